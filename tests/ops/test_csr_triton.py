"""The Triton kernel against torch's own operators: on a GPU, or anywhere through Triton's interpreter, or on numpy.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_csr_triton.py
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from dnis_torchrec.ops import csr_triton, triton_bags
from dnis_torchrec.ops.csr_operator import torch_csr_embedding_bag
from dnis_torchrec.ops.csr_triton import triton_csr_embedding_bag
from dnis_torchrec.ops.interleaved_rows import RowLayout
from dnis_torchrec.serving import load_operator
from tests.ops.test_csr_operator import Call, calls, large_call, small_call
from tests.triton_compiled import check_compiled
from tests.triton_on_numpy import without_triton

needs_triton = pytest.mark.skipif(triton_bags.triton is None, reason="needs Triton, which comes with torch for CUDA")
on_a_device = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(call: Call) -> Call:
    weights = None if call.per_sample_weights is None else call.per_sample_weights.to(DEVICE)
    moved = {"ids": call.ids.to(DEVICE), "offsets": call.offsets.to(DEVICE), "per_sample_weights": weights}
    return replace(call, **moved, tables=[table.to(DEVICE) for table in call.tables])


def pooled(call: Call) -> torch.Tensor:
    return triton_csr_embedding_bag(*on_device(call).arguments()).cpu()


JITTED = {"_number": "_number_at", "_bounds": "_row_bounds", "_float": "_as_float", "_kernel": "_pool_bag"}


@settings(max_examples=20, deadline=None)
@given(calls(most_cuts=0, longest=6))
def test_the_kernel_on_numpy_gives_the_bits_of_torch(call: Call) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_triton(patch, [csr_triton], JITTED, call.tables)
        assert triton_csr_embedding_bag(*call.arguments()).equal(torch_csr_embedding_bag(*call.arguments()))


@needs_triton
@on_a_device
@settings(max_examples=15)
@given(calls(most_cuts=0))
def test_gives_the_bits_of_torch(call: Call) -> None:
    assert pooled(call).equal(torch_csr_embedding_bag(*call.arguments()))


@needs_triton
@on_a_device
def test_an_unknown_id_is_asserted_or_contributes_zero() -> None:
    call = small_call(ids=torch.tensor([0, 3, 1]), zero_unknown=True)
    assert pooled(call).tolist() == [[0.0, 2.0], [0.0, 0.0]]
    if DEVICE == "cpu":  # on a GPU the assertion would end the process
        with pytest.raises(RuntimeError):
            pooled(replace(call, zero_unknown=False))


@needs_triton
@on_a_device
@pytest.mark.parametrize("offsets", [[0, 2, 4], [0, 3, 2], [0, 2, 2], [1, 2, 3], [0, 2**40, 3]])
def test_offsets_that_do_not_rise_to_the_number_of_ids_are_asserted(offsets: list[int]) -> None:
    if DEVICE == "cpu":  # on a GPU the assertion would end the process
        with pytest.raises(RuntimeError):
            pooled(small_call(offsets=torch.tensor(offsets)))


@needs_triton
@on_a_device
def test_shards_are_refused() -> None:
    call = small_call(layout=torch.tensor([[0, 2, 0, 2, 0, 4, 1]]))
    with pytest.raises(NotImplementedError, match="supported on a GPU is one shard per table, got 2"):
        pooled(call)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, nothing is compiled")
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    ("value_bytes", "column_bytes", "id_dtype", "pointer_bytes"), [(4, 1, "i64", 1), (2, 1, "i64", 8), (1, 2, "i32", 4)]
)
def test_compiles_without_a_gpu_and_rounds_as_the_cpu_does(
    value_bytes: int, column_bytes: int, id_dtype: str, pointer_bytes: int, is_weighted: bool
) -> None:
    pointers = {"ids": id_dtype, "offsets": "i64", "weights": "fp32" if is_weighted else id_dtype}
    pointers |= {"features": "i64", "fault": "i32", "out": "fp32"}
    numbers = dict.fromkeys(["num_ids", "num_bags", "batch_size", "width"], "i32")
    fixed = {"has_weights": is_weighted, "checks_ids": True, "value_bytes": value_bytes, "column_bytes": column_bytes}
    fixed |= {"scale_bytes": RowLayout(value_bytes, column_bytes).scale_bytes, "pointer_bytes": pointer_bytes}
    fixed |= {"record_bytes": 64, "start_bytes": 8, "rows_per_record": 56, "fields_per_feature": 7}
    fixed |= {"columns_per_program": 64, "values_per_step": csr_triton.VALUES_PER_STEP}
    types = {name: f"*{kind}" for name, kind in pointers.items()} | numbers
    check_compiled(csr_triton._kernel, types, fixed, csr_triton.WARPS_PER_PROGRAM)


@pytest.mark.gpu
@needs_triton
def test_the_operator_runs_on_a_gpu() -> None:
    """Many bags; and tables of several shards, which torch's own operators do."""
    load_operator()
    call = large_call()
    expected = torch_csr_embedding_bag(*call.arguments())
    assert pooled(call).equal(expected)
    arguments = on_device(call).arguments()
    assert torch.ops.dnis_torchrec.csr_embedding_bag.default(*arguments).cpu().equal(expected)
    one = torch.tensor([0, 0, 128, 63, 0], dtype=torch.uint8)  # 1.0 in column 0
    cut = small_call(tables=[one, torch.tensor([0, 1])] * 3)
    cut = replace(cut, layout=torch.tensor([[0, 3, 0, 2, 0, 4, 1]]))
    out = torch.ops.dnis_torchrec.csr_embedding_bag.default(*on_device(cut).arguments())
    assert out.cpu().equal(torch_csr_embedding_bag(*cut.arguments()))
