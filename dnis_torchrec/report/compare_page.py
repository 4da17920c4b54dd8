"""A comparison as one self-contained HTML page: the metrics of every method at the same bytes, and
its cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from plotly import graph_objects as go

from dnis_torchrec.data.files import write_text
from dnis_torchrec.report import charts
from dnis_torchrec.report.compare_content import ComparisonContent, ComparisonRow
from dnis_torchrec.report.compare_lines import (
    compared_lines,
    cost_lines,
    lines_of_size,
    missing_reasons,
    ranked_rows,
    sizes_of,
)
from dnis_torchrec.report.content import (
    DENSE,
    NO_EMBEDDINGS,
    WITH_VALIDATION,
    base_method,
    json_text,
)
from dnis_torchrec.report.key_numbers import KeyNumber
from dnis_torchrec.report.page import quality_caption
from dnis_torchrec.report.pareto_points import ParetoPoint
from dnis_torchrec.report.provenance import commands
from dnis_torchrec.report.rendering import render
from dnis_torchrec.report.tables import (
    PLUS_MINUS,
    format_count,
    format_difference,
    format_metric,
    group_metric,
)

MANY_METRICS = 3
"""Number of metrics above which deviations stand below their means, so that the table stays
readable."""
FEW_LINES = 24
"""Up to so many, the table of bytes is open from the start."""


def write_comparison(path: Path, content: ComparisonContent) -> Path:
    """Writes the page as one HTML file, atomically; the same content gives the same bytes."""
    return write_text(path, render_comparison(content))


def render_comparison(content: ComparisonContent) -> str:
    """The page of `write_comparison` as a string."""
    lines = [line for line in compared_lines(content) if not line.row.is_empty]
    metric, higher = content.primary_metric, content.higher_is_better
    sized = [row for row in content.rows if base_method(row.method) != NO_EMBEDDINGS]
    points = [point for row in sized if (point := row.point(metric)) is not None]
    caption = quality_caption(points, higher_is_better=higher)
    if len(points) < len(sized):
        caption += f" Rows that lack {metric} under a seed are left out."
    winners = _winners(content)
    return render(
        "compare.html.j2",
        charts=_charts(content, points),
        content=content,
        title="Methods at the same bytes",
        facts=[],
        sizes=[(size, lines_of_size(content, size)) for size in sizes_of(content)],
        filled=lines,
        missing=[f"{rows}: {reason}" for rows, reason in missing_reasons(content)],
        forms=list(dict.fromkeys(form for row in content.rows for form in row.form_names())),
        serving_forms=list(
            dict.fromkeys(form for row in content.rows for form in row.resident_bytes)
        ),
        costs=cost_lines(content),
        reproduce=commands(content.provenance),
        configuration_title="Settings of all cells",
        configuration=json_text(dict(content.rules), "ComparisonContent.rules"),
        sentence=_sentence(content, winners),
        key_numbers=_tiles(content, winners),
        quality_caption=caption,
        dense_bytes=next(
            (line.row.embedding_bytes for line in lines if line.row.method == DENSE), None
        ),
        has_no_embeddings=len(sized) < len(content.rows),
        cells_at_once=max(row.cells_at_once for row in content.rows),
        num_seeds=max(len(row.group.rows) for row in content.rows),
        many_metrics=len(content.metrics) > MANY_METRICS,
        few_lines=len(lines) <= FEW_LINES,
        with_validation=WITH_VALIDATION,
        plus_minus=f" {PLUS_MINUS} ",
        format_count=format_count,
    )


def _charts(content: ComparisonContent, points: Sequence[ParetoPoint]) -> dict[str, go.Figure]:
    """Every method at every size; DNIS beside network pruning by the share of parameters gone, the
    paper's comparison."""
    metric, higher, drawn = content.primary_metric, content.higher_is_better, {}
    if points:
        drawn["quality"] = charts.quality(points, metric, higher_is_better=higher)
    whole = [row for row in content.rows if row.point(metric) is not None]
    rows = [
        row
        for entry in whole
        if base_method(entry.method) == entry.method
        for row in entry.group.rows
    ]
    if all(any(row.method.startswith(kind) for row in rows) for kind in ("dnis", "magnitude")):
        drawn["pruning-rate"] = charts.pruning_rate(rows, metric, higher_is_better=higher)
    return drawn


def _winners(content: ComparisonContent) -> dict[float, list[ComparisonRow]]:
    """Size -> its rows, the best one first; a size at which no method has all its seeds is left
    out."""
    winners = {}
    for size in sizes_of(content):
        ranked = [
            row
            for row in ranked_rows(content, size)
            if row.point(content.primary_metric) is not None
        ]
        if size is not None and ranked:
            winners[size] = ranked
    return winners


def _tiles(
    content: ComparisonContent, winners: dict[float, list[ComparisonRow]]
) -> list[KeyNumber]:
    """The best method of the smallest size, of the largest one and of one between."""
    sizes = list(winners)
    shown = dict.fromkeys((*sizes[:1], *sizes[len(sizes) // 2 :][:1], *sizes[-1:]))
    return [_tile(content, f"{size:g}", winners[size]) for size in shown]


def _tile(content: ComparisonContent, size: str, ranked: list[ComparisonRow]) -> KeyNumber:
    best, metric, details, tone = ranked[0], content.primary_metric, [], ""
    if (difference := best.difference.get(metric)) is not None:
        details.append(f"{difference.told(len(best.group.rows))} against dense")
        if format_difference(difference.mean) != format_metric(0):
            tone = "better" if (difference.mean > 0) == content.higher_is_better else "worse"
    others = [row for row in ranked if base_method(row.method) != base_method(best.method)]
    if others:
        lead = _told_lead(best, others[0], metric)
        details.append(
            f"next: {others[0].method}, {format_metric(others[0].group.mean(metric) or 0.0)}{lead}"
        )
    label, value = f"Best at compression {size}: {best.method}", group_metric(best.group, metric)
    return KeyNumber(label=label, value=value, detail="; ".join(details), tone=tone)


def _told_lead(best: ComparisonRow, following: ComparisonRow, metric: str) -> str:
    """Says of a lead that it is no more than chance, where seeds do not tell it apart from that."""
    values = {row.seed: row.metrics[metric] for row in following.group.rows}
    leads = [
        row.metrics[metric] - values[row.seed] for row in best.group.rows if row.seed in values
    ]
    if len(leads) < 2:
        return ", of one seed alone"
    is_clear = abs(statistics.fmean(leads)) > statistics.stdev(leads)
    return "" if is_clear else ", a lead below its spread over seeds"


def _sentence(content: ComparisonContent, winners: dict[float, list[ComparisonRow]]) -> str:
    """Says in words which method is best at which size."""
    if not winners:
        return f"No method has finished on {content.recipe} under every seed yet."
    sizes: dict[str, list[str]] = {}
    for size, ranked in winners.items():
        sizes.setdefault(ranked[0].method, []).append(f"{size:g}")
    parts = [f"{method} at compression {_listed(numbers)}" for method, numbers in sizes.items()]
    told = f"Best test {content.primary_metric} on {content.recipe}, at the same bytes: {'; '.join(parts)}."
    num_seeds = max(len(row.group.rows) for row in content.rows)
    return told if num_seeds > 1 else f"{told} One seed alone: another one may say otherwise."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
