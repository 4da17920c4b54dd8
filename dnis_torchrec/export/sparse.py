"""Exact sparse form: compressed sparse rows (CSR) of a table, in the smallest integers that say it.

Shapes: N rows, D embedding_dim, V retained values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.serving.mixed_dimension import rows_per_chunk

SCIPY_FORMATS = ("coo", "csr")
"""Interchange files that `write_scipy` knows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseTable:
    """A table in compressed sparse rows: row i holds ``values[row_pointers[i] : row_pointers[i + 1]]``.

    Attributes:
        embedding_dim: D.
        values: ``(V,)`` float32, row by row.
        columns: ``(V,)`` uint8 (D <= 256) or uint16, rising within a row.
        row_pointers: ``(N + 1,)`` int32, or int64 from 2^31 values on.

    Raises:
        ValueError: if the arrays do not describe N rows of D columns.

    Example:
        >>> sparse = sparse_table(torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]]))
        >>> sparse.values.tolist(), sparse.columns.tolist(), sparse.row_pointers.tolist()
        ([2.0, 3.0, 4.0], [1, 0, 1], [0, 1, 1, 3])
        >>> sparse.to_dense().tolist()
        [[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    """

    embedding_dim: int
    values: Tensor
    columns: Tensor
    row_pointers: Tensor

    def __post_init__(self) -> None:
        pointers, num_values = self.row_pointers, self.values.numel()
        rising = pointers.numel() > 0 and int(pointers[0]) == 0 and bool((pointers.diff() >= 0).all())
        requirement = f"expected rising row pointers from 0 to {num_values}"
        check(rising and int(pointers[-1]) == num_values, "SparseTable.row_pointers", requirement, "others")
        requirement = f"expected {num_values} columns in 0..{self.embedding_dim - 1}"
        within = num_values == 0 or int(self.columns.int().max()) < self.embedding_dim
        check(self.columns.numel() == num_values and within, "SparseTable.columns", requirement, "others")

    @property
    def num_embeddings(self) -> int:
        """N."""
        return self.row_pointers.numel() - 1

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first <= i < last`` as dense ``(last - first, D)``."""
        pointers = self.row_pointers[first : last + 1].long()
        begin, end = int(pointers[0]), int(pointers[-1])
        row = torch.repeat_interleave(torch.arange(last - first), pointers.diff())
        dense = torch.zeros(last - first, self.embedding_dim)
        dense[row, self.columns[begin:end].long()] = self.values[begin:end]
        return dense

    def dense_chunks(self) -> Iterator[Tensor]:
        """The rows in order, some thousand at a time."""
        step = rows_per_chunk(self.embedding_dim)
        for first in range(0, self.num_embeddings, step):
            yield self.rows(first, min(first + step, self.num_embeddings))

    def to_dense(self) -> Tensor:
        """The whole table, ``(N, D)`` float32."""
        return self.rows(0, self.num_embeddings)

    def to_tensors(self) -> dict[str, Tensor]:
        """The three arrays, for a safetensors file."""
        return {"values": self.values, "columns": self.columns, "row_pointers": self.row_pointers}


def column_dtype(embedding_dim: int) -> torch.dtype:
    """Smallest dtype for column numbers: uint8 up to D = 256, else uint16.

    Raises:
        NotImplementedError: above D = 65,536.

    Example:
        >>> column_dtype(256), column_dtype(257)
        (torch.uint8, torch.uint16)
    """
    if embedding_dim > 2**16:
        raise NotImplementedError(describe("embedding_dim", "supported is up to 65536", embedding_dim))
    return torch.uint8 if embedding_dim <= 2**8 else torch.uint16


def pointer_dtype(num_values: int) -> torch.dtype:
    """Smallest dtype for row pointers: int32 below 2^31 values, else int64.

    Example:
        >>> pointer_dtype(2**31 - 1), pointer_dtype(2**31)
        (torch.int32, torch.int64)
    """
    return torch.int32 if num_values < 2**31 else torch.int64


def sparse_table(weight: Tensor) -> SparseTable:
    """Gathers the non-zero values of a dense table, a chunk of rows at a time.

    Args:
        weight: ``(N, D)`` floating point; a view is enough.

    Returns:
        The same table without its zeros, exact in float32.

    Example:
        >>> sparse_table(torch.zeros(3, 2)).row_pointers.tolist()
        [0, 0, 0, 0]
    """
    num_rows, embedding_dim = weight.shape
    chunks = weight.detach().split(rows_per_chunk(embedding_dim))
    counts = torch.cat([torch.count_nonzero(chunk, dim=1).cpu() for chunk in chunks])
    num_values = int(counts.sum())
    pointers = torch.zeros(num_rows + 1, dtype=pointer_dtype(num_values))
    torch.cumsum(counts, 0, dtype=pointers.dtype, out=pointers[1:])
    values = torch.empty(num_values)
    columns = torch.empty(num_values, dtype=column_dtype(embedding_dim))
    first = 0
    for chunk in chunks:
        where = chunk.nonzero(as_tuple=True)
        last = first + len(where[1])
        values[first:last] = chunk[where]
        columns[first:last] = where[1].to(columns.dtype)
        first = last
    return SparseTable(embedding_dim=embedding_dim, values=values, columns=columns, row_pointers=pointers)


def write_scipy(table: SparseTable, path: Path, *, scipy_format: str) -> None:
    """Writes a table as a scipy.sparse ``.npz`` file, for interchange; nothing here reads it back.

    Args:
        table: the table.
        path: file to write.
        scipy_format: one of `SCIPY_FORMATS`.
    """
    # scipy takes most of a second to import and only this needs it
    from scipy import sparse

    shape = (table.num_embeddings, table.embedding_dim)
    arrays = (table.values.numpy(), table.columns.int().numpy(), table.row_pointers.numpy())
    matrix: Any = sparse.csr_matrix(arrays, shape=shape)
    build: Callable[[Any], Any] = sparse.coo_matrix if scipy_format == "coo" else sparse.csr_matrix
    sparse.save_npz(path, build(matrix))
