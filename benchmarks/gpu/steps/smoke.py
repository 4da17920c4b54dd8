"""Does it run at all: versions, one pair of steps, and where the host waits for the GPU in the next pairs."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import step_time
from benchmarks.gpu.step import Run
from benchmarks.gpu.timing import seconds_of
from dnis_torchrec._dependencies import versions

SHAPE = step_time.vary(step_time.SHAPES["criteo"], None, None, None, batch_size=1024)
SMALL = step_time.vary(step_time.SHAPES["criteo"], 3, 50, None, batch_size=64)
MULTI_HOT, SMALL_MULTI_HOT = (
    step_time.vary(step_time.SHAPES["dlrm_v2"], num_tables, rows, None, batch_size=batch_size)
    for num_tables, rows, batch_size in ((None, None, 1024), (3, 50, 64))
)
WARM_UP_PAIRS, WATCHED_PAIRS = 3, 2
TOP = 12
"""Places at which the host waits, that are listed."""


def run(run: Run) -> None:
    """Notes the machine and its versions, then takes steps."""
    describe(run)
    for name, shape in (
        ("single-id", SMALL if run.is_stand_in else SHAPE),
        ("multi-hot", SMALL_MULTI_HOT if run.is_stand_in else MULTI_HOT),
    ):
        pairs_of(run, name, shape)


def describe(run: Run) -> None:
    """Notes what everything else was measured with."""
    run.figures.note("date", time.strftime("%Y-%m-%d"))
    run.figures.note("machine", f"{os.cpu_count()} CPU cores, Python {platform.python_version()}")
    for package, version in versions().items():
        run.figures.note("version", version, package=package)
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        run.figures.note("card", properties.name, number=torch.cuda.device_count())
        run.figures.note("memory", properties.total_memory / 1e9, "GB")
        run.figures.note("CUDA", torch.version.cuda, capability=".".join(map(str, torch.cuda.get_device_capability())))


def pairs_of(run: Run, name: str, shape: step_time.Shape) -> None:
    """Notes the first pair's time, with all that is built for it, a later pair's, and where the host waits.

    Args:
        run: what the step was given.
        name: of the shape.
        shape: of the model.
    """
    train, validation = step_time.make_batches(shape, 4, seed=0), step_time.make_batches(shape, 2, seed=1)
    with step_time.process_group() as device:
        bilevel = step_time.Bilevel(shape, train, validation, device)

        def pair() -> None:
            bilevel.step()
            bilevel.step()

        run.figures.note("first pair", seconds_of(pair, device), "s", shape=name)
        for _ in range(WARM_UP_PAIRS):
            pair()
        run.figures.note("pair", 1e3 * seconds_of(pair, device), "ms", shape=name)
        with waits(device) as places:
            for _ in range(WATCHED_PAIRS):
                pair()
        run.figures.note("waits of the host in a pair", places.total() / WATCHED_PAIRS, shape=name)
        for place, count in places.most_common(TOP):
            run.figures.note("waits at", count / WATCHED_PAIRS, shape=name, place=place)


@contextmanager
def waits(device: torch.device) -> Iterator[Counter[str]]:
    """Counts, by file and line, where the host waits for the GPU meanwhile; nowhere on a CPU.

    Args:
        device: which is worked on.
    """
    places: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            places["/".join(Path(warning.filename).parts[-2:]) + f":{warning.lineno}"] += 1
