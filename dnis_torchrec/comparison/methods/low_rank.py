"""Low rank: train uncompressed, rotate the tables into their principal axes, keep the first ones of every table alike.

What a search with rotation is worth beyond the rotation itself: here every row of every table gets the same number of
dimensions, and no gradient chooses them.
"""

from __future__ import annotations

import functools
import time
from typing import cast

import torch
from torch import nn

from dnis_torchrec.allocation.rotation import rotate_, rotation_groups
from dnis_torchrec.checks import describe
from dnis_torchrec.comparison.methods.method import MethodResult, MethodTask, NotApplicableError
from dnis_torchrec.comparison.methods.trained_scheme import row_blocks, uniform_scheme_
from dnis_torchrec.comparison.methods.uniform import rounded_up_dim, table_widths
from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.soft_selection.swap import unshard_
from dnis_torchrec.training.plain import train_plainly
from dnis_torchrec.training.retained_mask import RetainedMask
from dnis_torchrec.training.sharded import rest_optimizer, shard


def low_rank(task: MethodTask) -> MethodResult:
    """Cuts the uncompressed model's rotated tables to one embedding_dim, and trains on as long as that helps.

    The cut itself is the best approximation of that rank, see `rotation`; the embedding_dim is that of `uniform`, so
    rounded up, and the form is the same.

    Args:
        task: recipe and size.

    Raises:
        NotApplicableError: if the model has tables that may not be rotated, whose first columns are not the ones that
            carry most; before training.
        SizeNotMetError: if even tables of embedding_dim 1 take more than the budget; before training.
    """
    recipe = task.build(None)
    _check_all_rotate(recipe.model)
    widths = table_widths(task.build(rounded_up_dim(task, "low-rank")).model)
    counts, _ = row_blocks(task)
    torch.manual_seed(task.seed)
    started = time.monotonic()
    whole = TrainTask(recipe.model, recipe.loss, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(whole, recipe, task.device)
    train = functools.partial(
        train_plainly,
        recipe=recipe,
        device=task.device,
        max_epochs=task.max_epochs,
        patience=task.patience,
        folder=task.folder,
    )
    train(model, optimizer)
    rotate_(model, counts, rest_optimizer(model, recipe))
    plain = cast(TrainTask, unshard_(model))
    scheme = uniform_scheme_(plain.model, widths)
    model, optimizer = shard(plain, recipe, task.device)
    trained = train(model, optimizer, held=RetainedMask(model), starts_trained=True)
    tuned = cast(TrainTask, unshard_(model))
    seconds = time.monotonic() - started
    return MethodResult(
        model=tuned.model,
        scheme=scheme,
        form="mixed_dimension_fp32",
        selection_loss=trained.selection_loss,
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={"embedding_dim": max(widths.values()), "trained_on": str(trained.best_epoch >= 0)},
    )


def _check_all_rotate(model: nn.Module) -> None:
    rotated = {table for group in rotation_groups(model) for table in group.tables}
    others = [table for table in table_widths(model) if table not in rotated]
    if others:
        requirement = "supported are models that may be rotated, every table of them"
        remedy = "have the model's method rotation_groups name them"
        raise NotApplicableError(describe("low-rank", requirement, f"{others} that may not be", remedy))
