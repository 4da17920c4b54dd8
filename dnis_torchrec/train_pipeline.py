"""BilevelTrainPipeline: both levels of the search in one TorchRec train pipeline.

Lower steps are TorchRec's own: forward, backward with fused table optimizers, optimizer. Upper steps must not move a
weight: the pooled embeddings are detached, only d loss / d alpha is computed, DDP does not synchronise, running
statistics stand still. Batches of both levels travel through the same queue, so that the copy and input_dist of the
next batch, of either level, overlap the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import TrainPipelineContext
from torchrec.streamable import Pipelineable

from dnis_torchrec.alpha_optimizer import AlphaOptimizer, Pressure
from dnis_torchrec.checkpoint import save_checkpoint
from dnis_torchrec.checks import describe
from dnis_torchrec.finite import FiniteGuard
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
    """Interleaves lower and upper steps of the bi-level problem (paper, eq. 5 and 6, first order).

        min over alpha of L_validation(Theta*(alpha), alpha),   Theta* = argmin over Theta of L_train(Theta, alpha)

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

    Attributes:
        alpha_optimizer: the upper level's state.
        lower_steps: lower steps taken.
        upper_steps: upper steps taken.

    Raises:
        RuntimeError: if the model is not prepared.
        NotImplementedError: for DMPCollection (2D parallelism), whose replicas of alpha are not synchronised yet.
        ValueError: for a size that cannot be met.
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
        self._hits: dict[int, Tensor] = {}
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
        with ExitStack() as stack:
            if self.level is Level.UPPER and self._model.training:
                self._hits = stack.enter_context(self._alpha.upper_level())
                stack.enter_context(_nothing_moves(self._model))
                loss, output = self._model(batch)
                self._upper_step(loss)
            else:
                loss, output = self._model(batch)
        return loss, output

    def _backward(self, losses: Tensor) -> None:
        if self.level is Level.UPPER:
            return  # done in _forward, where alpha still requires a gradient
        self._guard.check_loss(losses, self._place())
        with self._guard.watch_gradients(self._place()):
            super()._backward(losses)
        self._guard.check_dense_gradients(self._place())

    def _upper_step(self, loss: Tensor) -> None:
        """d loss / d alpha, the same on every rank, then alpha's step."""
        dims = self._alpha.dims
        own = torch.autograd.grad(loss.sum(), [self._alpha.of(dim) for dim in dims], materialize_grads=True)
        gradients, hits, flags = self._all_reduce(dict(zip(dims, own, strict=True)), self._guard.flags(loss))
        self._guard.check_loss(loss, self._place(), flags)
        for dim in dims:
            self._guard.check_alpha_gradient(gradients[dim], dim, self._place())
        self.alpha_optimizer.step(gradients, hits)

    def _all_reduce(
        self, gradients: dict[int, Tensor], flags: Tensor
    ) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Mean of the gradients, union of the hits and sum of the loss's flags over ranks, in one collective."""
        group = self._process_group
        world_size = dist.get_world_size(group) if group is not None else 1
        if world_size == 1:
            return gradients, self._hits, flags
        dims = self._alpha.dims
        parts = [part.flatten() for dim in dims for part in (gradients[dim], self._hits[dim].float())]
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


@contextmanager
def _nothing_moves(model: nn.Module) -> Iterator[None]:
    """No DDP synchronisation and no running statistics: a forward pass that leaves no trace."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif isinstance(module, _NormBase) and module.track_running_stats:
                module.track_running_stats = False
                stack.callback(setattr, module, "track_running_stats", True)
        yield
