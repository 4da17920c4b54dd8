"""Position weights learn in a search on two ranks exactly as in TorchRec's own sharded module."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.feature_processor_scenarios import SHARDED_AS, scenarios
from tests.distributed.harness import RankResults, run_on_ranks
from tests.models import Net, weights_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Runs the scenarios once for all tests."""
    return run_on_ranks(2, scenarios(), tmp_path_factory.mktemp("feature_processors"))


@pytest.mark.parametrize("kind", SHARDED_AS)
@pytest.mark.parametrize("how", ["searched", "plain"])
def test_places_learn_as_in_torchrecs_own_module(ranks: RankResults, kind: str, how: str) -> None:
    start = {f"model.{name}": weight for name, weight in weights_of(Net()).items()}
    first, second = (own[how]["places"] for own in ranks[kind])
    for own in ranks[kind]:
        assert own[how]["losses"] == pytest.approx(own["torchrec"]["losses"], abs=1e-5)
        assert own["merged"].keys() == own["torchrec"]["places"].keys() == start.keys()
        for name, weight in own["torchrec"]["places"].items():
            torch.testing.assert_close(own[how]["places"][name], weight, atol=1e-5, rtol=0)
            assert torch.equal(own["merged"][name], own["searched"]["places"][name])
            assert not torch.allclose(weight, start[name], atol=1e-3)
    assert all(torch.equal(first[name], second[name]) for name in first)
