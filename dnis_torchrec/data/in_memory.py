"""Samples held in memory, cut into TorchRec Batches without any Python per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check
from dnis_torchrec.data.labels import RankingBatch

SPLIT_RATIOS = (0.8, 0.05, 0.05, 0.1)
"""train, validation, selection, test: 8:1:1, with the middle part halved between the upper level
and early stopping."""


@dataclass(frozen=True, eq=False)
class Bags:
    """The bags of one multi-hot feature for all samples, in CSR form."""

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        rising = self.offsets.numel() > 0 and bool((self.offsets.diff() >= 0).all())
        check(
            rising and int(self.offsets[0]) == 0 and int(self.offsets[-1]) == self.values.numel(),
            "Bags.offsets",
            f"rising numbers from 0 to {self.values.numel()}",
            self.offsets[:4].tolist(),
        )

    @classmethod
    def of_lengths(cls, values: Tensor, lengths: Tensor) -> Bags:
        """The bags that `select` returns."""
        return cls(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))

    def select(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The bags of some samples."""
        starts = self.offsets.index_select(0, rows)
        lengths = self.offsets.index_select(0, rows + 1) - starts
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        shift = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=total)
        return self.values.index_select(0, shift + torch.arange(total)), lengths


def split_rows(
    num_samples: int, *, seed: int, group_size: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cuts the samples at random into train, validation, selection and test, in the ratios of
    `SPLIT_RATIOS`."""
    num_groups = num_samples // group_size
    check(
        num_groups >= 20,
        "split_rows",
        "at least 20 samples, or groups of them, for four splits",
        num_groups,
    )
    order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed))
    held_out = [int(ratio * num_groups) for ratio in SPLIT_RATIOS[1:]]
    split_of_group = torch.empty(num_groups, dtype=torch.uint8)
    for split, part in enumerate(order.split([num_groups - sum(held_out), *held_out])):
        split_of_group[part] = split
    split_of_row = split_of_group.repeat_interleave(group_size)
    train, validation, selection, test = (
        (split_of_row == split).nonzero().squeeze(1) for split in range(4)
    )
    return train, validation, selection, test


class InMemoryBatches:
    """Batches of a data set in memory, to be iterated again and again: each time is the next epoch."""

    def __init__(
        self,
        dense: Tensor,
        ids: Tensor,
        labels: Tensor,
        *,
        feature_names: Sequence[str],
        batch_size: int,
        shuffle: bool,
        seed: int,
        multi_hot: Mapping[str, Bags] | None = None,
        scalar_names: Sequence[str] = (),
        queries: Tensor | None = None,
        rows: Tensor | None = None,
        drop_last: bool = False,
    ) -> None:
        num_samples = len(labels)
        multi_hot = dict(multi_hot or {})
        place = "InMemoryBatches"
        check(batch_size >= 1, f"{place}.batch_size", "an integer >= 1", batch_size)
        for name, tensor in (("dense", dense), ("ids", ids)):
            shape = tuple(tensor.shape)
            matches = len(shape) == 2 and shape[0] == num_samples
            check(matches, f"{place}.{name}", f"{num_samples} rows, one per label", shape)
        check(
            ids.shape[1] == len(feature_names),
            f"{place}.ids",
            f"{len(feature_names)} columns",
            ids.shape[1],
        )
        for name, bags in multi_hot.items():
            received = bags.offsets.numel() - 1
            check(received == num_samples, f"feature {name!r}", f"{num_samples} bags", received)
        fits = len(scalar_names) in (0, dense.shape[1])
        check(fits, f"{place}.scalar_names", f"{dense.shape[1]} names, or none", len(scalar_names))
        keys = [*feature_names, *multi_hot, *scalar_names]
        check(len(set(keys)) == len(keys), f"{place}.feature_names", "distinct names", keys)
        self._dense, self._ids, self._labels = dense.float(), ids, labels.float()
        self._multi_hot = tuple(multi_hot.values())
        self._num_scalars, self._queries = len(scalar_names), queries
        self._keys = keys
        self._rows = torch.arange(num_samples) if rows is None else rows
        self._batch_size, self._shuffle, self._seed, self._drop_last = (
            batch_size,
            shuffle,
            seed,
            drop_last,
        )
        self.epoch = 0
        check(len(self) > 0, place, "at least one batch", f"{self._rows.numel()} samples")

    @property
    def rows(self) -> Tensor:
        """The samples served, as rows of the whole data set."""
        return self._rows

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        whole, rest = divmod(self._rows.numel(), self._batch_size)
        return whole + int(rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        order = self._rows
        if self._shuffle:
            # Torch's CPU generator reads 32 bits of a seed, so the two numbers are mixed before,
            # not put side by side.
            mixed = int(np.random.SeedSequence((self._seed, self.epoch)).generate_state(1)[0])
            generator = torch.Generator().manual_seed(mixed)
            order = order[torch.randperm(order.numel(), generator=generator)]
        self.epoch += 1
        return (self._batch(rows) for rows in order.split(self._batch_size)[: len(self)])

    def _batch(self, rows: Tensor) -> Batch:
        dense, labels = self._dense.index_select(0, rows), self._labels.index_select(0, rows)
        features = self._features(rows, dense)
        if self._queries is None:
            return Batch(dense, features, labels)
        return RankingBatch(dense, features, labels, self._queries.index_select(0, rows))

    def _features(self, rows: Tensor, dense: Tensor) -> KeyedJaggedTensor:
        batch_size = rows.numel()
        num_single = self._ids.shape[1]
        values = [self._ids.index_select(0, rows).t().reshape(-1).long()]
        lengths = [torch.ones(num_single * batch_size, dtype=torch.int64)]
        for bags in self._multi_hot:
            bag_values, bag_lengths = bags.select(rows)
            values.append(bag_values)
            lengths.append(bag_lengths)
        length_per_key = [batch_size] * num_single + [part.numel() for part in values[1:]]
        weights = None
        if self._num_scalars:
            weights = torch.cat([torch.ones(sum(length_per_key)), dense.t().reshape(-1)])
            values.append(torch.arange(self._num_scalars).repeat_interleave(batch_size))
            lengths.append(torch.ones(self._num_scalars * batch_size, dtype=torch.int64))
            length_per_key += [batch_size] * self._num_scalars
        return KeyedJaggedTensor(
            keys=self._keys,
            values=torch.cat(values),
            weights=weights,
            lengths=torch.cat(lengths),
            stride=batch_size,
            length_per_key=length_per_key,
        )
