"""MMoE on MovieLens: its equations, its two labels, its tables turned; and that both tasks are learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.axes import rotate_
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.shards import table_configs
from examples import movielens
from examples.models import MultiGateMixtureOfExperts, build_tables
from examples.movielens_tasks import RATING_SHARE, ClickAndRating, mmoe
from tests.test_examples_datasets import ml_1m

__all__ = ["ml_1m"]


def naive(model: MultiGateMixtureOfExperts, x: Tensor, task: str) -> Tensor:
    """One sample at a time, one expert at a time, by the equations."""
    first, size = model.experts[0], model.towers[task][0]._mlp[0]._linear.in_features
    predictions = []
    for sample in x:
        shares = torch.softmax(model.gates[task](sample), 0)
        mixed = torch.zeros(size)
        for expert, share in enumerate(shares):
            rows = slice(expert * size, (expert + 1) * size)
            mixed = mixed + share * (first.weight[rows] @ sample + first.bias[rows]).clamp(min=0)
        predictions.append(model.towers[task](mixed.unsqueeze(0))[0, 0])
    return torch.stack(predictions)


@pytest.fixture
def batch(ml_1m: Path):
    return next(iter(mmoe(ml_1m, embedding_dim=4).data.train))


def test_equals_the_equations(ml_1m: Path, batch) -> None:
    model = mmoe(ml_1m, embedding_dim=4).model
    outputs = model(None, batch.sparse_features)
    x = model.embedding_bag_collection(batch.sparse_features).values()
    for task in ("click", "rating"):
        torch.testing.assert_close(outputs[task], naive(model, x, task))


def test_labels_are_the_click_and_the_rating(ml_1m: Path, batch) -> None:
    click, rating = batch.labels.unbind(1)
    assert torch.equal(click, (rating >= 4).float())
    assert 1 <= float(rating.min()) < float(rating.max()) <= 5
    alone = next(iter(movielens.ctr_fm(ml_1m, embedding_dim=4).data.train))
    assert torch.equal(alone.labels, click)
    outputs = {"click": torch.zeros(len(click)), "rating": torch.zeros(len(click))}
    expected = torch.tensor(2.0).log() + RATING_SHARE * rating.square().mean()
    torch.testing.assert_close(ClickAndRating().loss(batch, outputs), expected)


def test_turning_the_tables_changes_no_prediction(ml_1m: Path, batch) -> None:
    model = mmoe(ml_1m, embedding_dim=4).model.eval()
    nn.init.normal_(model.embedding_bag_collection.embedding_bags["user"].weight)
    before, weight = model(None, batch.sparse_features), model.embedding_bag_collection.embedding_bags["user"].weight
    held = weight.detach().clone()
    rotate_(model, count_frequencies([batch.sparse_features], table_configs(model)))
    assert not torch.allclose(weight, held, atol=1e-3)
    for task, values in model(None, batch.sparse_features).items():
        torch.testing.assert_close(values, before[task], atol=1e-4, rtol=1e-4)


def test_both_tasks_are_learned() -> None:
    torch.manual_seed(0)
    model = MultiGateMixtureOfExperts(build_tables({"user": 8, "movie": 8}, 4, init_std=0.1), {"click": 0, "rating": 3})
    ids = torch.randint(0, 8, (2, 256))
    features = KeyedJaggedTensor(["user", "movie"], ids.flatten(), lengths=torch.ones(512, dtype=torch.int64))
    rating = 1 + (ids[0] % 3 + ids[1] % 3).float()
    task = TrainTask(model, ClickAndRating())
    batch = Batch(None, features, torch.stack([(rating >= 4).float(), rating], 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        task(batch)[0].backward()
        optimizer.step()
    outputs = {name: values.detach() for name, values in model(None, features).items()}
    assert float((outputs["rating"] - rating).square().mean()) < 0.05
    assert float(((outputs["click"] > 0) == (rating >= 4)).float().mean()) > 0.99
