"""Block structure: whole columns of a block are retained or dropped, by their mean square over the
block's seen rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search.budget import Budget, Size, SizeOutOfReachError, keep_within, out_of_reach
from dnis_torchrec.search.pruning.tables import PrunedTable

_LIMB_BITS = 28
"""Two integers of so many bits hold a square as a fraction of its column's largest one. Sums of
2^35 rows fit int64."""


def kept_columns(
    tables: list[PrunedTable],
    blocks: RowBlocks,
    wanted: Size | float,
    per_table: bool,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Chooses columns: what a size affords, or what lies above a threshold. The same on every rank;
    no table changes."""
    scores = {table.name: mean_squares(table, ranks) for table in tables}
    largest = max(float(score.max()) for score in scores.values()) ** 0.5
    if not isinstance(wanted, Size):
        kept = {name: score > wanted**2 for name, score in scores.items()}
        check_leaves_something(
            largest, wanted, any(bool(columns.any()) for columns in kept.values())
        )
        return kept
    check_leaves_something(largest)
    budget, names = Budget.unchecked(wanted, blocks), [table.name for table in tables]
    costs = budget.column_costs
    if not per_table:
        shares = dict.fromkeys(names, 1.0)
        kept = _keep_columns_within(names, scores, costs, budget.amount)
    else:
        totals = {
            name: float(cost.sum()) * blocks.embedding_dims[name] for name, cost in costs.items()
        }
        shares = {name: totals[name] / sum(totals.values()) for name in names}
        share, kept = min(1.0, budget.amount / sum(totals.values())), {}
        for name in names:
            kept |= _keep_columns_within(
                [name], scores, costs, share * totals[name] * (1 + 1e-12)
            )  # as in `Budget.of`
    if not any(bool(columns.any()) for columns in kept.values()):
        prices = {
            name: costs[name][(scores[name] > 0).any(dim=1)] / share_of_table
            for name, share_of_table in shares.items()
            if share_of_table
        }
        raise out_of_reach(
            wanted, blocks, min(float(cost.min()) for cost in prices.values() if cost.numel())
        )
    return kept


def check_leaves_something(
    largest: float, threshold: float | None = None, leaves: bool = True
) -> None:
    """Checks that pruning leaves a value: tables without one are no model."""
    if largest == 0:
        requirement = "a value that is not zero, in a row that training looked up"
        raise SizeOutOfReachError(describe("tables", requirement, "none"))
    if not leaves:
        requirement = f"a number below {largest:.6g}, above which nothing is left"
        raise SizeOutOfReachError(describe("threshold", requirement, threshold))


def largest_magnitude(table: PrunedTable, ranks: Ranks) -> float:
    """The largest magnitude of a value in a row that training looked up. One reduction over ranks."""
    return float(_largest_squares(table, ranks).max()) ** 0.5


@torch.no_grad()
def keep_columns_(table: PrunedTable, kept: Tensor) -> None:
    """Zeroes the other columns, and rows of no block, in this rank's shards. Local, no collective."""
    padded = torch.cat([kept, torch.zeros(1, kept.shape[1], dtype=torch.bool)])
    for chunk, rows, columns in table.chunks():
        chunk.mul_(padded[table.blocks_of(rows), columns].to(chunk.device))


def nonzero_columns(table: PrunedTable, ranks: Ranks) -> Tensor:
    """``(S, D)`` bool: columns of blocks with at least one value that is not zero. One reduction
    over ranks."""
    return _largest_squares(table, ranks) > 0


def mean_squares(table: PrunedTable, ranks: Ranks) -> Tensor:
    """Mean square of every column of every block over its seen rows. Two reductions over ranks."""
    largest = _largest_squares(table, ranks)
    unit = torch.where(
        largest > 0, largest / torch.frexp(largest).mantissa, 1.0
    )  # a power of two, exactly
    limbs = torch.zeros(2, *_padded_shape(table), dtype=torch.int64)
    padded = torch.cat([unit, torch.ones(1, unit.shape[1], dtype=torch.float64)])
    for chunk, rows, columns in table.counted_chunks():
        block = table.blocks_of(rows)
        scaled = (
            _seen_squares(table, chunk, rows).div_(padded[block, columns]).mul_(2.0**_LIMB_BITS)
        )
        high = scaled.floor()
        limbs[0, :, columns].index_add_(0, block, high.long())
        limbs[1, :, columns].index_add_(
            0, block, scaled.sub_(high).mul_(2.0**_LIMB_BITS).round_().long()
        )
    high, low = ranks.sum_(limbs)[:, : table.routing.num_blocks].double()
    sums = (high + low / 2.0**_LIMB_BITS) / 2.0**_LIMB_BITS * unit
    return sums / _num_seen_rows(table).clamp(min=1).unsqueeze(1)


def _largest_squares(table: PrunedTable, ranks: Ranks) -> Tensor:
    """``(S, D)`` float64: the largest square of a seen row in every column of every block."""
    largest = torch.zeros(_padded_shape(table), dtype=torch.float64)
    for chunk, rows, columns in table.counted_chunks():
        squares = _seen_squares(table, chunk, rows)
        index = table.blocks_of(rows).unsqueeze(1).expand_as(squares)
        largest[:, columns].scatter_reduce_(0, index, squares, "amax")
    return ranks.max_(largest)[: table.routing.num_blocks]


def _seen_squares(table: PrunedTable, chunk: Tensor, rows: slice) -> Tensor:
    squares = (
        chunk.cpu().double().square()
    )  # not in place: of float64 on a CPU this is the table itself
    squares[table.counts[rows] == 0] = 0
    return squares


def _padded_shape(table: PrunedTable) -> tuple[int, int]:
    """One row more than there are blocks, for rows of no block."""
    return table.routing.num_blocks + 1, table.config.embedding_dim


def _num_seen_rows(table: PrunedTable) -> Tensor:
    """``(S,)`` float64. Every rank has all counts, so nothing is reduced."""
    total = torch.zeros(table.routing.num_blocks + 1, dtype=torch.int64)
    step = 1 << 16
    for first in range(0, table.config.num_embeddings, step):
        rows = slice(first, min(first + step, table.config.num_embeddings))
        total.index_add_(0, table.blocks_of(rows), (table.counts[rows] > 0).long())
    return total[: table.routing.num_blocks].double()


def _keep_columns_within(
    names: list[str], scores: Mapping[str, Tensor], costs: Mapping[str, Tensor], amount: float
) -> dict[str, Tensor]:
    flat = torch.cat([scores[name].flatten() for name in names])
    cost = torch.cat([costs[name].repeat_interleave(scores[name].shape[1]) for name in names])
    kept = keep_within(flat, cost, amount).split([scores[name].numel() for name in names])
    return {
        name: columns.view(scores[name].shape) for name, columns in zip(names, kept, strict=True)
    }
