"""Plans that all ranks agree on, and sharding that keeps weights.

Any sharder and plan of TorchRec's does for a search. But on a CPU its sharder has no row-wise
types, a plan that does not fit leaves ranks hanging, and weights are lost in sharding.

Shapes: N rows of a table, D its embedding_dim, W ranks.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
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
from dnis_torchrec.ranks import Ranks, on_rank_zero, together
from dnis_torchrec.selection import torchrec
from dnis_torchrec.selection.shards import (
    collections,
    holders_of_tables,
    is_pooled,
    local_shards,
    lookup_of,
    table_configs_of,
    whole_module_of,
)
from dnis_torchrec.selection.torchrec_inputs import (
    refuse_managed_collisions,
    share_remapping_,
    stands_still,
)
from dnis_torchrec.selection.wrapper import (
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
    SoftSelectionModule,
    soft_selection_modules,
)

Sharders = Sequence[ModuleSharder[nn.Module]]
Constraints = Mapping[str, ParameterConstraints]
TablePlans = Mapping[str, ParameterSharding]

ON_ONE_HOST = {ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}
"""Sharding types that cut rows over the ranks of one host, one shard for each."""
ROW_WISE_FAMILY = {ShardingType.ROW_WISE.value, *ON_ONE_HOST}
"""Sharding types that cut rows: parts of a bag are pooled on several ranks."""
FUSED_COLUMNS = 4
"""FBGEMM's fused kernels take multiples of so many columns, its dense ones on a CPU any."""


class CpuEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which on CPUs offers row_wise, table_row_wise and grid_shard as well.

    TorchRec lists these three on GPUs only, though gloo and FBGEMM's CPU kernels run them.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types for a kind of device, each once."""
        types = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*types, *sorted(ROW_WISE_FAMILY)]))


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
    """Plans with TorchRec's planner on rank 0: all ranks get its plan, or its error. The machines
    are made from the process group, LOCAL_WORLD_SIZE and the device's memory if not given.

    On a CPU tables that FBGEMM's fused kernels do not take, such as first-order weights in one
    column, get the dense kernel. Their optimizer is then that of dense weights.
    """
    # With `planner.collective_plan` an error on rank 0 leaves the others waiting.
    world_size, sharders = _world_size(process_group), with_processors(sharders)
    if topology is None:  # the hosts that the launcher names; each GPU has the memory of this one
        is_gpu, local_size = device.type == "cuda", get_local_size(world_size)
        memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
        topology = Topology(world_size, device.type, hbm_cap=memory, local_world_size=local_size)

    def plan() -> ShardingPlan:
        possible = _possible_constraints(model, device, sharders, topology, constraints or {})
        planner = EmbeddingShardingPlanner(topology=topology, constraints=possible)
        try:
            result = planner.plan(model, list(sharders))
        except (PlannerError, RuntimeError) as error:
            requirement = f"constraints that can be met on {world_size} ranks"
            remedy = "loosen the constraints, or take more ranks"
            text = " ".join(str(error).split())
            raise ValueError(describe("sharding plan", requirement, text, remedy)) from error
        _check_pooling(result, model)
        if device.type == "cpu":
            _choose_dense_kernels_(result, constraints or {})
        return result

    return on_rank_zero(plan, process_group)


def check_sharding_plan(
    plan: ShardingPlan,
    model: nn.Module,
    device: torch.device,
    world_size: int,
    local_world_size: int,
) -> None:
    """Checks that a plan is one for this model on this many ranks. Local, no collective."""
    lookups = _lookups_of_plan(model)
    for fqn in plan.plan:
        place = f"sharding plan, FQN {fqn!r}"
        module: nn.Module | None = None
        with suppress(AttributeError):
            module = model.get_submodule(fqn)
        check(module is not None, place, "a module of the model", "none", nearest(fqn, lookups))
        kinds = EmbeddingBagCollection | FeatureProcessedEmbeddingBagCollection
        if not isinstance(module, kinds | EmbeddingCollection):
            limit = "supported are EmbeddingBagCollections and EmbeddingCollections"
            remedy = "take its sharder away; its weights would be drawn anew"
            raise NotImplementedError(describe(place, limit, type(module).__name__, remedy))
    for fqn, lookup in lookups.items():
        plans, kind = _plans_under(plan, fqn), type(lookup)
        remedy = "make the plan for the prepared model"
        if kind not in (EmbeddingBagCollection, EmbeddingCollection):
            base = EmbeddingBagCollection if is_pooled(lookup) else EmbeddingCollection
            remedy = f"build it as an {base.__name__}: "
            remedy += f"sharders take no subclass, such as {kind.__name__}"
        for table in table_configs_of(lookup):
            place = f"sharding plan, table {table.name!r}"
            check(table.name in plans, place, f"an entry under FQN {fqn!r}", "none", remedy)
            _check_ranks(plans[table.name], place, world_size, local_world_size)
            shape = table.num_embeddings, table.embedding_dim
            _check_shards(plans[table.name], place, shape, device)
        if not is_pooled(lookup):
            _check_column_cuts(plans)
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

    TorchRec initialises tables anew when it takes them from a CPU. Here each rank copies the
    weights of its shards back. Data_parallel tables and the remapping of managed collisions become
    those of the first rank. TorchRec initialises tables on the "meta" device. A process group of
    one has no DistributedDataParallel around tables, which would copy their gradients for nothing.

    Distributed: two all_gather_object of a short string, so that a plan that does not fit raises
    everywhere, one broadcast per data_parallel table and per tensor of a remapping, what
    DistributedModelParallel itself needs, and without a plan the collectives of
    `make_sharding_plan`.

    Args:
        model: unsharded, prepared or not. Used up.
        device: device that this rank trains on.
        plan: the same on every rank; by default that of `make_sharding_plan`.
        sharders: those that the plan was made with; by default `default_sharders`.
        process_group: the ranks; all of them if None.

    Returns:
        The sharded model.

    Raises:
        ValueError: on all ranks alike, for a plan that does not fit (see `check_sharding_plan`), or
            that is not the same on all of them.
        RuntimeError: if there is no process group.
    """
    world_size = _world_size(process_group)
    sharders = with_processors(default_sharders() if sharders is None else sharders)
    if plan is None:
        plan = make_sharding_plan(model, device, sharders, process_group=process_group)
    with together(process_group):
        check_sharding_plan(plan, model, device, world_size, get_local_size(world_size))
    _check_same(plan, process_group)
    plain_lookups, fqns_of_plan = _every_lookup(model), _fqns_of_plan(model)
    holders = {fqn: holders_of_tables(lookup) for fqn, lookup in plain_lookups.items()}
    frozen = {fqn: torchrec.freeze_before_sharding_(tables) for fqn, tables in holders.items()}
    weights = _take_weights(model)
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    group = world if process_group is None else process_group
    env = ShardingEnv.from_process_group(group)
    result = DistributedModelParallel(
        model, env=env, device=device, plan=plan, sharders=list(sharders)
    )
    _share_again_(result, plain_lookups)
    for fqn, module in collections(result).items():
        plans = _plans_under(plan, fqns_of_plan[fqn])
        shards = sorted(local_shards(module), key=lambda shard: shard.table)
        for table, parts in itertools.groupby(shards, lambda shard: shard.table):
            # taken out, so that tables are held twice one after the other, not all at once
            weight = weights.pop((fqn, table))
            for part in parts:
                if not weight.is_meta:
                    part.weight.copy_(weight[part.window])
                if plans[table].sharding_type == ShardingType.DATA_PARALLEL.value:
                    dist.broadcast(part.weight, src=dist.get_global_rank(group, 0), group=group)
    share_remapping_(result, group)
    for fqn, lookup in _every_lookup(result).items():
        if isinstance(lookup, torchrec.Sharded):
            torchrec.hold_frozen_(lookup, holders_of_tables(lookup), frozen[fqn])
        if isinstance(lookup, ShardedEmbeddingCollection):
            torchrec.read_rows_in_order_(lookup)
    if world_size == 1:
        torchrec.reduce_no_tables_(result)
    torchrec.read_by_name_(result, refuse_weights=True)
    for wrapper in soft_selection_modules(result).values():
        torchrec.read_by_name_(wrapper)
    return result


def _every_lookup(model: nn.Module) -> dict[str, nn.Module]:
    """Collections, or the children of their wrappers, by the FQN of the outermost."""
    return {fqn: lookup_of(module) for fqn, module in collections(model).items()}


def _fqns_of_plan(model: nn.Module) -> dict[str, str]:
    """FQN of every collection -> that of the module, around it or in it, that TorchRec shards."""
    if not stands_still(model):
        remedy = "call prepare_ first: then rows keep their ids; or take TorchRec's own sharder"
        refuse_managed_collisions(model, "sharding", remedy)
    fqns = {}
    for fqn, module in collections(model).items():
        whole = whole_module_of(model, fqn)
        is_behind = isinstance(whole, FeatureProcessedEmbeddingBagCollection)
        is_behind |= isinstance(module, SoftSelectionFeatureProcessedEmbeddingBagCollection)
        holder = fqn.rpartition(".")[0] if is_behind else fqn
        if isinstance(module, SoftSelectionModule):
            holder = f"{holder}.{module.child_name}".removeprefix(".")
        fqns[fqn] = holder
    return fqns


def _lookups_of_plan(model: nn.Module) -> dict[str, nn.Module]:
    """Collections of an unsharded model by the FQN under which TorchRec shards them."""
    fqns = _fqns_of_plan(model)
    return {fqns[fqn]: lookup_of(module) for fqn, module in collections(model).items()}


def with_processors(sharders: Sharders) -> Sharders:
    """The sharders, and one made of them for feature processors in front of a collection."""
    kinds = {sharder.module_type: sharder for sharder in sharders}
    inner = kinds.get(EmbeddingBagCollection)
    if inner is None or FeatureProcessedEmbeddingBagCollection in kinds:
        return sharders
    codecs = inner.qcomm_codecs_registry
    extra = FeatureProcessedEmbeddingBagCollectionSharder(inner, qcomm_codecs_registry=codecs)
    return [*sharders, cast(ModuleSharder[nn.Module], extra)]


def _share_again_(model: nn.Module, plain_lookups: Mapping[str, nn.Module]) -> None:
    """Puts sharded collections under all names: TorchRec shards under the first alone."""
    inner = get_unwrapped_module(model)
    new = {id(lookup): lookup_of(inner.get_submodule(f)) for f, lookup in plain_lookups.items()}
    for parent in list(inner.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])


def _take_weights(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Takes the weights out of a model, and leaves meta ones: (FQN, table) -> weight."""
    # TorchRec keeps what it has sharded for as long as the sharded collection lives: with weights,
    # twice the memory. Of sequence collections that are not on "meta" it would copy the weights.
    weights = {}
    for fqn, lookup in _every_lookup(model).items():
        for table, holder in holders_of_tables(lookup).items():
            weight = cast(nn.Parameter, holder.weight)
            weights[fqn, table] = weight.detach()
            meta = weight.detach().to("meta")
            holder.weight = nn.Parameter(meta, requires_grad=weight.requires_grad)
            vars(holder.weight).update(vars(weight))  # the optimizers that are noted there
        if isinstance(lookup, EmbeddingCollection):
            torchrec.set_device_(lookup, torch.device("meta"))
    return weights


def _plans_under(plan: ShardingPlan, fqn: str) -> TablePlans:
    return cast(TablePlans, plan.plan.get(fqn, {}))


def _world_size(process_group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        remedy = "call torch.distributed.init_process_group, or use training.shard.process_group"
        raise RuntimeError(describe("sharding", "a process group", "none", remedy))
    return dist.get_world_size(process_group)


def _possible_constraints(
    model: nn.Module,
    device: torch.device,
    sharders: Sharders,
    topology: Topology,
    constraints: Constraints,
) -> dict[str, ParameterConstraints]:
    """The constraints, narrowed to the sharding types that a table can have."""
    lookups = _lookups_of_plan(model).values()
    configs = [config for lookup in lookups for config in table_configs_of(lookup)]
    for table in constraints:
        check_known("table", table, [config.name for config in configs])
    possible: dict[str, ParameterConstraints] = {}
    for config in configs:
        constraint = constraints.get(config.name)
        kind = EmbeddingCollection if config.pooling == PoolingType.NONE else EmbeddingBagCollection
        sharder = next((sharder for sharder in sharders if sharder.module_type is kind), None)
        if sharder is not None:
            constraint = _possible_constraint(config, constraint, sharder, device, topology)
        if constraint is not None:
            possible[config.name] = constraint
    return possible


def _possible_constraint(
    table: EmbeddingBagConfig,
    constraint: ParameterConstraints | None,
    sharder: ModuleSharder[nn.Module],
    device: torch.device,
    topology: Topology,
) -> ParameterConstraints:
    place, constraint = f"table {table.name!r}", constraint or ParameterConstraints()
    on_device = sharder.sharding_types(device.type)
    wishes = constraint.sharding_types or on_device
    types = [kind for kind in wishes if kind in on_device]
    offer = f"{device.type}: {', '.join(on_device)}"
    check(bool(types), place, f"a sharding type that the sharder offers on {offer}", wishes)
    if table.pooling == PoolingType.MEAN:  # see _check_pooling
        types = [kind for kind in types if kind not in ROW_WISE_FAMILY] or types
    rows = table.num_embeddings
    types = [kind for kind in types if not _has_empty_shard(kind, rows, device, topology)]
    requirement = f"a row on every rank of {', '.join(wishes)}"
    remedy = "shard it table_wise or column_wise"
    check(bool(types), place, requirement, f"{rows} rows", remedy)
    kernels = {kernel for kind in types for kernel in sharder.compute_kernels(kind, device.type)}
    wishes = constraint.compute_kernels or []
    requirement = f"a compute kernel for {', '.join(types)}: {', '.join(sorted(kernels))}"
    check(not wishes or bool(kernels & set(wishes)), place, requirement, wishes)
    return replace(constraint, sharding_types=types)


def _choose_dense_kernels_(plan: ShardingPlan, constraints: Constraints) -> None:
    """Gives tables whose columns no fused kernel takes the dense one."""
    for plans in cast(Mapping[str, TablePlans], plan.plan).values():
        for table, table_plan in plans.items():
            is_free = table not in constraints or not constraints[table].compute_kernels
            if is_free and not _has_fused_columns(table_plan):
                table_plan.compute_kernel = EmbeddingComputeKernel.DENSE.value


def _has_empty_shard(kind: str, rows: int, device: torch.device, topology: Topology) -> bool:
    """Whether rows run out before ranks do: FBGEMM's CPU kernels take no table without rows."""
    num_ranks = {ShardingType.ROW_WISE.value: topology.world_size}
    num_ranks |= dict.fromkeys(ON_ONE_HOST, topology.local_world_size)
    if device.type != "cpu" or kind not in num_ranks:
        return False
    per_rank = -(-rows // num_ranks[kind])
    return per_rank * (num_ranks[kind] - 1) >= rows


def _check_ranks(
    plan: ParameterSharding, place: str, world_size: int, local_world_size: int
) -> None:
    """Checks that a table's shards are on ranks that there are, as its sharding type wants them."""
    ranks, kind = list(plan.ranks or []), plan.sharding_type
    remedy = f"make a plan for {world_size} ranks"
    within = all(0 <= rank < world_size for rank in ranks)
    check(within, place, f"ranks below the world size {world_size}", ranks, remedy)
    if kind == ShardingType.ROW_WISE.value:
        everywhere = sorted(ranks) == list(range(world_size))
        check(everywhere, place, f"a shard on each of {world_size} ranks", ranks, remedy)
    if kind in ON_ONE_HOST:
        size = local_world_size
        hosts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        fits = all(h == list(range(h[0], h[0] + size)) and h[0] % size == 0 for h in hosts)
        requirement = f"shards on all {size} ranks of a host (LOCAL_WORLD_SIZE)"
        check(fits, place, requirement, ranks, remedy)


def _has_fused_columns(plan: ParameterSharding) -> bool:
    """Returns whether fused kernels take all shards of a table."""
    spec = plan.sharding_spec  # data_parallel has none
    shards = spec.shards if isinstance(spec, torchrec.EnumerableShardingSpec) else []
    return all(shard.shard_sizes[1] % FUSED_COLUMNS == 0 for shard in shards)


def _check_shards(
    plan: ParameterSharding, place: str, shape: tuple[int, int], device: torch.device
) -> None:
    """Checks that shards cover a table, and are such as their kernels take."""
    if not isinstance(plan.sharding_spec, torchrec.EnumerableShardingSpec):
        return  # data_parallel has none
    shards, kernel = plan.sharding_spec.shards, plan.compute_kernel
    ends = [(s.shard_offsets[i] + s.shard_sizes[i] for i in range(2)) for s in shards]
    end = tuple(max(of_dim) for of_dim in zip(*ends, strict=True))
    if device.type == "cpu":  # FBGEMM's CPU kernels take no table without rows
        requirement = f"a row on every rank of {plan.sharding_type}"
        remedy = "shard it table_wise or column_wise"
        smallest = min(shard.shard_sizes[0] for shard in shards)
        check(smallest > 0, place, requirement, f"{shape[0]} rows", remedy)
    requirement, remedy = f"shards of a table of shape {shape}", "make the plan for this model"
    check(end == shape, place, requirement, f"one of {end}", remedy)
    requirement = f"multiples of {FUSED_COLUMNS} columns in shards of kernel {kernel!r}"
    fits = kernel == EmbeddingComputeKernel.DENSE.value or _has_fused_columns(plan)
    remedy = "leave the kernel to make_sharding_plan on a CPU; on a GPU take another embedding_dim"
    check(fits, place, requirement, sorted({shard.shard_sizes[1] for shard in shards}), remedy)


def _check_column_cuts(plans: TablePlans) -> None:
    """Checks that all column-wise tables of an EmbeddingCollection have shards of one width."""
    widths = {}  # TorchRec reads that of one table, and takes it for all
    for table, plan in plans.items():
        if plan.sharding_type == ShardingType.COLUMN_WISE.value:
            shards = cast(torchrec.EnumerableShardingSpec, plan.sharding_spec).shards
            widths[table] = sorted({shard.shard_sizes[1] for shard in shards})
    remedy = "give all of them one min_partition that divides embedding_dim, or shard it table_wise"
    for table, of_table in widths.items():
        first = next(iter(widths.values()))[:1]
        requirement = f"columns in shards of {first[0]}, as its EmbeddingCollection's other tables"
        check(of_table == first, f"sharding plan, table {table!r}", requirement, of_table, remedy)


def _check_pooling(plan: ShardingPlan, model: nn.Module) -> None:
    """Refuses MEAN tables where TorchRec computes something else."""
    # Row-wise parts of a bag are summed and divided by its length at last. TorchRec 1.8 divides the
    # other tables of the collection too, unless they are row_wise or table_row_wise themselves, and
    # divides nothing under grid_shard. A prepared model sums everywhere: any plan does for it.
    grid, remedy = ShardingType.GRID_SHARD.value, "shard it table_wise or column_wise"
    for fqn, module in _lookups_of_plan(model).items():
        kinds = {name: p.sharding_type for name, p in _plans_under(plan, fqn).items()}
        rest = sorted(name for name, kind in kinds.items() if kind not in ROW_WISE_FAMILY - {grid})
        for table in table_configs_of(module):
            if table.pooling == PoolingType.MEAN and table.name in kinds:
                place, kind = f"sharding plan, table {table.name!r}", kinds[table.name]
                check(kind != grid, place, "SUM under grid_shard", "MEAN", remedy)
                requirement = f"all tables of {fqn!r} row-wise beside a row-wise MEAN table"
                fits = kind not in ROW_WISE_FAMILY or not rest
                check(fits, place, requirement, f"others: {rest}", remedy)


def _check_same(plan: ShardingPlan, process_group: dist.ProcessGroup | None) -> None:
    """Raises on every rank if one of them has another plan than the first."""
    group = Ranks(dist.group.WORLD if process_group is None else process_group)
    ranks, remedy = group.unlike_first([str(plan).encode()]), "make it with make_sharding_plan"
    check(not ranks, "sharding plan", "the same on every rank", f"another on ranks {ranks}", remedy)
