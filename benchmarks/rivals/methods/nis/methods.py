"""NIS-SE and NIS-ME as methods of the comparison: search, take the most probable choice, train it
from scratch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from benchmarks.rivals.forms import PRECISIONS
from benchmarks.rivals.methods.method import MethodResult, MethodTask, SizeNotMetError, served_in
from benchmarks.rivals.methods.nis.affordable import most_probable_within, trim
from benchmarks.rivals.methods.nis.controller import Controller
from benchmarks.rivals.methods.nis.grid import Grid, multi_size_grid, single_size_grid
from benchmarks.rivals.methods.nis.supernet import train_controller
from benchmarks.rivals.methods.trained_scheme import (
    Candidate,
    byte_budget,
    dims_bytes,
    prune_to_columns_,
    pruned_form,
    row_blocks,
)
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.search.prune import Budget
from dnis_torchrec.training.shard import check_pooling

WARM_UP_EPOCHS, EPOCHS = 2, 12
"""Epochs of the supernet's weights alone, and of weights and controller."""
NUM_DIMENSION_BLOCKS = 4
"""T, widths that a table's controllers choose from."""
TRIMMED_SHARE = 0.01
"""Share of the budget by which a choice may overshoot it before columns are taken off."""


@served_in(*PRECISIONS)
def nis_se(task: MethodTask) -> MethodResult:
    """Neural Input Search with single-size embeddings: each table keeps its v most frequent blocks
    at one width."""
    return _run(task, lambda *stages: single_size_grid(*stages, num_dimension_blocks=NUM_DIMENSION_BLOCKS))


@served_in(*PRECISIONS)
def nis_me(task: MethodTask) -> MethodResult:
    """Neural Input Search with multi-size embeddings: each dimension block is kept for its own v
    most frequent blocks."""
    return _run(task, lambda *stages: multi_size_grid(*stages, num_dimension_blocks=NUM_DIMENSION_BLOCKS))


def _run(task: MethodTask, make_grid: Callable[[RowBlocks, Budget], Grid]) -> MethodResult:
    """Never trains weights on validation."""
    recipe, embedding_bytes = task.for_search().build(None), task.embedding_bytes()
    check_pooling(recipe.model)  # the supernet divides sums itself, and what is trained afterwards does not
    counts, blocks = row_blocks(task, are_global=False)
    budget = byte_budget(task, blocks)
    grid = make_grid(blocks, replace(budget, amount=budget.amount * _saving(task)))
    _check_size(grid, grid.budget.amount + embedding_bytes - budget.amount)
    started = time.monotonic()
    controller = train_controller(
        recipe,
        grid,
        round(embedding_bytes * _saving(task)),
        warm_up_epochs=WARM_UP_EPOCHS,
        epochs=max(1, min(EPOCHS, task.max_epochs - WARM_UP_EPOCHS)),
        device=task.device,
        seed=task.seed,
    )
    retained, how = chosen(grid, controller)
    retained = _within(task, grid, retained)
    seconds = time.monotonic() - started
    final = task.build(None)
    scheme = prune_to_columns_(final.model, blocks, counts, retained)
    dims = {f"dims of {table}": " ".join(map(str, mask.sum(1).tolist())) for table, mask in retained.items()}
    form, settings = pruned_form(task.precision), dims | {"choice": how}
    candidate = Candidate(recipe=final, scheme=scheme, form=form, precision=task.precision, settings=settings)
    result = candidate.train(task)
    seconds += result.seconds
    return replace(result, seconds=seconds, seconds_of_trials=seconds)


def _saving(task: MethodTask) -> float:
    """Float32 bytes that a byte of the task's precision pays for, in rows as wide as a dimension
    block."""
    stored = PRECISIONS[task.precision]
    width = max(1, max(table.embedding_dim for table in task.tables()) // NUM_DIMENSION_BLOCKS)
    return 4 * width / stored.row_bytes(stored.stored_width(width))


def _within(task: MethodTask, grid: Grid, retained: dict[str, Tensor]) -> dict[str, Tensor]:
    """A choice with columns taken off, as `trim` does, where scales of narrow rows have led it over
    the bytes."""

    def num_bytes() -> int:
        return dims_bytes(grid.blocks, {table: mask.sum(1) for table, mask in retained.items()}, task.precision)

    while num_bytes() > task.embedding_bytes():
        retained = trim(retained, grid.budget.column_costs, 1.0)
        if not any(bool(mask.any()) for mask in retained.values()):
            requirement = "bytes for one column of a block of the choice"
            raise SizeNotMetError(describe("embedding_bytes", requirement, task.embedding_bytes()))
    return retained


def _check_size(grid: Grid, embedding_bytes: float) -> None:
    smallest = embedding_bytes - grid.budget.amount + grid.smallest_cost
    if smallest > embedding_bytes:
        requirement = f"at least {smallest:.0f} bytes for NIS"
        received = f"{embedding_bytes:.0f}"
        raise SizeNotMetError(describe("embedding_bytes", requirement, received, "ask for a lower compression"))


def chosen(grid: Grid, controller: Controller) -> tuple[dict[str, Tensor], str]:
    """Brings the choice of the controller within the budget."""
    amount = grid.budget.amount
    picked, how = controller.most_probable(), "most probable"
    if not 0 < grid.cost(picked) <= amount * (1 + TRIMMED_SHARE):
        picked, how = (_most_probable_within(grid, controller, amount * (1 + TRIMMED_SHARE)), "most probable in budget")
    if grid.cost(picked) <= amount:
        return grid.retained(picked), how
    trimmed = trim(grid.retained(picked), grid.budget.column_costs, grid.cost(picked) - amount)
    if any(bool(mask.any()) for mask in trimmed.values()):
        return trimmed, f"{how}, trimmed"
    return grid.retained(_most_probable_within(grid, controller, amount)), "most probable in budget"


def _most_probable_within(grid: Grid, controller: Controller, amount: float) -> list[int]:
    log_p = controller.log_probabilities()
    of_choices = [row[: len(choice.costs)] for row, choice in zip(log_p, grid.choices, strict=True)]
    return most_probable_within(of_choices, [choice.costs for choice in grid.choices], amount)
