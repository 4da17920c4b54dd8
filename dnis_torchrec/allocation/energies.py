"""How much loss each width of a column saves, measured on a sample of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.codes import WIDTHS, ColumnCodes, check_finite, fit_codes, is_coded
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME, RowRouting, merge_tallies, tally
from dnis_torchrec.checks import check
from dnis_torchrec.ops.packed import values_in_codes
from dnis_torchrec.ranks import Ranks, progress_bar
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.selection.shards import (
    TableShard,
    check_folded,
    collections,
    is_weighted,
    needs_indices,
    num_copies,
    ranks_of,
    shards_by_table,
    table_configs_of,
)
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.selection.wrapper import soft_selection_modules

ROWS_PER_BLOCK = 4096
UNSEEN_WEIGHT = 0.125
"""Weight, in lookups, of a row that training never looked up: little, but enough that its codes are
no garbage."""
_ROUNDS = 8
"""Rows that are certain leave more of the sample to the others, which may make further ones
certain."""


@dataclass(frozen=True, eq=False)
class RowSample:
    """Some rows of a table."""

    rows: Tensor
    blocks: Tensor
    weights: Tensor


def sample_rows(
    counts: Tensor,
    routing: RowRouting,
    rows_per_block: int = ROWS_PER_BLOCK,
    ranks: Ranks | None = None,
) -> RowSample:
    """Draws rows of every block: ranks share the chunks of a large table. Deterministic: equal
    counts and blocks give equal samples, on however many ranks."""
    num_chunks = -(-len(counts) // ROWS_AT_A_TIME)
    ranks = ranks if ranks is not None and num_chunks > 1 else Ranks()
    begin, end = ranks.share(num_chunks)
    chunks = partial(_rows_with_blocks, counts, routing, range(begin, end))
    thresholds = _thresholds(chunks(), routing, rows_per_block, ranks)
    # made at once: small tensors kept between large ones that go would leave holes as large as all
    # chunks together
    most = int(routing.row_counts().clamp(max=rows_per_block + 1).sum())
    rows, blocks = torch.empty(2, most, dtype=torch.int64)
    weights, count = torch.empty(most, dtype=torch.float64), 0
    crossings = torch.full((routing.num_blocks,), 0.5, dtype=torch.float64)
    if ranks.world_size > 1:  # those of the chunks ahead, added up one by one, as one rank does
        sums = [_Chances(thresholds, *chunk[1:]).sums for chunk in chunks()]
        of_ranks = ranks.concatenate(torch.cat([crossings[:0], *sums])).view(-1, len(crossings))
        for of_chunk in of_ranks[:begin]:
            crossings = (crossings + of_chunk).frac()
    for chunk, of_rows, times in chunks():
        chances = _Chances(thresholds, of_rows, times)
        drawn = chances.draw(crossings)
        crossings = (crossings + chances.sums).frac()
        here = slice(count, count := count + int(drawn.sum()))
        rows[here], blocks[here] = chunk[drawn], of_rows[drawn]
        weights[here] = chances.weights[drawn]
    return RowSample(*(ranks.concatenate(part[:count]) for part in (rows, blocks, weights)))


class _Chances:
    """The probability of each row of a chunk to be drawn, and the sum of it over each block."""

    def __init__(self, thresholds: Tensor, of_rows: Tensor, times: Tensor) -> None:
        frequency, of_each = times.double().clamp_(min=UNSEEN_WEIGHT), thresholds[of_rows]
        self._blocks, self._is_certain = of_rows, frequency >= of_each
        chance = frequency / of_each.clamp(min=UNSEEN_WEIGHT)
        self._chance = chance.masked_fill_(self._is_certain, 0.0)
        self.weights = torch.maximum(frequency, of_each)
        # numpy sorts uint16 in a sixth of the time of int64
        self._order = torch.from_numpy(of_rows.numpy().astype(np.uint16).argsort(kind="stable"))
        self._running = self._chance[self._order].cumsum(0)
        ends = torch.bincount(of_rows, minlength=len(thresholds)).cumsum(0)
        self._cuts = pad(self._running, (1, 0))[pad(ends, (1, 0))]
        self.sums = self._cuts.diff()

    def draw(self, crossings: Tensor) -> Tensor:
        """Which rows are drawn: those at which the sum over their block passes an integer."""
        totals, blocks = torch.empty_like(self._running), self._blocks[self._order]
        totals[self._order] = self._running - self._cuts[blocks] + crossings[blocks]
        return (totals.floor() > (totals - self._chance).floor()) | self._is_certain


def sampled_values(
    sample: RowSample,
    shards: Sequence[TableShard],
    embedding_dim: int,
    num_copies: int,
    ranks: Ranks,
) -> Tensor:
    """The sampled rows themselves. One all_reduce, in which every value comes from one rank and the
    others add zeros."""
    values = torch.zeros(sample.rows.numel(), embedding_dim)
    for shard in shards if num_copies == 1 or ranks.is_first else ():
        first, last = shard.first_row, shard.first_row + len(shard.weight)
        begin, end = torch.searchsorted(sample.rows, torch.tensor([first, last])).tolist()
        part = (sample.rows[begin:end] - first).to(shard.weight.device)
        values[begin:end, shard.window[1]] = shard.weight[part].float().cpu()
    return ranks.sum_(values)


_Chunks: TypeAlias = Iterator[tuple[Tensor, Tensor, Tensor]]
"""Rows that have a block, some at a time; their blocks; how often they were looked up."""


def _thresholds(chunks: _Chunks, routing: RowRouting, rows_per_block: int, ranks: Ranks) -> Tensor:
    """Per block the frequency from which on rows are certain: ``(S,)`` float64; 0 where all are."""
    tallies = (tally(times * routing.num_blocks + of_rows) for _, of_rows, times in chunks)
    keys, num_rows = merge_tallies(ranks.gather(merge_tallies(tallies)))
    of_runs, sizes = keys % routing.num_blocks, num_rows.double()
    frequency = (keys // routing.num_blocks).double().clamp_(min=UNSEEN_WEIGHT)
    thresholds = torch.full((routing.num_blocks,), torch.inf, dtype=torch.float64)
    for _ in range(_ROUNDS):
        certain, rest = torch.zeros(2, routing.num_blocks, dtype=torch.float64)
        is_certain = frequency >= thresholds[of_runs]
        certain.index_add_(0, of_runs, sizes.masked_fill(~is_certain, 0))
        rest.index_add_(0, of_runs, (sizes * frequency).masked_fill(is_certain, 0))
        lower = torch.minimum(thresholds, rest / (rows_per_block - certain).clamp(min=1))
        if lower.equal(thresholds):
            break
        thresholds = lower
    return torch.where(routing.row_counts() <= rows_per_block, 0.0, thresholds)


def _rows_with_blocks(counts: Tensor, routing: RowRouting, chunks: range) -> _Chunks:
    for chunk in chunks:
        rows = torch.arange(chunk * ROWS_AT_A_TIME, min((chunk + 1) * ROWS_AT_A_TIME, len(counts)))
        of_rows, times = routing.block_of(rows), counts[rows[0] : rows[-1] + 1].long()
        is_inside = of_rows < routing.num_blocks
        if not bool(is_inside.all()):
            rows, of_rows, times = rows[is_inside], of_rows[is_inside], times[is_inside]
        yield rows, of_rows, times


@dataclass(frozen=True, eq=False)
class RowChunk:
    """Some whole rows, and where this rank holds them or columns of them."""

    values: Tensor
    rows: slice
    parts: tuple[tuple[Tensor, slice, slice], ...]

    def write_(self, values: Tensor) -> None:
        """Writes other values to where the chunk lies. Local."""
        for weight, rows, columns in self.parts:
            weight.copy_(values[rows, columns].to(weight))


@dataclass(frozen=True, eq=False)
class WholeRows:
    """The rows of one table that this rank walks through."""

    shards: Sequence[TableShard]
    shape: tuple[int, int]
    is_cut: bool
    copies: int
    ranks: Ranks

    def chunks(self) -> Iterator[RowChunk]:
        """Walks through the rows."""
        if self.is_cut:
            yield from self._gathered()
            return
        for shard in self.shards:
            for weight, rows, columns in shard.chunks():
                yield RowChunk(weight.double(), rows, ((weight, slice(None), columns),))

    def _gathered(self) -> Iterator[RowChunk]:
        num_rows, dim = self.shape
        step = rows_per_chunk(dim)
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            parts = tuple(part for shard in self.shards for part in _within(shard, start, stop))
            values = torch.zeros(stop - start, dim, dtype=torch.float64)
            for weight, rows, columns in parts:
                values[rows, columns] = weight.cpu().double()
            yield RowChunk(self.ranks.sum_(values), slice(start, stop), parts)


def _within(shard: TableShard, start: int, stop: int) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yields a shard's weights of rows ``start .. stop``, if it has any, and their place there."""
    rows, columns = shard.window
    first, last = max(start, rows.start), min(stop, rows.stop)
    if first < last:
        weight = shard.weight[first - rows.start : last - rows.start]
        yield weight, slice(first - start, last - start), columns


def whole_rows(
    shards: Sequence[TableShard], shapes: Mapping[str, tuple[int, int]], ranks: Ranks
) -> dict[str, WholeRows]:
    """The rows of tables, however they are sharded."""
    if not shapes:
        return {}
    part = {table: [shard for shard in shards if shard.table == table] for table in shapes}
    cut = [any(s.weight.shape[1] != shapes[t][1] for s in parts) for t, parts in part.items()]
    is_cut = ranks.max_(torch.tensor(cut, dtype=torch.int64)).bool().tolist()
    copies = num_copies(part, shapes, ranks)
    return {
        table: WholeRows(
            *(parts, shapes[table], of_table, ranks.world_size if of_table else copies[table]),
            ranks,
        )
        for (table, parts), of_table in zip(part.items(), is_cut, strict=True)
    }


@contextmanager
def rows_in_codes(
    model: nn.Module,
    tables: Mapping[str, WholeRows],
    scheme: MixedDimensionScheme,
    rows: Mapping[str, Tensor],
) -> Iterator[None]:
    """Within the block some rows hold the values that they would be served with; afterwards their
    own, bit for bit."""
    parts = [
        part
        for name, whole in tables.items()
        for part in _coded_rows(whole, scheme.tables[name], rows[name])
    ]

    try:
        with writing_to_tables(model):
            for weight, place, _, values_in_codes in parts:
                weight[place] = values_in_codes
        yield
    finally:
        with writing_to_tables(model):
            for weight, place, values, _ in parts:
                weight[place] = values


@torch.no_grad()
def _coded_rows(
    whole: WholeRows, table: TableScheme, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(weight, places in it, values there, what they are in codes) of every shard of this rank, a
    chunk of the rows at a time."""
    place = f"table {table.name!r}"
    for chunk in rows.split(rows_per_chunk(table.embedding_dim)):
        blocks = table.routing.block_of(chunk)
        if whole.is_cut:
            sample = RowSample(chunk, blocks, torch.ones(len(chunk), dtype=torch.float64))
            values = sampled_values(sample, whole.shards, table.embedding_dim, 1, whole.ranks)
            whole_values = values_in_codes(values, blocks, table.codes, place=place)
        for shard in whole.shards:
            is_here = (chunk >= shard.first_row) & (chunk < shard.first_row + len(shard.weight))
            rows_here = (chunk[is_here] - shard.first_row).to(shard.weight.device)
            values = shard.weight[rows_here]
            if whole.is_cut:
                new_values = whole_values[is_here][:, shard.window[1]]
            else:
                new_values = values_in_codes(values, blocks[is_here], table.codes, place=place)
            yield shard.weight, rows_here, values, new_values.to(values)


BITS = (0, 1, 2, 3, 4, 5, 6, 8)
"""Widths that are offered unless others are asked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TableEnergies:
    """The rounding energies of one table, and the codes that they were measured with."""

    energy: Tensor
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, eq=False)
class RoundingEnergies:
    """Rounding energies of all tables of a model, the same on every rank."""

    bits: tuple[int, ...]
    tables: Mapping[str, TableEnergies]
    largest: Mapping[str, float] = field(default_factory=dict)

    def codes(self, table: str, bits: Tensor) -> ColumnCodes:
        """The codes of a table at widths that were measured."""
        of_table = self.tables[table]
        index = torch.searchsorted(torch.tensor(self.bits), bits.long()).unsqueeze(2)
        is_code = is_coded(bits)
        scale, shift = (x.gather(2, index).squeeze(2) for x in (of_table.scale, of_table.shift))
        scale, shift = torch.where(is_code, scale, 1.0), shift.masked_fill(~is_code, 0)
        return ColumnCodes(bits.to(torch.uint8), scale, shift)


@dataclass(frozen=True, eq=False)
class ModelTable:
    """A table of a model, and what its scheme says of its collection."""

    config: EmbeddingBagConfig
    collection: str
    is_weighted: bool
    need_indices: bool

    @property
    def name(self) -> str:
        """Of the table."""
        return self.config.name

    @property
    def shape(self) -> tuple[int, int]:
        """N and D."""
        return self.config.num_embeddings, self.config.embedding_dim

    def scheme(self, routing: RowRouting, columns: Tensor, **more: Any) -> TableScheme:
        """The scheme of whole columns of blocks; `more` are further fields of it."""
        return TableScheme(
            name=self.config.name,
            collection=self.collection,
            num_embeddings=self.config.num_embeddings,
            embedding_dim=self.config.embedding_dim,
            pooling=self.config.pooling.value.lower(),
            feature_names=tuple(self.config.feature_names),
            is_weighted=self.is_weighted,
            need_indices=self.need_indices,
            routing=routing,
            retained=columns,
            num_retained=int((routing.row_counts() * columns.sum(1)).sum()),
            **more,
        )


def tables_of(modules: Mapping[str, nn.Module]) -> list[ModelTable]:
    """The tables of collections by FQN, in their order. Local."""
    return [
        ModelTable(config, fqn, is_weighted(module), needs_indices(module))
        for fqn, module in modules.items()
        for config in table_configs_of(module)
    ]


def blocked_tables(model: nn.Module, blocks: RowBlocks) -> list[ModelTable]:
    """The tables of a model that have blocks, in its order. Local."""
    tables = [table for table in tables_of(collections(model)) if table.name in blocks.routings]
    check(bool(tables), "blocks", "those of tables of the model", sorted(blocks.routings))
    for table in tables:
        sizes = blocks.routings[table.name].num_embeddings, blocks.embedding_dims[table.name]
        requirement = f"blocks of N, D = {table.shape}"
        check(sizes == table.shape, f"table {table.name!r}", requirement, sizes)
    return tables


def check_all_merged(model: nn.Module) -> None:
    """Checks that no alpha is left to be folded into a table. Local."""
    for fqn, wrapper in soft_selection_modules(model).items():
        check_folded(fqn, wrapper)


@torch.no_grad()
def rounding_energies(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts, *, bits: Sequence[int] = BITS
) -> RoundingEnergies:
    """Measures the error that every width leaves, on a sample of a few thousand rows of every
    block."""
    rest = sorted(set(bits) - set(WIDTHS))
    check(not rest, "bits", f"some of {WIDTHS}", rest)
    widths = tuple(sorted({0, *bits}))
    check_all_merged(model)
    tables = blocked_tables(model, blocks)
    shapes = {table.name: table.shape for table in tables}
    modules = collections(model)
    holders = [modules[fqn] for fqn in dict.fromkeys(table.collection for table in tables)]
    ranks, shards = ranks_of(*holders), shards_by_table(holders, shapes)
    copies = num_copies(shards, shapes, ranks)
    energy, largest = {}, {}
    for name, part in progress_bar(shards.items(), "rounding tables", delay=1):
        of_chunks = [chunk.abs().amax().float().cpu() for s in part for chunk, _, _ in s.chunks()]
        most = torch.stack([torch.zeros(()), *of_chunks]).amax().view(1)
        largest[name] = float(ranks.max_(most))
        routing = blocks.routings[name]
        sample = sample_rows(counts.counts[name], routing, ranks=ranks)
        values = sampled_values(sample, part, shapes[name][1], copies[name], ranks)
        check_finite(values, sample.blocks, f"table {name!r}")
        energy[name] = table_energies(values, sample, routing.num_blocks, widths, ranks)
    return RoundingEnergies(widths, energy, largest)


def table_energies(
    values: Tensor, sample: RowSample, num_blocks: int, bits: Sequence[int], ranks: Ranks
) -> TableEnergies:
    """Measures the error that every width leaves on sampled rows of a table; ranks take its blocks
    in turn. Deterministic."""
    order = torch.sort(sample.blocks, stable=True).indices
    sizes = torch.bincount(sample.blocks, minlength=num_blocks).tolist()
    parts = [*zip(values[order].split(sizes), sample.weights[order].split(sizes), strict=True)]
    size = ranks.world_size
    of_ranks = ranks.gather([fit_codes(*part, bits) for part in parts[ranks.rank :: size]])
    fits = [of_ranks[block % size][block // size] for block in range(num_blocks)]
    return TableEnergies(
        energy=torch.stack([codes.error.T for codes in fits]),
        scale=torch.stack([codes.scale.T for codes in fits]),
        shift=torch.stack([codes.shift.T for codes in fits]),
    )
