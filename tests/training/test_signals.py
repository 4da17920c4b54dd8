"""Signals: the first is a request, what comes at once is the same one, the next ends; ignored ones stay ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dnis_torchrec.training import settings as signals
from dnis_torchrec.training.settings import REQUESTS, Ending, Stopped, StopRequest


class SearchEndedError(Exception):
    """Whoever looked at the request has stopped."""


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Signals that come to whoever had the handlers before."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in REQUESTS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", REQUESTS)
def test_a_request_is_noted_and_handed_on_if_nobody_looks_at_it(seen: list[int], number: int) -> None:
    with StopRequest() as request:
        assert not request.is_requested()
        signal.raise_signal(number)
        assert request.is_requested()
        assert request.number == number
        assert seen == []
    assert seen == [number]


def test_a_request_that_was_looked_at_is_over(seen: list[int]) -> None:
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        raise SearchEndedError
    assert seen == []


def test_a_second_signal_is_for_whoever_was_there_before(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the same one: the terminal's and the shell's
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
        monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGTERM, signal.SIGINT]
        raise SearchEndedError


def test_torchrun_passes_on_what_its_ranks_may_have_been_sent(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
    with suppress(SearchEndedError), StopRequest():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise SearchEndedError
    assert seen == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_ends_ends_where_the_signal_strikes(seen: list[int], number: int, code: int) -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # the same request does not come between
            cleaned.append(True)

    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as stopped, Ending():
        work()
    assert stopped.value.exit_code == code
    assert cleaned == [True]
    assert seen == []
    assert not isinstance(stopped.value, Exception)


def test_a_signal_while_all_is_ending_ends_the_process() -> None:
    if (child := os.fork()) == 0:
        signals.SAME_REQUEST_SECONDS = 0.0
        try:
            with Ending():
                try:
                    signal.raise_signal(signal.SIGTERM)
                finally:
                    signal.raise_signal(signal.SIGHUP)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGHUP


@pytest.mark.parametrize("handlers", [StopRequest, Ending])
def test_what_was_ignored_stays_ignored(handlers: type[StopRequest | Ending]) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in REQUESTS}
    try:
        with handlers():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as shells have it in the background
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("number", "ended_by"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, 0)])
@pytest.mark.parametrize("handlers", [StopRequest, Ending])
def test_a_forked_process_is_ended_by_sigterm_alone(handlers, number: int, ended_by: int) -> None:
    """Pools end their workers so; Ctrl-C is sent to all of a terminal's processes, and the parent's to deal with."""
    with handlers():
        if (child := os.fork()) == 0:
            signal.raise_signal(number)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == ended_by
