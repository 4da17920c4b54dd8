"""The gradient of alpha: first order, and one-step unrolled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.checks import check, describe
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.torchrec import lookups

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
    """The one-step unrolled gradient of alpha (see the top of this module) from first derivatives
    alone."""
    original = [weight.detach().clone() for weight in weights]
    try:
        _move_(weights, original, train_weight_gradient(), [-step for step in steps])
        gradient, of_weights = validation_gradients()
        lengths = [
            step * torch.linalg.vector_norm(v, dtype=torch.float64)
            for step, v in zip(steps, of_weights, strict=True)
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
def _move_(
    weights: Sequence[Tensor], original: Gradients, direction: Gradients, scales: Sequence[float]
) -> None:
    for weight, start, change, scale in zip(weights, original, direction, scales, strict=True):
        weight.copy_(start).add_(change, alpha=scale)


def first_order_gradient(loss: Tensor, alpha: Alpha) -> list[Tensor]:
    """d loss / d alpha, one per D; no gradient of a weight is computed."""
    alphas = [alpha.of(dim) for dim in alpha.dims]
    return list(torch.autograd.grad(loss.sum(), alphas, materialize_grads=True))


class UnrolledHypergradient:
    """`unrolled_gradient` of a sharded model whose tables are ordinary parameters."""

    def __init__(self, model: nn.Module, alpha: Alpha, step: float, optimizer: Any = None) -> None:
        self.set_step(step)
        _check_ordinary_gradients(model)
        self._modules, self._alpha = list(model.modules()), alpha
        self._weights = [
            parameter for _, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._optimizer = optimizer

    def set_step(self, step: float) -> None:
        """Sets xi for the next call."""
        remedy = "pass the lower level's learning rate, or None for the first order"
        check(step > 0, "unrolled_step", "a number above 0", step, remedy)
        self._step = step

    def __call__(
        self, train: Callable[[], Tensor], validation: Callable[[], Tensor]
    ) -> list[Tensor]:
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
        with self._pass(), without_synchronisation(self._modules), _learning(self._alpha):
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
    return (
        torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
        if leaf.grad is None
        else leaf.grad
    )


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


class UnrollingError(NotImplementedError):
    """The weights of this model cannot be unrolled by a step, as they are sharded and optimized."""


def _check_ordinary_gradients(model: nn.Module) -> None:
    """Refuses tables and weights that would be stepped inside the backward pass, or averaged by
    nobody."""
    supported = (
        "supported for one-step unrolling is the dense compute kernel in data_parallel sharding"
    )
    remedy = "shard the tables so, as training.shard does for replicated Adam, or take the first order (None)"
    for module in model.modules():
        if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            continue
        for table, sharding in module.module_sharding_plan.items():
            received = f"{sharding.compute_kernel} kernel in {sharding.sharding_type} sharding"
            is_dense = sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
            if not is_dense or sharding.sharding_type != ShardingType.DATA_PARALLEL.value:
                raise UnrollingError(describe(f"table {table!r}", supported, received, remedy))
    fused = next(in_backward_optimizer_filter(model.named_parameters(), include=True), None)
    if fused is not None:
        supported = "supported for one-step unrolling are optimizers outside the backward pass"
        raise UnrollingError(
            describe(f"parameter {fused[0]!r}", supported, "one that is fused into it")
        )


@contextmanager
def without_synchronisation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """DistributedDataParallel, where it is among the modules of a model, does not prepare for a
    backward pass."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


@contextmanager
def frozen_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Normalisation takes the batch's statistics, as in training, and leaves the running ones
    alone."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, _NormBase) and module.track_running_stats:
                module.track_running_stats = False
                stack.callback(setattr, module, "track_running_stats", True)
        yield


def fused_kernels(model: nn.Module) -> list[Any]:
    """FBGEMM's kernels that count their forward passes, as fused optimizers want for bias
    correction. Local."""
    return [
        part for lookup in lookups(model) for part in lookup.modules() if hasattr(part, "iter_cpu")
    ]


@contextmanager
def frozen_counters(kernels: Iterable[Any]) -> Iterator[None]:
    """Forward passes meanwhile are none of a training step: kernels of `fused_kernels` count them
    and forget them."""
    counted = [counter for kernel in kernels for counter in (kernel.iter, kernel.iter_cpu)]
    before = [counter.clone() for counter in counted]
    try:
        yield
    finally:
        for counter, value in zip(counted, before, strict=True):
            counter.copy_(value)
