"""Checks of a sharding plan, one table after the other: which ranks it names, and how it cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType

from dnis_torchrec.checks import check

ROW_WISE_FAMILY = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}
"""Sharding types that cut rows: parts of a bag are pooled on several ranks."""
ON_ONE_HOST = {ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}
"""Sharding types that cut rows over the ranks of one host, one shard for each."""
FUSED_COLUMNS = 4
"""FBGEMM's fused kernels take shards with multiples of so many columns, its dense ones on a CPU
any."""


def check_ranks(
    planned: ParameterSharding, place: str, world_size: int, local_world_size: int
) -> None:
    """Checks that a table's shards are on ranks that there are, as its sharding type wants them."""
    rank_numbers, kind = list(planned.ranks or []), planned.sharding_type
    remedy = f"make a plan for {world_size} ranks"
    within = all(0 <= rank < world_size for rank in rank_numbers)
    check(within, place, f"ranks below the world size {world_size}", rank_numbers, remedy)
    if kind == ShardingType.ROW_WISE.value:
        everywhere = sorted(rank_numbers) == list(range(world_size))
        check(everywhere, place, f"a shard on each of {world_size} ranks", rank_numbers, remedy)
    if kind in ON_ONE_HOST:
        hosts = [
            rank_numbers[start : start + local_world_size]
            for start in range(0, len(rank_numbers), local_world_size)
        ]
        whole = all(
            host == list(range(host[0], host[0] + local_world_size))
            and host[0] % local_world_size == 0
            for host in hosts
        )
        check(
            whole,
            place,
            f"shards on all {local_world_size} ranks of a host (LOCAL_WORLD_SIZE)",
            rank_numbers,
            remedy,
        )


def has_fused_columns(planned: ParameterSharding) -> bool:
    """Returns whether fused kernels take all shards of a table."""
    spec = planned.sharding_spec  # data_parallel has none
    shards = spec.shards if isinstance(spec, EnumerableShardingSpec) else []
    return all(shard.shard_sizes[1] % FUSED_COLUMNS == 0 for shard in shards)


def check_shards(
    planned: ParameterSharding, place: str, shape: tuple[int, int], device: torch.device
) -> None:
    """Checks that shards cover a table, and are such as their kernels take."""
    if not isinstance(planned.sharding_spec, EnumerableShardingSpec):
        return  # data_parallel has none
    shards = planned.sharding_spec.shards
    ends = [
        [o + s for o, s in zip(shard.shard_offsets, shard.shard_sizes, strict=True)]
        for shard in shards
    ]
    covered = (max(end[0] for end in ends), max(end[1] for end in ends))
    smallest = min(shard.shard_sizes[0] for shard in shards)
    if device.type == "cpu":  # FBGEMM's CPU kernels take no table without rows
        kind = planned.sharding_type
        remedy = "shard it table_wise or column_wise"
        check(smallest > 0, place, f"a row on every rank of {kind}", f"{shape[0]} rows", remedy)
    remedy = "make the plan for this model"
    check(
        covered == shape, place, f"shards of a table of shape {shape}", f"one of {covered}", remedy
    )
    requirement = (
        f"multiples of {FUSED_COLUMNS} columns in shards of kernel {planned.compute_kernel!r}"
    )
    fits = planned.compute_kernel == EmbeddingComputeKernel.DENSE.value or has_fused_columns(
        planned
    )
    remedy = "leave the kernel to make_sharding_plan on a CPU; on a GPU take another embedding_dim"
    check(fits, place, requirement, sorted({shard.shard_sizes[1] for shard in shards}), remedy)


def check_column_cuts(planned: Mapping[str, ParameterSharding]) -> None:
    """Checks that all tables of an EmbeddingCollection are cut into columns of one width: TorchRec
    reads one alone."""
    widths = {}
    for table, own in planned.items():
        if own.sharding_type == ShardingType.COLUMN_WISE.value:
            shards = cast(EnumerableShardingSpec, own.sharding_spec).shards
            widths[table] = sorted({shard.shard_sizes[1] for shard in shards})
    for table, own_widths in widths.items():
        first = next(iter(widths.values()))[:1]
        requirement = (
            f"columns in shards of {first[0]}, as the other tables of its EmbeddingCollection"
        )
        remedy = (
            "give all of them one min_partition that divides embedding_dim, or shard it table_wise"
        )
        check(
            own_widths == first, f"sharding plan, table {table!r}", requirement, own_widths, remedy
        )
