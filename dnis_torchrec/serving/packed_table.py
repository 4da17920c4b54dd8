"""PackedTable: one table whose blocks store every column in bits of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import check_widths, encode_rows, is_coded, packed_rows, row_strides
from dnis_torchrec.blocks.routing import RowDirectory
from dnis_torchrec.checks import check, describe
from dnis_torchrec.scheme import TableScheme


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTable:
    """A table in bit fields: a value of k bits is a number q in 0 .. 2^k - 1 that stands for scale
    * (q + shift / 2)."""

    bits: Tensor
    directory: RowDirectory
    rows: Tensor
    scales: Tensor
    shifts: Tensor
    row_counts: Tensor

    def __post_init__(self) -> None:
        dtypes = {
            "bits": torch.uint8,
            "rows": torch.uint8,
            "scales": torch.bfloat16,
            "shifts": torch.int16,
        }
        for name, dtype in dtypes.items():
            received = getattr(self, name).dtype
            if received != dtype:
                raise TypeError(describe(f"PackedTable.{name}", f"{dtype}", received))
        check_widths(self.bits, "PackedTable.bits")
        num_blocks = self.directory.num_blocks
        received = (*self.bits.shape[:1], *self.row_counts.shape)
        check(
            received == (num_blocks,) * 2,
            "PackedTable",
            f"bits and row counts of {num_blocks}",
            received,
        )
        ends = self.first_bytes()[-1] + self.row_counts[-1:] * row_strides(self.bits)[-1:]
        shapes = {"rows": int(ends), "scales": self.num_coded, "shifts": self.num_coded}
        for name, size in shapes.items():
            shape = tuple(getattr(self, name).shape)
            check(shape == (size,), f"PackedTable.{name}", f"{size} of them", shape)
        sound = bool((self.scales > 0).all()) and bool(self.scales.isfinite().all())
        check(sound, "PackedTable.scales", "finite ones above 0", "others")

    @classmethod
    def from_rows(
        cls, table: TableScheme, rows: Tensor, scale: Tensor, shift: Tensor
    ) -> PackedTable:
        """Takes the rows of all blocks as they are, so that they may lie in a mapped file."""
        bits = table.column_bits()
        is_code = is_coded(bits)
        return cls(
            bits=bits,
            directory=RowDirectory.of(table.routing),
            rows=rows,
            scales=scale[is_code].bfloat16(),
            shifts=shift[is_code].to(torch.int16),
            row_counts=table.routing.row_counts(),
        )

    @property
    def num_coded(self) -> int:
        """C."""
        return int(is_coded(self.bits).sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of rows, scales, shifts, bits and directory; 0 where nothing is retained."""
        if not bool(self.bits.any()):
            return 0
        parts = (self.rows, self.scales, self.shifts, self.bits, self.directory.directory)
        return sum(part.nbytes for part in parts)

    def first_bytes(self) -> Tensor:
        """Returns the first byte of the rows of every block, ``(S,)`` int64."""
        sizes = self.row_counts * row_strides(self.bits)
        return sizes.cumsum(0) - sizes

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Returns scale and shift of every column of every block, ``(S, D)`` float32, int16; 1 and
        0 without codes."""
        is_code = is_coded(self.bits)
        scale, shift = torch.ones(self.bits.shape), torch.zeros(self.bits.shape, dtype=torch.int16)
        scale[is_code], shift[is_code] = self.scales.float(), self.shifts
        return scale, shift


def split_blocks(rows: Tensor, row_counts: Tensor, bits: Tensor) -> list[Tensor]:
    """The rows of every block, ``(n, stride)`` each; views."""
    strides = row_strides(bits)
    parts = rows.split((row_counts * strides).tolist())
    return [
        part.view(n, stride)
        for part, n, stride in zip(parts, row_counts.tolist(), strides.tolist(), strict=True)
    ]


def pack_rows(
    table: TableScheme, chunks: Iterable[Tensor], row_counts: Tensor, *, first: int = 0
) -> Tensor:
    """Encodes consecutive rows of a table, each of which is read once."""
    bits = table.codes.bits
    packed = torch.empty(int(row_counts @ row_strides(bits)), dtype=torch.uint8)
    blocks, filled = split_blocks(packed, row_counts, bits), [0] * len(row_counts)
    for s, rows in packed_chunks(table, chunks, first=first):
        blocks[s][filled[s] : filled[s] + len(rows)] = rows
        filled[s] += len(rows)
    return packed


def packed_chunks(
    table: TableScheme, chunks: Iterable[Tensor], *, first: int
) -> Iterator[tuple[int, Tensor]]:
    """Encodes consecutive rows of a table a chunk at a time, each of which is read once."""
    codes = table.codes
    is_stored = (row_strides(codes.bits) > 0).tolist()
    for chunk in chunks:
        of_rows = table.routing.block_of(torch.arange(first, first + len(chunk)))
        encoded = encode_rows(
            chunk.detach().cpu().float(), of_rows, codes, place=f"table {table.name!r}"
        )
        first += len(chunk)
        for s in of_rows.unique().tolist():
            if s < len(is_stored) and is_stored[s]:
                yield s, packed_rows(encoded[of_rows == s], codes.bits[s])
