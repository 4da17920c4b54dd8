"""MDE: dims follow frequency within the bytes, and the projected lookup equals a dense naive formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.rivals.methods import SizeNotMetError
from benchmarks.rivals.methods.mde import (
    MDE_SETTINGS,
    ROUNDINGS,
    TEMPERATURES,
    MdeDims,
    MdeSetting,
    mde,
    popularity,
    solve,
)
from benchmarks.rivals.methods.projected import ProjectedEmbeddingBagCollection, project_
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.search.prune import Budget, Size
from tests.comparison.test_baselines_methods import make_task
from tests.tiny import make_recipe

DIM = 4
ROUND = MdeSetting(temperature=0.5, rounding="integer")


def make_collection(pooling: PoolingType, *, is_weighted: bool) -> EmbeddingBagCollection:
    """A single-id and a multi-hot table, and a second table that reads the single-id feature."""
    shapes = {"t": (6, ["one"]), "u": (9, ["many"]), "v": (6, ["one"])}
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features, pooling=pooling
            )
            for name, (rows, features) in shapes.items()
        ],
        is_weighted=is_weighted,
    )


def make_bags(*, is_weighted: bool) -> KeyedJaggedTensor:
    """Four samples; empty bags in both features, a bag that mixes blocks, a row twice in one bag."""
    lengths = torch.tensor([1, 1, 0, 1, 3, 0, 2, 4])
    values = torch.tensor([5, 0, 3, 8, 0, 4, 2, 2, 7, 1, 3, 0])
    weights = torch.linspace(0.5, 2.0, 12) if is_weighted else None
    return KeyedJaggedTensor(keys=["one", "many"], values=values, lengths=lengths, weights=weights)


def naive(collection: EmbeddingBagCollection, bags: KeyedJaggedTensor, dims: MdeDims, matrices: nn.ParameterDict):
    """Row by row: E[i, :d_s] P_s, weighted, summed, divided by the length of the whole bag for MEAN."""
    out = {}
    for config in collection.embedding_bag_configs():
        feature = bags[config.feature_names[0]]
        weight, block_of = (
            collection.embedding_bags[config.name].weight,
            dims.blocks.routings[config.name].all_blocks(),
        )
        pooled, first = torch.zeros(bags.stride(), DIM), 0
        for sample, length in enumerate(feature.lengths().tolist()):
            for position in range(first, first + length):
                row = int(feature.values()[position])
                block = int(block_of[row])
                d = int(dims.dims[config.name][block])
                name = dims.projection_names(config.name)[block]
                vector = weight[row] if name is None else weight[row, :d] @ matrices[name]
                factor = 1.0 if feature.weights_or_none() is None else float(feature.weights()[position])
                share = 1.0 if config.pooling == PoolingType.SUM else 1.0 / length
                pooled[sample] += factor * share * vector
            first += length
        shared = len([c for c in collection.embedding_bag_configs() if c.feature_names == config.feature_names]) > 1
        out[f"{config.feature_names[0]}@{config.name}" if shared else config.feature_names[0]] = pooled
    return out


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("per_block", [(4, 2, 1), (3, 3, 3), (4, 4, 4), (2, 4, 1)])
def test_the_projected_lookup_equals_the_dense_naive_formula(pooling, is_weighted: bool, per_block) -> None:
    collection, bags = make_collection(pooling, is_weighted=is_weighted), make_bags(is_weighted=is_weighted)
    configs = collection.embedding_bag_configs()
    blocks = blocks_from_counts(count_frequencies([bags], configs), configs, num_blocks=3)
    dims = MdeDims(setting=ROUND, base_dim=DIM, blocks=blocks, dims={c.name: torch.tensor(per_block) for c in configs})
    with torch.no_grad():  # what a scheme zeroes
        for name, bag in collection.embedding_bags.items():
            width = dims.dims[name][blocks.routings[name].all_blocks()]
            bag.weight *= torch.arange(DIM) < width.unsqueeze(1)
    model = nn.ModuleDict({"ebc": collection, "same": collection})
    project_(model, dims)
    wrapper = model["ebc"]
    assert isinstance(wrapper, ProjectedEmbeddingBagCollection)
    assert model["same"] is wrapper
    pooled, matrices = wrapper(bags), wrapper.project_pooled.projections.matrices
    assert {name: tuple(matrix.shape) for name, matrix in matrices.items()} == dims.projection_shapes()
    expected = naive(collection, bags, dims, matrices)
    assert pooled.keys() == list(expected)
    torch.testing.assert_close(pooled.values(), torch.cat(list(expected.values()), dim=1), atol=1e-6, rtol=0)
    assert wrapper.embedding_bag_configs() == configs
    assert wrapper.is_weighted() is is_weighted
    weights = [bag.weight for bag in collection.embedding_bags.values()]
    leaves, grad = [*matrices.values(), *weights], torch.randn_like(pooled.values())
    of_naive = torch.autograd.grad(torch.cat(list(expected.values()), dim=1), leaves, grad)
    for own, wanted in zip(torch.autograd.grad(pooled.values(), leaves, grad), of_naive, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-5, rtol=0)


def make_blocks(counts: dict[str, list[int]], widths: dict[str, int], num_blocks: int) -> RowBlocks:
    configs = [
        EmbeddingBagConfig(name=t, num_embeddings=len(c), embedding_dim=widths[t], feature_names=[t])
        for t, c in counts.items()
    ]
    frequencies = FrequencyCounts({t: torch.tensor(c) for t, c in counts.items()}, {}, 1)
    return blocks_from_counts(frequencies, configs, num_blocks=num_blocks)


def test_dims_follow_the_power_of_frequency_by_hand() -> None:
    # Two blocks of ten rows, 16 and 4 occurrences a row: shares 1 and 1/4, at temperature 1/2 dims as 2 to 1.
    blocks = make_blocks({"t": [16] * 10 + [4] * 10}, {"t": 16}, 2)
    assert popularity(blocks)["t"].tolist() == [1.0, 0.25]
    column = 4 * 10 + 2
    eight_and_four = 12 * column + 4 * 4 * 8  # the second block's projection is (4, 8); the first needs none
    # One byte less: lambda 7 to 5.5 would need a projection of the first block, too, and cost more than 8 and 4.
    for spare, expected in ((0, [8, 4]), (-1, [5, 3]), (column - 1, [8, 4])):
        budget = Budget(eight_and_four + spare, {"t": torch.tensor([column, column], dtype=torch.float64)})
        plan = solve(ROUND, blocks, budget, 16, lambda dim: {"t": dim})
        assert plan.dims["t"].tolist() == expected
        assert plan.base_dim == 8
    assert plan.projection_shapes() == {"D8_b1_d4": (4, 8)}


@pytest.mark.parametrize("setting", MDE_SETTINGS[::3], ids=str)
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 1.0])
def test_every_setting_meets_the_bytes_with_projections_counted(setting: MdeSetting, share: float) -> None:
    counts = {"t": [1000 // (i + 1) for i in range(400)], "u": [500 // (i + 1) for i in range(300)] + [0] * 20}
    full = {"t": 32, "u": 128}
    blocks = make_blocks(counts, full, 5)
    costs = Budget.of(Size(embedding_bytes=10**7), blocks).column_costs
    total = sum(float(costs[t].sum()) * width for t, width in full.items())
    budget = Budget(share * total, costs)
    plan = solve(setting, blocks, budget, 32, lambda dim: {"t": dim, "u": 4 * dim})
    cost = plan.table_bytes(budget) + plan.projection_bytes()
    assert cost <= budget.amount
    assert cost >= (0.7 if setting.rounding == "integer" else 0.4) * budget.amount or share == 1.0
    assert plan.base_dim in range(4, 33, 4)  # fused kernels train no other
    for table, dims in plan.dims.items():
        width = plan.blocks.embedding_dims[table]
        assert 1 <= int(dims.min()) <= int(dims.max()) <= width
        assert bool((dims.diff() <= 0).all())
        if setting.rounding == "power of two":
            assert all(d & (d - 1) == 0 for d in dims.tolist())


@pytest.mark.parametrize("setting", MDE_SETTINGS[::3], ids=str)
@pytest.mark.parametrize("share", [0.07, 0.15, 0.3, 0.55])
@pytest.mark.parametrize("ratio", [1, 4])  # of the second table's D; NeuMF's are 1 and 4
def test_no_larger_lambda_is_within_the_bytes(setting: MdeSetting, share: float, ratio: int) -> None:
    """The solution against 8,000 values of lambda, with tables and projections counted block by block."""
    counts = {"t": [900 // (i + 1) for i in range(90)], "u": [500 // (i + 1) for i in range(60)]}
    ratios = {"t": 1, "u": ratio}
    full = {table: 32 * ratios[table] for table in counts}
    blocks = make_blocks(counts, full, 4)
    costs = Budget.of(Size(embedding_bytes=10**7), blocks).column_costs
    budget = Budget(share * sum(float(costs[t].sum()) * full[t] for t in counts), costs)
    plan = solve(setting, blocks, budget, 32, lambda dim: {table: dim * ratios[table] for table in counts})
    scales = torch.linspace(1, 40, 8000, dtype=torch.float64)
    base = ((setting.round(scales) + 3) // 4 * 4).clamp(max=32)
    tables, projections = torch.zeros_like(scales), {}
    for table, shares in popularity(blocks).items():
        for block, of_block in enumerate(shares):
            dims = setting.round(ratios[table] * scales * of_block**setting.temperature)
            dims = dims.minimum(ratios[table] * base)
            tables += dims * float(costs[table][block])
            needed = torch.where(dims < ratios[table] * base, 4 * dims * ratios[table] * base, 0)
            projections[ratios[table], block] = needed  # tables of one D share it
    most = float(tables[tables + sum(projections.values()) <= budget.amount].max())
    assert plan.table_bytes(budget) >= most * (1 - 1e-9)  # a lambda between those of the oracle may buy more
    assert plan.table_bytes(budget) + plan.projection_bytes() <= budget.amount


def test_few_trials_are_spread_over_temperatures_and_roundings() -> None:
    for number in range(2, 9):
        assert len({setting.temperature for setting in MDE_SETTINGS[:number]}) == number
        assert {setting.rounding for setting in MDE_SETTINGS[:number]} == set(ROUNDINGS)


def test_a_budget_for_everything_is_the_uniform_model_without_projections() -> None:
    blocks = make_blocks({"t": [9, 8, 2, 1]}, {"t": 8}, 2)
    plan = solve(ROUND, blocks, Budget.of(Size(embedding_bytes=10**6), blocks), 8, lambda dim: {"t": dim})
    assert plan.dims["t"].tolist() == [8, 8]
    assert plan.projection_shapes() == {}


def test_unseen_blocks_have_one_dimension_and_no_projection() -> None:
    blocks = make_blocks({"t": [9, 8, 0, 0]}, {"t": 8}, 2)
    plan = solve(ROUND, blocks, Budget.of(Size(embedding_bytes=10**6), blocks), 8, lambda dim: {"t": dim})
    assert plan.dims["t"].tolist() == [8, 1]
    assert plan.projection_shapes() == {}


def test_less_than_one_dimension_for_every_block_is_refused() -> None:
    blocks = make_blocks({"t": [9, 8, 2, 1]}, {"t": 8}, 2)
    costs = {"t": torch.tensor([10.0, 10.0], dtype=torch.float64)}
    with pytest.raises(SizeNotMetError, match="expected at least 52 bytes for one dimension of every block, got 51"):
        solve(ROUND, blocks, Budget(51.0, costs), 8, lambda dim: {"t": dim})


def test_sixteen_settings_and_no_more(gloo, tmp_path: Path) -> None:
    assert {(s.temperature, s.rounding) for s in MDE_SETTINGS} == {(t, r) for t in TEMPERATURES for r in ROUNDINGS}
    assert len(MDE_SETTINGS) == 16
    all_of_them, more = (mde(make_task(tmp_path, 2, max_epochs=1, trials=number)) for number in (None, 17))
    assert (more.trials, more.selection_loss) == (all_of_them.trials, all_of_them.selection_loss)


def test_settings_of_the_same_dims_are_trained_once(gloo, tmp_path: Path) -> None:
    narrow = make_task(tmp_path, 1, make=lambda dim: make_recipe(embedding_dim=dim or 8), max_epochs=1, trials=8)
    result = mde(narrow)
    assert 1 < result.trials < 8
    assert result.extra_bytes == sum(
        4 * p.numel() for name, p in result.model.named_parameters() if ".matrices." in name
    )


def test_projections_learn_at_the_tables_rate(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that learns slowly, because it overfits first, does not hold them still."""
    initial: list[dict[str, torch.Tensor]] = []

    def noting(model: nn.Module, plan: MdeDims) -> None:
        project_(model, plan)
        initial.append({name: weight.detach().clone() for name, weight in model.named_parameters()})

    monkeypatch.setattr("benchmarks.rivals.methods.mde.project_", noting)
    task = make_task(tmp_path, 2, max_epochs=1, trials=1)
    slow = replace(task, build=lambda dim: replace(task.build(dim), dense_learning_rate=1e-6))
    found = dict(mde(slow).model.named_parameters())
    moved = {name: float((found[name] - weight).detach().abs().max()) for name, weight in initial[-1].items()}
    projections = {name for name in moved if ".matrices." in name}
    network = {name for name in moved if ".embedding_bags." not in name} - projections
    assert max(moved[name] for name in network) < 1e-4
    assert min(moved[name] for name in projections) > 1e-3
