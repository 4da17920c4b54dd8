"""Interchange files: what scipy reads is the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy import sparse as scipy_sparse

from dnis_torchrec.artifact.writing import write_scipy
from dnis_torchrec.serving import CsrTable


@pytest.mark.parametrize("scipy_format", ["coo", "csr"])
@pytest.mark.parametrize("dim", [5, 300])
def test_scipy_files(tmp_path: Path, scipy_format: str, dim: int) -> None:
    weight = torch.randn(7, dim) * (torch.rand(7, dim) < 0.3)
    write_scipy(CsrTable.from_dense(weight), tmp_path / "t.npz", scipy_format=scipy_format)
    matrix = scipy_sparse.load_npz(tmp_path / "t.npz")
    assert matrix.format == scipy_format
    assert torch.from_numpy(matrix.toarray()).equal(weight)
