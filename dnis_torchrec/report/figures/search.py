"""Figures of one search: alpha of every block, as a heat map and as a distribution, and the course of the epochs.

Shapes: S blocks, D embedding_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import check_alpha
from dnis_torchrec.report.figures.style import BLACK, BLUE, FIGURE_WIDTH, GREEN, GREY, ORANGE, short, styled

COUNTED_BLOCKS = 16
"""Up to so many, the dimensions that are left of a block are counted beside the heat map."""
MOST_TICKS = {1: 12, 2: 8, 3: 5}
"""Columns of panels -> how many ticks have room below one."""


@styled
def alpha_per_block(alpha: Mapping[str, Tensor]) -> Figure:
    """Heatmap of alpha, blocks downwards, dimensions sorted so that the structure is visible.

    Columns are sorted by the number of blocks in which alpha is not 0, then by mean alpha; values of exactly 0 stay
    blank; the number right of a row counts its non-zero dimensions. All panels share one scale from 0 to 1.

    Args:
        alpha: title of a panel -> ``(S, D)``.

    Raises:
        ValueError: if there is no alpha or one is not a matrix of values in [0, 1].
    """
    _check_drawable(alpha)
    num_columns, num_rows = _grid(len(alpha))
    tallest = min(max(values.shape[0] for values in alpha.values()), COUNTED_BLOCKS)
    figure = Figure(figsize=(FIGURE_WIDTH, num_rows * (0.75 + 0.2 * tallest) + 0.5), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    blues = matplotlib.colormaps["Blues"](np.linspace(0.15, 1, 256))
    colours = ListedColormap(blues).with_extremes(bad="white")
    for axis, (name, values) in zip(axes.flat, alpha.items(), strict=False):
        image = _alpha_panel(axis, _panel_title(name, num_columns), values.detach().float().cpu().numpy(), colours)
    for axis in axes.flat[len(alpha) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("block (0 = most frequent)" if tallest > 6 else "block")
    figure.supxlabel("dimension, most widely retained first", fontsize=9.5, color="#333333")
    bar = figure.colorbar(
        image,
        ax=list(axes.flat),
        label="alpha (blank: 0)",
        fraction=0.03,
        pad=0.02,
        shrink=max(1 / num_rows, 0.1),
        anchor=(0.0, 1.0),
        aspect=14,
    )
    bar.outline.set_visible(False)
    return figure


def _alpha_panel(axis: Axes, title: str, values: np.ndarray, colours: Colormap) -> Any:
    num_blocks, embedding_dim = values.shape
    order = np.lexsort((-values.mean(axis=0), -(values > 0).sum(axis=0)))
    shown = np.ma.masked_equal(values[:, order], 0.0)
    image = axis.imshow(shown, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="none")
    axis.set_title(title)
    few = num_blocks <= 10
    axis.yaxis.set_major_locator(FixedLocator(range(num_blocks)) if few else MaxNLocator(nbins=8, integer=True))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    axis.set_xlim(-0.5, embedding_dim - 0.5)
    axis.hlines(np.arange(1, num_blocks) - 0.5, -0.5, embedding_dim - 0.5, color="#ECECEC", linewidth=1.2)
    axis.spines[:].set(visible=True, color="#ECECEC", linewidth=1.2)
    axis.tick_params(length=0)
    if num_blocks <= COUNTED_BLOCKS:
        axis.text(1, 1.02, "non-zero", transform=axis.transAxes, ha="center", va="bottom", fontsize=8, color="#777777")
        for block, count in enumerate((values > 0).sum(axis=1)):
            axis.text(embedding_dim - 0.3, block, f" {count}", va="center", fontsize=8.5, color="#333333")
    return image


@styled
def alpha_distribution(alpha: Mapping[str, Tensor]) -> Figure:
    """Distribution of alpha within every block: each dot one dimension, beside it median and quartiles.

    The paper's figure of the trained soft selection. Values of exactly 0 would hide each other: they are left out of
    the dots and counted below the axis instead, but count in median and quartiles.

    Args:
        alpha: title of a panel -> ``(S, D)``.

    Raises:
        ValueError: if there is no alpha or one is not a matrix of values in [0, 1].
    """
    _check_drawable(alpha)
    num_columns, num_rows = _grid(len(alpha))
    figure = Figure(
        figsize=(FIGURE_WIDTH, 2.9 * num_rows if num_columns == 1 else 2.3 * num_rows + 0.3), layout="constrained"
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)
    for axis, (name, values) in zip(axes.flat, alpha.items(), strict=False):
        axis.set_title(_panel_title(name, num_columns))
        _distribution_panel(axis, values.detach().float().cpu().numpy(), MOST_TICKS[num_columns])
    for axis in axes.flat[len(alpha) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("alpha")
    figure.supxlabel("block (0 = most frequent), and its share of alpha at 0", fontsize=9.5, color="#333333")
    return figure


def _distribution_panel(axis: Axes, values: np.ndarray, most_ticks: int) -> None:
    num_blocks, embedding_dim = values.shape
    style: dict[str, Any] = {"markersize": 3.4 if embedding_dim > 32 else 5, "alpha": 0.6, "markeredgewidth": 0}
    for block, row in enumerate(values):
        kept = np.sort(row[row > 0])
        # Neighbours in value stand side by side, so that equal values do not hide each other.
        aside = np.resize([0.0, 0.5, -0.5, 1.0, -1.0], kept.shape) * 0.17
        axis.plot(block - 0.1 + aside, kept, "o", color=BLUE, **style)
        low, median, high = np.quantile(row, (0.25, 0.5, 0.75))
        axis.vlines(block + 0.28, low, high, color=BLACK, linewidth=2.2)
        axis.plot(block + 0.28, median, "o", color="white", markeredgecolor=BLACK, markersize=4.5, markeredgewidth=1.4)
    step = math.ceil(num_blocks / most_ticks)
    shown = range(0, num_blocks, step)
    axis.set_xticks(shown, [f"{block}\n{(values[block] == 0).mean():.0%}" for block in shown])
    axis.set_xlim(-0.6, num_blocks - 0.4)
    axis.set_ylim(-0.04, 1.04)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y")


def _check_drawable(alpha: Mapping[str, Tensor]) -> None:
    check(len(alpha) > 0, "alpha", "at least one table", "none", "leave the figure out")
    check_alpha(alpha)


def _grid(num_panels: int) -> tuple[int, int]:
    """Columns and rows for a number of panels."""
    num_columns = 1 if num_panels == 1 else 2 if num_panels <= 8 else 3
    return num_columns, math.ceil(num_panels / num_columns)


def _panel_title(name: str, num_columns: int) -> str:
    return short(name, 60 if num_columns == 1 else 20)


@styled
def search_history(history: Sequence[Mapping[str, Any]]) -> Figure:
    """The search over its epochs, phase by phase: losses above; below, alpha density and mean.

    Args:
        history: one mapping per epoch, see `ReportContent.history`; what is missing is not drawn.

    Raises:
        ValueError: if the history is empty.
    """
    check(len(history) > 0, "history", "at least one epoch", "none", "leave the figure out")
    epochs = [entry.get("epoch", float(index)) for index, entry in enumerate(history)]
    figure = Figure(figsize=(FIGURE_WIDTH, 5.0), layout="constrained")
    losses, density = figure.subplots(2, 1, sharex=True)
    marker = "o" if len(epochs) <= 40 else ""
    style: dict[str, Any] = {"linewidth": 1.8, "marker": marker, "markersize": 3.5}
    for key, colour, label in (
        ("train_loss", GREY, "training"),
        ("selection_loss", BLUE, "selection split"),
    ):
        _history_line(losses, epochs, history, key, colour=colour, label=label, **style)
    _history_line(density, epochs, history, "alpha_density", colour=ORANGE, label="share of alpha above 0", **style)
    _history_line(density, epochs, history, "alpha_mean", colour=GREEN, label="mean of alpha", **style)
    density.set_ylim(-0.03, 1.05)
    density.set_xlabel("epoch")
    density.set_ylabel("alpha (share or mean)")
    losses.set_ylabel("loss")
    density.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    _mark_phases((losses, density), epochs, [entry.get("phase") for entry in history])
    for axis in (losses, density):
        axis.grid(axis="y")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _mark_phases(axes: Sequence[Axes], epochs: Sequence[float], phases: Sequence[str | None]) -> None:
    """Draws a thin line before the first epoch of every phase, its name beside it in the last panel."""
    for before, epoch, phase in zip([None, *phases], epochs, phases, strict=False):
        if phase is None or phase == before:
            continue
        for axis in axes:
            axis.axvline(epoch - 0.5, color="#BBBBBB", linewidth=0.8)
        place = axes[-1].get_xaxis_transform()
        axes[-1].text(epoch - 0.4, 0.03, phase, rotation=90, transform=place, va="bottom", fontsize=8, color="#777777")


def _history_line(
    axis: Axes, epochs: list[float], history: Sequence[Mapping[str, Any]], key: str, *, colour: str, **style: Any
) -> None:
    values = [entry.get(key, math.nan) for entry in history]
    if any(math.isfinite(value) for value in values):
        axis.plot(epochs, values, color=colour, **style)
