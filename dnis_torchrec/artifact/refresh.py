"""Refresh: what a model that was trained on publishes, beside an artifact of yesterday.

`whole_` compresses anew at the artifact's size, in its axes where they still serve. `delta_` keeps
the artifact's scheme, and gives the state that differs from it in as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.axes import AxesOfRows, axes_of_rows
from dnis_torchrec.allocation.bits import Allocation, allocate
from dnis_torchrec.allocation.compress import AxesChange, Measured, measure_, widened_
from dnis_torchrec.allocation.curvature import (
    Curvature,
    Loss,
    checked_batch,
    curvature,
    device_of,
    evaluating,
    mean_loss,
    outputs_of,
)
from dnis_torchrec.allocation.energies import (
    UNSEEN_WEIGHT,
    RoundingEnergies,
    RowSample,
    WholeRows,
    rounding_energies,
    sampled_values,
    whole_rows,
)
from dnis_torchrec.allocation.gains import LossSample, output_bias
from dnis_torchrec.artifact.delta import ServedState
from dnis_torchrec.artifact.load import Rows
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes, fit_codes, is_coded, row_strides
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting, tally
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import for_lookup
from dnis_torchrec.data.over_ranks import blocks_over_ranks
from dnis_torchrec.data.task import Task
from dnis_torchrec.ops.packed import pack_values, values_in_codes
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme, compression_of
from dnis_torchrec.selection.shards import (
    VALUES_PER_OPERATION,
    TableShard,
    collections,
    dense_state,
    local_shards,
    ranks_of,
    table_configs_of,
    tables_named_apart,
)
from dnis_torchrec.selection.swap import tables_in_float32
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable, split_blocks
from dnis_torchrec.serving.sequences import table_of_single_ids

WORST_SCALES = 1.1
"""A block gets new scales once its error is so many times that of scales which fit."""
WORST_CODES = 2.0
"""Where nobody says which rows have changed: a row has, once its codes err so many times as much as
new ones would."""
LEAST_NEWBORN = 32
"""Fewer rows of a table wait for the next delta: a block's scales take as much as a few rows."""
MOST_DRIFT = 1e-3
"""Share of the loss that a scheme may be predicted to lose against a fresh one of the same size."""
ROWS_TO_FIT = 2048
"""Rows of a block at least, where it has them, that scales are held against and fitted to."""
ROWS_TO_COMPARE = 256
"""Rows of a block that tell in which axes a model stands."""
SAME_TURN = 1e-5
"""How far rounding moves what rows are multiplied by: less than a product's weights that learn."""
_PartOfBlock = tuple[int, Tensor, Tensor]
"""A block, some of its rows by id, and their bytes."""
_NO_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Refresh:
    """A model's tables in the scheme of an earlier day. The same on every rank."""

    scheme: MixedDimensionScheme
    rows: Mapping[str, Tensor]
    dense: Mapping[str, Tensor]
    num_changed: Mapping[str, int]

    def state(self, base: ServedState, **facts: Any) -> ServedState:
        """What stands in place of the artifact, its weights in the order that its file has."""
        names = {**base.dense, **self.dense}
        dense = {name: self.dense[name] for name in names if name in self.dense}
        return replace(base, scheme=self.scheme, rows=self.rows, dense=dense, **facts)


def whole_(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    rows: Mapping[str, Tensor],
    batches: Iterable[Batch],
    *,
    loss: Loss | Task,
    counts: FrequencyCounts,
    held_out: Iterable[Batch] | None = None,
    leave_alone: Collection[str] = (),
    compression: float | None = None,
) -> tuple[Measured, Allocation]:
    """Measures a model and allocates bits anew, at the size of an artifact unless another is given.

    Turns the model, as `measure_` does and with its collectives; `export` writes what comes back.
    """
    with tables_named_apart(model):
        measurement = measure_(
            *(model, batches),
            loss=loss,
            counts=counts,
            held_out=held_out,
            leave_alone=leave_alone,
            turns=_turns_of(model, _served(scheme, rows), counts),
        )
        size = scheme.compression(PACKED) if compression is None else compression
        return measurement, measurement.allocate(compression=size)


def delta_(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    rows: Mapping[str, Tensor],
    batches: Iterable[Batch],
    *,
    loss: Loss | Task,
    counts: FrequencyCounts,
    rows_read: Mapping[str, Tensor] | None = None,
    previous: Mapping[str, Rows] | None = None,
    held_out: Iterable[Batch] | None = None,
    leave_alone: Collection[str] = (),
) -> Refresh:
    """Encodes a model in the scheme of an artifact: rows that changed, blocks whose scales no
    longer fit, and rows born since.

    `rows` are the artifact's bit fields, `batches` the newest samples, `counts` those of all days.
    `rows_read` has the rows that training has read since, by table; without it codes are compared.
    Of a table in `previous`, as the artifact was made of it, only rows that differ are compared.
    Codes are the nearest ones: nothing is measured but a sample of rows. Gains that held-out
    samples teach move scales alone.

    Turns the model only where it has to: where samples are held out, rows are cut over ranks, or a
    group has no axes. Otherwise the rows that are encoded turn as they are read.

    Distributed: the collectives of `rotate_` where it turns; one reduction of the sample of every
    table, one of its rows in `previous`; each rank encodes rows that it holds, and all gather them.
    """
    rows_read, previous = dict(rows_read or {}), dict(previous or {})
    with tables_in_float32(model), tables_named_apart(model):
        model = widened_(model)
        served = _served(scheme, rows)
        old_turns = _turns_of(model, served, counts)
        change = AxesChange.of(model, counts, leave_alone)
        axes = axes_of_rows(model, old_turns, leave_alone) if held_out is None else None
        with change.undo_on_failure():
            batch = checked_batch(next(iter(batches)), loss, "batch 0")
            if axes is None:
                num_outputs = change.turn_(batch, loss, old_turns, math.inf).shape[1]
            turns = change.turns if axes is None else axes.turns
            of_model, tables, is_fitted = _rows_of(model, axes), dict[str, TableScheme](), {}
            frozen = {n: _with_newborn(t, counts.counts[n]) for n, t in scheme.tables.items()}
            for name, table in frozen.items():
                codes, is_fitted[name] = _fitted_codes(
                    table, scheme.tables[name], of_model[name], counts.counts[name]
                )
                tables[name] = table.with_codes(codes)
            shift: AbstractContextManager[None] = nullcontext()
            result = MixedDimensionScheme(tables)
            if held_out is not None:
                ranks = of_model[next(iter(of_model))].whole.ranks
                bias = output_bias(model, batch, loss, ranks)
                sample = LossSample(
                    *(model, held_out, _blocks_of(tables, counts)),
                    loss=loss,
                    is_held_out=True,
                    bias=bias,
                    num_outputs=num_outputs,
                )
                prediction = sample.predict(result)
                result = prediction.scheme or result
                if bias is not None:
                    shift = bias.shifted(model, prediction.output_shift)
            new_rows, num_changed, tables = {}, {}, {}
            for name, table in result.tables.items():
                turn, ids = turns.get(name), None
                stays = not _moves(turn, old_turns.get(name))
                compares = not (stays and name in rows_read)
                if stays and name in (rows_read | previous):
                    ids = of_model[name].unlike(previous[name]) if compares else rows_read[name]
                old = served[name] if compares else None
                parts = _encode(table, of_model[name], is_fitted[name], ids, old)
                new_rows[name], num_changed[name] = _with_parts(table, rows[name], parts)
                tables[name] = replace(table, turn=turn, row_gain=table.gain)
            with shift, nullcontext() if axes is None else axes.readers_turned():
                dense = {k: part.detach().cpu().clone() for k, part in dense_state(model).items()}
    return Refresh(MixedDimensionScheme(tables), new_rows, dense, num_changed)


def changed_rows(model: nn.Module) -> dict[str, Tensor] | None:
    """The rows that training has read since this was last asked, by table, from TorchRec's
    ModelDeltaTracker; None where the model has none. Two all_gathers a table."""
    if not isinstance(model, DistributedModelParallel) or model.get_delta_tracker() is None:
        return None
    local = model.get_delta_tracker().get_unique_ids()
    by_table = {fqn.rpartition(".")[2]: ids.cpu().long() for fqn, ids in local.items()}
    modules, result = collections(model).values(), {}
    ranks = ranks_of(*modules)
    first = {shard.table: shard.first_row for part in modules for shard in local_shards(part)}
    for config in _tables_of(model):
        ids = by_table.get(config.name, torch.zeros(0, dtype=torch.int64))
        result[config.name] = ranks.concatenate(ids + first.get(config.name, 0)).unique()
    return result


def _moves(turn: Tensor | None, old: Tensor | None) -> bool:
    """Whether rows that training left alone have other values than when they were encoded."""
    if turn is None or old is None:
        return turn is not old
    return float((turn.double() - old.double()).abs().max()) > SAME_TURN


def _tables_of(model: nn.Module) -> list[EmbeddingBagConfig]:
    """The tables of a model, sharded or not."""
    return [table for module in collections(model).values() for table in table_configs_of(module)]


@dataclass(frozen=True, eq=False)
class _ModelRows:
    """The rows of a table in the axes in which they are encoded."""

    whole: WholeRows
    turned: Callable[[Tensor], Tensor]

    def sampled(self, sample: RowSample) -> Tensor:
        """Reads the values of the rows in a sample. One all_reduce."""
        whole = self.whole
        copies = 1 if whole.is_cut else whole.copies
        values = sampled_values(sample, whole.shards, whole.shape[1], copies, whole.ranks)
        return self.turned(values)

    def parts(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows in `ids` that this rank holds, with their values, some at a time. If
        rows are cut over ranks, each step is an all_reduce."""
        whole, dim = self.whole, self.whole.shape[1]
        spans: list[tuple[Tensor, Sequence[TableShard], Ranks]] = [(ids, whole.shards, whole.ranks)]
        if not whole.is_cut:
            bounds = [shard.window[0] for shard in whole.shards]
            of_shards = [ids[(ids >= rows.start) & (ids < rows.stop)] for rows in bounds]
            spans = [(part, [s], Ranks()) for part, s in zip(of_shards, whole.shards, strict=True)]
        for of_span, shards, ranks in spans:
            for part in of_span.split(max(1, VALUES_PER_OPERATION // dim)):
                sample = RowSample(part, part, part)
                yield part, self.turned(sampled_values(sample, shards, dim, 1, ranks))

    def unlike(self, old: Rows) -> Tensor:
        """Finds the rows whose values differ from the old ones. One all_reduce."""
        is_other = torch.zeros(self.whole.shape[0], dtype=torch.uint8)
        for shard in self.whole.shards:
            for chunk, rows, columns in shard.chunks():
                change = chunk.cpu() - old(rows.start, rows.stop)[:, columns]
                is_other[rows] |= (change.abs_().amax(1) != 0).to(is_other)  # NaN is another value
        return self.whole.ranks.max_(is_other).nonzero().flatten()


def _rows_of(model: nn.Module, axes: AxesOfRows | None = None) -> dict[str, _ModelRows]:
    """The rows of every table that this rank walks through, in other axes than they stand in."""
    modules = list(collections(model).values())
    shards, ranks = [shard for part in modules for shard in local_shards(part)], ranks_of(*modules)
    shapes = {t.name: (t.num_embeddings, t.embedding_dim) for t in _tables_of(model)}
    return {
        name: _ModelRows(of_table, partial((axes or AxesOfRows([], [], {})).turned, name))
        for name, of_table in whole_rows(shards, shapes, ranks).items()
    }


def _turns_of(
    model: nn.Module, served: Mapping[str, _Served], counts: FrequencyCounts
) -> dict[str, Tensor]:
    """What turns a model's rows into an artifact's axes, by table: the artifact's turns, or none at
    all where its rows agree better with what is served as they are."""
    whole, tables = _rows_of(model), {name: part.table for name, part in served.items()}
    check([*whole] == [*tables], "artifact", f"tables {[*whole]}", [*tables])
    for name, table in tables.items():
        shape, place = (table.num_embeddings, table.embedding_dim), f"table {name!r}"
        actual = whole[name].whole.shape
        check(actual == shape, place, f"the artifact's N, D = {shape}", actual)
        check(table.has_codes, place, "columns in codes", "none", "compress the model first")
    turns = {name: t.turn.double() for name, t in tables.items() if t.turn is not None}
    errors = torch.zeros(2, dtype=torch.float64)
    for name, turn in turns.items():
        table = tables[name]
        sample = _some_rows(counts.counts[name], table.routing, ROWS_TO_COMPARE)
        values = whole[name].sampled(sample).double()
        old_values = _ungained(served[name].values(sample.rows), sample.blocks, table.row_gain)
        for index, of_model in enumerate((values @ turn, values)):
            is_retained = pad(table.retained, (0, 0, 0, 1))[sample.blocks]
            squares = (of_model - old_values).square() * is_retained * sample.weights[:, None]
            errors[index] += squares.sum() / values.square().sum().clamp(min=1e-30)
    stands_there = bool(errors[1] < errors[0])
    return {
        name: torch.eye(len(turn)).double() if stands_there else turn
        for name, turn in turns.items()
    }


def _ungained_codes(table: TableScheme) -> ColumnCodes:
    """The codes of a table for values that gains have not scaled."""
    bits, gain = table.codes.bits, table.row_gain
    scale = table.codes.scale if gain is None else table.codes.scale / gain
    scale = torch.where(is_coded(bits), scale.bfloat16().float(), 1.0)
    return ColumnCodes(bits, scale, table.codes.shift)


def _ungained(values: Tensor, blocks: Tensor, gain: Tensor | None) -> Tensor:
    """What codes stand for before they were scaled by gains."""
    return values if gain is None else values / pad(gain, (0, 0, 0, 1), value=1.0)[blocks]


class _Served:
    """Looks up the values that a table serves."""

    def __init__(self, table: TableScheme, rows: Tensor) -> None:
        self.table, self._rows = table, rows

    @cached_property
    def _module(self) -> PackedEmbeddingBagCollection:
        codes = self.table.codes  # to find all rows takes a while, and may not be needed
        packed = PackedTable.from_rows(self.table, self._rows, codes.scale, codes.shift)
        scheme = table_of_single_ids(self.table)
        return PackedEmbeddingBagCollection(scheme, {self.table.name: packed})

    def values(self, ids: Tensor) -> Tensor:
        """Looks up the served values of rows, ``(n, D)``. A row without bytes has zeros."""
        return self._module.lookup(ids, torch.arange(len(ids) + 1))


def _served(scheme: MixedDimensionScheme, rows: Mapping[str, Tensor]) -> dict[str, _Served]:
    return {name: _Served(table, rows[name]) for name, table in scheme.tables.items()}


def _some_rows(counts: Tensor, routing: RowRouting, rows_per_block: int) -> RowSample:
    """Rows of every block at equal distances, each standing for as many; rising."""
    steps = (routing.row_counts() // rows_per_block).clamp(min=1)
    rows_of_blocks = [_rows_of_block(routing, *pair) for pair in enumerate(steps.tolist())]
    rows = torch.cat(rows_of_blocks).sort().values
    blocks = routing.block_of(rows)
    weights = counts[rows].double().clamp(min=UNSEEN_WEIGHT) * steps[blocks]
    return RowSample(rows, blocks, weights)


def _rows_of_block(routing: RowRouting, block: int, step: int = 1) -> Tensor:
    """Every `step`-th row of a block, rising."""
    if routing.block_of_row is not None:
        return routing.block_of_row.eq(block).nonzero().flatten()[::step]
    first, last = cast(Tensor, routing.boundaries)[block : block + 2].tolist()
    return torch.arange(first, last, step)


def _with_newborn(table: TableScheme, counts: Tensor) -> TableScheme:
    """The same table with a block behind the others, of rows that have no byte and have been read
    as often as the rarest rows that have some. It has the bits of the block whose rows are read
    about as often."""
    has_bytes = pad(row_strides(table.codes.bits) > 0, (0, 1))
    blocks, times = table.routing.all_blocks(), counts.long()
    is_stored = has_bytes[blocks]
    if not bool(is_stored.any()) or bool(is_stored.all()):
        return table
    is_newborn = ~is_stored & (times >= max(1, int(times[is_stored].min())))
    if int(is_newborn.sum()) < LEAST_NEWBORN:
        return table
    last = table.num_blocks
    reads = torch.zeros(last + 1, dtype=torch.float64).index_add_(0, blocks, times.double())
    reads /= table.routing.row_counts(include_unassigned=True).clamp(min=1)
    distance = (reads / times[is_newborn].double().mean()).clamp(min=1e-9).log().abs()
    nearest = int(distance.masked_fill(~has_bytes, torch.inf).argmin())
    blocks = torch.where(blocks == last, last + 1, blocks).masked_fill(is_newborn, last)
    codes = ColumnCodes(
        torch.cat([table.codes.bits, table.codes.bits[nearest : nearest + 1]]),
        pad(table.codes.scale, (0, 0, 0, 1), value=1.0),
        pad(table.codes.shift, (0, 0, 0, 1)),
    )
    gain = None if table.row_gain is None else pad(table.row_gain, (0, 0, 0, 1), value=1.0)
    routing = RowRouting.from_map(blocks, last + 1)
    bare = replace(table, bits=None, scale=None, shift=None, feedback=None, gain=None)
    larger = replace(bare, routing=routing, retained=codes.bits > 0, num_retained=0)
    return replace(larger.with_codes(codes), row_gain=gain)


def _blocks_of(tables: Mapping[str, TableScheme], counts: FrequencyCounts) -> RowBlocks:
    """The blocks of a scheme, with how often their rows occur."""
    occurrences, seen_rows = dict[str, Tensor](), dict[str, Tensor]()
    for name, table in tables.items():
        blocks, times = table.routing.all_blocks(), counts.counts[name]
        for sums, weights in ((occurrences, times), (seen_rows, times > 0)):
            of_blocks = torch.bincount(blocks, weights.double(), minlength=table.num_blocks + 1)
            sums[name] = of_blocks[:-1].long()
    return RowBlocks(
        routings={name: table.routing for name, table in tables.items()},
        embedding_dims={name: table.embedding_dim for name, table in tables.items()},
        max_bag_lengths=dict(counts.max_bag_lengths),
        occurrences=occurrences,
        seen_rows=seen_rows,
    )


def _fitted_codes(
    table: TableScheme, old: TableScheme, rows: _ModelRows, counts: Tensor
) -> tuple[ColumnCodes, Tensor]:
    """The codes of a table: old scales where they still fit; and which blocks have new ones."""
    codes, has_code = _ungained_codes(table), is_coded(table.codes.bits)
    scale, shift = codes.scale.clone(), codes.shift.clone()
    sample = _some_rows(counts, table.routing, ROWS_TO_FIT)
    values, is_fitted = rows.sampled(sample), torch.zeros(table.num_blocks, dtype=torch.bool)
    plain = values_in_codes(values, sample.blocks, codes, place=table.name)
    of_old = (values - plain).double().square() * sample.weights[:, None]
    row_counts = table.routing.row_counts()
    for s in has_code.any(1).nonzero().flatten().tolist():
        here, columns = sample.blocks == s, has_code[s].nonzero().flatten()
        bits, weights = codes.bits[s, columns], sample.weights[here]
        of_block = values[here][:, columns]
        # Of some rows of a block one half teaches what is judged on the other; of all, all do both.
        is_part = len(of_block) < int(row_counts[s])
        taught, judged = (slice(0, None, 2), slice(1, None, 2)) if is_part else (slice(None),) * 2
        fresh = _fit(of_block[taught], weights[taught], bits)
        number = torch.zeros(len(of_block[judged]), dtype=torch.int64)
        again = values_in_codes(of_block[judged], number, fresh, place=table.name)
        of_fresh = (of_block[judged] - again).double().square() * weights[judged, None]
        is_worse = of_old[here][judged][:, columns].sum() > WORST_SCALES * of_fresh.sum()
        is_fitted[s] = s >= old.num_blocks or bool(is_worse)
        if is_fitted[s]:
            fresh = _fit(of_block, weights, bits) if is_part else fresh
            scale[s, columns], shift[s, columns] = fresh.scale[0], fresh.shift[0]
    result = ColumnCodes(codes.bits, scale, shift)
    if table.row_gain is not None:
        result = result.with_gain(torch.where(is_fitted[:, None], 1.0, table.row_gain))
    return result, is_fitted


def _fit(values: Tensor, weights: Tensor, bits: Tensor) -> ColumnCodes:
    """The best codes of some columns of a block, each at its own width."""
    widths, index = bits.unique(return_inverse=True)
    fit = fit_codes(values, weights, widths.tolist())
    scale, shift = (part.gather(0, index[None]) for part in (fit.scale, fit.shift))
    return ColumnCodes(bits[None], scale, shift)


def _encode(
    table: TableScheme,
    of_model: _ModelRows,
    is_fitted: Tensor,
    ids: Tensor | None,
    served: _Served | None,
) -> list[_PartOfBlock]:
    """Encodes the rows in `ids`, or all rows of a table. Every rank gets those of all ranks. If
    `served` is given, rows whose served values are still close are skipped."""
    codes, routing, place = table.codes, table.routing, table.name
    whole, has_bytes = of_model.whole, row_strides(codes.bits) > 0
    # few rows have changed, so arrays of all rows would take most of the time
    due = [] if ids is None else [ids[pad(has_bytes, (0, 1))[routing.block_of(ids)]]]
    for s in (has_bytes if ids is None else has_bytes & is_fitted).nonzero().flatten().tolist():
        due.append(_rows_of_block(routing, s))
    parts, is_writer = list[_PartOfBlock](), whole.copies == 1 or whole.ranks.is_first
    for rows, values in of_model.parts(tally(torch.cat([_NO_ROWS, *due]))[0]):
        if not is_writer:
            continue
        of_rows = routing.block_of(rows)
        if served is not None:
            new = values_in_codes(values, of_rows, codes, place=place)
            both = (served.values(rows), served.table.row_gain), (new, table.gain)
            errors = [
                (_ungained(part, of_rows, gain) - values).square().sum(1) for part, gain in both
            ]
            differs = is_fitted[of_rows] | (errors[0] > WORST_CODES * errors[1])
            rows, of_rows, values = rows[differs], of_rows[differs], values[differs]
        fields, row_counts = pack_values(values, of_rows, codes, place=place)
        for s, of_block in enumerate(split_blocks(fields, row_counts, codes.bits)):
            if of_block.numel():
                parts.append((s, rows[of_rows == s], of_block))
    return [part for of_rank in whole.ranks.gather(parts) for part in of_rank]


def _errors(values: Tensor, sample: RowSample, codes: ColumnCodes) -> Tensor:
    """The share of a column's energy that its nearest codes leave, ``(S, D)``."""
    rest = values - values_in_codes(values, sample.blocks, codes, place="codes")
    squares = torch.stack([rest, values]).double().square() * sample.weights[:, None]
    sums = torch.zeros(2, *codes.bits.shape, dtype=torch.float64)
    sums.index_add_(1, sample.blocks, squares)
    return sums[0] / sums[1].clamp(min=torch.finfo(torch.float64).tiny)


def _with_parts(table: TableScheme, rows: Tensor, parts: list[_PartOfBlock]) -> tuple[Tensor, int]:
    """Bit fields with some rows written anew, behind them those of a block that is new; and how
    many rows have other bytes."""
    if not parts:
        return rows, 0
    size = int(table.routing.row_counts() @ row_strides(table.codes.bits))
    old_size, num_changed = len(rows), 0
    rows = pad(rows, (0, size - old_size)) if size > old_size else rows.clone()
    blocks = split_blocks(rows, table.routing.row_counts(), table.codes.bits)
    begin = rows.storage_offset()
    for s in sorted({s for s, _, _ in parts}):
        is_new = blocks[s].storage_offset() - begin >= old_size
        rows_of_block = _rows_of_block(table.routing, s)
        for _, ids, fields in (part for part in parts if part[0] == s):
            place = torch.searchsorted(rows_of_block, ids)
            num_changed += int((is_new | (blocks[s][place] != fields).any(dim=1)).sum())
            blocks[s][place] = fields
    return rows, num_changed


def _losses(worth: Curvature, energies: RoundingEnergies, name: str, bits: Tensor) -> Tensor:
    """What a table is predicted to lose at these bits and fresh scales, by block, ``(S,)``."""
    index = torch.searchsorted(torch.tensor(energies.bits), bits.long())
    index = index.clamp(max=len(energies.bits) - 1)
    energy = energies.tables[name].energy.gather(2, index[:, :, None])[:, :, 0]
    energy = energy.masked_fill(bits == FLOAT_BITS, 0.0)
    return (worth.curvature[name].cpu().clamp(min=0) * energy).sum(1) / 2


def drift(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    rows: Mapping[str, Tensor],
    batches: Iterable[Batch],
    *,
    loss: Loss | Task,
    counts: FrequencyCounts,
    leave_alone: Collection[str] = (),
) -> dict[str, float]:
    """Table -> what a fresh allocation of the same bytes is predicted to save, over the loss; a
    whole refresh is due once all of them add up to more than `MOST_DRIFT`.

    Turns the model into the axes of the artifact, whose bit fields are `rows`. Distributed: the
    collectives of `rotate_`, `curvature` twice, and `rounding_energies`.
    """
    with tables_named_apart(model):
        change = AxesChange.of(model, counts, leave_alone)
        batch = checked_batch(next(iter(batches)), loss, "batch 0")
        change.turn_(batch, loss, _turns_of(model, _served(scheme, rows), counts), math.inf)
        of_model, result = _rows_of(model), {}
        ranks = of_model[next(iter(of_model))].whole.ranks
        more: Any = {"process_group": ranks.group, "leave_alone": leave_alone}
        blocks = blocks_over_ranks(counts, _tables_of(model), **more)
        more = {"loss": loss, "warns": False, "couplings": False}
        worth = curvature(model, batches, blocks, **more)
        of_old = curvature(model, batches, _blocks_of(scheme.tables, counts), **more)
        energies = rounding_energies(model, blocks, counts)
        num_bytes = sum(table.served_bytes(PACKED) for table in scheme.tables.values())
        size = compression_of(scheme.dense_parameters, num_bytes)
        fresh = allocate(model, blocks, counts, worth, compression=size, energies=energies).scheme
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), evaluating(model):
            for batch in map(for_lookup, batches):
                batch, number = batch.to(device_of(model)), len(batch.labels)
                value = mean_loss(outputs_of(model, batch, loss), batch, loss, "newest samples")
                sums += torch.tensor([number * float(value), number])
        total, num_samples = ranks.sum_(sums).tolist()
        mean = max(abs(total / num_samples), 1e-30)
        for name, table in fresh.tables.items():
            old, times = scheme.tables[name], counts.counts[name]
            sample = _some_rows(times, old.routing, ROWS_TO_FIT)
            errors = _errors(of_model[name].sampled(sample), sample, _ungained_codes(old))
            lost = float((of_old.curvature[name].cpu().clamp(min=0) * errors).sum()) / 2
            of_fresh = float(_losses(worth, energies, name, table.codes.bits).sum())
            result[name] = (lost - of_fresh) / mean
    return result
