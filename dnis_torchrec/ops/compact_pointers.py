"""Compact row pointers: where each row of a table begins and ends, in 1.14 bytes a row instead of 4
or 8."""

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
    """Bytes of the compact row pointers of n rows."""
    return num_rows + START_BYTES * -(-num_rows // ROWS_PER_RECORD)


def has_compact_pointers(embedding_dim: int) -> bool:
    """Returns whether lookups read compact row pointers: up to D = 255."""
    return embedding_dim <= LARGEST_LENGTH


def plain_pointer_bytes(num_rows: int, num_values: int) -> int:
    """Bytes of the row pointers of n rows as integers: four each, or eight from 2^31 values on."""
    return (num_rows + 1) * (4 if num_values < 2**31 else 8)


def pointer_bytes(num_rows: int, embedding_dim: int, num_values: int = 0) -> int:
    """Bytes of a table's row pointers as lookups read them."""
    if has_compact_pointers(embedding_dim):
        return compact_bytes(num_rows)
    return plain_pointer_bytes(num_rows, num_values)


def num_rows_of(pointers: Tensor) -> int:
    """n, from row pointers of either kind."""
    if pointers.dtype != torch.uint8:
        return pointers.numel() - 1
    num_records, rest = divmod(pointers.numel(), RECORD_BYTES)
    check(
        rest == 0 or rest > START_BYTES,
        "compact row pointers",
        "whole records",
        f"{rest} bytes of one",
    )
    return num_records * ROWS_PER_RECORD + max(0, rest - START_BYTES)


def compacted(row_pointers: Tensor) -> Tensor:
    """Makes row pointers compact, a chunk of rows at a time."""
    num_rows, step = row_pointers.numel() - 1, _RECORDS_PER_CHUNK * ROWS_PER_RECORD
    compact = torch.empty(compact_bytes(num_rows), dtype=torch.uint8)
    for first in range(0, num_rows, step):
        pointers = row_pointers[first : first + step + 1].long()
        lengths = pointers.diff()
        wrong = (lengths < 0) | (lengths > LARGEST_LENGTH)
        if bool(wrong.any()):
            row = first + int(wrong.nonzero()[0])
            check(
                False,
                "row pointers",
                f"rising ones, at most {LARGEST_LENGTH} apart",
                f"others in row {row}",
            )
        starts = (
            pointers[torch.arange(0, len(lengths), ROWS_PER_RECORD)]
            .view(torch.uint8)
            .view(-1, START_BYTES)
        )
        filled = pad(lengths, (0, len(starts) * ROWS_PER_RECORD - len(lengths))).view(
            -1, ROWS_PER_RECORD
        )
        records = torch.cat([starts, filled.to(torch.uint8)], dim=1).flatten()
        begin, size = compact_bytes(first), compact_bytes(len(lengths))
        compact[begin : begin + size] = records[:size]
    return compact


def row_bounds(pointers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where rows begin and end, from row pointers of either kind."""
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
