"""Progress of a training on standard error, and the signals that stop it after a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from dnis_torchrec.checks import visible
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import rank_of
from dnis_torchrec.training.evaluate import losses_in_words
from dnis_torchrec.training.loop import PLAIN, EpochRecord, Phase, SearchEvents, SearchInterrupted
from dnis_torchrec.training.settings import StopRequest

SMOOTHING = 0.98
"""Share of the old mean in the loss that is shown."""


@contextmanager
def progress(
    recipe: Recipe, on_save: Callable[[], None], epoch_samples: float = 1.0
) -> Iterator[SearchEvents]:
    """Shows a training; `on_save` is called after each epoch, whose state is saved."""
    stop = _SearchStop()
    if rank_of() != 0:
        with stop:
            yield SearchEvents(should_stop=stop.is_requested)
        return
    with progress_bar() as bar, stop:
        steps, samples = _Steps(bar), {"epoch": epoch_samples, "step": 1.0}

        def on_start(steps_per_epoch: int, counts: Any, blocks: Any) -> None:
            samples["epoch"] = counts.num_samples

        def on_phase(phase: Phase, done: int, steps_per_epoch: float) -> None:
            samples["step"] = samples["epoch"] / steps_per_epoch
            epochs, may_stop = phase.steps / steps_per_epoch, phase.patience is not None
            steps.begin(phase.name, epochs, samples["epoch"], done * samples["step"], may_stop)

        def on_resume(done: int, history: Sequence[EpochRecord]) -> None:
            _write(bar, f"resumed after lower step {done}, in epoch {len(history)}")

        def on_step(loss: float, density: float) -> None:
            more = f", alpha density {density:.3f}" if density < 1 else ""
            steps.take(samples["step"], loss, more)

        def on_epoch(record: EpochRecord) -> None:
            on_save()
            losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
            if record.phase != PLAIN:
                losses += f", alpha mean {record.alpha_mean:.3f}"
                losses += f", density {record.alpha_density:.3f}"
            _write(bar, f"epoch {record.epoch}, {record.phase}: {losses}")

        yield SearchEvents(
            on_start=on_start,
            on_resume=on_resume,
            on_phase=on_phase,
            on_step=on_step,
            on_epoch=on_epoch,
            should_stop=stop.is_requested,
        )


def progress_bar() -> tqdm:
    """A bar on standard error that counts samples."""
    return tqdm(
        desc="reading the data", unit=" samples", unit_scale=True, dynamic_ncols=True, disable=None
    )


def _write(bar: tqdm, line: str) -> None:
    bar.write(visible(line), file=sys.stderr)


class _Steps:
    """Steps of one phase after the other on a bar."""

    def __init__(self, bar: tqdm) -> None:
        self._bar, self._loss = bar, math.nan
        self._name, self._epochs, self._epoch_samples, self._done = "", "", 1.0, 0.0

    def begin(
        self, name: str, epochs: float, epoch_samples: float, done: float, may_stop: bool
    ) -> None:
        """Begins a phase, or goes on in the middle of it."""
        self._name, self._epochs = name, f"{'at most ' if may_stop else ''}{math.ceil(epochs)}"
        self._epoch_samples, self._done = epoch_samples, done
        self._bar.reset(total=round(epochs * epoch_samples))
        self._bar.initial = self._bar.n = round(done)
        self._describe(0.0)

    def take(self, samples: float, loss: float, more: str = "") -> None:
        """Takes a step."""
        old = loss if math.isnan(self._loss) else self._loss
        self._loss = SMOOTHING * old + (1 - SMOOTHING) * loss
        self._bar.set_postfix_str(f"loss {self._loss:.4f}{more}", refresh=False)
        self._describe(samples / 2)
        self._done += samples
        self._bar.update(samples)

    def _describe(self, samples: float) -> None:
        epoch = int((self._done + samples) / self._epoch_samples) + 1
        words = f"{self._name}, epoch {epoch} of {self._epochs}"
        self._bar.set_description(words, refresh=not samples)


class _SearchStop(StopRequest):
    """Tells a training that was stopped which signal it was."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SearchInterrupted):
            error.signal = self.number
        super().__exit__(kind, error, traceback)
