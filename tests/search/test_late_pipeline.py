"""The bi-level pipeline where the host reads a step late, as on a GPU: the same search, and the same stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.training.loop import EpochRecord, PlainEvents, SearchEvents, train_plainly
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import shard
from tests.late import read_late
from tests.search.test_search import found_by
from tests.search.test_train_pipeline import CPU, OPTIMIZERS, _poison, _progress, everything, make_pipeline
from tests.tiny import make_recipe


@pytest.fixture
def late() -> Iterator[None]:
    """Everything in a test is read late."""
    with read_late():
        yield


def stream_of(recipe, warm_up_steps: int = 1) -> BilevelStream:
    """A stream of the recipe's batches."""
    return BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=warm_up_steps))


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
    for _ in range(3):
        pipeline.progress(stream)
    while pipeline.level is not level:
        pipeline.progress(stream)
    alpha = pipeline.alpha.of(8).clone()
    with pytest.MonkeyPatch.context() as patch:
        _poison(patch, model, value)
        pipeline.progress(stream)
    assert all(bool(own.isfinite().all()) for own in everything(model, dense_optimizer).values())
    assert torch.equal(alpha, pipeline.alpha.of(8))
    return pipeline, stream


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
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


@pytest.mark.usefixtures("gloo", "late")
def test_a_loss_that_is_not_finite_stops_the_next_step() -> None:
    recipe, _, _, pipeline = make_pipeline("rowwise_adagrad")
    stream = stream_of(recipe, warm_up_steps=100)
    pipeline.progress(stream)
    recipe.data.train.batches[3].dense_features[:] = float("nan")
    with pytest.raises(
        NonFiniteError, match=r"lower step 3 \(every table is finite\): expected a finite loss, got nan"
    ):
        _progress(pipeline, stream, steps=10)
    assert pipeline.lower_steps == 4


@pytest.mark.usefixtures("gloo")
def test_who_listens_to_a_search_is_told_the_same_in_the_same_order(tmp_path: Path) -> None:
    def told(folder: Path) -> list[object]:
        events: list[object] = []

        def on_epoch(record: EpochRecord) -> None:
            events.append(record)
            if record.epoch == 2:  # two phases have been seen
                raise KeyboardInterrupt

        listening = SearchEvents(on_step=lambda loss, density: events.append((loss, density)), on_epoch=on_epoch)
        with pytest.raises(KeyboardInterrupt):
            found_by(make_recipe(), folder, listening)
        return events

    expected = told(tmp_path / "at once")
    with read_late():
        assert told(tmp_path / "late") == expected
    assert len({event.phase for event in expected if isinstance(event, EpochRecord)}) > 1


def plain(folder: Path, bad_batch: int | None = None) -> list[object]:
    """What a plain training tells who listens."""
    folder.mkdir()
    recipe, events = make_recipe(), list[object]()
    if bad_batch is not None:
        recipe.data.train.batches[bad_batch].dense_features[:] = float("nan")
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    listening = PlainEvents(on_step=events.append, on_epoch=lambda record: events.append(record.selection_loss))
    train_plainly(model, optimizer, recipe, CPU, max_epochs=2, patience=2, events=listening)
    return events


@pytest.mark.usefixtures("gloo")
def test_plain_training_tells_the_same_and_stops_within_the_epoch(tmp_path: Path) -> None:
    expected = plain(tmp_path / "at once")
    last = len(make_recipe().data.train.batches) - 1
    with read_late():
        assert plain(tmp_path / "late") == expected
        for bad in (2, last):
            with pytest.raises(NonFiniteError, match=rf"^epoch 0, step {bad + 1}\b.*expected a finite loss, got nan"):
                plain(tmp_path / f"bad {bad}", bad)
            assert not list((tmp_path / f"bad {bad}").glob("*"))  # no best state of what was not good


@pytest.mark.usefixtures("gloo")
def test_ids_of_a_batch_are_counted_before_it_goes_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, _, _, pipeline = make_pipeline()
    batch = next(iter(recipe.data.train))
    counted = batch.sparse_features.length_per_key()
    for device, expected in ((CPU, None), (torch.device("cuda"), counted)):
        batch.sparse_features.unsync()
        monkeypatch.setattr(pipeline, "_device", device)
        monkeypatch.setattr(pipeline, "_dataloader_iter", None)
        assert pipeline._next_batch(iter([batch])) is batch
        assert batch.sparse_features.length_per_key_or_none() == expected
    assert pipeline._next_batch(iter([])) is None
    assert pipeline._next_batch(iter(["another kind of batch"])) == "another kind of batch"


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", ["single-id", "multi-hot"])
def test_the_host_waits_for_no_gpu_in_a_pair_of_steps(sharding: str) -> None:
    """In the steps of single-id features; those of multi-hot ones may wait where TorchRec does, once a batch."""
    from benchmarks import step_time

    name = {"single-id": "criteo", "multi-hot": "dlrm_v2"}[sharding]
    shape = step_time.vary(step_time.SHAPES[name], 3, 50, None, batch_size=64)
    train, validation = step_time.make_batches(shape, 4, seed=0), step_time.make_batches(shape, 2, seed=1)
    with step_time.process_group() as device:
        bilevel = step_time.Bilevel(shape, train, validation, device)
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
    from dnis_torchrec.selection.shards import collections, local_shards

    shape = step_time.vary(step_time.SHAPES["criteo"], 3, 50, None, batch_size=64)
    train, validation = step_time.make_batches(shape, 4, seed=0), step_time.make_batches(shape, 2, seed=1)
    with step_time.process_group() as device:
        bilevel = step_time.Bilevel(shape, train, validation, device)
        for collection in collections(bilevel.model).values():
            next(part for part in local_shards(collection) if part.table == "c1").weight[:] = float("nan")
        with pytest.raises(NonFiniteError, match=r"lower step 1, table 'c1': expected a finite loss, got nan"):
            _progress(bilevel.pipeline, bilevel._stream, steps=3)
        alpha = bilevel.pipeline.alpha.of(shape.embedding_dim)
        assert bool(alpha.isfinite().all())
