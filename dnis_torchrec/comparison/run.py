"""The whole comparison: cells that have not finished are run, then all results are put side by side."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tqdm import tqdm

from dnis_torchrec.checks import check, visible
from dnis_torchrec.comparison.cells import Cell, read_crash, read_result
from dnis_torchrec.comparison.outputs import joined_versions, write_comparison_json, write_frame
from dnis_torchrec.comparison.plan import Comparison, RecipeFacts, recipe_facts
from dnis_torchrec.comparison.processes import run_cells
from dnis_torchrec.comparison.summary import comparison_rows
from dnis_torchrec.data.users_code import errors_of_its_code
from dnis_torchrec.report.compare_content import ComparisonContent
from dnis_torchrec.report.compare_page import comparison_figures, write_comparison
from dnis_torchrec.report.figures import save_png, save_svg
from dnis_torchrec.report.tables import format_metric, format_seconds
from dnis_torchrec.storage.foreign_folders import file_lock


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Results of a comparison.

    Attributes:
        content: the rows, as OUT/comparison.json, comparison.csv and comparison.html hold them.
        crashes: cells that crashed -> the file with the traceback.
    """

    content: ComparisonContent
    crashes: Mapping[Cell, Path]


def run_comparison(comparison: Comparison) -> Compared:
    """Runs the cells that have not finished, each in its own process, and writes tables and page into `out`.

    Args:
        comparison: its plan. Cells that have finished in its `out` are taken as they are, crashed ones run again.

    Returns:
        The rows, and the cells that crashed, which leave the others alone.

    Raises:
        ValueError: before anything is trained, if the recipe cannot be found, refuses the data or lacks a split, if
            cells in `out` were run under other rules, or if another comparison is at work there.
        TypeError: before anything is trained, if the recipe's function returns no Recipe.
        Stopped: on a signal (see `dnis_torchrec.training.signals`); the processes have ended, finished cells stay.
    """
    with errors_of_its_code(comparison.recipe):
        facts = recipe_facts(comparison)
    rules = comparison.rules() | facts.rules() | {"registry": comparison.registry}
    comparison.check_rules(rules)
    comparison.check_first_seed(facts)
    comparison.out.mkdir(parents=True, exist_ok=True)
    with _alone(comparison.out):
        finished = comparison.finished()
        folders = {comparison.folder(cell): cell for cell in comparison.cells() if cell not in finished}
        at_once = max(1, min(comparison.num_jobs, len(folders)))
        for folder, cell in folders.items():
            comparison.task(cell, rules, cells_at_once=at_once).write(folder)
        total, ended = len(comparison.cells()), count(len(finished) + 1)
        with tqdm(total=total, initial=len(finished), unit="cell", disable=None) as bar:

            def on_done(folder: Path) -> None:
                bar.update()
                told = _told(folder, facts.primary_metric)
                bar.write(visible(f"[{next(ended)}/{total}] {folders[folder].name}: {told}"), file=sys.stderr)

            with _fresh_folder(comparison.trained):
                run_cells(list(folders), jobs=comparison.num_jobs, on_done=on_done)
        return _written(comparison, facts)


def _written(comparison: Comparison, facts: RecipeFacts) -> Compared:
    """Gathers all cells and writes comparison.json, .csv and .html, and its figures as .png and .svg."""
    finished = comparison.finished()
    crashes = {cell: read_crash(comparison.folder(cell)) for cell in comparison.cells() if cell not in finished}
    rows = comparison_rows(
        comparison.cells(),
        finished,
        {cell: crash or "" for cell, crash in crashes.items()},
        primary_metric=facts.primary_metric,
        higher_is_better=facts.higher_is_better,
    )
    content = ComparisonContent(
        recipe=comparison.recipe,
        rows=rows,
        primary_metric=facts.primary_metric,
        higher_is_better=facts.higher_is_better,
        rules=comparison.rules() | {"embedding_dims": dict(facts.embedding_dims)},
        notes=facts.notes,
        versions=joined_versions(list(finished.values())),
    )
    write_comparison_json(comparison.out / "comparison.json", content)
    write_frame(comparison.out / "comparison.csv", rows)
    write_comparison(comparison.out / "comparison.html", content)
    for name, figure in comparison_figures(content).items():
        save_png(figure, comparison.out / f"{name}.png", dpi=110)
        save_svg(figure, comparison.out / f"{name}.svg")
    return Compared(content=content, crashes={cell: comparison.folder(cell) / "crash.txt" for cell in crashes})


def _told(folder: Path, metric: str) -> str:
    """Says in a few words how a cell has ended."""
    result = read_result(folder)
    if result is None:
        return f"crashed, see {folder / 'crash.txt'}: {read_crash(folder)}"
    if result.trained is None:
        return f"left empty: {result.reason}"
    row = result.trained.row
    measured = f"{metric} {format_metric(row.metrics[metric])} in " if metric in row.metrics else ""
    return measured + format_seconds(result.trained.seconds_of_trials)


@contextmanager
def _fresh_folder(path: Path) -> Iterator[None]:
    """Takes away what a killed comparison has left there, and what this one leaves."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keeps a second comparison out of the folder, which would run the same cells; the lock goes with the process."""
    with file_lock(out / "lock") as owner:
        check(owner is None, f"folder {out}", "no comparison at work", "one", "wait for it, or choose another --out")
        yield
