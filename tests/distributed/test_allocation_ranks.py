"""W ranks equal one: curvature, bits, axes, pruning, export and serving, under every sharding type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.artifact.test_refresh import TODAY
from tests.distributed import allocation_scenarios as of
from tests.distributed import serving_scenarios as serving
from tests.distributed.harness import RankResults, Results, joined, running_ranks
from tests.distributed.model import assert_near, assert_outcome, assert_same, assert_same_scheme, whole
from tests.tiny import files_of

OF_FOUR = {
    "export": {"grid_shard": of.EXPORTED["grid_shard"]},
    "refresh": {"row_wise": partial(of.refresh_over, "row_wise")},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    things = {"curvature": of.CURVATURE | {"grows": of.curvature_grows}, "axes": of.AXES}
    things |= {"compress": {kind: partial(of.compress_over, kind) for kind in of.COMPRESSED_AS}}
    things["compress"]["shared"] = of.shared_over
    things |= {"refresh": {kind: partial(of.refresh_over, kind) for kind in of.REFRESHED_AS}}
    things |= {"narrow": of.NARROW, "prune": of.PRUNED, "export": of.EXPORTED, "refusals": {"all": of.refusals}}
    things |= {"serve": serving.SERVED | serving.UNKNOWN | serving.DAMAGE}
    with running_ranks(2, joined(**things), tmp_path_factory.mktemp("two")) as running:
        yield running


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """Some on four: more ranks than some tables have shards."""
    with running_ranks(4, joined(**OF_FOUR), tmp_path_factory.mktemp("four")) as running:
        yield running


def ranks_of(size: int, request: pytest.FixtureRequest) -> RankResults:
    return request.getfixturevalue({2: "two", 4: "four"}[size])


@pytest.mark.parametrize("scenario", of.CURVATURE)
def test_ranks_measure_the_curvature_of_one_process(two: RankResults, scenario: str) -> None:
    """Up to how float32 lookups and gradients round; the ranks among themselves exactly."""
    results = two.part("curvature")[scenario]
    name = next((name for name in of.CASES if scenario.startswith(name)), "several ids")
    expected = of.curvature_alone(name, 1 if scenario == "enough" else 2)
    for own in results:
        assert own["num_samples"] == expected["num_samples"]
        assert own["relative_error"] == results[0]["relative_error"]
        for part in ("gradient", "curvature", "couplings"):
            assert_same(own[part], results[0][part])
            for table, want in expected[part].items():
                tolerance = 1e-6 * float(want.abs().max())
                torch.testing.assert_close(own[part][table], want, rtol=1e-5, atol=tolerance)


def test_a_table_that_one_rank_reads_is_read(two: RankResults) -> None:
    """The first batch of both ranks reads nothing of it, the first four do."""
    assert two.part("curvature")["grows"] == 2 * [{"num_samples": 2 * 4 * of.SIZE, "unread": []}]


@pytest.fixture(scope="module")
def compressed() -> Results:
    return of.compress_alone()


@pytest.mark.parametrize("kind", of.COMPRESSED_AS)
def test_ranks_compress_as_one_process(two: RankResults, compressed: Results, kind: str) -> None:
    for own in two.part("compress")[kind]:
        assert_same(own["counts"], compressed["counts"])
        assert own["bytes"] == compressed["bytes"]
        assert own["losses"] == pytest.approx(compressed["losses"], rel=1e-6)
        for tensors, expected in zip(own["tensors"], compressed["tensors"], strict=True):
            assert_same(tensors, expected)


def test_ranks_share_the_rows_and_blocks_of_large_tables(two: RankResults) -> None:
    """Each its part of them, and all of a table of one chunk; what comes out is what one process finds."""
    results, expected = two.part("compress")["shared"], of.shared()
    rows, few = (len(of.large_tables()[name]) for name in ("order", "few"))
    # twice for blocks, once where they are in order, and once to find how often rows occur in them
    assert expected["rows"] == 3 * sum(map(len, of.large_tables().values())) - rows
    assert sum(own["rows"] for own in results) == expected["rows"] + 3 * few
    assert max(own["rows"] for own in results) <= 1.05 * expected["rows"] / 2 + 3 * few
    assert sum(own["blocks"] for own in results) == expected["blocks"]
    assert max(own["blocks"] for own in results) <= expected["blocks"] / 2 + 4
    for own in results:
        for name, tensors in expected["tables"].items():
            assert_same(own["tables"][name], tensors)


def test_what_ranks_are_held_to_has_learnt(compressed: Results) -> None:
    fitted, _, learnt = compressed["tensors"]
    assert len([name for name in fitted if name.endswith("scale") and not fitted[name].equal(learnt[name])]) > 1


@pytest.mark.parametrize("drawn", of.SIZES)
@pytest.mark.parametrize("kind", of.EVERY)
def test_ranks_prune_as_one_process_bit_for_bit(two: RankResults, kind: str, drawn: str) -> None:
    results, expected = [own[drawn] for own in two.part("prune")[kind]], of.pruned(of.net(drawn), drawn)
    assert_same(whole([own["tables"] for own in results]), whole([expected["tables"]]))
    for own in results:
        assert_same_scheme(own["scheme"], expected["scheme"])


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of one process: with one file a table, and with several."""
    folder = tmp_path_factory.mktemp("alone")
    of.exported(of.net("spread"), folder)
    for name, is_several in (("packed", False), ("files", True)):
        manifest = json.loads((folder / name / "manifest.json").read_text())
        numbers = [len(table["shards"]["packed"]) for table in manifest["tables"].values()]
        assert any(number > 1 for number in numbers) == is_several
    assert max(int(routing.row_counts().max()) for routing in of.blocks().routings.values()) > of.SAMPLED
    return folder


@pytest.mark.parametrize(("size", "kind"), [*((2, kind) for kind in of.EVERY), (4, "grid_shard")])
def test_ranks_write_the_bytes_of_one_process(request, artifacts: Path, kind: str, size: int) -> None:
    """Which also means that rounding errors, bits and codes are the same."""
    part = ranks_of(size, request).part("export")
    part[kind]  # shows the ranks' tracebacks
    for name in ("packed", "files")[: 1 + (kind in of.FILES_AS)]:
        assert files_of(part.folder / kind / name) == files_of(artifacts / name)


@pytest.fixture(scope="module")
def refreshed() -> Results:
    return of.refreshed(of.trained_today(), TODAY)


@pytest.mark.parametrize(("size", "kind"), [*((2, kind) for kind in of.REFRESHED_AS), (4, "row_wise")])
def test_ranks_refresh_as_one_process(request, refreshed: Results, size: int, kind: str) -> None:
    for own in ranks_of(size, request).part("refresh")[kind]:
        assert own["changed"] == refreshed["changed"]
        assert min(own["changed"].values()) > 0
        assert_same(own["tensors"], refreshed["tensors"])
        assert_same(own["rows"], refreshed["rows"])


@pytest.mark.parametrize("scenario", of.AXES)
def test_ranks_turn_tables_as_one_process(two: RankResults, scenario: str) -> None:
    """Also columns that are spread over ranks, once training is over; what reads the tables turns along."""
    results, scenario_of_one = two.part("axes")[scenario], of.AXES[scenario]
    expected = scenario_of_one(None)
    assert_near(whole([own["tables"] for own in results]), whole([expected["tables"]]))
    for own in results:
        assert expected["rotations"]
        assert_near(own["rotations"], expected["rotations"])
        assert_near(own["readers"], expected["readers"])
        assert own["moved"] < 1e-5


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The steps of one process; values and states come from a run whose tables are whole."""
    return of.narrow_steps("data_parallel", tmp_path_factory.mktemp("narrow") / "artifact")


@pytest.mark.parametrize("kind", of.NARROW)
def test_narrow_tables_of_ranks_learn_as_those_of_one_process(two: RankResults, narrow: Results, kind: str) -> None:
    results = two.part("narrow")[kind]
    assert_near(whole([own["tables"] for own in results]), whole([narrow["tables"]]))
    for own in results:
        assert_near(list(own["dense"].values()), list(narrow["dense"].values()))


REFUSALS = {
    "batches": ("ValueError", "batches", None),
    "labels": ("ValueError", "batch 1", None),
    "predictions": ("ValueError", "batch 0", None),
    "compress nan": ("ValueError", "got nan in row", None),
    "allocate nan": ("ValueError", "table 'tag'", None),
    "export nan": ("ValueError", "table 'tag'", 1),
    "export outside": ("ValueError", "table 'tag'", 1),
    "export again": ("ValueError", "artifact ", 0),
    "prune infinity": ("ValueError", "table 'tag'", None),
    "prune to nothing": ("SizeOutOfReachError", "embedding_bytes", None),
}
"""Call -> kind, place, and the rank that is named on the others where one alone says it."""


@pytest.mark.parametrize("call", REFUSALS)
def test_what_is_wrong_on_one_rank_stops_all_and_leaves_nothing(two: RankResults, call: str) -> None:
    part, (kind, place, rank) = two.part("refusals"), REFUSALS[call]
    assert_outcome([own[call] for own in part["all"]], kind, place, rank)
    assert [path.name for path in part.folder.iterdir() if "refused" in path.name] == []


@pytest.mark.parametrize("kind", serving.KINDS)
def test_ranks_predict_the_bits_of_one_process(two: RankResults, kind: str) -> None:
    """Whole tables and rows of tables, bags and sequences; a rank has its own bytes in memory and no others."""
    part = two.part("serve")
    results, path = part[kind], part.folder / "artifact"
    alone, total = serving.Ranker(path), sum(own["bytes"] for own in results)
    scheme_bytes = (path / "scheme.safetensors").stat().st_size
    for rank, own in enumerate(results):
        for outputs, features in zip(own["predictions"], serving.batches(rank), strict=True):
            assert all(output.equal(want) for output, want in zip(outputs, alone(features), strict=True))
        assert kind == "mixed" or own["bytes"] == pytest.approx(total / 2, rel=0.05)
        assert own["mapped"] <= own["bytes"] + scheme_bytes + len(serving.READERS) * serving.AROUND


@pytest.mark.parametrize("way", ["zero", "mean"])
def test_ranks_read_unknown_ids_as_one_process(two: RankResults, way: str) -> None:
    part = two.part("serve")
    results, alone = part[way], serving.Ranker(part.folder / "artifact", way)
    for rank, own in enumerate(results):
        outputs = alone(serving.half_unknown(rank))
        assert all(output.equal(want) for output, want in zip(own["predictions"], outputs, strict=True))


def test_a_batch_that_one_rank_refuses_stops_all(two: RankResults) -> None:
    first, second = (own["outcome"] for own in two.part("serve")["error"])
    assert first.startswith("RuntimeError: rank 1 "), first
    assert second.startswith("ValueError: table 'e'"), second


@pytest.mark.parametrize("scenario", serving.DAMAGE)
def test_a_table_that_one_rank_cannot_read_stops_all(two: RankResults, scenario: str) -> None:
    first, second = (own["outcome"] for own in two.part("serve")[scenario])
    assert first.startswith("RuntimeError: rank 1 could not answer"), first
    assert "a directory of rows that exist" in second, second
