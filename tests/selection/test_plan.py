"""Plans and sharded models on one rank; tests/distributed/test_selection_ranks.py has the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection, get_unwrapped_module
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import compress, measure_
from dnis_torchrec.artifact.export import export, load_model
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.selection.plan import (
    CpuEmbeddingBagCollectionSharder,
    check_sharding_plan,
    make_sharding_plan,
    shard_model,
)
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import merge_, prepare_, unshard_
from dnis_torchrec.selection.torchrec_inputs import remap
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection, SoftSelectionEmbeddingCollection
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
from tests.models import (
    BATCHES,
    CPU,
    ITEMS,
    MANAGED_ROWS,
    NEW,
    USERS,
    Model,
    SequenceModel,
    StandIn,
    blocks_of,
    check_served_as_exported,
    lookups_of,
    mpzch,
    predictions,
    rows_of,
    trained,
    zch,
)
from tests.selection.shard_cases import plan_by, shard_by
from tests.tiny import make_batch, make_collection, make_recipe

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
    return model, plan_by(model, kind, topology=topology)


def test_the_sharder_adds_the_row_wise_family_on_a_cpu_and_nothing_on_a_gpu() -> None:
    stock, own = EmbeddingBagCollectionSharder(), CpuEmbeddingBagCollectionSharder()
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
    assert not any(isinstance(lookup, DistributedDataParallel) for lookup in lookups_of(sharded))
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
            plan = make_sharding_plan(model, CPU, SHARDERS, constraints=constraints)
        except ValueError as error:
            refused.append((kinds, str(error)))
            continue
        pooled = shard_model(model, CPU, plan, SHARDERS).module["ebc"](features).to_dict()
        torch.testing.assert_close(torch.cat([pooled[f"f_{n}"] for n in "abc"], 1), expected, atol=1e-5, rtol=0)
    rows = {("row_wise",) * 3}
    are_means_whole = {kinds for kinds in itertools.product(ALL, repeat=3) if {kinds[0], kinds[2]} == {"table_wise"}}
    assert {kinds for kinds, _ in refused} == set(itertools.product(ALL, repeat=3)) - are_means_whole - rows
    assert all(message.startswith("sharding plan, table ") for _, message in refused)


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
        make_sharding_plan(make_model(), CPU, SHARDERS)


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
    (lambda: make_sharding_plan(make_model(), CPU, SHARDERS, constraints=CACHED), ValueError, ".*table 'user'"),
    # managed collisions: jobs that count raw ids, and sharding before they are prepared
    (with_a_feature_of_two_tables, NotImplementedError, "FQN 'tables', table 'item'"),
    (lambda: table_configs(trained()), NotImplementedError, MANAGED),
    (lambda: make_sharding_plan(trained(), CPU, SHARDERS), NotImplementedError, MANAGED),
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
    model = TwoDimensional(prepare_(recipe.model, blocks_of(recipe.model, recipe.data.train)))
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
    batch = make_batch(5, 0)
    features = batch.sparse_features
    model, unsharded = kind(make_collection()), kind(make_collection())
    unsharded.load_state_dict(model.state_dict())
    if searched:
        prepare_(model, blocks_of(model, [batch]))
    sharders = [CpuEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})]
    sharded = shard_by(model, "table_wise", sharders)
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


TABLES = [USERS, ITEMS]
Kind = Callable[[], ManagedCollisionModule]
KINDS = pytest.mark.parametrize(
    ("kind", "model_of"), [(zch, Model), (mpzch, Model), (StandIn, Model), (zch, SequenceModel)]
)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "_managed_collision" in name}


def counted(model: Model) -> tuple[FrequencyCounts, RowBlocks]:
    counts = count_frequencies([remap(model, own.sparse_features) for own in BATCHES], TABLES)
    return counts, blocks_from_counts(counts, TABLES, num_blocks=4, least_rows=1)


@KINDS
def test_counts_are_of_the_rows_that_the_collection_is_called_with(kind: Kind, model_of: type[Model]) -> None:
    model = trained(kind, model_of)
    before = state_of(model)
    expected = {table.name: [0] * MANAGED_ROWS for table in TABLES}
    for own in BATCHES:
        rows = rows_of(model, own.sparse_features)
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
    prepare_(model, counted(model)[1])
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
    merged = merge_(model)
    assert merged is model
    assert type(model.tables._embedding_module) is (EmbeddingBagCollection if is_pooled else EmbeddingCollection)
    torch.testing.assert_close(predictions(model), before)


@pytest.mark.parametrize("model_of", [Model, SequenceModel])
def test_rows_keep_their_ids_while_the_model_is_prepared(model_of: type[Model]) -> None:
    model = trained(zch, model_of)
    prepare_(model, counted(model)[1])
    before = state_of(model)
    model.train()
    predictions(model, NEW)
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    merge_(model)
    predictions(model, NEW)
    assert any(not torch.equal(value, before[name]) for name, value in state_of(model).items())


def test_a_row_that_is_evicted_and_reused_begins_in_the_cold_block() -> None:
    model = trained()
    predictions(model.train(), NEW)
    reused = sorted(
        {row for own in NEW for row in rows_of(model.eval(), own.sparse_features)["user"]} - {MANAGED_ROWS - 1}
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
    found = compress(model, BATCHES, loss=nn.MSELoss(), compression=4)
    kind_of_tables = PackedEmbeddingBagCollection if model_of is Model else ServedEmbeddingCollection
    assert isinstance(model.tables._embedding_module, kind_of_tables)
    assert found.compression >= 4
    assert float((predictions(model) - before).std() / before.std()) < 0.2
    assert {table.collection for table in found.scheme.tables.values()} == {"tables._embedding_module"}
    scheme = measured.allocate(compression=4).scheme
    served = check_served_as_exported(given, scheme, tmp_path / "artifact", model_of(kind))
    assert isinstance(served.tables._embedding_module, kind_of_tables)
    torch.testing.assert_close(predictions(model), predictions(served) + found.output_shift)


def test_a_pruned_model_is_exported_exactly(tmp_path: Path) -> None:
    model = trained()
    counts, blocks = counted(model)
    merge_(prepare_(model, blocks))
    scheme = prune(model, blocks, counts, size=Size(compression=2))
    served = load_model(Model(), export(model, scheme, tmp_path / "artifact")).eval()
    torch.testing.assert_close(predictions(served), predictions(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="multi-probe ZCH learns ids on GPUs only")
def test_multi_probe_modules_that_learn_are_counted_as_they_look_up() -> None:
    device = torch.device("cuda")
    model = Model(lambda: mpzch(device)).to(device)
    batches = [own.to(device) for own in BATCHES]
    predictions(model.train(), batches)
    counts = count_frequencies([remap(model, own.sparse_features) for own in batches], TABLES)
    expected = torch.zeros(MANAGED_ROWS, dtype=torch.int64)
    for own in batches:
        expected += torch.bincount(
            torch.tensor(rows_of(model.eval(), own.sparse_features)["user"]), minlength=MANAGED_ROWS
        )
    assert counts.counts["user"].tolist() == expected.tolist()


def test_a_remapping_without_ids_is_refused() -> None:
    model = Model()
    blocks = counted(trained())[1]
    for attempt in (
        lambda: remap(model, BATCHES[0].sparse_features),
        lambda: measure_(model, BATCHES, loss=nn.MSELoss()),
        lambda: prepare_(model, blocks),
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
    prepared = prepare_(managed, blocks)
    assert type(prepared) is ManagedCollisionEmbeddingBagCollection
    assert isinstance(prepared._managed_collision_collection, ManagedCollisionCollection)
    assert type(merge_(prepared)._embedding_module) is EmbeddingBagCollection
