"""One pass over the data before anything is trained: it counts the training split, and checks every
split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.counts import FrequencyCounts, longest_bags
from dnis_torchrec.checks import check
from dnis_torchrec.data.labels import RankingBatch, check_candidates
from dnis_torchrec.data.lookup_batches import features_of
from dnis_torchrec.data.over_ranks import (
    all_samples,
    check_same,
    check_steps,
    fingerprints,
    split_over_ranks,
    warn_of_overlaps,
    with_notes,
)
from dnis_torchrec.data.recipe import DataSplits, Recipe, checked_batches
from dnis_torchrec.data.trial import try_out
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.streaming import CountLimits, count_stream


def read_before_training(
    recipe: Recipe, tables: Sequence[EmbeddingBagConfig], ranks: Ranks, limits: CountLimits
) -> tuple[DataSplits, FrequencyCounts, dict[str, int]]:
    """Reads all splits once: counts, checks, and warns of data that need not be wrong but mostly
    is."""
    whole = split_over_ranks(recipe.data, ranks)
    noted = with_notes(whole)
    counts = count_training_data(
        noted, recipe.task, tables, limits=limits, process_group=ranks.group
    )
    check_same(whole, ranks)
    check_steps(whole, noted, ranks)
    warn_of_overlaps(noted, ranks)
    with together(ranks.group):
        try_out(recipe, warns=ranks.is_first)
    return whole, counts, fingerprints(noted, ranks)


def count_training_data(
    data: DataSplits,
    task: nn.Module,
    tables: Sequence[EmbeddingBagConfig],
    *,
    limits: CountLimits | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> FrequencyCounts:
    """Counts the training split in bounded memory, and checks all that all splits hold on the way."""
    longest: Counter[str] = Counter()
    queries = {name: [torch.zeros(0, dtype=torch.int64)] for name in ("selection", "test")}
    with together(process_group):
        for name in ("validation", *queries):
            num_batches, batches = 0, getattr(data, name)
            for batch in checked_batches(
                all_samples(batches) if name == "validation" else batches, task, name
            ):
                longest |= Counter(
                    longest_bags(features_of(batch), tables, f"{name} batch {num_batches}")
                )
                num_batches += 1
                if name in queries and isinstance(batch, RankingBatch):
                    queries[name].append(batch.queries.cpu().long())
            check(
                num_batches > 0, f"{name} stream", "at least one batch", 0, "check the data splits"
            )
    _check_queries(queries, Ranks(process_group))
    train = checked_batches(all_samples(data.train), task, "train")
    features = (features_of(batch) for batch in train)
    counts = count_stream(features, tables, limits=limits, process_group=process_group)
    of_all = torch.tensor(
        [max(length, longest[name]) for name, length in counts.max_bag_lengths.items()]
    )
    lengths = Ranks(process_group).max_(of_all).tolist()
    return replace(counts, max_bag_lengths=dict(zip(counts.max_bag_lengths, lengths, strict=True)))


def _check_queries(queries: Mapping[str, list[torch.Tensor]], ranks: Ranks) -> None:
    """Every query of a ranked split has candidates enough, those of all ranks counted."""
    for name, own in queries.items():
        of_all = ranks.concatenate(torch.cat(own))
        if of_all.numel():
            check_candidates(of_all, place=f"{name} split")
