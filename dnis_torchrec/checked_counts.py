"""What is read of the data before anything is trained: the training split counted, all splits checked on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.checks import check
from dnis_torchrec.data_over_ranks import for_counting
from dnis_torchrec.frequency import FrequencyCounts, longest_bags
from dnis_torchrec.metrics import check_candidates
from dnis_torchrec.ranks import together
from dnis_torchrec.recipe import DataSplits, RankingBatch, with_checked_labels
from dnis_torchrec.reductions import Ranks
from dnis_torchrec.streaming import CountLimits, count_stream


def count_training_data(
    data: DataSplits,
    loss: nn.Module,
    tables: Sequence[EmbeddingBagConfig],
    *,
    limits: CountLimits | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> FrequencyCounts:
    """Counts the training split in bounded memory, and checks labels, ids and queries of all splits on the way.

    The longest bags are those of all splits, so that a feature that holds several ids only once, in another split than
    training's, is a multi-hot one from the start.

    Distributed: each rank reads its part, and all have the counts of all parts; see `count_stream`.

    Args:
        data: of this rank.
        loss: decides which labels are allowed.
        tables: the tables to count.
        limits: what counting may cost.
        process_group: of the ranks that count together; None for this process alone.

    Raises:
        ValueError: on all ranks, for an empty split, a label outside the loss's domain, an id outside its table, or a
            query of fewer candidates than the largest k of the ranking metrics.
    """
    longest: Counter[str] = Counter()
    queries = {name: [torch.zeros(0, dtype=torch.int64)] for name in ("selection", "test")}
    with together(process_group):
        for name in ("validation", *queries):
            num_batches, batches = 0, getattr(data, name)
            for batch in with_checked_labels(for_counting(batches) if name == "validation" else batches, loss, name):
                longest |= Counter(longest_bags(batch.sparse_features, tables, f"{name} batch {num_batches}"))
                num_batches += 1
                if name in queries and isinstance(batch, RankingBatch):
                    queries[name].append(batch.queries.cpu().long())
            check(num_batches > 0, f"{name} stream", "expected at least one batch", 0, "check the data splits")
    _check_queries(queries, Ranks(process_group))
    train = with_checked_labels(for_counting(data.train), loss, "train")
    features = (batch.sparse_features for batch in train)
    counts = count_stream(features, tables, limits=limits, process_group=process_group)
    of_all = torch.tensor([max(length, longest[name]) for name, length in counts.max_bag_lengths.items()])
    lengths = Ranks(process_group).max_(of_all).tolist()
    return replace(counts, max_bag_lengths=dict(zip(counts.max_bag_lengths, lengths, strict=True)))


def _check_queries(queries: Mapping[str, list[torch.Tensor]], ranks: Ranks) -> None:
    """Every query of a ranked split has candidates enough, those of all ranks counted."""
    for name, own in queries.items():
        of_all = ranks.concatenate(torch.cat(own))
        if of_all.numel():
            check_candidates(of_all, place=f"{name} split")
