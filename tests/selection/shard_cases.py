"""What ranks do, and report, about selection on the shards; judged in tests/distributed/test_selection_ranks.py.

Also on one rank, in the test's own process: tests/selection/test_shards.py.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import dnis_torchrec as dnis
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.ops.select import are_compiled
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.plan import Sharders, default_sharders
from dnis_torchrec.selection.shards import collections, local_shards, table_configs_of
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection, soft_selection_modules
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU
from tests.tiny import bag_config

SHARDERS = default_sharders()
PER_RANK, LEARNING_RATE = 9, 0.1
ROWS = {"a": 23, "b": 11, "c": 17}
LENGTHS = {"one": 1, "both": 4, "many": 3}
SAME_KIND = ("table_wise", "column_wise", "row_wise", "data_parallel", "table_row_wise", "grid_shard")
SHARDINGS = {kind: dict.fromkeys(ROWS, kind) for kind in SAME_KIND}
SHARDINGS["mixed"] = {"a": "column_wise", "b": "row_wise", "c": "data_parallel"}
SHARDINGS["kernel_per_table"] = SHARDINGS["row_wise"]
WHOLE_FEATURES = {
    "whole features": SHARDINGS["mixed"],
    "whole features, kernel_per_table": {"a": "column_wise", "b": "row_wise", "c": "table_wise"},
}
"""Where the lookups read one key per feature, for which the operators have to be compiled."""
MULTIPLIED_TABLES = {
    "multiplied tables, kernel_per_table": {"a": "column_wise", "b": "row_wise", "c": "table_wise"},
    "multiplied tables, rows, kernel_per_table": SHARDINGS["row_wise"],
    "multiplied tables, data_parallel, kernel_per_table": SHARDINGS["data_parallel"],
    "multiplied tables of two dims": SHARDINGS["table_wise"],
}
"""Where no optimizer is fused, and whole tables are multiplied; those of two dims in one kernel cannot be."""
WHOLE_FEATURES |= MULTIPLIED_TABLES
if are_compiled():
    SHARDINGS |= WHOLE_FEATURES
ANY_SIZE = ("table_wise", "column_wise", "data_parallel")
"""Where gloo lets ranks have batches of different sizes."""


def tables() -> list[EmbeddingBagConfig]:
    """SUM and MEAN, two dims, two features of one table, and one feature of two."""
    of = {"a": (8, ["one", "both"]), "b": (8, ["both"]), "c": (12, ["many"])}
    return [
        bag_config(name, ROWS[name], dim, *features, pooling=PoolingType.SUM if name == "a" else PoolingType.MEAN)
        for name, (dim, features) in of.items()
    ]


def make_model(weighted: bool, *, names: Collection[str] = ROWS) -> nn.Module:
    """The prepared collection of some tables, with the same weights and the same alpha in every process."""
    torch.manual_seed(1)
    configs = [table for table in tables() if table.name in names]
    rows_of = {table.name: table.num_embeddings for table in configs}
    counts = FrequencyCounts({n: torch.randint(0, 9, (rows,)) for n, rows in rows_of.items()}, LENGTHS, 30)
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=configs, is_weighted=weighted)})
    prepared = dnis.prepare_(model, dnis.blocks_from_counts(counts, configs, num_blocks=3, least_rows=1))
    for dim in prepared["ebc"].alpha.dims:
        prepared["ebc"].alpha.of(dim).uniform_(0.1, 1)
    return prepared


def make_features(rank: int, weighted: bool) -> KeyedJaggedTensor:
    """A rank's bags, empty ones among them; the second rank has no `many` at all."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.cat(
        [
            torch.randint(0, most + 1, (PER_RANK,), generator=generator) * (feature != "many" or rank != 1)
            for feature, most in LENGTHS.items()
        ]
    )
    ids = torch.randint(0, min(ROWS.values()), (int(lengths.sum()),), generator=generator)
    weights = torch.randn(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=list(LENGTHS), values=ids, lengths=lengths, weights=weights)


def no_samples(weighted: bool) -> KeyedJaggedTensor:
    none = torch.empty(0, dtype=torch.int64)
    weights = torch.empty(0) if weighted else None
    return KeyedJaggedTensor(keys=list(LENGTHS), values=none, lengths=none, weights=weights, stride=0)


def is_fused(kind: str, table: str) -> bool:
    return SHARDINGS[kind][table] != "data_parallel" and kind not in MULTIPLIED_TABLES


def shard(model: nn.Module, kind: str, group: dist.ProcessGroup) -> nn.Module:
    """The model sharded over a group, plain SGD fused into its tables where `is_fused`."""
    if kind in WHOLE_FEATURES:
        model["ebc"].read_whole_features_(multiply_tables=kind in MULTIPLIED_TABLES)
    for name, bag in model["ebc"].embedding_bag_collection.embedding_bags.items():
        if is_fused(kind, name):
            apply_optimizer_in_backward(torch.optim.SGD, bag.parameters(), {"lr": LEARNING_RATE})
    sharders = [dnis.CpuEmbeddingBagCollectionSharder({USE_ONE_TBE_PER_TABLE: kind.endswith("kernel_per_table")})]
    constraints = {
        name: ParameterConstraints(sharding_types=[SHARDINGS[kind][name]], min_partition=4)
        for name in model["ebc"].embedding_bag_collection.embedding_bags
    }
    plan = dnis.make_sharding_plan(model, CPU, sharders, constraints=constraints, process_group=group)
    for name, own in plan.plan["ebc.embedding_bag_collection"].items():
        if not is_fused(kind, name):
            own.compute_kernel = EmbeddingComputeKernel.DENSE.value
    return dnis.shard_model(model, CPU, plan, sharders, process_group=group)


def plan_by(model: nn.Module, kind: str, sharders: Sharders = SHARDERS, **options: Any) -> ShardingPlan:
    """A plan that gives all tables of a model one sharding type; column-wise ones are cut into shards of 4 columns."""
    constraint = ParameterConstraints(sharding_types=[kind], min_partition=4)
    names = [table.name for module in collections(model).values() for table in table_configs_of(module)]
    return dnis.make_sharding_plan(model, CPU, sharders, constraints=dict.fromkeys(names, constraint), **options)


def shard_by(model: nn.Module, kind: str, sharders: Sharders = SHARDERS) -> DistributedModelParallel:
    return dnis.shard_model(model, CPU, plan_by(model, kind, sharders), sharders)


def loss_of(pooled: KeyedTensor) -> torch.Tensor:
    """A mean over samples, so that the mean over ranks is that of the whole batch; every column counts differently.

    Of a rank without samples 0, and so is its gradient.
    """
    values = pooled.values()
    return (values * torch.linspace(-1, 1, values.shape[1])).sin().sum() / PER_RANK


def upper_gradients(
    wrapper: SoftSelectionEmbeddingBagCollection, features: KeyedJaggedTensor
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    dims = wrapper.alpha.dims
    with wrapper.alpha.upper_level() as hits:
        loss = loss_of(wrapper(features))
        alphas = [wrapper.alpha.of(dim) for dim in dims]
        return list(torch.autograd.grad(loss, alphas, materialize_grads=True)), hits


def compare(
    kind: str, weighted: bool, rank: int, world_size: int, group: dist.ProcessGroup, empty_rank: int | None = None
) -> Results:
    """How far the sharded collection is from the unsharded one, which sees all ranks' samples.

    One of the ranks may have none, which an unsharded collection of TorchRec does not take.
    """
    whole = make_model(weighted)["ebc"]
    parts = [
        no_samples(weighted) if other == empty_rank else make_features(other, weighted) for other in range(world_size)
    ]
    seen = [part for part in parts if part.stride()]
    expected = torch.empty(0, 36) if rank == empty_rank else whole(parts[rank]).values().detach()
    expected_upper = [upper_gradients(whole, part) for part in seen]
    (sum(loss_of(whole(part)) for part in seen) / world_size).backward()
    trained = {
        name: bag.weight.detach() - LEARNING_RATE * bag.weight.grad
        for name, bag in whole.embedding_bag_collection.embedding_bags.items()
    }
    sharded = shard(make_model(weighted), kind, group)
    before = list(sharded.state_dict())
    select_on_shards_(sharded)
    wrapper = soft_selection_modules(sharded)["ebc"]
    loss = loss_of(got := wrapper(parts[rank]))
    upper = upper_gradients(wrapper, parts[rank])
    loss.backward()
    not_fused = [weight for _, weight in in_backward_optimizer_filter(wrapper.named_parameters())]
    if not_fused:
        torch.optim.SGD(not_fused, lr=LEARNING_RATE).step()
    alpha_error, hit_errors = 0.0, 0
    for index, dim in enumerate(wrapper.alpha.dims):
        gradient, hits = upper[0][index].clone(), upper[1][dim].int()
        dist.all_reduce(gradient, group=group)
        dist.all_reduce(hits, group=group)
        wanted = sum(gradients[index] for gradients, _ in expected_upper) / world_size
        alpha_error = max(alpha_error, float((gradient / world_size - wanted).abs().max()))
        hit_errors += int(((hits > 0) != torch.stack([own[dim] for _, own in expected_upper]).any(0)).sum())
    table_error = 0.0
    for part in local_shards(wrapper):
        table_error = max(table_error, float((part.weight - trained[part.table][part.window]).abs().max()))
    return {
        "keys": got.keys() == [output.name for output in whole.outputs],
        "state": before == list(sharded.state_dict()),
        "columns": sum(wrapper.embedding_bag_collection._embedding_dims),
        "shape": list(got.values().shape),
        "value_error": float((got.values().detach() - expected).abs().sum()),
        "alpha_error": alpha_error,
        "hit_errors": hit_errors,
        "table_error": table_error,
    }


def look_up_nothing(wrapper: SoftSelectionEmbeddingBagCollection, weighted: bool) -> Results:
    """What becomes of a batch of 0 samples on every rank, in both levels."""
    before = [part.weight.clone() for part in local_shards(wrapper)]
    pooled = wrapper(no_samples(weighted))
    pooled.values().sum().backward()
    gradients, hits = upper_gradients(wrapper, no_samples(weighted))
    learned = [parameter.grad for parameter in wrapper.parameters() if parameter.grad is not None]  # no fused ones
    return {
        "keys": pooled.keys() == [output.name for output in wrapper.outputs],
        "shape": list(pooled.values().shape),
        "table_change": sum(
            float((part.weight - old).abs().sum()) for part, old in zip(local_shards(wrapper), before, strict=True)
        ),
        "gradient": sum(float(gradient.abs().sum()) for gradient in learned),
        "alpha_gradient": sum(float(gradient.abs().sum()) for gradient in gradients),
        "alpha_values": [gradient.numel() for gradient in gradients],
        "hits": sum(int(hit.sum()) for hit in hits.values()),
    }


def look_up_nothing_on(kind: str, at: Rank) -> Results:
    """`look_up_nothing` on one of several ranks."""
    wrapper = select_on_shards_(shard(make_model(False), kind, at.process_group)).module["ebc"]
    return look_up_nothing(wrapper, False)


def compare_on(kind: str, weighted: bool, empty_rank: int | None, at: Rank) -> Results:
    """`compare` on one of several ranks."""
    return compare(kind, weighted, at.rank, at.world_size, at.process_group, empty_rank)


def scenarios() -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}
    for kind in SHARDINGS:
        for weighted in (False, True):
            found[f"{kind} {weighted}"] = partial(compare_on, kind, weighted, None)
        found[f"{kind}, no samples"] = partial(look_up_nothing_on, kind)
    for kind in ANY_SIZE:
        for empty_rank in (0, 1):
            found[f"{kind}, no samples on rank {empty_rank}"] = partial(compare_on, kind, False, empty_rank)
    return found
