"""Recipes on anime ratings (1 to 10): MF of user and item, FM of all six fields; mean squared error.

The data are those of caserec's Datasets for Recommender Systems, from Kaggle's anime recommendations, as one
tab-separated file: 419,943 ratings of 7,157 titles by 4,714 users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dnis_torchrec.data.batches import split_rows
from dnis_torchrec.data.recipe import Recipe
from examples.datasets.in_memory import Samples
from examples.datasets.tab_separated import load_tab_separated
from examples.datasets.text_files import require_folder
from examples.models import FactorizationMachine, MatrixFactorization, build_tables, network_of_seed

PUBLISHER = "caserec's Datasets for Recommender Systems (anime), as anime.tsv"
BATCH_SIZE = 4096
EMBEDDING_DIM = 64
INIT_STD = 0.003
PAIR = {"user": "user", "item": "item"}
FIELDS = PAIR | {"genres": "genre_set", "first_genre": "genre1", "kind": "type", "episodes": "episodes"}
"""Feature -> column."""
PLAIN: dict[str, dict[str, Any]] = {
    "mf": {"embedding_l2": 0.06, "dense_learning_rate": 9e-3},
    "fm": {"embedding_l2": 0.1, "dense_learning_rate": 9e-3},
}
"""Recipe -> L2 and rates of its plain model, the same for all methods: chosen at D=64 on `selection` of seed 0 by
`python -m benchmarks.plain_grid examples.anime:mf` and so on (benchmarks/plain_grid_2cpu_2026-11-27.md)."""


def mf(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """Matrix factorisation of user and item.

    Args:
        data: folder with ``anime.tsv``, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """

    def build(samples: Samples, mean: float) -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=INIT_STD)
        return MatrixFactorization(tables, global_mean=mean)

    return _ratings(data, "mf", PAIR, build, seed)


def fm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A factorisation machine of all fields.

    Args:
        data: see `mf`.
        seed: see `mf`.
        embedding_dim: D, 64 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """

    def build(samples: Samples, mean: float) -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=INIT_STD)
        return FactorizationMachine(tables, initial_bias=mean)

    return _ratings(data, "fm", FIELDS, build, seed)


def _ratings(
    data: Path | None, name: str, fields: Mapping[str, str], build: Callable[[Samples, float], nn.Module], seed: int
) -> Recipe:
    folder = require_folder(data, f"examples.anime:{name}", PUBLISHER)
    samples = load_tab_separated(folder, "anime.tsv", label="rating", fields=fields, publisher=PUBLISHER, seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    network = network_of_seed(lambda: build(samples, float(samples.labels[train_rows].mean())), seed)
    return Recipe(model=network, data=samples.split(batch_size=BATCH_SIZE, seed=seed), loss=nn.MSELoss(), **PLAIN[name])
