"""The best of several trials on the selection split, trained by whichever processes of one task are
free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch

from benchmarks.rivals.methods.method import HelpIsOverError, MethodResult, MethodTask, SizeNotMetError
from benchmarks.rivals.methods.shared_trials import FinishedTrial, SharedTrials
from dnis_torchrec.checks import describe


class Trial(Protocol):
    """One of several trainings that a method chooses from."""

    def train(self, task: MethodTask) -> MethodResult:
        """Trains, and leaves files in the task's folder from which `restore` makes the result
        again."""

    def restore(self, task: MethodTask, finished: FinishedTrial) -> MethodResult:
        """The result of `train` again, in another process perhaps, and by another object of the
        same trial."""


def best_of(task: MethodTask, trials: Mapping[str, Callable[[], Trial]]) -> MethodResult:
    """Trains several trials, and gives the one of the lowest selection loss among those within a
    task's size."""
    names = [f"{task.precision}: {name}" for name in trials]
    shared, num_bytes = SharedTrials(task.folder, names), task.embedding_bytes()
    makers = list(trials.values())
    if task.helps:
        # The one that leads has ended, and the folder is gone; or it will find by itself that a
        # size cannot be met.
        with suppress(FileNotFoundError, SizeNotMetError):
            if threads := shared.threads():
                _train_shared(task, makers, shared, num_bytes=num_bytes, threads=threads)
        raise HelpIsOverError(describe("trials", "some to train", "none", "the process that leads has the result"))
    threads = max(1, torch.get_num_threads() // min(len(trials), task.processes))
    with shared.leading(threads=threads):
        _train_shared(task, makers, shared, num_bytes=num_bytes, threads=threads)
        finished, index = shared.finished(), shared.best(num_bytes=num_bytes)
        if index is None:
            raise SizeNotMetError(f"none of {len(trials)} trials comes to at most {num_bytes} bytes; ask for more")
        result = makers[index]().restore(replace(task, folder=shared.folder(index)), finished[index])
    seconds = sum(trial.seconds for trial in finished.values())
    return replace(result, trials=len(trials), seconds_of_trials=seconds)


def _train_shared(
    task: MethodTask, makers: Sequence[Callable[[], Trial]], shared: SharedTrials, *, num_bytes: int, threads: int
) -> None:
    """Trains this process's share of the trials."""
    own_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for index in shared.to_train(until_all_have_finished=not task.helps):
            result = makers[index]().train(replace(task, folder=shared.folder(index)))
            loss, size = result.selection_loss, result.embedding_bytes()
            shared.finish(index, FinishedTrial(selection_loss=loss, embedding_bytes=size, seconds=result.seconds))
            shared.drop_beaten(num_bytes=num_bytes)
    finally:
        torch.set_num_threads(own_threads)
