"""Which L2 and learning rates suit a recipe's plain model: a small grid, judged by the selection split of seed 0.

    python -m benchmarks.plain_grid RECIPE [RECIPE ..] [--data DIR] --out FOLDER [--dims 64,8] [--epochs N]

Every run trains as `dnis train` does, on one thread, to its own early stop. The test split is never read. First L2 on
looked-up embeddings walks along `LADDER` at the recipe's own rates, until both neighbours of the best are worse. Then
the tables' rate, and after it that of everything else, walks by factors of three the way that is better, as long as a
step gains `LEAST_GAIN`. If a rate has changed, L2 walks on from where it stood. Dropout is the model's own, in the
recipe's function, and stays as it is.

Every run is a line of ``FOLDER/plain_grid.jsonl``, written when it ends: a run that stands there is not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch

from dnis_torchrec.data.files import parse_json
from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import process_group, shard

LADDER = (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.6, 1.0)
"""Values of L2, each a step from its neighbours."""
FIRST = (0.0, 0.01)
"""Where the walk begins: 0 is always measured, to say what L2 is worth."""
RATE_FACTORS = (1 / 3, 3.0)
"""By which rates walk."""
LEAST_GAIN = 2e-4
"""Loss that another rate has to gain: less is noise, and slow rates make all trainings of a recipe longer."""
FILE = "plain_grid.jsonl"


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a run is given."""

    embedding_l2: float
    table_learning_rate: float
    dense_learning_rate: float

    def scaled(self, name: str, factor: float) -> Point:
        """The point with one of its rates multiplied, in three digits."""
        return replace(self, **{name: float(f"{factor * getattr(self, name):.3g}")})


class Run(TypedDict):
    """A line of the file; loss and metric are those of the best epoch on the selection split, None if it diverged."""

    recipe: str
    embedding_dim: int
    embedding_l2: float
    table_learning_rate: float
    dense_learning_rate: float
    max_epochs: int
    selection_loss: float | None
    metric: str
    selection_metric: float | None
    best_epoch: int
    epochs: int
    seconds: float


class Grid:
    """The runs of one recipe at one D, those of the file among them."""

    def __init__(self, spec: str, data: Path | None, embedding_dim: int, max_epochs: int, file: Path) -> None:
        self._spec, self._embedding_dim, self._max_epochs, self._file = spec, embedding_dim, max_epochs, file
        self._recipe = build_recipe(spec, data, seed=0, embedding_dim=embedding_dim)
        own = (spec, embedding_dim, max_epochs)
        self.runs = [run for run in read_runs(file) if (run["recipe"], run["embedding_dim"], run["max_epochs"]) == own]

    @property
    def start(self) -> Point:
        """The recipe's own rates, without L2."""
        tables, dense = self._recipe.table_learning_rate, self._recipe.dense_learning_rate
        return Point(embedding_l2=0.0, table_learning_rate=tables, dense_learning_rate=dense)

    def loss(self, point: Point) -> float:
        """Selection loss of a point, trained unless the file has it; infinite where training diverged."""
        loss = self.run(point)["selection_loss"]
        return math.inf if loss is None else loss

    def run(self, point: Point) -> Run:
        """The run of a point, from the file if it stands there."""
        wanted = asdict(point).items()
        found = next((run for run in self.runs if wanted <= run.items()), None)
        if found is None:
            found = self._train(point)
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(found, allow_nan=False) + "\n")
            self.runs.append(found)
            print(line_of(found), flush=True)
        return found

    def _train(self, point: Point) -> Run:
        own = self._recipe
        train = copy.copy(own.data.train)  # each run begins with the first epoch's order
        recipe = replace(own, data=replace(own.data, train=train), **asdict(point))
        metric, _ = primary_metric(recipe.loss, recipe.data.selection)
        run = Run(
            recipe=self._spec,
            embedding_dim=self._embedding_dim,
            embedding_l2=point.embedding_l2,
            table_learning_rate=point.table_learning_rate,
            dense_learning_rate=point.dense_learning_rate,
            max_epochs=self._max_epochs,
            selection_loss=None,
            metric=metric,
            selection_metric=None,
            best_epoch=-1,
            epochs=0,
            seconds=0.0,
        )
        started = time.monotonic()
        with process_group() as device:
            torch.manual_seed(0)
            task = TrainTask(copy.deepcopy(recipe.model), recipe.loss, embedding_l2=recipe.embedding_l2)
            model, optimizer = shard(task, recipe, device)
            try:
                trained = train_plainly(
                    model, optimizer, recipe, device, max_epochs=self._max_epochs, patience=SearchSettings.patience
                )
                metrics = evaluate(model, recipe.data.selection, recipe.loss, device)
            except NonFiniteError as error:
                print(error, flush=True)
            else:
                run["selection_loss"], run["selection_metric"] = trained.selection_loss, metrics[metric]
                run["best_epoch"], run["epochs"] = trained.best_epoch, len(trained.history)
        run["seconds"] = round(time.monotonic() - started, 1)
        return run


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

    def loss_of(l2: float) -> float:
        return loss(replace(at, embedding_l2=l2))

    tried = set(first)
    while True:
        best = min(sorted(tried), key=loss_of)
        place = LADDER.index(best)
        lacking = [l2 for l2 in LADDER[max(place - 1, 0) : place + 2] if l2 not in tried]
        if not lacking:
            return replace(at, embedding_l2=best)
        tried.add(lacking[0])


def read_runs(file: Path) -> list[Run]:
    """The runs of a file, none if there is none."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [parse_json(line, Run, f"{file}, line {number}") for number, line in enumerate(lines, start=1)]


HEAD = "recipe | D | L2 | table rate | dense rate | selection loss | metric | best epoch | epochs | seconds"


def line_of(run: Run) -> str:
    """A run as a line of a table under `HEAD`."""
    loss, metric = (
        "-" if found is None else f"{found:.5f}" for found in (run["selection_loss"], run["selection_metric"])
    )
    rates = f"{run['table_learning_rate']:g} | {run['dense_learning_rate']:g}"
    length = f"{run['best_epoch']} | {run['epochs']} | {run['seconds']:.0f}"
    point = f"{run['recipe']} | {run['embedding_dim']} | {run['embedding_l2']:g} | {rates}"
    return f"{point} | {loss} | {run['metric']} {metric} | {length}"


def dims(text: str) -> list[int]:
    """Embedding dims with commas between them."""
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the runs that are lacking, prints all of them, and what was chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="module:function")
    parser.add_argument("--data", type=Path, help="folder of the recipes' data")
    parser.add_argument("--out", type=Path, required=True, help="folder of the file of runs")
    parser.add_argument("--dims", type=dims, default=[64, 8], help="D, commas between them (default 64,8)")
    parser.add_argument("--epochs", type=int, default=SearchSettings.epochs, help="at most, of a run")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for recipe in arguments.recipes:
        for dim in arguments.dims:
            grid = Grid(recipe, arguments.data, dim, arguments.epochs, arguments.out / FILE)
            chosen = grid.run(choose(grid.loss, grid.start))
            tables.append((grid.runs, chosen))
    print(f"\n{HEAD}")
    for runs, chosen in tables:
        print("\n".join(line_of(run) + (" *" if run is chosen else "") for run in runs))


if __name__ == "__main__":
    main()
