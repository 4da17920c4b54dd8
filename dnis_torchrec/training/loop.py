"""Training: epochs until the selection loss stops improving, and back to the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import LookupBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.training.evaluate import selection_loss
from dnis_torchrec.training.pipeline import DetachableTrainPipeline, FiniteGuard, LateValues
from dnis_torchrec.training.rounded import HeldTables, HoldingOptimizer
from dnis_torchrec.training.shard import flushing_denormals
from dnis_torchrec.training.state import snapshot, take_


class Stepper(Protocol):
    """Whatever steps weights by their gradients: an optimizer, or what stands in front of one."""

    def zero_grad(self) -> None:
        """Clears all gradients."""

    def step(self) -> None:
        """Steps all weights."""


@dataclass(frozen=True, kw_only=True)
class PlainEpoch:
    """Results of one epoch of a plain training."""

    epoch: int
    step: int
    train_loss: float
    selection_loss: float


@dataclass(frozen=True, kw_only=True)
class PlainEvents:
    """Callbacks that follow a plain training; each is optional."""

    on_step: Callable[[float], None] = field(default=lambda loss: None)
    on_epoch: Callable[[PlainEpoch], None] = field(default=lambda record: None)


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """Results of `train_plainly`."""

    selection_loss: float
    best_epoch: int
    seconds: float
    history: tuple[PlainEpoch, ...] = ()


@flushing_denormals()
def train_plainly(
    model: DistributedModelParallel,
    optimizer: Stepper,
    recipe: Recipe,
    device: torch.device,
    *,
    max_epochs: int,
    patience: int,
    held: HeldTables | None = None,
    starts_trained: bool = False,
    events: PlainEvents = PlainEvents(),
) -> PlainTraining:
    """Trains with TorchRec's own pipeline until the selection loss stops improving, and goes back
    to the best epoch."""
    begin = time.monotonic()
    rule = held or HeldTables()
    stepper = optimizer if held is None else HoldingOptimizer(cast(KeyedOptimizer, optimizer), held)
    pipeline = DetachableTrainPipeline(model, stepper, device, pipeline_postproc=True)
    guard, late = FiniteGuard(model, model._env.process_group), LateValues()
    history: list[PlainEpoch] = []
    best, best_epoch, state = math.inf, -1, None
    if starts_trained:
        best, state = selection_loss(model, recipe, device), snapshot(model, rule.tensors())
    epoch_to_beat, loss_to_beat = -1, math.inf
    model.train()
    for epoch in range(max_epochs):
        batches = iter(LookupBatches(recipe.data.train, "train"))
        step, losses = 0, torch.zeros(2, dtype=torch.float64, device=device)
        while True:
            try:
                loss = pipeline.progress(batches)[0]
            except StopIteration:
                break
            step += 1
            guard.check_loss(loss, f"epoch {epoch}, step {step}")
            losses += torch.stack([loss.double(), torch.ones_like(loss, dtype=torch.float64)])
            late.settle()
            late.read(loss, lambda value: events.on_step(float(value)))
        late.settle()
        guard.settle()
        check(step > 0, "training stream", "at least one batch", 0, "check the data splits")
        loss_of_epoch = selection_loss(pipeline.detach(), recipe, device)
        record = PlainEpoch(
            epoch=epoch,
            step=step + (history[-1].step if history else 0),
            train_loss=_mean_over_ranks(losses, model),
            selection_loss=loss_of_epoch,
        )
        history.append(record)
        events.on_epoch(record)
        if loss_of_epoch < loss_to_beat:
            epoch_to_beat, loss_to_beat = epoch, loss_of_epoch
            if loss_of_epoch < best:
                best, best_epoch, state = loss_of_epoch, epoch, snapshot(model, rule.tensors())
        if epoch - epoch_to_beat >= patience:
            break
    if state is not None:
        take_(model, state, rule.tensors())
    rule.finish_load_()
    return PlainTraining(
        selection_loss=best,
        best_epoch=best_epoch,
        seconds=time.monotonic() - begin,
        history=tuple(history),
    )


def _mean_over_ranks(losses: Tensor, model: DistributedModelParallel) -> float:
    """Returns the mean loss over ranks, from each rank's sum and number of losses. One all_reduce
    of two numbers."""
    group = model._env.process_group
    if world_size_of(group) > 1:
        dist.all_reduce(losses, group=group)
    return float(losses[0] / losses[1])
