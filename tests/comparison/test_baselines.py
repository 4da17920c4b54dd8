"""Baselines: the right size, the same protocol, and pruning that starts from the same dense model each time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.comparison.methods import MagnitudePruning, MethodTask, nearest_dim, nearest_uniform_row
from dnis_torchrec.data.recipe import Recipe
from tests.tiny import make_recipe

CPU = torch.device("cpu")
DENSE_PARAMETERS = 52 * 8


@pytest.mark.parametrize(("ratio", "dim"), [(1, 16), (2, 8), (3, 5), (5, 3), (1000, 1)])
def test_nearest_dim_counts_every_table(tmp_path: Path, ratio: float, dim: int) -> None:
    """Also where some tables are four times as wide as a recipe's embedding_dim, as NeuMF's are."""

    def build(embedding_dim: int | None) -> Recipe:
        width = embedding_dim or 16
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=wide * width, feature_names=[name])
            for name, wide in (("mf", 1), ("mlp", 4))
        ]
        recipe = make_recipe()
        return dataclasses.replace(recipe, model=EmbeddingBagCollection(tables=tables))

    task = MethodTask(build=build, compression=ratio, seed=0, device=CPU, folder=tmp_path)
    assert nearest_dim(task) == dim


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_uniform_tables_report_their_own_size_also_where_kernels_train_wider_ones(
    gloo, tmp_path: Path, optimizer: str
) -> None:
    def build(embedding_dim: int | None) -> Recipe:
        return make_recipe(embedding_dim=embedding_dim, optimizer=optimizer)

    task = MethodTask(build=build, compression=2.7, seed=3, device=CPU, folder=tmp_path, patience=1, max_epochs=2)
    row = nearest_uniform_row(task)
    assert (row.method, row.seed, row.parameters, row.compression) == ("uniform", 3, 3 * 52, 8 / 3)
    assert row.bytes == {"dense_fp32": 4 * 3 * 52}
    assert 0 < row.metrics["logloss"] < 1


def test_magnitude_pruning_meets_each_size_to_the_value_from_the_same_dense_model(gloo, tmp_path: Path) -> None:
    pruning = MagnitudePruning(make_recipe(), seed=0, device=CPU, folder=tmp_path, patience=1)
    dense = pruning.dense_row()
    pointers = (40 + 8) + (12 + 8)
    rows = [pruning.pruned_row(pointers + 5 * num_values) for num_values in (208, 52, 208)]
    assert [row.parameters for row in rows] == [208, 52, 208]
    assert rows[0].metrics == rows[2].metrics  # nothing of the size before is left
    assert pruning.dense_row().metrics == dense.metrics
    assert rows[0].bytes["csr_fp32"] == 208 * 5 + pointers
    assert dense.parameters == DENSE_PARAMETERS
