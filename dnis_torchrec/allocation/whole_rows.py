"""Whole rows of a table, a chunk at a time, wherever its columns lie: on this rank, on each rank,
or spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import rows_per_chunk
from dnis_torchrec.selection.table_shards import TableShard, num_copies


@dataclass(frozen=True, eq=False)
class RowChunk:
    """Some whole rows, and where this rank holds them or columns of them."""

    values: Tensor
    rows: slice
    held: tuple[tuple[Tensor, slice, slice], ...]

    def write_(self, values: Tensor) -> None:
        """Writes other values to where the chunk lies. Local."""
        for weight, rows, columns in self.held:
            weight.copy_(values[rows, columns].to(weight))


@dataclass(frozen=True, eq=False)
class WholeRows:
    """The rows of one table that this rank walks through."""

    shards: Sequence[TableShard]
    shape: tuple[int, int]
    is_cut: bool
    copies: int
    ranks: Ranks

    def chunks(self) -> Iterator[RowChunk]:
        """Walks through the rows."""
        if self.is_cut:
            yield from self._gathered()
            return
        for shard in self.shards:
            for weight, rows, columns in shard.chunks():
                yield RowChunk(weight.double(), rows, ((weight, slice(None), columns),))

    def _gathered(self) -> Iterator[RowChunk]:
        num_rows, dim = self.shape
        step = rows_per_chunk(dim)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            held = tuple(part for shard in self.shards for part in _within(shard, start, stop))
            values = torch.zeros(stop - start, dim, dtype=torch.float64)
            for weight, rows, columns in held:
                values[rows, columns] = weight.cpu().double()
            yield RowChunk(self.ranks.sum_(values), slice(start, stop), held)


def _within(shard: TableShard, start: int, stop: int) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yields a shard's weights for rows ``start .. stop``, and their place there; nothing if it
    holds none of them."""
    first = max(start, shard.first_row)
    last = min(stop, shard.first_row + shard.weight.shape[0])
    if first < last:
        weight = shard.weight[first - shard.first_row : last - shard.first_row]
        columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        yield weight, slice(first - start, last - start), columns


def whole_rows(
    shards: Sequence[TableShard], shapes: Mapping[str, tuple[int, int]], ranks: Ranks
) -> dict[str, WholeRows]:
    """The rows of tables, however they are sharded."""
    if not shapes:
        return {}
    own = {table: [shard for shard in shards if shard.table == table] for table in shapes}
    cut = [
        any(shard.weight.shape[1] != shapes[table][1] for shard in held)
        for table, held in own.items()
    ]
    is_cut = dict(
        zip(shapes, ranks.max_(torch.tensor(cut, dtype=torch.int64)).tolist(), strict=True)
    )
    copies = num_copies(own, shapes, ranks)
    return {
        table: WholeRows(
            held,
            shapes[table],
            bool(is_cut[table]),
            ranks.world_size if is_cut[table] else copies[table],
            ranks,
        )
        for table, held in own.items()
    }
