"""The figure of a comparison: the metric of every method at the same bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import DENSE, NO_EMBEDDINGS, WITH_VALIDATION, base_method
from dnis_torchrec.report.figures.style import (
    FIGURE_WIDTH,
    GREY,
    legend_beside,
    log_axis,
    method_styles,
    metric_axis,
    short,
    styled,
)
from dnis_torchrec.report.pareto_points import ParetoPoint, metric_range
from dnis_torchrec.report.tables import format_metric, format_ratio

ENOUGH_TICKS = 3
LINE, GAP = 10, 8
"""Height of a line of names in points, and pixels at least between two names in it."""

DASHED, DOTTED = (0, (4, 2.5)), (0, (1, 2))


@styled
def quality_at_the_same_bytes(
    points: Sequence[ParetoPoint], metric: str, *, higher_is_better: bool, sizes: Sequence[float] = ()
) -> Figure:
    """A metric over the compression in bytes: a line per method, dashed and hollow if it had the validation split too.

    Methods without size are levels, named with their number. Bars are those of `ParetoPoint.bar`; points beyond
    `metric_range` are named with their number at the edge of the axis. The legend names methods from top to bottom as
    they stand at the largest compression.

    Args:
        points: one per method and size.
        metric: name of the metric.
        higher_is_better: its direction, told on the axis.
        sizes: compressions to put ticks at; round numbers if they are too few to read other points by.

    Raises:
        ValueError: if there are no points.
    """
    check(len(points) > 0, "points", "at least one point", "none", "leave the figure out")
    levels = [point for point in points if base_method(point.method) in (DENSE, NO_EMBEDDINGS)]
    compressed = [point for point in points if point not in levels]
    figure = Figure(figsize=(FIGURE_WIDTH, 4.6), layout="constrained")
    axis = figure.subplots()
    shown = [point for point in points if base_method(point.method) != NO_EMBEDDINGS] or points
    axis.set_ylim(metric_range(shown, higher_is_better=higher_is_better))
    styles = method_styles(point.method for point in points)
    for point in levels:
        linestyle = DOTTED if point.method.endswith(WITH_VALIDATION) else DASHED
        axis.axhline(point.mean, color=styles[point.method][0], linewidth=1.1, linestyle=linestyle, zorder=1)
    for method in styles:
        mine = sorted((p for p in compressed if p.method == method), key=lambda point: point.compression)
        if mine:
            _method_line(axis, mine, styles[method])
    ratios = [point.compression for point in compressed] or [1.0]
    margin = max(1.08, (max(ratios) / min(ratios)) ** 0.06)
    log_axis(axis, min(ratios) / margin, max(ratios) * margin, format_ratio)
    if len(sizes) >= ENOUGH_TICKS:
        axis.xaxis.set_major_locator(FixedLocator(list(sizes)))
    metric_axis(axis, metric, higher_is_better)
    axis.set_xlabel("compression: bytes of the uncompressed tables / bytes as served (log scale)")
    axis.set_title(_told_about_bars(points), fontsize=8, color="#666666")
    handles, labels = _legend(compressed, levels, styles)
    legend_beside(figure, handles, labels, "method")
    _name_points_beyond(figure, axis, compressed)
    return figure


def _told_about_bars(points: Sequence[ParetoPoint]) -> str:
    """Says what a point and its bar stand for, so that the figure's file explains itself."""
    num_seeds = max(point.num_seeds for point in points)
    if num_seeds == 1:
        return "one seed"
    of_what = "the difference to dense within each seed" if any(p.difference for p in points) else "the metric"
    return f"mean of {num_seeds} seeds; bars: standard deviation of {of_what}"


def _method_line(axis: Axes, points: Sequence[ParetoPoint], style: tuple[str, str]) -> None:
    """Draws one method; `_name_points_beyond` names the points beyond the axis."""
    (colour, marker), method = style, points[0].method
    is_second = method.endswith(WITH_VALIDATION)
    width, zorder = (2.4, 5) if method == "dnis" else (1.1, 3) if is_second else (1.6, 4)
    axis.errorbar(
        [point.compression for point in points],
        [point.mean for point in points],
        yerr=None if is_second else [point.bar or 0.0 for point in points],
        color=colour,
        marker=marker,
        markersize=5 if is_second else 6,
        markerfacecolor="white" if is_second else colour,
        linewidth=width,
        linestyle=DASHED if is_second else "-",
        elinewidth=1,
        capsize=2,
        zorder=zorder,
    )


def _name_points_beyond(figure: Figure, axis: Axes, points: Sequence[ParetoPoint]) -> None:
    """Writes points beyond the axis at its edges, the farthest outermost, each in the first line with room for it."""
    low, high = axis.get_ylim()
    middle = math.prod(axis.get_xlim()) ** 0.5
    names: list[Annotation] = []
    for point in sorted(points, key=lambda point: abs(point.mean - (low + high) / 2), reverse=True):
        if low <= point.mean <= high:
            continue
        edge, arrow, align = (
            (high, "\N{UPWARDS ARROW}", "top") if point.mean > high else (low, "\N{DOWNWARDS ARROW}", "bottom")
        )
        side = "right" if point.compression > middle else "left"
        name = axis.annotate(
            f"{arrow} {short(point.method)} {format_metric(point.mean)}",
            (point.compression, edge),
            (0, 0),
            textcoords="offset points",
            color="#333333",
            fontsize=8,
            ha=side,
            va=align,
            zorder=6,
        )
        names.append(name)
    if names:
        figure.draw_without_rendering()  # for the places of names, which depend on the width of the legend
    taken = defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    for name in names:
        box, align, line = name.get_window_extent(), name.get_verticalalignment(), 0
        while any(box.x0 < right and left < box.x1 for left, right in taken[align, line]):
            line += 1
        taken[align, line].append((box.x0 - GAP, box.x1 + GAP))
        name.set_position((0, -LINE * line if align == "top" else LINE * line))


def _legend(
    compressed: Sequence[ParetoPoint], levels: Sequence[ParetoPoint], styles: dict[str, tuple[str, str]]
) -> tuple[list[Artist], list[str]]:
    """Handles and labels, one per method whatever its rows."""
    last: dict[str, ParetoPoint] = {}
    for point in sorted(compressed, key=lambda point: (not point.method.endswith(WITH_VALIDATION), point.compression)):
        last[base_method(point.method)] = point
    handles: list[Artist] = []
    for method, point in sorted(last.items(), key=lambda item: -item[1].mean):
        colour, marker = styles[point.method]
        width = 2.4 if method == "dnis" else 1.6
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=6, linewidth=width))
    labels = [short(method) for method, _ in sorted(last.items(), key=lambda item: -item[1].mean)]
    for point in levels:
        linestyle = DOTTED if point.method.endswith(WITH_VALIDATION) else DASHED
        handles.append(Line2D([], [], color=styles[point.method][0], linewidth=1.1, linestyle=linestyle))
        labels.append(f"{short(point.method)} {format_metric(point.mean)}")
    if any(point.method.endswith(WITH_VALIDATION) for point in compressed):
        handles.append(Line2D([], [], color=GREY, marker="o", markersize=5, mfc="white", lw=1.1, linestyle=DASHED))
        labels.append("dashed: +validation")
    return handles, labels
