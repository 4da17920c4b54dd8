"""Reviews of Amazon's Sports and Outdoors as clicks: every review is a positive, its negatives are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.checks import describe
from dnis_torchrec.data.batches import Bags
from examples.datasets.implicit import KnownPositives
from examples.datasets.in_memory import Samples
from examples.datasets.tab_separated import read_columns
from examples.datasets.text_files import find_file, number_rows

PUBLISHER = "Amazon reviews 2014 (Sports and Outdoors, 5-core), as amazon_sports_seq.tsv"
FILE = "amazon_sports_seq.tsv"
NUM_NEGATIVES = 2
OF_ITEM = ("brand", "cat1", "cat2", "cat3", "leaf")
"""Single-id fields that belong to the item, and come with it where it is drawn."""
ATTRIBUTES = "attrs"
"""The multi-hot field of the item: ids with blanks between them."""


@dataclass(frozen=True, eq=False)
class Reviews:
    """Reviews, and the fields of the items."""

    users: Tensor
    items: Tensor
    item_fields: Tensor
    attributes: Bags
    num_embeddings: dict[str, int]


def load_amazon_sports(folder: Path, *, seed: int, is_by_time: bool = False) -> Samples:
    """Loads every review with its negatives behind it: items that its user never reviewed, drawn uniformly. The file is
    in the order of time."""
    reviews = read_reviews(find_file(folder, [FILE], PUBLISHER))
    group_size = 1 + NUM_NEGATIVES
    users = reviews.users.repeat_interleave(group_size)
    known = KnownPositives(reviews.users, reviews.items, reviews.num_embeddings["item"])
    drawn = known.draw_negatives(
        reviews.users.repeat_interleave(NUM_NEGATIVES), torch.Generator().manual_seed(seed)
    ).view(-1, NUM_NEGATIVES)
    items = torch.cat([reviews.items[:, None], drawn], dim=1).flatten()
    labels = torch.zeros(len(reviews.users), group_size)
    labels[:, 0] = 1
    samples = Samples(
        dense=torch.ones(items.numel(), 1),
        ids=torch.cat([users[:, None], items[:, None], reviews.item_fields[items]], dim=1),
        labels=labels.flatten(),
        feature_names=("user", "item", *OF_ITEM),
        multi_hot={ATTRIBUTES: reviews.attributes.select(items)},
        num_embeddings=reviews.num_embeddings,
        group_size=group_size,
        is_by_time=is_by_time,
    )
    return samples.sorted_by_frequency(samples.rows_of_splits(seed)[0])


@lru_cache(maxsize=1)
def read_reviews(path: Path) -> Reviews:
    """Reads the file; distinct values become rows of a table, whatever they are."""
    frame = read_columns(path, dict.fromkeys(("user", "item", *OF_ITEM), np.int64) | {ATTRIBUTES: str})
    of_items = frame.drop_duplicates("item").sort_values("item")
    lists = of_items[ATTRIBUTES].str.split()
    try:
        attributes = lists.explode().dropna().astype(np.int64)
    except (ValueError, OverflowError) as error:
        requirement = f"integers with blanks between them in {ATTRIBUTES!r}"
        raise ValueError(describe(path.name, requirement, error, "download it again")) from error
    codes = {name: number_rows(frame[name]) for name in ("user", "item")}
    codes |= {name: number_rows(of_items[name]) for name in OF_ITEM} | {ATTRIBUTES: number_rows(attributes)}
    return Reviews(
        users=codes["user"][0],
        items=codes["item"][0],
        item_fields=torch.stack([codes[name][0] for name in OF_ITEM], dim=1),
        attributes=Bags.of_lengths(codes[ATTRIBUTES][0], torch.tensor(lists.str.len().to_numpy())),
        num_embeddings={name: rows for name, (_, rows) in codes.items()},
    )
