"""The harness reports what ranks return, and names the rank that raised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import Rank, Results, run_on_ranks


def sum_of_ranks(at: Rank) -> Results:
    total = torch.tensor(float(at.rank))
    dist.all_reduce(total, group=at.process_group)
    return {"total": total, "world_size": at.world_size}


def rank_one_raises(at: Rank) -> Results:
    if at.rank == 1:
        raise ValueError("no such table")
    return {}


def test_results_come_back_by_name_and_an_error_names_its_rank(tmp_path: Path) -> None:
    results = run_on_ranks(2, {"raises": rank_one_raises, "sum": sum_of_ranks}, tmp_path)
    assert [own["total"].item() for own in results["sum"]] == [1.0, 1.0]
    assert [own["world_size"] for own in results["sum"]] == [2, 2]
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[\s\S]*ValueError: no such table"):
        results["raises"]
