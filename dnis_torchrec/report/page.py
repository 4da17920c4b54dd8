"""The report as one self-contained HTML page of about 5 MB, nearly all of it Plotly; nothing is
loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from plotly import graph_objects as go

from dnis_torchrec.data.files import write_text
from dnis_torchrec.report import charts
from dnis_torchrec.report.content import (
    SAME_BYTES,
    UNCOMPRESSED_ROWS,
    ReportContent,
    RowGroup,
    json_text,
)
from dnis_torchrec.report.key_numbers import KeyNumber, compared_number
from dnis_torchrec.report.pareto_points import ParetoPoint, pareto_points, told_beyond
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
    metric_names,
)
from dnis_torchrec.report.verdict import ONE_SEED, group_sentence

MOST_KEY_NUMBERS = 3
"""Numbers at the head of the page: what does not fit there stands in the sentence and in the table.
"""


def write_report(path: Path, content: ReportContent) -> Path:
    """Writes the report as one HTML file, atomically; the same content gives the same bytes."""
    return write_text(path, render_report(content))


def render_report(content: ReportContent) -> str:
    """The page of `write_report` as a string."""
    subject, num_seeds = content.subject, max(len(group.rows) for group in content.groups)
    points = pareto_points(content.groups, content.primary_metric)
    return render(
        "report.html.j2",
        charts=_charts(content, points),
        content=content,
        title=content.title,
        facts=[f"{'seed' if len(subject.rows) == 1 else 'seeds'} {format_seeds(subject.seeds)}"],
        sentence=_sentence(content),
        key_numbers=_key_numbers(content),
        quality_caption=quality_caption(points, higher_is_better=content.higher_is_better),
        doubts=[*([ONE_SEED] if len(subject.rows) == 1 else []), *content.doubts],
        quality=_quality_table(content),
        blocks=content.blocks,
        forms=_form_table(subject),
        reproduce=content.reproduce,
        configuration_title="Configuration of the run",
        configuration=json_text(content.configuration, "ReportContent.configuration"),
        format_count=format_count,
        num_seeds=num_seeds,
    )


def quality_caption(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> str:
    """What stands below the first chart of a page."""
    told = "Point at a mark for its numbers; click a name to hide its line."
    if any(point.num_seeds > 1 for point in points):
        of_what = (
            "the difference to dense within each seed"
            if any(p.difference for p in points)
            else "the metric"
        )
        told += f" A mark is the mean over its seeds, its bar the standard deviation of {of_what}."
    return f"{told} {told_beyond(points, higher_is_better=higher_is_better)}".rstrip()


def _charts(content: ReportContent, points: Sequence[ParetoPoint]) -> dict[str, go.Figure]:
    """The charts for which there is something to show."""
    drawn: dict[str, go.Figure] = {}
    metric, higher = content.primary_metric, content.higher_is_better
    if points:
        drawn["quality"] = charts.quality(points, metric, higher_is_better=higher)
    measured = [row for row in content.rows if metric in row.metrics]
    if any(row.method.startswith("magnitude") for row in measured):
        drawn["pruning-rate"] = charts.pruning_rate(measured, metric, higher_is_better=higher)
    for name, setting, series in (
        ("embedding-dim", "embedding_dim D", content.by_embedding_dim),
        ("num-blocks", "number of blocks S", content.by_num_blocks),
    ):
        if any(metric in row.metrics for runs in series.values() for _, row in runs):
            drawn[name] = charts.setting(series, setting, metric, higher_is_better=higher)
    if content.history:
        drawn["history"] = charts.search_history(
            content.history, content.stop_on, higher_is_better=content.stop_on_higher_is_better
        )
    if content.alpha:
        drawn["alpha"] = charts.alpha_per_block(content.alpha)
        drawn["alpha-distribution"] = charts.alpha_distribution(content.alpha)
    if content.blocks:
        drawn["frequency"] = charts.retained_dims(content.blocks)
    if content.row_distribution is not None:
        drawn["row-distribution"] = charts.joint_distribution(content.row_distribution)
    if any(size > 0 for size in content.subject.rows[0].bytes.values()):
        drawn["bytes"] = charts.bytes_per_form(content.subject.rows[0].bytes)
    return drawn


def _dense_group(content: ReportContent) -> RowGroup | None:
    """The uncompressed model: of the very run, else method ``"dense"``, else a uniform table of
    ratio 1."""
    groups = [
        group for name in UNCOMPRESSED_ROWS for group in content.groups if group.method == name
    ]
    groups += [
        group
        for group in content.groups
        if group.method == "uniform" and group.compression <= 1.001
    ]
    return groups[0] if groups else None


def _rival_group(content: ReportContent) -> RowGroup | None:
    """The uniform tables closest in size to the subject, if any take the same bytes."""

    def distance(group: RowGroup) -> float:
        return abs(math.log(group.compression / content.subject.compression))

    uniform = [group for group in content.groups if group.method == "uniform"]
    rival = min(uniform, key=distance, default=None)
    return rival if rival is not None and distance(rival) <= math.log(SAME_BYTES) else None


def _sentence(content: ReportContent) -> str:
    subject = content.subject
    if subject.parameters == 0:
        return f"The {subject.method} tables of {content.recipe} hold no parameters at all."
    higher = content.higher_is_better
    return group_sentence(subject, content.groups, content.primary_metric, higher_is_better=higher)


def _bytes_served(group: RowGroup) -> str:
    dense = 4 * group.dense_parameters
    return f"{format_megabytes(dense / group.compression)} instead of {format_megabytes(dense)}"


def _key_numbers(content: ReportContent) -> list[KeyNumber]:
    subject, metric = content.subject, content.primary_metric
    numbers = [
        KeyNumber(
            label="Compression",
            value=format_ratio(subject.compression),
            detail=_bytes_served(subject),
        )
    ]
    for other, label in (
        (_dense_group(content), "vs uncompressed"),
        (_rival_group(content), "vs uniform, same size"),
    ):
        if other is not None and other != subject:
            numbers += _comparison(content, other, label)
    mean, deviation = subject.mean(metric), subject.deviation(metric)
    direction = f"{'higher' if content.higher_is_better else 'lower'} is better"
    if deviation is not None:
        direction = (
            f"{PLUS_MINUS} {format_metric(deviation)} over {len(subject.rows)} seeds; {direction}"
        )
    value = "not measured" if mean is None else format_metric(mean)
    numbers.insert(1, KeyNumber(label=f"Test {metric}", value=value, detail=direction))
    return numbers if len(numbers) <= MOST_KEY_NUMBERS else [numbers[0], *numbers[2:]]


def _comparison(content: ReportContent, other: RowGroup, label: str) -> list[KeyNumber]:
    """The difference to another group over the seeds that both have; nothing where they share none."""
    difference = content.subject.difference(other, content.primary_metric)
    if difference is None:
        return []
    change, num_pairs = difference
    detail = f"{group_metric(other, content.primary_metric)} at {format_ratio(other.compression)}"
    if num_pairs > 1:
        detail += f"; mean of {num_pairs} paired seeds"
    elif len(content.subject.rows) > 1:
        detail += "; on the one seed that both have"
    return [compared_number(label, change, detail, higher_is_better=content.higher_is_better)]


def _quality_table(content: ReportContent) -> dict[str, list]:
    """Headings and lines of the quality table; a metric is mean, deviation and whether it is the
    best of its column."""
    groups = content.groups
    metrics = sorted(metric_names(content.rows), key=lambda name: name != content.primary_metric)
    best = {}
    for name in metrics:
        higher = (
            content.higher_is_better if name == content.primary_metric else is_higher_better(name)
        )
        best[name] = best_groups(groups, name, higher) if higher is not None else frozenset()
    lines = [
        {
            "method": group.method,
            "is_subject": group == content.subject,
            "ratio": format_ratio(group.compression),
            "parameters": format_count(group.parameters),
            "smallest": _smallest_form(group),
            "metrics": [
                (*_mean_and_deviation(group, name), index in best[name]) for name in metrics
            ],
            "seeds": format_seeds(group.seeds),
            "time": format_seconds(group.seconds),
        }
        for index, group in enumerate(groups)
    ]
    return {"metrics": metrics, "lines": lines}


def _mean_and_deviation(group: RowGroup, metric: str) -> tuple[str, str]:
    """On two lines of a narrow column."""
    mean, deviation = group.mean(metric), group.deviation(metric)
    spread = "" if deviation is None else f"{PLUS_MINUS} {format_metric(deviation)}"
    return ("-" if mean is None else format_metric(mean)), spread


def _smallest_form(group: RowGroup) -> tuple[str, str]:
    """Size and name of the smallest export form, on two lines of a narrow column; a dash if there
    is none."""
    form, size = min(group.rows[0].bytes.items(), key=lambda item: item[1], default=("", None))
    return ("-" if size is None else format_megabytes(size)), form


def _form_table(subject: RowGroup) -> list[dict[str, str]]:
    sizes = subject.rows[0].bytes
    dense = sizes.get("dense_fp32")
    return [
        {
            "form": form,
            "megabytes": format_megabytes(size),
            "bytes": f"{size:,}",
            "ratio": format_ratio(dense / size) if dense and size else "-",
        }
        for form, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    ]
