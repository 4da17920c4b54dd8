"""SearchLoop with a plan of its own: phases in order, best epochs gone back to and kept, attempts that go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.search.started import StartedSearch
from dnis_torchrec.training import loop as search_loop
from dnis_torchrec.training.checkpoint import CheckpointFolder
from dnis_torchrec.training.loop import EpochRecord, FinishedPhase, Phase, SearchEvents, SearchLoop
from dnis_torchrec.training.settings import Saving
from tests.small_models import state_tensors
from tests.tiny import make_recipe

CPU = torch.device("cpu")
FIRST = Phase(name="first", steps=60, patience=2)
SECOND = Phase(name="second", steps=13)
THIRD = Phase(name="third", steps=25, patience=1, starts_best=True)


def blocks_of(counts, tables) -> RowBlocks:
    return blocks_from_counts(counts, tables, num_blocks=3)


@dataclass
class Phases:
    """A plan that notes what it is asked; in its second phase alpha learns and a column dies at every step."""

    started: StartedSearch
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
    """A search of the tiny recipe by `Phases`.

    Attributes:
        weights: everything that is gone back to, at the end of every epoch.
    """

    folder: Path
    events: SearchEvents = field(default_factory=SearchEvents)
    saving: Saving = field(default_factory=Saving)
    phases: tuple[Phase, ...] = (FIRST, SECOND, THIRD)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = {"alpha_averaging": 0.5, "alpha_floor": 0.1}
        self.started = StartedSearch.of(make_recipe(), blocks_of, CPU, self.events, **settings)
        self.plan = Phases(self.started, self.phases)
        self.loop: SearchLoop = self.started.loop(self.plan, self.folder, self.events, self.saving, {"a": 1})
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


def test_a_phase_that_gets_better_ends_with_its_own_best_epoch(gloo, tmp_path: Path, monkeypatch) -> None:
    scripted(monkeypatch, [0.4, 0.9, 0.8, 0.7, 0.6, 0.65])
    run = Run(tmp_path, phases=(Phase(name="first", steps=10, patience=2), SECOND, THIRD))
    run.loop.run()
    assert [(own.best.epoch, own.best.loss) for own in run.loop.finished] == [(0, 0.4), (2, 0.8), (4, 0.6)]
    assert run.loop.finished[-1].last_step == 10 + 13 + 25  # the last epoch is a short one
    assert_same(run.now(), run.weights[4])
    for phase in run.loop.finished:
        assert CheckpointFolder(tmp_path).path_of(phase.best.step) == run.loop.checkpoint_of(phase)
        assert (run.loop.checkpoint_of(phase) / "manifest.json").exists()


def test_best_epochs_stay_and_others_go(gloo, tmp_path: Path, monkeypatch) -> None:
    scripted(monkeypatch, [0.5, 0.6, 0.9, 0.8, 0.75, 0.74])
    phases = (replace(FIRST, steps=20), SECOND, replace(THIRD, steps=12))
    run = Run(tmp_path, saving=Saving(keep_checkpoints=1, checkpoint_every=4), phases=phases)
    kept: list[int] = []
    run.events.on_alpha = lambda *_: kept.append(len(CheckpointFolder(tmp_path).steps()))
    run.loop.run()
    steps = CheckpointFolder(tmp_path).steps()
    assert {own.best.step for own in run.loop.finished} <= set(steps)
    assert max(kept) <= 6  # the last one, the one that is being written, two best ones, those of two finished phases
    assert len(steps) <= 5


class Killed(BaseException):
    """As if the process had ended here."""


def attempts(folder: Path, interruptions: Sequence[int | str], losses: dict[int, float]) -> Run:
    """Runs that each go on with what the one before has left.

    Args:
        folder: of checkpoints.
        interruptions: lower steps after which an attempt is asked to stop, or the phase at whose end it is killed.
        losses: filled with the loss of every step; a step that is repeated has to have the same one.
    """
    for number, interruption in enumerate([*interruptions, None]):
        torch.manual_seed(number)
        run, taken = Run(folder, saving=Saving(resume=True), phases=SHORTER), []

        def note(loss: float, _density: float, run: Run = run, taken: list[float] = taken) -> None:
            taken.append(loss)
            assert losses.setdefault(run.started.pipeline.lower_steps, loss) == loss

        def kill(record: EpochRecord, _alpha: object, is_last: bool, at: int | str | None = interruption) -> None:
            if is_last and record.phase == at:
                raise Killed

        run.events.on_step, run.events.on_alpha = note, kill
        run.events.should_stop = lambda taken=taken, at=interruption: len(taken) == at
        try:
            run.loop.run()
            assert interruption is None
        except (search_loop.SearchInterrupted, Killed):
            assert interruption is not None
    return run


SHORTER = (replace(FIRST, steps=25), replace(SECOND, steps=12), replace(THIRD, steps=15))


@pytest.fixture(scope="module")
def whole(gloo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[int, float]]:
    """A search in one go, and the loss of every step."""
    losses: dict[int, float] = {}
    return attempts(tmp_path_factory.mktemp("whole"), (), losses), losses


@pytest.mark.parametrize(
    "interruptions",
    [
        (13, 15, "second", 4),  # in the middle, in another phase, where it is over, in the last one
        (10, "first", 12, "third"),  # behind the last steps of epochs, and where the next phase has not begun
    ],
    ids=str,
)
def test_attempts_come_to_what_one_would_have(
    whole: tuple[Run, dict[int, float]], tmp_path: Path, interruptions: Sequence[int | str]
) -> None:
    """Bit for bit: losses, weights, alpha, optimizers, and the history."""
    expected, losses = whole
    broken = attempts(tmp_path, interruptions, dict(losses))
    assert broken.loop.history == expected.loop.history
    assert broken.loop.finished == expected.loop.finished
    assert_same(broken.now(), expected.now())
    own, others = (run.started.pipeline.alpha_optimizer.state_dict() for run in (broken, expected))
    assert_same(own, others)
    assert broken.started.stream.schedule == expected.started.stream.schedule
