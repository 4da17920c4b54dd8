"""Batches that move as a whole, and samples cut out of one: for an upper step that takes less, for
ranks that share it."""

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
    """A batch that moves with all of its fields; TorchRec's own moves its three, each of which has
    to be there."""

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
        moving = {
            name: part
            for name, part in parts.items()
            if isinstance(part, Tensor | KeyedJaggedTensor)
        }
        return dataclasses.replace(self, **{name: change(part) for name, part in moving.items()})


class CutBatches:
    """Batches that are cut out of others, which say what epoch it is."""

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
    """Samples ``first <= i < last`` of a batch."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise TypeError(
            describe("batch", "a dataclass, as TorchRec's Batch is", type(batch).__name__)
        )
    fields = {
        field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init
    }
    sliced = {name: _slice(value, first, last) for name, value in fields.items()}
    return dataclasses.replace(batch, **sliced)


def _slice(value: Any, first: int, last: int) -> Any:
    if isinstance(value, KeyedJaggedTensor):
        return _slice_features(value, first, last)
    return value[first:last] if isinstance(value, Tensor) else value


def _slice_features(features: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise NotImplementedError(
            describe("batch", "supported is one batch size for all features", "several")
        )
    num_features, stride = len(features.keys()), features.stride()
    lengths = features.lengths().view(num_features, stride)[:, first:last]
    starts = torch.arange(num_features) * stride
    offsets = features.offsets().cpu()
    spans = list(
        zip(offsets[starts + first].tolist(), offsets[starts + last].tolist(), strict=True)
    )
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat([features.values()[begin:end] for begin, end in spans]),
        weights=None
        if weights is None
        else torch.cat([weights[begin:end] for begin, end in spans]),
        lengths=lengths.reshape(
            -1
        ).contiguous(),  # of one sample it would be a view, which no collective takes
        stride=last - first,
    )


class BatchParts(CutBatches):
    """The batches of a stream, each cut into so many parts of equal size (the last ones may be a
    sample smaller)."""

    def __init__(self, batches: Iterable[Batch], num_parts: int, at_least: int = 1) -> None:
        check(num_parts >= 1, "num_parts", "at least 1", num_parts)
        super().__init__(batches)
        self._num_parts, self._at_least = num_parts, at_least

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield from cut_batch(batch, self._num_parts, self._at_least)

    @property
    def is_split_over_ranks(self) -> bool:
        """Whether the batches are this rank's own already, see
        `dnis_torchrec.data.over_ranks.SplitsItself`."""
        return getattr(self._batches, "is_split_over_ranks", False)


def cut_batch(batch: Batch, num_parts: int, at_least: int = 1) -> Iterator[Batch]:
    """The parts of a batch, in the order of its samples."""
    batch_size = batch.sparse_features.stride()
    num_parts = min(num_parts, batch_size // at_least)
    if num_parts < 2:
        yield batch
        return
    bounds = torch.linspace(0, batch_size, num_parts + 1).round().long().tolist()
    for first, last in itertools.pairwise(bounds):
        yield slice_of(batch, first, last)
