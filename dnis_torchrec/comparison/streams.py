"""The alpha-validation split as training data, for methods that need no alpha: nobody wins by data."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Protocol

from torchrec.datasets.utils import Batch

from dnis_torchrec.data_over_ranks import for_counting
from dnis_torchrec.recipe import Recipe


class InterleavedBatches:
    """Several streams as one: every batch of each, spread evenly over the epoch.

    Iterating again iterates the streams again, so an epoch has the new order that they give it.

    Args:
        first: what rows are counted in, see `counted`; it can be iterated again and again.
        others: so can these.

    Example:
        >>> "".join(InterleavedBatches("abcdef", "XY"))
        'abXcdeYf'
    """

    def __init__(self, first: Iterable[Batch], *others: Iterable[Batch]) -> None:
        self._streams = (first, *others)
        self._lengths: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        if not self._lengths:
            self._lengths = [sum(1 for _ in stream) for stream in self._streams]
        placed = (_placed(stream, length) for stream, length in zip(self._streams, self._lengths, strict=True))
        return map(itemgetter(1), heapq.merge(*placed, key=itemgetter(0)))

    def counted(self) -> Iterator[Batch]:
        """What is counted of the first stream, see `dnis_torchrec.data_over_ranks.for_counting`.

        So rows are in the blocks that the training split alone puts them in, and ids in the order of its frequencies
        stay so. Counted with the others they would be out of order, and blocks would pay four bytes a row for saying
        which row is where: a third of a small table's bytes, that methods without a second row do not pay.
        """
        return iter(for_counting(self._streams[0]))


def _placed(stream: Iterable[Batch], length: int) -> Iterator[tuple[float, Batch]]:
    """(place in the epoch, in (0, 1), batch) for every batch."""
    return (((index + 0.5) / length, batch) for index, batch in enumerate(stream))


class JoinsItself(Protocol):
    """A training stream whose samples depend on what else is trained on, such as one that draws negatives."""

    def joined_with(self, validation: Iterable[Batch]) -> Iterable[Batch]:
        """The training stream of both splits together."""


def train_on_validation(recipe: Recipe) -> Recipe:
    """The recipe with its validation samples among the training samples; selection and test stay as they are.

    A training stream that can (see `JoinsItself`) takes the validation stream in; batches of others stand between its
    own.
    """
    data = recipe.data
    join = getattr(data.train, "joined_with", None)
    train = InterleavedBatches(data.train, data.validation) if join is None else join(data.validation)
    return replace(recipe, data=replace(data, train=train))
