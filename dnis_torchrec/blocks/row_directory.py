"""Row directory: where every row stands, its block and its position in that block, in about half a
byte a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.row_routing import RowRouting
from dnis_torchrec.checks import check

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


def directory_bytes(routing: RowRouting, stored: Tensor | None = None) -> int:
    """Returns the bytes of a directory, which says where every row stands."""
    blocks = len(_occurring(routing))
    if stored is not None:
        blocks = int((stored > 0).sum()) + int(int(stored.sum()) < routing.num_embeddings)
    if blocks == 1:
        return 0
    if routing.boundaries is not None:
        return routing.boundaries.nbytes
    return RecordLayout(blocks).num_bytes(routing.num_embeddings)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDirectory:
    """Directory that finds the block of every row of a table, and its place there; see the module."""

    num_embeddings: int
    num_blocks: int
    blocks: tuple[int, ...]
    directory: Tensor

    def __post_init__(self) -> None:
        place, listed, count = "RowDirectory", list(self.blocks), len(self.blocks)
        rises = (
            listed == sorted(set(listed))
            and count > 0
            and listed[0] >= 0
            and listed[-1] <= self.num_blocks
        )
        check(rises, f"{place}.blocks", f"rising numbers in 0..{self.num_blocks}", listed)
        received = f"{self.directory.dtype} {tuple(self.directory.shape)}"
        if self.is_sorted:
            size = self.num_blocks + 1
            check(tuple(self.directory.shape) == (size,), place, f"{size} boundaries", received)
            return
        if count > 1:
            _check_count(self.num_blocks)
        size = RecordLayout(count).num_bytes(self.num_embeddings) if count > 1 else 0
        fits = self.directory.dtype == torch.uint8 and tuple(self.directory.shape) == (size,)
        check(
            fits, place, f"{size} bytes for {self.num_embeddings} rows of {count} blocks", received
        )

    @property
    def is_sorted(self) -> bool:
        """Whether `directory` holds boundaries."""
        return self.directory.dtype == torch.int64

    @classmethod
    def of(cls, routing: RowRouting) -> RowDirectory:
        """Builds the directory, a chunk of rows at a time."""
        blocks = _occurring(routing)
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
        own = planes.gather(2, (row // 8).view(-1, 1, 1).expand(-1, layout.num_planes, 1)).squeeze(
            2
        )
        bits = own >> (row % 8).unsqueeze(1).to(torch.uint8) & 1
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
        before = _BITS_OF_BYTE.to(ids.device)[same.long()].sum(1, dtype=torch.int64)
        at = (COUNT_BYTES * place).unsqueeze(1) + torch.arange(COUNT_BYTES, device=ids.device)
        low, high = counts.gather(1, at).long().unbind(1)
        count = low + (high << 8)
        block = torch.tensor(self.blocks, device=ids.device)[place]
        return block, starts[ids // ROWS_PER_START, place] + count + before


def _occurring(routing: RowRouting) -> tuple[int, ...]:
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
    first, *others = planes.unbind(1)
    for plane in others:
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
        before = torch.cat([torch.zeros(1, layout.num_blocks, dtype=torch.int64), counts[:-1]])
        of_start = before[::per_start]
        starts[rows.start // ROWS_PER_START :][: len(of_start)] = rows_before + of_start
        since = before - of_start.repeat_interleave(per_start, dim=0)[: len(before)]
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
    counted = torch.bincount(
        record * layout.num_blocks + places, minlength=num_records * layout.num_blocks
    )
    return counted.view(num_records, layout.num_blocks)


def _planes_of_records(places: Tensor, layout: RecordLayout) -> Tensor:
    """Bit planes of each record: ``(records, P R / 8)`` uint8."""
    padded = torch.nn.functional.pad(
        places.to(torch.uint8), (0, -len(places) % layout.rows_per_record)
    )
    eights = padded.view(-1, 1, layout.rows_per_record // 8, 8)
    bits = eights >> torch.arange(layout.num_planes, dtype=torch.uint8).view(-1, 1, 1) & 1
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(3, dtype=torch.uint8).flatten(1)
