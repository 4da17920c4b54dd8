"""A sample of a table's rows, a few thousand of every block: the same on every rank, however the
table is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.frequency import ROWS_AT_A_TIME, RowCounts
from dnis_torchrec.blocks.row_routing import RowRouting
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.table_shards import TableShard

ROWS_PER_BLOCK = 4096
UNSEEN_WEIGHT = 0.125
"""Weight, in lookups, of a row that training never looked up: little, but enough that its codes are
no garbage."""
_ROUNDS = 8
"""Rows that are certain leave more of the sample to the others, which may make further ones
certain."""


@dataclass(frozen=True, eq=False)
class RowSample:
    """Some rows of a table."""

    rows: Tensor
    blocks: Tensor
    weights: Tensor


def sample_rows(
    counts: RowCounts, routing: RowRouting, rows_per_block: int = ROWS_PER_BLOCK
) -> RowSample:
    """Draws rows of every block. Local and deterministic: equal counts and blocks give equal
    samples."""
    thresholds = _thresholds(counts, routing, rows_per_block)
    most = int(routing.row_counts().clamp(max=rows_per_block + 1).sum())
    # made at once: small tensors kept between large ones that go would leave holes as large as all
    # chunks together
    rows, blocks = torch.empty(2, most, dtype=torch.int64)
    weights, filled = torch.empty(most, dtype=torch.float64), 0
    passed = torch.full((routing.num_blocks,), 0.5, dtype=torch.float64)
    for chunk, of_rows, frequency in _rows_with_blocks(counts, routing):
        of_each = thresholds[of_rows]
        probability = torch.where(
            frequency >= of_each, 0.0, frequency / of_each.clamp(min=UNSEEN_WEIGHT)
        )
        order = torch.sort(of_rows, stable=True).indices
        sums = probability[order].cumsum(0)
        sizes = torch.bincount(of_rows, minlength=routing.num_blocks)
        ends = torch.cat([torch.zeros(1, dtype=torch.float64), sums])[sizes.cumsum(0)]
        starts = torch.cat([torch.zeros(1, dtype=torch.float64), ends[:-1]])
        after = torch.empty_like(sums)
        after[order] = sums - starts[of_rows[order]] + passed[of_rows[order]]
        drawn = (after.floor() > (after - probability).floor()) | (frequency >= of_each)
        passed += ends - starts
        passed -= passed.floor()
        here = slice(filled, filled := filled + int(drawn.sum()))
        rows[here], blocks[here] = chunk[drawn], of_rows[drawn]
        weights[here] = torch.maximum(frequency, of_each)[drawn]
    return RowSample(rows[:filled], blocks[:filled], weights[:filled])


def sampled_values(
    sample: RowSample,
    shards: Sequence[TableShard],
    embedding_dim: int,
    num_copies: int,
    ranks: Ranks,
) -> Tensor:
    """The sampled rows themselves. One all_reduce, in which every value comes from one rank and the
    others add zeros."""
    values = torch.zeros(sample.rows.numel(), embedding_dim)
    for shard in shards if num_copies == 1 or ranks.is_first else ():
        first, last = shard.first_row, shard.first_row + len(shard.weight)
        begin, end = torch.searchsorted(sample.rows, torch.tensor([first, last])).tolist()
        own = (sample.rows[begin:end] - first).to(shard.weight.device)
        columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        values[begin:end, columns] = shard.weight[own].float().cpu()
    return ranks.sum_(values)


def _thresholds(counts: RowCounts, routing: RowRouting, rows_per_block: int) -> Tensor:
    """Per block the frequency from which on rows are certain: ``(S,)`` float64; 0 where all are."""
    of_runs, frequency, sizes = _frequencies(counts, routing)
    thresholds = torch.full((routing.num_blocks,), torch.inf, dtype=torch.float64)
    for _ in range(_ROUNDS):
        certain, others = torch.zeros(2, routing.num_blocks, dtype=torch.float64)
        is_certain = frequency >= thresholds[of_runs]
        certain.index_add_(0, of_runs, sizes.masked_fill(~is_certain, 0))
        others.index_add_(0, of_runs, (sizes * frequency).masked_fill(is_certain, 0))
        lower = torch.minimum(thresholds, others / (rows_per_block - certain).clamp(min=1))
        if lower.equal(thresholds):
            break
        thresholds = lower
    return torch.where(routing.row_counts() <= rows_per_block, 0.0, thresholds)


def _frequencies(counts: RowCounts, routing: RowRouting) -> tuple[Tensor, Tensor, Tensor]:
    """The frequencies that occur in a block: (blocks, frequencies, how many rows have it as
    float64), few of each."""
    keys, sizes = torch.zeros(2, 0, dtype=torch.int64)
    for first in range(0, routing.num_embeddings, ROWS_AT_A_TIME):
        own = counts[first : first + ROWS_AT_A_TIME]
        of_rows = routing.block_of(torch.arange(first, first + len(own)))
        kept = of_rows < routing.num_blocks
        more, sizes_of_more = (own * routing.num_blocks + of_rows)[kept].unique(return_counts=True)
        keys, runs = torch.cat([keys, more]).unique(return_inverse=True)
        sizes = torch.zeros_like(keys).index_add_(0, runs, torch.cat([sizes, sizes_of_more]))
    frequency = keys // routing.num_blocks
    return keys % routing.num_blocks, frequency.double().clamp_(min=UNSEEN_WEIGHT), sizes.double()


def _rows_with_blocks(
    counts: RowCounts, routing: RowRouting
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows, their blocks, how often they were looked up as float64) of rows that have a block,
    some at a time."""
    for first in range(0, routing.num_embeddings, ROWS_AT_A_TIME):
        rows = torch.arange(first, min(first + ROWS_AT_A_TIME, routing.num_embeddings))
        of_rows = routing.block_of(rows)
        frequency = counts[first : first + ROWS_AT_A_TIME].double().clamp_(min=UNSEEN_WEIGHT)
        kept = of_rows < routing.num_blocks
        yield rows[kept], of_rows[kept], frequency[kept]
