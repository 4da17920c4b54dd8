"""Retained dims against frequency: block by block, and row by row with both marginal distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import BlockSummary
from dnis_torchrec.report.figures.style import (
    BLUE,
    COLOURS,
    FIGURE_WIDTH,
    GREY,
    MARKERS,
    ORANGE,
    legend_beside,
    log_axis,
    short,
    styled,
)
from dnis_torchrec.report.row_distribution import BINS_PER_DECADE, RowDistribution
from dnis_torchrec.report.tables import format_count

MOST_TABLES = len(COLOURS) * len(MARKERS)
"""So many can be told apart by colour and marker."""


@styled
def retained_dims_against_frequency(blocks: Sequence[BlockSummary]) -> Figure:
    """Retained dims of every block over how often its rows occur: one colour and marker per table, area by rows.

    Blocks whose rows never occur stand apart at the left edge. More than `MOST_TABLES` tables look alike.

    Args:
        blocks: of all tables, in any order; colours follow the tables' first appearance.

    Raises:
        ValueError: if there are no blocks.
    """
    check(len(blocks) > 0, "blocks", "at least one block", "none", "leave the figure out")
    tables = list(dict.fromkeys(block.table for block in blocks))
    frequencies = [block.occurrences_per_row for block in blocks if block.occurrences > 0]
    low, high = (min(frequencies), max(frequencies)) if frequencies else (1.0, 10.0)
    never_seen = any(block.occurrences == 0 for block in blocks)
    edge = low / 4
    most_rows = max(1, *(block.num_rows for block in blocks), 1)
    told_apart = len(tables) <= MOST_TABLES
    height = max(4.2, 0.19 * len(tables) + 0.8) if told_apart else 4.2
    figure = Figure(figsize=(FIGURE_WIDTH, height), layout="constrained")
    axis = figure.subplots()
    faint = 0.4 if len(tables) <= len(COLOURS) else 0.2
    for index, table in enumerate(tables):
        mine = sorted((block for block in blocks if block.table == table), key=lambda block: block.occurrences_per_row)
        x = [max(block.occurrences_per_row, edge) if block.occurrences else edge for block in mine]
        y = [block.retained_dims for block in mine]
        area = [25 + 225 * math.sqrt(block.num_rows / most_rows) for block in mine]
        seen = [(at, dims) for at, dims in zip(x, y, strict=True) if at > edge]
        colour, marker = _table_style(index) if told_apart else (BLUE, "o")
        axis.plot([at for at, _ in seen], [dims for _, dims in seen], color=colour, linewidth=1, alpha=faint, zorder=1)
        axis.scatter(x, y, s=area, color=colour, marker=marker, alpha=0.8, edgecolor="white", linewidth=0.7)
    log_axis(axis, (edge if never_seen else low) / 1.5, high * 1.5, format_count, first=low / 1.5)
    if never_seen:
        axis.set_xticks([edge, *(tick for tick in axis.get_xticks() if tick > edge)])
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "never" if x <= edge * 1.001 else format_count(x)))
        axis.axvline(low / 2, color="#CCCCCC", linewidth=0.8, linestyle=(0, (2, 3)))
    dims = sorted({block.embedding_dim for block in blocks})
    axis.set_ylim(-0.04 * dims[-1], 1.06 * dims[-1])
    axis.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    axis.grid(axis="y")
    axis.set_xlabel("mean occurrences per row of the block in the training data (log scale)")
    limit = " or ".join(map(str, dims)) if len(dims) <= 3 else f"up to {dims[-1]}"
    axis.set_ylabel(f"retained dims per row (of {limit})")
    if told_apart:
        legend = legend_beside(figure, axis.collections, [short(table) for table in tables], "table")
        for handle in legend.legend_handles:
            handle.set_sizes([40])  # type: ignore[union-attr]
    return figure


def _table_style(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


@styled
def joint_distribution(rows: RowDistribution) -> Figure:
    """Joint distribution of frequency and retained dims over all rows, with both marginals: the paper's joint plot.

    Darker cells hold more rows (log scale); the line is the mean of the retained dims at a frequency. Rows that never
    occur stand apart at the left edge.

    Args:
        rows: of all tables together.
    """
    num_rows = rows.num_rows.numpy()
    num_bins, dims = len(num_rows), np.arange(rows.embedding_dim + 1)
    figure = Figure(figsize=(FIGURE_WIDTH, 4.8), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(5, 1.1, 0.14), height_ratios=(1, 3.6), wspace=0.02, hspace=0.02)
    joint = figure.add_subplot(grid[1, 0])
    top = figure.add_subplot(grid[0, 0], sharex=joint)
    right = figure.add_subplot(grid[1, 1], sharey=joint)
    shown = np.ma.masked_equal(np.insert(num_rows, 1, 0, axis=0).T, 0)  # a gap sets apart what never occurs
    colours = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.18, 1, 256)))
    extent = (-1.5, num_bins - 0.5, -0.5, rows.embedding_dim + 0.5)
    scale = LogNorm(1, max(10, int(num_rows.max())))
    cells = joint.imshow(
        shown, cmap=colours, norm=scale, extent=extent, origin="lower", aspect="auto", interpolation="none"
    )
    in_bin = num_rows.sum(axis=1)
    seen = [bin_ for bin_ in range(1, num_bins) if in_bin[bin_]]
    means = [float(num_rows[bin_] @ dims / in_bin[bin_]) for bin_ in seen]
    joint.plot(seen, means, color=ORANGE, marker="o", markersize=3.5, linewidth=1.6, label="mean at a frequency")
    joint.legend(loc="upper left", fontsize=8.5, frameon=True, edgecolor="none")
    top.bar([-1, *range(1, num_bins)], in_bin, width=0.86, color=[GREY, *[BLUE] * (num_bins - 1)])
    right.barh(dims, num_rows.sum(axis=0), height=0.86, color=BLUE)
    _bin_axis(joint, num_bins, never_seen=bool(in_bin[0]))
    joint.set_ylim(-0.8, rows.embedding_dim + 0.8)
    joint.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    joint.set_xlabel("occurrences of a row in the training data (log scale)")
    joint.set_ylabel("retained dims of a row")
    for axis, along, across in ((top, top.xaxis, top.yaxis), (right, right.yaxis, right.xaxis)):
        along.set_tick_params(labelbottom=False, labelleft=False, length=0)
        across.set_major_locator(MaxNLocator(nbins=2))
        across.set_major_formatter(FuncFormatter(lambda value, _: format_count(value) if value else "0"))
        axis.grid(axis="y" if axis is top else "x")
    top.set_ylabel("rows")
    right.set_xlabel("rows")
    bar = figure.colorbar(cells, cax=figure.add_subplot(grid[1, 2]), label="rows in a cell (log scale)")
    bar.outline.set_visible(False)
    return figure


def _bin_axis(axis: Axes, num_bins: int, *, never_seen: bool) -> None:
    """The x axis of bins: a tick where a power of ten begins, and one for the rows that never occur."""
    starts = range(1, num_bins + 1, BINS_PER_DECADE)
    ticks = {start - 0.5: format_count(10 ** ((start - 1) / BINS_PER_DECADE)) for start in starts}
    axis.set_xlim(-1.7 if never_seen else 0.3, num_bins - 0.3)
    if never_seen:
        ticks[-1.0] = "never"
        axis.axvline(0.0, color="#CCCCCC", linewidth=0.8, linestyle=(0, (2, 3)))
    axis.set_xticks(list(ticks), list(ticks.values()))
