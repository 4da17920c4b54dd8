"""PEP: a threshold for every value learns beside it; what it leaves at zero is gone, and the rest
is trained anew."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper

from benchmarks.rivals.methods.magnitude import ELEMENT_PRECISIONS, affordable_elements, element_form
from benchmarks.rivals.methods.method import MethodResult, MethodTask, served_in
from benchmarks.rivals.methods.reparametrised import ThresholdedTables, table_parameters
from benchmarks.rivals.methods.trained_scheme import columns_of_dims, prune_to_columns_, row_blocks
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.prune import drop_zeros_
from dnis_torchrec.selection.shards import TableShard, collections, local_shards
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.loop import PlainEpoch, PlainEvents, PlainTraining, Stepper, train_plainly
from dnis_torchrec.training.shard import shard
from examples.paper.pruning import ValueMask, keep_largest_

START_SHARE = 0.1
"""Threshold at the beginning, as a share of the mean magnitude of all values: hardly anything is
below it."""
THRESHOLD_RATE = 3.0
"""Learning rate of thresholds over that of tables: s has to climb by several units, values by a
fraction of one."""
THRESHOLD_DECAY = 1e-5
"""Weight decay of thresholds, that of the authors' code: it takes them from their start, where f
has no slope in s."""


class _OverError(Exception):
    """No more values are left than the bytes pay for, or no more epochs."""


@served_in(*ELEMENT_PRECISIONS)
def pep(task: MethodTask) -> MethodResult:
    """Learns thresholds until as few values are left as the bytes pay for, and trains these from
    their initial weights."""
    counts, blocks = row_blocks(task)
    num_keep = affordable_elements(task, blocks)
    dims = blocks.embedding_dims
    every_column = {table: torch.full((blocks.routings[table].num_blocks,), dim) for table, dim in dims.items()}
    started = time.monotonic()
    recipes = []
    for _ in range(2):
        recipe = task.build(None)
        prune_to_columns_(recipe.model, blocks, counts, columns_of_dims(blocks, every_column))
        recipes.append(recipe)
    found = _thresholds_learnt(task, recipes[0], num_keep)
    _keep_as_in_(recipes[1].model, found)
    model, loss = _trained(task, recipes[1])
    scheme = drop_zeros_(model, blocks, counts)
    seconds = time.monotonic() - started
    return MethodResult(
        model=model,
        scheme=scheme,
        form=element_form(task),
        selection_loss=loss,
        seconds=seconds,
        seconds_of_trials=seconds,
    )


def _thresholds_learnt(task: MethodTask, recipe: Recipe, num_keep: int) -> nn.Module:
    """A model whose tables are zero but for the values to keep."""
    model, optimizer = _sharded(task, recipe)
    tables = table_parameters(model, "pep")
    magnitude = torch.cat([weight.detach().flatten().abs() for weight in tables.values()]).mean().clamp(1e-6, 0.9)
    stepper = ThresholdedTables(
        optimizer,
        tables,
        start=float(torch.logit(START_SHARE * magnitude)),
        learning_rate=THRESHOLD_RATE * recipe.table_learning_rate,
        decay=THRESHOLD_DECAY,
    )

    def stop_when_small(_: float) -> None:
        if stepper.num_alive() <= num_keep:
            raise _OverError

    def stop_when_late(record: PlainEpoch) -> None:
        if record.epoch + 1 == task.max_epochs:
            raise _OverError

    # A model that loses values gets worse: it is not to go back to its best epoch, with more of
    # them.
    events = PlainEvents(on_step=stop_when_small, on_epoch=stop_when_late)
    with suppress(_OverError):
        _train(replace(task, patience=task.max_epochs), model, stepper, recipe, events=events)
    plain = cast(TrainTask, unshard_(model)).model
    keep_largest_([table.weight for table in _tables(plain)], num_keep)
    return plain


def _tables(model: nn.Module) -> list[TableShard]:
    return [table for module in collections(model).values() for table in local_shards(module)]


@torch.no_grad()
def _keep_as_in_(model: nn.Module, found: nn.Module) -> None:
    """Zeroes what is zero in another model of these tables. A kept value that starts at zero
    becomes the smallest."""
    kept = {table.table: table.weight != 0 for table in _tables(found)}
    for table in _tables(model):
        mask, weight = kept[table.table].to(table.weight.device), table.weight
        weight.masked_fill_(mask & (weight == 0), torch.finfo(weight.dtype).tiny).mul_(mask)


def _trained(task: MethodTask, recipe: Recipe) -> tuple[nn.Module, float]:
    """The plain model trained on what is not zero in it, and its selection loss."""
    model, optimizer = _sharded(task, recipe)
    trained = _train(task, model, optimizer, recipe, held=ValueMask(model))
    return cast(TrainTask, unshard_(model)).model, trained.selection_loss


def _sharded(task: MethodTask, recipe: Recipe) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    torch.manual_seed(task.seed)
    whole = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
    return shard(whole, recipe, task.device, replicated=True)


def _train(
    task: MethodTask,
    model: DistributedModelParallel,
    optimizer: Stepper,
    recipe: Recipe,
    *,
    held: ValueMask | None = None,
    events: PlainEvents | None = None,
) -> PlainTraining:
    return train_plainly(
        model,
        optimizer,
        recipe,
        task.device,
        max_epochs=task.max_epochs,
        patience=task.patience,
        held=held,
        events=events or PlainEvents(),
    )
