"""`dnis` in processes that have imported everything: real signals and exit codes, and Python is not begun anew."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.shared_storage import register

ROOT = Path(__file__).parents[1]
SHORT = ("--epochs", "1")
"""Of a training or a search that takes a second."""
IMPORTED = [
    *("dnis_torchrec.cli.commands", "tests.small_models"),
    "torch.distributed.optim",  # which TorchRec imports when first a table has a fused optimizer
]
"""What processes of tests need and would each import for themselves, in seconds; the server that forks them has it."""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def dnis(*arguments: object, folder: Path = ROOT) -> Done:
    """Runs the program in this process: starting Python and TorchRec anew costs seconds."""
    from dnis_torchrec.cli import main

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["dnis", *map(str, arguments)])
        patch.chdir(folder)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@dataclass
class Started:
    """A command at work.

    Attributes:
        process: its process.
        stdout: the file it prints to.
        stderr: the file its messages go to.
    """

    process: BaseProcess
    stdout: Path
    stderr: Path

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.process.pid, number)

    def ended(self, timeout: float) -> tuple[int | None, str, str]:
        """Waits for its end, which is its exit code, and what it has said; kills it where that takes too long."""
        self.process.join(timeout)
        self.process.kill()
        return self.process.exitcode, self.stdout.read_text(), self.stderr.read_text()


def start_dnis(folder: Path, *arguments: object, **variables: str) -> Started:
    """Starts `dnis` in the root of the project, which knows the protocol of these tests.

    Args:
        folder: for what it says; one command at a time.
        arguments: its arguments.
        variables: environment variables, beside those of this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "stdout", folder / "stderr"
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=([str(argument) for argument in arguments], dict(os.environ) | variables, *map(str, said))
    )
    process.start()
    return Started(process, *said)


def _run(arguments: list[str], variables: Mapping[str, str], *said: str) -> None:
    for stream, path in zip((1, 2), said, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    register()
    sys.argv = ["dnis", *arguments]
    from dnis_torchrec.cli import main  # reads the environment as it begins

    main()
