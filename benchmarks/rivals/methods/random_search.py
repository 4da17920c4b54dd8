"""Random search: random descending dimension sequences over the blocks of the search, each trained
from scratch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.rivals.forms import PRECISIONS
from benchmarks.rivals.methods.best_trial import best_of
from benchmarks.rivals.methods.method import MethodResult, MethodTask, SizeNotMetError, served_in
from benchmarks.rivals.methods.trained_scheme import (
    Candidate,
    columns_of_dims,
    dims_bytes,
    largest_within,
    prune_to_columns_,
    pruned_form,
    row_blocks,
)
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.search.prune import Budget

NUM_TRIALS = 16


@served_in(*PRECISIONS)
def random_search(task: MethodTask) -> MethodResult:
    """The best, on the selection split, of 16 (or `MethodTask.trials`) random sequences within the
    budget."""
    counts, blocks = row_blocks(task)
    generator = torch.Generator().manual_seed(task.seed)
    drawn = [_drawn(task, blocks, generator) for _ in range(task.trials or NUM_TRIALS)]
    distinct = {str([dims.tolist() for dims in sequence.values()]): sequence for sequence in drawn}

    def candidate(sequence: dict[str, Tensor]) -> Candidate:
        recipe = task.build(None)
        scheme = prune_to_columns_(recipe.model, blocks, counts, columns_of_dims(blocks, sequence))
        settings = {f"dims of {table}": " ".join(map(str, dims.tolist())) for table, dims in sequence.items()}
        form = pruned_form(task.precision)
        return Candidate(recipe=recipe, scheme=scheme, form=form, precision=task.precision, settings=settings)

    return best_of(task, {name: partial(candidate, sequence) for name, sequence in distinct.items()})


def _drawn(task: MethodTask, blocks: RowBlocks, generator: torch.Generator) -> dict[str, Tensor]:
    """A sequence of the next random heights, as high as the bytes allow."""
    state = generator.get_state()

    def of_the_same_heights(budget: Budget) -> dict[str, Tensor]:
        generator.set_state(state)
        return random_dims(blocks, budget, generator)

    num_bytes = partial(dims_bytes, blocks, precision=task.precision)
    return largest_within(task, blocks, of_the_same_heights, num_bytes)


def random_dims(blocks: RowBlocks, budget: Budget, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws dims that fall from block to block and use up a budget."""
    costs = {dim: blocks.per_alpha_row(dim, budget.column_costs) for dim in blocks.alpha_shapes}
    reached, prices = ({}, {})  # the factor at which each dimension of each block is reached, and its cost; both (A, D)
    for dim, cost in costs.items():
        heights = 1 - torch.rand(len(cost), generator=generator, dtype=torch.float64)
        falling = [part.sort(descending=True).values for part in heights.tensor_split(_first_rows(blocks, dim)[1:])]
        reached[dim] = torch.arange(1, dim + 1) / (torch.cat(falling).unsqueeze(1) * dim)
        prices[dim] = cost.unsqueeze(1).expand_as(reached[dim])
    order = torch.argsort(torch.cat([factor.flatten() for factor in reached.values()]), stable=True)
    paid = torch.cat([price.flatten() for price in prices.values()])[order].cumsum(0)
    bought = torch.zeros(len(order), dtype=torch.bool)
    bought[order[: int((paid <= budget.amount).sum())]] = True
    if not bool(bought.any()):
        requirement = f"at least {float(paid[0]):.0f} bytes for one dimension of the first block"
        raise SizeNotMetError(describe("random search", requirement, f"{budget.amount:.0f}"))
    per_dim = bought.split([factor.numel() for factor in reached.values()])
    dims = {dim: part.view_as(reached[dim]).sum(dim=1) for dim, part in zip(reached, per_dim, strict=True)}
    return {
        table: dims[dim][blocks.first_alpha_row(table) :][: blocks.routings[table].num_blocks]
        for table, dim in blocks.embedding_dims.items()
    }


def _first_rows(blocks: RowBlocks, embedding_dim: int) -> list[int]:
    """The rows of alpha at which a sequence begins, rising from 0."""
    tables = [table for table, dim in blocks.embedding_dims.items() if dim == embedding_dim]
    return sorted({blocks.first_alpha_row(table) for table in tables})
