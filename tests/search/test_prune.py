"""Pruning against naive Python: sizes and what they pay for, which columns stay, what the scheme says of them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import UNSPENT_SHARE, Size, SizeOutOfReachError, drop_zeros_, keep_within, prune
from dnis_torchrec.selection import shards as shards_module
from dnis_torchrec.selection.swap import prepare_
from tests import models
from tests.models import SHARDING_TYPES, shard_as

FORM = "mixed_dimension"
Case = tuple[nn.Module, RowBlocks, FrequencyCounts]


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    """Tables of a test are walked in several chunks, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "ROWS_PER_CHUNK", 3)
        yield


@st.composite
def cases(draw, dims: tuple[int, ...] = (1, 2, 3)) -> Case:
    """Two collections with a table each, many equal values and zeros; whole rows zero, rows never seen."""
    tables, counts, weights = [], {}, {}
    for name in ("a", "b"):
        rows, dim = draw(st.integers(1, 8)), draw(st.sampled_from(dims))
        pooling = draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN]))
        config = EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{name}"], pooling=pooling
        )
        tables.append(config)
        of_rows = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        counts[name] = torch.tensor(sorted(of_rows, reverse=True) if draw(st.booleans()) else of_rows)
        values = st.sampled_from([-0.75, -0.5, 0.0, 0.25, 0.5, 1.0]) if dim <= 3 else st.just(0.5)
        weights[name] = torch.tensor(draw(st.lists(values, min_size=rows * dim, max_size=rows * dim))).view(rows, dim)
    counted = FrequencyCounts(counts, {"fa": 1, "fb": 1}, 9)
    blocks = blocks_from_counts(counted, tables, num_blocks=draw(st.integers(1, 3)), least_rows=1)
    model = nn.ModuleDict({config.name: EmbeddingBagCollection(tables=[config]) for config in tables})
    for name, weight in weights.items():
        table_of(model, name).copy_(weight)
    return model, blocks, counted


def table_of(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_submodule(f"{name}.embedding_bags.{name}").weight.detach()


def seen_tables(model: nn.Module, counts: FrequencyCounts) -> list[torch.Tensor]:
    """Copies of the tables, never-seen rows zeroed."""
    return [table_of(model, name) * (counts.counts[name] > 0).unsqueeze(1) for name in ("a", "b")]


def assert_scheme_tells_the_tables(model: nn.Module, blocks: RowBlocks, scheme: MixedDimensionScheme) -> None:
    """Every number of a scheme, counted again in the tables."""
    assert list(scheme.tables) == ["a", "b"]
    for name, table in scheme.tables.items():
        weight, config = table_of(model, name), model[name].embedding_bag_configs()[0]
        assert (table.collection, table.feature_names, table.is_weighted) == (name, (f"f{name}",), False)
        assert (table.num_embeddings, table.embedding_dim) == tuple(weight.shape)
        assert table.pooling == config.pooling.value.lower()
        assert table.num_retained == int(weight.count_nonzero())
        original, block_of_row = blocks.routings[name].all_blocks(), table.routing.all_blocks()
        for row, block in enumerate(block_of_row.tolist()):
            if block == table.routing.num_blocks:
                assert not weight[row].any()
            else:
                assert block == original[row]
                assert not weight[row][~table.retained[block]].any()
        for block, columns in enumerate(table.retained):
            stored = weight[block_of_row == block]
            assert (stored != 0).any(dim=0).tolist() == columns.tolist()
    assert scheme.parameters == sum(int(table_of(model, name).count_nonzero()) for name in scheme.tables)


def pruned(case: Case, expected: list[torch.Tensor], **options) -> MixedDimensionScheme | None:
    """Prunes to the tables that are expected; None where these hold nothing: refused, and no table has changed."""
    model, blocks, counts = case
    before = [table_of(model, name).clone() for name in ("a", "b")]
    if any(bool(table.any()) for table in expected):
        scheme = prune(model, blocks, counts, **options)
        assert_scheme_tells_the_tables(model, blocks, scheme)
        assert scheme.parameters > 0
    else:
        scheme, expected = None, before
        with pytest.raises(SizeOutOfReachError):
            prune(model, blocks, counts, **options)
    for name, table in zip(("a", "b"), expected, strict=True):
        assert torch.equal(table_of(model, name), table)
    return scheme


@given(cases())
def test_zeros_are_dropped_where_nothing_else_is_left_too(case: Case) -> None:
    model, blocks, counts = case
    before = seen_tables(model, counts)
    scheme = drop_zeros_(model, blocks, counts)
    for table, name in zip(before, ("a", "b"), strict=True):
        assert torch.equal(table_of(model, name), table)
    assert_scheme_tells_the_tables(model, blocks, scheme)


def naive_scores(model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts) -> dict[str, torch.Tensor]:
    """Mean square of every column of every block over the rows that training saw."""
    scores = {}
    for name, table in zip(("a", "b"), seen_tables(model, counts), strict=True):
        of_row, num_blocks = blocks.routings[name].all_blocks().tolist(), blocks.routings[name].num_blocks
        scores[name] = torch.zeros(num_blocks, table.shape[1], dtype=torch.float64)
        for block in range(num_blocks):
            rows = [r for r, b in enumerate(of_row) if b == block and counts.counts[name][r] > 0]
            for d in range(table.shape[1]):
                scores[name][block, d] = sum(float(table[r, d]) ** 2 for r in rows) / max(1, len(rows))
    return scores


def whole_columns(case: Case, kept: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tables with these columns of blocks alone."""
    model, blocks, counts = case
    named = zip(("a", "b"), seen_tables(model, counts), strict=True)
    return [table * kept[name][blocks.routings[name].all_blocks()] for name, table in named]


def index_bytes(blocks: RowBlocks) -> int:
    """Where the rows of a block begin, and a map of ids where rows do not stand in their order."""
    return sum(
        8 * (routing.num_blocks + 1) + (0 if routing.boundaries is not None else 4 * (routing.num_embeddings + 1))
        for routing in blocks.routings.values()
    )


@given(cases(dims=(3, 9)), st.sampled_from(["compression", "embedding_bytes"]), st.floats(0, 1))
def test_the_best_columns_within_the_budget_stay(case: Case, kind: str, share: float) -> None:
    model, blocks, counts = case
    dense_parameters = sum(table.numel() for table in seen_tables(model, counts))
    fixed = index_bytes(blocks)
    assume(fixed < 4 * dense_parameters - 1)
    num_bytes = math.ceil(fixed + share * (4 * dense_parameters - 1 - fixed))
    size = Size(**{kind: num_bytes if kind == "embedding_bytes" else 4 * dense_parameters / num_bytes})
    scores = naive_scores(model, blocks, counts)
    column_costs = [(4.0 * blocks.seen_rows[t] + 2).repeat_interleave(scores[t].shape[1]) for t in ("a", "b")]
    flat_scores = torch.cat([scores[t].flatten() for t in ("a", "b")])
    chosen = keep_within(flat_scores, torch.cat(column_costs), size.num_bytes(dense_parameters) - fixed)
    parts = chosen.split([scores[t].numel() for t in ("a", "b")])
    kept = {t: part.view(scores[t].shape) for t, part in zip(("a", "b"), parts, strict=True)}
    scheme = pruned(case, whole_columns(case, kept), size=size)
    if scheme is not None:
        assert scheme.served_bytes(FORM) <= num_bytes


def simple(counts: tuple[int, ...] = (4, 3, 2, 0), dim: int = 2, num_blocks: int = 2) -> Case:
    config = EmbeddingBagConfig(name="a", num_embeddings=len(counts), embedding_dim=dim, feature_names=["f"])
    model = EmbeddingBagCollection(tables=[config])
    model.embedding_bags["a"].weight.detach().fill_(1.0)
    counted = FrequencyCounts({"a": torch.tensor(counts)}, {"f": 1}, 9)
    return model, blocks_from_counts(counted, [config], num_blocks=num_blocks, least_rows=1), counted


def least_size(rows: int, dim: int, num_columns: int, num_blocks: int = 2) -> Size:
    """What pays for so many columns of blocks of equal size, whose rows are all seen."""
    return Size(embedding_bytes=8 * (num_blocks + 1) + num_columns * (4 * rows // num_blocks + 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_stays_keeps_its_bits(dtype: torch.dtype) -> None:
    model, blocks, counts = simple(counts=(4, 3, 2, 1), dim=6)
    model.to(dtype)
    weight = model.embedding_bags["a"].weight.detach()
    weight.copy_(torch.arange(1, 25).view(4, 6) / 8)
    before = weight.clone()
    scheme = prune(model, blocks, counts, size=least_size(4, 6, 3))
    assert scheme.parameters == 6
    assert torch.equal(weight, before * (weight != 0))


def test_dropping_the_most_frequent_block_needs_no_id_remap() -> None:
    """Empty rows of a table in frequency order stay in their block, which costs nothing, and boundaries still do."""
    model, blocks, counts = simple(counts=(4, 3, 2, 1))
    model.embedding_bags["a"].weight.detach()[:2] = 0.0
    table = drop_zeros_(model, blocks, counts).tables["a"]
    assert table.routing.boundaries.tolist() == [0, 2, 4]
    assert table.dims.tolist() == [0, 2]
    assert table.served_bytes(FORM) == 4 * 4 + 2 * 2 + 8 * 3


def test_never_seen_rows_in_the_middle_stay_within_the_bytes() -> None:
    """The id remap that they need is paid for from the start."""
    for embedding_bytes in range(50, 97):
        model, blocks, counts = simple(counts=(3, 0, 2), dim=8, num_blocks=1)
        table = prune(model, blocks, counts, size=Size(embedding_bytes=embedding_bytes)).tables["a"]
        assert table.routing.all_blocks().tolist() == [0, 1, 0]
        assert table.served_bytes(FORM) <= embedding_bytes
        assert int(table.dims) == min(8, (embedding_bytes - 32) // 10)


def test_empty_rows_in_the_middle_are_dropped_where_that_is_smaller() -> None:
    model, blocks, counts = simple(counts=(4, 3, 2, 1), dim=8, num_blocks=1)
    model.embedding_bags["a"].weight.detach()[1] = 0.0
    table = drop_zeros_(model, blocks, counts).tables["a"]
    assert table.routing.all_blocks().tolist() == [0, 1, 0, 0]
    assert table.num_retained == table.block_area == 24


Call = Callable[[EmbeddingBagCollection, RowBlocks, FrequencyCounts], object]
HALF = Size(compression=2)
REFUSED: list[tuple[Call, type[Exception], str]] = [
    (lambda m, b, c: drop_zeros_(prepare_(nn.ModuleDict({"ebc": m}), b), b, c), RuntimeError, "FQN 'ebc'"),
    (lambda m, b, c: prune(nn.Linear(1, 1), b, c, size=HALF), ValueError, "prune"),
    (lambda m, b, c: prune(renamed(m), b, c, size=HALF), ValueError, "table 'b'"),
    (lambda m, b, c: prune(m, b, FrequencyCounts({"b": c.counts["a"]}, {}, 1), size=HALF), ValueError, "table 'a'"),
    *(
        (lambda m, b, c, size=size: prune(m, b, c, size=size), ValueError, size.given[0])
        for size in (Size(embedding_bytes=16), Size(embedding_bytes=33), Size(compression=1.9))
    ),
]


def renamed(model: EmbeddingBagCollection) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[replace(model.embedding_bag_configs()[0], name="b")])


@pytest.mark.parametrize(("call", "kind", "place"), REFUSED)
def test_what_does_not_fit_is_refused_before_a_table_changes(call: Call, kind: type[Exception], place: str) -> None:
    model, blocks, counts = simple()
    weight = model.embedding_bags["a"].weight
    with pytest.raises(kind, match=f"^{place}"):
        call(model, blocks, counts)
    assert (weight == 1).all()


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_sharded_collections_are_refused_only_with_tables_of_the_blocks(sharding_type: str) -> None:
    model, blocks, counts = simple()
    other = shard_as(models.collection(), sharding_type)
    both = nn.ModuleDict({"ebc": model, "other": other.module})
    assert list(drop_zeros_(both, blocks, counts).tables) == ["a"]
    with pytest.raises(RuntimeError, match="FQN 'other': expected a merged, unsharded collection"):
        drop_zeros_(both, models.blocks(), models.counts())


@given(cases(dims=(4, 30)), st.sampled_from(["compression", "embedding_bytes"]))
def test_the_smallest_size_that_is_named_is_come_to_and_one_less_is_not(case: Case, kind: str) -> None:
    model, blocks, counts = case
    assume(any(bool(table.any()) for table in seen_tables(model, counts)))

    def pruned_to(value: float) -> int:
        return prune(copy.deepcopy(model), blocks, counts, size=Size(**{kind: value})).parameters

    with pytest.raises(SizeOutOfReachError, match="for these tables and blocks") as caught:
        pruned_to(1e9 if kind == "compression" else 0.5)
    smallest = float(re.search(r"expected at (?:most|least) ([\d.]+) for", str(caught.value)).group(1))
    assume(
        smallest > 1
        if kind == "compression"
        else smallest <= 4 * sum(table.numel() for table in seen_tables(model, counts))
    )
    assert pruned_to(smallest) > 0
    with pytest.raises(SizeOutOfReachError):
        pruned_to(smallest + 0.01 if kind == "compression" else smallest - 1)


numbers = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])


@given(st.lists(st.tuples(numbers, st.integers(0, 5)), max_size=10), st.integers(0, 15) | st.floats(-1, 20))
def test_keep_within(items: list[tuple[float, int]], amount: float) -> None:
    expected, left = [False] * len(items), amount
    for index in sorted(range(len(items)), key=lambda index: (-items[index][0], index)):
        score, cost = items[index]
        if score > 0 and cost <= left:
            expected[index] = True
            left -= cost
    scores, costs = (torch.tensor([item[side] for item in items], dtype=torch.float64) for side in (0, 1))
    kept = keep_within(scores, costs, amount)
    assert kept.dtype == torch.bool
    if left <= UNSPENT_SHARE * amount:
        assert kept.tolist() == expected
        return
    assert not bool(kept[scores <= 0].any())
    assert amount - left <= float(costs[kept].sum()) <= max(amount, 0)  # no less spent than greedily, never too much
    assert sum(a != b for a, b in zip(kept.tolist(), expected, strict=True)) in (0, 2)
