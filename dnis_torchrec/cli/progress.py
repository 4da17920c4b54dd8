"""Progress of a training on standard error, and the signals that stop it after a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tqdm import tqdm
from tqdm.std import EMA

from dnis_torchrec.checks import visible
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import rank_of
from dnis_torchrec.training.evaluate import losses_in_words
from dnis_torchrec.training.loop import PLAIN, EpochRecord, Phase, SearchEvents, SearchInterrupted
from dnis_torchrec.training.settings import StopRequest


@contextmanager
def progress(
    recipe: Recipe, on_save: Callable[[], None], epoch_samples: float = 1.0
) -> Iterator[SearchEvents]:
    """Shows a training; `on_save` is called after each epoch, whose state is saved."""
    stop, loss_mean = StopRequest(), EMA(0.02)
    samples, words = {"epoch": epoch_samples, "step": 1.0}, {"phase": "", "epochs": ""}
    bar = tqdm(
        *(None, "reading the data"),
        unit=" samples",
        unit_scale=True,
        dynamic_ncols=True,
        disable=None if rank_of() == 0 else True,
    )

    def write(line: str) -> None:
        bar.write(visible(line), file=sys.stderr)

    def on_start(steps_per_epoch: int, counts: Any, blocks: Any) -> None:
        samples["epoch"] = counts.num_samples

    def on_phase(phase: Phase, done: int, steps_per_epoch: float) -> None:
        samples["step"] = samples["epoch"] / steps_per_epoch
        words["phase"] = phase.name
        at_most = "" if phase.patience is None else "at most "
        words["epochs"] = f"{at_most}{math.ceil(phase.steps / steps_per_epoch)}"
        bar.reset(total=math.ceil(phase.steps * samples["step"]))
        bar.initial = bar.n = int(done * samples["step"])  # it may go on in the middle
        describe(refresh=True)

    def describe(refresh: bool = False) -> None:
        epoch = int((bar.n + samples["step"] / 2) / samples["epoch"]) + 1
        bar.set_description(f"{words['phase']}, epoch {epoch} of {words['epochs']}", refresh)

    def on_step(loss: float, density: float) -> None:
        more = f", alpha density {density:.3f}" if density < 1 else ""
        bar.set_postfix_str(f"loss {loss_mean(loss):.4f}{more}", refresh=False)
        describe()
        bar.update(samples["step"])

    def on_resume(done: int, history: Sequence[EpochRecord]) -> None:
        write(f"resumed after lower step {done}, in epoch {len(history)}")

    def on_epoch(record: EpochRecord) -> None:
        on_save()
        losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
        if record.phase != PLAIN:
            losses += f", alpha mean {record.alpha_mean:.3f}, density {record.alpha_density:.3f}"
        write(f"epoch {record.epoch}, {record.phase}: {losses}")

    events = SearchEvents(should_stop=stop.is_requested)
    if rank_of() == 0:
        callbacks: tuple[Any, ...] = on_start, on_resume, on_phase, on_step, on_epoch
        events = replace(events, **{callback.__name__: callback for callback in callbacks})
    with bar, _stopping(stop):
        yield events


@contextmanager
def progress_of_pass() -> Iterator[SearchEvents]:
    """Shows a pass over a stream, in steps; the run that it replaces goes when it is over."""
    stop, loss_mean, is_first = StopRequest(), EMA(0.02), rank_of() == 0
    disable = None if is_first else True
    bar = tqdm(None, "one pass", unit=" steps", dynamic_ncols=True, disable=disable)

    def on_phase(phase: Phase, done: int, steps_per_epoch: float) -> None:
        bar.reset(total=None if phase.steps == math.inf else int(phase.steps))
        bar.initial = bar.n = done

    def on_step(loss: float, density: float) -> None:
        bar.set_postfix_str(f"loss {loss_mean(loss):.4f}", refresh=False)
        bar.update()

    def on_epoch(record: EpochRecord) -> None:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        line = f"step {record.step:,}: train loss {record.train_loss:.4f}, window {metrics}"
        bar.write(visible(line), file=sys.stderr)

    events = SearchEvents(should_stop=stop.is_requested)
    if is_first:
        events = replace(events, on_phase=on_phase, on_step=on_step, on_epoch=on_epoch)
    with bar, _stopping(stop):
        yield events


@contextmanager
def _stopping(stop: StopRequest) -> Iterator[None]:
    """Signals stop the training inside after a step; its error then names the signal."""
    with stop:
        try:
            yield
        except SearchInterrupted as error:
            error.signal = stop.number
            raise
