"""Budgets of every kind of size, and what is kept within them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.search.budget import UNSPENT_SHARE, Budget, Size, keep_within

CSR_BYTES = {4: 5, 300: 6}
"""D -> bytes of one value with its column, which is one byte up to D=256."""


def blocks_of(counts: dict[str, list[int]], dims: dict[str, int], **options) -> RowBlocks:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=len(rows), embedding_dim=dims[name], feature_names=[name])
        for name, rows in counts.items()
    ]
    tensors = {name: torch.tensor(rows) for name, rows in counts.items()}
    return blocks_from_counts(FrequencyCounts(tensors, dict.fromkeys(counts, 1), 1), tables, **options)


BYTE_FORMS = ("mixed_dimension", "csr_fp32")


@st.composite
def many_blocks(draw) -> RowBlocks:
    """Two tables, in frequency order or not, with rows never seen, but not only such."""
    counts = {name: draw(st.lists(st.integers(0, 4), min_size=1, max_size=9)) for name in ("a", "b")}
    assume(any(sum(rows) for rows in counts.values()))
    if draw(st.booleans()):
        counts = {name: sorted(rows, reverse=True) for name, rows in counts.items()}
    dims = {name: draw(st.sampled_from([4, 300])) for name in counts}
    return blocks_of(counts, dims, num_blocks=draw(st.integers(1, 3)))


def dense_parameters(blocks: RowBlocks) -> int:
    return sum(routing.num_embeddings * blocks.embedding_dims[t] for t, routing in blocks.routings.items())


@given(many_blocks(), st.floats(1.01, 3), st.sampled_from(BYTE_FORMS))
def test_a_compression_is_a_share_of_the_float32_bytes(blocks: RowBlocks, compression: float, form: str) -> None:
    by_bytes = Budget.unchecked(Size(embedding_bytes=1, form=form), blocks)
    budget = Budget.unchecked(Size(compression=compression, form=form), blocks)
    dense_bytes = 4 * dense_parameters(blocks)
    assert budget.amount == pytest.approx(dense_bytes / compression - 1 + by_bytes.amount, abs=1e-6)
    assert {t: c.tolist() for t, c in budget.column_costs.items()} == {
        t: c.tolist() for t, c in by_bytes.column_costs.items()
    }


@given(many_blocks(), st.sampled_from(BYTE_FORMS))
def test_bytes_cost_values_columns_and_indices(blocks: RowBlocks, form: str) -> None:
    budget = Budget.of(Size(embedding_bytes=10**6, form=form), blocks)
    fixed = 0
    for table, routing in blocks.routings.items():
        if form == "csr_fp32":
            rows, is_compact = routing.num_embeddings, blocks.embedding_dims[table] <= 255
            fixed += rows + 8 * math.ceil(rows / 56) if is_compact else 4 * (rows + 1)
            expected = [CSR_BYTES[blocks.embedding_dims[table]] * seen for seen in blocks.seen_rows[table].tolist()]
        else:
            fixed += 8 * (routing.num_blocks + 1)
            fixed += 0 if routing.boundaries is not None else 4 * (routing.num_embeddings + 1)
            expected = [4 * seen + 2 for seen in blocks.seen_rows[table].tolist()]
        assert budget.column_costs[table].tolist() == expected
    assert budget.amount == pytest.approx(10**6 - fixed, abs=1e-5)


@given(many_blocks(), st.sampled_from(["compression", *BYTE_FORMS]))
def test_the_smallest_size_that_is_named_can_be_met_and_one_less_cannot(blocks: RowBlocks, kind: str) -> None:
    if kind == "compression":
        named = _named(Size(compression=1e9), blocks)
        assume(named > 1)
        assert budget_buys_something(Size(compression=named), blocks)
        message = f"^compression: expected at most {named:.2f} for these tables and blocks, got {named + 0.01}$"
        with pytest.raises(ValueError, match=message):
            Budget.of(Size(compression=named + 0.01), blocks)
        return
    named = int(_named(Size(embedding_bytes=1, form=kind), blocks))
    assert budget_buys_something(Size(embedding_bytes=named, form=kind), blocks)
    message = f"^embedding_bytes: expected at least {named} for these tables and blocks, got {named - 1}$"
    with pytest.raises(ValueError, match=message):
        Budget.of(Size(embedding_bytes=named - 1, form=kind), blocks)


def _named(size: Size, blocks: RowBlocks) -> float:
    with pytest.raises(ValueError, match="for these tables and blocks") as caught:
        Budget.of(size, blocks)
    return float(re.search(r"expected at (?:most|least) ([\d.]+) for", str(caught.value)).group(1))


def budget_buys_something(size: Size, blocks: RowBlocks) -> bool:
    """Whether the budget affords a column of some block that training saw."""
    budget = Budget.of(size, blocks)
    seen = [cost for t, costs in budget.column_costs.items() for cost in costs[blocks.seen_rows[t] > 0].tolist()]
    return min(seen) <= budget.amount


def test_a_compression_that_divides_exactly_is_met() -> None:
    """6864 / 8.8 is 780, but 779.9999999999999 in floating point."""
    assert 6864 / 8.8 < 780
    blocks = blocks_of({"a": [1] * 1716}, {"a": 1}, num_blocks=1)
    assert Budget.unchecked(Size(compression=8.8), blocks).amount >= 780 - 8 * 2


def test_tables_that_training_never_looked_up_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks: expected rows that training looked up, got none"):
        Budget.of(Size(embedding_bytes=10**6), blocks_of({"a": [0, 0]}, {"a": 4}))


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "size: expected one of compression, embedding_bytes, got none"),
        ({"embedding_bytes": 3, "compression": 2}, "size: expected one of .*got {'compression': 2, 'embedding_bytes'"),
        ({"compression": 1}, "compression: expected a finite number above 1, got 1"),
        ({"compression": float("nan")}, "compression: expected a finite number above 1, got nan"),
        ({"compression": float("inf")}, "compression: expected a finite number above 1, got inf"),
        ({"embedding_bytes": 0}, "embedding_bytes: expected a finite number above 0, got 0"),
        ({"embedding_bytes": -1}, "embedding_bytes: expected a finite number above 0, got -1"),
        (
            {"embedding_bytes": 9, "form": "dense_fp32"},
            r"form: expected one of .*'csr_fp32', .*'mixed_dimension'\], got",
        ),
    ],
)
def test_malformed_sizes_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Size(**fields)


def test_a_dearer_column_takes_the_place_of_a_cheap_one_where_much_would_be_left() -> None:
    scores, costs = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([10.0, 6.0, 6.0, 10.0])
    kept = keep_within(scores, costs, 27.0)  # greedily 10 + 6 + 6, and 5 of 27 are left
    assert kept.tolist() == [True, True, False, True]
    assert keep_within(scores, costs, 22.5).tolist() == [True, True, True, False]  # 0.5 of 22.5 are less than 3 %


def test_the_former_name_of_compression_is_taken() -> None:
    assert Size(compression_ratio=3) == Size(compression=3)
    assert replace(Size(compression_ratio=3), form="csr_fp32") == Size(compression=3, form="csr_fp32")
    with pytest.raises(ValueError, match="compression or compression_ratio, its former name, got both"):
        Size(compression=3, compression_ratio=3)
