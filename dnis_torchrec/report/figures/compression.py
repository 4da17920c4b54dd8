"""Figures of a compressed model: quality and loss against compression, as predicted and as measured."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dnis_torchrec.checks import check
from dnis_torchrec.report.compression_content import CompressionContent, CompressionRow
from dnis_torchrec.report.figures.style import (
    BLACK,
    BLUE,
    FIGURE_WIDTH,
    GREY,
    ORANGE,
    legend_beside,
    log_axis,
    metric_axis,
    styled,
)
from dnis_torchrec.report.tables import format_metric, format_ratio

X_LABEL = "compression: bytes of the float32 tables / bytes as served (log scale)"


@styled
def quality_against_compression(content: CompressionContent) -> Figure:
    """The primary metric on test and selection over the compression in bytes; the uncompressed model as levels.

    Args:
        content: with at least one compressed row.

    Raises:
        ValueError: if there is none.
    """
    figure, axis, rows = _sheet(content)
    metric = content.primary_metric
    handles, labels = [], []
    for split, colour, marker in (("metrics", BLUE, "o"), ("selection", GREY, "s")):
        before = getattr(content.uncompressed, split)
        own = [row for row in rows if metric in getattr(row, split)]
        name = "test" if split == "metrics" else "selection"
        if metric in before:
            handles.append(axis.axhline(before[metric], color=colour, linewidth=1.1, linestyle=(0, (4, 2.5))))
            labels.append(f"{name}, uncompressed {format_metric(before[metric])}")
        values = [getattr(row, split)[metric] for row in own]
        handles += axis.plot([row.compression for row in own], values, color=colour, marker=marker)
        labels.append(f"{name}, compressed")
    metric_axis(axis, metric, content.higher_is_better)
    legend_beside(figure, handles, labels, "split")
    return figure


@styled
def loss_against_compression(content: CompressionContent) -> Figure:
    """The increase of the loss over the compression in bytes: predicted before anything was rounded, and measured.

    Args:
        content: with at least one compressed row.

    Raises:
        ValueError: if there is none.
    """
    figure, axis, rows = _sheet(content)
    x = [row.compression for row in rows]
    axis.axhline(0, color=BLACK, linewidth=0.8)
    lines = {
        "predicted": ([row.predicted_loss_increase for row in rows], ORANGE, "^", (0, (4, 2.5))),
        "measured, test": ([content.loss_increase(row) for row in rows], BLUE, "o", "-"),
        "measured, selection": ([content.loss_increase(row, "selection") for row in rows], GREY, "s", "-"),
    }
    handles = []
    for values, colour, marker, linestyle in lines.values():
        handles += axis.plot(x, values, color=colour, marker=marker, linestyle=linestyle)
    metric_axis(axis, "loss increase", False)
    legend_beside(figure, handles, list(lines), "loss increase")
    return figure


def _sheet(content: CompressionContent) -> tuple[Figure, Axes, tuple[CompressionRow, ...]]:
    rows = content.compressed
    check(len(rows) > 0, "rows", "at least one compressed one", "none", "leave the figure out")
    figure = Figure(figsize=(FIGURE_WIDTH, 3.8), layout="constrained")
    axis = figure.subplots()
    low, high = rows[0].compression, rows[-1].compression
    margin = max(1.08, (high / low) ** 0.06)
    log_axis(axis, low / margin, high * margin, format_ratio)
    axis.set_xlabel(X_LABEL)
    return figure, axis, rows
