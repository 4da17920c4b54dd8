"""Soft selection: alpha, and the pure functions on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dnis_torchrec.checks import check

SAMPLES_PER_CHUNK = 256
"""Samples that soft selection works on at once: 1.7 MB of fp32 for 26 features of D = 64, which a
cache holds."""


class Alpha(nn.Module):
    """One alpha per embedding_dim, shared by every wrapper of a model."""

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
        """alpha of the tables of one embedding_dim, ``(A, D)``."""
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
        """Makes alpha the only thing that learns for the duration of one upper step."""
        self._hits = {
            dim: torch.zeros(len(self.of(dim)), dtype=torch.bool, device=self.of(dim).device)
            for dim in self.dims
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
        """Notes, in an upper step, which rows of alpha the batch used."""
        if self._hits is not None:
            hits = self._hits[embedding_dim]
            found = torch.zeros(len(hits) + 1, dtype=torch.bool, device=hits.device)
            hits |= found.index_fill_(0, rows.flatten().long() + 1, True)[1:]

    def density(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Share of table values whose alpha is not zero, each row of alpha weighted by the table
        rows it serves."""
        return float(self.density_there(rows_per_alpha_row))

    def density_there(self, rows_per_alpha_row: Mapping[int, Tensor]) -> Tensor:
        """`density` as a float64 of no dimension, on alpha's device: nobody waits for it."""
        return self._weighted(
            {dim: (self.of(dim) > 0).double() for dim in self.dims}, rows_per_alpha_row
        )

    def mean(self, rows_per_alpha_row: Mapping[int, Tensor]) -> float:
        """Mean of alpha over all table values."""
        return float(
            self._weighted({dim: self.of(dim).double() for dim in self.dims}, rows_per_alpha_row)
        )

    def _weighted(
        self, values: Mapping[int, Tensor], rows_per_alpha_row: Mapping[int, Tensor]
    ) -> Tensor:
        """Mean of any ``(A, D)`` values, each row of alpha weighted by the table rows it serves."""
        total = torch.stack([rows_per_alpha_row[dim].sum() * dim for dim in self.dims]).sum()
        summed = torch.stack(
            [values[dim].sum(1) @ rows_per_alpha_row[dim] for dim in self.dims]
        ).sum()
        return summed / total


class _Select(torch.autograd.Function):
    """out[b, f] = pooled[b, f] * alpha[rows[b, f]], with the alpha gradient as one segment sum."""

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
                grad_alpha.index_add_(
                    0, rows[chunk].flatten(), products.reshape(-1, alpha.shape[1])
                )
        return grad_pooled, grad_alpha, None


class _SelectBlocks(torch.autograd.Function):
    """out[b] = sum over s of pooled[b, s] * alpha[s], products a few samples at a time, as in
    `_Select`."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, pooled if ctx.needs_input_grad[1] else None)
        out = torch.empty(
            pooled.shape[0], pooled.shape[2], dtype=pooled.dtype, device=pooled.device
        )
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
                grad_alpha += (
                    pooled[chunk].to(alpha.dtype) * grad[chunk].to(alpha.dtype).unsqueeze(1)
                ).sum(0)
        return grad_pooled, grad_alpha


def _multiply_by_rows(values: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    for chunk in _chunks(rows):
        gathered = alpha.index_select(0, rows[chunk].flatten()).view(
            *rows[chunk].shape, alpha.shape[1]
        )
        torch.mul(values[chunk], gathered, out=out[chunk])
    return out


def _chunks(samples: Tensor) -> Iterator[slice]:
    """Samples to work on at once: all of them on a GPU, where a launch costs more than a cache
    miss."""
    step = SAMPLES_PER_CHUNK if samples.device.type == "cpu" else max(1, len(samples))
    for start in range(0, len(samples), step):
        yield slice(start, start + step)


def select_per_sample(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Soft selection of features whose bags hold at most one id (paper, eq. 3): ``alpha[rows] *
    pooled``."""
    return _Select.apply(pooled, alpha, rows)


def select_per_block(pooled: Tensor, alpha: Tensor) -> Tensor:
    """Soft selection of a multi-hot feature, pooled per block: ``sum over s of alpha[s] * pooled[:,
    s]``."""
    return _SelectBlocks.apply(pooled, alpha)


def normalise_gradient(gradient: Tensor, hits: Tensor) -> Tensor:
    """Row-wise normalisation of the complete alpha gradient (paper, eq. 8): ``g / (mean_k |g_k| +
    1e-7)``."""
    normalised = gradient / (gradient.abs().mean(dim=1, keepdim=True) + 1e-7)
    return torch.where(hits.unsqueeze(1), normalised, torch.zeros_like(normalised))


def step_and_clip_(
    alpha: Tensor, direction: Tensor, learning_rate: float, *, floor: float = 0.0
) -> Tensor:
    """One projected descent step: ``alpha <- clip(alpha - learning_rate * direction, floor, 1)``."""
    check(learning_rate > 0, "learning_rate", "a number above 0", learning_rate)
    return alpha.sub_(direction, alpha=learning_rate).clamp_(min=floor, max=1.0)
