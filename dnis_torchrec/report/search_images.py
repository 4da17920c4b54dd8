"""SearchImages: how alpha comes along, as images in TensorBoard while the search runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.report.charts.style import MOST_IN_A_LEGEND, series_style
from dnis_torchrec.report.content import BlockSummary
from dnis_torchrec.report.of_run import named_alpha, searched_summaries
from dnis_torchrec.report.tables import format_count

SHARE_OF_TIME = 0.05
"""Images may take this share of the time since the start; where epochs are short, some epochs have
none."""
STYLE: Any = {  # Any: matplotlib types the key as a literal of all its parameters
    "figure.dpi": 150,
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar sign in a table name is a dollar sign
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class SearchImages:
    """Draws alpha per block, and retained dims against frequency, into a TensorBoard log."""

    def __init__(self, writer: Any, blocks: RowBlocks) -> None:
        self._writer, self._blocks = writer, blocks
        self._started = time.monotonic()
        self._spent = 0.0

    def is_due(self) -> bool:
        """Returns whether the images drawn so far took less than their share of the time."""
        return self._spent <= SHARE_OF_TIME * (time.monotonic() - self._started)

    def draw(self, alpha: Mapping[int, Tensor], step: int) -> None:
        """Writes the images."""
        before = time.monotonic()
        with matplotlib.rc_context(STYLE):
            self._writer.add_figure(
                "alpha_per_block", alpha_image(named_alpha(alpha, self._blocks)), step
            )
            frequency = frequency_image(searched_summaries(alpha, self._blocks))
            self._writer.add_figure("retained_dims_against_frequency", frequency, step)
        self._spent += time.monotonic() - before


def alpha_image(alpha: Mapping[str, Tensor]) -> Figure:
    """Heat map of alpha: the blocks of every table downwards; values of exactly 0 stay white."""
    width = max(values.shape[1] for values in alpha.values())
    rows: list[np.ndarray] = []
    middles = []
    for values in alpha.values():
        shown = values.detach().float().cpu().numpy()
        order = np.lexsort((-shown.mean(axis=0), -(shown > 0).sum(axis=0)))
        middles.append(len(rows) + (len(shown) - 1) / 2)
        rows += [np.pad(row[order], (0, width - len(row))) for row in shown] + [np.zeros(width)]
    figure = Figure(figsize=(7, min(12.0, 1.6 + 0.22 * len(rows))), layout="constrained")
    axis = figure.subplots()
    colours = matplotlib.colormaps["Blues"].with_extremes(bad="white")
    cells = np.ma.masked_equal(np.stack(rows[:-1]), 0.0)
    image = axis.imshow(cells, cmap=colours, vmin=-0.2, vmax=1, aspect="auto", interpolation="none")
    axis.set_yticks(middles, [_short(name) for name in alpha])
    axis.set_xlabel("dimension, most widely retained first")
    figure.colorbar(
        image,
        label="alpha (white: 0)",
        boundaries=np.linspace(0, 1, 100),
        ticks=[0, 0.5, 1],
        shrink=0.5,
    )
    return figure


def frequency_image(blocks: Sequence[BlockSummary]) -> Figure:
    """Retained dims of every block over how often its rows occur; blocks whose rows never occur are
    left out."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    tables = list(dict.fromkeys(block.table for block in blocks))
    for index, table in enumerate(tables):
        mine = sorted(
            (b for b in blocks if b.table == table and b.occurrences),
            key=lambda b: b.occurrences_per_row,
        )
        x, y = (
            [block.occurrences_per_row for block in mine],
            [block.retained_dims for block in mine],
        )
        colour, marker = series_style(index)[0], MARKERS[index % len(MARKERS)]
        axis.plot(x, y, color=colour, marker=marker, markersize=8, linewidth=1, label=_short(table))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("mean occurrences per row of the block (log scale)")
    axis.set_ylabel("retained dims per row")
    axis.grid(axis="y", color="#E4E4E4")
    if 1 < len(tables) <= MOST_IN_A_LEGEND:
        handles, _ = axis.get_legend_handles_labels()
        axis.legend(
            handles, [_short(table) for table in tables], fontsize=10, ncols=2
        )  # names with "_" in front, too
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}\N{HORIZONTAL ELLIPSIS}"
