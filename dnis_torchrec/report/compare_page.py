"""A comparison as one self-contained HTML page: what every method reaches at the same bytes, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from dnis_torchrec.report import figures
from dnis_torchrec.report.compare_content import ComparisonContent, ComparisonRow
from dnis_torchrec.report.content import json_text, write_text
from dnis_torchrec.report.pareto import pareto_chart
from dnis_torchrec.report.rendering import render
from dnis_torchrec.report.tables import (
    PLUS_MINUS,
    best_groups,
    format_count,
    format_megabytes,
    format_metric,
    format_ratio,
    format_seconds,
    format_seeds,
    group_metric,
    is_higher_better,
)

NOTHING = "-"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, kw_only=True)
class ComparedLine:
    """One row of a comparison as it is printed; an empty one has dashes.

    Attributes:
        row: what is printed.
        size: the compression ratio asked for.
        megabytes: bytes in the form that is compared.
        form: that form.
        ratio: what the bytes came to, against the uncompressed tables.
        metrics: text of each metric, and whether it is the best at this size.
        difference: of the primary metric to the uncompressed model.
        tone: ``"better"``, ``"worse"`` or ``""``, of the difference.
        seeds: those that finished.
        seconds: of the one run that is reported.
        trials: runs that it took.
        seconds_of_trials: of all of them.
    """

    row: ComparisonRow
    size: str
    megabytes: str = NOTHING
    form: str = NOTHING
    ratio: str = NOTHING
    metrics: tuple[tuple[str, bool], ...] = ()
    difference: str = NOTHING
    tone: str = ""
    seeds: str = NOTHING
    seconds: str = NOTHING
    trials: str = NOTHING
    seconds_of_trials: str = NOTHING


def compared_lines(content: ComparisonContent) -> list[ComparedLine]:
    """The rows as they are printed, size by size, the uncompressed model first."""
    lines = []
    for size in sorted({row.size for row in content.rows}, key=lambda size: size or 0):
        lines += _lines_of_size(content, [row for row in content.rows if row.size == size])
    return lines


def _lines_of_size(content: ComparisonContent, rows: Sequence[ComparisonRow]) -> list[ComparedLine]:
    metrics = content.metrics
    best = {}
    for name in metrics:
        higher = content.higher_is_better if name == content.primary_metric else is_higher_better(name)
        whole = [row for row in rows if not row.missing]  # a mean over fewer seeds is one of other splits
        positions = best_groups([row.group for row in whole], name, higher) if higher is not None else ()
        best[name] = [whole[position] for position in positions]
    lines = []
    for row in rows:
        size = NOTHING if row.size is None else f"{row.size:g}"
        if row.is_empty:
            lines.append(ComparedLine(row=row, size=size, metrics=((NOTHING, False),) * len(metrics)))
            continue
        difference, tone = _difference(content, row)
        lines.append(
            ComparedLine(
                row=row,
                size=size,
                megabytes=format_megabytes(row.embedding_bytes),
                form=", ".join(row.forms),
                ratio=format_ratio(row.bytes_ratio),
                metrics=tuple((group_metric(row.group, name), row in best[name]) for name in metrics),
                difference=difference,
                tone=tone,
                seeds=format_seeds(row.group.seeds),
                seconds=format_seconds(row.group.seconds),
                trials=f"{row.trials:.0f}",
                seconds_of_trials=format_seconds(row.seconds_of_trials),
            )
        )
    return lines


def _difference(content: ComparisonContent, row: ComparisonRow) -> tuple[str, str]:
    """Text and tone of the difference to the uncompressed model."""
    difference = row.difference.get(content.primary_metric)
    if difference is None or row.method == "dense":
        return NOTHING, ""
    size = format_metric(abs(difference.mean))
    is_zero = float(size) == 0
    text = ("" if is_zero else "+" if difference.mean > 0 else MINUS) + size
    if difference.deviation is not None:
        text += f" {PLUS_MINUS} {format_metric(difference.deviation)}"
    if is_zero:
        return text, ""
    return text, "better" if (difference.mean > 0) == content.higher_is_better else "worse"


def write_comparison(path: Path, content: ComparisonContent) -> Path:
    """Writes the page as one HTML file, atomically; the same content gives the same bytes.

    Raises:
        ValueError: if the folder does not exist.
    """
    return write_text(path, render_comparison(content))


def render_comparison(content: ComparisonContent) -> str:
    """The page of `write_comparison` as a string."""
    lines = compared_lines(content)
    quality = quality_figure(content)
    metric, higher = content.primary_metric, content.higher_is_better
    points = [point for row in content.rows if (point := row.point(metric)) is not None]
    return render(
        "compare.html.j2",
        content=content,
        lines=lines,
        filled=[line for line in lines if not line.row.is_empty],
        missing=[line for line in lines if line.row.missing],
        forms=list(dict.fromkeys(form for row in content.rows for form in row.form_names())),
        pareto=Markup(pareto_chart(points, metric, higher_is_better=higher)) if points else "",
        quality=None if quality is None else Markup(figures.inline_svg(quality, "quality")),
        rules=json_text(dict(content.rules), "ComparisonContent.rules"),
        sentence=_sentence(content),
        cells_at_once=max(row.cells_at_once for row in content.rows),
        num_seeds=max(len(row.group.rows) for row in content.rows),
        format_count=format_count,
        format_megabytes=format_megabytes,
    )


def quality_figure(content: ComparisonContent) -> Figure | None:
    """Quality against size of every method, None if no row has the primary metric."""
    metric, higher = content.primary_metric, content.higher_is_better
    rows = [row for entry in content.rows for row in entry.group.rows if metric in row.metrics]
    return figures.quality_against_size(rows, metric, higher_is_better=higher) if rows else None


def _sentence(content: ComparisonContent) -> str:
    """What stands on the Pareto front, in words."""
    front = [row for row in content.rows if row.pareto]
    if not front:
        return f"No method has finished on {content.recipe} under every seed yet."
    names = [
        row.method if row.size is None else f"{row.method} at {row.size:g}"
        for row in sorted(front, key=lambda row: row.embedding_bytes)
    ]
    return (
        f"On {content.recipe}, no other method gives a better {content.primary_metric} in as few bytes as: "
        f"{', '.join(names)}."
    )
