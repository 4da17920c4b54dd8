"""Regrouping: exact, and as narrow as column sets can be on generated masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.artifact.forms import rows_of
from dnis_torchrec.artifact.regrouping import column_sets, regroup_table
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection
from tests.serving_reference import keyed_jagged_tensor, table_scheme


def scheme_of(weight: Tensor) -> TableScheme:
    """One block that retains every column: what pruning value by value leaves."""
    num_rows, dim = weight.shape
    routing = RowRouting(num_rows, 1, boundaries=torch.tensor([0, num_rows]))
    num_retained = int(weight.count_nonzero())
    retained = torch.ones(1, dim, dtype=torch.bool)
    return table_scheme("t", routing, retained, num_retained=num_retained)


def regrouped(weight: Tensor, **options: int) -> TableScheme:
    return regroup_table(scheme_of(weight), rows_of(weight), **options)


def padding(mask: Tensor, **options: int) -> float:
    """Stored over retained values."""
    return regrouped(mask.float(), **options).block_area / int(mask.sum())


def nested_masks(num_rows: int, dim: int, mean: float) -> Tensor:
    """Row i retains its first k_i columns, columns in a random order: what pressure on shared columns gives."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(num_rows).geometric_(1 / mean, generator=generator).clamp(max=dim)
    return (torch.arange(dim) < lengths.unsqueeze(1))[:, torch.randperm(dim, generator=generator)]


def random_masks(num_rows: int, dim: int, density: float) -> Tensor:
    return torch.rand(num_rows, dim, generator=torch.Generator().manual_seed(0)) < density


@pytest.mark.parametrize("dim", [64, 96])
def test_nested_masks_need_little_more_than_their_values(dim: int) -> None:
    mask = nested_masks(6000, dim, mean=dim / 20)
    assert padding(mask, num_groups=16) <= 1.2
    assert padding(mask, num_groups=16, dim_multiple=4) <= 1.2
    assert padding(mask, num_groups=4) <= 2.0


@pytest.mark.parametrize(("density", "most"), [(0.05, 13.0), (0.15, 6.0)])
def test_random_masks_need_much_less_than_dense_tables(density: float, most: float) -> None:
    """Masks without any structure: dense tables hold 1 / density times their values, and more groups need less."""
    mask = random_masks(2500, 64, density)
    few, many = padding(mask, num_groups=4), padding(mask, num_groups=16)
    assert many <= most
    assert many < few < 1 / density


@given(
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 0.2, 0.8]),
    st.integers(0, 2**31),
)
def test_serves_exactly(rows: int, dim: int, groups: int, multiple: int, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, dim, generator=generator) * (torch.rand(rows, dim, generator=generator) < density)
    table = regrouped(weight, num_groups=groups, dim_multiple=multiple)
    assert table.routing.num_blocks <= max(groups, 1)
    assert table.num_retained <= table.block_area <= scheme_of(weight).block_area
    module = MixedDimensionEmbeddingBagCollection.from_tables(
        MixedDimensionScheme({"t": table}), {"t": weight}, new_rows=False
    )
    bags = keyed_jagged_tensor({"f": [[(row, 1.0)] for row in range(rows)]})
    with torch.no_grad():
        assert module(bags).values().equal(weight)


def test_finds_groups_that_are_there() -> None:
    torch.manual_seed(0)
    sets = torch.rand(5, 100) < torch.tensor([0.9, 0.3, 0.2, 0.1, 0.05]).unsqueeze(1)
    group = torch.randint(0, 5, (3000,))
    table = regrouped(torch.randn(3000, 100) * sets[group], num_groups=8)
    assert table.is_block_structured
    assert table.dims.tolist() == sorted(table.dims.tolist(), reverse=True)


def test_depends_on_nothing_but_its_arguments() -> None:
    mask = random_masks(1000, 20, 0.2).float()
    first, again = regrouped(mask), regrouped(mask)
    assert first.retained.equal(again.retained)
    assert first.routing.all_blocks().equal(again.routing.all_blocks())


def test_block_structured_tables_stay() -> None:
    routing = RowRouting(10, 2, boundaries=torch.tensor([0, 4, 10]))
    table = table_scheme("t", routing, torch.tensor([[True, True], [True, False]]))
    assert regroup_table(table, lambda first, last: torch.zeros(last - first, 2)) is table


def test_the_union_is_always_there() -> None:
    """Rows that the sample has not seen have to go somewhere."""
    masks = torch.eye(6, dtype=torch.bool)[:2]
    sets = column_sets(masks, torch.ones(6, dtype=torch.bool), num_groups=4)
    assert bool(sets[0].all())
    assert bool((sets.sum(dim=1).diff() <= 0).all())
    assert column_sets(masks, torch.ones(6, dtype=torch.bool), num_groups=1).shape == (1, 6)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="num_groups: expected an integer >= 1, got 0"):
        regrouped(torch.eye(4), num_groups=0)
    with pytest.raises(ValueError, match="dim_multiple: expected an integer >= 1, got 0"):
        regrouped(torch.eye(4), dim_multiple=0)
