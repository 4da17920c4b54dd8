"""CsrTable: exact in float32, within the stated error in float16 and int8, and made of nothing but a table's arrays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse as scipy_sparse

from dnis_torchrec import scheme as scheme_module
from dnis_torchrec.serving import CsrTable
from dnis_torchrec.serving.csr_table import CSR_VALUE_DTYPES, column_dtype, pointer_dtype


@st.composite
def sparse_weights(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 16, 256, 257])))
    density = draw(st.sampled_from([0.0, 0.1, 1.0]))
    magnitude = draw(st.sampled_from([1e-30, 1e-4, 1.0, 1e3]))
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density) * magnitude


@given(sparse_weights())
def test_dense_and_back(weight: torch.Tensor) -> None:
    table = CsrTable.from_dense(weight)
    assert table.to_dense().equal(weight)
    assert table.values.numel() == int(weight.count_nonzero())
    assert table.columns.dtype == (torch.uint8 if weight.shape[1] <= 256 else torch.uint16)
    assert table.row_pointers.dtype == torch.int32
    width, rows = table.columns.element_size(), len(weight)
    pointers = 4 * (rows + 1) if weight.shape[1] > 255 else rows + 8  # compact: one record
    assert table.num_bytes == (4 + width) * table.values.numel() + pointers
    written = table.to_tensors()
    kept = {"interleaved_rows", "compact_row_pointers" if weight.shape[1] <= 255 else "row_pointers"}
    assert set(table.lookup_tensors()) == kept
    assert set(written) == {"values", "columns", "row_pointers"} | kept
    assert table.num_bytes == sum(array.nbytes for array in table.lookup_tensors().values())


def test_is_what_scipy_calls_csr() -> None:
    weight = torch.randn(20, 300) * (torch.rand(20, 300) < 0.1)
    table, wanted = CsrTable.from_dense(weight), scipy_sparse.csr_matrix(weight.numpy())
    assert table.values.tolist() == wanted.data.tolist()
    assert table.columns.long().tolist() == wanted.indices.tolist()
    assert table.row_pointers.tolist() == wanted.indptr.tolist()


@given(sparse_weights(), st.sampled_from([1, 7, 2**22]), st.data())
def test_rows_are_gathered_a_chunk_at_a_time(weight: torch.Tensor, values_per_chunk: int, data: st.DataObject) -> None:
    """And any rows of a table are a table, and tables one after the other are one."""
    middle = data.draw(st.integers(0, len(weight)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheme_module, "VALUES_PER_CHUNK", values_per_chunk)
        whole = CsrTable.from_dense(weight)
        parts = [
            CsrTable.from_rows(lambda i, j: weight[i:j], first, last, embedding_dim=weight.shape[1])
            for first, last in ((0, middle), (middle, len(weight)))
        ]
    assert whole.to_dense().equal(weight)
    assert whole.rows(middle, len(weight)).equal(weight[middle:])
    assert parts[1].to_dense().equal(weight[middle:])
    joined = CsrTable.concatenate(parts).to_tensors()
    assert all(tensor.equal(joined[name]) for name, tensor in whole.to_tensors().items())
    small = CsrTable.concatenate([part.quantized(torch.int8) for part in parts]).to_tensors()
    assert all(tensor.equal(small[name]) for name, tensor in whole.quantized(torch.int8).to_tensors().items())
    whole.check_rows()


def test_takes_views_and_half_precision() -> None:
    weight = torch.randn(6, 8).t()
    assert CsrTable.from_dense(weight).to_dense().equal(weight)
    half = torch.randn(4, 3).half()
    assert CsrTable.from_dense(half).to_dense().equal(half.float())
    parameter = torch.nn.Parameter(torch.randn(2, 2))
    assert not CsrTable.from_dense(parameter).values.requires_grad


def test_highest_column_of_uint16() -> None:
    weight = torch.zeros(2, 65_536)
    weight[1, -1] = 3.0
    table = CsrTable.from_dense(weight)
    assert table.columns.long().tolist() == [65_535]
    assert table.to_dense().equal(weight)


@pytest.mark.parametrize(
    ("field", "array", "message"),
    [
        ("row_pointers", torch.tensor([0, 3, 2, 4]), "row_pointers: expected rising ones, got others in row 1"),
        ("columns", torch.tensor([0, 1, 0, 4], dtype=torch.uint8), r"columns: expected 0\.\.3, got others in row 2"),
        ("columns", torch.tensor([0, 1, 3, 2], dtype=torch.uint8), "columns: expected them to rise .* in row 2"),
        ("columns", torch.tensor([0, 1, 2, 2], dtype=torch.uint8), "columns: expected them to rise .* in row 2"),
        ("values", torch.tensor([1.0, float("nan"), 1.0, 1.0]), "values: expected finite ones, got others in row 1"),
        ("scales", torch.tensor([1.0, 1.0, float("inf")]).bfloat16(), "scales: expected finite ones, .* in row 2"),
        (
            "compact_row_pointers",
            torch.tensor([0] * 8 + [1, 2, 1], dtype=torch.uint8),
            "compact_row_pointers: expected what the row pointers say",
        ),
        ("interleaved_rows", torch.zeros(20).byte(), "interleaved_rows: expected what the other arrays say"),
    ],
)
def test_rows_that_are_none(field: str, array: torch.Tensor, message: str) -> None:
    columns = torch.tensor([0, 1, 2, 3], dtype=torch.uint8)
    arrays = {"values": torch.ones(4), "columns": columns, "row_pointers": torch.tensor([0, 1, 2, 4])}
    if field == "scales":
        arrays["values"] = arrays["values"].to(torch.int8)
    table = CsrTable(embedding_dim=4, **arrays | {field: array})
    with pytest.raises(ValueError, match=f"CsrTable.{message}"):
        table.check_rows()


def test_dtypes() -> None:
    assert [column_dtype(dim) for dim in (1, 256, 257, 65_536)] == [torch.uint8] * 2 + [torch.uint16] * 2
    assert [pointer_dtype(count) for count in (0, 2**31 - 1, 2**31)] == [torch.int32] * 2 + [torch.int64]


@given(sparse_weights())
def test_float16_is_within_its_stated_error(weight: torch.Tensor) -> None:
    table = CsrTable.from_dense(weight).quantized(torch.float16)
    assert table.values.dtype == torch.float16
    assert ((table.to_dense() - weight).abs() <= weight.abs() * 2**-11 + 2**-25).all()


@given(sparse_weights())
def test_int8_is_within_its_stated_error(weight: torch.Tensor) -> None:
    exact = CsrTable.from_dense(weight)
    table = exact.quantized(torch.int8)
    assert (table.values.dtype, table.scales.dtype) == (torch.int8, torch.bfloat16)
    bound = 0.004 * weight.abs().amax(dim=1, keepdim=True)
    assert ((table.to_dense() - weight).abs() <= bound).all()
    assert table.num_bytes == exact.num_bytes - 3 * exact.values.numel() + 2 * len(weight)


def test_int8_uses_its_range() -> None:
    table = CsrTable.from_dense(torch.tensor([[127.0, -63.5], [1e-3, -2e-3]])).quantized(torch.int8)
    assert table.values.abs().max() >= 126
    assert table.values.tolist()[:2] == [127, -64]


def test_quantized_twice_and_to_the_same() -> None:
    table = CsrTable.from_dense(torch.eye(3))
    assert table.quantized(torch.float32) is table
    small = table.quantized(torch.int8)
    assert small.quantized(torch.int8) is small
    with pytest.raises(ValueError, match=r"expected float32 to start from, got torch\.int8"):
        small.quantized(torch.float16)
    with pytest.raises(TypeError, match=r"values: expected one of .*got torch\.int4"):
        table.quantized(torch.int4)


@pytest.mark.parametrize("dtype", CSR_VALUE_DTYPES[1:])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_cannot_be_quantised(dtype: torch.dtype, bad: float) -> None:
    with pytest.raises(ValueError, match="expected finite values"):
        CsrTable.from_dense(torch.tensor([[1.0, bad]])).quantized(dtype)


def test_too_large_for_float16() -> None:
    with pytest.raises(ValueError, match=r"expected at most 65504 for float16.*take int8"):
        CsrTable.from_dense(torch.tensor([[1e5]])).quantized(torch.float16)


def test_too_many_columns() -> None:
    assert CsrTable.from_dense(torch.ones(1, 2**16)).columns.dtype == torch.uint16
    with pytest.raises(NotImplementedError, match="embedding_dim: supported is up to 65536, got 65537"):
        CsrTable.from_dense(torch.zeros(1, 2**16 + 1))


@pytest.mark.parametrize(
    ("field", "array", "error", "message"),
    [
        ("values", torch.ones(2).double(), TypeError, "values: expected float32 or float16 or int8"),
        ("values", torch.ones(1, 2), ValueError, "values: expected one dimension"),
        ("columns", torch.zeros(2), TypeError, "columns: expected uint8 or uint16"),
        ("columns", torch.zeros(3, dtype=torch.uint8), ValueError, "columns: expected 2 of them, got 3"),
        ("row_pointers", torch.tensor([0.0, 2.0]), TypeError, "row_pointers: expected int32 or int64"),
        ("row_pointers", torch.tensor([0, 3]), ValueError, r"row_pointers: expected rising.*from 0 to 2, got \(0, 3\)"),
        ("row_pointers", torch.tensor([1, 2]), ValueError, "row_pointers: expected rising"),
        ("row_pointers", torch.tensor([], dtype=torch.int64), ValueError, "row_pointers: expected rising.*got None"),
        ("scales", torch.ones(1, dtype=torch.bfloat16), ValueError, "scales: expected scales with int8 values only"),
        ("values", torch.ones(2, dtype=torch.int8), ValueError, "scales: expected scales with int8 values only"),
        ("compact_row_pointers", torch.zeros(9), TypeError, "compact_row_pointers: expected uint8"),
        ("interleaved_rows", torch.zeros(10), TypeError, "interleaved_rows: expected uint8"),
        ("interleaved_rows", torch.zeros(9).byte(), ValueError, "interleaved_rows: expected 10 bytes, got 9"),
        (
            "compact_row_pointers",
            torch.zeros(8, dtype=torch.uint8),
            ValueError,
            "compact_row_pointers: expected 9 bytes, got 8",
        ),
    ],
)
def test_arrays_of_no_table(field: str, array: torch.Tensor, error: type[Exception], message: str) -> None:
    arrays = {"values": torch.ones(2), "columns": torch.tensor([0, 1], dtype=torch.uint8)}
    arrays["row_pointers"] = torch.tensor([0, 2])
    with pytest.raises(error, match=message):
        CsrTable(embedding_dim=2, **arrays | {field: array})


@pytest.mark.parametrize(
    ("scales", "error"), [(torch.ones(1), TypeError), (torch.ones(2, dtype=torch.bfloat16), ValueError)]
)
def test_scales_of_no_table(scales: torch.Tensor, error: type[Exception]) -> None:
    small = CsrTable.from_dense(torch.ones(1, 2)).quantized(torch.int8)
    with pytest.raises(error, match=r"CsrTable\.scales: expected"):
        CsrTable(
            embedding_dim=2, values=small.values, columns=small.columns, row_pointers=small.row_pointers, scales=scales
        )
