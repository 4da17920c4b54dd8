"""Plain training: epochs until the selection loss stops improving, and back to the best one.

Shapes: B batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.checks import check
from dnis_torchrec.data.lookup_batches import LookupBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.training.checkpoint import load_checkpoint, save_checkpoint
from dnis_torchrec.training.denormals import flushing_denormals
from dnis_torchrec.training.detachable_pipeline import DetachableTrainPipeline
from dnis_torchrec.training.evaluation import evaluate
from dnis_torchrec.training.finite import FiniteGuard
from dnis_torchrec.training.retained_mask import RetainedMask

BEST_STATE = "best"
"""Name of the checkpoint of the best epoch, in the folder that a training is given."""


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
class PlainTraining:
    """What `train_plainly` did.

    Attributes:
        selection_loss: of the best epoch.
        best_epoch: its number, from 0; -1 for the state that training started from.
        seconds: wall time.
    """

    selection_loss: float
    best_epoch: int
    seconds: float


@flushing_denormals()
def train_plainly(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    recipe: Recipe,
    device: torch.device,
    *,
    max_epochs: int,
    patience: int,
    folder: Path,
    mask: RetainedMask | None = None,
    starts_trained: bool = False,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> PlainTraining:
    """Trains with TorchRec's own pipeline until the selection loss stops improving, and goes back to the best epoch.

    Args:
        model: the sharded model; ends in its best state.
        optimizer: of everything not fused.
        recipe: data and loss.
        device: where the model is.
        max_epochs: epochs at most.
        patience: epochs without improvement before stopping.
        folder: where the best state is kept, as `BEST_STATE`.
        mask: holds pruned values at zero (masked fine-tuning).
        starts_trained: whether the state that training starts from may be the best one, as a pruned model's may that
            was at its best before. Epochs are stopped as they are without it.
        on_epoch: called with the epoch and its selection loss.

    Raises:
        NonFiniteError: if the loss becomes NaN or infinite.
    """
    started = time.monotonic()
    stepper = optimizer if mask is None else _MaskedOptimizer(optimizer, mask)
    pipeline = DetachableTrainPipeline(model, stepper, device, pipeline_postproc=True)
    stopping, guard = EarlyStopping(folder / BEST_STATE, patience), FiniteGuard(model, model._env.process_group)
    start, loss_before = folder / "start", math.inf
    if starts_trained:
        loss_before = evaluate(model, recipe.data.selection, recipe.loss, device)["loss"]
        save_checkpoint(start, model)
    model.train()
    for epoch in range(max_epochs):
        batches = iter(LookupBatches(recipe.data.train, "train"))
        step = 0
        while True:
            try:
                loss = pipeline.progress(batches)[0]
            except StopIteration:
                break
            step += 1
            guard.check_loss(loss, f"epoch {epoch}, step {step}")
        check(step > 0, "training stream", "at least one batch", 0, "check the data splits")
        evaluated = pipeline.detach()
        selection_loss = evaluate(evaluated, recipe.data.selection, recipe.loss, device)["loss"]
        on_epoch(epoch, selection_loss)
        if stopping.update(epoch, selection_loss, lambda path: save_checkpoint(path, model)):
            break
    stays = starts_trained and loss_before <= stopping.best
    load_checkpoint(start if stays else stopping.path, model)
    return PlainTraining(
        selection_loss=min(stopping.best, loss_before),
        best_epoch=-1 if stays else stopping.best_epoch,
        seconds=time.monotonic() - started,
    )


class _MaskedOptimizer:
    """A fresh optimizer that cannot wake pruned values."""

    def __init__(self, optimizer: KeyedOptimizerWrapper, mask: RetainedMask) -> None:
        self._optimizer = optimizer
        self._mask = mask

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        self._mask.hold_gradients_()
        self._optimizer.step()
        self._mask.hold_fused_()
