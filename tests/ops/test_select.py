"""Selection, bags split by block, rows rounded: compiled, on Triton and by torch, against loops and each other."""

from __future__ import annotations

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
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec import blocks_from_counts
from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops import select as block_operators
from dnis_torchrec.ops import select_triton
from dnis_torchrec.ops.build import INSTRUCTION_SETS, SELECTION
from dnis_torchrec.ops.select import RowRounding, are_compiled, are_good_bags, fill_rows_, select_pieces, split_bags
from dnis_torchrec.scheme import TableScheme
from dnis_torchrec.selection import alpha
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from tests.fuzz_operators import CASES, valid_case
from tests.models import operators
from tests.reference import rounded, table_scheme, with_codes
from tests.tiny import bag_config
from tests.triton_on_numpy import DEVICE, KERNEL_WAYS, check_compiled, needs_compilation, needs_triton, without_triton

pytestmark = pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")
MOST = 2**63 - 1
KERNELS = [name for name in vars(select_triton) if name.endswith("_kernel")]


@pytest.mark.parametrize("name", CASES)
def test_every_operator_gives_what_loops_give(name: str) -> None:
    for seed in range(30):
        valid_case(name, f"{seed}")


@dataclass(frozen=True)
class Selection:
    """What `select_pieces` reads, and what its output is multiplied by."""

    bag_sums: Tensor
    alpha: Tensor
    rows: Tensor
    divisors: Tensor | None
    layout: Tensor
    coefficients: Tensor

    def to(self, device: str, dtype: torch.dtype | None = None) -> Selection:
        """All that a kernel reads, there; its floats in a dtype."""
        parts = {name: part for name, part in vars(self).items() if part is not None and name != "layout"}
        moves = {name: part.to(device, dtype if part.is_floating_point() else None) for name, part in parts.items()}
        return replace(self, **moves)


@contextmanager
def kernels(way: str, tables: Sequence[Tensor] = ()) -> Iterator[str]:
    """Has `select_pieces` and `fill_rows_` run the kernels, on numpy or as Triton does; yields where tensors go.

    `tables` are tensors whose addresses alone are handed over. Any other way changes nothing.
    """
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):  # a GPU multiplies inf by 0 silently
        if way in ("numpy", "triton"):
            patch.setattr(block_operators, "_operators", lambda values: select_triton)
        if way == "numpy":
            without_triton(patch, [select_triton], tables)
        yield DEVICE if way == "triton" else "cpu"


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
        bag_sums=torch.randn(batch_size, in_column),
        alpha=torch.rand(begin),
        rows=rows.int(),
        divisors=torch.randint(1, 4, (batch_size, len(dims))).float() if has_divisors else None,
        layout=torch.tensor(pieces),
        coefficients=torch.randn(batch_size, width),
    )


def select(case: Selection, learns: Sequence[bool] = (True, True)) -> tuple[list[Tensor], list[bool]]:
    """Result and gradients, and what was watched."""
    parts, flags = (case.bag_sums, case.alpha), []
    leaves = [part.clone().requires_grad_(to) for part, to in zip(parts, learns, strict=True)]
    lookup = leaves[0] * 1.0  # as a lookup's result: what may be worked on in place
    rule, width = (case.rows, case.divisors, case.layout), case.coefficients.shape[1]
    out = select_pieces(lookup, leaves[1], *rule, width, watch=lambda is_finite, _: flags.append(bool(is_finite)))
    value = out.detach().clone()
    del lookup
    out.backward(case.coefficients)
    return [value, *(leaf.grad for leaf in leaves if leaf.grad is not None)], flags


LEARNS = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("way", KERNEL_WAYS)
@pytest.mark.parametrize("learns", LEARNS)
@settings(max_examples=25, deadline=None)
@given(case=selections())
def test_kernels_give_the_bits_of_the_operators(way: str, learns: tuple[bool, bool], case: Selection) -> None:
    """The output and the gradient of what was looked up; alpha's is summed in another order."""
    expected, flags = select(case, learns)
    with kernels(way) as device:
        found, flags_of_kernels = select(case.to(device), learns)
    assert flags_of_kernels == flags
    exact = 1 + learns[0]
    assert all(part.cpu().equal(other) for part, other in zip(found[:exact], expected[:exact], strict=True))
    for part, other in zip(found[exact:], expected[exact:], strict=True):
        torch.testing.assert_close(part.cpu(), other, rtol=1e-5, atol=1e-5)


def wide_case(batch_size: int = 130, num_pieces: int = 5, dim: int = 40, num_rows: int = 35) -> Selection:
    """More than one program along every axis: samples, columns, chunks of samples and blocks."""
    torch.manual_seed(0)
    layout = [[k * dim, k * dim, dim, 0, k, k, num_rows] for k in range(num_pieces)]
    rows = torch.randint(-1, num_rows, (batch_size, num_pieces))
    return Selection(
        bag_sums=torch.randn(batch_size, num_pieces * dim),
        alpha=torch.rand((num_rows + num_pieces) * dim),
        rows=torch.where(rows < 0, -1, rows + torch.arange(num_pieces)).int(),
        divisors=None,
        layout=torch.tensor(layout),
        coefficients=torch.randn(batch_size, num_pieces * dim),
    )


@pytest.mark.parametrize("way", KERNEL_WAYS)
def test_many_programs_and_the_same_bits_every_time(way: str) -> None:
    case = wide_case()
    expected, _ = select(case)
    with kernels(way) as device:
        runs = [select(case.to(device))[0] for _ in range(2)]
    assert all(first.equal(second) for first, second in zip(*runs, strict=True))
    assert all(part.cpu().equal(other) for part, other in zip(runs[0][:2], expected[:2], strict=True))
    torch.testing.assert_close(runs[0][2].cpu(), expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", KERNEL_WAYS)
def test_half_precision_is_calculated_in_float32_and_rounded_once(way: str) -> None:
    case = wide_case(batch_size=20, num_rows=3)
    half = replace(case, bag_sums=case.bag_sums.half(), coefficients=case.coefficients.half())
    expected, _ = select(half.to("cpu", torch.float32))
    with kernels(way) as device:
        found, _ = select(replace(half.to(device), alpha=case.alpha.to(device)))
    assert [part.dtype for part in found] == [torch.float16, torch.float16, torch.float32]
    assert found[0].cpu().equal(expected[0].half())
    assert found[1].cpu().equal(expected[1].half())
    torch.testing.assert_close(found[2].cpu(), expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["cpu", "cpu in float64", *KERNEL_WAYS])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("row", "divisor"), [(4, None), (4, 2.0), (-1, None)])
def test_a_gradient_that_is_not_finite_is_seen(way: str, bad: float, row: int, divisor: float | None) -> None:
    """Also that of an empty bag, which goes nowhere; and what an empty bag holds is not looked at."""
    case = wide_case(batch_size=20, num_rows=3).to("cpu", torch.float64 if way == "cpu in float64" else torch.float32)
    case = replace(case, divisors=divisor and torch.full((20, 5), divisor, dtype=case.alpha.dtype))
    case.rows[17, 4], case.coefficients[17, 199] = row, 1e30
    assert select(case)[1] == [True]
    case.coefficients[17, 199] = bad
    if row < 0:
        case.bag_sums[17, 160:] = bad
    with kernels(way) as device:
        (out, gradient, of_alpha), flags = select(case.to(device))
    assert flags == [False]
    assert bool(out.isfinite().all())
    assert int((~gradient.isfinite()).sum()) == (0 if row < 0 else 1)
    assert int((~of_alpha.isfinite()).sum()) == (0 if row < 0 else 1)


@pytest.mark.parametrize("way", KERNEL_WAYS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (37, 101)])
def test_values_become_zero_unless_a_flag_keeps_them(way: str, shape: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_triton, "MOST_SUMS", 2)  # fewer programs than steps
        for is_kept in (True, False):
            with kernels(way) as device:
                values = torch.full(shape, float("nan")).to(device)
                select_triton.zero_unless_(values, torch.tensor(is_kept, device=device))
            assert bool((values.isnan() if is_kept else values == 0).all())


@pytest.mark.parametrize("way", KERNEL_WAYS)
def test_pieces_of_one_output_share_its_columns(way: str) -> None:
    layout = torch.tensor([[0, 0, 4, 0, 0, 0, 9], [4, 4, 4, 0, 0, 0, 9]])
    message = "layout: expected pieces of output 0 at the same columns and of one alpha, got others"
    with kernels(way) as device, pytest.raises(ValueError, match=message):
        select(replace(wide_case(batch_size=2, num_pieces=2), layout=layout).to(device), (True, False))


def select_two_outputs(lookup: Tensor) -> Tensor:
    """Two outputs from a lookup's result ``(2, 4)``, an empty bag among them."""
    layout = torch.tensor([[0, 0, 2, 0, 0, 0, 1], [2, 2, 2, 2, 1, 0, 1]])
    rows = torch.tensor([[0, 0], [-1, 0]], dtype=torch.int32)
    return select_pieces(lookup, torch.tensor([0.5, 0.25, 2.0, 4.0]), rows, None, layout, 4)


GRADIENT_OF_TWO = torch.tensor([[0.5, 0.125, 8.0, 32.0], [0.0, 0.0, 8.0, 32.0]])
"""Of the squares of that, where all values are 1."""


def test_the_memory_of_a_leaf_or_of_a_view_is_left_alone() -> None:
    leaf, whole = torch.ones(2, 4, requires_grad=True), torch.ones(2, 2, 4)
    assert select_two_outputs(leaf).equal(select_two_outputs(whole[:, 0]))
    assert leaf.equal(torch.ones(2, 4))
    assert whole.equal(torch.ones(2, 2, 4))


def test_the_gradient_takes_the_outputs_memory_once_nobody_holds_it() -> None:
    leaf, places = torch.ones(2, 4, requires_grad=True), []
    lookup = leaf * 1.0
    place = lookup.data_ptr()
    lookup.grad_fn.register_prehook(lambda gradients: places.append(gradients[0].data_ptr()))
    loss = select_two_outputs(lookup).square().sum()
    del lookup
    loss.backward()
    assert places == [place]
    assert leaf.grad.equal(GRADIENT_OF_TWO)


@pytest.mark.parametrize("who", ["caller", "view", "graph"])
def test_the_outputs_memory_is_left_alone_while_somebody_holds_it(who: str) -> None:
    leaf = torch.ones(2, 4, requires_grad=True)
    out = select_two_outputs(leaf * 1.0)
    loss, holder = out.square().sum(), {"caller": out, "view": out.detach()[1:], "graph": None}[who]
    values = None if holder is None else holder.tolist()
    del out
    for _ in range(2 if who == "graph" else 1):
        loss.backward(retain_graph=who == "graph")
    assert values is None or holder.tolist() == values
    assert leaf.grad.equal(2 * GRADIENT_OF_TWO if who == "graph" else GRADIENT_OF_TWO)


@pytest.fixture
def widest() -> Iterator[str]:
    """The instruction set of this machine, put back afterwards."""
    name = SELECTION.instruction_set()
    yield name
    SELECTION.instruction_set(limit=name)


def test_every_instruction_set_gives_the_same_bits(widest: str) -> None:
    case, dim = wide_case(batch_size=300, num_pieces=3, dim=67, num_rows=5), 67
    layout = torch.tensor([[k * dim, min(k, 1) * dim, dim, 0, min(k, 1), 0, 8] for k in range(3)])
    case = replace(case, layout=layout, coefficients=case.coefficients[:, : 2 * dim].contiguous())
    scheme, weight, residual = table(40, 37, 3, 5, is_sorted=True), torch.randn(40, 37), torch.randn(40, 37) / 4
    results = []
    for name in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(widest) + 1]:
        assert SELECTION.instruction_set(limit=name) == name == SELECTION.instruction_set()
        results.append([*select(case)[0], *select(case.to("cpu", torch.float64))[0]])
        results[-1] += by_both(scheme, weight, residual, None, 0, slice(0, 37))
    assert all(part.equal(first) for parts in results for part, first in zip(parts, results[0], strict=True))


def test_an_instruction_set_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="instruction set 'avx': expected a known instruction set"):
        SELECTION.instruction_set(limit="avx")


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1], [3, -1], [MOST, 2, 1], [MOST, MOST, 4], [2**62] * 4 + [2]])
def test_lengths_that_are_not_those_of_the_ids_are_no_good(lengths: list[int]) -> None:
    """Nor those whose sum overflows to the right one."""
    bounds = torch.tensor([MOST])
    assert are_good_bags(torch.tensor([0, 1]), torch.tensor([2]), bounds, bounds)
    assert not are_good_bags(torch.tensor([0, 1]), torch.tensor(lengths), bounds, bounds)


@pytest.mark.parametrize("way", ["cpu", *KERNEL_WAYS])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_blocks", [1, 3, 16, 17, 300])
def test_rows_of_single_id_features(way: str, num_blocks: int, id_dtype: torch.dtype) -> None:
    """By ends and by map, few blocks of two rows and many; one key is of nobody and multi-hot, some bags are empty."""
    torch.manual_seed(num_blocks)
    ends = torch.arange(1, num_blocks + 1) * 2
    block_of_row = (torch.arange(2 * num_blocks) // 2).to(torch.uint8 if num_blocks < 256 else torch.uint16)
    lengths = torch.cat([torch.tensor([2, 0, 3]).repeat(100), torch.randint(2, (600,))])
    ids = torch.randint(2 * num_blocks, (int(lengths.sum()),)).to(id_dtype)
    places, routings = [(2, 2, 7), (0, 1, 5), (3, 1, 0)], [ends, block_of_row, torch.empty(0, dtype=torch.int64)]
    with kernels(way, routings) as device:
        rows = torch.full((300, 4), -7, dtype=torch.int32, device=device)
        parts = ids.to(device), lengths.to(device), [routing.to(device) for routing in routings]
        fill_rows_(rows, *parts, places)
    bags, expected = ids.split(lengths.tolist()), torch.full((300, 4), -7)
    for (column, key, first), is_of_blocks in zip(places, (True, True, False), strict=True):
        for sample, bag in enumerate(bags[300 * key : 300 * key + 300]):
            expected[sample, column] = first + is_of_blocks * int(bag[0]) // 2 if len(bag) else -1
    assert rows.cpu().equal(expected.int())


@pytest.mark.parametrize("way", KERNEL_WAYS)
def test_an_id_that_a_map_does_not_have_is_not_read(way: str) -> None:
    block_of_row = torch.zeros(3, dtype=torch.uint8)
    ids, lengths = torch.tensor([2, 3, -1]), torch.tensor([1, 1, 1])
    with kernels(way, [block_of_row]) as device:
        rows = torch.empty(3, 1, dtype=torch.int32, device=device)
        fill_rows_(rows, ids.to(device), lengths.to(device), [block_of_row.to(device)], [(0, 0, 4)])
    assert rows.flatten().tolist() == [4, -1, -1]


def test_a_split_bag_below_0_is_none() -> None:
    one, pieces = torch.tensor([1]), torch.tensor([-9, 0])
    split = split_bags(one, one, None, [torch.tensor([2])], pieces, [0, 2], 1, 1)
    assert (split[0].tolist(), split[1].tolist()) == ([], [0])


ONE, ENDS = torch.tensor([1]), torch.tensor([2, 4])
ROWS, SIZES = torch.zeros(1, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
SPARSE_LAYOUT = torch.tensor([[0, 2, 2, 1, 0, 2], [2, 0, 2, 1, 7, 3]])
BAGS = {"ids": ONE, "lengths": ONE}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fill_rows": BAGS | {"routings": [ENDS], "places": [0, 0, 0], "rows": ROWS},
    "split_bags": BAGS
    | {"weights": None, "routings": [ENDS], "pieces": torch.tensor([0, 1]), "first_of": [0, 2], "batch_size": 1}
    | {"split_ids": ONE.clone(), "split_lengths": ONE[:0].clone(), "split_weights": None},
    "find_pieces": BAGS
    | {"routings": [torch.zeros(3, dtype=torch.uint8)], "fields": [0, 0, 1], "starts": torch.zeros(1, 2).long()}
    | {"rows": SIZES[:1].clone(), "sizes": SIZES[:1].clone(), "piece_of_id": SIZES[:1].clone()},
    "gather_ids": {"ids": torch.tensor([0]), "weights": None, "starts": torch.tensor([[0, 2]]), "sizes": SIZES}
    | {"piece_of_id": SIZES[:1].clone(), "num_keys": [1], "ids_out": torch.tensor([0])}
    | {"lengths_out": torch.zeros(2, dtype=torch.int64), "weights_out": None},
    "select_pooled": {"bag_sums": torch.ones(1, 2), "alpha": torch.ones(2), "rows": ROWS, "divisors": torch.ones(1, 1)}
    | {"layout": torch.tensor([[0, 0, 2, 0, 0, 0, 1]]), "out": torch.ones(1, 2)},
    "select_sparse": {"bag_sums": torch.ones(2, 4), "alpha": torch.ones(27)}
    | {"starts": torch.tensor([[0, 1, 2], [2, 3, 3]]), "rows": torch.tensor([1, 0, 4], dtype=torch.int32)}
    | {"layout": SPARSE_LAYOUT, "out": torch.ones(2, 4)},
    "round_rows": {"codes": torch.ones(3, 4, 5), "routing": ENDS, "rows": None, "first_row": 2}
    | {"weight": torch.ones(3, 5), "residual": torch.zeros(3, 5)},
}
"""Arguments of operators, from which those that are refused differ."""


def refused_layouts() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Layouts that point beside their tensors."""
    for layout, message in (
        ([0, 0, 2, 0, -1, 0, 1], "divisors: expected one for each output"),
        ([MOST, 0, 2, 0, 0, 0, 1], "layout: expected pieces inside"),
        ([0, MOST, 2, 0, 0, 0, 1], "layout: expected outputs inside"),
        ([0, 0, MOST, 0, 0, 0, 1], "layout: expected pieces inside"),
        ([0, 0, 2, MOST, 0, 0, 1], "layout: expected alphas inside"),
        ([0, 0, 2, 0, 0, 0, 2], "layout: expected rows of alpha"),
        ([0, 0, 2, 0, 0, -1, 1], "layout: expected rows of alpha"),
        ([0, 0, 2, 0, 0, MOST, MOST], "layout: expected rows of alpha"),
        ([0, 0, 0, 0, 0, MOST, MOST], "layout: expected rows of alpha"),
    ):
        yield "select_pooled", {"layout": torch.tensor([layout])}, message
    for column, part in enumerate(("keys", "outputs", "keys", "keys", "alphas", "alphas")):
        for number in (-(2**63), -1, 2**62, MOST):
            layout = SPARSE_LAYOUT.clone()
            layout[0, column] = number
            yield "select_sparse", {"layout": layout}, f"layout: expected {part} inside"


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("fill_rows", {"ids": torch.tensor([9]), "routings": [torch.zeros(3).byte()]}, "ids: expected rows of their table"),
    ("fill_rows", {"ids": torch.tensor([1, 2]), "lengths": torch.tensor([2])}, "lengths: expected bags of at most one"),
    *(
        # what stands in front decides where a key's ids begin, also where nobody reads that key
        ("fill_rows", {"lengths": torch.tensor(n), "places": [0, 2, 0]}, "lengths: expected as many ids as they say")
        for n in ([-5, 0, 1], [MOST, 1, 1], [2, 1, -2], [MOST, MOST, 3])
    ),
    ("split_bags", {"lengths": torch.tensor([2])}, "lengths: expected as many ids as they say"),
    ("split_bags", {"lengths": torch.tensor([MOST])}, "lengths: expected as many ids as they say"),
    ("split_bags", {"first_of": [-1, 2]}, "first_of: expected F . 1 rising places"),
    (
        "split_bags",
        {"first_of": [0, 3, 2], "routings": [ENDS] * 2, "lengths": torch.tensor([MOST, MOST])},
        "first_of: expected F . 1 rising places",
    ),
    ("split_bags", {"batch_size": -1}, "batch_size: expected no more than there are lengths"),
    ("split_bags", {"batch_size": 2**62}, "batch_size: expected no more than there are lengths"),
    ("find_pieces", {"ids": torch.tensor([9])}, "ids: expected rows of their table"),
    ("find_pieces", {"lengths": torch.tensor([2])}, "lengths: expected as many ids as they say"),
    *(
        # a size below 0 would have the ids of the next piece written in front of all
        ("gather_ids", {"sizes": torch.tensor([size, 1]).int()}, "sizes: expected")
        for size in (-5, 2**31 - 1)
    ),
    *(("gather_ids", {"num_keys": [keys]}, "num_keys: expected") for keys in (0, -1, 2**62)),
    *(
        (
            "select_pooled",
            {"rows": ROWS + 1, "alpha": torch.ones(6), "layout": torch.tensor([[0, 0, 2, 0, 0, first, 1]])},
            "rows: expected rows of alpha",
        )
        for first in (0, 2)
    ),
    (
        "select_pooled",
        {"bag_sums": torch.ones(1, 1), "layout": torch.tensor([[0, 0, 1, 0, 0, 0, 1]]), "out": ROWS.view(torch.float)},
        "rows: expected memory that nothing is written to",
    ),
    ("select_sparse", {"alpha": torch.ones(9)}, "rows: expected rows of alpha"),
    ("select_sparse", {"bag_sums": torch.ones(1, 4)}, "starts: expected pieces that there are"),
    ("select_sparse", {"bag_sums": torch.ones(2, 3)}, "layout: expected keys inside"),
    *refused_layouts(),
    ("round_rows", {"rows": torch.tensor([3])}, "rows: expected rows of the shard, in blocks that have codes"),
    ("round_rows", {"rows": torch.tensor([-1])}, "rows: expected rows of the shard"),
    ("round_rows", {"codes": torch.ones(2, 4, 5)}, "rows: expected rows of the shard, in blocks that have codes"),
    ("round_rows", {"codes": torch.ones(3, 4, 6)}, r"codes: expected shape \(S \+ 1, 4, D\)"),
    ("round_rows", {"routing": torch.zeros(4).byte()}, "routing: expected all rows of the shard"),
    ("round_rows", {"first_row": -1}, "first_row: expected a row of the table"),
    ("round_rows", {"residual": torch.ones(2, 5)}, "residual: expected the shape of the weights"),
    ("round_rows", {"weight": torch.ones(3, 5).double()}, "weight: expected another dtype or layout"),
    ("round_rows", dict.fromkeys(["weight", "residual"], torch.ones(3, 5)), "residual: expected memory that nothing"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSALS)
def test_what_would_lead_outside_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"block operators: {message}"):
        getattr(torch.ops.dnis_torchrec, name)(*(ARGUMENTS[name] | changes).values())


def mixed_collection(longest: int = 3) -> tuple[SoftSelectionEmbeddingBagCollection, KeyedJaggedTensor]:
    """Single-id, multi-hot, MEAN and shared features of two dims, keys in any order; alpha drawn, and a batch.

    With bags of one id at most all features are single-id ones.
    """
    tables = [bag_config("a", 9, 4, "one", "two"), bag_config("b", 7, 8, "many", pooling=PoolingType.MEAN)]
    generator = torch.Generator().manual_seed(2)
    counts = {table.name: torch.randint(1, 9, (table.num_embeddings,), generator=generator) for table in tables}
    blocks = blocks_from_counts(
        FrequencyCounts(counts, {"one": 1, "two": longest, "many": longest}, 9), tables, num_blocks=3, least_rows=1
    )
    lengths = torch.tensor([3, 0, 1, 1, 0, 1, 2, 1, 0], dtype=torch.int32).clamp(max=longest)
    ids = torch.randint(7, (int(lengths.sum()),), generator=generator)
    features = KeyedJaggedTensor(keys=["many", "one", "two"], values=ids, lengths=lengths)
    torch.manual_seed(0)
    wrapper = SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=tables), blocks)
    for dim in wrapper.alpha.dims:
        wrapper.alpha.of(dim).uniform_(0, 1)
    return wrapper, features


def steps(wrapper: SoftSelectionEmbeddingBagCollection, features: KeyedJaggedTensor) -> list[torch.Tensor]:
    """Outputs, gradients and hits of a lower and of an upper step."""
    values = wrapper(features).values()
    values.square().sum().backward()
    with wrapper.alpha.upper_level() as hits:
        loss = wrapper(features).values().square().sum()
        gradients = torch.autograd.grad(loss, [wrapper.alpha.of(dim) for dim in wrapper.alpha.dims])
    return [values.detach(), *(p.grad for p in wrapper.parameters()), *gradients, *hits.values()]


@pytest.mark.parametrize("longest", [1, 3])
@pytest.mark.parametrize("way", ["torch", "numpy", pytest.param("cuda", marks=[pytest.mark.gpu, needs_triton])])
def test_a_collection_learns_the_same_everywhere(way: str, longest: int) -> None:
    """Without the operators, by the kernels on numpy, where lookups lie on the CPU, and on a GPU."""
    expected = steps(*mixed_collection(longest))
    with operators(compiled=way != "torch"):
        wrapper, features = mixed_collection(longest)
        device = torch.device("cuda" if way == "cuda" else "cpu")
        with kernels(way, list(wrapper.selection.buffers())):
            found = steps(wrapper.to(device), features.to(device))
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part.cpu(), other)


class Nothing:
    """A kernel that does nothing, wherever its tensors lie."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
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
        for name in KERNELS:
            patch.setattr(select_triton, name, Nothing())
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
@needs_compilation
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("flags", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_a_gpu_and_rounds_as_the_cpu_does(name: str, flags: tuple[bool, ...], dtype: str) -> None:
    kernel = getattr(select_triton, name)
    constants = dict(zip(("has_divisors", "in_order", "keep_empty"), flags, strict=True))
    constants["blocks_per_program"] = 16
    constants = {name: part for name, part in constants.items() if name in kernel.arg_names}
    pointers = dict.fromkeys(["bag_sums", "grad_pooled", "grad", "out", "values"], f"*{dtype}")
    pointers["is_kept"] = "*u8"
    pointers |= dict.fromkeys(["alpha", "divisors", "sums"], "*fp32")
    pointers |= dict.fromkeys(["ids", "lengths", "ends_of_bags", "features"], "*i64")
    pointers |= dict.fromkeys(["rows", "output_of_column", "outputs", "piece_of_column", "pieces", "fault"], "*i32")
    types = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in constants}
    check_compiled(kernel, types, constants, select_triton.WARPS_PER_TILE)


def test_a_failing_compiler_is_told_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match=r"block operators: expected a C\+\+ compiler(.|\n)*somewhat slower"):
        assert not SELECTION.is_there()


def test_alphas_gradient_does_not_depend_on_how_a_large_batch_is_cut() -> None:
    """3,000 bags of one piece each, in 1,000 rows of three keys."""
    starts, rows = torch.arange(3001).unsqueeze(0), torch.randint(7, (3000,)).int()
    grad, bag_sums, layout = torch.randn(3000, 2), torch.randn(1000, 6), torch.tensor([[0, 0, 2, 3, 0, 2]])
    gradients, threads = [], torch.get_num_threads()
    for number in (1, 2):
        torch.set_num_threads(number)
        gradients.append(torch.empty(14))
        torch.ops.dnis_torchrec.sum_sparse_alpha_gradient(grad, bag_sums, starts, rows, layout, gradients[-1])
    torch.set_num_threads(threads)
    assert gradients[0].any()
    assert gradients[0].equal(gradients[1])


def table(num_rows: int, dim: int, num_blocks: int, seed: int, *, is_sorted: bool) -> TableScheme:
    """A table with drawn codes; some of its rows may belong to no block."""
    torch.manual_seed(seed)
    blocks = torch.randint(num_blocks + 1, (num_rows,))
    routing = RowRouting.from_map(blocks, num_blocks)
    if is_sorted:
        counts = torch.bincount(blocks, minlength=num_blocks + 1)[:-1]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        routing = RowRouting(num_rows, num_blocks, boundaries=ends)
    return with_codes(table_scheme("t", routing, torch.ones(num_blocks, dim).bool()), seed=seed)


def by_both(
    scheme: TableScheme, weight: Tensor, residual: Tensor, rows: Tensor | None, first_row: int, columns: slice
) -> tuple[Tensor, Tensor]:
    """The same from the compiled operator and from torch's."""
    results = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_operators, "are_compiled", lambda compiled=compiled: compiled)
            patch.setattr(block_operators, "ROUNDED_AT_A_TIME", 7)
            parts = weight.clone(), residual.clone()
            RowRounding(scheme.codes, scheme.routing, first_row, columns, torch.device("cpu")).round_(*parts, rows)
            results.append(parts)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)
    return results[0]


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 20), st.sampled_from([1, 3, 20]), st.booleans())
def test_rows_are_rounded_bit_for_bit(seed: int, num_rows: int, dim: int, num_blocks: int, is_sorted: bool) -> None:
    scheme = table(num_rows, dim, num_blocks, seed, is_sorted=is_sorted)
    first_row, first_column = (int(torch.randint(most, ())) for most in (num_rows, dim))
    rows, columns = slice(first_row, num_rows), slice(first_column, int(torch.randint(first_column, dim, ())) + 1)
    weight, residual = torch.randn(num_rows, dim) * 2, torch.randn(num_rows, dim) / 4
    of_shard = weight[rows, columns].contiguous(), residual[rows, columns].contiguous()
    found, lacking = by_both(scheme, *of_shard, None, first_row, columns)
    latent, blocks = weight + residual, scheme.routing.all_blocks()
    assert found.equal(decode_rows(encode_rows(latent, blocks, scheme.codes), blocks, scheme.codes)[rows, columns])
    torch.testing.assert_close(found, rounded(scheme, latent)[rows, columns], rtol=0, atol=1e-4)
    bits = torch.cat([scheme.codes.bits, torch.zeros(1, dim, dtype=torch.uint8)])[blocks]
    scale = torch.cat([scheme.codes.scale, torch.ones(1, dim)])[blocks]
    half = torch.where((bits > 0) & (bits < 32), scale / 2, 0.0)[rows, columns]
    assert lacking.equal((latent[rows, columns] - found).clamp(-half, half))
    some = torch.randperm(len(found))[: len(found) // 2]
    again, lacks = by_both(scheme, *of_shard, some, first_row, columns)
    is_chosen = torch.zeros(len(found), 1, dtype=torch.bool).index_fill_(0, some, True)
    assert again.equal(torch.where(is_chosen, found, of_shard[0]))
    assert lacks.equal(torch.where(is_chosen, lacking, of_shard[1]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_passed_on_alike(bad: float) -> None:
    weight = torch.randn(6, 5).index_fill_(0, torch.tensor([1, 4]), bad)
    by_both(table(6, 5, 2, 1, is_sorted=False), weight, torch.zeros(6, 5), None, 0, slice(0, 5))
