"""Soft selection: alpha, and the pure functions on it.

    symbol here                          paper (Cheng, Shen, Huang 2020)
    S  blocks                            L  feature blocks
    D  embedding_dim                     K  embedding dimension
    A  rows of alpha for one D           L  (scope "global"), L x tables (scope "table")
    alpha      (A, D), in [0, 1]         alpha_l, soft selection layer, eq. 3
    pooled     (B, D) before selection   e_i (one-hot features)
    B  batch, F features

alpha is a buffer, not a parameter: DistributedDataParallel, optimizers and weight decay never see it, and its gradient
is made by `torch.autograd.grad` in upper steps alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dnis_torchrec.checks import check

SAMPLES_PER_CHUNK = 256
"""Samples that soft selection works on at once: 1.7 MB of fp32 for 26 features of D = 64, which a cache holds."""


class Alpha(nn.Module):
    """One alpha per embedding_dim, shared by every wrapper of a model.

    Args:
        shapes: embedding_dim D -> (A, D).

    Example:
        >>> alpha = Alpha({8: (2, 8)})
        >>> alpha.of(8).sum().item()
        16.0
    """

    def __init__(self, shapes: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        for dim, shape in shapes.items():
            self.register_buffer(f"dim{dim}", torch.ones(shape))
        self._dims = tuple(shapes)
        self._hits: dict[int, Tensor] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The embedding_dims that have an alpha."""
        return self._dims

    def of(self, embedding_dim: int) -> Tensor:
        """alpha of the tables of one embedding_dim, ``(A, D)``.

        Args:
            embedding_dim: D, one of `dims`.

        Returns:
            The live buffer: writing to it changes the model.
        """
        return getattr(self, f"dim{embedding_dim}")

    @property
    def begins(self) -> dict[int, int]:
        """embedding_dim -> where its alpha begins once all are flattened, one after the other."""
        sizes = [self.of(dim).numel() for dim in self._dims]
        return {dim: sum(sizes[:index]) for index, dim in enumerate(self._dims)}

    @property
    def is_upper(self) -> bool:
        """True inside `upper_level`."""
        return self._hits is not None

    @contextmanager
    def upper_level(self) -> Iterator[dict[int, Tensor]]:
        """Makes alpha the only thing that learns for the duration of one upper step.

        Yields:
            embedding_dim -> ``(A,)`` bool, filled by the forward pass: which rows of alpha the batch hit.
        """
        self._hits = {
            dim: torch.zeros(len(self.of(dim)), dtype=torch.bool, device=self.of(dim).device) for dim in self.dims
        }
        for dim in self.dims:
            self.of(dim).requires_grad_(True)
        try:
            yield self._hits
        finally:
            for dim in self.dims:
                self.of(dim).requires_grad_(False)
            self._hits = None

    def record_hits(self, embedding_dim: int, rows: Tensor) -> None:
        """Notes, in an upper step, which rows of alpha the batch used.

        Args:
            embedding_dim: D of the tables looked up.
            rows: rows of alpha, any shape, integers; -1 for none.
        """
        if self._hits is not None:
            hits = self._hits[embedding_dim]
            found = torch.zeros(len(hits) + 1, dtype=torch.bool, device=hits.device)
            hits |= found.index_fill_(0, rows.flatten().long() + 1, True)[1:]

    def density(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Share of table values whose alpha is not zero, each row of alpha weighted by the table rows it serves.

        Args:
            rows_per_alpha_row: embedding_dim -> ``(A,)`` float64 on alpha's device: how much each row of alpha counts,
                by rows or by their cost.
        """
        return float(self.density_there(rows_per_alpha_row))

    def density_there(self, rows_per_alpha_row: Mapping[int, Tensor]) -> Tensor:
        """`density` as a float64 of no dimension, on alpha's device: nobody waits for it.

        Args:
            rows_per_alpha_row: as for `density`, on that device, too.
        """
        return self._weighted({dim: (self.of(dim) > 0).double() for dim in self.dims}, rows_per_alpha_row)

    def mean(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Mean of alpha over all table values.

        Args:
            rows_per_alpha_row: as for `density`.
        """
        return float(self._weighted({dim: self.of(dim).double() for dim in self.dims}, rows_per_alpha_row))

    def _weighted(self, values: Mapping[int, Tensor], rows_per_alpha_row: Mapping[int, Tensor]) -> Tensor:
        """Mean of any ``(A, D)`` values, each row of alpha weighted by the table rows it serves."""
        total = torch.stack([rows_per_alpha_row[dim].sum() * dim for dim in self.dims]).sum()
        summed = torch.stack([values[dim].sum(1) @ rows_per_alpha_row[dim] for dim in self.dims]).sum()
        return summed / total


class _Select(torch.autograd.Function):
    """out[b, f] = pooled[b, f] * alpha[rows[b, f]], with the alpha gradient as one segment sum.

    Ordinary autograd would write the gathered (B, F, D) alpha to memory and keep it from forward to backward. Here it
    is gathered a few samples at a time, stays in the cache, and is gathered again in backward.
    """

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
        needs_pooled = ctx.needs_input_grad[1]
        ctx.save_for_backward(alpha, rows, pooled if needs_pooled else None)
        return _multiply_by_rows(pooled, alpha, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        alpha, rows, pooled = ctx.saved_tensors
        grad_pooled = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_pooled = _multiply_by_rows(grad, alpha, rows)
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.zeros_like(alpha)
            for chunk in _chunks(rows):
                products = grad[chunk].to(alpha.dtype) * pooled[chunk].to(alpha.dtype)
                grad_alpha.index_add_(0, rows[chunk].flatten(), products.reshape(-1, alpha.shape[1]))
        return grad_pooled, grad_alpha, None


class _SelectBlocks(torch.autograd.Function):
    """out[b] = sum over s of pooled[b, s] * alpha[s], products a few samples at a time, as in `_Select`.

    As an einsum it is a batch of D tiny matrix products, for which every operand is copied first: ten times as long.
    """

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, pooled if ctx.needs_input_grad[1] else None)
        out = torch.empty(pooled.shape[0], pooled.shape[2], dtype=pooled.dtype, device=pooled.device)
        for chunk in _chunks(pooled):
            torch.sum(pooled[chunk] * alpha, 1, out=out[chunk])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        alpha, pooled = ctx.saved_tensors
        grad_pooled = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_pooled = grad.unsqueeze(1) * alpha
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.zeros_like(alpha)
            for chunk in _chunks(grad):
                grad_alpha += (pooled[chunk].to(alpha.dtype) * grad[chunk].to(alpha.dtype).unsqueeze(1)).sum(0)
        return grad_pooled, grad_alpha


def _multiply_by_rows(values: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    for chunk in _chunks(rows):
        gathered = alpha.index_select(0, rows[chunk].flatten()).view(*rows[chunk].shape, alpha.shape[1])
        torch.mul(values[chunk], gathered, out=out[chunk])
    return out


def _chunks(samples: Tensor) -> Iterator[slice]:
    """Samples to work on at once: all of them on a GPU, where a launch costs more than a cache miss."""
    step = SAMPLES_PER_CHUNK if samples.device.type == "cpu" else max(1, len(samples))
    for start in range(0, len(samples), step):
        yield slice(start, start + step)


def select_per_sample(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Soft selection of features whose bags hold at most one id (paper, eq. 3): ``alpha[rows] * pooled``.

    Args:
        pooled: ``(B, F, D)``.
        alpha: ``(A, D)``.
        rows: ``(B, F)`` int64, the row of alpha of each sample's id.

    Returns:
        ``(B, F, D)``.

    Example:
        >>> alpha = torch.tensor([[1.0, 0.5]])
        >>> select_per_sample(torch.ones(1, 1, 2), alpha, torch.zeros(1, 1, dtype=torch.int64)).tolist()
        [[[1.0, 0.5]]]
    """
    return _Select.apply(pooled, alpha, rows)


def select_per_block(pooled: Tensor, alpha: Tensor) -> Tensor:
    """Soft selection of a multi-hot feature, pooled per block: ``sum over s of alpha[s] * pooled[:, s]``.

    The paper knows one id per feature only; multiplying rows before pooling is the same as multiplying each block's
    sum.

    Args:
        pooled: ``(B, S, D)``.
        alpha: ``(S, D)``.

    Returns:
        ``(B, D)``.

    Example:
        >>> select_per_block(torch.ones(1, 2, 2), torch.tensor([[1.0, 0.5], [1.0, 0.0]])).tolist()
        [[2.0, 0.5]]
    """
    return _SelectBlocks.apply(pooled, alpha)


def normalise_gradient(gradient: Tensor, hits: Tensor) -> Tensor:
    """Row-wise normalisation of the complete alpha gradient (paper, eq. 8): ``g / (mean_k |g_k| + 1e-7)``.

    NOTE[DIFF]: rows of alpha without a hit in the batch get zero; the paper would blow their rounding noise up to full
    steps.

    Args:
        gradient: ``(A, D)``, already averaged over ranks.
        hits: ``(A,)`` bool.

    Returns:
        ``(A, D)``.

    Example:
        >>> normalise_gradient(torch.tensor([[1.0, -3.0]]), torch.tensor([True])).round(decimals=3).tolist()
        [[0.5, -1.5]]
    """
    normalised = gradient / (gradient.abs().mean(dim=1, keepdim=True) + 1e-7)
    return torch.where(hits.unsqueeze(1), normalised, torch.zeros_like(normalised))


def step_and_clip_(alpha: Tensor, direction: Tensor, learning_rate: float, *, floor: float = 0.0) -> Tensor:
    """One projected descent step: ``alpha <- clip(alpha - learning_rate * direction, floor, 1)``.

    Args:
        alpha: ``(A, D)``, changed in place.
        direction: ``(A, D)``.
        learning_rate: step length.
        floor: the least value that alpha may take: 0 in the paper.

    Returns:
        `alpha`.

    Raises:
        ValueError: if the learning rate is not positive.

    Example:
        >>> step_and_clip_(torch.ones(1, 2), torch.tensor([[1.0, -1.0]]), 0.1).tolist()
        [[0.8999999761581421, 1.0]]
    """
    check(learning_rate > 0, "learning_rate", "a number above 0", learning_rate)
    return alpha.sub_(direction, alpha=learning_rate).clamp_(min=floor, max=1.0)
