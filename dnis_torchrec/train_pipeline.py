"""BilevelTrainPipeline: both levels of the search in one TorchRec train pipeline.

Lower steps are TorchRec's own: forward, backward with fused table optimizers, optimizer. Upper steps must not move a
weight: the pooled embeddings are detached, only d loss / d alpha is computed, DDP does not synchronise, running
statistics stand still. An unrolled upper step moves the weights and puts them back (see `hypergradient`). Batches of
both levels travel through the same queue, so that the copy and input_dist of the next batch, of either level, overlap
the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import TrainPipelineContext
from torchrec.streamable import Pipelineable

from dnis_torchrec.alpha_optimizer import AlphaOptimizer, Pressure
from dnis_torchrec.checkpoint import save_checkpoint
from dnis_torchrec.checks import describe
from dnis_torchrec.finite import FiniteGuard
from dnis_torchrec.hypergradient import (
    UnrolledHypergradient,
    first_order_gradient,
    frozen_statistics,
    without_synchronisation,
)
from dnis_torchrec.level_schedule import BilevelStream, Level
from dnis_torchrec.soft_selection import Alpha
from dnis_torchrec.table_shards import soft_selection_modules


class DenseOptimizer(Protocol):
    """What TorchRec's pipelines need of an optimizer: torch.optim.Optimizer and KeyedOptimizer both have it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients."""

    def step(self, closure: Any = None) -> Any:
        """Applies gradients."""


@dataclass
class BilevelTrainPipelineContext(TrainPipelineContext):
    """A batch's context in the queue, and the level that the batch belongs to."""

    level: Level = Level.LOWER


class BilevelTrainPipeline(TrainPipelineSparseDist):
    """Interleaves lower and upper steps of the bi-level problem (paper, eq. 5 and 6).

        min over alpha of L_validation(Theta*(alpha), alpha),   Theta* = argmin over Theta of L_train(Theta, alpha)

    An upper step takes Theta for Theta* (first order), or what one step of gradient descent on the latest training
    batch would make of Theta (one-step unrolled; `UnrolledHypergradient` has the equations, and what it costs).
    NOTE[DIFF]: DARTS unrolls the step to come, on the next training batch; here the batch of the last lower step is
    at hand, already on the device.

    Distributed: tables and dense weights as TorchRec distributes them; alpha is replicated. An upper step all-reduces
    one flat tensor (alpha's gradients, hits, and whether the loss is finite) over the model's process group, so every
    rank takes the same step, or stops. A lower step adds one all_reduce of W numbers for the loss and one per wrapper
    for its gradient, for the same reason.

    Args:
        model: DistributedModelParallel around a prepared model whose forward takes a batch and returns
            ``(loss, output)``, as TorchRec's pipelines want it.
        optimizer: optimizer of everything that is not fused into the tables' backward.
        device: where the model is.
        pressure: the requested size and how to get there; None searches without pressure, as the paper does.
        alpha_learning_rate: see `AlphaOptimizer`.
        alpha_averaging: see `AlphaOptimizer`.
        unrolled_step: xi of the one-step unrolled gradient, best the lower level's learning rate; None for the first
            order. The unrolled step is plain gradient descent, also where Adam trains the weights. An unrolled upper
            step returns the validation loss and output at the unrolled weights.

    Attributes:
        alpha_optimizer: the upper level's state.
        lower_steps: lower steps taken.
        upper_steps: upper steps taken.

    Raises:
        RuntimeError: if the model is not prepared.
        NotImplementedError: for DMPCollection (2D parallelism), whose replicas of alpha are not synchronised yet; for
            an `unrolled_step` with tables that have no ordinary gradient (see `UnrolledHypergradient`).
        ValueError: for a size that cannot be met, or an `unrolled_step` that is not above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DenseOptimizer,
        device: torch.device,
        *,
        pressure: Pressure | None = None,
        alpha_learning_rate: float | None = None,
        alpha_averaging: float = 0.98,
        unrolled_step: float | None = None,
    ) -> None:
        wrappers = soft_selection_modules(model)
        if not wrappers:
            remedy = "call prepare_(model, blocks) before DistributedModelParallel"
            raise RuntimeError(describe("BilevelTrainPipeline", "expected a prepared model", "no wrapper", remedy))
        if isinstance(model, DMPCollection):
            supported = "supported is DistributedModelParallel"
            raise NotImplementedError(describe("BilevelTrainPipeline", supported, "DMPCollection (2D parallelism)"))
        first = next(iter(wrappers.values()))
        self._alpha: Alpha = first.alpha
        self._process_group = model._env.process_group if isinstance(model, DistributedModelParallel) else None
        self.alpha_optimizer = AlphaOptimizer(
            self._alpha,
            first.blocks,
            pressure=pressure,
            learning_rate=alpha_learning_rate,
            averaging=alpha_averaging,
        )
        self.lower_steps = 0
        self.upper_steps = 0
        self._dense_optimizer = optimizer
        self._guard = FiniteGuard(model, self._process_group)
        self._unrolled = None if unrolled_step is None else UnrolledHypergradient(model, self._alpha, unrolled_step)
        self._train_batch: Pipelineable | None = None
        super().__init__(
            model,
            _LowerLevelOptimizer(self, optimizer),
            device,
            context_type=BilevelTrainPipelineContext,
            pipeline_postproc=True,  # else features split by block would not be pipelined
            custom_model_fwd=self._forward,
        )

    @property
    def alpha(self) -> Alpha:
        """The alpha that the upper level steps."""
        return self._alpha

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    def save(self, path: Path) -> None:
        """Writes a checkpoint of this rank's weights, alpha and the upper level's state (see `save_checkpoint`)."""
        save_checkpoint(path, self._model, self.alpha_optimizer.state_dict())

    @property
    def level(self) -> Level:
        """Level of the batch that is at the head of the queue."""
        return self.contexts[0].level

    def enqueue_batch(self, dataloader_iter: Iterator[Pipelineable]) -> bool:
        """Queues the next batch of a BilevelStream with its level.

        Raises:
            TypeError: if the iterator does not know levels.
        """
        if not isinstance(dataloader_iter, BilevelStream):
            received = type(dataloader_iter).__name__
            raise TypeError(
                describe("progress", "expected a BilevelStream", received, "BilevelStream(train, validation, ...)")
            )
        enqueued = super().enqueue_batch(dataloader_iter)
        if enqueued:
            self.contexts[-1].level = dataloader_iter.last_level
        return enqueued

    @contextmanager
    def detached(self) -> Iterator[nn.Module]:
        """Lends the model in eval mode, outside the pipeline; batches in flight wait.

        Yields:
            The model, callable on batches.
        """
        model = self.detach()
        was_training = model.training
        model.eval()
        try:
            yield model
        finally:
            model.train(was_training)
            self.attach(model)

    def _forward(self, batch: Pipelineable) -> tuple[Tensor, Any]:
        if not self._model.training:
            return self._model(batch)
        if self.level is Level.LOWER:
            self._train_batch = None if self._unrolled is None else batch
            return self._model(batch)
        return self._first_order_step(batch) if self._unrolled is None else self._unrolled_step(batch, self._unrolled)

    def _first_order_step(self, batch: Pipelineable) -> tuple[Tensor, Any]:
        """A forward pass that leaves no trace, then alpha's step."""
        with self._alpha.upper_level() as hits, without_synchronisation(self._model), frozen_statistics(self._model):
            loss, output = self._model(batch)
            self._step_alpha(loss, first_order_gradient(loss, self._alpha), hits, self._guard.flags(loss))
        return loss, output

    def _unrolled_step(self, batch: Pipelineable, unrolled: UnrolledHypergradient) -> tuple[Tensor, Any]:
        """Passes of the latest training batch and of the validation batch, then alpha's step."""
        train_batch = self._train_batch
        if train_batch is None:
            remedy = "let a BilevelStream begin with its warm-up"
            raise RuntimeError(describe(self._place(), "expected a lower step before it", "none", remedy))
        losses: list[Tensor] = []
        results: list[tuple[Tensor, Any]] = []

        def train() -> Tensor:
            losses.append(self._forward_again(train_batch))
            return losses[-1]

        def validation() -> Tensor:
            results.append(self._model(batch))
            losses.append(results[0][0])
            return losses[-1]

        gradients = unrolled(train, validation)
        # The forward passes note no hits here; a row of alpha that neither batch hits has a gradient of exact zeros.
        hits = {dim: own.any(dim=1) for dim, own in zip(self._alpha.dims, gradients, strict=True)}
        flags = self._guard.flags(torch.stack([loss.detach().sum() for loss in losses]))
        loss, output = results[0]
        self._step_alpha(loss, gradients, hits, flags)
        return loss, output

    def _forward_again(self, batch: Pipelineable) -> Tensor:
        """Loss of a batch that has left the queue: its input_dist is made anew, in a context of its own."""
        context = self._context_type(index=self.contexts[0].index, version=1)
        self.start_sparse_data_dist(batch, context)
        self.wait_sparse_data_dist(context)
        self._set_module_context(context)
        try:
            loss, _ = self._model(batch)
        finally:
            self._set_module_context(self.contexts[0])
        return loss

    def _backward(self, losses: Tensor) -> None:
        if self.level is Level.UPPER:
            return  # done in _forward, where alpha still requires a gradient
        self._guard.check_loss(losses, self._place())
        with self._guard.watch_gradients(self._place()):
            super()._backward(losses)
        self._guard.check_dense_gradients(self._place())

    def _step_alpha(self, loss: Tensor, own: list[Tensor], own_hits: dict[int, Tensor], flags: Tensor) -> None:
        """Averages the gradient over ranks, then alpha's step, the same on every rank."""
        dims = self._alpha.dims
        gradients, hits, flags = self._all_reduce(dict(zip(dims, own, strict=True)), own_hits, flags)
        self._guard.check_loss(loss, self._place(), flags)
        for dim in dims:
            self._guard.check_alpha_gradient(gradients[dim], dim, self._place())
        self.alpha_optimizer.step(gradients, hits)

    def _all_reduce(
        self, gradients: dict[int, Tensor], hits: dict[int, Tensor], flags: Tensor
    ) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Mean of the gradients, union of the hits and sum of the loss's flags over ranks, in one collective."""
        group = self._process_group
        world_size = dist.get_world_size(group) if group is not None else 1
        if world_size == 1:
            return gradients, hits, flags
        dims = self._alpha.dims
        parts = [part.flatten() for dim in dims for part in (gradients[dim], hits[dim].float())]
        flat = torch.cat([*parts, flags])
        dist.all_reduce(flat, group=group)
        shared_gradients, shared_hits, start = {}, {}, 0
        for dim in dims:
            size, rows = gradients[dim].numel(), gradients[dim].shape[0]
            shared_gradients[dim] = flat[start : start + size].view(rows, dim) / world_size
            shared_hits[dim] = flat[start + size : start + size + rows] > 0
            start += size + rows
        return shared_gradients, shared_hits, flat[start:]

    def _place(self) -> str:
        name = self.level.value
        return f"{name} step {self.lower_steps if self.level is Level.LOWER else self.upper_steps}"

    def _finish_step(self) -> None:
        if self.level is Level.LOWER:
            self._dense_optimizer.step()
            self.lower_steps += 1
        else:
            self.upper_steps += 1


class _LowerLevelOptimizer:
    """What the base class takes for its optimizer: steps the user's one in lower steps only."""

    def __init__(self, pipeline: BilevelTrainPipeline, optimizer: DenseOptimizer) -> None:
        self._pipeline = pipeline
        self._optimizer = optimizer

    def zero_grad(self) -> None:
        if self._pipeline.level is Level.LOWER:
            self._optimizer.zero_grad()

    def step(self) -> None:
        self._pipeline._finish_step()
