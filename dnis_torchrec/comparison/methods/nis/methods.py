"""NIS-SE and NIS-ME as methods of the comparison: search, take the most probable choice, train it from scratch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.comparison.methods.method import MethodResult, MethodTask, SizeNotMetError
from dnis_torchrec.comparison.methods.nis.affordable import most_probable_within, trim
from dnis_torchrec.comparison.methods.nis.controller import Controller
from dnis_torchrec.comparison.methods.nis.grid import Grid, multi_size_grid, single_size_grid
from dnis_torchrec.comparison.methods.nis.supernet import train_controller
from dnis_torchrec.comparison.methods.trained_scheme import Candidate, byte_budget, prune_to_columns_, row_blocks
from dnis_torchrec.search.budget import Budget, Size
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.training.sharded import check_pooling

NUM_DIMENSION_BLOCKS = 4
"""T, widths that a table's controllers choose from."""
TRIMMED_SHARE = 0.01
"""Share of the budget by which a choice may overshoot it before columns are taken off. Half the width of all tables
costs half their bytes and some for the index: without it, that choice would be out of reach at compression 2."""


def nis_se(task: MethodTask) -> MethodResult:
    """Neural Input Search with single-size embeddings: each table keeps its v most frequent blocks at one width.

    Args:
        task: recipe and size.

    Returns:
        The chosen scheme, trained from scratch to its own best epoch. `seconds` counts the search too.

    Raises:
        SizeNotMetError: if no choice that retains anything takes as few bytes; before training.
        ValueError: for a recipe without a validation stream.
        NonFiniteError: if a training loss is NaN or infinite.
    """
    return _run(task, lambda *stages: single_size_grid(*stages, num_dimension_blocks=NUM_DIMENSION_BLOCKS))


def nis_me(task: MethodTask) -> MethodResult:
    """Neural Input Search with multi-size embeddings: each dimension block is kept for its own v most frequent blocks.

    NOTE[DIFF]: the paper projects every width to a common one with learned matrices. Here absent dimensions are zero,
    as in every other scheme. A layer that reads the tables does what a projection would; in dot products, as of MF and
    FM, nothing does.

    Args:
        task: recipe and size.

    Returns:
        The chosen scheme, trained from scratch to its own best epoch. `seconds` counts the search too.

    Raises:
        SizeNotMetError: if no choice that retains anything takes as few bytes; before training.
        ValueError: for a recipe without a validation stream.
        NonFiniteError: if a training loss is NaN or infinite.
    """
    return _run(task, lambda *stages: multi_size_grid(*stages, num_dimension_blocks=NUM_DIMENSION_BLOCKS))


def _run(task: MethodTask, make_grid: Callable[[RowBlocks, Budget], Grid]) -> MethodResult:
    """The search lasts as long as the warm-up and the ramp of `dnis` would; it never trains weights on validation."""
    recipe, embedding_bytes = task.for_search().build(None), task.embedding_bytes()
    check_pooling(recipe.model)  # the supernet divides sums itself, and what is trained afterwards does not
    counts, blocks = row_blocks(task, scope="table")
    grid = make_grid(blocks, byte_budget(task, blocks))
    _check_size(grid, embedding_bytes)
    epochs = SearchConfig.of(recipe, Size(embedding_bytes=embedding_bytes)).within(task.max_epochs)
    started = time.monotonic()
    controller = train_controller(
        recipe,
        grid,
        embedding_bytes,
        warm_up_epochs=epochs.warm_up_epochs,
        ramp_epochs=epochs.ramp_epochs,
        device=task.device,
        seed=task.seed,
    )
    retained, how = chosen(grid, controller)
    seconds = time.monotonic() - started
    final = task.build(None)
    scheme = prune_to_columns_(final.model, blocks, counts, retained)
    dims = {f"dims of {table}": " ".join(map(str, mask.sum(1).tolist())) for table, mask in retained.items()}
    result = Candidate(recipe=final, scheme=scheme, settings=dims | {"choice": how}).train(task)
    seconds += result.seconds
    return replace(result, seconds=seconds, seconds_of_trials=seconds)


def _check_size(grid: Grid, embedding_bytes: int) -> None:
    smallest = embedding_bytes - grid.budget.amount + grid.smallest_cost
    if smallest > embedding_bytes:
        requirement = f"at least {smallest:.0f} bytes for NIS"
        raise SizeNotMetError(describe("embedding_bytes", requirement, embedding_bytes, "ask for a lower compression"))


def chosen(grid: Grid, controller: Controller) -> tuple[dict[str, Tensor], str]:
    """Brings the choice of the controller within the budget.

    It takes the most probable option of each choice, if these retain anything and overshoot the budget by at most
    `TRIMMED_SHARE`. Else it takes the most probable combination of which that is true. It then drops single columns,
    until the rest is within the budget. Bytes left over are not spent: the reward pays nothing for them.

    Args:
        grid: the choices, of which some are within the budget.
        controller: after the search.

    Returns:
        table -> ``(S, D)`` bool, and how it came about, in words.
    """
    amount = grid.budget.amount
    picked, how = controller.most_probable(), "most probable"
    if not 0 < grid.cost(picked) <= amount * (1 + TRIMMED_SHARE):
        picked, how = _most_probable_within(grid, controller, amount * (1 + TRIMMED_SHARE)), "most probable in budget"
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
