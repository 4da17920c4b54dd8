"""Unpooled tables on two and four ranks: what they compute and learn is what pooled bags of one id do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.harness import RankResults, running_ranks
from tests.distributed.sequence_scenarios import MIXED, OPTIMIZERS, scenarios, scenarios_of_models
from tests.models import KINDS


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """All ranks, for all tests."""
    with running_ranks(request.param, scenarios(), tmp_path_factory.mktemp("ranks")) as running:
        yield running


@pytest.mark.parametrize("kind", [*KINDS, MIXED])
def test_sequences_equal_bags_of_one(ranks: RankResults, kind: str) -> None:
    found = ranks[f"bags {kind}"]
    for own in found:
        assert own["errors"]
        assert max(own["errors"].values()) < 1e-6
    assert any(own["moved"] for own in found)


@pytest.mark.parametrize("ids", ["", ", no ids on rank 1"])
@pytest.mark.parametrize("kind", [*KINDS, MIXED])
def test_bags_of_any_length_equal_the_unsharded_collection(ranks: RankResults, kind: str, ids: str) -> None:
    for own in ranks[f"unsharded {kind}{ids}"]:
        assert own["error"] < 1e-5
        assert own["folded"] < 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """Two ranks that train whole models."""
    with running_ranks(2, scenarios_of_models(), tmp_path_factory.mktemp("models")) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_curvature_of_sequences_over_ranks(models: RankResults, kind: str) -> None:
    for own in models[f"curvature {kind}"]:
        assert max(own["errors"].values()) < 1e-6 * own["largest"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_search_over_ranks_ends_in_what_is_served(models: RankResults, optimizer: str) -> None:
    first, second = models[f"search {optimizer}"]
    for own in (first, second):
        assert own["compression"] >= 3.0
        assert own["error"] < 1e-5
    assert all(first["retained"][name].equal(second["retained"][name]) for name in ("item", "shop", "user"))


def test_a_plain_checkpoint_goes_on_in_the_prepared_model(models: RankResults) -> None:
    for own in models["plain checkpoint"]:
        assert own["names"][1] == own["names"][0]
        assert "model.sequences.embeddings.item.weight" in own["names"][0]["model"]
        assert own["prepared"] == pytest.approx(own["plain"], abs=1e-5)
