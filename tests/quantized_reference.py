"""What quantised rows may be off by, pooled as the bags are, and the ids that every serving module has to deal with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.serving_reference import Case, pool

FLOAT_ROUNDING = 2e-6


def assert_within(case: Case, pooled: Mapping[str, Tensor], row_bound: Callable[[str], Tensor]) -> None:
    """Every pooled value lies within the sum of its rows' bounds, ``row_bound(table)`` of shape ``(N, D)``."""
    expected, readers = case.expected(), [(t, f) for t in case.scheme.tables.values() for f in t.feature_names]
    assert list(pooled) == list(expected)
    for (name, wanted), (table, feature) in zip(expected.items(), readers, strict=True):
        magnitudes = [[(row, abs(weight)) for row, weight in bag] for bag in case.bags[feature]]
        bound = pool(row_bound(table.name), magnitudes, table.pooling, table.is_weighted)
        size = pool(case.tables[table.name].abs(), magnitudes, table.pooling, table.is_weighted)
        assert bool(((pooled[name] - wanted).abs() <= bound + FLOAT_ROUNDING * (1 + size + bound)).all()), name


def with_unknown_ids(case: Case, unknown: list[int]) -> KeyedJaggedTensor:
    """The case's bags with unknown ids in front of each."""
    bags = {f: [[*((i, 1.0) for i in unknown), *bag] for bag in of_feature] for f, of_feature in case.bags.items()}
    return Case(case.scheme, case.tables, bags, torch.int64).kjt()


def expected_with_unknown(case: Case, num_unknown: int) -> dict[str, Tensor]:
    """What a batch with unknown ids gives where they count as zero: MEAN divides by the longer length."""
    expected = case.expected()
    readers = [(t, f) for t in case.scheme.tables.values() for f in t.feature_names]
    for name, (table, feature) in zip(expected, readers, strict=True):
        if table.pooling == "mean":
            lengths = torch.tensor([len(bag) for bag in case.bags[feature]]).unsqueeze(1)
            expected[name] = expected[name] * lengths / (lengths + num_unknown).clamp(min=1)
    return expected
