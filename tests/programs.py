"""The program in processes of tests, storage that they share, and code of Markdown pages as tests run it."""

import io
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import typer
from fsspec.implementations.local import LocalFileSystem

ROOT = Path(__file__).parents[1]
SHORT = ("--epochs", "1")
"""Of a training or a search that takes a second."""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int | None
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


def write_next_delta(artifact: Path, out: Path) -> dict[str, torch.Tensor]:
    """Writes a delta on an artifact that adds 1 to all dense weights, and returns these."""
    from dnis_torchrec.artifact.delta import read_state, write_delta

    base = read_state(artifact)
    dense = {name: part + 1 for name, part in base.dense.items()}
    write_delta(artifact, replace(base, dense=dense), out)
    return dense


def commands() -> Mapping[str, Any]:
    """Name -> a command of the program, as typer describes it."""
    from dnis_torchrec.cli import app

    return typer.main.get_command(app).commands


@dataclass
class Started:
    """A command at work."""

    process: BaseProcess
    stdout: Path
    stderr: Path

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self, timeout: float) -> tuple[int | None, str, str]:
        """Waits for its end, which is its exit code, and what it has said; kills it where that takes too long."""
        self.process.join(timeout)
        self.process.kill()
        return self.process.exitcode, self.stdout.read_text(), self.stderr.read_text()


MAIN = "from dnis_torchrec.cli import main; main()"
"""The program `dnis`, which reads the environment as it is imported."""


def start(folder: Path, code: str, *arguments: object, cwd: Path = ROOT, **variables: str) -> Started:
    """Starts code as a program, with the protocol of these tests; what it says goes into `folder`.

    The process is fresh, but what it imports is there: a new Python would take five seconds to import it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "stdout", folder / "stderr"
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(code, list(map(str, arguments)), cwd, dict(os.environ) | variables, *map(str, said))
    )
    process.start()
    return Started(process, *said)


def start_dnis(folder: Path, *arguments: object, **variables: str) -> Started:
    return start(folder, MAIN, *arguments, **variables)


def run_python(folder: Path, code: str, *arguments: object, cwd: Path = ROOT, **variables: str) -> Done:
    """Runs code as `start` does, to its end."""
    return Done(*start(folder, code, *arguments, cwd=cwd, **variables).ended(timeout=240))


def _run(code: str, arguments: list[str], cwd: Path, variables: Mapping[str, str], *said: str) -> None:
    for stream, path in zip((1, 2), said, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    register()
    sys.argv = ["dnis", *arguments]
    exec(code, {"__name__": "__main__"})


class SharedFileSystem(LocalFileSystem):
    """The file system of this machine behind a protocol of its own, so that nothing takes its addresses for paths."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("shared://").strip("/")


def register() -> None:
    """Makes the protocol known in this process."""
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)


def blocks(page: str, language: str) -> list[str]:
    """Blocks of a page in one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_blocks(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs a page's Python from top to bottom, as if it were one file."""
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


def shell_commands(page: str) -> Iterator[list[str]]:
    """Words of every command of a page's shell blocks, without comments; a line that ends with ``\\`` goes on."""
    for block in blocks(page, "sh"):
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            words = re.sub(r" +#.*", "", line).split()
            if words:
                yield words


def table_rows(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading, of any level, of a page: first cell -> the others."""
    text = (ROOT / page).read_text(encoding="utf-8")
    below = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    table = re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows[2:]}
