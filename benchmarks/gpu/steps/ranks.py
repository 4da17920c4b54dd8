"""Runs the search step under torchrun: one rank per GPU, or two gloo ranks on a CPU."""

import json

import torch

from benchmarks.gpu.step import Run
from benchmarks.gpu.steps import search


def run(run: Run) -> None:
    """Notes seconds, metrics, and how far these are beyond those of one process, which sums in another order."""
    number = 2 if run.is_stand_in else torch.cuda.device_count()
    folder = search.artifact_of(run).parent
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", "-m", "dnis_torchrec")
    run.python("search", *launcher, *search.arguments_of(run, folder / "run_of_ranks"), ranks=number)
    files = (folder / name / "run.json" for name in ("run", "run_of_ranks"))
    alone, found = (json.loads(file.read_text(encoding="utf-8"))["metrics"] for file in files)
    for metric, value in found.items():
        run.figures.note("metric", value, metric=metric, ranks=number)
        run.figures.note("metric, beyond one process", value - alone[metric], metric=metric, ranks=number)
