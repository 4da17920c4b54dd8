"""A cell, one method at one size under one seed, and how it comes to its line."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.gains import with_gains
from benchmarks.rivals.methods import METHODS
from benchmarks.rivals.streams import shuffle_ids
from benchmarks.rivals.task import Recipes, Served, Task, UnmetError, loss_on_selection, plain
from dnis_torchrec.checks import versions
from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import process_group

SORTED, SHUFFLED = "sorted", "shuffled"
"""Ids as the recipe has them, most often by falling frequency; and in no order."""
KEY = ("recipe", "embedding_dim", "ids", "method", "size", "seed", "with_validation", "gains")
"""Names by which a line is told from others."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one size under one seed."""

    recipe: str
    data: Path | None
    method: str
    size: float | None
    seed: int
    with_validation: bool = False
    gains: bool = False
    ids: str = SORTED
    embedding_dim: int | None = None
    rules: Mapping[str, Any]
    precisions: tuple[str, ...]
    weights: Path

    @property
    def key(self) -> tuple[object, ...]:
        """By which a line is told from others."""
        return tuple(getattr(self, name) for name in KEY)

    def task(self, device: torch.device) -> Task:
        """The task of the method."""
        recipes = Recipes(
            lambda dim: build_recipe(self.recipe, self.data, seed=self.seed, embedding_dim=dim or self.embedding_dim)
        )
        is_sorted = self.ids == SORTED
        names = [f"{self.recipe.replace(':', '.')}", f"{self.embedding_dim or ''}", "" if is_sorted else SHUFFLED]
        file = f"seed{self.seed}{'+validation' * self.with_validation}.safetensors"
        return Task(
            build=recipes if is_sorted else lambda dim: shuffle_ids(recipes(dim), self.seed),
            with_validation=self.with_validation,
            size=self.size or 1.0,
            seed=self.seed,
            device=device,
            cache=self.weights / "-".join(filter(None, names)) / file,
            **self.rules,
        )


def run_cell(cell: Cell) -> dict[str, Any]:
    """The line of a cell."""
    torch.set_num_threads(1)
    head = {name: getattr(cell, name) for name in KEY} | {**cell.rules, "versions": versions()}
    with process_group() as device:
        task = cell.task(device)
        try:
            return head | measure(cell, task)
        except UnmetError as error:
            return head | {"reason": str(error)}


def measure(cell: Cell, task: Task) -> dict[str, Any]:
    """Runs a method in every precision, and measures the best on the test split."""
    method, recipe = METHODS[cell.method], task.build(None)
    if recipe.leave_alone and not method.leaves:
        raise UnmetError(f"tables cannot be left alone: {', '.join(recipe.leave_alone)}")
    plain(task)
    start, trials, reasons = time.monotonic(), 0, []
    best: tuple[float, str, Served] | None = None
    names = tuple(p for p in cell.precisions if p in method.precisions) or method.precisions
    for precision in names:
        torch.manual_seed(task.seed)
        try:
            served = method.run(replace(task, precision=precision))
        except UnmetError as error:
            reasons.append(f"{precision}: {error}")
            continue
        trials += served.trials
        loss = loss_on_selection(task, served.model)
        if best is None or loss < best[0]:
            best = loss, precision, served
    if best is None:
        raise UnmetError("; ".join(reasons))
    loss, precision, served = best
    if cell.gains:
        served = with_gains(task, served)
        loss = loss_on_selection(task, served.model)
    seconds = time.monotonic() - start
    whole = TrainTask(served.model, recipe.task)
    metrics = evaluate(whole, recipe.data.test, recipe.task, task.device)
    return {
        "split": "time" if recipe.data.is_by_time else "random",
        "precision": precision,
        "bytes": served.num_bytes,
        "compression": task.dense_bytes / max(1, served.num_bytes),
        "metrics": metrics,
        "selection_loss": loss,
        "settings": served.settings,
        "trials": trials,
        "seconds": seconds,
    }
