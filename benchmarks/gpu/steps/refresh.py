"""A refresh of what is served: whole, and as a delta that tables on the device take."""

import shutil

import dnis_torchrec as dnis
from benchmarks.deltas import num_bytes
from benchmarks.gpu.step import Run
from benchmarks.gpu.steps.search import COMPRESSION, recipe_of, run_command
from benchmarks.gpu.timing import seconds_of


def run(run: Run) -> None:
    """Serves a model of one epoch and refreshes it after the next; notes seconds and bytes."""
    folder, recipe = run.folder / "refresh", recipe_of(run)
    earlier, later, sizes, whole, delta = (folder / name for name in ("earlier", "later", "sizes", "whole", "delta"))
    artifact = sizes / f"x{COMPRESSION}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for epochs, out in ((1, earlier), (2, later)):
        run_command(run, f"train, epochs {epochs}", "train", recipe, "--epochs", epochs, "--out", out)
    size = ("--compression", COMPRESSION)
    run_command(run, "compress", "compress", recipe, "--from", earlier, *size, "--out", sizes)
    run_command(run, "refresh, whole", "refresh", recipe, later, artifact, "--out", whole)
    run_command(run, "refresh, delta", "refresh", recipe, later, artifact, "--delta", "--out", delta)
    for name, target in (("tables", dnis.load(artifact, device=run.device)), ("folder", artifact)):
        seconds = seconds_of(lambda target=target: dnis.apply_delta(target, delta), run.device)
        run.figures.note("delta applied", seconds, "s", to=name)
    for path in (artifact, whole, delta):
        run.figures.note("bytes", num_bytes(path), folder=path.name)
