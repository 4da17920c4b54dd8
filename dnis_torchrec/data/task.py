"""Task: how a batch becomes a loss, and which predictions of which kinds a model is judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.labels import RANKING_KS, RankingBatch, check_classes

BINARY, REGRESSION, RANKING = "binary", "regression", "ranking"

LOSS = "loss"
"""Name of the loss among the metrics."""

_RANKING = [f"{name}@{k}" for k in reversed(RANKING_KS) for name in ("ndcg", "recall", "mrr")]
METRICS: Mapping[str, Mapping[str, bool | None]] = {
    BINARY: {"auc": True, "logloss": False, "ne": False, "calibration": None},
    REGRESSION: {"mse": False},
    RANKING: dict.fromkeys(_RANKING, True),
}
"""Kind -> metric -> whether higher is better; None where neither is. The first one stands for the
kind."""

Outputs: TypeAlias = Tensor | Mapping[str, Any]
"""What a model returns: a tensor with one row per sample, or such tensors by name."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of one name, of the samples of a batch, with what they are judged by.

    Attributes:
        values: ``(B,)`` or ``(B, 1)``, see the module for what each kind holds.
        labels: ``(B,)`` or ``(B, 1)``; 0 or 1 where the kind is binary or a ranking.
        weights: ``(B,)`` or ``(B, 1)``, how much each sample counts, >= 0; 0 leaves a sample
            without a label out. None for samples that all count the same, as those of a ranking do.
        queries: ``(B,)``, the query that each sample is a candidate of; for a ranking alone.
    """

    values: Tensor
    labels: Tensor
    weights: Tensor | None = None
    queries: Tensor | None = None


class Task(nn.Module):
    """A loss of one's own, on a model of any number of outputs: the long way, where `Recipe.loss`
    is the short one.

    `TrainTask` makes a module of model and task that TorchRec's pipelines call with a batch. A task
    itself holds no model, so that the model it is asked about may be a prepared, sharded or served
    one, and no weights: what learns belongs to the model, which is saved. The loss is a function of
    the outputs: their second derivatives in it say what columns are worth.

    Attributes:
        kinds: name of each prediction -> its kind, ``"binary"``, ``"regression"`` or ``"ranking"``.
            Metrics have the name in front, as in ``"click_auc"``. The first metric of the first
            name is the one that a recipe is judged by.

    Example:
        >>> class ClickAndRating(Task):
        ...     kinds = {"click": "binary", "rating": "regression"}
        ...
        ...     def loss(self, batch, outputs):
        ...         click, rating = batch.labels.unbind(1)
        ...         of_click = nn.functional.binary_cross_entropy_with_logits(outputs["click"], click)
        ...         return of_click + 0.5 * nn.functional.mse_loss(outputs["rating"], rating)
        ...
        ...     def predictions(self, batch, outputs):
        ...         labels = batch.labels.unbind(1)
        ...         return {name: Predictions(outputs[name], of) for name, of in zip(self.kinds, labels)}
        >>> possible_metrics(ClickAndRating())
        ['loss', 'click_auc', 'click_logloss', 'click_ne', 'click_calibration', 'rating_mse']
    """

    kinds: Mapping[str, str] = {}

    def kinds_of(self, batch: Batch | None) -> Mapping[str, str]:
        """Returns the kinds of a split's predictions, by name: `kinds`.

        Args:
            batch: of the split; None where it is not known.
        """
        return self.kinds

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Calls the model, as ``model(dense_features=..., sparse_features=...)``; override it for
        any other call.

        Args:
            model: the recipe's, or what takes its place.
            batch: on the model's device.
        """
        outputs: Outputs = model(
            dense_features=batch.dense_features, sparse_features=batch.sparse_features
        )
        return outputs

    def loss(self, batch: Batch, outputs: Any) -> Tensor:
        """Computes the loss of a batch, a scalar: a mean over samples, which may be weighted, since
        ranks average it.

        It is called with other values in place of the outputs, too, so it takes all that comes from
        the model from there. The loss of a sample depends on the outputs of no other one, and can
        be derived twice in them.

        Args:
            batch: on the model's device.
            outputs: of the model.
        """
        raise NotImplementedError(
            describe(f"task {type(self).__name__}", "a method 'loss'", "none")
        )

    def predictions(self, batch: Batch, outputs: Any) -> Mapping[str, Predictions]:
        """Returns what is judged: for each name of `kinds` its predictions.

        Args:
            batch: on the model's device.
            outputs: of the model.
        """
        raise NotImplementedError(
            describe(f"task {type(self).__name__}", "a method 'predictions'", "none")
        )


class LossTask(Task):
    """The task of a model with one prediction per sample: the short way, `Recipe.loss`."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion
        self.kinds = {"": BINARY if isinstance(criterion, nn.BCEWithLogitsLoss) else REGRESSION}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predictions as ``(B,)``."""
        predictions: Any = super().outputs(model, batch)
        flat: Tensor = predictions.flatten()  # not squeeze: a batch of one sample stays a batch
        return flat

    def loss(self, batch: Batch, outputs: Tensor) -> Tensor:
        """The criterion of predictions and labels."""
        loss: Tensor = self.criterion(outputs, batch.labels.float())
        return loss

    def predictions(self, batch: Batch, outputs: Tensor) -> Mapping[str, Predictions]:
        """Predictions without a name."""
        queries = batch.queries if isinstance(batch, RankingBatch) else None
        return {"": Predictions(outputs, batch.labels.float(), queries=queries)}

    def kinds_of(self, batch: Batch | None) -> Mapping[str, str]:
        """Candidates are ranked, whatever the criterion."""
        return {"": RANKING} if isinstance(batch, RankingBatch) else self.kinds


def task_of(loss: nn.Module | Callable[..., Tensor]) -> Task:
    """The task that a loss stands for; a task itself."""
    return loss if isinstance(loss, Task) else LossTask(loss)  # type: ignore[arg-type]


def detached(outputs: Outputs) -> Outputs:
    """Outputs without their graph, as TorchRec's pipelines hand them on."""
    if not isinstance(outputs, Mapping):
        return outputs.detach()
    return {
        name: part.detach() if hasattr(part, "detach") else part for name, part in outputs.items()
    }


def metric_name(prediction: str, metric: str) -> str:
    """The name of a metric among those of all predictions."""
    return f"{prediction}_{metric}" if prediction else metric


def possible_metrics(task: Task) -> list[str]:
    """All metrics that a recipe may have, the loss first."""
    kinds = [*task.kinds.items(), *([("", RANKING)] if isinstance(task, LossTask) else [])]
    return [LOSS, *(metric_name(name, metric) for name, kind in kinds for metric in METRICS[kind])]


def direction_of(task: Task, metric: str) -> bool | None:
    """Whether higher is better of a metric; None where neither is."""
    known = possible_metrics(task)
    check(metric in known, f"metric {metric!r}", f"one of {', '.join(known)}", repr(metric))
    if metric == LOSS:
        return False
    kinds = [*task.kinds.items(), ("", RANKING)]
    return next(
        METRICS[k][own]
        for name, k in kinds
        for own in METRICS[k]
        if metric_name(name, own) == metric
    )


def check_task_is_one(task: object) -> None:
    """Checks what a recipe is given for a task, and what that says of itself."""
    if not isinstance(task, Task):
        requirement, remedy = "a dnis_torchrec.Task", "derive it from that class"
        raise TypeError(describe("Recipe.task", requirement, type(task).__name__, remedy))
    place = f"task {type(task).__name__}"
    check(bool(task.kinds), f"{place}.kinds", "at least one name with its kind", dict(task.kinds))
    for name, kind in task.kinds.items():
        check(
            kind in METRICS,
            f"{place}, prediction {name!r}",
            f"a kind of {', '.join(METRICS)}",
            repr(kind),
        )
    names = [name for name, _ in task.named_parameters()]
    check(
        not names,
        place,
        "no weights of its own",
        names,
        "hold in the model what learns: it is what is saved",
    )


def check_outputs(outputs: object, place: str) -> None:
    """Checks that outputs are a tensor, or tensors by name."""
    if not isinstance(outputs, Tensor | Mapping):
        requirement = "a tensor, or tensors by name, of the model"
        raise TypeError(
            describe(f"{place}, outputs", requirement, type(outputs).__name__, "return a dict")
        )


def checked_predictions(
    task: Task, batch: Batch, outputs: Any, place: str
) -> dict[str, Predictions]:
    """What a model is judged by in a batch, each ``(B,)``, checked."""
    found, kinds = task.predictions(batch, outputs), task.kinds_of(batch)
    names, requirement = (
        sorted({*found, *kinds}),
        f"the predictions {list(kinds)}, as its kinds have them",
    )
    check(
        len(names) == len(found) == len(kinds),
        f"{place}, task {type(task).__name__}",
        requirement,
        list(found),
    )
    return {
        name: _checked(
            found[name], kind, len(batch.labels), f"{place}, prediction {name!r}" if name else place
        )
        for name, kind in kinds.items()
    }


def _checked(predictions: Predictions, kind: str, num_samples: int, place: str) -> Predictions:
    needed = ("values", "labels", *(["queries"] if kind == RANKING else []))
    parts: dict[str, Tensor | None] = {}
    for name in ("values", "labels", "weights", "queries"):
        part = getattr(predictions, name)
        if part is not None or name in needed:
            received = tuple(part.shape) if isinstance(part, Tensor) else "none"
            is_fit = isinstance(part, Tensor) and received in ((num_samples,), (num_samples, 1))
            check(is_fit, place, f"{name} ({num_samples},), one for each sample", received)
            part = part.detach().flatten()
        parts[name] = part
    checked = Predictions(**parts)  # type: ignore[arg-type]
    labels, weights = checked.labels, checked.weights
    if weights is not None:
        check(kind != RANKING, place, "no weights of candidates that are ranked", "some")
        unfit = ~(weights.isfinite() & (weights >= 0))
        if bool(unfit.any()):
            raise ValueError(
                describe(place, "weights that are finite and >= 0", float(weights[unfit][0]))
            )
        counted = weights > 0
        labels = labels[counted]
        if not bool(
            counted.all()
        ):  # a label that is missing, as NaN, would not vanish with a weight of 0
            zero = torch.zeros((), dtype=checked.labels.dtype, device=labels.device)
            checked = Predictions(
                checked.values, torch.where(counted, checked.labels, zero), weights, None
            )
    finite = labels.isfinite()
    if not bool(finite.all()):
        remedy = "give samples without a label a weight of 0"
        raise ValueError(describe(place, "finite labels", float(labels[~finite][0]), remedy))
    if kind == BINARY:
        check_classes(labels, place)
    return checked


@torch.no_grad()
def check_task(model: nn.Module, task: Task, batch: Batch, place: str) -> None:
    """Tries a task of one's own out on a batch, before any training: one forward pass in evaluation
    mode."""
    weights = list(model.parameters())
    if any(weight.is_meta for weight in weights):
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        batch = batch.to(weights[0].device) if weights else batch
        outputs = task.outputs(model.eval(), batch)
    finally:
        for module, mode in modes:
            module.training = mode
    check_outputs(outputs, place)
    loss: object = task.loss(batch, outputs)
    received = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    check(
        received == (),
        f"{place}, task {type(task).__name__}",
        "a loss that is a scalar",
        received,
        "take its mean",
    )
    checked_predictions(task, batch, outputs, place)
