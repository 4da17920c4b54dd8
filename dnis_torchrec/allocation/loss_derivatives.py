"""First and second derivatives of a loss in the prediction of every sample, whatever the loss.

Shapes: B batch, T outputs of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Called with (predictions, labels), both float64: their mean loss, a scalar."""

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Tolerances within which one float64 number, computed in two ways, counts as equal."""


@dataclass(frozen=True)
class LossDerivatives:
    """A loss around the predictions of a batch.

    Attributes:
        loss: mean over the samples.
        first: ``(B, T)`` float64, dL_n / dz_nt, where L_n is the loss of sample n alone.
        second: ``(B, T, T)`` float64, d^2 L_n / (dz_nt dz_nt').
    """

    loss: float
    first: Tensor
    second: Tensor


@torch.enable_grad()
def loss_derivatives(loss: Loss, predictions: Tensor, labels: Tensor) -> LossDerivatives:
    """Derives a loss twice in the prediction of every sample: by T + 2 passes over numbers of the batch's size.

    The loss is a mean over samples, so that B times its gradient is the gradient of every sample's own loss. Samples
    that do not meet in the loss have a Hessian of blocks ``(T, T)``; sums of its rows then give all of it.

    Args:
        loss: twice differentiable in its first argument.
        predictions: ``(B, T)``; the loss gets those of one output as ``(B,)``.
        labels: ``(B,)`` or ``(B, ...)``.

    Raises:
        ValueError: for a loss that is no mean over samples, or in which samples meet.
        NotImplementedError: for a loss that cannot be derived twice.

    Example:
        >>> at = loss_derivatives(torch.nn.MSELoss(), torch.tensor([[3.0], [1.0]]), torch.tensor([1.0, 1.0]))
        >>> at.loss, at.first.flatten().tolist(), at.second.flatten().tolist()
        (2.0, [4.0, 0.0], [2.0, 2.0])
    """
    z, y = predictions.detach().double().requires_grad_(), labels.double()
    num_samples, num_outputs = z.shape
    value = _of(loss, z, y)
    mean, twice = (float(of.detach()) for of in (value, _of(loss, torch.cat([z, z]), torch.cat([y, y]))))
    is_mean = math.isclose(mean, twice, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    remedy = "give it reduction='mean'"
    check(is_mean, _place(loss), "a mean over the samples", f"{mean:g}, and {twice:g} of every sample twice", remedy)
    first = _derive(loss, value, z, create_graph=True) * num_samples
    rows = [_derive(loss, first[:, output].sum(), z) for output in range(num_outputs)]
    second = torch.stack(rows, dim=1)
    probe = torch.arange(1, z.numel() + 1, dtype=z.dtype, device=z.device).cos().view_as(z)
    mixed = _derive(loss, (first * probe).sum(), z)
    apart = torch.allclose(mixed, torch.einsum("ntu,nt->nu", second, probe), RELATIVE, ABSOLUTE)
    check(apart, _place(loss), "a mean of the losses of single samples", "one in which samples meet")
    return LossDerivatives(loss=mean, first=first.detach(), second=second)


def name_of(loss: Loss) -> str:
    """Returns the name of a loss for errors.

    Args:
        loss: a module, a function or another object.

    Example:
        >>> name_of(torch.nn.MSELoss())
        'MSELoss'
    """
    return getattr(loss, "__name__", type(loss).__name__)


def _place(loss: Loss) -> str:
    return f"loss {name_of(loss)}"


def _of(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    value = loss(z.squeeze(1) if z.shape[1] == 1 else z, y)
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    received = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    check(is_scalar, _place(loss), "a scalar, the mean over the samples", received, "give it reduction='mean'")
    return value.sum()


def _derive(loss: Loss, value: Tensor, z: Tensor, *, create_graph: bool = False) -> Tensor:
    try:
        return torch.autograd.grad(value, z, create_graph=create_graph, retain_graph=True, materialize_grads=True)[0]
    except RuntimeError as error:
        supported = "supported are losses that are twice differentiable in the predictions"
        raise NotImplementedError(describe(_place(loss), supported, str(error).splitlines()[0])) from error
