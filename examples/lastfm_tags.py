"""Recipes on Last.fm's tags as clicks: did this user give this artist this tag? FM, DeepFM and torchrec's DLRM.

The data are hetrec2011-lastfm-2k (Cantador, Brusilovsky, Kuflik, HetRec 2011) with a drawn tag for every false label,
as one tab-separated file: 547,001 samples of 1,892 users, 12,523 artists and 9,749 tags.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.data.recipe import Recipe
from examples.datasets.tab_separated import load_tab_separated
from examples.datasets.text_files import require_folder
from examples.models import DeepFM, FactorizationMachine, build_dlrm, build_tables, log_odds, network_of_seed

PUBLISHER = "GroupLens' hetrec2011-lastfm-2k, with drawn tags as lastfm_tag_ctr.tsv"
BATCH_SIZE = 4096
EMBEDDING_DIM = 64
INIT_STD = 0.01
TOWER = (256, 128)
PLAIN: dict[str, dict[str, Any]] = {
    "fm": {"embedding_l2": 0.003, "table_learning_rate": 1e-3, "dense_learning_rate": 3e-3},
    "deepfm": {"embedding_l2": 0.0, "table_learning_rate": 9e-3, "dense_learning_rate": 1e-3},
    "dlrm": {"embedding_l2": 0.001, "table_learning_rate": 3e-3, "dense_learning_rate": 3e-3},
}
"""Recipe -> L2 and rates of its plain model, the same for all methods: chosen at D=64 on `selection` of seed 0 by
`python -m benchmarks.plain_grid examples.lastfm_tags:fm` (benchmarks/plain_grid_2cpu_2026-11-27.md)."""


def fm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A factorisation machine of user, artist and tag.

    Args:
        data: folder with ``lastfm_tag_ctr.tsv``, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _clicks(
        data, "fm", lambda tables, bias: FactorizationMachine(tables, initial_bias=bias), seed, embedding_dim
    )


def fm_by_time(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The same on splits by time: the latest tags are those of test. Arguments and errors are those of `fm`."""

    def build(tables: EmbeddingBagCollection, bias: float) -> nn.Module:
        return FactorizationMachine(tables, initial_bias=bias)

    return _clicks(data, "fm", build, seed, embedding_dim, time="timestamp")


def deepfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """DeepFM, as its paper has it.

    Args:
        data: see `fm`.
        seed: see `fm`.
        embedding_dim: D, 64 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _clicks(
        data, "deepfm", lambda tables, bias: DeepFM(tables, tower=TOWER, initial_bias=bias), seed, embedding_dim
    )


def dlrm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM.

    Args:
        data: see `fm`.
        seed: see `fm`.
        embedding_dim: D, 64 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """

    def build(tables: EmbeddingBagCollection, _: float) -> nn.Module:
        return build_dlrm(tables, dense_in_features=1, dense_layers=[64], over_layers=[*TOWER])

    return _clicks(data, "dlrm", build, seed, embedding_dim)


def _clicks(
    data: Path | None,
    name: str,
    build: Callable[[EmbeddingBagCollection, float], nn.Module],
    seed: int,
    embedding_dim: int | None,
    *,
    time: str = "",
) -> Recipe:
    samples = load_tab_separated(
        require_folder(data, f"examples.lastfm_tags:{name}", PUBLISHER),
        "lastfm_tag_ctr.tsv",
        label="label",
        fields={name: name for name in ("user", "artist", "tag")},
        publisher=PUBLISHER,
        seed=seed,
        time=time,
    )
    bias = log_odds(samples.labels[samples.rows_of_splits(seed)[0]])

    def model() -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=INIT_STD)
        return build(tables, bias)

    network = network_of_seed(model, seed)
    return Recipe(
        model=network, data=samples.split(batch_size=BATCH_SIZE, seed=seed), loss=nn.BCEWithLogitsLoss(), **PLAIN[name]
    )
