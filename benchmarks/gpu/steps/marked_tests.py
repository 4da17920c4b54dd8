"""The tests marked gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

from benchmarks.gpu.schedule import ROOT
from benchmarks.gpu.step import Run

MARK = "mark" + ".gpu"
"""Not in one word: this file is none of tests."""
LAST_LINES, MOST_PROCESSES = 60, 6


def files_with_marks() -> list[str]:
    """Returns the files of tests that name the mark: the others need not even be imported."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if MARK in file.read_text(encoding="utf-8")]


def at_once() -> list[str]:
    """Returns pytest's options for several processes, where it has what they want: they share the GPU."""
    if find_spec("xdist") is None:
        return []
    processes = str(min(MOST_PROCESSES, os.cpu_count() or 1))
    return ["--numprocesses", processes, "--dist", "worksteal", "-p", "no:benchmark"]  # which refuses to be one of many


def run(run: Run) -> None:
    """Runs them, of one file as a stand-in, and notes what pytest says at its end.

    Raises:
        RuntimeError: if pytest failed.
    """
    files = files_with_marks()
    chosen = [file for file in files if "triton" in file][:1] if run.is_stand_in else files
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", *at_once(), *chosen]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)  # so that the log has it even if time runs out
            lines.append(line.rstrip())
    for line in lines[-LAST_LINES:]:
        if line.startswith(("FAILED", "ERROR")):
            run.figures.note("failed", line)
    run.figures.note("outcome", lines[-1] if lines else "nothing printed", files=len(chosen))
    if process.returncode:
        raise RuntimeError(f"pytest ended with code {process.returncode}")
