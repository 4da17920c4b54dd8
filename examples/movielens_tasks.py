"""Two tasks on MovieLens with one model: whether a movie is liked (a rating of 4 or more), and the rating."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import Predictions, Task
from examples.datasets.in_memory import split_rows
from examples.datasets.movielens import PUBLISHER, load_clicks_and_ratings
from examples.datasets.text_files import require_folder
from examples.models import MultiGateMixtureOfExperts, build_tables, log_odds, network_of_seed
from examples.movielens import BATCH_SIZE, CLICKS, CLICKS_INIT_STD, EMBEDDING_DIM

RATING_SHARE = 0.3
"""Weight of the rating's squared error, beside the click's cross entropy of 1: the two are then about as large."""


class ClickAndRating(Task):
    """Both predictions, the sum of their losses; ``labels[:, 0]`` are clicks, ``labels[:, 1]`` ratings."""

    kinds: Mapping[str, str] = {"click": "binary", "rating": "regression"}

    def loss(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of the click, and the rating's squared error in the share of `RATING_SHARE`."""
        of_click = binary_cross_entropy_with_logits(outputs["click"], batch.labels[:, 0])
        return of_click + RATING_SHARE * mse_loss(outputs["rating"], batch.labels[:, 1])

    def predictions(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Mapping[str, Predictions]:
        """Each output with its label."""
        return {name: Predictions(outputs[name], batch.labels[:, column]) for column, name in enumerate(self.kinds)}


def mmoe(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A multi-gate mixture of experts on MovieLens' clicks and ratings; stopped by the AUC of clicks.

    Args:
        data: folder with GroupLens' ratings, movies and (1M) users files, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or lacks a file.
    """
    folder = require_folder(data, "examples.movielens_tasks:mmoe", PUBLISHER)
    samples = load_clicks_and_ratings(folder, seed=seed)
    clicks, ratings = samples.labels[split_rows(len(samples.labels), seed=seed)[0]].unbind(1)

    def build() -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM, init_std=CLICKS_INIT_STD)
        biases = {"click": log_odds(clicks), "rating": float(ratings.mean())}
        return MultiGateMixtureOfExperts(tables, biases)

    network = network_of_seed(build, seed)
    return Recipe(
        model=network,
        data=samples.split(batch_size=BATCH_SIZE, seed=seed),
        loss=ClickAndRating(),
        stop_on="click_auc",
        **CLICKS,
    )
