"""The gradient of alpha through one step of gradient descent on the weights, from first derivatives alone.

    d/d alpha L_validation(Theta - xi * grad L_train(Theta, alpha), alpha)
        = grad_alpha L_validation(Theta', alpha) - (grad_alpha L_train(Theta+) - grad_alpha L_train(Theta-)) / (2 eps)

Theta' is the unrolled step, v = grad_Theta L_validation(Theta', alpha), Theta+- = Theta +- eps * xi * v: DARTS' central
difference, with an eps that is best for the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dnis_torchrec.checks import check
from dnis_torchrec.search.pipeline import first_order_gradient, frozen_statistics
from dnis_torchrec.selection.alpha import Alpha

Gradients = Sequence[Tensor]


def difference_radius(dtype: torch.dtype) -> float:
    """Returns the radius of a central difference in the weights: ``eps * ||xi * v|| = 2 *
    m^(1/3)``."""
    return 2 * float(torch.finfo(dtype).eps) ** (1 / 3)


def unrolled_gradient(
    weights: Sequence[Tensor],
    steps: Sequence[float],
    *,
    train_weight_gradient: Callable[[], Gradients],
    validation_gradients: Callable[[], tuple[Gradients, Gradients]],
    train_alpha_gradient: Callable[[], Gradients],
) -> list[Tensor]:
    """The one-step unrolled gradient of alpha from first derivatives
    alone."""
    original = [weight.detach().clone() for weight in weights]
    try:
        _move_(weights, original, train_weight_gradient(), [-step for step in steps])
        gradient, of_weights = validation_gradients()
        lengths = [
            step * torch.linalg.vector_norm(v, dtype=torch.float64) for step, v in zip(steps, of_weights, strict=True)
        ]
        length = float(torch.stack(lengths).norm())
        if length == 0:
            return list(gradient)
        eps = max(difference_radius(weight.dtype) for weight in weights) / length
        _move_(weights, original, of_weights, [eps * step for step in steps])
        above = train_alpha_gradient()
        _move_(weights, original, of_weights, [-eps * step for step in steps])
        below = train_alpha_gradient()
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, original, strict=True):
                weight.copy_(value)
    return [g - (up - down) / (2 * eps) for g, up, down in zip(gradient, above, below, strict=True)]


@torch.no_grad()
def _move_(weights: Sequence[Tensor], original: Gradients, direction: Gradients, scales: Sequence[float]) -> None:
    for weight, start, change, scale in zip(weights, original, direction, scales, strict=True):
        weight.copy_(start).add_(change, alpha=scale)


class UnrolledHypergradient:
    """`unrolled_gradient` of a prepared model; weights that Adam trains are unrolled about as far as Adam goes."""

    def __init__(self, model: nn.Module, alpha: Alpha, step: float, optimizer: Any = None) -> None:
        self.set_step(step)
        self._modules, self._alpha = list(model.modules()), alpha
        self._weights = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
        self._optimizer = optimizer

    def set_step(self, step: float) -> None:
        """Sets xi for the next call."""
        remedy = "pass the lower level's learning rate, or None for the first order"
        check(step > 0, "unrolled_step", "a number above 0", step, remedy)
        self._step = step

    def __call__(self, train: Callable[[], Tensor], validation: Callable[[], Tensor]) -> list[Tensor]:
        """The gradient of alpha on one batch of each level."""
        return unrolled_gradient(
            self._weights,
            self._steps(),
            train_weight_gradient=lambda: self._weight_gradient(train),
            validation_gradients=lambda: self._both_gradients(validation),
            train_alpha_gradient=lambda: self._alpha_gradient(train),
        )

    def _steps(self) -> list[float]:
        groups = [_group_of(weight, self._optimizer) for weight in self._weights]
        highest = max((group["lr"] for group in groups if group), default=0.0)
        steps = []
        for weight, group in zip(self._weights, groups, strict=True):
            share = group["lr"] / highest if group and highest else 1.0
            steps.append(self._step * share / _size_of_gradients(weight, group, self._optimizer))
        return steps

    def _weight_gradient(self, run: Callable[[], Tensor]) -> list[Tensor]:
        with self._pass():
            self._clear()
            run().sum().backward()
            gradients = [_gradient_of(weight) for weight in self._weights]
            self._clear()
        return gradients

    def _both_gradients(self, run: Callable[[], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with _learning(self._alpha) as alphas:
            weight_gradients = self._weight_gradient(run)
            return [_gradient_of(alpha) for alpha in alphas], weight_gradients

    def _alpha_gradient(self, run: Callable[[], Tensor]) -> list[Tensor]:
        with self._pass(), _learning(self._alpha):
            return first_order_gradient(run(), self._alpha)

    def _clear(self) -> None:
        for weight in self._weights:
            weight.grad = None

    @contextmanager
    def _pass(self) -> Iterator[None]:
        device = self._alpha.of(self._alpha.dims[0]).device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices), frozen_statistics(self._modules):
            yield


def _group_of(weight: Tensor, optimizer: Any) -> dict[str, Any]:
    """Returns the optimizer's param_group of a weight, or an empty dict if the optimizer does not
    train it."""
    groups = [] if optimizer is None else optimizer.param_groups
    return next((group for group in groups if any(weight is own for own in group["params"])), {})


def _size_of_gradients(weight: Tensor, group: dict[str, Any], optimizer: Any) -> float:
    """Root mean square of a weight's gradients, as Adam keeps it; 1 where the optimizer divides by
    no such thing."""
    state = optimizer.state.get(weight, {}) if group else {}
    if "exp_avg_sq" not in state:
        return 1.0
    bias = 1 - group["betas"][1] ** float(state["step"])
    return math.sqrt(float(state["exp_avg_sq"].mean()) / bias) or 1.0


def _gradient_of(leaf: Tensor) -> Tensor:
    """The leaf's gradient; zeros that take no memory where the loss does not depend on it."""
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape) if leaf.grad is None else leaf.grad


@contextmanager
def _learning(alpha: Alpha) -> Iterator[list[Tensor]]:
    """alpha requires a gradient beside the weights; `Alpha.upper_level` would cut the weights off."""
    alphas = [alpha.of(dim) for dim in alpha.dims]
    for value in alphas:
        value.requires_grad_(True)
    try:
        yield alphas
    finally:
        for value in alphas:
            value.requires_grad_(False)
            value.grad = None
