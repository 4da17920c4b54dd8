"""Phases of a search, and searches that go on where they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search import ramp
from dnis_torchrec.search.search import SearchOutcome, Setup, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training import loop as search_loop
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.loop import EpochRecord, FinishedPhase, Phase, SearchEvents, SearchInterrupted, TrainLoop
from dnis_torchrec.training.settings import Saving
from tests.models import state_tensors
from tests.tiny import make_recipe

CPU = torch.device("cpu")
FIRST = Phase(name="first", steps=60, patience=2)
SECOND = Phase(name="second", steps=13)
THIRD = Phase(name="third", steps=25, patience=1, starts_best=True)


def blocks_of(counts, tables) -> RowBlocks:
    return blocks_from_counts(counts, tables, num_blocks=3, least_rows=1)


@dataclass
class Phases:
    """A plan that notes what it is asked; in its second phase alpha learns and a column dies at every step."""

    started: Setup
    phases: tuple[Phase, ...] = (FIRST, SECOND, THIRD)
    calls: list[tuple[str, str, int]] = field(default_factory=list)

    def phase_after(self, finished: Sequence[FinishedPhase]) -> Phase | None:
        return [*self.phases, None][len(finished)]

    def begin(self, phase: Phase, finished: Sequence[FinishedPhase]) -> None:
        self.note("begin", phase)
        assert [own.name for own in finished] == [own.name for own in self.phases[: len(finished)]]
        if finished:
            pipeline = self.started.pipeline
            self.started.stream.alternate(pipeline.lower_steps + pipeline.upper_steps)

    def after_step(self, phase: Phase, done: int) -> None:
        if phase.name == "second":
            alpha = self.started.pipeline.alpha.of(8)
            living = torch.arange(8).expand_as(alpha) >= done // 4
            self.started.pipeline.alpha_optimizer.retain_({8: living})

    def end(self, phase: Phase) -> None:
        self.note("end", phase)

    def note(self, call: str, phase: Phase) -> None:
        self.calls.append((call, phase.name, self.started.pipeline.lower_steps))


@dataclass
class Run:
    """A search of the tiny recipe by `Phases`; `weights` are those at the end of every epoch."""

    folder: Path
    events: SearchEvents = field(default_factory=SearchEvents)
    saving: Saving = field(default_factory=Saving)
    phases: tuple[Phase, ...] = (FIRST, SECOND, THIRD)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = Setup(make_recipe(), blocks_of, CPU, self.events)
        self.plan = Phases(self.started, self.phases)
        self.loop: TrainLoop = self.started.loop(self.plan, self.folder, self.events, self.saving)
        self.events.on_epoch = lambda record: self.weights.append(self.now())

    def now(self) -> dict[str, Tensor]:
        """Clones of weights and alpha."""
        return {name: value.clone() for name, value in state_tensors(self.started.model).items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def scripted(monkeypatch: pytest.MonkeyPatch, losses: Sequence[float]) -> None:
    """Selection losses as written, epoch by epoch."""
    left = iter(losses)
    monkeypatch.setattr(search_loop, "selection_loss", lambda *_: next(left))


def test_phases_follow_each_other_and_go_back_to_their_best_epoch(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stops early, the second takes all of its steps, the third is no better than what it began with."""
    scripted(monkeypatch, [0.6, 0.4, 0.5, 0.7, 0.8, 0.9, 0.95])
    run = Run(tmp_path)
    at_ends: list[dict[str, Tensor]] = []
    note = run.plan.note
    monkeypatch.setattr(run.plan, "end", lambda phase: (note("end", phase), at_ends.append(run.now())))
    run.loop.run()
    history = run.loop.history
    assert [record.phase for record in history] == ["first"] * 4 + ["second"] * 2 + ["third"]
    assert [record.epoch for record in history] == list(range(7))
    assert [record.step for record in history] == [10, 20, 30, 40, 50, 53, 63]
    assert run.plan.calls == [
        ("begin", "first", 0),
        ("end", "first", 40),
        ("begin", "second", 40),
        ("end", "second", 53),
        ("begin", "third", 53),
        ("end", "third", 63),
    ]
    first, second, third = run.loop.finished
    assert (first.first_step, first.last_step, first.best.epoch, first.best.lower_step, first.best.loss) == (
        *(0, 40, 1, 20, 0.4),
    )
    assert (second.best.epoch, second.best.loss, second.last_step) == (5, 0.9, 53)  # though it was better before
    assert third.best == second.best
    assert_same(at_ends[0], run.weights[1])
    assert_same(at_ends[1], run.weights[5])
    assert_same(at_ends[2], run.weights[5])
    assert_same(run.now(), run.weights[5])
    assert [record.alpha_density for record in history] == [1.0] * 4 + [0.75, 0.625, 0.625]
    assert history[4].alpha_mean < 1


def test_best_epochs_stay_and_others_go(gloo, tmp_path: Path, monkeypatch) -> None:
    scripted(monkeypatch, [0.5, 0.6, 0.9, 0.8, 0.75, 0.74])
    phases = (replace(FIRST, steps=20), SECOND, replace(THIRD, steps=12))
    run = Run(tmp_path, saving=Saving(checkpoint_every=4), phases=phases)
    kept: list[int] = []
    run.events.on_save = lambda *_: kept.append(len(CheckpointFolder(tmp_path).steps()))
    run.loop.run()
    steps = CheckpointFolder(tmp_path).steps()
    assert {own.best.step for own in run.loop.finished} <= set(steps)
    assert max(kept) <= 7  # the last two, the one that is being written, two best ones, those of two finished phases
    assert len(steps) <= 6


class Killed(BaseException):
    """As if the process had ended here."""


SIZE = 10.0
SHORT = SearchSettings(num_blocks=3, epochs=2, patience=2)


class Dropping(nn.Module):
    """A model that draws random numbers in every step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.2)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return self.model(self.dropout(dense_features), sparse_features)


class Counted:
    """Batches in an order that its epoch decides, as those of the examples have."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches, self.epoch = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = torch.randperm(len(self._batches), generator=torch.Generator().manual_seed(epoch))
        return iter([self._batches[place] for place in order.tolist()])


class Noisy:
    """Batches in an order of its own every epoch and with noise, drawn from torch's random numbers as users' do."""

    def __init__(self, batches: list[Batch]) -> None:
        self._loader = DataLoader(batches, batch_size=None, shuffle=True)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            yield replace(batch, dense_features=batch.dense_features + torch.rand(1))


def shuffled(optimizer: str) -> Recipe:
    recipe = make_recipe(optimizer=optimizer)
    kind = Noisy if optimizer == "adam" else Counted
    train, validation = kind(recipe.data.train.batches), kind(recipe.data.validation.batches)
    data = replace(recipe.data, train=train, validation=validation)
    return replace(recipe, model=Dropping(recipe.model), data=data)


def run(
    folder: Path,
    optimizer: str,
    *,
    stop_at: int | None = None,
    kill_behind: str | None = None,
    every: int = 0,
    resume: bool = False,
    **settings: float,
) -> tuple[SearchOutcome | None, list[float]]:
    """A search, and the loss of each of its lower steps; None for the outcome of one that was stopped."""
    losses: list[float] = []

    def kill(record: EpochRecord, is_last: bool) -> None:
        if is_last and record.phase == kill_behind:
            raise Killed

    events = SearchEvents(
        on_step=lambda loss, density: losses.append(loss), should_stop=lambda: len(losses) == stop_at, on_save=kill
    )
    saving = Saving(checkpoint_every=every, resume=resume)
    torch.manual_seed(99 if resume else 7)  # a new process has other random numbers
    try:
        return found_by(shuffled(optimizer), folder, events, saving, **settings), losses
    except SearchInterrupted:
        return None, losses


def found_by(
    recipe: Recipe,
    folder: Path,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
    *,
    compression: float = SIZE,
    **settings: object,
) -> SearchOutcome:
    """A search of a second."""
    own = replace(SHORT, **settings)
    return search(recipe, compression, folder, CPU, settings=own, events=events, policy=saving)


def assert_same_outcomes(first: SearchOutcome, second: SearchOutcome) -> None:
    """Bit for bit."""
    assert first.history == second.history
    assert first.best_epoch == second.best_epoch
    assert_same(first.model.state_dict(), second.model.state_dict())
    assert all(torch.equal(first.alpha[dim], second.alpha[dim]) for dim in first.alpha)
    assert (first.origin, first.selection_losses) == (second.origin, second.selection_losses)
    for name, table in first.scheme.tables.items():
        for part in ("bits", "scale", "shift"):
            assert torch.equal(getattr(table, part), getattr(second.scheme.tables[name], part))


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_an_interrupted_search_equals_an_uninterrupted_one(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Stopped within plain training, where it is over, between the stages of a ramp, and within the release."""
    monkeypatch.setattr(ramp, "LEAST_STEPS", 2)
    whole, expected = run(tmp_path / "whole", optimizer)
    folder, seen = tmp_path / "broken", []
    for stop_at in (13, 7, 3, 12):
        outcome, losses = run(folder, optimizer, stop_at=stop_at, resume=bool(seen))
        assert outcome is None
        seen += losses
    outcome, losses = run(folder, optimizer, resume=True)
    assert seen + losses == expected
    assert_same_outcomes(outcome, whole)


@pytest.fixture(scope="module")
def whole_search(gloo, tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchOutcome, list[float], Path]:
    """A search in one go, the loss of every lower step, and its folder with a checkpoint every fourth step."""
    folder = tmp_path_factory.mktemp("search")
    return *run(folder, "adam", every=4), folder


@pytest.mark.parametrize("phase", ["plain", "ramp"])
def test_a_search_goes_on_where_a_phase_is_over_and_the_next_has_not_begun(
    whole_search: tuple[SearchOutcome, list[float], Path], tmp_path: Path, phase: str
) -> None:
    """As after SIGKILL there."""
    whole, expected, _ = whole_search
    with pytest.raises(Killed):
        run(tmp_path / "broken", "adam", kill_behind=phase)
    outcome, losses = run(tmp_path / "broken", "adam", resume=True)
    assert losses == expected[len(expected) - len(losses) :]
    assert len(losses) == len(expected) - {"plain": 20, "ramp": 28}[phase]
    assert_same_outcomes(outcome, whole)


def test_steps_since_the_last_checkpoint_are_repeated_alike(
    whole_search: tuple[SearchOutcome, list[float], Path], tmp_path: Path
) -> None:
    """As after SIGKILL, which saves nothing: the state on disk is that of some step before."""
    whole, expected, folder = whole_search
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kept = CheckpointFolder(tmp_path).steps()
    assert len(kept) <= 6  # the last two, and the best ones of three phases, of the last one two
    for step in kept[::3]:
        lower = json.loads((tmp_path / f"step-{step:08d}" / "manifest.json").read_text())["values"]["lower_steps"]
        for later in CheckpointFolder(tmp_path).steps():
            if later > step:
                shutil.rmtree(tmp_path / f"step-{later:08d}")
        outcome, losses = run(tmp_path, "adam", every=4, resume=True)
        assert losses == expected[lower:]
        assert_same_outcomes(outcome, whole)


def test_resume_without_a_checkpoint_begins_the_search(gloo, tmp_path: Path) -> None:
    assert len(run(tmp_path, "adam", stop_at=5, resume=True)[1]) == 5


@pytest.mark.parametrize("split", ["train", "validation", "selection", "test"])
def test_other_data_in_as_many_batches_is_refused(gloo, tmp_path: Path, split: str) -> None:
    """However little of it is other: two samples of one batch have their labels swapped."""
    stop = SearchEvents(should_stop=lambda: True)
    with pytest.raises(SearchInterrupted):
        found_by(make_recipe(), tmp_path, stop)
    other = make_recipe()
    labels = getattr(other.data, split).batches[1].labels
    labels[[int(labels.argmin()), int(labels.argmax())]] = torch.tensor([1.0, 0.0])
    message = (
        rf"checkpoint .*step-\d+: expected one of this data, got one of other samples in: {split}; resume with the"
    )
    with pytest.raises(ValueError, match=message):
        found_by(other, tmp_path, saving=Saving(resume=True))
    same = make_recipe()
    getattr(same.data, split).batches.reverse()  # the order of an epoch is the stream's own affair
    with pytest.raises(SearchInterrupted):
        found_by(same, tmp_path, stop, Saving(resume=True))
