"""`int4-qat`: uniform tables that know while they train that they will be served in int4."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import torch

from benchmarks.rivals.methods.method import MethodResult, MethodTask, served_in
from benchmarks.rivals.methods.reparametrised import RoundedRows, table_parameters
from benchmarks.rivals.methods.trained_scheme import in_precision
from benchmarks.rivals.methods.uniform import largest_dim, uniform_candidate
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import shard

PRECISION = "int4"


@served_in(PRECISION)
def int4_aware(task: MethodTask) -> MethodResult:
    """Uniform tables of the requested size in int4, trained through the rounding (straight-through
    estimator)."""
    task = replace(task, precision=PRECISION)
    candidate = uniform_candidate(task, largest_dim(task, "int4-qat"))
    recipe = candidate.recipe
    started = time.monotonic()
    torch.manual_seed(task.seed)
    whole = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(whole, recipe, task.device, replicated=True)
    trained = train_plainly(
        model,
        RoundedRows(optimizer, table_parameters(model, "int4-qat"), PRECISION),
        recipe,
        task.device,
        max_epochs=task.max_epochs,
        patience=task.patience,
    )
    seconds = time.monotonic() - started
    plain = cast(TrainTask, unshard_(model)).model
    return MethodResult(
        model=plain,
        scheme=in_precision(plain, candidate.scheme, candidate.form, PRECISION),
        form=candidate.form,
        embedding_dim=candidate.embedding_dim,
        selection_loss=trained.selection_loss,
        seconds=seconds,
        seconds_of_trials=seconds,
        settings=candidate.settings,
    )
