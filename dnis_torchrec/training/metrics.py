"""Metrics of an evaluation, from torchmetrics and torchrec.metrics; the same value on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.mse import compute_mse, get_mse_states
from torchrec.metrics.ne import compute_ne, get_ne_states

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.labels import RANKING_KS, check_candidates
from dnis_torchrec.data.task import BINARY, RANKING, REGRESSION, Predictions

_SMALLEST_PROBABILITY = 1e-12


class JudgedPredictions:
    """The metrics of predictions of one name, while batches come in."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self._kind = kind
        of_kind: dict[str, dict[str, Metric]] = {
            BINARY: {
                "auc": AreaUnderCurve(),
                "ne": NormalizedEntropy(),
                "calibration": Calibration(),
            },
            REGRESSION: {"mse": WeightedSquaredError()},
            RANKING: {"ranking": RankingMetrics()},
        }
        self._metrics = MetricCollection(of_kind[kind]).to(device)
        self._logloss = LogLoss().to(device)

    def update(self, predictions: Predictions) -> None:
        """Adds a batch."""
        values, labels, weights = predictions.values, predictions.labels, predictions.weights
        if self._kind == RANKING:
            self._metrics.update(values, labels, predictions.queries)
        elif self._kind == REGRESSION:
            self._metrics.update(values, labels, weights)
        elif len(values):
            values, labels = values.double(), labels.double()
            self._metrics.update(values.sigmoid(), labels, weights)
            self._logloss.update(values, labels, weights)

    def compute(self) -> dict[str, float]:
        """Metric -> value over the samples of all ranks so far; none that is not defined for them."""
        found = {name: float(value) for name, value in self._metrics.compute().items()}
        if self._kind == BINARY:
            found["logloss"] = float(self._logloss.compute())
        return {name: value for name, value in found.items() if not math.isnan(value)}


class AreaUnderCurve(Metric):
    """Exact area under the ROC curve, no bins; higher is better."""

    full_state_update = False
    higher_is_better = True
    preds: list[Tensor]
    positives: list[Tensor]
    negatives: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("preds", "positives", "negatives"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch."""
        counted = (
            torch.ones_like(target, dtype=torch.float64) if weights is None else weights.double()
        )
        self.preds.append(preds.detach())
        self.positives.append(counted * target)
        self.negatives.append(counted * (1 - target))

    def compute(self) -> Tensor:
        """Area of all samples so far."""
        preds, order = dim_zero_cat(self.preds).sort(descending=True)
        positives, negatives = (
            dim_zero_cat(part)[order].cumsum(0) for part in (self.positives, self.negatives)
        )
        last_of_ties = torch.cat([preds.diff() != 0, preds.new_ones(1, dtype=torch.bool)])
        start = positives.new_zeros(1)
        hits, misses = (torch.cat([start, part[last_of_ties]]) for part in (positives, negatives))
        return torch.trapezoid(hits, misses) / (hits[-1] * misses[-1])  # 0 / 0 is NaN


class _TorchRecMetric(Metric):
    """A metric of torchrec.metrics with sums for states, without its windows and tasks."""

    full_state_update = False

    def __init__(self, states: Sequence[str]) -> None:
        super().__init__()
        for name in states:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value)


class NormalizedEntropy(_TorchRecMetric):
    r"""Cross entropy divided by that of always predicting the click rate of the evaluated samples;
    lower is better."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels"))

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch."""
        self._add(get_ne_states(*_as_doubles(preds, target, weights), _SMALLEST_PROBABILITY))

    def compute(self) -> Tensor:
        """Normalised entropy of all samples so far."""
        sums = (self.cross_entropy_sum, self.weighted_num_samples, self.pos_labels, self.neg_labels)
        has_both = bool(self.pos_labels) and bool(self.neg_labels)
        return compute_ne(*sums, _SMALLEST_PROBABILITY) if has_both else torch.tensor(torch.nan)


class LogLoss(_TorchRecMetric):
    """Mean cross entropy of logits, exact however large they are; lower is better."""

    higher_is_better = False
    cross_entropy_sum: Tensor
    weighted_num_samples: Tensor

    def __init__(self) -> None:
        super().__init__(("cross_entropy_sum", "weighted_num_samples"))

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch."""
        labels, logits, counted = _as_doubles(preds, target, weights)
        each = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        self._add(
            {"cross_entropy_sum": (counted * each).sum(), "weighted_num_samples": counted.sum()}
        )

    def compute(self) -> Tensor:
        """Mean of all samples so far."""
        return self.cross_entropy_sum / self.weighted_num_samples


class Calibration(_TorchRecMetric):
    """Predicted clicks divided by clicks; 1 is best. Computed by torchrec.metrics."""

    def __init__(self) -> None:
        super().__init__(("calibration_num", "calibration_denom", "num_negatives"))

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch."""
        labels, preds, counted = _as_doubles(preds, target, weights)
        self._add(get_calibration_states(labels, preds, counted))
        self._add({"num_negatives": (counted * (1 - labels)).sum()})

    def compute(self) -> Tensor:
        """Calibration of all samples so far."""
        sums, has_both = (self.calibration_num, self.calibration_denom), bool(self.num_negatives)
        return compute_calibration(*sums) if has_both and bool(sums[1]) else torch.tensor(torch.nan)


class WeightedSquaredError(_TorchRecMetric):
    """Mean squared error, weighted; lower is better. Computed by torchrec.metrics."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(("error_sum", "weighted_num_samples"))

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Adds a batch."""
        sums = get_mse_states(*_as_doubles(preds, target, weights))
        self._add({name: sums[name] for name in ("error_sum", "weighted_num_samples")})

    def compute(self) -> Tensor:
        """Error of all samples so far."""
        if not bool(self.weighted_num_samples):
            return torch.tensor(torch.nan)
        return compute_mse(self.error_sum, self.weighted_num_samples)


class RankingMetrics(Metric):
    r"""Recall@k, MRR@k and NDCG@k, each the mean over queries; higher is better."""

    full_state_update = False
    higher_is_better = True
    preds: list[Tensor]
    target: list[Tensor]
    queries: list[Tensor]

    def __init__(self, ks: Sequence[int] = RANKING_KS) -> None:
        super().__init__()
        check(bool(ks) and min(ks, default=0) >= 1, "RankingMetrics.ks", "cut-offs >= 1", ks)
        self._ks = tuple(ks)
        for name in ("preds", "target", "queries"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, queries: Tensor) -> None:
        """Adds a batch."""
        odd = target[(target != 0) & (target != 1)]
        if odd.numel():
            remedy = "mark relevant candidates by 1, all others by 0"
            raise ValueError(describe("ranking", "labels 0 or 1", float(odd[0]), remedy))
        self.preds.append(preds.detach())
        self.target.append(target.long())
        self.queries.append(queries.long())

    def compute(self) -> dict[str, Tensor]:
        """Metric -> mean over the queries so far."""
        queries = dim_zero_cat(self.queries)
        check_candidates(queries, max(self._ks))
        label, query, position = _ranked(
            dim_zero_cat(self.preds), dim_zero_cat(self.target), queries
        )
        num_queries = int(query[-1]) + 1
        discount = (position + 2).double().log2().reciprocal()
        empty = torch.zeros(num_queries, dtype=torch.float64, device=query.device)
        num_positives = empty.index_add(0, query, label.double())
        ideal_position = torch.arange(int(position.max()) + 1, device=query.device)
        best_gains = (ideal_position + 2).double().log2().reciprocal().cumsum(0)
        found: dict[str, Tensor] = {}
        for k in self._ks:
            hit = (label * (position < k)).double()
            recall = empty.index_add(0, query, hit) / num_positives.clamp(min=1)
            reciprocal_rank = empty.scatter_reduce(0, query, hit / (position + 1), "amax")
            ideal = best_gains[num_positives.long().clamp(1, k) - 1]
            ndcg = empty.index_add(0, query, hit * discount) / ideal
            found |= {
                f"recall@{k}": recall.mean(),
                f"mrr@{k}": reciprocal_rank.mean(),
                f"ndcg@{k}": ndcg.mean(),
            }
        return found


def _as_doubles(
    preds: Tensor, target: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(labels, predictions, weights), as torchrec.metrics takes them."""
    labels = target.double()
    return labels, preds.double(), torch.ones_like(labels) if weights is None else weights.double()


def ranking_mean(metrics: Mapping[str, float]) -> float | None:
    """One number for a ranking: the mean of recall@k for every k, and of mrr@k and ndcg@k for every
    k above 1."""
    parts = {name: name.partition("@") for name in metrics}
    ranking = {
        name for name, (kind, at, _) in parts.items() if at and kind in ("recall", "mrr", "ndcg")
    }
    counted = [
        metrics[name] for name in ranking if parts[name][0] == "recall" or parts[name][2] != "1"
    ]
    return math.fsum(counted) / len(counted) if counted else None


def _ranked(preds: Tensor, target: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates in falling order of prediction within each query, equal predictions with the
    negatives first."""
    order = target.argsort(stable=True)
    order = order[preds[order].argsort(descending=True, stable=True)]
    order = order[queries[order].argsort(stable=True)]
    _, query, sizes = queries[order].unique_consecutive(return_inverse=True, return_counts=True)
    first = (sizes.cumsum(0) - sizes)[query]
    return target[order], query, torch.arange(query.numel(), device=query.device) - first
