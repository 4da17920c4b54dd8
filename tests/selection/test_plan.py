"""Plans on one rank (over several: tests/distributed/test_selection_ranks.py); whole models are prepared and merged."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection, get_unwrapped_module
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection import wrapper
from dnis_torchrec.selection.plan import check_sharding_plan, default_sharders
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import fold_, unshard_
from dnis_torchrec.selection.torchrec_inputs import remap
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection, SoftSelectionEmbeddingCollection
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
from tests import models
from tests.models import BATCHES, CPU, NEW, USERS, Model, SequenceModel, collection, features, predictions, trained, zch
from tests.selection.shard_cases import plan_by, shard_by
from tests.tiny import make_batch, make_collection, make_recipe

SHARDERS = [dnis.CpuEmbeddingBagCollectionSharder()]
ALL = ("row_wise", "grid_shard", "table_wise")
ROW_WISE = ("row_wise", "table_row_wise", "grid_shard")


def make_model() -> nn.ModuleDict:
    return nn.ModuleDict({"ebc": make_collection()})


def plan_for(rows: int, kind: str, world_size: int, local_world_size: int):
    """A plan for other machines than this one, which needs no process group of theirs."""
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=8, feature_names=["f"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table], device=torch.device("meta"))})
    topology = Topology(world_size=world_size, local_world_size=local_world_size, compute_device="cpu")
    return model, plan_by(model, kind, topology=topology)


def test_the_sharder_adds_the_row_wise_family_on_a_cpu_and_nothing_on_a_gpu() -> None:
    stock, own = EmbeddingBagCollectionSharder(), dnis.CpuEmbeddingBagCollectionSharder()
    assert set(own.sharding_types("cpu")) == {*stock.sharding_types("cpu"), *ROW_WISE}
    assert own.sharding_types("cuda") == stock.sharding_types("cuda")
    for device in ("cpu", "cuda"):
        for kind in own.sharding_types(device):
            assert own.compute_kernels(kind, device) == stock.compute_kernels(kind, device)


def test_replicated_tables_of_one_process_keep_gradients_where_they_are(gloo: dist.ProcessGroup) -> None:
    """DistributedDataParallel would copy them, whole, to divide them by one."""
    model, features = make_model(), make_batch(7, 0).sparse_features
    model["ebc"](features).values().square().sum().backward()
    expected = {name: part.weight.grad.clone() for name, part in model["ebc"].embedding_bags.items()}
    model.zero_grad()
    sharded = shard_by(model, "data_parallel")
    collection = sharded.module["ebc"]
    assert not any(isinstance(lookup, DistributedDataParallel) for lookup in models.lookups_of(sharded))
    collection(features).values().square().sum().backward()
    for name, part in collection.embedding_bags.items():
        torch.testing.assert_close(part.weight.grad, expected[name])


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_tables_of_the_same_name_keep_their_own_weights(gloo: dist.ProcessGroup, kind: str) -> None:
    model, features = nn.ModuleDict({"x": make_collection(), "y": make_collection()}), make_batch(7, 0).sparse_features
    expected = [model[fqn](features).values() for fqn in "xy"]
    sharded = shard_by(model, kind)
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
            plan = dnis.make_sharding_plan(model, CPU, SHARDERS, constraints=constraints)
        except ValueError as error:
            refused.append((kinds, str(error)))
            continue
        pooled = dnis.shard_model(model, CPU, plan, SHARDERS).module["ebc"](features).to_dict()
        torch.testing.assert_close(torch.cat([pooled[f"f_{n}"] for n in "abc"], 1), expected, atol=1e-5, rtol=0)
    rows = {("row_wise",) * 3}
    are_means_whole = {kinds for kinds in itertools.product(ALL, repeat=3) if {kinds[0], kinds[2]} == {"table_wise"}}
    assert {kinds for kinds, _ in refused} == set(itertools.product(ALL, repeat=3)) - are_means_whole - rows
    assert all(message.startswith("sharding plan, table ") for _, message in refused)


def test_the_planner_leaves_mean_tables_whole(gloo: dist.ProcessGroup) -> None:
    kinds = [kind for kind in SHARDERS[0].sharding_types("cpu") if kind != "data_parallel"]
    constraints = {name: ParameterConstraints(sharding_types=kinds) for name in "abc"}
    topology = Topology(world_size=4, local_world_size=4, compute_device="cpu")
    plan = dnis.make_sharding_plan(pooled_in_two_ways(), CPU, SHARDERS, constraints=constraints, topology=topology)
    assert not {plan.plan["ebc"][name].sharding_type for name in "ac"} & set(ROW_WISE)


def test_tables_on_meta_are_initialised_by_torchrec(gloo: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table], device=torch.device("meta"))})
    sharded = dnis.shard_model(model, CPU)
    (part,) = [part for module in collections(sharded).values() for part in local_shards(module)]
    assert part.weight.shape == (9, 8)
    assert 0 < float(part.weight.abs().max()) <= 1 / 3


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
def test_rows_suffice_for_the_ranks_or_are_said_not_to(gloo, rows: int, kind: str, world_size: int, fits: bool) -> None:
    if fits:
        model, plan = plan_for(rows, kind, world_size, 2)
        check_sharding_plan(plan, model, CPU, world_size, 2)
        shards = plan.plan["ebc"]["t"].sharding_spec.shards
        assert min(shard.shard_sizes[0] for shard in shards) > 0
    else:
        with pytest.raises(ValueError, match=f"table 't': expected a row on every rank of {kind}, got {rows} rows"):
            plan_for(rows, kind, world_size, 2)


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


def with_a_feature_of_two_tables() -> None:
    model = trained()
    model.other = EmbeddingBagCollection(
        tables=[type(USERS)(**vars(USERS) | {"name": "raw", "feature_names": ["item"]})]
    )
    remap(model, BATCHES[0].sparse_features)


def without_a_process_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        dnis.make_sharding_plan(make_model(), CPU, SHARDERS)


CACHED = {"user": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}
MANAGED = r"FQN 'tables\._embedding_module'"
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    *(
        (lambda make=make: check_sharding_plan(plan_for(41, "row_wise", 2, 2)[1], make(), CPU, 2, 2), ValueError, place)
        for make, place in (
            (lambda: plan_for(40, "row_wise", 2, 2)[0], "sharding plan, table 't'"),
            (lambda: nn.ModuleDict({"ec": make_model()}), "sharding plan, FQN 'ebc'"),
            (make_model, "sharding plan, table 'user'"),
        )
    ),
    (without_a_process_group, RuntimeError, "sharding"),
    (lambda: dnis.make_sharding_plan(make_model(), CPU, SHARDERS, constraints=CACHED), ValueError, ".*table 'user'"),
    # managed collisions: jobs that count raw ids, and sharding before they are prepared
    (with_a_feature_of_two_tables, NotImplementedError, "FQN 'tables', table 'item'"),
    (lambda: table_configs(trained()), NotImplementedError, MANAGED),
    (lambda: dnis.make_sharding_plan(trained(), CPU, SHARDERS), NotImplementedError, MANAGED),
]


@pytest.mark.parametrize(("call", "kind", "place"), REFUSED)
def test_what_cannot_be_sharded_is_refused(gloo, call: Callable[[], object], kind: type[Exception], place: str) -> None:
    with pytest.raises(kind, match=f"^{place}"):
        call()


class TwoDimensional(DMPCollection):
    """TorchRec builds the real one on GPUs only."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._dmp_wrapped_module = module


def test_two_dimensional_parallelism_is_refused_before_any_collective(gloo, monkeypatch) -> None:
    recipe = make_recipe()
    model = TwoDimensional(dnis.prepare_(recipe.model, models.blocks_of(recipe.model, recipe.data.train)))
    for collective in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier"):
        monkeypatch.setattr(dist, collective, lambda *_, **__: pytest.fail("a collective"))
    with pytest.raises(NotImplementedError, match=r"supported is DistributedModelParallel.*DMPCollection \(2D parall"):
        dnis.BilevelTrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU)


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("names", [("ebc", "again"), ("first.ebc", "second.ebc")])
def test_a_collection_that_has_two_names_stays_one(gloo, names: tuple[str, str], searched: bool) -> None:
    """TorchRec shards what a parent holds under two names under the first alone."""

    def build() -> nn.ModuleDict:
        held = {"ebc": make_collection()}
        parts = {part: nn.ModuleDict(held) for part in ("first", "second")}
        return nn.ModuleDict(parts if "first.ebc" in names else held | {"again": held["ebc"]})

    def pooled(model: nn.Module) -> Tensor:
        return sum(get_unwrapped_module(model).get_submodule(name)(features).values() for name in names)

    batch = make_batch(5, 0)
    features = batch.sparse_features
    model, unsharded = build(), build()
    unsharded.load_state_dict(model.state_dict())
    if searched:
        dnis.prepare_(model, models.blocks_of(model, [batch]))
    sharders = [dnis.CpuEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})]
    sharded = shard_by(model, "table_wise", sharders)
    optimizer = torch.optim.SGD(unsharded.parameters(), lr=0.5)
    for _ in range(2):
        found, expected = pooled(sharded), pooled(unsharded)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        found.square().mean().backward()
        expected.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = dnis.merge_(sharded) if searched else unshard_(sharded)
    torch.testing.assert_close(pooled(merged), pooled(unsharded), atol=1e-5, rtol=0)
    assert len(collections(merged)) == 1


def test_a_fused_kernel_for_a_table_too_narrow_for_it_is_refused(gloo: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=40, embedding_dim=1, feature_names=["user"])
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
    wanted = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    plan = dnis.make_sharding_plan(model, CPU, SHARDERS, constraints={"t": wanted})
    expected = r"table 't': expected multiples of 4 columns in shards of kernel 'fused', got \[1\]; leave the kernel to"
    with pytest.raises(ValueError, match=expected):
        dnis.shard_model(model, CPU, plan, SHARDERS)
    sharded = dnis.shard_model(model, CPU, dnis.make_sharding_plan(model, CPU, SHARDERS), SHARDERS)
    assert sharded.module["ebc"](make_batch(5, 0).sparse_features).values().shape == (5, 1)


TABLES = [USERS, models.ITEMS]
Kind = Callable[[], ManagedCollisionModule]
KINDS = pytest.mark.parametrize(
    ("kind", "model_of"), [(zch, Model), (models.mpzch, Model), (models.StandIn, Model), (zch, SequenceModel)]
)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "_managed_collision" in name}


def counted(model: Model) -> tuple[FrequencyCounts, RowBlocks]:
    counts = dnis.count_frequencies([remap(model, own.sparse_features) for own in BATCHES], TABLES)
    return counts, dnis.blocks_from_counts(counts, TABLES, num_blocks=4, least_rows=1)


@KINDS
def test_counts_are_of_the_rows_that_the_collection_is_called_with(kind: Kind, model_of: type[Model]) -> None:
    model = trained(kind, model_of)
    before = state_of(model)
    expected = {table.name: [0] * models.MANAGED_ROWS for table in TABLES}
    for own in BATCHES:
        rows = models.rows_of(model, own.sparse_features)
        for table in TABLES:
            for row in (row for feature in table.feature_names for row in rows[feature]):
                expected[table.name][row] += 1
    counts, _ = counted(model.train())
    assert model.tables._managed_collision_collection.training
    assert {name: of_table.tolist() for name, of_table in counts.counts.items()} == expected
    assert counts.max_bag_lengths == {"user": 1, "item": 1, "history": 3}
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())  # counting learns no id


@KINDS
def test_a_wrapped_model_predicts_and_learns_as_the_plain_one_and_comes_back(kind: Kind, model_of: type[Model]) -> None:
    model, plain = trained(kind, model_of), trained(kind, model_of)
    dnis.prepare_(model, counted(model)[1])
    wrapper, collection = model.tables._embedding_module, plain.tables._embedding_module
    is_pooled = model_of is Model
    assert type(wrapper) is (SoftSelectionEmbeddingBagCollection if is_pooled else SoftSelectionEmbeddingCollection)
    for own in (model, plain):
        for part in BATCHES[:2]:
            own(part.dense_features, part.sparse_features).square().mean().backward()
    torch.testing.assert_close(predictions(model), predictions(plain))
    for weight, expected in zip(wrapper.parameters(), collection.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)
    with torch.no_grad():
        wrapper.alpha.of(16).uniform_(0.5, 1)
    before = predictions(model)
    assert not torch.allclose(before, predictions(plain), atol=1e-3)
    merged = dnis.merge_(model)
    assert merged is model
    assert type(model.tables._embedding_module) is (EmbeddingBagCollection if is_pooled else EmbeddingCollection)
    torch.testing.assert_close(predictions(model), before)


@pytest.mark.parametrize("model_of", [Model, SequenceModel])
def test_rows_keep_their_ids_while_the_model_is_prepared(model_of: type[Model]) -> None:
    model = trained(zch, model_of)
    dnis.prepare_(model, counted(model)[1])
    before = state_of(model)
    model.train()
    predictions(model, NEW)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    dnis.merge_(model)
    predictions(model, NEW)
    assert any(not torch.equal(value, before[name]) for name, value in state_of(model).items())


def test_a_row_that_is_evicted_and_reused_begins_in_the_cold_block() -> None:
    model = trained()
    predictions(model.train(), NEW)
    reused = sorted(
        {row for own in NEW for row in models.rows_of(model.eval(), own.sparse_features)["user"]}
        - {models.MANAGED_ROWS - 1}
    )
    assert reused
    counts, blocks = counted(model)  # of data that reads none of the new ids
    assert counts.counts["user"][reused].tolist() == [0] * len(reused)
    block = blocks.routings["user"].all_blocks()
    assert block[reused].min() >= block[counts.counts["user"] > 0].max()
    assert (block[reused] == blocks.routings["user"].num_blocks - 1).sum() >= len(reused) - 1


@KINDS
def test_compressed_tables_are_those_of_remapped_rows(tmp_path: Path, kind: Kind, model_of: type[Model]) -> None:
    """And an artifact of them maps raw ids as the model did."""
    model, given, counts = trained(kind, model_of), trained(kind, model_of), counted(trained(kind, model_of))[0]
    measured = measure_(given, BATCHES, loss=nn.MSELoss())
    assert all(torch.equal(own, counts.counts[name]) for name, own in measured.counts.counts.items())
    before = predictions(model)
    found = dnis.compress(model, BATCHES, loss=nn.MSELoss(), compression=4)
    kind_of_tables = PackedEmbeddingBagCollection if model_of is Model else ServedEmbeddingCollection
    assert isinstance(model.tables._embedding_module, kind_of_tables)
    assert found.compression >= 4
    assert float((predictions(model) - before).std() / before.std()) < 0.2
    assert {table.collection for table in found.scheme.tables.values()} == {"tables._embedding_module"}
    scheme = measured.allocate(compression=4).scheme
    served = models.check_served_as_exported(given, scheme, tmp_path / "artifact", model_of(kind))
    assert isinstance(served.tables._embedding_module, kind_of_tables)
    torch.testing.assert_close(predictions(model), predictions(served) + found.output_shift)


def test_a_pruned_model_is_exported_exactly(tmp_path: Path) -> None:
    model = trained()
    counts, blocks = counted(model)
    dnis.merge_(dnis.prepare_(model, blocks))
    scheme = dnis.prune(model, blocks, counts, size=dnis.Size(compression=2))
    served = dnis.load_model(Model(), dnis.export(model, scheme, tmp_path / "artifact")).eval()
    torch.testing.assert_close(predictions(served), predictions(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="multi-probe ZCH learns ids on GPUs only")
def test_multi_probe_modules_that_learn_are_counted_as_they_look_up() -> None:
    device = torch.device("cuda")
    model = Model(lambda: models.mpzch(device)).to(device)
    batches = [own.to(device) for own in BATCHES]
    predictions(model.train(), batches)
    counts = dnis.count_frequencies([remap(model, own.sparse_features) for own in batches], TABLES)
    expected = torch.zeros(models.MANAGED_ROWS, dtype=torch.int64)
    for own in batches:
        expected += torch.bincount(
            torch.tensor(models.rows_of(model.eval(), own.sparse_features)["user"]), minlength=models.MANAGED_ROWS
        )
    assert counts.counts["user"].tolist() == expected.tolist()


def test_a_remapping_without_ids_is_refused() -> None:
    model = Model()
    blocks = counted(trained())[1]
    for attempt in (
        lambda: remap(model, BATCHES[0].sparse_features),
        lambda: measure_(model, BATCHES, loss=nn.MSELoss()),
        lambda: dnis.prepare_(model, blocks),
    ):
        with pytest.raises(ValueError, match=r"table 'user': expected ids that have rows"):
            attempt()
    assert type(model.tables._embedding_module) is EmbeddingBagCollection


def test_a_model_that_is_the_module_itself() -> None:
    managed = trained().tables
    assert list(collections(managed)) == ["_embedding_module"]
    features = BATCHES[0].sparse_features
    assert remap(managed, features).keys() == features.keys()
    blocks = counted(trained())[1]
    prepared = dnis.prepare_(managed, blocks)
    assert type(prepared) is ManagedCollisionEmbeddingBagCollection
    assert isinstance(prepared._managed_collision_collection, ManagedCollisionCollection)
    assert type(dnis.merge_(prepared)._embedding_module) is EmbeddingBagCollection


def structure(model: nn.Module) -> dict[str, str]:
    return {fqn: type(module).__name__ for fqn, module in model.named_modules()}


def configs_of(collection: nn.Module) -> list[dict[str, object]]:
    return [
        {field: value for field, value in vars(config).items() if field != "init_fn"}  # equal to itself only
        for config in collection.embedding_bag_configs()
    ]


def assert_plain_again(merged: nn.Module, original: nn.Module) -> None:
    """The same modules, names, shapes, configs and modes as the user's own model."""
    assert structure(merged) == structure(original)
    shapes = {name: value.shape for name, value in original.state_dict().items()}
    assert {name: value.shape for name, value in merged.state_dict().items()} == shapes
    assert all(parameter.requires_grad for parameter in merged.parameters())
    for fqn, module in collections(original).items():
        assert configs_of(collections(merged)[fqn]) == configs_of(module)
        assert collections(merged)[fqn].is_weighted() == module.is_weighted()
        assert collections(merged)[fqn].device == module.device


@pytest.mark.parametrize("name", list(models.MODELS))
def test_preparing_changes_no_output_and_shares_the_weights(name: str) -> None:
    model = models.MODELS[name]()
    expected = models.predict(model)
    storages = {(fqn, s.table): s.weight.data_ptr() for fqn, m in collections(model).items() for s in local_shards(m)}
    prepared = dnis.prepare_(model, models.blocks_for(model))
    assert (prepared is model) == (name != "bare")
    torch.testing.assert_close(models.predict(prepared), expected, atol=1e-6, rtol=0)
    wrapped = collections(prepared)
    assert all(isinstance(m, wrapper.SoftSelectionEmbeddingBagCollection) for m in wrapped.values())
    assert {(fqn, s.table): s.weight.data_ptr() for fqn, m in wrapped.items() for s in local_shards(m)} == storages


@pytest.mark.parametrize(("name", "sharding_type"), models.SHARDED_MODELS)
@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.usefixtures("gloo")
def test_the_plain_model_comes_back_and_computes_the_same(name: str, sharding_type: str | None, searched: bool) -> None:
    model = models.MODELS[name]()
    original = copy.deepcopy(model)
    if searched:
        model = dnis.prepare_(model, models.blocks_for(model))
        models.randomise_alpha_(model)
        assert not torch.allclose(models.predict(model), models.predict(original), atol=1e-4)
    expected = [models.predict(model, seed) for seed in range(3)]
    if sharding_type is not None:
        model = models.shard_as(model, sharding_type)
        assert isinstance(model, DistributedModelParallel)
        torch.testing.assert_close(models.predict(model, 0), expected[0], atol=1e-6, rtol=0)
    plain = dnis.merge_(model) if searched else unshard_(model)
    for seed in range(3):
        torch.testing.assert_close(models.predict(plain, seed), expected[seed], atol=1e-6, rtol=0)
    assert_plain_again(plain, original)
    assert wrapper.soft_selection_modules(plain) == {}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_survives(training: bool) -> None:
    model = models.dlrm().train(training)
    prepared = dnis.prepare_(model, models.blocks_for(model))
    assert {module.training for module in prepared.modules()} == {training}
    assert {module.training for module in dnis.merge_(prepared).modules()} == {training}


@pytest.mark.parametrize("sharding_type", [None, "table_wise"])
def test_only_the_named_collections_are_wrapped(gloo, sharding_type: str | None) -> None:
    model = models.TwoCollections()
    expected = models.predict(model)
    dnis.prepare_(model, models.blocks_for(model), fqns=["module.second"])
    assert list(wrapper.soft_selection_modules(model)) == ["module.second"]
    assert type(model.first) is EmbeddingBagCollection
    merged = dnis.merge_(model if sharding_type is None else models.shard_as(model, sharding_type))
    assert {type(module) for module in collections(merged).values()} == {EmbeddingBagCollection}
    torch.testing.assert_close(models.predict(merged), expected, atol=1e-6, rtol=0)


class Clamped(nn.Module):
    """A user's model that changes its features before it looks them up, which TorchRec's pipelines do ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.clamp, self.collection, self.over = Clamp(), collection(), nn.Linear(24, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        predictions = self.over(self.collection(self.clamp(batch.sparse_features)).values())
        return predictions.square().mean(), predictions.detach()


class Clamp(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=features.keys(), values=features.values().clamp(max=6), lengths=features.lengths()
        )


def test_a_model_merged_in_the_middle_of_a_pipeline_reads_the_bags_it_is_given(gloo) -> None:
    model = Clamped()
    sharded = models.shard_as(dnis.prepare_(model, models.blocks_for(model)), "data_parallel")
    optimizer = KeyedOptimizerWrapper(
        dict(sharded.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    pipeline = dnis.BilevelTrainPipeline(sharded, optimizer, torch.device("cpu"))
    batches = [
        Batch(torch.zeros(models.BATCH_SIZE, 0), features(seed), torch.zeros(models.BATCH_SIZE)) for seed in range(6)
    ]
    stream = dnis.BilevelStream(batches, batches, dnis.LevelSchedule(warm_up_steps=1))
    for _ in range(4):
        pipeline.progress(stream)
    merged = dnis.merge_(sharded)
    assert type(merged.clamp) is Clamp
    for batch in batches:
        expected = merged.over(merged.collection(Clamp()(batch.sparse_features)).values())
        torch.testing.assert_close(merged(batch)[1], expected)


def test_multi_hot_features_are_split_and_others_are_not() -> None:
    model = models.TwoCollections()
    dnis.prepare_(model, models.blocks_for(model), multi_hot_features=[f"{models.MULTI_HOT}_id", "movie_id"])
    outputs = {o.feature: o.is_multi_hot for m in wrapper.soft_selection_modules(model).values() for o in m.outputs}
    assert outputs == {"user_id": False, "genre_id": True, "movie_id": True}
    model = models.TwoCollections()
    dnis.prepare_(model, models.blocks_for(model))  # as counted
    outputs = {o.feature: o.is_multi_hot for m in wrapper.soft_selection_modules(model).values() for o in m.outputs}
    assert outputs == {"user_id": False, "genre_id": True, "movie_id": False}


# Refusals: each leaves the model as it was


def check_refused(model: nn.Module, blocks: RowBlocks, error: type[Exception], place: str, **options) -> None:
    before = structure(model)
    with pytest.raises(error, match=f"^{place}"):
        dnis.prepare_(model, blocks, **options)
    assert structure(model) == before


def blocks_of_rows(**rows: int) -> RowBlocks:
    configs = [replace(config, num_embeddings=rows[config.name]) for config in models.tables(*rows)]
    counts = {name: torch.arange(number) for name, number in rows.items()}
    return dnis.blocks_from_counts(FrequencyCounts(counts, {}, 1), configs)


WITHOUT_MOVIE = {"user": 12, "genre": 7}
SHORT_MOVIE = WITHOUT_MOVIE | {"movie": 4}


@pytest.mark.parametrize(
    ("build", "rows", "error", "place", "options"),
    [
        (models.TwoCollections, None, ValueError, "FQN 'fisrt'", {"fqns": ["first", "fisrt"]}),
        (models.TwoCollections, None, ValueError, "FQN 'over'", {"fqns": ["over"]}),
        (models.TwoCollections, None, ValueError, "fqns", {"fqns": []}),
        (models.TwoCollections, None, ValueError, "feature 'gerne_id'", {"multi_hot_features": ["gerne_id"]}),
        (lambda: nn.Linear(1, 1), WITHOUT_MOVIE, ValueError, "prepare_", {}),
        (models.TwoCollections, WITHOUT_MOVIE, ValueError, "table 'movie'", {}),
        (models.TwoCollections, SHORT_MOVIE, ValueError, "table 'movie'", {}),
        (lambda: nn.ModuleDict({"one": collection(), "two": collection()}), SHORT_MOVIE, ValueError, "table names", {}),
        (
            lambda: dnis.prepare_(models.dlrm(), models.blocks_for(models.dlrm())),
            SHORT_MOVIE,
            RuntimeError,
            "prepare_",
            {},
        ),
        (lambda: models.shard_as(models.dlrm(), "table_wise"), SHORT_MOVIE, RuntimeError, "FQN ", {}),
    ],
)
@pytest.mark.usefixtures("gloo")
def test_what_cannot_be_prepared(
    build: Callable[[], nn.Module], rows: dict[str, int] | None, error: type, place: str, options: dict
) -> None:
    """Found in the second collection, too, before the first is wrapped."""
    model = build()
    check_refused(model, blocks_of_rows(**rows) if rows else models.blocks_for(model), error, place, **options)


def test_what_was_never_prepared_cannot_be_merged() -> None:
    for function in (dnis.merge_, fold_):
        with pytest.raises(RuntimeError, match="merge_"):
            function(models.dlrm())


class Tied(nn.Module):
    """A table of each of two collections, and a layer, of 8 columns and 12 rows: what a user may let share weights."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        twelve = [replace(config, num_embeddings=12) for config in models.tables("user", "movie", "genre")]
        self.one = EmbeddingBagCollection(tables=twelve[:2], device=torch.device(device))
        self.two = EmbeddingBagCollection(tables=twelve[2:], device=torch.device(device))
        self.over = nn.Linear(8, 12, device=device)

    @property
    def bags(self) -> dict[str, nn.EmbeddingBag]:
        return {**self.one.embedding_bags, **self.two.embedding_bags}

    def blocks(self) -> RowBlocks:
        configs = [*self.one.embedding_bag_configs(), *self.two.embedding_bag_configs()]
        return dnis.blocks_from_counts(FrequencyCounts({name: torch.arange(12) for name in self.bags}, {}, 1), configs)


def tie_tables_of_two(model: Tied) -> None:
    model.bags["genre"].weight = nn.Parameter(model.bags["user"].weight.data)


def tie_table_and_layer(model: Tied) -> None:
    model.over.weight = model.bags["genre"].weight


@pytest.mark.parametrize(
    ("tie", "fqns", "table", "other"),
    [
        (
            lambda model: setattr(model.bags["movie"], "weight", model.bags["user"].weight),
            None,
            "user",
            "one.embedding_bags.movie",
        ),
        (tie_tables_of_two, None, "user", "two.embedding_bags.genre"),
        (tie_tables_of_two, ["one"], "user", "two.embedding_bags.genre"),
        (tie_tables_of_two, ["two"], "genre", "one.embedding_bags.user"),
        (
            lambda model: model.two.embedding_bags.update({"genre": model.one.embedding_bags["movie"]}),
            None,
            "movie",
            "two.embedding_bags.genre",
        ),
        (tie_table_and_layer, None, "genre", "over"),
    ],
)
def test_tables_that_share_weights(tie: Callable[[Tied], None], fqns: list[str] | None, table: str, other: str) -> None:
    """Alpha would be folded into them twice; a table, or a layer, that is not wrapped would be changed by it."""
    model = Tied()
    tie(model)
    place = rf"table '{table}': .* '{re.escape(other)}\.weight'"
    check_refused(model, model.blocks(), ValueError, place, fqns=fqns)
    if tie is tie_table_and_layer:
        dnis.prepare_(model, model.blocks(), fqns=["one"])
        assert list(wrapper.soft_selection_modules(model)) == ["one"]


def test_tables_without_memory_are_told_apart() -> None:
    model = Tied("meta")
    dnis.prepare_(model, model.blocks())
    assert list(wrapper.soft_selection_modules(model)) == ["one", "two"]
    model = Tied("meta")
    model.bags["genre"].weight = model.bags["user"].weight
    check_refused(model, model.blocks(), ValueError, "table 'user'")


class SeveralRanks:
    """What a sharded collection knows of its ranks."""

    world_size = 2


@pytest.mark.usefixtures("gloo")
def test_a_model_over_several_ranks_is_folded_where_it_is() -> None:
    sharded = models.shard_as(dnis.prepare_(models.dlrm(), models.blocks_for(models.dlrm())), "table_wise")
    models.randomise_alpha_(sharded)
    expected = models.predict(sharded)
    [own] = wrapper.soft_selection_modules(sharded).values()
    own.embedding_bag_collection._env = SeveralRanks
    assert dnis.merge_(sharded) is sharded
    assert (models.alpha_of(sharded).of(8) == 1).all()
    torch.testing.assert_close(models.predict(sharded), expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("gloo")
def test_a_model_over_several_ranks_cannot_be_unsharded() -> None:
    sharded = models.shard_as(models.TwoCollections(), "table_wise")
    sharded.get_submodule(next(n for n, _ in sharded.named_modules() if n.endswith("second")))._env = SeveralRanks
    with pytest.raises(NotImplementedError, match=r"FQN 'module\.second': supported is world size 1, got 2"):
        unshard_(sharded)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_merging_makes_sequence_embeddings_plain_too(gloo: object, kind: str) -> None:
    config = EmbeddingConfig(name="sequence", num_embeddings=9, embedding_dim=8, feature_names=["movie_id"])
    model = nn.ModuleDict({"pooled": collection(), "sequence": EmbeddingCollection(tables=[config])})
    expected = model["sequence"](features())["movie_id"].values().detach()
    sharders = [dnis.CpuEmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    prepared = dnis.prepare_(model, models.blocks_for(model), fqns=["pooled"])
    constraints = {"sequence": ParameterConstraints(sharding_types=[kind])}
    plan = dnis.make_sharding_plan(prepared, torch.device("cpu"), sharders, constraints=constraints)
    merged = dnis.merge_(dnis.shard_model(prepared, torch.device("cpu"), plan, sharders))
    assert not [fqn for fqn, module in merged.named_modules() if isinstance(module, ShardedModule)]
    assert type(merged["sequence"]) is EmbeddingCollection
    assert merged["sequence"].embedding_configs()[0].feature_names == ["movie_id"]
    torch.testing.assert_close(merged["sequence"](features())["movie_id"].values(), expected, atol=0, rtol=0)


def test_merging_names_what_stays_sharded(gloo: object) -> None:
    beside = nn.EmbeddingBag(8, 4, mode="sum", include_last_offset=True)
    model = nn.ModuleDict({"pooled": collection(), "beside": beside, "over": nn.Linear(1, 1)})
    prepared, sharders = (
        dnis.prepare_(model, models.blocks_for(model)),
        [EmbeddingBagCollectionSharder(), EmbeddingBagSharder()],
    )
    sharded = DistributedModelParallel(prepared, device=torch.device("cpu"), sharders=sharders)
    with pytest.warns(UserWarning, match="some modules stay sharded, got {'beside': 'ShardedEmbeddingBag'}"):
        merged = dnis.merge_(sharded)
    assert type(merged["pooled"]) is EmbeddingBagCollection


def test_a_model_in_distributed_data_parallel_is_prepared_inside_of_it(gloo) -> None:
    model, kjt = nn.ModuleDict({"ebc": collection()}), features()
    expected = model["ebc"](kjt).values()
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert dnis.prepare_(wrapped, models.blocks_for(model)) is wrapped
    assert list(wrapper.soft_selection_modules(wrapped)) == ["ebc"]
    torch.testing.assert_close(model["ebc"](kjt).values(), expected)
    assert type(dnis.merge_(wrapped)["ebc"]) is EmbeddingBagCollection


SHARDED_AS = (None, "table_wise", "column_wise", "data_parallel")


def prepared_and_plain(name: str, sharding_type: str | None) -> tuple[nn.Module, nn.Module]:
    """Two models of other weights, one with alpha below 1; the one of sequences is `interest`."""
    if name == "sequences":
        return interest_model(sharding_type, is_prepared=True), interest_model(sharding_type, is_prepared=False)
    plain, prepared = models.MODELS[name](), models.MODELS[name]()
    prepared = dnis.prepare_(prepared, models.blocks_for(prepared))
    models.randomise_alpha_(prepared)
    if sharding_type is None:
        return prepared, plain
    return models.shard_as(prepared, sharding_type), models.shard_as(plain, sharding_type)


def interest_model(kind: str | None, *, is_prepared: bool) -> nn.Module:
    """Prepared ones have weights of their own, and alpha below 1."""
    built = models.interest()
    if is_prepared:
        dnis.prepare_(built, models.blocks_of(built, [models.make_batch(0)]))
        alpha = wrapper.soft_selection_modules(built)["sequences"].alpha
        for weight in [*built.parameters(), *map(alpha.of, alpha.dims)]:
            weight.detach().mul_(0.5)
    if kind is None:
        return built
    return shard_by(built, kind, default_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}))


def predict_any(model: nn.Module) -> Tensor:
    if "sequences" not in dict(get_unwrapped_module(model).named_children()):
        return models.predict(model)
    batch = models.make_batch(1)
    return get_unwrapped_module(model)(batch.dense_features, batch.sparse_features).detach()


def states(*names: str) -> Callable:
    """Of models by name, unsharded and sharded."""

    def with_cases(test: Callable) -> Callable:
        test = pytest.mark.parametrize("sharding_type", SHARDED_AS)(pytest.mark.usefixtures("gloo")(test))
        return pytest.mark.parametrize("name", names)(test)

    return with_cases


@states("dlrm", "two_dims", "bare", "sequences")
def test_names_are_the_plain_models(name: str, sharding_type: str | None) -> None:
    prepared, plain = prepared_and_plain(name, sharding_type)
    assert list(wrapper.plain_state_dict(prepared)) == list(plain.state_dict())
    assert name != "sequences" or set(models.NAMES.values()) <= set(plain.state_dict())
    extra = set(prepared.state_dict()) - set(plain.state_dict())
    assert {own.rpartition(".")[0].rpartition(".")[2] for own in extra} == {"soft_selection"}
    assert [own for own, _ in prepared.named_parameters()] == [own for own, _ in plain.named_parameters()]
    assert {own for own, _ in plain.named_modules()} <= {own for own, _ in prepared.named_modules()}
    inner = prepared.module if isinstance(prepared, DistributedModelParallel) else prepared
    for own, weight in prepared.named_parameters():
        assert inner.get_parameter(own) is weight


@states("dlrm", "two_dims", "bare", "sequences")
def test_a_plain_state_fits_strictly(name: str, sharding_type: str | None) -> None:
    prepared, plain = prepared_and_plain(name, sharding_type)
    assert not torch.allclose(predict_any(prepared), predict_any(plain), atol=1e-3)
    differences = prepared.load_state_dict(plain.state_dict(), strict=True)
    assert (differences.missing_keys, differences.unexpected_keys) == ([], [])
    torch.testing.assert_close(predict_any(prepared), predict_any(plain), atol=1e-6, rtol=0)
    alpha = next(iter(wrapper.soft_selection_modules(prepared).values())).alpha
    assert all(bool((alpha.of(dim) == 1).all()) for dim in alpha.dims)


@states("two_dims", "sequences")
def test_a_prepared_state_comes_back_with_alpha_and_a_merged_one_is_plain(name: str, sharding_type: str | None) -> None:
    prepared, _ = prepared_and_plain(name, sharding_type)
    state = copy.deepcopy(prepared.state_dict()) if sharding_type is None else prepared.state_dict()
    other, plain = prepared_and_plain(name, sharding_type)[0], prepared_and_plain(name, None)[1]
    other.load_state_dict(state)
    expected = predict_any(prepared)
    assert torch.equal(predict_any(other), expected)
    plain.load_state_dict(wrapper.plain_state_dict(dnis.merge_(prepared)), strict=True)
    torch.testing.assert_close(predict_any(plain), expected, atol=1e-6, rtol=0)


def test_alpha_stays_where_a_state_has_no_tables() -> None:
    prepared, _ = prepared_and_plain("two_dims", None)
    before = models.predict(prepared)
    dense = {name: value for name, value in prepared.state_dict().items() if name.startswith("over.")}
    prepared.load_state_dict(dense, strict=False)
    assert torch.equal(models.predict(prepared), before)


def test_what_does_not_fit_is_named_as_in_the_plain_model() -> None:
    prepared, plain = prepared_and_plain("dlrm", None)
    name = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
    state = plain.state_dict()
    state[name.format("other")] = state.pop(name.format("user"))
    differences = prepared.load_state_dict(state, strict=False)
    assert differences.missing_keys == [name.format("user")]
    assert differences.unexpected_keys == [name.format("other")]


@pytest.mark.usefixtures("gloo")
def test_the_warm_start_of_the_docs_runs_as_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    prepared, plain = prepared_and_plain("two_dims", None)
    for model in (prepared, plain):
        for module in (own for own in model.modules() if isinstance(own, EmbeddingBagCollection)):
            apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    whole, other = (dnis.TrainTask(own, nn.BCEWithLogitsLoss()) for own in (plain, prepared))
    cpu, sharders = torch.device("cpu"), [dnis.CpuEmbeddingBagCollectionSharder()]
    constraints = dict.fromkeys(models.ROWS, ParameterConstraints(sharding_types=["table_wise"]))
    plans = [dnis.make_sharding_plan(task, cpu, sharders, constraints=constraints) for task in (whole, other)]
    trained = dnis.shard_model(whole, cpu, plans[0])
    trained.module.model(torch.zeros(5, 3), features()).sum().backward()
    saved = {"model": trained.state_dict(), "fused": trained.fused_optimizer.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated|`torch.distributed")
        dcp.save(saved, checkpoint_id=tmp_path / "plain")
        names: dict[str, Any] = {"dnis": dnis, "task": other, "device": cpu, "plan": plans[1]}
        names["folder"] = tmp_path / "plain"
        exec(block, names)
    found = names["sharded"]
    torch.testing.assert_close(
        models.predict(found.module.model), models.predict(trained.module.model), atol=1e-6, rtol=0
    )
    states, expected = (own.fused_optimizer.state_dict()["state"] for own in (found, trained))
    assert states.keys() == expected.keys()
    for name, of_table in expected.items():
        for kind, value in of_table.items():
            again = states[name][kind]
            if isinstance(value, ShardedTensor):
                value, again = (own.local_shards()[0].tensor for own in (value, again))
            assert torch.equal(again, value)
            assert "momentum" not in kind or bool(value.any())
