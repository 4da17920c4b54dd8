"""Blocking: frequency counts -> RowBlocks, the sets of rows that share one row of alpha (paper,
section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks.counts import FrequencyCounts, count_chunks
from dnis_torchrec.blocks.routing import MAX_NUM_BLOCKS, RowRouting, Tally, merge_tallies, tally
from dnis_torchrec.checks import check, check_known

LEAST_ROWS = 250
"""Rows of a block, at least. What a column of a block takes beside its codes, 5 bytes for scale,
shift and width, is then at most a tenth of them: 250 codes of .2 bytes, at 20 times."""

TableBlocks: TypeAlias = tuple[RowRouting, Tensor, Tensor]
"""Routing of a table's rows, occurrences and seen rows of every block."""


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
    return form_blocks(blocks_of_table, counts, tables, num_blocks, least_rows, leave_alone)


def form_blocks(
    form: Callable[[Tensor, int, int], TableBlocks],
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
    num_blocks: int = NUM_BLOCKS,
    least_rows: int = LEAST_ROWS,
    leave_alone: Collection[str] = (),
) -> RowBlocks:
    """Does what `blocks_from_counts` does; `form` makes the blocks of one table."""
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
        parts = form(counts.counts[name], size, least_rows)
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


class FrequencyBlocks:
    """The blocks of a table: its rows by falling frequency, ties in row order, cut where the tally
    of their counts says. No row is sorted for it."""

    def __init__(self, counts: Tensor, sums: Tally, most_blocks: int, least_rows: int) -> None:
        self._frequencies, sizes = sums
        num_rows, num_unseen = len(counts), int(sizes[self._frequencies == 0].sum())
        has_cold_block = most_blocks > 1 and least_rows <= num_unseen < num_rows
        end = num_rows - num_unseen if has_cold_block else num_rows
        size = min(most_blocks - has_cold_block, max(1, end // least_rows))
        self._starts = torch.arange(size + has_cold_block) * end // size
        self._boundaries = pad(self._starts, (0, 1), value=num_rows)
        parts = [part.aminmax() for part in counts.split(self._boundaries.diff().tolist())]
        # in a block rows that never occur come last, so that the end of the table can be cut off
        self.are_in_order = not bool(counts[num_rows - num_unseen :].any()) and all(
            low >= high for (low, _), (_, high) in pairwise(parts)
        )
        self._seen_rows = self._boundaries.clamp(max=num_rows - num_unseen).diff()
        # runs of rows of one frequency: the place of the first, and the occurrences until there
        totals = torch.stack([sizes, sizes * self._frequencies])
        self._next, sums_until = totals.flip(1).cumsum(1).flip(1) - totals
        runs = len(sizes) - torch.searchsorted(self._next.flip(0), self._boundaries, right=True)
        places = self._boundaries - self._next[runs]
        self._occurrences = (sums_until[runs] + places * self._frequencies[runs]).diff()
        self._first_blocks = self._block_at(self._next)
        is_cut = self._block_at(self._next + sizes - 1) > self._first_blocks
        self._cut_runs = is_cut.nonzero().squeeze(1)
        # fewer than 65,535: numpy sorts uint16 in a sixth of the time of int64
        self._cut_numbers = (is_cut.cumsum(0) * is_cut).numpy().astype(np.uint16)

    def _block_at(self, places: Tensor) -> Tensor:
        return torch.searchsorted(self._starts, places, right=True) - 1

    def map_rows(self, counts: Tensor, first: int, last: int, sums: Tally) -> Tensor:
        """The blocks of rows ``first .. last - 1`` of a table, zeros for others; `sums` are those
        of the rows before. To be called once."""
        dtype = torch.uint8 if len(self._starts) < 256 else torch.uint16
        block_of_row = torch.zeros(len(counts), dtype=dtype)
        self._next.index_add_(0, torch.searchsorted(self._frequencies, sums[0]), sums[1])
        for chunk in count_chunks(counts[first:last]):
            runs = torch.searchsorted(self._frequencies, chunk)
            blocks, numbers = self._first_blocks[runs], self._cut_numbers[runs.numpy()]
            sizes = torch.from_numpy(np.bincount(numbers, minlength=len(self._cut_runs) + 1))
            rows = torch.from_numpy(numbers.argsort(kind="stable"))[sizes[0] :]  # of cut runs
            starts = self._next[self._cut_runs] - (sizes[1:].cumsum(0) - sizes[1:])
            places = starts.repeat_interleave(sizes[1:]) + torch.arange(len(rows))
            blocks[rows] = self._block_at(places)
            self._next[self._cut_runs] += sizes[1:]
            block_of_row[first : first + len(blocks)] = blocks
            first += len(blocks)
        return block_of_row

    def result(self, block_of_row: Tensor | None) -> TableBlocks:
        """The blocks, by boundaries where rows are in order."""
        cuts = self._boundaries if block_of_row is None else None
        num_rows, num_blocks = int(self._boundaries[-1]), len(self._starts)
        routing = RowRouting(num_rows, num_blocks, boundaries=cuts, block_of_row=block_of_row)
        return routing, self._occurrences, self._seen_rows


def tally_counts(counts: Tensor) -> Tally:
    """How many rows occur how often."""
    return merge_tallies(map(tally, count_chunks(counts)))


def blocks_of_table(counts: Tensor, most_blocks: int, least_rows: int) -> TableBlocks:
    """Puts the rows of a table into blocks. Local."""
    blocks = FrequencyBlocks(counts, tally_counts(counts), most_blocks, least_rows)
    rows = counts, 0, len(counts), merge_tallies([])
    return blocks.result(None if blocks.are_in_order else blocks.map_rows(*rows))
