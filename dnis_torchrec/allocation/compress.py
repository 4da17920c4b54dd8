r"""Compress: a trained model -> the same model on tables of bit fields, without a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.allocation import axes
from dnis_torchrec.allocation.bits import Allocation, allocate
from dnis_torchrec.allocation.curvature import (
    ENOUGH_SAMPLES,
    Curvature,
    Loss,
    checked_batch,
    curvature_of_read_tables,
    device_of,
    evaluating,
    outputs_of,
    predictions_of,
)
from dnis_torchrec.allocation.energies import BITS, RoundingEnergies, rounding_energies
from dnis_torchrec.allocation.gains import LossSample, output_bias
from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts, table_key
from dnis_torchrec.checks import check, describe, tell
from dnis_torchrec.data.batches import features_of, for_lookup
from dnis_torchrec.data.over_ranks import blocks_over_ranks, count_over_ranks
from dnis_torchrec.data.recipe import check_left_alone
from dnis_torchrec.data.task import Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.selection.shards import (
    check_pooling,
    collections,
    local_shards,
    ranks_of,
    table_configs_of,
    tables_named_apart,
)
from dnis_torchrec.selection.swap import (
    ON_RANKS,
    check_weights_apart,
    replace_,
    tables_in_float32,
    unshard_,
)
from dnis_torchrec.selection.torchrec_inputs import managed_collisions, remap
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable, pack_rows
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection, table_of_single_ids
from dnis_torchrec.serving.trainable import MixedDimensionEmbeddingBagCollection

ServedModule: TypeAlias = PackedEmbeddingBagCollection | ServedEmbeddingCollection

ROUNDING = 1e-3
"""By how much a table's largest value may have grown since its bits were allocated."""
UNCHANGED = 1e-4
"""How far predictions may move when tables are turned, over the largest of them: rounding moves
them by less."""


@dataclass(frozen=True, eq=False)
class AxesChange:
    """A model whose tables were turned, and how."""

    model: nn.Module
    counts: FrequencyCounts
    leave_alone: Collection[str]
    had_axes: bool
    rotations: list[Tensor]
    turns: dict[str, Tensor]

    @classmethod
    def of(
        cls, model: nn.Module, counts: FrequencyCounts, leave_alone: Collection[str]
    ) -> AxesChange:
        """A model that can be turned, see `with_axes_`, and is not turned yet."""
        had_axes = axes.has_axes(get_unwrapped_module(model).state_dict())
        return cls(axes.with_axes_(model), counts, leave_alone, had_axes, [], {})

    def turn_(
        self,
        batch: Batch,
        loss: Loss | Task,
        turns: Mapping[str, Tensor] | None = None,
        tolerance: float = axes.AXES_TOLERANCE,
    ) -> Tensor:
        """Turns the tables, see `rotate_` for its collectives; the predictions of a batch, which
        stay, are returned."""
        model, ranks = self.model, ranks_of(*collections(self.model).values())
        old, _ = predictions_of(model, batch, loss, "batch 0", ranks)
        groups = axes.rotation_groups(model, self.leave_alone)
        modules = collections(model).values()
        dims = {t.name: t.embedding_dim for module in modules for t in table_configs_of(module)}
        factors = axes.product_factors(groups, dims)
        self.rotations[:] = axes.rotate_(
            model, self.counts, leave_alone=self.leave_alone, turns=turns, tolerance=tolerance
        )
        self.turns.update(axes.AxesOfRows(groups, self.rotations, factors).turns)
        new, _ = predictions_of(model, batch, loss, "batch 0", ranks)
        _check_unchanged(old, new, ranks)
        return old

    @contextmanager
    def undo_on_failure(self) -> Iterator[None]:
        """Turns the tables back if the block raises. Local: over several ranks they stay turned,
        because one rank may fail alone."""
        try:
            yield
        except BaseException:
            if ranks_of(*collections(self.model).values()).world_size == 1:
                axes.turn_back_(self.model, self.counts, self.rotations, self.leave_alone)
                if not self.had_axes:
                    axes.without_axes_(self.model)
            raise


@dataclass(frozen=True, eq=False, repr=False)
class Measured:
    """A model whose tables stand in their axes, and all that allocating bits in it needs. The same
    on every rank."""

    model: nn.Module
    counts: FrequencyCounts
    blocks: RowBlocks
    curvature: Curvature
    energies: RoundingEnergies
    sample: LossSample
    axes_change: AxesChange

    def shifted(self, result: Allocation) -> AbstractContextManager[None]:
        """The model with its output bias as tables of that size want it, within a block; afterwards
        it is as it was."""
        bias = self.sample.bias
        return nullcontext() if bias is None else bias.shifted(self.model, result.output_shift)

    def shift_(self, result: Allocation) -> None:
        """Moves the model's output bias to where tables of that size want it, for good. Local, the
        same on every rank."""
        if self.sample.bias is not None:
            self.sample.bias.shift_(self.model, result.output_shift)

    def allocate(
        self, *, compression: float | None = None, max_loss: float | None = None
    ) -> Allocation:
        """Chooses bits for one size, and predicts what it costs on the sample; the model does not
        change."""
        with tables_named_apart(self.model):
            result = allocate(
                *(self.model, self.blocks, self.counts, self.curvature),
                compression=compression,
                max_loss=max_loss,
                bits=self.energies.bits,
                energies=self.energies,
                predict=self.sample.predict,
            )
        turns = self.axes_change.turns
        tables = {
            name: replace(table, turn=turns.get(name), row_gain=table.gain)
            for name, table in result.scheme.tables.items()
        }
        return replace(result, scheme=MixedDimensionScheme(tables))


def compress(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss | Task,
    compression: float = 20.0,
    counts: FrequencyCounts | None = None,
    held_out: Iterable[Batch] | None = None,
    leave_alone: Collection[str] = (),
) -> Allocation:
    """Replaces the tables of a trained model by tables of bit fields, in place, without a training
    step.

    Samples of `held_out` teach gains: one factor for every table, block and column, and how far the
    model's output bias moves (`dnis_torchrec.allocation.gains` has the problem that is solved). The
    factors fold into the scales of the codes and take no byte. Where no gain is ahead by more than
    chance there is none. All other dense weights are as they were, but for what turned with tables.

    Every EmbeddingBagCollection becomes a PackedEmbeddingBagCollection, and every
    EmbeddingCollection a ServedEmbeddingCollection of packed tables; both serve and do not train.
    All tables share one budget. They are turned first where that is known to change no prediction
    (`with_axes_`, `rotation_groups`); frozen ones keep their axes, and are compressed as all others
    are. A table that no batch reads is worth nothing and may be dropped, as the rows of others that
    no batch reads: they take no byte and read as zeros; where training goes on they have a place to
    learn in (`MixedDimensionEmbeddingBagCollection.from_tables`).

    Local, no collective; needs no process group. A model in DistributedModelParallel on one process
    becomes plain inside it. Of a model that is spread over ranks, use `measure_` and `export`.

    Args:
        model: trained, plain or on one rank; called as
            ``model(dense_features=..., sparse_features=...)``.
        batches: training data, that can be iterated again and again.
        loss: called with (predictions, labels): ``nn.MSELoss()``, ``nn.BCEWithLogitsLoss()`` or
            another mean over samples that is twice differentiable in the predictions.
        compression: bytes of the float32 tables over bytes served, to be met from below.
        counts: of all rows in the training data; None counts the batches.
        held_out: batches that the model was not trained on, such as a validation split: 32 samples
            or more teach gains. The loss is predicted on them, each half by what the other has
            taught. Later data may lose twice as much as held-out samples of an earlier time say.
            None predicts the loss on `batches`: others may lose up to three times as much.
        leave_alone: names of tables that must not be touched: they keep their axes and their
            float32 values, and count in the size.

    Returns:
        The scheme, and what it is predicted to cost; no table.

    Raises:
        ValueError: for bad batches, tables with NaN or with weights that others share, or a
            compression that cannot be met.
        RuntimeError: if the model is compressed already, or turning the tables changes predictions,
            see `measure_`.
        NotImplementedError: for a model that is sharded over several ranks, or reads its tables
            beside their lookups.

    Whatever is raised, the model predicts as before: its tables are turned back, to rounding.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> class Sum(nn.Module):
        ...     def __init__(self, table):
        ...         super().__init__()
        ...         self.tables = EmbeddingBagCollection(tables=[table])
        ...
        ...     def forward(self, dense_features, sparse_features):
        ...         return self.tables(sparse_features).values().sum(1)
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=800, embedding_dim=4, feature_names=["f"]
        ... )
        >>> model, ids = Sum(table), torch.arange(800)
        >>> features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(800, dtype=torch.int64))
        >>> batch = Batch(torch.zeros(800, 1), features, labels=model(None, features).detach())
        >>> found = compress(model, [batch], loss=nn.MSELoss(), compression=6)
        >>> found.compression >= 6, type(model.tables).__name__
        (True, 'PackedEmbeddingBagCollection')
    """
    check_pooling(collections(model).values())
    plain = _plain_collections(unshard_(widened_(model)))
    with tables_in_float32(model), tables_named_apart(model):
        measurement = measure_(
            model, batches, loss=loss, counts=counts, held_out=held_out, leave_alone=leave_alone
        )
        with measurement.axes_change.undo_on_failure():
            result = measurement.allocate(compression=compression)
            packed_modules = packed_collections(model, result.scheme)
            try:
                for fqn, replacement in packed_modules.items():
                    replace_(model, plain[fqn], replacement.train(plain[fqn].training))
                _check_answers(model, next(iter(batches)), loss)
            except BaseException:
                for fqn, replacement in packed_modules.items():
                    replace_(model, replacement, plain[fqn])
                raise
    measurement.shift_(result)
    tell(_sentence(result, measurement.sample.loss))
    return result


def _sentence(result: Allocation, loss: float) -> str:
    size = f"{result.compression:.2f} times smaller: {result.num_bytes:,} bytes"
    plain, new = 4 * result.scheme.dense_parameters, loss + result.predicted_loss_increase
    size += f" instead of {plain:,}"
    return f"Tables are {size}; the loss is predicted as {new:.4f}, uncompressed it is {loss:.4f}."


def _check_answers(model: nn.Module, batch: Batch, loss: Loss | Task) -> None:
    """Calls a compressed model once: it may have read its tables beside their lookups."""
    try:
        predictions_of(model, checked_batch(batch, loss, "batch 0"), loss, "batch 0", Ranks())
    except AttributeError as error:
        requirement = "a model that reads its tables through lookups alone"
        remedy = "let it call the collection; the model is as it was"
        text = describe(type(model).__name__, requirement, str(error), remedy)
        raise NotImplementedError(text) from error


def measure_(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss | Task,
    counts: FrequencyCounts | None = None,
    held_out: Iterable[Batch] | None = None,
    num_blocks: int = NUM_BLOCKS,
    num_samples: int | None = ENOUGH_SAMPLES,
    bits: Sequence[int] = BITS,
    leave_alone: Collection[str] = (),
    turns: Mapping[str, Tensor] | None = None,
) -> Measured:
    """Turns a model's tables into their axes and measures what every column of every block is
    worth; `turns` are those of an earlier day, taken where they still serve. Tables of half
    precision become float32, where no rank shards them.

    Distributed: every rank of a sharded model calls it on its slices of the batches; see `rotate_`,
    `curvature`, `rounding_energies`, `LossSample` and `dnis_torchrec.data.over_ranks` for the
    collectives. What is wrong on one rank is raised on all; all ranks get the same.
    """
    again = "batches that can be iterated again and again"
    remedy = "give a list, a DataLoader, or an object whose __iter__ begins anew"
    check(not isinstance(batches, Iterator), "batches", again, type(batches).__name__, remedy)
    model = widened_(model)
    served_modules = served_collections(model)
    if served_modules:
        place, remedy = f"FQN {next(iter(served_modules))!r}", "compress the model that was trained"
        raise RuntimeError(describe(place, "tables of float32", "packed ones", remedy))
    with tables_in_float32(model), tables_named_apart(model) as names:
        leave_alone = [key for name in leave_alone for key in names.get(name, [name])]
        result = collections(model)
        check(bool(result), "model", "an embedding collection in it", "none")
        ranks = ranks_of(*result.values())
        tables = [table for collection in result.values() for table in table_configs_of(collection)]
        with ranks.together():
            check_left_alone(leave_alone, [table.name for table in tables], "leave_alone")
            check_weights_apart(model)
            check_pooling(m for m in result.values() if isinstance(m, EmbeddingBagCollection))
            _check_finite(model)
        with ranks.together():
            first = next(iter(batches), None)
            check(first is not None, "batches", "at least one batch", "none")
            features_of(cast(Batch, first))
            batch = checked_batch(cast(Batch, first), loss, "batch 0")
        features = _features_read(model, batch, loss)
        if counts is None:
            read = (features(batch) for batch in batches)
            counts = count_over_ranks(read, tables, process_group=ranks.group)
        more = {"num_blocks": num_blocks, "leave_alone": leave_alone}
        blocks = blocks_over_ranks(counts, tables, process_group=ranks.group, **more)
        axes_change = AxesChange.of(model, counts, leave_alone)
        with axes_change.undo_on_failure():
            num_outputs = axes_change.turn_(batch, loss, turns).shape[1]
            worth = curvature_of_read_tables(
                model, batches, blocks, loss=loss, num_samples=num_samples, num_outputs=num_outputs
            )
            energies = rounding_energies(model, blocks, counts, bits=bits)
            sample = LossSample(
                *(model, batches if held_out is None else held_out, blocks),
                loss=loss,
                is_held_out=held_out is not None,
                bias=output_bias(model, batch, loss, ranks),
                num_outputs=num_outputs,
                features=features,
            )
        return Measured(model, counts, blocks, worth, energies, sample, axes_change)


def _features_read(
    model: nn.Module, batch: Batch, loss: Loss | Task
) -> Callable[[Batch], KeyedJaggedTensor]:
    """What the collections of a model read of a batch: its bags, or what the model makes of them.

    A model that gives ids other rows before it looks them up is called for every batch. One batch
    tells; a sharded model is taken to read its bags as they are.
    """
    modules = list(collections(model).values())
    kinds = EmbeddingBagCollection | EmbeddingCollection

    def as_given(batch: Batch) -> KeyedJaggedTensor:
        return remap(model, features_of(batch))

    def as_read(batch: Batch) -> KeyedJaggedTensor:
        bags = dict[str, JaggedTensor]()
        for key, bag in _bags_at(modules, model, batch, loss):
            if key in bags and not bags[key].values().equal(bag.values()):
                limit = "supported are features that all collections read as the same rows"
                raise NotImplementedError(describe(f"feature {key!r}", limit, "others"))
            bags[key] = bag
        return KeyedJaggedTensor(
            list(bags),
            torch.cat([bag.values() for bag in bags.values()]),
            lengths=torch.cat([bag.lengths() for bag in bags.values()]),
            stride=features_of(batch).stride(),
        )

    if not all(isinstance(module, kinds) for module in modules) or managed_collisions(model):
        return as_given
    bags_given = copy.copy(features_of(batch)).to_dict()
    for key, bag in _bags_at(modules, model, batch, loss):
        if key not in bags_given or not bags_given[key].values().equal(bag.values()):
            return as_read
    return as_given


def _bags_at(
    modules: Sequence[nn.Module], model: nn.Module, batch: Batch, loss: Loss | Task
) -> list[tuple[str, JaggedTensor]]:
    """The bags that some collections are called with, by feature."""
    bags = list[KeyedJaggedTensor]()
    hooks = [m.register_forward_pre_hook(lambda _, inputs: bags.append(inputs[0])) for m in modules]
    try:
        with torch.no_grad(), evaluating(model):
            outputs_of(model, for_lookup(batch).to(device_of(model)), loss)
    finally:
        for hook in hooks:
            hook.remove()
    return [bag for features in bags for bag in copy.copy(features).to_dict().items()]


def widened_(model: nn.Module, tables: Mapping[str, Tensor] | None = None) -> nn.Module:
    """The plain model of one whose tables are narrow: stock collections, zeros where a block has no
    column. In place; a model without narrow tables is left as it is. Local.

    Over several ranks no rank has the rows: `tables` are those of
    `dnis_torchrec.artifact.narrow.widened_state`, whole on each rank.
    """
    plain = get_unwrapped_module(model)
    kind = MixedDimensionEmbeddingBagCollection
    narrow = {fqn: m for fqn, m in plain.named_modules() if isinstance(m, kind)}
    if not narrow:
        return model
    if tables is None:
        ranks = ranks_of(*collections(model).values())
        place, requirement = f"FQN {next(iter(narrow))!r}", "narrow tables on one process"
        remedy = "pass the tables of dnis_torchrec.artifact.narrow.widened_state"
        check(ranks.world_size == 1, place, requirement, f"{ranks.world_size} ranks", remedy)
        plain = unshard_(model)
    for module in narrow.values():
        plain = replace_(plain, module, module.widened(tables))
    return plain


def served_collections(model: nn.Module) -> dict[str, ServedModule]:
    """The collections of bit fields in a model by FQN, the outermost of each. Local."""
    served_modules: dict[str, ServedModule] = {}
    for fqn, module in get_unwrapped_module(model).named_modules():
        is_served = isinstance(module, ServedModule)
        if is_served and not any(fqn.startswith(f"{outer}.") for outer in served_modules):
            served_modules[fqn] = module
    return served_modules


def packed_collections(model: nn.Module, scheme: MixedDimensionScheme) -> dict[str, ServedModule]:
    """The collections of a plain model by FQN as tables of bit fields, ready to take their places.
    The model does not change; a table is read once, a chunk of rows at a time. Local.
    """
    replacement: dict[str, ServedModule] = {}
    for fqn, collection in _plain_collections(model).items():
        tables, rows = dict[str, TableScheme](), dict[str, PackedTable]()
        weights = {shard.table: shard.weight for shard in local_shards(collection)}
        for config in table_configs_of(collection):
            key = table_key(config.name, fqn)
            key = key if key in scheme.tables else config.name
            check(key in scheme.tables, f"table {key!r}", "a scheme of its own", "none")
            tables[key] = scheme.tables[key]
            rows[key] = _packed_table(tables[key], weights[config.name])
        of_collection = MixedDimensionScheme(tables)
        if isinstance(collection, EmbeddingCollection):
            single = {name: table_of_single_ids(table) for name, table in tables.items()}
            modules = {n: PackedEmbeddingBagCollection(of, rows) for n, of in single.items()}
            replacement[fqn] = ServedEmbeddingCollection(of_collection, modules)
        else:
            replacement[fqn] = PackedEmbeddingBagCollection(of_collection, rows)
    return replacement


def _plain_collections(model: nn.Module) -> dict[str, EmbeddingBagCollection | EmbeddingCollection]:
    plain: dict[str, EmbeddingBagCollection | EmbeddingCollection] = {}
    for fqn, collection in collections(model).items():
        if not isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
            requirement = "supported is a plain embedding collection"
            remedy = f"{ON_RANKS} if it is sharded, merge_(model) if it is prepared"
            kind = type(collection).__name__
            raise NotImplementedError(describe(f"FQN {fqn!r}", requirement, kind, remedy))
        plain[fqn] = collection
    return plain


def _packed_table(table: TableScheme, weight: Tensor) -> PackedTable:
    chunks = weight.split(rows_per_chunk(table.embedding_dim))
    largest = max((float(chunk.abs().max()) for chunk in chunks), default=0.0)
    if table.largest_value is not None:
        remedy = "allocate bits for the rows as they are: measure_(...).allocate(...)"
        requirement = f"values within {table.largest_value:g}, as when bits were allocated"
        fits = largest <= table.largest_value * (1 + ROUNDING)
        check(fits, f"table {table.name!r}", requirement, f"{largest:g}", remedy)
    rows = pack_rows(table, chunks, table.routing.row_counts())
    return PackedTable.from_rows(table, rows, table.codes.scale, table.codes.shift)


def _check_finite(model: nn.Module) -> None:
    """Axes of a table with NaN would be NaN in all of its rows."""
    modules = collections(model).values()
    for shard in (shard for module in modules for shard in local_shards(module)):
        for chunk, rows, _ in shard.chunks():
            bad = (~chunk.isfinite()).nonzero()
            if len(bad):
                row, column = bad[0].tolist()
                value = f"{chunk[row, column].item()} in row {rows.start + row}"
                remedy = "take weights of a model whose training did not diverge"
                check(False, f"table {shard.table!r}", "finite values", value, remedy)


def _check_unchanged(old: Tensor, new: Tensor, ranks: Ranks) -> None:
    """Checks that the predictions of a batch did not change when the tables were turned."""
    with ranks.together():
        change, largest = float((new - old).abs().max()), float(old.abs().max())
        if change > (most := UNCHANGED * largest):
            requirement = f"predictions to stay within {most:.3g} when tables are turned"
            value = f"a change by {change:.3g}"
            remedy = "correct the model's rotation_groups, or shard tables of DataType.FP32"
            raise RuntimeError(describe("rotation", requirement, value, remedy))
