"""Splits a recipe's data over ranks, each of which takes its slice of every batch; one pass over
the data before anything is trained, which counts and checks it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts, check_counts, count_batches, longest_bags
from dnis_torchrec.blocks.hashing import mix
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import (
    CutBatches,
    RankingBatch,
    check_not_empty,
    features_of,
    for_lookup,
    slice_of,
)
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import LossTask, check_candidates, check_task, checked_batches
from dnis_torchrec.ranks import Ranks, together

SPLITS = ("train", "validation", "selection", "test")
FINGERPRINTS = 1 << 40
"""Number of fingerprints, small enough that those of many ranks can be added up."""
SAME_BATCHES = "as many batches on every rank"


class SlicedBatches(CutBatches):
    """This rank's slices of the batches of a split."""

    def __init__(self, batches: Iterable[Batch], ranks: Ranks, name: str, *, equal: bool) -> None:
        super().__init__(batches)
        self._ranks, self._name, self._equal = ranks, name, equal
        self._skips = False
        self.fingerprint: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        """This rank's slice of every batch."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        for index, batch in enumerate(self._whole()):
            size = len(batch.labels)
            if self._equal and size >= world_size:
                share = size // world_size
                yield slice_of(batch, rank * share, (rank + 1) * share)
            elif not self._equal and not (self._skips and size < world_size):
                requirement = f"at least one sample for each of {world_size} ranks"
                remedy = "choose a batch size that leaves more for the last batch"
                check(size >= world_size, f"{self._name} batch {index}", requirement, size, remedy)
                yield slice_of(batch, size * rank // world_size, size * (rank + 1) // world_size)

    def measured(self) -> SlicedBatches:
        """The same for what only measures: all samples, and as many batches on every rank."""
        batches = SlicedBatches(self._batches, self._ranks, self._name, equal=False)
        batches._skips = True
        return batches

    def counted(self) -> Iterator[Batch]:
        """Slices that leave nothing out, however small a batch is; some ranks may get fewer of
        them."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        for batch in self._whole():
            size = len(batch.labels)
            first, last = size * rank // world_size, size * (rank + 1) // world_size
            if first < last:
                yield slice_of(batch, first, last)

    def _whole(self) -> Iterator[Batch]:
        total = 0
        for index, batch in enumerate(self._batches):
            check_not_empty(batch, f"{self._name} batch {index}")
            if self.fingerprint is None:
                places = np.arange(len(batch.labels), dtype=np.uint64) + np.uint64(index << 32)
                total = (total + int(mix(_samples(batch) + places).sum())) % FINGERPRINTS
            yield batch
        self.fingerprint = total if self.fingerprint is None else self.fingerprint


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


class NotedBatches:
    """Batches that note, while they are read anyway, which samples there are, and in how large
    batches."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self.fingerprint = 0
        self.sizes: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        return self._noting(self._batches)

    def counted(self) -> Iterator[Batch]:
        """The batches that `all_samples` returns."""
        return self._noting(all_samples(self._batches))

    def _noting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self.fingerprint, self.sizes = 0, []
        for batch in batches:
            yield batch  # to be checked first
            samples = _samples(batch)
            self.fingerprint = (self.fingerprint + int(samples.sum())) % FINGERPRINTS
            self.sizes.append(len(samples))


def read_before_training(
    recipe: Recipe, tables: Sequence[EmbeddingBagConfig], ranks: Ranks
) -> tuple[DataSplits, FrequencyCounts, dict[str, int]]:
    """Reads all splits once: this rank's data, the counts, and a fingerprint of every split."""
    whole = split_over_ranks(recipe.data, ranks)
    noted = DataSplits(**{name: NotedBatches(getattr(whole, name)) for name in SPLITS})
    counts = count_training_data(noted, recipe.task, tables, process_group=ranks.group)
    check_same(whole, ranks)
    _check_steps(whole, noted, ranks)
    with together(ranks.group):
        if not isinstance(recipe.task, LossTask):
            batch = for_lookup(next(iter(recipe.data.selection)))
            check_task(recipe.model, recipe.task, batch, "selection batch 0")
    return whole, counts, fingerprints(noted, ranks)


def count_over_ranks(
    batches: Iterable[KeyedJaggedTensor],
    tables: Sequence[EmbeddingBagConfig],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> FrequencyCounts:
    """`count_frequencies` of the batches of all ranks together, the same on each."""
    ranks = Ranks(process_group)
    with together(process_group):
        counts = count_batches(batches, tables)
    lengths = torch.tensor([*counts.max_bag_lengths.values()], dtype=torch.int64)
    num_samples = int(ranks.sum_(torch.tensor([counts.num_samples])))
    counts = FrequencyCounts(
        {name: ranks.sum_(of_rows) for name, of_rows in counts.counts.items()},
        dict(zip(counts.max_bag_lengths, ranks.max_(lengths).tolist(), strict=True)),
        num_samples,
    )
    check_counts(counts)
    return counts


def count_training_data(
    data: DataSplits,
    task: nn.Module,
    tables: Sequence[EmbeddingBagConfig],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> FrequencyCounts:
    """Counts the training split, and checks all that all splits hold on the way."""
    longest: Counter[str] = Counter()
    queries = {name: [torch.zeros(0, dtype=torch.int64)] for name in ("selection", "test")}
    with together(process_group):
        for name in ("validation", *queries):
            number, batches = 0, getattr(data, name)
            batches = all_samples(batches) if name == "validation" else batches
            for batch in checked_batches(batches, task, name):
                place = f"{name} batch {number}"
                longest |= Counter(longest_bags(features_of(batch), tables, place))
                number += 1
                if name in queries and isinstance(batch, RankingBatch):
                    queries[name].append(batch.queries.cpu().long())
            check(number > 0, f"{name} stream", "at least one batch", 0, "check the data splits")
    ranks = Ranks(process_group)
    _check_queries(queries, ranks)
    train = checked_batches(all_samples(data.train), task, "train")
    features = (features_of(batch) for batch in train)
    counts = count_over_ranks(features, tables, process_group=process_group)
    lengths = {name: max(length, longest[name]) for name, length in counts.max_bag_lengths.items()}
    of_ranks = ranks.max_(torch.tensor(list(lengths.values()))).tolist()
    return replace(counts, max_bag_lengths=dict(zip(lengths, of_ranks, strict=True)))


def _check_queries(queries: Mapping[str, list[torch.Tensor]], ranks: Ranks) -> None:
    """Every query of a ranked split has candidates enough, those of all ranks counted."""
    for name, of_rank in queries.items():
        of_all = ranks.concatenate(torch.cat(of_rank))
        if of_all.numel():
            check_candidates(of_all, place=f"{name} split")


def fingerprints(noted: DataSplits, ranks: Ranks) -> dict[str, int]:
    """Fingerprint of every split, of the samples of all ranks. One reduction of four numbers."""
    sums = ranks.sum_(torch.tensor([getattr(noted, name).fingerprint for name in SPLITS]))
    return dict(zip(SPLITS, (sums % FINGERPRINTS).tolist(), strict=True))


def _check_steps(data: DataSplits, noted: DataSplits, ranks: Ranks) -> None:
    """Data which splits itself gives every rank as many batches, and as large ones to learn on."""
    for name in SPLITS:
        batches, place = getattr(data, name), f"{name} stream"
        if isinstance(batches, SlicedBatches) or hasattr(batches, "counted"):
            continue
        if ranks.world_size == 1:
            return
        sizes = torch.tensor(getattr(noted, name).sizes, dtype=torch.int64)
        numbers = ranks.concatenate(torch.tensor([len(sizes)])).tolist()
        of_ranks = ranks.concatenate(sizes).split(numbers)
        remedy = "leave out what does not fill a batch on every rank"
        check(len(set(numbers)) == 1, place, SAME_BATCHES, f"{numbers} by rank", remedy)
        if name in ("train", "validation"):
            uneven = (torch.stack(of_ranks) != of_ranks[0]).any(0).nonzero().flatten().tolist()
            where = f"{name} batch {uneven[0] if uneven else 0}"
            requirement, received = "as many samples on every rank", "other numbers"
            check(not uneven, where, requirement, received, remedy)


def _samples(batch: Batch) -> np.ndarray:
    """Labels and bags of each sample mixed into one number, ``(B,)`` uint64."""
    features, zero = features_of(batch), np.zeros(1, np.uint64)
    factors = np.array([2 * zlib.crc32(key.encode()) + 1 for key in features.keys()], np.uint64)  # noqa: SIM118
    ids = features.values().detach().cpu().numpy().astype(np.uint64)
    # A bag of row 0 is no empty one.
    sums = np.concatenate([zero, np.cumsum(mix(ids + np.uint64(1)))])
    bags = np.diff(sums[features.offsets().cpu().numpy()])
    bags = bags.reshape(len(factors), features.stride())
    labels = batch.labels.detach().cpu().float().reshape(features.stride(), -1).contiguous()
    bits = labels.view(torch.int32).numpy().astype(np.uint64)
    columns = np.arange(bits.shape[1], dtype=np.uint64) << np.uint64(32)
    mixed = mix(bits + columns).sum(axis=1, dtype=np.uint64)
    return mix((bags * factors[:, None]).sum(axis=0) + mixed)
