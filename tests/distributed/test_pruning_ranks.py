"""Pruning over ranks equals pruning in one process, bit for bit, under every sharding type."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dnis_torchrec.artifact.export import export
from dnis_torchrec.artifact.load import load, load_dense_state, read_scheme
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.selection.shards import collections, local_shards
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.model import DIMS, ROWS
from tests.distributed.pruning_scenarios import (
    CASES,
    DRAWN,
    KINDS,
    blocks,
    counts,
    described,
    export_all,
    export_refusals,
    memory,
    model,
    prune_all,
    refusals,
    scores,
    shards_of,
    texts,
    unmerged,
)

WATCHED = ("row_wise", "column_wise")
EXPORTED = ("row_wise", "grid_shard", "mixed")
Results = dict[str, Any]
SCENARIOS = (
    {f"prune {kind}": partial(prune_all, kind) for kind in KINDS}
    | {f"export {kind}": partial(export_all, kind) for kind in EXPORTED}
    | {f"memory {kind}": partial(memory, kind) for kind in WATCHED}
    | {"refusals": refusals, "export refusals": export_refusals, "texts": texts, "unmerged": unmerged}
)
ON_FOUR_RANKS = ("prune grid_shard", "prune mixed", "export grid_shard", "texts")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Some of them on four: more ranks than some tables have shards."""
    return run_on_ranks(4, {name: SCENARIOS[name] for name in ON_FOUR_RANKS}, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Results]:
    """The same in one process: pruning.py is tested against naive Python in test_pruning.py."""
    found = {}
    for drawn in DRAWN:
        for name, options in CASES.items():
            whole = model(drawn)
            scheme = prune(whole, blocks(), counts(), **options)
            found[f"{drawn} {name}"] = {"shards": shards_of(whole), "scheme": described(scheme)}
    return found


def whole_tables(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tables put together from the shards of all ranks; what several ranks hold they hold alike."""
    tables = {name: torch.full((ROWS[name], DIMS[name]), torch.nan) for name in ROWS}
    for part in parts:
        for place, weight in part.items():
            name, row, column = place.split("/")
            rows = slice(int(row), int(row) + weight.shape[0])
            target = tables[name][rows, int(column) : int(column) + weight.shape[1]]
            assert target.isnan().all() or torch.equal(target, weight), place
            target.copy_(weight)
    assert not [name for name, table in tables.items() if table.isnan().any()]
    return tables


def assert_same_scheme(first: Results, second: Results) -> None:
    assert first["json"] == second["json"]
    assert first["tensors"].keys() == second["tensors"].keys()
    assert [k for k, value in first["tensors"].items() if not torch.equal(value, second["tensors"][k])] == []


def assert_equal_to_one_process(results: list[Results], alone: dict[str, Results]) -> None:
    for case, expected in alone.items():
        tables = whole_tables([own[case]["shards"] for own in results])
        wanted = whole_tables([expected["shards"]])
        assert [name for name in ROWS if not torch.equal(tables[name], wanted[name])] == [], case
        for own in results:
            assert_same_scheme(own[case]["scheme"], expected["scheme"])


@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_one_process_bit_for_bit(ranks: RankResults, alone: dict[str, Results], kind: str) -> None:
    assert_equal_to_one_process(ranks[f"prune {kind}"], alone)


@pytest.mark.parametrize("kind", ["grid_shard", "mixed"])
def test_four_ranks_equal_one_process_too(four_ranks: RankResults, alone: dict[str, Results], kind: str) -> None:
    assert_equal_to_one_process(four_ranks[f"prune {kind}"], alone)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("drawn", DRAWN)
def test_columns_have_the_same_scores_to_the_last_bit(ranks: RankResults, kind: str, drawn: str) -> None:
    expected = scores(model(drawn))
    for own in ranks[f"prune {kind}"]:
        assert [n for n, score in expected.items() if not torch.equal(own[f"{drawn} scores"][n], score)] == []


def test_scores_are_mean_squares() -> None:
    tables = {part: weight.double() for part, weight in shards_of(model("spread")).items()}
    for name, found in scores(model("spread")).items():
        of_row, seen = blocks().routings[name].all_blocks(), counts().counts[name] > 0
        for block, score in enumerate(found):
            rows = tables[f"{name}/0/0"][(of_row == block) & seen]
            expected = rows.square().sum(0) / max(1, len(rows))
            torch.testing.assert_close(score, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "grid_shard"])
def test_tables_are_cut(ranks: RankResults, kind: str) -> None:
    """Else the test above would pass without having been tried."""
    places = [set(own["ties ratio"]["shards"]) for own in ranks[f"prune {kind}"]]
    assert places[0]
    assert places[1]
    assert not places[0] & places[1]
    offsets = {place.split("/")[1 if kind == "row_wise" else 2] for own in places for place in own}
    assert len(offsets) > 1


def test_infinity_on_one_rank_stops_all(ranks: RankResults) -> None:
    expected = (
        "ValueError: table 'tag': expected finite values, got NaN or infinity; go back to the last good checkpoint"
    )
    first, second = ranks["refusals"]
    assert first == second
    assert first["nothing"].startswith("SizeOutOfReachError: embedding_bytes: expected at least")
    assert (first["infinite"], first["changed"]) == (expected, [])


def assert_artifact_of_one_process(found: Path, folder: Path) -> None:
    whole = model("spread")
    scheme = prune(whole, blocks(), counts(), size=Size(compression=3))
    expected = export(whole, scheme, folder / "alone", run={"metrics": {"auc": 0.5}})
    assert_same_scheme(described(read_scheme(found)), described(scheme))
    assert read_manifest(found)["run"] == {"metrics": {"auc": 0.5}}
    for collection in ("first", "second"):
        state, wanted = (load(path, collection=collection).state_dict() for path in (found, expected))
        assert state.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(state[key], wanted[key])] == []
    dense, wanted = load_dense_state(found), load_dense_state(expected)
    assert dense.keys() == wanted.keys()
    assert all(torch.equal(dense[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("kind", EXPORTED)
def test_artifact_reads_like_that_of_one_process(ranks: RankResults, tmp_path: Path, kind: str) -> None:
    assert ranks[f"export {kind}"]  # shows the ranks' tracebacks
    assert_artifact_of_one_process(ranks.folder / kind, tmp_path)


def test_artifact_of_four_ranks_reads_like_that_of_one_process(four_ranks: RankResults, tmp_path: Path) -> None:
    assert four_ranks["export grid_shard"]
    assert_artifact_of_one_process(four_ranks.folder / "grid_shard", tmp_path)


@pytest.mark.parametrize("kind", EXPORTED)
def test_nothing_is_left_of_an_export_but_the_artifact(ranks: RankResults, kind: str) -> None:
    for rank, own in enumerate(ranks[f"export {kind}"]):
        named = "" if rank == 0 else "rank 0: "
        assert own["again"].startswith(f"ValueError: {named}artifact ")
    folder = ranks.folder / kind
    listed = {"manifest.json", "MODEL_CARD.md", *read_manifest(folder)["files"]}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == listed


def test_what_one_rank_cannot_export_stops_all(ranks: RankResults) -> None:
    for rank, own in enumerate(ranks["export refusals"]):
        named = "" if rank == 1 else "rank 1: "
        assert own["outcome"].startswith(f"ValueError: {named}table 'tag': expected zeros outside the retained dims")
    assert [path.name for path in ranks.folder.iterdir() if "refused" in path.name] == []


@pytest.mark.parametrize("kind", WATCHED)
def test_memory_beyond_the_model_stays_below_a_shard(ranks: RankResults, kind: str) -> None:
    """With next to nothing pruned, which is the worst case of an export."""
    for own in ranks[f"memory {kind}"]:
        assert 0 < own["prune"] < 1.2 * own["shard"]
        assert 0 < own["export"] < 1.2 * own["shard"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_reductions_and_texts_are_the_same_on_all_ranks(
    ranks: RankResults, four_ranks: RankResults, world_size: int
) -> None:
    found = {2: ranks, 4: four_ranks}[world_size]["texts"]
    assert len(found) == world_size
    for own in found:
        assert own["texts"] == ["\u00e9" * rank for rank in range(world_size)]
        assert own["none"] == [""] * world_size
        factor = sum(range(1, world_size + 1))
        assert own["sum"].tolist() == [[factor * i for i in range(4)], [factor * i for i in range(4, 8)]]
        assert own["max"].tolist() == [world_size - 1.0, 0.0, 0.5, 7.0]


def test_a_prepared_model_is_merged_first(ranks: RankResults) -> None:
    """Half of alpha everywhere halves all values, which prunes none and no other one."""
    halved = model("ties")
    for shard in (shard for module in collections(halved).values() for shard in local_shards(module)):
        shard.weight.mul_(0.5)
    scheme = prune(halved, blocks(), counts(), size=Size(compression=3))
    found = ranks["unmerged"]
    for own in found:
        for outcome in (own["prune"], own["export"]):
            assert outcome.endswith("expected a merged collection, got alpha below 1; call merge_ first")
        assert_same_scheme(own["scheme"], described(scheme))
    tables, wanted = whole_tables([own["shards"] for own in found]), whole_tables([shards_of(halved)])
    assert [name for name in ROWS if not torch.equal(tables[name], wanted[name])] == []
