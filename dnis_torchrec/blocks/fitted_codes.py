r"""Codes: a column of a block in k bits a value, with one scale and one shift, chosen for the least
squared error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dnis_torchrec.blocks.bit_fields import FLOAT_BITS

LARGEST_SHIFT = 2**15 - 1
LEAST_SCALE = 2.0**-120
"""Values below it are 0 in any float32 that anybody trains."""
LARGEST_SCALE = float(torch.finfo(torch.bfloat16).max)
ROUNDS = 2
"""Number of rounds of alternating least squares after the search."""
CLIPS = {
    **{2: (0.05, 1, 12), 4: (0.08, 1, 12), 8: (0.15, 1, 12), 16: (0.2, 1, 10), 32: (0.3, 1, 8)},
    **{64: (0.4, 1, 5), 128: (0.5, 1, 4), 256: (0.6, 1, 3), 65536: (1, 1, 1)},
}
"""Levels -> shares of a column's range that are tried: from, to, how many. Fewer levels clip more.
"""


@dataclass(frozen=True, eq=False)
class FittedCodes:
    """The best codes of every column of a block at several widths."""

    scale: Tensor
    shift: Tensor
    error: Tensor


def fit_codes(values: Tensor, weights: Tensor, bits: Sequence[int]) -> FittedCodes:
    r"""Scale and shift of every column of a block, for the least :math:`\sum_i w_i (x_i - s (q_i +
    m / 2))^2`."""
    num_columns = values.shape[1]
    scale, shift = (
        torch.ones(len(bits), num_columns),
        torch.zeros(len(bits), num_columns, dtype=torch.int16),
    )
    error = torch.zeros(len(bits), num_columns, dtype=torch.float64)
    columns = _SortedColumns.of(values, weights) if values.numel() else None
    best: _Codes | None = None
    for width, index in sorted((width, index) for index, width in enumerate(bits)):
        if width == 0:
            error[index] = 1.0
        elif width < FLOAT_BITS and columns is not None:
            best = _best_codes(columns, 2**width, best)
            scale[index], shift[index] = best.scale.flatten().float(), best.shift.flatten().short()
            error[index] = (
                best.error / columns.energy.clamp(min=torch.finfo(torch.float64).tiny)
            ).flatten()
    if columns is not None:
        error[:, columns.energy.flatten() == 0] = 0
    return FittedCodes(scale, shift, error)


@dataclass(frozen=True, eq=False)
class _SortedColumns:
    """Columns about their weighted means, sorted, with running sums: sums over the values of a code
    are differences."""

    values: Tensor
    weights: Tensor
    mean: Tensor
    running: Tensor
    spread: Tensor
    energy: Tensor

    @staticmethod
    def of(values: Tensor, weights: Tensor) -> _SortedColumns:
        ordered, order = torch.sort(values.T.contiguous(), dim=1, stable=True)
        wide, weight = ordered.double(), weights.double()[order]
        mean = (weight * wide).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        mean = torch.where(wide[:, :1] == wide[:, -1:], wide[:, :1], mean)
        centred = wide - mean
        running = torch.zeros(2, *weight.shape[:1], weight.shape[1] + 1, dtype=torch.float64)
        torch.cumsum(weight, 1, out=running[0, :, 1:])
        torch.cumsum(weight * centred, 1, out=running[1, :, 1:])
        spread = (weight * centred.square()).sum(1, keepdim=True)
        return _SortedColumns(
            centred, weight, mean, running, spread, (weight * wide.square()).sum(1, keepdim=True)
        )

    @property
    def is_constant(self) -> Tensor:
        """``(D, 1)``: columns of one value."""
        return self.values[:, :1] == self.values[:, -1:]

    def sums_of_codes(
        self, scale: Tensor, low: Tensor, levels: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sums of q, q^2 and q x over all values, for the nearest codes of some scales and
        lowest levels."""
        if levels > self.values.shape[1]:
            steps = (self.values.unsqueeze(1) - low.unsqueeze(2)) / scale.unsqueeze(2)
            codes = steps.round_().clamp_(0, levels - 1)
            weighted = codes * self.weights.unsqueeze(1)
            return (
                weighted.sum(2),
                (weighted * codes).sum(2),
                (weighted * self.values.unsqueeze(1)).sum(2),
            )
        nth = torch.arange(levels - 1, dtype=torch.float64)
        boundaries = low.unsqueeze(2) + scale.unsqueeze(2) * (nth + 0.5)
        places = torch.searchsorted(self.values, boundaries.flatten(1))
        below, sum_below = (sums.gather(1, places).view_as(boundaries) for sums in self.running)
        above = self.running[0, :, -1:].unsqueeze(2) - below
        sum_above = self.running[1, :, -1:] * (levels - 1) - sum_below.sum(2)
        return above.sum(2), above @ (2 * nth + 1), sum_above


@dataclass(frozen=True, eq=False)
class _Codes:
    """Scales and shifts ``(D, G)`` as they are stored, what they err by, and the least squares that
    would be better."""

    scale: Tensor
    shift: Tensor
    error: Tensor
    better_scale: Tensor
    better_low: Tensor

    def chosen(self, index: Tensor) -> _Codes:
        """One of the G of every column."""
        fields = ("scale", "shift", "error", "better_scale", "better_low")
        return replace(self, **{name: getattr(self, name).gather(1, index) for name in fields})


def _best_codes(columns: _SortedColumns, levels: int, narrower: _Codes | None) -> _Codes:
    """The best of all that was tried; those of fewer levels are among it, so more levels never err
    by more."""
    if narrower is not None and bool(columns.is_constant.all()):
        return narrower
    lows, highs = _clipped_ranges(columns, levels)
    scales = (highs - lows) / (levels - 1)
    if narrower is not None:
        scales = torch.cat([scales, narrower.scale], dim=1)
        lows = torch.cat([lows, narrower.scale * narrower.shift / 2 - columns.mean], dim=1)
    tried = _rounded(columns, scales, lows, levels)
    best = tried.chosen(tried.error.argmin(1, keepdim=True))
    for _ in range(ROUNDS):
        again = _rounded(columns, best.better_scale, best.better_low, levels)
        both = (
            torch.cat([getattr(best, name), getattr(again, name)], dim=1)
            for name in best.__dataclass_fields__
        )
        pair = _Codes(*both)
        best = pair.chosen(pair.error.argmin(1, keepdim=True))
    return _constant_where(columns, best)


def _clipped_ranges(columns: _SortedColumns, levels: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest levels to try, about the mean, ``(D, G)`` each: fewer levels clip more."""
    clips = torch.linspace(*CLIPS[levels], dtype=torch.float64)
    lowest, highest = columns.values[:, :1], columns.values[:, -1:]
    reach = torch.maximum((lowest + columns.mean).abs(), (highest + columns.mean).abs())
    lows = torch.cat([-reach * clips - columns.mean, lowest * clips], dim=1)
    return lows, torch.cat([reach * clips - columns.mean, highest * clips], dim=1)


def _rounded(columns: _SortedColumns, scale: Tensor, low: Tensor, levels: int) -> _Codes:
    """Rounds scales and lowest levels to what can be stored; returns their squared errors, and
    better ones to try."""
    smallest = (2 * (low + columns.mean).abs() / LARGEST_SHIFT).clamp(min=LEAST_SCALE)
    scale = _up_to_bfloat16(torch.maximum(scale, smallest), smallest)
    shift = (2 * (low + columns.mean) / scale).round_().clamp_(-LARGEST_SHIFT, LARGEST_SHIFT)
    low = scale * shift / 2 - columns.mean
    q, q2, qx = columns.sums_of_codes(scale, low, levels)
    weight, total = columns.running[0, :, -1:], columns.running[1, :, -1:]
    error = columns.spread - 2 * scale * qx - 2 * low * total
    error += scale.square() * q2 + 2 * scale * low * q + low.square() * weight
    determinant = q2 * weight - q.square()
    solvable = determinant > 1e-12 * q2 * weight
    better = torch.where(
        solvable, (qx * weight - q * total) / torch.where(solvable, determinant, 1.0), scale
    )
    better_low = torch.where(solvable, (total - better * q) / weight, low)
    usable = better > 0
    return _Codes(
        scale,
        shift,
        error.clamp_(min=0),
        torch.where(usable, better, scale),
        torch.where(usable, better_low, low),
    )


def _up_to_bfloat16(scale: Tensor, smallest: Tensor) -> Tensor:
    """The nearest bfloat16, or the next one where that is below the smallest scale that a shift
    allows."""
    nearest = scale.clamp(max=LARGEST_SCALE).float().bfloat16().double()
    next_one = nearest + torch.exp2(torch.frexp(nearest).exponent.double() - 8)
    return torch.where(nearest < smallest, next_one.clamp(max=LARGEST_SCALE), nearest)


def _constant_where(columns: _SortedColumns, found: _Codes) -> _Codes:
    """Columns of one value get the scale of which half an integer comes nearest to it: code 0 is
    that value."""
    constant, value = columns.is_constant, columns.mean
    if not bool(constant.any()):
        return found
    fraction, exponent = torch.frexp(value.abs())
    scales = (1 + torch.arange(128, dtype=torch.float64) / 128) * torch.exp2(exponent.double() - 14)
    scales = scales.clamp(LEAST_SCALE)
    shifts = (2 * value / scales).round_()
    distance = (
        (scales * shifts / 2 - value).abs().masked_fill(shifts.abs() > LARGEST_SHIFT, torch.inf)
    )
    nearest = distance.argmin(1, keepdim=True)
    is_zero = fraction == 0
    scale = torch.where(is_zero, 1.0, scales.gather(1, nearest))
    shift = torch.where(is_zero, 0.0, shifts.gather(1, nearest))
    error = (scale * shift / 2 - value).square() * columns.running[0, :, -1:]
    return replace(
        found,
        scale=torch.where(constant, scale, found.scale),
        shift=torch.where(constant, shift, found.shift),
        error=torch.where(constant, error, found.error),
    )
