"""Both levels in one pipeline: steps to the bit, what they leave alone, what stops them, caches, sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask, collect_outputs, squared_norm
from dnis_torchrec.search import search as search_module
from dnis_torchrec.search.loop import SearchLoop
from dnis_torchrec.search.pipeline import AlphaOptimizer, BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.plan import default_sharders
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.torchrec import fused_kernels, writing_to_tables
from dnis_torchrec.selection.wrapper import plain_state_dict, soft_selection_modules
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import shard
from tests import models
from tests.reference import ReferenceTable, embedding_l2_reference, normalised_reference
from tests.tiny import Repeatable, make_recipe, read_late

DIM = 4
HIT = torch.tensor([True, True, True])


def make_optimizer(*, rate: float, **settings: float) -> tuple[Tensor, AlphaOptimizer]:
    """The alpha of one table of three blocks, and what steps it."""
    table = EmbeddingBagConfig(name="t", num_embeddings=60, embedding_dim=DIM, feature_names=["f"])
    counts = FrequencyCounts({"t": torch.arange(60, 0, -1)}, {"f": 1}, 100)
    blocks = blocks_from_counts(counts, [table], num_blocks=3, least_rows=1)
    alpha = Alpha(blocks.alpha_shapes)
    optimizer = AlphaOptimizer(alpha, blocks, **settings)
    optimizer.learning_rate = rate
    return alpha.of(DIM), optimizer


def step_reference(
    alpha: list[list[float]],
    average: list[list[float]],
    fresh: Tensor,
    hits: Sequence[bool],
    dead: Sequence[Sequence[bool]],
    options: tuple[float, float, float],
) -> None:
    """One upper step of lists of lists, in place."""
    rate, averaging, floor = options
    for row in (row for row, is_hit in enumerate(hits) if is_hit):
        for column in range(DIM):
            moved = averaging * average[row][column] + (1 - averaging) * float(fresh[row, column])
            stepped = min(1.0, max(floor, alpha[row][column] - rate * moved))
            is_held_up, is_held_down = stepped <= floor and moved > 0, stepped >= 1 and moved < 0
            average[row][column] = 0.0 if is_held_up or is_held_down else moved
            alpha[row][column] = 0.0 if dead[row][column] else stepped


columns = st.lists(st.lists(st.booleans(), min_size=DIM, max_size=DIM), min_size=3, max_size=3)


@given(
    gradients=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=3 * DIM, max_size=3 * DIM), min_size=1, max_size=6
    ),
    hits=st.lists(st.booleans(), min_size=3, max_size=3),
    dead=columns,
    dies_at=st.integers(0, 5),
    averaging=st.sampled_from([0.0, 0.9]),
    floor=st.sampled_from([0.0, 0.25]),
    rate=st.sampled_from([0.2, 4.7]),  # slow, and so fast that alphas are at their bounds soon and leave them again
)
def test_steps_are_those_of_the_oracle(
    gradients: list[list[float]],
    hits: list[bool],
    dead: list[list[bool]],
    dies_at: int,
    averaging: float,
    floor: float,
    rate: float,
) -> None:
    alpha, optimizer = make_optimizer(rate=rate, momentum=averaging, floor=floor)
    expected, average = [[1.0] * DIM for _ in range(3)], [[0.0] * DIM for _ in range(3)]
    died = [[False] * DIM for _ in range(3)]
    for step, values in enumerate(gradients):
        if step == dies_at:
            died = dead
            optimizer.retain_({DIM: ~torch.tensor(dead)})
            for row in range(3):
                expected[row] = [0.0 if dead[row][column] else a for column, a in enumerate(expected[row])]
        gradient = torch.tensor(values).view(3, DIM)
        optimizer.step({DIM: gradient}, {DIM: torch.tensor(hits)})
        fresh = normalised_reference(gradient, hits)
        step_reference(expected, average, fresh, hits, died, (rate, averaging, floor))
        torch.testing.assert_close(alpha, torch.tensor(expected), atol=1e-5, rtol=0)


@given(st.lists(columns, min_size=1, max_size=4), st.sampled_from([-1.0, 1.0]))
def test_columns_die_once_and_for_all(retained: list[list[list[bool]]], pushes: float) -> None:
    """Whatever is retained later, and however much validation wants them; the others never go below their floor."""
    alpha, optimizer = make_optimizer(rate=0.9, floor=0.05)
    living = torch.ones(3, DIM, dtype=torch.bool)
    for columns_of_stage in retained:
        living &= torch.tensor(columns_of_stage)
        optimizer.retain_({DIM: torch.tensor(columns_of_stage)})
        for _ in range(3):
            optimizer.step({DIM: pushes * torch.ones(3, DIM)}, {DIM: HIT})
            assert torch.equal(alpha > 0, living)
            assert bool((alpha[living] >= 0.05).all())
            assert bool((alpha[living] <= 1).all())


CPU = torch.device("cpu")
OPTIMIZERS = ("adam", "rowwise_adagrad")


def sharded(recipe: Recipe) -> tuple[DistributedModelParallel, Any]:
    blocks = models.blocks_of(recipe.model, recipe.data.train, num_blocks=3)
    model, optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, CPU)
    return model.train(), optimizer


def make_pipeline(optimizer: str = "adam", **settings):
    recipe = make_recipe(optimizer=optimizer)
    model, dense_optimizer = sharded(recipe)
    return recipe, model, dense_optimizer, BilevelTrainPipeline(model, dense_optimizer, CPU, **settings)


def stream_of(recipe: Recipe, warm_up_steps: int = 1) -> BilevelStream[Batch]:
    return BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=warm_up_steps))


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


def progress(pipeline: BilevelTrainPipeline, stream: BilevelStream[Batch], steps: int) -> None:
    for _ in range(steps):
        pipeline.progress(stream)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_upper_step_moves_alpha_and_nothing_else(gloo, optimizer: str) -> None:
    recipe, model, dense_optimizer, pipeline = make_pipeline(optimizer)
    stream = stream_of(recipe, 2)
    progress(pipeline, stream, 7)
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
    model, optimizer = sharded(recipe)
    pipeline, stream = BilevelTrainPipeline(model, optimizer, CPU), stream_of(recipe)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    for _ in range(6):
        level, before = pipeline.level if pipeline.contexts else Level.LOWER, norm.running_mean.clone()
        pipeline.progress(stream)
        assert torch.equal(before, norm.running_mean) == (level is Level.UPPER)
        assert norm.track_running_stats


def test_both_levels_are_pipelined(gloo, caplog: pytest.LogCaptureFixture) -> None:
    recipe, _, _, pipeline = make_pipeline()
    stream = stream_of(recipe)
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
    blocks = models.blocks_of(plain.model, plain.data.train, num_blocks=3)
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
    stream = stream_of(recipe)
    undisturbed = make_pipeline()
    other = stream_of(undisturbed[0])
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


def test_needs_a_sharded_model() -> None:
    """On one rank, too: TorchRec's pipelines know no plain collection."""
    task, batches = prepared_task(recipe()), recipe().data.train
    optimizer = torch.optim.Adam(task.parameters())
    for call in (
        lambda: BilevelTrainPipeline(task, optimizer, CPU),
        lambda: SearchLoop(task, optimizer, batches, batches, steps=2),
    ):
        with pytest.raises(RuntimeError, match=r"expected a sharded model, got TrainTask; call shard_model"):
            call()


def test_needs_a_stream_that_knows_levels(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    with pytest.raises(TypeError, match="expected a BilevelStream, got list_iterator"):
        pipeline.progress(iter(recipe.data.train.batches))


def _poison(monkeypatch: pytest.MonkeyPatch, model: nn.Module, value: float) -> None:
    """Makes the loss finite but its gradient not."""
    task = next(module for module in model.modules() if isinstance(module, TrainTask))
    original = task.task.criterion.forward

    def forward(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = original(predictions, labels)
        loss.register_hook(lambda gradient: gradient * value)
        return loss

    monkeypatch.setattr(task.task.criterion, "forward", forward)


def test_lower_steps_equal_torchrecs_own_pipeline(gloo) -> None:
    recipe, _, _, pipeline = make_pipeline()
    stream = stream_of(recipe, 1000)
    plain = make_recipe()
    model, optimizer = shard(TrainTask(plain.model, plain.loss), plain, CPU)
    model.train()
    own, batches = TrainPipelineSparseDist(model, optimizer, CPU), iter(plain.data.train)
    for _ in range(10):
        torch.testing.assert_close(pipeline.progress(stream)[0], own.progress(batches)[0], atol=1e-6, rtol=1e-5)


@pytest.fixture
def late() -> Iterator[None]:
    """Everything in a test is read late."""
    with read_late():
        yield


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_late_steps_are_the_steps_that_are_read_at_once(gloo, optimizer: str) -> None:
    def steps() -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
        recipe, model, dense_optimizer, pipeline = make_pipeline(optimizer, alpha_averaging=0.9)
        stream = stream_of(recipe)
        losses = [pipeline.progress(stream)[0] for _ in range(12)]
        return losses, everything(model, dense_optimizer), pipeline.alpha.of(8)

    losses, state, alpha = steps()
    with read_late():
        late_losses, late_state, late_alpha = steps()
    assert torch.equal(torch.stack(losses), torch.stack(late_losses))
    assert all(torch.equal(value, late_state[name]) for name, value in state.items())
    assert torch.equal(alpha, late_alpha)


def poisoned(monkeypatch: pytest.MonkeyPatch, level: Level, value: float) -> tuple[BilevelTrainPipeline, BilevelStream]:
    """A pipeline one step behind a step of this level whose gradient was not finite, and that has not been told."""
    recipe, model, dense_optimizer, pipeline = make_pipeline("rowwise_adagrad")
    stream = stream_of(recipe)
    progress(pipeline, stream, 3)
    while pipeline.level is not level:
        pipeline.progress(stream)
    alpha = pipeline.alpha.of(8).clone()
    with pytest.MonkeyPatch.context() as patch:
        _poison(patch, model, value)
        pipeline.progress(stream)
    assert all(bool(own.isfinite().all()) for own in everything(model, dense_optimizer).values())
    assert torch.equal(alpha, pipeline.alpha.of(8))
    return pipeline, stream


@pytest.mark.parametrize(("level", "value"), [(Level.LOWER, float("inf")), (Level.UPPER, float("nan"))])
@pytest.mark.usefixtures("gloo", "late")
def test_a_gradient_that_is_not_finite_reaches_no_weight_and_stops_the_next_step(
    monkeypatch: pytest.MonkeyPatch, level: Level, value: float
) -> None:
    pipeline, stream = poisoned(monkeypatch, level, value)
    step = {Level.LOWER: pipeline.lower_steps, Level.UPPER: pipeline.upper_steps}[level] - 1
    with pytest.raises(NonFiniteError, match=rf"^{level.value} step {step}, table"):
        pipeline.progress(stream)


@pytest.mark.usefixtures("gloo", "late")
def test_nothing_is_saved_evaluated_or_left_before_a_step_is_known_to_be_good(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, stream = poisoned(monkeypatch, Level.LOWER, float("nan"))
    with pytest.raises(NonFiniteError, match=r"^lower step"):
        pipeline.state(stream)
    pipeline, stream = poisoned(monkeypatch, Level.UPPER, float("nan"))
    with pytest.raises(NonFiniteError, match=r"^upper step"), pipeline.detached():
        pytest.fail("lent to an evaluation")
    pipeline, stream = poisoned(monkeypatch, Level.LOWER, float("nan"))
    with pytest.raises(NonFiniteError, match=r"^lower step"):
        pipeline.detach()


def bilevel_steps(shape: Any, device: torch.device) -> Any:
    """Both levels' steps of the benchmark, on tables and batches that are small."""
    from benchmarks import step_time

    shape = step_time.vary(shape, 3, 50, None, batch_size=64)
    train, validation = step_time.make_batches(shape, 4, seed=0), step_time.make_batches(shape, 2, seed=1)
    return step_time.Bilevel(shape, train, validation, device)


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["single-id", "multi-hot"])
def test_the_host_waits_for_no_gpu_in_a_pair_of_steps(sharding: str) -> None:
    """In the steps of single-id features; those of multi-hot ones may wait where TorchRec does, once a batch."""
    from benchmarks import step_time

    name = {"single-id": "criteo", "multi-hot": "dlrm_v2"}[sharding]
    with step_time.process_group() as device:
        bilevel = bilevel_steps(step_time.SHAPES[name], device)
        for _ in range(8):
            bilevel.step()
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error" if sharding == "single-id" else "warn")
        try:
            with nullcontext() if sharding == "single-id" else pytest.warns(UserWarning, match="synchroniz"):
                for _ in range(4):
                    bilevel.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_on_a_gpu_a_nan_in_a_table_stops_the_next_step() -> None:
    from benchmarks import step_time

    shape = step_time.SHAPES["criteo"]
    with step_time.process_group() as device:
        bilevel = bilevel_steps(shape, device)
        for collection in collections(bilevel.model).values():
            next(part for part in local_shards(collection) if part.table == "c1").weight[:] = float("nan")
        with pytest.raises(NonFiniteError, match=r"lower step 1, table 'c1': expected a finite loss, got nan"):
            progress(bilevel.pipeline, bilevel._stream, 3)
        alpha = bilevel.pipeline.alpha.of(shape.embedding_dim)
        assert bool(alpha.isfinite().all())


STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def locks() -> Iterator[None]:
    with models.counting_locks():
        yield


def prepared(*, cached: bool):
    recipe = make_recipe(optimizer="rowwise_adagrad")
    with models.operators(compiled=False):  # as on a GPU, where tables can be cached
        model, optimizer = sharded(recipe)
    if cached:
        models.plan_caches_(model)
    return recipe, model, optimizer, models.caches_of(model)


def run(pipeline: BilevelTrainPipeline, recipe: Recipe) -> list[torch.Tensor]:
    stream, losses = stream_of(recipe, 2), []
    for step in range(STEPS):
        losses.append(pipeline.progress(stream)[0].detach())
        if step == STEPS // 2:
            with pipeline.detached() as model:
                losses.append(torch.tensor(evaluate(model, recipe.data.selection, recipe.loss, CPU)["loss"]))
    return losses


def test_the_numbers_are_those_without_prefetching(gloo) -> None:
    found = []
    for cached in (False, True):
        recipe, model, optimizer, _ = prepared(cached=cached)
        pipeline = BilevelTrainPipeline(model, optimizer, CPU)
        pipeline.alpha_optimizer.learning_rate = 0.05
        losses = run(pipeline, recipe)
        found.append({"losses": torch.stack(losses), "alpha": pipeline.alpha.of(8).clone(), **models.tables_of(model)})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-6)
    assert (found[0]["alpha"] < 1).any()


@pytest.mark.parametrize("warm_up_steps", [1, 3, STEPS])
def test_locked_is_what_was_prefetched_for_the_next_batch_and_nothing_else(gloo, warm_up_steps: int) -> None:
    recipe, model, optimizer, caches = prepared(cached=True)
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    stream = stream_of(recipe, warm_up_steps)
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
    stream = stream_of(recipe, 2)
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


def test_a_search_prefetches_where_the_tables_are_set_up_for_it(gloo, monkeypatch, tmp_path) -> None:
    made = []

    def shard_with_caches(*args, **settings):
        model, optimizer = shard(*args, **settings)
        models.plan_caches_(model)
        made.extend(models.caches_of(model))
        return model, optimizer

    monkeypatch.setattr(search_module, "shard", shard_with_caches)
    recipe = make_recipe(optimizer="rowwise_adagrad")
    with models.operators(compiled=False):  # as on a GPU, where tables can be cached
        outcome = search(recipe, 10, tmp_path, CPU, settings=SearchSettings(num_blocks=3, epochs=1))
    assert outcome.history
    assert made
    for cache in made:
        assert cache.events.count("prefetch") >= cache.events.count("forward") > cache.events.count("backward")
        assert not cache.wrong


def recipe(optimizer: str = "adam") -> Recipe:
    def split(first: int, number: int) -> Repeatable:
        return Repeatable([models.make_batch(seed) for seed in range(first, first + number)])

    return Recipe(
        model=models.interest(),
        data=DataSplits(train=split(0, 12), validation=split(20, 4), selection=split(30, 4), test=split(40, 4)),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer=optimizer,
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
        embedding_l2=0.01,
    )


def test_a_table_to_be_left_alone_is_one_of_the_models() -> None:
    with pytest.raises(ValueError, match=r"table of Recipe\.leave_alone 'shopp': .* did you mean 'shop'"):
        replace(recipe(), leave_alone=("shopp",))


def test_the_penalty_counts_every_id_of_a_sample() -> None:
    model, batch = models.interest(), models.make_batch(3)
    kjt = batch.sparse_features
    with collect_outputs(model) as outputs:
        model(batch.dense_features, kjt)
    reads = []
    for table, features in {**models.FEATURES, "user": ["user"]}.items():
        weight = dict(model.named_parameters())[models.NAMES[table]].detach().double()
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


def prepared_task(own: Recipe, model: nn.Module | None = None) -> TrainTask:
    model = models.interest() if model is None else model
    return TrainTask(prepare_(model, models.blocks_of(model, own.data.train)), own.loss)


def states(model: nn.Module) -> dict[str, Tensor]:
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
    progress(pipeline, stream_of(own, 2), 4)
    after = states(model)
    assert after["table shop"].equal(before["table shop"])
    assert not after["table item"].equal(before["table item"])

    task = prepared_task(own, models.interest())
    task.model.sequences.embedding_collection.embeddings["shop"].weight.requires_grad_(False)
    trained = DistributedModelParallel(task, device=CPU, sharders=default_sharders({"learning_rate": 0.1}))
    with pytest.raises(NotImplementedError, match=r"FQN 'model\.sequences'.*got tables \['shop'\]"):
        BilevelTrainPipeline(trained, rest, CPU)
