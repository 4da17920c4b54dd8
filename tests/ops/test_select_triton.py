"""The Triton kernels of soft selection: on a GPU, through Triton's interpreter, or on numpy.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_select_triton.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.ops import batches_triton, select_triton
from dnis_torchrec.ops import select as block_operators
from dnis_torchrec.ops.select import are_compiled, fill_rows_, select_pieces
from dnis_torchrec.selection import alpha
from tests.ops.test_block_operators import mixed_collection, steps
from tests.triton_compiled import check_compiled
from tests.triton_on_numpy import without_triton

pytestmark = pytest.mark.skipif(
    not are_compiled(), reason="the oracle is compiled: no C++ compiler, or DNIS_NO_COMPILE"
)
needs_triton = pytest.mark.skipif(batches_triton.triton is None, reason="needs Triton, which comes with torch for CUDA")
on_a_device = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JITTED = {"_tile": "_tile_of_outputs", "_factors": "_rows_and_factors", "_select_kernel": "_select_tile"}
JITTED |= {"_place": "_place_of_piece"}
JITTED |= {"_spread_kernel": "_spread_tile", "_sum_kernel": "_sum_chunk", "_fill_kernel": "_fill_feature"}
JITTED |= {"_zero_kernel": "_zero_values"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Arguments of `select_pieces`, and coefficients that make a loss of its result."""

    pooled: Tensor
    alpha: Tensor
    rows: Tensor
    divisors: Tensor | None
    layout: Tensor
    coefficients: Tensor

    def to(self, device: str) -> Selection:
        """All that a kernel reads, there."""
        moved = {name: part.to(device) for name, part in vars(self).items() if part is not None and name != "layout"}
        return replace(self, **moved)


@contextmanager
def kernels(way: str, tables: Sequence[Tensor] = ()) -> Iterator[str]:
    """Has `select_pieces` and `fill_rows_` run the kernels, on numpy or as Triton does; yields where tensors go.

    `tables` are tensors whose addresses alone are handed over.
    """
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):  # a GPU multiplies inf by 0 silently
        patch.setattr(block_operators, "_operators", lambda values: select_triton)
        if way == "numpy":
            without_triton(patch, [select_triton], JITTED, list(tables))
        yield "cpu" if way == "numpy" else DEVICE


WAYS = ["numpy", pytest.param("triton", marks=[needs_triton, on_a_device])]


@st.composite
def selections(draw: Any) -> Selection:
    """Outputs of one piece or several in any order, of several D and tables, empty bags, divisors, unused rows."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch_size = draw(st.sampled_from([0, 1, 7, 37]))
    dims = draw(st.lists(st.sampled_from([0, 1, 3, 8, 37]), min_size=1, max_size=4))
    num_rows = {dim: draw(st.integers(1, 40)) for dim in dims}
    begins, begin = {}, 0
    for dim in num_rows:
        begins[dim], begin = begin, begin + num_rows[dim] * dim
    out_columns, width = {}, 0
    for output in draw(st.permutations(range(len(dims)))):
        out_columns[output], width = width, width + dims[output]
    pieces = []
    for output, dim in enumerate(dims):
        for _ in range(draw(st.integers(1, 3)) if draw(st.booleans()) else 1):
            first = draw(st.integers(0, num_rows[dim] - 1))
            count = draw(st.integers(1, num_rows[dim] - first))
            pieces.append([0, out_columns[output], dim, begins[dim], output, first, count])
    in_column = 0
    for piece in draw(st.permutations(pieces)) if draw(st.booleans()) else pieces:  # as sharded collections order them
        piece[0], in_column = in_column, in_column + piece[2]
    rows = torch.stack([torch.randint(-1, count, (batch_size,)) for *_, count in pieces], dim=1)
    rows = torch.where(rows < 0, -1, rows + torch.tensor([first for *_, first, _ in pieces]))
    has_divisors = draw(st.booleans())
    return Selection(
        pooled=torch.randn(batch_size, in_column),
        alpha=torch.rand(begin),
        rows=rows.int(),
        divisors=torch.randint(1, 4, (batch_size, len(dims))).float() if has_divisors else None,
        layout=torch.tensor(pieces),
        coefficients=torch.randn(batch_size, width),
    )


def select(case: Selection, learns: Sequence[bool]) -> tuple[list[Tensor], list[bool]]:
    """Result and gradients, and what was watched."""
    leaves = [case.pooled.clone().requires_grad_(learns[0]), case.alpha.clone().requires_grad_(learns[1])]
    watched: list[bool] = []
    lookup = leaves[0] * 1.0  # as a lookup's result: what may be worked on in place
    out = select_pieces(
        lookup,
        leaves[1],
        case.rows,
        case.divisors,
        case.layout,
        case.coefficients.shape[1],
        watch=lambda is_finite, _: watched.append(bool(is_finite)),
    )
    value = out.detach().clone()
    del lookup
    out.backward(case.coefficients)
    return [value, *(leaf.grad for leaf in leaves if leaf.grad is not None)], watched


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("learns", [(True, False), (False, True), (True, True)])
@settings(max_examples=25, deadline=None)
@given(case=selections())
def test_selection_and_its_gradients_are_the_cpu_operators(
    way: str, learns: tuple[bool, bool], case: Selection
) -> None:
    """The bits of the output and of the pooled embeddings' gradient; alpha's is summed in another order."""
    expected, watched = select(case, learns)
    with kernels(way) as device:
        got, seen = select(case.to(device), learns)
    assert seen == watched == ([True] if learns[0] else [])
    exact = 2 if learns[0] else 1
    assert all(own.cpu().equal(other) for own, other in zip(got[:exact], expected[:exact], strict=True))
    for own, other in zip(got[exact:], expected[exact:], strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=1e-5, atol=1e-5)


def wide_case(batch_size: int = 130, num_pieces: int = 5, dim: int = 40, num_rows: int = 35) -> Selection:
    """More than one program along every axis: samples, columns, chunks of samples and blocks."""
    torch.manual_seed(0)
    layout = [[k * dim, k * dim, dim, 0, k, k, num_rows] for k in range(num_pieces)]
    rows = torch.randint(-1, num_rows, (batch_size, num_pieces))
    return Selection(
        pooled=torch.randn(batch_size, num_pieces * dim),
        alpha=torch.rand((num_rows + num_pieces) * dim),
        rows=torch.where(rows < 0, -1, rows + torch.arange(num_pieces)).int(),
        divisors=None,
        layout=torch.tensor(layout),
        coefficients=torch.randn(batch_size, num_pieces * dim),
    )


@pytest.mark.parametrize("way", WAYS)
def test_many_programs_and_the_same_bits_every_time(way: str) -> None:
    case = wide_case()
    expected, _ = select(case, (True, True))
    with kernels(way) as device:
        runs = [select(case.to(device), (True, True))[0] for _ in range(2)]
    assert all(first.equal(second) for first, second in zip(*runs, strict=True))
    assert all(own.cpu().equal(other) for own, other in zip(runs[0][:2], expected[:2], strict=True))
    torch.testing.assert_close(runs[0][2].cpu(), expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_half_precision_is_calculated_in_float32_and_rounded_once(way: str) -> None:
    case = wide_case(batch_size=20, num_rows=3)
    half = replace(case, pooled=case.pooled.half(), coefficients=case.coefficients.half())
    exact = replace(case, pooled=half.pooled.float(), coefficients=half.coefficients.float())
    expected, _ = select(exact, (True, True))
    with kernels(way) as device:
        got, _ = select(half.to(device), (True, True))
    assert [part.dtype for part in got] == [torch.float16, torch.float16, torch.float32]
    assert got[0].cpu().equal(expected[0].half())
    assert got[1].cpu().equal(expected[1].half())
    torch.testing.assert_close(got[2].cpu(), expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [4, -1])
def test_a_gradient_that_is_not_finite_is_seen(way: str, bad: float, row: int) -> None:
    """Also that of an empty bag, which goes nowhere; and what an empty bag holds is not looked at."""
    case = wide_case(batch_size=20, num_rows=3)
    case.rows[17, 4], case.coefficients[17, 199] = row, bad
    if row < 0:
        case.pooled[17, 160:] = bad
    with kernels(way) as device:
        (out, gradient, of_alpha), watched = select(case.to(device), (True, True))
    assert watched == [False]
    assert bool(out.isfinite().all())
    assert int((~gradient.isfinite()).sum()) == (0 if row < 0 else 1)
    assert int((~of_alpha.isfinite()).sum()) == (0 if row < 0 else 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (37, 101)])
def test_values_become_zero_unless_a_flag_keeps_them(way: str, shape: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_triton, "MOST_SUMS", 2)  # fewer programs than steps
        for is_kept in (True, False):
            with kernels(way) as device:
                values = torch.full(shape, float("nan")).to(device)
                select_triton.zero_unless_(values, torch.tensor(is_kept, device=device))
            assert bool((values.isnan() if is_kept else values == 0).all())


@pytest.mark.parametrize("way", WAYS)
def test_pieces_of_one_output_share_its_columns(way: str) -> None:
    case = replace(
        wide_case(batch_size=2, num_pieces=2), layout=torch.tensor([[0, 0, 4, 0, 0, 0, 9], [4, 4, 4, 0, 0, 0, 9]])
    )
    message = "layout: expected pieces of output 0 at the same columns and of one alpha, got others"
    with kernels(way) as device, pytest.raises(ValueError, match=message):
        select(case.to(device), (True, False))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_blocks", [1, 3, 16, 17, 300])
def test_rows_of_single_id_features(way: str, num_blocks: int, id_dtype: torch.dtype) -> None:
    """By ends and by map, few blocks and many; one key is of nobody and multi-hot, some bags are empty."""
    torch.manual_seed(num_blocks)
    ends = torch.arange(1, num_blocks + 1) * 2
    block_of_row = torch.bucketize(torch.arange(2 * num_blocks), ends, right=True)
    block_of_row = block_of_row.to(torch.uint8 if num_blocks < 256 else torch.uint16)
    lengths = torch.cat([torch.tensor([2, 0, 3]).repeat(100), torch.randint(2, (600,))])
    ids = torch.randint(2 * num_blocks, (int(lengths.sum()),)).to(id_dtype)
    places = [(2, 2, 7), (0, 1, 5), (3, 1, 0)]
    routings = [ends, block_of_row, torch.empty(0, dtype=torch.int64)]
    expected = fill_rows_(torch.full((300, 4), -7, dtype=torch.int32), ids, lengths, routings, places)
    with kernels(way, routings) as device:
        rows = torch.full((300, 4), -7, dtype=torch.int32, device=device)
        moved = [routing.to(device) for routing in routings]
        fill_rows_(rows, ids.to(device), lengths.to(device), moved, places)
    assert rows.cpu().equal(expected)


@pytest.mark.parametrize("way", WAYS)
def test_an_id_that_a_map_does_not_have_is_not_read(way: str) -> None:
    block_of_row = torch.zeros(3, dtype=torch.uint8)
    ids, lengths = torch.tensor([2, 3, -1]), torch.tensor([1, 1, 1])
    with kernels(way, [block_of_row]) as device:
        rows = torch.empty(3, 1, dtype=torch.int32, device=device)
        fill_rows_(rows, ids.to(device), lengths.to(device), [block_of_row.to(device)], [(0, 0, 4)])
    assert rows.flatten().tolist() == [4, -1, -1]


@pytest.mark.parametrize("longest", [1, 3])
def test_a_collection_learns_by_the_kernels_what_it_does_by_the_operators(longest: int) -> None:
    """On numpy, whatever the machine: here lookups lie on the CPU."""
    expected = steps(*mixed_collection(longest))
    wrapper, features = mixed_collection(longest)
    with kernels("numpy", list(wrapper.selection.buffers())):
        got = steps(wrapper, features)
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other)


class _Nothing:
    """A kernel that does nothing, wherever its tensors lie."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *arguments: Any, **fixed: Any) -> None:
        assert {part.device.type for part in arguments if isinstance(part, Tensor)} == {"meta"}


def on_meta(bags: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=bags.keys(), values=bags.values().to("meta"), lengths=bags.lengths().to("meta"), stride=bags.stride()
    )


@pytest.mark.parametrize("longest", [1, 3])
def test_selection_reads_nothing_back(longest: int) -> None:
    """On meta, torch's device of tensors without content, all that a host would have to wait for is an error."""
    wrapper, features = mixed_collection(longest)
    split = features if wrapper.bag_splitter is None else wrapper.bag_splitter(features)
    selection = wrapper.selection.to("meta")
    pooled = wrapper.embedding_bag_collection(split)
    wrapper.alpha.to("meta")
    leaf = pooled.values().detach().to("meta").requires_grad_()

    def select_on_meta() -> Tensor:
        lookup = KeyedTensor(keys=pooled.keys(), length_per_key=pooled.length_per_key(), values=leaf * 1.0)
        return selection(lookup, on_meta(features), on_meta(split)).values()

    with kernels("numpy"), pytest.MonkeyPatch.context() as patch:
        for name in JITTED:
            patch.setattr(select_triton, name, _Nothing())
        patch.setattr(alpha, "can_select", lambda values: True)
        out = select_on_meta()
        out.sum().backward()
        with wrapper.alpha.upper_level():
            alphas = [wrapper.alpha.of(dim) for dim in wrapper.alpha.dims]
            gradients = torch.autograd.grad(select_on_meta().sum(), alphas)
    assert out.shape == (3, 16)
    assert leaf.grad is not None
    assert [gradient.shape for gradient in gradients] == [alpha.shape for alpha in alphas]


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, nothing is compiled")
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("flags", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("name", [name for name in JITTED if name.endswith("_kernel")])
def test_compiles_without_a_gpu_and_rounds_as_the_cpu_does(name: str, flags: tuple[bool, ...], dtype: str) -> None:
    kernel = getattr(select_triton, name)
    fixed = dict(zip(("has_divisors", "in_order", "keep_empty"), flags, strict=True))
    fixed |= {"fields_per_output": 7, "fields_per_piece": 8, "fields_per_feature": 6}
    fixed |= {"samples_per_program": 16, "columns_per_program": 64, "samples_per_step": 8, "blocks_per_program": 16}
    fixed |= {"ends_per_step": 16, "values_per_step": 1024}
    fixed = {name: part for name, part in fixed.items() if name in kernel.arg_names}
    pointers = dict.fromkeys(["pooled", "grad_pooled", "grad", "out", "values"], f"*{dtype}")
    pointers["is_kept"] = "*u8"
    pointers |= dict.fromkeys(["alpha", "divisors", "sums"], "*fp32")
    pointers |= dict.fromkeys(["ids", "lengths", "ends_of_bags", "features"], "*i64")
    pointers |= dict.fromkeys(["rows", "output_of_column", "outputs", "piece_of_column", "pieces", "fault"], "*i32")
    types = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in fixed}
    check_compiled(kernel, types, fixed, select_triton.WARPS_PER_TILE)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("longest", [1, 3])
def test_a_collection_learns_on_a_gpu_what_it_does_on_a_cpu(longest: int) -> None:
    expected = steps(*mixed_collection(longest))
    wrapper, features = mixed_collection(longest)
    got = steps(wrapper.to("cuda"), features.to(torch.device("cuda")))
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own.cpu(), other)
