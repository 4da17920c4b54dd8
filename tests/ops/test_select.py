"""Selection, bags split by block, rows rounded: compiled, on Triton and by torch, against loops and each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops import batches_triton, select_triton
from dnis_torchrec.ops import select as block_operators
from dnis_torchrec.ops import select as row_rounding
from dnis_torchrec.ops.build import INSTRUCTION_SETS, SELECTION
from dnis_torchrec.ops.select import (
    BagPieces,
    RowRounding,
    SparseBags,
    are_compiled,
    are_good_bags,
    fill_rows_,
    gather_bags,
    select_pieces,
    select_sparse,
    split_bags,
)
from dnis_torchrec.scheme import TableScheme
from dnis_torchrec.selection import alpha
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from tests.models import operators
from tests.reference import rounded, with_codes
from tests.triton_on_numpy import check_compiled, without_triton

needs_compiler = pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")


@st.composite
def selections(draw):
    """Pooled pieces of several widths, outputs of one piece or several, empty bags, divisors, more than one chunk."""
    batch_size = draw(st.sampled_from([0, 1, 3, 70, 600]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dims = draw(st.lists(st.sampled_from([1, 3, 8, 37]), min_size=1, max_size=3))
    num_rows, begins, begin = 3, {}, 0
    for dim in sorted(set(dims)):
        begins[dim], begin = begin, begin + num_rows * dim
    layout, in_column, out_column = [], 0, 0
    for output, dim in enumerate(dims):
        for _ in range(draw(st.integers(1, 3))):
            layout.append([in_column, out_column, dim, begins[dim], output, 0, num_rows])
            in_column += dim
        out_column += dim
    rows = torch.randint(-1, num_rows, (batch_size, len(layout)), generator=generator, dtype=torch.int32)
    pooled = torch.randn(batch_size, in_column, generator=generator, dtype=torch.float64)
    for k, (column, _, dim, *_) in enumerate(layout):
        pooled[:, column : column + dim] *= (rows[:, k] >= 0).unsqueeze(1)
    alpha = torch.rand(begin, generator=generator, dtype=torch.float64)
    divisors = None
    if draw(st.booleans()):
        divisors = torch.randint(1, 4, (batch_size, len(dims)), generator=generator).double()
    return pooled, alpha, rows, divisors, torch.tensor(layout), out_column


def select_naively(pooled, alpha, rows, divisors, layout, width) -> torch.Tensor:
    """The equation at the top of block_operators.py, a piece at a time, by autograd."""
    out = [pooled.new_zeros(len(pooled), 0)]
    for output in layout[:, 4].unique().tolist():
        total = 0
        for k in (layout[:, 4] == output).nonzero().flatten().tolist():
            column, _, dim, begin, *_ = layout[k].tolist()
            own = alpha[begin : begin + 3 * dim].view(3, dim)[rows[:, k].long().clamp(min=0)]
            total = total + pooled[:, column : column + dim] * own * (rows[:, k] >= 0).unsqueeze(1)
        out.append(total if divisors is None else total / divisors[:, output : output + 1])
    return torch.cat(out, dim=1)


@needs_compiler
@pytest.mark.parametrize(("pooled_learns", "alpha_learns"), [(True, False), (False, True), (True, True)])
@given(case=selections())
def test_selection_and_its_gradients(case, pooled_learns: bool, alpha_learns: bool) -> None:
    pooled, alpha, rows, divisors, layout, width = case
    watched: list[bool] = []
    expected_leaves = [pooled.clone().requires_grad_(pooled_learns), alpha.clone().requires_grad_(alpha_learns)]
    expected = select_naively(*expected_leaves, rows, divisors, layout, width)
    leaves = [pooled.clone().requires_grad_(pooled_learns), alpha.clone().requires_grad_(alpha_learns)]
    lookup = leaves[0] * 1.0  # as a lookup's result: what may be worked on in place
    got = select_pieces(
        lookup, leaves[1], rows, divisors, layout, width, watch=lambda is_finite, _: watched.append(is_finite)
    )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(leaves[0].detach(), pooled, rtol=0, atol=0)
    coefficients = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=got.dtype)
    for value, own in ((got, leaves), (expected, expected_leaves)):
        (value * coefficients).sum().backward()
        assert [leaf.grad is not None for leaf in own] == [pooled_learns, alpha_learns]
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, other.grad)
    assert watched == ([True] if pooled_learns else [])


@needs_compiler
def test_gradcheck() -> None:
    layout = torch.tensor([[0, 0, 2, 0, 0, 0, 2], [2, 2, 2, 0, 1, 0, 2], [4, 2, 2, 0, 1, 1, 1]])
    rows = torch.tensor([[0, 1, -1], [1, 0, 1]], dtype=torch.int32)
    divisors = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    pooled = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    pooled[0, 4:] = 0
    alpha = torch.rand(4, generator=generator, dtype=torch.float64).requires_grad_()

    def of(pooled: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        return select_pieces(pooled * 1.0, alpha, rows, divisors, layout, 4)

    assert torch.autograd.gradcheck(lambda own: of(pooled, own), (alpha,))
    nowhere_empty = (torch.randn(2, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    wide = lambda own: torch.cat([own, pooled[:, 4:]], dim=1)  # noqa: E731 - the piece of the empty bag stays zero
    assert torch.autograd.gradcheck(lambda own: of(wide(own), alpha.detach()), (nowhere_empty,))
    assert torch.autograd.gradcheck(lambda own, a: of(wide(own), a), (nowhere_empty, alpha))


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("row", "divisor"), [(0, 1), (0, 2), (-1, 1)])
def test_a_gradient_that_is_not_finite_is_seen(bad: float, dtype: torch.dtype, row: int, divisor: int) -> None:
    """Also that of an empty bag, which goes nowhere."""
    seen: list[bool] = []
    layout, rows = torch.tensor([[0, 0, 3, 0, 0, 0, 1]]), torch.zeros(5, 1, dtype=torch.int32)
    rows[4], divisors = row, torch.full((5, 1), float(divisor), dtype=dtype)
    pooled = torch.ones(5, 3, dtype=dtype, requires_grad=True)
    for value in (1e30, bad):
        out = select_pieces(
            pooled * 1, torch.ones(3, dtype=dtype), rows, divisors, layout, 3, watch=lambda f, _: seen.append(f)
        )
        gradient = torch.ones_like(out)
        gradient[4, 1] = value
        out.backward(gradient)
    assert seen == [True, False]


@needs_compiler
def test_the_memory_of_a_leaf_or_of_a_view_is_left_alone() -> None:
    layout, rows = torch.tensor([[0, 0, 2, 0, 0, 0, 1]]), torch.zeros(1, 1, dtype=torch.int32)
    leaf, half = torch.ones(1, 2, requires_grad=True), torch.tensor([0.5, 0.5])
    out = select_pieces(leaf, half, rows, None, layout, 2)
    whole = torch.ones(1, 2, 2)
    viewed = select_pieces(whole[:, 0], half, rows, None, layout, 2)
    assert out.tolist() == viewed.tolist() == [[0.5, 0.5]]
    assert leaf.tolist() == [[1.0, 1.0]]
    assert whole.tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


def _selected(lookup: torch.Tensor) -> torch.Tensor:
    """Two outputs from a lookup's result ``(2, 4)``, an empty bag among them."""
    layout = torch.tensor([[0, 0, 2, 0, 0, 0, 1], [2, 2, 2, 2, 1, 0, 1]])
    rows = torch.tensor([[0, 0], [-1, 0]], dtype=torch.int32)
    return select_pieces(lookup, torch.tensor([0.5, 0.25, 2.0, 4.0]), rows, None, layout, 4)


@needs_compiler
def test_the_gradient_takes_the_outputs_memory_once_nobody_holds_it() -> None:
    pooled, places = torch.ones(2, 4, requires_grad=True), []
    lookup = pooled * 1.0
    place = lookup.data_ptr()
    lookup.grad_fn.register_prehook(lambda gradients: places.append(gradients[0].data_ptr()))
    loss = _selected(lookup).square().sum()
    del lookup
    loss.backward()
    assert places == [place]
    assert pooled.grad.tolist() == [[0.5, 0.125, 8.0, 32.0], [0.0, 0.0, 8.0, 32.0]]


@needs_compiler
@pytest.mark.parametrize("who", ["caller", "view", "graph"])
def test_the_outputs_memory_is_left_alone_while_somebody_holds_it(who: str) -> None:
    pooled = torch.ones(2, 4, requires_grad=True)
    out = _selected(pooled * 1.0)
    loss, held = out.square().sum(), {"caller": out, "view": out.detach()[1:], "graph": None}[who]
    before = None if held is None else held.tolist()
    del out
    for _ in range(2 if who == "graph" else 1):
        loss.backward(retain_graph=who == "graph")
    assert before is None or held.tolist() == before
    expected = torch.tensor([[0.5, 0.125, 8.0, 32.0], [0.0, 0.0, 8.0, 32.0]])
    assert pooled.grad.equal(2 * expected if who == "graph" else expected)


@pytest.fixture
def widest() -> Iterator[str]:
    """The instruction set of this machine, put back afterwards."""
    name = SELECTION.instruction_set()
    yield name
    SELECTION.instruction_set(limit=name)


@needs_compiler
@pytest.mark.parametrize("wanted", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_instruction_set_gives_the_same_bits(wanted: str, dtype: torch.dtype, widest: str) -> None:
    if INSTRUCTION_SETS.index(wanted) > INSTRUCTION_SETS.index(widest):
        pytest.skip(f"this machine has {widest} at most")
    generator, dim = torch.Generator().manual_seed(0), 67
    layout = torch.tensor([[k * dim, min(k, 1) * dim, dim, 0, min(k, 1), 0, 5] for k in range(3)])
    rows = torch.randint(-1, 5, (300, 3), generator=generator, dtype=torch.int32)
    pooled = torch.randn(300, 3 * dim, generator=generator, dtype=dtype)
    alpha = torch.rand(5 * dim, generator=generator, dtype=dtype)
    weights = torch.randn(300, 2 * dim, generator=generator, dtype=dtype)
    results = []
    for name in ("baseline", wanted):
        assert SELECTION.instruction_set(limit=name) == name == SELECTION.instruction_set()
        own, own_alpha = pooled.clone().requires_grad_(), alpha.clone().requires_grad_()
        out = select_pieces(own * 1.0, own_alpha, rows, None, layout, 2 * dim)
        results.append([out, *torch.autograd.grad((out * weights).sum(), (own, own_alpha))])
    assert all(first.equal(second) for first, second in zip(*results, strict=True))


@needs_compiler
def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="instruction set 'avx': expected a known instruction set"):
        SELECTION.instruction_set(limit="avx")


@needs_compiler
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
@given(st.lists(st.lists(st.integers(-1, 4), max_size=3), min_size=4, max_size=4))
@example([[3], [0], [2], [0]])
@example([[3], [4], [2], [0]])
@example([[3], [0], [3], [0]])
@example([[3], [0], [-1], [0]])
@example([[3], [0, 1], [2], [0]])
@example([[3], [], [0, 1], [2]])
@example([[3], [0], [0, 1, 2], [2]])
@example([[], [], [], []])
def test_bags_within_bounds(length_dtype, id_dtype, bags: list[list[int]]) -> None:
    """Two features of two bags, of tables of 4 and of 3 rows; bags of at most one id, and of at most two."""
    ids = torch.tensor([row for bag in bags for row in bag], dtype=id_dtype)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=length_dtype)
    limits = ((4, 1), (4, 1), (3, 2), (3, 2))
    expected = all(
        len(bag) <= most and all(0 <= row < rows for row in bag) for bag, (rows, most) in zip(bags, limits, strict=True)
    )
    assert are_good_bags(ids, lengths, torch.tensor([4, 3]), torch.tensor([1, 2])) == expected


@needs_compiler
def test_bags_whose_lengths_are_not_those_of_the_ids() -> None:
    bounds = longest = torch.tensor([4])
    for lengths in ([1, 1, 1], [1], [3, -1]):
        assert not are_good_bags(torch.tensor([0, 1]), torch.tensor(lengths), bounds, longest)


@needs_compiler
@given(
    st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_split_bags(bags: list[list[int]], weighted: bool, id_dtype, length_dtype, as_map: bool) -> None:
    """Two features of three bags, blocks of rows 0..3, 4..6 and none; the second feature's block 1 is dropped."""
    ids = torch.tensor([row for bag in bags for row in bag], dtype=id_dtype)
    weights = torch.arange(len(ids)).float() if weighted else None
    lengths = torch.tensor([len(bag) for bag in bags], dtype=length_dtype)
    routing = torch.tensor([0] * 4 + [1] * 3 + [2] * 2, dtype=torch.uint8) if as_map else torch.tensor([4, 7])
    pieces = torch.tensor([0, 1, 3, 2, 3, 3])
    got, counts, got_weights = split_bags(ids, lengths, weights, [routing, routing], pieces, [0, 3, 6], 3, 3)
    expected, expected_counts, expected_weights = [], [], []
    positions = [list(range(start, start + len(bag))) for start, bag in zip(_starts(bags), bags, strict=True)]
    for feature, rows in ((0, range(4)), (0, range(4, 7)), (1, range(4))):
        for bag, places in list(zip(bags, positions, strict=True))[3 * feature : 3 * feature + 3]:
            kept = [(row, place) for row, place in zip(bag, places, strict=True) if row in rows]
            expected += [row for row, _ in kept]
            expected_weights += [float(place) for _, place in kept]
            expected_counts.append(len(kept))
    assert (got.tolist(), counts.tolist()) == (expected, expected_counts)
    assert (got.dtype, counts.dtype) == (id_dtype, length_dtype)
    assert (None if got_weights is None else got_weights.tolist()) == (expected_weights if weighted else None)


def _starts(bags: list[list[int]]) -> list[int]:
    return [sum(map(len, bags[:index])) for index in range(len(bags))]


@needs_compiler
@pytest.mark.parametrize("num_blocks", [1, 3, 16, 17, 300])
def test_rows_of_single_id_features(num_blocks: int) -> None:
    """By ends and by map, few blocks and many; the second key is empty in one sample, the first is of nobody."""
    ends = torch.arange(1, num_blocks + 1) * 2
    ids, lengths = torch.randint(2 * num_blocks, (8,)), torch.tensor([2, 0, 1, 1, 0, 1, 1, 1, 1])
    rows = torch.full((3, 2), -7, dtype=torch.int32)
    blocks = torch.bucketize(ids, ends, right=True)
    dtype = torch.uint8 if num_blocks < 256 else torch.uint16
    block_of_row = torch.bucketize(torch.arange(2 * num_blocks), ends, right=True).to(dtype)
    for routing in (ends, block_of_row):
        fill_rows_(rows, ids, lengths, [routing, routing], [(1, 2, 0), (0, 1, 5)])
        assert rows[:, 1].tolist() == blocks[5:].tolist()
        assert rows[:, 0].tolist() == [5 + int(blocks[3]), -1, 5 + int(blocks[4])]


@needs_compiler
def test_what_is_out_of_range_is_refused_and_not_read() -> None:
    rows, ids, lengths = torch.empty(1, 1, dtype=torch.int32), torch.tensor([9]), torch.tensor([1])
    block_of_row = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="block operators: ids: expected rows of their table"):
        fill_rows_(rows, ids, lengths, [block_of_row], [(0, 0, 0)])
    with pytest.raises(ValueError, match="lengths: expected bags of at most one id"):
        fill_rows_(rows, torch.tensor([1, 2]), torch.tensor([2]), [block_of_row], [(0, 0, 0)])
    with pytest.raises(ValueError, match="lengths: expected as many ids as they say"):
        split_bags(ids, torch.tensor([2]), None, [block_of_row], torch.tensor([0, 1]), [0, 2], 1, 1)
    bad_row = torch.ones(1, 1, dtype=torch.int32)
    for first, count in ((0, 1), (2, 1)):
        layout = torch.tensor([[0, 0, 2, 0, 0, first, count]])
        with pytest.raises(ValueError, match="rows: expected rows of alpha"):
            select_pieces(torch.ones(1, 2), torch.ones(6), bad_row, None, layout, 2)


MOST = 2**63 - 1


@needs_compiler
@pytest.mark.parametrize("lengths", [[-5, 0, 1], [MOST, 1, 1], [2, 1, -2], [MOST, MOST, 3]])
def test_lengths_of_keys_that_nobody_reads_count_too(lengths: list[int]) -> None:
    """What stands in front decides where a key's ids begin: nothing is read beside the ids."""
    rows, ends = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2, 4])
    with pytest.raises(ValueError, match="block operators: lengths: expected as many ids as they say"):
        fill_rows_(rows, torch.tensor([1]), torch.tensor(lengths), [ends], [(0, 2, 0)])


@needs_compiler
@pytest.mark.parametrize("lengths", [[MOST, 1, 1], [MOST, MOST, 3], [-1, 1, 1], [2**62] * 4 + [1], [2**62] * 5])
def test_lengths_whose_sum_overflows_are_no_good(lengths: list[int]) -> None:
    most = torch.tensor([MOST])
    assert not are_good_bags(torch.tensor([1]), torch.tensor(lengths), most, most)


@needs_compiler
@pytest.mark.parametrize(
    ("first_of", "batch_size", "message"),
    [
        ([-1, 2], 1, "first_of: expected F . 1 rising places"),
        ([0, 3, 2], 1, "first_of: expected F . 1 rising places"),
        ([0, 2], -1, "batch_size: expected no more than there are lengths"),
        ([0, 2], 2**62, "batch_size: expected no more than there are lengths"),
        ([0, 2], 1, "lengths: expected as many ids as they say"),
    ],
)
def test_bags_are_split_within_their_tensors(first_of: list[int], batch_size: int, message: str) -> None:
    ids, ends = torch.tensor([1]), torch.tensor([2, 4])
    lengths, room = torch.tensor([MOST] * (len(first_of) - 1)), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        torch.ops.dnis_torchrec.split_bags(
            ids, lengths, None, [ends] * len(lengths), torch.tensor([0, 1]), first_of, batch_size, room, room[:0], None
        )


@needs_compiler
def test_a_split_bag_below_0_is_none() -> None:
    one, pieces = torch.tensor([1]), torch.tensor([-9, 0])
    split = split_bags(one, one, None, [torch.tensor([2])], pieces, [0, 2], 1, 1)
    assert (split[0].tolist(), split[1].tolist()) == ([], [0])


@needs_compiler
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([0, 0, 2, 0, -1, 0, 1], "divisors: expected one for each output"),
        ([MOST, 0, 2, 0, 0, 0, 1], "layout: expected pieces inside"),
        ([0, MOST, 2, 0, 0, 0, 1], "layout: expected outputs inside"),
        ([0, 0, MOST, 0, 0, 0, 1], "layout: expected pieces inside"),
        ([0, 0, 2, MOST, 0, 0, 1], "layout: expected alphas inside"),
        ([0, 0, 2, 0, 0, 0, 2], "layout: expected rows of alpha"),
        ([0, 0, 2, 0, 0, -1, 1], "layout: expected rows of alpha"),
        ([0, 0, 2, 0, 0, MOST, MOST], "layout: expected rows of alpha"),
        ([0, 0, 0, 0, 0, MOST, MOST], "layout: expected rows of alpha"),
    ],
)
def test_layouts_that_point_beside_their_tensors(layout: list[int], message: str) -> None:
    rows, divisors = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with pytest.raises(ValueError, match=message):
        select_pieces(torch.ones(1, 2), torch.ones(2), rows, divisors, torch.tensor([layout]), 2)


@needs_compiler
def test_nothing_is_written_over_what_tells_where_to_write() -> None:
    rows = torch.zeros(1, 1, dtype=torch.int32)
    arguments = (torch.ones(1, 1), torch.ones(1), rows, None, torch.tensor([[0, 0, 1, 0, 0, 0, 1]]))
    with pytest.raises(ValueError, match="rows: expected memory that nothing is written to"):
        torch.ops.dnis_torchrec.select_pooled(*arguments, rows.view(torch.float32))


def mixed_collection(longest: int = 3) -> tuple[SoftSelectionEmbeddingBagCollection, KeyedJaggedTensor]:
    """Single-id, multi-hot, MEAN and shared features of two dims, keys in any order; alpha drawn, and a batch.

    With bags of one id at most all features are single-id ones.
    """
    tables = [
        EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=4, feature_names=["one", "two"]),
        EmbeddingBagConfig(
            name="b", num_embeddings=7, embedding_dim=8, feature_names=["many"], pooling=PoolingType.MEAN
        ),
    ]
    generator = torch.Generator().manual_seed(2)
    counts = {table.name: torch.randint(1, 9, (table.num_embeddings,), generator=generator) for table in tables}
    blocks = blocks_from_counts(
        FrequencyCounts(counts, {"one": 1, "two": longest, "many": longest}, 9), tables, num_blocks=3
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


@needs_compiler
def test_a_collection_gives_the_same_without_the_operators() -> None:
    results = []
    for compiled in (True, False):
        with operators(compiled):
            results.append(steps(*mixed_collection()))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


@needs_compiler
def test_a_failing_compiler_is_told_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match=r"block operators: expected a C\+\+ compiler(.|\n)*somewhat slower"):
        assert not SELECTION.is_there()


BLOCK_OF_ROW = [1, 0, 2, 2, 0, 1, 3, 0, 1]
"""Of nine rows in three blocks; row 6 belongs to none."""
FIRST_ROWS, FIRST_ALPHA_ROWS = (0, 2), (0, 4)
"""Of two features: the shard of the second begins at row 2 of its table, and its blocks at row 4 of alpha."""


def rules(num_keys: tuple[int, int]) -> list[BagPieces]:
    routing = torch.tensor(BLOCK_OF_ROW, dtype=torch.uint8)
    return [
        BagPieces(routing=routing, first_row=row, first_alpha_row=alpha_row, num_blocks=3, num_keys=keys)
        for row, alpha_row, keys in zip(FIRST_ROWS, FIRST_ALPHA_ROWS, num_keys, strict=True)
    ]


@st.composite
def two_features(draw):
    """Bags of two features, empty ones among them, and how many keys their pieces are laid out over."""
    batch_size = draw(st.integers(0, 5))
    bags = [
        draw(st.lists(st.lists(st.integers(0, most), max_size=6), min_size=batch_size, max_size=batch_size))
        for most in (8, 6)
    ]
    return bags, (draw(st.integers(1, 4)), draw(st.integers(1, 4)))


def pieces_of(bags: list[list[list[int]]]) -> list[list[tuple[int, int, list[int]]]]:
    """Per feature, in order: (bag, row of alpha, positions of its ids in the bag)."""
    found = []
    for own, first_row, first_alpha_row in zip(bags, FIRST_ROWS, FIRST_ALPHA_ROWS, strict=True):
        pieces = []
        for number, bag in enumerate(own):
            blocks = [BLOCK_OF_ROW[row + first_row] for row in bag]
            for block in dict.fromkeys(block for block in blocks if block < 3):
                positions = [place for place, other in enumerate(blocks) if other == block]
                pieces.append((number, first_alpha_row + block, positions))
        found.append(pieces)
    return found


def pack(bags, num_keys, *, weighted: bool = False, id_dtype=torch.int64, length_dtype=torch.int64) -> SparseBags:
    ids = torch.tensor([row for own in bags for bag in own for row in bag], dtype=id_dtype)
    lengths = torch.tensor([len(bag) for own in bags for bag in own], dtype=length_dtype)
    weights = torch.arange(len(ids)).float() if weighted else None
    return gather_bags(ids, lengths, weights, rules(num_keys), len(bags[0]))


@needs_compiler
@given(two_features(), st.booleans(), *[st.sampled_from([torch.int32, torch.int64])] * 2)
def test_pieces_lie_where_they_should(case, weighted: bool, id_dtype, length_dtype) -> None:
    bags, num_keys = case
    sparse = pack(bags, num_keys, weighted=weighted, id_dtype=id_dtype, length_dtype=length_dtype)
    pieces = pieces_of(bags)
    assert sparse.num_rows == max(1, *(-(-len(own) // keys) for own, keys in zip(pieces, num_keys, strict=True)))
    assert (sparse.ids.dtype, sparse.lengths.dtype) == (id_dtype, length_dtype)
    assert sparse.rows.tolist() == [row for own in pieces for _, row, _ in own]
    ids, lengths, weights, begin = [], [], [], 0
    for own, keys, bags_of in zip(pieces, num_keys, bags, strict=True):
        begins = [begin + sum(map(len, bags_of[:number])) for number in range(len(bags_of) + 1)]
        begin = begins[-1]
        for key in range(keys):
            for row in range(sparse.num_rows):
                bag, _, positions = own[row * keys + key] if row * keys + key < len(own) else (0, 0, [])
                ids += [bags_of[bag][place] for place in positions]
                weights += [float(begins[bag] + place) for place in positions]
                lengths.append(len(positions))
    assert (sparse.ids.tolist(), sparse.lengths.tolist()) == (ids, lengths)
    assert (sparse.weights.tolist() if weighted else sparse.weights) == (weights if weighted else None)
    assert sparse.rows_of([1]).tolist() == [row for _, row, _ in pieces[1]]


@needs_compiler
@given(two_features())
def test_weights_that_learn_are_gathered_alike_and_get_their_gradient(case) -> None:
    bags, num_keys = case
    ids = torch.tensor([row for own in bags for bag in own for row in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for own in bags for bag in own], dtype=torch.int64)
    weights = (torch.arange(len(ids)) + 0.5).requires_grad_()
    sparse = gather_bags(ids, lengths, weights, rules(num_keys), len(bags[0]))
    fixed = gather_bags(ids, lengths, weights.detach(), rules(num_keys), len(bags[0]))
    assert sparse.weights.dtype == weights.dtype
    assert sparse.weights.equal(fixed.weights)
    (gradient,) = torch.autograd.grad(sparse.weights.square().sum(), weights)
    is_gathered = torch.isin(weights.detach(), fixed.weights)  # they are distinct; ids of no block are left out
    assert gradient.equal(torch.where(is_gathered, 2 * weights.detach(), 0))
    with torch.no_grad():
        assert not gather_bags(ids, lengths, weights, rules(num_keys), len(bags[0])).weights.requires_grad


def layout_of(num_keys: tuple[int, int]) -> Tensor:
    """The first feature has both columns of D = 2, the second the last two columns of D = 3."""
    return torch.tensor([[0, 2, 2, num_keys[0], 0, 2], [2 * num_keys[0], 0, 2, num_keys[1], 6 + 1, 3]])


def select_naively_of_sparse(bags, num_keys: tuple[int, int], pooled: Tensor, alpha: Tensor) -> Tensor:
    """The equation at the top of select.cpp, a piece at a time."""
    narrow, wide = alpha[:6].view(3, 2), alpha[6:].view(7, 3)[:, 1:]
    samples = [[torch.zeros(2, dtype=torch.float64)] * 2 for _ in bags[0]]
    for feature, own in enumerate(pieces_of(bags)):
        for number, (bag, alpha_row, _) in enumerate(own):
            row, key = divmod(number, num_keys[feature])
            column = 2 * (key + feature * num_keys[0])
            piece = pooled[row, column : column + 2] * (narrow, wide)[feature][alpha_row]
            samples[bag][1 - feature] = samples[bag][1 - feature] + piece
    return torch.stack([torch.cat(sample) for sample in samples]) if samples else torch.zeros(0, 4)


@needs_compiler
@given(two_features(), st.integers(0, 2**31))
def test_selection_and_its_gradients_of_sparse(case, seed: int) -> None:
    bags, num_keys = case
    sparse, generator = pack(bags, num_keys), torch.Generator().manual_seed(seed)
    pooled = torch.randn(sparse.num_rows, 2 * sum(num_keys), generator=generator, dtype=torch.float64)
    alpha = torch.rand(27, generator=generator, dtype=torch.float64)
    holds_ids = (sparse.lengths.view(sum(num_keys), -1).t() > 0).repeat_interleave(2, dim=1)
    results = []
    for of in (
        lambda pooled, alpha: select_sparse(pooled, alpha, sparse, layout_of(num_keys), 4),
        lambda pooled, alpha: select_naively_of_sparse(bags, num_keys, pooled, alpha),
    ):
        own, own_alpha = pooled.clone().requires_grad_(), alpha.clone().requires_grad_()
        out = of(own, own_alpha)
        loss = out.square().sum() + 0 * own.sum() + 0 * own_alpha.sum()
        own_gradient, alpha_gradient = torch.autograd.grad(loss, (own, own_alpha))
        results.append([out.double(), own_gradient[holds_ids], alpha_gradient])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    frozen = select_sparse(pooled.clone().requires_grad_() * 1, alpha, sparse, layout_of(num_keys), 4)
    torch.testing.assert_close(frozen, results[1][0])


@needs_compiler
def test_alphas_gradient_does_not_depend_on_how_a_large_batch_is_cut() -> None:
    bags = [[[row % 9] * 2 + [(row + 1) % 9] for row in range(1500)], [[row % 7] for row in range(1500)]]
    sparse, threads = pack(bags, (3, 1)), torch.get_num_threads()
    pooled = torch.randn(sparse.num_rows, 8, generator=torch.Generator().manual_seed(0))
    gradients = []
    for number in (1, 2):
        torch.set_num_threads(number)
        alpha = torch.ones(27, requires_grad=True)
        select_sparse(pooled, alpha, sparse, layout_of((3, 1)), 4).square().sum().backward()
        gradients.append(alpha.grad)
    torch.set_num_threads(threads)
    assert gradients[0].equal(gradients[1])


@needs_compiler
def test_what_is_out_of_range_is_refused_and_not_read_of_sparse() -> None:
    sparse, layout = pack([[[0], [1]], [[2], []]], (1, 1)), layout_of((1, 1))
    pooled, alpha = torch.ones(2, 4), torch.ones(27)
    with pytest.raises(ValueError, match="block operators: ids: expected rows of their table"):
        pack([[[9]], [[]]], (1, 1))
    with pytest.raises(ValueError, match="lengths: expected as many ids as they say"):
        gather_bags(torch.tensor([1]), torch.tensor([2, 0]), None, rules((1, 1)), 1)
    with pytest.raises(ValueError, match="rows: expected rows of alpha"):
        select_sparse(pooled, alpha[:9], sparse, layout, 4)
    with pytest.raises(ValueError, match="starts: expected pieces that there are"):
        select_sparse(pooled[:1], alpha, sparse, layout, 4)
    with pytest.raises(ValueError, match="layout: expected keys inside"):
        select_sparse(pooled[:, :3], alpha, sparse, layout, 4)
    for column, message in enumerate(("keys", "outputs", "keys", "keys", "alphas", "alphas")):
        for number in (-(2**63), -1, 2**62, 2**63 - 1):
            changed = layout.clone()
            changed[0, column] = number
            with pytest.raises(ValueError, match=f"layout: expected {message} inside"):
                select_sparse(pooled, alpha, sparse, changed, 4)


@needs_compiler
@pytest.mark.parametrize(("size", "keys"), [(-5, 1), (2**31 - 1, 1), (1, 0), (1, -1), (1, 2**62)])
def test_pieces_are_packed_within_their_tensors(size: int, keys: int) -> None:
    """A size below 0 would have the ids of the next piece written in front of all."""
    starts, piece_of_id = torch.tensor([[0, 2]]), torch.tensor([1], dtype=torch.int32)
    sizes = torch.tensor([size, 1], dtype=torch.int32)
    ids, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"block operators: (sizes|num_keys): expected"):
        torch.ops.dnis_torchrec.gather_ids(ids[0], None, starts, sizes, piece_of_id, [keys], ids[1], lengths, None)


def table(num_rows: int, dim: int, num_blocks: int, seed: int, *, is_sorted: bool) -> TableScheme:
    """A table with drawn codes; some of its rows may belong to no block."""
    torch.manual_seed(seed)
    blocks = torch.randint(num_blocks + 1, (num_rows,))
    routing = RowRouting.from_map(blocks, num_blocks)
    if is_sorted:
        counts = torch.bincount(blocks, minlength=num_blocks + 1)[:-1]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        routing = RowRouting(num_rows, num_blocks, boundaries=ends)
    retained = torch.ones(num_blocks, dim, dtype=torch.bool)
    plain = TableScheme(
        name="t",
        collection="",
        num_embeddings=num_rows,
        embedding_dim=dim,
        pooling="sum",
        feature_names=("f",),
        is_weighted=False,
        routing=routing,
        retained=retained,
        num_retained=int(routing.row_counts().sum()) * dim,
    )
    return with_codes(plain, seed=seed)


def by_both(
    scheme: TableScheme, weight: Tensor, residual: Tensor, rows: Tensor | None, first_row: int, columns: slice
) -> tuple[Tensor, Tensor]:
    """The same from the compiled operator and from torch's."""
    assert are_compiled()
    found = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_rounding, "are_compiled", lambda compiled=compiled: compiled)
            patch.setattr(row_rounding, "ROUNDED_AT_A_TIME", 7)
            own = weight.clone(), residual.clone()
            RowRounding(scheme.codes, scheme.routing, first_row, columns, torch.device("cpu")).round_(*own, rows)
            found.append(own)
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])
    return found[0]


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


@pytest.fixture
def widest_of_rows() -> Iterator[str]:
    assert are_compiled()
    name = SELECTION.instruction_set()
    yield name
    SELECTION.instruction_set(limit=name)


def test_every_instruction_set_gives_the_same_bits_of_rows(widest_of_rows: str) -> None:
    scheme = table(40, 37, 3, 5, is_sorted=True)
    weight, residual = torch.randn(40, 37), torch.randn(40, 37) / 4
    for name in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(widest_of_rows) + 1]:
        assert SELECTION.instruction_set(limit=name) == name
        by_both(scheme, weight, residual, None, 0, slice(0, 37))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_passed_on_alike(bad: float) -> None:
    assert are_compiled()
    scheme = table(6, 5, 2, 1, is_sorted=False)
    weight = torch.randn(6, 5).index_fill_(0, torch.tensor([1, 4]), bad)
    found = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_rounding, "are_compiled", lambda compiled=compiled: compiled)
            own = weight.clone(), torch.zeros(6, 5)
            RowRounding(scheme.codes, scheme.routing, 0, slice(0, 5), torch.device("cpu")).round_(*own)
            found.append(own)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


ENDS = torch.tensor([2, 4])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.tensor([3])}, "rows: expected rows of the shard, in blocks that have codes"),
        ({"rows": torch.tensor([-1])}, "rows: expected rows of the shard"),
        ({"codes": torch.ones(2, 4, 5)}, "rows: expected rows of the shard, in blocks that have codes"),
        ({"codes": torch.ones(3, 4, 6)}, r"codes: expected shape \(S \+ 1, 4, D\)"),
        ({"routing": torch.zeros(4, dtype=torch.uint8)}, "routing: expected all rows of the shard"),
        ({"first_row": -1}, "first_row: expected a row of the table"),
        ({"residual": torch.ones(2, 5)}, "residual: expected the shape of the weights"),
        ({"weight": torch.ones(3, 5, dtype=torch.float64)}, "weight: expected another dtype or layout"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Tensor | int], message: str) -> None:
    assert are_compiled()
    weight, residual = torch.ones(3, 5), torch.zeros(3, 5)
    given = {"codes": torch.ones(3, 4, 5), "routing": ENDS, "rows": None, "first_row": 2}
    given |= {"weight": weight, "residual": residual} | changed
    with pytest.raises(ValueError, match=f"block operators: {message}"):
        torch.ops.dnis_torchrec.round_rows(*given.values())


def test_weights_are_not_their_own_residual() -> None:
    assert are_compiled()
    weight = torch.ones(3, 5)
    with pytest.raises(ValueError, match="residual: expected memory that nothing is written to"):
        torch.ops.dnis_torchrec.round_rows(torch.ones(3, 4, 5), ENDS, None, 0, weight, weight)


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
def triton_selections(draw: Any) -> Selection:
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


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("learns", [(True, False), (False, True), (True, True)])
@settings(max_examples=25, deadline=None)
@given(case=triton_selections())
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


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_many_programs_and_the_same_bits_every_time(way: str) -> None:
    case = wide_case()
    expected, _ = select(case, (True, True))
    with kernels(way) as device:
        runs = [select(case.to(device), (True, True))[0] for _ in range(2)]
    assert all(first.equal(second) for first, second in zip(*runs, strict=True))
    assert all(own.cpu().equal(other) for own, other in zip(runs[0][:2], expected[:2], strict=True))
    torch.testing.assert_close(runs[0][2].cpu(), expected[2], rtol=1e-4, atol=1e-4)


@needs_compiler
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


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [4, -1])
def test_a_gradient_that_is_not_finite_is_seen_on_triton(way: str, bad: float, row: int) -> None:
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


@needs_compiler
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


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_pieces_of_one_output_share_its_columns(way: str) -> None:
    case = replace(
        wide_case(batch_size=2, num_pieces=2), layout=torch.tensor([[0, 0, 4, 0, 0, 0, 9], [4, 4, 4, 0, 0, 0, 9]])
    )
    message = "layout: expected pieces of output 0 at the same columns and of one alpha, got others"
    with kernels(way) as device, pytest.raises(ValueError, match=message):
        select(case.to(device), (True, False))


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_blocks", [1, 3, 16, 17, 300])
def test_rows_of_single_id_features_on_triton(way: str, num_blocks: int, id_dtype: torch.dtype) -> None:
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


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
def test_an_id_that_a_map_does_not_have_is_not_read(way: str) -> None:
    block_of_row = torch.zeros(3, dtype=torch.uint8)
    ids, lengths = torch.tensor([2, 3, -1]), torch.tensor([1, 1, 1])
    with kernels(way, [block_of_row]) as device:
        rows = torch.empty(3, 1, dtype=torch.int32, device=device)
        fill_rows_(rows, ids.to(device), lengths.to(device), [block_of_row.to(device)], [(0, 0, 4)])
    assert rows.flatten().tolist() == [4, -1, -1]


@needs_compiler
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


@needs_compiler
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


@needs_compiler
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
    pointers = dict.fromkeys(["bag_sums", "grad_pooled", "grad", "out", "values"], f"*{dtype}")
    pointers["is_kept"] = "*u8"
    pointers |= dict.fromkeys(["alpha", "divisors", "sums"], "*fp32")
    pointers |= dict.fromkeys(["ids", "lengths", "ends_of_bags", "features"], "*i64")
    pointers |= dict.fromkeys(["rows", "output_of_column", "outputs", "piece_of_column", "pieces", "fault"], "*i32")
    types = {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in fixed}
    check_compiled(kernel, types, fixed, select_triton.WARPS_PER_TILE)


@needs_compiler
@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("longest", [1, 3])
def test_a_collection_learns_on_a_gpu_what_it_does_on_a_cpu(longest: int) -> None:
    expected = steps(*mixed_collection(longest))
    wrapper, features = mixed_collection(longest)
    got = steps(wrapper.to("cuda"), features.to(torch.device("cuda")))
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own.cpu(), other)
