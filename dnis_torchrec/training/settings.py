"""Settings of a training and of saving it, and the signals that end it; without torch."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from typing import Annotated, Self

from dnis_torchrec.checks import check


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings by which the plain model is trained."""

    seed: Annotated[int, "Of weights, splits and batch order."] = 0
    embedding_dim: Annotated[int | None, "D of the tables; the recipe's own if not given."] = None
    embedding_l2: Annotated[float | None, "L2 penalty; the recipe's own if not given."] = None
    epochs: Annotated[int, "Epochs at most."] = 60
    patience: Annotated[int, "Epochs without a better selection loss before it stops."] = 3

    def __post_init__(self) -> None:
        check(self.seed >= 0, "seed", "an integer >= 0", self.seed)
        dim, l2, remedy = self.embedding_dim, self.embedding_l2, "leave it out for the recipe's"
        check(dim is None or dim >= 1, "embedding_dim", "an integer >= 1", dim, remedy)
        is_fit = l2 is None or (math.isfinite(l2) and l2 >= 0)
        check(is_fit, "embedding_l2", "a finite number >= 0", l2, remedy)
        check(self.epochs >= 1, "epochs", "an integer >= 1", self.epochs)
        check(self.patience >= 1, "patience", "an integer >= 1", self.patience)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Settings by which a search saves itself."""

    resume: Annotated[bool, "Go on with a run at --out; begin it if there is none."] = False
    checkpoint_every: Annotated[int, "Lower steps between checkpoints; also after an epoch."] = 0
    keep_checkpoints: Annotated[int, "How many are kept, besides that of the best epoch."] = 2

    def __post_init__(self) -> None:
        every, keep = self.checkpoint_every, self.keep_checkpoints
        check(every >= 0, "checkpoint_every", "a number of steps >= 0", every)
        check(keep >= 1, "keep_checkpoints", "at least 1", keep)


REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_REQUEST_SECONDS = 0.5
"""Signals so soon after the first are the same request: a closing terminal sends SIGHUP twice."""
TORCHRUN_SECONDS = 10.0
"""The same for ranks of torchrun, which passes on what its ranks have been sent, too."""


class Stopped(BaseException):
    """Raised where a signal ends the work; no ``except Exception`` holds it up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = exit_code(number)


def exit_code(number: int) -> int:
    """Returns the exit code that shells give a process that a signal has ended."""
    return 128 + number


class StopRequest:
    """Notes the first signal of `REQUESTS` in the block, for work that saves itself and then stops.

    Later ones go to the handlers of before. For the main thread alone.
    """

    number: int | None = None
    raises = False

    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    def __enter__(self) -> Self:
        self._process, self._previous = os.getpid(), {n: signal.getsignal(n) for n in REQUESTS}
        for number, handler in self._previous.items():
            # nohup ignores SIGHUP. For what runs in the background a shell ignores SIGINT, too:
            # who sends it all the same means it.
            if handler is not signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._restore()
        # Where it does not raise, nobody has looked at the signal yet.
        if self.number is not None and error is None and not self.raises:
            signal.raise_signal(self.number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        wait = TORCHRUN_SECONDS if of_torchrun else SAME_REQUEST_SECONDS
        if os.getpid() != self._process:  # forked, as data loaders are: SIGTERM alone ends it
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif self.number is None:
            self.number, self._since = number, time.monotonic()
            if self.raises:
                raise Stopped(number)
        elif time.monotonic() - self._since >= wait:
            if self.raises:
                signal.signal(number, signal.SIG_DFL)
            else:
                self._restore()
            signal.raise_signal(number)


class Ending(StopRequest):
    """Raises `Stopped` where a signal strikes; the next one ends the process."""

    raises = True
