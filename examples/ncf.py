"""Recipes on the leave-one-out files of NCF: top-k recommendation by NeuMF, Table 4 of the paper, and by its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import nn

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import RANKING_KS, check_candidates
from examples.datasets.implicit import FEATURES, candidate_queries, split_leave_one_out
from examples.datasets.ncf import PUBLISHER, load_leave_one_out
from examples.datasets.text_files import require_folder
from examples.models import (
    MatrixFactorization,
    MultiLayerPerceptron,
    NeuMF,
    build_neumf_tables,
    build_tables,
    ncf_tower,
    network_of_seed,
)

BATCH_SIZE = 8190
"""Whole groups of one positive and `NUM_NEGATIVES` negatives."""
TEST_BATCH_SIZE = 16384
NUM_NEGATIVES = 4
INIT_STD = 0.01
"""Standard deviation of initial weights, as the authors of NCF have it."""
PART_DIM, PART_TOWER = 64, (64, 32, 16)
"""D and tower of MF and of the MLP alone: those of the MLP in `neumf_topk`."""
INITIAL_LOG_ODDS = -math.log(NUM_NEGATIVES)


def neumf_topk(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """NeuMF with D=16 on the leave-one-out files of NCF, judged by ranking each held-out positive among 99 negatives.

    It learns from implicit feedback, four new negatives per positive in every epoch, by binary cross entropy.

    Args:
        data: folder with ``ml-1m.train.rating``, ``ml-1m.test.rating`` and ``ml-1m.test.negative``, plain or ``.gz``.
        seed: of the split, the order of the batches, the negatives and the initial weights.
        embedding_dim: D of the GMF, 16 by default; the tables of the MLP have 4 D.

    Returns:
        The recipe; the splits depend on `seed` only. Validation and selection are cut from every user's training
        interactions; test is the published one.

    Raises:
        ValueError: if `data` is None or lacks a file, or a test case has fewer candidates than the largest k.
    """
    return _neumf(data, "neumf_topk", 16, embedding_dim, seed)


def neumf_topk_32(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """NeuMF as `neumf_topk` has it, with D=32 by default.

    Args:
        data: see `neumf_topk`.
        seed: see `neumf_topk`.
        embedding_dim: D of the GMF, 32 by default.

    Returns:
        The recipe; the splits depend on `seed` only, and are those of `neumf_topk`.

    Raises:
        ValueError: as `neumf_topk`.
    """
    return _neumf(data, "neumf_topk_32", 32, embedding_dim, seed)


def mf_topk(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """Matrix factorisation on the leave-one-out files of NCF, learned and judged as `neumf_topk`.

    Args:
        data: see `neumf_topk`.
        seed: see `neumf_topk`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only, and are those of `neumf_topk`.

    Raises:
        ValueError: as `neumf_topk`.
    """

    def build(rows: dict[str, int]) -> nn.Module:
        tables = build_tables(rows, embedding_dim or PART_DIM, init_std=INIT_STD)
        return MatrixFactorization(tables, global_mean=INITIAL_LOG_ODDS)

    return _topk(data, "mf_topk", build, seed)


def mlp_topk(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """NCF's multi-layer perceptron on its leave-one-out files, learned and judged as `neumf_topk`.

    Args:
        data: see `neumf_topk`.
        seed: see `neumf_topk`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only, and are those of `neumf_topk`.

    Raises:
        ValueError: as `neumf_topk`.
    """

    def build(rows: dict[str, int]) -> nn.Module:
        tables = build_tables(rows, embedding_dim or PART_DIM, init_std=INIT_STD)
        return MultiLayerPerceptron(tables, tower=PART_TOWER, initial_bias=INITIAL_LOG_ODDS)

    return _topk(data, "mlp_topk", build, seed)


def _neumf(data: Path | None, name: str, default_dim: int, embedding_dim: int | None, seed: int) -> Recipe:
    def build(rows: dict[str, int]) -> nn.Module:
        tables = build_neumf_tables(rows, embedding_dim or default_dim, init_std=INIT_STD)
        # The tower of the default D at every D, so that a comparison of D changes tables only.
        return NeuMF(tables, tower=ncf_tower(default_dim), turns_gmf=False)

    return _topk(data, name, build, seed)


def _topk(data: Path | None, name: str, build: Callable[[dict[str, int]], nn.Module], seed: int) -> Recipe:
    folder = require_folder(data, f"examples.ncf:{name}", PUBLISHER)
    protocol = load_leave_one_out(folder)
    check_candidates(candidate_queries(protocol), max(RANKING_KS))
    rows = dict(zip(FEATURES, (protocol.num_users, protocol.num_items), strict=True))
    network = network_of_seed(lambda: build(rows), seed)
    return Recipe(
        model=network,
        data=split_leave_one_out(
            protocol, num_negatives=NUM_NEGATIVES, batch_size=BATCH_SIZE, test_batch_size=TEST_BATCH_SIZE, seed=seed
        ),
        loss=nn.BCEWithLogitsLoss(),
    )
