"""Soft selection on whole tables: every row times its alpha, before a kernel looks anything up.
CPU, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class _MultiplyRows(torch.autograd.Function):
    """out[n] = weights[n] * alpha[rows[n]], zero where rows[n] is -1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
        num_rows, dim = alpha.shape
        flat, layout = (
            alpha.flatten(),
            torch.tensor([[0, 0, dim, 0, 0, 0, num_rows]]),
        )  # one piece, see `select_pieces`
        ctx.save_for_backward(flat, rows, layout, weights if ctx.needs_input_grad[1] else None)
        ctx.alpha_shape = alpha.shape
        out = torch.empty_like(weights)
        torch.ops.dnis_torchrec.select_pooled(weights, flat, rows, None, layout, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        flat, rows, layout, weights = ctx.saved_tensors
        grad_weights = grad_alpha = None
        grad, operators = grad.contiguous(), torch.ops.dnis_torchrec
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.empty_like(flat)
            operators.sum_alpha_gradient(grad, weights, rows, None, layout, grad_alpha)
            grad_alpha = grad_alpha.view(ctx.alpha_shape)
        if ctx.needs_input_grad[0]:
            grad_weights = torch.empty_like(grad)
            operators.spread_gradient(grad, flat, rows, None, layout, False, grad_weights)
        return grad_weights, grad_alpha, None


def multiply_rows(weights: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Every row of a table times its row of alpha: ``weights[n] * alpha[rows[n]]``. CPU, compiled."""
    return _MultiplyRows.apply(weights, alpha, rows)


class TableSelection:
    """Looks bags up in multiplied tables. Local, no collective."""

    def __init__(
        self, kernel: nn.Module, rows: Tensor, first_rows: Sequence[int], num_columns: int
    ) -> None:
        self._kernel = kernel
        self._rows = rows.to(torch.int32).unsqueeze(1)
        self._first_rows = list(first_rows)
        self._num_columns = num_columns

    def look_up(
        self,
        lookup: Callable[[KeyedJaggedTensor], Tensor],
        features: KeyedJaggedTensor,
        alpha: Tensor,
        *,
        weights_learn: bool,
    ) -> Tensor:
        """Soft selection of whole bags."""
        own = cast(Tensor, self._kernel.weights)
        weights = own if weights_learn else own.detach()
        multiplied = multiply_rows(
            weights.view(-1, self._num_columns), alpha.to(weights.dtype), self._rows
        )
        if not features.stride():  # no kernel takes an empty batch
            nothing = multiplied.new_empty(0, len(self._first_rows) * self._num_columns)
            return nothing + multiplied.sum() * 0
        with self._in_place_of_weights(multiplied.flatten()):
            return lookup(features)

    def rows_of(self, features: KeyedJaggedTensor) -> Tensor:
        """Row of alpha of every id, ``(I,)``, -1 for an id of no block."""
        ids = features.values().split(features.length_per_key())
        rows = [
            self._rows[own.long() + first] for own, first in zip(ids, self._first_rows, strict=True)
        ]
        return torch.cat(rows).squeeze(1)

    @contextmanager
    def _in_place_of_weights(self, multiplied: Tensor) -> Iterator[None]:
        """Puts a product in place of the weights, as `functional_call` does, for a kernel that its
        owner calls."""
        own = self._kernel._parameters["weights"]
        self._kernel._parameters["weights"] = multiplied  # type: ignore[assignment]  # no parameter, and none is wanted
        try:
            yield
        finally:
            self._kernel._parameters["weights"] = own
