"""As tests/fuzz_cases.py, for the operators of packed bags."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tests.fuzz_cases import Case, draw_ids, draw_lengths, draw_routing, integers, of_bags, same


@dataclass(frozen=True)
class Found:
    """Bags of some features split into pieces: the ids of one bag and one block, by their places in the batch."""

    ids: list[int]
    lengths: list[int]
    batch_size: int
    routings: list[Tensor]
    features: list[list[int]]
    starts: list[list[int]]
    pieces: list[tuple[int, list[int]]]
    """Row of alpha, and places of the ids."""

    @property
    def piece_of_id(self) -> list[int]:
        """-1 for an id of no block."""
        found = [-1] * len(self.ids)
        for index, (_, places) in enumerate(self.pieces):
            for place in places:
                found[place] = index
        return found


def draw_found(random: Random) -> Found:
    """One to three features."""
    batch_size, num_features = random.randint(1, 4), random.randint(1, 3)
    lengths = draw_lengths(random, num_features * batch_size, 4)
    ids = draw_ids(random, lengths, [9] * num_features)
    routings, features, starts = [], [], []
    pieces: list[tuple[int, list[int]]] = []
    bags, place = of_bags(ids, lengths), 0
    for feature in range(num_features):
        num_blocks, first_row, first_alpha_row = random.choice([1, 4, 20]), random.randint(0, 5), random.randint(0, 5)
        routing, blocks = draw_routing(random, 9 + first_row, num_blocks)
        routings.append(routing)
        features.append([first_row, first_alpha_row, num_blocks])
        starts.append([len(pieces)])
        for bag in bags[feature * batch_size : (feature + 1) * batch_size]:
            of_block: dict[int, list[int]] = {}
            for row in bag:
                block = blocks[row + first_row]
                if block < num_blocks:
                    of_block.setdefault(block, []).append(place)
                place += 1
            pieces += [(first_alpha_row + block, places) for block, places in of_block.items()]
            starts[-1].append(len(pieces))
    return Found(ids, lengths, batch_size, routings, features, starts, pieces)


def find_pieces(random: Random) -> Case:
    """Pieces are numbered feature by feature, bag by bag, and in a bag as its ids come."""
    f = draw_found(random)
    starts = torch.full((len(f.routings), f.batch_size + 1), -7)
    rows, sizes, piece_of_id = torch.full((3, len(f.ids)), -7, dtype=torch.int32).unbind()

    def check(_: None) -> None:
        assert starts.tolist() == f.starts
        assert rows[: len(f.pieces)].tolist() == [row for row, _ in f.pieces]
        assert sizes[: len(f.pieces)].tolist() == [len(places) for _, places in f.pieces]
        assert piece_of_id.tolist() == f.piece_of_id

    fields = [number for feature in f.features for number in feature]
    written = [starts, rows.clone(), sizes.clone(), piece_of_id.clone()]
    _, rows, sizes, piece_of_id = written
    return Case([integers(random, f.ids), integers(random, f.lengths), f.routings, fields, *written], check)


def draw_packing(random: Random, f: Found) -> tuple[list[int], int]:
    """Keys of every feature, and rows for all of its pieces."""
    num_keys = [random.randint(1, 3) for _ in f.routings]
    counts = [starts[-1] - starts[0] for starts in f.starts]
    num_rows = max([1, *(-(-count // keys) for count, keys in zip(counts, num_keys, strict=True))])
    return num_keys, num_rows + random.randint(0, 1)


def pack_ids(random: Random) -> Case:
    """The j-th piece of a feature is the bag of key ``j % keys`` in row ``j // keys``."""
    f = draw_found(random)
    num_keys, num_rows = draw_packing(random, f)
    ids, weights = integers(random, f.ids), torch.randn(len(f.ids)) if random.random() < 0.5 else None
    packed_ids, packed_weights = torch.zeros_like(ids), None if weights is None else torch.zeros_like(weights)
    packed_lengths = integers(random, [-7] * (sum(num_keys) * num_rows))

    def check(_: None) -> None:
        bags: list[list[int]] = []
        for starts, keys in zip(f.starts, num_keys, strict=True):
            of_feature = [places for _, places in f.pieces[starts[0] : starts[-1]]]
            for key in range(keys):
                own = of_feature[key::keys]
                bags += own + [[]] * (num_rows - len(own))
        order = [place for bag in bags for place in bag]
        assert packed_lengths.tolist() == [len(bag) for bag in bags]
        assert packed_ids[: len(order)].tolist() == [f.ids[place] for place in order]
        if weights is not None and packed_weights is not None:
            same(packed_weights[: len(order)], weights[order])

    starts, piece_of_id = torch.tensor(f.starts), torch.tensor(f.piece_of_id, dtype=torch.int32)
    sizes = torch.tensor([len(places) for _, places in f.pieces], dtype=torch.int32)
    written = [packed_ids, packed_lengths, packed_weights]
    return Case([ids, weights, starts, sizes, piece_of_id, num_keys, *written], check)


@dataclass(frozen=True)
class Selection:
    """What the three operators of soft selection read of packed bags."""

    starts: Tensor
    rows: Tensor
    layout: list[list[int]]
    pooled: Tensor
    alpha: Tensor
    out_width: int

    @property
    def terms(self) -> list[tuple[int, int, slice, slice, slice]]:
        """Of every piece its sample, packed row, columns there, columns of the output, and part of alpha."""
        found = []
        for starts, (in_column, out_column, dim, keys, first, stride) in zip(
            self.starts.tolist(), self.layout, strict=True
        ):
            for b in range(len(starts) - 1):
                for piece in range(starts[b], starts[b + 1]):
                    row, key = divmod(piece - starts[0], keys)
                    begin = in_column + key * dim
                    at = first + int(self.rows[piece]) * stride
                    parts = [slice(c, c + dim) for c in (begin, out_column, at)]
                    found.append((b, row, *parts))
        return found

    def arguments(self) -> list[Tensor]:
        """`starts`, `rows` and `layout`."""
        return [self.starts, self.rows, torch.tensor(self.layout)]


def draw_selection(random: Random) -> Selection:
    """The pieces of `draw_found`, with columns for each feature, and one tensor of alphas."""
    f, dtype = draw_found(random), random.choice([torch.float32, torch.float64])
    num_keys, num_rows = draw_packing(random, f)
    layout, in_column, out_column, alpha_size = [], 0, 0, 0
    for keys in num_keys:
        dim = random.choice([0, 1, 3, 17])
        stride = dim + random.randint(0, 2)
        layout.append([in_column, out_column, dim, keys, alpha_size, stride])
        in_column, out_column, alpha_size = in_column + keys * dim, out_column + dim, alpha_size + 30 * stride
    return Selection(
        torch.tensor(f.starts),
        torch.tensor([row for row, _ in f.pieces], dtype=torch.int32),
        layout,
        torch.randn(num_rows, in_column, dtype=dtype),
        torch.randn(alpha_size, dtype=dtype),
        out_column,
    )


def select_packed(random: Random) -> Case:
    """out = sum over the pieces of a bag of pooled * alpha."""
    s = draw_selection(random)
    out = s.pooled.new_full((s.starts.shape[1] - 1, s.out_width), torch.nan)

    def check(_: None) -> None:
        expected = torch.zeros_like(out)
        for b, row, own, to, of_alpha in s.terms:
            expected[b, to] += s.pooled[row, own] * s.alpha[of_alpha]
        same(out, expected)

    return Case([s.pooled, s.alpha, *s.arguments(), out], check)


def spread_packed_gradient(random: Random) -> Case:
    """grad_pooled = grad * alpha; what no piece takes stays as it is."""
    s = draw_selection(random)
    grad = torch.randn(s.starts.shape[1] - 1, s.out_width, dtype=s.pooled.dtype)
    grad_pooled = torch.full_like(s.pooled, 7.0)

    def check(_: None) -> None:
        expected = torch.full_like(s.pooled, 7.0)
        for b, row, own, to, of_alpha in s.terms:
            expected[row, own] = grad[b, to] * s.alpha[of_alpha]
        same(grad_pooled, expected)

    return Case([grad, s.alpha, *s.arguments(), grad_pooled], check)


def sum_packed_alpha_gradient(random: Random) -> Case:
    """grad_alpha = sum over the pieces of grad * pooled."""
    s = draw_selection(random)
    grad = torch.randn(s.starts.shape[1] - 1, s.out_width, dtype=s.pooled.dtype)
    grad_alpha = torch.full_like(s.alpha, torch.nan)

    def check(_: None) -> None:
        expected = torch.zeros_like(s.alpha)
        for b, row, own, to, of_alpha in s.terms:
            expected[of_alpha] += grad[b, to] * s.pooled[row, own]
        same(grad_alpha, expected)

    return Case([grad, s.pooled, *s.arguments(), grad_alpha], check)
