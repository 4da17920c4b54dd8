"""The whole comparison: cells that have not finished are run, then all results are put side by
side."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dnis_torchrec.checks import check, visible
from dnis_torchrec.comparison.cells import Cell, read_crash, read_result
from dnis_torchrec.comparison.outputs import joined_versions, write_comparison_json, write_frame
from dnis_torchrec.comparison.plan import Comparison, RecipeFacts, recipe_facts
from dnis_torchrec.comparison.processes import run_cells
from dnis_torchrec.comparison.summary import comparison_rows
from dnis_torchrec.data.files import file_lock
from dnis_torchrec.data.users_code import errors_of_its_code
from dnis_torchrec.ranks import Ranks, on_rank_zero, together
from dnis_torchrec.report.compare_content import ComparisonContent
from dnis_torchrec.report.compare_page import write_comparison
from dnis_torchrec.report.provenance import Step
from dnis_torchrec.report.tables import format_metric, format_seconds
from dnis_torchrec.training.checkpoint import check_shared
from dnis_torchrec.training.shard import launched_ranks


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Results of a comparison."""

    content: ComparisonContent
    crashes: Mapping[Cell, Path]


def run_comparison(comparison: Comparison) -> Compared:
    """Runs the cells that have not finished, each in its own process, and writes tables and page
    into `out`."""
    with launched_ranks() as ranks, ExitStack() as stack:
        step = Step.now("compare", comparison.out)
        check_shared(comparison.out.parent, ranks.group)
        begun = _Begun(metric="", waiting=(), num_cells=0)
        with together(ranks.group):
            if ranks.is_first:
                facts = stack.enter_context(_planned(comparison))
                begun = stack.enter_context(_begun(comparison, facts, ranks.world_size))
        begun = _Begun(**json.loads(ranks.gather_texts(json.dumps(asdict(begun)))[0]))
        with together(ranks.group):  # what is left of others' cells is waited for when it is left
            _run(comparison, begun, ranks)
        return on_rank_zero(lambda: _written(comparison, facts, step), ranks.group)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """What ranks have to know of a comparison: the metric to tell of, names of cells that wait, how
    many there are."""

    metric: str
    waiting: Sequence[str]
    num_cells: int


@contextmanager
def _planned(comparison: Comparison) -> Iterator[RecipeFacts]:
    """The facts of the recipe, once nothing stands in the way; no other comparison is at work in
    `out` meanwhile."""
    with errors_of_its_code(comparison.recipe):
        facts = recipe_facts(comparison)
    comparison.check_rules(_rules(comparison, facts))
    comparison.check_first_seed(facts)
    comparison.out.mkdir(parents=True, exist_ok=True)
    with _alone(comparison.out):
        yield facts


@contextmanager
def _begun(comparison: Comparison, facts: RecipeFacts, world_size: int) -> Iterator[_Begun]:
    """The cells that wait, with the tasks of their processes written, and an empty folder for what
    they share."""
    finished, rules = comparison.finished(), _rules(comparison, facts)
    waiting = [cell for cell in comparison.cells() if cell not in finished]
    at_once = max(1, min(comparison.num_jobs, -(-len(waiting) // world_size)))
    for cell in waiting:
        comparison.task(cell, rules, cells_at_once=at_once).write(comparison.folder(cell))
    with _fresh_folder(comparison.trained):
        names = [cell.name for cell in waiting]
        yield _Begun(metric=facts.primary_metric, waiting=names, num_cells=len(comparison.cells()))


def _rules(comparison: Comparison, facts: RecipeFacts) -> dict[str, Any]:
    return comparison.rules() | facts.rules() | {"registry": comparison.registry}


def _run(comparison: Comparison, begun: _Begun, ranks: Ranks) -> None:
    """Runs this rank's cells, and tells of each."""
    own = [
        comparison.out / "cells" / name for name in begun.waiting[ranks.rank :: ranks.world_size]
    ]
    elsewhere = len(begun.waiting) - len(own)
    total, finished = begun.num_cells - elsewhere, begun.num_cells - len(begun.waiting)
    ended, speaker = count(finished + 1), "" if ranks.world_size == 1 else f"rank {ranks.rank} "
    with tqdm(
        total=total, initial=finished, unit="cell", disable=None if ranks.is_first else True
    ) as bar:

        def on_done(folder: Path) -> None:
            bar.update()
            told = f"{speaker}[{next(ended)}/{total}] {folder.name}: {_told(folder, begun.metric)}"
            bar.write(visible(told), file=sys.stderr)

        run_cells(own, jobs=comparison.num_jobs, on_done=on_done)


def _written(comparison: Comparison, facts: RecipeFacts, step: Step) -> Compared:
    """Gathers all cells and writes comparison.json, .csv and .html."""
    finished = comparison.finished()
    crashes = {
        cell: read_crash(comparison.folder(cell))
        for cell in comparison.cells()
        if cell not in finished
    }
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
        provenance=(step,),
        versions=joined_versions(list(finished.values())),
    )
    write_comparison_json(comparison.out / "comparison.json", content)
    write_frame(comparison.out / "comparison.csv", rows)
    write_comparison(comparison.out / "comparison.html", content)
    return Compared(
        content=content, crashes={cell: comparison.folder(cell) / "crash.txt" for cell in crashes}
    )


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
    """Keeps a second comparison out of the folder, which would run the same cells; the lock goes
    with the process."""
    with file_lock(out / "lock") as owner:
        check(
            owner is None,
            f"folder {out}",
            "no comparison at work",
            "one",
            "wait for it, or choose another --out",
        )
        yield
