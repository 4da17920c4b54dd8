"""Recipes on MovieLens: ratings by MF, MLP and NeuMF; clicks (a rating of 4 or more) by FM, Wide & Deep, DeepFM, DLRM.

All of them read GroupLens' files of MovieLens-1M and of MovieLens-20M unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.data.recipe import Recipe
from examples.datasets.in_memory import Samples, split_rows
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
    draws,
    log_odds,
    ncf_tower,
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
    "ctr_fm": {"embedding_l2": 0.02, "table_learning_rate": 1e-3},
}
"""Recipe -> L2 and rates of its plain model, the same for all methods: chosen at D=64 on `selection` of seed 0 by
`python -m benchmarks.plain_grid examples.movielens:mf` and so on (benchmarks/plain_grid_2cpu_2026-11-26.md). Of FM the
grid is not finished: its rate beside the tables has stayed."""
CLICKS_LEARNING_RATE = 0.003
"""Learning rate of plain tables for clicks where no grid has chosen another. Without L2 it is the best of .001, .003
and .01 on `selection` of seed 0: DLRM gains .0009 in the mean of D=64 and 11, with and without alpha's split. DeepFM
and Wide & Deep are better than at .001 by .0011 and .0004. A rate of .01 was tried for DeepFM at D=64 alone: worse by
.02."""
CLICKS_RELEASE_RATE = 0.01
"""Learning rate of the tables in the release for clicks. It is the best of .001, .003, .01 and .03 for FM's search on
`selection` of seed 0, at compression 20. Before the release of a short search it is the best of .003, .006, .01 and
.02."""
NEUMF_SEARCH_RATE = 0.003
"""Learning rate of the tables in NeuMF's search: better than .001 on `selection` of seed 0, at compression 4 and 10."""
RELEASE_NETWORK_RATE = 1e-4
"""Learning rate of a network in the release: a tenth of plain training's, at which selection losses jump from epoch to
epoch."""
SEARCH_NETWORK_RATE = 3e-4
"""Learning rate, before the release of a search, of a network that overfits before its tables do. A search is longer
than plain training, which would lose by that rate."""
_RATINGS_WITH_TOWER = {
    "column_order": "importance",
    "warm_up_epochs": 5,
    "ramp_epochs": 8,
    "release_epochs": 8,
    "alpha_learning_rate": 0.01,
    "release_dense_learning_rate": RELEASE_NETWORK_RATE,
}
"""Settings of searches of ratings with a network behind the tables, chosen for MLP on `selection` of seed 0 at
compression 4. The network's rate in the release was chosen for NeuMF at 2, the order of columns for both at 4 and 10.
MLP's warm-up is 5 epochs, so that a search takes at most three plain trainings. Beside 8 epochs that is worse by .0011
at compression 4 and better by .0045 at 10 (mean of `selection` of three seeds, 0 to 2)."""
_WITH_NETWORK = {
    "scope": "table",
    "release_table_learning_rate": CLICKS_RELEASE_RATE,
    "release_dense_learning_rate": RELEASE_NETWORK_RATE,
}
"""Settings of searches of clicks with a network behind the tables. The network's rate in the release was chosen for
DLRM on `selection` of seeds 0 and 2, at compression 20. Tables that differ in worth have blocks of their own. For DLRM
as it was searched first that is better at compression 6 and 20, by .0010 and .0066. It is worse at 4 and 10, by .0053
and .0012."""
_FEWER_UPPER_STEPS = {"upper_every": 2, "alpha_learning_rate": 0.012}
"""So that a search takes at most three plain trainings. Half as many upper steps want larger ones: at the rate of one
every lower step alpha gets half as far. Of .003, .006 and .012 the best for DeepFM on `selection` of seed 0, at
compression 6 and 20, and for DLRM at 2."""
_DLRM = (
    _WITH_NETWORK
    | _FEWER_UPPER_STEPS
    | {
        "search_table_learning_rate": 0.002,
        "search_dense_learning_rate": SEARCH_NETWORK_RATE,
        "column_order": "free_importance",
        "column_sharing": 20.0,
        "warm_up_epochs": 2,
        "ramp_epochs": 4,
        "release_epochs": 6,
    }
)
"""Rates of tables .001, .002 and .003, of the network 1e-4, 3e-4 and 1e-3: of those tried the best on `selection` of
seed 0 in the order of alpha, added up over compression 2, 6 and 20. The order, and `column_sharing` of 1, 5, 20 and 50,
on that of seeds 0, 1 and 2, at 6 and 20: at 20 seeds differ by more than settings (docs/design.md)."""
DLRM_LEAST_COMPRESSION = 6
"""DLRM overfits with larger tables: a search asked for compression 2 or 4 is better at 6, on `selection` of seeds 0, 1
and 2."""
_WITH_TOWER = _WITH_NETWORK | {
    "column_order": "importance",
    "search_table_learning_rate": CLICKS_LEARNING_RATE,
    "search_dense_learning_rate": SEARCH_NETWORK_RATE,
    "alpha_learning_rate": 0.003,
    "warm_up_epochs": 2,
    "ramp_epochs": 8,
    "release_epochs": 7,
}
"""Settings of searches of clicks where the tables can be rotated and a tower reads them. Faster tables alone do not
help, because the tower overfits first. With a slower tower they do: on `selection` of seed 0, at compression 6 and 20,
they are better than tables and tower at .001. In the order of importance tables may have blocks of their own; in the
order of alpha DeepFM lost by it. Wide & Deep wants a ramp that long, and an upper step after every lower one
(docs/design.md)."""
_DEEPFM = _WITH_TOWER | {"alpha_learning_rate": 0.006, "ramp_epochs": 4, "release_decay": 0.7}
"""So that a search takes at most three plain trainings, which are shorter at that rate; larger upper steps, as the ramp
is half as long. On `selection` at compression 20 an upper step every second lower one at .012 is worse by .0008 in the
mean of seven seeds, and rates that stay in the release by .0008 in the mean of eight, each of them (docs/design.md)."""
_DLRM_DCN = _WITH_TOWER | _FEWER_UPPER_STEPS | {"ramp_epochs": 4, "search_dense_learning_rate": None}
"""Its cross network wants plain training's rate in a search, too: on `selection` of seed 0 at compression 6, with all
other settings those of DLRM, .5134, where its slow rate has .518. By importance, without `column_sharing` and with
tables at .003 it is .5113; the order without the rate is no help (.5190)."""
CONSTANT_DENSE = "MovieLens has no dense features; DLRM's dense arch sees the constant 1."


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

    # So that a search takes at most three plain trainings; with ramp and release of 8 epochs and an upper step every
    # lower one it takes 3.6, is .0014 to .0017 better
    # at compression 3 to 5 and .0008 worse at 10 (benchmarks/).
    return replace(_ratings(data, "mf", build, seed), warm_up_epochs=10, ramp_epochs=7, release_epochs=7, upper_every=4)


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

    return replace(_ratings(data, "mlp", build, seed), **_RATINGS_WITH_TOWER)


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

    # So that a search takes at most three plain trainings: by importance and with fast tables 5 + 7 epochs are better
    # at compression 2 to 5 than 8 + 8 in the order of alpha, and worse by .004 at 10 (benchmarks/, docs/design.md).
    return replace(
        _ratings(data, "neumf", build, seed),
        **_RATINGS_WITH_TOWER | {"warm_up_epochs": 3, "ramp_epochs": 5, "release_epochs": 7},
        search_table_learning_rate=NEUMF_SEARCH_RATE,
    )


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

    # So that a search takes less than three plain trainings; one of 27 epochs, tables at .003 before the release, is
    # better at compression 20 (docs/design.md).
    return replace(
        _clicks(data, "ctr_fm", build, seed),
        scope="table",
        column_order="importance",
        search_table_learning_rate=CLICKS_RELEASE_RATE,
        release_table_learning_rate=CLICKS_RELEASE_RATE,
        warm_up_epochs=2,
        ramp_epochs=4,
        release_epochs=5,
        upper_every=2,
    )


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

    return replace(_clicks(data, "ctr_wide_deep", build, seed), **_WITH_TOWER)


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

    return replace(_clicks(data, "ctr_deepfm", build, seed), **_DEEPFM)


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

    recipe = _clicks(data, "ctr_dlrm", build, seed, CONSTANT_DENSE)
    return replace(recipe, **_DLRM, least_compression=DLRM_LEAST_COMPRESSION)


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

    return replace(_clicks(data, "ctr_dlrm_dcn", build, seed, CONSTANT_DENSE), **_DLRM_DCN)


def _ratings(data: Path | None, name: str, build: Callable[[Samples, float], nn.Module], seed: int) -> Recipe:
    """The recipe of a model built from samples and the mean rating in training."""
    samples = load_ratings(require_folder(data, f"examples.movielens:{name}", PUBLISHER), seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    draw = draws(lambda: build(samples, float(samples.labels[train_rows].mean())), seed)
    return Recipe(
        model=draw(0),
        redraw=draw,
        data=samples.split(batch_size=BATCH_SIZE, seed=seed),
        loss=nn.MSELoss(),
        **PLAIN.get(name, {}),
        num_blocks=4,  # of 2, 4, 10 and 30 the best for MF on the selection split of seed 0, at compression 3
        release_epochs=20,
        notes=("MovieLens: a random 8:1:1 split, so ratings of the future help to predict those of the past.",),
    )


def _clicks(
    data: Path | None, name: str, build: Callable[[Samples, float], nn.Module], seed: int, *notes: str
) -> Recipe:
    """The recipe of a model built from samples and the log odds of a click in training."""
    samples = load_clicks(require_folder(data, f"examples.movielens:{name}", PUBLISHER), seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    draw = draws(lambda: build(samples, log_odds(samples.labels[train_rows])), seed)
    return Recipe(
        model=draw(0),
        redraw=draw,
        data=samples.split(batch_size=BATCH_SIZE, seed=seed),
        loss=nn.BCEWithLogitsLoss(),
        **{"table_learning_rate": CLICKS_LEARNING_RATE} | PLAIN.get(name, {}),
        num_blocks=4,
        warm_up_epochs=1,
        notes=(
            "MovieLens as clicks: a random 8:1:1 split, so ratings of the future help to predict those of the past.",
            *notes,
        ),
    )


def _clicks_tables(samples: Samples, embedding_dim: int | None) -> EmbeddingBagCollection:
    return build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=CLICKS_INIT_STD)
