"""Rotation over ranks: the matrix of one process, on every rank, for shards of rows, whole tables and replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dnis_torchrec.allocation.axes import rotate_, with_axes_
from tests.allocation.test_rotation import build, counts_of, drawn_in, tables_of
from tests.allocation.turnable import build as build_of_torchrec
from tests.allocation.turnable import counts as counts_of_torchrec
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.rotation_scenarios import MODELS, OF_TORCHREC, REFUSED, SCENARIOS, TURNED, WEIGHTED
from tests.reference import second_moment_reference


def axes_of(model: nn.Module) -> list[Tensor]:
    """The buffers that `with_axes_` adds."""
    return [value for name, value in model.named_buffers() if name.endswith("axes")]


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


@pytest.mark.parametrize(("name", "sharding_type"), [(name, kind) for name, own in OF_TORCHREC.items() for kind in own])
def test_models_of_torchrec_are_turned_as_one_process_turns_them(
    ranks: RankResults, name: str, sharding_type: str
) -> None:
    """Columns that are spread over ranks, too, once training is over; no logit moves."""
    model = with_axes_(build_of_torchrec(name, is_weighted=sharding_type in WEIGHTED))
    wanted = rotate_(model, counts_of_torchrec())
    tables = tables_of(model)
    seen = dict.fromkeys(tables, 0)
    for found in ranks[f"{name} of torchrec {sharding_type}"]:
        assert found["moved"] < 1e-5
        for own, rotation in zip(found["rotations"], wanted, strict=True):
            torch.testing.assert_close(own, rotation)
        for table, row, column, weight in found["shards"]:
            expected = tables[table][row : row + weight.shape[0], column : column + weight.shape[1]]
            torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)
            seen[table] += weight.numel()
        for own, axes in zip(found["axes"], axes_of(model), strict=True):
            torch.testing.assert_close(own, axes)
    copies = 2 if sharding_type == "data_parallel" else 1
    assert seen == {table: copies * weight.numel() for table, weight in tables.items()}
