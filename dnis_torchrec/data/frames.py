"""A data frame as batches: columns of any type become dense features, rows of tables and labels, in
four splits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.frame_columns import (
    Frame,
    FrameColumns,
    Ids,
    frame_of,
    id_bags_of,
    ids_of,
    labels_of,
    names_of,
    numbers_of,
    order_in_time,
)
from dnis_torchrec.data.in_memory import Bags, InMemoryBatches, split_rows
from dnis_torchrec.data.recipe import DataSplits

UNSEEN_ROW = 0
"""The row of all ids that no training sample has, in every table."""


@dataclass(frozen=True, kw_only=True)
class FrameSplits(DataSplits):
    """The splits of a frame, see `DataSplits.from_frame`."""

    encoder: FrameEncoder
    is_binary: bool


def splits_of_frame(
    frame: Frame,
    *,
    label: Hashable,
    dense: Sequence[Hashable],
    ids: Sequence[str],
    bags: Sequence[str],
    time: Hashable | None,
    batch_size: int,
    seed: int,
) -> FrameSplits:
    """See `DataSplits.from_frame`."""
    lists = {
        "dense": names_of("dense", dense),
        "ids": names_of("ids", ids),
        "bags": names_of("bags", bags),
    }
    columns = FrameColumns(label=label, time=time, **lists)
    frame = frame_of(frame, columns.all, columns.features)
    labels, parsed = labels_of(frame[columns.label]), _Parsed.of(frame, columns)
    splits = _split(frame, columns.time, seed)
    encoder = FrameEncoder(columns, parsed, splits[0])
    encoded, shuffled = encoder.encoded(parsed), (True, True, False, False)
    train, validation, selection, test = (
        encoded.batches(
            torch.from_numpy(labels.astype(np.float32)),
            rows=rows,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
        )
        for rows, shuffle in zip(splits, shuffled, strict=True)
    )
    is_binary = bool(np.isin(labels, (0, 1)).all())
    return FrameSplits(
        train=train,
        validation=validation,
        selection=selection,
        test=test,
        encoder=encoder,
        is_binary=is_binary,
    )


def _split(frame: pd.DataFrame, time: Hashable | None, seed: int) -> Sequence[Tensor]:
    parts = split_rows(len(frame), seed=seed)
    if time is None:
        return parts
    order = torch.from_numpy(order_in_time(frame[time]))
    return order.split([len(part) for part in parts])


class FrameEncoder:
    """What turns rows of a frame into what a model reads, as learned of training samples."""

    def __init__(self, columns: FrameColumns, parsed: _Parsed, training: Tensor) -> None:
        chosen = np.zeros(parsed.num_rows, bool)
        chosen[training.numpy()] = True
        self._columns = columns
        self._scaled = {name: _Scaled(numbers[chosen]) for name, numbers in parsed.dense.items()}
        self._rows = {name: _Rows(feature, chosen) for name, feature in parsed.features.items()}
        self.num_embeddings = {name: len(rows) for name, rows in self._rows.items()}
        self.num_dense = max(1, len(self._scaled))

    def __call__(self, frame: Frame) -> tuple[Tensor, KeyedJaggedTensor]:
        """What a model reads of a frame, such as new samples to be served."""
        columns = self._columns
        parsed = _Parsed.of(
            frame_of(frame, (*columns.dense, *columns.features), columns.features), columns
        )
        labels, all_rows = torch.zeros(parsed.num_rows), parsed.num_rows
        batches = self.encoded(parsed).batches(
            labels, rows=None, batch_size=all_rows, shuffle=False, seed=0
        )
        batch = next(iter(batches))
        return batch.dense_features, batch.sparse_features

    def encoded(self, parsed: _Parsed) -> _Encoded:
        """The rows as tensors."""
        dense = [scaled(parsed.dense[name]) for name, scaled in self._scaled.items()]
        rows = {name: self._rows[name](feature.ids) for name, feature in parsed.features.items()}
        lengths = {name: feature.lengths for name, feature in parsed.features.items()}
        single = [name for name, of_bags in lengths.items() if of_bags is None]
        bags = {name: of_bags for name, of_bags in lengths.items() if of_bags is not None}
        nothing = torch.zeros(parsed.num_rows, 1)
        return _Encoded(
            dense=torch.stack(dense, dim=1) if dense else nothing,
            ids=torch.stack([rows[name] for name in single], dim=1)
            if single
            else nothing[:, :0].int(),
            feature_names=tuple(single),
            multi_hot={
                name: Bags.of_lengths(rows[name], torch.from_numpy(of_bags))
                for name, of_bags in bags.items()
            },
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Encoded:
    """Samples as tensors, see `InMemoryBatches`."""

    dense: Tensor
    ids: Tensor
    feature_names: tuple[str, ...]
    multi_hot: Mapping[str, Bags]

    def batches(
        self, labels: Tensor, *, rows: Tensor | None, batch_size: int, shuffle: bool, seed: int
    ) -> InMemoryBatches:
        return InMemoryBatches(
            self.dense,
            self.ids,
            labels,
            feature_names=self.feature_names,
            multi_hot=self.multi_hot,
            rows=rows,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
        )


@dataclass(frozen=True, eq=False)
class _Feature:
    """Ids of all rows, one after the other, and how many each row has; None of one each."""

    ids: Ids
    lengths: np.ndarray | None

    def codes_of(self, chosen: np.ndarray) -> np.ndarray:
        """Of the rows for which `chosen`, ``(n,)`` bool, holds."""
        return self.ids.codes[chosen if self.lengths is None else np.repeat(chosen, self.lengths)]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Parsed:
    """Columns of a frame, before anything is learned of them."""

    num_rows: int
    dense: Mapping[Hashable, np.ndarray]
    features: Mapping[str, _Feature]

    @classmethod
    def of(cls, frame: pd.DataFrame, columns: FrameColumns) -> _Parsed:
        single = {name: _Feature(ids_of(frame[name]), None) for name in columns.ids}
        bags = {name: _Feature(*id_bags_of(frame[name])) for name in columns.bags}
        dense = {name: numbers_of(frame[name]) for name in columns.dense}
        return cls(num_rows=len(frame), dense=dense, features=single | bags)


class _Scaled:
    """A dense feature: mean 0 and variance 1 over the training samples, 0 where a number is
    missing."""

    def __init__(self, training: np.ndarray) -> None:
        known = training[~np.isnan(training)]
        self._mean = float(known.mean()) if len(known) else 0.0
        self._deviation = (float(known.std()) if len(known) else 0.0) or 1.0

    def __call__(self, numbers: np.ndarray) -> Tensor:
        """``(n,)`` float32."""
        return torch.from_numpy(np.nan_to_num((numbers - self._mean) / self._deviation)).float()


class _Rows:
    """Which row of a table an id has: row 1 is that of the most frequent one. Missing is an id like
    any other."""

    def __init__(self, feature: _Feature, chosen: np.ndarray) -> None:
        names = (None, *feature.ids.texts)
        counts = np.bincount(feature.codes_of(chosen) + 1, minlength=len(names))
        order = np.argsort(-counts, kind="stable")
        self._rows = {
            names[index]: row for row, index in enumerate(order[counts[order] > 0], UNSEEN_ROW + 1)
        }

    def __len__(self) -> int:
        """N."""
        return len(self._rows) + 1

    def __call__(self, ids: Ids) -> Tensor:
        """int32."""
        rows = np.array([self._rows.get(name, UNSEEN_ROW) for name in (None, *ids.texts)], np.int32)
        return torch.from_numpy(rows[ids.codes + 1])
