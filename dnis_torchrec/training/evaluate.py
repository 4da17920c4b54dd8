"""A model evaluated on a split: its loss and the metrics of its tasks, the same on every rank."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchrec.datasets.utils import Batch
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.mse import compute_mse, get_mse_states
from torchrec.metrics.ne import compute_ne, get_ne_states

from dnis_torchrec.allocation.gains import cut_batch, losses_of_parts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data import task as tasks
from dnis_torchrec.data.batches import for_lookup
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import progress_bar, world_size_of
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.training.pipeline import REMEDY, NonFiniteError

_PLACE = "evaluation split"


def predict(
    model: nn.Module, batches: Iterable[Batch], device: torch.device
) -> Iterator[tuple[Batch, Tensor, Tensor, tasks.Outputs]]:
    """(batch, loss, loss of the data alone, outputs) of a model in evaluation mode."""
    was_training = model.training
    model.eval()
    for batch in batches:
        if not len(batch.labels) and world_size_of() == 1:
            continue  # TorchRec's collections look up no batch of none
        batch = for_lookup(batch).to(device)
        loss, (data_loss, outputs) = model(batch)
        yield batch, loss, data_loss, outputs
    model.train(was_training)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], task: nn.Module, device: torch.device
) -> dict[str, float]:
    """Metrics of a model on a split, over all ranks."""
    read_by_name_(model, refuse_weights=None)
    task, metrics = tasks.task_of(task), None
    bar = progress_bar(batches, "evaluating", delay=1)
    for batch, _, value, outputs in predict(model, bar, device):
        if metrics is None:
            metrics = SampleMetrics(task.kinds_of(batch), device, _PLACE)
        predictions = tasks.check_predictions(task, batch, outputs, _PLACE)
        metrics.update(value, len(batch.labels), predictions)
    metrics = SampleMetrics({}, device, _PLACE) if metrics is None else metrics
    return metrics.compute()


class SampleMetrics:
    """The loss of some samples and the metrics of their predictions, over all ranks."""

    def __init__(self, kinds: Mapping[str, str], device: torch.device, place: str) -> None:
        self._kinds, self._place, self._num_samples = kinds, place, 0
        # by itself it would leave NaN out
        self._loss = MeanMetric(nan_strategy=math.inf).to(device)
        self._metrics: dict[str, Metric] = {
            name: _METRIC_OF[kind]().to(device) for name, kind in kinds.items()
        }

    def update(self, loss: Tensor, number: int, by_name: Mapping[str, tasks.Predictions]) -> None:
        """Adds samples: their mean loss, or that of each, and what was predicted for them."""
        self._num_samples += number
        if number:  # the mean of none is NaN
            self._loss.update(loss, weight=number / loss.numel())
        for name, of_name in by_name.items():
            by = of_name.queries if self._kinds[name] == tasks.RANKING else of_name.weights
            self._metrics[name].update(of_name.values, of_name.labels, by)

    def compute(self) -> dict[str, float]:
        """Metric -> value, those that are defined."""
        number = self._num_samples
        check(number > 0, self._place, "at least one sample", "none", "check the data splits")
        total = {tasks.LOSS: float(self._loss.compute())}
        if not math.isfinite(total[tasks.LOSS]):
            raise NonFiniteError(describe(self._place, "finite predictions", "nan or inf", REMEDY))
        for name, of_name in self._metrics.items():
            all_values = {metric: float(value) for metric, value in of_name.compute().items()}
            finite = {m: value for m, value in all_values.items() if not math.isnan(value)}
            total |= {tasks.metric_name(name, metric): value for metric, value in finite.items()}
        return total


def selection_loss(model: nn.Module, recipe: Recipe, device: torch.device) -> float:
    """What every choice makes small: a loss or metric of the selection split, over all ranks."""
    values = evaluate(model, recipe.data.selection, recipe.task, device)
    requirement = f"Recipe.stop_on to be one of {', '.join(values)}"
    check(recipe.stop_on in values, "selection split", requirement, repr(recipe.stop_on))
    value = values[recipe.stop_on]
    return -value if tasks.direction_of(recipe.task, recipe.stop_on) else value


def losses_in_words(recipe: Recipe, train_loss: float, selection_loss: float) -> str:
    """The losses of an epoch for users: the metric that the recipe stops on has its own sign."""
    value = -selection_loss if tasks.direction_of(recipe.task, recipe.stop_on) else selection_loss
    return f"train loss {train_loss:.4f}, selection {recipe.stop_on} {value:.4f}"


def primary_metric(task: nn.Module, test: Iterable[Batch] = ()) -> tuple[str, bool]:
    """The metric that a recipe is judged by."""
    name, kind = next(iter(tasks.task_of(task).kinds_of(next(iter(test), None)).items()))
    metric, is_higher_better = next(iter(tasks.METRICS[kind].items()))
    return tasks.metric_name(name, metric), bool(is_higher_better)


_SMALLEST_PROBABILITY = 1e-12


class _Sums(Metric):
    """A metric with sums for states."""

    full_state_update = False

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value)


class ClickMetrics(_Sums):
    """Exact area under the ROC curve, calibration, ne and logloss; NaN where one is undefined."""

    samples: list[Tensor]
    pos_labels: Tensor
    neg_labels: Tensor
    logit_cross_entropy: Tensor
    weighted_num_samples: Tensor

    def __init__(self) -> None:
        super().__init__(
            *("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels"),
            *("calibration_num", "calibration_denom", "logit_cross_entropy"),
        )
        self.add_state("samples", [], dist_reduce_fx="cat")

    def update(self, values: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch of logits."""
        if not len(values):
            return
        values, labels = values.double(), labels.double()
        chances, weight = values.sigmoid(), _weight(labels, weights)
        self._add(get_ne_states(labels, chances, weight, _SMALLEST_PROBABILITY))
        self._add(get_calibration_states(labels, chances, weight))
        each = binary_cross_entropy_with_logits(values, labels, reduction="none")
        self._add({"logit_cross_entropy": (weight * each).sum()})
        columns = [chances.detach(), weight * labels, weight * (1 - labels)]
        self.samples.append(torch.stack(columns, dim=1))

    def compute(self) -> dict[str, Tensor]:
        """Metric -> value for all samples so far."""
        has_both = bool(self.pos_labels) and bool(self.neg_labels)
        sums = (self.cross_entropy_sum, self.weighted_num_samples, self.pos_labels, self.neg_labels)
        nan = torch.tensor(torch.nan)
        calibration = compute_calibration(self.calibration_num, self.calibration_denom)
        return {
            "auc": self._area(),
            "calibration": calibration if has_both else nan,
            "ne": compute_ne(*sums, _SMALLEST_PROBABILITY) if has_both else nan,
            "logloss": self.logit_cross_entropy / self.weighted_num_samples,
        }

    def _area(self) -> Tensor:
        chances, positives, negatives = dim_zero_cat(self.samples).unbind(1)
        chances, order = chances.sort(descending=True)
        positives, negatives = (part[order].cumsum(0) for part in (positives, negatives))
        last_of_ties = torch.cat([chances.diff() != 0, chances.new_ones(1, dtype=torch.bool)])
        start = positives.new_zeros(1)
        hits, misses = (torch.cat([start, part[last_of_ties]]) for part in (positives, negatives))
        return torch.trapezoid(hits, misses) / (hits[-1] * misses[-1])  # 0 / 0 is NaN


class SquaredError(_Sums):
    """Mean squared error, weighted, as in torchrec.metrics."""

    error_sum: Tensor
    weighted_num_samples: Tensor

    def __init__(self) -> None:
        super().__init__("error_sum", "weighted_num_samples")

    def update(self, values: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch."""
        labels = labels.double()
        sums = get_mse_states(labels, values.double(), _weight(labels, weights))
        self._add({name: sums[name] for name in ("error_sum", "weighted_num_samples")})

    def compute(self) -> dict[str, Tensor]:
        """Error of all samples so far."""
        number = self.weighted_num_samples
        return {"mse": compute_mse(self.error_sum, number) if bool(number) else 0 / number}


def _weight(labels: Tensor, weights: Tensor | None) -> Tensor:
    return torch.ones_like(labels) if weights is None else weights.double()


class RankingMetrics(Metric):
    r"""Recall@k, MRR@k and NDCG@k, each the mean over queries; higher is better."""

    full_state_update = False
    higher_is_better = True
    preds: list[Tensor]
    target: list[Tensor]
    queries: list[Tensor]

    def __init__(self, ks: Sequence[int] = tasks.RANKING_KS) -> None:
        super().__init__()
        check(bool(ks) and min(ks, default=0) >= 1, "RankingMetrics.ks", "cut-offs >= 1", ks)
        self._ks = tuple(ks)
        for name in ("preds", "target", "queries"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, queries: Tensor) -> None:
        """Adds a batch."""
        odd = target[(target != 0) & (target != 1)][:1].tolist()
        remedy = "mark relevant candidates by 1, all others by 0"
        check(not odd, "ranking", "labels 0 or 1", sum(odd), remedy)
        self.preds.append(preds.detach())
        self.target.append(target.long())
        self.queries.append(queries.long())

    def compute(self) -> dict[str, Tensor]:
        """Metric -> mean over the queries so far."""
        queries = dim_zero_cat(self.queries)
        tasks.check_candidates(queries, max(self._ks))
        preds, target = dim_zero_cat(self.preds), dim_zero_cat(self.target)
        label, query, position = _ranked(preds, target, queries)
        num_queries = int(query[-1]) + 1
        discount = (position + 2).double().log2().reciprocal()
        empty = torch.zeros(num_queries, dtype=torch.float64, device=query.device)
        num_positives = empty.index_add(0, query, label.double())
        ideal_position = torch.arange(int(position.max()) + 1, device=query.device)
        best_gains = (ideal_position + 2).double().log2().reciprocal().cumsum(0)
        values: dict[str, Tensor] = {}
        for k in self._ks:
            hit = (label * (position < k)).double()
            recall = empty.index_add(0, query, hit) / num_positives.clamp(min=1)
            reciprocal_rank = empty.scatter_reduce(0, query, hit / (position + 1), "amax")
            ideal = best_gains[num_positives.long().clamp(1, k) - 1]
            ndcg = empty.index_add(0, query, hit * discount) / ideal
            of_k = {"recall": recall, "mrr": reciprocal_rank, "ndcg": ndcg}
            values |= {f"{name}@{k}": of_queries.mean() for name, of_queries in of_k.items()}
        return values


def _ranked(preds: Tensor, target: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of each query in falling order of prediction, of equals the negatives first."""
    order = target.argsort(stable=True)
    order = order[preds[order].argsort(descending=True, stable=True)]
    order = order[queries[order].argsort(stable=True)]
    _, query, sizes = queries[order].unique_consecutive(return_inverse=True, return_counts=True)
    first = (sizes.cumsum(0) - sizes)[query]
    return target[order], query, torch.arange(query.numel(), device=query.device) - first


_METRIC_OF = {
    tasks.BINARY: ClickMetrics,
    tasks.REGRESSION: SquaredError,
    tasks.RANKING: RankingMetrics,
}
LOSSES_PER_BATCH = 16  # parts of a batch at most


@torch.no_grad()
def part_losses(
    model: nn.Module, batches: Iterable[Batch], task: tasks.Task, device: torch.device
) -> Tensor:
    """``(P, 2)``: samples and loss of the parts of every batch of a split, as a model has them."""
    values = [torch.zeros(0, 2, dtype=torch.float64)]
    for batch, loss, _, outputs in predict(model, batches, device):
        if size := len(batch.labels):
            parts = cut_batch(batch, LOSSES_PER_BATCH)
            losses = losses_of_parts(outputs, parts, lambda rows, part: task.loss(part, rows))
            if not bool(losses.isfinite().all()):  # as of one whose samples all weigh nothing
                losses = torch.tensor([[size, float(loss)]], dtype=torch.float64)
            values.append(losses)
    return torch.cat(values)
