"""Models trained plainly and in codes, beside oracles; NaN and infinity reach no weight; denormals; signals."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import measure_, packed_collections
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import TableShard, collections, local_shards
from dnis_torchrec.selection.swap import prepare_, unshard_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training import settings as signals
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import SearchEvents, train_plainly
from dnis_torchrec.training.pipeline import FiniteGuard, NonFiniteError
from dnis_torchrec.training.rounded import RoundedTables
from dnis_torchrec.training.settings import REQUESTS, Ending, Stopped, StopRequest
from dnis_torchrec.training.shard import (
    flushing_denormals,
    is_flushing,
    launched_ranks,
    process_group,
    set_learning_rates_,
    shard,
)
from tests import models, reference
from tests.models import kernels_of, shard_as
from tests.tiny import ROWS, make_batch, make_collection, make_recipe, read_late, tables_alone

CPU = torch.device("cpu")


def shards_of(model: nn.Module) -> dict[str, TableShard]:
    return {part.table: part for module in collections(model).values() for part in local_shards(module)}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_tables_are_not_held_twice_once_they_are_sharded(gloo, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    bags = [bag for module in collections(recipe.model).values() for bag in module.embedding_bags.values()]
    weights = [TensorWeakRef(bag.weight) for bag in bags]
    del bags
    sharded = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)
    assert sharded


@pytest.mark.parametrize(("optimizer", "is_dense"), [("adam", True), ("rowwise_adagrad", False)])
def test_replicated_tables_that_learn_by_adam_are_fused_on_no_gpu_either(
    gloo, monkeypatch: pytest.MonkeyPatch, optimizer: str, is_dense: bool
) -> None:
    """A one-step unrolled gradient needs them so; what the planner is asked for can be seen without a GPU."""
    asked: list[ParameterConstraints] = []

    def refuse(*_: object, constraints: dict[str, ParameterConstraints]) -> None:
        asked.extend(constraints.values())
        raise ValueError("asked")

    monkeypatch.setattr("dnis_torchrec.training.shard.make_sharding_plan", refuse)
    recipe = make_recipe(optimizer=optimizer)
    with pytest.raises(ValueError, match="asked"):
        shard(TrainTask(recipe.model, recipe.loss), recipe, torch.device("cuda"), is_replicated=True)
    assert [own.sharding_types == ["data_parallel"] for own in asked] == [is_dense] * len(ROWS)
    assert [own.compute_kernels == ["dense"] for own in asked] == [is_dense] * len(ROWS)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_of_rows_beside_the_tables_learn_at_the_tables_rate(gloo, prefix: str) -> None:
    recipe = make_recipe()
    name = next(own for own, _ in recipe.model.named_parameters() if own.startswith("over_arch") and "bias" in own)
    rates = {"table_learning_rate": 0.5, "dense_learning_rate": 0.01}
    recipe = dataclasses.replace(recipe, row_weights=(prefix + name,), **rates)
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    dense = {own: part for own, part in model.named_parameters() if ".embedding_bags." not in own}
    before = {own: part.detach().clone() for own, part in dense.items()}
    model(next(iter(recipe.data.train)))[0].backward()
    optimizer.step()  # Adam's first step is as long as its rate, wherever there is a gradient
    moved = {own: float((part - before[own]).detach().abs().max()) for own, part in dense.items()}
    assert {round(length, 4) for own, length in moved.items() if own.endswith(name)} == {0.5}
    assert {round(length, 4) for own, length in moved.items() if not own.endswith(name)} == {0.01}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_rates_that_are_set_are_as_if_they_had_always_been(gloo, optimizer: str) -> None:
    """Those of row weights, too, which learn at the tables' rate."""
    weights = []
    for tables, dense in ((0.5, 0.01), (0.001, 0.002)):
        recipe = make_recipe(optimizer=optimizer)
        rows = next(own for own, _ in recipe.model.named_parameters() if own.startswith("over_arch") and "bias" in own)
        rates = {"table_learning_rate": tables, "dense_learning_rate": dense}
        recipe = dataclasses.replace(recipe, row_weights=(rows,), **rates)
        model, rest = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
        if tables != 0.5:
            set_learning_rates_(model, rest, tables=0.5, dense=0.01)
        model(next(iter(recipe.data.train)))[0].backward()
        rest.step()
        weights.append(reference.tables_of(model) | {own: part.detach() for own, part in model.named_parameters()})
    assert [own for own, weight in weights[0].items() if not torch.equal(weight, weights[1][own])] == []


def test_weights_of_rows_that_there_are_not_are_refused(gloo) -> None:
    recipe = dataclasses.replace(make_recipe(), row_weights=("first_order.weight",))
    with pytest.raises(ValueError, match=r"Recipe\.row_weights.*'first_order\.weight'"):
        shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_model_of_tables_alone_trains(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = dataclasses.replace(make_recipe(optimizer=optimizer), model=tables_alone(None).model)
    model, rest = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    before = {name: part.weight.clone() for name, part in shards_of(model).items()}
    assert len(rest.params) == (2 if optimizer == "adam" else 0)
    train_plainly(model, rest, recipe, CPU, max_epochs=1, patience=1)
    assert not any(torch.equal(part.weight, before[name]) for name, part in shards_of(model).items())


@pytest.mark.parametrize("starts_trained", [True, False])
def test_a_state_that_no_epoch_improves_is_kept_where_it_was_trained_before(
    gloo, tmp_path: Path, starts_trained: bool
) -> None:
    recipe = make_recipe()
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    first = train_plainly(model, optimizer, recipe, CPU, max_epochs=3, patience=1)
    before = {name: part.weight.clone() for name, part in shards_of(model).items()}
    set_learning_rates_(model, optimizer, tables=10.0, dense=10.0)
    losses = []
    events = SearchEvents(on_epoch=lambda record: losses.append(record.selection_loss))
    options = {"max_epochs": 9, "patience": 1, "starts_trained": starts_trained, "events": events}
    second = train_plainly(model, optimizer, recipe, CPU, **options)
    assert min(losses) > first.selection_loss
    assert len(losses) == losses.index(min(losses)) + 2  # stopped by its own epochs, whatever went before
    assert (second.best_epoch == -1) == starts_trained
    assert second.selection_loss == (pytest.approx(first.selection_loss, abs=1e-7) if starts_trained else min(losses))
    kept = all(torch.equal(part.weight, before[name]) for name, part in shards_of(model).items())
    assert kept == starts_trained


class Flippant(nn.Module):
    """Says something else each time, but in evaluation mode, and keeps statistics of what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bag_collection = make_collection()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = self.embedding_bag_collection(sparse_features).values()
        return self.dropout(torch.cat([pooled, self.norm(dense_features)], dim=1)).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("was_training", [True, False])
def test_models_are_evaluated_in_evaluation_mode_and_left_as_they_were(gloo, was_training: bool) -> None:
    recipe, model = make_recipe(), Flippant().train(was_training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = TrainTask(model, recipe.loss).train(was_training)
    first, second = (evaluate(task, recipe.data.test, recipe.loss, CPU) for _ in range(2))
    assert first == second
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (task.training, model.training) == (was_training, was_training)


def test_models_are_trained_in_training_mode_however_they_come(gloo, tmp_path: Path) -> None:
    recipe = dataclasses.replace(make_recipe(), model=Flippant())
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    train_plainly(model.eval(), optimizer, recipe, CPU, max_epochs=2, patience=2)
    statistics = dict(model.named_buffers())
    (counted,) = (value for name, value in statistics.items() if name.endswith("num_batches_tracked"))
    best_epoch_batches = len(list(recipe.data.train))
    assert int(counted) in (best_epoch_batches, 2 * best_epoch_batches)


def test_plain_training_ends_in_its_best_epoch(gloo, tmp_path: Path) -> None:
    recipe = make_recipe()
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    steps: list[float] = []
    events = SearchEvents(on_step=lambda loss, _: steps.append(loss))
    done = train_plainly(model, optimizer, recipe, CPU, max_epochs=12, patience=2, events=events)
    losses = {record.epoch: record.selection_loss for record in done.history}
    assert [record.step for record in done.history] == [10 * (epoch + 1) for epoch in losses]
    means = [sum(steps[10 * epoch : 10 * epoch + 10]) / 10 for epoch in losses]
    assert [record.train_loss for record in done.history] == pytest.approx(means, abs=1e-6)
    best = min(losses, key=lambda epoch: losses[epoch])
    assert done.best_epoch == best
    assert len(losses) == 12 or len(losses) == best + 3
    now = evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"]
    assert now == pytest.approx(losses[best], abs=1e-7) == pytest.approx(done.selection_loss, abs=1e-7)


L2 = 0.3
DIM = 4
READS = {"films": ("watched", "wanted"), "tags": ("tag",)}
"""Two features read one table."""


class Linear(nn.Module):
    """A prediction that is linear in all pooled embeddings."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection
        self.over = nn.Linear(DIM * sum(map(len, READS.values())), 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """One number per sample."""
        return self.over(self.collection(sparse_features).values())


def make_linear(pooling: PoolingType, *, is_weighted: bool) -> Linear:
    torch.manual_seed(0)
    shape = {"num_embeddings": 6, "embedding_dim": DIM, "pooling": pooling}
    tables = [
        EmbeddingBagConfig(name=table, feature_names=list(features), **shape) for table, features in READS.items()
    ]
    return Linear(EmbeddingBagCollection(tables=tables, is_weighted=is_weighted))


def batch_of(bags: dict[str, reference.Bags], weights: dict[str, list[list[float]]] | None) -> Batch:
    size = len(next(iter(bags.values())))
    in_order = [bag for feature in bags for bag in bags[feature]]
    factors = None if weights is None else [w for feature in bags for bag in weights[feature] for w in bag]
    features = KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row for bag in in_order for row in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in in_order]),
        weights=None if factors is None else torch.tensor(factors, dtype=torch.float32),
    )
    return Batch(torch.zeros(size, 1), features, torch.arange(size) % 2.0)


def table_gradients(task: TrainTask, batch: Batch) -> dict[str, Tensor]:
    task.zero_grad()
    task(batch)[0].backward()
    tables = {name.split(".")[-2]: part for name, part in task.named_parameters() if ".embedding_bags." in name}
    return {name: part.grad.double().clone() for name, part in tables.items()}


bag_lists = st.lists(st.tuples(*[st.lists(st.integers(0, 5), max_size=3)] * 3), max_size=3)


@pytest.mark.parametrize("is_selected", [False, True])
@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [(PoolingType.SUM, False), (PoolingType.MEAN, False), (PoolingType.SUM, True)]
)
@settings(max_examples=8)
@given(bag_lists)
def test_the_gradient_is_that_of_the_equation(
    pooling: PoolingType, is_weighted: bool, is_selected: bool, samples: Sequence[tuple[list[int], ...]]
) -> None:
    """Empty bags, repeated rows, a table of two features, and alpha where the model is prepared."""
    samples = [([0, 0], [3], [5]), *samples]  # so that each table is read
    bags = {name: [sample[place] for sample in samples] for place, name in enumerate(("watched", "wanted", "tag"))}
    weights = {name: [[0.5 + row / 4 for row in bag] for bag in own] for name, own in bags.items()}
    batch = batch_of(bags, weights if is_weighted else None)
    model = make_linear(pooling, is_weighted=is_weighted)
    weight = {name: bag.weight.detach().double() for name, bag in model.collection.embedding_bags.items()}
    alpha = {name: torch.ones(6, DIM, dtype=torch.float64) for name in READS}
    if is_selected:
        blocks = models.blocks_of(model, [batch])
        prepare_(model, blocks, multi_hot_features=["watched", "wanted", "tag"])
        (wrapper,) = soft_selection_modules(model).values()
        wrapper.alpha.of(DIM).uniform_(0, 1)
        for name in READS:
            rows = blocks.first_alpha_row(name) + blocks.routings[name].all_blocks()
            alpha[name] = wrapper.alpha.of(DIM).double()[rows]
    tasks = [TrainTask(model, nn.MSELoss(), embedding_l2=value) for value in (0.0, L2)]
    plain, penalised = (table_gradients(task, batch) for task in tasks)
    oracles = {
        name: reference.ReferenceTable(
            weight[name].requires_grad_(), alpha[name], torch.arange(6), pooling == PoolingType.MEAN
        )
        for name in READS
    }
    reads = [(oracles[name], bags[f], weights[f] if is_weighted else None) for name, fs in READS.items() for f in fs]
    (L2 * reference.embedding_l2_reference(reads)).backward()
    for name, oracle in oracles.items():
        torch.testing.assert_close(penalised[name] - plain[name], oracle.weight.grad, atol=1e-5, rtol=1e-4)


def test_the_reported_loss_is_that_of_the_data_alone(gloo) -> None:
    recipe, batch = make_recipe(), make_batch(16, 1)
    plain, penalised = (TrainTask(recipe.model, recipe.loss, embedding_l2=value) for value in (0.0, 100.0))
    (loss, (reported, *_)), (total, (also_reported, *_)) = plain(batch), penalised(batch)
    assert float(reported) == float(also_reported) == float(loss.detach())
    assert float(total.detach()) > float(loss.detach()) + 1
    assert not any(module._forward_hooks for module in recipe.model.modules())
    evaluated = [evaluate(task, recipe.data.test, recipe.loss, CPU) for task in (plain, penalised)]
    assert evaluated[0] == evaluated[1]
    assert float(penalised.eval()(batch)[0].detach()) == float(loss.detach())


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_values_that_are_no_penalty_are_refused(value: float) -> None:
    message = r"embedding_l2: expected a finite number >= 0, got .*; 0 leaves embeddings alone"
    with pytest.raises(ValueError, match=rf"^{message}"):
        TrainTask(nn.Identity(), nn.MSELoss(), embedding_l2=value)
    with pytest.raises(ValueError, match=rf"^{message}"):
        dataclasses.replace(make_recipe(), embedding_l2=value)


def test_the_fused_kernel_steps_by_the_exact_gradient(gloo) -> None:
    """Row-wise Adagrad by hand: a row's first step is the gradient over the root mean square of the row."""
    recipe, batch = dataclasses.replace(make_recipe(optimizer="rowwise_adagrad"), embedding_l2=L2), make_batch(64, 1)
    before = reference.tables_of(recipe.model)
    task = TrainTask(recipe.model, recipe.loss, embedding_l2=recipe.embedding_l2)
    gradients = table_gradients(copy.deepcopy(task), batch)
    model, _ = shard(task, recipe, CPU)
    model.train()
    model(batch)[0].backward()
    for table, weight in reference.tables_of(model).items():
        gradient = gradients[table]
        step = gradient / (gradient.square().mean(dim=1, keepdim=True).sqrt() + 1e-8)
        expected = before[table] - recipe.table_learning_rate * step
        torch.testing.assert_close(weight, expected.float(), atol=2e-6, rtol=1e-5)


STEPS = 4
ROUNDED_ROWS = {"user": 9, "genre": 6, "one": 1}
FEATURES = {"user": ["user", "friends"], "genre": ["genre"], "one": ["one"]}
"""Two features share a table; friends and genre are multi-hot."""
ROUTINGS = {
    "user": RowRouting(9, 3, boundaries=torch.tensor([0, 2, 5, 8])),
    "genre": RowRouting.from_map(torch.tensor([1, 0, 2, 0, 1, 0]), 2),
    "one": RowRouting(1, 1, boundaries=torch.tensor([0, 1])),
}
"""Rows of no block among them."""


def configs(dim: int = 8) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=FEATURES[name],
            pooling=PoolingType.MEAN if name == "genre" else PoolingType.SUM,
        )
        for name, rows in ROUNDED_ROWS.items()
    ]


def collection(dim: int = 8, seed: int = 0) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    tables = EmbeddingBagCollection(tables=configs(dim))
    for bag in tables.embedding_bags.values():
        nn.init.normal_(bag.weight)
    return tables


def features(seed: int, batch_size: int = 5) -> KeyedJaggedTensor:
    """Bags of all features; not every row of a table is in them."""
    generator = torch.Generator().manual_seed(seed)
    rows = {name: rows for table, rows in ROUNDED_ROWS.items() for name in FEATURES[table]}
    lengths = {
        name: torch.randint(0, 4 if name in ("friends", "genre") else 2, (batch_size,), generator=generator)
        for name in rows
    }
    ids = [torch.randint(0, rows[name], (int(own.sum()),), generator=generator) for name, own in lengths.items()]
    return KeyedJaggedTensor(list(rows), torch.cat(ids), lengths=torch.cat(list(lengths.values())))


def counts() -> FrequencyCounts:
    drawn = {name: torch.arange(rows, 0, -1) for name, rows in ROUNDED_ROWS.items()}
    return FrequencyCounts(drawn, dict.fromkeys(("user", "friends", "genre", "one"), 3), 50)


def blocks() -> RowBlocks:
    return blocks_from_counts(counts(), configs(), num_blocks=2, least_rows=1)


def step_(model: nn.Module, optimizer: torch.optim.Optimizer | None, held: RoundedTables, seed: int) -> None:
    model.zero_grad()
    reference.distance(model(features(seed)).to_dict()).backward()
    if optimizer is not None:
        optimizer.step()
    held.after_step_()


Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def assert_follows(model: nn.Module, scheme: MixedDimensionScheme, own: Any, theirs: Optimizers, first=0) -> None:
    """Some steps, each of which the oracle takes by hand on latent weights."""
    oracle, held = reference.StraightThrough(scheme, reference.tables_of(model)), RoundedTables(model, scheme)
    optimizer = theirs(list(oracle.latents.values()))
    for seed in range(first, first + STEPS):
        step_(model, own, held, seed)
        tables = configs(next(iter(scheme.tables.values())).embedding_dim)
        oracle.step(reference.loss_by_hand(tables, features(seed)), optimizer)
        expected = oracle.weights()
        for name, weight in reference.tables_of(model).items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4)  # a step of 16 bits, where they tie
            assert weight.equal(reference.rounded(held.scheme.tables[name], weight))
        with reference.latent_tables(model, held):
            for name, latent in reference.tables_of(model).items():
                torch.testing.assert_close(latent, oracle.latents[name].data, rtol=0, atol=1e-5)


bits = st.one_of(st.sampled_from([(0,), (32,), (1,), (16,), (0, 32)]), st.just(WIDTHS))


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 4]), bits, st.sampled_from([torch.optim.SGD, torch.optim.Adam]))
def test_whole_tables_follow_latent_weights(seed: int, dim: int, widths: tuple[int, ...], kind: Any) -> None:
    model = collection(dim, seed)
    scheme = reference.scheme_of(configs(dim), ROUTINGS, seed=seed, widths=widths)
    assert_follows(model, scheme, kind(model.parameters(), lr=0.2), partial(kind, lr=0.2), seed)


FUSED = {
    "table_wise": (torch.optim.SGD, torch.optim.SGD),
    "column_wise": (torch.optim.SGD, torch.optim.SGD),
    "table_wise adagrad": (RowWiseAdagrad, reference.RowWiseAdagradByHand),
    "data_parallel": (None, torch.optim.Adam),
}
"""Sharding type -> optimizer of the tables' kernel, and what it does by hand; both at rate 1."""


@pytest.mark.parametrize("kind", FUSED)
def test_kernels_follow_latent_weights(gloo, kind: str) -> None:
    fused, by_hand = FUSED[kind]
    model = models.shard_as(collection(), kind.split()[0], fused=fused)
    own = None if fused else torch.optim.Adam(model.parameters(), lr=1.0)
    before = reference.tables_of(model)["user"]
    assert_follows(model, reference.scheme_of(configs(), ROUTINGS, seed=3), own, partial(by_hand, lr=1.0))
    assert not before.equal(reference.tables_of(model)["user"])


@pytest.mark.parametrize("kind", ["plain", "table_wise", "data_parallel"])
def test_a_prepared_model_follows_latent_weights(gloo, kind: str) -> None:
    model = prepare_(collection(), blocks())
    rate = 0.2 if kind == "plain" else 1.0
    if kind != "plain":
        model = models.shard_as(model, kind)
    dense = [] if kind == "table_wise" else list(model.parameters())
    own = torch.optim.SGD(dense, lr=rate) if dense else None
    assert_follows(
        model, reference.scheme_of(configs(), blocks().routings, seed=3), own, partial(torch.optim.SGD, lr=rate)
    )


def trained(scheme: MixedDimensionScheme) -> tuple[EmbeddingBagCollection, RoundedTables, dict[str, Tensor]]:
    model = collection()
    held = RoundedTables(model, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for seed in range(STEPS):
        step_(model, optimizer, held, seed)
    with reference.latent_tables(model, held):
        return model, held, reference.tables_of(model)


def assert_holds(model: nn.Module, scheme: MixedDimensionScheme, latents: Mapping[str, Tensor]) -> None:
    for name, weight in reference.tables_of(model).items():
        assert weight.equal(reference.rounded(scheme.tables[name], latents[name])), name


def test_tables_stay_as_they_are_rounded_once_nothing_is_rounded_any_more() -> None:
    """And nobody notes what is looked up, for no step will round it."""
    scheme = reference.scheme_of(configs(), ROUTINGS)
    sharded = shard_as(collection(), "table_wise")
    held = RoundedTables(sharded, scheme)
    before, kernels = reference.tables_of(sharded), kernels_of(sharded)
    assert all(kernel.emb_module._forward_pre_hooks for kernel in kernels)
    held.stop_()
    assert not any(kernel.emb_module._forward_pre_hooks for kernel in kernels)
    assert all(weight.equal(before[name]) for name, weight in reference.tables_of(sharded).items())
    assert_holds(sharded, held.scheme, before)
    for module in collections(sharded).values():
        for own in local_shards(module):
            own.weight.add_(0.25)
    moved = reference.tables_of(sharded)
    held.after_step_()
    assert all(weight.equal(moved[name]) for name, weight in reference.tables_of(sharded).items())


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_training_in_codes_lowers_the_loss_and_packs_as_it_is(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    task = TrainTask(recipe.model, recipe.loss)
    model, rest = shard(task, recipe, CPU)
    train_plainly(model, rest, recipe, CPU, max_epochs=4, patience=2)
    plain = unshard_(model).model
    found = measure_(plain, recipe.data.train, loss=recipe.loss, num_blocks=2).allocate(compression=12)
    model, rest = shard(TrainTask(plain, recipe.loss), recipe, CPU)
    held = RoundedTables(model, found.scheme)
    rounded_loss = evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"]
    done = train_plainly(model, rest, recipe, CPU, max_epochs=4, patience=4, rule=held, starts_trained=True)
    assert done.best_epoch >= 0
    assert done.selection_loss < rounded_loss - 0.002
    assert evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"] == pytest.approx(done.selection_loss)
    trained_tables = reference.tables_of(model)
    with reference.latent_tables(model, held):
        latents = reference.tables_of(model)
    assert_holds(model, held.scheme, latents)
    plain = unshard_(model).model
    packed = packed_collections(plain, held.scheme)
    for name, weight in trained_tables.items():
        table = held.scheme.tables[name]
        ids = torch.arange(table.num_embeddings)
        lengths = torch.cat([torch.full_like(ids, feature == name) for feature in ("user", "genre")])
        one_each = KeyedJaggedTensor(["user", "genre"], ids, lengths=lengths)
        torch.testing.assert_close(packed[table.collection](one_each)[name], weight, rtol=0, atol=1e-6)


def doubles(scheme: MixedDimensionScheme, model: EmbeddingBagCollection) -> MixedDimensionScheme:
    model.double()
    return scheme


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (doubles, TypeError, r"^table 'user': expected float32 weights, got torch\.float64"),
        (
            lambda scheme, _: reference.without_codes(scheme),
            ValueError,
            "^table 'user': expected bits, scales and shifts",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_table_is_rounded(
    spoil: Callable[[MixedDimensionScheme, nn.Module], MixedDimensionScheme], error: type[Exception], message: str
) -> None:
    model = collection()
    scheme = spoil(reference.scheme_of(configs(), ROUTINGS), model)
    before = reference.tables_of(model)
    with pytest.raises(error, match=message):
        RoundedTables(model, scheme)
    assert all(
        weight.nan_to_num().equal(before[name].nan_to_num()) for name, weight in reference.tables_of(model).items()
    )


BAD = [float("nan"), float("inf"), float("-inf")]


def prepared(name: str = "dlrm", sharding_type: str | None = None) -> nn.Module:
    model = models.MODELS[name]()
    model = prepare_(model, models.blocks_for(model))
    return model if sharding_type is None else models.shard_as(model, sharding_type)


def tables_of(model: nn.Module) -> dict[tuple[str, int], torch.Tensor]:
    shards = [shard for module in collections(model).values() for shard in local_shards(module)]
    return {(shard.table, shard.first_column): shard.weight for shard in shards}


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return (
        factor
        * model(dense_features=torch.ones(models.BATCH_SIZE, models.NUM_DENSE), sparse_features=models.features()).sum()
    )


@pytest.mark.parametrize("bad", BAD)
def test_loss(bad: float) -> None:
    model = prepared()
    guard = FiniteGuard(model)
    guard.check_loss(torch.tensor(1e30), "lower step 3")
    message = rf"^lower step 3 \(every table is finite\): expected a finite loss, got {bad}; lower the learning rate"
    with pytest.raises(NonFiniteError, match=message):
        guard.check_loss(torch.tensor(bad), "lower step 3")
    tables_of(model)["movie", 0][8, 7] = bad
    message = rf"^lower step 3, table 'movie': expected a finite loss, got {bad}; .*last good"
    with pytest.raises(NonFiniteError, match=message):
        guard.check_loss(torch.tensor(bad), "lower step 3")


def test_finite_numbers_whose_sum_is_not_are_no_error() -> None:
    model, large = prepared(), torch.full((2,), 3e38)
    guard = FiniteGuard(model)
    guard.check_loss(large, "lower step 3")
    guard.check_alpha_gradient(large.expand(2, 2), 8, "upper step 3")
    dense = [weight for name, weight in model.named_parameters() if ".embedding_bags." not in name]
    assert dense
    for parameter in dense:
        parameter.grad = torch.full_like(parameter, 1e20)
    guard.check_dense_gradients("lower step 3")


@pytest.mark.parametrize(("row", "names"), [(1, ["user"]), (2, ["user"]), (3, ["genre"])])
@pytest.mark.parametrize("bad", BAD)
def test_alpha_gradient(row: int, names: list[str], bad: float) -> None:
    """Tables that share the row of alpha are named; those of another D, or with rows of their own, are not."""
    model = models.MODELS["two_dims"]()
    blocks = models.blocks_for(model)  # three blocks per table
    guard = FiniteGuard(prepare_(model, blocks))
    gradient = torch.zeros(blocks.alpha_shapes[4])
    guard.check_alpha_gradient(gradient, 4, "upper step 2")
    gradient[row, 2] = bad
    message = f"upper step 2, tables {names}, row {row} of alpha: expected a finite gradient, got nan or inf; lower"
    with pytest.raises(NonFiniteError, match=f"^{re.escape(message)}"):
        guard.check_alpha_gradient(gradient, 4, "upper step 2")


@pytest.fixture
def late() -> Iterator[None]:
    """Everything in a test is read late."""
    with read_late():
        yield


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize(
    ("sharding_type", "compiled"), [*((kind, True) for kind in (None, *models.SHARDING_TYPES)), ("table_wise", False)]
)
@pytest.mark.usefixtures("gloo")
def test_no_table_learns_a_bad_gradient(sharding_type: str | None, compiled: bool, is_late: bool) -> None:
    torch.manual_seed(0)  # of some initial weights every ReLU of the over arch is dead, and swallows the NaN
    with models.operators(compiled), read_late() if is_late else nullcontext():
        model = prepared(sharding_type=sharding_type)
        guard, before = FiniteGuard(model), {key: table.clone() for key, table in tables_of(model).items()}
        message = "^lower step 5, table 'user': expected finite gradients, got nan or inf; lower the learning rate"
        with pytest.raises(NonFiniteError, match=message):
            with guard.watch_gradients("lower step 5"):
                loss_of(model, float("nan")).backward()
            assert is_late
            guard.settle()
        assert all(torch.equal(table, before[key]) for key, table in tables_of(model).items())
        if is_late and sharding_type is None:
            grads = [p.grad for name, p in model.named_parameters() if ".embedding_bags." in name]
            assert grads
            assert not any(bool(grad.any()) for grad in grads)
        with guard.watch_gradients("lower step 6"):  # and a good one goes through
            loss_of(model).backward()
        guard.settle()
        if is_late and sharding_type not in (None, "data_parallel"):  # those have fused optimizers
            assert any(not torch.equal(table, before[key]) for key, table in tables_of(model).items())


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_table_whose_gradient_is_bad_is_named(compiled: bool, is_late: bool) -> None:
    with models.operators(compiled), read_late() if is_late else nullcontext():
        model = prepared("bare")
        guard = FiniteGuard(model)
        with pytest.raises(NonFiniteError, match="lower step 0, table 'genre'"):
            with guard.watch_gradients("lower step 0"):
                (model(models.features())["genre_id"] * float("inf")).sum().backward()
            guard.settle()


@pytest.mark.parametrize("is_late", [True, False])
def test_the_table_of_a_sequence_is_named(is_late: bool) -> None:
    model = models.sequences()
    guard = FiniteGuard(model)

    def backward() -> None:
        with guard.watch_gradients("lower step 1"):
            (model["tables"](models.sequence_features(0))["visits"].values() * float("nan")).sum().backward()

    with read_late() if is_late else nullcontext():
        if is_late:
            backward()
            shop = next(p for name, p in model.named_parameters() if "shop" in name)
            assert not bool(shop.grad.any())
        with pytest.raises(NonFiniteError, match="lower step 1, table 'shop'"):
            guard.settle() if is_late else backward()


def test_where_parts_are_not_told_apart_all_tables_are_named() -> None:
    """As where a kernel on a GPU tells in one number whether a gradient is finite."""
    model = prepared()
    guard = FiniteGuard(model)
    (wrapper,) = guard._wrappers.values()
    message = "lower step 7, one of 3 tables, 'user' to 'genre': expected finite gradients"
    with guard.watch_gradients("lower step 7"):
        wrapper.selection._check_gradient(torch.ones(1, dtype=torch.bool), torch.ones(1, 1))
        with pytest.raises(NonFiniteError, match=message):
            wrapper.selection._check_gradient(torch.zeros(1, dtype=torch.bool), torch.ones(1, 1))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(("is_late", "sharding_type"), [(True, None), (False, None), (False, "table_wise")])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_dense_gradient_is_named_and_late_ones_are_made_zero(
    bad: float, sharding_type: str | None, is_late: bool
) -> None:
    with read_late() if is_late else nullcontext():
        model = prepared(sharding_type=sharding_type)
        guard = FiniteGuard(model)
        guard.check_dense_gradients("lower step 1")  # none yet
        loss_of(model).backward()
        dense = {
            name: p for name, p in model.named_parameters() if ".embedding_bags." not in name and p.grad is not None
        }
        name, parameter = next((n, p) for n, p in dense.items() if "over_arch" in n)
        before = {own: p.grad.clone() for own, p in dense.items()}
        guard.check_dense_gradients("lower step 2")
        assert all(torch.equal(p.grad, before[own]) for own, p in dense.items())
        parameter.grad.view(-1)[0] = bad
        message = rf"^lower step 3, parameter '{name}': expected finite gradients, got nan or inf"
        with pytest.raises(NonFiniteError, match=message):
            guard.check_dense_gradients("lower step 3")
            assert all(not bool(p.grad.any()) for p in dense.values())
            guard.check_loss(torch.tensor(1.0), "upper step 3")


@pytest.mark.usefixtures("late")
def test_finite_gradients_whose_squares_are_not_stay() -> None:
    model = prepared()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    guard = FiniteGuard(model)
    guard.check_dense_gradients("lower step 1")
    guard.settle()
    assert all(bool((parameter.grad == 1e30).all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_of_every_width_are_made_zero(late: None, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2).to(dtype), nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -0.0)
    model[1].weight.grad[0] = float("nan")
    guard = FiniteGuard(model)
    guard.check_dense_gradients("lower step 1")
    assert all(not bool(parameter.grad.any()) for parameter in model.parameters())
    with pytest.raises(NonFiniteError, match=r"parameter '1\.weight'"):
        guard.settle()


flushing = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormals")


class Watched:
    """Batches that note at every epoch whether denormals are flushed where they are read."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches
        self.seen: list[bool] = []

    def __iter__(self) -> Iterator[Batch]:
        self.seen.append(is_flushing())
        return iter(self.batches)


@pytest.fixture
def watched() -> tuple[Recipe, Watched]:
    recipe = make_recipe()
    batches = Watched(list(recipe.data.train)[:2])
    return replace(recipe, data=replace(recipe.data, train=batches)), batches


@flushing
@pytest.mark.parametrize("before", [False, True])
def test_it_is_as_before_afterwards(before: bool) -> None:
    torch.set_flush_denormal(before)
    try:
        with flushing_denormals():
            with flushing_denormals():
                pass
            assert is_flushing()
        assert is_flushing() is before
    finally:
        torch.set_flush_denormal(False)


@flushing
def test_a_run_flushes() -> None:
    with process_group():
        assert is_flushing()
    assert not is_flushing()


@flushing
def test_plain_training_flushes(watched: tuple[Recipe, Watched], tmp_path: Path) -> None:
    recipe, batches = watched
    with process_group() as device:
        torch.set_flush_denormal(False)  # as in a program of somebody else's, whose group it is
        model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, device)
        train_plainly(model, optimizer, recipe, device, max_epochs=1, patience=1)
        assert not is_flushing()
    assert batches.seen == [True]


@flushing
def test_a_search_flushes(watched: tuple[Recipe, Watched], tmp_path: Path) -> None:
    recipe, batches = watched
    with process_group() as device:
        torch.set_flush_denormal(False)
        search(recipe, 10, tmp_path, device, settings=SearchSettings(num_blocks=3, epochs=1, patience=1))
        assert not is_flushing()
    assert batches.seen[-3:] == [True] * 3


class SearchEndedError(Exception):
    """Whoever looked at the request has stopped."""


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Signals that come to whoever had the handlers before."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in REQUESTS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", REQUESTS)
def test_a_request_is_noted_and_handed_on_if_nobody_looks_at_it(seen: list[int], number: int) -> None:
    with StopRequest() as request:
        assert not request.is_requested()
        signal.raise_signal(number)
        assert request.is_requested()
        assert request.number == number
        assert seen == []
    assert seen == [number]


def test_a_request_that_was_looked_at_is_over(seen: list[int]) -> None:
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        raise SearchEndedError
    assert seen == []


def test_a_second_signal_is_for_whoever_was_there_before(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the same one: the terminal's and the shell's
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
        monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGTERM, signal.SIGINT]
        raise SearchEndedError


def test_torchrun_passes_on_what_its_ranks_may_have_been_sent(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise SearchEndedError
    assert seen == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_ends_ends_where_the_signal_strikes(seen: list[int], number: int, code: int) -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # the same request does not come between
            cleaned.append(True)

    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as stopped, Ending():
        work()
    assert stopped.value.exit_code == code
    assert cleaned == [True]
    assert seen == []
    assert not isinstance(stopped.value, Exception)


def test_a_signal_while_all_is_ending_ends_the_process() -> None:
    if (child := os.fork()) == 0:
        signals.SAME_REQUEST_SECONDS = 0.0
        try:
            with Ending():
                try:
                    signal.raise_signal(signal.SIGTERM)
                finally:
                    signal.raise_signal(signal.SIGHUP)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGHUP


@pytest.mark.parametrize(("number", "ended_by"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, 0)])
@pytest.mark.parametrize("handlers", [StopRequest, Ending])
def test_a_forked_process_is_ended_by_sigterm_alone(handlers, number: int, ended_by: int) -> None:
    """Pools end their workers so; Ctrl-C is sent to all of a terminal's processes, and the parent's to deal with."""
    with handlers():
        if (child := os.fork()) == 0:
            signal.raise_signal(number)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == ended_by


@pytest.mark.parametrize("group", [process_group, launched_ranks])
def test_a_rank_without_torchrun_looks_for_the_others_too(
    group: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun and srun start ranks: one that took itself for the only process would do the work of all of them."""

    def meet(backend: str, **of_its_own: Any) -> None:
        assert "store" not in of_its_own, "it would meet nobody"
        raise ConnectionError("nobody there yet")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever ran before
    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConnectionError), group():
        pass
