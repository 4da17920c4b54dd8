"""Selection on the shards, on two ranks: what travels is the plain model's volume, what is computed the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.harness import RankResults, running_ranks
from tests.distributed.shard_selection_scenarios import ANY_SIZE, PER_RANK, SHARDINGS, VOLUME_KINDS, scenarios


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankResults]:
    """Both ranks, for all tests."""
    with running_ranks(2, scenarios(), tmp_path_factory.mktemp("ranks")) as running:
        yield running


@pytest.mark.parametrize("kind", VOLUME_KINDS)
def test_the_all_to_alls_carry_what_the_plain_models_do(ranks: RankResults, kind: str) -> None:
    for own in ranks[f"volume {kind}"]:
        assert own["wrapped"] == own["plain"]
        assert min(own["plain"].values()) > 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", SHARDINGS)
def test_it_computes_what_the_unsharded_collection_does(ranks: RankResults, kind: str, weighted: bool) -> None:
    for own in ranks[f"{kind} {weighted}"]:
        assert own["keys"]
        assert own["state"]
        assert own["columns"] == 8 + 8 + 8 + 12
        assert max(own["value_error"], own["alpha_error"], own["table_error"]) < 1e-6
        assert own["hit_errors"] == 0


@pytest.mark.parametrize("kind", SHARDINGS)
def test_a_batch_of_no_samples(ranks: RankResults, kind: str) -> None:
    for own in ranks[f"{kind}, no samples"]:
        assert own["keys"]
        assert own["shape"] == [0, 36]
        assert own["table_change"] == own["gradient"] == own["alpha_gradient"] == own["hits"] == 0


@pytest.mark.parametrize("empty_rank", [0, 1])
@pytest.mark.parametrize("kind", ANY_SIZE)
def test_a_rank_may_have_no_samples(ranks: RankResults, kind: str, empty_rank: int) -> None:
    for rank, own in enumerate(ranks[f"{kind}, no samples on rank {empty_rank}"]):
        assert own["shape"] == [0 if rank == empty_rank else PER_RANK, 36]
        assert max(own["value_error"], own["alpha_error"], own["table_error"]) < 1e-5
        assert own["hit_errors"] == 0
