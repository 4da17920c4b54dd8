"""Recipes on MovieLens: ratings by matrix factorisation, and clicks (a rating of 4 or more) by a DLRM."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dnis_torchrec.recipe import Recipe
from examples.datasets.in_memory import split_rows
from examples.datasets.movielens import PUBLISHER, load_clicks, load_ratings
from examples.datasets.text_files import require_folder
from examples.models import MatrixFactorization, build_dlrm, build_tables, seeded

BATCH_SIZE = 4096
EMBEDDING_DIM = 64
INIT_STD = 0.003
"""Of .001, .003, .01 and .03 the best for MF on `selection` of seed 0, for uniform tables of D=64 and of D=12."""
CLICKS_INIT_STD = 0.01
"""Of .003, .01 and .05 the best for DLRM on `selection` of seed 0 at D=64; runs differ by .01."""


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
    samples = load_ratings(require_folder(data, "examples.movielens:mf", PUBLISHER), seed=seed)
    splits = samples.split(batch_size=BATCH_SIZE, seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    with seeded(seed):
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=INIT_STD)
        model = MatrixFactorization(tables, global_mean=float(samples.labels[train_rows].mean()))
    return Recipe(
        model=model,
        data=splits,
        loss=nn.MSELoss(),
        num_blocks=4,  # of 2, 4, 10 and 30 the best on the selection split of seed 0, at compression 3
        release_epochs=20,
        notes=("MovieLens: a random 8:1:1 split, so ratings of the future help to predict those of the past.",),
    )


def ctr_dlrm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM on MovieLens as a click-through task: label 1 for a rating of 4 or more.

    Args:
        data: folder with GroupLens' ratings, movies and (1M) users files, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """
    samples = load_clicks(require_folder(data, "examples.movielens:ctr_dlrm", PUBLISHER), seed=seed)
    with seeded(seed):
        model = build_dlrm(
            build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=CLICKS_INIT_STD),
            dense_in_features=samples.dense.shape[1],
            dense_layers=[64],
            over_layers=[256, 128],
        )
    return Recipe(
        model=model,
        data=samples.split(batch_size=BATCH_SIZE, seed=seed),
        loss=nn.BCEWithLogitsLoss(),
        num_blocks=4,
        warm_up_epochs=1,
        ramp_epochs=5,
        release_epochs=4,
        alpha_learning_rate=0.003,
        notes=(
            "MovieLens as clicks: a random 8:1:1 split, so ratings of the future help to predict those of the past.",
            "MovieLens has no dense features; DLRM's dense arch sees the constant 1.",
        ),
    )
