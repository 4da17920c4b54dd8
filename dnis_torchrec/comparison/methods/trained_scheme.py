"""Training a given MixedDimensionScheme from scratch: what every method that chooses sizes beforehand shares.

A method says which columns of which blocks a table keeps; the dropped values of a fresh recipe are zero from the first
step to the last, so that what is trained is the mixed-dimension table itself, in the dense model's own code.

NOTE[DIFF]: not quite with row-wise optimizers, which divide by the mean square of a whole row's gradient, dropped
columns counted.

Shapes: N rows of a table, D embedding_dim, S blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.frequency import FrequencyCounts, count_frequencies, longest_bags
from dnis_torchrec.blocks.row_routing import RowRouting
from dnis_torchrec.checks import check_known
from dnis_torchrec.comparison.methods.method import MethodResult, MethodTask, SizeNotMetError
from dnis_torchrec.comparison.methods.shared_trials import FinishedTrial
from dnis_torchrec.data.over_ranks import all_samples
from dnis_torchrec.data.recipe import Recipe, TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.budget import Budget, Size, SizeOutOfReachError
from dnis_torchrec.search.pruning import drop_zeros_
from dnis_torchrec.soft_selection.swap import unshard_
from dnis_torchrec.soft_selection.table_shards import collections, local_shards, table_configs
from dnis_torchrec.training.checkpoint import load_checkpoint
from dnis_torchrec.training.plain import BEST_STATE, PlainTraining, train_plainly
from dnis_torchrec.training.retained_mask import RetainedMask
from dnis_torchrec.training.sharded import shard


def row_blocks(task: MethodTask, *, scope: str | None = None) -> tuple[FrequencyCounts, RowBlocks]:
    """Training counts of a task's tables, and the blocks that a search of the same recipe makes of them.

    Of the other splits the lengths of bags are read: a feature that holds several ids there alone is a multi-hot one
    from the start, as in a search.

    Args:
        task: whose recipe, at its own embedding_dim, is counted.
        scope: of the blocks, see `blocks_from_counts`; the recipe's own if not given.
    """
    recipe = task.build(None)
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in all_samples(recipe.data.train)), tables)
    longest = Counter(counts.max_bag_lengths)
    for name in ("validation", "selection", "test"):
        for number, batch in enumerate(all_samples(getattr(recipe.data, name))):
            longest |= Counter(longest_bags(batch.sparse_features, tables, f"{name} batch {number}"))
    counts = replace(counts, max_bag_lengths={feature: longest[feature] for feature in counts.max_bag_lengths})
    return counts, blocks_from_counts(counts, tables, num_blocks=recipe.num_blocks, scope=scope or recipe.scope)


def byte_budget(task: MethodTask, blocks: RowBlocks) -> Budget:
    """Returns the budget of a task in bytes of the mixed-dimension form, with the cost of every column.

    Args:
        task: how large, as `MethodTask.embedding_bytes` says.
        blocks: blocks of its tables, at its recipe's own embedding_dim.

    Raises:
        SizeNotMetError: if not even one column of the cheapest block fits.
    """
    try:
        return Budget.of(Size(embedding_bytes=task.embedding_bytes()), blocks)
    except SizeOutOfReachError as error:
        raise SizeNotMetError(str(error)) from error


def columns_of_dims(blocks: RowBlocks, dims: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns to keep where block s of a table keeps its first ``dims[s]``.

    Args:
        blocks: tables and their D.
        dims: table -> ``(S,)`` integers in 0..D.

    Returns:
        table -> ``(S, D)`` bool.

    Example:
        >>> table = {"t": torch.tensor([1])}
        >>> routing = RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3]))
        >>> blocks = RowBlocks("global", "explicit", {"t": routing}, {"t": 3}, {}, table, table)
        >>> columns_of_dims(blocks, {"t": torch.tensor([3, 1])})["t"].int().tolist()
        [[1, 1, 1], [1, 0, 0]]
    """
    return {table: torch.arange(blocks.embedding_dims[table]) < dim.unsqueeze(1) for table, dim in dims.items()}


def prune_to_columns_(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts, kept: Mapping[str, Tensor]
) -> MixedDimensionScheme:
    """Zeroes every column of a block that is not kept, and every row never seen in training, in place.

    Args:
        model: a plain model.
        blocks: blocks of its tables.
        counts: training counts.
        kept: table -> ``(S, D)`` bool.

    Returns:
        The scheme of the columns that are kept; rows never seen are stored nowhere.

    Raises:
        ValueError: for an unknown table.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
        >>> counts = FrequencyCounts({"t": torch.tensor([3, 2, 1, 0])}, {"f": 1}, 6)
        >>> blocks = blocks_from_counts(counts, [table], num_blocks=2)
        >>> kept = columns_of_dims(blocks, {"t": torch.tensor([4, 1])})
        >>> prune_to_columns_(EmbeddingBagCollection(tables=[table]), blocks, counts, kept).parameters
        9
    """
    for table in kept:
        check_known("table", table, blocks.routings)
    _zero_dropped_(model, blocks.routings, kept)
    return drop_zeros_(model, blocks, counts)


def uniform_scheme_(model: nn.Module, widths: Mapping[str, int]) -> MixedDimensionScheme:
    """Zeroes all but the first columns of every table, in place; every row is stored, seen in training or not.

    Args:
        model: a plain model.
        widths: table -> columns to keep.

    Returns:
        The scheme of the columns that are kept.
    """
    tables = table_configs(model)
    counts = FrequencyCounts({t.name: torch.ones(t.num_embeddings, dtype=torch.int64) for t in tables}, {}, 1)
    blocks = blocks_from_counts(counts, tables, num_blocks=1)
    kept = columns_of_dims(blocks, {table: torch.tensor([width]) for table, width in widths.items()})
    return prune_to_columns_(model, blocks, counts, kept)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A recipe and a scheme that a method may train from scratch.

    Attributes:
        recipe: fresh, with the tables of the scheme; its model is used up by training.
        scheme: which columns of which blocks to train; of a scheme of single elements, every column that holds one.
        form: see `MethodResult`.
        embedding_dim: see `MethodResult`.
        extra_bytes: see `MethodResult`.
        settings: see `MethodResult`.
    """

    recipe: Recipe
    scheme: MixedDimensionScheme
    form: str = "mixed_dimension_fp32"
    embedding_dim: int | None = None
    extra_bytes: int = 0
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def train(self, task: MethodTask) -> MethodResult:
        """Trains it from scratch (`train_scheme`): a method's result of one trial.

        Args:
            task: see `train_scheme`.
        """
        started = time.monotonic()
        model, trained = train_scheme(task, self.recipe, self.scheme)
        return self._result(model, selection_loss=trained.selection_loss, seconds=time.monotonic() - started)

    def restore(self, task: MethodTask, finished: FinishedTrial) -> MethodResult:
        """See `dnis_torchrec.comparison.methods.best_trial.Trial`.

        Args:
            task: with the folder that `train` had.
            finished: the results of the training.
        """
        model, _ = _sharded(task, self.recipe, self.scheme)
        load_checkpoint(task.folder / BEST_STATE, model)
        plain = cast(TrainTask, unshard_(model)).model
        return self._result(plain, selection_loss=finished.selection_loss, seconds=finished.seconds)

    def _result(self, model: nn.Module, *, selection_loss: float, seconds: float) -> MethodResult:
        tables = self.scheme.tables.items()
        return MethodResult(
            model=model,
            scheme=MixedDimensionScheme({name: replace(t, num_retained=t.block_area) for name, t in tables}),
            form=self.form,
            embedding_dim=self.embedding_dim,
            extra_bytes=self.extra_bytes,
            selection_loss=selection_loss,
            seconds=seconds,
            seconds_of_trials=seconds,
            settings=self.settings,
        )


def train_scheme(task: MethodTask, recipe: Recipe, scheme: MixedDimensionScheme) -> tuple[nn.Module, PlainTraining]:
    """Trains the retained columns of a scheme from scratch, to the best epoch on the selection split.

    Args:
        task: seed, device, early stopping and folder.
        recipe: see `Candidate`.
        scheme: see `Candidate`.

    Returns:
        The plain model, zero wherever the scheme drops, and how its training went.
    """
    model, optimizer = _sharded(task, recipe, scheme)
    is_full = scheme.parameters == scheme.dense_parameters
    trained = train_plainly(
        model,
        optimizer,
        recipe,
        task.device,
        max_epochs=task.max_epochs,
        patience=task.patience,
        folder=task.folder,
        held=None if is_full else RetainedMask(model),
    )
    return cast(TrainTask, unshard_(model)).model, trained


def _sharded(
    task: MethodTask, recipe: Recipe, scheme: MixedDimensionScheme
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """The model of a recipe, sharded, zero wherever a scheme drops, and its optimizer."""
    torch.manual_seed(task.seed)
    tables = scheme.tables.items()
    _zero_dropped_(recipe.model, {name: t.routing for name, t in tables}, {name: t.retained for name, t in tables})
    return shard(TrainTask(recipe.model, recipe.loss, embedding_l2=recipe.embedding_l2), recipe, task.device)


@torch.no_grad()
def _zero_dropped_(model: nn.Module, routings: Mapping[str, RowRouting], kept: Mapping[str, Tensor]) -> None:
    """Zeroes dropped values. A kept value that starts at zero becomes the smallest float: zero means "dropped"."""
    for module in collections(model).values():
        for table in local_shards(module):
            if table.table not in kept:
                continue
            columns = kept[table.table]
            or_none = torch.cat([columns, torch.zeros(1, columns.shape[1], dtype=torch.bool)])
            for chunk, rows, _ in table.chunks():
                is_kept = or_none[routings[table.table].block_of(torch.arange(rows.start, rows.stop))].to(chunk.device)
                chunk.masked_fill_(chunk == 0, torch.finfo(chunk.dtype).tiny).mul_(is_kept)
