"""One step in this process, as `benchmarks.gpu` starts it: `python -m benchmarks.gpu.step NAME --out DIR`."""

import argparse
import faulthandler
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.limited import STACKS_SIGNAL


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a step is given: its module's ``run`` takes it."""

    figures: Figures
    folder: Path
    is_stand_in: bool

    @property
    def device(self) -> torch.device:
        """Returns where the step measures."""
        return torch.device("cpu" if self.is_stand_in else "cuda")

    def python(self, name: str, *arguments: str, variables: Mapping[str, str] | None = None, **of: object) -> None:
        """Runs Python in a process of its own, whose crash leaves a stack in the log, and notes its seconds."""
        started, environment = time.monotonic(), os.environ | {"PYTHONFAULTHANDLER": "1"} | dict(variables or {})
        subprocess.run([sys.executable, *arguments], check=True, env=environment)
        self.figures.note("process", time.monotonic() - started, "s", name=name, **of)


def run_step(name: str, folder: Path, *, is_stand_in: bool) -> None:
    """Runs a step in this process."""
    module = importlib.import_module(f"benchmarks.gpu.steps.{name}")
    torch.manual_seed(0)
    module.run(Run(figures=Figures(folder, name), folder=folder, is_stand_in=is_stand_in))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the step, and prints the stacks of all threads when it crashes or is asked for them."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stand-in", action="store_true")
    arguments = parser.parse_args(argv)
    run_step(arguments.name, arguments.out, is_stand_in=arguments.stand_in)


if __name__ == "__main__":
    main()
