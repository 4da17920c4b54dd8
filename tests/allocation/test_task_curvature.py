"""Curvature of a task's loss in its outputs: equal to the dense oracle, whatever else the model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.data.task import Predictions, Task
from tests.allocation.curvature_cases import Case, Net, expected, make_batches, make_blocks, make_model
from tests.allocation.test_curvature import assert_as_expected

CASE = Case(num_outputs=2)


def apart(z: Tensor, labels: Tensor) -> Tensor:
    """A click, and a rating that counts more the more it is."""
    click, rating = labels.double().unbind(1)
    of_ratings = (1 + rating) * mse_loss(z[:, 1], rating, reduction="none")
    return binary_cross_entropy_with_logits(z[:, 0], click) + 0.3 * of_ratings.mean()


def joint(z: Tensor, labels: Tensor) -> Tensor:
    """A click, and a purchase, which only follows a click: the product of two chances."""
    click, bought = labels.double().unbind(1)
    chance = z.sigmoid().prod(1).clamp(1e-9, 1 - 1e-9)
    of_both = -(bought * chance.log() + (1 - bought) * (1 - chance).log())
    return binary_cross_entropy_with_logits(z[:, 0], click) + of_both.mean()


class Named(nn.Module):
    """The model's outputs by name, the first as a column; and others that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Net = make_model(CASE)

    def forward(self, dense_features: Tensor, sparse_features: Any) -> dict[str, Tensor]:
        z = self.net(dense_features, sparse_features)
        unread = {"hidden": z.repeat(1, 9), "scale": z.sum()}
        return unread | {"one": z[:, :1], "other": z[:, 1], "chance": z[:, 0].sigmoid()}


class Of(Task):
    """The task of a loss of both outputs."""

    kinds: Mapping[str, str] = {"one": "regression"}

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self._loss = loss

    def loss(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Tensor:
        return self._loss(torch.cat([outputs["one"], outputs["other"].unsqueeze(1)], dim=1), batch.labels)

    def predictions(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Mapping[str, Predictions]:
        return {"one": Predictions(outputs["one"], batch.labels[:, 0])}


@pytest.mark.parametrize("loss", [apart, joint])
def test_equals_the_oracle(loss: Any) -> None:
    batches, model = make_batches(CASE), Named()
    found = curvature(TrainTask(model, Of(loss)), batches, make_blocks(CASE), loss=Of(loss))
    assert_as_expected(found, expected(CASE, batches, loss))


def of_pairs(z: Tensor, labels: Tensor) -> Tensor:
    return (z[:, 0].unsqueeze(0) - z[:, 0].unsqueeze(1)).square().mean()


def of_constants(z: Tensor, labels: Tensor) -> Tensor:
    return (z.detach() - labels).square().mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (of_pairs, "batch 0, task Of: expected a mean of the losses of single samples, got one in which samples meet"),
        (of_constants, "batch 0, task Of: expected a loss that depends on the outputs, got constants .*; take what"),
    ],
)
def test_what_no_curvature_can_be_measured_of_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        curvature(Named(), make_batches(CASE), make_blocks(CASE), loss=Of(loss))
