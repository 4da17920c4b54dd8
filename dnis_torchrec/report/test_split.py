"""What a test split itself says about results on it: how many samples there are, and what their
mean would score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch

from dnis_torchrec.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class TestSplit:
    """A test split in two numbers."""

    __test__ = False  # for pytest, which takes the name for a test's

    num_samples: int
    variance: float | None = None


class CountedLabels:
    """Batches whose labels are counted while they are read anyway."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches, self._sums, self._is_single = (
            batches,
            torch.zeros(3, dtype=torch.float64),
            True,
        )

    def __iter__(self) -> Iterator[Batch]:
        self._sums.zero_()
        for batch in self._batches:
            yield batch
            labels = batch.labels.detach().cpu().double()
            self._is_single &= labels.dim() == 1
            self._sums += torch.stack(
                [torch.tensor(float(len(labels))).double(), labels.sum(), labels.square().sum()]
            )

    def of(self, ranks: Ranks) -> TestSplit:
        """What the last pass has counted, over all ranks. One all_reduce."""
        count, total, squares = (float(value) for value in ranks.sum_(self._sums.clone()))
        variance = squares / count - (total / count) ** 2 if count and self._is_single else math.nan
        return TestSplit(
            num_samples=int(count), variance=variance if math.isfinite(variance) else None
        )
