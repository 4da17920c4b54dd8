"""Bit fields that several ranks write are those of one process, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from dnis_torchrec.artifact import exact_rows, load, load_csr, read_manifest, read_scheme
from dnis_torchrec.artifact.export import export
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.model import ROWS
from tests.distributed.packed_export_scenarios import alone, export_packed, refusals

EXPORTED = ("row_wise", "mixed")
SCENARIOS = {f"export {kind}": partial(export_packed, kind) for kind in EXPORTED} | {"refusals": refusals}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of one process."""
    whole, scheme = alone()
    return export(whole, scheme, tmp_path_factory.mktemp("alone") / "artifact")


@pytest.mark.parametrize("kind", EXPORTED)
def test_artifact_reads_like_that_of_one_process(ranks: RankResults, expected: Path, kind: str) -> None:
    assert ranks[f"export {kind}"]  # shows the ranks' tracebacks
    found = ranks.folder / f"packed_{kind}"
    assert read_manifest(found)["forms"] == read_manifest(expected)["forms"] == ["packed"]
    tensors, wanted = read_scheme(found).to_tensors(), read_scheme(expected).to_tensors()
    assert [key for key, value in wanted.items() if not torch.equal(tensors[key], value)] == []
    rows, wanted_rows = exact_rows(found), exact_rows(expected)
    assert rows is not None
    assert wanted_rows is not None
    for name, count in ROWS.items():
        assert torch.equal(rows[name](0, count), wanted_rows[name](0, count))
        assert torch.equal(load_csr(ranks.folder / f"csr_{kind}", name).to_dense(), rows[name](0, count))
    for collection in ("first", "second"):
        served, of_one = (load(path, collection=collection).state_dict() for path in (found, expected))
        assert served.keys() == of_one.keys()
        assert [key for key in of_one if not torch.equal(served[key], of_one[key])] == []


@pytest.mark.parametrize("kind", EXPORTED)
def test_ranks_write_shards_of_their_own(ranks: RankResults, kind: str) -> None:
    assert ranks[f"export {kind}"]
    tables = read_manifest(ranks.folder / f"packed_{kind}")["tables"]
    cut = ROWS if kind == "row_wise" else ("user", "item")
    assert [name for name in cut if len(tables[name]["shards"]["packed"]) < 2] == []


def test_what_one_rank_cannot_export_stops_all(ranks: RankResults) -> None:
    for rank, own in enumerate(ranks["refusals"]):
        named = "" if rank == 1 else "rank 1: "
        assert own["no codes"].endswith(
            "form 'packed': expected bits, scales and shifts of its columns, got none; allocate bits first, or choose "
            "another form"
        )
        assert own["nan"].startswith(f"ValueError: {named}table 'tag': expected finite values, got nan in block ")
    assert [path.name for path in ranks.folder.iterdir() if "refused" in path.name] == []
