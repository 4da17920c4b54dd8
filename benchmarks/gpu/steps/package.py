"""A package of AOTInductor, loaded in fresh processes: what crashes them, and where.

One process compiles it. Others load it with the GPU in sight, with CUDA begun before, and with no GPU in sight. One
that a signal ends leaves the stacks of faulthandler, and runs a second time under gdb where there is one.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu.limited import Ended, run_limited
from benchmarks.gpu.step import Run

GDB = ("gdb", "-batch", "-ex", "run", "-ex", "bt 40", "-ex", "thread apply all bt 12", "--args")
BACKTRACE_LINES = 60
SECONDS = 150.0
"""That one process may take; the step's own limit ends it sooner."""
LOADS: dict[str, tuple[bool, dict[str, str]]] = {
    "GPU in sight": (False, {}),
    "CUDA begun before": (True, {}),
    "no GPU in sight": (False, {"CUDA_VISIBLE_DEVICES": ""}),
}
"""Setting -> whether CUDA has begun, and environment variables."""


def run(run: Run) -> None:
    """Compiles and loads."""
    folder = run.folder / "package"
    folder.mkdir(exist_ok=True)
    if child(run, "compiled", f"compiled({str(folder)!r})").outcome != "done":
        return
    for setting, (has_begun, variables) in LOADS.items():
        child(run, f"loaded, {setting}", f"loaded({str(folder)!r}, {has_begun and not run.is_stand_in})", variables)


def child(run: Run, what: str, call: str, variables: Mapping[str, str] | None = None) -> Ended:
    """Calls a function of this module in a process of its own, and notes how that ended.

    Args:
        run: what the step was given.
        what: the name of the figure.
        call: the call, as Python.
        variables: environment variables, beside those of this process.

    Returns:
        The end of the first process.
    """
    code = f"from benchmarks.gpu.steps.package import *; {call}"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    log = run.folder / "package_processes.log"
    ended = run_limited(command, log, SECONDS, variables)
    run.figures.note(what, ended.outcome)
    run.figures.note(f"{what}, time", ended.seconds, "s")
    if ended.is_crash:
        run.figures.note(f"{what}, stack", ended.detail)
        run.figures.note(f"{what}, backtrace of gdb", backtrace(command, run.folder, variables))
    elif ended.outcome != "done":
        run.figures.note(f"{what}, last lines", ended.detail)
    return ended


def backtrace(command: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Runs a command that crashes a second time, under gdb, and returns where it did.

    Args:
        command: program and arguments.
        folder: for the log.
        variables: environment variables, beside those of this process.
    """
    if shutil.which(GDB[0]) is None:
        return "no gdb here"
    log = folder / "gdb.log"
    begin = log.stat().st_size if log.exists() else 0
    run_limited([*GDB, *command], log, SECONDS, variables)
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    frames = [line for line in text.splitlines() if line.startswith(("#", "Thread ", "Program received"))]
    return "\n".join(frames[:BACKTRACE_LINES]) or "gdb saw no crash"


def compiled(folder: str) -> None:
    """Packages a model of two small tables, which checks it, too.

    Args:
        folder: where the package and its artifact go.
    """
    from benchmarks import packaged
    from dnis_torchrec.artifact.package import write_package
    from dnis_torchrec.artifact.write import write_artifact

    path = Path(folder)
    dense = packaged.made_up(num_embeddings=(50, 7), embedding_dim=24)
    collection = dense.get_submodule(packaged.COLLECTION)
    scheme = packaged.scheme_of(collection)
    tables = {name: bag.weight.detach() for name, bag in collection.embedding_bags.items()}
    artifact = write_artifact(tables, scheme, path / "artifact", forms=("csr_fp32",), overwrite=True)
    model = packaged.serving(dense, artifact, "csr_fp32")
    write_package(model, packaged.make_batch(scheme, 64), path / "package", overwrite=True)


def loaded(folder: str, has_begun: bool) -> None:
    """Loads the package, and has it predict twice.

    Args:
        folder: see `compiled`.
        has_begun: begin CUDA first.
    """
    import torch

    from benchmarks import packaged
    from dnis_torchrec.artifact.load import read_scheme
    from dnis_torchrec.artifact.package import Signature, load_package

    if has_begun:
        print(torch.ones(1, device="cuda").sum().item())
    model = load_package(Path(folder) / "package")
    for size in (64, 1):
        batch = packaged.make_batch(read_scheme(Path(folder) / "artifact"), size)
        print(model(*Signature.of_batch(batch).flatten(batch)).sum().item())
