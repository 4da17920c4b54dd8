"""Uniform tables: rows of one width, in float32 or as FBGEMM stores them in int8 or int4."""

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rivals.task import Served, Task, UnmetError, best_of, counts_of, plain, shards_of, train
from dnis_torchrec.allocation.axes import rotate_, rotation_groups, with_axes_
from dnis_torchrec.cli.judge import rounded_rows, table_bytes
from dnis_torchrec.selection.shards import table_configs

BITS = {"fp32": 32, "int8": 8, "int4": 4}
ROW_PRECISIONS = tuple(BITS)
TRAINED_MULTIPLE = 4
"""FBGEMM's fused kernels train such widths only: any other D is the first columns of a wider one."""
GRID_STEP = 4
"""Embedding dims of the grid are 4, 8, 12 and so on (Cheng, Shen, Huang, 2020: 4 to 64)."""


def rows_bytes(
    tables: list[EmbeddingBagConfig], precision: str, columns: int | None = None, leave_alone: Collection[str] = ()
) -> int:
    """Bytes of the first columns of all rows."""
    if BITS[precision] == 32:
        widths = [min(t.embedding_dim, columns or t.embedding_dim) for t in tables]
        return sum(4 * t.num_embeddings * d for t, d in zip(tables, widths, strict=True))
    return table_bytes(tables, BITS[precision], columns, leave_alone)


@torch.no_grad()
def round_rows_(
    model: nn.Module, precision: str, columns: int | None = None, leave_alone: Collection[str] = ()
) -> None:
    """Makes tables hold what their rows are served as: the first columns rounded, others zero."""
    for shard in shards_of(model):
        if shard.table not in leave_alone:
            shard.weight[:, :columns] = in_precision(shard.weight[:, :columns], precision)
            cut_(shard.weight, columns)


def in_precision(weight: Tensor, precision: str) -> Tensor:
    """Rows as kernels read them."""
    return weight if BITS[precision] == 32 else rounded_rows(weight, BITS[precision])


def cut_(weight: Tensor, columns: int | None) -> None:
    """Zeroes all but the first columns. What starts at zero becomes the smallest float: zero means
    dropped."""
    kept = weight[:, :columns]
    kept.masked_fill_(kept == 0, torch.finfo(weight.dtype).tiny)
    weight[:, columns or weight.shape[1] :] = 0


def dense(task: Task) -> Served:
    """The uncompressed model: the recipe as it is."""
    return Served(model=plain(task)[0], num_bytes=task.dense_bytes)


def no_embeddings(task: Task) -> Served:
    """Every embedding zero: the worth of biases, first-order weights, dense features."""
    recipe = task.build(None)
    for shard in shards_of(recipe.model):
        shard.weight.zero_()
    return Served(model=train(task, recipe, masks=True)[0], num_bytes=0)


def largest_dim(task: Task, *, follows: bool = True) -> int:
    """The largest embedding_dim within a task's bytes, of a recipe that follows it, or of its own tables, cut."""
    multiple = max(1, 16 // BITS[task.precision])
    dims = list(range(multiple, task.dim + 1, multiple))

    def num_bytes(dim: int) -> int:
        return rows_bytes(task.tables(dim if follows else None), task.precision, dim)

    number = bisect_right(dims, task.num_bytes, key=num_bytes)
    if not number:
        raise UnmetError(f"no D in {task.precision} comes to {task.num_bytes} bytes")
    return dims[number - 1]


def uniform_at(task: Task, dim: int) -> Served:
    """Tables of one width, from scratch."""
    wide = -(-dim // TRAINED_MULTIPLE) * TRAINED_MULTIPLE
    recipe, columns = task.build(wide), dim if wide != dim else None
    if columns:
        for shard in shards_of(recipe.model):
            cut_(shard.weight, columns)
    model, _ = train(task, recipe, masks=columns is not None)
    round_rows_(model, task.precision, columns)
    num_bytes = rows_bytes(task.tables(dim), task.precision, dim)
    return Served(model=model, num_bytes=num_bytes, settings={"embedding_dim": dim})


def uniform(task: Task) -> Served:
    """The widest uniform tables of the size, from scratch."""
    return uniform_at(task, largest_dim(task))


def uniform_grid(task: Task) -> Served:
    """The best of D = 4, 8, .. within the size."""
    dims = range(GRID_STEP, task.dim + 1, GRID_STEP)
    fits = [d for d in dims if rows_bytes(task.tables(d), task.precision) <= task.num_bytes]
    return best_of(task, [partial(uniform_at, task, dim) for dim in fits])


def whole_rows(task: Task) -> Served:
    """The uncompressed model with all of its rows in the task's precision; nothing is trained."""
    model, alone = plain(task)[0], task.build(None).leave_alone
    round_rows_(model, task.precision, leave_alone=alone)
    return Served(model=model, num_bytes=rows_bytes(task.tables(), task.precision, None, alone))


def _turn(task: Task) -> nn.Module:
    """The uncompressed model with its tables in their principal axes."""
    model, _ = plain(task)
    with_axes_(model)
    axes = {table for group in rotation_groups(model) for table in group.tables}
    others = {table.name for table in table_configs(model)} - axes
    if others:
        raise UnmetError(f"tables may not be turned: {', '.join(sorted(others))}")
    rotate_(model, counts_of(task))
    return model


def cut_axes(task: Task) -> Served:
    """The first principal axes of all tables; nothing is trained."""
    dim = largest_dim(task, follows=False)
    model = _turn(task)
    round_rows_(model, task.precision, dim)
    num_bytes = rows_bytes(task.tables(), task.precision, dim)
    return Served(model=model, num_bytes=num_bytes, settings={"embedding_dim": dim})


def low_rank(task: Task) -> Served:
    """The same, trained on as long as that helps."""
    dim = largest_dim(task, follows=False)
    model = _turn(task)
    for shard in shards_of(model):
        cut_(shard.weight, dim)
    recipe = replace(task.build(None), model=model)
    model, training = train(task, recipe, masks=True, starts_trained=True)
    round_rows_(model, task.precision, dim)
    num_bytes = rows_bytes(task.tables(), task.precision, dim)
    settings = {"embedding_dim": dim, "epochs": training.best_epoch + 1}
    return Served(model=model, num_bytes=num_bytes, settings=settings)
