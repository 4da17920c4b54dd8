"""Packed bags against Python lists, and soft selection of them against a loop over pieces, by autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.ops.select import PackedBags, Packing, are_compiled, pack_bags, select_packed

pytestmark = pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")

BLOCK_OF_ROW = [1, 0, 2, 2, 0, 1, 3, 0, 1]
"""Of nine rows in three blocks; row 6 belongs to none."""
FIRST_ROWS, FIRST_ALPHA_ROWS = (0, 2), (0, 4)
"""Of two features: the shard of the second begins at row 2 of its table, and its blocks at row 4 of alpha."""


def packings(num_keys: tuple[int, int]) -> list[Packing]:
    routing = torch.tensor(BLOCK_OF_ROW, dtype=torch.uint8)
    return [
        Packing(routing=routing, first_row=row, first_alpha_row=alpha_row, num_blocks=3, num_keys=keys)
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


def pack(bags, num_keys, *, weighted: bool = False, id_dtype=torch.int64, length_dtype=torch.int64) -> PackedBags:
    ids = torch.tensor([row for own in bags for bag in own for row in bag], dtype=id_dtype)
    lengths = torch.tensor([len(bag) for own in bags for bag in own], dtype=length_dtype)
    weights = torch.arange(len(ids)).float() if weighted else None
    return pack_bags(ids, lengths, weights, packings(num_keys), len(bags[0]))


@given(two_features(), st.booleans(), *[st.sampled_from([torch.int32, torch.int64])] * 2)
def test_pieces_lie_where_they_should(case, weighted: bool, id_dtype, length_dtype) -> None:
    bags, num_keys = case
    packed = pack(bags, num_keys, weighted=weighted, id_dtype=id_dtype, length_dtype=length_dtype)
    pieces = pieces_of(bags)
    assert packed.num_rows == max(1, *(-(-len(own) // keys) for own, keys in zip(pieces, num_keys, strict=True)))
    assert (packed.ids.dtype, packed.lengths.dtype) == (id_dtype, length_dtype)
    assert packed.rows.tolist() == [row for own in pieces for _, row, _ in own]
    ids, lengths, weights, begin = [], [], [], 0
    for own, keys, bags_of in zip(pieces, num_keys, bags, strict=True):
        begins = [begin + sum(map(len, bags_of[:number])) for number in range(len(bags_of) + 1)]
        begin = begins[-1]
        for key in range(keys):
            for row in range(packed.num_rows):
                bag, _, positions = own[row * keys + key] if row * keys + key < len(own) else (0, 0, [])
                ids += [bags_of[bag][place] for place in positions]
                weights += [float(begins[bag] + place) for place in positions]
                lengths.append(len(positions))
    assert (packed.ids.tolist(), packed.lengths.tolist()) == (ids, lengths)
    assert (packed.weights.tolist() if weighted else packed.weights) == (weights if weighted else None)
    assert packed.rows_of([1]).tolist() == [row for _, row, _ in pieces[1]]


@given(two_features())
def test_weights_that_learn_are_packed_alike_and_get_their_gradient(case) -> None:
    bags, num_keys = case
    ids = torch.tensor([row for own in bags for bag in own for row in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for own in bags for bag in own], dtype=torch.int64)
    weights = (torch.arange(len(ids)) + 0.5).requires_grad_()
    packed = pack_bags(ids, lengths, weights, packings(num_keys), len(bags[0]))
    fixed = pack_bags(ids, lengths, weights.detach(), packings(num_keys), len(bags[0]))
    assert packed.weights.dtype == weights.dtype
    assert packed.weights.equal(fixed.weights)
    (gradient,) = torch.autograd.grad(packed.weights.square().sum(), weights)
    is_packed = torch.isin(weights.detach(), fixed.weights)  # they are distinct; ids of no block are left out
    assert gradient.equal(torch.where(is_packed, 2 * weights.detach(), 0))
    with torch.no_grad():
        assert not pack_bags(ids, lengths, weights, packings(num_keys), len(bags[0])).weights.requires_grad


def layout_of(num_keys: tuple[int, int]) -> Tensor:
    """The first feature has both columns of D = 2, the second the last two columns of D = 3."""
    return torch.tensor([[0, 2, 2, num_keys[0], 0, 2], [2 * num_keys[0], 0, 2, num_keys[1], 6 + 1, 3]])


def select_naively(bags, num_keys: tuple[int, int], pooled: Tensor, alpha: Tensor) -> Tensor:
    """The equation at the top of packed_bags.py, a piece at a time."""
    narrow, wide = alpha[:6].view(3, 2), alpha[6:].view(7, 3)[:, 1:]
    samples = [[torch.zeros(2, dtype=torch.float64)] * 2 for _ in bags[0]]
    for feature, own in enumerate(pieces_of(bags)):
        for number, (bag, alpha_row, _) in enumerate(own):
            row, key = divmod(number, num_keys[feature])
            column = 2 * (key + feature * num_keys[0])
            piece = pooled[row, column : column + 2] * (narrow, wide)[feature][alpha_row]
            samples[bag][1 - feature] = samples[bag][1 - feature] + piece
    return torch.stack([torch.cat(sample) for sample in samples]) if samples else torch.zeros(0, 4)


@given(two_features(), st.integers(0, 2**31))
def test_selection_and_its_gradients(case, seed: int) -> None:
    bags, num_keys = case
    packed, generator = pack(bags, num_keys), torch.Generator().manual_seed(seed)
    pooled = torch.randn(packed.num_rows, 2 * sum(num_keys), generator=generator, dtype=torch.float64)
    alpha = torch.rand(27, generator=generator, dtype=torch.float64)
    holds_ids = (packed.lengths.view(sum(num_keys), -1).t() > 0).repeat_interleave(2, dim=1)
    results = []
    for of in (
        lambda pooled, alpha: select_packed(pooled, alpha, packed, layout_of(num_keys), 4),
        lambda pooled, alpha: select_naively(bags, num_keys, pooled, alpha),
    ):
        own, own_alpha = pooled.clone().requires_grad_(), alpha.clone().requires_grad_()
        out = of(own, own_alpha)
        loss = out.square().sum() + 0 * own.sum() + 0 * own_alpha.sum()
        own_gradient, alpha_gradient = torch.autograd.grad(loss, (own, own_alpha))
        results.append([out.double(), own_gradient[holds_ids], alpha_gradient])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    frozen = select_packed(pooled.clone().requires_grad_() * 1, alpha, packed, layout_of(num_keys), 4)
    torch.testing.assert_close(frozen, results[1][0])


def test_alphas_gradient_does_not_depend_on_how_a_large_batch_is_cut() -> None:
    bags = [[[row % 9] * 2 + [(row + 1) % 9] for row in range(1500)], [[row % 7] for row in range(1500)]]
    packed, threads = pack(bags, (3, 1)), torch.get_num_threads()
    pooled = torch.randn(packed.num_rows, 8, generator=torch.Generator().manual_seed(0))
    gradients = []
    for number in (1, 2):
        torch.set_num_threads(number)
        alpha = torch.ones(27, requires_grad=True)
        select_packed(pooled, alpha, packed, layout_of((3, 1)), 4).square().sum().backward()
        gradients.append(alpha.grad)
    torch.set_num_threads(threads)
    assert gradients[0].equal(gradients[1])


def test_what_is_out_of_range_is_refused_and_not_read() -> None:
    packed, layout = pack([[[0], [1]], [[2], []]], (1, 1)), layout_of((1, 1))
    pooled, alpha = torch.ones(2, 4), torch.ones(27)
    with pytest.raises(ValueError, match="block operators: ids: expected rows of their table"):
        pack([[[9]], [[]]], (1, 1))
    with pytest.raises(ValueError, match="lengths: expected as many ids as they say"):
        pack_bags(torch.tensor([1]), torch.tensor([2, 0]), None, packings((1, 1)), 1)
    with pytest.raises(ValueError, match="rows: expected rows of alpha"):
        select_packed(pooled, alpha[:9], packed, layout, 4)
    with pytest.raises(ValueError, match="starts: expected pieces that there are"):
        select_packed(pooled[:1], alpha, packed, layout, 4)
    with pytest.raises(ValueError, match="layout: expected keys inside"):
        select_packed(pooled[:, :3], alpha, packed, layout, 4)
    for column, message in enumerate(("keys", "outputs", "keys", "keys", "alphas", "alphas")):
        for number in (-(2**63), -1, 2**62, 2**63 - 1):
            changed = layout.clone()
            changed[0, column] = number
            with pytest.raises(ValueError, match=f"layout: expected {message} inside"):
                select_packed(pooled, alpha, packed, changed, 4)


@pytest.mark.parametrize(("size", "keys"), [(-5, 1), (2**31 - 1, 1), (1, 0), (1, -1), (1, 2**62)])
def test_pieces_are_packed_within_their_tensors(size: int, keys: int) -> None:
    """A size below 0 would have the ids of the next piece written in front of all."""
    starts, piece_of_id = torch.tensor([[0, 2]]), torch.tensor([1], dtype=torch.int32)
    sizes = torch.tensor([size, 1], dtype=torch.int32)
    ids, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"block operators: (sizes|num_keys): expected"):
        torch.ops.dnis_torchrec.pack_ids(ids[0], None, starts, sizes, piece_of_id, [keys], ids[1], lengths, None)
