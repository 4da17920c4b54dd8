"""Uniform tables: every row of every table has the same embedding_dim, trained from scratch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rivals.forms import DEFAULT_FORM, PACKED, PRECISIONS
from benchmarks.rivals.methods.best_trial import best_of
from benchmarks.rivals.methods.method import (
    STEP_SHARE,
    MethodResult,
    MethodTask,
    SizeNotMetError,
    leaves_alone,
    served_in,
)
from benchmarks.rivals.methods.trained_scheme import Candidate, pruned_form, uniform_scheme_
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import describe
from dnis_torchrec.selection.shards import dense_parameters, table_configs

GRID_STEP = 4
"""Embedding dims of the grid are 4, 8, 12 and so on up to the recipe's own (Cheng, Shen, Huang,
2020: 4 to 64)."""

FUSED_MULTIPLE = 4
"""FBGEMM's fused kernels train tables of such embedding dims only: any other D is trained as the
first D columns of the next wider tables, which makes the same function of the ids."""
_INDEX_BYTES = 16
"""Row routing of a table that is one block: where it begins and ends."""


@leaves_alone
def dense(task: MethodTask) -> MethodResult:
    """The uncompressed model in float32: the recipe as it is, at every requested size the same."""
    return uniform_candidate(task, None).train(task)


def no_embeddings(task: MethodTask) -> MethodResult:
    """Trains the model with every embedding zero: it shows the worth of biases, first-order
    weights, dense features."""
    recipe = task.build(None)
    scheme = uniform_scheme_(recipe.model, dict.fromkeys(table_widths(recipe.model), 0))
    return Candidate(recipe=recipe, scheme=scheme).train(task)


@served_in(*PRECISIONS)
def uniform(task: MethodTask) -> MethodResult:
    """Uniform tables of the requested size, each row in the task's precision as FBGEMM stores it."""
    return uniform_candidate(task, largest_dim(task, "uniform")).train(task)


@served_in(*PRECISIONS)
def uniform_grid(task: MethodTask) -> MethodResult:
    """Grid search over uniform tables: every D of 4, 8, .. up to the recipe's own, the best that is
    within the budget."""
    _check_size(task, GRID_STEP, "uniform-grid", "use 'uniform'")
    dims = range(GRID_STEP, smallest_dim(task, task.dense_bytes()) + 1, GRID_STEP)
    return best_of(task, {f"D = {dim}": partial(uniform_candidate, task, dim) for dim in dims})


def largest_dim(task: MethodTask, method: str, *, is_cut: bool = False) -> int:
    """The largest embedding_dim of a recipe whose tables take the bytes of a task, in its
    precision."""
    own, probed = task.tables(), task.tables(FUSED_MULTIPLE)
    widest, budget = (max(table.embedding_dim for table in own), (1 + STEP_SHARE) * task.embedding_bytes())

    def fits(dim: int, tables: Sequence[EmbeddingBagConfig]) -> bool:
        is_narrower = all(t.embedding_dim <= table.embedding_dim for t, table in zip(tables, own, strict=True))
        return is_narrower and _bytes_at(dim, tables, task, is_cut=is_cut) <= budget

    def expected(dim: int) -> list[EmbeddingBagConfig]:
        """Tables that follow embedding_dim in proportion, or not at all: no model is built for
        them."""
        return [
            replace(table, embedding_dim=max(1, round(probe.embedding_dim * dim / FUSED_MULTIPLE)))
            if probe.embedding_dim != table.embedding_dim
            else table
            for table, probe in zip(own, probed, strict=True)
        ]

    step = PRECISIONS[task.precision].dim_multiple  # what lies between takes as much as the next multiple
    dims = range(step, widest + 1, step) or range(widest, widest + 1)
    index = max((i for i, dim in enumerate(dims) if fits(dim, expected(dim))), default=-1)
    while index >= 0 and not fits(dims[index], task.tables(dims[index])):
        index -= 1
    while index + 1 < len(dims) and fits(dims[index + 1], task.tables(dims[index + 1])):
        index += 1
    if index < 0:
        _check_size(task, dims[0], method, is_cut=is_cut)
    return dims[max(0, index)]


def uniform_bytes(tables: Sequence[EmbeddingBagConfig], precision: str, *, is_cut: bool) -> int:
    """Bytes of tables of which every row is stored, in the form that `uniform_form` says."""
    form, stored = uniform_form(tables, precision, is_cut=is_cut), PRECISIONS[precision]
    if form == PACKED.name:
        return sum(_packed_bytes(table, stored.bits) for table in tables)
    rows = sum(t.num_embeddings * stored.row_bytes(t.embedding_dim) for t in tables)
    return rows + sum(_INDEX_BYTES + 2 * t.embedding_dim for t in tables if form == DEFAULT_FORM)


def _packed_bytes(table: EmbeddingBagConfig, bits: int) -> int:
    """All of a table in one block."""
    rows, dim = table.num_embeddings, table.embedding_dim
    routing = RowRouting(rows, 1, boundaries=torch.tensor([0, rows]))
    return PACKED.bytes_of(torch.full((1, dim), bits), torch.tensor([rows]), routing)


def uniform_form(tables: Sequence[EmbeddingBagConfig], precision: str, *, is_cut: bool) -> str:
    """The form of tables of which every row is stored: FBGEMM's own rows where these fit, else one
    block of each table."""
    multiple = PRECISIONS[precision].dim_multiple
    fits = not is_cut and all(table.embedding_dim % multiple == 0 for table in tables)
    return f"dense_{precision}" if fits else pruned_form(precision)


def _bytes_at(dim: int, tables: Sequence[EmbeddingBagConfig], task: MethodTask, *, is_cut: bool) -> int:
    """Bytes of tables of some embedding_dim; those that no kernel trains are cut out of the next
    wider ones."""
    is_cut = is_cut or trainable_dim(dim) != dim
    return uniform_bytes(tables, task.precision, is_cut=is_cut)


def _check_size(task: MethodTask, narrowest: int, method: str, remedy: str = "", *, is_cut: bool = False) -> None:
    """Tables as narrow as a method has them have to be within the budget."""
    smallest = _bytes_at(narrowest, task.tables(narrowest), task, is_cut=is_cut)
    budget = task.embedding_bytes()
    if smallest > budget:
        requirement = f"at least {smallest}, the bytes of tables of embedding_dim {narrowest}"
        raise SizeNotMetError(describe(method, requirement, budget, remedy))


def smallest_dim(task: MethodTask, num_bytes: int) -> int:
    """The smallest embedding_dim of a recipe whose float32 tables take at least so many bytes."""

    def float_bytes(dim: int) -> int:
        return sum(4 * table.num_embeddings * table.embedding_dim for table in task.tables(dim))

    dims = range(1, max(table.embedding_dim for table in task.tables()) + 1)
    return dims[min(bisect.bisect_left(dims, num_bytes, key=float_bytes), len(dims) - 1)]


def dense_table_bytes(model: nn.Module) -> int:
    """Bytes of a plain model's tables in float32: the sum of 4 N D."""
    return 4 * dense_parameters(model)


def trainable_dim(embedding_dim: int) -> int:
    """The smallest embedding_dim, not below the given one, that every kernel trains."""
    return -(-embedding_dim // FUSED_MULTIPLE) * FUSED_MULTIPLE


def table_widths(model: nn.Module) -> dict[str, int]:
    """table -> embedding_dim of a plain model."""
    return {table.name: table.embedding_dim for table in table_configs(model)}


def uniform_candidate(task: MethodTask, embedding_dim: int | None) -> Candidate:
    """Uniform tables of one embedding_dim, untrained."""
    trained_dim = None if embedding_dim is None else trainable_dim(embedding_dim)
    recipe, tables = task.build(trained_dim), task.tables(embedding_dim)
    form = uniform_form(tables, task.precision, is_cut=embedding_dim != trained_dim)
    return Candidate(
        recipe=recipe,
        scheme=uniform_scheme_(recipe.model, {table.name: table.embedding_dim for table in tables}),
        form=form,
        precision=task.precision,
        embedding_dim=trained_dim,
        settings={} if embedding_dim is None else {"embedding_dim": embedding_dim},
        is_shared=True,
    )
