"""CsrTable: one table in compressed sparse rows, with values in float32, float16 or int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.ops.compact_pointers import compact_bytes, compacted, has_compact_pointers
from dnis_torchrec.ops.interleaved_rows import RowLayout, interleaved
from dnis_torchrec.scheme import rows_per_chunk

CSR_VALUE_DTYPES = (torch.float32, torch.float16, torch.int8)
"""Dtypes that values may be stored in."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CsrTable:
    """A table in compressed sparse rows: row i holds ``values[row_pointers[i] : row_pointers[i +
    1]]``."""

    embedding_dim: int
    values: Tensor
    columns: Tensor
    row_pointers: Tensor
    scales: Tensor | None = None
    compact_row_pointers: Tensor | None = None
    interleaved_rows: Tensor | None = None

    def __post_init__(self) -> None:
        _check_dtype("values", self.values, CSR_VALUE_DTYPES)
        _check_dtype("columns", self.columns, (torch.uint8, torch.uint16))
        _check_dtype("row_pointers", self.row_pointers, (torch.int32, torch.int64))
        num_values = self.values.numel()
        outer = (
            (int(self.row_pointers[0]), int(self.row_pointers[-1]))
            if self.row_pointers.numel()
            else None
        )
        requirement = f"rising row pointers from 0 to {num_values}"
        check(outer == (0, num_values), "CsrTable.row_pointers", requirement, outer)
        received = self.columns.numel()
        check(received == num_values, "CsrTable.columns", f"{num_values} of them", received)
        scaled = self.values.dtype == torch.int8
        check(
            (self.scales is not None) == scaled,
            "CsrTable.scales",
            "scales with int8 values only",
            "others",
        )
        if self.scales is not None:
            _check_dtype("scales", self.scales, (torch.bfloat16,))
            received = self.scales.numel()
            requirement = f"{self.num_embeddings} of them"
            check(received == self.num_embeddings, "CsrTable.scales", requirement, received)
        if self.compact_row_pointers is not None:
            _check_dtype("compact_row_pointers", self.compact_row_pointers, (torch.uint8,))
            size = (
                compact_bytes(self.num_embeddings)
                if has_compact_pointers(self.embedding_dim)
                else 0
            )
            received = self.compact_row_pointers.numel()
            check(received == size, "CsrTable.compact_row_pointers", f"{size} bytes", received)
        if self.interleaved_rows is not None:
            _check_dtype("interleaved_rows", self.interleaved_rows, (torch.uint8,))
            size = self.row_layout.num_bytes(self.num_embeddings, num_values)
            received = self.interleaved_rows.numel()
            check(received == size, "CsrTable.interleaved_rows", f"{size} bytes", received)

    @classmethod
    def from_dense(cls, weight: Tensor) -> CsrTable:
        """Gathers the non-zero values of a dense table, a chunk of rows at a time; exact in
        float32."""
        return cls.from_rows(
            lambda first, last: weight[first:last], 0, len(weight), embedding_dim=weight.shape[1]
        )

    @classmethod
    def from_rows(
        cls, rows: Callable[[int, int], Tensor], first: int, last: int, *, embedding_dim: int
    ) -> CsrTable:
        """Gathers the non-zero values of rows that need not exist as a whole."""
        narrow = column_dtype(embedding_dim)
        step = rows_per_chunk(embedding_dim)
        chunks = [(begin, min(begin + step, last)) for begin in range(first, last, step)]
        counts = [torch.count_nonzero(rows(*chunk).detach(), dim=1).cpu() for chunk in chunks]
        pointers = torch.cat([torch.zeros(1, dtype=torch.int64), *counts]).cumsum(0)
        num_values = int(pointers[-1])
        values, columns = torch.empty(num_values), torch.empty(num_values, dtype=narrow)
        for begin, end in chunks:
            chunk = rows(begin, end).detach()
            row, column = chunk.nonzero(as_tuple=True)
            place = slice(int(pointers[begin - first]), int(pointers[end - first]))
            values[place] = chunk[row, column].float()
            columns[place] = column.to(narrow)
        pointers = pointers.to(pointer_dtype(num_values))
        return cls(
            embedding_dim=embedding_dim, values=values, columns=columns, row_pointers=pointers
        )

    @classmethod
    def concatenate(cls, tables: Sequence[CsrTable]) -> CsrTable:
        """One table of the rows of several, in order; a single one is given as it is."""
        first, *others = tables
        if not others:
            return first
        values = torch.cat([table.values for table in tables])
        pointers, begin = [first.row_pointers[:1].long()], 0
        for table in tables:
            pointers.append(table.row_pointers[1:].long() + begin)
            begin += table.values.numel()
        scales = [table.scales for table in tables if table.scales is not None]
        return cls(
            embedding_dim=first.embedding_dim,
            values=values,
            columns=torch.cat([table.columns for table in tables]),
            row_pointers=torch.cat(pointers).to(pointer_dtype(values.numel())),
            scales=torch.cat(scales) if scales else None,
        )

    @property
    def num_embeddings(self) -> int:
        """N."""
        return self.row_pointers.numel() - 1

    @property
    def row_layout(self) -> RowLayout:
        """Layout of interleaved rows."""
        return RowLayout.of(self.values.dtype, self.columns.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that lookups need."""
        is_compact = has_compact_pointers(self.embedding_dim)
        pointers = compact_bytes(self.num_embeddings) if is_compact else self.row_pointers.nbytes
        return self.row_layout.num_bytes(self.num_embeddings, self.values.numel()) + pointers

    def to_tensors(self) -> dict[str, Tensor]:
        """All arrays by name: the canonical ones, and those of lookups, which are made of them."""
        scales = {} if self.scales is None else {"scales": self.scales}
        canonical = {
            "values": self.values,
            "columns": self.columns,
            "row_pointers": self.row_pointers,
        }
        return canonical | scales | self.lookup_tensors()

    def lookup_tensors(self) -> dict[str, Tensor]:
        """The arrays that lookups need, by name, in the order in which the operator takes them."""
        pointers = {"row_pointers": self.row_pointers}
        if has_compact_pointers(self.embedding_dim):
            made = self.compact_row_pointers
            pointers = {
                "compact_row_pointers": compacted(self.row_pointers) if made is None else made
            }
        rows = self._interleaved() if self.interleaved_rows is None else self.interleaved_rows
        return {"interleaved_rows": rows} | pointers

    def prepared(self) -> CsrTable:
        """The table together with the arrays that lookups need, which are made now unless they are
        there."""
        made = self.lookup_tensors()
        compact = made.get("compact_row_pointers")
        return replace(
            self, interleaved_rows=made["interleaved_rows"], compact_row_pointers=compact
        )

    def _interleaved(self) -> Tensor:
        step = rows_per_chunk(self.embedding_dim)
        return interleaved(
            self.values, self.columns, self.row_pointers, self.scales, rows_per_chunk=step
        )

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first <= i < last`` as dense ``(last - first, D)`` float32; no others are read."""
        pointers = self.row_pointers[first : last + 1].long()
        begin, end = int(pointers[0]), int(pointers[-1])
        row = torch.repeat_interleave(torch.arange(last - first), pointers.diff())
        values = self.values[begin:end].float()
        if self.scales is not None:
            values = values * self.scales[first:last].float()[row]
        dense = torch.zeros(last - first, self.embedding_dim)
        dense[row, self.columns[begin:end].long()] = values
        return dense

    def to_dense(self) -> Tensor:
        """The whole table, ``(N, D)`` float32."""
        return self.rows(0, self.num_embeddings)

    def check_rows(self) -> None:
        """Reads the whole table and checks what construction leaves to lookups."""
        falling = self.row_pointers.diff() < 0
        self._check_none(falling, "row_pointers", "rising ones")
        if self.compact_row_pointers is not None:
            same = self.compact_row_pointers.equal(compacted(self.row_pointers))
            check(
                same, "CsrTable.compact_row_pointers", "what the row pointers say", "something else"
            )
        if self.interleaved_rows is not None:
            same = self.interleaved_rows.equal(self._interleaved())
            check(same, "CsrTable.interleaved_rows", "what the other arrays say", "something else")
        row, columns = self._row_of_value(), self.columns.int()
        self._check_none(
            columns >= self.embedding_dim, "columns", f"0..{self.embedding_dim - 1}", row
        )
        unsorted = (columns.diff() <= 0) & (row.diff() == 0)
        self._check_none(unsorted, "columns", "them to rise within a row", row)
        if self.scales is None:
            self._check_none(~self.values.isfinite(), "values", "finite ones", row)
        else:
            self._check_none(~self.scales.isfinite(), "scales", "finite ones")

    def _check_none(
        self, wrong: Tensor, field: str, requirement: str, row: Tensor | None = None
    ) -> None:
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0])
            found = position if row is None else int(row[position])
            check(False, f"CsrTable.{field}", requirement, f"others in row {found}")

    def quantized(self, dtype: torch.dtype) -> CsrTable:
        """The table with smaller values; columns and row pointers are shared."""
        if dtype not in CSR_VALUE_DTYPES:
            raise TypeError(describe("values", f"one of {CSR_VALUE_DTYPES}", dtype))
        if dtype == self.values.dtype:
            return self
        check(
            self.values.dtype == torch.float32, "values", "float32 to start from", self.values.dtype
        )
        check(bool(self.values.isfinite().all()), "values", "finite values", "NaN or infinity")
        scales = None
        if dtype == torch.int8:
            values, scales = self._to_int8()
        else:
            values = self.values.half()
            within = bool(values.isfinite().all())
            check(within, "values", "at most 65504 for float16", "a larger one", "take int8")
        return CsrTable(
            embedding_dim=self.embedding_dim,
            values=values,
            columns=self.columns,
            row_pointers=self.row_pointers,
            scales=scales,
            compact_row_pointers=self.compact_row_pointers,
        )

    def _to_int8(self) -> tuple[Tensor, Tensor]:
        """Values and scales, a chunk of rows at a time."""
        values = torch.empty(self.values.numel(), dtype=torch.int8)
        scales = torch.empty(self.num_embeddings, dtype=torch.bfloat16)
        step = rows_per_chunk(self.embedding_dim)
        for first in range(0, self.num_embeddings, step):
            pointers = self.row_pointers[first : first + step + 1].long()
            exact = self.values[int(pointers[0]) : int(pointers[-1])]
            row = torch.repeat_interleave(pointers.diff())
            largest = torch.zeros(len(pointers) - 1).scatter_reduce_(0, row, exact.abs(), "amax")
            scale = _bfloat16_rounded_up(largest / 127)
            scales[first : first + step] = scale
            rounded = (exact / scale.float()[row]).nan_to_num(0.0).round_().clamp_(-127, 127)
            values[int(pointers[0]) : int(pointers[-1])] = rounded.to(torch.int8)
        return values, scales

    def _row_of_value(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_embeddings), self.row_pointers.diff())


def column_dtype(embedding_dim: int) -> torch.dtype:
    """Smallest dtype for column numbers: uint8 up to D = 256, else uint16."""
    if embedding_dim > 2**16:
        raise NotImplementedError(
            describe("embedding_dim", "supported is up to 65536", embedding_dim)
        )
    return torch.uint8 if embedding_dim <= 2**8 else torch.uint16


def pointer_dtype(num_values: int) -> torch.dtype:
    """Smallest dtype for row pointers: int32 below 2^31 values, else int64."""
    return torch.int32 if num_values < 2**31 else torch.int64


def _check_dtype(field: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(describe(f"CsrTable.{field}", f"{names}", tensor.dtype))
    check(tensor.dim() == 1, f"CsrTable.{field}", "one dimension", tuple(tensor.shape))


def _bfloat16_rounded_up(positive: Tensor) -> Tensor:
    """The smallest bfloat16 not below: the upper half of the bits, plus one where the lower half is
    not zero."""
    return ((positive.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
