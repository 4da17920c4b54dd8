r"""Bits by rate and distortion: which columns of which blocks get how many bits, for every number
of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.bit_fields import FLOAT_BITS, is_coded
from dnis_torchrec.forms import COLUMN_SCALE_BYTES

LOOK_AHEAD = 24
"""Steps that are tried for the bytes that are left of a row."""


@dataclass(frozen=True, eq=False)
class ColumnSteps:
    """Steps from width to width of every block's columns, steepest first, ``(A, M)`` each."""

    column: Tensor
    target: Tensor
    bits: Tensor
    gain: Tensor
    coded: Tensor
    floats: Tensor
    before: Tensor


@dataclass(frozen=True, eq=False)
class RowOptions:
    """Cost and loss of rows of r bytes, for every block and every r from 0, ``(A, R + 1)`` each."""

    num_bytes: Tensor
    loss: Tensor
    taken: Tensor
    filled: Tensor


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
            rate_last, loss_last = rate.gather(1, last)[:, 0], loss.gather(1, last)[:, 0]
            rate_before, loss_before = (
                rate.gather(1, previous)[:, 0],
                loss.gather(1, previous)[:, 0],
            )
            steeper = (loss_before - loss_last) * (rate_here - rate_last) <= (
                loss_last - loss_here
            ) * (rate_last - rate_before)
            removed = better & (top > 0) & (steeper | (rate_here <= rate_last))
            if not bool(removed.any()):
                break
            top = top - removed.long()
        top = top + better.long()
        corners.scatter_(
            1,
            top[:, None],
            torch.where(better, point, corners.gather(1, top[:, None])[:, 0])[:, None],
        )
    is_corner = torch.arange(num_points) <= top[:, None]
    found = torch.zeros(num_rows, num_points, dtype=torch.bool)
    return found.scatter_(1, torch.where(is_corner, corners, 0), True)


def column_steps(loss: Tensor, rows: Tensor, bits: Tensor) -> ColumnSteps:
    """The steps on the hull of every column, in the order of their slopes within each block."""
    num_blocks, num_columns, num_widths = loss.shape
    scales = COLUMN_SCALE_BYTES * 8 * is_coded(bits) / rows.clamp(min=1).double()[:, None]
    rate = (bits + scales).unsqueeze(1).expand_as(loss)
    points = (num_blocks * num_columns, num_widths)
    corner = (
        lower_hull(rate.reshape(points), loss.reshape(points)).view_as(loss)
        & (rows > 0)[:, None, None]
    )
    corner[..., 0] = True
    nth = torch.arange(num_widths).expand_as(corner)
    origin = torch.cummax(nth.masked_fill(~corner, 0), dim=2).values[..., :-1]
    target = nth[..., 1:]
    gain = loss.gather(2, origin) - loss[..., 1:]
    slope = gain / (rate[..., 1:] - rate.gather(2, origin))
    slope = torch.cummin(
        torch.where(corner[..., 1:], slope, torch.inf), dim=2
    ).values  # rounding shall not swap steps
    valid = corner[..., 1:].flatten(1)
    order = torch.sort(
        slope.flatten(1).masked_fill(~valid, -1), dim=1, descending=True, stable=True
    ).indices
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1]).expand_as(order)
    )
    steps = num_widths - 1
    place_of_origin = place.view(num_blocks, num_columns, steps).gather(
        2, (origin - 1).clamp(min=0)
    )
    before = torch.where(origin > 0, place_of_origin, -1)
    column = torch.arange(num_columns).repeat_interleave(steps).expand_as(order)

    def ordered(values: Tensor) -> Tensor:
        return values.flatten(1).gather(1, order)

    is_valid = ordered(valid)
    coded, floats = is_coded(bits).long(), (bits == FLOAT_BITS).long()
    return ColumnSteps(
        column=column.gather(1, order),
        target=ordered(target),
        bits=ordered(bits[target] - bits[origin]) * is_valid,
        gain=ordered(gain) * is_valid,
        coded=ordered(coded[target] - coded[origin]) * is_valid,
        floats=ordered(floats[target] - floats[origin]) * is_valid,
        before=ordered(before),
    )


def row_options(steps: ColumnSteps, loss_of_none: Tensor, rows: Tensor) -> RowOptions:
    """The best use of a row of r bytes, for every block and r."""
    sums = [_running(part) for part in (steps.bits, steps.coded, steps.floats, steps.gain)]
    widest = -(-int(sums[0].max()) // 8)
    capacity = (8 * torch.arange(widest + 1)).expand(len(rows), -1).contiguous()
    taken = torch.searchsorted(sums[0], capacity, right=True) - 1
    bits, coded, floats, gain = (part.gather(1, taken) for part in sums)
    filled = torch.zeros(
        *taken.shape, LOOK_AHEAD + 1, dtype=torch.bool
    )  # the last one: what nobody takes
    last = steps.bits.shape[1] - 1
    for ahead in range(LOOK_AHEAD):
        place = (taken + ahead).clamp(max=last)
        before = steps.before.gather(1, place) - taken
        ready = (before < 0) | filled.gather(2, before.clamp(min=0, max=LOOK_AHEAD)[..., None])[
            ..., 0
        ]
        added = steps.bits.gather(1, place)
        fits = ready & (added > 0) & (taken + ahead <= last) & (bits + added <= capacity)
        filled[..., ahead] = fits
        bits = bits + added * fits
        coded = coded + steps.coded.gather(1, place) * fits
        floats = floats + steps.floats.gather(1, place) * fits
        gain = gain + steps.gain.gather(1, place) * fits
    stride = -(-(bits + 7 * torch.minimum(coded, floats)) // 8)
    num_bytes = rows[:, None] * stride + COLUMN_SCALE_BYTES * coded
    return RowOptions(num_bytes, loss_of_none[:, None] - gain, taken, filled[..., :LOOK_AHEAD])


def widths_of(steps: ColumnSteps, options: RowOptions, chosen: Tensor, num_columns: int) -> Tensor:
    """Index of the width of every column, once the bytes of every block's rows are chosen."""
    index = chosen[:, None]
    taken = options.taken.gather(1, index)
    place = torch.arange(steps.bits.shape[1]).expand_as(steps.bits)
    ahead = place - taken
    filled = options.filled[torch.arange(len(chosen)), chosen]
    is_taken = (ahead < 0) | (
        (ahead < LOOK_AHEAD) & filled.gather(1, ahead.clamp(0, LOOK_AHEAD - 1))
    )
    reached = torch.where(is_taken & (steps.bits > 0), steps.target, 0)
    widths = torch.zeros(len(chosen), num_columns, dtype=torch.int64)
    return widths.scatter_reduce_(1, steps.column, reached, "amax")


def _running(values: Tensor) -> Tensor:
    """Sums before each step, and of all: ``(A, M + 1)``."""
    return torch.cat([torch.zeros_like(values[:, :1]), values.cumsum(1)], dim=1)
