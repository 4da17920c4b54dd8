"""Figures of a report, one function each; matplotlib's object interface, no global state of pyplot.

Colours are those of Okabe and Ito, told apart by colour-blind readers too; markers say the same thing a second time.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import (
    BlockSummary,
    ReportRow,
    RowGroup,
    check_alpha,
    seed_groups,
    write_content,
    write_text,
)
from dnis_torchrec.report.tables import TIMES, format_count, format_megabytes, format_ratio

BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#222222"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A"
METHOD_STYLES = {
    "dnis": (BLUE, "o"),
    "uniform": (ORANGE, "s"),
    "magnitude": (GREEN, "^"),
    "dense": (BLACK, "D"),
}
TABLE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 8.6
STYLE: Any = {  # Any: matplotlib types the key as a literal of all its parameters
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar sign in a table name is a dollar sign
}

_P = ParamSpec("_P")


def _styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    @functools.wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


@_styled
def alpha_per_block(alpha: Mapping[str, Tensor]) -> Figure:
    """Heatmap of alpha, blocks downwards, dimensions sorted so that the structure is visible.

    Columns are sorted by the number of blocks in which alpha is not 0, then by mean alpha; values of exactly 0 stay
    white; the number right of a row counts its non-zero dimensions. All panels share one scale from 0 to 1.

    Args:
        alpha: embedding_dim or table name -> ``(S, D)``.

    Raises:
        ValueError: if there is no alpha or one is not a matrix of values in [0, 1].
    """
    check(len(alpha) > 0, "alpha", "expected at least one table", "none", "leave the figure out")
    check_alpha(alpha)
    num_columns = 1 if len(alpha) == 1 else 2 if len(alpha) <= 8 else 3
    num_rows = math.ceil(len(alpha) / num_columns)
    tallest = min(max(values.shape[0] for values in alpha.values()), 16)
    figure = Figure(figsize=(WIDTH, num_rows * (0.75 + 0.2 * tallest) + 0.5), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    blues = matplotlib.colormaps["Blues"](np.linspace(0.15, 1, 256))
    colours = ListedColormap(blues).with_extremes(bad="white")
    for axis, (name, values) in zip(axes.flat, alpha.items(), strict=False):
        title = f"tables of D = {name}" if name.isdigit() else _short(name, 60 if num_columns == 1 else 20)
        image = _alpha_panel(axis, title, values.detach().float().cpu().numpy(), colours)
    for axis in axes.flat[len(alpha) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("block (0 = most frequent)" if tallest > 6 else "block")
    figure.supxlabel("dimension, most widely retained first", fontsize=9.5, color="#333333")
    bar = figure.colorbar(
        image,
        ax=list(axes.flat),
        label="alpha (white: 0)",
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
    if num_blocks <= 16:
        axis.text(1, 1.02, "non-zero", transform=axis.transAxes, ha="center", va="bottom", fontsize=8, color="#777777")
        for block, count in enumerate((values > 0).sum(axis=1)):
            axis.text(embedding_dim - 0.3, block, f" {count}", va="center", fontsize=8.5, color="#333333")
    return image


@_styled
def retained_dims_against_frequency(blocks: Sequence[BlockSummary]) -> Figure:
    """Retained dims of every block over how often its rows occur: one colour and marker per table, area by rows.

    Blocks whose rows never occur stand apart at the left edge.

    Raises:
        ValueError: if there are no blocks.
    """
    check(len(blocks) > 0, "blocks", "expected at least one block", "none", "leave the figure out")
    tables = list(dict.fromkeys(block.table for block in blocks))
    frequencies = [block.occurrences_per_row for block in blocks if block.occurrences > 0]
    low, high = (min(frequencies), max(frequencies)) if frequencies else (1.0, 10.0)
    never_seen = any(block.occurrences == 0 for block in blocks)
    edge = low / 4
    most_rows = max(1, *(block.num_rows for block in blocks), 1)
    height = max(4.2, 0.19 * len(tables) + 0.8)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axis = figure.subplots()
    faint = 0.4 if len(tables) <= len(TABLE_COLOURS) else 0.2
    for index, table in enumerate(tables):
        mine = sorted((block for block in blocks if block.table == table), key=lambda block: block.occurrences_per_row)
        x = [max(block.occurrences_per_row, edge) if block.occurrences else edge for block in mine]
        y = [block.retained_dims for block in mine]
        area = [25 + 225 * math.sqrt(block.num_rows / most_rows) for block in mine]
        seen = [(at, dims) for at, dims in zip(x, y, strict=True) if at > edge]
        colour = TABLE_COLOURS[index % len(TABLE_COLOURS)]
        marker = MARKERS[(index + index // len(TABLE_COLOURS)) % len(MARKERS)]
        axis.plot([at for at, _ in seen], [dims for _, dims in seen], color=colour, linewidth=1, alpha=faint, zorder=1)
        axis.scatter(x, y, s=area, color=colour, marker=marker, alpha=0.8, edgecolor="white", linewidth=0.7)
    _log_axis(axis, (edge if never_seen else low) / 1.5, high * 1.5, format_count, first=low / 1.5)
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
    legend = _legend(figure, axis.collections, [_short(table) for table in tables], "table")
    for handle in legend.legend_handles:
        handle.set_sizes([40])  # type: ignore[union-attr]
    return figure


@_styled
def quality_against_size(rows: Sequence[ReportRow], metric: str, *, higher_is_better: bool) -> Figure:
    """A metric over the compression ratio: one line per method through the means over seeds, a faint point per seed.

    The uncompressed model and models whose tables retain nothing are also drawn as levels, for comparison.

    Args:
        rows: results; those without the metric are left out.
        metric: name of the metric.
        higher_is_better: its direction, told on the axis.

    Raises:
        ValueError: if no row has the metric.
    """
    rows = [row for row in rows if metric in row.metrics]
    check(len(rows) > 0, f"metric {metric!r}", "expected at least one row that has it", "none", "leave the figure out")
    groups = seed_groups([row for row in rows if row.parameters > 0])
    empty = seed_groups([row for row in rows if row.parameters == 0])
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axis = figure.subplots()
    methods = sorted({group.method for group in groups}, key=_method_order)
    others = [method for method in methods if method not in METHOD_STYLES]
    lines: list[Artist] = []
    for method in methods:
        colour, marker = METHOD_STYLES.get(method) or _other_style(others.index(method))
        mine = [group for group in groups if group.method == method]
        lines.append(_method_line(axis, mine, metric, colour=colour, marker=marker))
    for group in empty:
        lines.append(axis.axhline(_means([group], metric)[0], color=GREY, linewidth=1.4, linestyle=":"))
    ratios = [group.compression_ratio for group in groups] or [1.0]
    low, high = min(ratios), max(ratios)
    margin = max(1.06, (high / low) ** 0.05) if high > low else 1.5
    _log_axis(axis, low / margin, high * margin, format_ratio)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axis.ticklabel_format(axis="y", style="plain", useOffset=False)
    axis.grid(axis="y")
    axis.set_xlabel("compression ratio: uncompressed / retained parameters (log scale)")
    axis.set_ylabel(f"{_short(metric)} ({'higher' if higher_is_better else 'lower'} is better)")
    labels = [_short(method) for method in methods]
    labels += [f"{_short(group.method)} (no embeddings at all)" for group in empty]
    _legend(figure, lines, labels, "method")
    return figure


def _method_line(axis: Axes, groups: Sequence[RowGroup], metric: str, *, colour: str, marker: str) -> Artist:
    """Draws the means of one method, and the seeds behind them faintly; returns the line for the legend."""
    x, y = [group.compression_ratio for group in groups], _means(groups, metric)
    method = groups[0].method
    width, zorder = (2.4, 4) if method == "dnis" else (1.6, 3)
    (line,) = axis.plot(x, y, color=colour, marker=marker, markersize=6, linewidth=width, zorder=zorder)
    seeds = [row for group in groups if len(group.rows) > 1 for row in group.rows]
    if seeds:
        ratios = [row.compression_ratio for row in seeds]
        values = [row.metrics[metric] for row in seeds]
        axis.scatter(ratios, values, s=16, color=colour, marker=marker, alpha=0.3, linewidth=0, zorder=2)
    if method == "dense":
        axis.axhline(sum(y) / len(y), color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    return line


def _means(groups: Sequence[RowGroup], metric: str) -> list[float]:
    return [mean for group in groups if (mean := group.mean(metric)) is not None]


@_styled
def bytes_per_form(form_bytes: Mapping[str, int]) -> Figure:
    """Horizontal bars, one per export form, on a log scale, each with its size in MB and what it saves.

    Args:
        form_bytes: form -> bytes, index bytes counted; ``"dense_fp32"``, where given, is what the others are compared
            with.

    Raises:
        ValueError: if no form has a size above 0.
    """
    sizes = {form: size for form, size in form_bytes.items() if size > 0}
    check(len(sizes) > 0, "form_bytes", "expected at least one form above 0 bytes", dict(form_bytes))
    forms = sorted(sizes, key=lambda form: (-sizes[form], form))
    dense = sizes.get("dense_fp32")
    figure = Figure(figsize=(WIDTH, 0.42 * len(forms) + 0.95), layout="constrained")
    axis = figure.subplots()
    largest, smallest = sizes[forms[0]] / 1e6, sizes[forms[-1]] / 1e6
    low = 10 ** math.floor(math.log10(smallest) - 0.3)
    for position, form in enumerate(forms):
        megabytes = sizes[form] / 1e6
        axis.barh(position, megabytes - low, left=low, height=0.62, color=GREY if form == "dense_fp32" else BLUE)
        label = format_megabytes(sizes[form])
        if dense is not None and form != "dense_fp32":
            change = dense / sizes[form]
            label += f" ({change:.3g}{TIMES} smaller)" if change >= 1 else f" ({1 / change:.3g}{TIMES} larger)"
        axis.annotate(label, (megabytes, position), (5, 0), textcoords="offset points", va="center", fontsize=9)
    _log_axis(axis, low, low * (largest / low) ** 1.42, lambda x: f"{x:g}" if x < 1000 else f"{x:,.0f}")
    axis.set_yticks(range(len(forms)), [_short(form) for form in forms])
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("MB (10\N{SUPERSCRIPT SIX} bytes) of all tables, index bytes counted (log scale)")
    return figure


@_styled
def search_history(history: Sequence[Mapping[str, float]]) -> Figure:
    """The search over its epochs: losses above; below, alpha density and mean, with the pressure as a grey area.

    Args:
        history: one mapping per epoch, see `ReportContent.history`; what is missing is not drawn.

    Raises:
        ValueError: if the history is empty.
    """
    check(len(history) > 0, "history", "expected at least one epoch", "none", "leave the figure out")
    epochs = [entry.get("epoch", float(index)) for index, entry in enumerate(history)]
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    losses, density = figure.subplots(2, 1, sharex=True)
    marker = "o" if len(epochs) <= 40 else ""
    style: dict[str, Any] = {"linewidth": 1.8, "marker": marker, "markersize": 3.5}
    for key, colour, label in (
        ("train_loss", GREY, "training"),
        ("selection_loss", BLUE, "selection split"),
    ):
        _history_line(losses, epochs, history, key, colour=colour, label=label, **style)
    pressure = np.array([entry.get("pressure", math.nan) for entry in history], dtype=float)
    peak = float(np.nanmax(pressure)) if np.isfinite(pressure).any() else 0.0
    if peak > 0:
        label = f"pressure / its peak of {peak:.3g}"
        density.fill_between(epochs, np.nan_to_num(pressure) / peak, color="#E3E3E3", linewidth=0, label=label)
    _history_line(density, epochs, history, "alpha_density", colour=ORANGE, label="share of alpha above 0", **style)
    _history_line(density, epochs, history, "alpha_mean", colour=GREEN, label="mean of alpha", **style)
    density.set_ylim(-0.03, 1.05)
    density.set_xlabel("epoch")
    density.set_ylabel("alpha (share or mean)")
    losses.set_ylabel("loss")
    density.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    for axis in (losses, density):
        axis.grid(axis="y")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _history_line(
    axis: Axes, epochs: list[float], history: Sequence[Mapping[str, float]], key: str, *, colour: str, **style: Any
) -> None:
    values = [entry.get(key, math.nan) for entry in history]
    if any(math.isfinite(value) for value in values):
        axis.plot(epochs, values, color=colour, **style)


def save_png(figure: Figure, path: Path, *, dpi: int = 150) -> Path:
    """Writes a figure as PNG, atomically.

    Raises:
        ValueError: if the folder does not exist.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return write_content(path, buffer.getvalue())


def save_svg(figure: Figure, path: Path) -> Path:
    """Writes a figure as a stand-alone SVG, atomically; the same figure gives the same bytes.

    Raises:
        ValueError: if the folder does not exist.
    """
    return write_text(path, _svg_text(figure))


def inline_svg(figure: Figure, name: str) -> str:
    """An ``<svg>`` element for an HTML page: no ids shared with other figures, no address of any kind.

    Args:
        figure: the figure.
        name: letters, digits and dashes; goes before every id, so it has to differ between the figures of a page.

    Raises:
        ValueError: if the name holds other characters.
    """
    check(bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name)), "name", "expected letters, digits and dashes", repr(name))
    text = _svg_text(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    # Inside HTML, an <svg> needs neither a fixed size nor namespaces, which are addresses.
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 aria-hidden="true">', text, count=1)


def _svg_text(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "dnis_torchrec", "svg.fonttype": "path", "svg.image_inline": True}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _method_order(method: str) -> tuple[int, str]:
    known = list(METHOD_STYLES)
    return (known.index(method) if method in known else len(known), method)


def _other_style(index: int) -> tuple[str, str]:
    colours, markers = (PURPLE, SKY, YELLOW), ("v", "P", "X", "*")
    return colours[index % len(colours)], markers[index % len(markers)]


def _short(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str) -> Legend:
    """A legend beside the axes; with handles and labels given, names that begin with an underscore are shown too."""
    return figure.legend(
        handles, labels, loc="outside right upper", title=title, alignment="left", fontsize=8.5, title_fontsize=9
    )


def _log_axis(axis: Axes, low: float, high: float, tick_text: Callable[[float], str], *, first: float = 0.0) -> None:
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.xaxis.set_major_locator(FixedLocator(_log_ticks(max(low, first), high)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds: decades for a wide range, finer steps until at least three fit."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
        ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    return ticks or [math.sqrt(low * high)]
