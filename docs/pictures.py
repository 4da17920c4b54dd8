"""The pictures of the concept pages, drawn from small made-up tables: they explain, they measure nothing.

    python -m docs.pictures [--out docs/concepts]

Bits are spent by the rule of `dnis_torchrec.allocation.bits`, here in a few lines of numpy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SEED = 2020
BLUE, ORANGE, GREY, TEAL = "#0b5cad", "#c2410c", "#6b7280", "#0f766e"
BLOCKS = ("#0b5cad", "#3b82c4", "#8ab8e0", "#cfe2f3")
"""Colours of four blocks, the most frequent rows first."""
NOISE = {0: 1.0, 1: 0.363, 2: 0.119, 3: 0.0374, 4: 0.0115, 5: 0.0035, 6: 0.00104, 8: 0.0001}
"""Bits -> share of the energy of normal values that the best evenly spaced codes leave as an error (Max, 1960)."""


def _bare(axis: Axes, title: str, *, x: str = "", y: str = "") -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.set(xticks=[], yticks=[])


def soft_selection() -> Figure:
    """A table in four blocks, one row of alpha for each, and what the model reads."""
    random = np.random.default_rng(SEED)
    rows_of_block, dims = (2, 3, 4, 7), 8
    table = random.normal(size=(sum(rows_of_block), dims))
    alpha = np.clip(np.linspace(1.1, 0.15, 4)[:, None] - np.linspace(0, 0.75, dims)[None, :], 0, 1)
    spread = np.repeat(alpha, rows_of_block, axis=0)
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.6))
    for axis, values, title in (
        (axes[0], table, "table: N rows, D columns"),
        (axes[2], table * spread, "what the model reads"),
    ):
        axis.imshow(values, cmap="RdBu", vmin=-2.2, vmax=2.2, aspect="auto")
        _bare(axis, title)
        for edge in np.cumsum(rows_of_block)[:-1]:
            axis.axhline(edge - 0.5, color="black", linewidth=1.2)
    axes[1].imshow(alpha, cmap="Greys", vmin=0, vmax=1.3, aspect="auto")
    for block, column in np.ndindex(alpha.shape):
        value = alpha[block, column]
        shade, text = "white" if value > 0.7 else "black", f"{value:.1f}".lstrip("0") or "0"
        axes[1].text(column, block, text, ha="center", va="center", fontsize=8, color=shade)
    _bare(axes[1], "alpha: a row for each block")
    axes[0].set_ylabel("rows, the most frequent first", fontsize=9)
    figure.text(0.378, 0.47, "x", fontsize=18, ha="center")
    figure.text(0.65, 0.47, "=", fontsize=18, ha="center")
    return figure


def curvature() -> Figure:
    """The loss along alpha for two columns, one of which may go."""
    figure, axis = pyplot.subplots(figsize=(7, 3.3))
    alpha = np.linspace(-0.1, 1.45, 200)
    for bend, color, name in ((0.9, ORANGE, "a column that is needed"), (0.09, BLUE, "a column that is not")):
        axis.plot(alpha, bend / 2 * (alpha - 1) ** 2, color=color, linewidth=2, label=f"{name}: H = {bend}")
        axis.plot([0], [bend / 2], "o", color=color)
        text, place = f"dropped: + {bend / 2:.3g}", (0.07, bend / 2 + 0.03)
        axis.annotate(text, (0, bend / 2), xytext=place, fontsize=9, color=color)
    axis.axvline(1, color=GREY, linewidth=1, linestyle=":")
    axis.set(xlabel="alpha of the column; 1 leaves it as it is, 0 drops it", ylabel="rise of the loss")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper right")
    return figure


def spent_bits(worth: np.ndarray, rows: np.ndarray, budget: float) -> np.ndarray:
    """Bits of every column of every block: from 0 up, the step that saves most loss for its bytes comes first."""
    widths, noise = np.array(list(NOISE)), np.array(list(NOISE.values()))
    steps = []
    for block, column in np.ndindex(worth.shape):
        for old, new in pairwise(range(len(widths))):
            saved = worth[block, column] * (noise[old] - noise[new])
            cost = rows[block] * (widths[new] - widths[old]) / 8
            steps.append((saved / cost, cost, block, column, widths[new]))
    bits = np.zeros(worth.shape, dtype=int)
    for _, cost, block, column, width in sorted(steps, reverse=True):
        if cost > budget:
            break
        budget -= cost
        bits[block, column] = width
    return bits


def bits() -> Figure:
    """Loss against bytes of one column, and the bits that a table gets."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.5), width_ratios=(1, 1.35))
    widths, noise = np.array(list(NOISE)), np.array(list(NOISE.values()))
    for worth, color, name in ((1.0, ORANGE, "worth much"), (0.25, BLUE, "worth little")):
        left.plot(widths, worth * noise, "-o", color=color, label=f"a column {name}", markersize=4)
    left.set(xticks=widths, xlabel="bits of its values", ylabel="loss that it costs")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    left.set_title("steepest steps first", fontsize=10, loc="left")
    worth = np.outer(0.6 ** np.arange(6), 0.55 ** np.arange(12))
    rows = np.array([20, 60, 180, 540, 1600, 4600])
    found = spent_bits(worth, rows, budget=8400)
    right.imshow(found, cmap="Blues", vmin=0, vmax=10, aspect="auto")
    for block, column in np.ndindex(found.shape):
        shade = "white" if found[block, column] > 5 else "black"
        right.text(column, block, str(found[block, column]), ha="center", va="center", fontsize=8, color=shade)
    _bare(right, "bits of a table; 0 is a dropped column", x="columns, in principal axes", y="blocks, rare rows below")
    return figure


def blocks() -> Figure:
    """Counts of rows from the most frequent on, cut into blocks."""
    figure, axis = pyplot.subplots(figsize=(7, 3.3))
    edges = (1, 60, 700, 4500, 20000)
    for number, (start, stop) in enumerate(pairwise(edges)):
        rank = np.geomspace(start, stop, 20)
        axis.fill_between(rank, 40000 / rank**0.95, 1, color=BLOCKS[number], linewidth=0)
        middle, shade = np.sqrt(start * stop), "white" if number < 2 else "black"
        axis.text(middle, 1.5, f"block {number}", ha="center", fontsize=9, color=shade)
    axis.set(xscale="log", yscale="log", xlim=(edges[0], edges[-1]), ylim=(1, 60000))
    axis.set(xlabel="rows of a table, the most frequent first", ylabel="times looked up in training")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def axes() -> Figure:
    """Rows as points before and after a table is turned, and what its columns hold."""
    random = np.random.default_rng(SEED)
    angle = np.pi / 5
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    turned = random.normal(size=(300, 2)) * (1.0, 0.22)
    given = turned @ turn
    figure, panels = pyplot.subplots(1, 3, figsize=(9.5, 3.2))
    for panel, points, title in ((panels[0], given, "as trained"), (panels[1], turned, "in principal axes")):
        panel.scatter(points[:, 0], points[:, 1], s=8, color=BLUE, alpha=0.6, linewidth=0)
        panel.axhline(0, color=GREY, linewidth=0.8)
        panel.axvline(0, color=GREY, linewidth=0.8)
        panel.set(aspect="equal", xlim=(-3, 3), ylim=(-3, 3))
        _bare(panel, title, x="column 0", y="column 1")
    shares = [(points**2).sum(0) / (points**2).sum() for points in (given, turned)]
    panels[2].bar(np.arange(2) - 0.2, shares[0], 0.4, color=GREY, label="as trained")
    panels[2].bar(np.arange(2) + 0.2, shares[1], 0.4, color=BLUE, label="in principal axes")
    panels[2].set(xticks=[0, 1], xticklabels=["column 0", "column 1"], ylim=(0, 1.3))
    panels[2].set_title("share of the energy", fontsize=10, loc="left")
    panels[2].spines[["top", "right"]].set_visible(False)
    panels[2].legend(frameon=False, fontsize=9)
    return figure


def every_day() -> Figure:
    """What runs once, every day and every hour, and what it leaves for serving."""
    figure, axis = pyplot.subplots(figsize=(9, 3.4))
    axis.set(xlim=(0, 9), ylim=(0.5, 3.9))
    axis.axis("off")
    rows = (("once", 3.1, GREY), ("every day", 1.9, BLUE), ("every hour", 0.7, TEAL))
    texts = {
        "once": ("dnis train", "dnis compress", "artifact"),
        "every day": ("dnis train\n--scheme --from", "dnis refresh", "new artifact"),
        "every hour": ("dnis train\n--scheme --from", "dnis refresh --delta", "delta"),
    }
    arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.4}
    for name, y, color in rows:
        axis.text(0.05, y + 0.3, name, fontsize=10, color=color, weight="bold", va="center")
        for x, text in zip((1.3, 3.3, 5.3), texts[name], strict=True):
            axis.add_patch(pyplot.Rectangle((x, y), 1.6, 0.6, facecolor="white", edgecolor=color, linewidth=1.6))
            axis.text(x + 0.8, y + 0.3, text, fontsize=9, ha="center", va="center", color="black")
        for x in (2.9, 4.9):
            axis.annotate("", (x + 0.4, y + 0.3), (x, y + 0.3), arrowprops=arrow)
        axis.annotate("", (7.5, 2.2 if y > 1 else 1.4), (6.9, y + 0.3), arrowprops=arrow)
    for first, second in ((3.1, 1.9), (1.9, 0.7)):
        axis.annotate("", (2.1, second + 0.6), (2.1, first), arrowprops=arrow)
        axis.text(2.2, (first + second + 0.6) / 2, "weights, optimizer, counts", fontsize=8, color=GREY, va="center")
    axis.add_patch(pyplot.Rectangle((7.5, 1.1), 1.4, 1.5, facecolor="#e8f0fa", edgecolor=ORANGE, linewidth=1.6))
    axis.text(8.2, 1.85, "serving\nload_model\napply_delta", fontsize=9, ha="center", va="center", color="black")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "soft-selection": soft_selection,
    "curvature": curvature,
    "bits": bits,
    "blocks": blocks,
    "axes": axes,
    "every-day": every_day,
}
"""Page -> its picture."""


def draw(folder: Path) -> None:
    """Draws all pictures, as SVG that is the same whenever it is drawn."""
    with matplotlib.rc_context({"svg.hashsalt": "dnis", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name, picture in PICTURES.items():
            figure = picture()
            figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    matplotlib.use("agg")
    parser = argparse.ArgumentParser(description="Draws the pictures of the concept pages.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("concepts"))
    draw(parser.parse_args().out)
