"""The models of the paper: each equals its formula written out sample by sample, and goes through the whole search."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec import TrainTask, export, load
from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.artifact.package import Signature, export_graph
from dnis_torchrec.data.batches import Bags, InMemoryBatches
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.search.prune import uncompressed_scheme
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.serving import load_operator
from dnis_torchrec.training.evaluate import evaluate
from examples.models import (
    SCALARS,
    DeepFM,
    FactorizationMachine,
    FirstOrderWeights,
    MatrixFactorization,
    MultiLayerPerceptron,
    NeuMF,
    WideDeep,
    build_neumf_tables,
    build_tables,
    log_odds,
    ncf_tower,
)

CPU = torch.device("cpu")
ROWS = {"user": 30, "movie": 14, "genre": 5}
PAIR = {name: ROWS[name] for name in ("user", "movie")}
SCALAR_NAMES = ("age", "price")
DIM = 4
NUM_SAMPLES = 60
Sample = dict[str, list[tuple[int, float]]]
"""Feature -> (id, value) of one sample's bag."""


def batches(*, multi_hot: bool, scalars: bool, seed: int = 0, num_samples: int = NUM_SAMPLES) -> InMemoryBatches:
    """Samples of two single-id features, a multi-hot one with empty bags, and two scalars, one of them often 0."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(num_samples, 2, generator=generator)
    ids = torch.stack([(rows ** skewed[:, i]).long() - 1 for i, rows in enumerate(PAIR.values())], dim=1).clamp(min=0)
    lengths = torch.randint(0, 4, (num_samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bags = Bags(torch.randint(0, ROWS["genre"], (int(offsets[-1]),), generator=generator), offsets)
    dense = torch.randn(num_samples, len(SCALAR_NAMES), generator=generator)
    dense[::3, 1] = 0.0
    signal = (ids[:, 0] % 3 - 1.0) + (ids[:, 1] % 2) + dense[:, 0]
    labels = (signal.sigmoid() > torch.rand(num_samples, generator=generator)).float()
    return InMemoryBatches(
        dense,
        ids,
        labels,
        feature_names=tuple(PAIR),
        multi_hot={"genre": bags} if multi_hot else {},
        scalar_names=SCALAR_NAMES if scalars else (),
        batch_size=num_samples if num_samples == NUM_SAMPLES else 64,
        shuffle=False,
        seed=seed,
    )


def mf(dim: int = DIM) -> nn.Module:
    return MatrixFactorization(build_tables(PAIR, dim, init_std=0.3), global_mean=0.5)


def mlp(dim: int = DIM) -> nn.Module:
    return MultiLayerPerceptron(build_tables(PAIR, dim, init_std=0.3), tower=(6, 3), initial_bias=0.5)


def neumf(dim: int = DIM) -> nn.Module:
    return NeuMF(build_neumf_tables(PAIR, dim, init_std=0.3), tower=ncf_tower(dim), initial_bias=0.5)


def fm(dim: int = DIM, **tables: tuple[str, ...]) -> nn.Module:
    return FactorizationMachine(build_tables(ROWS, dim, init_std=0.3, **tables), initial_bias=0.5)


def wide_deep(dim: int = DIM, **tables: tuple[str, ...]) -> nn.Module:
    return WideDeep(build_tables(ROWS, dim, init_std=0.3, **tables), tower=(6, 3), initial_bias=0.5)


def deepfm(dim: int = DIM, **tables: tuple[str, ...]) -> nn.Module:
    return DeepFM(build_tables(ROWS, dim, init_std=0.3, **tables), tower=(6, 3), initial_bias=0.5)


OF_PAIRS = {"mf": mf, "mlp": mlp, "neumf": neumf}
OF_FIELDS = {"fm": fm, "wide_deep": wide_deep, "deepfm": deepfm}


def perceptron(tower: nn.Module, inputs: list[float]) -> list[float]:
    """ReLU layers, neuron by neuron."""
    for layer in tower._mlp:
        weight, bias = layer._linear.weight.tolist(), layer._linear.bias.tolist()
        inputs = [
            max(0.0, b + sum(w * x for w, x in zip(row, inputs, strict=True)))
            for row, b in zip(weight, bias, strict=True)
        ]
    return inputs


def linear(layer: nn.Linear, inputs: list[float]) -> float:
    bias = 0.0 if layer.bias is None else float(layer.bias)
    return bias + sum(w * x for w, x in zip(layer.weight[0].tolist(), inputs, strict=True))


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def pooled(collection: EmbeddingBagCollection, table: str, bag: list[tuple[int, float]]) -> list[float]:
    weight = collection.embedding_bags[table].weight
    total = [0.0] * weight.shape[1]
    for row, value in bag:
        total = [t + value * w for t, w in zip(total, weight[row].tolist(), strict=True)]
    return total


def naive(model: nn.Module, sample: Sample) -> float:
    """The model's formula for one sample, without a tensor operation."""
    tables = model.embedding_bag_collection
    if isinstance(model, MatrixFactorization):
        biases = sum(float(model.biases.biases[name].weight[sample[name][0][0]]) for name in PAIR)
        return 0.5 + biases + dot(*(pooled(tables, name, sample[name]) for name in PAIR))
    if isinstance(model, MultiLayerPerceptron):
        both = pooled(tables, "user", sample["user"]) + pooled(tables, "movie", sample["movie"])
        return linear(model.over, perceptron(model.tower, both))
    if isinstance(model, NeuMF):
        left, right = (pooled(tables, f"gmf_{name}", sample[name]) for name in PAIR)
        product = [a * b for a, b in zip(left, right, strict=True)]
        both = pooled(tables, "mlp_user", sample["user"]) + pooled(tables, "mlp_movie", sample["movie"])
        return linear(model.over, product + perceptron(model.tower, both))
    return naive_of_fields(model, sample)


def naive_of_fields(model: nn.Module, sample: Sample) -> float:
    tables, first_rows, start = model.embedding_bag_collection, {}, 0
    table_of = {}
    for config in tables.embedding_bag_configs():
        first_rows[config.name] = start
        start += config.num_embeddings
        table_of |= dict.fromkeys(config.feature_names, config.name)
    logit = float(model.first_order.bias)
    for name, bag in sample.items():
        for row, value in bag:
            logit += value * float(model.first_order.weights[first_rows[table_of[name]] + row])
    fields = [pooled(tables, table_of[name], sample[name]) for name in table_of]
    if not isinstance(model, WideDeep):
        logit += sum(dot(a, b) for i, a in enumerate(fields) for b in fields[:i])
    if not isinstance(model, FactorizationMachine):
        hidden = perceptron(model.deep[0], [value for field in fields for value in field])
        logit += linear(model.deep[1], hidden)
    return logit


def samples_of(features: KeyedJaggedTensor) -> list[Sample]:
    """What a KJT holds, sample by sample."""
    samples: list[Sample] = [{} for _ in range(features.stride())]
    for name, bags in features.to_dict().items():
        weights = bags.weights_or_none()
        values = [1.0] * len(bags.values()) if weights is None else weights.tolist()
        pairs = list(zip(bags.values().tolist(), values, strict=True))
        cuts = bags.offsets().tolist()
        for sample, start, end in zip(samples, cuts[:-1], cuts[1:], strict=True):
            sample[name] = pairs[start:end]
    return samples


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Every weight that starts at 0 would hide a mistake."""
    for parameter in model.parameters():
        parameter.add_(0.5 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("name", OF_PAIRS)
def test_models_of_pairs_equal_their_formula(name: str) -> None:
    torch.manual_seed(0)
    model = randomised(OF_PAIRS[name]())
    batch = next(iter(batches(multi_hot=False, scalars=False)))
    assert_equals_formula(model, batch)


@pytest.mark.parametrize("name", OF_FIELDS)
@pytest.mark.parametrize("scalars", [False, True], ids=["ids", "weighted"])
def test_models_of_fields_equal_their_formula(name: str, scalars: bool) -> None:
    torch.manual_seed(0)
    model = randomised(OF_FIELDS[name](scalar_names=SCALAR_NAMES if scalars else ()))
    assert model.embedding_bag_collection.is_weighted() == scalars
    batch = next(iter(batches(multi_hot=True, scalars=scalars)))
    assert (SCALARS in model.embedding_bag_collection.embedding_bags) == scalars
    assert_equals_formula(model, batch)


def assert_equals_formula(model: nn.Module, batch: Batch) -> None:
    model.requires_grad_(False)
    found = model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
    want = [naive(model, sample) for sample in samples_of(batch.sparse_features)]
    assert found.shape == (NUM_SAMPLES,)
    assert found.tolist() == pytest.approx(want, abs=1e-5)
    assert float(found.std()) > 0.1


def test_factorization_machine_is_that_of_all_features_where_bags_hold_one_id() -> None:
    """Rendle's own form: pairs of features i < j of a sparse vector x, not of fields."""
    model = randomised(fm())
    batch = next(iter(batches(multi_hot=False, scalars=False)))
    single = KeyedJaggedTensor(
        keys=["genre", "movie", "user"],
        values=torch.cat(
            [torch.arange(NUM_SAMPLES) % 5, *(batch.sparse_features[n].values() for n in ("movie", "user"))]
        ),
        lengths=torch.ones(3 * NUM_SAMPLES, dtype=torch.int64),
    )
    v = torch.cat([model.embedding_bag_collection.embedding_bags[name].weight for name in ROWS]).detach()
    x = torch.zeros(NUM_SAMPLES, sum(ROWS.values()))
    first = {"user": 0, "movie": ROWS["user"], "genre": ROWS["user"] + ROWS["movie"]}
    for name, start in first.items():
        x[torch.arange(NUM_SAMPLES), single[name].values() + start] = 1.0
    pairs = torch.triu(v @ v.t(), diagonal=1)
    want = model.first_order.bias + x @ model.first_order.weights + torch.einsum("bi,ij,bj->b", x, pairs, x)
    torch.testing.assert_close(model(torch.zeros(NUM_SAMPLES, 0), single), want, atol=1e-4, rtol=0)


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=16)), max_size=4), min_size=2, max_size=8))
def test_first_order_weights_of_any_bags(bags: list[list[tuple[int, float]]]) -> None:
    bags = bags[: len(bags) // 2 * 2]
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=4, embedding_dim=2, feature_names=[f"{name}_id"]) for name in "ab"
    ]
    values = [entry for bag in bags for entry in bag]
    features = KeyedJaggedTensor(
        keys=["b_id", "a_id"],
        values=torch.tensor([row for row, _ in values], dtype=torch.int64),
        weights=torch.tensor([value for _, value in values], dtype=torch.float32),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )
    module = FirstOrderWeights(tables, is_weighted=True, initial_bias=0.25)
    weights = torch.randn(8)
    module.weights.data.copy_(weights)
    half = len(bags) // 2
    want = [
        0.25
        + sum(value * float(weights[4 + row]) for row, value in bags[i])
        + sum(value * float(weights[row]) for row, value in bags[half + i])
        for i in range(half)
    ]
    assert module(features).tolist() == pytest.approx(want, abs=1e-5)


class Reordered(EmbeddingBagCollectionInterface):
    """Returns the keys of a collection in another order, as a sharded one may."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        by_key = self.tables(features).to_dict()
        keys = list(by_key)[::-1]
        return KeyedTensor(
            keys, [by_key[key].shape[1] for key in keys], torch.cat([by_key[key] for key in keys], dim=1)
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables.embedding_bag_configs()

    def is_weighted(self) -> bool:
        return self.tables.is_weighted()


@pytest.mark.parametrize("name", [*OF_PAIRS, *OF_FIELDS])
def test_the_order_of_a_collections_keys_does_not_matter(name: str) -> None:
    model = randomised((OF_PAIRS | OF_FIELDS)[name]())
    batch = next(iter(batches(multi_hot=name in OF_FIELDS, scalars=False)))
    before = model(batch.dense_features, batch.sparse_features)
    model.embedding_bag_collection = Reordered(model.embedding_bag_collection)
    torch.testing.assert_close(model(batch.dense_features, batch.sparse_features), before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: MatrixFactorization(build_tables(ROWS, 4), 0.0),
            "MatrixFactorization: expected a collection of two fe",
        ),
        (
            lambda: MultiLayerPerceptron(build_tables(ROWS, 4), tower=(2,)),
            "MultiLayerPerceptron: expected a collection",
        ),
        (
            lambda: NeuMF(build_tables(PAIR, 4), tower=(2,)),
            "NeuMF: expected a GMF pair of tables of equal D, then an MLP",
        ),
        (lambda: FactorizationMachine(build_neumf_tables(PAIR, 4)), "tables: expected one embedding_dim"),
        (lambda: build_tables(PAIR, 0), "embedding_dim: expected an integer >= 1, got 0"),
        (lambda: build_neumf_tables(PAIR, 0), "embedding_dim: expected an integer >= 1, got 0"),
    ],
)
def test_collections_that_do_not_fit_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_neumf_has_the_layers_of_ncf() -> None:
    model = NeuMF(build_neumf_tables(PAIR, 8), tower=ncf_tower(8))
    dims = {table.name: table.embedding_dim for table in model.embedding_bag_collection.embedding_bag_configs()}
    assert dims == {"gmf_user": 8, "gmf_movie": 8, "mlp_user": 32, "mlp_movie": 32}
    assert isinstance(model.tower, MLP)
    sizes = [(layer._linear.in_features, layer._linear.out_features) for layer in model.tower._mlp]
    assert sizes == [(64, 32), (32, 16), (16, 8)]
    assert model.over.in_features == 16


def test_log_odds_is_the_best_constant() -> None:
    labels = torch.cat([torch.ones(3000), torch.zeros(7000)])
    assert log_odds(labels) == pytest.approx(math.log(3 / 7), abs=1e-3)
    assert math.isfinite(log_odds(torch.zeros(5)))


def recipe_of(name: str, *, seed: int = 0, optimizer: str = "adam") -> Recipe:
    """A tiny recipe of one of the models."""
    weighted = name.endswith("_weighted")
    build = (OF_PAIRS | OF_FIELDS)[name.removesuffix("_weighted")]
    shape = {"multi_hot": name not in OF_PAIRS, "scalars": weighted}
    torch.manual_seed(seed)
    splits = [batches(**shape, seed=part, num_samples=size) for part, size in enumerate((320, 128, 64, 64))]
    return Recipe(
        model=build(dim=8, scalar_names=SCALAR_NAMES) if weighted else build(dim=8),
        data=DataSplits(**dict(zip(("train", "validation", "selection", "test"), splits, strict=True))),
        loss=nn.MSELoss() if name == "mf" else nn.BCEWithLogitsLoss(),
        table_optimizer=optimizer,
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
    )


WHOLE_WAY = [(name, "adam") for name in (*OF_PAIRS, *OF_FIELDS, "fm_weighted", "deepfm_weighted")]
WHOLE_WAY += [("neumf", "rowwise_adagrad"), ("fm_weighted", "rowwise_adagrad")]


@pytest.mark.parametrize(("name", "optimizer"), WHOLE_WAY, ids=lambda value: value)
def test_goes_all_the_way(gloo, tmp_path: Path, name: str, optimizer: str) -> None:
    """A search, export, load: what is served predicts what was found."""
    recipe = recipe_of(name, optimizer=optimizer)
    settings = SearchSettings(num_blocks=3, epochs=1, patience=1)
    outcome = search(recipe, 6.0, tmp_path, CPU, settings=settings)
    assert 6 <= outcome.scheme.compression("packed") < 8  # of so few rows a step may take more bytes than are left
    assert any(0 < int(dim) < 8 for table in outcome.scheme.tables.values() for dim in table.dims)

    expected = evaluate(TrainTask(outcome.model, recipe.loss), recipe.data.test, recipe.loss, CPU)
    artifact = export(outcome.model, outcome.scheme, tmp_path / "artifact")
    served = recipe_of(name, seed=1)
    drop_in_(served.model, artifact)
    assert evaluate(TrainTask(served.model, recipe.loss), recipe.data.test, recipe.loss, CPU) == pytest.approx(
        expected, abs=1e-5
    )
    (collection,) = collections(outcome.model).values()
    features = next(iter(recipe.data.test)).sparse_features
    want: Tensor = collection(features).values()
    torch.testing.assert_close(load(artifact)(features).values(), want, atol=1e-5, rtol=0)


@pytest.mark.skipif(not load_operator(), reason="the lookups are not compiled here")
@pytest.mark.parametrize("name", [*OF_PAIRS, *OF_FIELDS])
def test_every_model_can_be_packaged(tmp_path: Path, name: str) -> None:
    """A server may have no FBGEMM, which KeyedJaggedTensor's `features[name]` would call."""
    pruned, served = recipe_of(name).model, recipe_of(name, seed=1)
    scheme = uncompressed_scheme(pruned)
    model = drop_in_(served.model, export(pruned, scheme, tmp_path / "artifact"), form="mixed_dimension").eval()
    batch = next(iter(served.data.test))
    signature = Signature.of_batch(batch)
    with torch.no_grad():
        graph = export_graph(model, signature).module()
        expected = model(batch.dense_features, batch.sparse_features)
        torch.testing.assert_close(graph(*signature.flatten(batch)), expected, atol=1e-6, rtol=1e-5)


def test_tables_on_meta_take_no_memory() -> None:
    tables = build_tables({"user": 10**9}, 64, device=torch.device("meta"))
    assert tables.embedding_bags["user"].weight.is_meta
    assert tables.embedding_bag_configs()[0].num_embeddings == 10**9
