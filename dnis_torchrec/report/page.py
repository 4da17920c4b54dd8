"""The report as one self-contained HTML page: inline SVG and CSS, nothing loaded from anywhere.

The same figures can be written beside it as files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from dnis_torchrec.checks import check
from dnis_torchrec.report import figures
from dnis_torchrec.report.content import UNCOMPRESSED_ROWS, ReportContent, RowGroup, json_text
from dnis_torchrec.report.key_numbers import KeyNumber, compared_number
from dnis_torchrec.report.pareto import pareto_chart
from dnis_torchrec.report.pareto_points import pareto_points
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
from dnis_torchrec.report.verdict import ONE_SEED, SAME_BYTES, group_sentence
from dnis_torchrec.storage.foreign_folders import make_folder
from dnis_torchrec.storage.whole_files import write_text

MOST_KEY_NUMBERS = 3
"""Numbers at the head of the page: what does not fit there stands in the sentence and in the table."""
FIGURES = (
    "quality",
    "pruning-rate",
    "embedding-dim",
    "num-blocks",
    "history",
    "alpha",
    "alpha-distribution",
    "frequency",
    "row-distribution",
    "bytes",
)
"""Names of all figures that a report may have."""


def write_report(path: Path, content: ReportContent, *, figure_folder: Path | None = None) -> Path:
    """Writes the report as one HTML file, atomically; the same content gives the same bytes.

    Args:
        path: the file, usually ``RUN/report.html``; an older one is replaced.
        content: the content of the page.
        figure_folder: folder for every figure as PNG and as SVG, usually ``RUN/figures``; made if it does not exist.
            Figures of an older report that this one lacks are deleted.

    Returns:
        `path`.

    Raises:
        ValueError: if the folder of `path` or of `figure_folder` does not exist, or `figure_folder` is a link.
    """
    drawn = draw_figures(content)
    written = write_text(path, _page(content, drawn))
    if figure_folder is not None:
        _write_figures(figure_folder, drawn)
    return written


def render_report(content: ReportContent) -> str:
    """The page of `write_report` as a string.

    Args:
        content: the content of the page.
    """
    return _page(content, draw_figures(content))


def _page(content: ReportContent, drawn: Mapping[str, Figure]) -> str:
    subject, metric = content.subject, content.primary_metric
    points = pareto_points(content.groups, metric)
    pareto = pareto_chart(points, metric, higher_is_better=content.higher_is_better) if points else ""
    return render(
        "report.html.j2",
        content=content,
        subject=subject,
        sentence=_sentence(content),
        doubts=[*([ONE_SEED] if len(subject.rows) == 1 else []), *content.doubts],
        key_numbers=_key_numbers(content),
        quality=_quality_table(content),
        blocks=content.blocks,
        forms=_form_table(subject),
        pareto=Markup(pareto),
        figures={name: Markup(figures.inline_svg(figure, name)) for name, figure in drawn.items()},
        configuration=json_text(content.configuration, "ReportContent.configuration"),
        counts_dims=all(values.shape[0] <= figures.COUNTED_BLOCKS for values in content.alpha.values()),
        format_count=format_count,
        facts=_facts(content),
        num_seeds=max(len(group.rows) for group in content.groups),
    )


def _facts(content: ReportContent) -> list[tuple[str, str]]:
    """What the head of the page tells of the run."""
    seeds = ("seed" if len(content.subject.rows) == 1 else "seeds", format_seeds(content.subject.seeds))
    told = ("dnis_torchrec", "torch", "torchrec")
    return [seeds, *((name, content.versions[name]) for name in told if name in content.versions)]


def _write_figures(folder: Path, drawn: Mapping[str, Figure]) -> None:
    check(folder.parent.is_dir(), str(folder), "an existing folder", str(folder.parent), "create it first")
    make_folder(folder, within=folder.parent)
    for name in FIGURES:
        png, svg = folder / f"{name}.png", folder / f"{name}.svg"
        if name in drawn:
            figures.save_png(drawn[name], png)
            figures.save_svg(drawn[name], svg)
        else:
            png.unlink(missing_ok=True)
            svg.unlink(missing_ok=True)


def draw_figures(content: ReportContent) -> dict[str, Figure]:
    """Draws the figures for which there is something to show; names are of `FIGURES`.

    Args:
        content: the content of the report; an empty field of it has no figure.
    """
    drawn: dict[str, Figure] = {}
    metric, higher = content.primary_metric, content.higher_is_better
    measured = [row for row in content.rows if metric in row.metrics]
    if measured:
        drawn["quality"] = figures.quality_against_size(measured, metric, higher_is_better=higher)
    if any(row.method.startswith("magnitude") for row in measured):
        drawn["pruning-rate"] = figures.quality_against_pruning_rate(measured, metric, higher_is_better=higher)
    for name, setting, series in (
        ("embedding-dim", "embedding_dim D", content.by_embedding_dim),
        ("num-blocks", "number of blocks S", content.by_num_blocks),
    ):
        if any(metric in row.metrics for points in series.values() for _, row in points):
            drawn[name] = figures.quality_against_setting(series, setting, metric, higher_is_better=higher)
    if content.history:
        drawn["history"] = figures.search_history(content.history)
    if content.alpha:
        drawn["alpha"] = figures.alpha_per_block(content.alpha)
        drawn["alpha-distribution"] = figures.alpha_distribution(content.alpha)
    if content.blocks:
        drawn["frequency"] = figures.retained_dims_against_frequency(content.blocks)
    if content.row_distribution is not None:
        drawn["row-distribution"] = figures.joint_distribution(content.row_distribution)
    if any(size > 0 for size in content.subject.rows[0].bytes.values()):
        drawn["bytes"] = figures.bytes_per_form(content.subject.rows[0].bytes)
    return drawn


def _dense_group(content: ReportContent) -> RowGroup | None:
    """The uncompressed model: of the very run, else method ``"dense"``, else a uniform table of ratio 1."""
    groups = [group for name in UNCOMPRESSED_ROWS for group in content.groups if group.method == name]
    groups += [group for group in content.groups if group.method == "uniform" and group.compression <= 1.001]
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
    numbers = [KeyNumber(label="Compression", value=format_ratio(subject.compression), detail=_bytes_served(subject))]
    for other, label in ((_dense_group(content), "vs uncompressed"), (_rival_group(content), "vs uniform, same size")):
        if other is not None and other != subject:
            numbers += _comparison(content, other, label)
    mean, deviation = subject.mean(metric), subject.deviation(metric)
    direction = f"{'higher' if content.higher_is_better else 'lower'} is better"
    if deviation is not None:
        direction = f"{PLUS_MINUS} {format_metric(deviation)} over {len(subject.rows)} seeds; {direction}"
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
    """Headings and lines of the quality table; a metric is mean, deviation and whether it is the best of its column."""
    groups = content.groups
    metrics = sorted(metric_names(content.rows), key=lambda name: name != content.primary_metric)
    best = {}
    for name in metrics:
        higher = content.higher_is_better if name == content.primary_metric else is_higher_better(name)
        best[name] = best_groups(groups, name, higher) if higher is not None else frozenset()
    lines = [
        {
            "method": group.method,
            "is_subject": group == content.subject,
            "ratio": format_ratio(group.compression),
            "parameters": format_count(group.parameters),
            "smallest": _smallest_form(group),
            "metrics": [(*_mean_and_deviation(group, name), index in best[name]) for name in metrics],
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
    """Size and name of the smallest export form, on two lines of a narrow column; a dash if there is none."""
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
