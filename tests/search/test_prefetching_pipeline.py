"""BilevelTrainPipeline over tables that it prefetches: the numbers that it has without, no cache line locked.

With the caches of `row_caches` here; with FBGEMM's own, on GPUs, in distributed/test_sharding_ranks.py ("cached").
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from dnis_torchrec.allocation.axes import rotate_
from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search import started as started_module
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.plan import make_sharding_plan
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import fold_, prepare_
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training import shard as sharding_of_training
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import shard
from dnis_torchrec.training.state import snapshot, take_
from examples.paper.pruning import ValueMask
from tests.row_caches import caches_of, counting_locks, plan_caches_
from tests.small_models import operators
from tests.tiny import make_recipe

CPU = torch.device("cpu")
STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def locks() -> Iterator[None]:
    """For all tests."""
    with counting_locks():
        yield


def prepared(*, cached: bool):
    """Recipe, sharded model, optimizer and caches."""
    recipe = make_recipe(optimizer="rowwise_adagrad")
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    blocks = blocks_from_counts(counts, tables, num_blocks=3)
    with operators(compiled=False):  # as on a GPU, where tables can be cached
        sharded, optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, CPU)
    if cached:
        plan_caches_(sharded)
    return recipe, sharded.train(), optimizer, caches_of(sharded)


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {part.table: part.weight for module in collections(model).values() for part in local_shards(module)}


def run(pipeline: BilevelTrainPipeline, recipe: Recipe, schedule: LevelSchedule) -> list[torch.Tensor]:
    """Losses of the steps, and of an evaluation between them."""
    stream, losses = BilevelStream(recipe.data.train, recipe.data.validation, schedule), []
    for step in range(STEPS):
        losses.append(pipeline.progress(stream)[0].detach())
        if step == STEPS // 2:
            with pipeline.detached() as model:
                losses.append(torch.tensor(evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"]))
    return losses


def test_the_numbers_are_those_without_prefetching(gloo) -> None:
    schedule, found = LevelSchedule(warm_up_steps=2), []
    for cached in (False, True):
        recipe, model, optimizer, _ = prepared(cached=cached)
        pipeline = BilevelTrainPipeline(model, optimizer, CPU)
        pipeline.alpha_optimizer.learning_rate = 0.05
        losses = run(pipeline, recipe, schedule)
        found.append({"losses": torch.stack(losses), "alpha": pipeline.alpha.of(8).clone(), **tables_of(model)})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-6)
    assert (found[0]["alpha"] < 1).any()


@pytest.mark.parametrize("warm_up_steps", [1, 3, STEPS])
def test_locked_is_what_was_prefetched_for_the_next_batch_and_nothing_else(gloo, warm_up_steps: int) -> None:
    recipe, model, optimizer, caches = prepared(cached=True)
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=warm_up_steps))
    for step in range(STEPS):
        if step == 4:
            with pipeline.detached() as lent:
                assert not any(cache.kernel.lxu_cache_locking_counter.any() for cache in caches)
                evaluate(lent, recipe.data.selection, recipe.loss, CPU)
                assert not any(cache.kernel.lxu_cache_locking_counter.any() for cache in caches)
            assert all(cache.kernel.lxu_cache_locations_list for cache in caches)
        if step == 7:
            model.eval()
        pipeline.progress(stream)
        model.train()
        for cache in caches:
            assert cache.kernel.lxu_cache_locations_list
            assert torch.equal(cache.kernel.lxu_cache_locking_counter, cache.of_next_batch())
    assert caches
    assert not any(cache.wrong for cache in caches)
    pipeline.detach()
    for cache in caches:
        assert not cache.kernel.lxu_cache_locking_counter.any()
        assert not cache.kernel.lxu_cache_locations_list


def test_rows_are_fetched_between_the_forward_pass_before_and_its_backward(gloo) -> None:
    recipe, model, optimizer, caches = prepared(cached=True)
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=2))
    for cache in caches:
        cache.events.clear()
    for _ in range(4):
        pipeline.progress(stream)
        assert pipeline.contexts[0].module_input_post_prefetch  # the next batch's rows are there
        assert pipeline.contexts[1].fused_splits_awaitables  # and the input_dist of the one behind it has begun
    lower, upper = ["forward", "prefetch", "backward"], ["forward", "prefetch"]
    expected = ["prefetch", *lower, *lower, *lower, *upper]
    assert pipeline.upper_steps == 1
    for cache in caches:
        assert cache.events == expected


def test_a_stream_that_ends_is_worked_off(gloo) -> None:
    recipe, model, optimizer, caches = prepared(cached=True)
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    stream = Ending(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=1))
    for _ in range(Ending.NUM_BATCHES):
        pipeline.progress(stream)
    with pytest.raises(StopIteration):
        pipeline.progress(stream)
    assert pipeline.lower_steps + pipeline.upper_steps == Ending.NUM_BATCHES
    assert not any(cache.kernel.lxu_cache_locking_counter.any() for cache in caches)


class Ending(BilevelStream):
    """A stream of a few batches."""

    NUM_BATCHES = 5
    given = 0

    def __next__(self):
        self.given += 1
        if self.given > self.NUM_BATCHES:
            raise StopIteration
        return super().__next__()


def test_bags_of_prefetched_tables_are_split_before_their_lookup(gloo) -> None:
    """FBGEMM looks up the very ids that were prefetched, in their order."""
    for cached in (False, True):
        _, model, optimizer, _ = prepared(cached=cached)
        (wrapper,) = soft_selection_modules(model).values()
        assert wrapper.bag_splitter is not None
        BilevelTrainPipeline(model, optimizer, CPU)
        assert (wrapper.bag_splitter is not None) == cached


def test_whoever_writes_to_tables_finds_their_rows_there_and_leaves_no_older_ones(gloo) -> None:
    _, model, _, caches = prepared(cached=True)
    for cache in caches:
        cache.events.clear()
    with writing_to_tables(model):
        assert all(cache.events == ["flush"] for cache in caches)
    assert all(cache.events == ["flush", "purge"] for cache in caches)


@pytest.mark.parametrize("write_", ["fold_", "mask", "rotate_", "take_"])
def test_everything_that_writes_to_tables_says_so(
    gloo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_: str
) -> None:
    recipe, model, optimizer, caches = prepared(cached=True)
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    mask = ValueMask(model)
    saved = snapshot(model)
    for cache in caches:
        cache.events.clear()
    {
        "fold_": lambda: fold_(model),
        "mask": mask.hold_,
        "rotate_": lambda: rotate_(model, counts, optimizer),
        "take_": lambda: take_(model, saved),
    }[write_]()
    for cache in caches:
        assert cache.events.index("flush") < cache.events.index("purge")
        assert {*cache.events} == {"flush", "purge"}


@pytest.mark.parametrize("prefetched", [False, True])
def test_a_search_sets_cached_tables_up_for_prefetching(
    gloo, monkeypatch: pytest.MonkeyPatch, prefetched: bool
) -> None:
    plans = []

    def plan_with_a_cache(*args, **settings):
        plan = make_sharding_plan(*args, **settings)
        plans.append({table: own for part in plan.plan.values() for table, own in part.items()})
        plans[0]["user"].compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        return plan

    monkeypatch.setattr(sharding_of_training, "make_sharding_plan", plan_with_a_cache)
    recipe = make_recipe(optimizer="rowwise_adagrad")
    shard(TrainTask(recipe.model, recipe.loss), recipe, CPU, prefetched=prefetched)
    cache_params = {table: own.cache_params for table, own in plans[0].items()}
    assert {table for table, own in cache_params.items() if own is not None} == ({"user"} if prefetched else set())
    if prefetched:
        assert cache_params["user"].prefetch_pipeline


def test_a_search_prefetches_where_the_tables_are_set_up_for_it(gloo, monkeypatch, tmp_path) -> None:
    made = []

    def shard_with_caches(*args, **settings):
        model, optimizer = shard(*args, **settings)
        plan_caches_(model)
        made.extend(caches_of(model))
        return model, optimizer

    monkeypatch.setattr(started_module, "shard", shard_with_caches)
    recipe = make_recipe(optimizer="rowwise_adagrad")
    with operators(compiled=False):  # as on a GPU, where tables can be cached
        outcome = search(recipe, 10, tmp_path, CPU, settings=SearchSettings(num_blocks=3, epochs=1))
    assert outcome.history
    assert made
    for cache in made:
        assert cache.events.count("prefetch") >= cache.events.count("forward") > cache.events.count("backward")
        assert not cache.wrong
