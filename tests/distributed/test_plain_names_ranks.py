"""A sharded prepared model has the plain model's names, so the checkpoints of either are the other's, on any ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import Rank, Results, run_on_ranks
from tests.distributed.model import CPU
from tests.distributed.plain_names_scenarios import SHARDED_AS, scenarios

KINDS_OF = {1: SHARDED_AS, 2: ("row_wise", "mixed"), 4: ("mixed",)}
"""Number of ranks -> the shardings that they try."""


@pytest.fixture(scope="module")
def worlds(gloo: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Results]]]:
    """World size -> scenario -> what its ranks reported."""
    alone = Rank(0, 1, tmp_path_factory.mktemp("ranks_1"), gloo, CPU)
    found = {1: {kind: [scenario(alone)] for kind, scenario in scenarios(KINDS_OF[1]).items()}}
    for size in (2, 4):
        results = run_on_ranks(size, scenarios(KINDS_OF[size]), tmp_path_factory.mktemp(f"ranks_{size}"))
        found[size] = {kind: results[kind] for kind in KINDS_OF[size]}
    return found


everywhere = pytest.mark.parametrize(("size", "kind"), [(size, kind) for size in KINDS_OF for kind in KINDS_OF[size]])


@everywhere
def test_names_are_the_plain_models(worlds: dict, size: int, kind: str) -> None:
    for own in worlds[size][kind]:
        assert own["prepared names"] == own["plain names"]
        assert "model.first.embedding_bags.user.weight" in own["plain names"]["state_dict"]
        prefixes = {name.rpartition(".")[0] for name in own["added"]}
        assert prefixes == {"model.first.soft_selection", "model.second.soft_selection"}
        assert own["merged names"] == own["plain names"]["state_dict"]


@everywhere
def test_a_plain_checkpoint_goes_on_prepared(worlds: dict, size: int, kind: str) -> None:
    for own in worlds[size][kind]:
        assert_same_tables(own["prepared loaded"]["tables"], own["plain trained"]["tables"])
        assert own["prepared loaded"]["losses"] == pytest.approx(own["plain trained"]["losses"], abs=1e-5)
        assert own["prepared trained"]["losses"] != pytest.approx(own["plain trained"]["losses"], abs=1e-4)
        assert own["alpha"] == [1.0, 1.0]


@everywhere
def test_a_prepared_checkpoint_goes_on_plain(worlds: dict, size: int, kind: str) -> None:
    for own in worlds[size][kind]:
        assert_same_tables(own["plain loaded"]["tables"], own["prepared trained"]["tables"])
        assert own["plain loaded"]["losses"] == pytest.approx(own["prepared trained"]["losses"], abs=1e-5)


def assert_same_tables(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert first
    assert all(torch.equal(first[name], second[name]) for name in first)
