"""Every row of a comparison seed by seed, and how far a method is ahead there, from the cells of `dnis compare`.

    python -m benchmarks.by_seed OUT [OUT2 ..] --method dnis --json FILE

The table of a comparison has means; whether they hold within every seed is said here. First what each row has, then
margins, positive where the method is better, whatever the metric's direction: a line per size, metric and rival. Rivals
are the uncompressed model; the best uniform tables of any size, uncompressed ones counted; the best of all other rows
of the same size; and each row of that size, or of none, by itself. The best is sought anew in each seed and for each
metric, with and without alpha's split as training data. Several folders of one recipe count as one comparison; a cell
that stands in two of them is taken from the first.
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
from dnis_torchrec.data.files import write_text
from dnis_torchrec.report.content import DENSE, json_text
from dnis_torchrec.report.tables import format_difference, is_higher_better

ALIKE = ("recipe", "data", "embedding_dims", "patience", "max_epochs")
"""Rules that results must share to stand beside each other, where both have them; folders may differ in the methods'
number of trials, and in the settings of a recipe that has changed in between."""
BEST_UNIFORM = "the best uniform of any size"
BEST_OTHER = "the best other of its size"


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Margin by which a method is ahead of a rival.

    Attributes:
        size: compression asked for.
        metric: its name.
        rival: the uncompressed model, `BEST_UNIFORM`, `BEST_OTHER` or the name of another row.
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

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds, 0 of one."""
        return _deviation(self.by_seed)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The values of one metric in a row.

    Attributes:
        row_name: of the method, such as ``"uniform+validation"``.
        size: compression asked for, None for a row without size.
        metric: its name.
        by_seed: seed -> value.
        compression: bytes of the uncompressed tables over bytes served, the mean of these seeds.
    """

    row_name: str
    size: float | None
    metric: str
    by_seed: Mapping[int, float]
    compression: float


def read_cells(folders: Sequence[Path]) -> dict[Cell, CellResult]:
    """The trained cells of all folders.

    Raises:
        ValueError: if a folder has none, or was run under other rules than the first.
    """
    found: dict[Cell, CellResult] = {}
    for folder in folders:
        results = [read_result(cell) for cell in sorted((folder / "cells").glob("*"))]
        trained = [result for result in results if result is not None and result.trained is not None]
        check(bool(trained), f"folder {folder}", "finished cells of `dnis compare`", "none")
        for result in trained:
            first = next(iter(found.values()), result)
            for rule in ALIKE:
                theirs = first.rules.get(rule)
                own = result.rules.get(rule, theirs)
                wanted = f"{theirs!r} as in {folders[0]}"
                check(theirs is None or own == theirs, f"folder {folder}, {rule}", wanted, repr(own))
            found.setdefault(result.cell, result)
    return found


def measured(cells: Mapping[Cell, CellResult]) -> list[Measured]:
    """Returns every metric of every row, seed by seed, rows without size first."""
    of_rows: dict[tuple[float, str], list[CellResult]] = {}
    for cell, result in cells.items():
        of_rows.setdefault((cell.size or 0.0, cell.row_name), []).append(result)
    found = []
    for (size, row_name), results in sorted(of_rows.items()):
        trained = {result.cell.seed: with_ranking_mean(result.trained) for result in results if result.trained}
        metrics = {seed: own.row.metrics for seed, own in sorted(trained.items())}
        compression = statistics.fmean(own.dense_bytes / max(1, own.embedding_bytes) for own in trained.values())
        for metric in _metrics_of(metrics.values()):
            by_seed = {seed: values[metric] for seed, values in metrics.items() if metric in values}
            own = Measured(
                row_name=row_name, size=size or None, metric=metric, by_seed=by_seed, compression=compression
            )
            found.append(own)
    return found


def margins(cells: Mapping[Cell, CellResult], method: str) -> list[Margin]:
    """Returns the margins by which a method is ahead, size by size and metric by metric.

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
    check(method in names, "--method", f"one of {names}", repr(method))
    ours = [cell for cell in metrics if cell.row_name == method]
    others = [cell for cell in metrics if cell.row_name != method]
    found = []
    for size in sorted({cell.size for cell in ours if cell.size is not None}):
        rivals = {
            DENSE: [cell for cell in others if cell.row_name == DENSE],
            BEST_UNIFORM: [cell for cell in others if cell.method in (DENSE, "uniform", "uniform-grid")],
            BEST_OTHER: [cell for cell in others if cell.size == size],
        }
        for cell in others:
            if cell.size in (size, None) and cell.row_name != DENSE:
                rivals.setdefault(cell.row_name, []).append(cell)
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


def _deviation(by_seed: Mapping[int, float]) -> float:
    return statistics.stdev(by_seed.values()) if len(by_seed) > 1 else 0.0


def main() -> None:
    """Prints two tables, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="OUT", help="what `dnis compare --out` named")
    parser.add_argument("--method", default="dnis", help="whose margins, as the table names it")
    parser.add_argument("--json", type=output_file, dest="json_file")
    arguments = parser.parse_args()
    try:
        cells = read_cells(arguments.folders)
        rows = margins(cells, arguments.method)
    except ValueError as error:
        parser.error(str(error))
    seeds = sorted({cell.seed for cell in cells})
    names = [f"seed {seed}" for seed in seeds]
    print(" | ".join(["size", "of bytes", "row", "metric", *names, "mean", "deviation"]))
    for own in measured(cells):
        by_seed = [f"{own.by_seed[seed]:.4f}" if seed in own.by_seed else "-" for seed in seeds]
        ends = [f"{value:.4f}" for value in (statistics.fmean(own.by_seed.values()), _deviation(own.by_seed))]
        size = "-" if own.size is None else f"{own.size:g}"
        print(" | ".join([size, f"{own.compression:.2f}", own.row_name, own.metric, *by_seed, *ends]))
    print("\n" + " | ".join(["size", "metric", "ahead of", *names, "mean", "deviation", "least"]))
    for row in rows:
        by_seed = [format_difference(row.by_seed[seed]) if seed in row.by_seed else "-" for seed in seeds]
        mean, least = (format_difference(value) for value in (row.mean, min(row.by_seed.values())))
        print(" | ".join([f"{row.size:g}", row.metric, row.rival, *by_seed, mean, f"{row.deviation:.4f}", least]))
    if arguments.json_file:
        described = {"method": arguments.method, "rows": [asdict(row) | {"mean": row.mean} for row in rows]}
        described["measured"] = [asdict(own) for own in measured(cells)]
        write_text(arguments.json_file, json_text(described, str(arguments.json_file)) + "\n")


if __name__ == "__main__":
    main()
