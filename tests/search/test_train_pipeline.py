"""BilevelTrainPipeline: levels kept apart, streams cycled, NaN stopped, equal to an unsharded hand-written loop."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.pipeline import AlphaOptimizer, BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.torchrec import fused_kernels
from dnis_torchrec.selection.wrapper import plain_state_dict, soft_selection_modules
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import shard
from tests.tiny import make_recipe

CPU = torch.device("cpu")
OPTIMIZERS = ("adam", "rowwise_adagrad")


def make_pipeline(optimizer: str = "adam", **settings):
    recipe = make_recipe(optimizer=optimizer)
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    blocks = blocks_from_counts(counts, tables, num_blocks=3)
    model, dense_optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, CPU)
    model.train()
    pipeline = BilevelTrainPipeline(model, dense_optimizer, CPU, **settings)
    return recipe, model, dense_optimizer, pipeline


def everything(model: nn.Module, optimizer) -> dict[str, torch.Tensor]:
    """Tables, dense weights and every optimizer state, dense and fused; alpha left out."""
    found = {f"model/{name}": value.clone() for name, value in _tensors(plain_state_dict(model))}
    for shard_ in (part for module in collections(model).values() for part in local_shards(module)):
        found[f"table/{shard_.table}"] = shard_.weight.clone()
    for kind, states in (("dense", optimizer), ("fused", model.fused_optimizer)):
        found |= {f"{kind}/{name}": value.clone() for name, value in _tensors(states.state_dict()["state"])}
    for number, kernel in enumerate(fused_kernels(model)):  # what Adam corrects its bias by
        found |= {f"kernel {number}/{name}": getattr(kernel, name).clone() for name in ("iter", "iter_cpu")}
    return found


def _tensors(tree, prefix: str = ""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _tensors(value, f"{prefix}{name}/")
        elif hasattr(value, "local_shards"):
            yield f"{prefix}{name}", value.local_shards()[0].tensor
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_upper_step_moves_alpha_and_nothing_else(gloo, optimizer: str) -> None:
    recipe, model, dense_optimizer, pipeline = make_pipeline(optimizer)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=2))
    for _ in range(7):
        pipeline.progress(stream)
    levels = []
    for _ in range(6):
        levels.append(pipeline.level)
        before, alpha = everything(model, dense_optimizer), pipeline.alpha.of(8).clone()
        pipeline.progress(stream)
        after = everything(model, dense_optimizer)
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert before.keys() == after.keys()
        if levels[-1] is Level.UPPER:
            assert not changed
            assert not torch.equal(alpha, pipeline.alpha.of(8))
        else:
            assert {"table/user", "table/genre"} <= changed
            assert torch.equal(alpha, pipeline.alpha.of(8))
    assert levels == [Level.LOWER, Level.UPPER] * 3 or levels == [Level.UPPER, Level.LOWER] * 3


def test_running_statistics_stand_still_in_upper_steps(gloo) -> None:
    recipe = make_recipe()
    recipe.model.dense_arch = nn.Sequential(recipe.model.dense_arch, nn.BatchNorm1d(8))
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    blocks = blocks_from_counts(counts, tables, num_blocks=3)
    model, optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, CPU)
    model.train()
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    for _ in range(6):
        level, before = pipeline.level if pipeline.contexts else Level.LOWER, norm.running_mean.clone()
        pipeline.progress(stream)
        assert torch.equal(before, norm.running_mean) == (level is Level.UPPER)
        assert norm.track_running_stats


def test_both_levels_are_pipelined(gloo, caplog: pytest.LogCaptureFixture) -> None:
    recipe, _, _, pipeline = make_pipeline()
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            pipeline.progress(stream)
            assert len(pipeline.batches) == 2  # the next two are on their way, of whichever level
            assert pipeline.contexts[0].input_dist_tensors_requests  # and the next one's input_dist has begun
    assert not [record for record in caplog.records if "NOT be pipelined" in record.getMessage()]
    assert [record for record in caplog.records if "will be pipelined" in record.getMessage()]


def test_equals_a_hand_written_loop_without_sharding(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    pipeline.alpha_optimizer.learning_rate = 0.05
    schedule = LevelSchedule(warm_up_steps=3)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, schedule)
    steps = 20
    losses = [float(pipeline.progress(stream)[0]) for _ in range(steps)]

    plain = make_recipe()
    tables = table_configs(plain.model)
    counts = count_frequencies((batch.sparse_features for batch in plain.data.train), tables)
    blocks = blocks_from_counts(counts, tables, num_blocks=3)
    task = TrainTask(prepare_(plain.model, blocks), plain.loss)
    optimizer = torch.optim.Adam(task.parameters(), lr=1e-2)
    wrapper = task.model.sparse_arch.embedding_bag_collection
    upper = AlphaOptimizer(wrapper.alpha, blocks)
    upper.learning_rate = 0.05
    expected, batches = [], BilevelStream(plain.data.train, plain.data.validation, schedule)
    for _ in range(steps):
        batch = next(batches)
        if batches.last_level is Level.LOWER:
            optimizer.zero_grad()
            loss, _ = task(batch)
            loss.backward()
            optimizer.step()
        else:
            with wrapper.alpha.upper_level() as hits:
                loss, _ = task(batch)
                (gradient,) = torch.autograd.grad(loss, [wrapper.alpha.of(8)])
            upper.step({8: gradient}, hits)
        expected.append(float(loss.detach()))
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pipeline.alpha.of(8), wrapper.alpha.of(8), atol=1e-5, rtol=0)
    assert (pipeline.lower_steps, pipeline.upper_steps) == (12, 8)


def test_detached_lends_the_model_and_training_goes_on(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    undisturbed = make_pipeline()
    other = BilevelStream(undisturbed[0].data.train, undisturbed[0].data.validation, LevelSchedule(warm_up_steps=1))
    for step in range(8):
        if step == 4:
            with pipeline.detached() as model, torch.no_grad():
                assert not model.training
                assert [own.bag_splitter for own in soft_selection_modules(model).values()] == [None]  # shards split
                assert not [name for name, _ in get_unwrapped_module(model).named_children() if "." in name]
                model(recipe.data.test.batches[0])
            assert model.training
        got, expected = pipeline.progress(stream)[0], undisturbed[3].progress(other)[0]
        assert torch.equal(got, expected)


def test_needs_a_prepared_model(gloo) -> None:
    recipe = make_recipe()
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    with pytest.raises(RuntimeError, match=r"expected a prepared model, got no wrapper; call prepare_"):
        BilevelTrainPipeline(model, optimizer, CPU)


def test_needs_a_stream_that_knows_levels(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    with pytest.raises(TypeError, match="expected a BilevelStream, got list_iterator"):
        pipeline.progress(iter(recipe.data.train.batches))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nan_in_a_table_stops_the_run_and_names_it(gloo, optimizer: str) -> None:
    recipe, model, _, pipeline = make_pipeline(optimizer)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=100))
    pipeline.progress(stream)
    for module in collections(model).values():
        next(part for part in local_shards(module) if part.table == "genre").weight[:] = float("nan")
    with pytest.raises(NonFiniteError, match=r"lower step 1, table 'genre': expected a finite loss, got nan"):
        pipeline.progress(stream)


def _progress(pipeline: BilevelTrainPipeline, stream: BilevelStream[Batch], *, steps: int) -> None:
    for _ in range(steps):
        pipeline.progress(stream)


def _poison(monkeypatch: pytest.MonkeyPatch, model: nn.Module, value: float) -> None:
    """Makes the loss finite but its gradient not."""
    task = next(module for module in model.modules() if isinstance(module, TrainTask))
    original = task.task.criterion.forward

    def forward(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = original(predictions, labels)
        loss.register_hook(lambda gradient: gradient * value)
        return loss

    monkeypatch.setattr(task.task.criterion, "forward", forward)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_infinite_gradient_is_stopped_before_any_weight_takes_it(gloo, monkeypatch, optimizer: str) -> None:
    recipe, model, dense_optimizer, pipeline = make_pipeline(optimizer)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=100))
    pipeline.progress(stream)
    before = everything(model, dense_optimizer)
    _poison(monkeypatch, model, float("inf"))
    with pytest.raises(NonFiniteError, match=r"lower step 1, (table|parameter) '.*': expected finite gradients"):
        pipeline.progress(stream)
    after = everything(model, dense_optimizer)
    weights = [name for name in before if not name.startswith("kernel ")]  # those have counted the forward pass
    assert all(torch.equal(before[name], after[name]) for name in weights)


def test_infinite_alpha_gradient_is_stopped(gloo, monkeypatch) -> None:
    recipe, model, optimizer, pipeline = make_pipeline()
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    pipeline.progress(stream)
    pipeline.progress(stream)
    _poison(monkeypatch, model, float("nan"))
    alpha = pipeline.alpha.of(8).clone()
    monkeypatch.setattr(pipeline, "_backward", lambda losses: None)
    with pytest.raises(NonFiniteError, match="upper step 0"):
        _progress(pipeline, stream, steps=10)
    assert torch.equal(alpha, pipeline.alpha.of(8))
    assert all(bool(value.isfinite().all()) for value in everything(model, optimizer).values())


def test_an_empty_stream_is_refused(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    stream: BilevelStream[Batch] = BilevelStream(recipe.data.train, [], LevelSchedule(warm_up_steps=1))
    with pytest.raises(ValueError, match="validation stream: expected at least one batch, got none"):
        _progress(pipeline, stream, steps=4)


def test_lower_steps_equal_torchrecs_own_pipeline(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1000))
    plain = make_recipe()
    model, optimizer = shard(TrainTask(plain.model, plain.loss), plain, CPU)
    model.train()
    own, batches = TrainPipelineSparseDist(model, optimizer, CPU), iter(plain.data.train)
    for _ in range(10):
        torch.testing.assert_close(pipeline.progress(stream)[0], own.progress(batches)[0], atol=1e-6, rtol=1e-5)
