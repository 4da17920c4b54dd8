"""The compiled operators against the meaning they are documented with, and the collection with and without them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.ops.build import INSTRUCTION_SETS, SELECTION
from dnis_torchrec.ops.select import are_compiled, are_good_bags, fill_rows_, select_pieces, split_bags
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from tests.small_models import operators

pytestmark = pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")


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


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="instruction set 'avx': expected a known instruction set"):
        SELECTION.instruction_set(limit="avx")


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


def test_bags_whose_lengths_are_not_those_of_the_ids() -> None:
    bounds = longest = torch.tensor([4])
    for lengths in ([1, 1, 1], [1], [3, -1]):
        assert not are_good_bags(torch.tensor([0, 1]), torch.tensor(lengths), bounds, longest)


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


@pytest.mark.parametrize("lengths", [[-5, 0, 1], [MOST, 1, 1], [2, 1, -2], [MOST, MOST, 3]])
def test_lengths_of_keys_that_nobody_reads_count_too(lengths: list[int]) -> None:
    """What stands in front decides where a key's ids begin: nothing is read beside the ids."""
    rows, ends = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2, 4])
    with pytest.raises(ValueError, match="block operators: lengths: expected as many ids as they say"):
        fill_rows_(rows, torch.tensor([1]), torch.tensor(lengths), [ends], [(0, 2, 0)])


@pytest.mark.parametrize("lengths", [[MOST, 1, 1], [MOST, MOST, 3], [-1, 1, 1], [2**62] * 4 + [1], [2**62] * 5])
def test_lengths_whose_sum_overflows_are_no_good(lengths: list[int]) -> None:
    most = torch.tensor([MOST])
    assert not are_good_bags(torch.tensor([1]), torch.tensor(lengths), most, most)


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


def test_a_split_bag_below_0_is_none() -> None:
    one, pieces = torch.tensor([1]), torch.tensor([-9, 0])
    split = split_bags(one, one, None, [torch.tensor([2])], pieces, [0, 2], 1, 1)
    assert (split[0].tolist(), split[1].tolist()) == ([], [0])


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


def test_a_collection_gives_the_same_without_the_operators() -> None:
    results = []
    for compiled in (True, False):
        with operators(compiled):
            results.append(steps(*mixed_collection()))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def test_a_failing_compiler_is_told_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match=r"block operators: expected a C\+\+ compiler(.|\n)*somewhat slower"):
        assert not SELECTION.is_there()
