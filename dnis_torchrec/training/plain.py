"""Plain training: epochs until the selection loss stops improving, and back to the best one.

Shapes: B batch.
"""

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
from dnis_torchrec.training.denormals import flushing_denormals
from dnis_torchrec.training.detachable_pipeline import DetachableTrainPipeline
from dnis_torchrec.training.evaluation import selection_loss
from dnis_torchrec.training.finite import FiniteGuard
from dnis_torchrec.training.held_tables import HeldTables, HoldingOptimizer
from dnis_torchrec.training.late_values import LateValues

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
    """Stops when the selection loss has not improved for a while, and remembers the best state on disk.

    Attributes:
        path: name of the checkpoint that holds the best state.
        patience: epochs without improvement after which to stop.
    """

    path: Path
    patience: int
    best: float = math.inf
    best_epoch: int = -1

    def update(self, epoch: int, loss: float, save: Callable[[Path], None]) -> bool:
        """Takes the selection loss of an epoch.

        Args:
            epoch: its number.
            loss: selection loss.
            save: writes a checkpoint of the given name; called if this epoch is the best so far.

        Returns:
            True if training should stop.
        """
        if loss < self.best:
            self.best, self.best_epoch = loss, epoch
            save(self.path)
        return epoch - self.best_epoch >= self.patience


@dataclass(frozen=True, kw_only=True)
class PlainEpoch:
    """Results of one epoch of a plain training.

    Attributes:
        epoch: from 0.
        step: steps so far.
        train_loss: of the data alone, the mean over the epoch and all ranks.
        selection_loss: on the selection split, see `dnis_torchrec.training.evaluation.selection_loss`.
    """

    epoch: int
    step: int
    train_loss: float
    selection_loss: float


@dataclass(frozen=True, kw_only=True)
class PlainEvents:
    """Callbacks that follow a plain training; each is optional.

    Attributes:
        on_step: called after every step with this rank's loss; on a GPU after the next one, or at the end of the epoch.
        on_epoch: called with the record of every epoch.
    """

    on_step: Callable[[float], None] = field(default=lambda loss: None)
    on_epoch: Callable[[PlainEpoch], None] = field(default=lambda record: None)


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """Results of `train_plainly`.

    Attributes:
        selection_loss: of the best epoch.
        best_epoch: its number, from 0; -1 for the state that training started from.
        seconds: wall time.
        history: one record per epoch.
    """

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
    """Trains with TorchRec's own pipeline until the selection loss stops improving, and goes back to the best epoch.

    Weights learn on the training split, as the model's `TrainTask` has it, L2 included; what stops them is measured on
    the selection split: the data's loss alone, or the metric of `Recipe.stop_on`.

    Distributed: every rank calls it with its share of the data (see `data.over_ranks`). Beside TorchRec's own
    collectives each step sums W numbers, and each epoch the sums of losses and metrics. All ranks stop after the same
    epoch. Each keeps its own shards of the best state in its `folder`, which ranks may share.

    Args:
        model: the sharded model around a `TrainTask`, as `shard` makes it; ends in its best state.
        optimizer: of everything not fused, from `shard` or `rest_optimizer`, or what steps that one.
        recipe: data and loss; how weights learn is in model and optimizer already.
        device: where the model is.
        max_epochs: epochs at most.
        patience: epochs without improvement before stopping.
        folder: where the best state is kept, as `BEST_STATE`.
        held: what the tables obey after every step: a `RetainedMask` holds pruned values at zero (masked fine-tuning),
            `RoundedTables` round what they will be served as. Its state is kept with the best one.
        starts_trained: whether the state that training starts from may be the best one, as a pruned model's may that
            was at its best before. Epochs are stopped as they are without it.
        events: who listens.

    Returns:
        How it went, the same on all ranks but for the seconds.

    Raises:
        NonFiniteError: if the loss becomes NaN or infinite.
        ValueError: if the training split is empty.

    Example:
        >>> import tempfile
        >>> from examples.synthetic import demo
        >>> from dnis_torchrec.data.recipe import TrainTask
        >>> from dnis_torchrec.training.process_group import process_group
        >>> from dnis_torchrec.training.sharded import shard
        >>> recipe = demo(None)
        >>> with process_group() as device, tempfile.TemporaryDirectory() as folder:
        ...     task = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
        ...     model, optimizer = shard(task, recipe, device)
        ...     trained = train_plainly(
        ...         model, optimizer, recipe, device, max_epochs=1, patience=1, folder=Path(folder)
        ...     )
        >>> trained.best_epoch, trained.selection_loss < 0.69
        (0, True)
    """
    started = time.monotonic()
    rule = held or HeldTables()
    stepper = optimizer if held is None else HoldingOptimizer(cast(KeyedOptimizer, optimizer), held)
    pipeline = DetachableTrainPipeline(model, stepper, device, pipeline_postproc=True)
    stopping, guard = EarlyStopping(folder / BEST_STATE, patience), FiniteGuard(model, model._env.process_group)
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
        history.append(PlainEpoch(epoch=epoch, step=steps_before + step, train_loss=train_loss, selection_loss=found))
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
    """Returns the mean loss over ranks, from each rank's sum and number of losses. One all_reduce of two numbers."""
    group = model._env.process_group
    if world_size_of(group) > 1:
        dist.all_reduce(losses, group=group)
    return float(losses[0] / losses[1])
