"""Packed tables over several ranks: a sharder that TorchRec's planner, `shard_quant_model` and
DistributedModelParallel take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.codes import FLOAT_BITS, row_strides
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.packed import COLUMNS_PER_GROUP, GROUP_FIELDS, field_groups
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable, split_blocks
from dnis_torchrec.serving.sequences import table_of_single_ids
from dnis_torchrec.serving.tables import LogicalCollection, checked_bags

SHARDING_TYPES = ("table_wise", "row_wise")


class PackedSharder(ModuleSharder[PackedEmbeddingBagCollection]):
    """Spreads packed tables over ranks, whole or by rows; the same outputs to the bit as one
    process.

    It takes the collections of sequences and of ``unknown_ids="mean"``, too, whose packed tables
    are modules of their own. The planner sees a table as so many float32 rows as its packed bytes
    make, so that its shares of rows are shares of bytes.
    """

    @property
    def module_type(self) -> type[PackedEmbeddingBagCollection]:
        """The modules that are sharded."""
        return PackedEmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Whole tables, or rows: a packed row is a few bytes, which columns share."""
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
class _RowShard:
    """Rows ``first <= i < last`` of a table, on a rank."""

    rank: int
    device: torch.device
    first: int
    last: int


def _row_shards(
    table: TableScheme, sharding: ParameterSharding, world_size: int
) -> list[_RowShard]:
    """The shards of a table that have rows: its bytes are shared as the plan shares rows."""
    place, sharding_type = f"table {table.name!r}", sharding.sharding_type
    requirement, remedy = f"one of {SHARDING_TYPES}", "take row_wise"
    check(sharding_type in SHARDING_TYPES, place, requirement, sharding_type, remedy)
    shards = cast(Any, sharding.sharding_spec).shards
    ranks = [shard.placement.rank() for shard in shards]
    fits = len(set(ranks)) == len(ranks) and set(ranks) <= set(range(world_size))
    check(fits, place, f"different ranks of {world_size}", ranks)
    ends = _rows_at_bytes(table, [shard.shard_sizes[0] for shard in shards])
    places = zip(shards, ranks, [0, *ends], ends, strict=False)
    return [
        _RowShard(rank, shard.placement.device(), first, last)
        for shard, rank, first, last in places
        if first < last
    ]


def _rows_at_bytes(table: TableScheme, shares: list[int]) -> list[int]:
    """The row up to which each shard goes, where frequent rows are longer than others."""
    if len(shares) == 1:
        return [table.num_embeddings]
    routing, strides = table.routing, row_strides(table.column_bits())
    row_bytes = torch.cat([strides, strides.new_zeros(1)]).double()  # 0 of rows in no block
    ends = torch.tensor(shares, dtype=torch.float64).cumsum(0)
    limits = ends / ends[-1] * float((routing.row_counts() * strides).sum())
    rows, num_bytes = torch.zeros(len(shares), dtype=torch.int64), 0.0
    for _, blocks in routing.blocks_of_all():
        sums = row_bytes[blocks].cumsum(0) + num_bytes
        rows += torch.searchsorted(sums, limits)
        num_bytes = float(sums[-1])
    return [*rows[:-1].tolist(), table.num_embeddings]


def _rows_between(
    table: PackedTable, scheme: TableScheme, first: int, last: int
) -> PackedEmbeddingBagCollection:
    """A lookup of some rows of a table, one by one; where rows lie by block, their fields are a
    slice of the mapped file."""
    starts, part = scheme.routing.between(0, first).row_counts(), scheme.between(first, last)
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
        """Pooled bags of whole tables, then rows of split ones, as `_requests` asks for them."""
        batch_size, *num_rows = request[: 1 + num_split].tolist()
        num_ids = request.numel() - 1 - num_split - sum(num_rows)
        _, bags, *rows = request.split([1 + num_split, num_ids, *num_rows])
        outputs = [torch.empty(0, device=request.device)]
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
    sizes: list[list[int]]  # of each rank's answer: numbers of its bags, and of each table's rows


class ShardedPackedEmbeddingBagCollection(LogicalCollection):
    """Looks bags up in packed tables of several ranks, or of several devices of one process.

    A whole table pools its bags where it lies. Of a split table each row that a batch names is
    fetched once, and bags are pooled where they came from: in the order of their ids, as one
    process adds them up, for sums of parts would round otherwise.
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
        shards = {}
        for name, table in schemes.items():
            check_known("table", table.table_name, plan)
            shards[name] = _row_shards(table, plan[table.table_name], env.world_size)
        # in one process the plan says which device stands for a rank
        is_local = self._group is None
        places = {shard.rank: shard.device for of_table in shards.values() for shard in of_table}
        self._devices = [places.get(r, module.device) for r in range(env.world_size)]
        home = module.device if is_local or device is None else device
        self._split = {name: of for name, of in shards.items() if len(of) > 1}
        self._whole = {name: of[0].rank for name, of in shards.items() if len(of) == 1}
        names = [table.name for table in self._logical.tables]
        self._positions = [
            [feature for feature, name in enumerate(names) if self._whole.get(name) == rank]
            for rank in range(env.world_size)
        ]
        self._positions_of_split = [
            [feature for feature, name in enumerate(names) if name == split]
            for split in self._split
        ]
        self._dims_of_split = [schemes[name].embedding_dim for name in self._split]
        self.shards = nn.ModuleDict()
        for rank in range(env.world_size) if is_local else [env.rank]:
            of_rank = self._tables_of(rank, module)
            self.shards[str(rank)] = of_rank.to(self._devices[rank] if is_local else home)
        layout, groups = self._pooling()
        buffers = {"limits": self._logical.limits(), "layout": layout, "groups": groups}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer.to(home), persistent=False)

    def _tables_of(self, rank: int, module: PackedEmbeddingBagCollection) -> _TablesOfRank:
        schemes = self.schemes()
        whole = {name: table for name, table in schemes.items() if self._whole.get(name) == rank}
        bags = None
        if whole:
            tables = {name: module.table(name) for name in whole}
            scheme = MixedDimensionScheme(whole)
            bags = PackedEmbeddingBagCollection(scheme, tables, unknown_ids="zero")
        rows = {
            index: _rows_between(module.table(name), schemes[name], shard.first, shard.last)
            for index, (name, shards) in enumerate(self._split.items())
            for shard in shards
            if shard.rank == rank
        }
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
            cuts = torch.tensor([0, *(shard.last for shard in shards)], device=unique.device)
            ends = torch.searchsorted(unique, cuts).tolist()
            for of_rank in rows:
                of_rank.append(unique[:0])
            for shard, begin, end in zip(shards, ends, ends[1:], strict=False):
                rows[shard.rank][-1] = unique[begin:end] - shard.first
            places = place.split([counts[f] for f in positions])
            for f, of_feature in zip(positions, places, strict=True):
                ids[f] = of_feature
        requests, sizes = [], []
        for positions, of_tables in zip(self._positions, rows, strict=True):
            num_rows = [len(part) for part in of_tables]
            head = torch.tensor([bags.stride(), *num_rows], device=lengths.device)
            of_bags = [numbers[f] for numbers in (ids, bits) if numbers for f in positions]
            of_lengths = lengths[positions].flatten()
            requests.append(torch.cat([head, of_lengths, *of_bags, *of_tables]))
            width = sum(self._dims[f] for f in positions)
            of_rows = [n * dim for n, dim in zip(num_rows, self._dims_of_split, strict=True)]
            sizes.append([bags.stride() * width, *of_rows])
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
        requests = _exchange(batch.requests, sizes, self._group)
        answers = [shards[0].answer(request, num_split) for request in requests]
        return _exchange(answers, [sum(of_rank) for of_rank in batch.sizes], self._group)

    def _outputs(self, batch: _Batch, answers: list[Tensor]) -> Tensor:
        """Pooled embeddings ``(B, sum of D over features)``: those that came, and bags of rows."""
        columns, rows = dict[int, Tensor](), list[tuple[Tensor, ...]]()
        for positions, sizes, answer in zip(self._positions, batch.sizes, answers, strict=True):
            bags, *of_rank = answer.split(sizes)
            dims = [self._dims[f] for f in positions]
            parts = bags.view(batch.size, sum(dims)).split(dims, dim=1)
            columns |= dict(zip(positions, parts, strict=True))
            rows.append(tuple(of_rank))
        if self._split:
            of_tables = [
                torch.cat([rows[shard.rank][index] for shard in shards])
                for index, shards in enumerate(self._split.values())
            ]
            columns |= self._bags_of_rows(batch, of_tables)
        return torch.cat([columns[f] for f in range(len(self._dims))], dim=1)

    def _bags_of_rows(self, batch: _Batch, rows: list[Tensor]) -> dict[int, Tensor]:
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
        return dict(zip(positions, values.split(dims, dim=1), strict=True))


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
