"""Batches cut into parts along the samples, so that an upper step can take less than a whole validation batch.

Shapes: B batch, F features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, describe


class BatchParts:
    """The batches of a stream, each cut into so many parts of equal size (the last ones may be a sample smaller).

    An upper step costs about as much as the samples that it sees; what it learns from half of them is noisier, and the
    running mean of alpha's gradients is there for noise. A pass over the stream then takes that many more steps. A
    batch of fewer samples gives that many parts of one. Local. What is split over ranks after it was cut gives them the
    samples that one process alone would take.

    Args:
        batches: can be iterated again and again; its attributes ``epoch`` and ``is_split_over_ranks``, if it has them,
            are passed on.
        num_parts: parts of a batch; 1 leaves it whole.

    Raises:
        ValueError: if `num_parts` is below 1.

    Example:
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 0, 1]), lengths=torch.tensor([2, 1]))
        >>> batch = Batch(torch.zeros(2, 1), kjt, torch.ones(2))
        >>> [part.sparse_features.values().tolist() for part in BatchParts([batch], 2)]
        [[3, 0], [1]]
    """

    def __init__(self, batches: Iterable[Batch], num_parts: int) -> None:
        check(num_parts >= 1, "num_parts", "expected at least 1", num_parts)
        self._batches, self._num_parts = batches, num_parts

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield from cut(batch, self._num_parts)

    def __getattr__(self, name: str) -> object:
        if name in ("epoch", "is_split_over_ranks"):
            return getattr(self._batches, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        """`epoch` is the batches' own: a resumed search sets it."""
        if name == "epoch":
            self._batches.epoch = value  # type: ignore[attr-defined]
        else:
            super().__setattr__(name, value)


def cut(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """The parts of a batch, in the order of its samples.

    Args:
        batch: a Batch or a dataclass that extends it; whatever tensor it holds has B rows.
        num_parts: at most so many; never an empty one.

    Raises:
        NotImplementedError: for features of variable batch size.
    """
    features, batch_size = batch.sparse_features, batch.sparse_features.stride()
    if num_parts == 1:
        yield batch
        return
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        requirement = "expected one batch size for all features (stride), the only kind that can be cut"
        raise NotImplementedError(describe("KeyedJaggedTensor", requirement, "a batch size per feature"))
    bounds = torch.linspace(0, batch_size, min(num_parts, max(batch_size, 1)) + 1).round().long().tolist()
    held = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    for first, last in itertools.pairwise(bounds):
        rows = {name: tensor[first:last] for name, tensor in tensors.items()}
        yield replace(batch, sparse_features=_samples(features, first, last), **rows)


def _samples(features: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    """Samples [first, last) of every key."""
    keys, batch_size = features.keys(), features.stride()
    values, weights = features.values(), features.weights_or_none()
    offsets = features.offsets().view(-1)
    begins = (torch.arange(len(keys), device=offsets.device) * batch_size + first).tolist()
    spans = [(int(offsets[begin]), int(offsets[begin + last - first])) for begin in begins]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([values[start:end] for start, end in spans]),
        weights=None if weights is None else torch.cat([weights[start:end] for start, end in spans]),
        lengths=features.lengths().view(len(keys), batch_size)[:, first:last].reshape(-1),
        stride=last - first,
    )
