"""Low rank: train uncompressed, rotate the tables into their principal axes, keep the first ones of
every table alike."""

from __future__ import annotations

import time
from typing import cast

from torch import nn

from benchmarks.rivals.forms import PRECISIONS
from benchmarks.rivals.methods.method import MethodResult, MethodTask, NotApplicableError, served_in
from benchmarks.rivals.methods.trained_scheme import in_precision, pruned_form, row_blocks, uniform_scheme_
from benchmarks.rivals.methods.uniform import largest_dim, table_widths, uniform_candidate
from dnis_torchrec.allocation.axes import rotate_, rotation_groups, with_axes_
from dnis_torchrec.checks import describe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import shard
from examples.paper.pruning import ValueMask


@served_in(*PRECISIONS)
def low_rank(task: MethodTask) -> MethodResult:
    """Cuts the uncompressed model's rotated tables to one embedding_dim, and trains on as long as
    that helps."""
    recipe = task.build(None)
    _check_all_rotate(with_axes_(recipe.model))
    tables = task.tables(largest_dim(task, "low-rank", is_cut=True))
    counts, _ = row_blocks(task)
    dense = uniform_candidate(task, None).train(task)
    started = time.monotonic()
    rotate_(with_axes_(dense.model), counts)
    scheme = uniform_scheme_(dense.model, {table.name: table.embedding_dim for table in tables})
    whole = TrainTask(dense.model, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(whole, recipe, task.device)
    trained = train_plainly(
        model,
        optimizer,
        recipe=recipe,
        device=task.device,
        max_epochs=task.max_epochs,
        patience=task.patience,
        held=ValueMask(model),
        starts_trained=True,
    )
    tuned = cast(TrainTask, unshard_(model))
    seconds, form = dense.seconds + time.monotonic() - started, pruned_form(task.precision)
    return MethodResult(
        model=tuned.model,
        scheme=in_precision(tuned.model, scheme, form, task.precision),
        form=form,
        selection_loss=trained.selection_loss,
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={
            "embedding_dim": max(table.embedding_dim for table in tables),
            "trained_on": str(trained.best_epoch >= 0),
        },
    )


def _check_all_rotate(model: nn.Module) -> None:
    rotated = {table for group in rotation_groups(model) for table in group.tables}
    others = [table for table in table_widths(model) if table not in rotated]
    if others:
        requirement = "supported are models that may be rotated, every table of them"
        remedy = "have the model's method rotation_groups name them"
        raise NotApplicableError(describe("low-rank", requirement, f"{others} that may not be", remedy))
