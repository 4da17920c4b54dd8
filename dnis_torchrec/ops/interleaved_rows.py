"""Interleaved rows: whatever a lookup reads of a CSR row stands in one place, so that it waits for
memory once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.checks import check

_DTYPE_OF_BYTES = {4: torch.float32, 2: torch.float16, 1: torch.int8}


class RowLayout(NamedTuple):
    """Sizes of the values and column indices that rows are interleaved of."""

    value_bytes: int
    column_bytes: int

    @classmethod
    def of(cls, values: torch.dtype, columns: torch.dtype) -> RowLayout:
        """The layout of values and columns of these dtypes."""
        return cls(values.itemsize, columns.itemsize)

    @property
    def scale_bytes(self) -> int:
        """Bytes ahead of a row's values."""
        return 2 if self.value_bytes == 1 else 0

    @property
    def entry_bytes(self) -> int:
        """Bytes of a value and its column."""
        return self.value_bytes + self.column_bytes

    def num_bytes(self, num_rows: int, num_values: int) -> int:
        """Bytes of n rows with V values together."""
        return num_rows * self.scale_bytes + num_values * self.entry_bytes


def interleaved(
    values: Tensor,
    columns: Tensor,
    row_pointers: Tensor,
    scales: Tensor | None = None,
    *,
    rows_per_chunk: int = 2**16,
) -> Tensor:
    """Interleaves rows, a chunk at a time."""
    layout, num_rows = RowLayout.of(values.dtype, columns.dtype), row_pointers.numel() - 1
    rows = torch.empty(layout.num_bytes(num_rows, values.numel()), dtype=torch.uint8)
    for first in range(0, num_rows, rows_per_chunk):
        last = min(first + rows_per_chunk, num_rows)
        pointers = row_pointers[first : last + 1].long()
        begin, end = int(pointers[0]), int(pointers[-1])
        start = first * layout.scale_bytes + begin * layout.entry_bytes
        chunk = rows[start : start + layout.num_bytes(last - first, end - begin)]
        count = pointers.diff()
        check(
            bool((count >= 0).all()), "row pointers", "rising ones", f"others from row {first} on"
        )
        row_start = (pointers[:-1] - begin) * layout.entry_bytes + torch.arange(
            last - first
        ) * layout.scale_bytes
        if scales is not None:
            _scatter(chunk, row_start, scales[first:last])
        row, place = _entries(count)
        value_start = row_start[row] + layout.scale_bytes
        _scatter(chunk, value_start + place * layout.value_bytes, values[begin:end])
        column_start = value_start + count[row] * layout.value_bytes + place * layout.column_bytes
        _scatter(chunk, column_start, columns[begin:end])
    return rows


def read_rows(
    rows: Tensor, layout: RowLayout, index: Tensor, first: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes rows apart: what a lookup gathers, one row after the other."""
    row_start = first * layout.entry_bytes + index * layout.scale_bytes
    row, place = _entries(count)
    value_start = row_start[row] + layout.scale_bytes
    values = _gather(
        rows, value_start + place * layout.value_bytes, _DTYPE_OF_BYTES[layout.value_bytes]
    )
    column_start = value_start + count[row] * layout.value_bytes + place * layout.column_bytes
    column_bytes = _bytes_at(rows, column_start, layout.column_bytes).long()
    columns = sum(part << 8 * byte for byte, part in enumerate(column_bytes.unbind(1)))
    scales = torch.ones(len(index), device=rows.device)
    if layout.scale_bytes:
        scales = _gather(rows, row_start, torch.bfloat16).float()
    return row, torch.as_tensor(columns), values.float(), scales


def _entries(count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each value's row and its place in the row, for rows of `count` values each."""
    row = torch.repeat_interleave(count)
    return row, torch.arange(row.numel(), device=count.device) - (count.cumsum(0) - count)[row]


def _bytes_at(rows: Tensor, start: Tensor, num_bytes: int) -> Tensor:
    return rows[start.unsqueeze(1) + torch.arange(num_bytes, device=rows.device)]


def _gather(rows: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    return _bytes_at(rows, start, dtype.itemsize).view(dtype).squeeze(1)


def _scatter(rows: Tensor, start: Tensor, numbers: Tensor) -> None:
    width = numbers.dtype.itemsize
    rows[start.unsqueeze(1) + torch.arange(width)] = numbers.view(torch.uint8).view(-1, width)
