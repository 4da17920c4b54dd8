"""Frequencies of a stream in bounded memory, on one rank or many: exact up to a limit, beyond it
with a stated error."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts, RowCounts, bags_of
from dnis_torchrec.blocks.settings import CountLimits
from dnis_torchrec.blocks.sketch import BoundedCounter, CountMinSketch, EstimatedCounts
from dnis_torchrec.checks import describe
from dnis_torchrec.ranks import Ranks, together


def count_stream(
    batches: Iterable[KeyedJaggedTensor],
    tables: Sequence[EmbeddingBagConfig],
    *,
    limits: CountLimits | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> FrequencyCounts:
    """Counts how often each row of each table is looked up, on all ranks together, in bounded
    memory."""
    ranks = Ranks(process_group)
    if ranks.world_size == 1:
        counts = _count(batches, tables, limits or CountLimits())
    else:
        with together(process_group):
            counts = _count(batches, tables, limits or CountLimits())
        counts = _merged(counts, ranks)
    if counts.num_samples == 0:
        raise ValueError(
            describe("training stream", "at least one sample", "none", "check the data folder")
        )
    return counts


def _count(
    batches: Iterable[KeyedJaggedTensor], tables: Sequence[EmbeddingBagConfig], limits: CountLimits
) -> FrequencyCounts:
    """The counts of this rank's batches."""
    counts = {table.name: _nothing_counted(table.num_embeddings, limits) for table in tables}
    max_bag_lengths = {feature: 0 for table in tables for feature in table.feature_names}
    num_samples = 0
    for index, features in enumerate(batches):
        jagged = copy.copy(
            features
        ).to_dict()  # the batch itself is left as it was: see jagged_by_key
        for table in tables:
            own = counts[table.name]
            for feature, (ids, longest) in bags_of(table, jagged, f"batch {index}").items():
                if isinstance(own, EstimatedCounts):
                    own.counter.add(ids.numpy())
                else:
                    own.scatter_add_(0, ids, torch.ones_like(ids))
                max_bag_lengths[feature] = max(max_bag_lengths[feature], longest)
        num_samples += features.stride()
    return FrequencyCounts(counts, max_bag_lengths, num_samples)


def _nothing_counted(num_embeddings: int, limits: CountLimits) -> RowCounts:
    if num_embeddings <= limits.exact_rows:
        return torch.zeros(num_embeddings, dtype=torch.int64)
    counter = BoundedCounter(exact_ids=limits.exact_ids, epsilon=limits.epsilon, delta=limits.delta)
    return EstimatedCounts(counter, num_embeddings)


def _merged(counts: FrequencyCounts, ranks: Ranks) -> FrequencyCounts:
    """The counts of all ranks together, the same on each."""
    longest = torch.tensor([*counts.max_bag_lengths.values()], dtype=torch.int64)
    lengths = dict(zip(counts.max_bag_lengths, ranks.max_(longest).tolist(), strict=True))
    num_samples = int(ranks.sum_(torch.tensor([counts.num_samples])))
    merged: dict[str, RowCounts] = {}
    for name, own in counts.counts.items():
        if isinstance(own, EstimatedCounts):
            merged[name] = EstimatedCounts(_merged_counter(own.counter, ranks), own.numel())
        else:
            merged[name] = ranks.sum_(own)
    return FrequencyCounts(merged, lengths, num_samples)


def _merged_counter(counter: BoundedCounter, ranks: Ranks) -> BoundedCounter:
    """A counter of all ranks' ids: each rank says what it knows of the ids of all tables, and
    sketches add up."""
    counter.settle()
    merged = BoundedCounter(
        exact_ids=counter.exact_ids, epsilon=counter.epsilon, delta=counter.delta
    )
    for part in range(ranks.world_size):
        ids = np.unique(_gathered(counter.ids[counter.ids % ranks.world_size == part], ranks))
        exact, sketched = (ranks.sum_(torch.from_numpy(own)).numpy() for own in counter.parts(ids))
        merged.include(ids, exact, sketched)
    if int(ranks.max_(torch.tensor([not counter.is_exact], dtype=torch.int64))):
        own_sketch = counter.sketch or CountMinSketch(counter.epsilon, counter.delta)
        ranks.sum_(torch.from_numpy(own_sketch.table))
        if merged.sketch is not None:
            own_sketch.table += merged.sketch.table
        merged.sketch = own_sketch
    return merged


def _gathered(values: np.ndarray, ranks: Ranks) -> np.ndarray:
    """The int64 values of all ranks, which may have different numbers of them."""
    sizes = torch.zeros(ranks.world_size, dtype=torch.int64)
    sizes[ranks.rank] = len(values)
    begins = [0, *ranks.sum_(sizes).cumsum(0).tolist()]
    joined = torch.zeros(begins[-1], dtype=torch.int64)
    joined[begins[ranks.rank] : begins[ranks.rank + 1]] = torch.from_numpy(values)
    return ranks.sum_(joined).numpy()
