"""Recipes on MovieLens: ratings by MF, MLP and NeuMF; clicks (a rating of 4 or more) by FM, Wide & Deep, DeepFM, DLRM.

All of them read GroupLens' files of MovieLens-1M and of MovieLens-20M unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.data.batches import split_rows
from dnis_torchrec.data.recipe import Recipe
from examples.datasets.in_memory import Samples
from examples.datasets.movielens import PUBLISHER, load_clicks, load_ratings
from examples.datasets.text_files import require_folder
from examples.models import (
    DeepFM,
    FactorizationMachine,
    MatrixFactorization,
    MultiLayerPerceptron,
    NeuMF,
    WideDeep,
    build_dlrm,
    build_dlrm_dcn,
    build_neumf_tables,
    build_tables,
    log_odds,
    ncf_tower,
    network_of_seed,
)

BATCH_SIZE = 4096
EMBEDDING_DIM = 64
INIT_STD = 0.003
"""Standard deviation of initial weights: the best of .001, .003, .01 and .03 for MF on `selection` of seed 0. It is the
best for uniform tables of D=64 and of D=12."""
MLP_INIT_STD = 0.01
"""The same for MLP: the best of .003, .01 and .1 on `selection` of seed 0 at D=64, by .002 and .007."""
CLICKS_INIT_STD = 0.01
"""The same for clicks: the best of .003, .01 and .05 for DLRM on `selection` of seed 0 at D=64; runs differ by .01."""
MLP_TOWER = (64, 32, 16)
"""NCF's halving layers below a first one of D=64. The same at every D: comparing D changes tables only."""
NEUMF_TOWER = ncf_tower(EMBEDDING_DIM)
"""NCF's layers for D=64, at every D for the same reason."""
CLICKS_TOWER = (256, 128)
PLAIN: dict[str, dict[str, Any]] = {
    "mf": {"embedding_l2": 0.03, "table_learning_rate": 3.33e-4, "dense_learning_rate": 3e-3},
    "neumf": {"embedding_l2": 0.001, "dense_learning_rate": 3.33e-4},
    "ctr_fm": {"embedding_l2": 0.02, "table_learning_rate": 1e-3},
    "ctr_wide_deep": {"embedding_l2": 0.0, "table_learning_rate": 9e-3, "dense_learning_rate": 3.33e-4},
    "ctr_deepfm": {"embedding_l2": 0.003, "dense_learning_rate": 3e-3},
    "ctr_dlrm": {"embedding_l2": 0.003, "dense_learning_rate": 3.33e-4},
}
"""Recipe -> L2 and rates of its plain model, the same for all methods: chosen at D=64 on `selection` of seed 0 by
`python -m benchmarks.plain_grid examples.movielens:mf` and so on (benchmarks/plain_grid_2cpu_2026-11-27.md). Of FM the
grid is not finished: its rate beside the tables has stayed."""
CLICKS_LEARNING_RATE = 0.003
"""Learning rate of plain tables for clicks where no grid has chosen another. Without L2 it is the best of .001, .003
and .01 for DLRM on `selection` of seed 0: .0009 better in the mean of D=64 and 11, with and without alpha's split."""
CLICKS = {"table_learning_rate": CLICKS_LEARNING_RATE, "embedding_l2": 0.01}
"""Rate and L2 of clicks where no grid has chosen others. The L2 is a guess."""


def mf(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """Matrix factorisation on MovieLens ratings, mean squared error.

    Args:
        data: folder with GroupLens' ``ratings.dat`` (1M) or ``ratings.csv`` (20M), plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """

    def build(samples: Samples, mean: float) -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=INIT_STD)
        return MatrixFactorization(tables, global_mean=mean)

    return _ratings(data, "mf", build, seed)


def mlp(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """NCF's multi-layer perceptron on MovieLens ratings, mean squared error.

    Args:
        data: see `mf`.
        seed: see `mf`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """

    def build(samples: Samples, mean: float) -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=MLP_INIT_STD)
        return MultiLayerPerceptron(tables, tower=MLP_TOWER, initial_bias=mean)

    return _ratings(data, "mlp", build, seed)


def neumf(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """NeuMF on MovieLens ratings, mean squared error: tables of D for its GMF and of 4 D for its MLP.

    Args:
        data: see `mf`.
        seed: see `mf`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """

    def build(samples: Samples, mean: float) -> nn.Module:
        dim = embedding_dim or EMBEDDING_DIM
        tables = build_neumf_tables(samples.num_embeddings, dim, init_std=MLP_INIT_STD)
        return NeuMF(tables, tower=NEUMF_TOWER, initial_bias=mean)

    return _ratings(data, "neumf", build, seed)


def ctr_fm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A factorisation machine on MovieLens as a click-through task: label 1 for a rating of 4 or more.

    Args:
        data: folder with GroupLens' ratings, movies and (1M) users files, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """

    def build(samples: Samples, bias: float) -> nn.Module:
        return FactorizationMachine(_clicks_tables(samples, embedding_dim), initial_bias=bias)

    return _clicks(data, "ctr_fm", build, seed)


def ctr_wide_deep(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """Wide & Deep on MovieLens as a click-through task.

    Args:
        data: see `ctr_fm`.
        seed: see `ctr_fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """

    def build(samples: Samples, bias: float) -> nn.Module:
        return WideDeep(_clicks_tables(samples, embedding_dim), tower=CLICKS_TOWER, initial_bias=bias)

    return _clicks(data, "ctr_wide_deep", build, seed)


def ctr_deepfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """DeepFM, as its paper has it, on MovieLens as a click-through task.

    Args:
        data: see `ctr_fm`.
        seed: see `ctr_fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """

    def build(samples: Samples, bias: float) -> nn.Module:
        return DeepFM(_clicks_tables(samples, embedding_dim), tower=CLICKS_TOWER, initial_bias=bias)

    return _clicks(data, "ctr_deepfm", build, seed)


def ctr_dlrm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM on MovieLens as a click-through task.

    Args:
        data: see `ctr_fm`.
        seed: see `ctr_fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """

    def build(samples: Samples, _: float) -> nn.Module:
        tables, num_dense = _clicks_tables(samples, embedding_dim), samples.dense.shape[1]
        return build_dlrm(tables, dense_in_features=num_dense, dense_layers=[64], over_layers=[*CLICKS_TOWER])

    return _clicks(data, "ctr_dlrm", build, seed)


def ctr_dlrm_dcn(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM_DCN on MovieLens as a click-through task.

    Args:
        data: see `ctr_fm`.
        seed: see `ctr_fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """

    def build(samples: Samples, _: float) -> nn.Module:
        tables, num_dense = _clicks_tables(samples, embedding_dim), samples.dense.shape[1]
        return build_dlrm_dcn(tables, dense_in_features=num_dense, dense_layers=[64], over_layers=[*CLICKS_TOWER])

    return _clicks(data, "ctr_dlrm_dcn", build, seed)


def _ratings(data: Path | None, name: str, build: Callable[[Samples, float], nn.Module], seed: int) -> Recipe:
    """The recipe of a model built from samples and the mean rating in training."""
    samples = load_ratings(require_folder(data, f"examples.movielens:{name}", PUBLISHER), seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    network = network_of_seed(lambda: build(samples, float(samples.labels[train_rows].mean())), seed)
    return Recipe(
        model=network, data=samples.split(batch_size=BATCH_SIZE, seed=seed), loss=nn.MSELoss(), **PLAIN.get(name, {})
    )


def _clicks(data: Path | None, name: str, build: Callable[[Samples, float], nn.Module], seed: int) -> Recipe:
    """The recipe of a model built from samples and the log odds of a click in training."""
    samples = load_clicks(require_folder(data, f"examples.movielens:{name}", PUBLISHER), seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    network = network_of_seed(lambda: build(samples, log_odds(samples.labels[train_rows])), seed)
    return Recipe(
        model=network,
        data=samples.split(batch_size=BATCH_SIZE, seed=seed),
        loss=nn.BCEWithLogitsLoss(),
        **CLICKS | PLAIN.get(name, {}),
    )


def _clicks_tables(samples: Samples, embedding_dim: int | None) -> EmbeddingBagCollection:
    return build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=CLICKS_INIT_STD)
