"""Pruning: which columns of which blocks stay, as many as a size pays for, on one rank or many."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dnis_torchrec.allocation.energies import ModelTable, tables_of
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting, routing_bytes
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import (
    TableShard,
    check_merged,
    collections,
    num_copies,
    ranks_of,
    shards_by_table,
    table_configs_of,
)

UNSPENT_SHARE = 0.03
"""Share of a budget that may be left before a worse but better fitting choice is taken."""
LIMB_BITS = 28
"""Two integers of so many bits hold a square over its column's largest one: sums are exact, so the
same on every number of ranks, and of 2^35 rows fit int64."""


class SizeOutOfReachError(ValueError):
    """A size that the tables cannot be brought to, or that would leave nothing of them."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A requested size of all tables together, index bytes counted: bytes of the float32 tables
    over those of the smaller ones, above 1, or the bytes of the smaller ones."""

    compression: float | None = None
    embedding_bytes: int | None = None

    def __post_init__(self) -> None:
        is_one = (self.compression is None) != (self.embedding_bytes is None)
        both = (self.compression, self.embedding_bytes)
        check(is_one, "size", "one of compression, embedding_bytes", both)
        name, value = self.given
        above = 1 if name == "compression" else 0
        is_fit = math.isfinite(value) and value > above
        check(is_fit, name, f"a finite number above {above}", value)

    @property
    def given(self) -> tuple[str, float]:
        """Which of the two is given, and its value."""
        if self.compression is not None:
            return "compression", self.compression
        return "embedding_bytes", self.embedding_bytes or 0

    def num_bytes(self, num_values: int) -> float:
        """Bytes that tables of so many values, the sum of N D, may take."""
        name, value = self.given
        # 6864 / 8.8 is 779.9999999999999
        return round(4 * num_values / value, 6) if name == "compression" else value


def keep_within(scores: Tensor, costs: Tensor, amount: float) -> Tensor:
    """Chooses what to keep: highest score first, as long as the budget lasts; earlier ones first
    among equals."""
    keeps = torch.zeros(scores.numel(), dtype=torch.bool)
    rest = amount
    for index in torch.argsort(scores, descending=True, stable=True).tolist():
        cost = float(costs[index])
        if float(scores[index]) > 0 and cost <= rest:
            keeps[index] = True
            rest -= cost
    if rest > UNSPENT_SHARE * amount:
        _exchange_one_(keeps, scores, costs, rest)
    return keeps


def _exchange_one_(keeps: Tensor, scores: Tensor, costs: Tensor, rest: float) -> None:
    """Replaces one item by a dearer one, so that less is left of the budget."""
    rivals = (~keeps & (scores > 0)).nonzero().flatten().tolist()
    best: tuple[float, float, int, int] | None = None
    for out in keeps.nonzero().flatten().tolist():
        for into in rivals:
            gain = float(costs[into] - costs[out])
            if 0 < gain <= rest and (best is None or (gain, -float(scores[out])) > best[:2]):
                best = (gain, -float(scores[out]), out, into)
    if best is not None:
        keeps[best[2]], keeps[best[3]] = False, True


def _index_bytes(blocks: RowBlocks) -> int:
    """Bytes that the tables take if nothing of them stays."""
    return sum(routing_bytes(routing) for routing in blocks.routings.values())


def _num_values(blocks: RowBlocks) -> int:
    dims = blocks.embedding_dims
    return sum(routing.num_embeddings * dims[table] for table, routing in blocks.routings.items())


def _out_of_reach(size: Size, blocks: RowBlocks, amount: float) -> SizeOutOfReachError:
    """Names the smallest size that keeps something, as the user gave it."""
    name, value = size.given
    smallest = _index_bytes(blocks) + amount
    limit = f"at least {math.ceil(smallest * (1 - 1e-12))}"
    if name == "compression":  # rounded down: rounded up it could not be met
        limit = f"at most {math.floor(400 * _num_values(blocks) / smallest) / 100:.2f}"
    return SizeOutOfReachError(describe(name, f"{limit} for these tables and blocks", value))


@torch.no_grad()
def prune(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts, *, size: Size
) -> MixedDimensionScheme:
    """Zeroes columns of blocks until a size is met, in place, and returns the scheme of the rest.

    The largest set of columns that fits stays, by mean square over the rows that training looked
    up; rows never seen are zeroed. Tables are walked a few rows at a time: nothing of a table's
    size is ever allocated, only a byte per row.

    Distributed: every rank of the model calls it and changes its own shards, of any sharding type;
    blocks and counts are those of the whole tables on every rank. Scores of columns and a byte per
    row are reduced over ranks, never a value of a table. Every rank gets the same scheme, bit for
    bit that of one process with the same tables.

    Args:
        model: a merged model (see `merge_`); its tables change. A collection that has no table in
            `blocks`, such as one that `prepare_` left out, stays as it is and out of the scheme.
        blocks: the blocks that the search used.
        counts: how often training read each row.
        size: how much stays, in narrow float32 tables, one for each block.

    Returns:
        The scheme, to `export` with the model.

    Raises:
        ValueError: for a size above that of the uncompressed tables or one that cannot be met, a
            model without a collection, tables of zeros, or a NaN or infinity in a table of any
            rank; no table has changed then.
        NotImplementedError: for tables of which some ranks hold copies and some do not.
        RuntimeError: if the model is not merged yet.

    Example:
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from dnis_torchrec.blocks.blocking import blocks_from_counts
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"]
        ... )
        >>> counts = FrequencyCounts({"t": torch.tensor([3, 2, 1, 1])}, {"f": 1}, 7)
        >>> blocks = blocks_from_counts(counts, [table], num_blocks=2, least_rows=1)
        >>> ebc = EmbeddingBagCollection(tables=[table])
        >>> prune(ebc, blocks, counts, size=Size(compression=1.6)).parameters
        2
    """
    tables, ranks = _pruned_tables(model, blocks, counts)
    if size.embedding_bytes is not None:
        limit = 4 * sum(math.prod(table.of_model.shape) for table in tables)
        requirement = f"at most {limit}, what the uncompressed tables take"
        check(size.embedding_bytes <= limit, "embedding_bytes", requirement, size.embedding_bytes)
    # All that may raise comes before a table changes.
    return _with_columns_(tables, _columns_within(tables, blocks, size, ranks), ranks)


@torch.no_grad()
def drop_zeros_(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts
) -> MixedDimensionScheme:
    """Says what is left of a model in which all else is zero already, maybe nothing; rows never
    seen are zeroed."""
    tables, ranks = _pruned_tables(model, blocks, counts)
    columns = {table.name: _largest_squares(table, ranks) > 0 for table in tables}
    return _with_columns_(tables, columns, ranks)


def uncompressed_scheme(model: nn.Module) -> MixedDimensionScheme:
    """The scheme of tables of which everything stays, all rows in one block. Local."""
    schemes = {}
    for table in tables_of(collections(model)):
        num_rows, dim = table.shape
        routing = RowRouting(num_rows, 1, boundaries=torch.tensor([0, num_rows]))
        schemes[table.name] = table.scheme(routing, torch.ones(1, dim, dtype=torch.bool))
    return MixedDimensionScheme(schemes)


@dataclass(frozen=True, eq=False)
class _Table:
    """One table to prune: this rank's shards, and what all ranks know of it."""

    of_model: ModelTable
    routing: RowRouting
    counts: Tensor
    seen_rows: Tensor
    shards: list[TableShard]
    is_first_copy: bool

    @property
    def name(self) -> str:
        """Of the table."""
        return self.of_model.name

    def chunks(self, *, once: bool = False) -> Iterator[tuple[Tensor, slice, slice]]:
        """Every value that this rank holds, a few rows at a time; `once`: over all ranks each value
        of the table once."""
        for shard in self.shards if self.is_first_copy or not once else ():
            yield from shard.chunks()

    def blocks_of(self, rows: slice) -> Tensor:
        """Blocks of some rows, int64; S for "no block"."""
        return self.routing.block_of(torch.arange(rows.start, rows.stop))


def _pruned_tables(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts
) -> tuple[list[_Table], Ranks]:
    """The tables of a merged model that have blocks, and the ranks that hold them."""
    modules = collections(model)
    check(bool(modules), "prune", "a model with an embedding collection", type(model).__name__)
    names = {fqn: {c.name for c in table_configs_of(module)} for fqn, module in modules.items()}
    with_blocks = {fqn: m for fqn, m in modules.items() if names[fqn] & blocks.routings.keys()}
    modules = with_blocks or modules  # of blocks of another model: the loop names a table
    ranks = ranks_of(*modules.values())
    for fqn, module in modules.items():
        check_merged(fqn, module, ranks)
    of_model = {table.name: table for table in tables_of(modules)}
    for name in of_model:
        check_known("table", name, blocks.routings)
        check_known("table", name, counts.counts)
    shards = shards_by_table(modules.values(), of_model)
    copies = num_copies(shards, {name: table.shape for name, table in of_model.items()}, ranks)
    tables = [
        _Table(
            of_model=table,
            routing=blocks.routings[name],
            counts=counts.counts[name],
            seen_rows=blocks.seen_rows[name],
            shards=shards[name],
            is_first_copy=copies[name] == 1 or ranks.is_first,
        )
        for name, table in of_model.items()
    ]
    bad = [sum(not chunk.isfinite().all() for chunk, _, _ in table.chunks()) for table in tables]
    num_bad = ranks.max_(torch.tensor(bad, dtype=torch.int64)).tolist()
    for table, count in zip(tables, num_bad, strict=True):
        place, remedy = f"table {table.name!r}", "go back to the last good checkpoint"
        check(count == 0, place, "finite values", "NaN or infinity", remedy)
    return tables, ranks


def _columns_within(
    tables: list[_Table], blocks: RowBlocks, size: Size, ranks: Ranks
) -> dict[str, Tensor]:
    """Columns that a size pays for, the same on every rank; no table changes."""
    scores = {table.name: mean_squares(table, ranks) for table in tables}
    if not any(bool(score.any()) for score in scores.values()):
        requirement = "a value that is not zero, in a row that training looked up"
        raise SizeOutOfReachError(describe("tables", requirement, "none"))
    # A column of a block costs a float32 of every row that training looked up, and its number.
    costs = {
        name: (4 * blocks.seen_rows[name].double() + 2).unsqueeze(1).expand_as(score)
        for name, score in scores.items()
    }
    flat_scores = torch.cat([score.flatten() for score in scores.values()])
    flat_costs = torch.cat([cost.flatten() for cost in costs.values()])
    amount = size.num_bytes(_num_values(blocks)) - _index_bytes(blocks)
    keeps = keep_within(flat_scores, flat_costs, amount)
    if not bool(keeps.any()):
        raise _out_of_reach(size, blocks, float(flat_costs[flat_scores > 0].min()))
    parts = keeps.split([score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def _with_columns_(
    tables: list[_Table], columns: Mapping[str, Tensor], ranks: Ranks
) -> MixedDimensionScheme:
    """Zeroes rows never seen, rows of no block and all columns but these."""
    for table in tables:
        keeps = columns[table.name]
        keeps = torch.cat([keeps, torch.zeros(1, keeps.shape[1], dtype=torch.bool)])
        for chunk, rows, of_chunk in table.chunks():
            occurs = (table.counts[rows] > 0).unsqueeze(1)
            chunk.mul_((keeps[table.blocks_of(rows), of_chunk] & occurs).to(chunk.device))
    schemes = {table.name: _scheme_of(table, columns[table.name], ranks) for table in tables}
    return MixedDimensionScheme(schemes)


def mean_squares(table: _Table, ranks: Ranks) -> Tensor:
    """``(S, D)`` float64: mean square of every column of every block over its seen rows."""
    num_blocks, largest = table.routing.num_blocks, _largest_squares(table, ranks)
    # A power of two, exactly, so that dividing by it rounds nothing.
    unit = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0)
    limbs = torch.zeros(2, num_blocks + 1, unit.shape[1], dtype=torch.int64)
    units = torch.cat([unit, torch.ones(1, unit.shape[1], dtype=torch.float64)])
    for chunk, rows, columns in table.chunks(once=True):
        block = table.blocks_of(rows)
        squares = _seen_squares(table, chunk, rows)
        squares = squares.div_(units[block, columns]).mul_(2.0**LIMB_BITS)
        high = squares.floor()
        low = squares.sub_(high).mul_(2.0**LIMB_BITS).round_()
        limbs[0, :, columns].index_add_(0, block, high.long())
        limbs[1, :, columns].index_add_(0, block, low.long())
    high, low = ranks.sum_(limbs)[:, :num_blocks].double()
    sums = (high + low / 2.0**LIMB_BITS) / 2.0**LIMB_BITS * unit
    return sums / table.seen_rows.double().clamp(min=1).unsqueeze(1)


def _largest_squares(table: _Table, ranks: Ranks) -> Tensor:
    """``(S, D)`` float64: the largest square of a seen row in every column of every block."""
    num_blocks = table.routing.num_blocks
    # One row more than there are blocks, for rows of no block.
    largest = torch.zeros(num_blocks + 1, table.of_model.shape[1], dtype=torch.float64)
    for chunk, rows, columns in table.chunks(once=True):
        squares = _seen_squares(table, chunk, rows)
        index = table.blocks_of(rows).unsqueeze(1).expand_as(squares)
        largest[:, columns].scatter_reduce_(0, index, squares, "amax")
    return ranks.max_(largest)[:num_blocks]


def _seen_squares(table: _Table, chunk: Tensor, rows: slice) -> Tensor:
    squares = chunk.cpu().double().square()  # a new tensor, as of float64 on a CPU `double` is not
    squares[table.counts[rows] == 0] = 0
    return squares


def _scheme_of(table: _Table, columns: Tensor, ranks: Ranks) -> TableScheme:
    has_values = torch.zeros(table.of_model.shape[0], dtype=torch.uint8)
    num_values = torch.zeros(1, dtype=torch.int64)
    for chunk, rows, _ in table.chunks(once=True):
        has_values[rows] |= (chunk != 0).any(dim=1).cpu()
        num_values += int(chunk.count_nonzero())
    has_values, num_values = ranks.max_(has_values).bool(), ranks.sum_(num_values)
    routing = _without_empty_rows(table.routing, has_values, columns)
    columns = columns & (routing.row_counts() > 0).unsqueeze(1)
    scheme = table.of_model.scheme(routing, columns)
    return replace(scheme, num_retained=min(int(num_values), scheme.num_retained))


def _without_empty_rows(routing: RowRouting, has_values: Tensor, columns: Tensor) -> RowRouting:
    """Drops rows that hold nothing, unless the id remap that this takes costs more than their
    zeros."""
    without = routing.without_rows(~has_values)
    if routing.boundaries is None or without.boundaries is not None:
        return without
    end = len(has_values) - int(has_values.flip(0).byte().argmax())
    tail = torch.zeros_like(has_values)
    tail[end:] = True
    shorter = routing.without_rows(tail)
    num_zeros = (shorter.row_counts() - without.row_counts()) @ columns.sum(1)
    return without if int(num_zeros) > routing.num_embeddings else shorter
