"""A model evaluated on a split, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import describe
from dnis_torchrec.data.labels import RankingBatch, check_classes
from dnis_torchrec.data.lookup_batches import for_lookup
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.soft_selection.features_by_name import read_by_name_
from dnis_torchrec.training.finite import REMEDY, NonFiniteError
from dnis_torchrec.training.metrics import metrics_of


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], loss: nn.Module, device: torch.device) -> dict[str, float]:
    """Metrics of a model on a split, over all ranks.

    Args:
        model: called on a Batch, returns ``(loss, (loss, predictions, labels))`` as `TrainTask` does.
        batches: the split.
        loss: decides the metrics, with the kind of batches: recall@k, mrr@k and ndcg@k (k = 1, 5, 10) for a split of
            `RankingBatch`; else ``auc`` (exact, no bins), ``logloss``, ``ne`` (against the click rate of this split)
            and ``calibration`` for a binary loss, ``mse`` for nn.MSELoss.
        device: where the model is.

    Returns:
        metric -> value; ``"loss"`` is always among them, ``auc`` and ``ne`` only where samples are of both classes.

    Raises:
        ValueError: if the split is empty, a label of a binary loss is neither 0 nor 1, or a query has fewer candidates
            than k.
        NonFiniteError: on all ranks, if a prediction or its loss is NaN or infinite.
    """
    read_by_name_(model, refuse_weights=None)
    was_training = model.training
    model.eval()
    is_binary = isinstance(loss, nn.BCEWithLogitsLoss)
    mean_loss = MeanMetric(nan_strategy=math.inf).to(device)  # by itself it would leave NaN out
    metrics: MetricCollection | None = None
    seen, is_ranking = 0, False
    for batch in batches:
        if metrics is None:
            is_ranking = isinstance(batch, RankingBatch)
            metrics = metrics_of(loss, is_ranking=is_ranking).to(device)
        if is_binary and not is_ranking:
            check_classes(batch.labels, "evaluation split")
        if not batch.labels.numel() and world_size_of() == 1:  # TorchRec's collections look up no batch of none
            continue
        batch = for_lookup(batch).to(device)
        seen += batch.labels.numel()
        _, (value, predictions, labels) = model(batch)
        if labels.numel():  # the mean of none is NaN
            mean_loss.update(value, weight=labels.numel())
        if is_ranking:
            metrics.update(predictions, labels, batch.queries)
        elif is_binary:
            metrics.update(predictions.double().sigmoid(), labels.long())
        else:
            metrics.update(predictions, labels)
    model.train(was_training)
    if metrics is None or not seen:
        raise ValueError(describe("evaluation split", "at least one sample", "none", "check the data splits"))
    total = {"loss": float(mean_loss.compute())}
    if not math.isfinite(total["loss"]):
        raise NonFiniteError(describe("evaluation split", "finite predictions", "nan or inf", REMEDY))
    if is_binary and not is_ranking:
        total["logloss"] = total["loss"]
    computed = {name: float(value) for name, value in metrics.compute().items()}
    return total | {name: value for name, value in computed.items() if not math.isnan(value)}


def primary_metric(loss: nn.Module, test: Iterable[Batch] = ()) -> tuple[str, bool]:
    """The metric that a recipe is judged by.

    Args:
        loss: the recipe's loss.
        test: its test split; whether it is one of `RankingBatch` is read from its first batch.

    Returns:
        (name, whether higher is better).
    """
    if isinstance(next(iter(test), None), RankingBatch):
        return "ndcg@10", True
    return ("auc", True) if isinstance(loss, nn.BCEWithLogitsLoss) else ("mse", False)
