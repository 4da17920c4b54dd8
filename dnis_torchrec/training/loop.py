"""Training: epochs until the selection loss stops improving, and back to the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from dnis_torchrec.checks import check
from dnis_torchrec.data.lookup_batches import LookupBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import world_size_of
from dnis_torchrec.training.checkpoint import load_checkpoint, save_checkpoint
from dnis_torchrec.training.evaluate import selection_loss
from dnis_torchrec.training.pipeline import DetachableTrainPipeline, FiniteGuard, LateValues
from dnis_torchrec.training.rounded import HeldTables, HoldingOptimizer
from dnis_torchrec.training.shard import flushing_denormals

BEST_STATE = "best"
"""Name of the checkpoint of the best epoch, in the folder that a training is given."""


class Stepper(Protocol):
    """Whatever steps weights by their gradients: an optimizer, or what stands in front of one."""

    def zero_grad(self) -> None:
        """Clears all gradients."""

    def step(self) -> None:
        """Steps all weights."""


@dataclass
class EarlyStopping:
    """Stops when the selection loss has not improved for a while, and remembers the best state on
    disk."""

    path: Path
    patience: int
    best: float = math.inf
    best_epoch: int = -1

    def update(self, epoch: int, loss: float, save: Callable[[Path], None]) -> bool:
        """Takes the selection loss of an epoch."""
        if loss < self.best:
            self.best, self.best_epoch = loss, epoch
            save(self.path)
        return epoch - self.best_epoch >= self.patience


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
    folder: Path,
    held: HeldTables | None = None,
    starts_trained: bool = False,
    events: PlainEvents = PlainEvents(),
) -> PlainTraining:
    """Trains with TorchRec's own pipeline until the selection loss stops improving, and goes back
    to the best epoch."""
    started = time.monotonic()
    rule = held or HeldTables()
    stepper = optimizer if held is None else HoldingOptimizer(cast(KeyedOptimizer, optimizer), held)
    pipeline = DetachableTrainPipeline(model, stepper, device, pipeline_postproc=True)
    stopping, guard = (
        EarlyStopping(folder / BEST_STATE, patience),
        FiniteGuard(model, model._env.process_group),
    )
    late, start, loss_before = LateValues(), folder / "start", math.inf
    history: list[PlainEpoch] = []
    if starts_trained:
        loss_before = selection_loss(model, recipe, device)
        save_checkpoint(start, model, rule.tensors())
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
            late.read(loss, lambda found: events.on_step(float(found)))
        late.settle()
        guard.settle()
        check(step > 0, "training stream", "at least one batch", 0, "check the data splits")
        found = selection_loss(pipeline.detach(), recipe, device)
        steps_before = history[-1].step if history else 0
        train_loss = _mean_over_ranks(losses, model)
        history.append(
            PlainEpoch(
                epoch=epoch, step=steps_before + step, train_loss=train_loss, selection_loss=found
            )
        )
        events.on_epoch(history[-1])
        if stopping.update(epoch, found, lambda path: save_checkpoint(path, model, rule.tensors())):
            break
    stays = starts_trained and loss_before <= stopping.best
    load_checkpoint(start if stays else stopping.path, model, rule.tensors())
    rule.finish_load_()
    return PlainTraining(
        selection_loss=min(stopping.best, loss_before),
        best_epoch=-1 if stays else stopping.best_epoch,
        seconds=time.monotonic() - started,
        history=tuple(history),
    )


def _mean_over_ranks(losses: Tensor, model: DistributedModelParallel) -> float:
    """Returns the mean loss over ranks, from each rank's sum and number of losses. One all_reduce
    of two numbers."""
    group = model._env.process_group
    if world_size_of(group) > 1:
        dist.all_reduce(losses, group=group)
    return float(losses[0] / losses[1])
