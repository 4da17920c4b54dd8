"""Operators on blocks: soft selection of a whole collection at once, and, on the CPU, bags split by block.

Soft selection reads the pooled embeddings of a collection as K *pieces* of D columns each: one for a single-id feature,
S for a multi-hot one. Pieces that belong to one output key are summed:

    out[b, output] = sum over its pieces k of pooled[b, k] * alpha[rows[b, k]] / divisors[b, output]

``rows[b, k] = -1`` says that the bag is empty: its embedding is zero, and is not even looked at. The operators are
compiled for the CPU, and those of soft selection have Triton kernels for a GPU (select_triton.py). Where there is
neither, or values are of another type, bag_splitting.py and soft_selection use torch's own operators instead: same
meaning, more passes over the same memory.

Shapes: B batch, K pieces, S blocks, I ids of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.ops.native_build import NAMESPACE, SELECTION, once


@once
def are_compiled() -> bool:
    """Returns whether the compiled operators are there. A process's first call loads, and if need be builds, them.

    Warns:
        RuntimeWarning: if they could not be compiled, with the reason; ``DNIS_NO_COMPILE=1`` silences it.

    Example:
        >>> are_compiled() in (True, False)
        True
    """
    if not SELECTION.is_there():
        return False
    of_blocks = ("select_pooled", "sum_alpha_gradient", "split_bags", "fill_rows")
    of_packed = ("find_pieces", "pack_ids", "select_packed", "spread_packed_gradient", "sum_packed_alpha_gradient")
    for name in (*of_blocks, *of_packed, "round_rows"):  # they write to their arguments
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *arguments: None)
    for name in ("spread_gradient", "are_good_bags"):
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *arguments: True)
    return True


Watch = Callable[[Any, Tensor], Tensor | None]


class _SelectPieces(torch.autograd.Function):
    """Soft selection, forward and backward, each in one pass over the pooled embeddings, and in place where it can.

    A new tensor of that size costs more in fresh pages than the multiplication itself. Where alpha does not learn, the
    pooled embeddings are not needed after forward, so the output takes their place (single-id features), and its
    gradient after it if nobody else holds the output by then; or their gradient alone does in backward (multi-hot ones,
    S times the output; pieces of empty bags are zero there already).
    """

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
            is_finite = operators.spread_gradient(grad, alpha, rows, divisors, layout, keeps_empty, grad_pooled)
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
    """Returns whether `select_pieces` and `fill_rows_` are there for such values.

    They are for float32 and float64 on a CPU with compiled operators, and for float32, float16 and bfloat16 on a GPU
    with Triton.

    Args:
        values: pooled embeddings.

    Example:
        >>> can_select(torch.ones(1, 1)) == are_compiled()
        True
    """
    if values.device.type == "cuda":
        from dnis_torchrec.ops import select_triton, triton_bags  # Triton takes seconds to load

        return triton_bags.triton is not None and values.dtype in select_triton.SELECTED_DTYPES
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64) and are_compiled()


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
    """Soft selection of every output key of a collection at once; see the top of this module.

    Args:
        pooled: ``(B, sum of D over pieces)``, for which `can_select`; zero where a bag is empty. Its memory is taken
            for the output or for its own gradient where autograd allows: use it no more.
        alpha: ``(sum of A * D,)``: the alphas of all embedding_dims, flattened, one after the other; float64 for
            float64, else float32.
        rows: ``(B, K)`` int32: row of alpha, or -1 for an empty bag.
        divisors: ``(B, outputs)`` of the dtype of `alpha`, or None for ones.
        layout: ``(K, 7)`` int64, on the CPU: first column of the piece in `pooled`, first column of its output, D,
            where its alpha begins in `alpha`, its output, the first row of that alpha that it may take, and the number
            of those rows. Pieces of one output stand next to each other.
        width: sum of D over outputs.
        watch: called in backward, once the gradient of `pooled` is known and before anything takes it: with whether
            the gradient of the result is finite throughout, and that gradient. It may return whether `pooled` may have
            its gradient, of no dimension: else that is zero.

    Returns:
        ``(B, width)``.

    Example:
        >>> if are_compiled():
        ...     pooled, alpha = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([1.0, 0.5, 0.0, 1.0])
        ...     rows = torch.tensor([[0, 1]], dtype=torch.int32)
        ...     layout = torch.tensor([[0, 0, 2, 0, 0, 0, 2], [2, 0, 2, 0, 0, 0, 2]])
        ...     assert select_pieces(pooled, alpha, rows, None, layout, 2).tolist() == [[1.0, 5.0]]
    """
    return _SelectPieces.apply(pooled, alpha, rows, divisors, layout, width, watch)


def fill_rows_(
    rows: Tensor, ids: Tensor, lengths: Tensor, routings: list[Tensor], places: Sequence[tuple[int, int, int]]
) -> Tensor:
    """Writes the rows of alpha of single-id features into `rows`, -1 for an empty bag. See `can_select`.

    Args:
        rows: ``(B, K)`` int32; columns of other features stay as they are.
        ids: ``(I,)`` int32 or int64, the bags of one key after those of another.
        lengths: ``(keys * B,)`` int32 or int64.
        routings: per feature, see `split_bags`.
        places: per feature its piece, its key's position, and its row of alpha for block 0.

    Returns:
        `rows`.

    Example:
        >>> if are_compiled():
        ...     rows, lengths = torch.empty(2, 1, dtype=torch.int32), torch.tensor([1, 0])
        ...     ids, ends = torch.tensor([3]), torch.tensor([2, 4])
        ...     assert fill_rows_(rows, ids, lengths, [ends], [(0, 0, 5)]).tolist() == [[6], [-1]]
    """
    flat = [number for place in places for number in place]
    _operators(rows).fill_rows(ids.contiguous(), lengths.contiguous(), routings, flat, rows)
    return rows


def are_good_bags(ids: Tensor, lengths: Tensor, bounds: Tensor, longest: Tensor) -> bool:
    """Returns whether no bag is too long, and every id is at least 0 and below the bound of its key. CPU, compiled.

    Args:
        ids: ``(I,)`` int32 or int64, the bags of one key after those of another.
        lengths: ``(keys * B,)`` int32 or int64.
        bounds: ``(keys,)`` int64.
        longest: ``(keys,)`` int64, ids that a bag of the key may hold.

    Example:
        >>> if are_compiled():
        ...     ids, lengths, bounds = torch.tensor([3, 0, 9]), torch.tensor([1, 2]), torch.tensor([4, 10])
        ...     assert are_good_bags(ids, lengths, bounds, torch.tensor([1, 2]))
        ...     assert not are_good_bags(ids, lengths, bounds, torch.tensor([1, 1]))
    """
    return torch.ops.dnis_torchrec.are_good_bags(ids.contiguous(), lengths.contiguous(), bounds, longest)


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
    """Splits the bags of all features by block in two passes over the ids, which keep their order. CPU, compiled.

    Args:
        ids: ``(I,)`` int32 or int64, the bags of one feature after those of another.
        lengths: ``(F * B,)`` int32 or int64.
        weights: ``(I,)``, or None.
        routings: per feature the block of every row, ``(N,)`` uint8 or uint16; or the rising ends of its blocks,
            ``(S,)`` int64; or an empty tensor where it has one block.
        pieces: for every (feature, block) the split bag that its ids go to, int64; `num_pieces` drops them.
        first_of: per feature where its blocks begin in `pieces`, and their number: F + 1 integers.
        batch_size: B.
        num_pieces: K.

    Returns:
        Ids, lengths ``(K * B,)`` and weights of the split bags.

    Raises:
        ValueError: for an id outside its routing, or lengths that are not those of the ids.

    Example:
        >>> if are_compiled():
        ...     ends, pieces = torch.tensor([2, 4]), torch.tensor([0, 1, 2])
        ...     ids, lengths = torch.tensor([3, 0, 1]), torch.tensor([2, 1])
        ...     split, counts, _ = split_bags(ids, lengths, None, [ends], pieces, [0, 3], 2, 2)
        ...     assert (split.tolist(), counts.tolist()) == ([0, 1, 3], [1, 1, 1, 0])
    """
    split_ids, split_lengths = torch.empty_like(ids), lengths.new_empty(num_pieces * batch_size)
    split_weights = None if weights is None else torch.empty_like(weights)
    torch.ops.dnis_torchrec.split_bags(
        ids, lengths, weights, routings, pieces, first_of, batch_size, split_ids, split_lengths, split_weights
    )
    total = int(split_lengths.sum())
    return split_ids[:total], split_lengths, None if split_weights is None else split_weights[:total]
