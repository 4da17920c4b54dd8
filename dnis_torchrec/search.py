"""The whole search: count, block, warm up, ramp, release, merge, prune.

epochs    0 .. warm_up    .. + ramp          .. + release (until the selection loss stops improving)
lower     weights learn throughout
upper     still           mean of alpha led  lambda fades, alpha of the kept columns learns on
                          to the size

Without pressure (the paper's search) there is no ramp: alpha learns on validation loss alone from the warm-up on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.alpha_optimizer import Pressure
from dnis_torchrec.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.budget import Budget, Size
from dnis_torchrec.checkpoint import load_checkpoint
from dnis_torchrec.checks import check, describe
from dnis_torchrec.frequency import FrequencyCounts, count_frequencies
from dnis_torchrec.level_schedule import BilevelStream, LevelSchedule
from dnis_torchrec.pruning import STRUCTURES, prune
from dnis_torchrec.recipe import DataSplits, Recipe, TrainTask, check_labels
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.swap import merge_, prepare_
from dnis_torchrec.table_shards import collections
from dnis_torchrec.train_pipeline import BilevelTrainPipeline
from dnis_torchrec.training import EarlyStopping, evaluate, shard


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to search.

    Attributes:
        size: the requested size of all tables.
        pressure: lead alpha to the size while training. NOTE[DIFF]: False is the paper's search, where validation loss
            alone moves alpha and pruning has to reach the size afterwards.
        unrolled: take the gradient of alpha through one unrolled step of the weights (see `hypergradient`), at the
            learning rate of the tables; needs tables without a fused optimizer.
        structure: what pruning drops at the end, see `prune`. With pressure whole columns are dead by then.
        num_blocks: S.
        scope: see `blocks_from_counts`.
        strategy: see `blocks_from_counts`.
        warm_up_epochs: epochs of lower steps alone.
        ramp_epochs: epochs in which the mean of alpha is led to the size.
        release_epochs: epochs at most after the ramp; without pressure the epochs of the ramp are added to them.
        patience: epochs of the release without a better selection loss before stopping.
        column_sharing: see `Pressure`.
        upper_every: lower steps per upper step.
        alpha_learning_rate: see `AlphaOptimizer`.
        alpha_averaging: see `AlphaOptimizer`.
    """

    size: Size
    pressure: bool = True
    unrolled: bool = False
    structure: str = "block"
    num_blocks: int = 10
    scope: str = "global"
    strategy: str = "equal_rows"
    warm_up_epochs: int = 2
    ramp_epochs: int = 12
    release_epochs: int = 14
    patience: int = 3
    column_sharing: float = 0.0
    upper_every: int = 1
    alpha_learning_rate: float | None = None
    alpha_averaging: float = 0.98

    def __post_init__(self) -> None:
        for name in ("num_blocks", "warm_up_epochs", "ramp_epochs", "release_epochs", "patience", "upper_every"):
            check(getattr(self, name) >= 1, name, "expected at least 1", getattr(self, name))
        check(self.structure in STRUCTURES, "structure", f"expected one of {STRUCTURES}", repr(self.structure))

    @property
    def epochs(self) -> int:
        """Epochs at most."""
        return self.warm_up_epochs + self.ramp_epochs + self.release_epochs

    @staticmethod
    def of(recipe: Recipe, size: Size, settings: Mapping[str, Any] | None = None) -> SearchConfig:
        """The configuration that suits a recipe.

        Args:
            recipe: gives the number of blocks, of epochs, and alpha's rate.
            size: see `size`.
            settings: any field by name, instead of the recipe's or the default.
        """
        names = (
            "num_blocks",
            "warm_up_epochs",
            "ramp_epochs",
            "release_epochs",
            "column_sharing",
            "alpha_learning_rate",
        )
        return SearchConfig(size=size, **{name: getattr(recipe, name) for name in names} | dict(settings or {}))


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """What one epoch of a search came to; one line of the history.

    Attributes:
        epoch: from 0.
        step: lower steps so far.
        train_loss: mean over the epoch.
        selection_loss: on the selection split.
        alpha_mean: mean of alpha, weighted by what each value costs.
        alpha_density: share of values whose alpha is not zero.
        pressure: lambda.
    """

    epoch: int
    step: int
    train_loss: float
    selection_loss: float
    alpha_mean: float
    alpha_density: float
    pressure: float


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """What a search found.

    Attributes:
        model: the plain model, merged and pruned.
        scheme: the retained dims.
        counts: training frequencies.
        blocks: the row blocks.
        alpha: embedding_dim -> ``(A, D)`` as it was before merging.
        history: one record per epoch.
        best_epoch: the epoch that was kept.
    """

    model: nn.Module
    scheme: MixedDimensionScheme
    counts: FrequencyCounts
    blocks: RowBlocks
    alpha: dict[int, torch.Tensor]
    history: tuple[EpochRecord, ...]
    best_epoch: int


@dataclass
class SearchEvents:
    """Who wants to know how a search goes; every call is optional.

    Attributes:
        on_start: called with the number of lower steps of an epoch, the counts and the blocks, before training.
        on_step: called after every lower step with its loss and the density of alpha.
        on_epoch: called with the record of every epoch.
        on_alpha: called after that with the record, alpha (embedding_dim -> ``(A, D)``, to be read only) and whether
            it was the last epoch.
        should_stop: asked after every step; True saves the state and ends the search.
    """

    on_start: Callable[[int, FrequencyCounts, RowBlocks], None] = field(default=lambda steps, counts, blocks: None)
    on_step: Callable[[float, float], None] = field(default=lambda loss, density: None)
    on_epoch: Callable[[EpochRecord], None] = field(default=lambda record: None)
    on_alpha: Callable[[EpochRecord, Mapping[int, torch.Tensor], bool], None] = field(
        default=lambda record, alpha, is_last: None
    )
    should_stop: Callable[[], bool] = field(default=lambda: False)


class SearchInterrupted(RuntimeError):
    """The search was asked to stop; its state was saved first."""


def table_configs(model: nn.Module) -> list[EmbeddingBagConfig]:
    """Configs of all tables of an unsharded model.

    Raises:
        TypeError: if a collection of it is sharded.
    """
    configs: list[EmbeddingBagConfig] = []
    for fqn, module in collections(model).items():
        if not isinstance(module, EmbeddingBagCollectionInterface):
            received = type(module).__name__
            raise TypeError(describe(f"FQN {fqn!r}", "expected an unsharded collection", received))
        configs += module.embedding_bag_configs()
    return configs


def count_training_data(data: DataSplits, loss: nn.Module, tables: list[EmbeddingBagConfig]) -> FrequencyCounts:
    """Counts the training split, and checks the labels of all splits on the way.

    Raises:
        ValueError: for an empty split, a label outside the loss's domain, or an id outside its table.
    """
    for name in ("validation", "selection", "test"):
        num_batches = sum(1 for _ in _checked(getattr(data, name), loss, name))
        check(num_batches > 0, f"{name} stream", "expected at least one batch", 0, "check the data splits")
    return count_frequencies((batch.sparse_features for batch in _checked(data.train, loss, "train")), tables)


def _checked(batches: Iterable[Batch], loss: nn.Module, name: str) -> Iterable[Batch]:
    for index, batch in enumerate(batches):
        check_labels(batch.labels, loss, f"{name} batch {index}")
        yield batch


def search(
    recipe: Recipe,
    config: SearchConfig,
    checkpoints: Path,
    device: torch.device,
    events: SearchEvents | None = None,
) -> SearchOutcome:
    """Finds how many dimensions each block of each table deserves, at the requested size.

    Needs a process group of one rank, which `dnis_torchrec.training.process_group` makes.

    Args:
        recipe: model, data and loss. Its model is used up: take the one of the outcome.
        config: how to search.
        checkpoints: existing folder for the last good state (``last``) and the best one (``best``).
        device: where to train.
        events: who listens.

    Returns:
        The merged and pruned model with its scheme.

    Raises:
        ValueError: for bad data, blocks or a size that cannot be met, before training starts.
        NonFiniteError: if a loss or gradient is NaN or infinite; the last good checkpoint stays.
        SearchInterrupted: if `events` asked to stop; the state is in ``last``.
        NotImplementedError: on several ranks.
    """
    if dist.get_world_size() > 1:
        supported = "supported is one process; BilevelTrainPipeline itself runs on several"
        raise NotImplementedError(describe("search", supported, f"{dist.get_world_size()} ranks"))
    events = events or SearchEvents()
    tables = table_configs(recipe.model)
    counts = count_training_data(recipe.data, recipe.loss, tables)
    blocks = blocks_from_counts(
        counts, tables, num_blocks=config.num_blocks, scope=config.scope, strategy=config.strategy
    )
    Budget.of(config.size, blocks)
    steps_per_epoch = sum(1 for _ in recipe.data.train)
    events.on_start(steps_per_epoch, counts, blocks)
    model, optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, device)
    schedule = LevelSchedule(warm_up_steps=config.warm_up_epochs * steps_per_epoch, upper_every=config.upper_every)
    pressure = Pressure(
        size=config.size,
        ramp_steps=max(1, config.ramp_epochs * steps_per_epoch // config.upper_every),
        column_sharing=config.column_sharing,
    )
    pipeline = BilevelTrainPipeline(
        model,
        optimizer,
        device,
        pressure=pressure if config.pressure else None,
        alpha_learning_rate=config.alpha_learning_rate,
        alpha_averaging=config.alpha_averaging,
        unrolled_step=recipe.table_learning_rate if config.unrolled else None,
    )
    stream = BilevelStream(recipe.data.train, recipe.data.validation, schedule)
    model.train()
    history, best = _epochs(pipeline, stream, recipe, config, checkpoints, steps_per_epoch, events)
    pipeline.detach()
    load_checkpoint(checkpoints / "best", model)
    wrapper_alpha = pipeline.alpha
    alpha = {dim: wrapper_alpha.of(dim).detach().cpu().clone() for dim in wrapper_alpha.dims}
    plain = cast(TrainTask, merge_(model)).model
    scheme = prune(plain, blocks, counts, size=config.size, structure=config.structure)
    return SearchOutcome(
        model=plain,
        scheme=scheme,
        counts=counts,
        blocks=blocks,
        alpha=alpha,
        history=tuple(history),
        best_epoch=best,
    )


def _epochs(
    pipeline: BilevelTrainPipeline,
    stream: BilevelStream[Batch],
    recipe: Recipe,
    config: SearchConfig,
    checkpoints: Path,
    steps_per_epoch: int,
    events: SearchEvents,
) -> tuple[list[EpochRecord], int]:
    """Runs every epoch; the best one after the ramp, in selection loss, ends up in ``checkpoints/best``.

    Returns:
        The history, and the number of the best epoch.
    """
    history: list[EpochRecord] = []
    stopping = EarlyStopping(checkpoints / "best", config.patience)
    for epoch in range(config.epochs):
        losses, until = [], (epoch + 1) * steps_per_epoch
        steps_until = stream.schedule.steps_for(until)
        while pipeline.lower_steps + pipeline.upper_steps < steps_until:
            before = pipeline.lower_steps
            loss = pipeline.progress(stream)[0]
            if pipeline.lower_steps > before:
                losses.append(loss)
                events.on_step(float(loss), pipeline.alpha_optimizer.last_density)
            if events.should_stop():
                pipeline.save(checkpoints / "last")
                place, saved = f"epoch {epoch}, lower step {pipeline.lower_steps}", checkpoints / "last"
                raise SearchInterrupted(
                    f"{place}: stopped on request; weights, alpha and its state are saved in {saved}"
                )
        with pipeline.detached() as model:
            selection_loss = evaluate(model, recipe.data.selection, recipe.loss, pipeline.device)["loss"]
        record = EpochRecord(
            epoch=epoch,
            step=pipeline.lower_steps,
            train_loss=float(torch.stack(losses).mean()),
            selection_loss=selection_loss,
            alpha_mean=pipeline.alpha_optimizer.mean(),
            alpha_density=pipeline.alpha_optimizer.density(),
            pressure=pipeline.alpha_optimizer.pressure_now,
        )
        history.append(record)
        events.on_epoch(record)
        pipeline.save(checkpoints / "last")
        is_candidate = pipeline.alpha_optimizer.is_released and epoch >= config.warm_up_epochs
        is_over = is_candidate and stopping.update(epoch, selection_loss, pipeline.save)
        alpha = {dim: pipeline.alpha.of(dim) for dim in pipeline.alpha.dims}
        events.on_alpha(record, alpha, is_over or epoch == config.epochs - 1)
        if is_over:
            break
    return history, stopping.best_epoch
