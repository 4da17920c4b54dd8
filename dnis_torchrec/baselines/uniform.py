"""Uniform tables: every row of every table has the same, smaller embedding_dim, trained from scratch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from dnis_torchrec.checks import check
from dnis_torchrec.recipe import Recipe, TrainTask
from dnis_torchrec.report import ReportRow
from dnis_torchrec.search import table_configs
from dnis_torchrec.training import evaluate, shard, train_plainly

MAX_EPOCHS = 60


def uniform_dim(embedding_dim: int, compression_ratio: float) -> int:
    """The embedding_dim whose uniform tables come nearest to a compression ratio.

    Example:
        >>> uniform_dim(64, 5)
        13
    """
    check(compression_ratio >= 1, "compression_ratio", "expected a number >= 1", compression_ratio)
    return max(1, round(embedding_dim / compression_ratio))


def train_uniform(
    recipe: Recipe, *, dense_parameters: int, seed: int, device: torch.device, patience: int, method: str = "uniform"
) -> ReportRow:
    """Trains a recipe as it is to its own best epoch.

    Args:
        recipe: built with the embedding_dim to compare with.
        dense_parameters: parameters of the uncompressed tables, to tell the compression ratio.
        seed: for the row.
        device: where to train.
        patience: epochs without a better selection loss before stopping.
        method: name in the report.

    Returns:
        Its row: test metrics, parameters, bytes, seconds.
    """
    parameters = sum(table.num_embeddings * table.embedding_dim for table in table_configs(recipe.model))
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, device)
    with tempfile.TemporaryDirectory() as folder:
        trained = train_plainly(
            model, optimizer, recipe, device, max_epochs=MAX_EPOCHS, patience=patience, folder=Path(folder)
        )
    return ReportRow(
        method=method,
        compression_ratio=dense_parameters / parameters,
        parameters=parameters,
        bytes={"dense_fp32": 4 * parameters},
        metrics=evaluate(model, recipe.data.test, recipe.loss, device),
        seed=seed,
        seconds=trained.seconds,
    )
