"""A prepared model with managed collisions is searched on two ranks as on one process, by the rows that ids have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.distributed.harness import RankResults, Results, run_on_ranks
from tests.distributed.managed_scenarios import MODELS, scenarios, unsharded


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Runs the scenarios once for all tests."""
    return run_on_ranks(2, scenarios(), tmp_path_factory.mktemp("managed"))


@pytest.fixture(scope="module")
def expected() -> Mapping[str, Results]:
    """What one process comes to."""
    return {model_of: unsharded(model_of) for model_of in MODELS}


@pytest.mark.parametrize("scenario", list(scenarios()))
def test_it_is_searched_as_on_one_process(ranks: RankResults, expected: Mapping[str, Results], scenario: str) -> None:
    alone, found = expected[scenario.split()[0]], ranks[scenario]
    losses = torch.stack([own["losses"] for own in found]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], atol=1e-5, rtol=1e-5)
    assert found[0]["levels"].count("upper") == 4
    for own in found:
        assert own["moved"] == []
        assert own["compression"] >= 4
        for table, bits in alone["bits"].items():
            assert (own["bits"][table] != bits).float().mean() < 0.02  # sums of ranks are rounded otherwise
        torch.testing.assert_close(own["alpha"], alone["alpha"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own["merged"], own["before"], atol=1e-5, rtol=1e-5)
        for place, shard in own["tables"].items():
            table, row, column = place.split("/")
            whole = alone["tables"][f"{table}/0/0"]
            part = whole[int(row) : int(row) + shard.shape[0], int(column) : int(column) + shard.shape[1]]
            torch.testing.assert_close(shard, part, atol=1e-5, rtol=1e-5)
