"""Batches cut into parts along the samples, so that an upper step can take less than a whole validation batch.

Shapes: B batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torchrec.datasets.utils import Batch

from dnis_torchrec.batch_slices import CutBatches, slice_of
from dnis_torchrec.checks import check


class BatchParts(CutBatches):
    """The batches of a stream, each cut into so many parts of equal size (the last ones may be a sample smaller).

    An upper step costs about as much as the samples that it sees; what it learns from half of them is noisier, and the
    running mean of alpha's gradients is there for noise. A pass over the stream then takes that many more steps. A
    batch of too few samples gives fewer parts. Local. What is split over ranks after it was cut gives them the samples
    that one process alone would take.

    Parts are cut in the order of the samples. A batch that holds all its positives in front would give parts without
    any, whose gradients cancel those of the others: mix it, or put each positive in front of its negatives.

    Args:
        batches: can be iterated again and again; its attributes ``epoch`` and ``is_split_over_ranks``, if it has them,
            are passed on.
        num_parts: parts of a batch; 1 leaves it whole.
        at_least: samples of a part: one for each rank that takes its share of it.

    Raises:
        ValueError: if `num_parts` is below 1.

    Example:
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 0, 1]), lengths=torch.tensor([2, 1]))
        >>> batch = Batch(torch.zeros(2, 1), kjt, torch.ones(2))
        >>> [part.sparse_features.values().tolist() for part in BatchParts([batch], 2)]
        [[3, 0], [1]]
    """

    def __init__(self, batches: Iterable[Batch], num_parts: int, at_least: int = 1) -> None:
        check(num_parts >= 1, "num_parts", "expected at least 1", num_parts)
        super().__init__(batches)
        self._num_parts, self._at_least = num_parts, at_least

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield from cut(batch, self._num_parts, self._at_least)

    @property
    def is_split_over_ranks(self) -> bool:
        """Whether the batches are this rank's own already, see `dnis_torchrec.data_over_ranks.SplitsItself`."""
        return getattr(self._batches, "is_split_over_ranks", False)


def cut(batch: Batch, num_parts: int, at_least: int = 1) -> Iterator[Batch]:
    """The parts of a batch, in the order of its samples.

    Args:
        batch: what `slice_of` can cut; left whole where it makes no two parts.
        num_parts: at most so many.
        at_least: samples of a part.
    """
    batch_size = batch.sparse_features.stride()
    num_parts = min(num_parts, batch_size // at_least)
    if num_parts < 2:
        yield batch
        return
    bounds = torch.linspace(0, batch_size, num_parts + 1).round().long().tolist()
    for first, last in itertools.pairwise(bounds):
        yield slice_of(batch, first, last)
