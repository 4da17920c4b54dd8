"""A model sharded and trained: optimizers, rates, L2, the best epoch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ops.select import are_compiled
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.shards import TableShard, collections, local_shards, table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.torchrec_inputs import DetachableTrainPipeline
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.loop import PlainEvents, train_plainly
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import set_learning_rates_, shard
from examples.paper.pruning import ValueMask
from tests.models import kernels_of
from tests.reference import Bags, ReferenceTable, embedding_l2_reference
from tests.tiny import ROWS, make_batch, make_collection, make_recipe

CPU = torch.device("cpu")


def shards_of(model: nn.Module) -> dict[str, TableShard]:
    return {part.table: part for module in collections(model).values() for part in local_shards(module)}


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_sharding_keeps_the_weights_that_the_model_came_with(gloo, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    before = {name: part.weight.clone() for name, part in shards_of(recipe.model).items()}
    model, _ = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    after = shards_of(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name].weight) for name, weight in before.items())


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
        shard(TrainTask(recipe.model, recipe.loss), recipe, torch.device("cuda"), replicated=True)
    assert [own.sharding_types == ["data_parallel"] for own in asked] == [is_dense] * len(ROWS)
    assert [own.compute_kernels == ["dense"] for own in asked] == [is_dense] * len(ROWS)


@pytest.mark.parametrize("most_ids", [1, 3])
def test_multi_hot_searches_have_a_kernel_for_every_table(gloo, most_ids: int) -> None:
    recipe = make_recipe(optimizer="rowwise_adagrad")
    configs = table_configs(recipe.model)
    features = [feature for config in configs for feature in config.feature_names]
    rows = {config.name: torch.ones(config.num_embeddings, dtype=torch.int64) for config in configs}
    counts = FrequencyCounts(rows, dict.fromkeys(features, most_ids), 30)
    prepared = prepare_(recipe.model, blocks_from_counts(counts, configs, num_blocks=2))
    model, _ = shard(TrainTask(prepared, recipe.loss), recipe, CPU)
    assert len(kernels_of(model)) == (1 if most_ids == 1 else len(configs))


@pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")
def test_lookups_of_a_multi_hot_search_read_one_key_per_feature(gloo) -> None:
    """Which changes nothing that a model computes, with a pipeline or without."""
    recipe = make_recipe(optimizer="rowwise_adagrad")
    configs, batch = table_configs(recipe.model), next(iter(recipe.data.train))
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), configs)
    prepared = prepare_(recipe.model, blocks_from_counts(counts, configs, num_blocks=2))
    (wrapper,) = soft_selection_modules(prepared).values()
    for dim in wrapper.alpha.dims:
        wrapper.alpha.of(dim).uniform_(0, 1)
    expected = TrainTask(prepared, recipe.loss)(batch)[1][1]
    model, _ = shard(TrainTask(prepared, recipe.loss), recipe, CPU)
    keys = [kernel.config.feature_names() for kernel in kernels_of(model)]
    assert sorted(keys) == sorted([feature] for config in configs for feature in config.feature_names)
    torch.testing.assert_close(model(batch)[1][1], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_of_rows_beside_the_tables_learn_at_the_tables_rate(gloo, prefix: str) -> None:
    recipe = make_recipe()
    name = next(own for own, _ in recipe.model.named_parameters() if own.startswith("over_arch") and "bias" in own)
    recipe = dataclasses.replace(
        recipe, table_learning_rate=0.5, dense_learning_rate=0.01, row_weights=(prefix + name,)
    )
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
    weights, rows = [], ""
    for tables, dense in ((0.5, 0.01), (0.001, 0.002)):
        recipe = make_recipe(optimizer=optimizer)
        rows = next(own for own, _ in recipe.model.named_parameters() if own.startswith("over_arch") and "bias" in own)
        rates = {"table_learning_rate": tables, "dense_learning_rate": dense}
        recipe = dataclasses.replace(recipe, row_weights=(rows,), **rates)
        model, rest = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
        if tables != 0.5:
            set_learning_rates_(model, rest, tables=0.5, dense=0.01, rows=0.25)
        of_rows = next(part for own, part in model.named_parameters() if own.endswith(rows))
        before = of_rows.detach().clone()
        model(next(iter(recipe.data.train)))[0].backward()
        rest.step()  # Adam's first step is as long as its rate, wherever there is a gradient
        length = 0.5 if tables == 0.5 else 0.25
        assert float((of_rows.detach() - before).abs().max()) == pytest.approx(length, rel=1e-3)
        own_tables = {table: part.weight for table, part in shards_of(model).items()}
        weights.append({**own_tables, **{own: part.detach() for own, part in model.named_parameters()}})
    assert all(torch.equal(weight, weights[1][own]) for own, weight in weights[0].items() if not own.endswith(rows))


def test_weights_of_rows_that_there_are_not_are_refused(gloo) -> None:
    recipe = dataclasses.replace(make_recipe(), row_weights=("first_order.weight",))
    with pytest.raises(
        ValueError, match=r"expected a known parameter of Recipe\.row_weights, got 'first_order\.weight'"
    ):
        shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)


class OnlyTables(nn.Module):
    """A model without a dense weight."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = make_collection()

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """The sum of all pooled values."""
        return self.collection(sparse_features).values().sum(1)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_model_of_tables_alone_trains(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = dataclasses.replace(make_recipe(optimizer=optimizer), model=OnlyTables())
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
    set_learning_rates_(model, optimizer, tables=10.0, dense=10.0, rows=10.0)
    losses = []
    second = train_plainly(
        model,
        optimizer,
        recipe,
        CPU,
        max_epochs=9,
        patience=1,
        starts_trained=starts_trained,
        events=PlainEvents(on_epoch=lambda record: losses.append(record.selection_loss)),
    )
    assert min(losses) > first.selection_loss
    assert len(losses) == losses.index(min(losses)) + 2  # stopped by its own epochs, whatever went before
    assert (second.best_epoch == -1) == starts_trained
    assert second.selection_loss == (pytest.approx(first.selection_loss, abs=1e-7) if starts_trained else min(losses))
    kept = all(torch.equal(part.weight, before[name]) for name, part in shards_of(model).items())
    assert kept == starts_trained


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_labels_that_are_no_classes_have_no_auc(share: float, gloo) -> None:
    recipe = make_recipe()
    batch = make_batch(3, 1)
    batch.labels = torch.tensor([0.0, 1.0, share])
    task = TrainTask(recipe.model, recipe.loss)
    message = rf"^evaluation split: expected labels 0 or 1, got {share}"
    with pytest.raises(ValueError, match=message):
        evaluate(task, [batch], recipe.loss, CPU)
    assert evaluate(TrainTask(recipe.model, nn.MSELoss()), [batch], nn.MSELoss(), CPU)["mse"] > 0


def test_metrics_are_those_of_all_samples_together(gloo) -> None:
    recipe = make_recipe()
    task = TrainTask(recipe.model, recipe.loss)
    metrics = evaluate(task, recipe.data.test, recipe.loss, CPU)
    with torch.no_grad():
        outputs = [task(batch)[1] for batch in recipe.data.test]
    scores, labels = torch.cat([o[1] for o in outputs]), torch.cat([batch.labels for batch in recipe.data.test])
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    assert metrics["auc"] == pytest.approx(float(wins.mean()), abs=1e-6)
    expected = nn.functional.binary_cross_entropy_with_logits(scores, labels)
    assert metrics["logloss"] == pytest.approx(float(expected), abs=1e-6)
    assert metrics["loss"] == pytest.approx(float(expected), abs=1e-6)
    squared = evaluate(TrainTask(recipe.model, nn.MSELoss()), recipe.data.test, nn.MSELoss(), CPU)
    assert squared["mse"] == pytest.approx(float((scores - labels).square().mean()), abs=1e-6)
    assert (primary_metric(nn.MSELoss()), primary_metric(recipe.loss)) == (("mse", False), ("auc", True))


def test_an_empty_split_is_refused(gloo) -> None:
    recipe = make_recipe()
    with pytest.raises(ValueError, match="evaluation split: expected at least one sample, got none"):
        evaluate(TrainTask(recipe.model, recipe.loss), [], recipe.loss, CPU)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss()])
def test_a_prediction_that_is_not_finite_is_refused(gloo, loss: nn.Module, bad: float) -> None:
    recipe = make_recipe()
    batches = [make_batch(8, seed) for seed in range(2)]
    batches[1].dense_features[3] = bad
    with pytest.raises(NonFiniteError, match="evaluation split: expected finite predictions, got nan or inf"):
        evaluate(TrainTask(recipe.model, loss), batches, loss, CPU)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_clicks_of_one_class_have_no_auc_no_ne_and_no_calibration(gloo, label: float) -> None:
    recipe = make_recipe()
    batches = [dataclasses.replace(batch, labels=torch.full_like(batch.labels, label)) for batch in recipe.data.test]
    found = evaluate(TrainTask(recipe.model, recipe.loss), batches, recipe.loss, CPU)
    assert set(found) == {"loss", "logloss"}


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
    events = PlainEvents(on_step=steps.append)
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


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_masked_fine_tuning_moves_what_is_retained_and_nothing_else(gloo, tmp_path: Path, optimizer: str) -> None:
    recipe = make_recipe(optimizer=optimizer)
    model, rest = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    tables = shards_of(model)
    for part in tables.values():
        part.weight[:, ::2] = 0
    before = {name: part.weight.clone() for name, part in tables.items()}
    train_plainly(model, rest, recipe, CPU, max_epochs=2, patience=2, held=ValueMask(model))
    for name, part in tables.items():
        assert not bool(part.weight[:, ::2].any())
        assert not torch.equal(part.weight[:, 1::2], before[name][:, 1::2])


def test_a_loss_that_is_not_finite_stops_the_run(gloo, tmp_path: Path) -> None:
    recipe = make_recipe()
    recipe.data.train.batches[3].dense_features[:] = math.nan
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    with pytest.raises(NonFiniteError, match=r"epoch 0.*expected a finite loss, got nan"):
        train_plainly(model, optimizer, recipe, CPU, max_epochs=2, patience=1)


CPU_OF_EMBEDDING_L2 = torch.device("cpu")
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
    tables = [
        EmbeddingBagConfig(
            name=table, num_embeddings=6, embedding_dim=DIM, feature_names=list(features), pooling=pooling
        )
        for table, features in READS.items()
    ]
    return Linear(EmbeddingBagCollection(tables=tables, is_weighted=is_weighted))


def batch_of(bags: dict[str, Bags], weights: dict[str, list[list[float]]] | None) -> Batch:
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
    """Of the loss to every table of a task that is not sharded."""
    task.zero_grad()
    task(batch)[0].backward()
    return {
        name.split(".")[-2]: part.grad.double().clone()
        for name, part in task.named_parameters()
        if ".embedding_bags." in name
    }


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
    configs = table_configs(model)
    alpha = {name: torch.ones(6, DIM, dtype=torch.float64) for name in READS}
    if is_selected:
        counts = count_frequencies([batch.sparse_features], configs)
        blocks = blocks_from_counts(counts, configs, num_blocks=2)
        prepare_(model, blocks, multi_hot_features=["watched", "wanted", "tag"])
        (wrapper,) = soft_selection_modules(model).values()
        wrapper.alpha.of(DIM).uniform_(0, 1)
        for name in READS:
            rows = blocks.first_alpha_row(name) + blocks.routings[name].all_blocks()
            alpha[name] = wrapper.alpha.of(DIM).double()[rows]
    plain, penalised = (
        table_gradients(TrainTask(model, nn.MSELoss(), embedding_l2=value), batch) for value in (0.0, L2)
    )
    oracles = {
        name: ReferenceTable(weight[name].requires_grad_(), alpha[name], torch.arange(6), pooling == PoolingType.MEAN)
        for name in READS
    }
    reads = [(oracles[name], bags[f], weights[f] if is_weighted else None) for name, fs in READS.items() for f in fs]
    (L2 * embedding_l2_reference(reads)).backward()
    for name, oracle in oracles.items():
        torch.testing.assert_close(penalised[name] - plain[name], oracle.weight.grad, atol=1e-5, rtol=1e-4)


def test_the_reported_loss_is_that_of_the_data_alone(gloo) -> None:
    recipe, batch = make_recipe(), make_batch(16, 1)
    plain, penalised = (TrainTask(recipe.model, recipe.loss, embedding_l2=value) for value in (0.0, 100.0))
    (loss, (reported, *_)), (total, (also_reported, *_)) = plain(batch), penalised(batch)
    assert float(reported) == float(also_reported) == float(loss.detach())
    assert float(total.detach()) > float(loss.detach()) + 1
    assert not any(module._forward_hooks for module in recipe.model.modules())
    evaluated = [evaluate(task, recipe.data.test, recipe.loss, CPU_OF_EMBEDDING_L2) for task in (plain, penalised)]
    assert evaluated[0] == evaluated[1]
    assert float(penalised.eval()(batch)[0].detach()) == float(loss.detach())


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_values_that_are_no_penalty_are_refused(value: float) -> None:
    message = r"embedding_l2: expected a finite number >= 0, got .*; 0 leaves embeddings alone"
    with pytest.raises(ValueError, match=rf"^{message}"):
        TrainTask(nn.Identity(), nn.MSELoss(), embedding_l2=value)
    with pytest.raises(ValueError, match=rf"^{message}"):
        dataclasses.replace(make_recipe(), embedding_l2=value)


def sharded_tables(model: nn.Module) -> dict[str, Tensor]:
    return {part.table: part.weight.clone() for module in collections(model).values() for part in local_shards(module)}


def test_the_fused_kernel_steps_by_the_exact_gradient(gloo) -> None:
    """Row-wise Adagrad by hand: a row's first step is the gradient over the root mean square of the row."""
    recipe, batch = dataclasses.replace(make_recipe(optimizer="rowwise_adagrad"), embedding_l2=L2), make_batch(64, 1)
    before = {table: bag.weight.detach().clone() for table, bag in bags_of(recipe.model).items()}
    task = TrainTask(recipe.model, recipe.loss, embedding_l2=recipe.embedding_l2)
    gradients = table_gradients(copy.deepcopy(task), batch)
    model, _ = shard(task, recipe, CPU_OF_EMBEDDING_L2)
    model.train()
    model(batch)[0].backward()
    for table, weight in sharded_tables(model).items():
        gradient = gradients[table]
        step = gradient / (gradient.square().mean(dim=1, keepdim=True).sqrt() + 1e-8)
        expected = before[table] - recipe.table_learning_rate * step
        torch.testing.assert_close(weight, expected.float(), atol=2e-6, rtol=1e-5)


def bags_of(model: nn.Module) -> dict[str, nn.EmbeddingBag]:
    return {name: bag for module in collections(model).values() for name, bag in module.embedding_bags.items()}


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_pipeline_steps_as_the_bare_model_does(gloo, optimizer: str, is_prepared: bool) -> None:
    """The pipeline traces the task's forward pass and starts lookups before it."""
    found = []
    for is_pipelined in (False, True):
        recipe = make_recipe(optimizer=optimizer)
        if is_prepared:
            configs = table_configs(recipe.model)
            counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), configs)
            prepare_(recipe.model, blocks_from_counts(counts, configs, num_blocks=3))
            for wrapper in soft_selection_modules(recipe.model).values():
                wrapper.alpha.of(8).uniform_(0.2, 1, generator=torch.Generator().manual_seed(1))
        model, rest = shard(TrainTask(recipe.model, recipe.loss, embedding_l2=L2), recipe, CPU_OF_EMBEDDING_L2)
        model.train()
        batches = iter(recipe.data.train.batches[:3])
        if is_pipelined:
            pipeline = DetachableTrainPipeline(model, rest, CPU_OF_EMBEDDING_L2, pipeline_postproc=True)
            for _ in range(3):
                pipeline.progress(batches)
            pipeline.detach()
        else:
            for batch in batches:
                rest.zero_grad()
                model(batch)[0].backward()
                rest.step()
        found.append(sharded_tables(model))
    for table, weight in found[0].items():
        torch.testing.assert_close(found[1][table], weight, atol=1e-6, rtol=1e-5)


def test_upper_steps_use_the_loss_of_the_data_alone(gloo, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe()
    configs = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), configs)
    prepare_(recipe.model, blocks_from_counts(counts, configs, num_blocks=3))
    penalised: list[bool] = []
    forward = TrainTask.forward

    def watched(task: TrainTask, batch: Batch) -> object:
        loss, output = forward(task, batch)
        if isinstance(loss, Tensor) and batch is not None:
            penalised.append(not torch.equal(loss.detach(), output[0]))
        return loss, output

    model, rest = shard(TrainTask(recipe.model, recipe.loss, embedding_l2=L2), recipe, CPU_OF_EMBEDDING_L2)
    model.train()
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    pipeline = BilevelTrainPipeline(model, rest, CPU_OF_EMBEDDING_L2)
    pipeline.progress(stream)
    monkeypatch.setattr(TrainTask, "forward", watched)
    while pipeline.upper_steps == 0:
        del penalised[:]
        pipeline.progress(stream)
    assert penalised == [False]
    pipeline.progress(stream)
    assert penalised[-1]  # the next lower step again
