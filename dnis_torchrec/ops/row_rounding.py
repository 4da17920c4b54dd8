r"""Rows rounded in place to the values that they are served as, beside a residual that keeps what
they lack."""

from __future__ import annotations

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import (
    FLOAT_BITS,
    ColumnCodes,
    is_coded,
    largest_codes,
    nearest_codes,
)
from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from dnis_torchrec.ops.block_operators import are_compiled

ROUNDED_AT_A_TIME = 1 << 18
"""Values that torch's operators work on at a time, so that what lies between them stays in the
cache."""


class RowRounding:
    """Rounds rows of a shard: `decode_rows` of `encode_rows`, bit for bit."""

    def __init__(
        self,
        codes: ColumnCodes,
        routing: RowRouting,
        first_row: int,
        columns: slice,
        device: torch.device,
    ) -> None:
        # the largest code of a float32 column is infinite: that tells it
        largest = largest_codes(codes.bits).masked_fill_(codes.bits == FLOAT_BITS, torch.inf)
        half_step = torch.where(is_coded(codes.bits), codes.scale / 2, 0.0)
        fields = torch.stack([codes.scale, codes.shift / 2, largest, half_step], dim=1)[
            :, :, columns
        ]
        of_no_block = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 4, 1).expand(1, 4, fields.shape[2])
        self._codes = torch.cat([fields, of_no_block]).to(device)
        self._router, self._first_row = RowRouter(routing).to(device), first_row

    def round_(self, weight: Tensor, residual: Tensor, rows: Tensor | None = None) -> None:
        """Rounds rows. Local."""
        if weight.device.type == "cpu" and weight.is_contiguous() and are_compiled():
            routing = self._router.routing_tensor()
            torch.ops.dnis_torchrec.round_rows(
                self._codes, routing, rows, self._first_row, weight, residual
            )
            return
        step = max(1, ROUNDED_AT_A_TIME // max(1, weight.shape[1]))
        chosen = torch.arange(len(weight), device=weight.device) if rows is None else rows
        for chunk in chosen.split(step):
            latent = weight.index_select(0, chunk) + residual.index_select(0, chunk)
            of_rows = self._codes.index_select(0, self._router(chunk + self._first_row))
            scale, half_shift, largest, half_step = of_rows.unbind(1)
            rounded = (
                nearest_codes(latent, scale, half_shift, largest)
                .mul_(scale)
                .add_(scale * half_shift)
            )
            rounded = torch.where(largest.isinf(), latent, rounded)
            weight.index_copy_(0, chunk, rounded)
            residual.index_copy_(0, chunk, (latent - rounded).clamp_(-half_step, half_step))
