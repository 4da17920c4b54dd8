"""Progress of a command on standard error, and the signals that stop it after a step."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tqdm import tqdm
from tqdm.std import EMA

from dnis_torchrec.checks import visible
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import progress_bar, rank_of
from dnis_torchrec.training.loop import EpochRecord, Phase, SearchEvents, SearchInterrupted
from dnis_torchrec.training.progress import progress
from dnis_torchrec.training.settings import StopRequest


def say_beside_bar(line: str) -> None:
    """Writes a line above a progress bar that may be there."""
    tqdm.write(visible(line), file=sys.stderr)


@contextmanager
def progress_and_stop(
    recipe: Recipe, on_save: Callable[[], None], epoch_samples: float = 1.0
) -> Iterator[SearchEvents]:
    """Shows a training; `on_save` is called after each epoch, whose state is saved."""
    stop = StopRequest()
    with progress(recipe, say_beside_bar, epoch_samples) as events, _to_stop(stop):

        def on_epoch(record: EpochRecord) -> None:
            if rank_of() == 0:
                on_save()
            events.on_epoch(record)

        yield replace(events, should_stop=stop.is_requested, on_epoch=on_epoch)


@contextmanager
def progress_of_pass() -> Iterator[SearchEvents]:
    """Shows a pass over a stream, in steps; the run that it replaces goes when it is over."""
    stop, loss_mean = StopRequest(), EMA(0.02)
    bar = progress_bar(None, "one pass", unit=" steps")

    def on_phase(phase: Phase, done: int, steps_per_epoch: float) -> None:
        bar.reset(total=None if phase.steps == math.inf else int(phase.steps))
        bar.initial = bar.n = done

    def on_step(loss: float, density: float) -> None:
        bar.set_postfix_str(f"loss {loss_mean(loss):.4f}", refresh=False)
        bar.update()

    def on_epoch(record: EpochRecord) -> None:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        line = f"step {record.step:,}: train loss {record.train_loss:.4f}, window {metrics}"
        say_beside_bar(line)

    events = SearchEvents(should_stop=stop.is_requested)
    if rank_of() == 0:
        events = replace(events, on_phase=on_phase, on_step=on_step, on_epoch=on_epoch)
    with bar, _to_stop(stop):
        yield events


@contextmanager
def _to_stop(stop: StopRequest) -> Iterator[None]:
    """Signals stop the training inside after a step; its error then names the signal."""
    with stop:
        try:
            yield
        except SearchInterrupted as error:
            error.signal = stop.number
            raise
