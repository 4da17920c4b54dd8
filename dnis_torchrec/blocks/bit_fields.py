"""Bit fields: where the values of a row stand when every column of its block has a width of its
own."""

from __future__ import annotations

import torch
from torch import Tensor

from dnis_torchrec.checks import check

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
"""Bits that a value may take: 0 is a dropped column, 32 a float32, all others are codes."""
FLOAT_BITS = 32


def check_widths(bits: Tensor, place: str) -> None:
    """Checks that every width is one of `WIDTHS`."""
    others = sorted(set(bits.unique().tolist()) - set(WIDTHS))
    check(not others, place, f"bits among {WIDTHS}", others)


def is_coded(bits: Tensor) -> Tensor:
    """Marks the columns that are stored in codes, with a scale and a shift: neither dropped nor
    float32."""
    return (bits > 0) & (bits < FLOAT_BITS)


def field_offsets(bits: Tensor) -> Tensor:
    """First bit of every field in its row."""
    return _fields(bits)[0]


def row_strides(bits: Tensor) -> Tensor:
    """Bytes of a row of every block: its fields, rounded up to whole bytes."""
    return -(-_fields(bits)[1] // 8)


def _fields(bits: Tensor) -> tuple[Tensor, Tensor]:
    """(first bit of every field, bits of every row before its padding)."""
    widths = bits.long()
    ends = widths.cumsum(1)
    for column in (widths == FLOAT_BITS).any(dim=0).nonzero().flatten().tolist():
        begin = ends[:, column] - widths[:, column]
        ends[:, column:] += (-begin % 8 * (widths[:, column] == FLOAT_BITS)).unsqueeze(1)
    return ends - widths, ends[:, -1]


def packed_rows(fields: Tensor, bits: Tensor) -> Tensor:
    """Rows of one block in bytes."""
    (offsets,), (stride,) = (
        field_offsets(bits.unsqueeze(0)),
        row_strides(bits.unsqueeze(0)).tolist(),
    )
    packed = torch.zeros(len(fields), stride, dtype=torch.uint8)
    for column, (width, offset) in enumerate(zip(bits.tolist(), offsets.tolist(), strict=True)):
        first, last = offset // 8, (offset + width + 7) // 8
        field = (fields[:, column].long() & ((1 << width) - 1)) << offset % 8
        for byte in range(first, last):
            packed[:, byte] |= (field >> 8 * (byte - first) & 0xFF).to(torch.uint8)
    return packed


def unpacked_fields(rows: Tensor, bits: Tensor) -> Tensor:
    """The fields of rows of one block: the inverse of `packed_rows`."""
    (offsets,) = field_offsets(bits.unsqueeze(0))
    fields = torch.zeros(len(rows), len(bits), dtype=torch.int32)
    for column, (width, offset) in enumerate(zip(bits.tolist(), offsets.tolist(), strict=True)):
        first, last = offset // 8, (offset + width + 7) // 8
        field = torch.zeros(len(rows), dtype=torch.int64)
        for byte in range(first, last):
            field |= rows[:, byte].long() << 8 * (byte - first)
        field = field >> offset % 8 & ((1 << width) - 1)
        fields[:, column] = (
            field - (field >> FLOAT_BITS - 1 << FLOAT_BITS)
        ).int()  # a sign, where all bits are used
    return fields
