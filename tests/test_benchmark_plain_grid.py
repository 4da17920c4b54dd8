"""The grid of plain trainings: where it walks, what it records, and that it never reads the test split."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest
from torchrec.datasets.utils import Batch

from benchmarks import plain_grid
from benchmarks.plain_grid import FILE, LADDER, Grid, Point, choose, read_runs
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.jobs.train_job import TrainJob, run_train
from tests import tiny

RECIPE = "tests.test_benchmark_plain_grid:demo"
START = Point(embedding_l2=0.0, table_learning_rate=0.003, dense_learning_rate=0.001)


class Untouchable:
    """A split that nobody may read."""

    def __iter__(self) -> Iterator[NoReturn]:
        pytest.fail("the test split was read")


@dataclass
class Turning:
    """Batches that begin one later in every epoch."""

    batches: list[Batch]
    epoch: int = 0

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return iter([*self.batches[self.epoch :], *self.batches[: self.epoch]])


def demo(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The tiny recipe, its test split out of reach."""
    recipe = tiny.demo(data, seed=seed, embedding_dim=embedding_dim)
    train = Turning(list(recipe.data.train))
    return replace(recipe, data=replace(recipe.data, train=train, test=Untouchable()))


class Bowl:
    """A selection loss with one lowest point, which remembers where it was asked."""

    def __init__(self, l2: float, tables: float = 0.003, dense: float = 0.001, *, slope: float = 1.0) -> None:
        self._l2, self._rates, self._slope = LADDER.index(l2), (tables, dense), slope
        self.asked: list[Point] = []

    def __call__(self, point: Point) -> float:
        if point not in self.asked:
            self.asked.append(point)
        found = (point.table_learning_rate, point.dense_learning_rate)
        far = sum(max(a / b, b / a) - 1 for a, b in zip(found, self._rates, strict=True))
        return abs(LADDER.index(point.embedding_l2) - self._l2) + self._slope * far

    @property
    def l2(self) -> list[float]:
        return [point.embedding_l2 for point in self.asked]


@pytest.mark.parametrize("lowest", LADDER)
def test_l2_walks_until_both_neighbours_are_worse(lowest: float) -> None:
    bowl = Bowl(lowest)
    assert choose(bowl, START) == replace(START, embedding_l2=lowest)
    place = LADDER.index(lowest)
    assert {0.0, *LADDER[max(place - 1, 0) : place + 2]} <= set(bowl.l2)


def test_few_runs_are_made() -> None:
    bowl = Bowl(0.01)
    choose(bowl, START)
    assert bowl.l2 == [0.0, 0.01, 0.003, 0.02, 0.01, 0.01, 0.01, 0.01]
    rates = [(point.table_learning_rate, point.dense_learning_rate) for point in bowl.asked[4:]]
    assert rates == [(0.001, 0.001), (0.009, 0.001), (0.003, 0.000333), (0.003, 0.003)]


def test_l2_walks_on_where_a_rate_has_changed() -> None:
    bowl = Bowl(0.03, tables=0.009, dense=0.000333)
    best = Point(embedding_l2=0.03, table_learning_rate=0.009, dense_learning_rate=0.000333)
    assert choose(bowl, START) == best
    assert {point.embedding_l2 for point in bowl.asked if replace(point, embedding_l2=0.03) == best} == {
        0.02,
        0.03,
        0.06,
    }


@pytest.mark.parametrize("factor", [1 / 27, 1 / 3, 1.0, 9.0])
def test_rates_walk_while_they_gain(factor: float) -> None:
    best = START.scaled("table_learning_rate", factor).scaled("dense_learning_rate", factor)
    bowl = Bowl(0.0, best.table_learning_rate, best.dense_learning_rate)
    found = choose(bowl, START)
    assert found.table_learning_rate == pytest.approx(best.table_learning_rate, rel=1e-2)
    assert found.dense_learning_rate == pytest.approx(best.dense_learning_rate, rel=1e-2)


def test_where_every_rate_diverges_the_walk_ends() -> None:
    assert choose(lambda point: math.inf, START) == START


def test_a_rate_that_gains_next_to_nothing_is_left() -> None:
    assert choose(Bowl(0.01, tables=0.001, slope=1e-5), START) == replace(START, embedding_l2=0.01)
    assert choose(Bowl(0.01, tables=0.001, slope=1e-3), START).table_learning_rate == 0.001


def test_every_run_is_a_line_that_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain_grid, "LADDER", (0.0, 0.01))
    arguments = [RECIPE, "--out", str(tmp_path), "--dims", "4", "--epochs", "2"]
    plain_grid.main(arguments)
    runs = read_runs(tmp_path / FILE)
    assert {(run["recipe"], run["embedding_dim"], run["epochs"], run["metric"]) for run in runs} == {
        (RECIPE, 4, 2, "auc")
    }
    assert len({tuple(run[name] for name in Point.__annotations__) for run in runs}) == len(runs) >= 6
    printed = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert printed[0] == plain_grid.HEAD
    assert [line.removesuffix(" *") for line in printed[1:]] == [plain_grid.line_of(run) for run in runs]
    (chosen,) = (run for run, line in zip(runs, printed[1:], strict=True) if line.endswith(" *"))
    assert chosen["selection_loss"] <= min(run["selection_loss"] for run in runs) + plain_grid.LEAST_GAIN
    monkeypatch.setattr(plain_grid, "train_plainly", lambda *_, **__: pytest.fail("it stands in the file"))
    plain_grid.main(arguments)
    assert read_runs(tmp_path / FILE) == runs


def test_a_run_is_the_training_of_dnis_train(tmp_path: Path) -> None:
    given = {"embedding_l2": 0.02, "embedding_dim": 4, "epochs": 3}
    run_train(TrainJob(recipe="tests.tiny:demo", data=None, out=tmp_path / "run", **given))
    grid = Grid("tests.tiny:demo", None, 4, 3, tmp_path / FILE)
    run = grid.run(replace(grid.start, embedding_l2=0.02))
    head = json.loads((tmp_path / "run" / "run.json").read_text())
    losses = [record["selection_loss"] for record in head["history"]]
    assert (run["selection_loss"], run["best_epoch"]) == (min(losses), head["best_epoch"])


def test_a_run_does_not_depend_on_those_before_it(tmp_path: Path) -> None:
    first, second = (Grid(RECIPE, None, 4, 2, tmp_path / name) for name in ("first", "second"))
    point = replace(first.start, embedding_l2=0.1)
    first.loss(first.start)
    assert first.loss(point) == second.loss(point) != first.loss(first.start)


def test_a_training_that_diverges_is_recorded_and_never_chosen(tmp_path: Path) -> None:
    grid = Grid(RECIPE, None, 4, 2, tmp_path / FILE)
    assert grid.loss(replace(grid.start, table_learning_rate=1e38)) == float("inf")
    assert read_runs(tmp_path / FILE) == grid.runs
    assert grid.runs[0]["selection_loss"] is None
