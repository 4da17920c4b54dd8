"""A search from beginning to end as users run it: the command, its export, and what the artifact predicts."""

from __future__ import annotations

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
from examples.models import build_dlrm, build_tables

RECIPE, SMALL_RECIPE = "examples.synthetic:demo", "benchmarks.gpu.steps.search:small"
SMALL_SAMPLES, SMALL_BATCH = 1500, 256


def small(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The demo's recipe on few samples."""
    del data
    samples = generate(SMALL_SAMPLES, seed=0).samples
    samples = samples.sorted_by_frequency(split_rows(SMALL_SAMPLES, seed=seed)[0])
    tables = build_tables(samples.num_embeddings, embedding_dim or 8, init_std=0.1)
    model = build_dlrm(tables, dense_in_features=samples.dense.shape[1], dense_layers=[8], over_layers=[8])
    splits = samples.split(batch_size=SMALL_BATCH, seed=seed)
    return Recipe(model=model, data=splits, loss=nn.BCEWithLogitsLoss(), table_learning_rate=1e-2)


def run(run: Run) -> None:
    """Search, export, evaluation; each command's time, and the metrics of the model searched and of the artifact."""
    folder = run.folder / "search"
    recipe = SMALL_RECIPE if run.is_stand_in else RECIPE
    few = ["--epochs", "1"] if run.is_stand_in else []
    searched, artifact, evaluated = folder / "run", folder / "artifact", folder / "artifact.json"
    folder.mkdir(exist_ok=True)
    commands = {
        "search": ["search", recipe, "--compression", "6", "--out", str(searched), *few],
        "export": ["export", str(searched), "--out", str(artifact)],
        "evaluate": ["evaluate", str(artifact), "--recipe", recipe, "--json", str(evaluated)],
    }
    for name, arguments in commands.items():
        started = time.monotonic()
        dnis(arguments)
        run.figures.note("command", time.monotonic() - started, "s", name=name, recipe=recipe)
    for metric, value in json.loads(evaluated.read_text(encoding="utf-8")).items():
        if isinstance(value, float):
            run.figures.note("artifact", value, metric=metric)


def dnis(arguments: list[str]) -> None:
    """Runs the command in this process, which has imported everything already."""
    with mock.patch.object(sys, "argv", ["dnis", *arguments]):
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise
