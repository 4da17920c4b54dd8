"""Training a given scheme: what is dropped stays zero, what is kept learns, and the best trial within a size wins."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.rivals.methods import METHODS, Method, SizeNotMetError, train_scheme
from benchmarks.rivals.methods.best_trial import best_of
from benchmarks.rivals.methods.random_search import random_dims
from benchmarks.rivals.methods.trained_scheme import (
    Candidate,
    columns_of_dims,
    prune_to_columns_,
    row_blocks,
    uniform_scheme_,
)
from benchmarks.rivals.methods.uniform import dense_table_bytes, smallest_dim, uniform, uniform_candidate, uniform_grid
from dnis_torchrec import export
from dnis_torchrec.allocation.settings import NUM_BLOCKS
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search.prune import Budget, Size
from tests.comparison.test_baselines_methods import DIM, build, make_task

NUM_ROWS = 52


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: bag.weight.detach()
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection)
        for name, bag in module.embedding_bags.items()
    }


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize("starts_at_zero", [False, True])
def test_dropped_values_stay_zero_and_retained_ones_learn(
    gloo, tmp_path: Path, optimizer: str, starts_at_zero: bool
) -> None:
    def fresh(dim: int | None) -> Recipe:
        recipe = build(dim, optimizer=optimizer)
        for weight in tables_of(recipe.model).values() if starts_at_zero else ():
            weight.zero_()
        return recipe

    task = make_task(tmp_path, 1, make=fresh)
    counts, blocks = row_blocks(task)
    dims = {table: torch.tensor([DIM, DIM, DIM, 5, 5, 5, 0, 0]) for table in blocks.routings}
    recipe = task.build(None)
    before = {name: weight.clone() for name, weight in tables_of(recipe.model).items()}
    scheme = prune_to_columns_(recipe.model, blocks, counts, columns_of_dims(blocks, dims))
    model, trained = train_scheme(task, task.build(None), scheme)
    assert trained.best_epoch >= 0
    for name, weight in tables_of(model).items():
        kept = torch.arange(DIM) < dims[name][blocks.routings[name].all_blocks()].unsqueeze(1)
        kept &= ~counts.never_seen(name).unsqueeze(1)
        assert scheme.tables[name].num_retained == int(kept.sum())
        assert not bool(weight[~kept].any())
        assert bool((weight[kept] != before[name][kept]).float().mean() > 0.9)


def test_a_trained_scheme_never_stores_rows_without_training_samples(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 1)
    counts, blocks = row_blocks(task)
    assert int(counts.never_seen("user").sum()) > 0
    kept = columns_of_dims(blocks, {table: torch.full((NUM_BLOCKS,), 3) for table in blocks.routings})
    scheme = prune_to_columns_(task.build(None).model, blocks, counts, kept)
    assert int(scheme.tables["user"].routing.row_counts().sum()) == int((~counts.never_seen("user")).sum())


def test_a_scheme_of_single_elements_is_retrained_by_whole_columns(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 4)
    pruned = METHODS["magnitude"](task)
    assert not all(table.is_block_structured for table in pruned.scheme.tables.values())
    retrained = Candidate(recipe=task.build(None), scheme=pruned.scheme).train(task)
    assert all(table.is_block_structured for table in retrained.scheme.tables.values())
    export(retrained.model, retrained.scheme, tmp_path / "artifact")


def test_an_unknown_table_is_named() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=2, embedding_dim=4, feature_names=["f"])
    counts = FrequencyCounts({"t": torch.tensor([2, 1])}, {"f": 1}, 3)
    blocks = blocks_from_counts(counts, [table], num_blocks=1)
    with pytest.raises(ValueError, match="table"):
        prune_to_columns_(EmbeddingBagCollection(tables=[table]), blocks, counts, {"u": torch.ones(1, 4) > 0})


# The best of several candidates


def test_none_within_the_size_says_how_many_were_trained(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 8, max_epochs=1)
    trials = {str(dim): lambda dim=dim: uniform_candidate(task, dim) for dim in (12, 16)}
    with pytest.raises(SizeNotMetError, match=f"none of 2 trials comes to at most {task.embedding_bytes()} bytes"):
        best_of(task, trials)
    assert not list(tmp_path.iterdir())


# Uniform tables


def test_the_smallest_dim_has_at_least_the_bytes_and_one_less_has_not(tmp_path: Path) -> None:
    data = build(None).data

    def two_widths(dim: int | None) -> Recipe:  # one table follows embedding_dim fourfold, one not at all
        dim = dim or 6
        tables = [
            EmbeddingBagConfig(name="a", num_embeddings=3, embedding_dim=4 * dim, feature_names=["a"]),
            EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=2, feature_names=["b"]),
        ]
        return Recipe(model=EmbeddingBagCollection(tables=tables), data=data, loss=nn.MSELoss())

    task = make_task(tmp_path, 1, make=two_widths)
    assert task.dense_bytes() == 6 * 48 + 40
    for num_bytes in (1, 88, 89, 136, 137, 200, 280, 281, 328):
        dim = smallest_dim(task, num_bytes)
        assert dense_table_bytes(two_widths(dim).model) >= num_bytes
        assert dim == 1 or dense_table_bytes(two_widths(dim - 1).model) < num_bytes
    assert dim == 6


@pytest.mark.parametrize(("ratio", "dim"), [(2, 8), (3, 5), (13, 1)])
def test_uniform_tables_are_as_wide_as_the_bytes_allow(gloo, tmp_path: Path, ratio: float, dim: int) -> None:
    task = make_task(tmp_path, ratio, max_epochs=1)
    result = uniform(task)
    assert result.embedding_bytes() <= 1.02 * task.embedding_bytes() < result.embedding_bytes() + 4 * NUM_ROWS + 36
    assert [table.dims.tolist() for table in result.scheme.tables.values()] == [[dim], [dim]]
    assert result.scheme.parameters == NUM_ROWS * dim  # rows never seen as well
    assert result.settings == {"embedding_dim": dim}
    for weight in tables_of(result.model).values():
        assert bool(weight[:, :dim].all())
        assert not bool(weight[:, dim:].any())


@pytest.mark.parametrize(("method", "narrowest"), [(uniform, 1), (uniform_grid, 4)])
def test_the_narrowest_tables_are_above_a_size(tmp_path: Path, method: Method, narrowest: int) -> None:
    made: list[int | None] = []

    def recording(dim: int | None) -> Recipe:
        made.append(dim)
        return build(dim)

    task = make_task(tmp_path, DIM / narrowest + 1, make=recording)
    smallest = 4 * NUM_ROWS * narrowest + (2 * (16 + 2) if narrowest == 1 else 0)  # cut out of wider ones: an index
    told = rf"expected at least {smallest}, .* embedding_dim {narrowest}, got {task.embedding_bytes()}"
    with pytest.raises(SizeNotMetError, match=told):
        method(task)
    assert set(made) <= {None, narrowest, 4}  # nothing is trained


def test_the_grid_trains_every_dim_and_takes_one_within_the_budget(gloo, tmp_path: Path) -> None:
    made: list[int | None] = []

    def recording(dim: int | None) -> Recipe:
        made.append(dim)
        return build(dim)

    task = make_task(tmp_path, 2, make=recording, max_epochs=1)
    grid = uniform_grid(task)
    assert grid.trials == 4
    assert {4, 8, 12, 16} <= set(made)
    assert made[-1] == grid.embedding_dim
    assert grid.settings["embedding_dim"] in (4, 8)
    alone = {dim: uniform(make_task(tmp_path, DIM / dim, max_epochs=1)).selection_loss for dim in (4, 8)}
    assert grid.selection_loss == min(alone.values())
    assert grid.settings["embedding_dim"] == min(alone, key=alone.__getitem__)


def test_a_uniform_scheme_keeps_every_row() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=["f"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
    scheme = uniform_scheme_(model, {"t": 3})
    assert scheme.tables["t"].retained.tolist() == [[True, True, True, False]]
    assert scheme.parameters == 9
    assert not bool(tables_of(model)["t"][:, 3].any())


# Random sequences


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 5),
    st.floats(0.0, 1.0),
    st.integers(0, 2**31),
)
def test_random_sequences_fall_and_use_the_budget_up(
    rows: list[list[int]], num_blocks: int, share: float, seed: int
) -> None:
    rows[0][0] = 51  # at least one row was seen
    configs = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=len(c), embedding_dim=(4, 4, 8)[i], feature_names=[f"f{i}"])
        for i, c in enumerate(rows)
    ]
    counts = FrequencyCounts({f"t{i}": torch.tensor(c) for i, c in enumerate(rows)}, {}, 100)
    blocks = blocks_from_counts(counts, configs, num_blocks=num_blocks)
    costs = Budget.of(Size(embedding_bytes=10**6), blocks).column_costs
    total = sum(float(costs[c.name].sum()) * c.embedding_dim for c in configs)
    budget = Budget(share * total, costs)
    generator = torch.Generator().manual_seed(seed)
    dearest = max(float(blocks.per_alpha_row(dim, costs).max()) for dim in blocks.alpha_shapes)
    try:
        dims = random_dims(blocks, budget, generator)
    except SizeNotMetError:
        assert budget.amount < dearest
        return
    spent = sum(float(costs[name] @ dims[name].double()) for name in dims)
    assert spent <= budget.amount
    assert budget.amount - spent < dearest or spent == total
    for config in configs:
        sequence = dims[config.name]
        assert bool((sequence.diff() <= 0).all())
        assert 0 <= int(sequence.min()) <= int(sequence.max()) <= config.embedding_dim


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_dims_are_random_heights_times_the_largest_factor(seed: int, share: float) -> None:
    """``d_s = min(D, floor(c h_s D))``, h uniform and falling, c tried at every value where a dimension is reached."""
    widths = {"t": 8, "u": 4}
    rows = {"t": [9] * 5 + [5] * 5 + [1] * 10, "u": [7] * 4 + [2] * 4 + [1] * 5}
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=len(counts), embedding_dim=widths[name], feature_names=[name])
        for name, counts in rows.items()
    ]
    counts = FrequencyCounts({name: torch.tensor(own) for name, own in rows.items()}, {}, 100)
    blocks = blocks_from_counts(counts, configs, num_blocks=3)
    costs = Budget.of(Size(embedding_bytes=10**6), blocks).column_costs
    budget = Budget(share * sum(float(costs[name].sum()) * dim for name, dim in widths.items()), costs)
    generator, heights = torch.Generator().manual_seed(seed), {}
    for dim in blocks.alpha_shapes:
        (name,) = (own for own, width in widths.items() if width == dim)
        heights[name] = sorted((1 - torch.rand(3, generator=generator, dtype=torch.float64)).tolist(), reverse=True)

    def dims_at(factor: float) -> dict[str, list[int]]:
        return {
            name: [min(dim, math.floor(factor * height * dim + 1e-9)) for height in heights[name]]
            for name, dim in widths.items()
        }

    def cost(dims: dict[str, list[int]]) -> float:
        return sum(float(costs[name] @ torch.tensor(own, dtype=torch.float64)) for name, own in dims.items())

    factors = [
        k / (height * dim) for name, dim in widths.items() for height in heights[name] for k in range(1, dim + 1)
    ]
    expected = dims_at(max(factor for factor in factors if cost(dims_at(factor)) <= budget.amount))
    found = random_dims(blocks, budget, torch.Generator().manual_seed(seed))
    assert {name: dims.tolist() for name, dims in found.items()} == expected


def test_tables_that_share_no_blocks_have_random_sequences_of_their_own() -> None:
    counts = FrequencyCounts({"a": torch.tensor([9, 7, 2, 1]), "b": torch.tensor([9, 7, 2, 1])}, {}, 38)
    configs = [EmbeddingBagConfig(name=n, num_embeddings=4, embedding_dim=8, feature_names=[n]) for n in counts.counts]
    blocks = blocks_from_counts(counts, configs, num_blocks=2)
    budget = Budget.of(Size(embedding_bytes=2 * 8 * 3 + 12 * 10), blocks)
    drawn = [random_dims(blocks, budget, torch.Generator().manual_seed(seed)) for seed in range(40)]
    of_a = sum(int(dims["a"].sum() > dims["b"].sum()) for dims in drawn)
    of_b = sum(int(dims["a"].sum() < dims["b"].sum()) for dims in drawn)
    assert min(of_a, of_b) >= 10
