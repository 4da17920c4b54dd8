"""Bit fields that several ranks write are those of one process, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from dnis_torchrec.artifact.load import exact_rows
from dnis_torchrec.artifact.manifest import read_manifest
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.model import ROWS
from tests.distributed.packed_export_scenarios import export_alone, export_packed, memory, refusals
from tests.distributed.pruning_scenarios import KINDS
from tests.reference import whole_table
from tests.tiny import files_of

EXPORTS = {f"export {kind}": partial(export_packed, kind) for kind in KINDS}
WATCHED = ("row_wise", "column_wise")
MEMORY = {f"memory {kind}": partial(memory, kind) for kind in WATCHED}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, EXPORTS | MEMORY | {"refusals": refusals}, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Exports on four: more ranks than some tables have shards."""
    return run_on_ranks(4, EXPORTS, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of one process."""
    folder = tmp_path_factory.mktemp("alone")
    export_alone(folder)
    return folder


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("world_size", [2, 4])
def test_files_are_those_of_one_process(request, alone: Path, kind: str, world_size: int) -> None:
    found = request.getfixturevalue({2: "ranks", 4: "four_ranks"}[world_size])
    found[f"export {kind}"]  # shows the ranks' tracebacks
    for files in ("packed", "files"):
        assert files_of(found.folder / f"{files}_{kind}") == files_of(alone / files)


def test_tables_take_one_file_or_several(alone: Path) -> None:
    """Else the test above would not have tried both."""
    for files, several in (("packed", False), ("files", True)):
        numbers = [len(table["shards"]["packed"]) for table in read_manifest(alone / files)["tables"].values()]
        assert any(number > 1 for number in numbers) == several


@pytest.mark.parametrize("kind", list(KINDS))
def test_other_forms_hold_what_the_codes_stand_for(ranks: RankResults, alone: Path, kind: str) -> None:
    ranks[f"export {kind}"]
    rows = exact_rows(alone / "packed")
    assert rows is not None
    for name, count in ROWS.items():
        assert torch.equal(whole_table(ranks.folder / f"csr_{kind}", name), rows[name](0, count))


@pytest.mark.parametrize("kind", WATCHED)
def test_a_rank_holds_a_few_rows_beyond_its_shard(ranks: RankResults, kind: str) -> None:
    for own in ranks[f"memory {kind}"]:
        assert own["export"] < own["shard"] / 8


def test_what_one_rank_cannot_export_stops_all(ranks: RankResults) -> None:
    for rank, own in enumerate(ranks["refusals"]):
        named = "" if rank == 1 else "rank 1: "
        assert own["nan"].startswith(f"ValueError: {named}table 'tag': expected finite values, got nan in block ")
    assert [path.name for path in ranks.folder.iterdir() if "refused" in path.name] == []
