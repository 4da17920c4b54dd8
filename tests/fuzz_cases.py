"""Arguments for every compiled operator, drawn at random, and what each has to give: plain loops over torch's tensors.

For tests/fuzz_operators.py. Tables and batches are tiny, so that whatever is read or written beside a tensor lies in
memory that nobody owns, which AddressSanitizer sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops.packed import names_tensor, torch_bag_offsets
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from tests.reference import packed, table_scheme

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Case:
    """Arguments of an operator, in its order, and a check of what it gave, or wrote into them."""

    arguments: list[Any]
    check: Callable[[Any], None]


def same(found: Tensor, expected: Tensor) -> None:
    """Equal but for rounding; NaN, as of what nobody writes, equals nothing."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, check_dtype=False)


def draw_lengths(random: Random, num_bags: int, longest: int) -> list[int]:
    """How many ids each bag holds."""
    return [random.randint(0, longest) for _ in range(num_bags)]


def draw_ids(random: Random, lengths: list[int], rows: list[int]) -> list[int]:
    """Ids of the bags of keys that may be as large as `rows` say."""
    per_key = len(lengths) // len(rows)
    return [random.randrange(rows[index // per_key]) for index, length in enumerate(lengths) for _ in range(length)]


def offsets_of(lengths: list[int]) -> list[int]:
    """Where bags begin, and the number of ids."""
    return list(itertools.accumulate(lengths, initial=0))


def integers(random: Random, numbers: list[int]) -> Tensor:
    """As int32 or int64."""
    return torch.tensor(numbers, dtype=random.choice(INTEGERS))


def of_bags(ids: list[int], lengths: list[int]) -> list[list[int]]:
    """The ids of every bag."""
    bounds = offsets_of(lengths)
    return [ids[begin:end] for begin, end in itertools.pairwise(bounds)]


def draw_block_table(random: Random, name: str) -> TableScheme:
    """A table of blocks, whose rows stand by block or do not."""
    num_rows, num_blocks, dim = random.randint(1, 12), random.choice([1, 3, 40]), random.choice([1, 5, 16, 33])
    blocks = [random.randint(0, num_blocks) for _ in range(num_rows)]
    routing = RowRouting.from_map(torch.tensor(sorted(blocks) if random.random() < 0.5 else blocks), num_blocks)
    retained = torch.rand(num_blocks, dim) < random.random()
    readers, pooling = tuple("fg"[: random.randint(1, 2)]), random.choice(["sum", "mean"])
    return table_scheme(name, routing, retained, feature_names=readers, pooling=pooling)


def packed_embedding_bag(random: Random) -> Case:
    """One or two tables of bit fields, whose rows stand by block, in one block, or anyhow; a key that nobody reads."""
    batch_size = random.randint(1, 4)
    schemes, stored, dense = {}, {}, {}
    for name in "tu"[: random.randint(1, 2)]:
        schemes[name], stored[name], dense[name] = packed(draw_block_table(random, name), random)
    module = PackedEmbeddingBagCollection(MixedDimensionScheme(schemes), stored)
    features = [(f, table) for table in schemes.values() for f in table.feature_names]
    names = ["f", "g", "x"]
    random.shuffle(names)
    rows_of = [min([table.num_embeddings for f, table in features if f == n], default=9) for n in names]
    lengths = draw_lengths(random, 3 * batch_size, 4)
    ids = draw_ids(random, lengths, rows_of)
    weights = torch.randn(len(ids)) if random.random() < 0.5 else None
    keys = [names.index(feature) for feature, _ in features]
    arguments = [
        integers(random, ids),
        integers(random, offsets_of(lengths)),
        weights,
        list(module.tables.buffers()),
        *module.outputs.buffers(),
        keys,
        batch_size,
        sum(table.embedding_dim for _, table in features),
        random.random() < 0.3,
    ]
    factors = torch.ones(len(ids)) if weights is None else weights

    def check(out: Tensor) -> None:
        tables = [(table, dense[table.name]) for _, table in features]
        same(out, pooled_by_loops(tables, keys, ids, lengths, factors, batch_size))

    return Case(arguments, check)


def pooled_by_loops(
    tables: list[tuple[TableScheme, Tensor]],
    keys: list[int],
    ids: list[int],
    lengths: list[int],
    factors: Tensor,
    batch_size: int,
) -> Tensor:
    """Bags of all features, one id after the other."""
    bounds, parts = offsets_of(lengths), []
    for (table, dense), key in zip(tables, keys, strict=True):
        pooled = torch.zeros(batch_size, table.embedding_dim)
        for bag in range(batch_size):
            begin, end = bounds[key * batch_size + bag], bounds[key * batch_size + bag + 1]
            for place in range(begin, end):
                pooled[bag] += dense[ids[place]] * factors[place]
            if table.pooling == "mean":
                pooled[bag] /= max(end - begin, 1)
        parts.append(pooled)
    return torch.cat(parts, dim=1)


def bag_offsets(random: Random) -> Case:
    """Lengths of one to three features."""
    num_features, batch_size = random.randint(1, 3), random.randint(0, 4)
    lengths = draw_lengths(random, num_features * batch_size, 3)
    arguments = [
        integers(random, lengths).view(num_features, batch_size),
        torch.arange(sum(lengths)),
        names_tensor(["a", "bc", "d"][:num_features]),
    ]
    return Case(arguments, lambda out: same(out, torch_bag_offsets(*arguments)))


Term = tuple[int, int, slice, slice, slice, float]
"""Sample, row of what was pooled, columns there, columns of the output, part of alpha, and divisor."""


def check_output(terms: list[Term], pooled: Tensor, alpha: Tensor, out: Tensor) -> None:
    """out = sum over pieces of pooled * alpha / divisor."""
    expected = torch.zeros_like(out)
    for b, row, at, to, of_alpha, divisor in terms:
        expected[b, to] += pooled[row, at] * alpha[of_alpha] / divisor
    same(out, expected)


def check_spread(terms: list[Term], grad: Tensor, alpha: Tensor, grad_pooled: Tensor, rest: float) -> None:
    """grad_pooled = grad * alpha / divisor, and what no piece takes stands as it did."""
    expected = torch.full_like(grad_pooled, rest)
    for b, row, at, to, of_alpha, divisor in terms:
        expected[row, at] = grad[b, to] * alpha[of_alpha] / divisor
    same(grad_pooled, expected)


def check_sum(terms: list[Term], grad: Tensor, pooled: Tensor, grad_alpha: Tensor) -> None:
    """grad_alpha = sum over samples of grad * pooled / divisor."""
    expected = torch.zeros_like(grad_alpha)
    for b, row, at, to, of_alpha, divisor in terms:
        expected[of_alpha] += grad[b, to] * pooled[row, at] / divisor
    same(grad_alpha, expected)


@dataclass(frozen=True)
class Selection:
    """Pieces of a collection: what the three operators of soft selection read."""

    layout: list[list[int]]
    rows: Tensor
    alpha: Tensor
    divisors: Tensor | None
    pooled: Tensor
    width: int

    @property
    def terms(self) -> list[Term]:
        """Every piece of every sample that is not empty."""
        terms = []
        for b, k in itertools.product(range(len(self.rows)), range(len(self.layout))):
            in_column, out_column, dim, first, output, *_ = self.layout[k]
            row, divisor = int(self.rows[b, k]), 1.0 if self.divisors is None else float(self.divisors[b, output])
            if row >= 0:
                at, to, of_alpha = (slice(c, c + dim) for c in (in_column, out_column, first + row * dim))
                terms.append((b, b, at, to, of_alpha, divisor))
        return terms


def draw_selection(random: Random) -> Selection:
    """One to three outputs of one to three pieces each; the alphas of all stand in one tensor."""
    batch_size, dtype = random.randint(1, 70), random.choice([torch.float32, torch.float64])
    layout: list[list[int]] = []
    in_column, out_column, alpha_size = 0, 0, 0
    for output in range(random.randint(1, 3)):
        dim, num_rows = random.choice([1, 3, 17]), random.randint(1, 4)
        for _ in range(random.randint(1, 3)):
            first_row = random.randrange(num_rows)
            layout.append([in_column, out_column, dim, alpha_size, output, first_row, num_rows - first_row])
            in_column += dim
        out_column, alpha_size = out_column + dim, alpha_size + dim * num_rows
    rows = [
        [random.choice([-1, *range(first, first + count)]) for *_, first, count in layout] for _ in range(batch_size)
    ]
    pooled = torch.randn(batch_size, in_column, dtype=dtype)
    divisors = torch.rand(batch_size, output + 1, dtype=dtype) + 1 if random.random() < 0.5 else None
    alpha = torch.randn(alpha_size, dtype=dtype)
    rows_tensor = torch.tensor(rows, dtype=torch.int32)
    return Selection(layout, rows_tensor, alpha, divisors, pooled, out_column)


def select_pooled(random: Random) -> Case:
    """The output."""
    s = draw_selection(random)
    out = s.pooled.new_full((len(s.pooled), s.width), torch.nan)
    arguments = [s.pooled, s.alpha, s.rows, s.divisors, torch.tensor(s.layout), out]
    return Case(arguments, lambda _: check_output(s.terms, s.pooled, s.alpha, out))


def spread_gradient(random: Random) -> Case:
    """The gradient of what was pooled, 0 or untouched for empty bags; whether grad is finite."""
    s, keep_empty = draw_selection(random), random.random() < 0.5
    grad = torch.randn(len(s.pooled), s.width, dtype=s.pooled.dtype)
    grad_pooled = torch.full_like(s.pooled, 7.0)

    def check(is_finite: bool) -> None:
        check_spread(s.terms, grad, s.alpha, grad_pooled, 7.0 if keep_empty else 0.0)
        assert is_finite

    return Case([grad, s.alpha, s.rows, s.divisors, torch.tensor(s.layout), keep_empty, grad_pooled], check)


def sum_alpha_gradient(random: Random) -> Case:
    """The gradient of alpha."""
    s = draw_selection(random)
    grad, grad_alpha = torch.randn(len(s.pooled), s.width, dtype=s.pooled.dtype), torch.full_like(s.alpha, torch.nan)
    arguments = [grad, s.pooled, s.rows, s.divisors, torch.tensor(s.layout), grad_alpha]
    return Case(arguments, lambda _: check_sum(s.terms, grad, s.pooled, grad_alpha))


def draw_routing(random: Random, num_rows: int, num_blocks: int) -> tuple[Tensor, list[int]]:
    """Where rows belong, in one of the ways that operators know, and as a list; block `num_blocks` is none."""
    kind = random.choice(["ends", "map", "wide map"])
    if kind == "ends":
        ends = sorted(random.randint(0, num_rows) for _ in range(num_blocks))
        return torch.tensor(ends, dtype=torch.int64), [sum(row >= end for end in ends) for row in range(num_rows)]
    blocks = [random.randint(0, num_blocks) for _ in range(num_rows)]
    return torch.tensor(blocks, dtype=torch.uint8 if kind == "map" else torch.uint16), blocks


def fill_rows(random: Random) -> Case:
    """Rows of alpha of single-id features, of which a key may have none."""
    num_keys, batch_size, num_pieces = random.randint(1, 3), random.randint(1, 5), random.randint(1, 4)
    lengths = draw_lengths(random, num_keys * batch_size, 1)
    ids = draw_ids(random, lengths, [9] * num_keys)
    drawn = [draw_routing(random, 9, random.choice([1, 4, 20])) for _ in range(random.randint(1, num_pieces))]
    pieces = random.sample(range(num_pieces), len(drawn))
    places = [(piece, random.randrange(num_keys), random.randint(0, 50)) for piece in pieces]
    rows = torch.full((batch_size, num_pieces), -7, dtype=torch.int32)

    def check(_: None) -> None:
        bags, expected = of_bags(ids, lengths), torch.full_like(rows, -7)
        for (piece, key, first_row), (_, blocks) in zip(places, drawn, strict=True):
            for b in range(batch_size):
                bag = bags[key * batch_size + b]
                expected[b, piece] = first_row + blocks[bag[0]] if bag else -1
        same(rows, expected)

    flat = [number for place in places for number in place]
    routings = [routing for routing, _ in drawn]
    return Case([integers(random, ids), integers(random, lengths), routings, flat, rows], check)


def are_good_bags(random: Random) -> Case:
    """Bags some of which are too long, or hold an id too high."""
    num_keys, batch_size = random.randint(1, 3), random.randint(0, 4)
    lengths = draw_lengths(random, num_keys * batch_size, 2)
    ids = draw_ids(random, lengths, [9] * num_keys)
    bounds, longest = ([random.choice([1, 9, 2**63 - 1]) for _ in range(num_keys)] for _ in range(2))

    def check(are_good: bool) -> None:
        keys = [bag // max(batch_size, 1) for bag in range(len(lengths))]
        fits = zip(of_bags(ids, lengths), keys, strict=True) if lengths else []
        expected = all(len(bag) <= longest[key] and all(i < bounds[key] for i in bag) for bag, key in fits)
        assert are_good == expected

    return Case([integers(random, ids), integers(random, lengths), torch.tensor(bounds), torch.tensor(longest)], check)


def split_bags(random: Random) -> Case:
    """Bags of one to three features, split by block; some blocks are dropped."""
    batch_size, num_blocks = random.randint(1, 4), [random.choice([1, 4, 20]) for _ in range(random.randint(1, 3))]
    lengths = draw_lengths(random, len(num_blocks) * batch_size, 4)
    ids = draw_ids(random, lengths, [9] * len(num_blocks))
    drawn = [draw_routing(random, 9, count) for count in num_blocks]
    first_of, num_pieces = offsets_of([count + 1 for count in num_blocks]), random.randint(0, 6)
    pieces = [random.randint(0, num_pieces) for _ in range(first_of[-1])]
    ids_tensor, lengths_tensor = integers(random, ids), integers(random, lengths)
    weights = torch.randn(len(ids), dtype=torch.float64) if random.random() < 0.5 else None
    split_ids, split_weights = torch.zeros_like(ids_tensor), None if weights is None else torch.zeros_like(weights)
    split_lengths = lengths_tensor.new_zeros(num_pieces * batch_size)

    def check(_: None) -> None:
        split: list[list[int]] = [[] for _ in range(num_pieces * batch_size)]
        bag_of_id = [bag for bag, length in enumerate(lengths) for _ in range(length)]
        for place, bag in enumerate(bag_of_id):
            feature, b = divmod(bag, batch_size)
            piece = pieces[first_of[feature] + drawn[feature][1][ids[place]]]
            if piece < num_pieces:
                split[piece * batch_size + b].append(place)
        order = [place for bag in split for place in bag]
        assert split_lengths.tolist() == [len(bag) for bag in split]
        assert split_ids[: len(order)].tolist() == [ids[place] for place in order]
        if weights is not None and split_weights is not None:
            same(split_weights[: len(order)], weights[order])

    routings, at = [routing for routing, _ in drawn], torch.tensor(pieces)
    written = [split_ids, split_lengths, split_weights]
    return Case([ids_tensor, lengths_tensor, weights, routings, at, first_of, batch_size, *written], check)


def round_rows(random: Random) -> Case:
    """All rows of a shard, or some, in codes, in float32 and dropped."""
    num_rows, dim, first_row, num_blocks = random.randint(1, 9), random.randint(0, 19), random.randint(0, 3), 4
    routing, blocks = draw_routing(random, num_rows + first_row, num_blocks)
    codes = torch.rand(num_blocks + 1, 4, dim) + 0.1
    codes[:, 2] = torch.tensor(random.choices([0.0, 1.0, 15.0, torch.inf], k=(num_blocks + 1) * dim)).view(
        num_blocks + 1, dim
    )
    rows = random.sample(range(num_rows), random.randint(0, num_rows))
    weight, residual = torch.randn(num_rows, dim) * 3, torch.randn(num_rows, dim)
    latent, before = weight + residual, residual.clone()
    some = random.random() < 0.5

    def check(_: None) -> None:
        for row in range(num_rows):
            if some and row not in rows:
                same(residual[row], before[row])
                continue
            scale, half_shift, largest, half_step = codes[blocks[row + first_row]]
            nearest = torch.minimum((latent[row] / scale - half_shift).round().clamp(min=0), largest)
            values = torch.where(largest.isinf(), latent[row], (nearest + half_shift) * scale)
            same(weight[row], values)
            same(residual[row], (latent[row] - values).clamp(-half_step, half_step))

    chosen = torch.tensor(rows, dtype=torch.int64) if some else None
    return Case([codes, routing, chosen, first_row, weight, residual], check)


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


def gather_ids(random: Random) -> Case:
    """The j-th piece of a feature is the bag of key ``j % keys`` in row ``j // keys``."""
    f = draw_found(random)
    num_keys, num_rows = draw_packing(random, f)
    ids, weights = integers(random, f.ids), torch.randn(len(f.ids)) if random.random() < 0.5 else None
    ids_out, weights_out = torch.zeros_like(ids), None if weights is None else torch.zeros_like(weights)
    lengths_out = integers(random, [-7] * (sum(num_keys) * num_rows))

    def check(_: None) -> None:
        bags: list[list[int]] = []
        for starts, keys in zip(f.starts, num_keys, strict=True):
            of_feature = [places for _, places in f.pieces[starts[0] : starts[-1]]]
            for key in range(keys):
                own = of_feature[key::keys]
                bags += own + [[]] * (num_rows - len(own))
        order = [place for bag in bags for place in bag]
        assert lengths_out.tolist() == [len(bag) for bag in bags]
        assert ids_out[: len(order)].tolist() == [f.ids[place] for place in order]
        if weights is not None and weights_out is not None:
            same(weights_out[: len(order)], weights[order])

    starts, piece_of_id = torch.tensor(f.starts), torch.tensor(f.piece_of_id, dtype=torch.int32)
    sizes = torch.tensor([len(places) for _, places in f.pieces], dtype=torch.int32)
    written = [ids_out, lengths_out, weights_out]
    return Case([ids, weights, starts, sizes, piece_of_id, num_keys, *written], check)


@dataclass(frozen=True)
class SparseSelection:
    """What the three operators of soft selection read of sparse bags."""

    starts: Tensor
    rows: Tensor
    layout: list[list[int]]
    pooled: Tensor
    alpha: Tensor
    out_width: int

    @property
    def terms(self) -> list[Term]:
        """Every piece of every sample."""
        terms = []
        for starts, (in_column, out_column, dim, keys, first, stride) in zip(
            self.starts.tolist(), self.layout, strict=True
        ):
            for b in range(len(starts) - 1):
                for piece in range(starts[b], starts[b + 1]):
                    row, key = divmod(piece - starts[0], keys)
                    places = (in_column + key * dim, out_column, first + int(self.rows[piece]) * stride)
                    at, to, of_alpha = (slice(c, c + dim) for c in places)
                    terms.append((b, row, at, to, of_alpha, 1.0))
        return terms

    def arguments(self) -> list[Tensor]:
        """`starts`, `rows` and `layout`."""
        return [self.starts, self.rows, torch.tensor(self.layout)]


def draw_sparse_selection(random: Random) -> SparseSelection:
    """The pieces of `draw_found`, with columns for each feature, and one tensor of alphas."""
    f, dtype = draw_found(random), random.choice([torch.float32, torch.float64])
    num_keys, num_rows = draw_packing(random, f)
    layout, in_column, out_column, alpha_size = [], 0, 0, 0
    for keys in num_keys:
        dim = random.choice([0, 1, 3, 17])
        stride = dim + random.randint(0, 2)
        layout.append([in_column, out_column, dim, keys, alpha_size, stride])
        in_column, out_column, alpha_size = in_column + keys * dim, out_column + dim, alpha_size + 30 * stride
    return SparseSelection(
        torch.tensor(f.starts),
        torch.tensor([row for row, _ in f.pieces], dtype=torch.int32),
        layout,
        torch.randn(num_rows, in_column, dtype=dtype),
        torch.randn(alpha_size, dtype=dtype),
        out_column,
    )


def select_sparse(random: Random) -> Case:
    """The output."""
    s = draw_sparse_selection(random)
    out = s.pooled.new_full((s.starts.shape[1] - 1, s.out_width), torch.nan)
    arguments = [s.pooled, s.alpha, *s.arguments(), out]
    return Case(arguments, lambda _: check_output(s.terms, s.pooled, s.alpha, out))


def spread_sparse_gradient(random: Random) -> Case:
    """The gradient of what was pooled; what no piece takes stays as it is."""
    s = draw_sparse_selection(random)
    grad = torch.randn(s.starts.shape[1] - 1, s.out_width, dtype=s.pooled.dtype)
    grad_pooled = torch.full_like(s.pooled, 7.0)
    arguments = [grad, s.alpha, *s.arguments(), grad_pooled]
    return Case(arguments, lambda _: check_spread(s.terms, grad, s.alpha, grad_pooled, 7.0))


def sum_sparse_alpha_gradient(random: Random) -> Case:
    """The gradient of alpha."""
    s = draw_sparse_selection(random)
    grad = torch.randn(s.starts.shape[1] - 1, s.out_width, dtype=s.pooled.dtype)
    grad_alpha = torch.full_like(s.alpha, torch.nan)
    arguments = [grad, s.pooled, *s.arguments(), grad_alpha]
    return Case(arguments, lambda _: check_sum(s.terms, grad, s.pooled, grad_alpha))
