"""Tunes L2 and learning rates of a recipe's plain model on a small grid, by the selection split of seed 0.

    python -m benchmarks.plain_grid RECIPE [RECIPE ..] [--data DIR] --out FOLDER [--dims 64,8] [--epochs N]

Every run trains as `dnis train` does, on one thread, to its own early stop. The test split is never read. First L2 on
looked-up embeddings walks along `LADDER` at the recipe's own rates, until both neighbours of the best are worse. Then
the rate of the tables changes by factors of three, as long as a step gains `LEAST_GAIN`; then the rate of everything
else. If a rate has changed, L2 walks on from its last value. Dropout stays as the recipe sets it.

Every run is a line of ``FOLDER/plain_grid.jsonl``, written when it ends: a run that stands there is not repeated. Its
loss and metric are those of the best epoch on the selection split, null if it diverged.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.rivals.task import Recipes, Task, train
from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import process_group

LADDER = (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.6, 1.0)
"""Values of L2, each a step from its neighbours."""
FIRST = (0.0, 0.01)
"""Where the walk begins: 0 is always measured, to say what L2 is worth."""
RATE_FACTORS = (1 / 3, 3.0)
"""By which rates walk."""
LEAST_GAIN = 2e-4
"""Loss that another rate has to gain: less is noise, and slow rates make all trainings of a recipe longer."""
FILE = "plain_grid.jsonl"

Run = dict[str, Any]
"""A line of the file."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a run is given."""

    embedding_l2: float
    table_learning_rate: float
    dense_learning_rate: float

    def scaled(self, name: str, factor: float) -> Self:
        """The point with one of its rates multiplied, in three digits."""
        return replace(self, **{name: float(f"{factor * getattr(self, name):.3g}")})


class Grid:
    """The runs of one recipe at one D, those of the file among them."""

    def __init__(self, spec: str, data: Path | None, embedding_dim: int, max_epochs: int, file: Path) -> None:
        self._build = Recipes(lambda _: build_recipe(spec, data, seed=0, embedding_dim=embedding_dim))
        self._file = file
        self._head = {"recipe": spec, "embedding_dim": embedding_dim, "max_epochs": max_epochs}
        self.runs = [run for run in read_runs(file) if self._head.items() <= run.items()]

    @property
    def start(self) -> Point:
        """The recipe's own rates, without L2."""
        recipe = self._build(None)
        tables, dense = recipe.table_learning_rate, recipe.dense_learning_rate
        return Point(embedding_l2=0.0, table_learning_rate=tables, dense_learning_rate=dense)

    def loss(self, point: Point) -> float:
        """Selection loss of a point, trained unless the file has it; infinite where training diverged."""
        loss = self.run(point)["selection_loss"]
        return math.inf if loss is None else loss

    def run(self, point: Point) -> Run:
        """The run of a point, from the file if it stands there."""
        for run in self.runs:
            if asdict(point).items() <= run.items():
                return run
        run = self._train(point)
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(run, allow_nan=False) + "\n")
        self.runs.append(run)
        print(line_of(run), flush=True)
        return run

    def _train(self, point: Point) -> Run:
        recipe, started = replace(self._build(None), **asdict(point)), time.monotonic()
        metric, _ = primary_metric(recipe.loss, recipe.data.selection)
        run = self._head | asdict(point) | {"selection_loss": None, "metric": metric, "selection_metric": None}
        run |= {"best_epoch": -1, "epochs": 0}
        with process_group() as device:
            rules = {"max_epochs": self._head["max_epochs"], "patience": SearchSettings.patience}
            try:
                model, training = train(Task(build=self._build, device=device, **rules), recipe)
                metrics = evaluate(TrainTask(model, recipe.loss), recipe.data.selection, recipe.loss, device)
            except NonFiniteError as error:
                print(error, flush=True)
            else:
                run |= {"selection_loss": training.selection_loss, "selection_metric": metrics[metric]}
                run |= {"best_epoch": training.best_epoch, "epochs": len(training.history)}
        return run | {"seconds": round(time.monotonic() - started, 1)}


def choose(loss: Callable[[Point], float], start: Point) -> Point:
    """The best point that the grid of the module's docstring meets."""
    best = _walk_l2(loss, start, FIRST)
    rates = best
    for name in ("table_learning_rate", "dense_learning_rate"):
        rates = _walk_rate(loss, rates, name)
    return best if rates == best else _walk_l2(loss, rates, [rates.embedding_l2])


def _walk_rate(loss: Callable[[Point], float], at: Point, name: str) -> Point:
    """Multiplies a rate by the better one of the factors, again and again while that gains enough."""
    factor = min(RATE_FACTORS, key=lambda factor: loss(at.scaled(name, factor)))
    while loss(other := at.scaled(name, factor)) < loss(at) - LEAST_GAIN:
        at = other
    return at


def _walk_l2(loss: Callable[[Point], float], at: Point, first: Sequence[float]) -> Point:
    """Tries neighbours on the ladder until both of the best are worse; of equals the smaller L2 is better."""
    tried = set(first)
    while True:
        best = min(sorted(tried), key=lambda l2: loss(replace(at, embedding_l2=l2)))
        place = LADDER.index(best)
        lacking = [l2 for l2 in LADDER[max(place - 1, 0) : place + 2] if l2 not in tried]
        if not lacking:
            return replace(at, embedding_l2=best)
        tried.add(lacking[0])


def read_runs(file: Path) -> list[Run]:
    """The runs of a file, none if there is none."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


HEAD = "recipe | D | L2 | table rate | dense rate | selection loss | metric | best epoch | epochs | seconds"


def line_of(run: Mapping[str, Any]) -> str:
    """A run as a line of a table under `HEAD`."""
    loss, metric = ("-" if run[name] is None else f"{run[name]:.5f}" for name in ("selection_loss", "selection_metric"))
    rates = f"{run['table_learning_rate']:g} | {run['dense_learning_rate']:g}"
    length = f"{run['best_epoch']} | {run['epochs']} | {run['seconds']:.0f}"
    point = f"{run['recipe']} | {run['embedding_dim']} | {run['embedding_l2']:g} | {rates}"
    return f"{point} | {loss} | {run['metric']} {metric} | {length}"


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the runs that are lacking, prints all of them, and what was chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="module:function")
    parser.add_argument("--data", type=Path, help="folder of the recipes' data")
    parser.add_argument("--out", type=Path, required=True, help="folder of the file of runs")
    parser.add_argument("--dims", default="64,8", help="D, commas between them (default 64,8)")
    parser.add_argument("--epochs", type=int, default=SearchSettings.epochs, help="at most, of a run")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for recipe in arguments.recipes:
        for dim in map(int, arguments.dims.split(",")):
            grid = Grid(recipe, arguments.data, dim, arguments.epochs, arguments.out / FILE)
            chosen = grid.run(choose(grid.loss, grid.start))
            tables.append((grid.runs, chosen))
    print(f"\n{HEAD}")
    for runs, chosen in tables:
        print("\n".join(line_of(run) + (" *" if run is chosen else "") for run in runs))


if __name__ == "__main__":
    main()
