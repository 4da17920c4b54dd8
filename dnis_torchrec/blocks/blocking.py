"""Blocking: frequency counts -> RowBlocks, the sets of rows that share one row of alpha (paper,
section 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.counts import FrequencyCounts, RowCounts, count_chunks
from dnis_torchrec.blocks.routing import MAX_NUM_BLOCKS, RowRouting
from dnis_torchrec.blocks.settings import SCOPES, STRATEGIES
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.data.files import read_tensors, write_tensors

logger = logging.getLogger(__name__)


class _Head(TypedDict):
    scope: str
    strategy: str
    left_alone: NotRequired[list[str]]
    tables: dict[str, tuple[int, int, int]]
    max_bag_lengths: dict[str, int]


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Row blocks of all tables: they say which row of alpha multiplies which row of which table."""

    scope: str
    strategy: str
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
            num_blocks = self.routings[table].num_blocks
            rows[dim] = max(rows.get(dim, 0), self.first_alpha_row(table) + num_blocks)
        return {dim: (num_rows, dim) for dim, num_rows in rows.items()}

    def first_alpha_row(self, table: str) -> int:
        """Row of alpha that belongs to block 0 of `table`; 0 for every table of scope ``"global"``."""
        check_known("table", table, self.routings)
        if self.scope == "global":
            return 0
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

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        tensors, described = {}, {}
        for table, routing in self.routings.items():
            described[table] = [
                routing.num_embeddings,
                routing.num_blocks,
                self.embedding_dims[table],
            ]
            tensors[f"{table}/occurrences"] = self.occurrences[table]
            tensors[f"{table}/seen_rows"] = self.seen_rows[table]
            tensors |= {f"{table}/{key}": value for key, value in routing.to_tensors().items()}
        head = {"scope": self.scope, "strategy": self.strategy, "tables": described}
        head |= {
            "max_bag_lengths": dict(self.max_bag_lengths),
            "left_alone": sorted(self.left_alone),
        }
        write_tensors(path, tensors, "row_blocks", head)

    @staticmethod
    def load(path: Path) -> RowBlocks:
        """Reads a file that `save` wrote."""
        tensors, described = read_tensors(path, "row_blocks", _Head)
        routings, dims = {}, {}
        for table, (num_embeddings, num_blocks, dim) in described["tables"].items():
            parts = {
                k: tensors[f"{table}/{k}"]
                for k in ("boundaries", "block_of_row")
                if f"{table}/{k}" in tensors
            }
            routings[table] = RowRouting.from_tensors(num_embeddings, num_blocks, parts)
            dims[table] = dim
        return RowBlocks(
            described["scope"],
            described["strategy"],
            routings,
            dims,
            described["max_bag_lengths"],
            {table: tensors[f"{table}/occurrences"] for table in routings},
            {table: tensors[f"{table}/seen_rows"] for table in routings},
            frozenset(described.get("left_alone", ())),
        )


def blocks_from_counts(
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
    *,
    num_blocks: int = 10,
    scope: str = "global",
    strategy: str = "equal_rows",
    boundaries: Sequence[int] | None = None,
    leave_alone: Collection[str] = (),
) -> RowBlocks:
    """Cuts the rows, sorted by descending frequency, into blocks.

    Takes a byte per row (two from 256 blocks on) and a few MB, beside the counts. Local and
    deterministic: equal counts give equal blocks on all ranks.

    Args:
        counts: occurrences in the training data.
        tables: the tables to block, as ``embedding_bag_configs()`` gives them.
        num_blocks: S wanted, at most 65,535; with scope ``"table"`` as many as a table has rows,
            where those are fewer. ``"decades"`` and ``"explicit"`` have as many blocks as they come
            to.
        scope: ``"global"`` (the paper: tables of equal embedding_dim together) or ``"table"``.
        strategy: ``"equal_rows"`` (the paper's reading), ``"equal_mass"`` (equal occurrences),
            ``"decades"`` (one block per power of ten of the frequency; never-seen rows join the
            last) or ``"explicit"``.
        boundaries: for ``"explicit"``: rising positions in the sorted order at which a new block
            begins.
        leave_alone: names of tables that must not be touched, see `RowBlocks.left_alone`; with
            scope ``"table"``.

    Returns:
        The blocks of every table. A table whose rows stand in frequency order is routed by
        boundaries, any other by a uint8 or uint16 map.

    Raises:
        ValueError: for an unknown scope or strategy, counts of other tables or other
            num_embeddings, or boundaries that do not fit.

    Example:
        >>> counts = FrequencyCounts({"t": torch.tensor([9, 7, 2, 1])}, {"f": 1}, 19)
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> blocks_from_counts(counts, [table], num_blocks=2).routings["t"].boundaries.tolist()
        [0, 2, 4]
    """
    check(scope in SCOPES, "scope", f"one of {SCOPES}", repr(scope))
    check(strategy in STRATEGIES, "strategy", f"one of {STRATEGIES}", repr(strategy))
    check(num_blocks >= 1, "num_blocks", "at least 1", num_blocks)
    check(num_blocks <= MAX_NUM_BLOCKS, "num_blocks", f"at most {MAX_NUM_BLOCKS}", num_blocks)
    check(
        (boundaries is not None) == (strategy == "explicit"),
        "boundaries",
        "exactly with strategy 'explicit'",
        f"{boundaries} with {strategy!r}",
    )
    for table in tables:
        check_known("table", table.name, counts.counts)
        counted = counts.counts[table.name].numel()
        fits = counted == table.num_embeddings
        check(
            fits,
            f"table {table.name!r}",
            f"counts of num_embeddings={table.num_embeddings} rows",
            counted,
        )
    for name in leave_alone:
        check_known("table to leave alone", name, [table.name for table in tables])
    check(not leave_alone or scope == "table", "leave_alone", "scope 'table'", repr(scope))
    sorted_together: dict[object, list[EmbeddingBagConfig]] = {}
    for table in tables:
        sorted_together.setdefault(
            table.embedding_dim if scope == "global" else table.name, []
        ).append(table)
    routings: dict[str, RowRouting] = {}
    occurrences: dict[str, Tensor] = {}
    seen_rows: dict[str, Tensor] = {}
    for members in sorted_together.values():
        order = _FrequencyOrder([counts.counts[table.name] for table in members])
        wanted = (
            min(num_blocks, order.num_rows) if scope == "table" else num_blocks
        )  # a small table is no news
        wanted = 1 if members[0].name in leave_alone else wanted
        starts = _block_starts(order, strategy, wanted, boundaries or ())
        for name in (table.name for table in members):
            routings[name], occurrences[name], seen_rows[name] = _block_rows(
                counts.counts[name], order, starts
            )
            if name in leave_alone:  # never-seen rows stay where they are, so no map is needed
                num_rows = counts.counts[name].numel()
                routings[name] = RowRouting(num_rows, 1, boundaries=torch.tensor([0, num_rows]))
    return RowBlocks(
        scope,
        strategy,
        {table.name: routings[table.name] for table in tables},
        {table.name: table.embedding_dim for table in tables},
        dict(counts.max_bag_lengths),
        {table.name: occurrences[table.name] for table in tables},
        {table.name: seen_rows[table.name] for table in tables},
        frozenset(leave_alone),
    )


def check_num_blocks(
    num_blocks: int, tables: Sequence[EmbeddingBagConfig], *, scope: str, strategy: str
) -> None:
    """Checks that there are rows for so many blocks, before anything is counted."""
    if strategy not in ("equal_rows", "equal_mass"):
        return
    rows: dict[object, int] = {}
    for table in tables:
        together = table.embedding_dim if scope == "global" else table.name
        rows[together] = rows.get(together, 0) + table.num_embeddings
    most = min(MAX_NUM_BLOCKS, max(rows.values(), default=MAX_NUM_BLOCKS))
    requirement = f"at most {most} blocks for the rows of these tables"
    check(num_blocks <= most, "num_blocks", requirement, num_blocks, "take fewer blocks")


class _FrequencyOrder:
    """Rows by falling frequency, ties in row order: as runs of rows of equal frequency, without
    sorting any rows."""

    def __init__(self, counts: Sequence[RowCounts]) -> None:
        values, sizes = torch.zeros(2, 0, dtype=torch.int64)
        for chunk in chain.from_iterable(map(count_chunks, counts)):
            more, sizes_of_more = torch.unique(chunk, return_counts=True)
            values, run = torch.unique(torch.cat([values, more]), return_inverse=True)
            both = torch.cat([sizes, sizes_of_more])
            sizes = torch.zeros_like(values).index_add_(0, run, both)
        self.frequencies, self._rising = values.flip(0), values
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.flip(0).cumsum(0)])
        self._next = self.starts[:-1].clone()

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return int(self.starts[-1])

    def take_places(self, counts: Tensor) -> Tensor:
        """The places of the next rows, which are asked for once, in their order; ``(n,)`` int64."""
        runs = self.frequencies.numel() - 1 - torch.searchsorted(self._rising, counts)
        ordered, order = torch.sort(runs, stable=True)
        nth_of_run = torch.arange(counts.numel()) - torch.searchsorted(ordered, ordered)
        places = torch.empty_like(runs)
        places[order] = self._next[ordered] + nth_of_run
        self._next += torch.bincount(runs, minlength=self._next.numel())
        return places


def _block_starts(
    order: _FrequencyOrder, strategy: str, num_blocks: int, boundaries: Sequence[int]
) -> Tensor:
    """The places at which blocks begin, rising from 0."""
    num_rows, frequencies, none = (
        order.num_rows,
        order.frequencies,
        torch.zeros(1, dtype=torch.int64),
    )
    if strategy == "equal_rows":
        starts = torch.arange(num_blocks) * num_rows // num_blocks
    elif strategy == "equal_mass":
        mass = (frequencies * order.starts.diff()).cumsum(0)
        shares = -(
            -torch.arange(1, num_blocks) * mass[-1] // num_blocks
        )  # rounded up, exact unlike floats
        run = torch.searchsorted(mass, shares)
        before = torch.cat([none, mass])[run]
        rows = -(-(shares - before) // frequencies[run].clamp(min=1))
        starts = torch.cat([none, order.starts[run] + rows.clamp(min=1)])
    elif strategy == "decades":
        rarest = max(1, int(frequencies[(frequencies > 0).sum() - 1]))
        decade = torch.log10(frequencies.clamp(min=rarest).double() * (1 + 1e-12)).floor()
        starts = torch.cat([none, order.starts[1:-1][decade.diff() != 0]])
    else:
        starts = torch.tensor([0, *boundaries])
        rising = bool((starts.diff() > 0).all()) and int(starts[-1]) < num_rows
        check(rising, "boundaries", f"rising positions in 1..{num_rows - 1}", list(boundaries))
    starts = torch.unique(starts[starts < num_rows])
    wanted = num_blocks if strategy in ("equal_rows", "equal_mass") else starts.numel()
    if starts.numel() < wanted:
        logger.warning(
            "blocking: %d blocks came out of %d wanted (too few rows)", starts.numel(), wanted
        )
    return starts


def _block_rows(
    counts: RowCounts, order: _FrequencyOrder, starts: Tensor
) -> tuple[RowRouting, Tensor, Tensor]:
    """Puts the rows of the next table into blocks; also returns each block's occurrences and number
    of seen rows."""
    num_rows, num_blocks = counts.numel(), starts.numel()
    block_of_row = torch.empty(num_rows, dtype=torch.uint8 if num_blocks < 256 else torch.uint16)
    rows, occurrences, seen_rows = torch.zeros(3, num_blocks, dtype=torch.int64)
    in_order, last = True, torch.zeros(2, 1, dtype=torch.int64)
    filled = 0
    for chunk in count_chunks(counts):
        block = torch.searchsorted(starts, order.take_places(chunk), right=True) - 1
        block_of_row[filled : filled + block.numel()] = block
        filled += block.numel()
        rows += torch.bincount(block, minlength=num_blocks)
        occurrences.index_add_(0, block, chunk)
        seen_rows.index_add_(0, block, (chunk > 0).long())
        rising = torch.cat([last, torch.stack([block, (chunk == 0).long()])], dim=1)
        in_order, last = in_order and bool((rising.diff() >= 0).all()), rising[:, -1:]
    if in_order:
        boundaries = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
        return RowRouting(num_rows, num_blocks, boundaries=boundaries), occurrences, seen_rows
    return RowRouting(num_rows, num_blocks, block_of_row=block_of_row), occurrences, seen_rows
