"""The bit layout of packed rows: every column of a block has a width of its own, in bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dnis_torchrec.checks import check

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
"""Bits that a value may take: 0 is a dropped column, 32 a float32, all others are codes."""
FLOAT_BITS = 32


def check_widths(bits: Tensor, place: str) -> None:
    """Checks that every width is one of `WIDTHS`."""
    unknown_widths = sorted(set(bits.unique().tolist()) - set(WIDTHS))
    check(not unknown_widths, place, f"bits among {WIDTHS}", unknown_widths)


def is_coded(bits: Tensor) -> Tensor:
    """Marks the columns stored as integer codes: neither dropped nor float32."""
    return (bits > 0) & (bits < FLOAT_BITS)


def field_offsets(bits: Tensor) -> Tensor:
    """Returns the offset of every field in its row, in bits."""
    return _fields(bits)[0]


def row_strides(bits: Tensor) -> Tensor:
    """Returns how many bytes a row of each block takes; the last byte may be part empty."""
    return -(-_fields(bits)[1] // 8)


def _fields(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the offset of every field and the length of every row, both in bits."""
    widths = bits.long()
    ends = widths.cumsum(1)
    for column in (widths == FLOAT_BITS).any(dim=0).nonzero().flatten().tolist():
        begin = ends[:, column] - widths[:, column]
        ends[:, column:] += (-begin % 8 * (widths[:, column] == FLOAT_BITS)).unsqueeze(1)
    return ends - widths, ends[:, -1]


def pack_fields(fields: Tensor, bits: Tensor) -> Tensor:
    """Writes the codes of each row of a block side by side, as bit fields in a row of bytes."""
    (offsets,), stride = field_offsets(bits.unsqueeze(0)), int(row_strides(bits.unsqueeze(0)))
    row_bytes = torch.zeros(len(fields), stride, dtype=torch.uint8)
    for column, (width, offset) in enumerate(zip(bits.tolist(), offsets.tolist(), strict=True)):
        first, last = offset // 8, (offset + width + 7) // 8
        field = (fields[:, column].long() & ((1 << width) - 1)) << offset % 8
        for byte in range(first, last):
            row_bytes[:, byte] |= (field >> 8 * (byte - first) & 0xFF).to(torch.uint8)
    return row_bytes


def unpack_fields(rows: Tensor, bits: Tensor) -> Tensor:
    """Reads the codes of each row back from its bytes: the inverse of `pack_fields`."""
    (offsets,) = field_offsets(bits.unsqueeze(0))
    fields = torch.zeros(len(rows), len(bits), dtype=torch.int32)
    for column, (width, offset) in enumerate(zip(bits.tolist(), offsets.tolist(), strict=True)):
        first, last = offset // 8, (offset + width + 7) // 8
        field = torch.zeros(len(rows), dtype=torch.int64)
        for byte in range(first, last):
            field |= rows[:, byte].long() << 8 * (byte - first)
        field = field >> offset % 8 & ((1 << width) - 1)
        # a sign, where all bits are used
        fields[:, column] = (field - (field >> FLOAT_BITS - 1 << FLOAT_BITS)).int()
    return fields


@dataclass(frozen=True, eq=False)
class ColumnCodes:
    """The codes in which the columns of a table's blocks are stored: bits, scale and shift of
    each."""

    bits: Tensor
    scale: Tensor
    shift: Tensor
    feedback: Tensor | None = None
    gain: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.bits.shape)
        dtypes = {"bits": torch.uint8, "scale": torch.float32, "shift": torch.int16}
        for name, dtype in dtypes.items():
            value = getattr(self, name)
            fits, actual = value.dtype == dtype, f"{value.dtype} {tuple(value.shape)}"
            fits = fits and value.shape == self.bits.shape
            check(fits, f"ColumnCodes.{name}", f"{dtype} of shape {shape}", actual)
        sound = (self.scale > 0) & self.scale.isfinite()
        sound &= self.scale == self.scale.bfloat16().float()
        if not bool(sound.all()):
            block, column = (~sound).nonzero()[0].tolist()
            value = f"{self.scale[block, column].item()} in block {block}, column {column}"
            check(False, "ColumnCodes.scale", "finite bfloat16 values above 0", value)
        steps = torch.stack([largest_codes(self.bits), self.shift / 2])
        reach = torch.cat([steps, steps.sum(0, keepdim=True)]).abs().amax(0)
        values = torch.where(is_coded(self.bits), self.scale * reach, 0.0)
        fits, actual = bool(values.isfinite().all()), f"values up to {float(values.max())}"
        check(fits, "ColumnCodes.scale", "codes that mean finite values", actual)
        of_feedback = (*shape, shape[-1])
        shapes = {"feedback": (self.feedback, of_feedback), "gain": (self.gain, shape)}
        for name, (part, size) in shapes.items():
            if part is not None:
                fits, actual = part.shape == size, f"{tuple(part.shape)}"
                check(fits, f"ColumnCodes.{name}", f"{size}", actual)

    @property
    def moves(self) -> bool:
        """Whether rows have other codes than those nearest to them."""
        return self.feedback is not None or self.gain is not None

    def with_gain(self, gain: Tensor) -> ColumnCodes:
        """The same codes of every row, that stand for other values: those of a column times its
        gain, to a bfloat16."""
        has_code = is_coded(self.bits)
        scale = torch.where(has_code, (self.scale * gain).bfloat16().float(), self.scale)
        exact = torch.where(has_code, scale / self.scale, 1.0)
        feedback = self.feedback
        # its columns stand in the order of rounding, and carry errors from one to another
        if feedback is not None:
            in_order = exact.gather(1, rounding_order(self.bits))
            feedback = feedback * in_order[:, None, :] / in_order[:, :, None]
        exact_gain = exact if self.gain is None else exact * self.gain
        return replace(self, scale=scale, feedback=feedback, gain=exact_gain)

    def settle(self, chunk: Tensor, blocks: Tensor) -> Tensor:
        """Moves rows to values whose nearest codes are those that `encode_rows` chooses. Local."""
        if self.gain is not None:
            chunk = chunk * torch.cat([self.gain, torch.ones(1, self.gain.shape[1])])[blocks]
        if self.feedback is None:
            return chunk
        parts = self.bits, self.scale, self.shift / 2, largest_codes(self.bits)
        result, order = chunk.clone(), rounding_order(self.bits)
        for block in blocks.unique().tolist():
            if block == len(self.bits) or not bool(self.feedback[block].any()):
                continue
            of_columns = [part[block, order[block]].tolist() for part in parts]
            for places in (blocks == block).nonzero().squeeze(1).split(CACHED_ROWS):
                columns = chunk[places].T[order[block]].contiguous()
                _feed_back_(columns, self.feedback[block], *of_columns)
                result[places] = columns[order[block].argsort()].T
        return result


def encode_rows(chunk: Tensor, blocks: Tensor, codes: ColumnCodes) -> Tensor:
    """Codes of some rows: the nearest ones, or what error feedback makes of them. Local."""
    check_finite(chunk, blocks, "codes")
    chunk = codes.settle(chunk, blocks)
    bits, scale, shift = _of_rows(blocks, codes)
    nearest = nearest_codes(chunk, scale, shift / 2, largest_codes(bits)).int()
    return torch.where(bits == FLOAT_BITS, chunk.contiguous().view(torch.int32), nearest)


def decode_rows(fields: Tensor, blocks: Tensor, codes: ColumnCodes) -> Tensor:
    """The values that codes stand for. Local."""
    bits, scale, shift = _of_rows(blocks, codes)
    values = scale * fields + scale * (shift / 2)
    values = torch.where(is_coded(bits), values, 0.0)
    return torch.where(bits == FLOAT_BITS, fields.contiguous().view(torch.float32), values)


def check_finite(chunk: Tensor, blocks: Tensor, place: str) -> None:
    """Checks that rows hold no NaN and no infinity."""
    if not bool(chunk.isfinite().all()):
        row, column = (~chunk.isfinite()).nonzero()[0].tolist()
        value = f"{chunk[row, column].item()} in block {int(blocks[row])}, column {column}"
        check(False, place, "finite values", value, "go back to the last good checkpoint")


def nearest_codes(values: Tensor, scale: Tensor, half_shift: Tensor, largest: Tensor) -> Tensor:
    """The codes nearest to some values, as floats. Local; shapes are broadcast."""
    return torch.minimum((values / scale - half_shift).round_().clamp_(min=0), largest)


def largest_codes(bits: Tensor) -> Tensor:
    """The largest code of every column, as a float; 0 where it has none."""
    return torch.where(is_coded(bits), (1 << bits.int().clamp(max=16)) - 1, 0).float()


def _of_rows(blocks: Tensor, codes: ColumnCodes) -> tuple[Tensor, Tensor, Tensor]:
    """(bits as int32, scale, shift) of every value: ``(n, D)`` each; rows of no block have no
    bits."""
    num_columns = codes.bits.shape[1]
    bits = torch.cat([codes.bits.int(), torch.zeros(1, num_columns, dtype=torch.int32)])
    scale = torch.cat([codes.scale, torch.ones(1, num_columns)])
    shift = torch.cat([codes.shift.float(), torch.zeros(1, num_columns)])
    return bits[blocks], scale[blocks], shift[blocks]


TABLE_SHARE, DIAGONAL_SHARE = 0.1, 0.3
"""Weight of the whole table's couplings, and of equal ones of every column with itself, beside a
block's own."""
CACHED_ROWS = 2048
"""So many rows of 64 columns stay in a processor's cache."""


def feedback_of(couplings: Tensor, bits: Tensor) -> Tensor:
    r"""The shares :math:`U_{jk} / U_{jj}` of a column's error that later ones take up. Local and
    deterministic."""
    num_columns = bits.shape[1]
    of_blocks, table = _of_trace_one(couplings), _of_trace_one(couplings.sum(0, keepdim=True))
    diagonal = torch.eye(num_columns, dtype=torch.float64) / num_columns
    order = rounding_order(bits)
    shrunk = of_blocks + TABLE_SHARE * table + DIAGONAL_SHARE * diagonal
    shrunk = shrunk.gather(1, order[:, :, None].expand_as(shrunk))
    shrunk = shrunk.gather(2, order[:, None, :].expand_as(shrunk))
    upper = torch.linalg.cholesky(torch.linalg.inv(shrunk), upper=True)
    shares = upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]
    return shares.triu(diagonal=1).float()


def rounding_order(bits: Tensor) -> Tensor:
    """``(S, D)`` int64: which column is rounded when."""
    return bits.int().argsort(dim=1, stable=True)


def _of_trace_one(couplings: Tensor) -> Tensor:
    traces = couplings.diagonal(dim1=1, dim2=2).sum(1)
    return couplings / torch.where(traces > 0, traces, 1.0)[:, None, None]


def _feed_back_(columns: Tensor, feedback: Tensor, *of_columns: list[float]) -> None:
    """Moves columns of a block, ``(D, n)`` in the order of rounding, to where nearest rounding
    gives each the code that error feedback chooses. In place."""
    for index, (width, scale, half_shift, largest) in enumerate(zip(*of_columns, strict=True)):
        if width == FLOAT_BITS:
            return  # and so are all that follow: nothing is lost any more
        column, later = columns[index], columns[index + 1 :]
        nearest = (column / scale).sub_(half_shift).round_().clamp_(0, largest)
        nearest.add_(half_shift).mul_(scale if width else 0.0)
        # a product, then a difference, never fused: a row moves alike in every chunk
        later.sub_(feedback[index, index + 1 :, None] * (column - nearest))


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
    scale = torch.ones(len(bits), num_columns)
    shift = torch.zeros(len(bits), num_columns, dtype=torch.int16)
    error = torch.zeros(len(bits), num_columns, dtype=torch.float64)
    columns = _SortedColumns.of(values, weights) if values.numel() else None
    best: _Codes | None = None
    for width, index in sorted((width, index) for index, width in enumerate(bits)):
        if width == 0:
            error[index] = 1.0
        elif width < FLOAT_BITS and columns is not None:
            best = _best_codes(columns, 2**width, best)
            scale[index], shift[index] = best.scale.flatten().float(), best.shift.flatten().short()
            least = torch.finfo(torch.float64).tiny
            error[index] = (best.error / columns.energy.clamp(min=least)).flatten()
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
    prefix_sums: Tensor
    spread: Tensor
    energy: Tensor

    @staticmethod
    def of(values: Tensor, weights: Tensor) -> _SortedColumns:
        sorted_values, order = torch.sort(values.T.contiguous(), dim=1, stable=True)
        wide, weight = sorted_values.double(), weights.double()[order]
        mean = (weight * wide).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        mean = torch.where(wide[:, :1] == wide[:, -1:], wide[:, :1], mean)
        deviations = wide - mean
        prefix_sums = torch.zeros(2, *weight.shape[:1], weight.shape[1] + 1, dtype=torch.float64)
        torch.cumsum(weight, 1, out=prefix_sums[0, :, 1:])
        torch.cumsum(weight * deviations, 1, out=prefix_sums[1, :, 1:])
        spread = (weight * deviations.square()).sum(1, keepdim=True)
        energy = (weight * wide.square()).sum(1, keepdim=True)
        return _SortedColumns(deviations, weight, mean, prefix_sums, spread, energy)

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
            weighted_codes = codes * self.weights.unsqueeze(1)
            of_values = (weighted_codes * self.values.unsqueeze(1)).sum(2)
            return weighted_codes.sum(2), (weighted_codes * codes).sum(2), of_values
        nth = torch.arange(levels - 1, dtype=torch.float64)
        boundaries = low.unsqueeze(2) + scale.unsqueeze(2) * (nth + 0.5)
        places = torch.searchsorted(self.values, boundaries.flatten(1))
        below, sum_below = (sums.gather(1, places).view_as(boundaries) for sums in self.prefix_sums)
        above = self.prefix_sums[0, :, -1:].unsqueeze(2) - below
        sum_above = self.prefix_sums[1, :, -1:] * (levels - 1) - sum_below.sum(2)
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

    def choose(self, index: Tensor) -> _Codes:
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
    candidates = _round_codes(columns, scales, lows, levels)
    best = candidates.choose(candidates.error.argmin(1, keepdim=True))
    for _ in range(ROUNDS):
        again = _round_codes(columns, best.better_scale, best.better_low, levels)
        both = zip(vars(best).values(), vars(again).values(), strict=True)
        pair = _Codes(*(torch.cat(parts, dim=1) for parts in both))
        best = pair.choose(pair.error.argmin(1, keepdim=True))
    return _constant_where(columns, best)


def _clipped_ranges(columns: _SortedColumns, levels: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest levels to try, about the mean, ``(D, G)`` each: fewer levels clip more."""
    clips = torch.linspace(*CLIPS[levels], dtype=torch.float64)
    lowest, highest = columns.values[:, :1], columns.values[:, -1:]
    reach = torch.maximum((lowest + columns.mean).abs(), (highest + columns.mean).abs())
    lows = torch.cat([-reach * clips - columns.mean, lowest * clips], dim=1)
    return lows, torch.cat([reach * clips - columns.mean, highest * clips], dim=1)


def _round_codes(columns: _SortedColumns, scale: Tensor, low: Tensor, levels: int) -> _Codes:
    """Rounds scales and lowest levels to what can be stored; returns their squared errors, and
    better ones to try."""
    smallest = (2 * (low + columns.mean).abs() / LARGEST_SHIFT).clamp(min=LEAST_SCALE)
    scale = _up_to_bfloat16(torch.maximum(scale, smallest), smallest)
    shift = (2 * (low + columns.mean) / scale).round_().clamp_(-LARGEST_SHIFT, LARGEST_SHIFT)
    low = scale * shift / 2 - columns.mean
    q, q2, qx = columns.sums_of_codes(scale, low, levels)
    weight, total = columns.prefix_sums[0, :, -1:], columns.prefix_sums[1, :, -1:]
    error = columns.spread - 2 * scale * qx - 2 * low * total
    error += scale.square() * q2 + 2 * scale * low * q + low.square() * weight
    determinant = q2 * weight - q.square()
    solvable = determinant > 1e-12 * q2 * weight
    solution = (qx * weight - q * total) / torch.where(solvable, determinant, 1.0)
    better = torch.where(solvable, solution, scale)
    better_low = torch.where(solvable, (total - better * q) / weight, low)
    usable = better > 0
    better = torch.where(usable, better, scale)
    better_low = torch.where(usable, better_low, low)
    return _Codes(scale, shift, error.clamp_(min=0), better, better_low)


def _up_to_bfloat16(scale: Tensor, smallest: Tensor) -> Tensor:
    """The nearest bfloat16, or the next one where that is below the smallest scale that a shift
    allows."""
    nearest = scale.clamp(max=LARGEST_SCALE).float().bfloat16().double()
    next_one = nearest + torch.exp2(torch.frexp(nearest).exponent.double() - 8)
    return torch.where(nearest < smallest, next_one.clamp(max=LARGEST_SCALE), nearest)


def _constant_where(columns: _SortedColumns, codes: _Codes) -> _Codes:
    """Columns of one value get the scale of which half an integer comes nearest to it: code 0 is
    that value."""
    constant, value = columns.is_constant, columns.mean
    if not bool(constant.any()):
        return codes
    fraction, exponent = torch.frexp(value.abs())
    scales = (1 + torch.arange(128, dtype=torch.float64) / 128) * torch.exp2(exponent.double() - 14)
    scales = scales.clamp(LEAST_SCALE)
    shifts = (2 * value / scales).round_()
    distance = (scales * shifts / 2 - value).abs()
    distance = distance.masked_fill(shifts.abs() > LARGEST_SHIFT, torch.inf)
    nearest = distance.argmin(1, keepdim=True)
    is_zero = fraction == 0
    scale = torch.where(is_zero, 1.0, scales.gather(1, nearest))
    shift = torch.where(is_zero, 0.0, shifts.gather(1, nearest))
    error = (scale * shift / 2 - value).square() * columns.prefix_sums[0, :, -1:]
    exact = {"scale": scale, "shift": shift, "error": error}
    parts = {k: torch.where(constant, part, getattr(codes, k)) for k, part in exact.items()}
    return replace(codes, **parts)
