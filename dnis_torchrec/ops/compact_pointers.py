"""Compact row pointers: where each row of a table begins and ends, in 1.14 bytes a row instead of 4 or 8.

Row pointers rise slowly: from one row to the next by at most D. So the rows are taken 56 at a time, and a record of 64
bytes, a cache line, says where the first of them begins (int64) and how many values each has (uint8). A row begins
where its record does plus the lengths before its own; one instruction adds those up. The last record ends with the
last row, so the number of bytes tells the number of rows.

Row pointers ``(n + 1,)`` int32 or int64 and compact ones, uint8, are told apart by their dtype.

Shapes: n rows, I rows that are looked up, D embedding_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dnis_torchrec.checks import check

RECORD_BYTES = 64
"""A record of compact row pointers."""
START_BYTES = 8
ROWS_PER_RECORD = RECORD_BYTES - START_BYTES
LARGEST_LENGTH = 255
"""Values that a row of compact row pointers may have, so the largest D that they serve."""
_RECORDS_PER_CHUNK = 2**16


def compact_bytes(num_rows: int) -> int:
    """Bytes of the compact row pointers of n rows.

    Example:
        >>> compact_bytes(56), compact_bytes(57)
        (64, 73)
    """
    return num_rows + START_BYTES * -(-num_rows // ROWS_PER_RECORD)


def has_compact_pointers(embedding_dim: int) -> bool:
    """Returns whether lookups read compact row pointers: up to D = 255.

    Example:
        >>> has_compact_pointers(255), has_compact_pointers(256)
        (True, False)
    """
    return embedding_dim <= LARGEST_LENGTH


def plain_pointer_bytes(num_rows: int, num_values: int) -> int:
    """Bytes of the row pointers of n rows as integers: four each, or eight from 2^31 values on.

    Example:
        >>> plain_pointer_bytes(56, 100), plain_pointer_bytes(56, 2**31)
        (228, 456)
    """
    return (num_rows + 1) * (4 if num_values < 2**31 else 8)


def pointer_bytes(num_rows: int, embedding_dim: int, num_values: int = 0) -> int:
    """Bytes of a table's row pointers as lookups read them.

    Args:
        num_rows: n.
        embedding_dim: D; up to 255 row pointers are compact.
        num_values: plain ones depend on it.

    Example:
        >>> pointer_bytes(56, 64), pointer_bytes(56, 256), pointer_bytes(56, 256, 2**31)
        (64, 228, 456)
    """
    if has_compact_pointers(embedding_dim):
        return compact_bytes(num_rows)
    return plain_pointer_bytes(num_rows, num_values)


def num_rows_of(pointers: Tensor) -> int:
    """n, from row pointers of either kind.

    Args:
        pointers: ``(n + 1,)`` int32 or int64, or compact.

    Raises:
        ValueError: if compact ones end within a record's start.

    Example:
        >>> num_rows_of(torch.tensor([0, 2, 3])), num_rows_of(torch.zeros(73, dtype=torch.uint8))
        (2, 57)
    """
    if pointers.dtype != torch.uint8:
        return pointers.numel() - 1
    num_records, rest = divmod(pointers.numel(), RECORD_BYTES)
    check(rest == 0 or rest > START_BYTES, "compact row pointers", "whole records", f"{rest} bytes of one")
    return num_records * ROWS_PER_RECORD + max(0, rest - START_BYTES)


def compacted(row_pointers: Tensor) -> Tensor:
    """Makes row pointers compact, a chunk of rows at a time.

    Args:
        row_pointers: ``(n + 1,)`` int32 or int64, on the CPU.

    Returns:
        ``(compact_bytes(n),)`` uint8.

    Raises:
        ValueError: if a row has fewer than 0 or more than 255 values; names the first such row.

    Example:
        >>> compacted(torch.tensor([0, 2, 3])).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 2, 1]
    """
    num_rows, step = row_pointers.numel() - 1, _RECORDS_PER_CHUNK * ROWS_PER_RECORD
    compact = torch.empty(compact_bytes(num_rows), dtype=torch.uint8)
    for first in range(0, num_rows, step):
        pointers = row_pointers[first : first + step + 1].long()
        lengths = pointers.diff()
        wrong = (lengths < 0) | (lengths > LARGEST_LENGTH)
        if bool(wrong.any()):
            row = first + int(wrong.nonzero()[0])
            check(False, "row pointers", f"rising ones, at most {LARGEST_LENGTH} apart", f"others in row {row}")
        starts = pointers[torch.arange(0, len(lengths), ROWS_PER_RECORD)].view(torch.uint8).view(-1, START_BYTES)
        filled = pad(lengths, (0, len(starts) * ROWS_PER_RECORD - len(lengths))).view(-1, ROWS_PER_RECORD)
        records = torch.cat([starts, filled.to(torch.uint8)], dim=1).flatten()
        begin, size = compact_bytes(first), compact_bytes(len(lengths))
        compact[begin : begin + size] = records[:size]
    return compact


def row_bounds(pointers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where rows begin and end, from row pointers of either kind.

    Args:
        pointers: ``(n + 1,)`` int32 or int64, or compact.
        rows: ``(I,)`` int64, each in 0..n-1.

    Returns:
        First value of each row, and the one after its last: ``(I,)`` int64.

    Example:
        >>> begin, end = row_bounds(compacted(torch.tensor([0, 2, 3])), torch.tensor([1, 0]))
        >>> begin.tolist(), end.tolist()
        ([2, 0], [3, 2])
    """
    if pointers.dtype != torch.uint8:
        return pointers[rows].long(), pointers[rows + 1].long()
    record = rows // ROWS_PER_RECORD * RECORD_BYTES
    own = record + START_BYTES + rows % ROWS_PER_RECORD
    position = record.unsqueeze(1) + torch.arange(RECORD_BYTES, device=rows.device)
    # the bytes of the start, little-endian, and the lengths before the row's own
    shift = torch.arange(RECORD_BYTES, device=rows.device) * 8
    shift[START_BYTES:] = 0
    read = position < own.unsqueeze(1)
    content = pointers[torch.where(read, position, 0)].long()
    begin = torch.where(read, content << shift, 0).sum(dim=1)
    return begin, begin + pointers[own].long()
