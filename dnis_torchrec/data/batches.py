"""Batches that move as a whole, and samples cut out of one: for an upper step that takes less, for ranks that share it.

Shapes: B batch, F features.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, describe


@dataclasses.dataclass
class WholeBatch(Batch):
    """A batch that moves with all of its fields; TorchRec's own moves its three, each of which has to be there.

    A field that is no tensor and no KeyedJaggedTensor stays as it is, as dense features that are None do. Batches with
    weights of samples, or several KeyedJaggedTensors, derive from it and add their fields.

    Example:
        >>> @dataclasses.dataclass
        ... class WeightedBatch(WholeBatch):
        ...     weights: Tensor
        >>> batch = WeightedBatch(None, KeyedJaggedTensor.empty(), torch.ones(2), weights=torch.ones(2))
        >>> moved = batch.to(torch.device("meta"))
        >>> moved.weights.device.type, moved.dense_features
        ('meta', None)
    """

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch on a device."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory."""
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until the stream has passed."""
        self._each(lambda part: part.record_stream(stream))

    def _each(self, change: Callable[[Any], Any]) -> Self:
        """The batch with its tensors and bags changed."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moving = {name: part for name, part in parts.items() if isinstance(part, Tensor | KeyedJaggedTensor)}
        return dataclasses.replace(self, **{name: change(part) for name, part in moving.items()})


class CutBatches:
    """Batches that are cut out of others, which say what epoch it is.

    Args:
        batches: can be iterated again and again.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches: Any = batches

    @property
    def epoch(self) -> int:
        """Number of the next epoch, where the batches count them; set it to resume."""
        return self._batches.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        """Sets it in the batches."""
        self._batches.epoch = epoch


def slice_of(batch: Batch, first: int, last: int) -> Batch:
    """Samples ``first <= i < last`` of a batch.

    Args:
        batch: a dataclass of tensors with B rows and KeyedJaggedTensors of stride B, as TorchRec's Batch is.
        first: of the samples.
        last: one after them.

    Returns:
        A batch of the same class.

    Raises:
        TypeError: if `batch` is no dataclass.
        NotImplementedError: for variable batch sizes per feature.

    Example:
        >>> kjt = KeyedJaggedTensor(keys=["f", "g"], values=torch.arange(5), lengths=torch.tensor([2, 0, 1, 2]))
        >>> half = slice_of(Batch(torch.zeros(2, 1), kjt, torch.tensor([0.0, 1.0])), 1, 2)
        >>> half.sparse_features.values().tolist(), half.sparse_features.lengths().tolist(), half.labels.tolist()
        ([3, 4], [0, 2], [1.0])
    """
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise TypeError(describe("batch", "a dataclass, as TorchRec's Batch is", type(batch).__name__))
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
    sliced = {name: _slice(value, first, last) for name, value in fields.items()}
    return dataclasses.replace(batch, **sliced)


def _slice(value: Any, first: int, last: int) -> Any:
    if isinstance(value, KeyedJaggedTensor):
        return _slice_features(value, first, last)
    return value[first:last] if isinstance(value, Tensor) else value


def _slice_features(features: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise NotImplementedError(describe("batch", "supported is one batch size for all features", "several"))
    num_features, stride = len(features.keys()), features.stride()
    lengths = features.lengths().view(num_features, stride)[:, first:last]
    starts = torch.arange(num_features) * stride
    offsets = features.offsets().cpu()
    spans = list(zip(offsets[starts + first].tolist(), offsets[starts + last].tolist(), strict=True))
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat([features.values()[begin:end] for begin, end in spans]),
        weights=None if weights is None else torch.cat([weights[begin:end] for begin, end in spans]),
        lengths=lengths.reshape(-1).contiguous(),  # of one sample it would be a view, which no collective takes
        stride=last - first,
    )


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
        check(num_parts >= 1, "num_parts", "at least 1", num_parts)
        super().__init__(batches)
        self._num_parts, self._at_least = num_parts, at_least

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield from cut_batch(batch, self._num_parts, self._at_least)

    @property
    def is_split_over_ranks(self) -> bool:
        """Whether the batches are this rank's own already, see `dnis_torchrec.data.over_ranks.SplitsItself`."""
        return getattr(self._batches, "is_split_over_ranks", False)


def cut_batch(batch: Batch, num_parts: int, at_least: int = 1) -> Iterator[Batch]:
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
