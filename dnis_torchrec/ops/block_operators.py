"""Operators on blocks: soft selection of a whole collection at once, and, on the CPU, bags split by
block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.ops.native_build import NAMESPACE, SELECTION, once


@once
def are_compiled() -> bool:
    """Returns whether the compiled operators are there. A process's first call loads, and if need
    be builds, them."""
    if not SELECTION.is_there():
        return False
    of_blocks = ("select_pooled", "sum_alpha_gradient", "split_bags", "fill_rows")
    of_packed = (
        "find_pieces",
        "pack_ids",
        "select_packed",
        "spread_packed_gradient",
        "sum_packed_alpha_gradient",
    )
    for name in (*of_blocks, *of_packed, "round_rows"):  # they write to their arguments
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
        pooled: Tensor,
        alpha: Tensor,
        rows: Tensor,
        divisors: Tensor | None,
        layout: Tensor,
        width: int,
        watch: Watch | None,
    ) -> Tensor:
        needs_pooled, needs_alpha = ctx.needs_input_grad[:2]
        is_result = pooled.grad_fn is not None or not pooled.requires_grad
        is_free = not needs_alpha and is_result and pooled.is_contiguous() and not pooled._is_view()
        values = pooled.contiguous()
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
        alpha, rows, divisors, layout, pooled = ctx.saved_tensors
        grad_pooled = grad_alpha = None
        grad, operators = grad.contiguous(), _operators(grad)
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.empty_like(alpha)
            operators.sum_alpha_gradient(grad, pooled, rows, divisors, layout, grad_alpha)
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
    """Counts the holders of a tensor's memory: tensors, views, and tensors that autograd has saved."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_HELD_BY_ONE = _holders(torch.empty(1))


def _is_held_elsewhere(tensor: Tensor) -> bool:
    return _holders(tensor) > _HELD_BY_ONE


def can_select(values: Tensor) -> bool:
    """Returns whether `select_pieces` and `fill_rows_` are there for such values."""
    if values.device.type == "cuda":
        from dnis_torchrec.ops import select_triton, triton_bags  # Triton takes seconds to load

        return triton_bags.triton is not None and values.dtype in select_triton.SELECTED_DTYPES
    return (
        values.device.type == "cpu"
        and values.dtype in (torch.float32, torch.float64)
        and are_compiled()
    )


def _operators(values: Tensor) -> Any:
    if values.device.type == "cpu":
        return torch.ops.dnis_torchrec
    from dnis_torchrec.ops import select_triton  # as above

    return select_triton


def select_pieces(
    pooled: Tensor,
    alpha: Tensor,
    rows: Tensor,
    divisors: Tensor | None,
    layout: Tensor,
    width: int,
    *,
    watch: Watch | None = None,
) -> Tensor:
    """Soft selection of every output key of a collection at once; see the top of this module."""
    return _SelectPieces.apply(pooled, alpha, rows, divisors, layout, width, watch)


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
    return torch.ops.dnis_torchrec.are_good_bags(
        ids.contiguous(), lengths.contiguous(), bounds, longest
    )


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
    torch.ops.dnis_torchrec.split_bags(
        ids,
        lengths,
        weights,
        routings,
        pieces,
        first_of,
        batch_size,
        split_ids,
        split_lengths,
        split_weights,
    )
    total = int(split_lengths.sum())
    return (
        split_ids[:total],
        split_lengths,
        None if split_weights is None else split_weights[:total],
    )
