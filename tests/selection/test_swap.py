"""prepare_ and merge_ on whole models, plain and sharded: outputs, weights, names and structure come through."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import BilevelStream, BilevelTrainPipeline, LevelSchedule
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection import wrapper
from dnis_torchrec.selection.plan import (
    CpuEmbeddingBagCollectionSharder,
    default_sharders,
    make_sharding_plan,
    shard_model,
)
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import fold_, merge_, prepare_, unshard_
from tests import models
from tests.models import collection, features
from tests.selection.shard_cases import shard_by


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
    prepared = prepare_(model, models.blocks_for(model))
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
        model = prepare_(model, models.blocks_for(model))
        models.randomise_alpha_(model)
        assert not torch.allclose(models.predict(model), models.predict(original), atol=1e-4)
    expected = [models.predict(model, seed) for seed in range(3)]
    if sharding_type is not None:
        model = models.shard_as(model, sharding_type)
        assert isinstance(model, DistributedModelParallel)
        torch.testing.assert_close(models.predict(model, 0), expected[0], atol=1e-6, rtol=0)
    plain = merge_(model) if searched else unshard_(model)
    for seed in range(3):
        torch.testing.assert_close(models.predict(plain, seed), expected[seed], atol=1e-6, rtol=0)
    assert_plain_again(plain, original)
    assert wrapper.soft_selection_modules(plain) == {}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_survives(training: bool) -> None:
    model = models.dlrm().train(training)
    prepared = prepare_(model, models.blocks_for(model))
    assert {module.training for module in prepared.modules()} == {training}
    assert {module.training for module in merge_(prepared).modules()} == {training}


@pytest.mark.parametrize("sharding_type", [None, "table_wise"])
def test_only_the_named_collections_are_wrapped(gloo, sharding_type: str | None) -> None:
    model = models.TwoCollections()
    expected = models.predict(model)
    prepare_(model, models.blocks_for(model), fqns=["module.second"])
    assert list(wrapper.soft_selection_modules(model)) == ["module.second"]
    assert type(model.first) is EmbeddingBagCollection
    merged = merge_(model if sharding_type is None else models.shard_as(model, sharding_type))
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
    sharded = models.shard_as(prepare_(model, models.blocks_for(model)), "data_parallel")
    optimizer = KeyedOptimizerWrapper(
        dict(sharded.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    pipeline = BilevelTrainPipeline(sharded, optimizer, torch.device("cpu"))
    batches = [
        Batch(torch.zeros(models.BATCH_SIZE, 0), features(seed), torch.zeros(models.BATCH_SIZE)) for seed in range(6)
    ]
    stream = BilevelStream(batches, batches, LevelSchedule(warm_up_steps=1))
    for _ in range(4):
        pipeline.progress(stream)
    merged = merge_(sharded)
    assert type(merged.clamp) is Clamp
    for batch in batches:
        expected = merged.over(merged.collection(Clamp()(batch.sparse_features)).values())
        torch.testing.assert_close(merged(batch)[1], expected)


def test_multi_hot_features_are_split_and_others_are_not() -> None:
    model = models.TwoCollections()
    prepare_(model, models.blocks_for(model), multi_hot_features=[f"{models.MULTI_HOT}_id", "movie_id"])
    outputs = {o.feature: o.is_multi_hot for m in wrapper.soft_selection_modules(model).values() for o in m.outputs}
    assert outputs == {"user_id": False, "genre_id": True, "movie_id": True}
    model = models.TwoCollections()
    prepare_(model, models.blocks_for(model))  # as counted
    outputs = {o.feature: o.is_multi_hot for m in wrapper.soft_selection_modules(model).values() for o in m.outputs}
    assert outputs == {"user_id": False, "genre_id": True, "movie_id": False}


# Refusals: each leaves the model as it was


def check_refused(model: nn.Module, blocks: RowBlocks, error: type[Exception], place: str, **options) -> None:
    before = structure(model)
    with pytest.raises(error, match=f"^{place}"):
        prepare_(model, blocks, **options)
    assert structure(model) == before


def blocks_of_rows(**rows: int) -> RowBlocks:
    configs = [replace(config, num_embeddings=rows[config.name]) for config in models.tables(*rows)]
    counts = {name: torch.arange(number) for name, number in rows.items()}
    return blocks_from_counts(FrequencyCounts(counts, {}, 1), configs)


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
        (lambda: prepare_(models.dlrm(), models.blocks_for(models.dlrm())), SHORT_MOVIE, RuntimeError, "prepare_", {}),
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
    for function in (merge_, fold_):
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
        return blocks_from_counts(FrequencyCounts({name: torch.arange(12) for name in self.bags}, {}, 1), configs)


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
        prepare_(model, model.blocks(), fqns=["one"])
        assert list(wrapper.soft_selection_modules(model)) == ["one"]


def test_tables_without_memory_are_told_apart() -> None:
    model = Tied("meta")
    prepare_(model, model.blocks())
    assert list(wrapper.soft_selection_modules(model)) == ["one", "two"]
    model = Tied("meta")
    model.bags["genre"].weight = model.bags["user"].weight
    check_refused(model, model.blocks(), ValueError, "table 'user'")


class SeveralRanks:
    """What a sharded collection knows of its ranks."""

    world_size = 2


@pytest.mark.usefixtures("gloo")
def test_a_model_over_several_ranks_is_folded_where_it_is() -> None:
    sharded = models.shard_as(prepare_(models.dlrm(), models.blocks_for(models.dlrm())), "table_wise")
    models.randomise_alpha_(sharded)
    expected = models.predict(sharded)
    [own] = wrapper.soft_selection_modules(sharded).values()
    own.embedding_bag_collection._env = SeveralRanks
    assert merge_(sharded) is sharded
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
    sharders = [CpuEmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    prepared = prepare_(model, models.blocks_for(model), fqns=["pooled"])
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
    prepared, sharders = (
        prepare_(model, models.blocks_for(model)),
        [EmbeddingBagCollectionSharder(), EmbeddingBagSharder()],
    )
    sharded = DistributedModelParallel(prepared, device=torch.device("cpu"), sharders=sharders)
    with pytest.warns(UserWarning, match="some modules stay sharded, got {'beside': 'ShardedEmbeddingBag'}"):
        merged = merge_(sharded)
    assert type(merged["pooled"]) is EmbeddingBagCollection


def test_a_model_in_distributed_data_parallel_is_prepared_inside_of_it(gloo) -> None:
    model, kjt = nn.ModuleDict({"ebc": collection()}), features()
    expected = model["ebc"](kjt).values()
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert prepare_(wrapped, models.blocks_for(model)) is wrapped
    assert list(wrapper.soft_selection_modules(wrapped)) == ["ebc"]
    torch.testing.assert_close(model["ebc"](kjt).values(), expected)
    assert type(merge_(wrapped)["ebc"]) is EmbeddingBagCollection


SHARDED_AS = (None, "table_wise", "column_wise", "data_parallel")


def prepared_and_plain(name: str, sharding_type: str | None) -> tuple[nn.Module, nn.Module]:
    """Two models of other weights, one with alpha below 1; the one of sequences is `interest`."""
    if name == "sequences":
        return interest_model(sharding_type, is_prepared=True), interest_model(sharding_type, is_prepared=False)
    plain, prepared = models.MODELS[name](), models.MODELS[name]()
    prepared = prepare_(prepared, models.blocks_for(prepared))
    models.randomise_alpha_(prepared)
    if sharding_type is None:
        return prepared, plain
    return models.shard_as(prepared, sharding_type), models.shard_as(plain, sharding_type)


def interest_model(kind: str | None, *, is_prepared: bool) -> nn.Module:
    """Prepared ones have weights of their own, and alpha below 1."""
    built = models.interest()
    if is_prepared:
        prepare_(built, models.blocks_of(built, [models.make_batch(0)]))
        alpha = wrapper.soft_selection_modules(built)["sequences"].alpha
        for weight in [*built.parameters(), *map(alpha.of, alpha.dims)]:
            weight.detach().mul_(0.5)
    if kind is None:
        return built
    return shard_by(built, kind, default_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}))


def predict_any(model: nn.Module) -> Tensor:
    """`predict`, also of `interest`."""
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
    plain.load_state_dict(wrapper.plain_state_dict(merge_(prepared)), strict=True)
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
