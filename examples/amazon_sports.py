"""Recipes on Amazon's Sports and Outdoors as clicks: did this user review this item? FM and DeepFM.

The data are Amazon reviews of 2014, 5-core (McAuley, Targett, Shi, van den Hengel, SIGIR 2015), as one tab-separated
file: 296,337 reviews of 18,357 items by 35,598 users. Every review gets two negatives. An item comes with its brand,
four categories and a list of attributes, a multi-hot bag.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.data.recipe import Recipe
from examples.datasets.amazon_sports import PUBLISHER, load_amazon_sports
from examples.datasets.text_files import require_folder
from examples.models import DeepFM, FactorizationMachine, build_tables, log_odds, network_of_seed

BATCH_SIZE = 4096
EMBEDDING_DIM = 64
INIT_STD = 0.01
TOWER = (256, 128)
PLAIN: dict[str, dict[str, Any]] = {
    "fm": {"embedding_l2": 0.06, "table_learning_rate": 1e-3, "dense_learning_rate": 3.33e-4},
    "deepfm": {"embedding_l2": 0.001, "table_learning_rate": 3e-3, "dense_learning_rate": 3e-3},
}
"""Recipe -> L2 and rates of its plain model, the same for all methods: chosen at D=64 on `selection` of seed 0 by
`python -m benchmarks.plain_grid examples.amazon_sports:fm` (benchmarks/plain_grid_2cpu_2026-11-27.md)."""


def fm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A factorisation machine of user, item and the item's fields.

    Args:
        data: folder with ``amazon_sports_seq.tsv``, plain or ``.gz``.
        seed: of the negatives, the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _clicks(
        data, "fm", lambda tables, bias: FactorizationMachine(tables, initial_bias=bias), seed, embedding_dim
    )


def fm_by_time(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The same on splits by time: the latest reviews are those of test. Arguments and errors are those of `fm`."""

    def build(tables: EmbeddingBagCollection, bias: float) -> nn.Module:
        return FactorizationMachine(tables, initial_bias=bias)

    return _clicks(data, "fm", build, seed, embedding_dim, is_by_time=True)


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


def _clicks(
    data: Path | None,
    name: str,
    build: Callable[[EmbeddingBagCollection, float], nn.Module],
    seed: int,
    embedding_dim: int | None,
    *,
    is_by_time: bool = False,
) -> Recipe:
    folder = require_folder(data, f"examples.amazon_sports:{name}", PUBLISHER)
    samples = load_amazon_sports(folder, seed=seed, is_by_time=is_by_time)
    bias = log_odds(samples.labels[samples.rows_of_splits(seed)[0]])

    def model() -> nn.Module:
        return build(build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=INIT_STD), bias)

    network = network_of_seed(model, seed)
    return Recipe(
        model=network, data=samples.split(batch_size=BATCH_SIZE, seed=seed), loss=nn.BCEWithLogitsLoss(), **PLAIN[name]
    )
