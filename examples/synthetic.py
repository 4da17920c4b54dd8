"""A recipe that needs no data: torchrec's DLRM on generated, Criteo-shaped samples."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import split_rows
from dnis_torchrec.data.recipe import Recipe
from examples.datasets.synthetic import generate
from examples.models import build_dlrm, build_tables, network_of_seed

BATCH_SIZE = 1024
EMBEDDING_DIM = 16
NUM_SAMPLES = 60_000
DATA_SEED = 2020
"""Seed of the generated data set, which is the same for all seeds of a recipe, as a downloaded one would be."""


def demo(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM on generated data in which frequent rows have more useful dimensions than rare ones.

    Args:
        data: None; this recipe reads no files.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 16 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if a data folder is given.
    """
    check(data is None, "recipe 'examples.synthetic:demo'", "no data folder", data, "leave out --data")
    samples = generate(NUM_SAMPLES, seed=DATA_SEED).samples
    samples = samples.sorted_by_frequency(split_rows(NUM_SAMPLES, seed=seed)[0])

    def build() -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=0.1)
        num_dense = samples.dense.shape[1]
        return build_dlrm(tables, dense_in_features=num_dense, dense_layers=[32], over_layers=[64])

    network = network_of_seed(build, seed)
    return Recipe(
        model=network,
        data=samples.split(batch_size=BATCH_SIZE, seed=seed),
        loss=nn.BCEWithLogitsLoss(),
        table_learning_rate=2e-3,
    )
