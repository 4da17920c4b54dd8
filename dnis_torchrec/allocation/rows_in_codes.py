"""Rows in codes: some rows of a model hold what they would be served as, for as long as somebody
wants to look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dnis_torchrec.allocation.row_sample import RowSample, sampled_values
from dnis_torchrec.allocation.whole_rows import WholeRows
from dnis_torchrec.blocks.column_codes import decode_rows, encode_rows
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.selection.cached_tables import writing_to_tables
from dnis_torchrec.selection.table_shards import TableShard


@dataclass(frozen=True, eq=False)
class _HeldRows:
    """Some rows of one shard."""

    shard: TableShard
    place: Tensor
    own: Tensor
    rounded: Tensor
    blocks: Tensor

    def multiply_(self, gain: Tensor) -> None:
        """Writes the rounded rows, times a factor for each column of each block, ``(S, D)``."""
        first, width = self.shard.first_column, self.shard.weight.shape[1]
        of_columns = torch.cat([gain, torch.ones(1, gain.shape[1], dtype=gain.dtype)])[
            :, first : first + width
        ]
        self.shard.weight[self.place] = (
            self.rounded * of_columns.to(self.rounded)[self.blocks.to(self.rounded.device)]
        )


class RowsInCodes:
    """What `rows_in_codes` gives: rows that hold rounded values, and may hold multiples of them."""

    def __init__(self, model: nn.Module, held: Mapping[str, list[_HeldRows]]) -> None:
        self._model, self._held = model, held

    @torch.no_grad()
    def multiply_(self, gains: Mapping[str, Tensor]) -> None:
        """Rows hold multiples of their rounded values, as if scales were so much larger. Local."""
        with writing_to_tables(self._model):
            for name, gain in gains.items():
                for rows in self._held[name]:
                    rows.multiply_(gain)


@contextmanager
def rows_in_codes(
    model: nn.Module,
    tables: Mapping[str, WholeRows],
    scheme: MixedDimensionScheme,
    rows: Mapping[str, Tensor],
) -> Iterator[RowsInCodes]:
    """Within the block some rows hold the values that they would be served with; afterwards their
    own, bit for bit."""
    held = {
        name: list(_held_rows(whole, scheme.tables[name], rows[name]))
        for name, whole in tables.items()
    }
    every = [part for of_table in held.values() for part in of_table]
    try:
        _write_(model, every, lambda part: part.rounded)
        yield RowsInCodes(model, held)
    finally:
        _write_(model, every, lambda part: part.own)


@torch.no_grad()
def _write_(
    model: nn.Module, held: Iterable[_HeldRows], values: Callable[[_HeldRows], Tensor]
) -> None:
    with writing_to_tables(model):
        for part in held:
            part.shard.weight[part.place] = values(part)


@torch.no_grad()
def _held_rows(whole: WholeRows, table: TableScheme, rows: Tensor) -> Iterator[_HeldRows]:
    """For every shard of this rank some of the table's rows, and what they are in codes, a chunk at
    a time."""
    for chunk in rows.split(rows_per_chunk(table.embedding_dim)):
        blocks, gathered = table.routing.block_of(chunk), None
        if whole.is_cut:
            sample = RowSample(chunk, blocks, torch.ones(len(chunk), dtype=torch.float64))
            values = sampled_values(sample, whole.shards, table.embedding_dim, 1, whole.ranks)
            gathered = _in_codes(values, blocks, table)
        for shard in whole.shards:
            is_here = (chunk >= shard.first_row) & (chunk < shard.first_row + len(shard.weight))
            place = (chunk[is_here] - shard.first_row).to(shard.weight.device)
            own, of_own = shard.weight[place], blocks[is_here]
            if gathered is None:
                rounded = _in_codes(own.cpu().float(), of_own, table)
            else:
                rounded = gathered[
                    is_here, shard.first_column : shard.first_column + shard.weight.shape[1]
                ]
            yield _HeldRows(shard, place, own, rounded.to(own), of_own)


def _in_codes(values: Tensor, blocks: Tensor, table: TableScheme) -> Tensor:
    """What rows are in codes, ``(n, D)``."""
    encoded = encode_rows(values, blocks, table.codes, place=f"table {table.name!r}")
    return decode_rows(encoded, blocks, table.codes)
