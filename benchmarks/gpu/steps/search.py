"""A search from beginning to end as users run it: the command, its export, and what the artifact predicts."""

import json
import sys
import time
from pathlib import Path
from unittest import mock

from torch import nn

from benchmarks.gpu.step import Run
from dnis_torchrec.cli import main
from dnis_torchrec.data.batches import split_rows
from dnis_torchrec.data.recipe import Recipe
from examples.datasets.synthetic import generate
from examples.models import build_dlrm, build_tables, network_of_seed

RECIPE, SMALL_RECIPE, COMPRESSION = "examples.synthetic:demo", "benchmarks.gpu.steps.search:small", "6"
SMALL_SAMPLES, SMALL_BATCH = 1500, 256


def small(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The demo's recipe on few samples."""
    del data
    samples = generate(SMALL_SAMPLES, seed=0).samples
    samples = samples.sorted_by_frequency(split_rows(SMALL_SAMPLES, seed=seed)[0])

    def build() -> nn.Module:
        tables = build_tables(samples.num_embeddings, embedding_dim or 8, init_std=0.1)
        return build_dlrm(tables, dense_in_features=samples.dense.shape[1], dense_layers=[8], over_layers=[8])

    model, splits = network_of_seed(build, seed), samples.split(batch_size=SMALL_BATCH, seed=seed)
    return Recipe(model=model, data=splits, loss=nn.BCEWithLogitsLoss(), table_learning_rate=1e-2)


def recipe_of(run: Run) -> str:
    """Returns the name of the recipe to pass to commands."""
    return SMALL_RECIPE if run.is_stand_in else RECIPE


def arguments_of(run: Run, out: Path) -> list[str]:
    """The search itself."""
    few = ["--epochs", "1"] if run.is_stand_in else []
    return ["search", recipe_of(run), "--compression", COMPRESSION, "--out", str(out), "--overwrite", *few]


def run(run: Run) -> None:
    """Search, export, evaluation; each command's time, and the metrics of the artifact."""
    folder, evaluated = run.folder / "search", run.folder / "search" / "artifact.json"
    folder.mkdir(exist_ok=True)
    run_command(run, "search", *arguments_of(run, folder / "run"))
    run_command(run, "export", "export", folder / "run", "--out", folder / "artifact", "--overwrite")
    run_command(run, "evaluate", "evaluate", folder / "artifact", "--recipe", recipe_of(run), "--json", evaluated)
    for metric, value in json.loads(evaluated.read_text(encoding="utf-8"))["metrics"].items():
        run.figures.note("artifact", value, metric=metric)


def artifact_of(run_of_other: Run) -> Path:
    """The artifact that this step leaves beside its run; another step makes it where this one was left out."""
    artifact = run_of_other.folder / "search" / "artifact"
    if not artifact.is_dir():
        run(run_of_other)
    return artifact


def run_command(run: Run, name: str, *arguments: object) -> None:
    """Runs a command in this process, which has imported everything already, and notes its seconds."""
    started = time.monotonic()
    with mock.patch.object(sys, "argv", ["dnis", *map(str, arguments)]):
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise
    run.figures.note("command", time.monotonic() - started, "s", name=name, recipe=recipe_of(run))
