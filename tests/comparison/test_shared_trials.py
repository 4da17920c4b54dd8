"""Trials dealt out to processes: each is trained once, whoever is killed or comes late, and the best state stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dnis_torchrec.comparison.methods import METHODS, MethodTask
from dnis_torchrec.comparison.methods.best_trial import best_of
from dnis_torchrec.comparison.methods.method import HelpIsOverError, MethodResult, SizeNotMetError
from dnis_torchrec.comparison.methods.shared_trials import FinishedTrial, SharedTrials, unclaimed_trials
from dnis_torchrec.comparison.methods.trained_scheme import Candidate
from dnis_torchrec.comparison.methods.uniform import uniform_candidate
from dnis_torchrec.scheme import MixedDimensionScheme
from tests.cli.test_cli import ROOT, environment
from tests.comparison.test_baselines_methods import make_task
from tests.comparison.test_baselines_trained_scheme import tables_of

NAMES = ["a", "b", "c"]

HOLD = """
import sys, time
from pathlib import Path
from dnis_torchrec.comparison.methods.shared_trials import SharedTrials
for index in SharedTrials(Path(sys.argv[1]), ["a", "b", "c"]).to_train(until_all_have_finished=False):
    print(index, flush=True)
    time.sleep(60)
"""


def came_to(loss: float, num_bytes: int = 10) -> FinishedTrial:
    return FinishedTrial(selection_loss=loss, embedding_bytes=num_bytes, seconds=1.0)


def test_the_best_is_the_lowest_loss_within_the_bytes_the_first_of_equals(tmp_path: Path) -> None:
    trials = SharedTrials(tmp_path, [*NAMES, "d"])
    with trials.leading(threads=1):
        for index, trial in enumerate([came_to(0.3), came_to(0.2, 20), came_to(0.2), came_to(0.1, 30)]):
            trials.finish(index, trial)
        assert [trials.best(num_bytes=size) for size in (9, 10, 20, 30)] == [None, 2, 1, 3]


def test_only_states_that_may_be_the_best_stay(tmp_path: Path) -> None:
    trials = SharedTrials(tmp_path, NAMES)
    with trials.leading(threads=1):
        left = []
        for index in trials.to_train(until_all_have_finished=True):
            (trials.folder(index) / "state").touch()
            trials.finish(index, [came_to(0.3), came_to(0.1, 99), came_to(0.2)][index])
            trials.drop_beaten(num_bytes=10)
            left.append([number for number in range(3) if trials.folder(number).exists()])
        assert left == [[0], [0], [2]]
    assert not list(tmp_path.iterdir())


def test_a_trial_is_dealt_out_once_and_again_when_its_process_was_killed(tmp_path: Path) -> None:
    trials = SharedTrials(tmp_path, NAMES)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with trials.leading(threads=1):
        assert unclaimed_trials(tmp_path) == 3
        with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "0\n"
            (trials.folder(0) / "half a state").touch()
            assert unclaimed_trials(tmp_path) == 2
            mine = []
            for index in trials.to_train(until_all_have_finished=True):
                mine.append((index, [path.name for path in trials.folder(index).iterdir()]))
                trials.finish(index, came_to(0.5))
                if index == 2:
                    other.kill()
        assert mine == [(1, []), (2, []), (0, [])]
        assert unclaimed_trials(tmp_path) == 0


def test_one_that_helps_does_not_wait(tmp_path: Path) -> None:
    trials, others = (SharedTrials(tmp_path, NAMES) for _ in range(2))
    with trials.leading(threads=1):
        for index in trials.to_train(until_all_have_finished=True):
            helped = []
            for number in others.to_train(until_all_have_finished=False):
                helped.append(number)
                others.finish(number, came_to(0.5))
            trials.finish(index, came_to(0.5))
            assert (index, helped) == (0, [1, 2])


def test_trials_of_other_names_do_not_meet(tmp_path: Path) -> None:
    trials = SharedTrials(tmp_path, NAMES)
    with trials.leading(threads=3):
        assert trials.threads() == 3
        assert SharedTrials(tmp_path, ["a", "b", "d"]).threads() is None
    assert trials.threads() is None
    assert unclaimed_trials(tmp_path / "nowhere") == 0


# The best of several candidates


def grid(task: MethodTask, helper: MethodTask | None = None) -> dict[str, partial[Candidate]]:
    """Uniform candidates; the making of the first lets a helper train what it can, as if it came in just then."""

    def first(helped: list[bool]) -> Candidate:
        if helper is not None and not helped:
            helped.append(True)
            with pytest.raises(HelpIsOverError, match="expected some to train, got none"):
                best_of(helper, grid(helper))
            assert len(list(helper.folder.glob("trials-*/*.json"))) == 3  # and trials.json
        return uniform_candidate(task, 4)

    return {
        "4": partial(first, []),
        "8": partial(uniform_candidate, task, 8),
        "12": partial(uniform_candidate, task, 12),
    }


def test_with_help_comes_out_what_comes_out_alone(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 1, max_epochs=3)
    alone = [candidate().train(task) for candidate in grid(task).values()]
    best = min(alone, key=lambda result: result.selection_loss)
    assert best is not alone[0]  # what the helper trained is the best, so its state is loaded
    for helper in (None, replace(task, helps=True)):
        result = best_of(task, grid(task, helper))
        assert (result.selection_loss, result.settings, result.trials) == (best.selection_loss, best.settings, 3)
        assert result.seconds_of_trials > result.seconds > 0
        assert result.scheme.parameters == best.scheme.parameters
        expected = best.model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in result.model.state_dict().items())
        assert tables_of(result.model)
    assert not list(tmp_path.glob("*trials-*"))


class OutOfReach(Candidate):
    """A trial whose size cannot be met, which shows once it begins."""

    def train(self, task: MethodTask) -> MethodResult:
        raise SizeNotMetError("too small")


def test_help_with_a_size_out_of_reach_is_over(gloo, tmp_path: Path) -> None:
    task = make_task(tmp_path, 3)
    trials = {name: lambda: OutOfReach(recipe=task.build(None), scheme=MixedDimensionScheme({})) for name in "ab"}
    with (
        SharedTrials(tmp_path, [f"{task.precision}: {name}" for name in trials]).leading(threads=1),
        pytest.raises(HelpIsOverError),
    ):
        best_of(replace(task, helps=True), trials)
    with pytest.raises(SizeNotMetError, match="too small"):
        best_of(task, trials)
    assert not list(tmp_path.iterdir())


def test_threads_are_shared_by_the_processes_that_may_train_and_given_back(gloo, tmp_path: Path) -> None:
    seen = []

    def candidate(task: MethodTask, dim: int) -> Candidate:
        seen.append(torch.get_num_threads())
        return uniform_candidate(task, dim)

    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        for processes in (1, 2, 8):
            task = make_task(tmp_path, 1, max_epochs=1, processes=processes)
            best_of(task, {str(dim): partial(candidate, task, dim) for dim in (4, 8)})
            assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
    assert seen == [6, 6, 6, 3, 3, 6, 3, 3, 6]  # two trials, and the best one made anew


def test_help_is_over_when_the_last_trial_ends_and_the_folder_goes_away(
    gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that leads may be quicker to see it than the helper is to look for another one."""
    task = make_task(tmp_path, 1, max_epochs=1, helps=True)
    finish = SharedTrials.finish

    def finish_and_go(trials: SharedTrials, index: int, trial: FinishedTrial) -> None:
        finish(trials, index, trial)
        shutil.move(trials.folder(index).parent, tmp_path / "gone")

    monkeypatch.setattr(SharedTrials, "finish", finish_and_go)
    trials, seen = {"4": partial(uniform_candidate, task, 4)}, []
    with (
        suppress(FileNotFoundError),
        SharedTrials(tmp_path, [f"{task.precision}: {name}" for name in trials]).leading(threads=1),
    ):  # whose end misses it, too
        with pytest.raises(HelpIsOverError):
            best_of(task, trials)
        seen.append((tmp_path / "gone" / "0.json").exists())
    assert seen == [True]


def test_help_for_what_has_not_begun_is_over_at_once(gloo, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(HelpIsOverError):
        METHODS["random"](make_task(tmp_path, 2, helps=True))
    assert time.monotonic() - started < 30
    assert not list(tmp_path.iterdir())
