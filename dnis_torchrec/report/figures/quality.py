"""Figures of results: a metric against size, pruning rate, embedding_dim or number of blocks, and bytes per form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MultipleLocator, PercentFormatter

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import ReportRow, RowGroup, seed_groups
from dnis_torchrec.report.figures.style import (
    BLUE,
    COLOURS,
    FIGURE_WIDTH,
    GREY,
    MARKERS,
    METHOD_STYLES,
    legend_beside,
    log_axis,
    method_styles,
    metric_axis,
    short,
    styled,
    ticks_with_room,
)
from dnis_torchrec.report.tables import format_count, format_megabytes, format_number, format_ratio

PRUNING_METHODS = ("dnis", "magnitude", "dense")
"""Prefixes of the names of the methods that the figure of pruning rates compares."""


@styled
def quality_against_size(rows: Sequence[ReportRow], metric: str, *, higher_is_better: bool) -> Figure:
    """A metric over the compression: one line per method through the means over seeds, a faint point per seed.

    The uncompressed model and models whose tables retain nothing are also drawn as levels, for comparison.

    Args:
        rows: results; those without the metric are left out.
        metric: name of the metric.
        higher_is_better: its direction, told on the axis.

    Raises:
        ValueError: if no row has the metric.
    """
    rows = [row for row in rows if metric in row.metrics]
    check(len(rows) > 0, f"metric {metric!r}", "at least one row that has it", "none", "leave the figure out")
    groups = seed_groups([row for row in rows if row.parameters > 0])
    empty = seed_groups([row for row in rows if row.parameters == 0])
    figure = Figure(figsize=(FIGURE_WIDTH, 4.2), layout="constrained")
    axis = figure.subplots()
    styles = method_styles(group.method for group in groups)
    lines: list[Artist] = []
    for method, style in styles.items():
        mine = [group for group in groups if group.method == method]
        lines.append(_method_line(axis, mine, metric, style, x=_compression))
    for group in empty:
        lines.append(axis.axhline(_means([group], metric)[0], color=GREY, linewidth=1.4, linestyle=":"))
    ratios = [group.compression for group in groups] or [1.0]
    low, high = min(ratios), max(ratios)
    margin = max(1.06, (high / low) ** 0.05) if high > low else 1.5
    log_axis(axis, low / margin, high * margin, format_ratio)
    metric_axis(axis, metric, higher_is_better)
    axis.set_xlabel("compression: bytes of the float32 tables / bytes served (log scale)")
    labels = [short(method) for method in styles]
    labels += [f"{short(group.method)} (no embeddings at all)" for group in empty]
    legend_beside(figure, lines, labels, "method")
    return figure


@styled
def quality_against_pruning_rate(rows: Sequence[ReportRow], metric: str, *, higher_is_better: bool) -> Figure:
    """A metric over the share of parameters that is gone, for DNIS and for magnitude pruning: the paper's comparison.

    ``pruning rate = 1 - parameters / dense_parameters``, as the paper counts; index bytes, of which
    unstructured pruning needs many, are in the figure of quality against bytes. The uncompressed model is a level.

    Args:
        rows: results; only methods named ``dnis...``, ``magnitude...`` and ``dense`` are drawn.
        metric: name of the metric.
        higher_is_better: its direction, told on the axis.

    Raises:
        ValueError: if no row of such a method has the metric.
    """
    rows = [row for row in rows if metric in row.metrics and row.method.startswith(PRUNING_METHODS)]
    check(len(rows) > 0, f"metric {metric!r}", "a row of DNIS or of pruning", "none", "leave the figure out")
    groups = seed_groups(rows)
    figure = Figure(figsize=(FIGURE_WIDTH, 4.0), layout="constrained")
    axis = figure.subplots()
    styles = method_styles(group.method for group in groups)
    lines = [
        _method_line(axis, [group for group in groups if group.method == method], metric, style, x=_pruning_rate)
        for method, style in styles.items()
    ]
    axis.set_xlim(-3, 103)
    axis.xaxis.set_major_locator(MultipleLocator(10))
    axis.xaxis.set_major_formatter(PercentFormatter(decimals=0))
    metric_axis(axis, metric, higher_is_better)
    axis.set_xlabel("pruning rate: share of the parameters of the tables that is gone")
    legend_beside(figure, lines, [short(method) for method in styles], "method")
    return figure


@styled
def quality_against_setting(
    series: Mapping[str, Sequence[tuple[float, ReportRow]]], setting: str, metric: str, *, higher_is_better: bool
) -> Figure:
    """A metric over a setting of the search, such as embedding_dim or the number of blocks: one line per series.

    Args:
        series: name (say ``"dnis at 5x"``) -> the setting and the row of every run; rows of one setting are seeds of
            one experiment. Rows without the metric are left out.
        setting: label of the x axis.
        metric: name of the metric.
        higher_is_better: its direction, told on the axis.

    Raises:
        ValueError: if no row has the metric.
    """
    drawn: dict[str, dict[float, RowGroup]] = {}
    for name, points in series.items():
        for value in sorted({value for value, row in points if metric in row.metrics}):
            rows = tuple(row for at, row in points if at == value and metric in row.metrics)
            drawn.setdefault(name, {})[value] = RowGroup(method=rows[0].method, rows=rows)
    check(len(drawn) > 0, f"metric {metric!r}", "at least one row that has it", "none", "leave the figure out")
    figure = Figure(figsize=(FIGURE_WIDTH, 3.8), layout="constrained")
    axis = figure.subplots()
    lines = []
    for index, (name, groups) in enumerate(drawn.items()):
        colour, marker = METHOD_STYLES["dense"] if name == "dense" else _series_style(index)
        line, _, _ = axis.errorbar(
            list(groups),
            _means(list(groups.values()), metric),
            yerr=[group.deviation(metric) or 0.0 for group in groups.values()],
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=1.8,
            elinewidth=1,
            capsize=3,
        )
        lines.append(line)
    values = sorted({value for groups in drawn.values() for value in groups})
    margin = max(1.06, (values[-1] / values[0]) ** 0.05)
    log_axis(axis, values[0] / margin, values[-1] * margin, format_count)
    axis.xaxis.set_major_locator(FixedLocator(ticks_with_room(axis, values, format_count)))
    metric_axis(axis, metric, higher_is_better)
    axis.set_xlabel(f"{setting} (log scale)")
    legend_beside(figure, lines, [short(name) for name in drawn], "tables")
    return figure


def _series_style(index: int) -> tuple[str, str]:
    return COLOURS[index % (len(COLOURS) - 1)], MARKERS[index % len(MARKERS)]  # black is the uncompressed model


def _compression(item: ReportRow | RowGroup) -> float:
    return item.compression


def _pruning_rate(item: ReportRow | RowGroup) -> float:
    return 100 * (1 - item.parameters / item.dense_parameters)


def _method_line(
    axis: Axes,
    groups: Sequence[RowGroup],
    metric: str,
    style: tuple[str, str],
    *,
    x: Callable[[ReportRow | RowGroup], float],
) -> Artist:
    """Draws the means of one method, and the seeds behind them faintly; returns the line for the legend."""
    (colour, marker), method, means = style, groups[0].method, _means(groups, metric)
    width, zorder = (2.4, 4) if method == "dnis" else (1.6, 3)
    at = [x(group) for group in groups]
    (line,) = axis.plot(at, means, color=colour, marker=marker, markersize=6, linewidth=width, zorder=zorder)
    seeds = [row for group in groups if len(group.rows) > 1 for row in group.rows]
    if seeds:
        values = [row.metrics[metric] for row in seeds]
        axis.scatter([x(row) for row in seeds], values, s=16, color=colour, marker=marker, alpha=0.3, lw=0, zorder=2)
    if method == "dense":
        axis.axhline(sum(means) / len(means), color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    return line


def _means(groups: Sequence[RowGroup], metric: str) -> list[float]:
    return [mean for group in groups if (mean := group.mean(metric)) is not None]


@styled
def bytes_per_form(form_bytes: Mapping[str, int]) -> Figure:
    """Horizontal bars, one per export form, on a log scale, each with its size in MB and what it saves.

    Args:
        form_bytes: form -> bytes, index bytes counted; ``"dense_fp32"``, where given, is what the others are compared
            with.

    Raises:
        ValueError: if no form has a size above 0.
    """
    sizes = {form: size for form, size in form_bytes.items() if size > 0}
    check(len(sizes) > 0, "form_bytes", "at least one form above 0 bytes", dict(form_bytes))
    forms = sorted(sizes, key=lambda form: (-sizes[form], form))
    dense = sizes.get("dense_fp32")
    figure = Figure(figsize=(FIGURE_WIDTH, 0.42 * len(forms) + 0.95), layout="constrained")
    axis = figure.subplots()
    largest, smallest = sizes[forms[0]] / 1e6, sizes[forms[-1]] / 1e6
    low = 10 ** math.floor(math.log10(smallest) - 0.3)
    for position, form in enumerate(forms):
        megabytes = sizes[form] / 1e6
        axis.barh(position, megabytes - low, left=low, height=0.62, color=GREY if form == "dense_fp32" else BLUE)
        label = format_megabytes(sizes[form])
        if dense is not None and form != "dense_fp32":
            change = dense / sizes[form]
            label += f" ({format_ratio(change)} smaller)" if change >= 1 else f" ({format_ratio(1 / change)} larger)"
        axis.annotate(label, (megabytes, position), (5, 0), textcoords="offset points", va="center", fontsize=9)
    log_axis(axis, low, low * (largest / low) ** 1.42, format_number)
    axis.set_yticks(range(len(forms)), [short(form) for form in forms])
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("MB (10\N{SUPERSCRIPT SIX} bytes) of all tables, index bytes counted (log scale)")
    return figure
