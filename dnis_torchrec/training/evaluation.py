"""A model evaluated on a split, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torchmetrics import MeanMetric
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.lookup_batches import for_lookup
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import (
    LOSS,
    METRICS,
    checked_predictions,
    direction_of,
    metric_name,
    task_of,
)
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.training.finite import REMEDY, NonFiniteError
from dnis_torchrec.training.metrics import JudgedPredictions

_PLACE = "evaluation split"


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], task: nn.Module, device: torch.device
) -> dict[str, float]:
    """Metrics of a model on a split, over all ranks."""
    read_by_name_(model, refuse_weights=None)
    was_training = model.training
    model.eval()
    task = task_of(task)
    mean_loss = MeanMetric(nan_strategy=math.inf).to(device)  # by itself it would leave NaN out
    judged: dict[str, JudgedPredictions] = {}
    seen = 0
    for batch in batches:
        if not judged:
            judged = {
                name: JudgedPredictions(kind, device) for name, kind in task.kinds_of(batch).items()
            }
        if (
            not len(batch.labels) and world_size_of() == 1
        ):  # TorchRec's collections look up no batch of none
            continue
        batch = for_lookup(batch).to(device)
        seen += len(batch.labels)
        _, (value, outputs) = model(batch)
        if len(batch.labels):  # the mean of none is NaN
            mean_loss.update(value, weight=len(batch.labels))
        for name, predictions in checked_predictions(task, batch, outputs, _PLACE).items():
            judged[name].update(predictions)
    model.train(was_training)
    if not seen:
        raise ValueError(describe(_PLACE, "at least one sample", "none", "check the data splits"))
    total = {LOSS: float(mean_loss.compute())}
    if not math.isfinite(total[LOSS]):
        raise NonFiniteError(describe(_PLACE, "finite predictions", "nan or inf", REMEDY))
    for name, of_name in judged.items():
        total |= {metric_name(name, metric): value for metric, value in of_name.compute().items()}
    return total


def selection_loss(model: nn.Module, recipe: Recipe, device: torch.device) -> float:
    """What early stopping and every other choice makes small, over all ranks, on the selection
    split."""
    found = evaluate(model, recipe.data.selection, recipe.task, device)
    requirement = f"Recipe.stop_on to be one of {', '.join(found)}"
    check(recipe.stop_on in found, "selection split", requirement, repr(recipe.stop_on))
    value = found[recipe.stop_on]
    return -value if direction_of(recipe.task, recipe.stop_on) else value


def losses_in_words(recipe: Recipe, train_loss: float, selection_loss: float) -> str:
    """The losses of an epoch as users are told them; a metric that the recipe stops on has its own
    name and sign."""
    value = -selection_loss if direction_of(recipe.task, recipe.stop_on) else selection_loss
    return f"train loss {train_loss:.4f}, selection {recipe.stop_on} {value:.4f}"


def primary_metric(task: nn.Module, test: Iterable[Batch] = ()) -> tuple[str, bool]:
    """The metric that a recipe is judged by."""
    name, kind = next(iter(task_of(task).kinds_of(next(iter(test), None)).items()))
    metric, is_higher_better = next(iter(METRICS[kind].items()))
    return metric_name(name, metric), bool(is_higher_better)
