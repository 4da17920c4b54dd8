"""Search in one pass: the order of batches, where columns die, what goes over, and what a run leaves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch

from dnis_torchrec import SearchLoop, load_model, merge_
from dnis_torchrec.cli.commands import run_evaluate, run_export, run_search, run_train
from dnis_torchrec.cli.run import RunFolder
from dnis_torchrec.cli.settings import EvaluateCommand, ExportCommand, SearchCommand, TrainCommand
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.report.rows import SEARCH
from dnis_torchrec.search import one_pass
from dnis_torchrec.search.pipeline import AlphaOptimizer, BilevelTrainPipeline
from dnis_torchrec.search.ramp import Ramp
from dnis_torchrec.search.schedule import SAMPLE_BATCHES, Level, LevelSchedule, OnePass
from dnis_torchrec.training.checkpoint import tensors_under
from dnis_torchrec.training.loop import SearchInterrupted
from dnis_torchrec.training.progressive import Progressive
from tests.search.test_loop import sharded_for_a_loop
from tests.tiny import batches_of_day, demo, files_of, make_batch

BOTH, KINDS = "tests.tiny:two_days", ("table/", "model/", "optimizer/", "fused/")


@given(number=st.integers(0, 40), warm_up=st.integers(1, 9), upper=st.none() | st.integers(0, 9))
def test_each_batch_is_held_out_and_then_trained_on(number: int, warm_up: int, upper: int | None) -> None:
    stream = OnePass(iter(range(number)), LevelSchedule(warm_up_steps=warm_up, upper_steps=upper))
    given_ones = [(batch, stream.last_level) for batch in stream]
    assert [batch for batch, level in given_ones if level is Level.LOWER] == [*range(number)]
    pairs = list(itertools.pairwise(given_ones))
    uppers = [batch for batch, level in given_ones if level is Level.UPPER]
    assert uppers == [*range(warm_up + 1, number)][:upper]
    assert all(after == (batch, Level.LOWER) for (batch, level), after in pairs if level is Level.UPPER)
    assert [*stream.sample(3)] == [*range(number)][-SAMPLE_BATCHES:]
    assert next(stream, None) is None


@given(number=st.integers(5, 30), step=st.integers(0, 12), ahead=st.integers(0, 4))
def test_a_stream_goes_on_where_its_steps_were(number: int, step: int, ahead: int) -> None:
    torch.manual_seed(1)
    schedule = LevelSchedule(warm_up_steps=2, upper_steps=7)
    whole = OnePass(range(number), schedule)
    order = [*itertools.islice(whole, step + ahead)]
    state = json.loads(json.dumps(whole.state_dict(min(step, len(order)))))
    other = OnePass(range(number))
    other.first_train_batch()
    other.load_state_dict(state)
    assert [*other] == [*order[step:], *whole]
    assert [*other.sample(0)] == [*whole.sample(0)]


def test_a_loop_ends_with_its_stream(gloo) -> None:
    model, optimizer, _ = sharded_for_a_loop()
    batches = (make_batch(64, index) for index in range(25))
    loop = SearchLoop(model, optimizer, batches, compression=10, steps=100, plain_steps=8, ramp_steps=12)
    assert sum(1 for _ in iter(loop.step, False)) == loop.lower_steps == 25
    assert loop.pipeline.upper_steps == 25 - 8 - 1
    assert not loop.step()
    weights = merge_(loop.detach()).state_dict().values()
    assert any(bool((weight == 0).any()) for weight in weights)


def test_predictions_of_an_upper_step_count() -> None:
    """The lower step on the same batch comes when alpha has learnt its labels."""
    batch, recipe = make_batch(8, 0), demo(None)
    stream: Any = SimpleNamespace(settle=lambda: batch)
    progressive = Progressive(stream, recipe.model, recipe.task, torch.device("cpu"), 3)
    early, late = torch.zeros(8), 9 * (2 * batch.labels - 1)
    progressive.note((torch.tensor(0.5), early), is_lower=False)
    progressive.note((torch.tensor(0.1), late))
    assert progressive.metrics()["auc"] == 0.5
    progressive.note((torch.tensor(0.1), late))
    assert progressive.metrics()["auc"] > 0.5


def searched(out: Path, recipe: str = BOTH, **changes: Any) -> RunFolder:
    run_search(SearchCommand(**{"recipe": recipe, "out": out, "steps": 60, "compression": 4.0} | changes))
    return RunFolder.open(out)


@pytest.fixture(scope="module")
def run(gloo, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return searched(tmp_path_factory.mktemp("searched") / "run")


def test_a_search_leaves_what_later_commands_take(run: RunFolder, tmp_path: Path) -> None:
    run_export(ExportCommand(run=run.path, out=tmp_path / "artifact"))
    results = json.loads((run.path / "results.json").read_text())
    (row,) = [row for row in results["rows"] if row["method"] == SEARCH]
    metrics = run_evaluate(EvaluateCommand(path=tmp_path / "artifact", recipe=BOTH))["metrics"]
    assert metrics == pytest.approx(row["metrics"], abs=1e-6)  # its newest samples are all
    model = load_model(demo(None).model, tmp_path / "artifact")
    assert run.scheme().compression() >= 4
    assert type(model.sparse_arch.embedding_bag_collection).__name__ == "PackedEmbeddingBagCollection"
    assert [record["step"] for record in results["history"]] == [*range(1, 61)]
    assert "Gains are not fitted" in " ".join(results["notes"])
    assert run.counts().num_samples == 60 * 64 == sum(len(batch.labels) for batch in run.recent())
    run_train(TrainCommand(recipe="tests.tiny:next_day", out=tmp_path / "next", source=run.path, steps=5))
    checkpoint = RunFolder.open(tmp_path / "next").latest_checkpoint()
    assert {int(value) for key, value in tensors_under(checkpoint, "optimizer/").items() if "step" in key} == {65}


def test_columns_die_in_the_ramp_alone(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    follow = one_pass.OnePassSearch.after_step

    def watch(self: Any, phase: Any, done: int) -> None:
        follow(self, phase, done)
        num_dead = sum(int((alpha == 0).sum()) for alpha in self._pipeline.alphas().values())
        seen.append((phase.name, num_dead, self._pipeline.upper_steps))

    narrow, stages = Ramp._narrow, list[int]()
    monkeypatch.setattr(Ramp, "_narrow", lambda self, *stage: (stages.append(len(seen)), narrow(self, *stage)))
    monkeypatch.setattr(one_pass.OnePassSearch, "after_step", watch)
    searched(tmp_path / "run", compression=16.0, steps=60)
    assert [name for name, *_ in seen] == [one_pass.RAMP] * 12 + [one_pass.RELEASE] * 18
    dead = [number for _, number, _ in seen]
    assert dead[0] == 0 < dead[11] == dead[-1]
    assert dead == sorted(dead)
    assert max(stages) < 12
    assert [number for *_, number in seen] == [0, 0, *range(1, 11)] + [10] * 18


def test_without_a_ramp_it_is_plain_training(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states of optimizers go over bit for bit; a step with alpha = 1 adds up in another order."""
    begin, differ = BilevelTrainPipeline.begin_with, list[str]()

    def watch(self: BilevelTrainPipeline, path: Any, batch: Batch) -> None:
        begin(self, path, batch)
        stored = {kind: tensors_under(path, kind) for kind in KINDS}
        live = self.state(SimpleNamespace(state_dict=lambda step: {})).tensors  # type: ignore[arg-type]
        for kind, of_kind in stored.items():
            differ.extend(key for key in of_kind if not live[kind + key].chunks[0].tensor.equal(of_kind[key]))
        assert stored["optimizer/"]

    monkeypatch.setattr(BilevelTrainPipeline, "begin_with", watch)
    monkeypatch.setattr(Ramp, "_narrow", lambda *stage: None)
    monkeypatch.setattr(AlphaOptimizer, "step", lambda *gradients: None)
    run = searched(tmp_path / "run")
    assert differ == []
    run_train(TrainCommand(recipe=BOTH, out=tmp_path / "plain", steps=60))
    plain = RunFolder.open(tmp_path / "plain")
    for kind in KINDS:
        expected = tensors_under(plain.latest_checkpoint(), kind)
        torch.testing.assert_close(tensors_under(run.latest_checkpoint(), kind), expected, atol=1e-5, rtol=1e-3)
    for name in ("counts", "recent"):
        assert files_of(run.path)[f"{name}.safetensors"] == files_of(plain.path)[f"{name}.safetensors"]


def test_a_search_that_was_stopped_goes_on_behind_its_plain_steps(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, steps = Progressive.note, list[int]()

    def stop(self: Any, *output: Any, **options: Any) -> None:
        note(self, *output, **options)
        steps.append(self.stream._num_samples // 64)
        if steps[-1] == 40 and steps[0] == 1:
            raise SearchInterrupted("stopped")

    monkeypatch.setattr(Progressive, "note", stop)
    with pytest.raises(SearchInterrupted):
        searched(tmp_path / "run")
    steps.clear()
    files = files_of(searched(tmp_path / "run", resume=True).path)
    assert min(steps) == 31
    for name in ("model", "scheme", "counts", "recent"):
        assert files[f"{name}.safetensors"] == files_of(run.path)[f"{name}.safetensors"]


def late(data: Path | None, **options: Any) -> Recipe:
    """Of user, the second half of the rows comes after half of the steps."""
    batches = [*batches_of_day(0)]
    for batch in batches[:15]:
        batch.sparse_features.values()[: len(batch.labels)] %= 20
    return dataclasses.replace(demo(data, **options), data=iter(batches))


def test_rows_that_come_late_have_columns_to_learn_in(gloo, tmp_path: Path) -> None:
    run = searched(tmp_path / "run", f"{__name__}:late", steps=30, compression=16.0)
    tables = tensors_under(run.latest_checkpoint(), "table/")
    assert bool((tables["user"][20:] != 0).all())
    assert bool((tables["genre"] == 0).all(dim=0).any())


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"epochs": 2}, "--epochs"),
        ({"steps": None}, "Recipe.data"),
        ({"recipe": "tests.tiny:demo"}, "--steps"),
        ({"steps": 500}, "training stream"),
        ({"source": Path("none")}, "none"),
    ],
)
def test_what_has_no_meaning_is_refused(gloo, fields: dict[str, Any], place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=place):
        searched(tmp_path / "out", **fields)
