"""BilevelTrainPipeline: both levels of the search in one TorchRec train pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.streamable import Pipelineable

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.task import data_terms_only
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search.schedule import BilevelStream, Level
from dnis_torchrec.selection import torchrec
from dnis_torchrec.selection.alpha import Alpha, normalise_gradient, step_and_clip_
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.torchrec_inputs import PrefetchingTrainPipeline
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.checkpoint import PlacedTensor
from dnis_torchrec.training.pipeline import FiniteGuard, SavedTrainPipeline

LEARNING_RATE = 0.01
"""Of alpha, as in the paper."""


class DenseOptimizer(Protocol):
    """An optimizer as TorchRec's pipelines call it: torch.optim.Optimizer and KeyedOptimizer both
    fit."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients."""

    def step(self, closure: Any = None) -> Any:
        """Applies gradients."""


class AlphaOptimizer:
    """Steps alpha on validation gradients. Local and deterministic: equal gradients give equal
    alphas on all ranks."""

    def __init__(
        self, alpha: Alpha, blocks: RowBlocks, *, momentum: float = 0.0, floor: float = 0.0
    ) -> None:
        check(0 <= momentum < 1, "momentum", "a number in [0, 1)", momentum)
        check(0 <= floor < 1, "floor", "a number in [0, 1)", floor)
        self._alpha, self._momentum, self._floor = alpha, momentum, floor
        is_alone = {
            table: torch.full((routing.num_blocks,), int(table in blocks.left_alone))
            for table, routing in blocks.routings.items()
        }
        self._rows, self._stands = {}, {}
        for dim in alpha.dims:
            device = alpha.of(dim).device
            self._rows[dim] = blocks.per_alpha_row(dim, blocks.seen_rows).to(device)
            self._stands[dim] = (blocks.per_alpha_row(dim, is_alone) > 0).to(device)
        self._averages = {dim: torch.zeros_like(alpha.of(dim)) for dim in alpha.dims}
        self._dead = {dim: torch.zeros_like(alpha.of(dim), dtype=torch.bool) for dim in alpha.dims}
        self.learning_rate = LEARNING_RATE

    def density(self) -> Tensor:
        """Share of the tables' values, of rows that training saw, whose alpha is not zero."""
        return self._alpha.density(self._rows)

    def mean(self) -> float:
        """Mean of alpha over the same values."""
        return self._alpha.mean(self._rows)

    @torch.no_grad()
    def retain_(self, columns: Mapping[int, Tensor]) -> None:
        """Lets all other columns die: their alpha is 0 from now on."""
        for dim, mask in columns.items():
            self._dead[dim] |= ~mask.to(self._dead[dim].device)
            self._alpha.of(dim).masked_fill_(self._dead[dim], 0.0)

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor], hits: Mapping[int, Tensor]) -> None:
        """One upper step."""
        for dim in self._alpha.dims:
            moves, average = hits[dim] & ~self._stands[dim], self._averages[dim]
            hit, fresh = moves.unsqueeze(1), normalise_gradient(gradients[dim], moves)
            average.copy_(torch.where(hit, torch.lerp(fresh, average, self._momentum), average))
            alpha = self._alpha.of(dim)
            step_and_clip_(alpha, average * hit, self.learning_rate, floor=self._floor)
            pushes_out = ((alpha >= 1) & (average < 0)) | ((alpha <= self._floor) & (average > 0))
            average.masked_fill_(pushes_out, 0.0)
            alpha.masked_fill_(self._dead[dim], 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a continued search needs, as live tensors, which are also read in place."""
        kinds = {"average": self._averages, "dead": self._dead}
        return {f"{kind}/{dim}": kinds[kind][dim] for dim in self._alpha.dims for kind in kinds}


@dataclass
class BilevelTrainPipelineContext(PrefetchTrainPipelineContext):
    """A batch's context in the queue, and the level that the batch belongs to."""

    level: Level = Level.LOWER


@dataclass(frozen=True, kw_only=True)
class _SharedGradient:
    """Loss and gradient of an upper step, while they are added up over ranks."""

    loss: Tensor
    flat: Tensor
    work: dist.Work | None


class BilevelTrainPipeline(SavedTrainPipeline, PrefetchingTrainPipeline):
    """Interleaves lower and upper steps of the bi-level problem (paper, eq. 5 and 6), of first
    order; the model is a prepared, sharded one that returns ``(loss, output)`` of a batch.

    Distributed: alpha is replicated. An upper step all-reduces one flat tensor while the next
    batch's input_dist begins, so every rank takes the same step, or stops.
    """

    # A lower step learns from all that the model returns as its loss, a `TrainTask`'s L2 penalty
    # included; an upper step from the data's loss alone.

    def __init__(
        self,
        model: nn.Module,
        optimizer: DenseOptimizer,
        device: torch.device,
        *,
        alpha_averaging: float = 0.0,
        alpha_floor: float = 0.0,
    ) -> None:
        wrappers, place = soft_selection_modules(model), "BilevelTrainPipeline"
        if not wrappers:
            remedy = "call prepare_(model, blocks) before DistributedModelParallel"
            raise RuntimeError(describe(place, "a prepared model", "no wrapper", remedy))
        if not isinstance(model, DistributedModelParallel):
            remedy = "call shard_model, on one rank too, and make the optimizer of what it returns"
            raise RuntimeError(describe(place, "a sharded model", type(model).__name__, remedy))
        if isinstance(model, DMPCollection):  # nobody keeps its replicas of alpha alike yet
            limit = "supported is DistributedModelParallel"
            raise NotImplementedError(describe(place, limit, "DMPCollection (2D parallelism)"))
        self.process_group, self.device = torchrec.process_group_of(model), device
        for fqn, wrapper in wrappers.items():
            torchrec.check_frozen_are_held(fqn, wrapper.lookup)
        select_on_shards_(model)
        torchrec.read_by_name_(model)
        first, ranks = next(iter(wrappers.values())), Ranks(self.process_group)
        maps = [
            of_rows.numpy()
            for routing in first.blocks.routings.values()
            for of_rows in (routing.boundaries, routing.block_of_row)
            if of_rows is not None
        ]
        remedy = "count rows with dnis_torchrec.data.over_ranks.count_over_ranks"
        others = ranks.unlike_first(maps)
        actual = f"others on ranks {others}"
        check(not others, "blocks of rows", "the same on every rank", actual, remedy)
        self.alpha: Alpha = first.alpha
        self.alpha_optimizer = AlphaOptimizer(
            self.alpha, first.blocks, momentum=alpha_averaging, floor=alpha_floor
        )
        self._dense_optimizer = optimizer
        self._guard = FiniteGuard(model, self.process_group)
        self._kernels = torchrec.fused_kernels(model)
        self._num_ranks = ranks.world_size
        self._shared: _SharedGradient | None = None
        super().__init__(
            model,
            _LowerLevelOptimizer(self, optimizer),
            device,
            context_type=BilevelTrainPipelineContext,
            pipeline_postproc=True,  # else features split by block would not be pipelined
            custom_model_fwd=self._forward,
        )

    @cached_property
    def _modules(self) -> list[nn.Module]:
        """Modules of the model, found once, in the first upper step: finding them takes longer than
        their use."""
        return list(self._model.modules())

    @property
    def density(self) -> Tensor:
        """Share of the tables' values whose alpha is not zero, after the last step."""
        return self.alpha_optimizer.density()

    def figures(self) -> dict[str, float]:
        """What the record of an epoch says of alpha."""
        optimizer = self.alpha_optimizer
        return {"alpha_mean": optimizer.mean(), "alpha_density": float(optimizer.density())}

    def alphas(self) -> dict[int, Tensor]:
        """embedding_dim -> alpha."""
        return {dim: self.alpha.of(dim) for dim in self.alpha.dims}

    def _more_tensors(self) -> dict[str, PlacedTensor]:
        of_alpha = self.alpha_optimizer.state_dict().items()
        return {f"alpha_optimizer/{name}": PlacedTensor.of(value) for name, value in of_alpha}

    def go_back(self, path: Address) -> None:
        """Takes weights, buffers, alpha and the state of the weights' optimizers from a checkpoint
        of this run; batches read, random numbers and steps taken stay. The collectives of
        `read_checkpoint`."""
        self._read(path)

    @property
    def level(self) -> Level:
        """Level of the batch that is at the head of the queue."""
        return self.contexts[0].level

    def enqueue_batch(self, dataloader_iter: Iterator[Pipelineable]) -> bool:
        """Queues the next batch of a BilevelStream with its level; says whether there was one."""
        if not isinstance(dataloader_iter, BilevelStream):
            kind, remedy = type(dataloader_iter).__name__, "BilevelStream(train, validation)"
            raise TypeError(describe("progress", "a BilevelStream", kind, remedy))
        has_batch = super().enqueue_batch(dataloader_iter)
        if has_batch:
            self.contexts[-1].level = dataloader_iter.last_level
        return has_batch

    def _forward(self, batch: Pipelineable) -> tuple[Tensor, Any]:
        is_upper = self._model.training and self.level is Level.UPPER
        return self._upper_step(batch) if is_upper else self._model(batch)

    def _upper_step(self, batch: Pipelineable) -> tuple[Tensor, Any]:
        """A forward pass that leaves no trace; alpha's gradient is on its way to other ranks."""
        modules = self._modules
        with (
            self.alpha.upper_level() as hits,
            data_terms_only(modules),
            without_synchronisation(modules),
            frozen_statistics(modules),
            torchrec.frozen_counters(self._kernels),
        ):
            loss, output = self._model(batch)
            gradients = first_order_gradient(loss, self.alpha)
            self._share(loss, gradients, hits, self._guard.flags(loss.detach().isfinite().all()))
        return loss, output

    def _backward(self, losses: Tensor) -> None:
        if self.level is Level.UPPER:
            return  # done in _forward, where alpha still requires a gradient
        self._guard.check_loss(losses, self._place())
        with self._guard.watch_gradients(self._place()):
            super()._backward(losses)
        self._guard.check_dense_gradients(self._place())

    def _share(
        self, loss: Tensor, gradients: list[Tensor], hits: dict[int, Tensor], flags: Tensor
    ) -> None:
        """Begins the one collective of an upper step, which goes on while the next batch's
        input_dist begins."""
        dims, work = self.alpha.dims, None
        parts = [
            part.flatten()
            for dim, g in zip(dims, gradients, strict=True)
            for part in (g, hits[dim].to(g.dtype))
        ]
        flat = torch.cat([*parts, flags.to(parts[0].dtype)])
        if self._num_ranks > 1:
            work = dist.all_reduce(flat, group=self.process_group, async_op=True)
        self._shared = _SharedGradient(loss=loss.detach(), flat=flat, work=work)

    def _step_alpha(self) -> None:
        """Alpha's step, the same on every rank: on the mean of the gradients and the union of the
        hits."""
        sums, self._shared = self._shared, None
        if sums is None:
            return
        if sums.work is not None:
            sums.work.wait()
        gradients, hits, start = {}, {}, 0
        for dim in self.alpha.dims:
            rows, size = self.alpha.of(dim).shape[0], self.alpha.of(dim).numel()
            gradients[dim] = sums.flat[start : start + size].view(rows, dim) / self._num_ranks
            hits[dim] = sums.flat[start + size : start + size + rows] > 0
            start += size + rows
        flags, place = sums.flat[start:], self._place()
        self._guard.check_loss(sums.loss, place, flags)
        check_gradient = self._guard.check_alpha_gradient
        is_finite = [check_gradient(gradient, dim, place) for dim, gradient in gradients.items()]
        may_step = torch.stack(is_finite).all() & (flags == 0).all()
        self.alpha_optimizer.step(gradients, {dim: hit & may_step for dim, hit in hits.items()})

    def _goes_backward(self) -> bool:
        return super()._goes_backward() and self.level is Level.LOWER

    def _place(self) -> str:
        name = self.level.value
        return f"{name} step {self.lower_steps if self.level is Level.LOWER else self.upper_steps}"

    def _finish_step(self) -> None:
        if self.level is Level.LOWER:
            self._dense_optimizer.step()
            self.lower_steps += 1
        else:
            self._step_alpha()
            self.upper_steps += 1


class _LowerLevelOptimizer:
    """Optimizer that the base class is given: it steps the user's own in lower steps only."""

    def __init__(self, pipeline: BilevelTrainPipeline, optimizer: DenseOptimizer) -> None:
        self._pipeline, self._optimizer = pipeline, optimizer

    def zero_grad(self) -> None:
        if self._pipeline.level is Level.LOWER:
            self._optimizer.zero_grad()

    def step(self) -> None:
        self._pipeline._finish_step()


def first_order_gradient(loss: Tensor, alpha: Alpha) -> list[Tensor]:
    """d loss / d alpha, one per D; no gradient of a weight is computed."""
    alphas = [alpha.of(dim) for dim in alpha.dims]
    return list(torch.autograd.grad(loss.sum(), alphas, materialize_grads=True))


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
