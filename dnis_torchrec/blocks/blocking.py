"""Blocking: frequency counts -> RowBlocks, the sets of rows that share one row of alpha (paper,
section 3.2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks.counts import FrequencyCounts, count_chunks
from dnis_torchrec.blocks.routing import MAX_NUM_BLOCKS, RowRouting
from dnis_torchrec.checks import check, check_known

LEAST_ROWS = 250
"""Rows of a block, at least. What a column of a block takes beside its codes, 5 bytes for scale,
shift and width, is then at most a tenth of them: 250 codes of .2 bytes, at 20 times."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBlocks:
    """Row blocks of all tables: they say which row of alpha multiplies which row of which table.

    Tables of one embedding_dim share one alpha, in which each has rows of its own; a subclass whose
    `first_alpha_row` says otherwise lets tables share rows, and everything follows it.
    """

    routings: Mapping[str, RowRouting]
    embedding_dims: Mapping[str, int]
    max_bag_lengths: Mapping[str, int]
    occurrences: Mapping[str, Tensor]
    seen_rows: Mapping[str, Tensor]
    left_alone: frozenset[str] = frozenset()

    @property
    def alpha_shapes(self) -> dict[int, tuple[int, int]]:
        """embedding_dim D -> shape (A, D) of the alpha that serves all tables of that D."""
        rows: dict[int, int] = {}
        for table, dim in self.embedding_dims.items():
            end = self.first_alpha_row(table) + self.routings[table].num_blocks
            rows[dim] = max(rows.get(dim, 0), end)
        return {dim: (num_rows, dim) for dim, num_rows in rows.items()}

    def first_alpha_row(self, table: str) -> int:
        """Row of alpha that belongs to block 0 of `table`."""
        check_known("table", table, self.routings)
        first = 0
        for name, dim in self.embedding_dims.items():
            if name == table:
                break
            if dim == self.embedding_dims[table]:
                first += self.routings[name].num_blocks
        return first

    def per_alpha_row(self, embedding_dim: int, per_block: Mapping[str, Tensor]) -> Tensor:
        """Adds up a quantity of the tables' blocks, such as `seen_rows`, by the row of alpha that
        multiplies them."""
        total = torch.zeros(self.alpha_shapes[embedding_dim][0], dtype=torch.float64)
        for table, dim in self.embedding_dims.items():
            if dim == embedding_dim:
                first = self.first_alpha_row(table)
                total[first : first + self.routings[table].num_blocks] += per_block[table]
        return total


def blocks_from_counts(
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
    *,
    num_blocks: int = NUM_BLOCKS,
    least_rows: int = LEAST_ROWS,
    leave_alone: Collection[str] = (),
) -> RowBlocks:
    """Cuts the rows of every table, sorted by descending frequency, into blocks of equal size; rows
    that never occur into one of their own.

    Takes a byte per row (two from 256 blocks on) and a few MB, beside the counts. Local and
    deterministic: equal counts give equal blocks on all ranks.

    Args:
        counts: occurrences in the training data.
        tables: the tables to block, as ``embedding_bag_configs()`` gives them.
        num_blocks: S of every table, at most 65,535.
        least_rows: rows of a block, at least: a table of fewer rows than S of them gets fewer
            blocks, and one in any case; fewer rows that never occur stay in the last of the others.
        leave_alone: names of tables that must not be touched: one block each, whose alpha stays 1.

    Returns:
        The blocks of every table. A table whose rows stand in frequency order is routed by
        boundaries, any other by a uint8 or uint16 map.

    Raises:
        ValueError: for counts of other tables or other num_embeddings, or a name that no table has.

    Example:
        >>> counts = FrequencyCounts({"t": torch.tensor([9, 7, 2, 1])}, {"f": 1}, 19)
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"]
        ... )
        >>> blocks = blocks_from_counts(counts, [table], num_blocks=2, least_rows=1)
        >>> blocks.routings["t"].boundaries.tolist()
        [0, 2, 4]
    """
    check(1 <= num_blocks <= MAX_NUM_BLOCKS, "num_blocks", f"1..{MAX_NUM_BLOCKS}", num_blocks)
    for table in tables:
        check_known("table", table.name, counts.counts)
        rows, place = counts.counts[table.name].numel(), f"table {table.name!r}"
        requirement = f"counts of num_embeddings={table.num_embeddings} rows"
        check(rows == table.num_embeddings, place, requirement, rows)
    for name in leave_alone:
        check_known("table to leave alone", name, [table.name for table in tables])
    routings: dict[str, RowRouting] = {}
    occurrences: dict[str, Tensor] = {}
    seen_rows: dict[str, Tensor] = {}
    for table in tables:
        name, num_rows = table.name, table.num_embeddings
        size = 1 if name in leave_alone else num_blocks
        parts = _blocks_of(counts.counts[name], size, least_rows)
        routing, occurrences[name], seen_rows[name] = parts
        if name in leave_alone:  # never-seen rows stay where they are, so no map is needed
            routing = RowRouting(num_rows, 1, boundaries=torch.tensor([0, num_rows]))
        routings[name] = routing
    return RowBlocks(
        routings=routings,
        embedding_dims={table.name: table.embedding_dim for table in tables},
        max_bag_lengths=dict(counts.max_bag_lengths),
        occurrences=occurrences,
        seen_rows=seen_rows,
        left_alone=frozenset(leave_alone),
    )


class _FrequencyOrder:
    """Rows by falling frequency, ties in row order: as runs of rows of equal frequency, without
    sorting any rows."""

    def __init__(self, counts: Tensor) -> None:
        values, sizes = torch.zeros(2, 0, dtype=torch.int64)
        for chunk in count_chunks(counts):
            more, sizes_of_more = torch.unique(chunk, return_counts=True)
            values, run = torch.unique(torch.cat([values, more]), return_inverse=True)
            both = torch.cat([sizes, sizes_of_more])
            sizes = torch.zeros_like(values).index_add_(0, run, both)
        self._frequencies = values
        self.num_unseen = int(sizes[values == 0].sum())
        ends = sizes.flip(0).cumsum(0)
        self._next = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])

    def take_places(self, counts: Tensor) -> Tensor:
        """The places of the next rows, which are asked for once, in their order; ``(n,)`` int64."""
        runs = self._frequencies.numel() - 1 - torch.searchsorted(self._frequencies, counts)
        sorted_runs, order = torch.sort(runs, stable=True)
        nth_of_run = torch.arange(counts.numel()) - torch.searchsorted(sorted_runs, sorted_runs)
        places = torch.empty_like(runs)
        places[order] = self._next[sorted_runs] + nth_of_run
        self._next += torch.bincount(runs, minlength=self._next.numel())
        return places


def _blocks_of(
    counts: Tensor, most_blocks: int, least_rows: int
) -> tuple[RowRouting, Tensor, Tensor]:
    """Puts the rows of a table into blocks; also returns each block's occurrences and number of
    seen rows."""
    num_rows, order = counts.numel(), _FrequencyOrder(counts)
    has_cold_block = most_blocks > 1 and least_rows <= order.num_unseen < num_rows
    end = num_rows - order.num_unseen if has_cold_block else num_rows
    size = min(most_blocks - has_cold_block, max(1, end // least_rows))
    starts = torch.arange(size + has_cold_block) * end // size
    num_blocks = len(starts)
    block_of_row = torch.empty(num_rows, dtype=torch.uint8 if num_blocks < 256 else torch.uint16)
    rows, occurrences, seen_rows = torch.zeros(3, num_blocks, dtype=torch.int64)
    in_order, last, first = True, torch.zeros(2, 1, dtype=torch.int64), 0
    for chunk in count_chunks(counts):
        block = torch.searchsorted(starts, order.take_places(chunk), right=True) - 1
        block_of_row[first : first + block.numel()] = block
        first += block.numel()
        rows += torch.bincount(block, minlength=num_blocks)
        occurrences.index_add_(0, block, chunk)
        seen_rows.index_add_(0, block, (chunk > 0).long())
        # in a block rows that never occur come last, so that the end of the table can be cut off
        order_keys = torch.cat([last, torch.stack([block, (chunk == 0).long()])], dim=1)
        in_order, last = in_order and bool((order_keys.diff() >= 0).all()), order_keys[:, -1:]
    if in_order:
        boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
        return RowRouting(num_rows, num_blocks, boundaries=boundaries), occurrences, seen_rows
    return RowRouting(num_rows, num_blocks, block_of_row=block_of_row), occurrences, seen_rows
