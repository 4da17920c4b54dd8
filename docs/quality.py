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

from dnis_torchrec.report.page import COMPRESSION

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RIVALS = BENCHMARKS / "rate_distortion_2cpu_2026-11-26.md"
SUITED = BENCHMARKS / "search_2cpu_2026-11-27.md"

COMPRESS, UNIFORM, CUT, ROWS = "#0b5cad", "#c2410c", "#6b7280", "#0f766e"
SIZES = (1, 4, 8, 20, 40, 64)

Points = list[tuple[float, float]]
"""(compression, metric) of one line of a picture, in rising order."""


def table_under(page: str, heading: str) -> list[dict[str, str]]:
    """Rows of the first table after a line of a page, by the names of its columns.

    Args:
        page: Markdown.
        heading: how the line begins.

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


def measured(page: str, heading: str, method: str, metric: str) -> Points:
    """Sizes of one method, each in the precision that the selection split prefers.

    Args:
        page: that of rivals.
        heading: of the model's section.
        method: as its column says.
        metric: name of the column.
    """
    rows = [row for row in table_under(page, heading) if row["method"] == method]
    starred = {row["asked for"] for row in rows if row["precision"].endswith("*")}
    kept = [row for row in rows if row["precision"].endswith("*") or row["asked for"] not in starred]
    return sorted((float(row["compression"]), float(row[metric])) for row in kept)


def suited_fm(page: str) -> Points:
    """FM at the L2 and rate that suit it, uncompressed and compressed.

    Args:
        page: that of searches.
    """
    rows = table_under(page, "FM with the L2")
    return [(1.0 if row["FM"] == "uncompressed" else float(row["FM"].split()[0]), float(row["AUC"])) for row in rows]


def _line(axis: Axes, points: Iterable[tuple[float, float]], label: str, color: str, style: str = "-o") -> None:
    compressions, values = zip(*points, strict=True)
    axis.plot(compressions, values, style, color=color, label=label, linewidth=1.8, markersize=5)


def _dress(axis: Axes, title: str, metric: str) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(SIZES))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}x"))
    axis.tick_params(labelsize=9)
    axis.set_xlabel(COMPRESSION)
    axis.set_ylabel(metric)
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(color="#e5e7eb", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="best")


def draw(path: Path) -> None:
    """Draws both models side by side.

    Args:
        path: of the picture.
    """
    rivals, suited = RIVALS.read_text(encoding="utf-8"), SUITED.read_text(encoding="utf-8")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.9))
    section = "## MF, MSE"
    plain = measured(rivals, section, "uncompressed", "mse")
    _line(left, plain + measured(rivals, section, "compress", "mse"), "compress", COMPRESS)
    _line(left, plain + measured(rivals, section, "row-wise", "mse"), "int8 rows, int4 rows", ROWS, "--s")
    _line(left, plain + measured(rivals, section, "uniform", "mse"), "smaller D, best precision", UNIFORM, "-^")
    _line(left, plain + measured(rivals, section, "cut axes", "mse"), "first principal axes", CUT, ":v")
    left.set_ylim(0.7155, 0.755)
    _dress(left, "MF on ratings", "test MSE (low is better)")
    section = "## FM on clicks"
    plain = measured(rivals, section, "uncompressed", "auc")
    _line(right, suited_fm(suited), "L2 .02, rate .001: compress", COMPRESS)
    _line(right, plain + measured(rivals, section, "compress", "auc"), "L2 .01: compress", COMPRESS, "--o")
    _line(
        right, plain + measured(rivals, section, "uniform", "auc"), "L2 .01: smaller D, best precision", UNIFORM, "-^"
    )
    right.set_ylim(0.8065, 0.8205)
    _dress(right, "FM on clicks", "test AUC (high is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    matplotlib.use("agg")
    parser = argparse.ArgumentParser(description="Draws test quality against compression.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("quality.png"))
    draw(parser.parse_args().out)
