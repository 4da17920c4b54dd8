"""Whole rows: every row once, in whatever shards it lies, and what is written lands where it was read."""

from __future__ import annotations

import itertools
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec import scheme
from dnis_torchrec.allocation.energies import whole_rows
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import TableShard


@st.composite
def grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[TableShard]]:
    """A table, and it once more cut into shards of rows and of columns."""
    num_rows, dim = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    table = torch.arange(num_rows * dim, dtype=torch.float32).reshape(num_rows, dim)
    row_cuts = sorted({0, num_rows, *draw(st.lists(st.integers(0, num_rows), max_size=3))})
    column_cuts = sorted({0, dim, *draw(st.lists(st.integers(0, dim), max_size=2))})
    shards = [
        TableShard("t", table[first:last, left:right].clone(), first, left)
        for first, last in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]
    return table, draw(st.permutations(shards))


@given(grids(), st.integers(1, 20))
def test_rows_are_read_once_and_written_back_where_they_lie(
    drawn: tuple[torch.Tensor, list[TableShard]], values_per_chunk: int
) -> None:
    table, shards = drawn
    others = [TableShard("other", torch.ones(2, 3))]
    rows = whole_rows([*shards, *others], {"t": (table.shape[0], table.shape[1])}, Ranks())["t"]
    seen = torch.zeros_like(table)
    with mock.patch.object(scheme, "VALUES_PER_CHUNK", values_per_chunk):
        for chunk in rows.chunks():
            seen[chunk.rows] += chunk.values.float()
            chunk.write_(chunk.values * 2 + 1)
    assert rows.is_cut == any(shard.weight.shape[1] < table.shape[1] for shard in shards)
    assert torch.equal(seen, table)
    for shard in shards:
        columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        expected = table[shard.first_row : shard.first_row + shard.weight.shape[0], columns] * 2 + 1
        assert torch.equal(shard.weight, expected)


class OtherHoldsColumns(Ranks):
    """Two ranks, of which the other holds a whole table of 4 x 2, in two shards of a column each."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(values)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        return values.add_(8)


def test_a_rank_without_a_shard_walks_through_a_cut_table_too() -> None:
    """The others would wait for it."""
    rows = whole_rows([], {"t": (4, 2)}, OtherHoldsColumns())["t"]
    assert (rows.is_cut, rows.copies) == (True, 2)
    assert [chunk.rows for chunk in rows.chunks()] == [slice(0, 4)]
