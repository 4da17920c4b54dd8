"""Pruning: which values of the merged tables are retained, decided exactly for a requested size.

Two structures. ``"element"``: single values, the largest magnitudes stay (paper, eq. 7: ``|E~| < eps -> 0``).
``"block"``: whole columns of a block, by mean square over the block's seen rows; no padding in the mixed-dimension
form. Rows never seen in training are zeroed in both. Tables are walked a few rows at a time: nothing of a table's size
is ever allocated.

Local: works on the tables that this rank holds whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface

from dnis_torchrec.blocking import RowBlocks
from dnis_torchrec.budget import Budget, Size, keep_within
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.frequency import FrequencyCounts
from dnis_torchrec.row_routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.table_shards import TableShard, collections, local_shards

STRUCTURES = ("element", "block")
HALF_BITS = 16


@dataclass(frozen=True, eq=False)
class _Table:
    """One table to prune, with what is known about it."""

    name: str
    collection: str
    module: EmbeddingBagCollection
    shard: TableShard
    routing: RowRouting


@torch.no_grad()
def prune(
    model: nn.Module,
    blocks: RowBlocks,
    counts: FrequencyCounts,
    *,
    size: Size | None = None,
    threshold: float | None = None,
    structure: str = "block",
    scope: str = "global",
) -> MixedDimensionScheme:
    """Zeroes what is not retained, in place, and says what is retained.

    Args:
        model: a merged model (see `merge_`) whose tables this rank holds whole; its tables change. A collection that
            has no table in `blocks`, such as one that `prepare_` left out, stays as it is and out of the scheme.
        blocks: blocks of its tables.
        counts: training counts; rows that were never seen are zeroed.
        size: how much to retain. With structure ``"element"`` a number of parameters, or of CSR bytes, is met to the
            value; with ``"block"`` the largest set of columns that fits is kept.
        threshold: instead of a size: magnitudes (root mean squares of columns) up to this are dropped. 0 drops zeros
            only.
        structure: ``"block"`` or ``"element"``.
        scope: ``"global"``: one budget for all tables; ``"table"``: each table is brought to the same ratio.

    Returns:
        The scheme, to `export` with the model.

    Raises:
        ValueError: for an unknown structure or scope, not exactly one of size and threshold, a size that cannot be met
            (no table has changed then), or a model without a collection.
        NotImplementedError: for element structure with bytes of a form other than CSR.
        RuntimeError: if the model is not merged yet, or its tables are spread over several ranks.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from dnis_torchrec.blocking import blocks_from_counts
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
        >>> counts = FrequencyCounts({"t": torch.tensor([3, 2, 1, 0])}, {"f": 1}, 6)
        >>> blocks = blocks_from_counts(counts, [table], num_blocks=2)
        >>> ebc = EmbeddingBagCollection(tables=[table])
        >>> prune(ebc, blocks, counts, size=Size(parameters=6), structure="element").parameters
        6
    """
    check(structure in STRUCTURES, "structure", f"expected one of {STRUCTURES}", repr(structure))
    check(scope in ("global", "table"), "scope", "expected 'global' or 'table'", repr(scope))
    wanted = _size_or_threshold(size, threshold)
    tables = _tables(model, blocks, counts)
    if structure == "element":
        _prune_elements_(tables, blocks, counts, wanted, scope)
        return _scheme(tables, {table.name: _retained_columns(table) for table in tables})
    limit = Budget.of(wanted, blocks) if isinstance(wanted, Size) else wanted  # raises before a table changes
    _zero_never_seen_(tables, counts)
    kept = _kept_columns(tables, blocks, counts, limit, scope)
    for table in tables:
        _keep_columns_(table, kept[table.name])
    return _scheme(tables, kept)


class RetainedMask:
    """Holds pruned values at zero while the retained ones train on (masked fine-tuning).

    One bool per value of this rank's shards. Gradients of dense (data_parallel) tables are masked before the optimizer
    sees them, so its state stays clean; fused optimizers apply their update inside backward, so their result is masked
    afterwards. NOTE[DIFF]: the row-wise state of a fused row-wise optimizer still averages over pruned columns.

    Args:
        model: a pruned model, sharded or not; what is zero now stays zero.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shards = [shard for module in collections(model).values() for shard in local_shards(module)]
        self._masks = [shard.weight != 0 for shard in self._shards]
        storages = {shard.weight.data_ptr(): index for index, shard in enumerate(self._shards)}
        self._dense = [(p, storages[p.data_ptr()]) for p in model.parameters() if p.data_ptr() in storages]

    @torch.no_grad()
    def hold_gradients_(self) -> None:
        """Zeroes the gradients of pruned values; call before the optimizer's step."""
        for parameter, index in self._dense:
            if parameter.grad is not None:
                parameter.grad.mul_(self._masks[index])

    @torch.no_grad()
    def hold_(self) -> None:
        """Zeroes pruned values; call after the optimizer's step."""
        for shard, mask in zip(self._shards, self._masks, strict=True):
            shard.weight.mul_(mask)


def _size_or_threshold(size: Size | None, threshold: float | None) -> Size | float:
    if size is not None and threshold is None:
        return size
    if size is None and threshold is not None:
        check(threshold >= 0, "threshold", "expected a number >= 0", threshold)
        return threshold
    raise ValueError(describe("prune", "expected exactly one of size and threshold", (size, threshold)))


def _tables(model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts) -> list[_Table]:
    found = collections(model)
    check(bool(found), "prune", "expected a model with an EmbeddingBagCollection", type(model).__name__)
    blocked = {fqn: module for fqn, module in found.items() if not _table_names(module).isdisjoint(blocks.routings)}
    tables = []
    for fqn, module in (blocked or found).items():  # blocks of another model: the loop names the unknown table
        if not isinstance(module, EmbeddingBagCollection):
            place, received = f"FQN {fqn!r}", type(module).__name__
            raise RuntimeError(
                describe(place, "expected a merged, unsharded collection", received, "call merge_ first")
            )
        for shard in local_shards(module):
            check_known("table", shard.table, blocks.routings)
            check_known("table", shard.table, counts.counts)
            tables.append(_Table(shard.table, fqn, module, shard, blocks.routings[shard.table]))
    return tables


def _table_names(collection: nn.Module) -> set[str]:
    if isinstance(collection, ShardedEmbeddingBagCollection):
        return {config.name for config in collection._embedding_bag_configs}
    assert isinstance(collection, EmbeddingBagCollectionInterface)  # `collections` finds no other kind
    return {config.name for config in collection.embedding_bag_configs()}


def _zero_never_seen_(tables: list[_Table], counts: FrequencyCounts) -> None:
    for table in tables:
        never_seen = counts.never_seen(table.name)
        for part, rows, _ in table.shard.chunks():
            part[never_seen[rows].to(part.device)] = 0


# Block structure


def _kept_columns(
    tables: list[_Table],
    blocks: RowBlocks,
    counts: FrequencyCounts,
    limit: Budget | float,
    scope: str,
) -> dict[str, Tensor]:
    """table -> ``(S, D)`` bool: what a budget affords, or what lies above a threshold."""
    scores = {table.name: _mean_squares(table, counts.never_seen(table.name)) for table in tables}
    if not isinstance(limit, Budget):
        return {name: score > limit**2 for name, score in scores.items()}
    names = [table.name for table in tables]
    if scope == "global":
        return _keep_columns_within(names, scores, limit.column_costs, limit.amount)
    share = limit.share(blocks)
    kept: dict[str, Tensor] = {}
    for name in names:
        cost = limit.column_costs[name]
        amount = share * float(cost.sum()) * scores[name].shape[1]
        kept |= _keep_columns_within([name], scores, limit.column_costs, amount)
    return kept


def _keep_columns_within(
    names: list[str], scores: Mapping[str, Tensor], costs: Mapping[str, Tensor], amount: float
) -> dict[str, Tensor]:
    flat = torch.cat([scores[name].flatten() for name in names])
    cost = torch.cat([costs[name].repeat_interleave(scores[name].shape[1]) for name in names])
    kept = keep_within(flat, cost, amount).split([scores[name].numel() for name in names])
    return {name: part.view(scores[name].shape) for name, part in zip(names, kept, strict=True)}


def _mean_squares(table: _Table, never_seen: Tensor) -> Tensor:
    """Mean square of every column of every block over its seen rows, ``(S, D)`` float64."""
    num_blocks, dim = table.routing.num_blocks, table.shard.weight.shape[1]
    sums = torch.zeros(num_blocks + 1, dim, dtype=torch.float64)
    seen = torch.zeros(num_blocks + 1, dtype=torch.float64)
    for part, rows, _ in table.shard.chunks():
        block = table.routing.block_of(torch.arange(rows.start, rows.stop))
        sums.index_add_(0, block, part.cpu().double().square())
        seen.index_add_(0, block, (~never_seen[rows]).double())
    return (sums / seen.clamp(min=1).unsqueeze(1))[:num_blocks]


def _keep_columns_(table: _Table, kept: Tensor) -> None:
    padded = torch.cat([kept, torch.zeros(1, kept.shape[1], dtype=torch.bool)])
    for part, rows, _ in table.shard.chunks():
        block = table.routing.block_of(torch.arange(rows.start, rows.stop))
        part.mul_(padded[block].to(part.device))


# Element structure


def _prune_elements_(
    tables: list[_Table], blocks: RowBlocks, counts: FrequencyCounts, wanted: Size | float, scope: str
) -> None:
    shards = [table.shard for table in tables]
    if not isinstance(wanted, Size):
        _zero_never_seen_(tables, counts)
        for shard in shards:
            for part, _, _ in shard.chunks():
                part.mul_(part.abs() > wanted)
        return
    num_keep = _num_elements(wanted, blocks)  # raises before a table changes
    _zero_never_seen_(tables, counts)
    if scope == "global":
        keep_largest_(shards, num_keep)
        return
    total = sum(shard.weight.numel() for shard in shards)
    for shard in shards:
        keep_largest_([shard], num_keep * shard.weight.numel() // total)


def _num_elements(size: Size, blocks: RowBlocks) -> int:
    total = sum(routing.num_embeddings * blocks.embedding_dims[t] for t, routing in blocks.routings.items())
    name, value = size.given
    if name == "compression_ratio":
        check(value <= total, name, f"expected at most {total} for these tables", value)
        return int(total / value)
    if name == "parameters":
        return min(int(value), total)
    if size.form != "csr_fp32":
        raise NotImplementedError(describe("form", "supported for single elements is 'csr_fp32'", repr(size.form)))
    pointers = sum(4 * (routing.num_embeddings + 1) for routing in blocks.routings.values())
    per_value = {4 + (1 if dim <= 256 else 2) for dim in blocks.embedding_dims.values()}
    affordable = int(value - pointers) // max(per_value)
    smallest = pointers + max(per_value)
    check(affordable >= 1, name, f"expected at least {smallest} for these tables in CSR", value)
    return min(affordable, total)


def keep_largest_(shards: list[TableShard], num_keep: int) -> None:
    """Zeroes all but the `num_keep` largest magnitudes, exactly; among equals, earlier ones (shard, row, column) stay.

    Radix select: magnitudes of non-negative floats sort like their bit patterns, so two histograms of 2^16 bins find
    the threshold, however large the tables. (Histograms add up over ranks.)

    Args:
        shards: fp32 shards, changed in place.
        num_keep: values to keep.
    """
    high = _histogram(shards, lambda bits: bits >> HALF_BITS)
    upper, above = _bin_of_rank(high, num_keep)
    low = _histogram(shards, lambda bits: (bits & 0xFFFF)[(bits >> HALF_BITS) == upper])
    lower, above_in_bin = _bin_of_rank(low, num_keep - above)
    threshold = (upper << HALF_BITS) | lower
    ties_left = num_keep - above - above_in_bin
    for shard in shards:
        for part, _, _ in shard.chunks():
            bits = _magnitude_bits(part)
            keep, tied = bits > threshold, bits == threshold
            first_ties = tied & (tied.flatten().cumsum(0).view(tied.shape) <= ties_left)
            ties_left -= int(first_ties.sum())
            part.mul_(keep | first_ties)


def _magnitude_bits(part: Tensor) -> Tensor:
    return part.float().abs().contiguous().view(torch.int32)


def _histogram(shards: list[TableShard], to_bin: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros(1 << HALF_BITS, dtype=torch.int64)
    for shard in shards:
        for part, _, _ in shard.chunks():
            total += torch.bincount(to_bin(_magnitude_bits(part)).flatten(), minlength=1 << HALF_BITS).cpu()
    return total


def _bin_of_rank(histogram: Tensor, rank: int) -> tuple[int, int]:
    """The bin that holds the value of this rank from the top, and how many values lie in higher bins."""
    from_top = histogram.flip(0).cumsum(0)
    position = int(torch.searchsorted(from_top, torch.tensor(max(rank, 1))))
    position = min(position, len(histogram) - 1)
    above = int(from_top[position - 1]) if position else 0
    return len(histogram) - 1 - position, above


# The scheme


def _retained_columns(table: _Table) -> Tensor:
    return _mean_squares(table, torch.zeros(table.routing.num_embeddings, dtype=torch.bool)) > 0


def _nonzero_rows_and_values(table: _Table) -> tuple[Tensor, int]:
    rows, values = [], 0
    for part, _, _ in table.shard.chunks():
        rows.append((part != 0).any(dim=1).cpu())
        values += int((part != 0).sum())
    return torch.cat(rows), values


def _scheme(tables: list[_Table], retained: Mapping[str, Tensor]) -> MixedDimensionScheme:
    schemes = {}
    for table, config in _with_configs(tables):
        has_values, num_values = _nonzero_rows_and_values(table)
        routing = _without_empty_rows(table.routing, has_values, retained[table.name])
        columns = retained[table.name] & (routing.row_counts() > 0).unsqueeze(1)
        structured = int((routing.row_counts() * columns.sum(1)).sum())
        schemes[table.name] = TableScheme(
            name=table.name,
            collection=table.collection,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            pooling="mean" if config.pooling == PoolingType.MEAN else "sum",
            feature_names=tuple(config.feature_names),
            is_weighted=table.module.is_weighted(),
            routing=routing,
            retained=columns,
            num_retained=min(num_values, structured),
        )
    return MixedDimensionScheme(schemes)


def _without_empty_rows(routing: RowRouting, has_values: Tensor, retained: Tensor) -> RowRouting:
    """Drops rows that hold nothing, unless the id remap that this takes costs more than their zeros."""
    dropped = routing.without_rows(~has_values)
    if routing.boundaries is None or dropped.boundaries is not None:
        return dropped
    end = int(has_values.nonzero().max()) + 1
    trimmed = routing.without_rows(torch.arange(len(has_values)) >= end)
    saved = (trimmed.row_counts() - dropped.row_counts()) @ retained.sum(1)
    return dropped if int(saved) > routing.num_embeddings else trimmed


def _with_configs(tables: list[_Table]) -> Iterator[tuple[_Table, EmbeddingBagConfig]]:
    for table in tables:
        configs = {config.name: config for config in table.module.embedding_bag_configs()}
        yield table, configs[table.name]
