"""CsrTable: one table in compressed sparse rows, with values in float32, float16 or int8.

Shapes: N rows, D embedding_dim, V retained values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.serving.mixed_dimension import rows_per_chunk

VALUE_DTYPES = (torch.float32, torch.float16, torch.int8)
"""What values may be stored as."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CsrTable:
    """A table in compressed sparse rows: row i holds ``values[row_pointers[i] : row_pointers[i + 1]]``.

    Only shapes, dtypes and the two outer row pointers are checked, so that a memory-mapped table is not read before it
    is used; lookups check whatever else they rely on.

    Attributes:
        embedding_dim: D.
        values: ``(V,)`` float32, float16, or int8 times its row's scale.
        columns: ``(V,)`` uint8 (D <= 256) or uint16, rising within a row.
        row_pointers: ``(N + 1,)`` int32 or int64.
        scales: ``(N,)`` bfloat16 with int8 values, else None.

    Raises:
        ValueError: if the arrays do not describe N rows of D columns.
        TypeError: for other dtypes.

    Example:
        >>> table = CsrTable.from_dense(torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]]))
        >>> table.values.tolist(), table.columns.tolist(), table.row_pointers.tolist()
        ([2.0, 3.0, 4.0], [1, 0, 1], [0, 1, 1, 3])
        >>> table.num_bytes
        31
    """

    embedding_dim: int
    values: Tensor
    columns: Tensor
    row_pointers: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        _check_dtype("values", self.values, VALUE_DTYPES)
        _check_dtype("columns", self.columns, (torch.uint8, torch.uint16))
        _check_dtype("row_pointers", self.row_pointers, (torch.int32, torch.int64))
        num_values = self.values.numel()
        outer = (int(self.row_pointers[0]), int(self.row_pointers[-1])) if self.row_pointers.numel() else None
        requirement = f"expected rising row pointers from 0 to {num_values}"
        check(outer == (0, num_values), "CsrTable.row_pointers", requirement, outer)
        received = self.columns.numel()
        check(received == num_values, "CsrTable.columns", f"expected {num_values} of them", received)
        scaled = self.values.dtype == torch.int8
        check((self.scales is not None) == scaled, "CsrTable.scales", "expected scales with int8 values only", "others")
        if self.scales is not None:
            _check_dtype("scales", self.scales, (torch.bfloat16,))
            received = self.scales.numel()
            requirement = f"expected {self.num_embeddings} of them"
            check(received == self.num_embeddings, "CsrTable.scales", requirement, received)

    @classmethod
    def from_dense(cls, weight: Tensor) -> CsrTable:
        """Gathers the non-zero values of a dense table, a chunk of rows at a time; exact in float32.

        Args:
            weight: ``(N, D)`` floating point.

        Raises:
            NotImplementedError: above D = 65,536, the most that uint16 columns can tell apart.
        """
        embedding_dim = weight.shape[1]
        if embedding_dim > 2**16:
            raise NotImplementedError(describe("embedding_dim", "supported is up to 65536", embedding_dim))
        column_dtype = torch.uint8 if embedding_dim <= 2**8 else torch.uint16
        values, columns, counts = [], [], [torch.zeros(1, dtype=torch.int64)]
        for chunk in weight.detach().split(rows_per_chunk(embedding_dim)):
            row, column = chunk.nonzero(as_tuple=True)
            values.append(chunk[row, column].float())
            columns.append(column.to(column_dtype))
            counts.append(torch.bincount(row, minlength=len(chunk)))
        pointers = torch.cat(counts).cumsum(0)
        return cls(
            embedding_dim=embedding_dim,
            values=torch.cat(values),
            columns=torch.cat(columns),
            row_pointers=pointers.int() if pointers[-1] < 2**31 else pointers,
        )

    @property
    def num_embeddings(self) -> int:
        """N."""
        return self.row_pointers.numel() - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        buffers = (self.values, self.columns, self.row_pointers, self.scales)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def to_dense(self) -> Tensor:
        """The whole table, ``(N, D)`` float32."""
        row, values = self._row_of_value(), self.values.float()
        if self.scales is not None:
            values = values * self.scales.float()[row]
        dense = torch.zeros(self.num_embeddings, self.embedding_dim)
        dense[row, self.columns.long()] = values
        return dense

    def quantized(self, dtype: torch.dtype) -> CsrTable:
        """The table with smaller values; columns and row pointers are shared.

        - float16: ``value`` rounded to 11 bits, so off by at most ``2^-11 |value|`` (``2^-25`` for the tiniest).
        - int8: ``round(value / scale)`` with ``scale = max |row| / 127``, rounded up to bfloat16; off by at most
          ``0.004 max |row|``. bfloat16 takes 2 bytes per row and, unlike float16, knows the range of float32.

        Args:
            dtype: float32 (no change), float16 or int8.

        Raises:
            TypeError: for another dtype.
            ValueError: if the table is quantised already, or holds NaN, infinity or a value beyond float16's 65,504.

        Example:
            >>> table = CsrTable.from_dense(torch.tensor([[0.0, 2.0], [-1.0, 0.5]])).quantized(torch.int8)
            >>> table.values.tolist(), table.scales.tolist()
            ([126, -126, 63], [0.015869140625, 0.0079345703125])
        """
        if dtype not in VALUE_DTYPES:
            raise TypeError(describe("values", f"expected one of {VALUE_DTYPES}", dtype))
        if dtype == self.values.dtype:
            return self
        check(self.values.dtype == torch.float32, "values", "expected float32 to start from", self.values.dtype)
        check(bool(self.values.isfinite().all()), "values", "expected finite values", "NaN or infinity")
        values, scales = self.values.half(), None
        if dtype == torch.int8:
            row = self._row_of_value()
            largest = torch.zeros(self.num_embeddings).scatter_reduce_(0, row, self.values.abs(), "amax")
            scales = _bfloat16_rounded_up(largest / 127)
            values = (self.values / scales.float()[row]).nan_to_num(0.0).round_().clamp_(-127, 127).to(torch.int8)
        else:
            within = bool(values.isfinite().all())
            check(within, "values", "expected at most 65504 for float16", "a larger one", "take int8")
        return CsrTable(
            embedding_dim=self.embedding_dim,
            values=values,
            columns=self.columns,
            row_pointers=self.row_pointers,
            scales=scales,
        )

    def _row_of_value(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_embeddings), self.row_pointers.diff())


def _check_dtype(field: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(describe(f"CsrTable.{field}", f"expected {names}", tensor.dtype))
    check(tensor.dim() == 1, f"CsrTable.{field}", "expected one dimension", tuple(tensor.shape))


def _bfloat16_rounded_up(positive: Tensor) -> Tensor:
    """The smallest bfloat16 not below: the upper half of the bits, plus one where the lower half is not zero."""
    return ((positive.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
