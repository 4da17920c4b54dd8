"""The Triton kernel of packed tables: on a GPU, through Triton's interpreter, or on numpy.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_packed_triton.py
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops import batches_triton, packed_triton
from dnis_torchrec.ops.packed_triton import triton_packed_embedding_bag
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import PackedEmbeddingBagCollection, load_operator
from tests.ops.test_packed_operator import PLACES, call
from tests.packed_reference import packed, packed_case
from tests.serving_reference import Case, cases, table_scheme
from tests.triton_compiled import check_compiled
from tests.triton_on_numpy import without_triton

needs_triton = pytest.mark.skipif(batches_triton.triton is None, reason="needs Triton, which comes with torch for CUDA")
on_a_device = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JITTED = {
    "_count": "_count_of_bits",
    "_place": "_place_in_record",
    "_locate": "_where_rows_stand",
    "segment_of_bags": "_segment_of_bags",
    "_bags": "_bags_of_program",
    "_words": "_words_of_rows",
    "_values": "_values_of_words",
    "_search_kernel": "_find_rows",
    "_kernel": "_pool_bags",
    "_constants_kernel": "_constants_of_group",
}


def by_operator(arguments: list[Any]) -> Tensor:
    """Compiled, or from torch's own operators where nothing can be compiled."""
    return torch.ops.dnis_torchrec.packed_embedding_bag.default(*arguments)


def on_numpy(arguments: list[Any]) -> Tensor:
    """The kernel, one program after another."""
    with pytest.MonkeyPatch.context() as patch:
        without_triton(patch, [packed_triton], JITTED, arguments[PLACES["tables"]])
        return triton_packed_embedding_bag(*arguments)


def on_device(arguments: list[Any]) -> Tensor:
    """The kernel as Triton runs it."""
    moved = [part.to(DEVICE) if isinstance(part, Tensor) else part for part in arguments]
    moved[PLACES["tables"]] = [table.to(DEVICE) for table in arguments[PLACES["tables"]]]
    return triton_packed_embedding_bag(*moved).cpu()


WAYS = [pytest.param(on_numpy, id="numpy"), pytest.param(on_device, id="triton", marks=[needs_triton, on_a_device])]


def of_case(case: Case, seed: int) -> list[Any]:
    """Arguments for the bags of a case over packed tables."""
    case, stored = packed_case(case, seed)
    module = PackedEmbeddingBagCollection(case.scheme, stored)
    seen: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        operator = torch.ops.dnis_torchrec.packed_embedding_bag
        compiled = operator.default
        patch.setattr(operator, "default", lambda *given: seen.append(list(given)) or compiled(*given))
        module(case.kjt())
    return seen[0]


def of_blocks(num_blocks: int, dim: int, *, weighted: bool = False) -> list[Any]:
    """Arguments for bags over one table of so many blocks, in no order."""
    torch.manual_seed(num_blocks)
    routing = RowRouting.from_map(torch.randint(num_blocks + 1, (1_500,)), num_blocks)
    scheme = table_scheme("t", routing, torch.ones(num_blocks, dim).bool(), pooling="mean", is_weighted=weighted)
    scheme, stored, _ = packed(scheme, Random(num_blocks))
    module = PackedEmbeddingBagCollection(MixedDimensionScheme({"t": scheme}), {"t": stored})
    offsets, ids = torch.tensor([0, 3, 3, 4, 9, 20, 21, 22, 22, 25, 30]), torch.randint(1_500, (30,))
    weights = torch.randn(30) if weighted else None
    layout = list(module.outputs.buffers())
    return [ids, offsets, weights, list(module.tables.buffers()), *layout, None, 10, dim, False]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_gives_the_bits_of_the_operator(way: Any, case: Case, seed: int) -> None:
    arguments = of_case(case, seed)
    assert way(arguments).equal(by_operator(arguments))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num_blocks", "dim"), [(1, 5), (3, 130), (8, 17), (12, 4), (100, 6)])
def test_takes_directories_of_any_size(way: Any, num_blocks: int, dim: int) -> None:
    for weighted in (False, True):
        arguments = of_blocks(num_blocks, dim, weighted=weighted)
        assert way(arguments).equal(by_operator(arguments))


def test_constants_are_made_once_and_anew_where_groups_have_changed() -> None:
    arguments = of_blocks(3, 17)
    assert on_numpy(arguments).equal(by_operator(arguments))
    groups = arguments[7]
    known = packed_triton._columns_of_groups[groups][1]
    assert on_numpy(arguments).equal(by_operator(arguments))
    assert packed_triton._columns_of_groups[groups][1] is known
    groups[:, 32:64].view(torch.float32).mul_(2.0)  # scales and biases
    changed = by_operator(arguments)
    assert on_numpy(arguments).equal(changed)
    with torch.inference_mode():
        arguments[7] = groups.clone()
        for _ in range(2):
            arguments[7][:, 32:64].view(torch.float32).mul_(0.5)
            assert on_numpy(arguments).equal(by_operator(arguments))


@pytest.mark.parametrize("way", WAYS)
def test_features_that_read_one_key_do_not_share_what_is_found(way: Any) -> None:
    arguments, _ = call()
    offsets, arguments[8] = arguments[1], [0, 0]
    arguments[0], arguments[1] = arguments[0][: offsets[arguments[9]]], offsets[: arguments[9] + 1]
    assert way(arguments).equal(by_operator(arguments))


@pytest.mark.parametrize("way", WAYS)
def test_unknown_ids_contribute_zero(way: Any) -> None:
    arguments, expected = call()
    arguments[0], arguments[-1] = torch.tensor([0, -1, 10, 1]), True
    expected[1, :18] = expected[0, 18:] = 0.0
    assert way(arguments).equal(expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the assertion would end the process")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, torch.tensor([0, 3, 10, 1])),
        (1, torch.tensor([0, 2, 1, 3, 4])),
        (1, torch.tensor([0, 1, 2, 3, 3])),
        (1, torch.tensor([0, 1, 2, 3, 2**40])),
        (1, torch.tensor([1, 1, 2, 3, 4])),
    ],
)
def test_unknown_ids_and_offsets_that_do_not_rise_are_asserted(way: Any, place: int, value: Tensor) -> None:
    arguments, _ = call()
    arguments[place] = value
    with pytest.raises(RuntimeError):
        way(arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the assertion would end the process")
@pytest.mark.parametrize("way", WAYS)
def test_directories_that_point_nowhere_are_asserted(way: Any) -> None:
    for place, value in ((1, 0xFF), (3, 2**40)):
        arguments, _ = call()
        tables = [table.clone() for table in arguments[3]]
        tables[place][: 24 // tables[place].itemsize] = value
        arguments[3] = tables
        with pytest.raises(RuntimeError):
            way(arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the assertion would end the process")
def test_a_row_behind_the_last_of_its_block_is_refused_as_the_operator_does() -> None:
    refused = []
    for size in range(4):  # more rows than these the bytes do not hold
        arguments, _ = call()
        arguments[6][:, 1] = size
        for look_up in (by_operator, on_numpy):
            try:
                look_up(arguments)
            except (RuntimeError, ValueError):
                refused.append((size, look_up.__name__))
    sizes = {size for size, _ in refused}
    assert sizes
    assert len(sizes) < 4
    assert len(refused) == 2 * len(sizes)


def test_features_without_bags() -> None:
    arguments, _ = call()
    for keys in ([0, 2], [-1, 0]):
        arguments[8] = keys
        with pytest.raises(ValueError, match="offsets: expected bags for each feature, got those of 2 keys"):
            on_numpy(arguments)
    arguments[8], arguments[9], arguments[1] = None, 0, torch.zeros(1, dtype=torch.int64)
    assert on_numpy(arguments).shape == (0, 36)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, nothing is compiled")
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("kind", "num_planes"), [(0, 1), (1, 1), (2, 3)])
def test_compiles_without_a_gpu_and_rounds_as_the_cpu_does(kind: int, num_planes: int, is_weighted: bool) -> None:
    pointers = {"ids": "i64", "found": "i64", "offsets": "i64", "weights": "fp32", "features": "i64"}
    pointers |= {"blocks": "i64", "columns": "i32", "fault": "i32", "out": "fp32"}
    numbers = dict.fromkeys(["num_ids", "num_bags", "batch_size", "width"], "i32")
    fixed = {"has_weights": is_weighted, "checks_ids": True, "kind": kind, "num_planes": num_planes}
    fixed |= {"rows_per_record": 128, "rows_per_start": 1 << 16, "columns_per_group": 16, "group_bits": 24}
    fixed |= {"fields_per_feature": 12, "bags_per_segment": 64, "ids_per_step": 128, "is_one_block": kind == 0}
    fixed |= {"bags_per_program": packed_triton.BAGS_PER_PROGRAM, "columns_per_program": 64}
    types = {name: f"*{kind}" for name, kind in pointers.items()} | numbers
    for kernel, num_warps in (
        (packed_triton._search_kernel, packed_triton.WARPS_PER_SEARCH),
        (packed_triton._kernel, packed_triton.NUM_WARPS),
    ):
        own = {name: part for name, part in fixed.items() if name in kernel.arg_names}
        check_compiled(kernel, {name: types[name] for name in kernel.arg_names if name not in own}, own, num_warps)


@pytest.mark.gpu
@needs_triton
def test_the_operator_runs_on_a_gpu() -> None:
    load_operator()
    arguments = of_blocks(8, 64)
    moved = [part.to("cuda") if isinstance(part, Tensor) else part for part in arguments]
    moved[3] = [table.to("cuda") for table in arguments[3]]
    assert by_operator(moved).cpu().equal(by_operator(arguments))
