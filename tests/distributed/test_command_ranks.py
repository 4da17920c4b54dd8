"""W ranks equal one: commands and whole searches, and no more of a table on a rank than its shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dnis_torchrec.artifact.export import load_model
from dnis_torchrec.cli.commands import run_compress, run_evaluate, run_train
from dnis_torchrec.cli.settings import EvaluateCommand, TrainCommand
from dnis_torchrec.data.over_ranks import count_training_data
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.report.rows import COMPRESS, UNCOMPRESSED
from dnis_torchrec.search.search import SearchOutcome
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.weights import check_state, fill_, written_model
from tests.distributed import command_scenarios as of
from tests.distributed.harness import Part, RankResults, Results, joined, running_ranks
from tests.distributed.model import CPU, assert_outcome, assert_same, assert_same_scheme
from tests.tiny import EMBEDDING_DIM, files_of

WITH_METRICS = {"manifest.json", "run.json", "results.json", "report.html", "MODEL_CARD.md"}
Files = tuple[Path, list[Results]]


@pytest.fixture(scope="module")
def weights(gloo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in files of every kind."""
    return of.save_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def two(weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """All things on two ranks."""
    file = weights["w.safetensors"]
    jobs = {kind: partial(of.compress_over, kind, file) for kind in of.KINDS if kind not in of.FILES.values()}
    jobs |= {
        name: partial(of.compress_over, kind, weights[name], recipe=of.UNFILLED) for name, kind in of.FILES.items()
    }
    things = {
        "commands": {"all": partial(of.commands_over, tuple(of.COMMANDS), None)},
        "jobs": jobs,
        "refused": {"all": partial(of.refuse_jobs, file)},
        "searches": of.SEARCHES,
    }
    with running_ranks(2, joined(**things), tmp_path_factory.mktemp("two")) as running:
        yield running


@pytest.fixture(scope="module")
def four(two: RankResults, weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """A job, and the run of two ranks, on four."""
    run = two.part("commands").folder
    two.wait()
    things = {
        "jobs": {kind: partial(of.compress_over, kind, weights["w.safetensors"]) for kind in ("row_wise",)},
        "commands": {"all": partial(of.commands_over, of.OF_A_RUN, run)},
    }
    with running_ranks(4, joined(**things), tmp_path_factory.mktemp("four")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(weights: dict[str, Path]) -> Files:
    """The files and rows of one process."""
    out = weights["w.safetensors"].parent / "alone"
    return out, rows_of(run_compress(of.job(out, source=weights["w.safetensors"])).rows)


def rows_of(rows: Any) -> list[Results]:
    """What several ranks measure, too."""
    return [asdict(row) for row in rows if row.method in (COMPRESS, UNCOMPRESSED)]


def assert_same_files(folder: Path, rows: list[Results], alone: Files) -> None:
    for row, other in zip(rows, alone[1], strict=True):
        for name in ("metrics", "selection", "predicted_loss_increase"):
            assert row[name] == (other[name] and pytest.approx(other[name], abs=1e-6))
        for name in ("method", "compression", "num_bytes", "seed", "name"):
            assert row[name] == other[name]
    files, expected = files_of(folder), files_of(alone[0])
    assert files.keys() == expected.keys()
    same = [name for name in expected if Path(name).name not in WITH_METRICS]
    assert {f"x{size:g}/packed/000_user.safetensors" for size in of.SIZES} <= set(same)
    assert [name for name in same if files[name] != expected[name]] == []
    for size in of.SIZES:
        assert of.manifest_of(folder / f"x{size:g}") == of.manifest_of(alone[0] / f"x{size:g}")


def assert_reads_and_holds_shards(results: list[Results]) -> None:
    values = dict.fromkeys(of.ROWS, 0)
    for own in results:
        assert own["read"][: len(own["held"])] == own["held"]
        assert own["whole"] == []
        for table, _, (rows, columns) in own["held"]:
            values[table.removesuffix(".weight")] += rows * columns
    assert values == {name: rows * EMBEDDING_DIM for name, rows in of.ROWS.items()}


JOBS = [(2, "table_wise", "w.safetensors"), *((2, kind, name) for name, kind in of.FILES.items())]


@pytest.mark.parametrize(("size", "kind", "file"), [*JOBS, (4, "row_wise", "w.safetensors")])
def test_compress_leaves_the_files_and_rows_of_one_process(request, alone, size: int, kind: str, file: str) -> None:
    part = request.getfixturevalue({2: "two", 4: "four"}[size]).part("jobs")
    results = part[file if (size, kind) in {(2, own) for own in of.FILES.values()} else kind]
    for own in results:
        assert_same_files(part.folder / f"{kind} {file}", own["rows"], alone)
    if kind != "table_wise":
        assert_reads_and_holds_shards(results)


def metrics_of(path: Path, recipe: str = of.RECIPE) -> dict[str, float]:
    """What one process measures."""
    return run_evaluate(EvaluateCommand(path=path, recipe=recipe))["metrics"]


def test_commands_go_through_as_ranks_of_torchrun(two: RankResults, tmp_path: Path) -> None:
    first, second = two.part("commands")["all"]
    folder = two.part("commands").folder
    for own in (first, second):
        assert {name: done["code"] for name, done in own.items() if done["code"]} == {"verify damage": 1}
    assert {done["said"] for done in second.values()} == {""}
    assert not [line for done in second.values() for line in done["error"].splitlines() if line.startswith("error")]
    assert f"artifact: {folder}/sizes/x3" in first["compress"]["said"]
    assert_reads_and_holds_shards([first["compress"], second["compress"]])
    rows = json.loads((folder / "sizes" / "results.json").read_text())["rows"]
    again = run_compress(of.job(tmp_path / "alone", source=folder / "plain"))
    assert_same_files(folder / "sizes", rows, (tmp_path / "alone", rows_of(again.rows)))
    for name, path in (("evaluate", "plain"), ("evaluate size", "sizes/x6"), ("evaluate run", "searched")):
        said = json.loads(first[name]["said"])["metrics"]
        assert said == pytest.approx(metrics_of(folder / path), abs=1e-6)
    assert metrics_of(folder / "packed") == pytest.approx(metrics_of(folder / "searched"), abs=1e-6)


def test_training_on_ranks_is_that_of_one_process(two: RankResults, tmp_path: Path) -> None:
    part = two.part("commands")
    assert part["all"]
    [row] = run_train(TrainCommand(recipe=of.EVEN, out=tmp_path / "alone", epochs=2)).rows
    assert metrics_of(part.folder / "even", of.EVEN) == pytest.approx(row.metrics, abs=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_an_artifact_is_written_to_the_same_bytes_and_verified_alike(
    request, gloo, two: RankResults, size: int, tmp_path: Path
) -> None:
    part = request.getfixturevalue({2: "two", 4: "four"}[size]).part("commands")
    results, run = part["all"], two.part("commands").folder
    of.run_commands(tmp_path, run, of.OF_A_RUN)
    assert files_of(part.folder / "packed") == files_of(tmp_path / "packed")
    verdicts = [json.loads((folder / "verified.json").read_text()) for folder in (part.folder, tmp_path)]
    checks, expected = (
        {(finding["check"], finding["subject"]): finding["status"] for finding in verdict["findings"]}
        for verdict in verdicts
    )
    assert checks == expected
    assert {"checksums", "parity", "unknown ids", "metric"} == {check for check, _ in checks}
    assert verdicts[0]["ok"]
    read = [sum(rows * columns for _, _, (rows, columns) in own["export"]["read"]) for own in results]
    assert sum(read) == EMBEDDING_DIM * sum(of.ROWS.values())  # together ranks read each value of a table once
    assert max(read) < sum(read)
    assert [own["export"]["whole"] for own in results] == [[]] * size


REFUSED = {
    "weights": ("ValueError", "none.safetensors", 1),
    "write": ("RunWriteError", "No space left", None),
    "serve": ("RunWriteError", "No space left", None),
    "size": ("ValueError", "compression", None),
    "other folders": ("ValueError", "folder ", 1),
    "a folder that stands": ("ValueError", "stands", 0),
    "run": ("ValueError", "run folder ", None),
    "recipe": ("RecipeError", "command_scenarios:broken", 1),
}
"""Command -> kind, place, and the rank that is named on the others where one alone says it."""


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_wrong_on_one_rank_stops_commands_on_all(two: RankResults, command: str) -> None:
    kind, place, rank = REFUSED[command]
    results = two.part("refused")["all"]
    assert_outcome([own[command] for own in results], kind, place, rank)
    assert [own["left"] for own in results] == [[], []]


@pytest.fixture(scope="module")
def searches(two: RankResults) -> Part:
    return two.part("searches")


@pytest.fixture(scope="module")
def searched_alone(gloo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SearchOutcome]:
    """What this process finds."""
    own = of.search_recipe()
    own.data.train.batches.pop()  # several ranks do not train on it
    return {
        "whole": of.searched(own, tmp_path_factory.mktemp("whole")),
        "turned": of.searched(of.turnable(), tmp_path_factory.mktemp("turned")),
    }


def assert_learnt_alike(history: list[Results], alone: SearchOutcome) -> None:
    """Not for ever: sums are rounded in another order, and Adam enlarges that."""
    for own, expected in zip(history[:4], alone.history, strict=False):
        for name in ("step", "train_loss", "selection_loss", "alpha_mean", "alpha_density"):
            assert own[name] == pytest.approx(getattr(expected, name), abs=1e-4), (expected.epoch, name)


def test_both_ranks_find_the_same_and_what_one_process_does(searches: Part, searched_alone) -> None:
    first, second = searches["whole"]
    assert first["history"] == second["history"]
    assert first["metrics"] == second["metrics"]
    assert_same_scheme(first["scheme"], second["scheme"])
    for part in ("alpha", "counts"):
        assert_same(first[part], second[part])
    assert of.SIZE <= first["compression"] <= 1.4 * of.SIZE
    assert_learnt_alike(first["history"], searched_alone["whole"])
    assert first["compression"] == pytest.approx(searched_alone["whole"].scheme.compression(), rel=0.05)
    own = of.search_recipe()
    counts = count_training_data(own.data, own.loss, table_configs(own.model))
    assert first["num_samples"] == counts.num_samples == 641  # that of a batch which no rank trains on is counted too
    assert_same(first["counts"], dict(counts.counts))


@pytest.mark.parametrize("scenario", ["whole", "turned"])
def test_no_rank_holds_what_another_holds(searches: Part, scenario: str) -> None:
    """Adam's tables neither, though FBGEMM has no fused kernel for it on a CPU."""
    held = [own["held"] for own in searches[scenario]]
    assert all(held)
    for table in table_configs(of.search_recipe().model):
        size = sum(size for own in held for name, size in own if name == table.name)
        assert size == table.num_embeddings * table.embedding_dim


def test_what_ranks_wrote_has_the_same_metric_in_one_process(searches: Part, tmp_path: Path) -> None:
    expected, folder = searches["whole"][0]["metrics"], searches.folder
    own, fresh = of.search_recipe(), of.search_recipe()
    weights = written_model(folder / "model")
    check_state(own.model, weights, "model")
    fill_(own.model, weights)
    load_model(fresh.model, folder / "artifact")
    for model in (own.model, fresh.model):
        metrics = evaluate(TrainTask(model, own.loss), own.data.test, own.loss, CPU)
        assert metrics == pytest.approx(expected, abs=1e-6)
    shutil.copytree(folder / "model" / "model", tmp_path / "model")
    next((tmp_path / "model").glob("*/rank1.*.safetensors")).unlink()
    with pytest.raises(ValueError, match="rank 1"):
        [stored.whole() for stored in written_model(tmp_path).values()]


def test_one_process_goes_on_with_a_search_of_two_ranks(searches: Part, searched_alone) -> None:
    """With Adam's states of spread tables that were turned, and an epoch of which two ranks have seen a part each."""
    results, alone = searches["turned"], searched_alone["turned"]
    assert_learnt_alike(results[0]["history"], alone)
    assert_outcome([own["stop"] for own in results], "SearchInterrupted", "epoch 2, lower step 24")
    for what, place in (("other data", "selection"), ("other settings", "patience")):
        assert_outcome([own[what] for own in results], "ValueError", place, 0)
    resumed = of.searched(of.turnable(), searches.folder / "stopped", resume=True)
    assert len(resumed.history) == len(alone.history)
    assert_learnt_alike(of.history_of(resumed), alone)


STOPPED = {
    "label": ("ValueError", "selection batch 1", 1),
    "order": ("ValueError", "train stream", None),
    "start": ("ZeroDivisionError", "division by zero", 1),
    "small": ("ValueError", "test batch 0", None),
    "candidates": ("ValueError", "test split, query 0", None),
    "size": ("SizeOutOfReachError", "compression", None),
    "nan": ("NonFiniteError", "lower step 24", None),
    "a smaller last batch": ("ValueError", "train batch 1", None),
    "fewer batches": ("ValueError", "train stream", None),
    "a batch of none": ("ValueError", "train batch 1", None),
    "a smaller batch of validation": ("ValueError", "validation batch 0", None),
    "fewer batches of test": ("ValueError", "test stream", None),
    "smaller batches of test": ("SearchInterrupted", "epoch 0, lower step 8", None),
}
"""Search -> kind, place, and rank, as above; batches that are only judged may be of any size."""


@pytest.mark.parametrize("search", STOPPED)
def test_what_one_rank_meets_stops_searches_on_all(searches: Part, search: str) -> None:
    kind, place, rank = STOPPED[search]
    assert_outcome([own[search] for own in searches["refused"]], kind, place, rank)
