"""Spending bytes: one order of all steps, steepest first, cut where the bytes end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.allocation.hulls import RowOptions, lower_hull


@dataclass(frozen=True, eq=False)
class Path:
    """Steps of all blocks to wider rows, steepest first; ties in the order of tables, then blocks.
    ``(P,)`` each."""

    block: Tensor
    row_bytes: Tensor
    cost: Tensor
    gain: Tensor

    @staticmethod
    def of(options: RowOptions) -> Path:
        """The path over the lower convex hulls of all blocks."""
        corner = lower_hull(options.num_bytes.double(), options.loss)
        nth = torch.arange(corner.shape[1]).expand_as(corner)
        origin = torch.cummax(nth.masked_fill(~corner, 0), dim=1).values[:, :-1]
        cost = options.num_bytes[:, 1:] - options.num_bytes.gather(1, origin)
        gain = options.loss.gather(1, origin) - options.loss[:, 1:]
        slope = torch.where(corner[:, 1:], gain / cost.clamp(min=1), torch.inf)
        slope = torch.cummin(slope, dim=1).values  # rounding shall not swap steps of a block
        block, step = corner[:, 1:].nonzero().unbind(1)
        order = torch.sort(slope[block, step], descending=True, stable=True).indices
        block, step = block[order], step[order]
        return Path(block, step + 1, cost[block, step], gain[block, step])


@dataclass(frozen=True, eq=False)
class Spent:
    """The rows that some bytes have bought."""

    row_bytes: Tensor
    num_bytes: int
    smallest: int


@dataclass(frozen=True, eq=False)
class Purse:
    """A path, and the fixed bytes of tables beside its steps."""

    path: Path
    table_of_block: Tensor
    fixed: Tensor

    def spend(self, budget: int, steps: Tensor | None = None) -> Spent:
        """The most that a budget buys, met from below."""
        order = torch.arange(len(self.path.block)) if steps is None else steps
        bought, left, most = self._none(), budget, torch.inf
        is_open = torch.zeros(len(self.fixed), dtype=torch.bool)
        smallest = 0
        while order.numel():
            costs, gains = self._costs(order, is_open), self.path.gain[order].cumsum(0)
            if left < int(costs.min()) and bool(is_open.any()):
                break
            allowed = int((gains <= most).sum())
            totals = costs.cumsum(0)
            count = min(allowed, int(torch.searchsorted(totals, left, right=True)))
            if allowed and not bool(is_open.any()):
                smallest = min(smallest or int(costs[0]), int(costs[0]))
            if count:
                self._take(bought, order[:count])
                is_open[self._tables(order[:count])] = True
                left, most = left - int(totals[count - 1]), most - float(gains[count - 1])
            if count == allowed:
                break
            most = min(most, float(self.path.gain[order[count]]))
            order = self._cheaper(order[count:], int(costs[count]), is_open)
        return Spent(bought, budget - left, smallest)

    def first(self, count: int) -> Spent:
        """What the first steps of the path buy, whatever they cost."""
        steps, bought = torch.arange(count), self._none()
        is_open = torch.zeros(len(self.fixed), dtype=torch.bool)
        self._take(bought, steps)
        return Spent(bought, int(self._costs(steps, is_open).sum()), 0)

    def _none(self) -> Tensor:
        return torch.zeros(len(self.table_of_block), dtype=torch.int64)

    def _take(self, bought: Tensor, steps: Tensor) -> None:
        bought.scatter_reduce_(0, self.path.block[steps], self.path.row_bytes[steps], "amax")

    def _tables(self, steps: Tensor) -> Tensor:
        return self.table_of_block[self.path.block[steps]]

    def _costs(self, steps: Tensor, is_open: Tensor) -> Tensor:
        """Returns the bytes of each step; the first step of a table that is not open also pays its
        fixed bytes."""
        tables = self._tables(steps)
        first = torch.full((len(self.fixed),), len(steps)).scatter_reduce_(
            0, tables, torch.arange(len(steps)), "amin", include_self=True
        )
        opens = (first < len(steps)) & ~is_open
        costs = self.path.cost[steps].clone()
        costs[first[opens]] += self.fixed[opens]
        return costs

    def _cheaper(self, order: Tensor, limit: int, is_open: Tensor) -> Tensor:
        """Steps after the first one, up to where each block has one that costs the limit or more."""
        blocks, rest = self.path.block[order], order[1:]
        dear = self._costs(rest, is_open) >= limit
        end = torch.full((len(self.table_of_block),), len(rest))
        end.scatter_reduce_(0, blocks[1:][dear], dear.nonzero().squeeze(1), "amin")
        end[blocks[0]] = 0
        return rest[torch.arange(len(rest)) < end[blocks[1:]]]
