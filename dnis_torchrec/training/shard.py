"""A model sharded for its table optimizer, the optimizer of the rest, and process groups."""

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ShardingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dnis_torchrec.checks import check_known
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ops.select import are_compiled
from dnis_torchrec.ranks import Ranks, world_size_of
from dnis_torchrec.selection import shards
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.plan import (
    CpuEmbeddingBagCollectionSharder,
    default_sharders,
    make_sharding_plan,
    shard_model,
)
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.selection.wrapper import (
    SoftSelectionEmbeddingBagCollection,
    SoftSelectionModule,
    soft_selection_modules,
)

WHOLE_ROWS = {"table_wise", "row_wise", "table_row_wise"}  # sharding types that cut no row
FUSED_OPTIMIZERS = {
    "adam": EmbOptimType.ADAM,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
"""`Recipe.table_optimizer` -> FBGEMM's optimizer that runs inside the tables' backward."""
TABLE_RATE = "table_rate"  # key of param_groups: whether they learn at the tables' rate


def check_pooling(model: nn.Module) -> None:
    """Checks that torch itself can look up the tables of a model, as one process does."""
    if world_size_of() == 1:
        shards.check_pooling(shards.collections(model).values())


def shard(
    task: TrainTask,
    recipe: Recipe,
    device: torch.device,
    *,
    whole_rows: Collection[str] = (),
    is_replicated: bool = False,
    is_prefetched: bool = False,
    batch_size: int | None = None,
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Shards a model as the recipe's table optimizer needs it."""
    check_pooling(task)
    is_gpu, is_cpu = device.type == "cuda", device.type == "cpu"
    in_backward = recipe.table_optimizer == "rowwise_adagrad" or (is_gpu and not is_replicated)
    wrappers = soft_selection_modules(task).values()
    is_multi_hot = any(wrapper.bag_splitter is not None for wrapper in wrappers)
    may_select_in_lookups = is_multi_hot and is_cpu and are_compiled()
    multiplies = may_select_in_lookups and not is_replicated and _are_small(wrappers, batch_size)
    selects_in_lookups = multiplies or (may_select_in_lookups and in_backward)
    if selects_in_lookups:
        for wrapper in wrappers:
            if isinstance(wrapper, SoftSelectionEmbeddingBagCollection):
                wrapper.read_whole_features_(multiply_tables=multiplies)
    # Not by apply_optimizer_in_backward: torch then keeps what it was applied to, and every table
    # would be held twice.
    kernel_optimizer = FUSED_OPTIMIZERS[recipe.table_optimizer]
    fused_params = {"optimizer": kernel_optimizer, "learning_rate": recipe.table_learning_rate}
    of_bags = {USE_ONE_TBE_PER_TABLE: True} if in_backward and is_multi_hot and is_cpu else None
    sharders = default_sharders(fused_params if in_backward else None, of_bags=of_bags)
    is_spread = in_backward or (world_size_of() > 1 and not is_replicated)
    if is_spread:
        # Small tables would be planned data_parallel, whose dense kernel has no fused optimizer.
        kinds = _spread_types(device)
        constraint = ParameterConstraints(sharding_types=kinds)
        uncut = ParameterConstraints(sharding_types=[kind for kind in kinds if kind in WHOLE_ROWS])
    else:
        kernels, kinds = [EmbeddingComputeKernel.DENSE.value], [ShardingType.DATA_PARALLEL.value]
        constraint = uncut = ParameterConstraints(sharding_types=kinds, compute_kernels=kernels)
    constraints = {
        table.name: uncut if table.name in whole_rows else constraint
        for module in shards.collections(task).values()
        for table in shards.table_configs_of(module)
    }
    plan = make_sharding_plan(task, device, sharders, constraints=constraints)
    for module_plan in cast(Iterable[EmbeddingModuleShardingPlan], plan.plan.values()):
        for sharding in module_plan.values():
            kernel = sharding.compute_kernel
            if is_spread and not in_backward:
                # Every type runs in the dense kernel; the planner knows it for data_parallel alone.
                sharding.compute_kernel = EmbeddingComputeKernel.DENSE.value
            elif is_prefetched and kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
                cache = sharding.cache_params or CacheParams()
                sharding.cache_params = replace(cache, prefetch_pipeline=True)
    model = shard_model(task, device, plan, sharders)
    if selects_in_lookups:
        select_on_shards_(model)
    read_by_name_(model)
    return model, rest_optimizer(model, recipe)


def spread_tables(model: nn.Module, device: torch.device) -> nn.Module:
    """Spreads a model's tables for work that trains nothing: each value is on one rank."""
    if world_size_of() == 1:
        return model.to(device)
    constraint = ParameterConstraints(sharding_types=_spread_types(device))
    constraints = {table.name: constraint for table in shards.table_configs(model)}
    sharders = default_sharders()
    plan = make_sharding_plan(model, device, sharders, constraints=constraints)
    return shard_model(model, device, plan, sharders)


def _spread_types(device: torch.device) -> list[str]:
    """Sharding types by which no two ranks hold the same value."""
    kinds = CpuEmbeddingBagCollectionSharder().sharding_types(device.type)
    return [kind for kind in kinds if kind != ShardingType.DATA_PARALLEL.value]


def _are_small(wrappers: Collection[SoftSelectionModule], batch_size: int | None) -> bool:
    """Whether all pooled tables hold at most as many numbers as a batch of all ranks gives."""
    collections = filter(shards.is_pooled, wrappers)
    tables = [table for module in collections for table in shards.table_configs_of(module)]
    per_sample = sum(table.embedding_dim * len(table.feature_names) for table in tables)
    num_values = sum(table.num_embeddings * table.embedding_dim for table in tables)
    return num_values <= per_sample * (batch_size or 0)


def rest_optimizer(model: DistributedModelParallel, recipe: Recipe) -> KeyedOptimizerWrapper:
    """A fresh Adam for everything that is not fused: dense weights, tables in the dense kernel."""
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    at_table_rate = shards.table_weight_names(model)
    for name in recipe.row_weights:
        names = {parameter for parameter in rest if f".{parameter}".endswith(f".{name}")}
        if not names:
            check_known("parameter of Recipe.row_weights", name, rest)
        at_table_rate |= names
    rates = {False: recipe.dense_learning_rate, True: recipe.table_learning_rate}
    groups: list[dict[str, Any]] = []
    for kind, rate in rates.items():
        weights = [weight for name, weight in rest.items() if (name in at_table_rate) is kind]
        groups.append({"params": weights, "lr": rate, TABLE_RATE: kind})
    groups = [group for group in groups if group["params"]] or groups[:1]
    return KeyedOptimizerWrapper(rest, lambda _: torch.optim.Adam(groups, fused=True))


def set_learning_rates_(
    model: DistributedModelParallel,
    optimizer: KeyedOptimizerWrapper,
    *,
    tables: float,
    dense: float,
) -> None:
    """Lets a model learn at other rates from the next step on. All ranks call it alike."""
    for group in optimizer.param_groups:
        group["lr"] = tables if group[TABLE_RATE] else dense
    for group in model.fused_optimizer.param_groups:
        group["lr"] = tables  # kernels of frozen tables keep theirs
    # Here TorchRec's fused optimizers hand their rate on to the kernels.
    model.fused_optimizer.zero_grad()


LONGEST_WAIT = timedelta(days=30)  # of ranks that train nothing: one may be at work alone


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The process group of a run: a launcher's, or else of this process alone."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(torch.distributed.get_node_local_rank(fallback_rank=0)))
        torch.cuda.set_device(device)
    with flushing_denormals(), _group("nccl" if device.type == "cuda" else "gloo"):
        yield device


@contextmanager
def launched_ranks() -> Iterator[Ranks]:
    """The ranks of a launcher such as torchrun, on CPUs, for work that trains nothing."""
    with _group("gloo", LONGEST_WAIT) if _is_launched() else nullcontext():
        yield Ranks.everyone()


@contextmanager
def _group(backend: str, timeout: timedelta | None = None) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        if _is_launched():
            dist.init_process_group(backend, timeout=timeout)
        else:  # a file, not a port: several runs on one machine never meet
            store = dist.FileStore(f"{folder}/store", 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _is_launched() -> bool:
    """Returns whether this process is a rank of several, or one that torchrun started alone."""
    return dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """While it lasts this thread's CPU takes denormals for zero, where the CPU can."""
    was_flushing = is_flushing()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)


def is_flushing() -> bool:
    """Returns whether this thread's CPU takes denormals for zero."""
    smallest = torch.tensor(torch.finfo(torch.float32).tiny)
    return float(smallest / 2) == 0
