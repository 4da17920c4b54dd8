"""How far a method is ahead within each seed, from the finished cells of `dnis compare`.

    python -m benchmarks.by_seed OUT [OUT2 ..] --method dnis --json FILE

The table of a comparison has means; whether they hold within every seed is said here. Positive is better, whatever the
metric's direction. A row per size, metric and rival: the uncompressed model; the best uniform tables of any size,
uncompressed ones counted; the best of all other rows of the same size. The best is sought anew in each seed and for
each metric, with and without alpha's split as training data. Several folders of one recipe count as one comparison; a
cell that stands in two of them is taken from the first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.files import output_file
from dnis_torchrec.checks import check
from dnis_torchrec.comparison.cells import Cell, CellResult, read_result
from dnis_torchrec.comparison.summary import with_ranking_mean
from dnis_torchrec.report.content import DENSE, json_text, write_text
from dnis_torchrec.report.tables import format_difference, is_higher_better

ALIKE = ("recipe", "data", "embedding_dims", "patience", "max_epochs")
"""Rules that results must share to stand beside each other, where both have them; folders may differ in the methods'
number of trials, and in the settings of a recipe that has changed in between."""
BEST_UNIFORM = "the best uniform of any size"
BEST_OTHER = "the best other of its size"


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How far a method is ahead of a rival.

    Attributes:
        size: compression asked for.
        metric: its name.
        rival: the uncompressed model, `BEST_UNIFORM` or `BEST_OTHER`.
        by_seed: seed -> by how much the method is better; seeds that both have.
    """

    size: float
    metric: str
    rival: str
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.by_seed.values())


def read_cells(folders: Sequence[Path]) -> dict[Cell, CellResult]:
    """The trained cells of all folders.

    Raises:
        ValueError: if a folder has none, or was run under other rules than the first.
    """
    found: dict[Cell, CellResult] = {}
    for folder in folders:
        results = [read_result(cell) for cell in sorted((folder / "cells").glob("*"))]
        trained = [result for result in results if result is not None and result.trained is not None]
        check(bool(trained), f"folder {folder}", "expected finished cells of `dnis compare`", "none")
        for result in trained:
            first = next(iter(found.values()), result)
            for rule in ALIKE:
                theirs = first.rules.get(rule)
                own = result.rules.get(rule, theirs)
                wanted = f"expected {theirs!r} as in {folders[0]}"
                check(theirs is None or own == theirs, f"folder {folder}, {rule}", wanted, repr(own))
            found.setdefault(result.cell, result)
    return found


def margins(cells: Mapping[Cell, CellResult], method: str) -> list[Margin]:
    """How far a method is ahead, size by size and metric by metric.

    Args:
        cells: as `read_cells` gives them.
        method: as tables name it, such as ``"dnis"`` or ``"uniform+validation"``.

    Raises:
        ValueError: if the method has no cell with a size.
    """
    metrics = {
        cell: with_ranking_mean(result.trained).row.metrics
        for cell, result in cells.items()
        if result.trained is not None
    }
    names = sorted({cell.row_name for cell in metrics if cell.size is not None})
    check(method in names, "--method", f"expected one of {names}", repr(method))
    ours = [cell for cell in metrics if cell.row_name == method]
    others = [cell for cell in metrics if cell.row_name != method]
    found = []
    for size in sorted({cell.size for cell in ours if cell.size is not None}):
        rivals = {
            DENSE: [cell for cell in others if cell.row_name == DENSE],
            BEST_UNIFORM: [cell for cell in others if cell.method in (DENSE, "uniform", "uniform-grid")],
            BEST_OTHER: [cell for cell in others if cell.size == size],
        }
        mine = [cell for cell in ours if cell.size == size]
        for metric in _metrics_of(metrics[cell] for cell in mine):
            # A split of one class has no AUC: such a seed is left out.
            measured = {cell: values[metric] for cell, values in metrics.items() if metric in values}
            for rival, theirs in rivals.items():
                by_seed = _ahead(mine, theirs, measured, metric)
                if by_seed:
                    found.append(Margin(size=size, metric=metric, rival=rival, by_seed=by_seed))
    return found


def _metrics_of(cells: Iterable[Mapping[str, float]]) -> list[str]:
    """Those with a direction that any cell has; `loss` is one of them by another name."""
    names = dict.fromkeys(name for values in cells for name in values)
    return [name for name in names if name != "loss" and is_higher_better(name) is not None]


def _ahead(mine: Sequence[Cell], theirs: Sequence[Cell], values: Mapping[Cell, float], metric: str) -> dict[int, float]:
    """seed -> how much better mine is than the best of theirs, of the seeds that both have."""
    sign = 1 if is_higher_better(metric) else -1
    by_seed = {}
    for cell in sorted((cell for cell in mine if cell in values), key=lambda cell: cell.seed):
        rivals = [other for other in theirs if other.seed == cell.seed and other in values]
        gains = [sign * (values[cell] - values[other]) for other in rivals]
        if gains:
            by_seed[cell.seed] = min(gains)
    return by_seed


def main() -> None:
    """Prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="OUT", help="what `dnis compare --out` named")
    parser.add_argument("--method", default="dnis", help="whose margins, as the table names it")
    parser.add_argument("--json", type=output_file, dest="json_file")
    arguments = parser.parse_args()
    try:
        rows = margins(read_cells(arguments.folders), arguments.method)
    except ValueError as error:
        parser.error(str(error))
    seeds = sorted({seed for row in rows for seed in row.by_seed})
    print(" | ".join(["size", "metric", "ahead of", *(f"seed {seed}" for seed in seeds), "mean", "least"]))
    for row in rows:
        by_seed = [format_difference(row.by_seed[seed]) if seed in row.by_seed else "-" for seed in seeds]
        ends = [format_difference(value) for value in (row.mean, min(row.by_seed.values()))]
        print(" | ".join([f"{row.size:g}", row.metric, row.rival, *by_seed, *ends]))
    if arguments.json_file:
        described = {"method": arguments.method, "rows": [asdict(row) | {"mean": row.mean} for row in rows]}
        write_text(arguments.json_file, json_text(described, str(arguments.json_file)) + "\n")


if __name__ == "__main__":
    main()
