"""CSR of tables: exact, in the smallest integers, a chunk of rows at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse as scipy_sparse

from dnis_torchrec.export.sparse import SparseTable, column_dtype, pointer_dtype, sparse_table, write_scipy
from dnis_torchrec.serving import mixed_dimension


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.integers(1, 20)), draw(st.sampled_from([1, 5, 64, 256, 257]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    density = draw(st.sampled_from([0.0, 0.1, 1.0]))
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)


@given(weights(), st.sampled_from([1, 7, 2**22]))
def test_round_trip_chunk_by_chunk(weight: torch.Tensor, values_per_chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_dimension, "VALUES_PER_CHUNK", values_per_chunk)
        sparse = sparse_table(weight)
        assert torch.cat(list(sparse.dense_chunks())).equal(weight)
    assert sparse.to_dense().equal(weight)
    wanted = scipy_sparse.csr_matrix(weight.numpy())
    assert sparse.values.tolist() == wanted.data.tolist()
    assert sparse.columns.long().tolist() == wanted.indices.tolist()
    assert sparse.row_pointers.tolist() == wanted.indptr.tolist()
    assert sparse.columns.dtype == (torch.uint8 if weight.shape[1] <= 256 else torch.uint16)
    assert sparse.row_pointers.dtype == torch.int32
    assert sparse.values.dtype == torch.float32


def test_takes_views_and_half_precision() -> None:
    weight = torch.randn(6, 8).t()
    assert sparse_table(weight).to_dense().equal(weight)
    half = torch.randn(4, 3).half()
    assert sparse_table(half).to_dense().equal(half.float())
    parameter = torch.nn.Parameter(torch.randn(2, 2))
    assert not sparse_table(parameter).values.requires_grad


def test_dtypes() -> None:
    assert [column_dtype(dim) for dim in (1, 256, 257, 65_536)] == [torch.uint8] * 2 + [torch.uint16] * 2
    assert [pointer_dtype(count) for count in (0, 2**31 - 1, 2**31)] == [torch.int32] * 2 + [torch.int64]
    with pytest.raises(NotImplementedError, match="supported is up to 65536, got 65537"):
        column_dtype(65_537)


def test_highest_column_of_uint16() -> None:
    weight = torch.zeros(2, 65_536)
    weight[1, -1] = 3.0
    sparse = sparse_table(weight)
    assert sparse.columns.long().tolist() == [65_535]
    assert sparse.to_dense().equal(weight)


@pytest.mark.parametrize(
    ("pointers", "columns", "message"),
    [
        ([0, 2, 1, 2], [0, 1], "row_pointers"),
        ([1, 2], [0, 1], "row_pointers"),
        ([0, 1], [0, 1], "row_pointers"),
        ([], [0, 1], "row_pointers"),
        ([0, 2], [0, 4], "columns"),
        ([0, 2], [0], "columns"),
    ],
)
def test_malformed_arrays_are_refused(pointers: list[int], columns: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"SparseTable.{message}: expected"):
        SparseTable(
            embedding_dim=4,
            values=torch.ones(2),
            columns=torch.tensor(columns, dtype=torch.uint8),
            row_pointers=torch.tensor(pointers, dtype=torch.int32),
        )


@pytest.mark.parametrize("scipy_format", ["coo", "csr"])
@pytest.mark.parametrize("dim", [5, 300])
def test_scipy_files(tmp_path: Path, scipy_format: str, dim: int) -> None:
    weight = torch.randn(7, dim) * (torch.rand(7, dim) < 0.3)
    write_scipy(sparse_table(weight), tmp_path / "t.npz", scipy_format=scipy_format)
    matrix = scipy_sparse.load_npz(tmp_path / "t.npz")
    assert matrix.format == scipy_format
    assert torch.from_numpy(matrix.toarray()).equal(weight)
