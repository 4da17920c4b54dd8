"""Fuzzes every compiled operator under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz_operators [--seed N] [--cases N]

Valid arguments have to give what plain loops give. Hostile ones (numbers out of any range, other shapes, dtypes and
strides, memory that two arguments share) have to be refused by an exception, or to do something within their tensors:
a read or write beside one, or undefined behaviour, ends the process. Tables and batches are tiny, so that whatever is
read or written beside a tensor lies in memory that nobody owns. The libraries are compiled anew for it, with portable
loops only, because sanitizers do not see what vector intrinsics read; the cache keeps them. Where the compiler has no
sanitizers, that is said, and nothing is done.
"""

import argparse
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import WIDTHS, row_strides
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ops import build as native_build
from dnis_torchrec.ops import select as block_operators
from dnis_torchrec.ops.packed import load_operator, names_tensor, torch_encode_rows
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from tests.reference import packed, pool, table_scheme

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined")
FLAGS = (*native_build.FLAGS, *SANITIZERS, "-DDNIS_PORTABLE", "-O1", "-g1")
OPTIONS = {
    # leaks of Python's are none of ours; a size that nobody has is torch's to refuse
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "OMP_NUM_THREADS": "1",
}
SECONDS = 600
"""After which a call counts as one that does not end; on two idle cores all takes half a minute."""

NAMESPACE = "dnis_torchrec::"
HOSTILE_PER_CASE = 12
NUMBERS = (-(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 16, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
DTYPES = (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
REFUSALS = (ValueError, RuntimeError, TypeError, IndexError, NotImplementedError, MemoryError)
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


Entry = TypeVar("Entry")


def of_bags(ids: list[Entry], lengths: list[int]) -> list[list[Entry]]:
    bounds = offsets_of(lengths)
    return [ids[begin:end] for begin, end in itertools.pairwise(bounds)]


def draw_block_table(random: Random, name: str) -> TableScheme:
    """A table of blocks, whose rows stand by block or do not, or of which few have a block."""
    num_rows, num_blocks, dim = random.randint(1, 12), random.choice([1, 3, 40]), random.choice([1, 5, 16, 33])
    blocks = [random.randint(0, num_blocks) for _ in range(num_rows)]
    if random.random() < 0.3:
        blocks += [num_blocks] * random.randint(1000, 1100)
        random.shuffle(blocks)
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
    factors = [1.0] * len(ids) if weights is None else weights.tolist()

    def check(out: Tensor) -> None:
        bags = of_bags(list(zip(ids, factors, strict=True)), lengths)
        same(
            out,
            torch.cat(
                [
                    pool(dense[table.name], bags[key * batch_size :][:batch_size], table.pooling, True)
                    for (_, table), key in zip(features, keys, strict=True)
                ],
                dim=1,
            ),
        )

    return Case(arguments, check)


def opened(case: Case) -> int:
    """The number of a collection with the tables and layouts of a case of `packed_embedding_bag`."""
    return torch.ops.dnis_torchrec.open_collection.default(*case.arguments[3:8])


def arguments_of_bags(case: Case) -> list[Any]:
    """What `pool_opened` takes behind the number."""
    return [*case.arguments[:3], *case.arguments[8:10], case.arguments[11]]


def open_collection(random: Random) -> Case:
    case, pool_opened = packed_embedding_bag(random), torch.ops.dnis_torchrec.pool_opened.default
    return Case(case.arguments[3:8], lambda number: case.check(pool_opened(number, *arguments_of_bags(case))))


def pool_opened(random: Random) -> Case:
    case = packed_embedding_bag(random)
    return Case([opened(case), *arguments_of_bags(case)], case.check)


def close_collection(random: Random) -> Case:
    case, pool_opened = packed_embedding_bag(random), torch.ops.dnis_torchrec.pool_opened.default
    number = opened(case)

    def check(nothing: None) -> None:
        try:
            pool_opened(number, *arguments_of_bags(case))
        except REFUSALS:
            return
        raise AssertionError(f"expected collection {number} to be closed")

    return Case([number], check)


def bag_offsets(random: Random) -> Case:
    num_features, batch_size = random.randint(1, 3), random.randint(0, 4)
    lengths = draw_lengths(random, num_features * batch_size, 3)
    arguments = [
        integers(random, lengths).view(num_features, batch_size),
        torch.arange(sum(lengths)),
        names_tensor(["a", "bc", "d"][:num_features]),
    ]
    return Case(arguments, lambda out: same(out, torch.tensor(offsets_of(lengths))))


def encode_rows(random: Random) -> Case:
    """Rows of one to three blocks or of none, as bit fields or as what these stand for."""
    num_blocks, dim, num_rows = random.randint(1, 3), random.choice([1, 5, 17]), random.choice([0, 1, 7, 40])
    bits = torch.tensor(WIDTHS)[torch.randint(len(WIDTHS), (num_blocks, dim))].byte()
    gain = 1 + torch.rand(num_blocks, dim) if random.random() < 0.5 else None
    feedback = torch.rand(num_blocks, dim, dim) if random.random() < 0.5 else None
    scale, shift = torch.ones(num_blocks, dim), torch.randint(-9, 9, (num_blocks, dim)).short()
    values, blocks = 9 * torch.randn(num_rows, dim), torch.randint(num_blocks + 1, (num_rows,))
    arguments = [values, blocks, bits, scale, shift, gain, feedback]
    num_bytes = int(torch.bincount(blocks, minlength=num_blocks + 1)[:-1] @ row_strides(bits))
    size = (num_bytes,) if random.random() < 0.5 else (num_rows, dim)
    out, expected = (torch.zeros(size, dtype=torch.uint8 if len(size) == 1 else torch.float32) for _ in range(2))
    torch_encode_rows(*arguments, expected)
    return Case([*arguments, out], lambda _: same(out, expected))


Term = tuple[int, int, slice, slice, slice, float]
"""Sample, row of what was pooled, columns there, columns of the output, part of alpha, and divisor."""


@dataclass(frozen=True)
class Selection:
    """What the three operators of soft selection read; `rule` says which piece goes where, and so do `terms`."""

    rule: list[Tensor | None]
    terms: list[Term]
    bag_sums: Tensor
    alpha: Tensor
    batch_size: int
    width: int


def draw_selection(random: Random) -> Selection:
    """One to three outputs of one to three pieces each; the alphas of all stand in one tensor."""
    batch_size, dtype = random.choice([1, 7, 70, 600]), random.choice([torch.float32, torch.float64])
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
    divisors = torch.rand(batch_size, output + 1, dtype=dtype) + 1 if random.random() < 0.5 else None
    terms = []
    for b, k in itertools.product(range(batch_size), range(len(layout))):
        in_first, out_first, dim, first, output, *_ = layout[k]
        divisor = 1.0 if divisors is None else float(divisors[b, output])
        if rows[b][k] >= 0:
            at, to, of_alpha = (slice(c, c + dim) for c in (in_first, out_first, first + rows[b][k] * dim))
            terms.append((b, b, at, to, of_alpha, divisor))
    rule = [torch.tensor(rows, dtype=torch.int32), divisors, torch.tensor(layout)]
    bag_sums, alpha = torch.randn(batch_size, in_column, dtype=dtype), torch.randn(alpha_size, dtype=dtype)
    return Selection(rule, terms, bag_sums, alpha, batch_size, out_column)


def check_output(s: Selection) -> Case:
    """out = sum over pieces of bag sums * alpha / divisor."""
    out = s.bag_sums.new_full((s.batch_size, s.width), torch.nan)
    expected = torch.zeros_like(out)
    for b, row, at, to, of_alpha, divisor in s.terms:
        expected[b, to] += s.bag_sums[row, at] * s.alpha[of_alpha] / divisor
    return Case([s.bag_sums, s.alpha, *s.rule, out], lambda _: same(out, expected))


def check_spread(s: Selection, *options: bool, rest: float = 7.0) -> Case:
    """The gradient of bag sums = grad * alpha / divisor; what no piece takes is `rest` then, and 7 before."""
    grad = torch.randn(s.batch_size, s.width, dtype=s.bag_sums.dtype)
    grad_sums, expected = torch.full_like(s.bag_sums, 7.0), torch.full_like(s.bag_sums, rest)
    for b, row, at, to, of_alpha, divisor in s.terms:
        expected[row, at] = grad[b, to] * s.alpha[of_alpha] / divisor

    def check(is_finite: bool | None) -> None:
        same(grad_sums, expected)
        assert is_finite is not False

    return Case([grad, s.alpha, *s.rule, *options, grad_sums], check)


def check_sum(s: Selection) -> Case:
    """The gradient of alpha = sum over samples of grad * bag sums / divisor."""
    grad = torch.randn(s.batch_size, s.width, dtype=s.bag_sums.dtype)
    grad_alpha, expected = torch.full_like(s.alpha, torch.nan), torch.zeros_like(s.alpha)
    for b, row, at, to, of_alpha, divisor in s.terms:
        expected[of_alpha] += grad[b, to] * s.bag_sums[row, at] / divisor
    return Case([grad, s.bag_sums, *s.rule, grad_alpha], lambda _: same(grad_alpha, expected))


def spread_gradient(random: Random) -> Case:
    """Empty bags have a gradient of 0, or what stood there before."""
    keep_empty = random.random() < 0.5
    return check_spread(draw_selection(random), keep_empty, rest=7.0 if keep_empty else 0.0)


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
    ids = [row - (random.random() < 0.1) * 9 for row in draw_ids(random, lengths, [9] * num_keys)]
    bounds, longest = ([random.choice([1, 9, 2**63 - 1]) for _ in range(num_keys)] for _ in range(2))

    def check(are_good: bool) -> None:
        keys = [bag // max(batch_size, 1) for bag in range(len(lengths))]
        fits = zip(of_bags(ids, lengths), keys, strict=True) if lengths else []
        expected = all(len(bag) <= longest[key] and all(0 <= i < bounds[key] for i in bag) for bag, key in fits)
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
class Pieces:
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


def draw_pieces(random: Random) -> Pieces:
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
    return Pieces(ids, lengths, batch_size, routings, features, starts, pieces)


def find_pieces(random: Random) -> Case:
    """Pieces are numbered feature by feature, bag by bag, and in a bag as its ids come."""
    f = draw_pieces(random)
    starts = torch.full((len(f.routings), f.batch_size + 1), -7)
    rows, sizes, piece_of_id = (torch.full((len(f.ids),), -7, dtype=torch.int32) for _ in range(3))

    def check(_: None) -> None:
        assert starts.tolist() == f.starts
        assert rows[: len(f.pieces)].tolist() == [row for row, _ in f.pieces]
        assert sizes[: len(f.pieces)].tolist() == [len(places) for _, places in f.pieces]
        assert piece_of_id.tolist() == f.piece_of_id

    fields = [number for feature in f.features for number in feature]
    written = [starts, rows, sizes, piece_of_id]
    return Case([integers(random, f.ids), integers(random, f.lengths), f.routings, fields, *written], check)


def draw_packing(random: Random, f: Pieces) -> tuple[list[int], int]:
    num_keys = [random.randint(1, 3) for _ in f.routings]
    counts = [starts[-1] - starts[0] for starts in f.starts]
    num_rows = max([1, *(-(-count // keys) for count, keys in zip(counts, num_keys, strict=True))])
    return num_keys, num_rows + random.randint(0, 1)


def gather_ids(random: Random) -> Case:
    """The j-th piece of a feature is the bag of key ``j % keys`` in row ``j // keys``."""
    f = draw_pieces(random)
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


def draw_sparse_selection(random: Random) -> Selection:
    """The pieces of `draw_pieces`, with columns for each feature, and one tensor of alphas."""
    f, dtype = draw_pieces(random), random.choice([torch.float32, torch.float64])
    num_keys, num_rows = draw_packing(random, f)
    layout, terms, in_column, out_column, alpha_size = [], [], 0, 0, 0
    for starts, keys in zip(f.starts, num_keys, strict=True):
        dim = random.choice([0, 1, 3, 17])
        stride = dim + random.randint(0, 2)
        layout.append([in_column, out_column, dim, keys, alpha_size, stride])
        pieces_of_bags = [(b, piece) for b in range(f.batch_size) for piece in range(starts[b], starts[b + 1])]
        for b, piece in pieces_of_bags:
            row, key = divmod(piece - starts[0], keys)
            places = (in_column + key * dim, out_column, alpha_size + f.pieces[piece][0] * stride)
            at, to, of_alpha = (slice(c, c + dim) for c in places)
            terms.append((b, row, at, to, of_alpha, 1.0))
        in_column, out_column, alpha_size = in_column + keys * dim, out_column + dim, alpha_size + 30 * stride
    rows = torch.tensor([row for row, _ in f.pieces], dtype=torch.int32)
    rule: list[Tensor | None] = [torch.tensor(f.starts), rows, torch.tensor(layout)]
    bag_sums, alpha = torch.randn(num_rows, in_column, dtype=dtype), torch.randn(alpha_size, dtype=dtype)
    return Selection(rule, terms, bag_sums, alpha, f.batch_size, out_column)


CASES: dict[str, Callable[[Random], Case]] = {
    **{draw.__name__: draw for draw in (packed_embedding_bag, bag_offsets, spread_gradient, fill_rows, are_good_bags)},
    **{draw.__name__: draw for draw in (open_collection, pool_opened, close_collection)},
    **{draw.__name__: draw for draw in (split_bags, round_rows, find_pieces, gather_ids, encode_rows)},
    "select_pooled": lambda random: check_output(draw_selection(random)),
    "sum_alpha_gradient": lambda random: check_sum(draw_selection(random)),
    "select_sparse": lambda random: check_output(draw_sparse_selection(random)),
    "spread_sparse_gradient": lambda random: check_spread(draw_sparse_selection(random)),
    "sum_sparse_alpha_gradient": lambda random: check_sum(draw_sparse_selection(random)),
}
"""Every operator of the libraries, with what draws its arguments."""


def hostile_number(random: Random, number: int) -> int:
    """One beside it, or any that makes trouble."""
    return random.choice([number - 1, number + 1, *NUMBERS])


def within(number: int, dtype: torch.dtype) -> int:
    bounds = torch.iinfo(dtype)
    return min(max(number, bounds.min), bounds.max)


def with_another_element(random: Random, tensor: Tensor) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.view(-1)
    for _ in range(random.randint(1, 2) if len(flat) else 0):
        place = random.randrange(len(flat))
        if tensor.dtype.is_floating_point:
            flat[place] = random.choice([torch.nan, torch.inf, -1e30])
        else:
            flat[place] = within(hostile_number(random, int(flat[place])), tensor.dtype)
    return tensor


def of_another_shape(random: Random, tensor: Tensor) -> Tensor:
    """Shorter, longer, of other dimensions, with gaps between its numbers, or with none at all."""
    if tensor.dim() == 0:
        return tensor.unsqueeze(0)
    gaps = torch.stack([tensor, tensor], dim=-1)[..., 0]
    huge = tensor.new_empty(0, random.choice([2**40, 2**60]))
    cut = [tensor[:-1], tensor[1:], tensor[:0], tensor[..., :-1]]
    more = [torch.cat([tensor, tensor[:1]]), tensor.expand(2, *tensor.shape), huge, huge.t(), gaps]
    return random.choice([*cut, *more, tensor.flatten(), tensor.unsqueeze(0), tensor.unsqueeze(1)])


def over_the_memory_of(other: Tensor, tensor: Tensor) -> Tensor:
    """Of the same dtype, and shape if there is room, where another argument lies."""
    found = torch.empty(0, dtype=tensor.dtype).set_(other.untyped_storage())
    return found[: tensor.numel()].view(tensor.shape) if found.numel() >= tensor.numel() else found


def spoiled(random: Random, argument: Any, tensors: list[Tensor]) -> Any:
    """An argument of about the same kind that the operator may well not expect."""
    if isinstance(argument, Tensor):
        changes: list[Callable[[], Tensor]] = [
            lambda: with_another_element(random, argument),
            lambda: with_another_element(random, argument),
            lambda: of_another_shape(random, argument),
            lambda: argument.to(random.choice(DTYPES)),
            lambda: over_the_memory_of(random.choice(tensors), argument),
            lambda: random.choice(tensors),
        ]
        return random.choice(changes)()
    if isinstance(argument, bool):
        return not argument
    if isinstance(argument, int):
        return hostile_number(random, argument)
    if isinstance(argument, list):
        changed = list(argument)
        place = random.randrange(len(changed) + 1)
        kind = random.choice(["one less", "one more", "another", "another", "none"])
        if kind == "none" or not changed:
            return []
        if kind == "one less":
            del changed[-1]
        elif kind == "one more":
            changed.insert(place, random.choice(changed))
        else:
            place = min(place, len(changed) - 1)
            changed[place] = spoiled(random, changed[place], tensors)
        return changed
    return random.choice([None, *tensors])


@functools.cache
def operator(name: str) -> Callable[..., Any]:
    """A compiled operator; what is compiled and what is drawn here have to be the same."""
    assert load_operator(), "expected the lookups to be compiled"
    assert block_operators.are_compiled(), "expected the operators on blocks to be compiled"
    names = {name.removeprefix(NAMESPACE) for name in torch._C._dispatch_get_all_op_names() if NAMESPACE in name}
    assert names == CASES.keys(), f"CASES: expected {sorted(names)}, got {sorted(CASES)}"
    return getattr(torch.ops.dnis_torchrec, name).default


def valid_case(name: str, seed: str) -> tuple[Case, Random]:
    """Arguments of an operator, after a call that gave what it had to."""
    random = Random(seed)
    torch.manual_seed(random.getrandbits(32))
    case = CASES[name](random)
    case.check(operator(name)(*case.arguments))
    return case, random


def fuzz(seed: int, num_cases: int, last: Path) -> None:
    """Calls every operator with valid and hostile arguments; `last` tells which call was the last one."""
    native_build.FLAGS = FLAGS
    for name in sorted(CASES):
        num_refusals = 0
        for index in range(num_cases):
            case_seed = f"{seed}:{name}:{index}"
            last.write_text(f"{case_seed}, valid")
            case, random = valid_case(name, case_seed)
            flat = [part for own in case.arguments for part in (own if isinstance(own, list) else [own])]
            tensors = [part for part in flat if isinstance(part, Tensor)]
            for attempt in range(HOSTILE_PER_CASE):
                arguments = list(case.arguments)
                for place in random.sample(range(len(arguments)), min(len(arguments), random.choice([1, 1, 2, 3]))):
                    arguments[place] = spoiled(random, arguments[place], tensors)
                last.write_text(f"{case_seed}, hostile {attempt}")
                try:
                    operator(name)(*arguments)
                except REFUSALS:
                    num_refusals += 1
        print(
            f"fuzz: {name}: {num_cases} valid, {num_cases * HOSTILE_PER_CASE} hostile of which {num_refusals} refused"
        )


def sanitizer_runtimes(compiler: str, folder: Path) -> list[str]:
    """What has to be loaded before Python, or nothing if the compiler cannot compile a program with the sanitizers."""
    source, program = folder / "trivial.cpp", folder / "trivial"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, *SANITIZERS, str(source), "-o", str(program)]
    if subprocess.run(command, capture_output=True).returncode or subprocess.run([program]).returncode:
        return []
    names = ("libasan.so", "libstdc++.so")  # the second, because the first looks for what throws exceptions
    found = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    runtimes = [done.stdout.strip() for done in found]
    return runtimes if all(Path(runtime).is_absolute() for runtime in runtimes) else []


def build() -> None:
    native_build.FLAGS = FLAGS
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda build: build(), [native_build.LOOKUPS.build, native_build.SELECTION.build]))


def main() -> int:
    """Compiles, and fuzzes in a process of its own. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="valid ones of every operator, each with hostile ones")
    parser.add_argument("--last", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.last is not None:
        fuzz(options.seed, options.cases, options.last)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        compiler = native_build.find_compiler()
        runtimes = sanitizer_runtimes(compiler, Path(folder)) if compiler else []
        if not runtimes:
            print("fuzz: skipped: the C++ compiler has no AddressSanitizer and UndefinedBehaviorSanitizer")
            return 0
        build()
        last = Path(folder) / "last"
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz_operators", "--last", str(last)]
        command += ["--seed", str(options.seed), "--cases", str(options.cases)]
        variables = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(runtimes)}
        try:
            status = subprocess.run(command, env=variables, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired:
            status = 124
        if status:
            print(f"fuzz: failed with status {status}, at {last.read_text() if last.exists() else 'the start'}")
        return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
