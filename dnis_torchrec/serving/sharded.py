"""Packed tables over several ranks: a sharder that TorchRec's planner, `shard_quant_model` and
DistributedModelParallel take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import mul
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.codes import FLOAT_BITS, pack_fields, row_strides, unpack_fields
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.packed import COLUMNS_PER_GROUP, GROUP_FIELDS, field_groups
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable, split_blocks
from dnis_torchrec.serving.sequences import table_of_single_ids
from dnis_torchrec.serving.tables import LogicalCollection, checked_bags

SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")


class PackedSharder(ModuleSharder[PackedEmbeddingBagCollection]):
    """Spreads packed tables over ranks, whole, by rows or by columns; the same outputs to the bit
    as one process.

    It takes the collections of sequences and of ``unknown_ids="mean"``, too, whose packed tables
    are modules of their own. The planner sees a table as so many float32 rows as its packed bytes
    make, so that its shares of rows or columns are shares of bytes.

    Example:
        >>> from dnis_torchrec.serving import PackedSharder
        >>> PackedSharder().sharding_types("cpu")
        ['table_wise', 'row_wise', 'column_wise']
    """

    @property
    def module_type(self) -> type[PackedEmbeddingBagCollection]:
        """The modules that are sharded."""
        return PackedEmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Whole tables, rows, or columns."""
        return list(SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The planner's name for kernels that read quantized rows."""
        return ["quant"]

    def shardable_parameters(self, module: PackedEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Stand-ins for the tables, whose bytes are those of the packed ones."""
        parameters = {}
        for name, table in module.schemes().items():
            # TorchRec reads shape and dtype, and asks no sharder for bytes
            num_rows = -(-module.bytes_of_table(name) // (4 * table.embedding_dim))
            weight = torch.empty(max(1, num_rows), table.embedding_dim, device="meta")
            parameters[table.table_name] = nn.Parameter(weight, requires_grad=False)
        return parameters

    def shard(
        self,
        module: PackedEmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedPackedEmbeddingBagCollection:
        """Keeps the shards of this rank, or in one process those of all devices."""
        return ShardedPackedEmbeddingBagCollection(module, params, env, device)


@dataclass(frozen=True)
class _Shard:
    """Some rows of a table, or some columns, on a rank."""

    rank: int
    device: torch.device
    rows: range
    columns: range


def _shards_of(table: TableScheme, sharding: ParameterSharding, world_size: int) -> list[_Shard]:
    """Returns the shards that are not empty. Each gets the share of bytes that the plan gives."""
    place, kind = f"table {table.name!r}", sharding.sharding_type
    check(kind in SHARDING_TYPES, place, f"one of {SHARDING_TYPES}", kind)
    by_column = kind == "column_wise"
    shards = cast(Any, sharding.sharding_spec).shards
    ranks = [shard.placement.rank() for shard in shards]
    fits = set(ranks) <= set(range(world_size)) and (by_column or len(set(ranks)) == len(ranks))
    check(fits, place, f"ranks of {world_size}, and different ones for rows", ranks)
    sizes = [shard.shard_sizes[int(by_column)] for shard in shards]
    shares = torch.tensor(sizes, dtype=torch.float64).cumsum(0) / sum(sizes)
    ends = (_columns_at_bytes if by_column else _rows_at_bytes)(table, shares)
    rows, columns = range(table.num_embeddings), range(table.embedding_dim)
    parts = [range(first, last) for first, last in pairwise([0, *ends])]
    return [
        _Shard(rank, shard.placement.device(), *((rows, part) if by_column else (part, columns)))
        for shard, rank, part in zip(shards, ranks, parts, strict=True)
        if part
    ]


def _columns_at_bytes(table: TableScheme, shares: Tensor) -> list[int]:
    """The column up to which each shard goes, nearest to its share: some are wider than others."""
    sums = pad((table.routing.row_counts() @ table.column_bits().long()).cumsum(0), (1, 0))
    ends = (sums - (shares * sums[-1]).unsqueeze(1)).abs().argmin(dim=1)
    return [*ends[:-1].tolist(), table.embedding_dim]


def _rows_at_bytes(table: TableScheme, shares: Tensor) -> list[int]:
    """The row up to which each shard goes, where frequent rows are longer than others."""
    if len(shares) == 1:
        return [table.num_embeddings]
    routing, strides = table.routing, row_strides(table.column_bits())
    row_bytes = torch.cat([strides, strides.new_zeros(1)]).double()  # 0 of rows in no block
    limits = shares * float((routing.row_counts() * strides).sum())
    rows, num_bytes = torch.zeros(len(shares), dtype=torch.int64), 0.0
    for _, blocks in routing.blocks_of_all():
        sums = row_bytes[blocks].cumsum(0) + num_bytes
        rows += torch.searchsorted(sums, limits)
        num_bytes = float(sums[-1])
    return [*rows[:-1].tolist(), table.num_embeddings]


def _of_columns(
    table: PackedTable, scheme: TableScheme, columns: list[int]
) -> tuple[TableScheme, PackedTable]:
    """Some columns as a table of their own: the same codes, in shorter rows."""
    if len(columns) == scheme.embedding_dim:
        return scheme, table
    names, counts = ("retained", "bits", "scale", "shift"), table.row_counts
    fields = {name: getattr(scheme, name)[:, columns] for name in names}
    area, bits = int(counts @ fields["retained"].sum(dim=1)), fields["bits"]
    fields |= dict.fromkeys(("feedback", "gain", "turn", "row_gain"))
    part = replace(scheme, embedding_dim=len(columns), num_retained=area, **fields)
    rows = torch.empty(int(counts @ row_strides(bits)), dtype=torch.uint8)
    blocks = split_blocks(table.rows, counts, table.bits), split_blocks(rows, counts, bits)
    for source, target, widths, part_widths in zip(*blocks, table.bits, bits, strict=True):
        chunks = source.split(ROWS_AT_A_TIME), target.split(ROWS_AT_A_TIME)
        for chunk, copy in zip(*chunks, strict=True):
            copy.copy_(pack_fields(unpack_fields(chunk.cpu(), widths)[:, columns], part_widths))
    # the directory of the whole table also finds blocks that have none of these columns: rows of 0
    scale, shift = part.codes.scale, part.codes.shift
    return part, PackedTable.from_rows(part, rows, scale, shift, table.directory)


def _rows_between(
    table: PackedTable, scheme: TableScheme, ids: range
) -> PackedEmbeddingBagCollection:
    """A lookup of some rows of a table, one by one; where rows lie by block, their fields are a
    slice of the mapped file."""
    starts = scheme.routing.between(0, ids.start).row_counts()
    part = scheme.between(ids.start, ids.stop)
    counts, strides = part.routing.row_counts(), row_strides(table.bits)
    begin, size = int(starts @ strides), int(counts @ strides)
    if part.routing.boundaries is not None:
        rows = table.rows[begin : begin + size]
    else:
        blocks = split_blocks(table.rows, table.row_counts, table.bits)
        here = zip(blocks, starts.tolist(), counts.tolist(), strict=True)
        rows = torch.cat([block[start : start + n].flatten() for block, start, n in here])
    single = table_of_single_ids(replace(part, is_weighted=False))
    codes = scheme.codes
    packed_rows = PackedTable.from_rows(part, rows, codes.scale, codes.shift)
    return PackedEmbeddingBagCollection(single, {part.name: packed_rows})


class _TablesOfRank(nn.Module):
    """The tables and the rows that one rank holds; answers what others ask of it."""

    def __init__(
        self,
        bags: PackedEmbeddingBagCollection | None,
        rows: Mapping[int, PackedEmbeddingBagCollection],
    ) -> None:
        super().__init__()
        self.bags = bags
        self.rows = nn.ModuleDict({str(index): module for index, module in rows.items()})

    def answer(self, request: Tensor, num_split: int) -> Tensor:
        """0, pooled bags of columns, then rows of split tables, as `_batch_of` asks for them."""
        batch_size, *num_rows = request[: 1 + num_split].tolist()
        num_ids = request.numel() - 1 - num_split - sum(num_rows)
        _, bags, *rows = request.split([1 + num_split, num_ids, *num_rows])
        outputs = [torch.zeros(1, device=request.device)]
        if self.bags is not None:
            num_bags, weights = batch_size * len(self.bags._logical.features), None
            lengths, ids = bags[:num_bags], bags[num_bags:]
            if self.bags.is_weighted():
                ids, numbers = ids.view(2, -1)
                weights = numbers.int().view(torch.float32)
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            outputs.append(self.bags.lookup(ids, offsets, weights).flatten())
        for index, ids in enumerate(rows):
            if len(ids):
                bag_of_id = torch.arange(len(ids) + 1, device=ids.device)
                outputs.append(cast(Any, self.rows[str(index)]).lookup(ids, bag_of_id).flatten())
        return torch.cat(outputs)


@dataclass(frozen=True)
class _Batch:
    """What a rank asks of others, and what it does with their answers."""

    size: int
    offsets: Tensor
    ids: Tensor  # of split tables: the row's number among those asked for, beyond them of no row
    weights: Tensor | None
    requests: list[Tensor]  # one for each rank
    sizes: list[list[int]]  # of each rank's answer: a mark, its bags, and each table's rows


class ShardedPackedEmbeddingBagCollection(LogicalCollection):
    """Looks bags up in packed tables of several ranks, or of several devices of one process.

    A table, or some of its columns, pools its bags where it lies. Of a table that is split by rows
    each row that a batch names is fetched once, and bags are pooled where they came from: in the
    order of their ids, as one process adds them up, for sums of parts would round otherwise.
    """

    limits: Tensor
    layout: Tensor
    groups: Tensor

    def __init__(
        self,
        module: PackedEmbeddingBagCollection,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        schemes = module.schemes()
        unknown_ids = "zero" if module._zero_unknown else "error"
        super().__init__(MixedDimensionScheme(schemes), unknown_ids=unknown_ids)
        self.content_id, self.sequence = module.content_id, module.sequence
        self.encoder, self._group = module.encoder, env.process_group
        shards, self._split = dict[str, list[_Shard]](), dict[str, list[_Shard]]()
        for name, table in schemes.items():
            check_known("table", table.table_name, plan)
            shards[name] = _shards_of(table, plan[table.table_name], env.world_size)
            if len(shards[name][0].rows) < table.num_embeddings:
                self._split[name] = shards[name]
        # in one process the plan says which device stands for a rank
        is_local = self._group is None
        places = {shard.rank: shard.device for of_table in shards.values() for shard in of_table}
        self._devices = [places.get(r, module.device) for r in range(env.world_size)]
        home = module.device if is_local or device is None else device
        names = [table.name for table in self._logical.tables]
        self._parts = [
            [
                (feature, shard.columns)
                for feature, name in enumerate(names)
                for shard in shards[name]
                if name not in self._split and shard.rank == rank
            ]
            for rank in range(env.world_size)
        ]
        # a table whose columns are in several parts of a rank has its features there once
        self._positions = [list(dict.fromkeys(f for f, _ in parts)) for parts in self._parts]
        self._positions_of_split = [
            [feature for feature, name in enumerate(names) if name == split]
            for split in self._split
        ]
        self._dims_of_split = [schemes[name].embedding_dim for name in self._split]
        self._widths = [  # of each rank's answer: of a bag, and of a row of each table
            [sum(len(columns) for _, columns in parts), *self._dims_of_split]
            for parts in self._parts
        ]
        self.shards = nn.ModuleDict()
        for rank in range(env.world_size) if is_local else [env.rank]:
            of_rank = self._tables_of(rank, module, shards)
            self.shards[str(rank)] = of_rank.to(self._devices[rank] if is_local else home)
        layout, groups = self._pooling()
        buffers = {"limits": self._logical.limits(), "layout": layout, "groups": groups}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer.to(home), persistent=False)

    def _tables_of(
        self, rank: int, module: PackedEmbeddingBagCollection, shards: Mapping[str, list[_Shard]]
    ) -> _TablesOfRank:
        parts, rows, bags = {}, {}, None
        for name, scheme in self.schemes().items():
            local = [shard for shard in shards[name] if shard.rank == rank]
            if local and name in self._split:
                of_rows = _rows_between(module.table(name), scheme, local[0].rows)
                rows[list(self._split).index(name)] = of_rows
            elif local:
                columns = [column for shard in local for column in shard.columns]
                parts[name] = _of_columns(module.table(name), scheme, columns)
        if parts:
            schemes = MixedDimensionScheme({name: part for name, (part, _) in parts.items()})
            tables = {name: table for name, (_, table) in parts.items()}
            bags = PackedEmbeddingBagCollection(schemes, tables, unknown_ids="zero")
        return _TablesOfRank(bags, rows)

    def _pooling(self) -> tuple[Tensor, Tensor]:
        """The operator's layout of features and of columns, for float32 rows that were fetched."""
        layout, groups, column = list[list[int]](), [torch.empty(0, GROUP_FIELDS).int()], 0
        for index, dim in enumerate(self._dims_of_split):
            for position in self._positions_of_split[index]:
                layout.append([index, column, dim, int(self._logical.is_mean[position])])
                column += dim
            bits = torch.full((1, dim), FLOAT_BITS, dtype=torch.uint8)
            groups.append(field_groups(bits, torch.ones(1, dim), torch.zeros(1, dim)))
        return torch.tensor(layout), torch.cat(groups)

    def bytes_of_table(self, name: str) -> int:
        """Bytes of one table that this process holds."""
        return sum(
            module.bytes_of_table(name)
            for module in self.modules()
            if isinstance(module, PackedEmbeddingBagCollection) and name in module.schemes()
        )

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        try:
            batch = self._batch_of(features)
        except Exception:
            if self._group is not None:  # others wait for this rank
                _exchange_sizes([-1] * len(self._devices), self._group, self.limits.device)
            raise
        values = self._outputs(batch, self._answers(batch))
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=values)

    def _batch_of(self, features: KeyedJaggedTensor) -> _Batch:
        """Checks a batch, and says what to ask of every rank: a batch size, how many rows of each
        split table, lengths and ids and weights of bags of its whole tables, and the rows."""
        unknown = self.limits if self._zero_unknown else None
        bags = checked_bags(features, self._logical, self.limits, unknown)
        lengths = bags.lengths().long().view(len(self._logical.features), bags.stride())
        counts, weights = lengths.sum(1).tolist(), bags.weights_or_none()
        ids = list(bags.values().split(counts))
        bits = () if weights is None else weights.view(torch.int32).long().split(counts)
        rows: list[list[Tensor]] = [[] for _ in self._devices]
        for shards, positions in zip(self._split.values(), self._positions_of_split, strict=True):
            unique, place = torch.cat([ids[f] for f in positions]).unique(return_inverse=True)
            cuts = torch.tensor([0, *(shard.rows.stop for shard in shards)], device=unique.device)
            ends = torch.searchsorted(unique, cuts).tolist()
            for of_rank in rows:
                of_rank.append(unique[:0])
            for shard, begin, end in zip(shards, ends, ends[1:], strict=False):
                rows[shard.rank][-1] = unique[begin:end] - shard.rows.start
            places = place.split([counts[f] for f in positions])
            for f, of_feature in zip(positions, places, strict=True):
                ids[f] = of_feature
        requests, sizes = [], []
        parts = zip(self._positions, rows, self._widths, strict=True)
        for positions, of_tables, widths in parts:
            num_rows = [len(part) for part in of_tables]
            head = torch.tensor([bags.stride(), *num_rows], device=lengths.device)
            of_bags = [numbers[f] for numbers in (ids, bits) if numbers for f in positions]
            of_lengths = lengths[positions].flatten()
            requests.append(torch.cat([head, of_lengths, *of_bags, *of_tables]))
            sizes.append([1, *map(mul, [bags.stride(), *num_rows], widths)])
        offsets = bags.offsets()
        return _Batch(bags.stride(), offsets, torch.cat(ids), weights, requests, sizes)

    def _answers(self, batch: _Batch) -> list[Tensor]:
        """The answer of every rank."""
        num_split, home = len(self._split), self.limits.device
        shards = [cast(_TablesOfRank, of_rank) for of_rank in self.shards.values()]
        if self._group is None:
            of_ranks = zip(shards, batch.requests, self._devices, strict=True)
            return [part.answer(ask.to(at), num_split).to(home) for part, ask, at in of_ranks]
        sizes = _exchange_sizes([len(request) for request in batch.requests], self._group, home)
        requests, failure = _exchange(batch.requests, sizes, self._group), None
        try:
            answers = [shards[0].answer(request, num_split) for request in requests]
        except Exception as error:  # others wait for this rank
            failure, widths = error, self._widths[dist.get_rank(self._group)]
            heads = [request[: 1 + num_split].tolist() for request in requests]
            answers = [torch.ones(1 + sum(map(mul, head, widths)), device=home) for head in heads]
        results = _exchange(answers, [sum(of_rank) for of_rank in batch.sizes], self._group)
        if failure is not None:
            raise failure
        marks = torch.stack([result[0] for result in results]).tolist()
        if any(marks):
            message = f"rank {marks.index(1)} could not answer; its own error says why"
            raise RuntimeError(message)
        return results

    def _outputs(self, batch: _Batch, answers: list[Tensor]) -> Tensor:
        """Pooled embeddings ``(B, sum of D over features)``: those that came, and bags of rows."""
        columns, rows = dict[tuple[int, int], Tensor](), list[tuple[Tensor, ...]]()
        for parts, sizes, answer in zip(self._parts, batch.sizes, answers, strict=True):
            _, bags, *of_rank = answer.split(sizes)
            widths = [len(of_part) for _, of_part in parts]
            values = bags.view(batch.size, sum(widths)).split(widths, dim=1)
            keys = [(feature, of_part.start) for feature, of_part in parts]
            columns |= dict(zip(keys, values, strict=True))
            rows.append(tuple(of_rank))
        if self._split:
            of_tables = [
                torch.cat([rows[shard.rank][index] for shard in shards])
                for index, shards in enumerate(self._split.values())
            ]
            columns |= self._bags_of_rows(batch, of_tables)
        return torch.cat([columns[key] for key in sorted(columns)], dim=1)

    def _bags_of_rows(self, batch: _Batch, rows: list[Tensor]) -> dict[tuple[int, int], Tensor]:
        """Bags of float32 rows, by the operator that reads packed ones: its order, its rounding."""
        tables, blocks, num_groups = [], [], 0
        for index, dim in enumerate(self._dims_of_split):
            num_rows = rows[index].numel() // dim
            tables.append([num_rows, index, 1, index, -1])
            blocks.append([0, num_rows, 4 * dim, num_groups] if num_rows else [0, 0, 0, -1])
            num_groups += -(-dim // COLUMNS_PER_GROUP)
        positions = [f for of_table in self._positions_of_split for f in of_table]
        dims = [self._dims[f] for f in positions]
        values = torch.ops.dnis_torchrec.packed_embedding_bag.default(
            batch.ids,
            batch.offsets,
            batch.weights,
            [of_table.view(torch.uint8) for of_table in rows],
            self.layout,
            torch.tensor(tables, device=self.layout.device),
            torch.tensor(blocks, device=self.layout.device),
            self.groups,
            positions,
            batch.size,
            sum(dims),
            True,
        )
        keys = [(feature, 0) for feature in positions]
        return dict(zip(keys, values.split(dims, dim=1), strict=True))


def _exchange_sizes(sizes: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """How many numbers every rank has for this one; raises where a rank refused its batch."""
    outputs = torch.empty(len(sizes), dtype=torch.int64, device=device)
    dist.all_to_all_single(outputs, torch.tensor(sizes, device=device), group=group)
    numbers = outputs.tolist()
    if min(numbers) < 0 <= min(sizes):
        message = f"rank {numbers.index(-1)} refused its batch; its own error says why"
        raise RuntimeError(message)
    return numbers


def _exchange(parts: list[Tensor], sizes: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Part k goes to rank k; returns those for this rank, of `sizes`."""
    outputs = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(outputs, torch.cat(parts), sizes, [len(p) for p in parts], group=group)
    return list(outputs.split(sizes))
