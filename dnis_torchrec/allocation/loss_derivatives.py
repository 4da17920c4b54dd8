"""First and second derivatives of a loss in the prediction of every sample, whatever the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.task import Outputs, Task, check_outputs

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Called with (predictions, labels), both float64: their mean loss, a scalar."""

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Tolerances within which one float64 number, computed in two ways, counts as equal."""
SINGLE = 1e-3
"""The same for the numbers of a task, which are its model's, in float32 mostly."""


@dataclass(frozen=True)
class LossDerivatives:
    """A loss around the predictions of a batch."""

    loss: float
    first: Tensor
    second: Tensor


@torch.enable_grad()
def loss_derivatives(loss: Loss, predictions: Tensor, labels: Tensor) -> LossDerivatives:
    """Derives a loss twice in the prediction of every sample: by T + 2 passes over numbers of the
    batch's size."""
    z, y = predictions.detach().double().requires_grad_(), labels.double()
    value = _of(loss, z, y)
    mean, twice = (
        float(of.detach()) for of in (value, _of(loss, torch.cat([z, z]), torch.cat([y, y])))
    )
    is_mean = math.isclose(mean, twice, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    remedy = "give it reduction='mean'"
    check(
        is_mean,
        _place(loss),
        "a mean over the samples",
        f"{mean:g}, and {twice:g} of every sample twice",
        remedy,
    )
    return _derivatives(value, z, _place(loss), RELATIVE)


def _derivatives(value: Tensor, z: Tensor, place: str, tolerance: float) -> LossDerivatives:
    """Derives a mean over samples, computed from ``(B, T)`` predictions."""
    num_samples, num_outputs = z.shape
    first = _derive(value, z, place, create_graph=True) * num_samples
    rows = [_derive(first[:, output].sum(), z, place) for output in range(num_outputs)]
    second = torch.stack(rows, dim=1)
    probe = torch.arange(1, z.numel() + 1, dtype=z.dtype, device=z.device).cos().view_as(z)
    mixed = _derive((first * probe).sum(), z, place)
    expected = torch.einsum("ntu,nt->nu", second, probe)
    apart = torch.allclose(
        mixed, expected, tolerance, tolerance * float(expected.abs().max()) + ABSOLUTE
    )
    check(apart, place, "a mean of the losses of single samples", "one in which samples meet")
    return LossDerivatives(
        loss=float(value.detach()), first=first.detach().double(), second=second.double()
    )


@torch.enable_grad()
def task_derivatives(
    task: Task, batch: Batch, outputs: Outputs, place: str
) -> tuple[Tensor, LossDerivatives]:
    """Derives a task's loss twice in the outputs of its model, of every sample. Local, no
    collective."""
    place = f"{place}, task {type(task).__name__}"
    check_outputs(outputs, place)
    by_name = {"": outputs} if isinstance(outputs, Tensor) else dict(outputs)

    def loss_at(values: Mapping[str, Tensor]) -> Tensor:
        given = {name: values.get(name, part) for name, part in by_name.items()}
        value = task.loss(batch, given[""] if isinstance(outputs, Tensor) else given)
        return value.sum()

    leaves = {
        name: part.detach().requires_grad_()
        for name, part in by_name.items()
        if isinstance(part, Tensor)
        and part.is_floating_point()
        and part.shape[:1] == batch.labels.shape[:1]
    }
    value, remedy = (
        loss_at(leaves),
        "take what comes from the model from the outputs in its method 'loss'",
    )
    check(
        value.requires_grad,
        place,
        "a loss that depends on the outputs",
        f"constants {list(by_name)}",
        remedy,
    )
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    used = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    columns = [by_name[name].reshape(len(batch.labels), -1) for name in used]
    whole = torch.cat(columns, dim=1)
    finite = whole.isfinite()
    if not bool(finite.all()):
        remedy = "take weights of a model whose training did not diverge"
        raise ValueError(
            describe(place, "finite outputs", float(whole[~finite][0].detach()), remedy)
        )
    z = whole.detach().requires_grad_()
    parts = z.split([column.shape[1] for column in columns], dim=1)
    values = {
        name: part.view_as(by_name[name]).to(by_name[name])
        for name, part in zip(used, parts, strict=True)
    }
    return whole, _derivatives(loss_at(values), z, place, SINGLE)


def name_of(loss: Loss | Task) -> str:
    """Returns the name of a loss for errors."""
    return getattr(loss, "__name__", type(loss).__name__)


def _place(loss: Loss) -> str:
    return f"loss {name_of(loss)}"


def _of(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    value = loss(z.squeeze(1) if z.shape[1] == 1 else z, y)
    is_scalar = isinstance(value, Tensor) and value.numel() == 1
    received = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    check(
        is_scalar,
        _place(loss),
        "a scalar, the mean over the samples",
        received,
        "give it reduction='mean'",
    )
    return value.sum()


def _derive(value: Tensor, z: Tensor, place: str, *, create_graph: bool = False) -> Tensor:
    try:
        return torch.autograd.grad(
            value, z, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )[0]
    except RuntimeError as error:
        supported = "supported are losses that are twice differentiable in the predictions"
        raise NotImplementedError(describe(place, supported, str(error).splitlines()[0])) from error
