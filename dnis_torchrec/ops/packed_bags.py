"""Packed bags: bags split by block, without a place for the blocks that do not occur. CPU, compiled.

A lookup wants as many bags of one key as of any other. Split into S keys of B bags each, a feature of long bags leaves
most of them empty, though each is pooled to D zeros. Here the *pieces* of a feature (the ids of one bag and one block)
are numbered as they come and laid out over its keys row by row: the j-th of them is the bag of key ``j % keys`` in row
``j // keys``. With R rows, the lookup pools ``(R, sum of D over keys)``, of which soft selection adds up

    out[b, feature] = sum over the pieces of the bag of pooled[row, key] * alpha[row of alpha of the piece]

A feature with a key per block never needs more than B rows, one with a single key as many as it has pieces, and learns
faster (see `SoftSelectionEmbeddingBagCollection.read_whole_features_`); the feature that fills its keys most sets R.

Shapes: B batch, F features, K keys (sum over features), R packed rows, S blocks, I ids of a batch, P pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBags:
    """Bags split into pieces, as a lookup reads them, and the bag and the row of alpha of every piece.

    Attributes:
        ids: the ids, key by key.
        lengths: ``(K * R,)``.
        weights: of the ids, or None.
        num_rows: R.
        starts: ``(F, B + 1)`` int64: first piece of every bag.
        rows: ``(P,)`` int32: row of alpha of every piece.
    """

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
    """The rule by which the bags of one feature are split.

    Attributes:
        routing: block of every row of the table, see `dnis_torchrec.ops.block_operators.split_bags`.
        first_row: row of the table that id 0 is.
        first_alpha_row: row of alpha of block 0.
        num_blocks: S.
        num_keys: keys that its pieces are laid out over.
    """

    routing: Tensor
    first_row: int
    first_alpha_row: int
    num_blocks: int
    num_keys: int


def pack_bags(
    ids: Tensor, lengths: Tensor, weights: Tensor | None, packings: Sequence[Packing], batch_size: int
) -> PackedBags:
    """Splits bags by block and packs the pieces; ids of no block are left out. CPU, compiled.

    Args:
        ids: ``(I,)`` int32 or int64, the bags of one feature after those of another.
        lengths: ``(F * B,)`` int32 or int64.
        weights: ``(I,)``, or None.
        packings: per feature.
        batch_size: B.

    Returns:
        The packed bags; ids of a piece keep their order. Gradients flow back to the weights.

    Raises:
        ValueError: for an id outside its routing, or lengths that are not those of the ids.

    Example:
        >>> from dnis_torchrec.ops.block_operators import are_compiled
        >>> packing = Packing(routing=torch.tensor([2, 4]), first_row=0, first_alpha_row=0, num_blocks=2, num_keys=2)
        >>> if are_compiled():
        ...     bags = pack_bags(torch.tensor([3, 0, 1]), torch.tensor([2, 1]), None, [packing], 2)
        ...     assert (bags.num_rows, bags.rows.tolist(), bags.starts.tolist()) == (2, [1, 0, 0], [[0, 2, 3]])
        ...     assert (bags.ids.tolist(), bags.lengths.tolist()) == ([3, 1, 0], [1, 1, 1, 0])
    """
    operators = torch.ops.dnis_torchrec
    starts = torch.empty(len(packings), batch_size + 1, dtype=torch.int64)
    rows, sizes, piece_of_id = torch.empty(3, len(ids), dtype=torch.int32)
    fields = [n for packing in packings for n in (packing.first_row, packing.first_alpha_row, packing.num_blocks)]
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
    operators.pack_ids(ids, carried, starts, sizes, piece_of_id, num_keys, packed_ids, packed_lengths, packed)
    total = int(packed_lengths.sum())
    if packed is not None:
        packed = weights.index_select(0, packed[:total]) if weights is not None and learns else packed[:total]
    return PackedBags(
        ids=packed_ids[:total],
        lengths=packed_lengths,
        weights=packed,
        num_rows=num_rows,
        starts=starts,
        rows=rows[: sum(counts)].clone(),  # the rest of that memory is given back
    )


class _SelectPacked(torch.autograd.Function):
    """Soft selection of packed bags, forward and backward, each in one pass over what was pooled.

    Where alpha does not learn, nothing that was pooled is kept for backward: that memory is free while the dense part
    holds its activations, and the gradient takes new memory once they are gone. To write it over the pooled embeddings
    would be faster and take more at the peak.
    """

    @staticmethod
    def forward(
        ctx: Any, pooled: Tensor, alpha: Tensor, starts: Tensor, rows: Tensor, layout: Tensor, width: int
    ) -> Tensor:
        values = pooled.contiguous()
        out = values.new_empty(starts.shape[1] - 1, width)
        torch.ops.dnis_torchrec.select_packed(values, alpha, starts, rows, layout, out)
        ctx.save_for_backward(alpha, starts, rows, layout, values if ctx.needs_input_grad[1] else None)
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
            # No kernel reads the gradient of an empty bag: it stays unwritten, but where somebody looks for NaN.
            grad_pooled = grad.new_zeros(ctx.shape) if torch.is_anomaly_enabled() else grad.new_empty(ctx.shape)
            operators.spread_packed_gradient(grad, alpha, starts, rows, layout, grad_pooled)
        return grad_pooled, grad_alpha, None, None, None, None


def select_packed(pooled: Tensor, alpha: Tensor, bags: PackedBags, layout: Tensor, width: int) -> Tensor:
    """Soft selection of packed bags; see the top of this module. CPU, compiled.

    Args:
        pooled: ``(R, sum of D over keys)``, float32 or float64; its empty bags are not looked at, nor is anything
            written to the memory of their gradient.
        alpha: ``(sum of A * D,)``: the alphas of all embedding_dims, flattened, one after the other.
        bags: the bags that were looked up.
        layout: ``(F, 6)`` int64: first column of the feature's keys in `pooled`, first column of its output, its
            columns (fewer than D where a shard holds some only), its keys, where the first of these columns of row 0
            stands in `alpha`, and D, from one row of alpha to the next.
        width: sum of columns over features.

    Returns:
        ``(B, width)``.

    Example:
        >>> from dnis_torchrec.ops.block_operators import are_compiled
        >>> packing = Packing(routing=torch.tensor([2, 4]), first_row=0, first_alpha_row=0, num_blocks=2, num_keys=2)
        >>> if are_compiled():
        ...     bags = pack_bags(torch.tensor([3, 0, 1]), torch.tensor([2, 1]), None, [packing], 2)
        ...     pooled, alpha = torch.tensor([[3.0, 0.5], [1.0, 0.0]]), torch.tensor([1.0, 0.5])
        ...     layout = torch.tensor([[0, 0, 1, 2, 0, 1]])
        ...     assert select_packed(pooled, alpha, bags, layout, 1).tolist() == [[2.0], [1.0]]
    """
    return _SelectPacked.apply(pooled, alpha, bags.starts, bags.rows, layout, width)
