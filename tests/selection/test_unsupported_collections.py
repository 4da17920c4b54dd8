"""Collections that do not look up what they are given are refused by name, wherever a model comes in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
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
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.artifact.export import export
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, table_configs
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.training.shard import shard

CPU = torch.device("cpu")
SHARDERS = [CpuEmbeddingBagCollectionSharder()]
TABLE = EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=8, feature_names=["f"])
COUNTS = FrequencyCounts({"t": torch.arange(12, 0, -1)}, {"f": 3}, 30)


def blocks() -> RowBlocks:
    return blocks_from_counts(COUNTS, [TABLE], num_blocks=3)


def collection(*, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[TABLE], is_weighted=weighted)


class Scaled(EmbeddingBagCollection):
    """A subclass that returns something else."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Twice what the collection returns."""
        pooled = super().forward(features)
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), 2 * pooled.values())


class Named(EmbeddingBagCollection):
    """A subclass that only has another name."""


class Processed(FeatureProcessedEmbeddingBagCollection):
    """A subclass of TorchRec's feature processors, which its sharder does not know."""


def position_weighted() -> nn.Module:
    return Processed(collection(weighted=True), {"f": PositionWeightedModule(5)})


class Managed(ManagedCollisionEmbeddingBagCollection):
    """A subclass of TorchRec's managed collisions, which its sharder does not know."""


def managed_collisions() -> nn.Module:
    policy = DistanceLFU_EvictionPolicy()
    remap = MCHManagedCollisionModule(zch_size=12, device=CPU, eviction_policy=policy, eviction_interval=5)
    return Managed(collection(), ManagedCollisionCollection({"t": remap}, [TABLE]))


def pruned_in_training() -> nn.Module:
    return ITEPEmbeddingBagCollection(collection(), GenericITEPModule({}, []))


def hooked() -> nn.Module:
    own = collection()
    own.register_forward_pre_hook(lambda module, inputs: None)
    return own


def patched() -> nn.Module:
    own = collection()
    own.forward = lambda features: None
    return own


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "feature processor": (position_weighted, "Processed 'e'"),
    "managed collisions": (managed_collisions, "Managed 'e'"),
    "pruning in training": (pruned_in_training, "ITEPEmbeddingBagCollection 'e'"),
    "subclass": (lambda: Scaled(tables=[TABLE]), "Scaled with a forward of its own"),
    "hook": (hooked, "one with hooks"),
    "patched": (patched, "EmbeddingBagCollection with a forward of its own"),
}
every_unsupported = pytest.mark.parametrize("name", list(UNSUPPORTED))


def model_with(name: str) -> tuple[nn.Module, str]:
    build, received = UNSUPPORTED[name]
    return nn.ModuleDict({"e": build()}), received


def refused(received: str, attempt: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError, match=r"FQN 'e.*supported are EmbeddingBagCollections that") as error:
        attempt()
    assert received in str(error.value)


@every_unsupported
def test_prepare_refuses_it_and_leaves_the_model_as_it_was(name: str) -> None:
    model, received = model_with(name)
    before = {fqn: type(module) for fqn, module in model.named_modules()}
    refused(received, lambda: prepare_(model, blocks()))
    assert {fqn: type(module) for fqn, module in model.named_modules()} == before


@every_unsupported
def test_sharding_refuses_it(gloo: dist.ProcessGroup, name: str) -> None:
    plan = make_sharding_plan(nn.ModuleDict({"e": collection()}), CPU, SHARDERS)
    model, received = model_with(name)
    refused(received, lambda: make_sharding_plan(model, CPU, SHARDERS))
    with pytest.raises((NotImplementedError, ValueError), match="FQN 'e"):
        shard_model(model, CPU, plan, SHARDERS)


@every_unsupported
def test_plain_training_and_counting_refuse_it(gloo: dist.ProcessGroup, name: str) -> None:
    model, received = model_with(name)
    refused(received, lambda: table_configs(model))  # what every method asks for before it counts
    recipe = Recipe(model=model, data=DataSplits(train=[], validation=[], selection=[], test=[]), loss=nn.MSELoss())
    with pytest.raises(NotImplementedError, match="supported are EmbeddingBagCollections that"):
        shard(TrainTask(model, recipe.loss), recipe, CPU)


@every_unsupported
def test_pruning_and_export_refuse_it(tmp_path: Path, name: str) -> None:
    plain = nn.ModuleDict({"e": collection()})
    scheme = prune(plain, blocks(), COUNTS, size=Size(compression=2))
    model, received = model_with(name)
    refused(received, lambda: prune(model, blocks(), COUNTS, size=Size(compression=2)))
    refused(received, lambda: export(model, scheme, tmp_path / "artifact"))


def test_a_subclass_without_a_forward_of_its_own_is_a_collection() -> None:
    model = prepare_(nn.ModuleDict({"e": Named(tables=[TABLE])}), blocks())
    assert list(collections(merge_(model))) == ["e"]


def test_a_plan_for_other_modules_is_refused(gloo: dist.ProcessGroup) -> None:
    """TorchRec draws weights of what it takes from a CPU anew."""
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.SGD, {"lr": 0.1})
    model = nn.ModuleDict({"e": collection(), "other": fused})
    plan = make_sharding_plan(model, CPU, SHARDERS)
    plan.plan["other"] = plan.plan["e"]
    with pytest.raises(NotImplementedError, match=r"FQN 'other': supported are .* got FusedEmbeddingBagCollection"):
        shard_model(model, CPU, plan, SHARDERS)


def hooked_table(bag: nn.EmbeddingBag) -> None:
    bag.register_forward_hook(lambda module, inputs, output: None)


def hooked_weight(bag: nn.EmbeddingBag) -> None:
    bag.weight.register_hook(lambda gradient: gradient * 0)


def bounded(bag: nn.EmbeddingBag) -> None:
    bag.max_norm = 1.0


def padded(bag: nn.EmbeddingBag) -> None:
    bag.padding_idx = 0


def scaled_by_frequency(bag: nn.EmbeddingBag) -> None:
    bag.scale_grad_by_freq = True


CHANGES = {
    "one with hooks": (hooked_table, hooked_weight),
    "max_norm=1.0": (bounded,),
    "padding_idx=0": (padded,),
    "scale_grad_by_freq=True": (scaled_by_frequency,),
}


@pytest.mark.parametrize(("received", "change"), [(name, own) for name, all_of in CHANGES.items() for own in all_of])
def test_what_users_change_in_a_table_and_sharding_would_lose_is_refused(
    received: str, change: Callable[[nn.EmbeddingBag], None]
) -> None:
    model = nn.ModuleDict({"e": collection()})
    change(model["e"].embedding_bags["t"])
    with pytest.raises(NotImplementedError, match=f"FQN 'e', table 't': supported are .* got {received}"):
        prepare_(model, blocks())


def test_a_table_of_another_class_is_refused() -> None:
    model = nn.ModuleDict({"e": collection()})
    other = type("Mine", (nn.EmbeddingBag,), {})(12, 8)
    model["e"].embedding_bags["t"] = other
    with pytest.raises(NotImplementedError, match=r"FQN 'e', table 't': supported are .* got Mine"):
        prepare_(model, blocks())


class Perceptron(MLP):
    """A user's class, derived from one of TorchRec's that knows nothing of embeddings."""

    def __init__(self) -> None:
        super().__init__(8, [4, 1])
        self.e = collection()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The perceptron of what is looked up."""
        return super().forward(self.e(features).values())


class Tower(nn.Module):
    """What a tower of TorchRec's does with pooled embeddings."""

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        """Their values."""
        return pooled.values()


HOLDERS: dict[str, Callable[[], nn.Module]] = {
    "tower": lambda: EmbeddingTower(collection(), Tower()),
    "towers": lambda: EmbeddingTowerCollection([EmbeddingTower(collection(), Tower())]),
    "derived": Perceptron,
}


@pytest.mark.parametrize("name", list(HOLDERS))
def test_modules_that_only_call_a_collection_are_supported(gloo: dist.ProcessGroup, name: str) -> None:
    model = nn.ModuleDict({"m": HOLDERS[name]()})
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 11, 0]), lengths=torch.tensor([2, 0, 1]))
    expected = model["m"](features)
    model = prepare_(model, blocks())
    torch.testing.assert_close(model["m"](features), expected)
    sharded = shard_model(model, CPU)
    torch.testing.assert_close(get_unwrapped_module(sharded)["m"](features), expected)
    torch.testing.assert_close(merge_(sharded)["m"](features), expected)


def test_a_subclass_is_searched_like_the_plain_collection(gloo: dist.ProcessGroup) -> None:
    """TorchRec's sharders take no subclasses: the wrapper looks up in a plain one."""
    single_id = blocks_from_counts(FrequencyCounts(COUNTS.counts, {"f": 1}, 30), [TABLE], num_blocks=3)
    model = prepare_(nn.ModuleDict({"e": Named(tables=[TABLE])}), single_id)
    features = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3, 11]), lengths=torch.tensor([1, 1]))
    expected = model["e"](features).values()
    sharded = shard_model(model, CPU)
    torch.testing.assert_close(get_unwrapped_module(sharded)["e"](features).values(), expected)
    plain = nn.ModuleDict({"e": Named(tables=[TABLE])})
    plan = make_sharding_plan(plain, CPU, SHARDERS)
    with pytest.raises(ValueError, match=r"under FQN 'e', got none; .* sharders take no subclass, such as Named"):
        shard_model(plain, CPU, plan, SHARDERS)


class Copied(CopyableMixin):
    """A model that is copied as TorchRec's own test models are."""

    def __init__(self) -> None:
        super().__init__()
        self.e = collection()


def test_a_model_of_torchrecs_that_changes_nothing_may_hold_a_collection() -> None:
    assert list(collections(prepare_(Copied(), blocks()))) == ["e"]
