"""Training a given MixedDimensionScheme from scratch: what every method that chooses sizes
beforehand shares."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper

from benchmarks.rivals.forms import DEFAULT_FORM, PACKED, PRECISIONS, form_named
from benchmarks.rivals.methods.method import MethodResult, MethodTask, SizeNotMetError
from benchmarks.rivals.methods.shared_trials import FinishedTrial
from benchmarks.rivals.methods.trained_once import Trained, trained_once
from benchmarks.rivals.uniform_bits import with_uniform_bits
from dnis_torchrec.artifact.forms import rows_of
from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies, longest_bags
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import check_known, describe
from dnis_torchrec.data.batches import features_of
from dnis_torchrec.data.over_ranks import all_samples
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import Budget, Size, SizeOutOfReachError, drop_zeros_, uncompressed_scheme
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.checkpoint import CheckpointFolder, go_back_, write_checkpoint
from dnis_torchrec.training.loop import PlainTraining, train_plainly
from dnis_torchrec.training.shard import shard
from dnis_torchrec.training.state import TrainingState, describe_tables, model_tensors
from examples.paper.blocks import global_blocks
from examples.paper.pruning import ValueMask

_HALVINGS = 24
"""Steps of a bisection: the amount is exact to 6e-8 of all bytes."""


def row_blocks(task: MethodTask, *, are_global: bool = True) -> tuple[FrequencyCounts, RowBlocks]:
    """Training counts of a task's tables, and their blocks: `NUM_BLOCKS` as a search has."""
    recipe = task.build(None)
    tables = table_configs(recipe.model)
    counts = count_frequencies((features_of(batch) for batch in all_samples(recipe.data.train)), tables)
    longest = Counter(counts.max_bag_lengths)
    for name in ("validation", "selection", "test"):
        for number, batch in enumerate(all_samples(getattr(recipe.data, name))):
            longest |= Counter(longest_bags(features_of(batch), tables, f"{name} batch {number}"))
    counts = replace(counts, max_bag_lengths={feature: longest[feature] for feature in counts.max_bag_lengths})
    form = global_blocks if are_global else blocks_from_counts
    return counts, form(counts, tables, num_blocks=NUM_BLOCKS)


def byte_budget(task: MethodTask, blocks: RowBlocks) -> Budget:
    """Returns the budget of a task in bytes of the mixed-dimension form, with the cost of every
    column."""
    try:
        return Budget.of(Size(embedding_bytes=task.embedding_bytes()), blocks)
    except SizeOutOfReachError as error:
        raise SizeNotMetError(str(error)) from error


def dims_bytes(blocks: RowBlocks, dims: Mapping[str, Tensor], precision: str) -> int:
    """Bytes of tables whose seen rows keep so many dims, in the form of a precision
    (`pruned_form`)."""
    form, bits, num_bytes = form_named(DEFAULT_FORM), PRECISIONS[precision].bits, 0.0
    for table, routing in blocks.routings.items():
        rows, dim = blocks.seen_rows[table], blocks.embedding_dims[table]
        kept = dims[table] * (rows > 0)
        if pruned_form(precision) == PACKED.name:
            widths = (torch.arange(dim) < kept.unsqueeze(1)).long() * bits
            num_bytes += PACKED.bytes_of(widths, rows.long(), routing)
        else:
            costs = form.bytes_per_column(rows, dim)
            num_bytes += form.fixed_bytes(routing, dim) + float((costs * kept).sum())
    return int(num_bytes)


def pruned_form(precision: str) -> str:
    """The form of tables whose blocks keep columns of their own."""
    return DEFAULT_FORM if precision == "fp32" else PACKED.name


def in_precision(model: nn.Module, scheme: MixedDimensionScheme, form: str, precision: str) -> MixedDimensionScheme:
    """The scheme of a trained model as it is served: in the form ``"packed"`` every kept column
    gets its bits."""
    if form != PACKED.name:
        return scheme
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    return with_uniform_bits(scheme, {s.table: rows_of(s.weight) for s in shards}, PRECISIONS[precision].bits)


_Choice = TypeVar("_Choice")


def largest_within(
    task: MethodTask, blocks: RowBlocks, choose: Callable[[Budget], _Choice], num_bytes: Callable[[_Choice], int]
) -> _Choice:
    """The choice of a method that spends bytes column by column, at a task's bytes in its
    precision."""
    budget = byte_budget(task, blocks)
    if task.precision == "fp32":
        return choose(budget)
    best: _Choice | None = None
    columns = [(costs, blocks.embedding_dims[table]) for table, costs in budget.column_costs.items()]
    low, high = 0.0, 2 * sum(float(costs.sum()) * dim for costs, dim in columns)
    for _ in range(_HALVINGS):
        amount = (low + high) / 2
        try:
            choice = choose(replace(budget, amount=amount))
        except SizeNotMetError:
            low = amount
            continue
        if num_bytes(choice) <= task.embedding_bytes():
            best, low = choice, amount
        else:
            high = amount
    if best is None:
        remedy = "ask for a lower compression"
        received = task.embedding_bytes()
        raise SizeNotMetError(describe(f"{task.precision} tables", "at least one row of a block", received, remedy))
    return best


def columns_of_dims(blocks: RowBlocks, dims: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns to keep where block s of a table keeps its first ``dims[s]``."""
    return {table: torch.arange(blocks.embedding_dims[table]) < dim.unsqueeze(1) for table, dim in dims.items()}


def prune_to_columns_(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts, kept: Mapping[str, Tensor]
) -> MixedDimensionScheme:
    """Zeroes every column of a block that is not kept, and every row never seen in training, in
    place."""
    for table in kept:
        check_known("table", table, blocks.routings)
    _zero_dropped_(model, blocks.routings, kept)
    return drop_zeros_(model, blocks, counts)


def first_columns(scheme: MixedDimensionScheme, widths: Mapping[str, int]) -> MixedDimensionScheme:
    """The scheme that keeps the first columns of every table, whichever row it is."""
    kept = {}
    for name, table in scheme.tables.items():
        retained = (torch.arange(table.embedding_dim) < widths[name]).unsqueeze(0)
        kept[name] = replace(table, retained=retained, num_retained=table.num_embeddings * widths[name])
    return MixedDimensionScheme(kept)


def uniform_scheme_(model: nn.Module, widths: Mapping[str, int]) -> MixedDimensionScheme:
    """Zeroes all but the first columns of every table, in place; every row is stored, seen in
    training or not."""
    scheme = first_columns(uncompressed_scheme(model), widths)
    _zero_dropped_by_(model, scheme)
    return scheme


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A recipe and a scheme that a method may train from scratch."""

    recipe: Recipe
    scheme: MixedDimensionScheme
    form: str = DEFAULT_FORM
    precision: str = "fp32"
    embedding_dim: int | None = None
    extra_bytes: int = 0
    settings: Mapping[str, float | str] = field(default_factory=dict)
    is_shared: bool = False

    def train(self, task: MethodTask) -> MethodResult:
        """Trains it from scratch (`train_scheme`): a method's result of one trial."""
        done = self.trained(task)
        return self._result(done.model, selection_loss=done.selection_loss, seconds=done.seconds)

    def trained(self, task: MethodTask) -> Trained:
        """Trains it from scratch, or takes the training that another cell has done, in float32."""

        def train() -> Trained:
            started = time.monotonic()
            model, trained = train_scheme(task, self.recipe, self.scheme)
            return Trained(
                model=model,
                selection_loss=trained.selection_loss,
                best_epoch=trained.best_epoch,
                seconds=time.monotonic() - started,
            )

        return trained_once(task.trained if self.is_shared else None, self._key(), self.recipe.model, train)

    def _key(self) -> str:
        """The training depends on the D that the model has and, where something is dropped, on what
        is."""
        if self.scheme.parameters == self.scheme.dense_parameters:
            return f"all of D = {self.embedding_dim}"
        digest = hashlib.sha256(json.dumps(self.scheme.to_json()).encode())
        for name, value in sorted(self.scheme.to_tensors().items()):
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        return f"{digest.hexdigest()} of D = {self.embedding_dim}"

    def restore(self, task: MethodTask, finished: FinishedTrial) -> MethodResult:
        """See `benchmarks.rivals.methods.best_trial.Trial`."""
        if self.is_shared and task.trained is not None:
            return self.train(task)
        model, _ = _sharded(task, self.recipe, self.scheme)
        path = cast(Address, CheckpointFolder(task.folder).latest())
        go_back_(path, model, model_tensors(model), None)
        plain = cast(TrainTask, unshard_(model)).model
        return self._result(plain, selection_loss=finished.selection_loss, seconds=finished.seconds)

    def _result(self, model: nn.Module, *, selection_loss: float, seconds: float) -> MethodResult:
        tables = self.scheme.tables.items()
        whole = MixedDimensionScheme({name: replace(t, num_retained=t.block_area) for name, t in tables})
        return MethodResult(
            model=model,
            scheme=in_precision(model, whole, self.form, self.precision),
            form=self.form,
            embedding_dim=self.embedding_dim,
            extra_bytes=self.extra_bytes,
            selection_loss=selection_loss,
            seconds=seconds,
            seconds_of_trials=seconds,
            settings=self.settings,
        )


def train_scheme(task: MethodTask, recipe: Recipe, scheme: MixedDimensionScheme) -> tuple[nn.Module, PlainTraining]:
    """Trains the retained columns of a scheme from scratch, to the best epoch on the selection
    split."""
    model, optimizer = _sharded(task, recipe, scheme)
    is_full = scheme.parameters == scheme.dense_parameters
    trained = train_plainly(
        model,
        optimizer,
        recipe,
        task.device,
        max_epochs=task.max_epochs,
        patience=task.patience,
        held=None if is_full else ValueMask(model),
    )
    state = TrainingState(tensors=model_tensors(model), tables=describe_tables(model))
    write_checkpoint(CheckpointFolder(task.folder), 0, state, None)  # for a trial that goes on
    return cast(TrainTask, unshard_(model)).model, trained


def _sharded(
    task: MethodTask, recipe: Recipe, scheme: MixedDimensionScheme
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """The model of a recipe, sharded, zero wherever a scheme drops, and its optimizer."""
    torch.manual_seed(task.seed)
    _zero_dropped_by_(recipe.model, scheme)
    return shard(TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2), recipe, task.device)


def _zero_dropped_by_(model: nn.Module, scheme: MixedDimensionScheme) -> None:
    tables = scheme.tables.items()
    _zero_dropped_(model, {name: t.routing for name, t in tables}, {name: t.retained for name, t in tables})


@torch.no_grad()
def _zero_dropped_(model: nn.Module, routings: Mapping[str, RowRouting], kept: Mapping[str, Tensor]) -> None:
    """Zeroes dropped values. A kept value that starts at zero becomes the smallest float: zero
    means "dropped"."""
    for module in collections(model).values():
        for table in local_shards(module):
            if table.table not in kept:
                continue
            columns = kept[table.table]
            or_none = torch.cat([columns, torch.zeros(1, columns.shape[1], dtype=torch.bool)])
            for chunk, rows, _ in table.chunks():
                is_kept = or_none[routings[table.table].block_of(torch.arange(rows.start, rows.stop))].to(chunk.device)
                chunk.masked_fill_(chunk == 0, torch.finfo(chunk.dtype).tiny).mul_(is_kept)
