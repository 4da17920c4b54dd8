"""Packed bags: bags split by block, without a place for the blocks that do not occur. CPU,
compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBags:
    """Bags split into pieces, as a lookup reads them, and the bag and the row of alpha of every
    piece."""

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    num_rows: int
    starts: Tensor
    rows: Tensor

    def rows_of(self, features: Sequence[int]) -> Tensor:
        """Rows of alpha of the pieces of some features."""
        ends = self.starts[:, [0, -1]].tolist()
        return torch.cat([self.rows[ends[f][0] : ends[f][1]] for f in features])


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The rule by which the bags of one feature are split."""

    routing: Tensor
    first_row: int
    first_alpha_row: int
    num_blocks: int
    num_keys: int


def pack_bags(
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    packings: Sequence[Packing],
    batch_size: int,
) -> PackedBags:
    """Splits bags by block and packs the pieces; ids of no block are left out. CPU, compiled."""
    operators = torch.ops.dnis_torchrec
    starts = torch.empty(len(packings), batch_size + 1, dtype=torch.int64)
    rows, sizes, piece_of_id = torch.empty(3, len(ids), dtype=torch.int32)
    fields = [
        n
        for packing in packings
        for n in (packing.first_row, packing.first_alpha_row, packing.num_blocks)
    ]
    routings = [packing.routing for packing in packings]
    operators.find_pieces(ids, lengths, routings, fields, starts, rows, sizes, piece_of_id)
    num_keys = [packing.num_keys for packing in packings]
    counts = (starts[:, -1] - starts[:, 0]).tolist()
    needed = [-(-count // keys) for count, keys in zip(counts, num_keys, strict=True)]
    num_rows = max([1, *needed])  # no kernel takes an empty batch
    packed_ids, packed_lengths = torch.empty_like(ids), lengths.new_empty(sum(num_keys) * num_rows)
    learns = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    # The operator knows no gradient; torch's selection by the places that it packs does.
    carried = torch.arange(len(ids)) if learns else weights
    packed = None if carried is None else torch.empty_like(carried)
    operators.pack_ids(
        ids, carried, starts, sizes, piece_of_id, num_keys, packed_ids, packed_lengths, packed
    )
    total = int(packed_lengths.sum())
    if packed is not None:
        packed = (
            weights.index_select(0, packed[:total])
            if weights is not None and learns
            else packed[:total]
        )
    return PackedBags(
        ids=packed_ids[:total],
        lengths=packed_lengths,
        weights=packed,
        num_rows=num_rows,
        starts=starts,
        rows=rows[: sum(counts)].clone(),  # the rest of that memory is given back
    )


class _SelectPacked(torch.autograd.Function):
    """Soft selection of packed bags, forward and backward, each in one pass over what was pooled."""

    @staticmethod
    def forward(
        ctx: Any,
        pooled: Tensor,
        alpha: Tensor,
        starts: Tensor,
        rows: Tensor,
        layout: Tensor,
        width: int,
    ) -> Tensor:
        values = pooled.contiguous()
        out = values.new_empty(starts.shape[1] - 1, width)
        torch.ops.dnis_torchrec.select_packed(values, alpha, starts, rows, layout, out)
        ctx.save_for_backward(
            alpha, starts, rows, layout, values if ctx.needs_input_grad[1] else None
        )
        ctx.shape = values.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, starts, rows, layout, pooled = ctx.saved_tensors
        grad_pooled = grad_alpha = None
        grad, operators = grad.contiguous(), torch.ops.dnis_torchrec
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.empty_like(alpha)
            operators.sum_packed_alpha_gradient(grad, pooled, starts, rows, layout, grad_alpha)
        if ctx.needs_input_grad[0]:
            # No kernel reads the gradient of an empty bag: it stays unwritten, but where somebody
            # looks for NaN.
            grad_pooled = (
                grad.new_zeros(ctx.shape)
                if torch.is_anomaly_enabled()
                else grad.new_empty(ctx.shape)
            )
            operators.spread_packed_gradient(grad, alpha, starts, rows, layout, grad_pooled)
        return grad_pooled, grad_alpha, None, None, None, None


def select_packed(
    pooled: Tensor, alpha: Tensor, bags: PackedBags, layout: Tensor, width: int
) -> Tensor:
    """Soft selection of packed bags; see the top of this module. CPU, compiled."""
    return _SelectPacked.apply(pooled, alpha, bags.starts, bags.rows, layout, width)
