"""Sparse tables as scipy.sparse files, for programs that know nothing of this project."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dnis_torchrec.serving.csr_table import CsrTable

SCIPY_FORMATS = ("coo", "csr")
"""Interchange files that `write_scipy` knows."""


def write_scipy(table: CsrTable, path: Path, *, scipy_format: str) -> None:
    """Writes a table as a scipy.sparse ``.npz`` file, for interchange; nothing here reads it back.

    Args:
        table: the table, with float32 values.
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
