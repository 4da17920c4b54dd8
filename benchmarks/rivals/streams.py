"""The alpha-validation split as training data, for methods that need no alpha: nobody wins by data."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Protocol, runtime_checkable

from torchrec.datasets.utils import Batch

from dnis_torchrec.data.over_ranks import all_samples
from dnis_torchrec.data.recipe import Recipe


class InterleavedBatches:
    """Several streams as one: every batch of each, spread evenly over the epoch."""

    def __init__(self, *streams: Iterable[Batch]) -> None:
        self._streams = streams
        self._lengths: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        if not self._lengths:
            self._lengths = [sum(1 for _ in stream) for stream in self._streams]
        placed = (_placed(stream, length) for stream, length in zip(self._streams, self._lengths, strict=True))
        return map(itemgetter(1), heapq.merge(*placed, key=itemgetter(0)))


def _placed(stream: Iterable[Batch], length: int) -> Iterator[tuple[float, Batch]]:
    """(place in the epoch, in (0, 1), batch) for every batch."""
    return (((index + 0.5) / length, batch) for index, batch in enumerate(stream))


class CountedAs:
    """Training batches whose rows are counted in others: blocks are those of the training split
    alone."""

    def __init__(self, batches: Iterable[Batch], counted: Iterable[Batch]) -> None:
        self._batches, self._counted = batches, counted

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def each_sample(self) -> Iterator[Batch]:
        """Yields the batches that are counted."""
        return iter(all_samples(self._counted))


@runtime_checkable
class JoinsItself(Protocol):
    """A training stream whose samples depend on what else is trained on, such as one that draws
    negatives."""

    def joined_with(self, validation: Iterable[Batch]) -> Iterable[Batch]:
        """The training stream of both splits together."""


def train_on_validation(recipe: Recipe) -> Recipe:
    """The recipe with its validation samples among the training samples; selection and test stay as
    they are."""
    train, validation = recipe.data.train, recipe.data.validation
    joined = train.joined_with(validation) if isinstance(train, JoinsItself) else InterleavedBatches(train, validation)
    return replace(recipe, data=replace(recipe.data, train=CountedAs(joined, train)))
