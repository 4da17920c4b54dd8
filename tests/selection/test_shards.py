"""Local shards of plain, wrapped and sharded collections, and merging alpha into them."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.utils import CopyableMixin
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import dnis_torchrec as dnis
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.ops.select import are_compiled
from dnis_torchrec.selection import shards as shards_module
from dnis_torchrec.selection.alpha import SelectPooled
from dnis_torchrec.selection.on_shards import ShardSelection, select_on_shards_
from dnis_torchrec.selection.shards import TableShard, table_configs
from dnis_torchrec.training.shard import shard as shard_for_training
from tests.models import blocks_of, kernels_of, lookups_of, operators
from tests.selection import shard_cases
from tests.selection.shard_cases import shard as shard_scenario
from tests.tiny import make_recipe


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5))
def test_chunks_cover_the_shard(rows: int, columns: int, first_row: int, first_column: int) -> None:
    table = torch.arange(20 * 20).view(20, 20)
    view = table[first_row : first_row + rows, first_column : first_column + columns]
    seen = torch.zeros_like(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "ROWS_PER_CHUNK", 2)
        for part, of_rows, of_columns in TableShard("t", view, first_row, first_column).chunks():
            assert len(part) <= 2
            assert torch.equal(part, table[of_rows, of_columns])
            assert part.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
            seen[of_rows, of_columns] += 1
    assert seen.sum() == rows * columns
    assert (seen[first_row : first_row + rows, first_column : first_column + columns] == 1).all()


class OwnLookup(GroupedPooledEmbeddingsLookup):
    """What a sharder of somebody else may have put in."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *itertools.product(["table_wise", "grid_shard", "mixed", "kernel_per_table"], [True, False]),
        *((kind, True) for kind in shard_cases.WHOLE_FEATURES if kind in shard_cases.SHARDINGS),
    ],
)
def test_it_computes_what_the_unsharded_collection_does(gloo, compiled: bool, kind: str, weighted: bool) -> None:
    with operators(compiled):
        found = shard_cases.compare(kind, weighted, 0, 1, gloo)
    assert found["keys"]
    assert found["state"]
    assert found["columns"] == 36
    assert max(found["value_error"], found["alpha_error"], found["table_error"]) < 1e-6
    assert found["hit_errors"] == 0


@pytest.mark.parametrize("kind", ["data_parallel", "table_wise"])
def test_weights_that_learn_get_the_gradient_of_the_unsharded_collection(gloo: dist.ProcessGroup, kind: str) -> None:
    """Compiled or not. Without table b: FBGEMM has no gradient for the weights of a feature of two tables."""
    features, gradients = shard_cases.make_features(0, True), []
    for on_shards, compiled in ((False, True), (True, True), (True, False)):
        model = shard_cases.make_model(True, names="ac")
        wrapper = select_on_shards_(shard_scenario(model, kind, gloo)).module["ebc"] if on_shards else model["ebc"]
        weights = features.weights().clone().requires_grad_()
        bags = type(features)(
            keys=features.keys(), values=features.values(), lengths=features.lengths(), weights=weights
        )
        with operators(compiled):
            shard_cases.loss_of(wrapper(bags)).backward()
        gradients.append(weights.grad)
    expected, *others = gradients
    assert expected.any()
    for gradient in others:
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", shard_cases.SHARDINGS)
def test_a_batch_without_ids(gloo: dist.ProcessGroup, kind: str) -> None:
    wrapper = select_on_shards_(shard_scenario(shard_cases.make_model(False), kind, gloo)).module["ebc"]
    features = shard_cases.make_features(0, False)
    empty = type(features)(
        keys=features.keys(), values=features.values()[:0], lengths=torch.zeros_like(features.lengths())
    )
    pooled = wrapper(empty).values()
    assert not pooled.any()
    pooled.sum().backward()
    gradients, hits = shard_cases.upper_gradients(wrapper, empty)
    assert not any(gradient.any() for gradient in gradients)
    assert not any(hit.any() for hit in hits.values())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("kind", "on_shards", "compiled"),
    [
        *((kind, True, True) for kind in shard_cases.SHARDINGS),
        *((kind, on_shards, False) for kind in ("table_wise", "mixed") for on_shards in (True, False)),
    ],
)
def test_a_batch_of_no_samples(gloo, kind: str, weighted: bool, compiled: bool, on_shards: bool) -> None:
    """TorchRec's sharded collections take one, as the last batch of a rank may be."""
    with operators(compiled):
        sharded = shard_scenario(shard_cases.make_model(weighted), kind, gloo)
        wrapper = (select_on_shards_(sharded) if on_shards else sharded).module["ebc"]
        found = shard_cases.look_up_nothing(wrapper, weighted)
    assert found["keys"]
    assert found["shape"] == [0, 36]
    assert found["alpha_values"] == [wrapper.alpha.of(dim).numel() for dim in wrapper.alpha.dims]
    assert found["table_change"] == found["gradient"] == found["alpha_gradient"] == found["hits"] == 0


def test_what_cannot_be_moved_selects_behind_the_collection(gloo: dist.ProcessGroup) -> None:
    features = shard_cases.make_features(1, False)
    unsharded = shard_cases.make_model(False)
    expected = unsharded["ebc"](features).values()
    assert select_on_shards_(unsharded) is unsharded
    sharded = shard_scenario(shard_cases.make_model(False), "table_wise", gloo)
    wrapper = sharded.module["ebc"]
    for lookup in lookups_of(sharded):
        lookup.__class__ = OwnLookup
    select_on_shards_(sharded)
    for own in (unsharded["ebc"], wrapper):
        assert own.bag_splitter is not None
        assert isinstance(own.selection, SelectPooled)
        torch.testing.assert_close(own(features).values(), expected, atol=1e-6, rtol=0)
    single = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=shard_cases.tables())})
    counts = FrequencyCounts(
        {name: torch.ones(rows, dtype=torch.int64) for name, rows in shard_cases.ROWS.items()}, {}, 30
    )
    dnis.prepare_(
        single, dnis.blocks_from_counts(counts, shard_cases.tables(), num_blocks=3, least_rows=1), multi_hot_features=[]
    )
    assert isinstance(
        select_on_shards_(shard_scenario(single, "table_wise", gloo)).module["ebc"].selection, SelectPooled
    )


compiled = pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")

CPU = torch.device("cpu")


def multiply_tables(model: nn.Module) -> list[bool]:
    """Of every kernel whether it multiplies its tables."""
    forwards = [kernel.forward for kernel in kernels_of(model)]
    return [isinstance(own, ShardSelection) and own._tables is not None for own in forwards]


@compiled
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("multiplied tables, rows, kernel_per_table", [True, True, True]),
        ("multiplied tables, data_parallel, kernel_per_table", [True, True, True]),
        ("multiplied tables of two dims", [False]),
        ("whole features, kernel_per_table", None),
    ],
)
def test_kernels_that_may_multiply_do(gloo: dist.ProcessGroup, kind: str, expected: list[bool] | None) -> None:
    """All tables of a kernel want the same columns, and no optimizer that is fused."""
    found = multiply_tables(select_on_shards_(shard_scenario(shard_cases.make_model(False), kind, gloo)))
    assert found == (expected if expected is not None else [False] * len(found))


@compiled
@pytest.mark.parametrize("kind", shard_cases.MULTIPLIED_TABLES)
def test_the_kernels_own_weights_come_back(gloo: dist.ProcessGroup, kind: str) -> None:
    """Also after a lookup that failed."""
    model = select_on_shards_(shard_scenario(shard_cases.make_model(False), kind, gloo))
    before = [kernel.emb_module.weights for kernel in kernels_of(model)]
    values = [weights.detach().clone() for weights in before]
    features, wrapper = shard_cases.make_features(0, False), model.module["ebc"]
    with wrapper.alpha.upper_level():
        wrapper(features).values().sum().backward()
    with torch.inference_mode():
        wrapper(features)
    for kernel in kernels_of(model):
        kernel.emb_module.pooling_mode = None
    with pytest.raises(Exception, match=r"pooling_mode|NoneType|argument"):
        wrapper(features)
    for kernel, own, value in zip(kernels_of(model), before, values, strict=True):
        assert kernel.emb_module.weights is own
        assert torch.equal(own, value)
        assert own.grad is None


@compiled
@pytest.mark.parametrize(
    ("optimizer", "batch_size", "replicated", "expected"),
    [
        ("adam", 10_000, False, True),
        ("adam", 1, False, False),
        ("adam", None, False, False),
        ("adam", 10_000, True, False),
        ("rowwise_adagrad", 10_000, False, False),
    ],
)
def test_small_tables_are_multiplied(
    gloo: dist.ProcessGroup, optimizer: str, batch_size: int | None, replicated: bool, expected: bool
) -> None:
    """Small beside a batch; a fused optimizer would step the multiplied ones."""
    recipe = make_recipe(optimizer=optimizer)
    task = dnis.TrainTask(dnis.prepare_(recipe.model, blocks_of(recipe.model, recipe.data.train)), recipe.loss)
    model, _ = shard_for_training(task, recipe, CPU, is_replicated=replicated, batch_size=batch_size)
    if not isinstance(kernels_of(model)[0].forward, ShardSelection):
        select_on_shards_(model)
    assert multiply_tables(model) == [expected] * len(kernels_of(model))


# Collections that do not look up what they are given are refused by name

SHARDERS = [dnis.CpuEmbeddingBagCollectionSharder()]
TABLE = EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=8, feature_names=["f"])
COUNTS = FrequencyCounts({"t": torch.arange(12, 0, -1)}, {"f": 3}, 30)


def one_blocks() -> RowBlocks:
    return dnis.blocks_from_counts(COUNTS, [TABLE], num_blocks=3, least_rows=1)


def one_table(*, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[TABLE], is_weighted=weighted)


class Scaled(EmbeddingBagCollection):
    """A subclass that returns something else."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = super().forward(features)
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), 2 * pooled.values())


class Named(EmbeddingBagCollection):
    """A subclass that only has another name."""


class Processed(FeatureProcessedEmbeddingBagCollection):
    """A subclass of TorchRec's feature processors, which its sharder does not know."""


class Managed(ManagedCollisionEmbeddingBagCollection):
    """A subclass of TorchRec's managed collisions, which its sharder does not know."""


def managed_collisions() -> nn.Module:
    policy = LFU_EvictionPolicy()
    remap = MCHManagedCollisionModule(zch_size=12, device=CPU, eviction_policy=policy, eviction_interval=5)
    return Managed(one_table(), ManagedCollisionCollection({"t": remap}, [TABLE]))


def hooked() -> nn.Module:
    own = one_table()
    own.register_forward_pre_hook(lambda module, inputs: None)
    return own


def patched() -> nn.Module:
    own = one_table()
    own.forward = lambda features: None
    return own


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "feature processor": (
        lambda: Processed(one_table(weighted=True), {"f": PositionWeightedModule(5)}),
        "Processed 'e'",
    ),
    "managed collisions": (managed_collisions, "Managed 'e'"),
    "pruning in training": (
        lambda: ITEPEmbeddingBagCollection(one_table(), GenericITEPModule({}, [])),
        "ITEPEmbeddingBagCollection 'e'",
    ),
    "subclass": (lambda: Scaled(tables=[TABLE]), "Scaled with a forward of its own"),
    "hook": (hooked, "one with hooks"),
    "patched": (patched, "EmbeddingBagCollection with a forward of its own"),
}


def model_with(name: str) -> tuple[nn.Module, str]:
    build, received = UNSUPPORTED[name]
    return nn.ModuleDict({"e": build()}), received


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_it_is_refused_wherever_a_model_comes_in(gloo: dist.ProcessGroup, name: str, tmp_path: Path) -> None:
    plain = nn.ModuleDict({"e": one_table()})
    plan, size = dnis.make_sharding_plan(plain, CPU, SHARDERS), dnis.Size(compression=2)
    scheme = dnis.prune(plain, one_blocks(), COUNTS, size=size)
    model, kind = model_with(name)
    before = {fqn: type(module) for fqn, module in model.named_modules()}
    data = dnis.DataSplits(train=[], validation=[], selection=[], test=[])
    for call in (
        lambda: dnis.prepare_(model, one_blocks()),
        lambda: dnis.make_sharding_plan(model, CPU, SHARDERS),
        lambda: table_configs(model),
        lambda: dnis.prune(model, one_blocks(), COUNTS, size=size),
        lambda: dnis.export(model, scheme, tmp_path / "artifact"),
    ):
        with pytest.raises(NotImplementedError, match=f"^FQN 'e.*{kind}"):
            call()
    with pytest.raises((NotImplementedError, ValueError), match="FQN 'e"):
        dnis.shard_model(model, CPU, plan, SHARDERS)
    with pytest.raises(NotImplementedError):
        shard_for_training(
            dnis.TrainTask(model, nn.MSELoss()), dnis.Recipe(model=model, data=data, loss=nn.MSELoss()), CPU
        )
    assert {fqn: type(module) for fqn, module in model.named_modules()} == before


def test_a_plan_for_other_modules_is_refused(gloo: dist.ProcessGroup) -> None:
    """TorchRec draws weights of what it takes from a CPU anew."""
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.SGD, {"lr": 0.1})
    model = nn.ModuleDict({"e": one_table(), "other": fused})
    plan = dnis.make_sharding_plan(model, CPU, SHARDERS)
    plan.plan["other"] = plan.plan["e"]
    with pytest.raises(NotImplementedError, match=r"FQN 'other': supported are .* got FusedEmbeddingBagCollection"):
        dnis.shard_model(model, CPU, plan, SHARDERS)


@pytest.mark.parametrize(
    ("received", "change"),
    [
        ("one with hooks", lambda bags: bags["t"].register_forward_hook(lambda *_: None)),
        ("one with hooks", lambda bags: bags["t"].weight.register_hook(lambda gradient: gradient * 0)),
        ("max_norm=1.0", lambda bags: setattr(bags["t"], "max_norm", 1.0)),
        ("padding_idx=0", lambda bags: setattr(bags["t"], "padding_idx", 0)),
        ("scale_grad_by_freq=True", lambda bags: setattr(bags["t"], "scale_grad_by_freq", True)),
        ("Mine", lambda bags: bags.update({"t": type("Mine", (nn.EmbeddingBag,), {})(12, 8)})),
    ],
)
def test_what_users_change_in_a_table_and_sharding_would_lose_is_refused(
    received: str, change: Callable[[nn.ModuleDict], None]
) -> None:
    model = nn.ModuleDict({"e": one_table()})
    change(model["e"].embedding_bags)
    with pytest.raises(NotImplementedError, match=f"FQN 'e', table 't': supported are .* got {received}"):
        dnis.prepare_(model, one_blocks())


class Perceptron(CopyableMixin, MLP):
    """A user's class, derived from those of TorchRec's that know nothing of embeddings."""

    def __init__(self) -> None:
        MLP.__init__(self, 8, [4, 1])
        self.e = one_table()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return MLP.forward(self, self.e(features).values())


class Tower(nn.Module):
    """What a tower of TorchRec's does with pooled embeddings."""

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        return pooled.values()


HOLDERS: dict[str, Callable[[], nn.Module]] = {
    "tower": lambda: EmbeddingTower(one_table(), Tower()),
    "towers": lambda: EmbeddingTowerCollection([EmbeddingTower(one_table(), Tower())]),
    "derived": Perceptron,
}


@pytest.mark.parametrize("name", list(HOLDERS))
def test_modules_that_only_call_a_collection_are_supported(gloo: dist.ProcessGroup, name: str) -> None:
    model = nn.ModuleDict({"m": HOLDERS[name]()})
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 11, 0]), lengths=torch.tensor([2, 0, 1]))
    expected = model["m"](features)
    model = dnis.prepare_(model, one_blocks())
    torch.testing.assert_close(model["m"](features), expected)
    sharded = dnis.shard_model(model, CPU)
    torch.testing.assert_close(get_unwrapped_module(sharded)["m"](features), expected)
    torch.testing.assert_close(dnis.merge_(sharded)["m"](features), expected)


def test_a_subclass_is_searched_like_the_plain_collection(gloo: dist.ProcessGroup) -> None:
    """TorchRec's sharders take no subclasses: the wrapper looks up in a plain one."""
    single_id = dnis.blocks_from_counts(
        FrequencyCounts(COUNTS.counts, {"f": 1}, 30), [TABLE], num_blocks=3, least_rows=1
    )
    model = dnis.prepare_(nn.ModuleDict({"e": Named(tables=[TABLE])}), single_id)
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 11]), lengths=torch.tensor([1, 1]))
    expected = model["e"](features).values()
    sharded = dnis.shard_model(model, CPU)
    torch.testing.assert_close(get_unwrapped_module(sharded)["e"](features).values(), expected)
    plain = nn.ModuleDict({"e": Named(tables=[TABLE])})
    plan = dnis.make_sharding_plan(plain, CPU, SHARDERS)
    with pytest.raises(ValueError, match=r"under FQN 'e', got none; .* sharders take no subclass, such as Named"):
        dnis.shard_model(plain, CPU, plan, SHARDERS)
