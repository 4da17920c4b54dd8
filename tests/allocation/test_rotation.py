"""Rotation: no prediction changes, training goes on as if it had been rotated from the start, columns come in order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.axes import LinearReader, RotationGroup, WeightedProduct, rotate_, rotation_groups
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import prepare_
from examples.models import (
    DeepFM,
    FactorizationMachine,
    MatrixFactorization,
    MultiLayerPerceptron,
    NeuMF,
    WideDeep,
    build_neumf_tables,
    build_tables,
)
from tests import models
from tests.models import shard_as
from tests.reference import second_moment_reference

CPU = torch.device("cpu")
SHARDERS = [CpuEmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})]
ROWS = {"user": 11, "movie": 7}
DIM = 8
BATCH_SIZE = 16
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mf": lambda: MatrixFactorization(build_tables(ROWS, DIM, init_std=0.5), global_mean=3.0),
    "mlp": lambda: MultiLayerPerceptron(build_tables(ROWS, DIM, init_std=0.5), tower=(6, 3)),
    "neumf": lambda: NeuMF(build_neumf_tables(ROWS, 4, init_std=0.5), tower=(6, 3)),
    "fm": lambda: FactorizationMachine(build_tables(ROWS, DIM, init_std=0.5)),
    "wide_deep": lambda: WideDeep(build_tables(ROWS, DIM, init_std=0.5), tower=(6, 3)),
    "deepfm": lambda: DeepFM(build_tables(ROWS, DIM, init_std=0.5), tower=(6, 3)),
}
TURNED = {name: ("user", "movie") for name in BUILDERS} | {"neumf": ("gmf_user", "gmf_movie", "mlp_user", "mlp_movie")}

pytestmark = pytest.mark.usefixtures("gloo")


def build(name: str) -> nn.Module:
    """One of the models, with weights of its own in every layer."""
    torch.manual_seed(3)
    return BUILDERS[name]()


def counts_of(model: nn.Module) -> FrequencyCounts:
    """Frequencies for all tables of a model; some rows were never seen."""
    generator = torch.Generator().manual_seed(5)
    configs = [config for module in collections(model).values() for config in module.embedding_bag_configs()]
    counts = {c.name: torch.randint(0, 6, (c.num_embeddings,), generator=generator) for c in configs}
    return FrequencyCounts(counts, {feature: 1 for c in configs for feature in c.feature_names}, 50)


def features_of(model: nn.Module, seed: int = 1) -> KeyedJaggedTensor:
    """A batch of single-id bags for all features of a model."""
    generator = torch.Generator().manual_seed(seed)
    configs = [config for module in collections(model).values() for config in module.embedding_bag_configs()]
    rows = {feature: config.num_embeddings for config in configs for feature in config.feature_names}
    ids = [torch.randint(0, number, (BATCH_SIZE,), generator=generator) for number in rows.values()]
    lengths = torch.ones(BATCH_SIZE * len(rows), dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(rows), values=torch.cat(ids), lengths=lengths)


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tables."""
    return {part.table: part.weight.clone() for module in collections(model).values() for part in local_shards(module)}


def drawn_in(model: nn.Module) -> dict[str, Tensor]:
    """What each column of a table is multiplied by before the tables turn: 1, but for those of a weighted product."""
    factors = {table: torch.ones(1, dtype=torch.float64) for table in tables_of(model)}
    for group in rotation_groups(model):
        if group.product is not None:
            dim, first = tables_of(model)[group.tables[0]].shape[1], group.product.first_column
            weights = group.product.weight.detach()[0, first : first + dim].double()
            factors |= {group.tables[0]: weights.sign() * weights.abs().sqrt(), group.tables[1]: weights.abs().sqrt()}
    return factors


def optimizer_of(
    model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> KeyedOptimizerWrapper:
    """An optimizer of everything that is not fused."""
    return KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), make)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that there is a state to turn; a rotation commutes with it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kjt: KeyedJaggedTensor, steps: int) -> None:
    """A few steps towards labels of noise."""
    labels = torch.linspace(-1, 1, BATCH_SIZE)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.zeros(BATCH_SIZE, 0), kjt) - labels).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("name", BUILDERS)
def test_predictions_stay_and_columns_come_in_order(name: str, sharding_type: str) -> None:
    """The second moment of what was turned is diagonal and falls."""
    model = build(name)
    counts, kjt = counts_of(model), features_of(model)
    sharded = shard_as(model, sharding_type)
    before, predicted = tables_of(sharded), sharded(torch.zeros(BATCH_SIZE, 0), kjt).detach()
    before = {table: (weight.double() * drawn_in(sharded)[table]).float() for table, weight in before.items()}
    groups = [group.tables for group in rotation_groups(sharded)]
    rotations = rotate_(sharded, counts, optimizer_of(sharded, sgd))
    after = tables_of(sharded)
    assert sorted(table for tables in groups for table in tables) == sorted(TURNED[name])
    torch.testing.assert_close(sharded(torch.zeros(BATCH_SIZE, 0), kjt), predicted, atol=1e-5, rtol=1e-5)
    for tables, rotation in zip(groups, rotations, strict=True):
        moment = second_moment_reference([after[table] for table in tables], [counts.counts[table] for table in tables])
        torch.testing.assert_close(moment, moment.diag().diag(), atol=1e-3, rtol=0)
        assert (moment.diag().diff() < 1e-4).all()
        for table in tables:
            torch.testing.assert_close(after[table], (before[table].double() @ rotation).float())


@pytest.mark.parametrize("name", ["mf", "mlp", "deepfm"])
def test_training_does_not_notice(name: str) -> None:
    """SGD with momentum in float32: train, rotate, train equals train, train, rotate by the same matrix."""
    first = shard_as(build(name), "data_parallel")
    second = shard_as(build(name), "data_parallel")
    counts, kjt = counts_of(build(name)), features_of(build(name))
    optimizers = [optimizer_of(model, sgd) for model in (first, second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(model, optimizer, kjt, 2)
    rotations = rotate_(first, counts, optimizers[0])
    for model, optimizer in zip((first, second), optimizers, strict=True):
        train(model, optimizer, kjt, 3)
    turned, straight = tables_of(first), tables_of(second)
    for group, rotation in zip(rotation_groups(first), rotations, strict=True):
        for table in group.tables:
            torch.testing.assert_close(
                turned[table], (straight[table].double() @ rotation).float(), atol=1e-4, rtol=1e-4
            )
    zeros = torch.zeros(BATCH_SIZE, 0)
    torch.testing.assert_close(first(zeros, kjt), second(zeros, kjt), atol=1e-4, rtol=1e-4)


def test_fused_row_wise_adagrad_does_not_notice() -> None:
    """Its state is a number per row, the mean of squared gradients, which no rotation changes."""
    models = []
    for _ in range(2):
        model = build("mf")
        for module in model.modules():
            if isinstance(module, EmbeddingBagCollection):
                apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
        models.append(shard_as(model, "table_wise", fused=None))
    counts, kjt = counts_of(build("mf")), features_of(build("mf"))
    optimizers = [optimizer_of(model, sgd) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, kjt, 2)
    (rotation,) = rotate_(models[0], counts, optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, kjt, 3)
    turned, straight = (tables_of(model) for model in models)
    for table in turned:
        torch.testing.assert_close(turned[table], (straight[table].double() @ rotation).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_states_turn_along(fused: bool) -> None:
    """Adam's average as the gradient does; sums of squares, Adam's and Adagrad's, by the squared matrix."""
    model = build("mf")
    counts, kjt = counts_of(model), features_of(model)
    sharded = shard_as(model, "table_wise" if fused else "data_parallel", fused=torch.optim.Adagrad)
    optimizer = optimizer_of(sharded, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    train(sharded, optimizer, kjt, 2)

    def states() -> dict[str, Tensor]:
        found = sharded.fused_optimizer.state_dict()["state"] if fused else optimizer.state_dict()["state"]
        tensors = {}
        for parameter, of_parameter in found.items():
            for key, value in of_parameter.items():
                local = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
                if isinstance(local, Tensor) and local.dim() == 2 and local.shape[1] == DIM:
                    tensors[f"{parameter}:{key}"] = local.clone()
        return tensors

    before = states()
    (rotation,) = rotate_(sharded, counts, optimizer)
    assert len(before) == (2 if fused else 4)
    for name, state in states().items():
        by = rotation if name.endswith("exp_avg") else rotation.square()
        torch.testing.assert_close(state, (before[name].double() @ by).float())


def test_a_prepared_model_is_turned_like_a_plain_one() -> None:
    """The wrapper stands between the model and its tables; with alpha 1 nothing changes."""
    model = build("wide_deep")
    configs = model.embedding_bag_collection.embedding_bag_configs()
    counts, kjt = counts_of(model), features_of(model)
    blocks = blocks_from_counts(counts, configs, num_blocks=3)
    sharded = shard_as(prepare_(model, blocks), "table_wise")
    predicted = sharded(torch.zeros(BATCH_SIZE, 0), kjt).detach()
    assert len(rotate_(sharded, counts, optimizer_of(sharded, sgd))) == 2
    torch.testing.assert_close(sharded(torch.zeros(BATCH_SIZE, 0), kjt), predicted, atol=1e-5, rtol=1e-5)


def test_models_that_do_not_say_are_left_alone() -> None:
    """torchrec's DLRM names no groups."""
    sharded = shard_as(models.dlrm(), "table_wise")
    before = tables_of(sharded)
    assert rotate_(sharded, models.counts(), optimizer_of(sharded, sgd)) == []
    assert all(torch.equal(table, before[name]) for name, table in tables_of(sharded).items())


def test_column_shards_are_refused_untouched() -> None:
    """A rank cannot turn rows of which it holds a part."""
    model = build("mf")
    counts = counts_of(model)
    sharded = shard_as(model, "column_wise")
    before = tables_of(sharded)
    with pytest.raises(NotImplementedError, match=r"shards of whole rows, got 4 of its 8 columns"):
        rotate_(sharded, counts, optimizer_of(sharded, sgd))
    assert all(torch.equal(table, before[name]) for name, table in tables_of(sharded).items())


def test_unknown_optimizer_states_are_refused_untouched() -> None:
    """Rprop's step sizes belong to axes that are gone."""
    model = build("mf")
    counts, kjt = counts_of(model), features_of(model)
    sharded = shard_as(model, "data_parallel")
    optimizer = optimizer_of(sharded, lambda parameters: torch.optim.Rprop(parameters))
    train(sharded, optimizer, kjt, 1)
    before = tables_of(sharded)
    with pytest.raises(NotImplementedError, match="optimizer state: supported to turn are"):
        rotate_(sharded, counts, optimizer)
    assert all(torch.equal(table, before[name]) for name, table in tables_of(sharded).items())


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (RotationGroup(tables=("user", "nobody")), "nobody"),
        (RotationGroup(tables=("user", "user")), "expected every table in one group at most"),
        (RotationGroup(tables=("user", "wide")), "expected tables of one embedding_dim"),
        (
            RotationGroup(tables=("user",), readers={"movie": (LinearReader(weight=nn.Linear(9, 2).weight),)}),
            "expected readers of its own tables",
        ),
        (
            RotationGroup(
                tables=("user",), readers={"user": (LinearReader(weight=nn.Linear(9, 2).weight, first_column=2),)}
            ),
            "expected at least 10 inputs, got 9",
        ),
        (
            RotationGroup(tables=("user",), product=WeightedProduct(weight=nn.Linear(8, 1).weight)),
            "expected two tables without readers beside a product",
        ),
        (
            RotationGroup(tables=("user", "movie"), product=WeightedProduct(weight=nn.Linear(8, 2).weight)),
            "product: expected a layer with one output, got 2",
        ),
        (
            RotationGroup(
                tables=("user", "movie"), product=WeightedProduct(weight=nn.Linear(8, 1).weight, first_column=1)
            ),
            "product: expected at least 9 inputs, got 8",
        ),
    ],
)
def test_wrong_groups_are_named(group: RotationGroup, says: str) -> None:
    """Before anything is changed."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                *build_tables(ROWS, DIM).embedding_bag_configs(),
                *build_tables({"wide": 3}, 4).embedding_bag_configs(),
            ]
            self.collection = EmbeddingBagCollection(tables=copy.deepcopy(tables))

        def rotation_groups(self) -> list[RotationGroup]:
            return [group]

    with pytest.raises(ValueError, match=says):
        rotation_groups(Odd())


@pytest.mark.parametrize("name", ["mlp", "fm"])
@pytest.mark.parametrize("searched", [False, True])
def test_a_frozen_table_is_not_turned_nor_what_would_turn_with_it(name: str, searched: bool) -> None:
    model = build(name)
    (module,) = collections(model).values()
    frozen = module.embedding_bags["movie"].weight.requires_grad_(False)
    counts = counts_of(model)
    groups = [group.tables for group in rotation_groups(model)]
    assert all("movie" not in tables for tables in groups)
    before, features = frozen.detach().clone(), features_of(model)
    if searched:
        prepare_(model, blocks_from_counts(counts, module.embedding_bag_configs(), num_blocks=2))
    expected = model(dense_features=torch.zeros(BATCH_SIZE, 1), sparse_features=features)
    sharded = shard_model(model, CPU)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda p: torch.optim.Adam(p)
    )
    assert [group.tables for group in rotation_groups(sharded)] == groups
    rotate_(sharded, counts, optimizer)
    shards = [
        part.weight for own in collections(sharded).values() for part in local_shards(own) if part.table == "movie"
    ]
    assert torch.equal(torch.cat(shards), before)
    found = sharded(dense_features=torch.zeros(BATCH_SIZE, 1), sparse_features=features)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_frozen_layer_is_not_turned() -> None:
    model = build("mlp")
    whole = rotation_groups(model)
    whole[0].layers()[0].requires_grad_(False)
    assert len(rotation_groups(model)) < len(whole)
