"""Reviews of Amazon's Sports and Outdoors as sequences: what a user reviewed before, and what came next.

Splits are by time: train ends before validation begins, and so on. So about a tenth of the histories of the test split
end in the training split, as they would in a shop.

Shapes: n reviews with a history, C candidates of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.data.in_memory import SPLIT_RATIOS, Bags, InMemoryBatches
from dnis_torchrec.data.recipe import DataSplits
from examples.datasets.amazon_sports import FILE, NUM_NEGATIVES, PUBLISHER, read_reviews
from examples.datasets.implicit import KnownPositives
from examples.datasets.in_memory import frequency_rank
from examples.datasets.text_files import find_file

FEATURES = ("candidate", "history")
"""Both are read from the table of items."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Reviews in the order of time, each with the items that its user had reviewed before.

    Attributes:
        users: ``(n,)`` int64.
        items: ``(n,)`` int64, numbered by falling frequency in the training part.
        history: n bags, oldest item first, none of them empty.
        known: pairs of a user and an item that are no negatives.
        num_items: size of the catalogue.
    """

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

    def batches(
        self, rows: Tensor, *, num_negatives: int, batch_size: int, seed: int, is_ranking: bool = False
    ) -> InMemoryBatches:
        """Reviews with negatives behind them, drawn once and uniformly from what their user never reviewed.

        Args:
            rows: reviews.
            num_negatives: of each, so that C is one more.
            batch_size: B.
            seed: of the negatives and of the order.
            is_ranking: batches of type `RankingBatch`, each review a query, in the order of time; else they are
                shuffled.
        """
        num_candidates = 1 + num_negatives
        users = self.users[rows].repeat_interleave(num_negatives)
        negatives = self.known.draw_negatives(users, torch.Generator().manual_seed(seed)).view(-1, num_negatives)
        candidates = torch.cat([self.items[rows, None], negatives], dim=1).flatten()
        labels = torch.zeros(len(rows), num_candidates)
        labels[:, 0] = 1
        queries = torch.arange(len(rows)).repeat_interleave(num_candidates) if is_ranking else None
        return InMemoryBatches(
            torch.ones(len(candidates), 1),
            candidates[:, None],
            labels.flatten(),
            feature_names=FEATURES[:1],
            multi_hot={FEATURES[1]: Bags.of_lengths(*self.history.select(rows.repeat_interleave(num_candidates)))},
            queries=queries,
            batch_size=batch_size,
            shuffle=not is_ranking,
            seed=seed,
        )

    def split(self, *, batch_size: int, seed: int, num_queries: int, num_ranked: int) -> DataSplits:
        """Splits in the order of time.

        Args:
            batch_size: B.
            seed: of the negatives and the order of every epoch.
            num_queries: judge test by ranking so many of its reviews, evenly spread, among `num_ranked` candidates; 0
                judges all of it as clicks.
            num_ranked: candidates of a query.
        """
        train, validation, selection, test = self.parts()
        clicks = [
            self.batches(rows, num_negatives=NUM_NEGATIVES, batch_size=batch_size, seed=4 * seed + number)
            for number, rows in enumerate((train, validation, selection))
        ]
        if num_queries:
            test = test[torch.linspace(0, len(test) - 1, min(num_queries, len(test))).long()]
        judged = self.batches(
            test,
            num_negatives=num_ranked - 1 if num_queries else NUM_NEGATIVES,
            batch_size=batch_size,
            seed=4 * seed + 3,
            is_ranking=bool(num_queries),
        )
        return DataSplits(train=clicks[0], validation=clicks[1], selection=clicks[2], test=judged)


def load_sequences(folder: Path, *, longest: int) -> Sequences:
    """Loads every review whose user had reviewed something before.

    Args:
        folder: holds `examples.datasets.amazon_sports.FILE`, plain or ``.gz``, sorted by time.
        longest: items of a history at most: the latest ones.

    Raises:
        ValueError: as `examples.datasets.amazon_sports.load_amazon_sports`, or if no user has two reviews.
    """
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
