"""Spending bytes: the widths that a block may have, and the order in which bytes go to blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import FLOAT_BITS, is_coded
from dnis_torchrec.scheme import COLUMN_SCALE_BYTES

LOOK_AHEAD = 24
"""Steps that are tried for the bytes that are left of a row."""


@dataclass(frozen=True, eq=False)
class ColumnSteps:
    """Steps from width to width of every block's columns, steepest first, ``(A, M)`` each."""

    column: Tensor
    target: Tensor
    bits: Tensor
    gain: Tensor
    num_codes: Tensor
    floats: Tensor
    origin: Tensor


@dataclass(frozen=True, eq=False)
class RowOptions:
    """Cost and loss of rows of r bytes, for every block and every r from 0, ``(A, R + 1)`` each."""

    num_bytes: Tensor
    loss: Tensor
    steps_in: Tensor
    spare: Tensor


def lower_hull(rate: Tensor, loss: Tensor) -> Tensor:
    """Marks the points that are corners of the falling part of the lower convex hull of loss over
    rate."""
    num_rows, num_points = rate.shape
    corners = torch.zeros(num_rows, num_points, dtype=torch.int64)
    top = torch.zeros(num_rows, dtype=torch.int64)
    for point in range(1, num_points):
        rate_here, loss_here = rate[:, point], loss[:, point]
        rate_last, loss_last = (
            of.gather(1, corners.gather(1, top[:, None]))[:, 0] for of in (rate, loss)
        )
        better = (loss_here < loss_last) | ((loss_here == loss_last) & (rate_here < rate_last))
        while True:
            last, previous = (
                corners.gather(1, place[:, None]) for place in (top, (top - 1).clamp(min=0))
            )
            rate_last, loss_last = (of.gather(1, last)[:, 0] for of in (rate, loss))
            rate_first, loss_first = (of.gather(1, previous)[:, 0] for of in (rate, loss))
            old = (loss_first - loss_last) * (rate_here - rate_last)
            steeper = old <= (loss_last - loss_here) * (rate_last - rate_first)
            drop = better & (top > 0) & (steeper | (rate_here <= rate_last))
            if not bool(drop.any()):
                break
            top = top - drop.long()
        top = top + better.long()
        corner = torch.where(better, point, corners.gather(1, top[:, None])[:, 0])
        corners.scatter_(1, top[:, None], corner[:, None])
    is_corner = torch.arange(num_points) <= top[:, None]
    corner = torch.zeros(num_rows, num_points, dtype=torch.bool)
    return corner.scatter_(1, torch.where(is_corner, corners, 0), True)


def column_steps(loss: Tensor, rows: Tensor, bits: Tensor) -> ColumnSteps:
    """The steps on the hull of every column, in the order of their slopes within each block."""
    num_blocks, num_columns, num_widths = loss.shape
    scales = COLUMN_SCALE_BYTES * 8 * is_coded(bits) / rows.clamp(min=1).double()[:, None]
    rate = (bits + scales).unsqueeze(1).expand_as(loss)
    hull = lower_hull(rate.flatten(0, 1), loss.flatten(0, 1)).view_as(loss)
    corner = hull & (rows > 0)[:, None, None]
    corner[..., 0] = True
    nth = torch.arange(num_widths).expand_as(corner)
    origin = torch.cummax(nth.masked_fill(~corner, 0), dim=2).values[..., :-1]
    target = nth[..., 1:]
    gain = loss.gather(2, origin) - loss[..., 1:]
    slope = gain / (rate[..., 1:] - rate.gather(2, origin))
    slope = torch.where(corner[..., 1:], slope, torch.inf)
    slope = torch.cummin(slope, dim=2).values  # rounding shall not swap steps
    valid, steps = corner[..., 1:].flatten(1), num_widths - 1
    slope = slope.flatten(1).masked_fill(~valid, -1)
    order = slope.argsort(dim=1, descending=True, stable=True)
    nth_step = torch.arange(order.shape[1]).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, nth_step)
    place = place.view(num_blocks, num_columns, steps)
    place_of_origin = place.gather(2, (origin - 1).clamp(min=0))
    origin_place = torch.where(origin > 0, place_of_origin, -1)
    column = torch.arange(num_columns).repeat_interleave(steps).expand_as(order)

    def ordered(values: Tensor) -> Tensor:
        return values.flatten(1).gather(1, order)

    is_valid = ordered(valid)
    codes, floats = is_coded(bits).long(), (bits == FLOAT_BITS).long()
    return ColumnSteps(
        column=column.gather(1, order),
        target=ordered(target),
        bits=ordered(bits[target] - bits[origin]) * is_valid,
        gain=ordered(gain) * is_valid,
        num_codes=ordered(codes[target] - codes[origin]) * is_valid,
        floats=ordered(floats[target] - floats[origin]) * is_valid,
        origin=ordered(origin_place),
    )


def row_options(steps: ColumnSteps, loss_of_none: Tensor, rows: Tensor) -> RowOptions:
    """The best use of a row of r bytes, for every block and r."""
    sums = [_running(part) for part in (steps.bits, steps.num_codes, steps.floats, steps.gain)]
    widest = -(-int(sums[0].max()) // 8)
    capacity = (8 * torch.arange(widest + 1)).expand(len(rows), -1).contiguous()
    index = torch.searchsorted(sums[0], capacity, right=True) - 1
    bits, codes, floats, gain = (part.gather(1, index) for part in sums)
    # the last one: what nobody takes
    spare = torch.zeros(*index.shape, LOOK_AHEAD + 1, dtype=torch.bool)
    last = steps.bits.shape[1] - 1
    for look in range(LOOK_AHEAD):
        place = (index + look).clamp(max=last)
        origin_place = steps.origin.gather(1, place) - index
        origin = origin_place.clamp(min=0, max=LOOK_AHEAD)[..., None]
        ready = (origin_place < 0) | spare.gather(2, origin)[..., 0]
        extra = steps.bits.gather(1, place)
        fits = ready & (extra > 0) & (index + look <= last) & (bits + extra <= capacity)
        spare[..., look] = fits
        bits = bits + extra * fits
        codes = codes + steps.num_codes.gather(1, place) * fits
        floats = floats + steps.floats.gather(1, place) * fits
        gain = gain + steps.gain.gather(1, place) * fits
    stride = -(-(bits + 7 * torch.minimum(codes, floats)) // 8)
    num_bytes = rows[:, None] * stride + COLUMN_SCALE_BYTES * codes
    return RowOptions(num_bytes, loss_of_none[:, None] - gain, index, spare[..., :LOOK_AHEAD])


def widths_of(steps: ColumnSteps, options: RowOptions, width: Tensor, num_columns: int) -> Tensor:
    """Index of the width of every column, once the bytes of every block's rows are chosen."""
    index = width[:, None]
    place_taken = options.steps_in.gather(1, index)
    place = torch.arange(steps.bits.shape[1]).expand_as(steps.bits)
    look = place - place_taken
    spare = options.spare[torch.arange(len(width)), width]
    is_taken = (look < 0) | ((look < LOOK_AHEAD) & spare.gather(1, look.clamp(0, LOOK_AHEAD - 1)))
    target = torch.where(is_taken & (steps.bits > 0), steps.target, 0)
    widths = torch.zeros(len(width), num_columns, dtype=torch.int64)
    return widths.scatter_reduce_(1, steps.column, target, "amax")


def _running(values: Tensor) -> Tensor:
    """Sums before each step, and of all: ``(A, M + 1)``."""
    return torch.cat([torch.zeros_like(values[:, :1]), values.cumsum(1)], dim=1)


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
    overhead: Tensor

    def spend(self, budget: int) -> Spent:
        """The most that a budget buys, met from below."""
        order = torch.arange(len(self.path.block))
        bought, rest, most = self._none(), budget, torch.inf
        is_open = torch.zeros(len(self.overhead), dtype=torch.bool)
        smallest = 0
        while order.numel():
            costs, gains = self._costs(order, is_open), self.path.gain[order].cumsum(0)
            if rest < int(costs.min()) and bool(is_open.any()):
                break
            limit = int((gains <= most).sum())
            totals = costs.cumsum(0)
            count = min(limit, int(torch.searchsorted(totals, rest, right=True)))
            if limit and not bool(is_open.any()):
                smallest = min(smallest or int(costs[0]), int(costs[0]))
            if count:
                self._take(bought, order[:count])
                is_open[self._tables(order[:count])] = True
                rest, most = rest - int(totals[count - 1]), most - float(gains[count - 1])
            if count == limit:
                break
            most = min(most, float(self.path.gain[order[count]]))
            order = self._cheaper(order[count:], int(costs[count]), is_open)
        return Spent(bought, budget - rest, smallest)

    def first(self, count: int) -> Spent:
        """What the first steps of the path buy, whatever they cost."""
        steps, bought = torch.arange(count), self._none()
        is_open = torch.zeros(len(self.overhead), dtype=torch.bool)
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
        first = torch.full((len(self.overhead),), len(steps)).scatter_reduce_(
            0, tables, torch.arange(len(steps)), "amin", include_self=True
        )
        opens = (first < len(steps)) & ~is_open
        costs = self.path.cost[steps].clone()
        costs[first[opens]] += self.overhead[opens]
        return costs

    def _cheaper(self, order: Tensor, limit: int, is_open: Tensor) -> Tensor:
        """Steps after the first, up to where each block has one that costs the limit or more."""
        blocks, rest = self.path.block[order], order[1:]
        dear = self._costs(rest, is_open) >= limit
        end = torch.full((len(self.table_of_block),), len(rest))
        end.scatter_reduce_(0, blocks[1:][dear], dear.nonzero().squeeze(1), "amin")
        end[blocks[0]] = 0
        return rest[torch.arange(len(rest)) < end[blocks[1:]]]
