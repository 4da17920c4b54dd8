"""The L2 penalty on looked-up embeddings: exact for every pooling and kernel, in lower steps and not in upper ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.torchrec_inputs import DetachableTrainPipeline
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import shard
from tests.reference import Bags, ReferenceTable, embedding_l2_reference
from tests.tiny import make_batch, make_recipe

CPU = torch.device("cpu")
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
    evaluated = [evaluate(task, recipe.data.test, recipe.loss, CPU) for task in (plain, penalised)]
    assert evaluated[0] == evaluated[1]
    assert float(penalised.eval()(batch)[0].detach()) == float(loss.detach())


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_values_that_are_no_penalty_are_refused(value: float) -> None:
    message = r"embedding_l2: expected a finite number >= 0, got .*; 0 leaves embeddings alone"
    with pytest.raises(ValueError, match=rf"^{message}"):
        TrainTask(nn.Identity(), nn.MSELoss(), embedding_l2=value)
    with pytest.raises(ValueError, match=rf"^Recipe\.{message}"):
        dataclasses.replace(make_recipe(), embedding_l2=value)


def sharded_tables(model: nn.Module) -> dict[str, Tensor]:
    return {part.table: part.weight.clone() for module in collections(model).values() for part in local_shards(module)}


def test_the_fused_kernel_steps_by_the_exact_gradient(gloo) -> None:
    """Row-wise Adagrad by hand: a row's first step is the gradient over the root mean square of the row."""
    recipe, batch = dataclasses.replace(make_recipe(optimizer="rowwise_adagrad"), embedding_l2=L2), make_batch(64, 1)
    before = {table: bag.weight.detach().clone() for table, bag in bags_of(recipe.model).items()}
    task = TrainTask(recipe.model, recipe.loss, embedding_l2=recipe.embedding_l2)
    gradients = table_gradients(copy.deepcopy(task), batch)
    model, _ = shard(task, recipe, CPU)
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
        model, rest = shard(TrainTask(recipe.model, recipe.loss, embedding_l2=L2), recipe, CPU)
        model.train()
        batches = iter(recipe.data.train.batches[:3])
        if is_pipelined:
            pipeline = DetachableTrainPipeline(model, rest, CPU, pipeline_postproc=True)
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

    model, rest = shard(TrainTask(recipe.model, recipe.loss, embedding_l2=L2), recipe, CPU)
    model.train()
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    pipeline = BilevelTrainPipeline(model, rest, CPU)
    pipeline.progress(stream)
    monkeypatch.setattr(TrainTask, "forward", watched)
    while pipeline.upper_steps == 0:
        del penalised[:]
        pipeline.progress(stream)
    assert penalised == [False]
    pipeline.progress(stream)
    assert penalised[-1]  # the next lower step again
