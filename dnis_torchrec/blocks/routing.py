"""Row routing: from a row id to the block that the row belongs to, and to its position in that
block."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dnis_torchrec.checks import check

MAX_NUM_BLOCKS = 65_535
MOST_ROWS = 1 << 40
"""Most rows of a table: times the bytes of a row, that still fits into an int64."""
ROWS_AT_A_TIME = 1 << 20
"""Rows that are handled at a time, which bounds temporary memory."""
Tally: TypeAlias = tuple[Tensor, Tensor]
"""Numbers that occur, rising, and how often each does; int64."""


def tally(numbers: Tensor) -> Tally:
    """Counts equal numbers; numpy sorts them in a tenth of torch's time."""
    values, sizes = np.unique(numbers.numpy(), return_counts=True)
    return torch.from_numpy(values).long(), torch.from_numpy(sizes)


def merge_tallies(tallies: Iterable[Tally]) -> Tally:
    """Adds up tallies, one after the other."""
    values, sizes = torch.zeros(2, 0, dtype=torch.int64)
    for more, sizes_of_more in tallies:
        values, index = torch.cat([values, more]).unique(return_inverse=True)
        both = torch.cat([sizes, sizes_of_more])
        sizes = torch.zeros_like(values).index_add_(0, index, both)
    return values, sizes


@dataclass(frozen=True, eq=False)
class RowRouting:
    """Map from each of N rows to its block, in the smaller of two forms."""

    num_embeddings: int
    num_blocks: int
    boundaries: Tensor | None = None
    block_of_row: Tensor | None = None

    def __post_init__(self) -> None:
        rows, count = self.num_embeddings, self.num_blocks
        check(0 < count <= MAX_NUM_BLOCKS, "RowRouting.num_blocks", f"1..{MAX_NUM_BLOCKS}", count)
        check(0 <= rows <= MOST_ROWS, "RowRouting.num_embeddings", f"0..{MOST_ROWS}", rows)
        is_one = (self.boundaries is None) != (self.block_of_row is None)
        value = "neither" if self.boundaries is None else "both"
        check(is_one, "RowRouting", "exactly one of boundaries and block_of_row", value)
        if self.boundaries is not None:
            place, cuts = "RowRouting.boundaries", self.boundaries
            fits = cuts.dtype == torch.int64 and cuts.shape == (count + 1,)
            actual = f"{cuts.dtype} {tuple(cuts.shape)}"
            requirement = f"{count + 1} rising row numbers from 0 to at most {rows}"
            check(fits, place, f"{requirement}, as int64", actual)
            rises = int(cuts[0]) == 0 and bool((cuts.diff() >= 0).all()) and int(cuts[-1]) <= rows
            check(rises, place, requirement, reprlib.repr(cuts.tolist()))
        elif self.block_of_row is not None:
            blocks = self.block_of_row
            fits = blocks.dtype in (torch.uint8, torch.uint16) and blocks.shape == (rows,)
            actual = f"{blocks.dtype} {tuple(blocks.shape)}"
            requirement = f"one block for each of {rows} rows, as uint8 or uint16"
            check(fits, "RowRouting.block_of_row", requirement, actual)

    @staticmethod
    def from_map(block_of_row: Tensor, num_blocks: int) -> RowRouting:
        """Builds a routing from one block number per row, stored as uint8 or uint16."""
        wide = block_of_row.long()
        within = wide.numel() == 0 or (int(wide.min()) >= 0 and int(wide.max()) <= num_blocks)
        check(within, "block_of_row", f"values in 0..{num_blocks}", "a value outside")
        narrow = wide.to(_map_dtype(num_blocks))
        return RowRouting(block_of_row.numel(), num_blocks, block_of_row=narrow)

    def block_of(self, ids: Tensor) -> Tensor:
        """Blocks of the given rows."""
        cuts = None if self.boundaries is None else self.boundaries[1:].contiguous()
        return _block_of(ids, cuts, self.block_of_row)

    def all_blocks(self) -> Tensor:
        """The block of every row, ``(N,)`` int64."""
        if self.block_of_row is not None:
            return self.block_of_row.long()
        sizes = enumerate(self.row_counts(include_unassigned=True).tolist())
        return torch.cat([torch.full((size,), block) for block, size in sizes])

    def blocks_of_all(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their blocks as int64) of all rows, `ROWS_AT_A_TIME` at a time."""
        for first in range(0, self.num_embeddings, ROWS_AT_A_TIME):
            rows = slice(first, min(first + ROWS_AT_A_TIME, self.num_embeddings))
            yield rows, self.block_of(torch.arange(rows.start, rows.stop))

    @cached_property
    def largest_block(self) -> int:
        """The largest number among the rows' blocks, at most S unless a file is damaged."""
        is_mapped = self.block_of_row is not None and self.num_embeddings > 0
        return int(self._rows_per_number.nonzero()[-1]) if is_mapped else 0

    def row_counts(self, *, include_unassigned: bool = False) -> Tensor:
        """Rows per block."""
        return self._row_counts if include_unassigned else self._row_counts[: self.num_blocks]

    @cached_property
    def _block_sets(self) -> Tally:
        """Which blocks occur within a group of rows, one bit a block: every set that occurs, and
        how many groups have it. Walks all rows, once."""
        return merge_tallies(self._block_sets_of_chunks())

    def _block_sets_of_chunks(self) -> Iterator[Tally]:
        for _, blocks in self.blocks_of_all():
            bits = pad(1 << blocks, (0, -len(blocks) % ROWS_PER_GROUP)).view(-1, ROWS_PER_GROUP)
            while bits.shape[1] > 1:
                first, second = bits.chunk(2, dim=1)
                bits = first | second
            yield tally(bits.flatten())

    def num_groups(self, is_stored: Tensor) -> int:
        """Groups of eight rows that have one of some blocks, ``(S,)``; S is 62 at most."""
        sets, sizes = self._block_sets
        mask = int((is_stored.long() << torch.arange(self.num_blocks)).sum())
        return int(sizes[sets & mask != 0].sum())

    @cached_property
    def _row_counts(self) -> Tensor:
        """``(S + 1,)``."""
        if self.boundaries is not None:
            return torch.cat([self.boundaries, torch.tensor([self.num_embeddings])]).diff()
        return self._rows_per_number[: self.num_blocks + 1]

    @cached_property
    def _rows_per_number(self) -> Tensor:
        """How many rows of a map have each number, at least S + 1: walks all rows, but once."""
        blocks = self.block_of_row
        assert blocks is not None  # its callers have a map
        counts = torch.zeros(self.num_blocks + 1, dtype=torch.int64)
        for part in blocks.split(ROWS_AT_A_TIME):
            # bytes as they are, .6 ns a row: a load waits for it. Of uint16 torch counts nothing
            numbers = part if part.dtype == torch.uint8 else part.long()
            more = torch.bincount(numbers, minlength=len(counts))
            counts = pad(counts, (0, len(more) - len(counts))) + more
        return counts

    def positions(self) -> Tensor | None:
        """Returns each row's position once rows are ordered by block: the id remap of the
        mixed-dimension form."""
        if self.block_of_row is None:
            return None
        count, remedy = self.num_embeddings, "sort the rows by frequency: then no remap is needed"
        check(count < 2**31, "id remap", "fewer than 2^31 rows", count, remedy)
        order = torch.argsort(self.block_of_row.long(), stable=True)
        positions = torch.empty(count, dtype=torch.int32)
        positions[order] = torch.arange(count, dtype=torch.int32)
        return positions

    def without_rows(self, is_dropped: Tensor) -> RowRouting:
        """The same routing with some rows moved to "no block"."""
        if not bool(is_dropped.any()):
            return self
        if self.boundaries is not None:
            first = int(is_dropped.nonzero()[0])
            if bool(is_dropped[first:].all()):
                return replace(self, boundaries=self.boundaries.clamp(max=first))
        return self._mapped(
            lambda rows, blocks: blocks.masked_fill(is_dropped[rows], self.num_blocks)
        )

    def _mapped(self, move: Callable[[slice, Tensor], Tensor]) -> RowRouting:
        """The same rows with a map of blocks, which a function gives of some rows and blocks."""
        block_of_row = torch.empty(self.num_embeddings, dtype=_map_dtype(self.num_blocks))
        for rows, blocks in self.blocks_of_all():
            block_of_row[rows] = move(rows, blocks)
        return replace(self, boundaries=None, block_of_row=block_of_row)

    def with_rows_in(self, is_home: Tensor) -> RowRouting:
        """The same routing with all rows in these blocks, ``(S,)``: those of none and of others are
        in the last of them."""
        last = int(is_home.nonzero()[-1])
        targets = torch.where(pad(is_home, (0, 1)), torch.arange(self.num_blocks + 1), last)
        if self.boundaries is not None and bool((targets.diff() >= 0).all()):
            sizes = torch.zeros_like(targets).index_add(0, targets, self._row_counts)
            ends = torch.cat([self.boundaries[:1], sizes[:-1].cumsum(0)])
            return RowRouting(self.num_embeddings, self.num_blocks, boundaries=ends)
        return self._mapped(lambda rows, blocks: targets[blocks])

    def between(self, first: int, last: int) -> RowRouting:
        """The routing of rows ``first <= i < last``, as if they were a table; a view."""
        if (first, last) == (0, self.num_embeddings):
            return self
        cuts, blocks = self.boundaries, self.block_of_row
        return RowRouting(
            last - first,
            self.num_blocks,
            boundaries=None if cuts is None else cuts.clamp(first, last) - first,
            block_of_row=None if blocks is None else blocks[first:last],
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors that say everything, for a safetensors file; `from_tensors` reads them
        back."""
        either = {"boundaries": self.boundaries, "block_of_row": self.block_of_row}
        return {name: tensor for name, tensor in either.items() if tensor is not None}

    @staticmethod
    def from_tensors(
        num_embeddings: int, num_blocks: int, tensors: dict[str, Tensor]
    ) -> RowRouting:
        """Rebuilds a routing from `to_tensors`."""
        either = {name: tensors.get(name) for name in ("boundaries", "block_of_row")}
        return RowRouting(num_embeddings, num_blocks, **either)


class RowRouter(nn.Module):
    """A RowRouting inside a model: its tensors move with the model's device and stay out of its
    state_dict."""

    cuts: Tensor | None
    block_of_row: Tensor | None

    def __init__(self, routing: RowRouting) -> None:
        super().__init__()
        cuts = None if routing.boundaries is None else routing.boundaries[1:].contiguous()
        self.register_buffer("cuts", cuts, persistent=False)
        self.register_buffer("block_of_row", routing.block_of_row, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Blocks of the given rows, as `RowRouting.block_of`."""
        return _block_of(ids, self.cuts, self.block_of_row)

    def routing_tensor(self) -> Tensor:
        """All of it in one tensor: ends of the blocks (int64), or the block of every row (uint8,
        uint16)."""
        if self.cuts is not None:
            return self.cuts
        assert self.block_of_row is not None  # RowRouting has one of the two
        return self.block_of_row


def _map_dtype(num_blocks: int) -> torch.dtype:
    return torch.uint8 if num_blocks < 256 else torch.uint16


def _block_of(ids: Tensor, cuts: Tensor | None, block_of_row: Tensor | None) -> Tensor:
    if cuts is not None:
        return torch.bucketize(ids, cuts, right=True)
    assert block_of_row is not None  # RowRouting has one of the two
    if block_of_row.dtype == torch.uint16:  # torch gathers uint16 only through its signed twin
        return block_of_row.view(torch.int16)[ids].long() & 0xFFFF
    if ids.dim() == 1:  # index_select costs a tenth of indexing here
        return block_of_row.index_select(0, ids).long()
    return block_of_row[ids].long()


def map_bytes(num_embeddings: int) -> int:
    """Bytes of the map that finds a table's rows where they are not sorted: 4 per row, and 4 for
    unknown ids."""
    return 4 * (num_embeddings + 1)


def routing_bytes(routing: RowRouting) -> int:
    """Bytes that find the block of a row: 8 per boundary, and a map where rows are not sorted by
    block."""
    is_sorted = routing.boundaries is not None
    return 8 * (routing.num_blocks + 1) + (0 if is_sorted else map_bytes(routing.num_embeddings))


MOST_BLOCKS = 255
"""S of a rank directory."""
ROWS_PER_START = 1 << 16
"""So many rows a uint16 counts."""
BYTES_OF_START, COUNT_BYTES = 8, 2

_BITS_OF_BYTE = torch.tensor([value.bit_count() for value in range(256)], dtype=torch.uint8)


@dataclass(frozen=True)
class RecordLayout:
    """Layout of the records of a rank directory."""

    num_blocks: int

    @property
    def num_planes(self) -> int:
        """P."""
        return (self.num_blocks - 1).bit_length()

    @property
    def rows_per_record(self) -> int:
        """R, a multiple of 64 that divides `ROWS_PER_START`."""
        return min(max(128, 16 << self.num_planes), 1024)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return COUNT_BYTES * self.num_blocks + self.num_planes * self.rows_per_record // 8

    def start_bytes(self, num_rows: int) -> int:
        """Bytes ahead of the records."""
        return BYTES_OF_START * self.num_blocks * -(-num_rows // ROWS_PER_START)

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of a directory."""
        return self.start_bytes(num_rows) + self.record_bytes * -(-num_rows // self.rows_per_record)


ROWS_PER_GROUP, GROUPS_PER_RECORD, RECORD_INTS = 8, 128, 6
"""Of a sparse directory: rows of a byte, bytes that a record tells of, and its int32."""
MOST_BLOCKS_OF_SETS = 62
IDS_AT_A_TIME = 1 << 14
"""Ids that torch's own operators find at a time in a sparse directory: some KB each."""


@dataclass(frozen=True)
class SparseLayout:
    """Layout of a sparse directory, in int32: M and G, a record of every 1,024 rows, a byte of each
    of G groups of eight rows that have a stored one, and a rank directory of the M stored rows.

    A record says how many stored rows and groups stand before it, and which of its groups have any.
    """

    num_rows: int
    num_stored: int
    num_groups: int
    num_blocks: int

    @property
    def num_records(self) -> int:
        """Records of all rows."""
        return -(-self.num_rows // (ROWS_PER_GROUP * GROUPS_PER_RECORD))

    @property
    def first_group(self) -> int:
        """The first byte of the groups, from that of the directory."""
        return 4 * (2 + RECORD_INTS * self.num_records)

    @property
    def first_rank(self) -> int:
        """The first byte of the rank directory, so far that eight groups are read at a time."""
        return self.first_group + 8 * (1 + -(-self.num_groups // 8))

    @property
    def num_bytes(self) -> int:
        """Bytes of a directory."""
        ranks = RecordLayout(self.num_blocks).num_bytes(self.num_stored)
        return self.first_rank + (4 * -(-ranks // 4) if self.num_blocks > 1 else 0)


def directory_bytes(routing: RowRouting, is_stored: Tensor) -> int:
    """Returns the bytes of a directory, which says where every row of the blocks stands whose rows
    take bytes, ``(S,)``."""
    return _layout_of(routing, is_stored)[1]


def _blocks_of(routing: RowRouting, is_stored: Tensor) -> tuple[int, ...]:
    """The blocks that a directory names, the last of them for rows that are not stored."""
    rows = routing.row_counts() * is_stored
    numbers, num_stored = rows.nonzero().flatten().tolist(), int(rows.sum())
    is_whole = num_stored == routing.num_embeddings and bool(numbers)
    return tuple(numbers) if is_whole else (*numbers, routing.num_blocks)


def _layout_of(
    routing: RowRouting, is_stored: Tensor
) -> tuple[tuple[int, ...], int, SparseLayout | None]:
    """The blocks that a directory names, its bytes, and its layout where a sparse one is the
    smallest."""
    rows, num_rows = routing.row_counts() * is_stored, routing.num_embeddings
    blocks, num_stored = _blocks_of(routing, is_stored), int(rows.sum())
    if len(blocks) == 1:
        return blocks, 0, None
    if routing.boundaries is not None:
        return blocks, routing.boundaries.nbytes, None
    _check_count(routing.num_blocks)
    num_bytes = RecordLayout(len(blocks)).num_bytes(num_rows)
    if blocks[-1] == routing.num_blocks <= MOST_BLOCKS_OF_SETS and num_stored < 2**31:
        num_groups = routing.num_groups(rows > 0)
        sparse = SparseLayout(num_rows, num_stored, num_groups, len(blocks) - 1)
        if sparse.num_bytes < num_bytes:
            return blocks, sparse.num_bytes, sparse
    return blocks, num_bytes, None


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDirectory:
    """Directory that finds the block of every row of a table, and its place there: boundaries
    (int64), ranks (uint8) or a sparse one (int32)."""

    num_embeddings: int
    num_blocks: int
    blocks: tuple[int, ...]
    directory: Tensor

    def __post_init__(self) -> None:
        place, numbers, count = "RowDirectory", list(self.blocks), len(self.blocks)
        rises = count > 0 and numbers == sorted(set(numbers))
        rises = rises and numbers[0] >= 0 and numbers[-1] <= self.num_blocks
        check(rises, f"{place}.blocks", f"rising numbers in 0..{self.num_blocks}", numbers)
        value = f"{self.directory.dtype} {tuple(self.directory.shape)}"
        if self.is_sorted:
            size = self.num_blocks + 1
            check(tuple(self.directory.shape) == (size,), place, f"{size} boundaries", value)
            return
        if count > 1:
            _check_count(self.num_blocks)
        if self.is_sparse:
            has_head = self.directory.numel() > 1 and count > 1
            # counts below 0 would cancel out of the size, and let groups be read behind the end
            has_head = has_head and bool((self.directory[:2] >= 0).all())
            size = self._sparse_layout.num_bytes if has_head else -1
            requirement = f"{size} bytes for {self.num_embeddings} rows of {count} blocks"
            check(self.directory.nbytes == size, place, requirement, value)
            return
        size = RecordLayout(count).num_bytes(self.num_embeddings) if count > 1 else 0
        fits = self.directory.dtype == torch.uint8 and tuple(self.directory.shape) == (size,)
        check(fits, place, f"{size} bytes for {self.num_embeddings} rows of {count} blocks", value)

    @property
    def is_sorted(self) -> bool:
        """Whether `directory` holds boundaries."""
        return self.directory.dtype == torch.int64

    @property
    def is_sparse(self) -> bool:
        """Whether `directory` holds stored rows alone."""
        return self.directory.dtype == torch.int32

    @property
    def _sparse_layout(self) -> SparseLayout:
        num_stored, num_groups = self.directory[:2].tolist()
        return SparseLayout(self.num_embeddings, num_stored, num_groups, len(self.blocks) - 1)

    @classmethod
    def of(
        cls, routing: RowRouting, is_stored: Tensor, directory: Tensor | None = None
    ) -> RowDirectory:
        """Builds the directory of the rows of some blocks, ``(S,)``, a chunk of rows at a time, or
        takes the one that was built before."""
        if directory is not None:  # the layout of a sparse one walks all rows
            blocks = _blocks_of(routing, is_stored)
        else:
            blocks, num_bytes, sparse = _layout_of(routing, is_stored)
            if num_bytes == 0:
                directory = torch.empty(0, dtype=torch.uint8)
            elif routing.boundaries is not None:
                directory = routing.boundaries
            elif sparse is not None:
                directory = _sparse_directory(routing, blocks, sparse)
            else:
                directory = _rank_directory(routing, blocks)
        sizes = {"num_embeddings": routing.num_embeddings, "num_blocks": routing.num_blocks}
        return cls(**sizes, blocks=blocks, directory=directory)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks and positions of rows, with torch's own operators; memory about a record for each
        id. The position of a row that is not stored says nothing."""
        ids = ids.long()
        if len(self.blocks) == 1:
            return torch.full_like(ids, self.blocks[0]), ids
        if self.is_sorted:
            block = torch.bucketize(ids, self.directory[1:].contiguous(), right=True)
            return block, ids - self.directory[block]
        if self.is_sparse:
            parts = [self._locate_stored(part) for part in ids.split(IDS_AT_A_TIME)]
            place, position = (torch.cat(part) for part in zip(*parts, strict=True))
        else:
            layout = RecordLayout(len(self.blocks))
            place, position = _locate_by_rank(self.directory, self.num_embeddings, layout, ids)
        return torch.tensor(self.blocks, device=ids.device)[place], position

    def _locate_stored(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a sparse directory: the last place is that of rows that are not stored."""
        layout, data = self._sparse_layout, self.directory.view(torch.uint8)
        groups, ranks = data[layout.first_group : layout.first_rank], data[layout.first_rank :]
        records = data[8 : layout.first_group].view(-1, 4 * RECORD_INTS)
        records = records[ids // (ROWS_PER_GROUP * GROUPS_PER_RECORD)]
        rows_before, groups_before = records[:, :8].clone().view(torch.int32).long().unbind(1)
        group, row = ids // ROWS_PER_GROUP % GROUPS_PER_RECORD, ids % ROWS_PER_GROUP
        bits = records[:, 8:, None] >> torch.arange(8, dtype=torch.uint8, device=ids.device) & 1
        bits = bits.flatten(1)
        is_there = bits.gather(1, group[:, None])[:, 0] > 0
        is_ahead = torch.arange(GROUPS_PER_RECORD, device=ids.device) < group[:, None]
        bits &= is_ahead
        number = groups_before[:, None] + bits.cumsum(1) - bits  # of each group with a bit
        last = max(layout.num_groups - 1, 0)  # a damaged directory may say more
        bits_of_byte = _BITS_OF_BYTE.to(ids.device)
        rows_ahead = bits_of_byte[groups[number.clamp(0, last)].long()] * bits
        byte = groups[(groups_before + bits.sum(1)).clamp(0, last)].long()
        is_there &= (byte >> row & 1) > 0
        position = rows_before + rows_ahead.sum(1) + bits_of_byte[byte & (1 << row) - 1]
        position = position.clamp(0, max(layout.num_stored - 1, 0))
        place = torch.zeros_like(ids)
        if layout.num_blocks > 1:
            of_blocks = RecordLayout(layout.num_blocks)
            place, position = _locate_by_rank(ranks, layout.num_stored, of_blocks, position)
        return torch.where(is_there, place, layout.num_blocks), position


def _locate_by_rank(
    directory: Tensor, num_rows: int, layout: RecordLayout, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Which of the blocks of a rank directory rows have, and where they stand in it."""
    first = layout.start_bytes(num_rows)
    starts = directory[:first].clone().view(torch.int64).view(-1, layout.num_blocks)
    num_records = -(-num_rows // layout.rows_per_record)
    records = directory[first : first + layout.record_bytes * num_records]
    records = records.view(-1, layout.record_bytes)[ids // layout.rows_per_record]
    counts, planes = records.tensor_split([COUNT_BYTES * layout.num_blocks], dim=1)
    planes = planes.reshape(len(ids), layout.num_planes, layout.rows_per_record // 8)
    row = ids % layout.rows_per_record
    byte = planes.gather(2, (row // 8).view(-1, 1, 1).expand(-1, layout.num_planes, 1)).squeeze(2)
    bits = byte >> (row % 8).unsqueeze(1).to(torch.uint8) & 1
    place = (bits.long() << torch.arange(layout.num_planes, device=ids.device)).sum(1)
    place = place.clamp(max=layout.num_blocks - 1)  # a damaged directory may say more
    same = planes.new_full((len(ids), layout.rows_per_record // 8), 255)
    for plane in (planes ^ (bits - 1).unsqueeze(2)).unbind(1):
        same &= plane
    byte_numbers = torch.arange(layout.rows_per_record // 8, device=ids.device)
    bytes_before = byte_numbers - (row // 8).unsqueeze(1)
    last = ((1 << row % 8) - 1).unsqueeze(1)
    is_before = torch.where(bytes_before < 0, 255, torch.where(bytes_before == 0, last, 0))
    same &= is_before.to(torch.uint8)
    rank = _BITS_OF_BYTE.to(ids.device)[same.long()].sum(1, dtype=torch.int64)
    at = (COUNT_BYTES * place).unsqueeze(1) + torch.arange(COUNT_BYTES, device=ids.device)
    low, high = counts.gather(1, at).long().unbind(1)
    return place, starts[ids // ROWS_PER_START, place] + low + (high << 8) + rank


def _check_count(num_blocks: int) -> None:
    limit, remedy = f"at most {MOST_BLOCKS} blocks", "form fewer blocks, or sort the rows by block"
    check(num_blocks <= MOST_BLOCKS, "row directory", limit, num_blocks, remedy)


def _rank_directory(routing: RowRouting, blocks: tuple[int, ...]) -> Tensor:
    layout, num_rows = RecordLayout(len(blocks)), routing.num_embeddings
    directory = torch.empty(layout.num_bytes(num_rows), dtype=torch.uint8)
    first = layout.start_bytes(num_rows)
    starts = directory[:first].view(torch.int64).view(-1, layout.num_blocks)
    records = directory[first:].view(-1, layout.record_bytes)
    place_of_block = _places_of(routing, blocks)
    rows_before = torch.zeros(layout.num_blocks, dtype=torch.int64)
    for rows, of_rows in routing.blocks_of_all():  # chunks begin at multiples of ROWS_PER_START
        places = place_of_block[of_rows]
        counts = _counts_of_records(places, layout).cumsum(0)
        begin = rows.start // layout.rows_per_record
        per_start = ROWS_PER_START // layout.rows_per_record
        counts_before = pad(counts[:-1], (0, 0, 1, 0))
        of_start = counts_before[::per_start]
        starts[rows.start // ROWS_PER_START :][: len(of_start)] = rows_before + of_start
        since = counts_before - of_start.repeat_interleave(per_start, dim=0)[: len(counts_before)]
        two_bytes = torch.stack([since & 0xFF, since >> 8], dim=2).to(torch.uint8).flatten(1)
        of_chunk = torch.cat([two_bytes, _planes_of_records(places, layout)], dim=1)
        records[begin : begin + len(counts)] = of_chunk
        rows_before += counts[-1]
    return directory


def _places_of(routing: RowRouting, blocks: tuple[int, ...]) -> Tensor:
    """The place of each block, ``(S + 1,)``; the last one for those that are not named."""
    places = torch.full((routing.num_blocks + 1,), len(blocks) - 1)
    places[torch.tensor(blocks)] = torch.arange(len(blocks))
    return places


def _sparse_directory(routing: RowRouting, blocks: tuple[int, ...], layout: SparseLayout) -> Tensor:
    directory = torch.zeros(layout.num_bytes // 4, dtype=torch.int32)
    directory[:2] = torch.tensor([layout.num_stored, layout.num_groups])
    data, places = directory.view(torch.uint8), _places_of(routing, blocks)
    records = directory[2 : layout.first_group // 4].view(-1, RECORD_INTS)
    groups = data[layout.first_group : layout.first_rank]
    of_stored = torch.empty(layout.num_stored, dtype=torch.uint8)
    per_record = ROWS_PER_GROUP * GROUPS_PER_RECORD
    num_rows = num_groups = 0
    for rows, of_rows in routing.blocks_of_all():  # chunks begin at multiples of a record
        here = places[of_rows].to(torch.uint8)
        is_stored = pad(here < layout.num_blocks, (0, -len(here) % per_record))
        hot = here[here < layout.num_blocks]
        of_stored[num_rows : num_rows + len(hot)] = hot
        bytes_of_groups = _bytes_of(is_stored)
        has_rows = bytes_of_groups > 0
        full = bytes_of_groups[has_rows]
        groups[num_groups : num_groups + len(full)] = full
        counts = torch.stack([is_stored.view(-1, per_record).sum(1), has_rows.view(-1, 128).sum(1)])
        first = counts.cumsum(1) - counts + torch.tensor([[num_rows], [num_groups]])
        of_chunk = records[rows.start // per_record :][: counts.shape[1]]
        of_chunk[:, :2] = first.T
        of_chunk[:, 2:] = _bytes_of(has_rows).view(torch.int32).view(-1, RECORD_INTS - 2)
        num_rows, num_groups = num_rows + len(hot), num_groups + len(full)
    if layout.num_blocks > 1:
        routing_of_stored = RowRouting(layout.num_stored, layout.num_blocks, block_of_row=of_stored)
        ranks = _rank_directory(routing_of_stored, tuple(range(layout.num_blocks)))
        data[layout.first_rank : layout.first_rank + len(ranks)] = ranks
    return directory


def _bytes_of(bits: Tensor) -> Tensor:
    """Bytes of eight bits each, the lowest first."""
    eights = bits.view(-1, 8).to(torch.uint8)
    return (eights << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _counts_of_records(places: Tensor, layout: RecordLayout) -> Tensor:
    """Rows of each block in each record: ``(records, K)``."""
    record = torch.arange(len(places)) // layout.rows_per_record
    size = (int(record[-1]) + 1) * layout.num_blocks
    counts = torch.bincount(record * layout.num_blocks + places, minlength=size)
    return counts.view(-1, layout.num_blocks)


def _planes_of_records(places: Tensor, layout: RecordLayout) -> Tensor:
    """Bit planes of each record: ``(records, P R / 8)`` uint8."""
    numbers = pad(places.to(torch.uint8), (0, -len(places) % layout.rows_per_record))
    eights = numbers.view(-1, 1, layout.rows_per_record // 8, 8)
    bits = eights >> torch.arange(layout.num_planes, dtype=torch.uint8).view(-1, 1, 1) & 1
    return _bytes_of(bits).view(len(eights), -1)
