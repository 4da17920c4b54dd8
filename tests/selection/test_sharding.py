"""Plans and sharded models on one rank; tests/distributed/test_sharding_ranks.py has the rest."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection, get_unwrapped_module
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.selection.plan import (
    CpuEmbeddingBagCollectionSharder,
    check_sharding_plan,
    make_sharding_plan,
    shard_model,
)
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import merge_, prepare_, unshard_
from tests.small_models import lookups_of
from tests.tiny import ROWS, make_batch, make_collection, make_recipe

CPU = torch.device("cpu")
SHARDERS = [CpuEmbeddingBagCollectionSharder()]
ALL = ("row_wise", "grid_shard", "table_wise")
ROW_WISE = ("row_wise", "table_row_wise", "grid_shard")


def make_model() -> nn.ModuleDict:
    return nn.ModuleDict({"ebc": make_collection()})


def plan_for(rows: int, kind: str, world_size: int, local_world_size: int):
    """A plan for other machines than this one, which needs no process group of theirs."""
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=8, feature_names=["f"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table], device=torch.device("meta"))})
    topology = Topology(world_size=world_size, local_world_size=local_world_size, compute_device="cpu")
    constraints = {"t": ParameterConstraints(sharding_types=[kind], min_partition=4)}
    return model, make_sharding_plan(model, CPU, SHARDERS, constraints=constraints, topology=topology)


def test_the_sharder_adds_the_row_wise_family_on_a_cpu_and_nothing_on_a_gpu() -> None:
    stock, own = EmbeddingBagCollectionSharder(), CpuEmbeddingBagCollectionSharder()
    assert set(own.sharding_types("cpu")) == {*stock.sharding_types("cpu"), *ROW_WISE}
    assert own.sharding_types("cuda") == stock.sharding_types("cuda")
    for device in ("cpu", "cuda"):
        for kind in own.sharding_types(device):
            assert own.compute_kernels(kind, device) == stock.compute_kernels(kind, device)


@pytest.mark.parametrize("kind", ROW_WISE)
def test_it_serves_a_users_own_distributed_model_parallel(gloo: dist.ProcessGroup, kind: str) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=40, embedding_dim=8, feature_names=["user"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
    constraints = {"t": ParameterConstraints(sharding_types=[kind], min_partition=4)}
    plan = make_sharding_plan(model, CPU, SHARDERS, constraints=constraints)
    assert {planned.sharding_type for planned in plan.plan["ebc"].values()} == {kind}
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=SHARDERS)
    pooled = sharded.module["ebc"](make_batch(5, 0).sparse_features)
    assert pooled.values().shape == (5, 8)


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "table_wise", "column_wise", "data_parallel"])
def test_a_sharded_model_computes_what_the_model_did(gloo: dist.ProcessGroup, kind: str) -> None:
    model, features = make_model(), make_batch(7, 0).sparse_features
    expected = model["ebc"](features)
    constraints = dict.fromkeys(ROWS, ParameterConstraints(sharding_types=[kind], min_partition=4))
    plan = make_sharding_plan(model, CPU, SHARDERS, constraints=constraints)
    pooled = shard_model(model, CPU, plan, SHARDERS).module["ebc"](features)
    assert pooled.keys() == expected.keys()
    torch.testing.assert_close(pooled.values(), expected.values(), atol=1e-6, rtol=0)


def test_replicated_tables_of_one_process_keep_gradients_where_they_are(gloo: dist.ProcessGroup) -> None:
    """DistributedDataParallel would copy them, whole, to divide them by one."""
    model, features = make_model(), make_batch(7, 0).sparse_features
    model["ebc"](features).values().square().sum().backward()
    expected = {name: part.weight.grad.clone() for name, part in model["ebc"].embedding_bags.items()}
    model.zero_grad()
    constraints = dict.fromkeys(ROWS, ParameterConstraints(sharding_types=["data_parallel"]))
    sharded = shard_model(model, CPU, make_sharding_plan(model, CPU, SHARDERS, constraints=constraints), SHARDERS)
    collection = sharded.module["ebc"]
    assert not any(isinstance(lookup, DistributedDataParallel) for lookup in lookups_of(sharded))
    collection(features).values().square().sum().backward()
    for name, part in collection.embedding_bags.items():
        torch.testing.assert_close(part.weight.grad, expected[name])


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_tables_of_the_same_name_keep_their_own_weights(gloo: dist.ProcessGroup, kind: str) -> None:
    model, features = nn.ModuleDict({"x": make_collection(), "y": make_collection()}), make_batch(7, 0).sparse_features
    expected = [model[fqn](features).values() for fqn in "xy"]
    constraints = dict.fromkeys(ROWS, ParameterConstraints(sharding_types=[kind]))
    sharded = shard_model(model, CPU, make_sharding_plan(model, CPU, SHARDERS, constraints=constraints), SHARDERS)
    found = [get_unwrapped_module(sharded)[fqn](features).values() for fqn in "xy"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def pooled_in_two_ways() -> nn.ModuleDict:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=8, feature_names=[f"f_{name}"], pooling=pooling)
        for name, pooling in (("a", PoolingType.MEAN), ("b", PoolingType.SUM), ("c", PoolingType.MEAN))
    ]
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})


def test_a_plan_that_torchrec_pools_wrongly_is_refused_and_no_other(gloo: dist.ProcessGroup) -> None:
    lengths = torch.tensor([1, 2, 3] * 3)
    features = KeyedJaggedTensor(keys=["f_a", "f_b", "f_c"], values=torch.arange(18) % 9, lengths=lengths)
    refused = []
    for kinds in itertools.product(ALL, repeat=3):
        model = pooled_in_two_ways()
        expected = model["ebc"](features).values()
        chosen = zip("abc", kinds, strict=True)
        constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in chosen}
        try:
            plan = make_sharding_plan(model, CPU, SHARDERS, constraints=constraints)
        except ValueError as error:
            refused.append((kinds, str(error)))
            continue
        pooled = shard_model(model, CPU, plan, SHARDERS).module["ebc"](features).to_dict()
        torch.testing.assert_close(torch.cat([pooled[f"f_{n}"] for n in "abc"], 1), expected, atol=1e-5, rtol=0)
    rows = {("row_wise",) * 3}
    are_means_whole = {kinds for kinds in itertools.product(ALL, repeat=3) if {kinds[0], kinds[2]} == {"table_wise"}}
    assert {kinds for kinds, _ in refused} == set(itertools.product(ALL, repeat=3)) - are_means_whole - rows
    messages = dict(refused)
    assert messages["grid_shard", "table_wise", "table_wise"].startswith(
        "sharding plan, table 'a': expected SUM under grid_shard, got MEAN; shard it table_wise or column_wise"
    )
    assert messages["row_wise", "table_wise", "row_wise"].startswith(
        "sharding plan, table 'a': expected all tables of 'ebc' row-wise beside a row-wise MEAN table, got others: "
    )


def test_the_planner_leaves_mean_tables_whole(gloo: dist.ProcessGroup) -> None:
    kinds = [kind for kind in SHARDERS[0].sharding_types("cpu") if kind != "data_parallel"]
    constraints = {name: ParameterConstraints(sharding_types=kinds) for name in "abc"}
    topology = Topology(world_size=4, local_world_size=4, compute_device="cpu")
    plan = make_sharding_plan(pooled_in_two_ways(), CPU, SHARDERS, constraints=constraints, topology=topology)
    assert not {plan.plan["ebc"][name].sharding_type for name in "ac"} & set(ROW_WISE)


def test_tables_on_meta_are_initialised_by_torchrec(gloo: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table], device=torch.device("meta"))})
    sharded = shard_model(model, CPU)
    (part,) = [part for module in collections(sharded).values() for part in local_shards(module)]
    assert part.weight.shape == (9, 8)
    assert 0 < float(part.weight.abs().max()) <= 1 / 3


def test_without_a_process_group_both_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="sharding: expected a process group, got none"):
        make_sharding_plan(make_model(), CPU, SHARDERS)


@pytest.mark.parametrize(
    ("rows", "kind", "world_size", "fits"),
    [
        (4, "row_wise", 4, True),
        (3, "row_wise", 4, False),
        (5, "row_wise", 4, False),  # two each leave none for the last
        (6, "row_wise", 4, False),
        (7, "row_wise", 4, True),
        (2, "table_row_wise", 4, True),
        (1, "table_row_wise", 4, False),
        (1, "grid_shard", 4, False),
        (1, "table_wise", 4, True),
        (1, "column_wise", 4, True),
    ],
)
def test_rows_suffice_for_the_ranks_or_are_said_not_to(
    gloo: dist.ProcessGroup, rows: int, kind: str, world_size: int, fits: bool
) -> None:
    if fits:
        model, plan = plan_for(rows, kind, world_size, 2)
        check_sharding_plan(plan, model, CPU, world_size, 2)
        shards = plan.plan["ebc"]["t"].sharding_spec.shards
        assert min(shard.shard_sizes[0] for shard in shards) > 0
    else:
        with pytest.raises(ValueError, match=f"table 't': expected a row on every rank of {kind}, got {rows} rows"):
            plan_for(rows, kind, world_size, 2)


def test_the_planner_is_offered_what_a_small_table_can_have(gloo: dist.ProcessGroup) -> None:
    model = make_model()
    topology = Topology(world_size=32, local_world_size=32, compute_device="cpu")
    kinds = [kind for kind in SHARDERS[0].sharding_types("cpu") if kind != "data_parallel"]
    constraints = dict.fromkeys(ROWS, ParameterConstraints(sharding_types=kinds))
    plan = make_sharding_plan(model, CPU, SHARDERS, constraints=constraints, topology=topology)
    assert plan.plan["ebc"]["genre"].sharding_type not in ROW_WISE  # 12 rows
    check_sharding_plan(plan, model, CPU, 32, 32)


@pytest.mark.parametrize(
    ("made_for", "used_on", "message"),
    [
        (("row_wise", 4, 4), (2, 2), r"table 't': expected ranks below the world size 2, got \[0, 1, 2, 3\]; make"),
        (("row_wise", 2, 2), (4, 4), r"table 't': expected a shard on each of 4 ranks, got \[0, 1\]; make"),
        (("table_row_wise", 4, 2), (4, 4), r"table 't': expected shards on all 4 ranks of a host .*got \[0, 1\]"),
        (("grid_shard", 4, 4), (4, 3), r"table 't': expected shards on all 3 ranks of a host"),
    ],
)
def test_a_plan_for_another_world_size_is_refused(
    gloo: dist.ProcessGroup, made_for: tuple[str, int, int], used_on: tuple[int, int], message: str
) -> None:
    model, plan = plan_for(41, *made_for)
    check_sharding_plan(plan, model, CPU, *made_for[1:])
    with pytest.raises(ValueError, match=f"sharding plan, {message}"):
        check_sharding_plan(plan, model, CPU, *used_on)


def test_a_plan_for_another_model_is_refused(gloo: dist.ProcessGroup) -> None:
    model, plan = plan_for(41, "row_wise", 2, 2)
    other, _ = plan_for(40, "row_wise", 2, 2)
    with pytest.raises(ValueError, match=r"table 't': expected shards of a table of shape \(40, 8\), got one of \(41"):
        check_sharding_plan(plan, other, CPU, 2, 2)
    with pytest.raises(ValueError, match=r"sharding plan, FQN 'ebc': expected a module of the model, got none; .*'ec'"):
        check_sharding_plan(plan, nn.ModuleDict({"ec": model["ebc"]}), CPU, 2, 2)
    with pytest.raises(ValueError, match="table 'user': expected an entry under FQN 'ebc', got none"):
        check_sharding_plan(plan, make_model(), CPU, 2, 2)


def test_a_uvm_cached_table_is_refused_on_a_cpu(gloo: dist.ProcessGroup) -> None:
    constraints = {"user": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}
    with pytest.raises(ValueError, match=r"table 'user': expected a compute kernel for .*: dense, fused, got"):
        make_sharding_plan(make_model(), CPU, SHARDERS, constraints=constraints)


class TwoDimensional(DMPCollection):
    """TorchRec builds the real one on GPUs only."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._dmp_wrapped_module = module


def test_two_dimensional_parallelism_is_refused_before_any_collective(
    gloo: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    model = TwoDimensional(prepare_(recipe.model, blocks_from_counts(counts, tables, num_blocks=2)))
    for collective in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
        monkeypatch.setattr(dist, collective, lambda *_, **__: pytest.fail("a collective"))
    with pytest.raises(NotImplementedError, match=r"supported is DistributedModelParallel.*DMPCollection \(2D parall"):
        BilevelTrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)


class Part(nn.Module):
    """A part of a model that looks up in a collection."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.ebc = collection

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled embeddings."""
        return self.ebc(features).values()


class Twice(Part):
    """The same under two names."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__(collection)
        self.again = collection

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled embeddings of both."""
        return super().forward(features) + self.again(features).values()


class InTwoParts(nn.Module):
    """The same in two parts of a model."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.first, self.second = Part(collection), Part(collection)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled embeddings of both."""
        return self.first(features) + self.second(features)


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("kind", [Twice, InTwoParts])
def test_a_collection_that_has_two_names_stays_one(gloo, kind: type[nn.Module], searched: bool) -> None:
    """TorchRec shards what a parent holds under two names under the first alone."""
    features = make_batch(5, 0).sparse_features
    model, unsharded = kind(make_collection()), kind(make_collection())
    unsharded.load_state_dict(model.state_dict())
    if searched:
        tables = table_configs(model)
        prepare_(model, blocks_from_counts(count_frequencies([features], tables), tables, num_blocks=2))
    sharders = [CpuEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})]
    constraints = {table: ParameterConstraints(sharding_types=["table_wise"]) for table in ROWS}
    sharded = shard_model(model, CPU, make_sharding_plan(model, CPU, sharders, constraints=constraints), sharders)
    optimizer = torch.optim.SGD(unsharded.parameters(), lr=0.5)
    for _ in range(2):
        found, expected = sharded(features), unsharded(features)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        found.square().mean().backward()
        expected.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = merge_(sharded) if searched else unshard_(sharded)
    torch.testing.assert_close(merged(features), unsharded(features), atol=1e-5, rtol=0)
    assert len(collections(merged)) == 1


def test_a_fused_kernel_for_a_table_too_narrow_for_it_is_refused(gloo: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=40, embedding_dim=1, feature_names=["user"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
    wanted = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    plan = make_sharding_plan(model, CPU, SHARDERS, constraints={"t": wanted})
    expected = r"table 't': expected multiples of 4 columns in shards of kernel 'fused', got \[1\]; leave the kernel to"
    with pytest.raises(ValueError, match=expected):
        shard_model(model, CPU, plan, SHARDERS)
    sharded = shard_model(model, CPU, make_sharding_plan(model, CPU, SHARDERS), SHARDERS)
    assert sharded.module["ebc"](make_batch(5, 0).sparse_features).values().shape == (5, 1)
