"""Tables of fewer rows: looked up as a naive loop over ids says, within the bytes, and served as they were trained."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.rivals.methods import METHODS, NotApplicableError, SizeNotMetError
from benchmarks.rivals.methods.partitioned import QUOTIENT, Partition, is_partitioned, partition_
from benchmarks.rivals.methods.shared_rows import partitions
from dnis_torchrec.data.recipe import Recipe
from tests.comparison.test_baselines_methods import CPU, build, make_task
from tests.tiny import make_batch, make_collection

DIM, DATA = 4, build(None).data


def make_tables(pooling: PoolingType, *, is_weighted: bool = False) -> EmbeddingBagCollection:
    """A single-id and a multi-hot table, and a third that reads the single-id feature, too."""
    shapes = {"t": (6, ["one"]), "u": (9, ["many"]), "v": (6, ["one"])}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features, pooling=pooling)
        for name, (rows, features) in shapes.items()
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def make_bags(*, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Four samples; empty bags in both features, a row twice in one bag, keys in another order than the tables'."""
    lengths = torch.tensor([3, 0, 2, 4, 1, 1, 0, 1])
    values = torch.tensor([8, 0, 4, 2, 2, 7, 1, 3, 0, 5, 0, 3])
    weights = torch.linspace(0.5, 2.0, 12) if is_weighted else None
    return KeyedJaggedTensor(keys=["many", "one"], values=values, lengths=lengths, weights=weights)


def naive(tables: dict[str, Tensor], partition: dict[str, Partition], collection, bags: KeyedJaggedTensor) -> Tensor:
    """Id by id: sums (or means) of rows ``i mod m``, times those of rows ``i div m``."""
    pooled = []
    for config in collection.embedding_bag_configs():
        (feature,) = config.feature_names
        own, parts = bags[feature], partition[config.name]
        ids, offsets = own.values().tolist(), own.offsets().tolist()
        weights = [1.0] * len(ids) if own.weights_or_none() is None else own.weights().tolist()
        of_samples = []
        for start, end in pairwise(offsets):
            share = 1.0 if config.pooling == PoolingType.SUM else 1.0 / max(1, end - start)
            bag = [(ids[at], weights[at] * share) for at in range(start, end)]

            def total(name: str, rows: list[int], bag: list[tuple[int, float]] = bag) -> Tensor:
                parts = [w * tables[name][row] for row, (_, w) in zip(rows, bag, strict=True)]
                return sum(parts, torch.zeros(DIM))

            vector = total(config.name, [i % parts.remainders for i, _ in bag])
            if parts.quotients:
                vector = vector * total(f"{config.name}{QUOTIENT}", [i // parts.remainders for i, _ in bag])
            of_samples.append(vector)
        pooled.append(torch.stack(of_samples))
    return torch.cat(pooled, dim=1)


def drawn_tables(model: nn.Module) -> dict[str, Tensor]:
    """Every short table of a partitioned collection, by name, with weights that tell rows apart."""
    torch.manual_seed(0)
    found = {}
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter)
        found[name.split(".")[-2]] = parameter
    return found


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("has_quotients", [False, True])
@pytest.mark.parametrize("rows", [(3, 4, 6), (6, 3, 5), (1, 1, 1)])
def test_the_lookup_equals_a_naive_loop(pooling: PoolingType, has_quotients: bool, rows: tuple[int, ...]) -> None:
    collection, bags = make_tables(pooling), make_bags()
    partition = {
        config.name: Partition(num_embeddings=config.num_embeddings, remainders=m, has_quotients=has_quotients)
        for config, m in zip(collection.embedding_bag_configs(), rows, strict=True)
    }
    model = nn.ModuleDict({"ebc": collection, "same": collection})
    partition_(model, partition)
    assert model["same"] is model["ebc"]
    assert is_partitioned(model)
    tables, pooled = drawn_tables(model["ebc"]), model["ebc"](bags)
    assert pooled.keys() == collection(bags).keys()
    expected = naive(tables, partition, collection, bags)
    torch.testing.assert_close(pooled.values(), expected, atol=1e-6, rtol=0)
    assert {name: len(weight) for name, weight in tables.items() if not name.endswith(QUOTIENT)} == dict(
        zip("tuv", rows, strict=True)
    )
    leaves, grad = list(tables.values()), torch.randn_like(expected)
    of_naive = torch.autograd.grad(expected, leaves, grad)
    for own, wanted in zip(torch.autograd.grad(pooled.values(), leaves, grad), of_naive, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-5, rtol=0)


def test_hashed_bags_keep_their_weights() -> None:
    collection, bags = make_tables(PoolingType.SUM, is_weighted=True), make_bags(is_weighted=True)
    partition = {
        config.name: Partition(num_embeddings=config.num_embeddings, remainders=4, has_quotients=False)
        for config in collection.embedding_bag_configs()
    }
    model = nn.ModuleDict({"ebc": collection})
    partition_(model, partition)
    expected = naive(drawn_tables(model["ebc"]), partition, collection, bags)
    torch.testing.assert_close(model["ebc"](bags).values(), expected, atol=1e-6, rtol=0)


def test_a_partitioned_model_begins_as_the_plain_one_for_ids_below_the_remainders() -> None:
    plain, bags = make_collection(8), make_batch(64, 0).sparse_features
    low = KeyedJaggedTensor(keys=bags.keys(), values=bags.values() % 6, lengths=bags.lengths())
    partition = {
        config.name: Partition(num_embeddings=config.num_embeddings, remainders=6, has_quotients=has_quotients)
        for config, has_quotients in zip(plain.embedding_bag_configs(), (True, False), strict=True)
    }
    model = nn.ModuleDict({"ebc": plain})
    before = plain(low).values()
    partition_(model, partition)
    assert torch.equal(model["ebc"](low).values(), before)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 16)), min_size=1, max_size=3),
    st.booleans(),
    st.floats(1.0, 60.0),
    st.sampled_from(["fp32", "int8", "int4"]),
)
def test_rows_are_as_many_as_the_bytes_pay_for(
    shapes: list[tuple[int, int]], has_quotients: bool, compression: float, precision: str
) -> None:
    def make(_: int | None) -> Recipe:
        tables = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{i}"])
            for i, (rows, dim) in enumerate(shapes)
        ]
        return Recipe(model=nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)}), data=DATA, loss=nn.MSELoss())

    task = make_task(Path(), compression, make=make, precision=precision)
    try:
        found = partitions(task, has_quotients=has_quotients)
    except SizeNotMetError:
        return
    stored = {"fp32": (4, 0, 1), "int8": (1, 4, 2), "int4": (0.5, 4, 4)}[precision]
    is_dense = all(dim % stored[2] == 0 for _, dim in shapes)

    def num_bytes(rows: list[tuple[int, int]]) -> int:
        """Of short tables: rows of values and a scale; else whole bytes, and a scale and bits of every column."""
        total = 0
        for (_, dim), own in zip(shapes, rows, strict=True):
            row = math.ceil(dim * stored[0]) + (stored[1] if is_dense else 0)
            total += sum(n * row + (0 if is_dense else 5 * dim) for n in own if n)
        return total

    assert num_bytes([(p.remainders, p.quotients) for p in found.values()]) <= task.embedding_bytes()
    for (rows, _), own in zip(shapes, found.values(), strict=True):
        assert own.rows <= rows
        quotients = {i // own.remainders for i in range(rows)}
        assert own.quotients in ((0,) if own.remainders == rows or not has_quotients else (len(quotients),))


@pytest.mark.parametrize(("name", "ratio"), [("hash", 4.0), ("hash", 1.5), ("qr", 2.4), ("qr", 1.5)])
def test_what_is_served_is_what_was_trained(gloo, tmp_path: Path, name: str, ratio: float) -> None:
    task = make_task(tmp_path, ratio)
    made = METHODS[name](task)
    assert 0.75 * task.embedding_bytes() < made.embedding_bytes() <= task.embedding_bytes()
    batch = make_batch(32, 9)
    with torch.no_grad():
        expected = made.model(batch.dense_features, batch.sparse_features)
        with made.served(CPU) as model:
            found = model(batch.dense_features, batch.sparse_features)
        again = made.model(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert torch.equal(again, expected)


def test_quotients_do_not_know_weights(tmp_path: Path) -> None:
    def weighted(dim: int | None) -> Recipe:
        recipe = build(dim)
        object.__setattr__(recipe, "model", nn.ModuleDict({"tables": make_collection(16, is_weighted=True)}))
        return recipe

    with pytest.raises(NotApplicableError, match="qr: supported are bags without per-sample weights"):
        METHODS["qr"](make_task(tmp_path, 2, make=weighted))


def test_a_table_named_as_anothers_quotients_is_refused(tmp_path: Path) -> None:
    def taken(dim: int | None) -> Recipe:
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=[name])
            for name in ("user", f"user{QUOTIENT}")
        ]
        model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})
        return Recipe(model=model, data=DATA, loss=nn.MSELoss())

    with pytest.raises(ValueError, match="table names: expected none that ends with '_quotient' behind another's"):
        METHODS["qr"](make_task(tmp_path, 1.2, make=taken))
