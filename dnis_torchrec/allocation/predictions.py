"""PredictedBatch of a model on one batch, and the loss around them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.curvature import (
    derivatives_at,
    device_of,
    evaluating,
    on_all,
    outputs_of,
)
from dnis_torchrec.allocation.loss_derivatives import Loss, LossDerivatives
from dnis_torchrec.data.task import Outputs, Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.features_by_name import read_by_name_


class PredictedBatch(NamedTuple):
    """What a model says of a batch."""

    outputs: Outputs
    values: Tensor
    at: LossDerivatives


@torch.no_grad()
def predictions_of(
    model: nn.Module, batch: Batch, loss: Loss | Task, place: str, ranks: Ranks
) -> PredictedBatch:
    """The predictions of one batch in evaluation mode, and the loss around them."""
    read_by_name_(model, refuse_weights=None)
    batch = batch.to(device_of(model))
    with evaluating(model):
        outputs = outputs_of(model, batch, loss)
    with on_all(ranks):
        predictions, at = derivatives_at(outputs, batch, loss, place)
    return PredictedBatch(outputs, predictions.double(), at)
