"""Tables of one column, and of others that fused kernels do not take, train beside fused ones on two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.narrow_table_scenarios import SHARDED_AS, scenarios, unsharded


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Runs the scenarios once for all tests."""
    return run_on_ranks(2, scenarios(), tmp_path_factory.mktemp("narrow_tables"))


@pytest.mark.parametrize("kind", SHARDED_AS)
def test_they_learn_as_on_one_process(ranks: RankResults, kind: str) -> None:
    expected, found = unsharded(), ranks[kind]
    mean = torch.stack([own["losses"] for own in found]).mean(0)
    torch.testing.assert_close(mean, expected["losses"], atol=1e-6, rtol=1e-5)
    seen = set()
    for own in found:
        for place, shard in own["tables"].items():
            table, row, column = place.split("/")
            whole = expected["tables"][f"{table}/0/0"]
            part = whole[int(row) : int(row) + shard.shape[0], int(column) : int(column) + shard.shape[1]]
            torch.testing.assert_close(shard, part, atol=1e-6, rtol=1e-5)
            seen.add(table)
    assert seen == {"first_order", "six", "wide", "visited"}


@pytest.mark.parametrize("kind", SHARDED_AS[:-1])
def test_only_what_fused_kernels_do_not_take_is_dense(ranks: RankResults, kind: str) -> None:
    wide = "dense" if kind == "data_parallel" else "fused"
    for own in ranks[kind]:
        assert own["kernels"] == {"first_order": "dense", "six": "dense", "wide": wide, "visited": "dense"}
