"""The whole search: count, block, warm up, ramp, release, merge, prune.

epochs    0 .. warm_up    .. + ramp          .. + release (until the selection loss stops improving)
lower     weights learn throughout
upper     still           mean of alpha led  lambda fades, alpha of the kept columns learns on
                          to the size

Without pressure (the paper's search) there is no ramp: alpha learns on validation loss alone from the warm-up on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.allocation.rotation import column_scales, rotate_, rotation_groups
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts, check_num_blocks
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import BatchParts
from dnis_torchrec.data.lookup_batches import LookupBatches
from dnis_torchrec.data.over_ranks import split_over_ranks
from dnis_torchrec.data.recipe import DataSplits, Recipe, TrainTask
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.budget import Budget, check_compresses
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.search.level_schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.loop import EpochRecord, SearchEvents, SearchInterrupted, SearchLoop
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.pruning import num_elements, prune
from dnis_torchrec.soft_selection.swap import merge_, prepare_
from dnis_torchrec.soft_selection.table_shards import dense_parameters, table_configs
from dnis_torchrec.storage.files import Address
from dnis_torchrec.streaming import CountLimits
from dnis_torchrec.streaming.checked_counts import count_training_data, read_before_training
from dnis_torchrec.training.saving import Saving
from dnis_torchrec.training.sharded import check_pooling, set_learning_rates_, shard

__all__ = [
    "EpochRecord",
    "Saving",
    "SearchConfig",
    "SearchEvents",
    "SearchInterrupted",
    "SearchOutcome",
    "count_training_data",
    "search",
    "table_configs",
]


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """Results of a search: the pruned model, its scheme, and how they came about.

    Attributes:
        model: the plain model, merged and pruned. On several ranks its collections stay sharded.
        scheme: the retained dims.
        counts: training frequencies.
        blocks: the row blocks.
        alpha: embedding_dim -> ``(A, D)`` as it was before merging.
        history: one record per epoch.
        best_epoch: the epoch that was kept.
        seconds_before: wall time of earlier attempts, up to the checkpoint that this one resumed from.
    """

    model: nn.Module
    scheme: MixedDimensionScheme
    counts: FrequencyCounts
    blocks: RowBlocks
    alpha: dict[int, torch.Tensor]
    history: tuple[EpochRecord, ...]
    best_epoch: int
    seconds_before: float = 0.0


def search(
    recipe: Recipe,
    config: SearchConfig,
    checkpoints: Address,
    device: torch.device,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
) -> SearchOutcome:
    """Finds how many dimensions each block of each table deserves, at the requested size.

    Needs a process group, which `dnis_torchrec.training.process_group.process_group` makes.

    Distributed: every rank calls it with the same recipe and configuration. Its data is split over ranks (see
    `data.over_ranks`), counts are added up, tables are sharded as the planner sees fit and stay so, and alpha, blocks,
    scheme and history are the same on every rank.

    Args:
        recipe: model, data and loss. Its model is used up: take the one of the outcome.
        config: how to search.
        checkpoints: folder for the last checkpoints and the best one, a path that all ranks see or a URL (see
            `checkpoint_folder`).
        device: where to train.
        events: who listens.
        saving: when to save, and whether to resume from a checkpoint in `checkpoints`.

    Returns:
        The merged and pruned model with its scheme.

    Raises:
        ValueError: for bad data, blocks or a size that cannot be met, a model that could not be evaluated (see
            `check_pooling`), or other data or another configuration than that of the checkpoint to go on from, before
            training starts; on all ranks alike.
        NonFiniteError: if a loss or gradient is NaN or infinite; the last good checkpoint stays.
        SearchInterrupted: if `events` asked to stop; everything was saved first, or the message says otherwise.
        CheckpointWriteError: if a checkpoint could not be written, and that is to stop the search.
    """
    ranks = Ranks.everyone()
    events = events or SearchEvents()
    with together():
        tables = table_configs(recipe.model)
        check_pooling(recipe.model)
        check_compresses(config.size, dense_parameters(recipe.model))
        check_num_blocks(config.num_blocks, tables, scope=config.scope, strategy=config.strategy)
    limits = CountLimits(exact_rows=config.exact_count_rows)
    whole, counts, data = read_before_training(recipe, tables, ranks, limits)
    recipe = replace(recipe, data=replace(whole, validation=_in_parts(recipe.data, config, ranks)))
    blocks = blocks_from_counts(
        counts, tables, num_blocks=config.num_blocks, scope=config.scope, strategy=config.strategy
    )
    _check_size(config, blocks)
    steps_per_epoch = sum(1 for _ in recipe.data.train)
    _check_upper_steps(config, steps_per_epoch)
    with together():
        events.on_start(steps_per_epoch, counts, blocks)
    turned = [table for group in rotation_groups(recipe.model) for table in group.tables] if config.rotate else []
    model, optimizer = _sharded(recipe, blocks, config, device, turned, counts.num_samples // steps_per_epoch)
    pipeline, stream = _pipeline(model, optimizer, device, recipe, config, steps_per_epoch)
    model.train()
    loop = SearchLoop(
        pipeline,
        stream,
        recipe,
        checkpoints,
        saving or Saving(),
        epochs=config.epochs,
        warm_up_epochs=config.warm_up_epochs,
        patience=config.patience,
        steps_per_epoch=steps_per_epoch,
        events=events,
        before_epoch=partial(_set_rates_, model, optimizer, pipeline, recipe, config),
        after_warm_up=partial(_turn_axes_, model, optimizer, pipeline, blocks, counts) if turned else None,
        data=data,
        configuration=asdict(config),
    )
    loop.run()
    alpha = {dim: pipeline.alpha.of(dim).detach().cpu().clone() for dim in pipeline.alpha.dims}
    plain = cast(TrainTask, get_unwrapped_module(merge_(model))).model
    scheme = prune(plain, blocks, counts, size=config.size, structure=config.structure)
    return SearchOutcome(
        model=plain,
        scheme=scheme,
        counts=counts,
        blocks=blocks,
        alpha=alpha,
        history=tuple(loop.history),
        best_epoch=loop.best.epoch,
        seconds_before=loop.seconds_before,
    )


def _sharded(
    recipe: Recipe,
    blocks: RowBlocks,
    config: SearchConfig,
    device: torch.device,
    turned: Sequence[str],
    batch_size: int,
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Returns the recipe's model, prepared, and the optimizer of all weights without a fused one."""
    return shard(
        TrainTask(prepare_(recipe.model, blocks), recipe.loss, embedding_l2=recipe.embedding_l2),
        recipe,
        device,
        whole_rows=turned,
        replicated=config.unrolled,
        prefetched=not config.unrolled,
        batch_size=batch_size,
    )


def _in_parts(data: DataSplits, config: SearchConfig, ranks: Ranks) -> Iterable[Batch]:
    """This rank's share of every part of the validation batches.

    Cut before ranks take their slices: several ranks then step on the samples that one process would step on.
    """
    parts = BatchParts(data.validation, config.upper_batch_parts, at_least=ranks.world_size)
    return split_over_ranks(replace(data, validation=parts), ranks).validation


def _turn_axes_(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    pipeline: BilevelTrainPipeline,
    blocks: RowBlocks,
    counts: FrequencyCounts,
) -> None:
    """Turns the tables into their principal axes; columns that die in the order of alpha are scaled by what they carry.

    Without the scales validation loss alone sets that order at first, and where a model has begun to overfit it would
    rather be rid of its strongest columns. The order of importance needs none.
    """
    rotate_(model, counts, optimizer)
    pipeline.alpha_optimizer.scale_columns(column_scales(model, blocks, counts))


def _set_rates_(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    pipeline: BilevelTrainPipeline,
    recipe: Recipe,
    config: SearchConfig,
    epoch: int,
) -> None:
    """Sets the learning rates of an epoch; checkpoints do not have them, so a search that goes on needs it too."""
    tables, dense = recipe.table_learning_rate, recipe.dense_learning_rate
    rows = tables
    if config.pressure:
        tables = config.search_table_learning_rate or tables
        dense = config.search_dense_learning_rate or dense
        rows = config.search_row_learning_rate or rows
        epochs_of_release = epoch - config.warm_up_epochs - config.ramp_epochs
        if epochs_of_release >= 0:
            tables = config.release_table_learning_rate or tables
            dense = config.release_dense_learning_rate or dense
            decay = config.release_decay**epochs_of_release
            tables, dense, rows = tables * decay, dense * decay, rows * decay
    set_learning_rates_(model, optimizer, tables=tables, dense=dense, rows=rows)
    if config.unrolled:
        pipeline.set_unrolled_step(_highest_rate(optimizer))


def _highest_rate(optimizer: KeyedOptimizerWrapper) -> float:
    """Returns the highest learning rate. As xi it moves every weight at its own rate, see `UnrolledHypergradient`."""
    return max(group["lr"] for group in optimizer.param_groups)


def _check_size(config: SearchConfig, blocks: RowBlocks) -> None:
    """Checks that the size can be met by what the search retains: columns of alpha, columns of blocks, or values."""
    if config.pressure or config.structure == "block":
        Budget.of(config.size, blocks, by_alpha_row=config.pressure)
    if config.structure == "element":
        num_elements(config.size, blocks)


def _check_upper_steps(config: SearchConfig, steps_per_epoch: int) -> None:
    """Without an upper step before columns die, or at all, alpha would decide nothing."""
    epochs = config.ramp_epochs + (0 if config.pressure else config.release_epochs)
    during = "the ramp" if config.pressure else "the epochs behind the warm-up"
    requirement = f"at most {epochs * steps_per_epoch}, the lower steps of {during}"
    fits = config.upper_every <= epochs * steps_per_epoch
    check(fits, "upper_every", requirement, config.upper_every, "let alpha step more often")


def _pipeline(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    device: torch.device,
    recipe: Recipe,
    config: SearchConfig,
    steps_per_epoch: int,
) -> tuple[BilevelTrainPipeline, BilevelStream[Batch]]:
    """Builds both levels of a search as it is configured, and the streams that they read."""
    schedule = LevelSchedule(warm_up_steps=config.warm_up_epochs * steps_per_epoch, upper_every=config.upper_every)
    pressure = config.pressure_over(max(1, config.ramp_epochs * steps_per_epoch // config.upper_every))
    pipeline = BilevelTrainPipeline(
        model,
        optimizer,
        device,
        pressure=pressure if config.pressure else None,
        alpha_learning_rate=config.alpha_learning_rate,
        alpha_averaging=config.alpha_averaging,
        unrolled_step=_highest_rate(optimizer) if config.unrolled else None,
    )
    data = recipe.data
    train, validation = LookupBatches(data.train, "train"), LookupBatches(data.validation, "validation")
    return pipeline, BilevelStream(train, validation, schedule)
