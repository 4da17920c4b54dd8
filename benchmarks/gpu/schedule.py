"""The steps, in order, each with its share of the time."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu_ranks import hidden_gpus
from benchmarks.gpu.figures import RESULTS, Figures, read_lines, tables
from benchmarks.gpu.limited import Ended, run_limited
from dnis_torchrec.data.files import write_text

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One of the things to be measured: a module of `benchmarks.gpu.steps`."""

    name: str
    share: float


SHARES = {"smoke": 5, "gpu_tests": 16, "serving": 14, "step_time": 20, "gains": 8, "compress": 10}
SHARES |= {"search": 8, "ranks": 5, "package": 10, "refresh": 4}
STEPS = tuple(Step(name=name, share=share) for name, share in SHARES.items())
"""In order of what hangs on them."""


def command_of(name: str, folder: Path, *, is_stand_in: bool) -> list[str]:
    """Returns the command that runs one step in a process of its own."""
    stand_in = ["--stand-in"] if is_stand_in else []
    return [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu.step", name, "--out", str(folder), *stand_in]


def run_steps(steps: Sequence[Step], folder: Path, seconds: float, command: Callable[[str], Sequence[str]]) -> None:
    """Runs steps one after the other; what one of them comes to does not touch the others."""
    end = time.monotonic() + seconds
    for index, step in enumerate(steps):
        left, shares = end - time.monotonic(), sum(other.share for other in steps[index:])
        limit = left * step.share / shares
        figures = Figures(folder, step.name)
        print(f"{step.name}: {limit:.0f} s at most", flush=True)
        if left <= 0:
            ended = Ended(outcome="no time left", seconds=0.0, detail="")
        else:
            ended = run_limited(command(step.name), folder / f"{step.name}.log", limit)
        figures.end(ended.outcome, ended.seconds, max(limit, 0), ended.detail)
        print(f"{step.name}: {ended.outcome} after {ended.seconds:.0f} s", flush=True)
        write_text(folder / RESULTS, tables(read_lines(folder)))


def run_all(steps: Sequence[Step], folder: Path, seconds: float, *, is_stand_in: bool) -> None:
    """`run_steps` of the project's own steps; as a stand-in they see no GPU."""
    folder.mkdir(parents=True, exist_ok=True)

    def run() -> None:
        run_steps(steps, folder, seconds, lambda name: command_of(name, folder, is_stand_in=is_stand_in))

    if not is_stand_in:
        run()
        return
    with hidden_gpus():
        run()
