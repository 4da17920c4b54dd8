"""The best of a method's results in several precisions, on the selection split, each as it is
served."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from benchmarks.rivals.methods.method import (
    HelpIsOverError,
    Method,
    MethodResult,
    MethodTask,
    SizeNotMetError,
    check_leaves_alone,
)
from dnis_torchrec.checks import describe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.training.evaluate import selection_loss


def best_precision(method: Method, task: MethodTask, precisions: Sequence[str]) -> MethodResult:
    """Runs a method at the same bytes in each precision, and takes the result that serves best on
    the selection split."""
    check_leaves_alone(method, task.build(None))
    if task.helps:
        for precision in precisions:
            with suppress(HelpIsOverError, SizeNotMetError):
                method(replace(task, precision=precision))
        raise HelpIsOverError(describe("trials", "some to train", "none", "the process that leads has the result"))
    best: MethodResult | None = None
    refusals, trials, seconds = {}, 0, 0.0
    for precision in precisions:
        try:
            made = _as_served(method(replace(task, precision=precision)), task)
        except SizeNotMetError as error:
            refusals[precision] = str(error)
            continue
        trials, seconds = trials + made.trials, seconds + made.seconds_of_trials
        if best is None or made.selection_loss < best.selection_loss:
            best = made
    if best is None:
        reasons = refusals.values() if len(refusals) == 1 else [f"{name}: {why}" for name, why in refusals.items()]
        raise SizeNotMetError("; ".join(reasons))
    return replace(best, trials=trials, seconds_of_trials=seconds)


def _as_served(made: MethodResult, task: MethodTask) -> MethodResult:
    """The result with the selection loss of the model as it is served."""
    recipe = task.build(None)
    with made.served(task.device) as model:
        loss = selection_loss(TrainTask(model, recipe.task), recipe, task.device)
    return replace(made, selection_loss=loss)
