"""Splits a recipe's data over ranks: each rank takes its slice of every batch."""

from __future__ import annotations

import itertools
import logging
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torchrec.datasets.utils import Batch

from dnis_torchrec.blocks.hashing import mix
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import CutBatches, slice_of
from dnis_torchrec.data.lookup_batches import features_of
from dnis_torchrec.data.recipe import DataSplits
from dnis_torchrec.data.sample_sketch import SampleSketch, share_found, share_repeated
from dnis_torchrec.data.split_checks import NO_EMPTY_BATCHES, SOME_SAMPLES
from dnis_torchrec.ranks import Ranks

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "selection", "test")
FINGERPRINTS = 1 << 40
"""Number of fingerprints, small enough that those of many ranks can be added up."""
SAME_BATCHES = "as many batches on every rank"
OVERLAP = 0.5
"""Share of a split's samples, beyond what repeats anyway, that another split may have too before a
warning says so."""


class SplitsItself(Protocol):
    """Batches that are this rank's own already, as many on every rank, and say so; others need not
    say anything."""

    is_split_over_ranks: bool


class SlicedBatches(CutBatches):
    """This rank's slices of the batches of a split."""

    def __init__(self, batches: Iterable[Batch], ranks: Ranks, name: str, *, equal: bool) -> None:
        super().__init__(batches)
        self._ranks, self._name, self._equal = ranks, name, equal
        self.fingerprint: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        """This rank's slice of every batch."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        for index, batch in enumerate(self._whole()):
            size = len(batch.labels)
            if self._equal and size >= world_size:
                share = size // world_size
                yield slice_of(batch, rank * share, (rank + 1) * share)
            elif not self._equal:
                requirement = f"at least one sample for each of {world_size} ranks"
                remedy = "choose a batch size that leaves more for the last batch"
                check(size >= world_size, f"{self._name} batch {index}", requirement, size, remedy)
                yield slice_of(batch, size * rank // world_size, size * (rank + 1) // world_size)

    def counted(self) -> Iterator[Batch]:
        """Slices that leave nothing out, however small a batch is; some ranks may get fewer of
        them."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        for batch in self._whole():
            size = len(batch.labels)
            first, last = size * rank // world_size, size * (rank + 1) // world_size
            if first < last:
                yield slice_of(batch, first, last)

    def measured(self) -> Iterable[Batch]:
        """The same batches for what only measures: all samples, and as many batches on every rank."""
        return _Measured(self._batches, self._ranks, self._name, equal=False)

    def _whole(self) -> Iterator[Batch]:
        seen = 0
        for index, batch in enumerate(self._batches):
            check(
                len(batch.labels) > 0,
                f"{self._name} batch {index}",
                SOME_SAMPLES,
                "none",
                NO_EMPTY_BATCHES,
            )
            if self.fingerprint is None:
                seen += _fingerprint(batch, index)
            yield batch
        self.fingerprint = seen if self.fingerprint is None else self.fingerprint


class _Measured(SlicedBatches):
    def _whole(self) -> Iterator[Batch]:
        return (batch for batch in super()._whole() if len(batch.labels) >= self._ranks.world_size)


def split_over_ranks(data: DataSplits, ranks: Ranks) -> DataSplits:
    """The part of every split that this rank learns on and is judged on. Local, no collective."""
    if ranks.world_size == 1:
        return data
    learned_on = {"train": True, "validation": True, "selection": False, "test": False}
    splits: dict[str, Iterable[Batch]] = {}
    for name, equal in learned_on.items():
        batches = getattr(data, name)
        is_split = getattr(batches, "is_split_over_ranks", False)
        splits[name] = batches if is_split else SlicedBatches(batches, ranks, name, equal=equal)
    return DataSplits(**splits)


def all_samples(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Returns the batches that this rank counts and checks, once, of a split that is learned on.
    Local, no collective."""
    counted = getattr(batches, "counted", None)
    return batches if counted is None else counted()


def measured_samples(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Returns the batches that this rank measures a model on, of a split that is learned on. Local,
    no collective."""
    return batches.measured() if isinstance(batches, SlicedBatches) else batches


def check_same(data: DataSplits, ranks: Ranks) -> None:
    """Checks that all ranks have read the same batches. One reduction of two numbers per split."""
    for name in SPLITS:
        batches = getattr(data, name)
        if isinstance(batches, SlicedBatches):
            mine = batches.fingerprint or 0
            largest, smallest = ranks.max_(torch.tensor([mine, -mine])).tolist()
            requirement = "the same batches in the same order on every rank"
            remedy = "let their order depend on the recipe's seed alone"
            check(largest == -smallest, f"{name} stream", requirement, "others", remedy)


def _fingerprint(batch: Batch, index: int) -> int:
    """An integer below 2^40 that other labels, ids or another order change."""
    total = torch.zeros((), dtype=torch.int64)
    for values in (batch.labels.float().view(torch.int32), features_of(batch).values().int()):
        flat = values.detach().cpu().flatten().long()
        total += (flat * (torch.arange(flat.numel()) % 8191 + index % 127 + 1)).sum()
    return int(total) % FINGERPRINTS


class NotedBatches:
    """Batches that note, while they are read anyway, which samples there are: other data in as many
    batches is found."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self.fingerprint, self.sketch = 0, SampleSketch()
        self.sizes: list[int] = []
        self.batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[Batch]:
        return self._noting(self._batches)

    def counted(self) -> Iterator[Batch]:
        """Yields the batches that `all_samples` returns, and notes their samples."""
        return self._noting(all_samples(self._batches))

    def _noting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self.fingerprint, self.sketch = 0, SampleSketch()
        self.sizes.clear()
        self.batches.clear()
        for batch in batches:
            yield batch  # to be checked first
            samples = _samples(batch)
            self.fingerprint = (self.fingerprint + int(samples.sum())) % FINGERPRINTS
            self.sizes.append(len(samples))
            self.sketch.add(_with_dense(samples, batch))
            self.batches[id(batch)] = batch


def with_notes(data: DataSplits) -> DataSplits:
    """The same splits, which note their samples while they are read."""
    return DataSplits(**{name: NotedBatches(getattr(data, name)) for name in SPLITS})


def fingerprints(noted: DataSplits, ranks: Ranks) -> dict[str, int]:
    """Fingerprint of every split, of the samples of all ranks. One reduction of four numbers."""
    sums = (
        ranks.sum_(torch.tensor([getattr(noted, name).fingerprint for name in SPLITS]))
        % FINGERPRINTS
    )
    return dict(zip(SPLITS, sums.tolist(), strict=True))


def check_steps(data: DataSplits, noted: DataSplits, ranks: Ranks) -> None:
    """Checks that data which splits itself gives every rank as many batches, and as large ones to
    learn on."""
    for name in SPLITS:
        batches, sizes = (
            getattr(data, name),
            torch.tensor(getattr(noted, name).sizes, dtype=torch.int64),
        )
        if (
            isinstance(batches, SlicedBatches)
            or hasattr(batches, "counted")
            or ranks.world_size == 1
        ):
            continue
        numbers = ranks.concatenate(torch.tensor([len(sizes)])).tolist()
        of_ranks = [of_rank.tolist() for of_rank in ranks.concatenate(sizes).split(numbers)]
        remedy = "leave out what does not fill a batch on every rank"
        for rank, of_one in enumerate(of_ranks):
            received = f"{len(of_one)} on rank {rank}, {len(of_ranks[0])} on rank 0"
            check(len(of_one) == len(of_ranks[0]), f"{name} stream", SAME_BATCHES, received, remedy)
        for index, of_batch in enumerate(
            zip(*of_ranks, strict=True) if name in ("train", "validation") else ()
        ):
            other = next((rank for rank, size in enumerate(of_batch) if size != of_batch[0]), 0)
            received = f"{of_batch[other]} on rank {other}, {of_batch[0]} on rank 0"
            check(
                not other,
                f"{name} batch {index}",
                "as many samples on every rank",
                received,
                remedy,
            )


def warn_of_overlaps(noted: DataSplits, ranks: Ranks) -> None:
    """Warns of splits that have batches or many samples in common: metrics on such data say little."""
    splits = {name: getattr(noted, name) for name in SPLITS}
    sketches = {name: split.sketch.over_ranks(ranks) for name, split in splits.items()}
    repeating = max(share_repeated(sketch) for sketch in sketches.values())
    for pair in itertools.combinations(reversed(SPLITS), 2):
        for one, other in (pair, reversed(pair)):
            found = share_found(sketches[one], sketches[other])
            if found - repeating > OVERLAP:
                message = (
                    f"about {found:.0%} of the {one} split's samples are in the {other} split, too"
                )
                break
        else:
            if not any(
                splits[pair[1]].batches.get(key) is batch
                for key, batch in splits[pair[0]].batches.items()
            ):
                continue
            message = f"a batch of the {pair[0]} split is one of the {pair[1]} split, too"
        if ranks.is_first:
            logger.warning(
                "%s: no sample should be in two splits, or what is measured on one says little",
                message,
            )


def _with_dense(samples: np.ndarray, batch: Batch) -> np.ndarray:
    """The numbers of samples, each mixed with its dense features."""
    if not isinstance(batch.dense_features, torch.Tensor) or not len(samples):
        return samples
    return mix(samples + _mixed_columns(batch.dense_features, len(samples), first_column=1))


def _mixed_columns(values: torch.Tensor, num_samples: int, *, first_column: int = 0) -> np.ndarray:
    """The numbers of each sample mixed into one, ``(B,)`` uint64."""
    rows = values.detach().cpu().float().reshape(num_samples, -1).contiguous()
    bits = rows.view(torch.int32).numpy().astype(np.uint64)
    columns = np.arange(first_column, first_column + bits.shape[1], dtype=np.uint64) << np.uint64(
        32
    )
    mixed: np.ndarray = mix(bits + columns).sum(axis=1, dtype=np.uint64)
    return mixed


def _samples(batch: Batch) -> np.ndarray:
    """Labels and bags of each sample mixed into one number, ``(B,)`` uint64."""
    features, zero = features_of(batch), np.zeros(1, np.uint64)
    factors = np.array([2 * zlib.crc32(key.encode()) + 1 for key in features.keys()], np.uint64)  # noqa: SIM118
    ids = features.values().detach().cpu().numpy().astype(np.uint64)
    offsets = features.offsets().cpu().numpy()
    sums = np.concatenate(
        [zero, np.cumsum(mix(ids + np.uint64(1)))]
    )  # a bag of row 0 is no empty one
    bags = np.diff(sums[offsets]).reshape(len(factors), features.stride())
    return mix(
        (bags * factors[:, None]).sum(axis=0) + _mixed_columns(batch.labels, features.stride())
    )
