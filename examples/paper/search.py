"""The search as published: a warm-up, then weights and alpha in turns until the selection loss stops improving.

    min over alpha of L_validation(Theta*(alpha), alpha),   Theta* = argmin over Theta of L_train(Theta, alpha)

Weights learn by Adam on training batches, alpha by a normalised gradient step on validation batches (paper, eq. 5 to
8), at Theta for Theta* (first order) or through one unrolled step of Theta. In plain PyTorch, on one device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import LookupBatches
from dnis_torchrec.data.over_ranks import count_training_data
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask, data_terms_only
from dnis_torchrec.search.pipeline import AlphaOptimizer, first_order_gradient, frozen_statistics
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.shards import table_configs, table_weight_names
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.evaluate import selection_loss
from examples.paper.blocks import GlobalBlocks, global_blocks
from examples.paper.hypergradient import UnrolledHypergradient
from examples.paper.pruning import ValueMask


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """How to search: `is_unrolled` takes alpha's gradient through a step of the weights."""

    epochs: int = 30
    patience: int = 3
    num_blocks: int = 10
    is_unrolled: bool = False

    def __post_init__(self) -> None:
        check(self.epochs >= 2, "epochs", "at least 2", self.epochs)
        check(self.patience >= 1, "patience", "at least 1", self.patience)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What an epoch came to; one before the first has the number -1."""

    epoch: int
    phase: str
    train_loss: float
    selection_loss: float
    alpha_mean: float = 1.0
    alpha_density: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PaperOutcome:
    """The plain model, alpha merged into its tables, before anything is pruned."""

    model: nn.Module
    counts: FrequencyCounts
    blocks: GlobalBlocks
    alpha: dict[str, Tensor]
    history: tuple[Epoch, ...]
    best_epoch: int


@dataclass
class _Trained:
    """A model with the best state that its epochs came by."""

    model: nn.Module
    patience: int
    best: float = math.inf
    best_epoch: int = -1
    state: dict[str, Tensor] = field(default_factory=dict)
    history: list[Epoch] = field(default_factory=list)

    def note(self, epoch: Epoch) -> bool:
        """Takes an epoch and says whether to stop."""
        self.history.append(epoch)
        if epoch.selection_loss < self.best:
            self.best, self.best_epoch = epoch.selection_loss, epoch.epoch
            self.state = {name: value.clone() for name, value in _tensors(self.model).items()}
        return epoch.epoch - self.best_epoch >= self.patience

    @torch.no_grad()
    def go_back_(self) -> None:
        """Gives the model its best state."""
        for name, value in _tensors(self.model).items():
            value.copy_(self.state[name])


def search_as_published(
    recipe: Recipe,
    settings: PaperSettings,
    device: torch.device,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> PaperOutcome:
    """Learns weights and alpha.

    Args:
        recipe: its model is used up: take the one of the outcome.
        settings: how to search.
        device: where.
        on_epoch: who listens.
    """
    if recipe.leave_alone:
        remedy = "search by `dnis search`"
        supported = "supported are recipes without tables to leave alone"
        raise NotImplementedError(describe("Recipe.leave_alone", supported, recipe.leave_alone, remedy))
    train, validation = LookupBatches(recipe.data.train, "train"), LookupBatches(recipe.data.validation, "validation")
    tables = table_configs(recipe.model)
    counts = count_training_data(recipe.data, recipe.task, tables)
    blocks = global_blocks(counts, tables, settings.num_blocks)
    steps = sum(1 for _ in train)
    task = TrainTask(prepare_(recipe.model, blocks), recipe.task, embedding_l2=recipe.embedding_l2).to(device).train()
    levels = _Levels(task, adam(task, recipe), blocks, is_unrolled=settings.is_unrolled)
    stream = BilevelStream(train, validation, LevelSchedule(warm_up_steps=steps))
    trained = _Trained(task, settings.patience)
    for number in range(settings.epochs):
        train_loss = levels.epoch(stream, steps, device)
        epoch = Epoch(
            epoch=number,
            phase="both levels" if number else "warm-up",
            train_loss=train_loss,
            selection_loss=selection_loss(task, recipe, device),
            alpha_mean=levels.alpha_optimizer.mean(),
            alpha_density=float(levels.alpha_optimizer.density()),
        )
        on_epoch(epoch)
        if number == 0:
            trained.history.append(epoch)  # of the warm-up, which is no result
        elif trained.note(epoch):
            break
    trained.go_back_()
    alpha = {name: levels.alpha.of(dim).detach().cpu().clone() for name, dim in blocks.embedding_dims.items()}
    return PaperOutcome(
        model=merge_(task).model,
        counts=counts,
        blocks=blocks,
        alpha=alpha,
        history=tuple(trained.history),
        best_epoch=trained.best_epoch,
    )


def fine_tune_(model: nn.Module, recipe: Recipe, device: torch.device, *, epochs: int, patience: int = 3) -> float:
    """Trains a pruned model on, pruned values held at zero, and returns the selection loss of its best epoch.

    Args:
        model: plain; left as it was where no epoch is better.
        recipe: its data and rates.
        device: where.
        epochs: at most.
        patience: epochs without a better one before it stops.
    """
    task = TrainTask(model, recipe.task, embedding_l2=recipe.embedding_l2).to(device).train()
    optimizer, mask, trained = adam(task, recipe), ValueMask(task), _Trained(task, patience)
    before = selection_loss(task, recipe, device)
    trained.note(Epoch(epoch=-1, phase="pruned", train_loss=math.nan, selection_loss=before))
    for number in range(epochs):
        losses = []
        for batch in LookupBatches(recipe.data.train, "train"):
            losses.append(_lower_step(task, optimizer, batch.to(device), mask.before_step_))
            mask.hold_()
        train_loss, loss = float(torch.stack(losses).mean()), selection_loss(task, recipe, device)
        if trained.note(Epoch(epoch=number, phase="fine-tuning", train_loss=train_loss, selection_loss=loss)):
            break
    trained.go_back_()
    return trained.best


def adam(task: TrainTask, recipe: Recipe) -> torch.optim.Adam:
    """Adam of all weights, tables and what goes with rows at their own rate."""
    of_tables = table_weight_names(task)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, weight in task.named_parameters():
        of_rows = any(f".{name}".endswith(f".{row}") for row in recipe.row_weights)
        groups[name in of_tables or of_rows].append(weight)
    rates = {True: recipe.table_learning_rate, False: recipe.dense_learning_rate}
    return torch.optim.Adam([{"params": g, "lr": rates[kind]} for kind, g in groups.items() if g], fused=True)


class _Levels:
    """Both levels' steps on one model."""

    def __init__(
        self, task: TrainTask, optimizer: torch.optim.Adam, blocks: GlobalBlocks, *, is_unrolled: bool
    ) -> None:
        self._task, self._optimizer = task, optimizer
        self.alpha = next(iter(soft_selection_modules(task).values())).alpha
        self.alpha_optimizer = AlphaOptimizer(self.alpha, blocks)
        # xi as the highest rate: every weight moves at its own.
        xi = max(group["lr"] for group in optimizer.param_groups)
        self._unrolled = UnrolledHypergradient(task, self.alpha, xi, optimizer) if is_unrolled else None
        self._train_batch: Batch | None = None

    def epoch(self, stream: BilevelStream[Batch], steps: int, device: torch.device) -> float:
        """So many lower steps, and the upper ones before each; returns the mean training loss."""
        losses: list[Tensor] = []
        while len(losses) < steps:
            batch = next(stream).to(device)
            if stream.last_level is Level.UPPER:
                self._upper_step(batch)
                continue
            losses.append(_lower_step(self._task, self._optimizer, batch))
            self._train_batch = batch
        mean = float(torch.stack(losses).double().mean())
        check(math.isfinite(mean), "training loss", "a finite number", mean, "take a lower learning rate")
        return mean

    def _upper_step(self, batch: Batch) -> None:
        """On the latest training batch where a step is unrolled, as it is at hand; DARTS takes the next one."""
        if self._unrolled is None:
            with (
                self.alpha.upper_level() as hits,
                data_terms_only([self._task]),
                frozen_statistics(self._task.modules()),
            ):
                gradients = first_order_gradient(self._task(batch)[0], self.alpha)
        else:
            gradients = self._unrolled(lambda: self._task(self._train_batch)[0], lambda: self._data_loss(batch))
            # Neither batch hits a row of alpha whose gradient is exactly zero.
            hits = {dim: of_dim.any(dim=1) for dim, of_dim in zip(self.alpha.dims, gradients, strict=True)}
        self.alpha_optimizer.step(dict(zip(self.alpha.dims, gradients, strict=True)), hits)

    def _data_loss(self, batch: Batch) -> Tensor:
        with data_terms_only([self._task]):
            return self._task(batch)[0]


def _lower_step(
    task: TrainTask, optimizer: torch.optim.Adam, batch: Batch, before_step: Callable[[], None] = lambda: None
) -> Tensor:
    optimizer.zero_grad()
    loss = task(batch)[0]
    loss.backward()
    before_step()
    optimizer.step()
    return loss.detach()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, alpha among them."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def copy_of(outcome: PaperOutcome) -> nn.Module:
    """A model to prune to one size, where there are several."""
    return copy.deepcopy(outcome.model)
