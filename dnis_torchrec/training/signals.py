"""Signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM (schedulers, torchrun), SIGHUP (a
terminal that closes)."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_REQUEST_SECONDS = 0.5
"""Signals so soon after the first are the same request: a terminal that closes sends SIGHUP twice,
systemd two kinds."""
TORCHRUN_SECONDS = 10.0
"""The same for ranks of torchrun, which passes on what its ranks may have been sent, too. It kills
them after 30 s."""


class Stopped(BaseException):
    """Raised where a signal ends the work. It is no error of the program, so no ``except
    Exception`` holds it up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = exit_code(number)


def exit_code(number: int) -> int:
    """Returns the exit code that shells give a process that a signal has ended."""
    return 128 + number


class _Handlers:
    """Takes the place of the handlers of `REQUESTS` while the block runs. For the main thread
    alone."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._since, self._process = 0.0, os.getpid()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in REQUESTS:
            previous = signal.getsignal(number)
            # A shell ignores SIGINT for what it runs in the background: who sends it all the same
            # means it.
            if previous is not None and (previous is not signal.SIG_IGN or number == signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._process:
            _end_forked(number)
        elif self.number is None:
            self.number, self._since = number, time.monotonic()
            self._first(number)
        elif time.monotonic() - self._since >= _seconds_of_one_request():
            self._next(number)

    def _first(self, number: int) -> None:
        """Handles the first signal of a request; here it does nothing."""

    def _next(self, number: int) -> None:
        """Hands a further signal on to the handlers that were there before."""
        self._restore()
        signal.raise_signal(number)


class StopRequest(_Handlers):
    """Notes that a signal has come, for work that saves itself before it stops."""

    def is_requested(self) -> bool:
        """Returns whether a signal has come."""
        return self.number is not None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the noting of signals."""
        self._restore()
        if self.number is not None and error is None:
            signal.raise_signal(self.number)


class Ending(_Handlers):
    """Raises `Stopped` where a signal strikes; the next one, which comes while that is dealt with,
    ends the process."""

    def _first(self, number: int) -> None:
        raise Stopped(number)

    def _next(self, number: int) -> None:
        for each in REQUESTS:
            signal.signal(each, signal.SIG_DFL)
        signal.raise_signal(number)


def _seconds_of_one_request() -> float:
    return TORCHRUN_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else SAME_REQUEST_SECONDS


def _end_forked(number: int) -> None:
    """Ends a process forked from this one, as data loaders are, on SIGTERM, and ignores all other
    signals."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
