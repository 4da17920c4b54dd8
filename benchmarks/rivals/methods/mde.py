"""MDE: Mixed Dimension Embeddings, dims that follow a power of frequency, with projections to a
base dimension."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.rivals.forms import PRECISIONS
from benchmarks.rivals.methods.best_trial import best_of
from benchmarks.rivals.methods.method import MethodResult, MethodTask, SizeNotMetError, served_in
from benchmarks.rivals.methods.projected import ProjectedDims, project_
from benchmarks.rivals.methods.trained_scheme import (
    Candidate,
    columns_of_dims,
    dims_bytes,
    largest_within,
    prune_to_columns_,
    pruned_form,
    row_blocks,
)
from benchmarks.rivals.methods.uniform import smallest_dim, trainable_dim
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import describe
from dnis_torchrec.search.prune import Budget

ROUNDINGS = ("integer", "power of two")
TEMPERATURES = (0.1, 0.4, 0.7, 0.2, 0.5, 0.8, 0.3, 0.6)


@dataclass(frozen=True, kw_only=True)
class MdeSetting:
    """One trial's hyper-parameters."""

    temperature: float
    rounding: str

    def round(self, values: Tensor) -> Tensor:
        """Rounds positive numbers to int64, to at least 1."""
        at_least_one = values.clamp(min=1)
        rounded = at_least_one if self.rounding == "integer" else 2 ** at_least_one.log2().add(0.5).floor()
        return rounded.add(0.5).floor().long()

    def edges(self, largest: int) -> Tensor:
        """Returns the numbers at which rounding jumps, from 1 to beyond `largest`."""
        if self.rounding == "integer":
            return torch.arange(1, largest + 1, dtype=torch.float64) + 0.5
        return 2 ** (torch.arange(math.ceil(math.log2(largest)) + 1, dtype=torch.float64) + 0.5)


MDE_SETTINGS = tuple(
    MdeSetting(temperature=t, rounding=ROUNDINGS[(index + first) % 2])
    for first in range(2)
    for index, t in enumerate(TEMPERATURES)
)
"""The 16 settings of a full run, in an order whose beginnings are spread over temperatures and
roundings."""


@dataclass(frozen=True, kw_only=True)
class MdeDims(ProjectedDims):
    """The dims that a setting comes to, each in 1..D; the blocks have the tables' D at the base
    dimension."""

    setting: MdeSetting
    base_dim: int

    def table_bytes(self, budget: Budget) -> float:
        """Bytes of the tables, without their fixed index bytes."""
        return sum(float(budget.column_costs[table] @ dims.double()) for table, dims in self.dims.items())

    def projection_bytes(self) -> int:
        """Bytes of the projections."""
        return sum(4 * d * dim for d, dim in self.projection_shapes().values())


@served_in(*PRECISIONS)
def mde(task: MethodTask) -> MethodResult:
    """The best, on the selection split, of 16 settings: temperature .1 to .8, dims rounded both
    ways."""
    counts, blocks = row_blocks(task)
    largest = smallest_dim(task, task.dense_bytes())

    @functools.cache
    def widths(embedding_dim: int) -> dict[str, int]:
        return {table.name: table.embedding_dim for table in task.tables(embedding_dim)}

    def num_bytes(plan: MdeDims) -> int:
        return dims_bytes(plan.blocks, plan.dims, task.precision) + plan.projection_bytes()

    distinct: dict[str, MdeDims] = {}
    for setting in MDE_SETTINGS[: task.trials]:
        solved = functools.partial(solve, setting, blocks, largest_dim=largest, widths=widths)
        plan = largest_within(task, blocks, solved, num_bytes)
        distinct.setdefault(str([plan.base_dim, *(dims.tolist() for dims in plan.dims.values())]), plan)
    return best_of(task, {name: functools.partial(_candidate, task, plan, counts) for name, plan in distinct.items()})


def solve(
    setting: MdeSetting, blocks: RowBlocks, budget: Budget, largest_dim: int, widths: Callable[[int], Mapping[str, int]]
) -> MdeDims:
    """The largest dims of a setting within a budget."""
    shares = {table: share**setting.temperature for table, share in popularity(blocks).items()}

    def dims_at(scale: float) -> MdeDims:
        base = min(largest_dim, trainable_dim(int(setting.round(torch.tensor(scale, dtype=torch.float64)))))
        dims = {
            table: setting.round(shares[table] * (dim * scale / base)).clamp(max=dim)
            for table, dim in widths(base).items()
        }
        return MdeDims(setting=setting, base_dim=base, blocks=replace(blocks, embedding_dims=widths(base)), dims=dims)

    jumps = [setting.edges(largest_dim)]  # of the base dimension, then of every table's dims
    for table, dim in widths(largest_dim).items():
        positive = shares[table][shares[table] > 0] * (dim / largest_dim)
        jumps.append((setting.edges(dim).unsqueeze(1) / positive).flatten())
    scales = [1.0, *(torch.cat(jumps).unique() * (1 + 1e-12)).tolist()]  # just past each jump, so that it has happened
    affordable = bisect.bisect_right(scales, budget.amount, key=lambda scale: dims_at(scale).table_bytes(budget))
    for scale in reversed(scales[:affordable]):  # projections come and go as blocks reach the base: no order in them
        plan = dims_at(scale)
        if plan.table_bytes(budget) + plan.projection_bytes() <= budget.amount:
            return plan
    smallest = dims_at(1.0).table_bytes(budget) + dims_at(1.0).projection_bytes()
    requirement = f"at least {smallest:.0f} bytes for one dimension of every block"
    raise SizeNotMetError(describe("MDE", requirement, f"{budget.amount:.0f}", "take fewer blocks"))


def popularity(blocks: RowBlocks) -> dict[str, Tensor]:
    """Mean occurrences of the seen rows of each block, over those of the most popular block."""
    rates = {}
    for dim in blocks.alpha_shapes:
        seen = blocks.per_alpha_row(dim, blocks.seen_rows).clamp(min=1)
        rates[dim] = blocks.per_alpha_row(dim, blocks.occurrences) / seen
    most = max(float(rate.max()) for rate in rates.values())
    return {
        table: (rates[dim] / most)[blocks.first_alpha_row(table) :][: blocks.routings[table].num_blocks]
        for table, dim in blocks.embedding_dims.items()
    }


def _candidate(task: MethodTask, plan: MdeDims, counts: FrequencyCounts) -> Candidate:
    recipe = task.build(plan.base_dim)
    torch.manual_seed(task.seed)
    project_(recipe.model, plan)
    projections = tuple(f"projections.matrices.{name}" for name in plan.projection_shapes())
    return Candidate(
        # Projections are part of the embeddings: a network that overfits, and learns slowly for
        # that, is not for them.
        recipe=replace(recipe, row_weights=(*recipe.row_weights, *projections)),
        scheme=prune_to_columns_(recipe.model, plan.blocks, counts, columns_of_dims(plan.blocks, plan.dims)),
        form=pruned_form(task.precision),
        precision=task.precision,
        embedding_dim=plan.base_dim,
        extra_bytes=plan.projection_bytes(),
        settings={
            "temperature": plan.setting.temperature,
            "rounding": plan.setting.rounding,
            "embedding_dim": plan.base_dim,
        },
    )
