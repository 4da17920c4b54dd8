"""What two ranks measure of a sharded model, and the bits that come of it, are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.compress_scenarios import SCENARIOS, measure_alone
from tests.distributed.curvature_scenarios import KINDS
from tests.distributed.harness import RankResults, run_on_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same in one process."""
    return measure_alone()


@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(ranks: RankResults, alone: dict[str, Any], kind: str) -> None:
    for own in ranks[kind]:
        assert all(own["counts"][name].equal(counts) for name, counts in alone["counts"].items())
        assert own["bytes"] == alone["bytes"]
        assert own["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        for found, wanted in zip(own["tensors"], alone["tensors"], strict=True):
            assert found.keys() == wanted.keys()
            assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_what_ranks_are_held_to_has_learnt(alone: dict[str, Any]) -> None:
    fitted, _, learnt = alone["tensors"]
    moved = [name for name, value in fitted.items() if name.endswith("scale") and not value.equal(learnt[name])]
    assert len(moved) > 1


def test_a_value_that_is_none_on_one_rank_stops_all(ranks: RankResults) -> None:
    assert all("expected finite values, got nan in row" in own["error"] for own in ranks["refused"])
