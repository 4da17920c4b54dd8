"""The search itself as a method among the others: as it is, and as in the paper."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks.rivals.forms import CODES, PACKED
from benchmarks.rivals.methods.method import (
    MethodResult,
    MethodTask,
    SizeNotMetError,
    learns_on_validation,
    leaves_alone,
    served_in,
)
from benchmarks.rivals.methods.uniform import uniform_candidate
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.prune import Size, SizeOutOfReachError
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.evaluate import selection_loss
from examples.paper.pruning import num_values, prune_values_
from examples.paper.search import PaperSettings, search_as_published

SINGLE_VALUES = "csr_fp32"


@leaves_alone
@learns_on_validation
@served_in(CODES.name)
def dnis(task: MethodTask) -> MethodResult:
    """The search (`dnis_torchrec.search.search`), at its own defaults, from the plain training that
    cells share."""
    plain = uniform_candidate(replace(task, precision="fp32"), None).trained(task)
    recipe, trained_epochs = replace(task.build(None), model=plain.model), plain.best_epoch + 1
    settings = replace(SearchSettings(), patience=task.patience)
    torch.manual_seed(task.seed)
    started = time.monotonic()
    try:
        found = search(
            recipe, task.compression, task.folder, task.device, settings=settings, trained_epochs=trained_epochs
        )
    except SizeOutOfReachError as error:
        raise SizeNotMetError(str(error)) from error
    seconds = plain.seconds + time.monotonic() - started
    return MethodResult(
        model=found.model,
        scheme=found.scheme,
        form=PACKED.name,
        selection_loss=found.selection_loss,
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={
            "origin": found.origin,
            "trained_epochs": trained_epochs,
            "epochs": len(found.history),
            "best_epoch": found.best_epoch,
        },
    )


@learns_on_validation
def dnis_paper(task: MethodTask) -> MethodResult:
    """The search as in the paper, see `search_as_published`."""
    return _as_published(task, is_unrolled=False)


@learns_on_validation
def dnis_unrolled(task: MethodTask) -> MethodResult:
    """Searches as `dnis_paper` does, with alpha's gradient through one unrolled step of the weights
    (second order)."""
    return _as_published(task, is_unrolled=True)


def _as_published(task: MethodTask, *, is_unrolled: bool) -> MethodResult:
    recipe = task.build(None)
    size = Size(embedding_bytes=task.embedding_bytes())
    settings = PaperSettings(epochs=max(2, task.max_epochs), patience=task.patience, is_unrolled=is_unrolled)
    torch.manual_seed(task.seed)
    started = time.monotonic()
    try:
        num_values(size, [(t.num_embeddings, t.embedding_dim) for t in table_configs(recipe.model)])
        found = search_as_published(recipe, settings, task.device)
        scheme = prune_values_(found.model, found.blocks, found.counts, size)
    except SizeOutOfReachError as error:
        raise SizeNotMetError(str(error)) from error
    seconds = time.monotonic() - started
    return MethodResult(
        model=found.model,
        scheme=scheme,
        form=SINGLE_VALUES,
        selection_loss=selection_loss(TrainTask(found.model, recipe.task), recipe, task.device),
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={"num_blocks": settings.num_blocks, "epochs": len(found.history), "best_epoch": found.best_epoch},
    )
