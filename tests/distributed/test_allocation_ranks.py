"""Energies, codes and schemes of several ranks are those of one process, bit for bit, under every sharding type."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.allocation_scenarios import SAMPLED, allocate_all, allocate_alone, refusals
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.pruning_scenarios import KINDS, blocks

SCENARIOS = {kind: partial(allocate_all, kind) for kind in KINDS} | {"refusals": refusals}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same in one process."""
    return allocate_alone()


@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_one_process_bit_for_bit(ranks: RankResults, alone: dict[str, Any], kind: str) -> None:
    for own in ranks[kind]:
        assert own["numbers"] == alone["numbers"]
        assert own["scheme"]["json"] == alone["scheme"]["json"]
        for given in ("energies", "codes"):
            assert [key for key, value in alone[given].items() if not torch.equal(own[given][key], value)] == []
        bits = alone["scheme"]["tensors"]
        assert [key for key, value in bits.items() if not torch.equal(own["scheme"]["tensors"][key], value)] == []


def test_blocks_are_larger_than_their_samples() -> None:
    """Else the tests above would not have tried which rows are drawn."""
    assert max(int(routing.row_counts().max()) for routing in blocks().routings.values()) > SAMPLED


def test_a_value_that_is_none_on_one_rank_stops_all(ranks: RankResults) -> None:
    for own in ranks["refusals"]:
        assert own["refused"].startswith("table 'tag': expected finite values, got nan in block ")
