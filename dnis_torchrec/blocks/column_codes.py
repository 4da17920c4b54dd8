r"""Column codes: how the values of a block's columns are stored, in k bits a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dnis_torchrec.blocks.bit_fields import FLOAT_BITS, is_coded
from dnis_torchrec.checks import check


@dataclass(frozen=True, eq=False)
class ColumnCodes:
    """The codes in which the columns of a table's blocks are stored: bits, scale and shift of each."""

    bits: Tensor
    scale: Tensor
    shift: Tensor
    feedback: Tensor | None = None
    gain: Tensor | None = None

    def __post_init__(self) -> None:
        for name, dtype in (
            ("bits", torch.uint8),
            ("scale", torch.float32),
            ("shift", torch.int16),
        ):
            value = getattr(self, name)
            fits = value.dtype == dtype and value.shape == self.bits.shape
            check(
                fits,
                f"ColumnCodes.{name}",
                f"{dtype} of shape {tuple(self.bits.shape)}",
                f"{value.dtype} {tuple(value.shape)}",
            )
        sound = (
            (self.scale > 0) & self.scale.isfinite() & (self.scale == self.scale.bfloat16().float())
        )
        if not bool(sound.all()):
            block, column = (~sound).nonzero()[0].tolist()
            received = f"{self.scale[block, column].item()} in block {block}, column {column}"
            check(False, "ColumnCodes.scale", "finite bfloat16 values above 0", received)
        if self.feedback is not None:
            shape = (*self.bits.shape, self.bits.shape[1])
            check(
                tuple(self.feedback.shape) == shape,
                "ColumnCodes.feedback",
                f"{shape}",
                tuple(self.feedback.shape),
            )
        if self.gain is not None:
            fits = self.gain.shape == self.bits.shape
            check(fits, "ColumnCodes.gain", f"{tuple(self.bits.shape)}", tuple(self.gain.shape))

    @property
    def moves(self) -> bool:
        """Whether rows have other codes than those nearest to them."""
        return self.feedback is not None or self.gain is not None

    def with_gain(self, gain: Tensor) -> ColumnCodes:
        """The same codes of every row, that stand for other values: those of a column times its
        gain, to a bfloat16."""
        coded = is_coded(self.bits)
        scale = torch.where(coded, (self.scale * gain).bfloat16().float(), self.scale)
        exact = torch.where(coded, scale / self.scale, 1.0)
        feedback = self.feedback
        if (
            feedback is not None
        ):  # its columns stand in the order of rounding, and carry errors from one to another
            from dnis_torchrec.blocks.error_feedback import (
                rounding_order,
            )  # serving decodes, and never needs it

            in_order = exact.gather(1, rounding_order(self.bits))
            feedback = feedback * in_order[:, None, :] / in_order[:, :, None]
        own = exact if self.gain is None else exact * self.gain
        return replace(self, scale=scale, feedback=feedback, gain=own)

    def settled(self, chunk: Tensor, blocks: Tensor) -> Tensor:
        """Moves rows to values whose nearest codes are those that `encode_rows` chooses. Local."""
        if self.gain is not None:
            chunk = chunk * torch.cat([self.gain, torch.ones(1, self.gain.shape[1])])[blocks]
        if self.feedback is None:
            return chunk
        from dnis_torchrec.blocks.error_feedback import (
            fed_back,
        )  # serving decodes, and never needs it

        of_codes = self.bits, self.scale, self.shift / 2, largest_codes(self.bits)
        return fed_back(chunk, blocks, self.feedback, *of_codes)


def encode_rows(
    chunk: Tensor, blocks: Tensor, codes: ColumnCodes, *, place: str = "codes"
) -> Tensor:
    """Codes of some rows: the nearest ones, or what error feedback makes of them. Local."""
    check_finite(chunk, blocks, place)
    chunk = codes.settled(chunk, blocks)
    bits, scale, shift = _of_rows(blocks, codes)
    nearest = nearest_codes(chunk, scale, shift / 2, largest_codes(bits)).int()
    return torch.where(bits == FLOAT_BITS, chunk.contiguous().view(torch.int32), nearest)


def decode_rows(encoded: Tensor, blocks: Tensor, codes: ColumnCodes) -> Tensor:
    """The values that codes stand for. Local."""
    bits, scale, shift = _of_rows(blocks, codes)
    values = scale * encoded + scale * (shift / 2)
    values = torch.where(is_coded(bits), values, 0.0)
    return torch.where(bits == FLOAT_BITS, encoded.contiguous().view(torch.float32), values)


def check_finite(chunk: Tensor, blocks: Tensor, place: str) -> None:
    """Checks that rows hold no NaN and no infinity."""
    if not bool(chunk.isfinite().all()):
        row, column = (~chunk.isfinite()).nonzero()[0].tolist()
        received = f"{chunk[row, column].item()} in block {int(blocks[row])}, column {column}"
        check(False, place, "finite values", received, "go back to the last good checkpoint")


def nearest_codes(values: Tensor, scale: Tensor, half_shift: Tensor, largest: Tensor) -> Tensor:
    """The codes nearest to some values, as floats. Local; shapes are broadcast."""
    return torch.minimum((values / scale - half_shift).round_().clamp_(min=0), largest)


def largest_codes(bits: Tensor) -> Tensor:
    """The largest code of every column, as a float; 0 where it has none."""
    return torch.where(is_coded(bits), (1 << bits.int().clamp(max=16)) - 1, 0).float()


def _of_rows(blocks: Tensor, codes: ColumnCodes) -> tuple[Tensor, Tensor, Tensor]:
    """(bits as int32, scale, shift) of every value: ``(n, D)`` each; rows of no block have no bits."""
    num_columns = codes.bits.shape[1]
    bits = torch.cat([codes.bits.int(), torch.zeros(1, num_columns, dtype=torch.int32)])
    scale = torch.cat([codes.scale, torch.ones(1, num_columns)])
    shift = torch.cat([codes.shift.float(), torch.zeros(1, num_columns)])
    return bits[blocks], scale[blocks], shift[blocks]
