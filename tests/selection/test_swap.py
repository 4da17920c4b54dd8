"""prepare_ and merge_ on whole models, plain and sharded: outputs, weights, names and structure come through."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import BilevelStream, BilevelTrainPipeline, LevelSchedule
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import fold_, merge_, prepare_, unshard_
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection, soft_selection_modules
from tests.small_models import (
    BATCH_SIZE,
    MODELS,
    MULTI_HOT,
    SHARDING_TYPES,
    TwoCollections,
    alpha_of,
    blocks_for,
    collection,
    dlrm,
    features,
    predict,
    randomise_alpha_,
    shard_as,
    tables,
)

every_model = pytest.mark.parametrize("name", list(MODELS))


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


@every_model
def test_preparing_changes_no_output_and_shares_the_weights(name: str) -> None:
    model = MODELS[name]()
    expected = predict(model)
    storages = {(fqn, s.table): s.weight.data_ptr() for fqn, m in collections(model).items() for s in local_shards(m)}
    prepared = prepare_(model, blocks_for(model))
    assert (prepared is model) == (name != "bare")
    torch.testing.assert_close(predict(prepared), expected, atol=1e-6, rtol=0)
    wrapped = collections(prepared)
    assert all(isinstance(m, SoftSelectionEmbeddingBagCollection) for m in wrapped.values())
    assert {(fqn, s.table): s.weight.data_ptr() for fqn, m in wrapped.items() for s in local_shards(m)} == storages


@every_model
def test_merging_gives_the_plain_model_with_the_output_of_the_wrapped_one(name: str) -> None:
    model = MODELS[name]()
    original = copy.deepcopy(model)
    prepared = prepare_(model, blocks_for(model))
    randomise_alpha_(prepared)
    expected = [predict(prepared, seed) for seed in range(3)]
    assert not torch.allclose(expected[1], predict(original), atol=1e-4)
    merged = merge_(prepared)
    for seed in range(3):
        torch.testing.assert_close(predict(merged, seed), expected[seed], atol=1e-6, rtol=0)
    assert_plain_again(merged, original)
    assert soft_selection_modules(merged) == {}


@every_model
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_merging_a_sharded_model_gives_the_plain_model(name: str, sharding_type: str) -> None:
    model = MODELS[name]()
    original = copy.deepcopy(model)
    prepared = prepare_(model, blocks_for(model))
    randomise_alpha_(prepared)
    expected = predict(prepared)
    sharded = shard_as(prepared, sharding_type)
    assert isinstance(sharded, DistributedModelParallel)
    torch.testing.assert_close(predict(sharded), expected, atol=1e-6, rtol=0)
    merged = merge_(sharded)
    torch.testing.assert_close(predict(merged), expected, atol=1e-6, rtol=0)
    assert_plain_again(merged, original)


@every_model
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_unsharding_gives_the_plain_model(name: str, sharding_type: str) -> None:
    model = MODELS[name]()
    original, expected = copy.deepcopy(model), predict(model)
    plain = unshard_(shard_as(model, sharding_type))
    torch.testing.assert_close(predict(plain), expected, atol=1e-6, rtol=0)
    assert_plain_again(plain, original)


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.usefixtures("gloo")
def test_folding_keeps_wrappers_and_output(sharding_type: str) -> None:
    model = TwoCollections()
    sharded = shard_as(prepare_(model, blocks_for(model)), sharding_type)
    randomise_alpha_(sharded)
    expected = predict(sharded)
    fold_(sharded)
    assert all((alpha_of(sharded).of(dim) == 1).all() for dim in alpha_of(sharded).dims)
    assert list(soft_selection_modules(sharded)) == ["first", "module.second"]
    torch.testing.assert_close(predict(sharded), expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("gloo")
def test_training_goes_on_after_merging() -> None:
    """The merged tables are ordinary parameters: a gradient step moves the rows of the batch and no others."""
    model = collection()
    merged = merge_(shard_as(prepare_(model, blocks_for(model)), "column_wise"))
    before = {name: value.clone() for name, value in merged.state_dict().items()}
    bags = features()
    merged(bags).values().sum().backward()
    torch.optim.SGD(merged.parameters(), lr=1.0).step()
    for name in ("user", "movie"):
        rows = torch.zeros(len(before[f"embedding_bags.{name}.weight"]), dtype=torch.bool)
        rows[bags[f"{name}_id"].values()] = True
        moved = merged.embedding_bags[name].weight.detach() != before[f"embedding_bags.{name}.weight"]
        assert torch.equal(moved.all(dim=1), rows)
        assert torch.equal(moved.any(dim=1), rows)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_survives(training: bool) -> None:
    model = dlrm().train(training)
    prepared = prepare_(model, blocks_for(model))
    assert {module.training for module in prepared.modules()} == {training}
    assert {module.training for module in merge_(prepared).modules()} == {training}


def test_only_the_named_collections_are_wrapped() -> None:
    model = TwoCollections()
    prepare_(model, blocks_for(model), fqns=["module.second"])
    assert list(soft_selection_modules(model)) == ["module.second"]
    assert type(model.first) is EmbeddingBagCollection
    assert type(merge_(model).module["second"]) is EmbeddingBagCollection


def test_what_was_not_wrapped_is_plain_after_merging_a_sharded_model(gloo) -> None:
    model = TwoCollections()
    expected = predict(model)
    sharded = shard_as(prepare_(model, blocks_for(model), fqns=["module.second"]), "table_wise")
    merged = merge_(sharded)
    assert {type(module) for module in collections(merged).values()} == {EmbeddingBagCollection}
    torch.testing.assert_close(predict(merged), expected, atol=1e-6, rtol=0)


def test_a_frozen_table_stays_frozen() -> None:
    model = dlrm()
    model.sparse_arch.embedding_bag_collection.embedding_bags["user"].weight.requires_grad_(False)
    merged = merge_(prepare_(model, blocks_for(model)))
    bags = merged.sparse_arch.embedding_bag_collection.embedding_bags
    learns = {table: bag.weight.requires_grad for table, bag in bags.items()}
    assert learns == {table: table != "user" for table in bags}


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
    sharded = shard_as(prepare_(model, blocks_for(model)), "data_parallel")
    optimizer = KeyedOptimizerWrapper(
        dict(sharded.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    pipeline = BilevelTrainPipeline(sharded, optimizer, torch.device("cpu"))
    batches = [Batch(torch.zeros(BATCH_SIZE, 0), features(seed), torch.zeros(BATCH_SIZE)) for seed in range(6)]
    stream = BilevelStream(batches, batches, LevelSchedule(warm_up_steps=1))
    for _ in range(4):
        pipeline.progress(stream)
    merged = merge_(sharded)
    assert type(merged.clamp) is Clamp
    for batch in batches:
        expected = merged.over(merged.collection(Clamp()(batch.sparse_features)).values())
        torch.testing.assert_close(merged(batch)[1], expected)


def test_a_collection_held_under_two_names_is_wrapped_once_and_everywhere() -> None:
    model = nn.Module()
    model.ebc = collection()
    model.arch = nn.ModuleDict({"ebc": model.ebc, "again": model.ebc})
    original = model.ebc
    prepare_(model, blocks_for(model))
    assert isinstance(model.ebc, SoftSelectionEmbeddingBagCollection)
    assert model.arch["ebc"] is model.arch["again"] is model.ebc
    merge_(model)
    assert type(model.ebc) is EmbeddingBagCollection
    assert model.arch["ebc"] is model.arch["again"] is model.ebc
    assert model.ebc.embedding_bags["user"].weight.data_ptr() == original.embedding_bags["user"].weight.data_ptr()


def test_multi_hot_features_are_split_and_others_are_not() -> None:
    model = TwoCollections()
    prepare_(model, blocks_for(model), multi_hot_features=[f"{MULTI_HOT}_id", "movie_id"])
    outputs = {o.feature: o.is_multi_hot for m in soft_selection_modules(model).values() for o in m.outputs}
    assert outputs == {"user_id": False, "genre_id": True, "movie_id": True}
    model = TwoCollections()
    prepare_(model, blocks_for(model))  # as counted
    outputs = {o.feature: o.is_multi_hot for m in soft_selection_modules(model).values() for o in m.outputs}
    assert outputs == {"user_id": False, "genre_id": True, "movie_id": False}


# Refusals: each leaves the model as it was


def refused(model: nn.Module, blocks: RowBlocks, error: type[Exception], message: str, **options) -> None:
    before = structure(model)
    with pytest.raises(error, match=message):
        prepare_(model, blocks, **options)
    assert structure(model) == before


def test_unknown_fqn() -> None:
    model = TwoCollections()
    message = "FQN 'fisrt': expected a known FQN, got 'fisrt'; did you mean 'first'"
    refused(model, blocks_for(model), ValueError, message, fqns=["first", "fisrt"])


def test_no_fqn() -> None:
    model = TwoCollections()
    message = (
        r"fqns: expected at least one FQN, got none; leave it out to wrap all collections: 'first', 'module\.second'"
    )
    for nothing in ([], ()):
        refused(model, blocks_for(model), ValueError, message, fqns=nothing)


def test_the_fqn_of_what_is_no_collection() -> None:
    model = TwoCollections()
    message = "FQN 'over': expected a known FQN, got 'over'; known names: 'first', 'module.second'"
    refused(model, blocks_for(model), ValueError, message, fqns=["over"])


def test_unknown_feature() -> None:
    model = TwoCollections()
    message = "feature 'gerne_id': expected a known feature, got 'gerne_id'; did you mean 'genre_id'"
    refused(model, blocks_for(model), ValueError, message, multi_hot_features=["gerne_id"])


def test_no_collection() -> None:
    model = TwoCollections()
    message = "prepare_: expected a model with an embedding collection, got Linear"
    refused(nn.Linear(1, 1), blocks_for(model), ValueError, message)


def test_blocks_without_a_table_or_of_other_rows() -> None:
    """Found in the second collection, before the first is wrapped."""
    model = TwoCollections()
    first_only = model.first.embedding_bag_configs()
    counted = {"user": torch.arange(12), "genre": torch.arange(7), "movie": torch.arange(4)}
    counts = FrequencyCounts(counted, {}, 1)
    refused(model, blocks_from_counts(counts, first_only), ValueError, "table 'movie': expected a known table")
    short = EmbeddingBagConfig(name="movie", num_embeddings=4, embedding_dim=8, feature_names=["movie_id"])
    message = "table 'movie': expected blocks of num_embeddings=9 rows, got 4"
    refused(model, blocks_from_counts(counts, [*first_only, short]), ValueError, message)


def test_one_table_name_in_two_collections() -> None:
    model = nn.ModuleDict({"one": collection(), "two": collection()})
    message = r"table names: expected distinct names over all wrapped collections, got \['genre', 'movie', 'user'\]"
    refused(model, blocks_for(collection()), ValueError, message)
    prepare_(model, blocks_for(collection()), fqns=["two"])
    assert list(soft_selection_modules(model)) == ["two"]


class Tied(nn.Module):
    """A table of each of two collections, and a layer, of 8 columns and 12 rows: what a user may let share weights."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        twelve = [replace(config, num_embeddings=12) for config in tables("user", "movie", "genre")]
        self.one = EmbeddingBagCollection(tables=twelve[:2], device=torch.device(device))
        self.two = EmbeddingBagCollection(tables=twelve[2:], device=torch.device(device))
        self.over = nn.Linear(8, 12, device=device)

    @property
    def bags(self) -> dict[str, nn.EmbeddingBag]:
        return {**self.one.embedding_bags, **self.two.embedding_bags}

    def blocks(self) -> RowBlocks:
        configs = [*self.one.embedding_bag_configs(), *self.two.embedding_bag_configs()]
        return blocks_from_counts(FrequencyCounts({name: torch.arange(12) for name in self.bags}, {}, 1), configs)


def test_tables_that_share_weights() -> None:
    """Alpha would be folded into them twice; a table, or a layer, that is not wrapped would be changed by it."""
    model = Tied()
    model.bags["movie"].weight = model.bags["user"].weight
    message = (
        r"table 'user': expected weights of its own, got those of 'one\.embedding_bags\.movie\.weight' too; let one "
        r"table read the features of both \(feature_names\), or copy the weights"
    )
    refused(model, model.blocks(), ValueError, message)

    model = Tied()
    model.bags["genre"].weight = nn.Parameter(model.bags["user"].weight.data)
    for fqns, table, other in (
        (None, "user", r"two\.embedding_bags\.genre"),
        (["one"], "user", r"two\.embedding_bags\.genre"),
        (["two"], "genre", r"one\.embedding_bags\.user"),
    ):
        message = rf"table '{table}': expected weights of its own, got those of '{other}\.weight' too"
        refused(model, model.blocks(), ValueError, message, fqns=fqns)

    model = Tied()
    model.two.embedding_bags["genre"] = model.one.embedding_bags["movie"]
    message = r"table 'movie': expected weights of its own, got those of 'two\.embedding_bags\.genre\.weight' too"
    refused(model, model.blocks(), ValueError, message)

    model = Tied()
    model.over.weight = model.bags["genre"].weight
    message = r"table 'genre': expected weights of its own, got those of 'over\.weight' too"
    refused(model, model.blocks(), ValueError, message)
    prepare_(model, model.blocks(), fqns=["one"])
    assert list(soft_selection_modules(model)) == ["one"]


def test_tables_without_memory_are_told_apart() -> None:
    model = Tied("meta")
    prepare_(model, model.blocks())
    assert list(soft_selection_modules(model)) == ["one", "two"]
    model = Tied("meta")
    model.bags["genre"].weight = model.bags["user"].weight
    refused(model, model.blocks(), ValueError, "table 'user': expected weights of its own")


def test_prepared_already() -> None:
    model = TwoCollections()
    prepare_(model, blocks_for(model), fqns=["first"])
    message = "prepare_: expected a model not yet prepared, got wrapped collections; merge_ it"
    refused(model, blocks_for(model), RuntimeError, message, fqns=["module.second"])


@pytest.mark.usefixtures("gloo")
def test_sharded_already() -> None:
    sharded = shard_as(TwoCollections(), "table_wise")
    message = r"FQN '.*first': expected an unsharded collection, got a sharded one; call prepare_ before Distributed"
    refused(sharded, blocks_for(TwoCollections()), RuntimeError, message)


class SeveralRanks:
    """What a sharded collection knows of its ranks."""

    world_size = 2


@pytest.mark.usefixtures("gloo")
def test_a_model_over_several_ranks_is_folded_where_it_is() -> None:
    sharded = shard_as(prepare_(dlrm(), blocks_for(dlrm())), "table_wise")
    randomise_alpha_(sharded)
    expected = predict(sharded)
    [wrapper] = soft_selection_modules(sharded).values()
    wrapper.embedding_bag_collection._env = SeveralRanks
    assert merge_(sharded) is sharded
    assert (alpha_of(sharded).of(8) == 1).all()
    torch.testing.assert_close(predict(sharded), expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("gloo")
def test_a_model_over_several_ranks_cannot_be_unsharded() -> None:
    sharded = shard_as(TwoCollections(), "table_wise")
    sharded.get_submodule(next(n for n, _ in sharded.named_modules() if n.endswith("second")))._env = SeveralRanks
    with pytest.raises(NotImplementedError, match=r"FQN 'module\.second': supported is world size 1, got 2"):
        unshard_(sharded)


def test_merging_and_folding_what_was_never_prepared() -> None:
    for function in (merge_, fold_):
        message = "merge_: expected a prepared model, got no wrapped collection; call prepare_ first"
        with pytest.raises(RuntimeError, match=message):
            function(dlrm())


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_merging_makes_sequence_embeddings_plain_too(gloo: object, kind: str) -> None:
    config = EmbeddingConfig(name="sequence", num_embeddings=9, embedding_dim=8, feature_names=["movie_id"])
    model = nn.ModuleDict({"pooled": collection(), "sequence": EmbeddingCollection(tables=[config])})
    expected = model["sequence"](features())["movie_id"].values().detach()
    sharders = [CpuEmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    prepared = prepare_(model, blocks_for(model), fqns=["pooled"])
    constraints = {"sequence": ParameterConstraints(sharding_types=[kind])}
    plan = make_sharding_plan(prepared, torch.device("cpu"), sharders, constraints=constraints)
    merged = merge_(shard_model(prepared, torch.device("cpu"), plan, sharders))
    assert not [fqn for fqn, module in merged.named_modules() if isinstance(module, ShardedModule)]
    assert type(merged["sequence"]) is EmbeddingCollection
    assert merged["sequence"].embedding_configs()[0].feature_names == ["movie_id"]
    torch.testing.assert_close(merged["sequence"](features())["movie_id"].values(), expected, atol=0, rtol=0)


def test_merging_names_what_stays_sharded(gloo: object) -> None:
    beside = nn.EmbeddingBag(8, 4, mode="sum", include_last_offset=True)
    model = nn.ModuleDict({"pooled": collection(), "beside": beside, "over": nn.Linear(1, 1)})
    prepared, sharders = prepare_(model, blocks_for(model)), [EmbeddingBagCollectionSharder(), EmbeddingBagSharder()]
    sharded = DistributedModelParallel(prepared, device=torch.device("cpu"), sharders=sharders)
    with pytest.warns(UserWarning, match="some modules stay sharded, got {'beside': 'ShardedEmbeddingBag'}"):
        merged = merge_(sharded)
    assert type(merged["pooled"]) is EmbeddingBagCollection


def test_a_model_in_distributed_data_parallel_is_prepared_inside_of_it(gloo) -> None:
    model, kjt = nn.ModuleDict({"ebc": collection()}), features()
    expected = model["ebc"](kjt).values()
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert prepare_(wrapped, blocks_for(model)) is wrapped
    assert list(soft_selection_modules(wrapped)) == ["ebc"]
    torch.testing.assert_close(model["ebc"](kjt).values(), expected)
    assert type(merge_(wrapped)["ebc"]) is EmbeddingBagCollection
