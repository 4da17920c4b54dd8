"""Row routing: from a row id to the block that the row belongs to, and to its position in that
block."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dnis_torchrec.checks import check

MAX_NUM_BLOCKS = 65_535
MOST_ROWS = 1 << 40
"""Most rows of a table: times the bytes of a row, that still fits into an int64."""
ROWS_AT_A_TIME = 1 << 20
"""Rows that are handled at a time, which bounds temporary memory."""


@dataclass(frozen=True, eq=False)
class RowRouting:
    """Map from each of N rows to its block, in the smaller of two forms."""

    num_embeddings: int
    num_blocks: int
    boundaries: Tensor | None = None
    block_of_row: Tensor | None = None

    def __post_init__(self) -> None:
        check(
            0 < self.num_blocks <= MAX_NUM_BLOCKS,
            "RowRouting.num_blocks",
            f"1..{MAX_NUM_BLOCKS}",
            self.num_blocks,
        )
        rows = self.num_embeddings
        check(0 <= rows <= MOST_ROWS, "RowRouting.num_embeddings", f"0..{MOST_ROWS}", rows)
        check(
            (self.boundaries is None) != (self.block_of_row is None),
            "RowRouting",
            "exactly one of boundaries and block_of_row",
            "both" if self.boundaries is not None else "neither",
        )
        if self.boundaries is not None:
            place, cuts = "RowRouting.boundaries", self.boundaries
            fits = cuts.dtype == torch.int64 and cuts.shape == (self.num_blocks + 1,)
            actual = f"{cuts.dtype} {tuple(cuts.shape)}"
            requirement = f"{self.num_blocks + 1} rising row numbers from 0 to at most {rows}"
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
        return RowRouting(
            block_of_row.numel(), num_blocks, block_of_row=wide.to(_map_dtype(num_blocks))
        )

    def block_of(self, ids: Tensor) -> Tensor:
        """Blocks of the given rows."""
        cuts = None if self.boundaries is None else self.boundaries[1:].contiguous()
        return _block_of(ids, cuts, self.block_of_row)

    def all_blocks(self) -> Tensor:
        """The block of every row, ``(N,)`` int64."""
        if self.block_of_row is not None:
            return self.block_of_row.long()
        sizes = self.row_counts(include_unassigned=True)
        return torch.repeat_interleave(torch.arange(self.num_blocks + 1), sizes)

    def blocks_of_all(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their blocks as int64) of all rows, `ROWS_AT_A_TIME` at a time."""
        for first in range(0, self.num_embeddings, ROWS_AT_A_TIME):
            rows = slice(first, min(first + ROWS_AT_A_TIME, self.num_embeddings))
            yield rows, self.block_of(torch.arange(rows.start, rows.stop))

    @cached_property
    def largest_block(self) -> int:
        """The largest number among the rows' blocks, at most S unless a file is damaged: walks all
        rows, but once."""
        if self.block_of_row is None or not self.num_embeddings:
            return 0
        return max(int(blocks.max()) for _, blocks in self.blocks_of_all())

    def row_counts(self, *, include_unassigned: bool = False) -> Tensor:
        """Rows per block."""
        return self._row_counts if include_unassigned else self._row_counts[: self.num_blocks]

    @cached_property
    def _row_counts(self) -> Tensor:
        """``(S + 1,)``: walks all rows, but once."""
        if self.boundaries is not None:
            return torch.cat([self.boundaries, torch.tensor([self.num_embeddings])]).diff()
        counts = torch.zeros(self.num_blocks + 1, dtype=torch.int64)
        for _, blocks in self.blocks_of_all():
            counts += torch.bincount(blocks, minlength=self.num_blocks + 1)
        return counts

    def positions(self) -> Tensor | None:
        """Returns each row's position once rows are ordered by block: the id remap of the
        mixed-dimension form."""
        if self.block_of_row is None:
            return None
        remedy = "sort the rows by frequency: then no remap is needed"
        check(
            self.num_embeddings < 2**31,
            "id remap",
            "fewer than 2^31 rows",
            self.num_embeddings,
            remedy,
        )
        order = torch.argsort(self.block_of_row.long(), stable=True)
        positions = torch.empty(self.num_embeddings, dtype=torch.int32)
        positions[order] = torch.arange(self.num_embeddings, dtype=torch.int32)
        return positions

    def without_rows(self, is_dropped: Tensor) -> RowRouting:
        """The same routing with some rows moved to "no block"."""
        if not bool(is_dropped.any()):
            return self
        if self.boundaries is not None:
            first = int(is_dropped.nonzero()[0])
            if bool(is_dropped[first:].all()):
                return RowRouting(
                    self.num_embeddings,
                    self.num_blocks,
                    boundaries=self.boundaries.clamp(max=first),
                )
        block_of_row = torch.empty(self.num_embeddings, dtype=_map_dtype(self.num_blocks))
        for rows, blocks in self.blocks_of_all():
            block_of_row[rows] = blocks.masked_fill(is_dropped[rows], self.num_blocks)
        return RowRouting(self.num_embeddings, self.num_blocks, block_of_row=block_of_row)

    def with_unassigned_in(self, block: int) -> RowRouting:
        """The same routing with the rows of "no block" moved to one."""
        if self.boundaries is not None and block == self.num_blocks - 1:
            ends = torch.tensor([self.num_embeddings])
            return RowRouting(
                self.num_embeddings,
                self.num_blocks,
                boundaries=torch.cat([self.boundaries[:-1], ends]),
            )
        block_of_row = torch.empty(self.num_embeddings, dtype=_map_dtype(self.num_blocks))
        for rows, blocks in self.blocks_of_all():
            block_of_row[rows] = blocks.masked_fill(blocks == self.num_blocks, block)
        return RowRouting(self.num_embeddings, self.num_blocks, block_of_row=block_of_row)

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
        return RowRouting(
            num_embeddings,
            num_blocks,
            boundaries=tensors.get("boundaries"),
            block_of_row=tensors.get("block_of_row"),
        )


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


def directory_bytes(routing: RowRouting, rows_of_blocks: Tensor | None = None) -> int:
    """Returns the bytes of a directory, which says where every row stands."""
    blocks = len(_blocks_with_rows(routing))
    if rows_of_blocks is not None:
        blocks = int((rows_of_blocks > 0).sum()) + int(
            int(rows_of_blocks.sum()) < routing.num_embeddings
        )
    if blocks == 1:
        return 0
    if routing.boundaries is not None:
        return routing.boundaries.nbytes
    return RecordLayout(blocks).num_bytes(routing.num_embeddings)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDirectory:
    """Directory that finds the block of every row of a table, and its place there; see the
    module."""

    num_embeddings: int
    num_blocks: int
    blocks: tuple[int, ...]
    directory: Tensor

    def __post_init__(self) -> None:
        place, numbers, count = "RowDirectory", list(self.blocks), len(self.blocks)
        rises = (
            numbers == sorted(set(numbers))
            and count > 0
            and numbers[0] >= 0
            and numbers[-1] <= self.num_blocks
        )
        check(rises, f"{place}.blocks", f"rising numbers in 0..{self.num_blocks}", numbers)
        value = f"{self.directory.dtype} {tuple(self.directory.shape)}"
        if self.is_sorted:
            size = self.num_blocks + 1
            check(tuple(self.directory.shape) == (size,), place, f"{size} boundaries", value)
            return
        if count > 1:
            _check_count(self.num_blocks)
        size = RecordLayout(count).num_bytes(self.num_embeddings) if count > 1 else 0
        fits = self.directory.dtype == torch.uint8 and tuple(self.directory.shape) == (size,)
        check(fits, place, f"{size} bytes for {self.num_embeddings} rows of {count} blocks", value)

    @property
    def is_sorted(self) -> bool:
        """Whether `directory` holds boundaries."""
        return self.directory.dtype == torch.int64

    @classmethod
    def of(cls, routing: RowRouting) -> RowDirectory:
        """Builds the directory, a chunk of rows at a time."""
        blocks = _blocks_with_rows(routing)
        if len(blocks) == 1:
            directory = torch.empty(0, dtype=torch.uint8)
        elif routing.boundaries is not None:
            directory = routing.boundaries
        else:
            directory = _rank_directory(routing, blocks)
        return cls(
            num_embeddings=routing.num_embeddings,
            num_blocks=routing.num_blocks,
            blocks=blocks,
            directory=directory,
        )

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks and positions of rows, with torch's own operators; memory about a record for each
        id."""
        ids = ids.long()
        if len(self.blocks) == 1:
            return torch.full_like(ids, self.blocks[0]), ids
        if self.is_sorted:
            block = torch.bucketize(ids, self.directory[1:].contiguous(), right=True)
            return block, ids - self.directory[block]
        layout = RecordLayout(len(self.blocks))
        first = layout.start_bytes(self.num_embeddings)
        starts = self.directory[:first].clone().view(torch.int64).view(-1, layout.num_blocks)
        records = self.directory[first:].view(-1, layout.record_bytes)[
            ids // layout.rows_per_record
        ]
        counts, planes = records.tensor_split([COUNT_BYTES * layout.num_blocks], dim=1)
        planes = planes.reshape(len(ids), layout.num_planes, layout.rows_per_record // 8)
        row = ids % layout.rows_per_record
        byte = planes.gather(2, (row // 8).view(-1, 1, 1).expand(-1, layout.num_planes, 1)).squeeze(
            2
        )
        bits = byte >> (row % 8).unsqueeze(1).to(torch.uint8) & 1
        place = (bits.long() << torch.arange(layout.num_planes, device=ids.device)).sum(1)
        place = place.clamp(max=layout.num_blocks - 1)  # a damaged directory may say more
        same = _all_of(planes ^ (bits - 1).unsqueeze(2))
        bytes_before = torch.arange(layout.rows_per_record // 8, device=ids.device) - (
            row // 8
        ).unsqueeze(1)
        last = ((1 << row % 8) - 1).unsqueeze(1)
        same &= torch.where(bytes_before < 0, 255, torch.where(bytes_before == 0, last, 0)).to(
            torch.uint8
        )
        rank = _BITS_OF_BYTE.to(ids.device)[same.long()].sum(1, dtype=torch.int64)
        at = (COUNT_BYTES * place).unsqueeze(1) + torch.arange(COUNT_BYTES, device=ids.device)
        low, high = counts.gather(1, at).long().unbind(1)
        count = low + (high << 8)
        block = torch.tensor(self.blocks, device=ids.device)[place]
        return block, starts[ids // ROWS_PER_START, place] + count + rank


def _blocks_with_rows(routing: RowRouting) -> tuple[int, ...]:
    if routing.boundaries is None:
        _check_count(routing.num_blocks)
    return tuple(routing.row_counts(include_unassigned=True).nonzero().flatten().tolist())


def _check_count(num_blocks: int) -> None:
    remedy = "form fewer blocks, or sort the rows by block"
    check(
        num_blocks <= MOST_BLOCKS,
        "row directory",
        f"at most {MOST_BLOCKS} blocks",
        num_blocks,
        remedy,
    )


def _all_of(planes: Tensor) -> Tensor:
    """Bits that are set in all planes: ``(I, P, bytes)`` -> ``(I, bytes)``."""
    first, *rest = planes.unbind(1)
    for plane in rest:
        first = first & plane
    return first


def _rank_directory(routing: RowRouting, blocks: tuple[int, ...]) -> Tensor:
    layout, num_rows = RecordLayout(len(blocks)), routing.num_embeddings
    directory = torch.empty(layout.num_bytes(num_rows), dtype=torch.uint8)
    first = layout.start_bytes(num_rows)
    starts = directory[:first].view(torch.int64).view(-1, layout.num_blocks)
    records = directory[first:].view(-1, layout.record_bytes)
    place_of_block = torch.zeros(routing.num_blocks + 1, dtype=torch.int64)
    place_of_block[torch.tensor(blocks)] = torch.arange(layout.num_blocks)
    rows_before = torch.zeros(layout.num_blocks, dtype=torch.int64)
    for rows, of_rows in routing.blocks_of_all():  # chunks begin at multiples of ROWS_PER_START
        places = place_of_block[of_rows]
        counts = _counts_of_records(places, layout).cumsum(0)
        begin, per_start = (
            rows.start // layout.rows_per_record,
            ROWS_PER_START // layout.rows_per_record,
        )
        counts_before = torch.cat(
            [torch.zeros(1, layout.num_blocks, dtype=torch.int64), counts[:-1]]
        )
        of_start = counts_before[::per_start]
        starts[rows.start // ROWS_PER_START :][: len(of_start)] = rows_before + of_start
        since = counts_before - of_start.repeat_interleave(per_start, dim=0)[: len(counts_before)]
        two_bytes = torch.stack([since & 0xFF, since >> 8], dim=2).to(torch.uint8).flatten(1)
        records[begin : begin + len(counts)] = torch.cat(
            [two_bytes, _planes_of_records(places, layout)], dim=1
        )
        rows_before += counts[-1]
    return directory


def _counts_of_records(places: Tensor, layout: RecordLayout) -> Tensor:
    """Rows of each block in each record: ``(records, K)``."""
    record = torch.arange(len(places)) // layout.rows_per_record
    num_records = int(record[-1]) + 1
    counts = torch.bincount(
        record * layout.num_blocks + places, minlength=num_records * layout.num_blocks
    )
    return counts.view(num_records, layout.num_blocks)


def _planes_of_records(places: Tensor, layout: RecordLayout) -> Tensor:
    """Bit planes of each record: ``(records, P R / 8)`` uint8."""
    numbers = torch.nn.functional.pad(
        places.to(torch.uint8), (0, -len(places) % layout.rows_per_record)
    )
    eights = numbers.view(-1, 1, layout.rows_per_record // 8, 8)
    bits = eights >> torch.arange(layout.num_planes, dtype=torch.uint8).view(-1, 1, 1) & 1
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(3, dtype=torch.uint8).flatten(1)
