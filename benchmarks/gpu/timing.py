"""Times on a GPU by its own events, and on a CPU by a clock."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Self

import torch

Call = Callable[[], object]
WARM_UP = 3


def wait_for(device: torch.device) -> None:
    """Until everything that was asked of a GPU is done; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Call, device: torch.device, rounds: int) -> list[float]:
    """Times of calls that follow one another, as a GPU sees them: it waits for the host where that is slower."""
    for _ in range(WARM_UP):
        call()
    wait_for(device)
    if device.type != "cuda":
        return [_by_clock(call) for _ in range(rounds)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    wait_for(device)
    return [first.elapsed_time(last) for first, last in pairwise(events)]


def in_turns(calls: Mapping[str, Call], device: torch.device, turns: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of every call; they take turns, in random order, so that all meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name in random.sample(list(calls), len(calls)):
            times[name] += milliseconds(calls[name], device, rounds)
    return {name: statistics.median(of_name) for name, of_name in times.items()}


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds of one call until the device has done it, by the clock."""
    wait_for(device)
    started = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - started


def copied_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written a second when a large tensor is copied: the memory bandwidth that can be had."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (statistics.median(milliseconds(lambda: target.copy_(source), device, 10)) / 1e3)


class PeakMemory:
    """Memory of a GPU that is taken inside a ``with``, at its peak, above what was taken before; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_bytes: int | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self._device) - self._before


def _by_clock(call: Call) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)
