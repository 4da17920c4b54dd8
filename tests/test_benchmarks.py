"""The benchmarks run, write what they promise, and compare ratios only. No assertion here looks at a clock."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import against_naive, compare_ratios, packaged, sequence_step, serving, step_time, weak_scaling

SMALL = {"batch_size": 32, "num_embeddings": 50, "embedding_dim": 8, "num_blocks": 3}


def small(name: str, **fields: int) -> step_time.Shape:
    """A shape that takes a moment."""
    varied = {"num_tables": None, "pooling": None, **SMALL, **fields}
    return step_time.vary(step_time.SHAPES[name], **varied)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process what a benchmark would start one for; the memory is then anybody's."""
    monkeypatch.setattr(step_time, "peak_memory", lambda shape, which: {"plain": 100, "bilevel": 110}[which])
    monkeypatch.setattr(step_time, "ROUNDS", 2)
    monkeypatch.setattr(step_time, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(step_time, "WARM_UP_ROUNDS", 1)


def test_memory_is_compared_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {("plain", 8): [10, 20, 40], ("bilevel", 8): [20, 30, 50], ("plain", 16): [1, 1, 1]}
    peaks["bilevel", 16] = [3, 4, 5]
    monkeypatch.setattr(step_time, "peak_memory", lambda shape, which: peaks[which, shape.batch_size].pop(0))
    shapes = [small("criteo", batch_size=8), small("criteo", batch_size=16)]
    assert step_time.memory_ratios(shapes, num_runs=3, at_once=1) == [[2, 1.5, 1.25], [3, 4, 5]]


@pytest.mark.usefixtures("no_processes")
def test_step_time_measures_every_shape_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, options = tmp_path / "times.json", []
    for name, value in SMALL.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    step_time.main(["--quick", *options, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["criteo", "dlrm_v2", "movielens"]
    for row in rows:
        assert {name: row[name] for name in SMALL} == SMALL
        assert row["rounds"] == 2
        assert row["peak_memory_ratio"] == 1.1
        assert min(row["lower_ratio"], row["upper_ratio"]) > 0
        assert row["pair_ratio"] > max(row["lower_ratio"], row["upper_ratio"])
        assert row["pair_cpu_ratio"] > max(row["lower_cpu_ratio"], row["upper_cpu_ratio"]) > 0
        assert row["output_volume_ratio"] == 1
        parts = row["breakdown"]
        assert sum(parts["plain"].values()) == pytest.approx(1, abs=0.01)
        assert parts["plain"]["select"] == 0
        assert parts["lower"]["select"] > 0
        assert parts["upper"]["select"] > 0
        for part in ("lookup", "input_dist", "dense_forward", "backward"):
            assert parts["plain"][part] > 0, part
            assert parts["lower"][part] > 0, part
    text = capsys.readouterr().out
    assert all(f"\n{row['shape']}: batch_size=32" in text for row in rows)


def test_every_combination_of_values_is_a_shape() -> None:
    arguments = step_time.parse(["--shape", "criteo", "--batch-size", "16,32", "--pooling", "1,5", "--num-tables", "2"])
    shapes = step_time.chosen_shapes(arguments)
    assert [(s.batch_size, s.poolings) for s in shapes] == [(16, (1, 1)), (16, (5, 5)), (32, (1, 1)), (32, (5, 5))]
    assert {s.num_embeddings for s in shapes} == {(40_000, 40_000)}


@pytest.mark.parametrize(
    "argv", [["--num-tables", "3"], ["--batch-size", "0"], ["--batch-size", "x"], ["--shape", "other"]]
)
def test_a_wrong_command_line_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.parse(argv)
    assert argv[0] in capsys.readouterr().err


def test_an_upper_step_may_take_a_part_of_a_batch() -> None:
    shape = small("movielens", upper_batch_parts=4)
    train, validation = step_time.make_batches(shape, 2, seed=0), step_time.make_batches(shape, 2, seed=1)
    with step_time.process_group() as device:
        bilevel, sizes = step_time.Bilevel(shape, train, validation, device), []
        for _ in range(4):
            sizes.append(bilevel.pipeline.batches[0].labels.numel())
            bilevel.step()
    assert sizes == [32, 8, 32, 8]


def test_two_ranks_measure_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "START_METHOD", "forkserver")  # the tests' server has imported everything
    measured = step_time.measure_over_ranks(small("movielens", ranks=2), rounds=1, profiled_rounds=1)
    assert {len(values) for values in measured.times.values()} == {1}
    assert set(measured.parts) == {"plain", "lower", "upper"}


def test_batches_have_the_bags_of_their_shape() -> None:
    shape = small("dlrm_v2", num_tables=3)
    features = step_time.make_batches(shape, 1, seed=0)[0].sparse_features
    assert features.keys() == shape.features == ["c0", "c1", "c2"]
    assert features.lengths().view(3, -1)[:, 0].tolist() == list(shape.poolings) == [3, 2, 1]
    assert int(features.values().max()) < 50
    assert int(features.values().min()) >= 0


def test_the_bilevel_steps_are_of_the_level_whose_time_they_are_taken_for() -> None:
    shape, levels = small("movielens"), []
    train, validation = step_time.make_batches(shape, 2, seed=0), step_time.make_batches(shape, 2, seed=1)

    with step_time.process_group() as device:
        plain = step_time.Plain(shape, train, validation, device)
        bilevel = step_time.Bilevel(shape, train, validation, device)

        def note(name: str) -> nullcontext:
            levels.append((name, bilevel.pipeline.level.value))
            return nullcontext()

        for _ in range(3):
            step_time.take_turns(plain, bilevel, note)
    assert [pair for pair in levels if pair[0] != "plain"] == 3 * [("lower", "lower"), ("upper", "upper")]


def test_every_moment_of_a_step_belongs_to_its_innermost_part() -> None:
    step = SimpleNamespace(name="step plain", cpu_parent=None, self_cpu_time_total=1.0)
    forward = SimpleNamespace(name="## forward 3 ##", cpu_parent=step, self_cpu_time_total=2.0)
    backward_name = "autograd::engine::evaluate_function: MmBackward0"
    backward = SimpleNamespace(name=backward_name, cpu_parent=forward, self_cpu_time_total=3.0)
    product = SimpleNamespace(name="aten::mm", cpu_parent=backward, self_cpu_time_total=4.0)
    between = SimpleNamespace(name="aten::ones", cpu_parent=None, self_cpu_time_total=100.0)
    parts = step_time.breakdown([step, forward, backward, product, between])["plain"]
    assert {part: share for part, share in parts.items() if share} == {
        "other": 0.1,
        "dense_forward": 0.2,
        "backward": 0.7,
    }


def test_both_sides_train_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same weights and alpha at 1 the two models predict the same; both learn alpha and stay in [0, 1]."""
    monkeypatch.setattr(against_naive, "BATCH_SIZE", 64)
    naive = against_naive.NaiveFactorisation(100)
    tables = against_naive.build_tables({"user": 50, "item": 50}, against_naive.EMBEDDING_DIM)
    for name, table in zip(("user", "item"), naive.tables, strict=True):
        tables.embedding_bags[name].weight.data.copy_(table.weight.data)
    batch = against_naive.make_batches(100, 1, seed=0)[0]
    dnis = against_naive.Factorisation(tables)(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(naive(batch.sparse_features.values().view(2, -1)), dnis)
    batches = against_naive.make_batches(100, 2, seed=1)
    data = against_naive.DataSplits(train=batches, validation=batches, selection=batches, test=())
    monkeypatch.setattr(against_naive, "NaiveFactorisation", lambda rows: naive)
    for pair, selection_loss in against_naive.naive_side(100, 0.01, data):
        before = selection_loss()
        for _ in range(30):
            pair()
        assert selection_loss() < before
    assert naive.alpha.min() >= 0
    assert naive.alpha.max() <= 1
    assert not naive.alpha.equal(torch.ones_like(naive.alpha))


def test_against_naive_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TARGET_LOSS": 2.0, "BATCH_SIZE": 64, "TRAIN_BATCHES": 3}.items():
        monkeypatch.setattr(against_naive, name, value)
    monkeypatch.setattr(against_naive, "LEARNING_RATES", {"naive": (0.01,), "dnis": (0.03,)})
    real, peaks = against_naive.run_here, {"naive": 200, "dnis": 50}
    monkeypatch.setattr(
        against_naive, "run_apart", lambda job: dataclasses.replace(real(job), peak_bytes=peaks[job.side])
    )
    path = tmp_path / "naive.json"
    against_naive.main(["--quick", "--num-rows", "200,400", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["num_rows"] for row in rows] == [200, 400]
    for row in rows:
        assert row["time_ratio"] == pytest.approx(row["dnis"]["seconds"] / row["naive"]["seconds"], abs=1e-4)
        assert row["memory_ratio"] == 0.25
        assert (row["not_reached"], row["is_bound"]) == ([], False)
        assert row["dnis"]["pairs"] == row["naive"]["pairs"] == 2
        assert row["dnis"]["best_loss"] < 2


def test_a_run_ends_at_its_limit_of_pairs_or_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TARGET_LOSS": 0.0, "BATCH_SIZE": 64, "TRAIN_BATCHES": 3}.items():
        monkeypatch.setattr(against_naive, name, value)
    job = against_naive.Job(side="naive", num_rows=200, learning_rate=0.01, max_pairs=4)
    ended = against_naive.run_here(job)
    assert (ended.pairs, ended.is_reached) == (4, False)
    assert against_naive.run_here(dataclasses.replace(job, max_seconds=1e-9)).pairs == 1


def made_up(seconds: float, pairs: int, *, is_reached: bool = True, peak_bytes: int = 100) -> against_naive.Run:
    """What a run might have come to."""
    return against_naive.Run(
        seconds=seconds,
        cpu_seconds=seconds,
        preparation_seconds=1.0,
        pairs=pairs,
        is_reached=is_reached,
        best_loss=0.3 if is_reached else 0.9,
        peak_bytes=peak_bytes,
    )


@pytest.mark.parametrize(
    ("reached", "fits", "expected"),
    [
        ({"dnis", "naive"}, True, {"time_ratio": 0.2, "memory_ratio": 0.5, "is_bound": False, "not_reached": []}),
        ({"dnis"}, True, {"time_ratio": 0.2, "memory_ratio": 0.5, "is_bound": True, "not_reached": ["naive"]}),
        ({"naive"}, True, {"time_ratio": None, "memory_ratio": 0.5, "is_bound": False, "not_reached": ["dnis"]}),
        ({"dnis"}, False, {"time_ratio": None, "memory_ratio": None, "is_bound": False, "not_reached": []}),
    ],
)
def test_a_row_says_what_its_ratios_are_worth(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reached: set[str],
    fits: bool,
    expected: dict[str, object],
) -> None:
    jobs = []

    def run(job: against_naive.Job) -> against_naive.Run:
        jobs.append(job)
        seconds, pairs, peak_bytes = {"dnis": (2.0, 9, 100), "naive": (10.0, 5, 200)}[job.side]
        return made_up(seconds, pairs, is_reached=job.side in reached, peak_bytes=peak_bytes)

    monkeypatch.setattr(against_naive, "naive_fits", lambda num_rows: fits)
    row = against_naive.compare(1000, {"dnis": 0.1, "naive": 0.03}, time_limit=4, repeats=3, run=run)
    assert {name: row[name] for name in expected} == expected
    assert [(job.seed, job.max_seconds) for job in jobs if job.side == "dnis"] == [(0, None), (1, None), (2, None)]
    naive = [(job.seed, job.max_seconds, job.learning_rate) for job in jobs if job.side == "naive"]
    assert naive == ([(0, 8.0, 0.03), (1, 8.0, 0.03), (2, 8.0, 0.03)] if fits else [])
    against_naive.print_row(row)
    text = capsys.readouterr().out
    assert ("<=0.200" in text) == expected["is_bound"]
    assert ("more than this machine has" in text) == (not fits)
    assert ("naive came down to 0.900, not to" in text) == (expected["not_reached"] == ["naive"])


def test_each_side_takes_the_learning_rate_that_needs_fewest_pairs() -> None:
    needed, limits = {0.03: 20, 0.01: 50, 0.1: 10}, []

    def run(job: against_naive.Job) -> against_naive.Run:
        limits.append(job.max_pairs)
        pairs = needed[job.learning_rate]
        return made_up(1.0, min(pairs, job.max_pairs), is_reached=pairs <= job.max_pairs)

    assert against_naive.tuned_learning_rate("naive", 100, run) == 0.1
    assert limits == [against_naive.MAX_PAIRS, 20, 20]


def test_a_learning_rate_that_arrives_beats_one_that_does_not() -> None:
    def run(job: against_naive.Job) -> against_naive.Run:
        return made_up(1.0, 300, is_reached=job.learning_rate == 0.3)

    assert against_naive.tuned_learning_rate("dnis", 100, run) == 0.3


def ratio(value: float, *quartiles: float) -> compare_ratios.Ratio:
    """A ratio with or without its quartiles."""
    return compare_ratios.Ratio(value=value, quartiles=list(quartiles) or None)


def test_ratios_are_the_only_thing_that_is_compared() -> None:
    row = {"shape": "criteo", "lower_ratio": 1.1, "plain_ms": 120.0, "lower_quartiles": [1.0, 1.2]}
    assert compare_ratios.ratios_of("step_time", [row]) == {"step_time criteo lower_ratio": ratio(1.1, 1.0, 1.2)}
    row = {"num_rows": 100, "time_ratio": None, "memory_ratio": 0.5, "time_ratio_range": None, "is_bound": False}
    assert compare_ratios.ratios_of("against_naive", [row]) == {"against_naive 100 memory_ratio": ratio(0.5)}
    row = {"num_rows": 100, "time_ratio": 0.05, "time_cpu_ratio": 0.06, "memory_ratio": 0.5, "is_bound": True}
    assert compare_ratios.ratios_of("against_naive", [row]) == {"against_naive 100 memory_ratio": ratio(0.5)}


def test_what_moved_is_marked() -> None:
    cases = {
        "lower_ratio": (ratio(1.0), ratio(1.19), ""),
        "upper_ratio": (ratio(1.0), ratio(0.7), "moved -30%"),
        "pair_ratio": (ratio(1.0, 0.8, 1.3), ratio(1.5, 1.2, 1.9), ""),  # too noisy to say
        "pair_cpu_ratio": (ratio(1.0, 0.9, 1.1), ratio(1.5, 1.4, 1.6), "moved +50%"),
        "a peak_memory_ratio": (ratio(1.0), ratio(1.25), "moved +25%"),
        "b peak_memory_ratio": (ratio(1.0), ratio(1.15), ""),
        "a output_volume_ratio": (ratio(1.0), ratio(1.001), "moved +0%"),
        "a time_ratio": (ratio(0.1), ratio(0.19), ""),
        "b time_ratio": (ratio(0.1), ratio(0.04), "moved -60%"),
        "old_ratio": (ratio(1.0), None, "gone"),
        "new_ratio": (None, ratio(2.0), "new"),
    }
    committed = {name: case[0] for name, case in cases.items() if case[0] is not None}
    measured = {name: case[1] for name, case in cases.items() if case[1] is not None}
    comparisons = compare_ratios.compare(committed, measured)
    assert {c.name: c.verdict for c in comparisons} == {name: case[2] for name, case in cases.items()}
    assert compare_ratios.table(comparisons).splitlines()[-1].startswith("5 moved")


def test_update_writes_what_the_next_run_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_ratios, "COMMITTED", tmp_path / "ratios.json")
    monkeypatch.setattr(compare_ratios, "measure", lambda: {"a_ratio": ratio(2.0, 1.9, 2.1)})
    compare_ratios.main(["--update", "--note", "a toaster"])
    assert "no committed ratios yet" in capsys.readouterr().out
    monkeypatch.setattr(compare_ratios, "measure", lambda: {"a_ratio": ratio(3.0, 2.9, 3.1)})
    compare_ratios.main([])
    text = capsys.readouterr().out
    assert "a toaster" in text
    assert "2.000 [1.900, 2.100]" in text
    assert "moved +50%" in text
    assert compare_ratios.read(tmp_path / "ratios.json") == ("a toaster", {"a_ratio": ratio(2.0, 1.9, 2.1)})


@pytest.mark.parametrize("module", [step_time, against_naive, packaged, serving, weak_scaling])
def test_folders_of_files_are_looked_for_before_anything_is_measured(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "file"
    monkeypatch.setattr("sys.argv", [module.__name__, "--json", str(path)])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert f"--json: expected a file in a folder that exists, got '{path}'" in capsys.readouterr().err


def test_steps_on_sequences_have_a_line_for_each_optimizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("NUM_ITEMS", 50), ("BATCH_SIZE", 16), ("WARM_UP_ROUNDS", 1)):
        monkeypatch.setattr(sequence_step, name, value)
    sequence_step.main(["--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(sequence_step.OPTIMIZERS)
    assert all("of the plain step" in line for line in lines)
