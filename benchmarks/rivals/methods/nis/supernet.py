"""The search of NIS: weights shared by all choices, and the controller that learns on validation
batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.utils import Batch

from benchmarks.rivals.methods.method import NotApplicableError
from benchmarks.rivals.methods.nis.controller import Controller
from benchmarks.rivals.methods.nis.grid import Grid
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import LookupBatches
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import Task, TrainTask, check_classes
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.pipeline import FiniteGuard
from dnis_torchrec.training.shard import shard

NUM_SAMPLES = 4
"""Combinations that one controller step compares on the same validation batch (the synchronous
workers of A2C)."""
COST_WEIGHT = 0.1
"""lambda."""


def reward_of(quality: float, overshoot: float) -> float:
    """Returns the reward of the controller, as in the paper: ``quality - lambda * max(0, bytes /
    budget - 1)``."""
    return quality - COST_WEIGHT * max(0.0, overshoot)


class Quality:
    """Quality of a batch's predictions, without unit: AUC for a binary loss, else ``-MSE / variance
    of the labels``."""

    def __init__(self, recipe: Recipe) -> None:
        if isinstance(recipe.loss, Task):
            supported, received = ("supported are recipes with a loss of one prediction", type(recipe.task).__name__)
            raise NotApplicableError(describe("reward", supported, received))
        self._is_binary = isinstance(recipe.loss, nn.BCEWithLogitsLoss)
        labels = [batch.labels.float().cpu() for batch in recipe.data.validation]
        check(len(labels) > 0, "validation stream", "at least one batch", 0, "check the data splits")
        if self._is_binary:
            check_classes(torch.cat(labels), "validation stream")
        self._variance = float(torch.cat(labels).var(unbiased=False).clamp(min=torch.finfo(torch.float32).tiny))

    def of(self, predictions: Tensor, labels: Tensor) -> float:
        """Quality of one batch; higher is better."""
        if not self._is_binary:
            return -float((predictions - labels).square().mean()) / self._variance
        classes = labels.long()
        if bool((classes == classes[0]).all()):
            return 0.5
        return float(binary_auroc(predictions.sigmoid(), classes))


class Supernet:
    """The prepared and sharded model, run under one combination at a time."""

    def __init__(self, recipe: Recipe, grid: Grid, device: torch.device) -> None:
        task = TrainTask(prepare_(recipe.model, grid.blocks), recipe.task, embedding_l2=recipe.embedding_l2)
        self.model, self._optimizer = shard(task, recipe, device)
        self._alpha: Alpha = next(iter(soft_selection_modules(self.model).values())).alpha
        self._guard = FiniteGuard(self.model, self.model._env.process_group)
        self._grid, self._device = grid, device
        self._quality = Quality(recipe)

    def train(self, batch: Batch, picked: list[int], place: str) -> None:
        """One step of the weights under a combination."""
        self._grid.select_(self._alpha, picked)
        self.model.train()
        self._optimizer.zero_grad()
        loss, _ = self.model(batch.to(self._device))
        self._guard.check_loss(loss, place)
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def qualities(self, batch: Batch, combinations: list[list[int]]) -> list[float]:
        """Quality of each combination on one batch; no weight learns."""
        self._guard.settle()
        self.model.eval()
        batch = batch.to(self._device)
        qualities = []
        for picked in combinations:
            self._grid.select_(self._alpha, picked)
            _, (_, predictions) = self.model(batch)
            qualities.append(self._quality.of(predictions, batch.labels.float()))
        return qualities


def train_controller(
    recipe: Recipe,
    grid: Grid,
    embedding_bytes: int,
    *,
    warm_up_epochs: int,
    epochs: int,
    device: torch.device,
    seed: int,
) -> Controller:
    """Trains the weights under sampled combinations, and after a warm-up the controller with them."""
    steps_per_epoch = sum(1 for _ in recipe.data.train)
    schedule = LevelSchedule(warm_up_steps=warm_up_epochs * steps_per_epoch)
    data = recipe.data
    train, validation = (LookupBatches(data.train, "train"), LookupBatches(data.validation, "validation"))
    stream = BilevelStream(train, validation, schedule)
    supernet = Supernet(recipe, grid, device)
    steps = (warm_up_epochs + 2 * epochs) * steps_per_epoch
    num_options = [len(choice.options) for choice in grid.choices]
    controller = Controller(num_options, num_steps=epochs * steps_per_epoch, seed=seed)
    for step in range(steps):
        batch = next(stream)
        if stream.last_level is Level.LOWER:
            supernet.train(batch, controller.sample(1)[0].tolist(), f"NIS step {step}")
            continue
        picked = controller.sample(NUM_SAMPLES)
        combinations = picked.tolist()
        qualities = supernet.qualities(batch, combinations)
        overshoots = [(grid.cost(combination) - grid.budget.amount) / embedding_bytes for combination in combinations]
        rewards = [reward_of(q, overshoot) for q, overshoot in zip(qualities, overshoots, strict=True)]
        controller.learn(picked, torch.tensor(rewards, dtype=torch.float64))
    return controller
