"""Splits a recipe's data over ranks, and counts and checks it before anything is trained."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks import blocking
from dnis_torchrec.blocks.counts import FrequencyCounts, check_counts, count_batches, longest_bags
from dnis_torchrec.blocks.hashing import mix
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME, merge_tallies
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import (
    CutBatches,
    RankingBatch,
    check_not_empty,
    features_of,
    for_lookup,
    samples_where,
    slice_of,
)
from dnis_torchrec.data.recipe import SPLITS, DataSplits, Recipe
from dnis_torchrec.data.task import LossTask, check_batches, check_candidates, check_task
from dnis_torchrec.ranks import Ranks, together

FINGERPRINTS = 1 << 40  # so few that those of many ranks can be added up
SAME_BATCHES = "as many batches on every rank"
LEARN, MEASURE, JUDGE, COUNT = "learn", "measure", "judge", "count"
"""What slices are for: equal ones; all samples of what fills all ranks; all samples, or an error;
all samples, however few, where some ranks may get fewer batches."""


class JoinedBatches(CutBatches):
    """The batches of train, and those of validation spread evenly among them. Local."""

    def __init__(self, train: Iterable[Batch], validation: Iterable[Batch]) -> None:
        super().__init__(train)
        self._validation, self._sizes = validation, list[int]()

    def __iter__(self) -> Iterator[Batch]:
        parts, epoch = (self._batches, self._validation), getattr(self, "epoch", None)
        self._sizes = self._sizes or [sum(1 for _ in part) for part in parts]
        for part in parts:
            if epoch is not None and hasattr(part, "epoch"):
                part.epoch = epoch  # counting is no epoch, and a resumed run has the same order
        streams = (_with_places(part, size) for part, size in zip(parts, self._sizes, strict=True))
        return map(itemgetter(1), heapq.merge(*streams, key=itemgetter(0)))

    def each_sample(self) -> Iterator[Batch]:
        """All samples of both."""
        return chain.from_iterable(map(all_samples, (self._batches, self._validation)))


class SeenSamples:
    """The samples of batches whose rows training has all seen, or else all others. Local."""

    def __init__(
        self,
        batches: Iterable[Batch],
        counts: Mapping[str, Tensor],
        tables: Sequence[EmbeddingBagConfig],
        *,
        are_seen: bool,
    ) -> None:
        self._batches, self._counts, self._are_seen = batches, counts, are_seen
        self._tables = {feature: table.name for table in tables for feature in table.feature_names}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            is_seen = torch.ones(len(batch.labels), dtype=torch.bool)
            for feature, bag in features_of(batch).to_dict().items():
                if feature in self._tables:
                    is_new = self._counts[self._tables[feature]][bag.values().long()] == 0
                    of_ids = torch.arange(len(is_seen)).repeat_interleave(bag.lengths())
                    is_seen[of_ids[is_new]] = False
            part = samples_where(batch, is_seen == self._are_seen)
            if len(part.labels):
                yield part


def _with_places(batches: Iterable[Batch], number: int) -> Iterator[tuple[float, Batch]]:
    """(place in the epoch, in (0, 1), batch) for every batch."""
    return (((index + 0.5) / number, batch) for index, batch in enumerate(batches))


class RankBatches(CutBatches):
    """This rank's slices of the batches of a split."""

    def __init__(self, batches: Iterable[Batch], ranks: Ranks, name: str, use: str) -> None:
        super().__init__(batches)
        self._ranks, self._name, self._use = ranks, name, use
        self.fingerprint: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self._slices(self._use)

    def each_sample(self) -> Iterator[Batch]:
        """Slices that leave nothing out."""
        return self._slices(COUNT)

    def _slices(self, use: str) -> Iterator[Batch]:
        rank, world_size, total = self._ranks.rank, self._ranks.world_size, 0
        for index, batch in enumerate(self._batches):
            size, place = len(batch.labels), f"{self._name} batch {index}"
            check_not_empty(batch, place)
            if self.fingerprint is None:
                numbers = np.arange(size, dtype=np.uint64) + np.uint64(index << 32)
                total = (total + int(mix(fingerprints_of(batch) + numbers).sum())) % FINGERPRINTS
            requirement = f"at least one sample for each of {world_size} ranks"
            check(size >= world_size or use != JUDGE, place, requirement, size)
            number = size // world_size * world_size if use == LEARN else size
            first, last = number * rank // world_size, number * (rank + 1) // world_size
            if first < last and (size >= world_size or use == COUNT):
                yield slice_of(batch, first, last)
        self.fingerprint = total if self.fingerprint is None else self.fingerprint


def split_over_ranks(data: DataSplits, ranks: Ranks) -> DataSplits:
    """The part of every split that this rank learns on and is judged on. Local, no collective."""
    if ranks.world_size == 1:
        return data
    splits: dict[str, Any] = {}
    for name in SPLITS:
        batches, use = getattr(data, name), LEARN if name in ("train", "validation") else JUDGE
        is_split = getattr(batches, "is_split_over_ranks", False)
        splits[name] = batches if is_split else RankBatches(batches, ranks, name, use)
    return replace(data, **splits)


def all_samples(batches: Iterable[Batch]) -> Iterable[Batch]:
    """What this rank counts and checks, once, of a split that is learned on. Local."""
    return batches.each_sample() if hasattr(batches, "each_sample") else batches


def samples_to_measure(batches: Iterable[Batch]) -> Iterable[Batch]:
    """What this rank measures a model on, of a split that is learned on. Local."""
    if not isinstance(batches, RankBatches):
        return batches
    return RankBatches(batches._batches, batches._ranks, batches._name, MEASURE)


def check_same(data: DataSplits, ranks: Ranks) -> None:
    """Checks that all ranks have read the same batches. One reduction of two numbers per split."""
    for name in SPLITS:
        batches = getattr(data, name)
        if isinstance(batches, RankBatches):
            number = batches.fingerprint or 0
            largest, smallest = ranks.max_(torch.tensor([number, -number])).tolist()
            requirement = "the same batches in the same order on every rank"
            check(largest == -smallest, f"{name} stream", requirement, "others")


@dataclass
class SplitSummary:
    """What a pass over a split has read: its samples as one number, and the sizes of batches."""

    fingerprint: int = 0
    sizes: list[int] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """One more batch has been read; neither order nor the cut of batches changes the number."""
        samples = fingerprints_of(batch)
        self.fingerprint = (self.fingerprint + int(samples.sum())) % FINGERPRINTS
        self.sizes.append(len(samples))


def read_splits(
    recipe: Recipe, tables: Sequence[EmbeddingBagConfig], ranks: Ranks
) -> tuple[DataSplits, FrequencyCounts, dict[str, int]]:
    """Reads all splits once: this rank's data, the counts, and a fingerprint of every split."""
    remedy = "`dnis train --steps` trains on a stream, `dnis compress` takes what it leaves"
    check(not recipe.is_stream, "Recipe.data", "DataSplits", "a stream", remedy)
    data = split_over_ranks(recipe.data, ranks)
    summaries = {name: SplitSummary() for name in SPLITS}
    counts = count_training_data(
        data, recipe.task, tables, process_group=ranks.group, summaries=summaries
    )
    check_same(data, ranks)
    _check_steps(data, summaries, ranks)
    with together(ranks.group):
        if not isinstance(recipe.task, LossTask):
            batch = for_lookup(next(iter(recipe.data.selection)))
            check_task(recipe.model, recipe.task, batch, "selection batch 0")
    sums = ranks.sum_(torch.tensor([summary.fingerprint for summary in summaries.values()]))
    return data, counts, dict(zip(SPLITS, (sums % FINGERPRINTS).tolist(), strict=True))


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


def blocks_over_ranks(
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> blocking.RowBlocks:
    """Does what `blocks_from_counts` does, while ranks share the rows of each large table. All
    ranks get the same: a gather of tallies, and an all_reduce of a byte a row if rows need a map.
    """
    ranks = Ranks(process_group)

    def shared_blocks(counts: Tensor, most_blocks: int, least_rows: int) -> blocking.TableBlocks:
        if ranks.world_size == 1 or len(counts) <= ROWS_AT_A_TIME:  # not worth a collective
            return blocking.blocks_of_table(counts, most_blocks, least_rows)
        first, last = ranks.share(len(counts))
        sums, block_of_row = ranks.gather(blocking.tally_counts(counts[first:last])), None
        blocks = blocking.FrequencyBlocks(counts, merge_tallies(sums), most_blocks, least_rows)
        if not blocks.are_in_order:
            until = merge_tallies(sums[: ranks.rank])
            block_of_row = blocks.map_rows(counts, first, last, until)
            ranks.sum_(block_of_row.view(torch.uint8))
        return blocks.result(block_of_row)

    return blocking.form_blocks(shared_blocks, counts, tables, **options)


def count_training_data(
    data: DataSplits,
    task: nn.Module,
    tables: Sequence[EmbeddingBagConfig],
    *,
    process_group: dist.ProcessGroup | None = None,
    summaries: Mapping[str, SplitSummary] | None = None,
) -> FrequencyCounts:
    """Counts the training split, and checks all that all splits hold on the way."""
    ranks, longest = Ranks(process_group), Counter[str]()
    queries = {name: [torch.zeros(0, dtype=torch.int64)] for name in ("selection", "test")}

    def read(name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in check_batches(batches, task, name):
            yield batch  # to be checked first
            if summaries is not None:
                summaries[name].add(batch)

    with together(process_group):
        for name in ("validation", *queries):
            number, batches = 0, getattr(data, name)
            for batch in read(name, all_samples(batches) if name == "validation" else batches):
                place = f"{name} batch {number}"
                longest |= Counter(longest_bags(features_of(batch), tables, place))
                number += 1
                if name in queries and isinstance(batch, RankingBatch):
                    queries[name].append(batch.queries.cpu().long())
            check(number > 0, f"{name} stream", "at least one batch", 0, "check the data splits")
    for name, of_rank in queries.items():
        of_all = ranks.concatenate(torch.cat(of_rank))  # candidates of a query may lie on all ranks
        if of_all.numel():
            check_candidates(of_all, place=f"{name} split")
    features = (features_of(batch) for batch in read("train", all_samples(data.train)))
    counts = count_over_ranks(features, tables, process_group=process_group)
    lengths = {name: max(length, longest[name]) for name, length in counts.max_bag_lengths.items()}
    of_ranks = ranks.max_(torch.tensor(list(lengths.values()))).tolist()
    return replace(counts, max_bag_lengths=dict(zip(lengths, of_ranks, strict=True)))


def _check_steps(data: DataSplits, summaries: Mapping[str, SplitSummary], ranks: Ranks) -> None:
    """Data which splits itself gives every rank as many batches, and as large ones to learn on."""
    for name in SPLITS:
        batches = getattr(data, name)
        if ranks.world_size == 1 or hasattr(batches, "each_sample"):
            continue
        sizes = torch.tensor(summaries[name].sizes, dtype=torch.int64)
        numbers = ranks.concatenate(torch.tensor([len(sizes)])).tolist()
        of_ranks, place = ranks.concatenate(sizes).split(numbers), f"{name} stream"
        check(len(set(numbers)) == 1, place, SAME_BATCHES, f"{numbers} by rank")
        if name in ("train", "validation"):
            uneven = (torch.stack(of_ranks) != of_ranks[0]).any(0).nonzero().flatten().tolist()
            place = f"{name} batch {next(iter(uneven), 0)}"
            check(not uneven, place, "as many samples on every rank", "other numbers")


def fingerprints_of(batch: Batch) -> np.ndarray:
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
    of_labels = mix(bits + columns).sum(axis=1, dtype=np.uint64)
    return mix((bags * factors[:, None]).sum(axis=0) + of_labels)
