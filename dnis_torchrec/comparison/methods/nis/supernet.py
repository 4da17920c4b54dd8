"""The search of NIS: weights shared by all choices, and the controller that learns on validation batches.

epochs    0 .. warm_up                 .. + ramp
weights   learn throughout, each training batch under one sampled combination
control   uniform                      one step of actor-critic after every training batch

A combination is a mask of 0 and 1 over blocks and columns, so it runs as alpha of soft selection: nothing is rebuilt.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, describe
from dnis_torchrec.comparison.methods.method import NotApplicableError
from dnis_torchrec.comparison.methods.nis.controller import Controller
from dnis_torchrec.comparison.methods.nis.grid import Grid
from dnis_torchrec.data.labels import check_classes
from dnis_torchrec.data.lookup_batches import LookupBatches
from dnis_torchrec.data.recipe import Recipe, TrainTask
from dnis_torchrec.search.level_schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.soft_selection.alpha import Alpha
from dnis_torchrec.soft_selection.swap import prepare_
from dnis_torchrec.soft_selection.wrapper import soft_selection_modules
from dnis_torchrec.training.finite import FiniteGuard
from dnis_torchrec.training.sharded import shard

NUM_SAMPLES = 4
"""Combinations that one controller step compares on the same validation batch (the synchronous workers of A2C)."""
COST_WEIGHT = 0.1
"""lambda. Twice the budget costs .1 of quality. A doubled table gains about .003 of AUC or .005 of R^2, so being over
the budget never pays; and the span between a useless table and the best is about .1, so quality is not drowned."""


def reward_of(quality: float, overshoot: float) -> float:
    """Returns the reward of the controller, as in the paper: ``quality - lambda * max(0, bytes / budget - 1)``.

    Args:
        quality: see `Quality`.
        overshoot: ``bytes / budget - 1``, below 0 within the budget.

    Example:
        >>> reward_of(0.8, -0.1), round(reward_of(0.8, 0.5), 3)
        (0.8, 0.75)
    """
    return quality - COST_WEIGHT * max(0.0, overshoot)


class Quality:
    """Quality of a batch's predictions, without unit: AUC for a binary loss, else ``-MSE / variance of the labels``.

    NOTE[DIFF]: the paper knows AUC and Recall@1. The variance is that of all validation labels, so that one lambda
    serves ratings from 1 to 5 and from 0 to 100 alike.

    Args:
        recipe: its loss decides, its validation labels give the variance.

    Raises:
        ValueError: if there is no validation batch, or a label of a binary loss is neither 0 nor 1.
        NotApplicableError: for a recipe with a task of its own.
    """

    def __init__(self, recipe: Recipe) -> None:
        if recipe.loss is None:
            supported, received = "supported are recipes with a loss of one prediction", type(recipe.task).__name__
            raise NotApplicableError(describe("reward", supported, received))
        self._is_binary = isinstance(recipe.loss, nn.BCEWithLogitsLoss)
        labels = [batch.labels.float().cpu() for batch in recipe.data.validation]
        check(len(labels) > 0, "validation stream", "at least one batch", 0, "check the data splits")
        if self._is_binary:
            check_classes(torch.cat(labels), "validation stream")
        self._variance = float(torch.cat(labels).var(unbiased=False).clamp(min=torch.finfo(torch.float32).tiny))

    def of(self, predictions: Tensor, labels: Tensor) -> float:
        """Quality of one batch; higher is better.

        Args:
            predictions: ``(B,)``, logits for a binary loss.
            labels: ``(B,)``.

        Returns:
            The quality; 0.5 for a batch of one class only, which has no AUC.
        """
        if not self._is_binary:
            return -float((predictions - labels).square().mean()) / self._variance
        classes = labels.long()
        if bool((classes == classes[0]).all()):
            return 0.5
        return float(binary_auroc(predictions.sigmoid(), classes))


class Supernet:
    """The prepared and sharded model, run under one combination at a time.

    Args:
        recipe: its model is used up.
        grid: the choices.
        device: where to train.

    Attributes:
        model: the sharded model.

    Raises:
        ValueError: if there is no validation batch.
    """

    def __init__(self, recipe: Recipe, grid: Grid, device: torch.device) -> None:
        task = TrainTask(prepare_(recipe.model, grid.blocks), recipe.task, embedding_l2=recipe.embedding_l2)
        self.model, self._optimizer = shard(task, recipe, device)
        self._alpha: Alpha = next(iter(soft_selection_modules(self.model).values())).alpha
        self._guard = FiniteGuard(self.model, self.model._env.process_group)
        self._grid, self._device = grid, device
        self._quality = Quality(recipe)

    def train(self, batch: Batch, picked: list[int], place: str) -> None:
        """One step of the weights under a combination.

        NOTE[DIFF]: what a combination masks gets no gradient but, under dense Adam, coasts on its momentum for a few
        steps, as rows absent from a batch do. To hold it would cost a copy of every table in every step.

        Args:
            batch: of the training split.
            picked: the option of each choice.
            place: the step, for an error.

        Raises:
            NonFiniteError: if the loss is NaN or infinite.
        """
        self._grid.select_(self._alpha, picked)
        self.model.train()
        self._optimizer.zero_grad()
        loss, _ = self.model(batch.to(self._device))
        self._guard.check_loss(loss, place)
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def qualities(self, batch: Batch, combinations: list[list[int]]) -> list[float]:
        """Quality of each combination on one batch; no weight learns.

        Args:
            batch: of the validation split.
            combinations: the option of each choice, for each combination.

        Raises:
            NonFiniteError: if the loss of the last step, on a GPU, was NaN or infinite.
        """
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
    """Trains the weights under sampled combinations, and after a warm-up the controller with them.

    Args:
        recipe: model, data and loss. Its model is used up.
        grid: the choices.
        embedding_bytes: bytes that a combination may take, index bytes counted.
        warm_up_epochs: epochs of the weights alone.
        epochs: of both.
        device: where to train.
        seed: of the sampled combinations.

    Returns:
        The controller as it ended.

    Raises:
        ValueError: if there is no validation batch.
        NonFiniteError: if a training loss is NaN or infinite.
    """
    steps_per_epoch = sum(1 for _ in recipe.data.train)
    schedule = LevelSchedule(warm_up_steps=warm_up_epochs * steps_per_epoch)
    data = recipe.data
    train, validation = LookupBatches(data.train, "train"), LookupBatches(data.validation, "validation")
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
