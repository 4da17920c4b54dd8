"""A cell, one method at one size under one seed, and how it comes to its line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rivals.methods import METHODS
from benchmarks.rivals.streams import train_on_validation
from benchmarks.rivals.task import Recipes, Served, Task, UnmetError, loss_on_selection, plain
from dnis_torchrec.checks import versions
from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import process_group


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one size under one seed."""

    recipe: str
    data: Path | None
    method: str
    size: float | None
    seed: int
    with_validation: bool
    rules: Mapping[str, Any]
    precisions: tuple[str, ...]
    weights: Path

    @property
    def key(self) -> tuple[object, ...]:
        """By which a line is told from others."""
        return self.recipe, self.method, self.size, self.seed, self.with_validation

    def task(self, device: torch.device) -> Task:
        """The task of the method."""
        build = Recipes(lambda dim: build_recipe(self.recipe, self.data, seed=self.seed, embedding_dim=dim))
        suffix = "+validation" if self.with_validation else ""
        return Task(
            build=(lambda dim: train_on_validation(build(dim))) if self.with_validation else build,
            build_for_search=build,
            size=self.size or 1.0,
            seed=self.seed,
            device=device,
            cache=self.weights / f"seed{self.seed}{suffix}.safetensors",
            **self.rules,
        )


def run_cell(cell: Cell) -> dict[str, Any]:
    """The line of a cell."""
    torch.set_num_threads(1)
    head = {"recipe": cell.recipe, "method": cell.method, "size": cell.size, "seed": cell.seed}
    head |= {"with_validation": cell.with_validation, **cell.rules, "versions": versions()}
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
    seconds = time.monotonic() - start
    whole = TrainTask(served.model, recipe.task)
    metrics = evaluate(whole, recipe.data.test, recipe.task, task.device)
    return {
        "precision": precision,
        "bytes": served.num_bytes,
        "compression": task.dense_bytes / max(1, served.num_bytes),
        "metrics": metrics,
        "selection_loss": loss,
        "settings": served.settings,
        "trials": trials,
        "seconds": seconds,
    }
