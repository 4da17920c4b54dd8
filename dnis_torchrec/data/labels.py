"""Labels and candidates of batches, from which a loss and a metric can be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import WholeBatch


@dataclass
class RankingBatch(WholeBatch):
    """A batch of candidates to be ranked within their queries: a split of such batches is judged by
    ranking metrics."""

    queries: Tensor


def check_labels_are_there(batch: Batch, place: str) -> None:
    """Checks that a batch has labels, one row for each sample; how many samples there are is read
    from them."""
    labels: object = getattr(batch, "labels", None)
    shape = tuple(labels.shape) if isinstance(labels, Tensor) else ()
    check(bool(shape), f"{place}, labels", "a tensor with one row for each sample", shape or "none")


def check_labels(labels: Tensor, loss: Callable[..., Tensor], place: str) -> None:
    """Checks that there is one label per sample, and that it lies in the domain of the loss."""
    remedy = "flatten them: a loss of (B,) and (B, 1) is one of B times B differences"
    check(labels.dim() == 1, place, "labels of shape (B,)", tuple(labels.shape), remedy)
    values = labels.float()
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        raise ValueError(
            describe(place, "finite labels", float(values[~finite][0]), "clean the data")
        )
    if isinstance(loss, nn.BCEWithLogitsLoss):
        outside = (values < 0) | (values > 1)
        if bool(outside.any()):
            raise ValueError(
                describe(
                    place,
                    "labels in [0, 1] for BCEWithLogitsLoss",
                    float(values[outside][0]),
                    "map the labels to 0 and 1, or use MSELoss",
                )
            )


def check_classes(
    labels: Tensor, place: str, remedy: str = "smooth labels in the train split alone"
) -> None:
    """Checks that labels are classes, which AUC, NE and calibration are defined for; a loss may
    take shares of them."""
    other = (labels != 0) & (labels != 1)
    if bool(other.any()):
        raise ValueError(describe(place, "labels 0 or 1", float(labels[other][0]), remedy))


RANKING_KS = (1, 5, 10)
"""Cut-offs of the ranking metrics."""


def check_candidates(queries: Tensor, k: int = max(RANKING_KS), place: str = "ranking") -> None:
    """Checks that every query has enough candidates for a cut-off: recall@k of fewer than k
    candidates is always 1."""
    check(queries.numel() > 0, place, "at least one query", 0)
    names, sizes = queries.unique(return_counts=True)
    fewest = int(sizes.argmin())
    requirement = f"at least k={k} candidates"
    remedy = "add negatives, or leave the query out"
    check(
        int(sizes[fewest]) >= k,
        f"{place}, query {int(names[fewest])}",
        requirement,
        int(sizes[fewest]),
        remedy,
    )
