"""Methods that train nothing, for tests of comparisons: uniform tables cut to a size, and ways to go wrong.

Calls are counted in OUT/calls, one line each, across processes.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import torch

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.comparison.methods.best_trial import best_of
from dnis_torchrec.comparison.methods.method import (
    Method,
    MethodResult,
    MethodTask,
    SizeNotMetError,
    learns_on_validation,
)
from dnis_torchrec.comparison.methods.trained_scheme import Candidate
from dnis_torchrec.comparison.methods.uniform import uniform_candidate
from dnis_torchrec.comparison.worker import help_cell
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import table_configs
from tests.tiny import EMBEDDING_DIM


def out_of(task: MethodTask) -> Path:
    """OUT of the comparison that a task belongs to: its folder is OUT/cells/CELL/work."""
    return task.folder.parents[2]


def count(task: MethodTask, name: str) -> None:
    with (out_of(task) / "calls").open("a") as file:
        file.write(f"{name} {task.compression:g} {task.seed}\n")


def full_scheme(recipe: Recipe) -> MixedDimensionScheme:
    """Everything of every table retained, in one block."""
    tables = {}
    for config in table_configs(recipe.model):
        rows, dim = config.num_embeddings, config.embedding_dim
        tables[config.name] = TableScheme(
            name=config.name,
            collection="sparse_arch.embedding_bag_collection",
            num_embeddings=rows,
            embedding_dim=dim,
            pooling=config.pooling.value.lower(),
            feature_names=tuple(config.feature_names),
            is_weighted=False,
            routing=RowRouting(rows, 1, boundaries=torch.tensor([0, rows])),
            retained=torch.ones(1, dim, dtype=torch.bool),
            num_retained=rows * dim,
        )
    return MixedDimensionScheme(tables=tables)


def uniform(task: MethodTask) -> MethodResult:
    """Untrained uniform tables of the size."""
    count(task, "uniform")
    recipe = task.build(int(EMBEDDING_DIM / task.compression))
    return MethodResult(
        model=recipe.model,
        scheme=full_scheme(recipe),
        form="dense_fp32",
        extra_bytes=4,
        selection_loss=0.5,
        seconds=1.5,
        trials=task.trials or 2,
        seconds_of_trials=3.0,
        settings={"embedding_dim": EMBEDDING_DIM / task.compression},
    )


def modest(task: MethodTask) -> MethodResult:
    """Cannot go beyond a compression of 4."""
    if task.compression > 4:
        raise SizeNotMetError("compression: expected at most 4, got 8")
    return uniform(task)


def sleeper(task: MethodTask) -> MethodResult:
    """Says that it is there in OUT/calls, and never ends."""
    count(task, "sleeper")
    while True:
        time.sleep(0.1)


def reader(task: MethodTask) -> MethodResult:
    """Writes the labels of two epochs of every split, those that a search trains on, and its rules to OUT/CELL.json."""
    data = task.build(None).data
    seen = {
        name: [[batch.labels.tolist() for batch in getattr(data, name)] for _ in range(2)]
        for name in ("train", "validation", "selection", "test")
    }
    seen["search"] = [[batch.labels.tolist() for batch in task.for_search().build(None).data.train]]
    rules = {"patience": task.patience, "max_epochs": task.max_epochs, "trials": task.trials}
    name = task.folder.parent.name
    (out_of(task) / f"{name}.json").write_text(json.dumps({"seen": seen, "rules": rules}))
    return uniform(task)


def tries_two(task: MethodTask) -> MethodResult:
    """Two trials; while it makes the first one, a process that helps comes and goes, and finds the other."""

    def first() -> Candidate:
        if not task.helps and not (out_of(task) / "helped").exists():
            help_cell(task.folder.parent)
            (out_of(task) / "helped").write_text(" ".join(sorted(p.name for p in task.folder.glob("trials-*/?.json"))))
        return uniform_candidate(task, None)

    return best_of(task, {"own": first, "narrow": partial(uniform_candidate, task, EMBEDDING_DIM // 2)})


METHODS: dict[str, Method] = {
    "dense": uniform,
    "uniform": uniform,
    "dnis": learns_on_validation(partial(uniform)),
    "modest": modest,
    "sleeper": sleeper,
    "reader": reader,
    "tries-two": tries_two,
    "learner": learns_on_validation(partial(reader)),
}
