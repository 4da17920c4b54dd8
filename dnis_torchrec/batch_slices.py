"""Samples of a batch, cut out of it: for an upper step that takes less than a whole one, and for ranks that share one.

Shapes: B batch, F features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import describe


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
        raise TypeError(describe("batch", "expected a dataclass, as TorchRec's Batch is", type(batch).__name__))
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
        lengths=lengths.reshape(-1),
        stride=last - first,
    )
