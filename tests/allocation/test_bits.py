"""Bits under a budget: bytes and loss as counted naively, cold blocks, retained columns."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import prepare_
from dnis_torchrec.allocation import energies as energies_module
from dnis_torchrec.allocation.bits import Allocation, allocate, retained_columns
from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.allocation.energies import (
    RoundingEnergies,
    TableEnergies,
    blocked_tables,
    check_all_merged,
    rounding_energies,
)
from dnis_torchrec.allocation.spending import Path, Purse, RowOptions, column_steps, lower_hull, row_options, widths_of
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import is_coded, row_strides
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.scheme import PACKED, packed_index_bytes
from tests import models
from tests.reference import least_loss_reference

EVERY_WIDTH = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
GAINS = st.floats(1e-6, 1.0)


class Model:
    """Tables of some sizes, their blocks, a curvature and energies: all that `allocate` is given."""

    def __init__(self, rows: list[int], dims: list[int], num_blocks: int, seed: int, widths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d, feature_names=[f"f{i}"])
            for i, (n, d) in enumerate(zip(rows, dims, strict=True))
        ]
        drawn = {c.name: torch.randint(1, 9, (c.num_embeddings,), generator=generator) for c in self.configs}
        self.counts = FrequencyCounts(drawn, {f"f{i}": 1 for i in range(len(rows))}, 100)
        self.blocks = blocks_from_counts(self.counts, self.configs, num_blocks=num_blocks, least_rows=1)
        worth, energies = {}, {}
        for config in self.configs:
            shape = (self.blocks.routings[config.name].num_blocks, config.embedding_dim)
            worth[config.name] = torch.exp(2 * torch.randn(shape, generator=generator, dtype=torch.float64))
            worth[config.name][torch.rand(shape, generator=generator) < 0.1] = -0.1
            worth[config.name][0, 0] = 1.0
            ideal = torch.tensor([4.0**-k if k < 32 else 0.0 for k in widths], dtype=torch.float64)
            noise = torch.exp(0.5 * torch.rand(*shape, len(widths), generator=generator, dtype=torch.float64))
            energy = torch.where(torch.tensor(widths) > 0, ideal * noise, 1.0).cummin(2).values
            ones = torch.ones(*shape, len(widths))
            energies[config.name] = TableEnergies(energy=energy, scale=ones * 0.5, shift=-(2 * ones).short())
        self.curvature = Curvature({name: 0 * part for name, part in worth.items()}, worth, 100, 0.1)
        self.energies = RoundingEnergies(widths, energies)
        self.collection = EmbeddingBagCollection(tables=self.configs)
        self.dense_bytes = 4 * sum(n * d for n, d in zip(rows, dims, strict=True))

    def allocate(self, **size: float | int | str | tuple[int, ...]) -> Allocation:
        given = {"energies": self.energies, "bits": self.energies.bits} | size
        return allocate(self.collection, self.blocks, self.counts, self.curvature, **given)  # type: ignore[arg-type]

    def loss_of(self, found: Allocation) -> float:
        """Naively: H / 2 times the energy at the width of every column of every block."""
        total = 0.0
        for name, table in found.scheme.tables.items():
            assert table.bits is not None
            for block, row in enumerate(table.bits.tolist()):
                for column, width in enumerate(row):
                    if width == 32:  # exact, also where it was not offered
                        continue
                    energy = self.energies.tables[name].energy[block, column, self.energies.bits.index(width)]
                    total += max(0.0, float(self.curvature.curvature[name][block, column])) / 2 * float(energy)
        return total

    def bytes_of(self, found: Allocation) -> int:
        """Naively: fields one after the other, float32 at whole bytes, rows of whole bytes."""
        total = 0
        for name, table in found.scheme.tables.items():
            assert table.bits is not None
            own = 0
            for rows, widths in zip(table.routing.row_counts().tolist(), table.bits.tolist(), strict=True):
                end = 0
                for width in widths:
                    end = (math.ceil(end / 8) * 8 if width == 32 else end) + width
                    own += 4 * (0 < width < 32)
                own += rows * math.ceil(end / 8)
            total += own + packed_index_bytes(self.blocks.routings[name], table.bits) if own else 0
        return total


def draw_models(most: int, *widths: tuple[int, ...]) -> st.SearchStrategy[Model]:
    """Of so many tables at most."""
    return st.builds(
        lambda sizes, *rest: Model([n for n, _ in sizes], [d for _, d in sizes], *rest),
        st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 3, 8])), min_size=1, max_size=most),
        st.integers(1, most),
        st.integers(0, 10_000),
        st.sampled_from(widths),
    )


MODELS = draw_models(3, (0, 1, 2, 3, 4, 5, 6, 8), (0, 1, 4, 16), EVERY_WIDTH, (0, 32), (0, 3, 32))


# The first step of a table may be cheap enough, and be refused for what it would gain.
@example(model=Model([29, 51], [8, 3], 3, 0, (0, 1, 4, 16)), share=0.0625)
@example(model=Model([9, 52], [8, 3], 3, 2, (0, 1, 2, 3, 4, 5, 6, 8)), share=0.0625)
@settings(max_examples=20, deadline=None)
@given(model=MODELS, share=st.floats(0.02, 1.2))
def test_bytes_and_loss_are_those_of_the_scheme_and_within_the_budget(model: Model, share: float) -> None:
    budget = max(1, int(share * model.dense_bytes))
    try:
        found = model.allocate(compression=model.dense_bytes / budget)
    except ValueError as error:
        most = float(str(error).split("at most ")[1].split(" ")[0])
        assert most < model.dense_bytes / budget
        found = model.allocate(compression=most)
        budget = model.dense_bytes / most
    served = sum(table.served_bytes(PACKED) for table in found.scheme.tables.values())
    assert found.num_bytes == model.bytes_of(found) == served <= budget
    assert found.predicted_loss_increase == pytest.approx(model.loss_of(found), rel=1e-9, abs=1e-12)
    assert found.compression == pytest.approx(model.dense_bytes / found.num_bytes)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_blocks=st.integers(1, 4), budget=st.integers(0, 60))
def test_bytes_are_spent_as_well_as_brute_force_would(data: st.DataObject, num_blocks: int, budget: int) -> None:
    """What is bought has the least loss of all on the hulls that takes so many bytes; at most one step is missing."""
    costs = [sorted(data.draw(st.sets(st.integers(1, 15), min_size=2, max_size=2))) for _ in range(num_blocks)]
    gains = [data.draw(st.lists(GAINS, min_size=2, max_size=2)) for _ in range(num_blocks)]
    num_bytes = torch.tensor([[0, *cost] for cost in costs])
    loss = torch.tensor([[sum(gain), gain[1], 0.0] for gain in gains], dtype=torch.float64)
    corner = lower_hull(num_bytes.double(), loss)
    options = [
        [(int(n), float(x)) for n, x, kept in zip(num_bytes[b], loss[b], corner[b], strict=True) if kept]
        for b in range(num_blocks)
    ]
    none = torch.zeros(num_blocks, dtype=torch.int64)
    no_steps = torch.zeros_like(num_bytes), torch.zeros(*loss.shape, 0, dtype=torch.bool)
    path = Path.of(RowOptions(num_bytes, loss, *no_steps))  # as if rows of 0, 1 and 2 bytes took so many bytes
    spent = Purse(path, none, torch.zeros(1, dtype=torch.int64)).spend(budget)
    found = float(loss.gather(1, spent.row_bytes[:, None]).sum())
    assert spent.num_bytes == int(num_bytes.gather(1, spent.row_bytes[:, None]).sum()) <= budget
    assert found >= least_loss_reference(options, [0] * num_blocks, [0], budget) - 1e-12
    largest = max((int(c) for c in path.cost), default=0)
    assert found <= least_loss_reference(options, [0] * num_blocks, [0], max(0, budget - largest)) + 1e-12
    first_steps = [corners[1][0] for corners in options]
    assert (spent.num_bytes > 0) == (min(first_steps) <= budget)
    totals = path.cost.cumsum(0).tolist()
    if budget in totals:
        assert found == pytest.approx(least_loss_reference(options, [0] * num_blocks, [0], budget), abs=1e-12)


# losses as losses are: differences of 1e-228 are none
LOSSES = st.floats(0, 1).map(lambda loss: round(loss, 6))


@settings(max_examples=50, deadline=None)
@given(points=st.lists(st.tuples(st.integers(1, 9), LOSSES), min_size=1, max_size=6), first=LOSSES)
def test_hulls_are_those_of_naive_search(points: list[tuple[int, float]], first: float) -> None:
    """A corner lies below every line between two others, and is lower than all before it."""
    rates, losses = [0, *sorted(p[0] for p in points)], [first, *(p[1] for p in points)]
    found = lower_hull(torch.tensor([rates]).double(), torch.tensor([losses]).double())[0].tolist()
    corners = [(r, x) for r, x, kept in zip(rates, losses, found, strict=True) if kept]
    assert corners == sorted(corners, key=lambda c: -c[1])
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(corners)]
    assert all(slope < 0 for slope in slopes)
    assert slopes == sorted(slopes)
    for rate, loss in zip(rates, losses, strict=True):
        for (r0, x0), (r1, x1) in pairwise(corners):
            if r0 <= rate <= r1:
                assert loss >= x0 + (x1 - x0) * (rate - r0) / (r1 - r0) - 1e-12
        assert loss >= corners[-1][1] or rate > corners[-1][0]


@pytest.mark.parametrize("widths", [(0, 1, 2, 3, 4, 5, 6, 8), (0, 1, 4, 16), (0, 3, 32)])
def test_rows_leave_no_bits_that_a_step_would_fit_in(widths: tuple[int, ...]) -> None:
    model = Model([50], [8], 2, 3, widths)
    bits = torch.tensor(widths)
    loss = model.curvature.curvature["t0"].clamp(min=0)[..., None] / 2 * model.energies.tables["t0"].energy
    rows = model.blocks.routings["t0"].row_counts()
    steps = column_steps(loss, rows, bits)
    options = row_options(steps, loss[..., 0].sum(1), rows)
    for stride in range(options.loss.shape[1]):
        chosen = torch.full((2,), stride)
        index = widths_of(steps, options, chosen, 8)
        taken = bits[index]
        assert bool((taken.sum(1) <= 8 * stride).all())
        expected = loss.gather(2, index[..., None]).sum((1, 2))
        torch.testing.assert_close(options.loss[:, stride], expected, rtol=1e-9, atol=1e-12)
        exact = rows * row_strides(taken) + 4 * is_coded(taken).sum(1)
        assert bool((options.num_bytes[:, stride] >= exact).all())
        if 32 not in widths:
            assert torch.equal(options.num_bytes[:, stride], exact)
        for block in range(2):
            spare = 8 * stride - int(taken[block].sum())
            nexts = [
                bits[corner] - bits[index[block, c]]
                for c in range(8)
                for corner in [_next_corner(loss[block, c], bits, int(rows[block]), int(index[block, c]))]
                if corner is not None
            ]
            assert all(int(step) > spare for step in nexts)


def _next_corner(loss: torch.Tensor, bits: torch.Tensor, rows: int, index: int) -> int | None:
    rate = bits + 32 * is_coded(bits) / rows
    corners = lower_hull(rate[None].double(), loss[None])[0].nonzero().flatten().tolist()
    return next((corner for corner in corners if corner > index), None)


def test_codes_are_those_measured_at_the_chosen_bits() -> None:
    torch.manual_seed(0)
    model = Model([300], [8], 3, 1, (0, 2, 3, 4, 8, 32))
    energies = rounding_energies(model.collection, model.blocks, model.counts, bits=model.energies.bits)
    found = allocate(model.collection, model.blocks, model.counts, model.curvature, compression=5, bits=energies.bits)
    table, codes = found.scheme.tables["t0"], found.scheme.tables["t0"].codes
    assert table.bits is not None
    assert torch.equal(codes.bits, table.bits)
    assert len(table.bits.unique()) > 2
    for block, column in [(b, c) for b in range(3) for c in range(8)]:
        width = int(table.bits[block, column])
        index, measured = energies.bits.index(width), energies.tables["t0"]
        is_code = 0 < width < 32
        assert float(codes.scale[block, column]) == (float(measured.scale[block, column, index]) if is_code else 1)
        assert int(codes.shift[block, column]) == (int(measured.shift[block, column, index]) if is_code else 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "size: expected exactly one of compression, max_loss, got none"),
        ({"compression": 8, "max_loss": 0.1}, "size: expected exactly one"),
        ({"compression": math.nan}, "compression: expected a finite number above 0"),
        ({"compression": 8, "bits": (2, 7)}, r"energies: expected those of \[0, 2, 7\] bits, got none of \[7\]"),
        ({"compression": 8, "energies": None, "bits": (2, 9)}, r"bits: expected some of .*, got \[9\]"),
    ],
)
def test_what_is_no_size_is_refused(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model([30], [8], 3, 1, (0, 2, 3, 4, 8)).allocate(**given)


def test_a_curvature_of_other_blocks_or_of_nothing_is_refused() -> None:
    model = Model([30], [8], 3, 1, (0, 2, 3, 4, 8))
    worth = model.curvature.curvature["t0"].clone()
    for other, message in (
        (worth[:2], r"table 't0': expected curvature of \(S, D\) = \(3, 8\), got \(2, 8\)"),
        (worth * torch.nan, "table 't0': expected a finite curvature"),
        (worth * 0, "curvature: expected a column of a table that is worth something"),
    ):
        model.curvature = Curvature({"t0": other}, {"t0": other}, 100, 0.1)
        with pytest.raises(ValueError, match=message):
            model.allocate(compression=8)


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(2, 12))
def test_others_get_what_a_table_left_alone_leaves(seed: int, ratio: int) -> None:
    """As if it were not there, of bytes that are fewer by its own."""
    model = Model([30, 20, 40], [4, 2, 3], 2, seed, EVERY_WIDTH[:7])
    alone = "t1"
    blocks = dataclasses.replace(model.blocks, left_alone=frozenset({alone}))
    others = [config for config in model.configs if config.name != alone]
    given = {"energies": model.energies, "bits": model.energies.bits}
    dense, others_dense = 4 * (30 * 4 + 20 * 2 + 40 * 3), 4 * (30 * 4 + 40 * 3)
    budget = 4 * 20 * 2 + 200 + others_dense // ratio
    found = allocate(model.collection, blocks, model.counts, model.curvature, compression=dense / budget, **given)
    own = found.scheme.tables[alone].served_bytes(PACKED)
    expected = allocate(
        EmbeddingBagCollection(tables=others),
        blocks_from_counts(model.counts, others, num_blocks=2, least_rows=1),
        model.counts,
        model.curvature,
        compression=others_dense / (budget - own),
        **given,
    )
    assert list(found.scheme.tables) == ["t0", "t1", "t2"]
    assert bool((found.scheme.tables[alone].bits == 32).all())
    assert all(torch.equal(found.scheme.tables[name].bits, t.bits) for name, t in expected.scheme.tables.items())
    assert found.num_bytes == expected.num_bytes + own <= budget
    assert found.predicted_loss_increase == expected.predicted_loss_increase


ROWS, BLOCKS = 400, 4


class ModelOfColdBlocks:
    """One table of which the last half is never looked up, beside one that training knows whole."""

    def __init__(self, dim: int) -> None:
        torch.manual_seed(0)
        self.tables = [
            EmbeddingBagConfig(name="new", num_embeddings=ROWS, embedding_dim=dim, feature_names=["f"]),
            EmbeddingBagConfig(name="old", num_embeddings=ROWS, embedding_dim=16, feature_names=["g"]),
        ]
        counted = torch.arange(ROWS, 0, -1)
        drawn = {"new": counted * (torch.arange(ROWS) < ROWS // 2), "old": counted}
        self.counts = FrequencyCounts(drawn, {"f": 1, "g": 1}, 100)
        self.blocks: RowBlocks = blocks_from_counts(self.counts, self.tables, num_blocks=BLOCKS, least_rows=1)
        worth = {t.name: torch.rand(BLOCKS, t.embedding_dim, dtype=torch.float64) + 0.1 for t in self.tables}
        worth["new"][self.blocks.seen_rows["new"] == 0] = 0.0
        self.curvature = Curvature({name: 0 * part for name, part in worth.items()}, worth, 100, 0.1)
        self.collection = EmbeddingBagCollection(tables=self.tables)

    def allocate(self, **size: float) -> Allocation:
        return allocate(self.collection, self.blocks, self.counts, self.curvature, **size)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [64, 8])
def test_cold_blocks_take_no_byte_and_read_as_zeros(dim: int) -> None:
    model = ModelOfColdBlocks(dim)
    found = model.allocate(compression=12)
    bits, rows = found.scheme.tables["new"].bits, model.blocks.routings["new"].row_counts()
    assert bits[:-1].any(1).all()
    assert not bits[-1].any()
    assert rows[-1] == ROWS // 2
    assert found.num_bytes == sum(table.served_bytes(PACKED) for table in found.scheme.tables.values())
    (served,) = packed_collections(nn.ModuleDict({"c": model.collection}), found.scheme).values()
    bags = KeyedJaggedTensor(["f", "g"], torch.tensor([ROWS - 1, 0]), lengths=torch.tensor([1, 0, 0, 1]))
    assert not served(bags)["f"].any()
    assert served.bit_fields()["new"].numel() == int((rows * row_strides(bits))[:-1].sum())
    tables = blocked_tables(model.collection, model.blocks)
    searched = retained_columns(tables, model.blocks, model.curvature.curvature, bits=4, compression=12)["new"]
    assert searched[0].any()
    assert not searched[-1].any()  # nor do columns stay there in a search


@pytest.mark.parametrize(("dim", "range_of_columns"), [(16, 1.0), (16, 2.0**-10), (64, 2.0**-10)])
def test_few_rows_of_shuffled_ids_can_be_served_in_a_200th(dim: int, range_of_columns: float) -> None:
    """A tenth of 100,000 rows is read. Loss grows with the compression, and at once by no more than the bits that go:
    four times for each bit of a value."""
    config = EmbeddingBagConfig(name="t", num_embeddings=100_000, embedding_dim=dim, feature_names=["f"])
    counted = torch.zeros(100_000, dtype=torch.int64)
    read = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))[:10_000]
    counted[read] = 10**6 // torch.arange(1, 10_001)
    counts = FrequencyCounts({"t": counted}, {"f": 1}, 100)
    blocks = blocks_from_counts(counts, [config])
    assert blocks.seen_rows["t"].tolist() == [1428, 1429, 1428, 1429, 1428, 1429, 1429, 0]
    widths = energies_module.BITS
    worth = blocks.occurrences["t"][:, None] * range_of_columns ** (2 * torch.arange(dim).double() / dim)
    energy = torch.tensor([4.0**-k for k in widths], dtype=torch.float64).expand(*worth.shape, -1)
    ones = torch.ones(*worth.shape, len(widths))
    energies = RoundingEnergies(widths, {"t": TableEnergies(energy=energy, scale=ones, shift=ones.short())})
    collection, curvature = EmbeddingBagCollection(tables=[config]), Curvature({"t": 0 * worth}, {"t": worth}, 100, 0.1)
    losses, bits = [], []
    for compression in (40, 60, 100, 150, 200):
        found = allocate(collection, blocks, counts, curvature, compression=compression, energies=energies)
        table = found.scheme.tables["t"]
        assert compression <= found.compression < 1.1 * compression
        assert packed_index_bytes(table.routing, table.bits) <= 0.15 * 100_000 + table.bits.numel()
        is_starved = ~table.retained.any(1) & (blocks.seen_rows["t"] > 0)
        share = float(blocks.occurrences["t"][is_starved].sum() / counted.sum())
        assert found.starved_share == pytest.approx(share)
        assert ("of the lookups read as zeros" in str(found)) == (share > 0)
        losses.append(found.predicted_loss_increase)
        bits.append(8 * found.num_bytes / (10_000 * dim))
    assert losses == sorted(losses)
    jumps = [more / less for less, more in pairwise(losses)]
    for jump, (more, less) in zip(jumps, pairwise(bits), strict=True):
        assert jump < max(10, 1.2 * 4 ** (more - less))
    assert dim == 16 or max(jumps) < 10


BITS = st.sampled_from([2, 4, 8])


def retained(model: Model, bits: int, compression: float) -> dict[str, Tensor]:
    """Of the worth that the model was drawn with."""
    tables = blocked_tables(model.collection, model.blocks)
    return retained_columns(tables, model.blocks, model.curvature.curvature, bits=bits, compression=compression)


def fixed_of(model: Model, *, stored: int) -> list[int]:
    """What tables take beside their codes if all their blocks have some, or none."""
    routings = [(model.blocks.routings[c.name], c.embedding_dim) for c in model.configs]
    return [packed_index_bytes(r, torch.full((r.num_blocks, dim), stored)) for r, dim in routings]


def bytes_of(model: Model, found: dict[str, Tensor], bits: int) -> int:
    """Rows of whole bytes, four bytes of scale and shift for every column of a block, the index of what is stored."""
    total = 0
    for name, columns in found.items():
        rows = model.blocks.routings[name].row_counts().tolist()
        fixed = packed_index_bytes(model.blocks.routings[name], columns)
        own = [n * math.ceil(k * bits / 8) + 4 * k for n, k in zip(rows, columns.sum(1).tolist(), strict=True)]
        total += sum(own) + fixed if any(own) else 0
    return total


def loss_of(model: Model, found: dict[str, Tensor]) -> float:
    """What the dropped columns were worth."""
    worth = model.curvature.curvature
    return sum(float(worth[name][~columns].clamp(min=0).sum()) for name, columns in found.items())


def least_loss(model: Model, bits: int, budget: int, *, fixed: list[int]) -> float:
    """Of all ways to give every block so many of its best columns."""
    options, table_of_block = [], []
    for table, config in enumerate(model.configs):
        rows = model.blocks.routings[config.name].row_counts().tolist()
        for num_rows, worths in zip(rows, model.curvature.curvature[config.name].clamp(min=0).tolist(), strict=True):
            best = sorted(worths, reverse=True)
            counts = range(len(best) + 1) if num_rows else [0]
            options.append([(num_rows * math.ceil(k * bits / 8) + 4 * k, sum(best[k:])) for k in counts])
            table_of_block.append(table)
    return least_loss_reference(options, table_of_block, fixed, budget)


@settings(max_examples=30, deadline=None)
@given(model=draw_models(2, (0, 4)), bits=BITS, compression=st.floats(1.1, 40))
@example(model=Model([1, 6], [8, 8], 1, 0, (0, 4)), bits=2, compression=9.0)  # 224 bytes / 8.96 is 24.99.. in floats
def test_columns_are_chosen_as_well_as_brute_force_would(model: Model, bits: int, compression: float) -> None:
    """Within the bytes, the best columns of each block, and no worse than what a step fewer could buy."""
    try:
        found = retained(model, bits, compression)
    except ValueError as error:
        largest = float(str(error).split("at most ")[1].split(" ")[0])
        assert largest < compression
        if largest > 1:
            found, compression = retained(model, bits, largest), largest
        else:
            return
    budget, fixed = math.floor(model.dense_bytes / compression * (1 + 1e-12)), fixed_of(model, stored=1)
    assert bytes_of(model, found, bits) <= budget
    assert any(columns.any() for columns in found.values())
    for name, columns in found.items():
        for worths, kept in zip(model.curvature.curvature[name], columns, strict=True):
            if kept.any() and not kept.all():
                assert float(worths[kept].min()) >= float(worths[~kept].max())
    lost = loss_of(model, found)
    assert lost >= least_loss(model, bits, budget, fixed=fixed_of(model, stored=0)) - 1e-9
    rows = max(int(routing.row_counts().max()) for routing in model.blocks.routings.values())
    largest_step = rows * 8 + 4 * 8 + max(fixed)
    fewer = budget - largest_step - sum(fixed)
    if fewer >= 0:
        assert lost <= least_loss(model, bits, fewer, fixed=[0] * len(fixed)) + 1e-9


def test_a_prepared_model_whose_alpha_is_one_is_measured_as_the_plain_one_is() -> None:
    plain = models.dlrm()
    blocks, counts = models.blocks_for(plain), models.counts()
    expected = rounding_energies(plain, blocks, counts)
    prepared = prepare_(plain, blocks)
    check_all_merged(prepared)
    found = rounding_energies(prepared, blocks, counts)
    assert all(torch.equal(found.tables[name].energy, own.energy) for name, own in expected.tables.items())
    models.alpha_of(prepared).of(8)[0, 0] = 0.5
    with pytest.raises(RuntimeError, match="expected a merged collection, got alpha below 1; call merge_ first"):
        check_all_merged(prepared)
    with pytest.raises(RuntimeError, match="call merge_ first"):
        rounding_energies(prepared, blocks, counts)
    with pytest.raises(RuntimeError, match="call merge_ first"):
        allocate(prepared, blocks, counts, None, compression=8, energies=found)  # type: ignore[arg-type]


class Summed(nn.Module):
    """Tables that a linear layer reads, each by a feature of one id."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d, feature_names=[f"f{i}"])
            for i, (n, d) in enumerate(shapes)
        ]
        self.tables = EmbeddingBagCollection(tables=configs)
        self.top = nn.Linear(sum(d for _, d in shapes), 1)
        for weight in self.tables.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        del dense_features
        return self.top(self.tables(sparse_features).values().tanh())


def compressed(shapes: list[tuple[int, int]], compression: float) -> tuple[Allocation, dict[str, Tensor], nn.Module]:
    """A compressed model, its tables before (as no axes turn them), and the model."""
    torch.manual_seed(0)
    model, size = Summed(shapes), max(256, *(n for n, _ in shapes))
    ids = [torch.arange(size) % n for n, _ in shapes]
    lengths = torch.ones(size * len(shapes), dtype=torch.int64)
    features = KeyedJaggedTensor([f"f{i}" for i in range(len(shapes))], torch.cat(ids), lengths=lengths)
    with torch.no_grad():
        labels = model(None, features).squeeze(1) + torch.randn(size) / 10
    weights = {name: bag.weight.detach().clone() for name, bag in model.tables.embedding_bags.items()}
    batch = Batch(torch.zeros(size, 1), features, labels)
    return dnis.compress(model, [batch], loss=nn.MSELoss(), compression=compression), weights, model


@example(small=[(30, 32), (5, 16)], compression=8.0)
@example(small=[(1, 1), (2, 3), (3, 16), (4, 2)], compression=20.0)
@example(small=[(3, 31)], compression=16.0)
@settings(max_examples=8, deadline=None)
@given(
    small=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 32)), min_size=1, max_size=3),
    compression=st.floats(2, 16),
)
def test_a_small_table_beside_a_large_one_is_never_worse_than_fp16(
    small: list[tuple[int, int]], compression: float
) -> None:
    """More bytes than fp16 are taken by float32 rows alone, which take a byte a column beside their values."""
    found, weights, model = compressed([*small, (4500, 16)], compression)  # small: a tenth of the bytes at most
    assert found.num_bytes == sum(table.served_bytes(PACKED) for table in found.scheme.tables.values())
    assert found.compression >= compression
    served = model.tables.bit_fields()
    for name in list(weights)[:-1]:
        table, (n, d) = found.scheme.tables[name], weights[name].shape
        assert table.routing.num_blocks == 1
        assert bool(table.bits.any())
        if table.served_bytes(PACKED) > 2 * n * d:
            assert table.served_bytes(PACKED) == 4 * n * d + d
            assert served[name].view(torch.float32).view(n, d).equal(weights[name])


def test_one_small_table_keeps_most_of_its_columns() -> None:
    found, _, _ = compressed([(30, 32)], 8)
    assert int((found.scheme.tables["t0"].bits > 0).sum()) > 16
    found, _, _ = compressed([(5, 16)], 2)
    assert bool((found.scheme.tables["t0"].bits == 8).all())


def test_blocks_of_large_tables_do_not_merge() -> None:
    found, _, _ = compressed([(1999, 4), (2000, 4), (3000, 16)], 8)
    assert [table.routing.num_blocks for table in found.scheme.tables.values()] == [7, 8, 8]
