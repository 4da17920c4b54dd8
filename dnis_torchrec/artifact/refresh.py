"""Refresh: what a model that was trained on publishes, beside an artifact of yesterday.

`whole_` compresses anew at the artifact's size, in its axes where they still serve. `delta_` keeps
the artifact's scheme, and gives the state that differs from it in as little as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.bits import Allocation, allocate
from dnis_torchrec.allocation.compress import Measured, measure_
from dnis_torchrec.allocation.curvature import Curvature, Loss, curvature
from dnis_torchrec.allocation.energies import (
    BITS,
    RoundingEnergies,
    RowSample,
    WholeRows,
    rounding_energies,
    sample_rows,
    sampled_values,
    whole_rows,
)
from dnis_torchrec.artifact.delta import ServedState
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import (
    FLOAT_BITS,
    ColumnCodes,
    decode_rows,
    feedback_of,
    is_coded,
    row_strides,
    unpack_fields,
)
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowDirectory, RowRouting
from dnis_torchrec.checks import check
from dnis_torchrec.data.task import Task
from dnis_torchrec.ops.packed import pack_values, values_in_codes
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme, compression_of
from dnis_torchrec.selection.shards import (
    collections,
    dense_state,
    local_shards,
    ranks_of,
    table_configs_of,
    tables_named_apart,
)
from dnis_torchrec.serving.packed import split_blocks

WORST_SCALES = 1.25
"""A block gets new scales once its error, weighted by curvature, is so many times that of scales
which fit."""
WORST_CODES = 2.0
"""Where nobody says which rows have changed: a row has, once its codes err so many times as much as
new ones would."""
LEAST_NEWBORN = 32
"""Fewer rows of a table wait for the next delta: a block's scales take as much as a few rows."""
MOST_DRIFT = 1e-3
"""Share of the loss that a scheme may be predicted to lose against a fresh one of the same size."""
ROWS_TO_COMPARE = 256
"""Rows of a block that tell in which axes a model stands."""
SAME_TURN = 1e-5
"""How far rounding moves what rows are multiplied by; a product's weights that learn move it more.
"""


@dataclass(frozen=True, eq=False)
class Refresh:
    """A model's tables in the scheme of an earlier day. The same on every rank. `drift` is the
    share of the loss that a fresh allocation of the same size is predicted to save, by table."""

    scheme: MixedDimensionScheme
    rows: Mapping[str, Tensor]
    dense: Mapping[str, Tensor]
    num_changed: Mapping[str, int]
    predicted_loss_increase: float
    drift: Mapping[str, float]

    def state(self, base: ServedState, **facts: Any) -> ServedState:
        """What stands in place of the artifact, its weights in the order that its file has."""
        names = [name for name in {**base.dense, **self.dense} if name in self.dense]
        dense = {name: self.dense[name] for name in names}
        return replace(base, scheme=self.scheme, rows=self.rows, dense=dense, **facts)

    @property
    def is_stale(self) -> bool:
        """Whether a whole refresh is due."""
        return sum(self.drift.values()) > MOST_DRIFT


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
        turns = _turns_of(model, scheme, rows, counts)
        measurement = measure_(
            *(model, batches),
            loss=loss,
            counts=counts,
            held_out=held_out,
            leave_alone=leave_alone,
            turns=turns,
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
    held_out: Iterable[Batch] | None = None,
    leave_alone: Collection[str] = (),
) -> Refresh:
    """Encodes a model in the scheme of an artifact: rows that changed, blocks whose scales no
    longer fit, and rows born since.

    `rows` are the artifact's bit fields, `batches` the newest samples, `counts` those of all days.
    `rows_read` has the rows that training has read since, by table; without it codes are compared.
    Gains that held-out samples teach move scales alone. Turns the model as `measure_` does, with
    its collectives; each rank encodes the rows that it holds.
    """
    with tables_named_apart(model):
        turns = _turns_of(model, scheme, rows, counts)
        frozen = {name: _with_newborn(t, counts.counts[name]) for name, t in scheme.tables.items()}
        widths = {
            *BITS,
            *(bits for t in frozen.values() for bits in t.codes.bits.flatten().tolist()),
        }
        measurement = measure_(
            *(model, batches),
            loss=loss,
            counts=counts,
            held_out=held_out,
            bits=sorted(widths),
            leave_alone=leave_alone,
            turns=turns,
            blocks=_blocks_of(frozen, counts),
        )
        state = _State(measurement)
        tables, is_fitted, losses = dict[str, TableScheme](), {}, {}
        for name, table in frozen.items():
            codes, is_fitted[name], losses[name] = state.codes(table, scheme.tables[name])
            tables[name] = table.with_codes(codes)
        prediction = measurement.sample.predict(MixedDimensionScheme(tables))
        learnt = (prediction.scheme or MixedDimensionScheme(tables)).tables
        new_rows, num_changed = {}, {}
        for name, table in learnt.items():
            turn = measurement.axes_change.turns.get(name)
            has_ids = rows_read is not None and not _moves(turn, turns.get(name))
            ids = rows_read.get(name) if rows_read is not None and has_ids else None
            parts = state.encode(table, scheme.tables[name], rows[name], is_fitted[name], ids)
            new_rows[name], num_changed[name] = _with_parts(table, rows[name], parts)
            tables[name] = replace(table, turn=turn, row_gain=table.gain)
        with measurement.shifted(prediction):
            dense = {key: part.detach().cpu().clone() for key, part in dense_state(model).items()}
        result = MixedDimensionScheme(tables)
        drift = _drift(measurement, result, losses, batches, loss, leave_alone)
    increase = prediction.loss_increase
    return Refresh(result, new_rows, dense, num_changed, increase, drift)


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


def _rows_of(model: nn.Module) -> dict[str, WholeRows]:
    """The rows of every table that this rank walks through."""
    modules = list(collections(model).values())
    shards, ranks = [shard for part in modules for shard in local_shards(part)], ranks_of(*modules)
    shapes = {t.name: (t.num_embeddings, t.embedding_dim) for t in _tables_of(model)}
    return whole_rows(shards, shapes, ranks)


def _sampled(whole: WholeRows, sample: RowSample) -> Tensor:
    """The values of some rows. One all_reduce."""
    copies = 1 if whole.is_cut else whole.copies
    return sampled_values(sample, whole.shards, whole.shape[1], copies, whole.ranks)


def _turns_of(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    rows: Mapping[str, Tensor],
    counts: FrequencyCounts,
) -> dict[str, Tensor]:
    """What turns a model's rows into an artifact's axes, by table: the artifact's turns, or none at
    all where its rows agree better with what is served as they are."""
    whole = _rows_of(model)
    check([*whole] == [*scheme.tables], "artifact", f"tables {[*whole]}", [*scheme.tables])
    for name, table in scheme.tables.items():
        shape, place = (table.num_embeddings, table.embedding_dim), f"table {name!r}"
        check(
            whole[name].shape == shape, place, f"the artifact's N, D = {shape}", whole[name].shape
        )
        check(table.has_codes, place, "columns in codes", "none", "compress the model first")
    turns = {name: t.turn.double() for name, t in scheme.tables.items() if t.turn is not None}
    errors = torch.zeros(2, dtype=torch.float64)
    for name, turn in turns.items():
        table = scheme.tables[name]
        sample = sample_rows(counts.counts[name], table.routing, ROWS_TO_COMPARE)
        values, codes = _sampled(whole[name], sample).double(), table.codes
        fields = _BitFields(table, rows[name]).fields(sample.rows, sample.blocks)
        served_values = decode_rows(fields, sample.blocks, codes)
        old_values = _ungained(served_values, sample.blocks, table.row_gain)
        for index, of_model in enumerate((values @ turn, values)):
            is_retained = pad(table.retained, (0, 0, 0, 1))[sample.blocks]
            squares = (of_model - old_values).square() * is_retained * sample.weights[:, None]
            errors[index] += squares.sum() / values.square().sum().clamp(min=1e-30)
    stands_there = bool(errors[1] < errors[0])
    return {
        name: torch.eye(len(turn)).double() if stands_there else turn
        for name, turn in turns.items()
    }


def _ungained(values: Tensor, blocks: Tensor, gain: Tensor | None) -> Tensor:
    """What codes stand for before they were scaled by gains."""
    return values if gain is None else values / pad(gain, (0, 0, 0, 1), value=1.0)[blocks]


class _BitFields:
    """The rows of a table in bit fields, to be found by id."""

    def __init__(self, table: TableScheme, rows: Tensor) -> None:
        self._bits = table.codes.bits
        self._directory = RowDirectory.of(table.routing, (self._bits > 0).any(dim=1))
        self.blocks = split_blocks(rows, table.routing.row_counts(), self._bits)

    def places(self, ids: Tensor) -> Tensor:
        """The place of each row in its block."""
        return self._directory.locate(ids)[1]

    def fields(self, ids: Tensor, of_rows: Tensor) -> Tensor:
        """The codes of some rows, ``(n, D)`` int32."""
        places = self.places(ids)
        fields = torch.zeros(len(ids), self._bits.shape[1], dtype=torch.int32)
        for s in of_rows.unique().tolist():
            if s < len(self.blocks) and self.blocks[s].numel():
                here = of_rows == s
                fields[here] = unpack_fields(self.blocks[s][places[here]], self._bits[s])
        return fields


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
    retained, num_retained = codes.bits > 0, 0
    larger = replace(bare, routing=routing, retained=retained, num_retained=num_retained)
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


def _losses(worth: Curvature, energies: RoundingEnergies, name: str, bits: Tensor) -> Tensor:
    """What a table is predicted to lose at these bits and fresh scales, by block, ``(S,)``."""
    index = torch.searchsorted(torch.tensor(energies.bits), bits.long())
    index = index.clamp(max=len(energies.bits) - 1)
    energy = energies.tables[name].energy.gather(2, index[:, :, None])[:, :, 0]
    energy = energy.masked_fill(bits == FLOAT_BITS, 0.0)
    return (worth.curvature[name].cpu().clamp(min=0) * energy).sum(1) / 2


BlockRows = tuple[int, Tensor, Tensor]
"""A block, some of its rows by id, and their bytes."""


class _State:
    """A model that stands in an artifact's axes, ready to be encoded table by table."""

    def __init__(self, measurement: Measured) -> None:
        self._measurement, self._rows = measurement, _rows_of(measurement.model)

    def codes(self, table: TableScheme, old: TableScheme) -> tuple[ColumnCodes, Tensor, Tensor]:
        """The codes of a table; which blocks have new scales; what each block is predicted to
        lose."""
        name, bits = table.name, table.codes.bits
        measurement = self._measurement
        has_code = is_coded(bits)
        gain = torch.ones(bits.shape) if table.row_gain is None else table.row_gain
        scale = torch.where(has_code, (table.codes.scale / gain).bfloat16().float(), 1.0)
        plain = ColumnCodes(bits, scale, table.codes.shift)
        sample = sample_rows(measurement.counts.counts[name], table.routing)
        values = _sampled(self._rows[name], sample)
        worth = measurement.curvature.curvature[name].cpu().clamp(min=0)
        of_old = (worth * _errors(values, sample, plain)).sum(1) / 2
        of_new = _losses(measurement.curvature, measurement.energies, name, bits)
        is_fitted = of_old > WORST_SCALES * of_new
        is_fitted[old.num_blocks :] = True
        fresh = measurement.energies.codes(name, bits)
        takes_fresh = is_fitted[:, None] & has_code
        feedback = feedback_of(measurement.curvature.couplings[name].cpu(), bits)
        codes = ColumnCodes(
            bits,
            torch.where(takes_fresh, fresh.scale, plain.scale),
            torch.where(takes_fresh, fresh.shift, plain.shift),
            feedback,
        )
        if table.row_gain is not None:
            codes = codes.with_gain(torch.where(is_fitted[:, None], 1.0, gain))
        return codes, is_fitted, torch.where(is_fitted, of_new, of_old)

    def encode(
        self,
        table: TableScheme,
        old: TableScheme,
        rows: Tensor,
        is_fitted: Tensor,
        ids_read: Tensor | None,
    ) -> list[BlockRows]:
        """Rows of a table whose codes are to be written, those of all ranks."""
        whole, is_read = self._rows[table.name], None
        if ids_read is not None:
            is_read = torch.zeros(table.num_embeddings, dtype=torch.bool)
            is_read[ids_read] = True
        bit_fields, parts = _BitFields(old, rows), list[BlockRows]()
        has_bytes = pad(row_strides(table.codes.bits) > 0, (0, 1))
        is_writer = whole.copies == 1 or whole.ranks.is_first
        for chunk in whole.chunks():
            ids = torch.arange(chunk.rows.start, chunk.rows.stop)
            blocks = table.routing.block_of(ids)
            is_here = has_bytes[blocks]
            if is_read is not None:
                is_here &= is_read[ids] | pad(is_fitted, (0, 1))[blocks]
            if not is_writer or not bool(is_here.any()):
                continue
            ids, blocks, values = ids[is_here], blocks[is_here], chunk.values.cpu()[is_here].float()
            if is_read is None:
                old_fields = bit_fields.fields(ids, blocks)
                differs = is_fitted[blocks] | self._errs(table, values, blocks, old_fields)
                ids, blocks, values = ids[differs], blocks[differs], values[differs]
            fields, row_counts = pack_values(values, blocks, table.codes, place=table.name)
            for s, of_block in enumerate(split_blocks(fields, row_counts, table.codes.bits)):
                if of_block.numel():
                    parts.append((s, ids[blocks == s], of_block))
        return [part for of_rank in whole.ranks.gather(parts) for part in of_rank]

    def _errs(self, table: TableScheme, values: Tensor, blocks: Tensor, fields: Tensor) -> Tensor:
        """Which rows codes are far from, every column by what the loss bends with it, ``(n,)``."""
        bends = self._measurement.curvature.couplings[table.name].cpu().diagonal(dim1=1, dim2=2)
        weights = bends / bends.sum(1, keepdim=True).clamp(min=1e-30) + 1 / bends.shape[1]
        weights = (weights * is_coded(table.codes.bits) + (table.codes.bits == FLOAT_BITS))[blocks]
        old = decode_rows(fields, blocks, table.codes)
        new = values_in_codes(values, blocks, table.codes, place=table.name)
        rest = [_ungained(part, blocks, table.gain) - values for part in (old, new)]
        errors = [(part.double().square() * weights).sum(1) for part in rest]
        return errors[0] > WORST_CODES * errors[1]


def _errors(values: Tensor, sample: RowSample, codes: ColumnCodes) -> Tensor:
    """The share of a column's energy that its nearest codes leave, ``(S, D)``."""
    rest = values - values_in_codes(values, sample.blocks, codes, place="codes")
    sums = torch.zeros(2, *codes.bits.shape, dtype=torch.float64)
    for total, part in zip(sums, (rest, values), strict=True):
        squares = part.double().square() * sample.weights[:, None]
        total.index_add_(0, sample.blocks, squares)
    return sums[0] / sums[1].clamp(min=torch.finfo(torch.float64).tiny)


def _with_parts(table: TableScheme, rows: Tensor, parts: list[BlockRows]) -> tuple[Tensor, int]:
    """Bit fields with some rows written anew, behind them those of a block that is new; and how
    many rows have other bytes."""
    if not parts:
        return rows, 0
    size = int(table.routing.row_counts() @ row_strides(table.codes.bits))
    old_size, num_changed = len(rows), 0
    rows = pad(rows, (0, size - old_size)) if size > old_size else rows.clone()
    of_table = _BitFields(table, rows)
    blocks, ids = of_table.blocks, torch.cat([ids for _, ids, _ in parts])
    places = of_table.places(ids).split([len(ids) for _, ids, _ in parts])
    begins = [block.storage_offset() for block in blocks]
    for (s, _, fields), place in zip(parts, places, strict=True):
        is_new = begins[s] - rows.storage_offset() >= old_size
        num_changed += int((is_new | (blocks[s][place] != fields).any(dim=1)).sum())
        blocks[s][place] = fields
    return rows, num_changed


def _drift(
    measurement: Measured,
    scheme: MixedDimensionScheme,
    losses: Mapping[str, Tensor],
    batches: Iterable[Batch],
    loss: Loss | Task,
    leave_alone: Collection[str],
) -> dict[str, float]:
    """Table -> what a fresh allocation of the same bytes is predicted to save, over the loss."""
    model, counts = measurement.model, measurement.counts
    blocks = blocks_from_counts(counts, _tables_of(model), leave_alone=leave_alone)
    worth = curvature(
        *(model, batches, blocks),
        loss=loss,
        warns=False,
        couplings=False,
        num_outputs=measurement.sample.num_outputs,
    )
    energies = rounding_energies(model, blocks, counts)
    num_bytes = sum(table.served_bytes(PACKED) for table in scheme.tables.values())
    size = compression_of(scheme.dense_parameters, num_bytes)
    fresh = allocate(model, blocks, counts, worth, compression=size, energies=energies).scheme
    result, scale = {}, max(abs(measurement.sample.loss), 1e-30)
    for name, table in fresh.tables.items():
        of_fresh = float(_losses(worth, energies, name, table.codes.bits).sum())
        result[name] = (float(losses[name].sum()) - of_fresh) / scale
    return result
