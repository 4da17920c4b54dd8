"""W ranks equal one: training goes on from checkpoints, in codes, under plain names, stops together; data of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import training_scenarios as of
from tests.distributed.harness import Part, Rank, RankResults, Results, joined, running_ranks
from tests.distributed.model import CPU, assert_outcome, assert_same, blocks, tables, whole
from tests.reference import rounded, scheme_of


def sum_of_ranks(at: Rank) -> Results:
    total = torch.tensor(float(at.rank))
    dist.all_reduce(total, group=at.process_group)
    return {"total": float(total)}


def rank_one_raises(at: Rank) -> Results:
    if at.rank == 1:
        raise ValueError("no such table")
    return {}


@pytest.fixture(scope="module")
def alone(gloo: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Rank:
    return Rank(0, 1, tmp_path_factory.mktemp("one"), gloo, CPU)


@pytest.fixture(scope="module")
def of_one(alone: Rank) -> Results:
    """What a process alone came to; two ranks go on from its checkpoint."""
    return of.written_by_one(alone)


@pytest.fixture(scope="module")
def two(of_one: Results, alone: Rank, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    things = {"checkpoints": of.checkpoints(alone.folder), "codes": of.CODES, "stops": of.STOPPED}
    things |= {
        "data": of.DATA,
        "names": {"mixed": partial(of.there_and_back, "mixed")},
        "harness": {"raises": rank_one_raises, "sum": sum_of_ranks},
    }
    with running_ranks(2, joined(**things), tmp_path_factory.mktemp("two")) as running:
        yield running


def test_the_harness_reports_by_name_and_names_the_rank_that_raised(two: RankResults) -> None:
    assert two.part("harness")["sum"] == [{"total": 1.0}, {"total": 1.0}]
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[\s\S]*ValueError: no such table"):
        two.part("harness")["raises"]


SAME_RANKS = [(f"{kind} to {kind}", steps) for kind, steps in of.SAME.items()]
SAME_RANKS += [("adagrad column_wise to column_wise", (of.SAVED_AT,))]


@pytest.mark.parametrize(("scenario", "steps"), SAME_RANKS)
def test_the_same_ranks_go_on_bit_for_bit(two: RankResults, scenario: str, steps: tuple[int, ...]) -> None:
    for own in two.part("checkpoints")[scenario]:
        for step in steps:
            expected, resumed = own[str(step)]["whole"], own[str(step)]["resumed"]
            assert own[str(step)]["steps"] == step
            assert resumed["losses"] == expected["losses"]
            assert len(resumed["losses"]) == of.STEPS - step
            for kind in ("alpha", "dense", "tables"):
                assert_same(resumed[kind], expected[kind])


def assert_near(results: list[Results], expected: list[Results]) -> None:
    """Up to how sums over ranks are rounded: losses are means over ranks, tables lie anywhere."""
    losses = [torch.tensor([own["losses"] for own in side]).mean(0) for side in (results, expected)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=0)
    for kind in ("alpha", "dense"):
        values = [list(side[0][kind].values()) for side in (results, expected)]
        torch.testing.assert_close(*values, atol=1e-5, rtol=0)
    parts = [whole([own["tables"] for own in side]) for side in (results, expected)]
    torch.testing.assert_close(*parts, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "scenario", [*(f"{kind} to {then}" for kind, then in of.OTHERWISE), "adagrad table_wise to row_wise"]
)
def test_another_sharding_goes_on_within_rounding(two: RankResults, scenario: str) -> None:
    results = [own[str(of.SAVED_AT)] for own in two.part("checkpoints")[scenario]]
    assert_near([own["resumed"] for own in results], [own["whole"] for own in results])
    assert any(own["resumed"]["tables"].keys() != own["whole"]["tables"].keys() for own in results)


def test_one_rank_goes_on_with_the_run_of_two(two: RankResults, alone: Rank) -> None:
    results = [own[str(of.SAVED_AT)] for own in two.part("checkpoints")["mixed to mixed"]]
    run = of.Run("table_wise", alone)
    run.pipeline.restore(Path(results[0]["path"]), run.stream)
    assert_near([{"losses": run.steps(of.STEPS - of.SAVED_AT)} | run.state()], [own["whole"] for own in results])


def test_two_ranks_go_on_with_the_run_of_one(two: RankResults, of_one: Results) -> None:
    first, second = two.part("checkpoints")["one to mixed"]
    assert_near([first, second], [of_one])
    for kind in ("alpha", "dense"):
        assert_same(first[kind], second[kind])


BAD = {
    "column shards": ("ValueError", "column shards of table 'user'"),
    "other optimizer": ("ValueError", "fused/genre/"),
    "missing file": ("ValueError", "rank 1"),
}
"""Checkpoint -> kind of error, and the place that all ranks name."""


@pytest.mark.parametrize("checkpoint", BAD)
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(two: RankResults, checkpoint: str) -> None:
    kind, place = BAD[checkpoint]
    assert_outcome([own[checkpoint] for own in two.part("checkpoints")["bad"]], kind, place)


def test_a_disk_that_is_full_on_one_rank(two: RankResults) -> None:
    for own in two.part("checkpoints")["full disk"]:
        assert "step-00000004" in own["errors"]
        assert own["taken"] == 6
        assert own["steps"] == [2]
        assert own["latest"] == "step-00000002"
        assert own["partial"] == []


def test_a_checkpoint_that_torch_saved_on_two_ranks_is_read_by_one(two: RankResults) -> None:
    part = two.part("checkpoints")
    for kind in of.SAVED_BY_TORCH:
        before, stored = part[f"saved {kind}"][0], of.distributed_checkpoint(part.folder / f"saved {kind}")
        assert_same({name: tensor.whole() for name, tensor in stored.items()}, before)


def test_only_the_files_of_the_rows_asked_for_are_read(two: RankResults) -> None:
    part = two.part("checkpoints")
    before, folder = part["saved row_wise"][0], part.folder / "saved row_wise without rank 1"
    shutil.copytree(part.folder / "saved row_wise", folder)
    (folder / "__1_0.distcp").unlink()  # the file of rank 1: rank 0 holds the first rows
    stored = of.distributed_checkpoint(folder)
    name = next(name for name in stored if "user.weight" in name)
    stored[name].copy_to_(first := torch.zeros(20, 8))
    assert first.equal(before[name][:20])
    with pytest.raises(ValueError, match=r"user\.weight: .*'__1_0\.distcp'"):
        stored[name].copy_to_(torch.zeros(30, 8))


@pytest.fixture(scope="module")
def codes(two: RankResults) -> Part:
    return two.part("codes")


@pytest.fixture(scope="module")
def codes_alone(alone: Rank) -> Results:
    return of.trains_in_codes("table_wise", alone)


@pytest.mark.parametrize("kind", of.ROUNDED_AS)
def test_two_ranks_train_in_codes_as_one(codes: Part, codes_alone: Results, kind: str) -> None:
    parts, begin = codes[kind], whole([codes_alone["begin"]])
    assert_same(whole([own["begin"] for own in parts]), begin)  # in the same codes
    first, second, expected = (own["trained"] for own in (*parts, codes_alone))
    assert_same(first["codes"], second["codes"])
    assert_same(first["codes"], expected["codes"])
    torch.testing.assert_close(first["alpha"], expected["alpha"], atol=1e-5, rtol=0)
    for key in ("tables", "latents"):
        result = whole([first[key], second[key]])
        torch.testing.assert_close(result, whole([expected[key]]), atol=1e-5, rtol=0)
        assert not result["user"].equal(begin["user"])


def test_alpha_was_learnt_and_tables_are_in_their_codes(codes_alone: Results) -> None:
    assert all(bool((alpha < 1).any()) for alpha in codes_alone["trained"]["alpha"].values())
    scheme = scheme_of(tables(), blocks().routings)
    for name, weight in whole([codes_alone["trained"]["tables"]]).items():
        parts = {key: codes_alone["trained"]["codes"][f"{name}/{key}"] for key in ("bits", "scale", "shift")}
        table = scheme.tables[name].with_codes(type(scheme.tables[name].codes)(**parts))
        assert weight.equal(rounded(table, weight))


@pytest.mark.parametrize("kind", of.ROUNDED_AS)
def test_the_first_rounding_is_that_of_whole_rows(codes: Part, kind: str) -> None:
    """By error feedback, also of a rank that has some columns of a row; what trains on has its nearest codes."""
    parts = codes[f"settles {kind}"]
    before, after = (whole([own[when] for own in parts]) for when in ("before", "after"))
    for name, table in of.scheme_with_feedback().tables.items():
        rows, nearest = table.routing.all_blocks(), replace(table.codes, feedback=None)
        assert after[name].equal(of.in_codes(before[name], rows, table.codes))
        assert not after[name].equal(of.in_codes(before[name], rows, nearest))
    assert not any(own["has_feedback"] for own in parts)


def test_plain_and_prepared_models_read_each_others_checkpoints(two: RankResults) -> None:
    for own in two.part("names")["mixed"]:
        assert own["prepared names"] == own["plain names"]
        assert "model.first.embedding_bags.user.weight" in own["plain names"]["state_dict"]
        prefixes = {name.rpartition(".")[0] for name in own["added"]}
        assert prefixes == {"model.first.soft_selection", "model.second.soft_selection"}
        assert own["merged names"] == own["plain names"]["state_dict"]
        for here, there in (("prepared", "plain"), ("plain", "prepared")):
            loaded, source = own[f"{here} loaded"], own[f"{there} trained"]
            assert_same(loaded["tables"], source["tables"])
            assert loaded["losses"] == pytest.approx(source["losses"], abs=1e-5)
        assert own["prepared trained"]["losses"] != pytest.approx(own["plain trained"]["losses"], abs=1e-4)
        assert own["alpha is 1"]


@pytest.mark.parametrize(("level", "what", "late"), of.STOPS)
def test_all_ranks_stop_at_what_one_of_them_meets(two: RankResults, level, what: str, late: bool) -> None:
    """At the same step, late or not; no weight takes it."""
    results = two.part("stops")[f"{level.value} {what}{' late' * late}"]
    is_of_all = what == "dense gradient" or (level, what) == (of.Level.UPPER, "gradient")  # all see the sum over ranks
    last = [own["outcomes"][-1] for own in results]
    assert_outcome(last, "NonFiniteError", f"{level.value} step ")
    assert [", rank 1: " in outcome for outcome in last] == [not is_of_all, False]
    for own in results:
        assert own["outcomes"][:-1] == ["went on"] * late
        assert own["bad"] == []
        may_learn = late or what == "dense gradient"  # a table may learn before a dense gradient is known
        assert may_learn or own["changed"] == []


def test_all_ranks_stop_plain_training(two: RankResults) -> None:
    assert_outcome([own["outcome"] for own in two.part("stops")["plain"]], "NonFiniteError", "step 1")
    assert_outcome([own["outcome"] for own in two.part("stops")["apart"]], "ValueError", "blocks of rows")


def test_metrics_are_those_of_all_samples(two: RankResults) -> None:
    first, second = two.part("data")["metrics"]
    assert first == second
    for name, expected in of.metrics_of((0, 1)).items():
        assert first[name] == pytest.approx(expected, abs=1e-6)


def test_a_search_of_a_stream_is_one_search_and_resumes_where_it_was(two: RankResults, tmp_path: Path) -> None:
    """Every rank reads its own share: none takes a slice of what is a share already."""
    first, second = two.part("data")["search"]
    assert first["whole"] == second["whole"]
    train = of.recipe_of(of.write_clicks(tmp_path / "clicks.tsv")).data.train
    steps = first["whole"][0]["step"]
    assert steps == train.num_samples // (16 * 2)
    for own in (first, second):
        assert own["resumed"] == own["whole"]
        assert own["outcome"].startswith("SearchInterrupted: epoch 2, lower step 8")
    assert train.num_samples > 2 * 16 * steps  # an epoch leaves some out, counting none
    assert {int(rows.sum()) for name, rows in first["counts"].items() if name != "tags"} == {train.num_samples}
    assert_same(first["counts"], second["counts"])


def test_another_number_of_ranks_with_epochs_of_another_length_is_refused(gloo, two: RankResults) -> None:
    """Warm-up and ramp are counted in steps: they would end in the midst of an epoch, or twice."""
    part = two.part("data")
    assert part["search"]
    with pytest.raises(ValueError, match="lower steps per epoch"):
        of.searched(part.folder / "clicks_0.tsv", part.folder / "stopped", resume=True)
