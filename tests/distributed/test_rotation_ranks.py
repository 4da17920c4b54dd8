"""Rotation over ranks: the matrix of one process, on every rank, for shards of rows, whole tables and replicas."""

from __future__ import annotations

import pytest
import torch

from tests.allocation.test_rotation import build, counts_of, drawn_in, tables_of
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.rotation_scenarios import MODELS, REFUSED, SCENARIOS, TURNED
from tests.reference import second_moment_reference


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    return run_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("sharding_type", TURNED)
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_turns_its_rows_by_the_matrix_of_the_whole(
    ranks: RankResults, name: str, sharding_type: str
) -> None:
    model = build(name)
    counts, factors = counts_of(model), drawn_in(model)
    tables = {table: weight.double() * factors[table] for table, weight in tables_of(model).items()}
    first, second = ranks[f"{name} {sharding_type}"]
    seen = dict.fromkeys(tables, 0)
    for number, group in enumerate(first["groups"]):
        rotation = first["rotations"][number]
        assert torch.equal(rotation, second["rotations"][number])
        moment = second_moment_reference([tables[table] for table in group], [counts.counts[table] for table in group])
        turned_moment = rotation.T @ moment @ rotation
        torch.testing.assert_close(turned_moment, turned_moment.diag().diag(), atol=1e-6, rtol=0)
        assert (turned_moment.diag().diff() < 1e-6).all()
        for found in (first, second):
            for table, first_row, weight in found["shards"]:
                if table in group:
                    rows = tables[table][first_row : first_row + len(weight)]
                    torch.testing.assert_close(weight, (rows @ rotation).float())
                    seen[table] += len(weight)
    copies = 2 if sharding_type == "data_parallel" else 1
    assert seen == {table: copies * len(weight) for table, weight in tables.items()}


@pytest.mark.parametrize("sharding_type", TURNED)
@pytest.mark.parametrize("name", MODELS)
def test_what_reads_the_tables_turns_along(ranks: RankResults, name: str, sharding_type: str) -> None:
    model = build(name)
    before = next(value for key, value in model.named_parameters() if key.endswith("0._linear.weight")).detach()
    for found in ranks[f"{name} {sharding_type}"]:
        of_table = {t: r for group, r in zip(found["groups"], found["rotations"], strict=True) for t in group}
        read = [table for table in counts_of(model).counts if not table.startswith("gmf")]
        parts = before.double().split([of_table[table].shape[0] for table in read], dim=1)
        turned = torch.cat([part @ of_table[table] for part, table in zip(parts, read, strict=True)], dim=1)
        torch.testing.assert_close(found["reader"].detach(), turned.float())


@pytest.mark.parametrize("name", MODELS)
def test_column_shards_are_refused_on_all_ranks(ranks: RankResults, name: str) -> None:
    for found in ranks[f"{name} {REFUSED}"]:
        assert "supported to rotate are shards of whole rows, got 4 of its " in found["error"]
