"""A comparison as lines of a table, for terminal and page alike: the metrics and the cost of every
method."""

from __future__ import annotations

from dataclasses import dataclass

from dnis_torchrec.report.compare_content import ComparisonContent, ComparisonRow
from dnis_torchrec.report.content import DENSE
from dnis_torchrec.report.tables import (
    best_groups,
    format_count,
    format_difference,
    format_megabytes,
    format_metric,
    format_ratio,
    format_seconds,
    format_seeds,
    group_metric,
    is_higher_better,
    of_fewer_seeds,
)

NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class ComparedLine:
    """One row of a comparison as it is printed; an empty one has dashes."""

    row: ComparisonRow
    size: str
    parameters: str = NOTHING
    megabytes: str = NOTHING
    form: str = NOTHING
    precision: str = NOTHING
    ratio: str = NOTHING
    metrics: tuple[tuple[str, bool], ...] = ()
    difference: str = NOTHING
    tone: str = ""
    seeds: str = NOTHING
    seconds: str = NOTHING
    trials: str = NOTHING
    seconds_of_trials: str = NOTHING


def compared_lines(content: ComparisonContent) -> list[ComparedLine]:
    """The rows as they are printed, size by size, the uncompressed model first; within a size the
    best one first."""
    return [line for size in sizes_of(content) for line in lines_of_size(content, size)]


def sizes_of(content: ComparisonContent) -> list[float | None]:
    """The sizes asked for, None for the uncompressed model first."""
    return sorted({row.size for row in content.rows}, key=lambda size: size or 0)


def ranked_rows(content: ComparisonContent, size: float | None) -> list[ComparisonRow]:
    """The rows of a size, the best primary metric first; then those that lack it in some seed, then
    empty ones."""
    sign = -1 if content.higher_is_better else 1

    def place(row: ComparisonRow) -> tuple[bool, bool, bool, float]:
        mean = row.group.mean(content.primary_metric) if row.group.rows else None
        return (
            row.is_empty,
            not row.is_whole(content.primary_metric),
            mean is None,
            sign * (mean or 0.0),
        )

    return sorted((row for row in content.rows if row.size == size), key=place)


def lines_of_size(content: ComparisonContent, size: float | None) -> list[ComparedLine]:
    """The rows of one size as they are printed."""
    rows, metrics = ranked_rows(content, size), content.metrics
    best = {}
    for name in metrics:
        higher = (
            content.higher_is_better if name == content.primary_metric else is_higher_better(name)
        )
        whole = [row for row in rows if row.is_whole(name)]
        positions = (
            best_groups([row.group for row in whole], name, higher) if higher is not None else ()
        )
        best[name] = [whole[position] for position in positions]
    lines = []
    for row in rows:
        asked = NOTHING if row.size is None else f"{row.size:g}"
        if row.is_empty:
            lines.append(
                ComparedLine(row=row, size=asked, metrics=((NOTHING, False),) * len(metrics))
            )
            continue
        difference, tone = _difference(content, row)
        lines.append(
            ComparedLine(
                row=row,
                size=asked,
                parameters=format_count(row.group.parameters),
                megabytes=format_megabytes(row.embedding_bytes),
                form=", ".join(row.forms),
                precision=row.precision,
                ratio=format_ratio(row.group.compression),
                metrics=tuple((_metric(row, name), row in best[name]) for name in metrics),
                difference=difference,
                tone=tone,
                seeds=format_seeds(row.group.seeds),
                seconds=format_seconds(row.group.seconds),
                trials=f"{row.trials:.0f}",
                seconds_of_trials=format_seconds(row.seconds_of_trials),
            )
        )
    return lines


def _metric(row: ComparisonRow, name: str) -> str:
    """Text of a metric."""
    num_seeds = row.num_seeds(name)
    return group_metric(row.group, name) + (
        of_fewer_seeds(num_seeds, len(row.group.rows)) if num_seeds else ""
    )


def _difference(content: ComparisonContent, row: ComparisonRow) -> tuple[str, str]:
    """Text and tone of the difference to the uncompressed model."""
    difference = row.difference.get(content.primary_metric)
    if difference is None or row.method == DENSE:
        return NOTHING, ""
    text = difference.told(len(row.group.rows))
    if format_difference(difference.mean) == format_metric(0):
        return text, ""
    return text, "better" if (difference.mean > 0) == content.higher_is_better else "worse"


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """The cost of one method at every size."""

    method: str
    cells: tuple[tuple[str, str], ...]


def cost_lines(content: ComparisonContent) -> list[CostLine]:
    """Returns the cost of every method at every size of `sizes_of`, methods in the order of the
    comparison."""
    rows = {(row.method, row.size): row for row in content.rows if not row.is_empty}
    plain = next(
        (row.group.seconds for row in content.rows if row.method == DENSE and not row.is_empty),
        None,
    )
    lines = []
    for method in dict.fromkeys(row.method for row in rows.values()):
        of_sizes = (rows.get((method, size)) for size in sizes_of(content))
        cells = tuple(("", "") if row is None else _cost(row, plain) for row in of_sizes)
        lines.append(CostLine(method=method, cells=cells))
    return lines


def _cost(row: ComparisonRow, plain_seconds: float | None) -> tuple[str, str]:
    told = (
        [f"{row.trials:.0f} runs, the one taken {format_seconds(row.group.seconds)}"]
        if row.trials > 1
        else []
    )
    if plain_seconds:
        told.append(f"{format_ratio(float(f'{row.seconds_of_trials / plain_seconds:.2g}'))} dense")
    return format_seconds(row.seconds_of_trials), ", ".join(told)


def missing_reasons(content: ComparisonContent) -> list[tuple[str, str]]:
    """(rows, why they are missing or lack seeds), one entry per reason."""
    rows: dict[str, list[str]] = {}
    for row in content.rows:
        if row.missing:
            name = row.method if row.size is None else f"{row.method} at {row.size:g}"
            rows.setdefault(row.reason, []).append(name)
    return [(", ".join(names), reason) for reason, names in rows.items()]
