"""README's picture: test quality against compression, from the tables of the measured pages.

    python -m docs.quality [--out docs/quality.png]

Nothing is written down here twice: what is drawn is read from benchmarks/*.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RIVALS = BENCHMARKS / "rate_distortion_2cpu_2026-11-27.md"
COMPRESSED = BENCHMARKS / "compress_2cpu_2026-11-28.md"

COMPRESS, UNIFORM, CUT, ROWS = "#0b5cad", "#c2410c", "#6b7280", "#0f766e"
SIZES = (1, 4, 8, 20, 40, 64)

Points = list[tuple[float, float]]
"""(compression, metric) of one line of a picture, in rising order."""


def table_under(page: str, heading: str) -> list[dict[str, str]]:
    """Rows of the first table after a line of a page, by the names of its columns.

    Example:
        >>> table_under("# A\\n\\n| x | y |\\n|---|---|\\n| 1 | 2 |\\n", "# A")
        [{'x': '1', 'y': '2'}]
    """
    lines = page.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(heading))
    first = next(number for number in range(start + 1, len(lines)) if lines[number].startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names, _, *values = rows
    return [dict(zip(names, row, strict=True)) for row in values]


def measured(page: str, heading: str, model: str, method: str) -> Points:
    """What a row of a table says of every compression; a column is named by its own, if it is not that of the model."""
    name = ""
    for row in table_under(page, heading):
        first, second, *rest = row.items()
        name = first[1] or name
        if name.startswith(model) and second[1] == method:
            cells = [(column.split()[0], cell.strip("*").split()) for column, cell in rest]
            return [(1.0 if c == "uncompressed" else float(c), float(cell[0].strip("*"))) for c, cell in cells if cell]
    raise ValueError(f"no row {method!r} of {model!r}")


def _line(axis: Axes, points: Iterable[tuple[float, float]], label: str, color: str, style: str = "-o") -> None:
    compressions, values = zip(*points, strict=True)
    axis.plot(compressions, values, style, color=color, label=label, linewidth=1.8, markersize=5)


def _dress(axis: Axes, title: str, metric: str) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(SIZES))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}x"))
    axis.tick_params(labelsize=9)
    axis.set(xlabel="times smaller tables (log scale)", ylabel=metric)
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(color="#e5e7eb", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)


def draw(path: Path) -> None:
    """Draws both models side by side."""
    rivals, compressed = RIVALS.read_text(encoding="utf-8"), COMPRESSED.read_text(encoding="utf-8")
    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 4.2))
    for axis, model in zip(axes, ("MF on ratings", "FM on clicks"), strict=True):
        same, smaller = "## From the same trained model", "## A smaller D"
        _line(axis, measured(compressed, "Means of seeds", model, "learnt"), "dnis compress", COMPRESS)
        _line(axis, measured(rivals, same, model, "int8, int4 rows"), "TorchRec's int8 and int4 rows", ROWS, "--s")
        narrow = measured(rivals, smaller, model, "smaller D")
        _line(axis, narrow, "smaller embedding_dim, trained anew, one seed", UNIFORM, "-^")
        _line(axis, measured(rivals, same, model, "cut axes"), "first principal axes only", CUT, ":v")
    left, right = axes
    left.set_ylim(0.708, 0.745)
    _dress(left, "Ratings of MovieLens-1M, matrix factorization", "error (MSE) on test, low is better")
    right.set_ylim(0.8065, 0.8215)
    _dress(right, "Clicks of MovieLens-1M, factorization machine", "AUC on test, high is better")
    figure.suptitle("Quality of two models as their embedding tables get smaller, mean of three seeds", fontsize=12)
    lines, labels = left.get_legend_handles_labels()
    figure.legend(lines, labels, frameon=False, fontsize=9, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    matplotlib.use("agg")
    parser = argparse.ArgumentParser(description="Draws test quality against compression.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("quality.png"))
    draw(parser.parse_args().out)
