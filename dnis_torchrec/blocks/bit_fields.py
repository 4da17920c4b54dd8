"""Bit fields: where the values of a row stand when every column of its block has a width of its own.

Rows of a block follow one another at a fixed stride of whole bytes. In a row the columns come in their order, each a
field of its bits, least significant bit first; a column of 0 bits takes none. A field of 32 bits holds a float32 and
begins at a whole byte.

Shapes: S blocks, D embedding_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dnis_torchrec.checks import check

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
"""Bits that a value may take: 0 is a dropped column, 32 a float32, all others are codes."""
FLOAT_BITS = 32


def check_widths(bits: Tensor, place: str) -> None:
    """Checks that every width is one of `WIDTHS`.

    Args:
        bits: any shape, integers.
        place: what they belong to, for the error.

    Raises:
        ValueError: if one is not.
    """
    others = sorted(set(bits.unique().tolist()) - set(WIDTHS))
    check(not others, place, f"bits among {WIDTHS}", others)


def is_coded(bits: Tensor) -> Tensor:
    """Marks the columns that are stored in codes, with a scale and a shift: neither dropped nor float32.

    Args:
        bits: any shape, integers among `WIDTHS`.
    """
    return (bits > 0) & (bits < FLOAT_BITS)


def field_offsets(bits: Tensor) -> Tensor:
    """First bit of every field in its row.

    Args:
        bits: ``(S, D)`` integers among `WIDTHS`.

    Returns:
        ``(S, D)`` int64; of a dropped column, where the next field may begin.

    Example:
        >>> import torch
        >>> field_offsets(torch.tensor([[3, 0, 4, 32, 2]])).tolist()
        [[0, 3, 3, 8, 40]]
    """
    return _fields(bits)[0]


def row_strides(bits: Tensor) -> Tensor:
    """Bytes of a row of every block: its fields, rounded up to whole bytes.

    Args:
        bits: ``(S, D)`` integers among `WIDTHS`.

    Returns:
        ``(S,)`` int64; 0 for a block without a column.

    Example:
        >>> import torch
        >>> row_strides(torch.tensor([[3, 0, 4, 32, 2], [0, 0, 0, 0, 0]])).tolist()
        [6, 0]
    """
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
    """Rows of one block in bytes.

    Args:
        fields: ``(n, D)`` int64: codes in ``0 .. 2^bits - 1``, and of float32 columns the bits of the value (``value.
            view(torch.int32)``); what stands at dropped columns is passed over.
        bits: ``(D,)`` integers among `WIDTHS`.

    Returns:
        ``(n, stride)`` uint8.

    Example:
        >>> packed_rows(torch.tensor([[5, 9, 3]]), torch.tensor([3, 0, 6])).tolist()  # 011101 over 101
        [[29, 0]]
    """
    (offsets,), (stride,) = field_offsets(bits.unsqueeze(0)), row_strides(bits.unsqueeze(0)).tolist()
    packed = torch.zeros(len(fields), stride, dtype=torch.uint8)
    for column, (width, offset) in enumerate(zip(bits.tolist(), offsets.tolist(), strict=True)):
        first, last = offset // 8, (offset + width + 7) // 8
        field = (fields[:, column].long() & ((1 << width) - 1)) << offset % 8
        for byte in range(first, last):
            packed[:, byte] |= (field >> 8 * (byte - first) & 0xFF).to(torch.uint8)
    return packed


def unpacked_fields(rows: Tensor, bits: Tensor) -> Tensor:
    """The fields of rows of one block: the inverse of `packed_rows`.

    Args:
        rows: ``(n, stride)`` uint8.
        bits: ``(D,)`` integers among `WIDTHS`.

    Returns:
        ``(n, D)`` int32: codes, the bits of a float32, and 0 for dropped columns.

    Example:
        >>> bits = torch.tensor([3, 0, 6])
        >>> unpacked_fields(packed_rows(torch.tensor([[5, 9, 3]]), bits), bits).tolist()
        [[5, 0, 3]]
    """
    (offsets,) = field_offsets(bits.unsqueeze(0))
    fields = torch.zeros(len(rows), len(bits), dtype=torch.int32)
    for column, (width, offset) in enumerate(zip(bits.tolist(), offsets.tolist(), strict=True)):
        first, last = offset // 8, (offset + width + 7) // 8
        field = torch.zeros(len(rows), dtype=torch.int64)
        for byte in range(first, last):
            field |= rows[:, byte].long() << 8 * (byte - first)
        field = field >> offset % 8 & ((1 << width) - 1)
        fields[:, column] = (field - (field >> FLOAT_BITS - 1 << FLOAT_BITS)).int()  # a sign, where all bits are used
    return fields
