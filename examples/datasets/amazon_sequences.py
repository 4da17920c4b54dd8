"""Reviews of Amazon's Sports and Outdoors as sequences: what a user reviewed before, and what came next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import SPLIT_RATIOS, Bags, RankingBatch
from dnis_torchrec.data.recipe import DataSplits
from examples.datasets.amazon_sports import FILE, PUBLISHER, read_reviews
from examples.datasets.implicit import KnownPositives
from examples.datasets.in_memory import frequency_rank
from examples.datasets.text_files import find_file

FEATURES = ("candidate", "history")
"""Both are read from the table of items."""


class SequenceBatches:
    """Histories and candidates, to be iterated again and again: each time is the next epoch, with new negatives."""

    def __init__(
        self,
        users: Tensor,
        history: Bags,
        following: Bags,
        known: KnownPositives,
        *,
        num_negatives: int,
        batch_size: int,
        seed: int,
        is_fixed: bool = False,
        is_ranking: bool = False,
    ) -> None:
        place = "SequenceBatches"
        check(batch_size > num_negatives, f"{place}.batch_size", f"at least {1 + num_negatives}", batch_size)
        check(len(users) > 0, place, "at least one history", 0)
        self._users, self._history, self._following, self._known = users, history, following, known
        self._group_size, self._groups_per_batch = 1 + num_negatives, batch_size // (1 + num_negatives)
        self._seed, self._is_fixed, self._is_ranking = seed, is_fixed or is_ranking, is_ranking
        self.epoch = 0

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return -(-len(self._users) // self._groups_per_batch)

    def __iter__(self) -> Iterator[Batch]:
        mixed = np.random.SeedSequence((self._seed, 0 if self._is_fixed else self.epoch)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        self.epoch += 1
        order = torch.randperm(len(self._users), generator=generator)
        return (self._batch(rows, generator) for rows in order.split(self._groups_per_batch))

    def _batch(self, rows: Tensor, generator: torch.Generator) -> Batch:
        rows = rows.repeat_interleave(self._group_size)
        history, following = self._history.select(rows), self._following.select(rows)
        candidates, lengths = following.values, following.lengths
        labels = torch.zeros(len(rows))
        labels[:: self._group_size] = 1
        is_drawn = (labels == 0).repeat_interleave(lengths)
        users = self._users[rows].repeat_interleave(lengths)
        candidates[is_drawn] = self._known.draw_negatives(users[is_drawn], generator)
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.cat([candidates, history.values]),
            lengths=torch.cat([lengths, history.lengths]),
            stride=len(rows),
            length_per_key=[len(candidates), len(history.values)],
        )
        dense = torch.zeros(len(rows), 0)
        return RankingBatch(dense, features, labels, rows) if self._is_ranking else Batch(dense, features, labels)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Reviews in the order of time, each with the items that its user had reviewed before."""

    users: Tensor
    items: Tensor
    history: Bags
    known: KnownPositives
    num_items: int

    def parts(self) -> tuple[Tensor, ...]:
        """The rows of train, validation, selection and test, one after the other in time."""
        number = len(self.items)
        sizes = [int(ratio * number) for ratio in SPLIT_RATIOS[1:]]
        return torch.arange(number).split([number - sum(sizes), *sizes])

    def reviews(self, rows: Tensor) -> tuple[Tensor, Bags, Bags]:
        """Users, histories and the item that followed, of some reviews."""
        history = self.history.select(rows)
        return self.users[rows], history, Bags.of_lengths(self.items[rows], torch.ones_like(rows))

    def whole_sequences(self, rows: Tensor) -> tuple[Tensor, Bags, Bags]:
        """Users, the history of the last review of each, and the items that followed each item of it."""
        last = torch.zeros(int(self.users.max()) + 1, dtype=torch.int64).scatter_reduce_(
            0, self.users[rows], rows, "amax", include_self=False
        )
        users, history, item = self.reviews(last[self.users[rows].unique()])
        following = history.values.roll(-1)
        following[history.offsets[1:] - 1] = item.values
        return users, history, Bags(following, history.offsets)

    def known_in(self, rows: Tensor) -> KnownPositives:
        """The pairs of some reviews and of their histories."""
        before = self.history.select(rows)
        users = torch.cat([self.users[rows], self.users[rows].repeat_interleave(before.lengths)])
        return KnownPositives(users, torch.cat([self.items[rows], before.values]), self.num_items)

    def clicks(self, *, num_negatives: int, batch_size: int, seed: int) -> DataSplits:
        """Splits in the order of time: every review is a click, its negatives are none."""
        train, *measured = self.parts()
        batches = partial(SequenceBatches, num_negatives=num_negatives, batch_size=batch_size)
        validation, selection, test = (
            batches(*self.reviews(rows), self.known, seed=4 * seed + number, is_fixed=number > 1)
            for number, rows in enumerate(measured, 1)
        )
        learnt = batches(*self.reviews(train), self.known_in(train), seed=4 * seed)
        return DataSplits(train=learnt, validation=validation, selection=selection, test=test, is_by_time=True)

    def next_items(
        self, *, num_negatives: int, batch_size: int, seed: int, num_queries: int, num_ranked: int
    ) -> DataSplits:
        """Splits in the order of time: train has whole sequences, test ranks what came next."""
        train, *_, test = self.parts()
        ranked = test[torch.linspace(0, len(test) - 1, min(num_queries, len(test))).long()]
        batches = partial(SequenceBatches, batch_size=batch_size)
        return replace(
            self.clicks(num_negatives=num_negatives, batch_size=batch_size, seed=seed),
            train=batches(
                *self.whole_sequences(train), self.known_in(train), num_negatives=num_negatives, seed=4 * seed
            ),
            test=batches(
                *self.reviews(ranked), self.known, num_negatives=num_ranked - 1, seed=4 * seed + 3, is_ranking=True
            ),
        )


def load_sequences(folder: Path, *, longest: int) -> Sequences:
    """Loads every review whose user had reviewed something before."""
    reviews = read_reviews(find_file(folder, [FILE], PUBLISHER))
    users, items, num_items = reviews.users, reviews.items, reviews.num_embeddings["item"]
    num_held_out = sum(int(ratio * len(items)) for ratio in SPLIT_RATIOS[1:])
    items = frequency_rank(items[: len(items) - num_held_out], num_items)[items]
    order = torch.argsort(users, stable=True)  # the reviews of one user behind each other, in the order of time
    begins = torch.searchsorted(users[order].contiguous(), users[order].contiguous())
    place = torch.arange(len(order))
    starts = torch.maximum(begins, place - longest)
    lengths = torch.empty_like(place)
    first = torch.empty_like(place)
    lengths[order], first[order] = place - starts, starts
    rows = (lengths > 0).nonzero().squeeze(1)
    check(len(rows) > 0, FILE, "a user with two reviews", "none", "take a larger part of the file")
    kept, counted = first[rows], lengths[rows]
    ends = counted.cumsum(0)
    values = torch.arange(int(ends[-1])) + (kept - (ends - counted)).repeat_interleave(counted)
    return Sequences(
        users=users[rows],
        items=items[rows],
        history=Bags.of_lengths(items[order][values], counted),
        known=KnownPositives(users, items, num_items),
        num_items=num_items,
    )
