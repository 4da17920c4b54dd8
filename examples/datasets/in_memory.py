"""A data set held in memory: its samples, its splits, and its rows in the order of their frequency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dnis_torchrec.data.batches import Bags, InMemoryBatches, split_rows
from dnis_torchrec.data.recipe import DataSplits


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """A whole data set as tensors; the splits of it share them."""

    dense: Tensor
    ids: Tensor
    labels: Tensor
    feature_names: tuple[str, ...]
    multi_hot: Mapping[str, Bags] = field(default_factory=dict)
    num_embeddings: Mapping[str, int]
    scalar_names: tuple[str, ...] = ()
    group_size: int = 1
    is_by_time: bool = False
    """Whether samples stand in the order of time, and the latest ones are to be those of test."""

    def rows_of_splits(self, seed: int) -> tuple[Tensor, ...]:
        """Rows of train, validation, selection and test: at random, or one after the other."""
        parts = split_rows(len(self.labels), seed=seed, group_size=self.group_size)
        return torch.arange(len(self.labels)).split([len(part) for part in parts]) if self.is_by_time else parts

    def sorted_by_frequency(self, train_rows: Tensor) -> Samples:
        """The same samples with every table's rows numbered from the most to the least frequent."""
        ids = self.ids.clone()
        for column, name in enumerate(self.feature_names):
            rank = frequency_rank(self.ids[train_rows, column], self.num_embeddings[name])
            ids[:, column] = rank.to(ids.dtype)[ids[:, column].long()]
        multi_hot = {}
        for name, bags in self.multi_hot.items():
            rank = frequency_rank(bags.select(train_rows).values, self.num_embeddings[name])
            multi_hot[name] = Bags(rank[bags.values], bags.offsets)
        return replace(self, ids=ids, multi_hot=multi_hot)

    def split(self, *, batch_size: int, seed: int) -> DataSplits:
        """Splits the samples 8:1:1 and serves them in batches."""
        parts = self.rows_of_splits(seed)
        shuffled = (True, True, False, False)
        train, validation, selection, test = (
            InMemoryBatches(
                self.dense,
                self.ids,
                self.labels,
                feature_names=self.feature_names,
                multi_hot=self.multi_hot,
                scalar_names=self.scalar_names,
                rows=rows,
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
            )
            for rows, shuffle in zip(parts, shuffled, strict=True)
        )
        return DataSplits(
            train=train, validation=validation, selection=selection, test=test, is_by_time=self.is_by_time
        )


def frequency_rank(ids: Tensor, num_embeddings: int) -> Tensor:
    """Row -> its place in falling order of frequency, int64; ties keep their order."""
    counts = torch.bincount(ids, minlength=num_embeddings)
    rank = torch.empty(num_embeddings, dtype=torch.int64)
    rank[torch.argsort(counts, descending=True, stable=True)] = torch.arange(num_embeddings)
    return rank
