"""How a training saves itself, and the signals that end it; without torch."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How a run saves itself: whether it goes on, and lower steps between checkpoints."""

    resume: bool = False
    checkpoint_every: int = 0


REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_REQUEST_SECONDS = 0.5  # between signals of one request: a closing terminal sends two SIGHUPs
TORCHRUN_SECONDS = 10.0  # for ranks of torchrun, which passes on what its ranks have been sent, too


class Stopped(BaseException):
    """Raised where a signal ends the work; no ``except Exception`` holds it up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = exit_code(number)


def exit_code(number: int) -> int:
    """Returns the exit code that shells give a process that a signal has ended."""
    return 128 + number


class StopRequest:
    """Notes the first signal of `REQUESTS` in the block, for work that saves itself and stops."""

    # Later ones go to the previous handlers. For the main thread alone.

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
