"""Uniform tables: every row of every table has the same embedding_dim, trained from scratch."""

from __future__ import annotations

import bisect
from functools import partial

from torch import nn

from dnis_torchrec.checks import describe
from dnis_torchrec.comparison.methods.best_trial import best_of
from dnis_torchrec.comparison.methods.method import MethodResult, MethodTask, SizeNotMetError
from dnis_torchrec.comparison.methods.trained_scheme import Candidate, uniform_scheme_
from dnis_torchrec.soft_selection.table_shards import dense_parameters, table_configs

GRID_STEP = 4
"""Embedding dims of the grid are 4, 8, 12 and so on up to the recipe's own (Cheng, Shen, Huang, 2020: 4 to 64)."""

FUSED_MULTIPLE = 4
"""FBGEMM's fused kernels train tables of such embedding dims only: any other D is trained as the first D columns of the
next wider tables, which makes the same function of the ids."""


def dense(task: MethodTask) -> MethodResult:
    """The uncompressed model: the recipe as it is, at every requested size the same.

    Args:
        task: recipe to train; its `compression` is not looked at.
    """
    return uniform_candidate(task, None).train(task)


def no_embeddings(task: MethodTask) -> MethodResult:
    """Trains the model with every embedding zero: it shows the worth of biases, first-order weights, dense features.

    A data set on which this is as good as the uncompressed model says nothing about embeddings.

    Args:
        task: recipe to train; its `compression` is not looked at.
    """
    recipe = task.build(None)
    scheme = uniform_scheme_(recipe.model, dict.fromkeys(table_widths(recipe.model), 0))
    return Candidate(recipe=recipe, scheme=scheme).train(task)


def uniform(task: MethodTask) -> MethodResult:
    """Uniform tables of the requested size.

    The embedding_dim is the smallest whose float32 tables take AT LEAST the budget: rounded up, unlike every
    other method's size but `low-rank`'s, so that this competitor never has fewer bytes than the search that it is held
    against.

    Args:
        task: recipe and size.

    Raises:
        SizeNotMetError: if even tables of embedding_dim 1 take more than the budget; before training.
    """
    return uniform_candidate(task, rounded_up_dim(task, "uniform")).train(task)


def uniform_grid(task: MethodTask) -> MethodResult:
    """Grid search over uniform tables: every D of 4, 8, .. up to the recipe's own, the best that is within the budget.

    All of them are trained and count as trials, whatever the budget: with compression 1 the result is the best
    uniform dimension of any size. `MethodTask.trials` does not shorten the grid.

    Args:
        task: recipe and size.

    Raises:
        SizeNotMetError: if even the narrowest tables of the grid take more than the budget; before training.
    """
    _check_size(task, GRID_STEP, "uniform-grid", "use 'uniform'")
    dims = range(GRID_STEP, smallest_dim(task, task.dense_bytes()) + 1, GRID_STEP)
    return best_of(task, {f"D = {dim}": partial(uniform_candidate, task, dim) for dim in dims})


def rounded_up_dim(task: MethodTask, method: str) -> int:
    """The smallest embedding_dim of a recipe whose float32 tables take at least the budget.

    Args:
        task: builds the recipe at several dims; how large.
        method: who asks, for the message.

    Raises:
        SizeNotMetError: if embedding_dim 1 takes more than the budget.
    """
    _check_size(task, 1, method)
    return smallest_dim(task, task.embedding_bytes())


def _check_size(task: MethodTask, narrowest: int, method: str, remedy: str = "") -> None:
    """Tables as narrow as a method has them have to be within the budget."""
    smallest, budget = dense_table_bytes(task.build(narrowest).model), task.embedding_bytes()
    if smallest > budget:
        requirement = f"at least {smallest}, the bytes of tables of embedding_dim {narrowest}"
        raise SizeNotMetError(describe(method, requirement, budget, remedy))


def smallest_dim(task: MethodTask, num_bytes: int) -> int:
    """The smallest embedding_dim of a recipe whose float32 tables take at least so many bytes.

    Args:
        task: builds the recipe at several dims; tables may follow embedding_dim in any rising way.
        num_bytes: at most the bytes of the recipe's own tables.
    """
    widest = max(table.embedding_dim for table in table_configs(task.build(None).model))
    dims = range(1, widest + 1)
    index = bisect.bisect_left(dims, num_bytes, key=lambda dim: dense_table_bytes(task.build(dim).model))
    return dims[min(index, len(dims) - 1)]


def dense_table_bytes(model: nn.Module) -> int:
    """Bytes of a plain model's tables in float32: the sum of 4 N D.

    Args:
        model: plain, not sharded.

    Raises:
        TypeError: if a collection of the model is sharded.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=8, feature_names=["f"])
        >>> dense_table_bytes(EmbeddingBagCollection(tables=[table]))
        160
    """
    return 4 * dense_parameters(model)


def trainable_dim(embedding_dim: int) -> int:
    """The smallest embedding_dim, not below the given one, that every kernel trains.

    Args:
        embedding_dim: at least 1.

    Example:
        >>> [trainable_dim(dim) for dim in (1, 4, 13)]
        [4, 4, 16]
    """
    return -(-embedding_dim // FUSED_MULTIPLE) * FUSED_MULTIPLE


def table_widths(model: nn.Module) -> dict[str, int]:
    """table -> embedding_dim of a plain model.

    Args:
        model: plain, not sharded.

    Raises:
        TypeError: if a collection of the model is sharded.
    """
    return {table.name: table.embedding_dim for table in table_configs(model)}


def uniform_candidate(task: MethodTask, embedding_dim: int | None) -> Candidate:
    """Uniform tables of one embedding_dim, untrained.

    Args:
        task: builds the recipe.
        embedding_dim: of the tables; None for the recipe's own.
    """
    trained_dim = None if embedding_dim is None else trainable_dim(embedding_dim)
    recipe = task.build(trained_dim)
    if embedding_dim == trained_dim:
        form, widths = "dense_fp32", table_widths(recipe.model)
    else:
        form, widths = "mixed_dimension_fp32", table_widths(task.build(embedding_dim).model)
    return Candidate(
        recipe=recipe,
        scheme=uniform_scheme_(recipe.model, widths),
        form=form,
        embedding_dim=trained_dim,
        settings={} if embedding_dim is None else {"embedding_dim": embedding_dim},
    )
