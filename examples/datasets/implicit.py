"""Implicit feedback: interactions as positives, items sampled at random as negatives, in TorchRec Batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import InMemoryBatches
from dnis_torchrec.data.recipe import DataSplits
from examples.datasets.ncf import LeaveOneOut

FEATURES = ("user", "item")
HELD_OUT_RATIO = 0.05
"""Share of a user's interactions that goes to validation, and again to selection."""


class KnownPositives:
    """Pairs (user, item) that must never be drawn as negatives."""

    def __init__(self, users: Tensor, items: Tensor, num_items: int) -> None:
        self.num_items = num_items
        self._pairs = (users * num_items + items).unique()
        num_known = torch.bincount(self._pairs.div(num_items, rounding_mode="floor"))
        most = int(num_known.argmax()) if num_known.numel() else 0
        leaves_one = not num_known.numel() or int(num_known[most]) < num_items
        check(leaves_one, f"user {most}", f"an item of {num_items} left to be a negative", "none")

    def contains(self, users: Tensor, items: Tensor) -> Tensor:
        """Returns whether each pair is known, bool."""
        if not self._pairs.numel():
            return torch.zeros_like(users, dtype=torch.bool)
        pairs = users * self.num_items + items
        place = torch.searchsorted(self._pairs, pairs).clamp(max=self._pairs.numel() - 1)
        return self._pairs[place] == pairs

    def joined_with(self, other: KnownPositives) -> KnownPositives:
        """The pairs that either of them knows, of the same catalogue."""
        check(other.num_items == self.num_items, "known pairs", f"{self.num_items} items", other.num_items)
        pairs = torch.cat([self._pairs, other._pairs])
        users, items = pairs.div(self.num_items, rounding_mode="floor"), pairs % self.num_items
        return KnownPositives(users, items, self.num_items)

    def draw_negatives(self, users: Tensor, generator: torch.Generator) -> Tensor:
        """One item per user, uniform over those that are not known."""
        items = torch.randint(self.num_items, users.shape, generator=generator)
        redrawn = self.contains(users, items).nonzero().squeeze(1)
        while redrawn.numel():
            items[redrawn] = torch.randint(self.num_items, redrawn.shape, generator=generator)
            redrawn = redrawn[self.contains(users[redrawn], items[redrawn])]
        return items


class ImplicitBatches:
    """Positives with freshly drawn negatives, to be iterated again and again: each time is the next epoch."""

    def __init__(
        self,
        users: Tensor,
        items: Tensor,
        known: KnownPositives,
        *,
        num_negatives: int,
        batch_size: int,
        seed: int,
        is_fixed: bool = False,
    ) -> None:
        self._positives_per_batch = batch_size // (1 + num_negatives)
        place = "ImplicitBatches"
        check(self._positives_per_batch > 0, f"{place}.batch_size", f"at least {1 + num_negatives}", batch_size)
        check(users.numel() > 0, place, "at least one interaction", 0)
        self._users, self._items, self._known = users, items, known
        self._num_negatives, self._batch_size, self._seed = num_negatives, batch_size, seed
        self._is_fixed = is_fixed
        self.epoch = 0

    def joined_with(self, other: ImplicitBatches) -> ImplicitBatches:
        """Both splits as one: a positive of either is a negative of neither."""
        both = KnownPositives(other._users, other._items, self._known.num_items)
        return ImplicitBatches(
            torch.cat([self._users, other._users]),
            torch.cat([self._items, other._items]),
            self._known.joined_with(both),
            num_negatives=self._num_negatives,
            batch_size=self._batch_size,
            seed=self._seed,
            is_fixed=self._is_fixed,
        )

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return -(-self._users.numel() // self._positives_per_batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch = 0 if self._is_fixed else self.epoch
        self.epoch += 1
        mixed = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1)[0])
        generator = torch.Generator().manual_seed(mixed)
        order = torch.randperm(self._users.numel(), generator=generator)
        return (self._batch(rows, generator) for rows in order.split(self._positives_per_batch))

    def _batch(self, rows: Tensor, generator: torch.Generator) -> Batch:
        groups = 1 + self._num_negatives
        negatives = self._known.draw_negatives(self._users[rows].repeat(self._num_negatives), generator)
        users = self._users[rows].repeat_interleave(groups)
        items = torch.cat([self._items[rows], negatives]).view(groups, -1).t().reshape(-1)
        labels = torch.zeros(users.numel())
        labels[::groups] = 1.0
        return Batch(
            dense_features=torch.zeros(users.numel(), 0),
            sparse_features=KeyedJaggedTensor(
                keys=list(FEATURES),
                values=torch.cat([users, items]),
                lengths=torch.ones(2 * users.numel(), dtype=torch.int64),
                stride=users.numel(),
                length_per_key=[users.numel()] * 2,
            ),
            labels=labels,
        )


def split_per_user(
    users: Tensor, *, seed: int, held_out_ratio: float = HELD_OUT_RATIO
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts interactions into train, validation and selection at random, for each user alone."""
    order = torch.randperm(users.numel(), generator=torch.Generator().manual_seed(seed))
    order = order[users[order].argsort(stable=True)]
    _, user, sizes = users[order].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(users.numel()) - (sizes.cumsum(0) - sizes)[user]
    held_out = (held_out_ratio * sizes).long().clamp(min=1)
    held_out[sizes < 3] = 0
    part = torch.where(place < held_out[user], 1, torch.where(place < 2 * held_out[user], 2, 0))
    train, validation, selection = (order[part == number].sort().values for number in range(3))
    return train, validation, selection


def split_leave_one_out(
    protocol: LeaveOneOut, *, num_negatives: int, batch_size: int, test_batch_size: int, seed: int
) -> DataSplits:
    """The splits of top-k recommendation: sampled negatives to learn from, published candidates to be judged by."""
    users, items, num_items = protocol.train_users, protocol.train_items, protocol.num_items
    train, validation, selection = split_per_user(users, seed=seed)
    known_in_train = KnownPositives(users[train], items[train], num_items)
    known = KnownPositives(users, items, num_items)

    def batches(rows: Tensor, known: KnownPositives, number: int, *, is_fixed: bool = False) -> ImplicitBatches:
        return ImplicitBatches(
            users[rows],
            items[rows],
            known,
            num_negatives=num_negatives,
            batch_size=batch_size,
            seed=3 * seed + number,
            is_fixed=is_fixed,
        )

    return DataSplits(
        train=batches(train, known_in_train, 0),
        validation=batches(validation, known, 1),
        selection=batches(selection, known, 2, is_fixed=True),
        test=candidate_batches(protocol, batch_size=test_batch_size),
    )


def candidate_queries(protocol: LeaveOneOut) -> Tensor:
    """The test case that each candidate belongs to: first of every case's positive, then of all negatives."""
    sizes = protocol.negatives.offsets.diff()
    cases = torch.arange(sizes.numel())
    return torch.cat([cases, cases.repeat_interleave(sizes)])


def candidate_batches(protocol: LeaveOneOut, *, batch_size: int) -> InMemoryBatches:
    """Every test case as a query: its positive (label 1) and its published negatives (label 0)."""
    queries, negatives = candidate_queries(protocol), protocol.negatives.values
    items = torch.cat([protocol.test_items, negatives])
    labels = torch.cat([torch.ones(protocol.test_items.numel()), torch.zeros(negatives.numel())])
    order = queries.argsort(stable=True)
    return InMemoryBatches(
        torch.zeros(queries.numel(), 0),
        torch.stack([protocol.test_users[queries], items], dim=1)[order],
        labels[order],
        queries=queries[order],
        feature_names=FEATURES,
        batch_size=batch_size,
        shuffle=False,
        seed=0,
    )
