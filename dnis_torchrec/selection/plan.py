"""Under which FQNs TorchRec shards a model's collections, and by which sharders: in front of some
stand processors."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dnis_torchrec.checks import check, check_known, describe, nearest
from dnis_torchrec.ranks import on_rank_zero, together
from dnis_torchrec.selection.shards import (
    TableShard,
    collections,
    holders_of_tables,
    is_pooled,
    local_shards,
    lookup_of,
    table_configs_of,
    whole_module_of,
)
from dnis_torchrec.selection.torchrec import (
    freeze_before_sharding_,
    frozen_tables,
    hold_frozen_,
    read_by_name_,
    read_rows_in_order_,
    refuse_managed_collisions,
    share_remapping_,
    stands_still,
)
from dnis_torchrec.selection.wrapper import (
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
    SoftSelectionModule,
    soft_selection_modules,
)


def planned_fqns(model: nn.Module) -> dict[str, str]:
    """FQN of every collection of an unsharded model -> that of the module which TorchRec shards."""
    if not stands_still(model):
        remedy = "call prepare_ first: then rows keep their ids; to train it as it is, take TorchRec's own sharder"
        refuse_managed_collisions(model, "sharding", remedy)
    planned = {}
    for fqn, module in collections(model).items():
        is_processed = isinstance(
            whole_module_of(model, fqn), FeatureProcessedEmbeddingBagCollection
        )
        if is_processed or isinstance(module, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            own = fqn.rpartition(".")[0]
        else:
            own = fqn
        is_wrapped = isinstance(module, SoftSelectionModule)
        planned[fqn] = f"{own}.{module.child_name}".removeprefix(".") if is_wrapped else own
    return planned


def planned_collections(model: nn.Module) -> dict[str, nn.Module]:
    """Returns an unsharded model's collections, also inside wrappers, by the FQN under which
    TorchRec shards them."""
    planned = planned_fqns(model)
    return {planned[fqn]: lookup_of(module) for fqn, module in collections(model).items()}


def with_processors(
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> Sequence[ModuleSharder[nn.Module]]:
    """The sharders, and one for what processes features in front of a collection, made of the
    collection's sharder."""
    kinds = {sharder.module_type: sharder for sharder in sharders}
    inner = kinds.get(EmbeddingBagCollection)
    if inner is None or FeatureProcessedEmbeddingBagCollection in kinds:
        return sharders
    processed = FeatureProcessedEmbeddingBagCollectionSharder(
        inner, qcomm_codecs_registry=inner.qcomm_codecs_registry
    )
    return [*sharders, cast(ModuleSharder[nn.Module], processed)]


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


Sharders = Sequence[ModuleSharder[nn.Module]]
Constraints = Mapping[str, ParameterConstraints]


class CpuEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which on CPUs offers row_wise, table_row_wise and grid_shard as well.

    TorchRec lists these three on GPUs only, though gloo and FBGEMM's CPU kernels run them. On a GPU
    it is the same as its base class, so one program serves both. Takes what
    `EmbeddingBagCollectionSharder` takes, quantised communication (`qcomm_codecs_registry`)
    included.

    Example:
        >>> sorted(CpuEmbeddingBagCollectionSharder().sharding_types("cpu"))[:4]
        ['column_wise', 'data_parallel', 'grid_shard', 'row_wise']
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types for a kind of device, each once."""
        own = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*own, *sorted(ROW_WISE_FAMILY)]))


def default_sharders(
    fused_params: dict[str, Any] | None = None, *, of_bags: dict[str, Any] | None = None
) -> list[ModuleSharder[nn.Module]]:
    """A sharder for each kind of collection: pooled ones and sequences of embeddings. Local."""
    for_bags = fused_params if of_bags is None else {**(fused_params or {}), **of_bags}
    sharders = [
        CpuEmbeddingBagCollectionSharder(for_bags),
        EmbeddingCollectionSharder(fused_params),
    ]
    return [cast(ModuleSharder[nn.Module], sharder) for sharder in sharders]


def make_sharding_plan(
    model: nn.Module,
    device: torch.device,
    sharders: Sharders,
    *,
    constraints: Constraints | None = None,
    topology: Topology | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    """Plans with TorchRec's EmbeddingShardingPlanner on rank 0, for all ranks.

    When ``planner.collective_plan`` raises on rank 0, all others wait for a broadcast that never
    comes. When every rank plans for itself, options of equal cost may be chosen differently,
    because the planner walks through sets of strings, whose order is another one in every process.
    Here all ranks get rank 0's plan, or its error.

    On a CPU tables that FBGEMM's fused kernels do not take, such as first-order weights in one
    column, get the dense kernel. Their optimizer is then that of dense weights.

    Distributed: one all_gather_object and one broadcast_object_list.

    Args:
        model: unsharded, prepared or not; on any device, "meta" included.
        device: where it will be sharded to; its memory is what a GPU is planned with.
        sharders: what may be sharded and how.
        constraints: table -> what the planner has to keep to.
        topology: the machines; made from the process group, LOCAL_WORLD_SIZE and the memory of
            `device` if None.
        process_group: the ranks; all of them if None.

    Returns:
        The plan.

    Raises:
        ValueError: on all ranks, for a constraint on a table that there is not, a sharding type or
            compute kernel that no sharder offers, or constraints that do not fit the machines.
        RuntimeError: without a process group.
    """
    world_size, sharders = _world_size(process_group), with_processors(sharders)
    topology = topology if topology is not None else _topology(device, world_size)

    def plan() -> ShardingPlan:
        possible = _possible_constraints(model, device, sharders, topology, constraints or {})
        try:
            made = EmbeddingShardingPlanner(topology=topology, constraints=possible).plan(
                model, list(sharders)
            )
        except (PlannerError, RuntimeError) as error:
            requirement = f"constraints that can be met on {world_size} ranks"
            remedy = "loosen the constraints, or take more ranks"
            received = " ".join(str(error).split())
            raise ValueError(describe("sharding plan", requirement, received, remedy)) from error
        _check_pooling(made, model)
        if device.type == "cpu":
            _choose_dense_kernels_(made, constraints or {})
        return made

    return on_rank_zero(plan, process_group)


def check_sharding_plan(
    plan: ShardingPlan,
    model: nn.Module,
    device: torch.device,
    world_size: int,
    local_world_size: int,
) -> None:
    """Checks that a plan is one for this model on this many ranks. Local, no collective."""
    tables, lookups = _tables_by_fqn(model), planned_collections(model)
    for fqn in plan.plan:
        if not _has(model, fqn):
            place, requirement = f"sharding plan, FQN {fqn!r}", "a module of the model"
            raise ValueError(describe(place, requirement, "none", nearest(fqn, tables)))
    for fqn in plan.plan:
        module = model.get_submodule(fqn)
        kinds = (
            EmbeddingBagCollection,
            EmbeddingCollection,
            FeatureProcessedEmbeddingBagCollection,
        )
        if not isinstance(module, kinds):
            supported = "supported are EmbeddingBagCollections and EmbeddingCollections"
            remedy = "take its sharder away; its weights would be drawn anew"
            raise NotImplementedError(
                describe(f"sharding plan, FQN {fqn!r}", supported, type(module).__name__, remedy)
            )
    for fqn, shapes in tables.items():
        planned = cast(Mapping[str, ParameterSharding], plan.plan.get(fqn, {}))
        for table, shape in shapes.items():
            place = f"sharding plan, table {table!r}"
            kind = type(lookups[fqn])
            remedy = "make the plan for the prepared model"
            if kind not in (EmbeddingBagCollection, EmbeddingCollection):
                base = EmbeddingBagCollection if is_pooled(lookups[fqn]) else EmbeddingCollection
                remedy = f"build it as an {base.__name__}: sharders take no subclass, such as {kind.__name__}"
            check(table in planned, place, f"an entry under FQN {fqn!r}", "none", remedy)
            check_ranks(planned[table], place, world_size, local_world_size)
            check_shards(planned[table], place, shape, device)
        if not is_pooled(lookups[fqn]):
            check_column_cuts(planned)
    _check_pooling(plan, model)


def shard_model(
    model: nn.Module,
    device: torch.device,
    plan: ShardingPlan | None = None,
    sharders: Sharders | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> DistributedModelParallel:
    """DistributedModelParallel that keeps the weights which the model came with.

    TorchRec initialises tables anew when it takes them from a CPU. Here each rank copies the rows
    and columns of its own shards back; a data_parallel table is that of the first rank on all of
    them, as dense weights are. So is the remapping of managed collisions. Tables on the "meta"
    device have no weights to keep: TorchRec initialises those. In a process group of one,
    data_parallel tables are not in DistributedDataParallel, which would copy their gradients for
    nothing.

    Distributed: two all_gather_object of a short string, so that a plan that does not fit raises
        everywhere, one
    broadcast per data_parallel table and per tensor of a remapping, what DistributedModelParallel
    itself needs, and without a plan the collectives of `make_sharding_plan`.

    Args:
        model: unsharded, prepared or not. Used up.
        device: where to train.
        plan: the same on every rank; by default that of `make_sharding_plan`.
        sharders: those that the plan was made with; by default `default_sharders`.
        process_group: the ranks; all of them if None.

    Returns:
        The sharded model.

    Raises:
        ValueError: on all ranks alike, for a plan that does not fit (see `check_sharding_plan`), or
            that is not the same on all of them.
        RuntimeError: without a process group.
    """
    world_size = _world_size(process_group)
    if sharders is None:
        sharders = default_sharders()
    sharders = with_processors(sharders)
    if plan is None:
        plan = make_sharding_plan(model, device, sharders, process_group=process_group)
    with together(process_group):
        check_sharding_plan(plan, model, device, world_size, get_local_size(world_size))
    _check_same(plan, process_group)
    unsharded, planned = _every_lookup(model), planned_fqns(model)
    frozen = {fqn: _freeze_before_sharding_(lookup) for fqn, lookup in unsharded.items()}
    weights = _take_weights(model)
    group = (
        process_group if process_group is not None else cast(dist.ProcessGroup, dist.group.WORLD)
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=plan,
        sharders=list(sharders),
    )
    _share_again_(sharded, unsharded)
    for fqn, module in collections(sharded).items():
        replicated = _replicated_tables(plan, planned[fqn])
        by_table = itertools.groupby(
            sorted(local_shards(module), key=lambda part: part.table), lambda part: part.table
        )
        for table, parts in by_table:
            weight = weights.pop(
                (fqn, table)
            )  # so that tables are held twice one after the other, not all at once
            for part in parts:
                if not weight.is_meta:
                    _copy_weight_(part, weight)
                if table in replicated:
                    dist.broadcast(part.weight, src=dist.get_global_rank(group, 0), group=group)
    share_remapping_(sharded, group)
    for fqn, lookup in _every_lookup(sharded).items():
        if isinstance(lookup, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            hold_frozen_(lookup, holders_of_tables(lookup), frozen[fqn])
        if isinstance(lookup, ShardedEmbeddingCollection):
            read_rows_in_order_(lookup)
    if world_size == 1:
        _reduce_no_tables_(sharded)
    read_by_name_(sharded, refuse_weights=True)
    for wrapper in soft_selection_modules(sharded).values():
        read_by_name_(wrapper)
    return sharded


def _reduce_no_tables_(model: nn.Module) -> None:
    """Takes data_parallel tables out of DistributedDataParallel, for a process group of one."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            for i, lookup in enumerate(module._lookups):
                if isinstance(lookup, DistributedDataParallel):
                    module._lookups[i] = lookup.module


def _every_lookup(model: nn.Module) -> dict[str, nn.Module]:
    """Collections, or the children of their wrappers, by the FQN of the outermost."""
    return {fqn: lookup_of(module) for fqn, module in collections(model).items()}


def _freeze_before_sharding_(lookup: nn.Module) -> frozenset[str]:
    """The frozen tables of a collection, for which TorchRec then makes kernels of their own."""
    holders = holders_of_tables(lookup)
    frozen = frozen_tables(holders)
    for table in frozen:
        freeze_before_sharding_(cast(nn.Parameter, holders[table].weight))
    return frozen


def _share_again_(model: nn.Module, unsharded: Mapping[str, nn.Module]) -> None:
    """Puts sharded collections wherever those that they were made of are."""
    plain = get_unwrapped_module(model)
    sharded = {id(lookup): lookup_of(plain.get_submodule(fqn)) for fqn, lookup in unsharded.items()}
    for parent in list(plain.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in sharded:
                setattr(parent, name, sharded[id(child)])


def _take_weights(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Takes the weights out of a model: (FQN, table) -> weight; parameters on the meta device stay
    in their place."""
    weights = {}
    for fqn, lookup in _every_lookup(model).items():
        for table, holder in holders_of_tables(lookup).items():
            weight = cast(nn.Parameter, holder.weight)
            weights[fqn, table] = weight.detach()
            holder.weight = nn.Parameter(
                weight.detach().to("meta"), requires_grad=weight.requires_grad
            )
            vars(holder.weight).update(vars(weight))  # the optimizers that are noted there
        if isinstance(lookup, EmbeddingCollection):
            lookup._device = torch.device("meta")
    return weights


def _replicated_tables(plan: ShardingPlan, fqn: str) -> set[str]:
    """Tables that every rank holds whole, of what a plan says under an FQN."""
    planned = cast(Mapping[str, ParameterSharding], plan.plan.get(fqn, {}))
    return {
        table
        for table, own in planned.items()
        if own.sharding_type == ShardingType.DATA_PARALLEL.value
    }


def _copy_weight_(shard: TableShard, weight: torch.Tensor) -> None:
    rows = slice(shard.first_row, shard.first_row + shard.weight.shape[0])
    columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
    shard.weight.copy_(weight[rows, columns])


def _world_size(process_group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group, or use dnis_torchrec.training.shard.process_group"
        raise RuntimeError(describe("sharding", "a process group", "none", remedy))
    return dist.get_world_size(process_group)


def _topology(device: torch.device, world_size: int) -> Topology:
    """Returns a topology of as many hosts as the launcher says; each GPU has the memory of this
    one."""
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    return Topology(
        world_size=world_size,
        local_world_size=get_local_size(world_size),
        compute_device=device.type,
        hbm_cap=memory,
    )


def _tables_by_fqn(model: nn.Module) -> dict[str, dict[str, tuple[int, int]]]:
    """FQN of every plain collection -> table -> (N, D)."""
    return {
        fqn: {
            table.name: (table.num_embeddings, table.embedding_dim)
            for table in table_configs_of(module)
        }
        for fqn, module in planned_collections(model).items()
    }


def _has(model: nn.Module, fqn: str) -> bool:
    try:
        model.get_submodule(fqn)
    except AttributeError:
        return False
    return True


def _possible_constraints(
    model: nn.Module,
    device: torch.device,
    sharders: Sharders,
    topology: Topology,
    constraints: Constraints,
) -> dict[str, ParameterConstraints]:
    """The constraints, narrowed to the sharding types that a table can have."""
    of_model = [
        config
        for module in planned_collections(model).values()
        for config in table_configs_of(module)
    ]
    for table in constraints:
        check_known("table", table, [config.name for config in of_model])
    possible: dict[str, ParameterConstraints] = {}
    for config in of_model:
        constraint = constraints.get(config.name)
        kind = EmbeddingCollection if config.pooling == PoolingType.NONE else EmbeddingBagCollection
        sharder = next((own for own in sharders if own.module_type is kind), None)
        if sharder is not None:
            possible[config.name] = _possible_constraint(
                config, constraint, sharder, device, topology
            )
        elif constraint is not None:
            possible[config.name] = constraint
    return possible


def _possible_constraint(
    table: EmbeddingBagConfig,
    given: ParameterConstraints | None,
    sharder: ModuleSharder[nn.Module],
    device: torch.device,
    topology: Topology,
) -> ParameterConstraints:
    place, constraint = f"table {table.name!r}", given or ParameterConstraints()
    offered = sharder.sharding_types(device.type)
    wanted = constraint.sharding_types or offered
    types = [kind for kind in wanted if kind in offered]
    requirement = f"a sharding type that the sharder offers on {device.type}: {', '.join(offered)}"
    check(bool(types), place, requirement, wanted)
    if table.pooling == PoolingType.MEAN:  # see _check_pooling
        types = [kind for kind in types if kind not in ROW_WISE_FAMILY] or types
    types = [
        kind for kind in types if not _has_empty_shard(kind, table.num_embeddings, device, topology)
    ]
    remedy = "shard it table_wise or column_wise"
    rows = f"{table.num_embeddings} rows"
    check(bool(types), place, f"a row on every rank of {', '.join(wanted)}", rows, remedy)
    kernels = {kernel for kind in types for kernel in sharder.compute_kernels(kind, device.type)}
    allowed = constraint.compute_kernels
    requirement = f"a compute kernel for {', '.join(types)}: {', '.join(sorted(kernels))}"
    check(not allowed or bool(kernels & set(allowed)), place, requirement, allowed)
    return replace(constraint, sharding_types=types)


def _choose_dense_kernels_(plan: ShardingPlan, constraints: Constraints) -> None:
    """Gives shards whose columns fused kernels do not take the dense one, which the planner knows
    for data_parallel."""
    for planned in cast(Mapping[str, Mapping[str, ParameterSharding]], plan.plan).values():
        for table, sharding in planned.items():
            is_free = table not in constraints or not constraints[table].compute_kernels
            if is_free and not has_fused_columns(sharding):
                sharding.compute_kernel = EmbeddingComputeKernel.DENSE.value


def _has_empty_shard(kind: str, rows: int, device: torch.device, topology: Topology) -> bool:
    """Returns whether rows run out before ranks do: FBGEMM's CPU kernels take no table without
    rows."""
    rank_numbers = {ShardingType.ROW_WISE.value: topology.world_size} | dict.fromkeys(
        ON_ONE_HOST, topology.local_world_size
    )
    if device.type != "cpu" or kind not in rank_numbers:
        return False
    per_rank = -(-rows // rank_numbers[kind])
    return per_rank * (rank_numbers[kind] - 1) >= rows


def _check_pooling(plan: ShardingPlan, model: nn.Module) -> None:
    """Refuses MEAN tables where TorchRec computes something else."""
    divided = ROW_WISE_FAMILY - {ShardingType.GRID_SHARD.value}
    for fqn, module in planned_collections(model).items():
        if fqn not in plan.plan:
            continue
        planned = cast(Mapping[str, ParameterSharding], plan.plan[fqn])
        kinds = {name: sharding.sharding_type for name, sharding in planned.items()}
        means = [
            table.name for table in table_configs_of(module) if table.pooling == PoolingType.MEAN
        ]
        for table in means:
            place, remedy = f"sharding plan, table {table!r}", "shard it table_wise or column_wise"
            check(
                kinds[table] not in ROW_WISE_FAMILY - divided,
                place,
                "SUM under grid_shard",
                "MEAN",
                remedy,
            )
            others = sorted(name for name, kind in kinds.items() if kind not in divided)
            requirement = f"all tables of {fqn!r} row-wise beside a row-wise MEAN table"
            check(
                kinds[table] not in divided or not others,
                place,
                requirement,
                f"others: {others}",
                remedy,
            )


def _check_same(plan: ShardingPlan, process_group: dist.ProcessGroup | None) -> None:
    """Raises on every rank if one of them has another plan than the first."""
    world_size = dist.get_world_size(process_group)
    if world_size == 1:
        return
    digests = [""] * world_size
    dist.all_gather_object(
        digests, hashlib.sha256(str(plan).encode()).hexdigest(), group=process_group
    )
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    remedy = "make it with make_sharding_plan"
    check(
        not others, "sharding plan", "the same on every rank", f"another on ranks {others}", remedy
    )
