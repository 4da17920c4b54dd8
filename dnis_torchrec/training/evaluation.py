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
from dnis_torchrec.soft_selection.features_by_name import read_by_name_
from dnis_torchrec.training.finite import REMEDY, NonFiniteError
from dnis_torchrec.training.metrics import JudgedPredictions

_PLACE = "evaluation split"


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], task: nn.Module, device: torch.device) -> dict[str, float]:
    """Metrics of a model on a split, over all ranks.

    Args:
        model: called on a Batch, returns ``(loss, (loss, outputs))`` as `TrainTask` does.
        batches: the split.
        task: the recipe's, or its loss. It decides the metrics, see `dnis_torchrec.data.task`: recall@k, mrr@k and
            ndcg@k (k = 1, 5, 10) for a ranking, as a loss has on a split of `RankingBatch`; ``auc`` (exact, no bins),
            ``logloss``, ``ne`` (against the click rate of this split) and ``calibration`` for a binary prediction;
            ``mse`` for any other. Samples count by their weights.
        device: where the model is.

    Returns:
        metric -> value, the prediction's name in front where it has one; ``"loss"`` is always among them, ``auc`` and
        ``ne`` only where samples are of both classes.

    Raises:
        ValueError: if the split is empty, a query has fewer candidates than k, and as `checked_predictions`.
        NonFiniteError: on all ranks, if a prediction or its loss is NaN or infinite.
    """
    read_by_name_(model, refuse_weights=None)
    was_training = model.training
    model.eval()
    task = task_of(task)
    mean_loss = MeanMetric(nan_strategy=math.inf).to(device)  # by itself it would leave NaN out
    judged: dict[str, JudgedPredictions] = {}
    seen = 0
    for batch in batches:
        if not judged:
            judged = {name: JudgedPredictions(kind, device) for name, kind in task.kinds_of(batch).items()}
        if not len(batch.labels) and world_size_of() == 1:  # TorchRec's collections look up no batch of none
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
    """What early stopping and every other choice makes small, over all ranks, on the selection split.

    Args:
        model: see `evaluate`.
        recipe: data, task and which metric it is.
        device: where the model is.

    Returns:
        The loss, or the metric that the recipe stops on: one of which higher is better is negated.

    Raises:
        ValueError: if that metric cannot be computed on the split, and as `evaluate`.
        NonFiniteError: as `evaluate`.
    """
    found = evaluate(model, recipe.data.selection, recipe.task, device)
    requirement = f"Recipe.stop_on to be one of {', '.join(found)}"
    check(recipe.stop_on in found, "selection split", requirement, repr(recipe.stop_on))
    value = found[recipe.stop_on]
    return -value if direction_of(recipe.task, recipe.stop_on) else value


def losses_in_words(recipe: Recipe, train_loss: float, selection_loss: float) -> str:
    """The losses of an epoch as users are told them; a metric that the recipe stops on has its own name and sign.

    Args:
        recipe: says which metric it is.
        train_loss: of the data alone.
        selection_loss: as `selection_loss` returns it.

    Example:
        >>> from examples.synthetic import demo
        >>> losses_in_words(demo(None), 0.5, 0.25)
        'train loss 0.5000, selection loss 0.2500'
    """
    value = -selection_loss if direction_of(recipe.task, recipe.stop_on) else selection_loss
    return f"train loss {train_loss:.4f}, selection {recipe.stop_on} {value:.4f}"


def primary_metric(task: nn.Module, test: Iterable[Batch] = ()) -> tuple[str, bool]:
    """The metric that a recipe is judged by.

    Args:
        task: the recipe's, or its loss.
        test: its test split; whether it is one of `RankingBatch` is read from its first batch.

    Returns:
        (name, whether higher is better).
    """
    name, kind = next(iter(task_of(task).kinds_of(next(iter(test), None)).items()))
    metric, is_higher_better = next(iter(METRICS[kind].items()))
    return metric_name(name, metric), bool(is_higher_better)
