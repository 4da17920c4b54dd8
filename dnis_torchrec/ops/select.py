"""The compiled operators of training: soft selection, bags split by block, rows rounded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.blocks import codes as column_codes
from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes
from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from dnis_torchrec.ops.build import NAMESPACE, SELECTION, once


@once
def are_compiled() -> bool:
    """Returns whether the compiled operators are there. A process's first call loads, and if need
    be builds, them."""
    if not SELECTION.is_there():
        return False
    writers = "select_pooled sum_alpha_gradient split_bags fill_rows find_pieces gather_ids "
    writers += "select_sparse spread_sparse_gradient sum_sparse_alpha_gradient round_rows"
    for name in writers.split():
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *arguments: None)
    for name in ("spread_gradient", "are_good_bags"):
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *arguments: True)
    return True


Watch = Callable[[Any, Tensor], Tensor | None]


class _SelectPieces(torch.autograd.Function):
    """Soft selection, forward and backward, each in one pass over the pooled embeddings, and in
    place where it can."""

    @staticmethod
    def forward(
        ctx: Any,
        bag_sums: Tensor,
        alpha: Tensor,
        rows: Tensor,
        divisors: Tensor | None,
        layout: Tensor,
        width: int,
        watch: Watch | None,
    ) -> Tensor:
        needs_pooled, needs_alpha = ctx.needs_input_grad[:2]
        is_free = bag_sums.grad_fn is not None or not bag_sums.requires_grad
        is_free = is_free and bag_sums.is_contiguous() and not bag_sums._is_view()
        is_free = is_free and not needs_alpha
        values = bag_sums.contiguous()
        ctx.is_output_room = is_free and torch.equal(layout[:, 0], layout[:, 1])
        if ctx.is_output_room:
            out = values
            ctx.mark_dirty(out)
        else:
            out = values.new_empty(len(values), width)
        _operators(values).select_pooled(values, alpha, rows, divisors, layout, out)
        ctx.save_for_backward(alpha, rows, divisors, layout, values if needs_alpha else None)
        has_room = is_free and needs_pooled and (ctx.is_output_room or values.shape[1] > width)
        ctx.room = values.detach() if has_room else None
        ctx.shape, ctx.watch = values.shape, watch
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, rows, divisors, layout, bag_sums = ctx.saved_tensors
        grad_pooled = grad_alpha = None
        grad, operators = grad.contiguous(), _operators(grad)
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.empty_like(alpha)
            operators.sum_alpha_gradient(grad, bag_sums, rows, divisors, layout, grad_alpha)
        if ctx.needs_input_grad[0]:
            room, ctx.room = ctx.room, None  # the graph may live on, with the loss
            if room is not None and ctx.is_output_room and _is_held_elsewhere(room):
                room = None
            grad_pooled = grad.new_empty(ctx.shape) if room is None else room
            keeps_empty = room is not None and not ctx.is_output_room
            is_finite = operators.spread_gradient(
                grad, alpha, rows, divisors, layout, keeps_empty, grad_pooled
            )
            if keeps_empty:
                torch.autograd.graph.increment_version(grad_pooled)
            if ctx.watch is not None:
                may_learn = ctx.watch(is_finite, grad)
                if may_learn is not None and grad_pooled.is_cuda:
                    operators.zero_unless_(grad_pooled, may_learn)
                elif may_learn is not None:
                    grad_pooled = torch.where(may_learn, grad_pooled, 0.0)
        return grad_pooled, grad_alpha, None, None, None, None, None


def _holders(tensor: Tensor) -> int:
    """Counts the holders of a tensor's memory: tensors, views, what autograd has saved."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_HELD_BY_ONE = _holders(torch.empty(1))


def _is_held_elsewhere(tensor: Tensor) -> bool:
    return _holders(tensor) > _HELD_BY_ONE


def can_select(values: Tensor) -> bool:
    """Returns whether `select_pieces` and `fill_rows_` are there for such values."""
    if values.device.type == "cuda":
        from dnis_torchrec.ops import batches_triton, select_triton  # Triton takes seconds to load

        return batches_triton.triton is not None and values.dtype in select_triton.SELECTED_DTYPES
    is_float = values.dtype in (torch.float32, torch.float64)
    return values.device.type == "cpu" and is_float and are_compiled()


def _operators(values: Tensor) -> Any:
    if values.device.type == "cpu":
        return torch.ops.dnis_torchrec
    from dnis_torchrec.ops import select_triton  # as above

    return select_triton


def select_pieces(
    bag_sums: Tensor,
    alpha: Tensor,
    rows: Tensor,
    divisors: Tensor | None,
    layout: Tensor,
    width: int,
    *,
    watch: Watch | None = None,
) -> Tensor:
    """Soft selection of every output key of a collection at once."""
    return _SelectPieces.apply(bag_sums, alpha, rows, divisors, layout, width, watch)


def fill_rows_(
    rows: Tensor,
    ids: Tensor,
    lengths: Tensor,
    routings: list[Tensor],
    places: Sequence[tuple[int, int, int]],
) -> Tensor:
    """Writes the rows of alpha of single-id features into `rows`, -1 for an empty bag. See
    `can_select`."""
    flat = [number for place in places for number in place]
    _operators(rows).fill_rows(ids.contiguous(), lengths.contiguous(), routings, flat, rows)
    return rows


def are_good_bags(ids: Tensor, lengths: Tensor, bounds: Tensor, longest: Tensor) -> bool:
    """Returns whether no bag is too long, and every id is at least 0 and below the bound of its
    key. CPU, compiled."""
    bags = ids.contiguous(), lengths.contiguous()
    return torch.ops.dnis_torchrec.are_good_bags(*bags, bounds, longest)


def split_bags(
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    routings: list[Tensor],
    pieces: Tensor,
    first_of: list[int],
    batch_size: int,
    num_pieces: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Splits the bags of all features by block in two passes over the ids, which keep their order.
    CPU, compiled."""
    split_ids, split_lengths = torch.empty_like(ids), lengths.new_empty(num_pieces * batch_size)
    split_weights = None if weights is None else torch.empty_like(weights)
    bags = (ids, lengths, weights, routings, pieces, first_of, batch_size)
    torch.ops.dnis_torchrec.split_bags(*bags, split_ids, split_lengths, split_weights)
    total = int(split_lengths.sum())
    weights = None if split_weights is None else split_weights[:total]
    return split_ids[:total], split_lengths, weights


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseBags:
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
class BagPieces:
    """The rule by which the bags of one feature are split."""

    routing: Tensor
    first_row: int
    first_alpha_row: int
    num_blocks: int
    num_keys: int


def gather_bags(
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    pieces: Sequence[BagPieces],
    batch_size: int,
) -> SparseBags:
    """Splits bags by block and gathers the pieces; ids of no block are left out. CPU, compiled."""
    operators = torch.ops.dnis_torchrec
    starts = torch.empty(len(pieces), batch_size + 1, dtype=torch.int64)
    rows, sizes, piece_of_id = torch.empty(3, len(ids), dtype=torch.int32)
    fields = [n for rule in pieces for n in (rule.first_row, rule.first_alpha_row, rule.num_blocks)]
    routings = [rule.routing for rule in pieces]
    operators.find_pieces(ids, lengths, routings, fields, starts, rows, sizes, piece_of_id)
    num_keys = [rule.num_keys for rule in pieces]
    counts = (starts[:, -1] - starts[:, 0]).tolist()
    least = [-(-count // keys) for count, keys in zip(counts, num_keys, strict=True)]
    num_rows = max([1, *least])  # no kernel takes an empty batch
    ids_out, lengths_out = torch.empty_like(ids), lengths.new_empty(sum(num_keys) * num_rows)
    learns = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    # The operator knows no gradient; torch's selection by the places that it gathers does.
    values_in = torch.arange(len(ids)) if learns else weights
    values_out = None if values_in is None else torch.empty_like(values_in)
    outputs = (ids_out, lengths_out, values_out)
    operators.gather_ids(ids, values_in, starts, sizes, piece_of_id, num_keys, *outputs)
    total = int(lengths_out.sum())
    if values_out is not None:
        values_out = values_out[:total]
        if weights is not None and learns:
            values_out = weights.index_select(0, values_out)
    return SparseBags(
        ids=ids_out[:total],
        lengths=lengths_out,
        weights=values_out,
        num_rows=num_rows,
        starts=starts,
        rows=rows[: sum(counts)].clone(),  # the rest of that memory is given back
    )


class _SelectSparse(torch.autograd.Function):
    """Soft selection of sparse bags, forward and backward, each in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        bag_sums: Tensor,
        alpha: Tensor,
        starts: Tensor,
        rows: Tensor,
        layout: Tensor,
        width: int,
    ) -> Tensor:
        values = bag_sums.contiguous()
        out = values.new_empty(starts.shape[1] - 1, width)
        torch.ops.dnis_torchrec.select_sparse(values, alpha, starts, rows, layout, out)
        of_alpha = values if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(alpha, starts, rows, layout, of_alpha)
        ctx.shape = values.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, starts, rows, layout, bag_sums = ctx.saved_tensors
        grad_pooled = grad_alpha = None
        grad, operators = grad.contiguous(), torch.ops.dnis_torchrec
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.empty_like(alpha)
            operators.sum_sparse_alpha_gradient(grad, bag_sums, starts, rows, layout, grad_alpha)
        if ctx.needs_input_grad[0]:
            # No kernel reads the gradient of an empty bag: it stays unwritten, but where somebody
            # looks for NaN.
            is_watched = torch.is_anomaly_enabled()
            grad_pooled = (grad.new_zeros if is_watched else grad.new_empty)(ctx.shape)
            operators.spread_sparse_gradient(grad, alpha, starts, rows, layout, grad_pooled)
        return grad_pooled, grad_alpha, None, None, None, None


def select_sparse(
    bag_sums: Tensor, alpha: Tensor, bags: SparseBags, layout: Tensor, width: int
) -> Tensor:
    """Soft selection of sparse bags. CPU, compiled."""
    return _SelectSparse.apply(bag_sums, alpha, bags.starts, bags.rows, layout, width)


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
        largest = column_codes.largest_codes(codes.bits).masked_fill_(
            codes.bits == FLOAT_BITS, torch.inf
        )
        half_step = torch.where(column_codes.is_coded(codes.bits), codes.scale / 2, 0.0)
        fields = torch.stack([codes.scale, codes.shift / 2, largest, half_step], dim=1)
        fields = fields[:, :, columns]
        of_no_block = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 4, 1).expand(1, 4, fields.shape[2])
        self._codes = torch.cat([fields, of_no_block]).to(device)
        self._router, self._first_row = RowRouter(routing).to(device), first_row

    def round_(self, weight: Tensor, residual: Tensor, rows: Tensor | None = None) -> None:
        """Rounds rows. Local."""
        if weight.device.type == "cpu" and weight.is_contiguous() and are_compiled():
            routing = self._router.routing_tensor()
            where = (routing, rows, self._first_row)
            torch.ops.dnis_torchrec.round_rows(self._codes, *where, weight, residual)
            return
        step = max(1, ROUNDED_AT_A_TIME // max(1, weight.shape[1]))
        row_ids = torch.arange(len(weight), device=weight.device) if rows is None else rows
        for chunk in row_ids.split(step):
            latent = weight.index_select(0, chunk) + residual.index_select(0, chunk)
            of_rows = self._codes.index_select(0, self._router(chunk + self._first_row))
            scale, half_shift, largest, half_step = of_rows.unbind(1)
            near = column_codes.nearest_codes(latent, scale, half_shift, largest).mul_(scale)
            near = near.add_(scale * half_shift)
            near = torch.where(largest.isinf(), latent, near)
            weight.index_copy_(0, chunk, near)
            residual.index_copy_(0, chunk, (latent - near).clamp_(-half_step, half_step))
