"""Searches of models with unpooled tables: one budget with the pooled ones, through pruning, export and serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints

from dnis_torchrec import TrainTask, export
from dnis_torchrec.artifact.export import drop_in_
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import pooled_outputs, squared_norm
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import local_shards, table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import shard
from dnis_torchrec.training.state import TableDescription, TrainingState, describe_tables, model_tensors
from tests.reference import ReferenceTable, embedding_l2_reference
from tests.sequence_models import FEATURES, NAMES, ClickAndRating, interest, make_batch, two_outputs
from tests.tiny import Repeatable

CPU = torch.device("cpu")


def recipe(optimizer: str = "adam") -> Recipe:
    def split(first: int, number: int) -> Repeatable:
        return Repeatable([make_batch(seed) for seed in range(first, first + number)])

    return Recipe(
        model=interest(),
        data=DataSplits(train=split(0, 12), validation=split(20, 4), selection=split(30, 4), test=split(40, 4)),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer=optimizer,
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
        embedding_l2=0.01,
    )


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_search_ends_in_what_is_served(optimizer: str, tmp_path: Path, no_images: None, gloo: object) -> None:
    own = recipe(optimizer)
    settings = SearchSettings(num_blocks=2, epochs=2, patience=2)
    outcome = search(own, 3.0, tmp_path / "run", CPU, settings=settings)
    assert {name: table.pooling for name, table in outcome.scheme.tables.items()} == {
        "item": "none",
        "shop": "none",
        "user": "sum",
    }
    assert outcome.scheme.compression() >= 3.0
    path = export(outcome.model, outcome.scheme, tmp_path / "artifact")
    served = drop_in_(interest(), path).eval()
    batch = make_batch(50)
    wanted = outcome.model.eval()(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(served(batch.dense_features, batch.sparse_features), wanted)


def test_two_tasks_and_a_table_left_alone(tmp_path: Path, no_images: None, gloo: object) -> None:
    both = {"model": two_outputs(), "loss": None, "task": ClickAndRating(), "stop_on": "click_auc"}
    own = replace(recipe(), **both, leave_alone=("shop",))
    settings = SearchSettings(num_blocks=2, epochs=2, patience=2)
    outcome = search(own, 1.6, tmp_path / "run", CPU, settings=settings)
    assert outcome.scheme.compression() >= 1.6
    assert set(outcome.scheme.tables["shop"].bits.flatten().tolist()) == {32}
    path = export(outcome.model, outcome.scheme, tmp_path / "artifact")
    served = drop_in_(two_outputs(), path)
    found, wanted = (evaluate(TrainTask(m, own.task), own.data.test, own.task, CPU) for m in (served, outcome.model))
    assert {"loss", "click_auc", "rating_mse"} <= found.keys()
    assert found == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ValueError, match=r"table of Recipe\.leave_alone 'shopp': .* did you mean 'shop'"):
        replace(recipe(), leave_alone=("shopp",))


def test_the_penalty_counts_every_id_of_a_sample() -> None:
    model, batch = interest(), make_batch(3)
    kjt = batch.sparse_features
    with pooled_outputs(model) as outputs:
        model(batch.dense_features, kjt)
    reads = []
    for table, features in {**FEATURES, "user": ["user"]}.items():
        weight = dict(model.named_parameters())[NAMES[table]].detach().double()
        naive = ReferenceTable(weight, torch.ones(1, weight.shape[1]).double(), torch.zeros(len(weight)).long(), False)
        for feature in features:
            ids, lengths = kjt[feature].values().tolist(), kjt[feature].lengths().tolist()
            longest = max(lengths)
            for place in range(longest):  # the ids of a sample one by one, because they are not pooled
                starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
                bags = [
                    ids[start + place : start + place + 1] if place < n else []
                    for start, n in zip(starts, lengths, strict=False)
                ]
                reads.append((naive, bags, None))
    wanted = embedding_l2_reference(reads)
    torch.testing.assert_close(torch.as_tensor(squared_norm(outputs)).double().detach(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_the_pipeline_steps_as_a_loop_does_and_upper_steps_move_no_table(optimizer: str, gloo: object) -> None:
    own = recipe(optimizer)
    model, rest = shard(prepared_task(own), own, CPU)
    pipeline = BilevelTrainPipeline(model, rest, CPU)
    stream = BilevelStream(own.data.train, own.data.validation, LevelSchedule(warm_up_steps=2))
    before = states(model)
    for _ in range(5):
        taken = pipeline.upper_steps
        pipeline.progress(stream)
        after = states(model)
        moved = {name for name, value in after.items() if not value.equal(before[name])}
        if pipeline.upper_steps > taken:
            assert moved == {"alpha 4", "alpha 8"}
        else:
            assert "table item" in moved
            assert not moved & {"alpha 4", "alpha 8"}
        before = after
    assert pipeline.upper_steps == 1
    naive, optim = shard(prepared_task(own), own, CPU)
    naive.train()
    for batch in list(own.data.train)[:2]:
        optim.zero_grad()
        loss, _ = naive(batch)
        loss.backward()
        optim.step()
    first = states_after(own, optimizer, 2)
    for name, value in states(naive).items():
        torch.testing.assert_close(value, first[name], atol=1e-6, rtol=0)


def states_after(own: Recipe, optimizer: str, steps: int) -> dict[str, Tensor]:
    model, rest = shard(prepared_task(own), own, CPU)
    pipeline = BilevelTrainPipeline(model, rest, CPU)
    stream = BilevelStream(own.data.train, own.data.validation, LevelSchedule(warm_up_steps=steps))
    for _ in range(steps):
        pipeline.progress(stream)
    return states(model)


def prepared_task(own: Recipe, model: nn.Module | None = None) -> TrainTask:
    model = interest() if model is None else model
    tables = table_configs(model)
    counts = count_frequencies([batch.sparse_features for batch in own.data.train], tables)
    return TrainTask(prepare_(model, blocks_from_counts(counts, tables, num_blocks=2)), own.loss)


def states(model: nn.Module) -> dict[str, Tensor]:
    """Tables, alpha and dense weights."""
    wrappers = soft_selection_modules(model).values()
    found = {f"table {own.table}": own.weight.clone() for wrapper in wrappers for own in local_shards(wrapper)}
    alpha = next(iter(wrappers)).alpha
    found |= {f"alpha {dim}": alpha.of(dim).clone() for dim in alpha.dims}
    plain = get_unwrapped_module(model).model
    return found | {f"dense {name}": weight.detach().clone() for name, weight in plain.over.named_parameters()}


def test_frozen_sequences_stay_or_are_refused(gloo: object) -> None:
    own = recipe("rowwise_adagrad")
    own.model.sequences.embeddings["shop"].weight.requires_grad_(False)
    model, rest = shard(prepared_task(own, own.model), own, CPU)
    before = states(model)
    pipeline = BilevelTrainPipeline(model, rest, CPU)
    stream = BilevelStream(own.data.train, own.data.validation, LevelSchedule(warm_up_steps=2))
    for _ in range(4):
        pipeline.progress(stream)
    after = states(model)
    assert after["table shop"].equal(before["table shop"])
    assert not after["table item"].equal(before["table item"])

    task = prepared_task(own, interest())
    task.model.sequences.embedding_collection.embeddings["shop"].weight.requires_grad_(False)
    trained = DistributedModelParallel(task, device=CPU, sharders=default_sharders({"learning_rate": 0.1}))
    with pytest.raises(NotImplementedError, match=r"FQN 'model\.sequences'.*got tables \['shop'\]"):
        BilevelTrainPipeline(trained, rest, CPU)


@pytest.mark.parametrize("kinds", [("row_wise", "column_wise"), ("column_wise", "data_parallel")])
def test_a_checkpoint_brings_everything_back_in_another_sharding(
    kinds: tuple[str, str], tmp_path: Path, gloo: object
) -> None:
    one, two = (sharded_as(kind) for kind in kinds)
    for wrapper in soft_selection_modules(one).values():
        wrapper.alpha.of(8).uniform_(0.1, 1)
        for own in local_shards(wrapper):
            own.weight.uniform_(-1, 1)
    assert sorted(key for key in model_tensors(one) if "embeddings" in key) == []
    folder = CheckpointFolder(tmp_path)
    write_checkpoint(folder, 3, TrainingState(tensors=model_tensors(one), tables=described(one)), None)
    read_checkpoint(folder.latest(), TrainingState(tensors=model_tensors(two), tables=described(one)), None)
    batch = make_batch(5)
    torch.testing.assert_close(
        two.module(batch.dense_features, batch.sparse_features), one.module(batch.dense_features, batch.sparse_features)
    )


def described(model: nn.Module) -> dict[str, TableDescription]:
    """Tables, however their columns are cut."""
    return {name: replace(own, column_cuts=(0,)) for name, own in describe_tables(model).items()}


def sharded_as(kind: str) -> DistributedModelParallel:
    torch.manual_seed(len(kind))
    model = prepared_task(recipe()).model
    constraint = ParameterConstraints(sharding_types=[kind], min_partition=4)
    sharders = default_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    plan = make_sharding_plan(model, CPU, sharders, constraints=dict.fromkeys(NAMES, constraint))
    return shard_model(model, CPU, plan, sharders).eval()
