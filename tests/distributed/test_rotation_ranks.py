"""Rotation over ranks: the matrix of one process, on every rank, for shards of rows, whole tables and replicas."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.rotation_scenarios import MODEL, REFUSED, SCENARIOS, TURNED
from tests.reference import second_moment_reference
from tests.test_rotation import DIM, build, counts_of, tables_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("sharding_type", TURNED)
def test_every_rank_turns_its_rows_by_the_matrix_of_the_whole(ranks: RankResults, sharding_type: str) -> None:
    model = build(MODEL)
    counts, tables = counts_of(model), tables_of(model)
    moment = second_moment_reference(list(tables.values()), [counts.counts[table] for table in tables])
    reader = next(value for name, value in model.named_parameters() if name.endswith("0._linear.weight"))
    first, second = ranks[sharding_type]
    (rotation,) = first["rotations"]
    assert torch.equal(rotation, second["rotations"][0])
    turned_moment = rotation.T @ moment @ rotation
    torch.testing.assert_close(turned_moment, turned_moment.diag().diag(), atol=1e-8, rtol=0)
    assert (turned_moment.diag().diff() < 0).all()
    seen = dict.fromkeys(tables, 0)
    for found in (first, second):
        for table, first_row, weight in found["shards"]:
            rows = tables[table][first_row : first_row + len(weight)]
            torch.testing.assert_close(weight, (rows.double() @ rotation).float())
            seen[table] += len(weight)
        halves = [part.double() @ rotation for part in reader.detach().split(DIM, dim=1)]
        torch.testing.assert_close(found["reader"].detach(), torch.cat(halves, dim=1).float())
    copies = 2 if sharding_type == "data_parallel" else 1
    assert seen == {table: copies * len(weight) for table, weight in tables.items()}


def test_column_shards_are_refused_on_all_ranks(ranks: RankResults) -> None:
    for found in ranks[REFUSED]:
        assert "supported to rotate are shards of whole rows, got 4 of its 8 columns" in found["error"]
