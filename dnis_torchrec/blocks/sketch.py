r"""Counting ids in bounded memory: a count-min sketch, and a table of exact counts in front of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.blocks.hashing import spread
from dnis_torchrec.blocks.settings import CountLimits
from dnis_torchrec.checks import check


class CountMinSketch:
    """Counts of ids that are never too low, in ``8 w d`` bytes whatever the number of ids."""

    def __init__(
        self, epsilon: float = CountLimits.epsilon, delta: float = CountLimits.delta
    ) -> None:
        check(0 < epsilon < 1, "epsilon", "a number between 0 and 1", epsilon)
        check(0 < delta < 1, "delta", "a number between 0 and 1", delta)
        self.epsilon, self.delta = epsilon, delta
        self.table = np.zeros(
            (math.ceil(math.log(1 / delta)), math.ceil(math.e / epsilon)), dtype=np.int64
        )

    @property
    def total(self) -> int:
        """M: occurrences added."""
        return int(self.table[0].sum())

    def add(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Adds occurrences."""
        for row, columns in zip(self.table, self._columns(ids), strict=True):
            np.add.at(row, columns, counts)

    def estimate(self, ids: np.ndarray) -> np.ndarray:
        """``(n,)`` int64 estimates, none too low."""
        estimates = np.full(len(ids), np.iinfo(np.int64).max, dtype=np.int64)
        for row, columns in zip(self.table, self._columns(ids), strict=True):
            np.minimum(estimates, row[columns], out=estimates)
        return estimates

    def _columns(self, ids: np.ndarray) -> list[np.ndarray]:
        width = self.table.shape[1]
        return [
            (spread(ids.astype(np.uint64), seed) * width).astype(np.int64)
            for seed in range(len(self.table))
        ]


class BoundedCounter:
    """Counts of ids: all exact while they fit, then the most frequent ones exact and the rest
    sketched."""

    def __init__(
        self,
        *,
        exact_ids: int = CountLimits.exact_ids,
        epsilon: float = CountLimits.epsilon,
        delta: float = CountLimits.delta,
    ) -> None:
        check(exact_ids >= 2, "exact_ids", "an integer >= 2", exact_ids)
        self.exact_ids, self.epsilon, self.delta = exact_ids, epsilon, delta
        self.ids, self.counts, self.before = (np.empty(0, np.int64) for _ in range(3))
        self.sketch: CountMinSketch | None = None
        self._waiting: list[np.ndarray] = []

    @property
    def is_exact(self) -> bool:
        """Whether every count is."""
        self.settle()
        return self.sketch is None

    @property
    def error_bound(self) -> float:
        """Most that an estimate is too high, with probability 1 - delta: epsilon M; 0 while
        everything is exact."""
        self.settle()
        return 0.0 if self.sketch is None else self.epsilon * self.sketch.total

    def add(self, ids: np.ndarray) -> None:
        """Counts ids, each as often as it occurs; ``(n,)`` integers >= 0."""
        self._waiting.append(ids.astype(np.int64))
        # New ids go in by copying the table, which pays for many at a time only.
        if sum(map(len, self._waiting)) >= self.exact_ids:
            self.settle()

    def settle(self) -> None:
        """Takes in the ids that wait to be counted; `estimate` does it by itself."""
        if not self._waiting:
            return
        ids, counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        self._waiting.clear()
        places, known = self._find(ids)
        self.counts[places[known]] += counts[known]
        new = ids[~known]
        before = np.zeros(len(new), np.int64) if self.sketch is None else self.sketch.estimate(new)
        self.include(new, counts[~known], before)

    def include(self, ids: np.ndarray, counts: np.ndarray, before: np.ndarray) -> None:
        """Takes ids into the table that are not in it."""
        where = np.searchsorted(self.ids, ids)
        self.ids = np.insert(self.ids, where, ids)
        self.counts = np.insert(self.counts, where, counts)
        self.before = np.insert(self.before, where, before)
        self._shrink()

    def _shrink(self) -> None:
        """If the table holds more ids than it may, moves the least frequent to the sketch until it
        is half full."""
        if len(self.ids) <= self.exact_ids:
            return
        if self.sketch is None:
            self.sketch = CountMinSketch(self.epsilon, self.delta)
        kept = np.zeros(len(self.ids), bool)
        # Ties fall by id, so that equal streams have equal tables.
        kept[np.argsort(-(self.counts + self.before), kind="stable")[: self.exact_ids // 2]] = True
        # What was before is in the sketch already.
        self.sketch.add(self.ids[~kept], self.counts[~kept])
        self.ids, self.counts, self.before = self.ids[kept], self.counts[kept], self.before[kept]

    def parts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Occurrences of ids as ``(counted exactly, by the sketch alone)``, both ``(n,)`` int64."""
        self.settle()
        exact = np.zeros(len(ids), np.int64)
        sketched = (
            np.zeros(len(ids), np.int64) if self.sketch is None else self.sketch.estimate(ids)
        )
        places, known = self._find(ids)
        exact[known], sketched[known] = self.counts[places[known]], self.before[places[known]]
        return exact, sketched

    def estimate(self, ids: np.ndarray) -> np.ndarray:
        """``(n,)`` int64: occurrences of ids, exact or too high by at most `error_bound`, never too
        low."""
        exact, sketched = self.parts(ids)
        return exact + sketched

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places of ids in the table, or where they would be put, and whether they are
        in it."""
        places = np.searchsorted(self.ids, ids)
        known = places < len(self.ids)
        known[known] = self.ids[places[known]] == ids[known]
        return places, known


class EstimatedCounts:
    """Counts of a table's rows as a `BoundedCounter` has them: read a slice at a time, as a tensor
    of them would be."""

    def __init__(self, counter: BoundedCounter, num_embeddings: int) -> None:
        self.counter = counter
        self._num_embeddings = num_embeddings

    @property
    def error_bound(self) -> float:
        """Most that a count is too high, with probability 1 - delta; none is too low. 0 if all are
        exact."""
        return self.counter.error_bound

    @property
    def confidence(self) -> float:
        """Probability that a count is not too high by more than that: 1 - delta."""
        return 1 - self.counter.delta

    def numel(self) -> int:
        """N."""
        return self._num_embeddings

    def __getitem__(self, rows: slice) -> Tensor:
        """Counts of a run of rows, int64."""
        first, end, step = rows.indices(self._num_embeddings)
        return torch.from_numpy(self.counter.estimate(np.arange(first, end, step, dtype=np.int64)))

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything, for a safetensors file; `from_tensors` reads it back."""
        counter = self.counter
        counter.settle()
        found: dict[str, np.ndarray] = {
            "ids": counter.ids,
            "counts": counter.counts,
            "before": counter.before,
        }
        found["limits"] = np.array([counter.epsilon, counter.delta])
        found["size"] = np.array([self._num_embeddings, counter.exact_ids])
        if counter.sketch is not None:
            found["sketch"] = counter.sketch.table
        return {name: torch.from_numpy(part) for name, part in found.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> EstimatedCounts:
        """Rebuilds the counts from `to_tensors`."""
        parts = {name: tensor.numpy() for name, tensor in tensors.items()}
        num_embeddings, exact_ids = parts["size"].tolist()
        epsilon, delta = parts["limits"].tolist()
        counter = BoundedCounter(exact_ids=exact_ids, epsilon=epsilon, delta=delta)
        counter.ids, counter.counts, counter.before = parts["ids"], parts["counts"], parts["before"]
        if "sketch" in parts:
            counter.sketch = CountMinSketch(epsilon, delta)
            counter.sketch.table = parts["sketch"]
        return EstimatedCounts(counter, num_embeddings)
