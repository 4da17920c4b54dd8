"""Summary of finished cells in rows: means and spread over seeds, differences within each seed, the
Pareto front."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dnis_torchrec.comparison.cells import Cell, CellResult, TrainedCell
from dnis_torchrec.report.compare_content import ComparisonRow
from dnis_torchrec.report.content import DENSE, NO_EMBEDDINGS, RowGroup, base_method
from dnis_torchrec.report.pareto_points import Difference, pareto_front
from dnis_torchrec.training.evaluate import ranking_mean

RANKING_MEAN = "recall_mrr_ndcg"
"""Name of `dnis_torchrec.training.evaluate.ranking_mean` in the rows of a comparison."""


def comparison_rows(
    cells: Sequence[Cell],
    finished: Mapping[Cell, CellResult],
    crashes: Mapping[Cell, str],
    *,
    primary_metric: str,
    higher_is_better: bool,
) -> tuple[ComparisonRow, ...]:
    """One row per method and size, in the order of the cells."""
    by_row: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.row_name, cell.size), []).append(cell)
    measured = {
        cell: result.trained for cell, result in finished.items() if result.trained is not None
    }
    trained = {cell: with_ranking_mean(value) for cell, value in measured.items()}
    dense = {cell.seed: value for cell, value in trained.items() if cell.row_name == DENSE}
    reasons = {
        cell: _missing_reason(cell, finished, crashes) for cell in cells if cell not in trained
    }
    rows = [_row(group, trained, dense, reasons) for group in by_row.values()]
    return _marked(rows, primary_metric, higher_is_better)


def with_ranking_mean(trained: TrainedCell) -> TrainedCell:
    """Puts `RANKING_MEAN` in front of a cell's metrics, if they are those of a ranking, which has
    several."""
    mean = ranking_mean(trained.row.metrics)
    if mean is None:
        return trained
    return replace(
        trained, row=replace(trained.row, metrics={RANKING_MEAN: mean, **trained.row.metrics})
    )


def _missing_reason(
    cell: Cell, finished: Mapping[Cell, CellResult], crashes: Mapping[Cell, str]
) -> str:
    return finished[cell].reason if cell in finished else f"crashed: {crashes[cell]}"


def _row(
    cells: Sequence[Cell],
    trained: Mapping[Cell, TrainedCell],
    dense: Mapping[int, TrainedCell],
    reasons: Mapping[Cell, str],
) -> ComparisonRow:
    measured = [trained[cell] for cell in cells if cell in trained]
    group = RowGroup(method=cells[0].row_name, rows=tuple(value.row for value in measured))
    missing = {cell.seed: reasons[cell] for cell in cells if cell in reasons}
    if not measured:
        return ComparisonRow(method=group.method, size=cells[0].size, group=group, missing=missing)
    return ComparisonRow(
        method=group.method,
        size=cells[0].size,
        group=group,
        missing=missing,
        forms=tuple(dict.fromkeys(value.form for value in measured)),
        embedding_bytes=statistics.fmean(value.embedding_bytes for value in measured),
        extra_bytes=statistics.fmean(value.extra_bytes for value in measured),
        network_bytes=statistics.fmean(value.network_bytes for value in measured),
        resident_bytes=_mean_of_each([value.resident_bytes for value in measured]),
        trials=statistics.fmean(value.trials for value in measured),
        seconds_of_trials=statistics.fmean(value.seconds_of_trials for value in measured),
        cells_at_once=max(value.cells_at_once for value in measured),
        difference=_differences(
            group, RowGroup(method=DENSE, rows=tuple(value.row for value in dense.values()))
        ),
    )


def _mean_of_each(sizes: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """name -> mean over the seeds that have it."""
    names = dict.fromkeys(name for own in sizes for name in own)
    return {name: statistics.fmean(own[name] for own in sizes if name in own) for name in names}


def _differences(group: RowGroup, dense: RowGroup) -> dict[str, Difference]:
    """metric -> the group minus the uncompressed model, within each seed that both have."""
    theirs = {row.seed: row.metrics for row in dense.rows}
    differences: dict[str, list[float]] = {}
    for row in group.rows:
        for name, value in row.metrics.items():
            if name in theirs.get(row.seed, {}):
                differences.setdefault(name, []).append(value - theirs[row.seed][name])
    return {
        name: Difference(
            mean=statistics.fmean(values),
            deviation=statistics.stdev(values) if len(values) > 1 else None,
            num_seeds=len(values),
        )
        for name, values in differences.items()
    }


def _marked(
    rows: Sequence[ComparisonRow], metric: str, higher_is_better: bool
) -> tuple[ComparisonRow, ...]:
    """Marks the Pareto front, equal rows alike; nothing is smaller than no embeddings at all, so
    these stand aside."""
    sized = (
        (index, row) for index, row in enumerate(rows) if base_method(row.method) != NO_EMBEDDINGS
    )
    points = {index: point for index, row in sized if (point := row.point(metric)) is not None}
    drawn = list(points.values())
    front = {
        (drawn[at].bytes, drawn[at].mean)
        for at in pareto_front(drawn, higher_is_better=higher_is_better)
    }
    marked = {index for index, point in points.items() if (point.bytes, point.mean) in front}
    return tuple(replace(row, pareto=index in marked) for index, row in enumerate(rows))
