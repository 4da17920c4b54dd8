"""The grid of NIS: vocabulary blocks x dimension blocks of every table, and the choices a
controller makes on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check
from dnis_torchrec.search.prune import Budget
from dnis_torchrec.selection.alpha import Alpha


@dataclass(frozen=True, eq=False)
class Choice:
    """One decision: which of its options a table follows. Option 0 keeps nothing."""

    table: str
    options: Tensor
    costs: Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """All choices of a model. What the choices of one table retain adds up, and they never retain
    the same value twice."""

    blocks: RowBlocks
    budget: Budget
    choices: tuple[Choice, ...]

    @property
    def smallest_cost(self) -> float:
        """Cost of the smallest combination that retains anything at all."""
        costs = torch.cat([choice.costs for choice in self.choices])
        return float(costs[costs > 0].min())

    def cost(self, picked: Sequence[int]) -> float:
        """Returns how much of the budget a combination of options takes."""
        return sum(float(choice.costs[option]) for choice, option in zip(self.choices, picked, strict=True))

    def retained(self, picked: Sequence[int]) -> dict[str, Tensor]:
        """table -> ``(S, D)`` bool: the columns of every block that a combination retains."""
        masks: dict[str, Tensor] = {}
        for choice, option in zip(self.choices, picked, strict=True):
            mask = choice.options[option]
            masks[choice.table] = masks[choice.table] | mask if choice.table in masks else mask
        return masks

    @torch.no_grad()
    def select_(self, alpha: Alpha, picked: Sequence[int]) -> None:
        """Makes a prepared model compute with the columns that a combination retains: alpha becomes
        their mask."""
        for table, mask in self.retained(picked).items():
            first = self.blocks.first_alpha_row(table)
            alpha.of(self.blocks.embedding_dims[table])[first : first + len(mask)].copy_(mask)


def single_size_grid(blocks: RowBlocks, budget: Budget, *, num_dimension_blocks: int) -> Grid:
    """NIS-SE: one choice per table, of ``S * T + 1`` options: nothing, or v vocabulary x t
    dimension blocks."""
    choices = []
    for table, cuts in _dimension_cuts(blocks, num_dimension_blocks).items():
        num_blocks, num_parts = blocks.routings[table].num_blocks, len(cuts) - 1
        options = torch.zeros(num_blocks * num_parts + 1, num_blocks, cuts[-1], dtype=torch.bool)
        for rows in range(1, num_blocks + 1):
            for parts in range(1, num_parts + 1):
                options[1 + (rows - 1) * num_parts + parts - 1, :rows, : cuts[parts]] = True
        choices.append(_choice(blocks, budget, table, options))
    return Grid(blocks, budget, tuple(choices))


def multi_size_grid(blocks: RowBlocks, budget: Budget, *, num_dimension_blocks: int) -> Grid:
    """NIS-ME: one choice per table and dimension block, of ``S + 1`` options; option v keeps v
    vocabulary blocks."""
    choices = []
    for table, cuts in _dimension_cuts(blocks, num_dimension_blocks).items():
        num_blocks = blocks.routings[table].num_blocks
        for start, end in pairwise(cuts):
            options = torch.zeros(num_blocks + 1, num_blocks, cuts[-1], dtype=torch.bool)
            for rows in range(1, num_blocks + 1):
                options[rows, :rows, start:end] = True
            choices.append(_choice(blocks, budget, table, options))
    return Grid(blocks, budget, tuple(choices))


def _dimension_cuts(blocks: RowBlocks, num_dimension_blocks: int) -> dict[str, list[int]]:
    """table -> columns at which a dimension block begins, and D; widths differ by one at most."""
    check(num_dimension_blocks >= 1, "num_dimension_blocks", "at least 1", num_dimension_blocks)
    cuts = {}
    for table, dim in blocks.embedding_dims.items():
        num_parts = min(num_dimension_blocks, dim)
        cuts[table] = [part * dim // num_parts for part in range(num_parts + 1)]
    return cuts


def _choice(blocks: RowBlocks, budget: Budget, table: str, options: Tensor) -> Choice:
    options &= (blocks.seen_rows[table] > 0).view(1, -1, 1)
    return Choice(table, options, options.sum(2).double() @ budget.column_costs[table])
