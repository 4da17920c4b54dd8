"""A small recipe of two tasks: outputs by name, two losses, weights of samples, two KJTs a batch, no dense features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import WholeBatch
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import Predictions, Task
from tests.tiny import EMBEDDING_DIM, ROWS, Repeatable, make_batch

SHARE = 0.5
"""Of the rating in the loss."""
METRICS = {"loss", "click_auc", "click_logloss", "click_ne", "click_calibration", "rating_mse"}


@dataclass
class TwoSidedBatch(WholeBatch):
    """User's bags in `sparse_features`, genres in `candidates`; labels ``(B, 2)``, click and rating."""

    candidates: KeyedJaggedTensor
    weights: Tensor


class TwoTasks(nn.Module):
    """A tower for each prediction on what two collections look up."""

    def __init__(self, embedding_dim: int = EMBEDDING_DIM) -> None:
        super().__init__()
        self.users, self.genres = (
            EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name, num_embeddings=ROWS[name], embedding_dim=embedding_dim, feature_names=[name]
                    )
                ]
            )
            for name in ROWS
        )
        self.towers = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(2 * embedding_dim, 8), nn.Tanh(), nn.Linear(8, 1)) for name in TASKS}
        )

    def forward(self, users: KeyedJaggedTensor, candidates: KeyedJaggedTensor) -> dict[str, Tensor]:
        """``(B, 1)`` for each task, and a probability that the loss does not depend on."""
        pooled = torch.cat([self.users(users).values(), self.genres(candidates).values()], dim=1)
        outputs = {name: tower(pooled) for name, tower in self.towers.items()}
        return outputs | {"share": outputs["click"].sigmoid()}


TASKS = ("click", "rating")


class ClickAndRating(Task):
    """A click and a rating; a sample of weight 0 has no rating."""

    kinds: Mapping[str, str] = {"click": "binary", "rating": "regression"}

    def outputs(self, model: nn.Module, batch: TwoSidedBatch) -> Mapping[str, Tensor]:
        return model(batch.sparse_features, batch.candidates)

    def loss(self, batch: TwoSidedBatch, outputs: Mapping[str, Tensor]) -> Tensor:
        click, rating = (outputs[name].squeeze(1) for name in TASKS)
        of_clicks = binary_cross_entropy_with_logits(click, batch.labels[:, 0])
        known = torch.where(batch.weights > 0, batch.labels[:, 1], 0.0)
        return of_clicks + SHARE * (batch.weights * mse_loss(rating, known, reduction="none")).mean()

    def predictions(self, batch: TwoSidedBatch, outputs: Mapping[str, Tensor]) -> dict[str, Predictions]:
        return {
            "click": Predictions(outputs["click"], batch.labels[:, 0]),
            "rating": Predictions(outputs["rating"], batch.labels[:, 1:], batch.weights),
        }


def two_sided(size: int, seed: int, *, empty_bags: bool = True) -> TwoSidedBatch:
    """Samples of `tests.tiny.make_batch`; some have no rating, a NaN."""
    batch, generator = make_batch(size, seed, empty_bags=empty_bags), torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 3, (size,), generator=generator) / 2
    ratings = torch.where(weights > 0, 3 + batch.labels + batch.dense_features[:, 0], torch.nan)
    users, candidates = batch.sparse_features.split([1, 1])
    return TwoSidedBatch(None, users, torch.stack([batch.labels, ratings], 1), candidates=candidates, weights=weights)


def make_recipe(*, seed: int = 0, embedding_dim: int | None = None, **fields: Any) -> Recipe:
    """The recipe; the splits depend on nothing but the batch seeds."""
    torch.manual_seed(seed)
    data = DataSplits(
        train=Repeatable([two_sided(64, s) for s in range(10)]),
        validation=Repeatable([two_sided(64, 100 + s) for s in range(3)]),
        selection=Repeatable([two_sided(64, 200 + s) for s in range(2)]),
        test=Repeatable([two_sided(64, 300), two_sided(63, 301)]),
    )
    given = {"loss": ClickAndRating(), "table_learning_rate": 1e-2, "dense_learning_rate": 1e-2, "embedding_l2": 1e-3}
    return Recipe(model=TwoTasks(embedding_dim or EMBEDDING_DIM), data=data, **(given | fields))


def two_tasks(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe function, as the command line finds it: ``tests.tiny_tasks:two_tasks``."""
    del data
    return make_recipe(seed=seed, embedding_dim=embedding_dim, stop_on="click_auc")
