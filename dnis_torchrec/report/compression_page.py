"""A compressed model as one self-contained HTML page, and as a terminal table: quality against compression."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from dnis_torchrec.report import figures
from dnis_torchrec.report.compression_content import UNCOMPRESSED, CompressionContent
from dnis_torchrec.report.content import json_text
from dnis_torchrec.report.rendering import render
from dnis_torchrec.report.tables import MINUS, cell, format_megabytes, format_metric, format_ratio, format_seconds
from dnis_torchrec.storage.whole_files import write_text


def write_compression(path: Path, content: CompressionContent) -> Path:
    """Writes the page as one HTML file, atomically; the same content gives the same bytes.

    Args:
        path: of the page; an older one is replaced.
        content: the content of the page.

    Returns:
        `path`.

    Raises:
        ValueError: if the folder does not exist.
    """
    drawn = {
        "quality": figures.quality_against_compression(content),
        "loss": figures.loss_against_compression(content),
    }
    headings, *lines = compression_lines(content)
    page = render(
        "compression.html.j2",
        content=content,
        sentence=_sentence(content),
        headings=headings,
        lines=lines,
        figures={name: Markup(figures.inline_svg(figure, name)) for name, figure in drawn.items()},
        configuration=json_text(content.configuration, "CompressionContent.configuration"),
    )
    return write_text(path, page)


def compression_lines(content: CompressionContent) -> list[list[str]]:
    """Headings, then a line per row, as text: the uncompressed model first, then by compression.

    Args:
        content: what is told.
    """
    metric = content.primary_metric
    headings = ["model", "compression", "bytes", f"selection {metric}", f"test {metric}"]
    headings += ["predicted loss", "selection loss", "test loss", "time"]
    lines = [headings]
    for row in (content.uncompressed, *content.compressed):
        values = [format_metric(split[metric]) if metric in split else "-" for split in (row.selection, row.metrics)]
        if row.method == UNCOMPRESSED:
            losses, time = ["-", "-", "-"], "-"
        else:
            measured = [content.loss_increase(row, split) for split in ("selection", "metrics")]
            losses, time = [_signed(row.predicted_loss_increase), *map(_signed, measured)], format_seconds(row.seconds)
        name = row.name or row.method
        lines.append([name, format_ratio(row.compression), f"{row.bytes:,}", *values, *losses, time])
    return lines


def compression_table(content: CompressionContent) -> Table:
    """A terminal table of `compression_lines`.

    Args:
        content: what is told.
    """
    headings, *lines = compression_lines(content)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(cell(heading), justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*map(cell, line))
    return table


def _signed(increase: float) -> str:
    """A change of the loss: far smaller than the loss itself, so with a digit more than metrics have.

    Example:
        >>> _signed(0.00004), _signed(-0.0012)
        ('+0.00004', '\N{MINUS SIGN}0.00120')
    """
    return f"{'+' if increase >= 0 else MINUS}{abs(increase):.5f}"


def _sentence(content: CompressionContent) -> str:
    smallest, metric = content.compressed[-1], content.primary_metric
    size = f"{format_megabytes(content.uncompressed.bytes)} become {format_megabytes(smallest.bytes)}"
    size += f" at the smallest size, {format_ratio(smallest.compression)}, without a training step"
    if metric not in smallest.metrics or metric not in content.uncompressed.metrics:
        return f"{size}."
    values = f"{format_metric(content.uncompressed.metrics[metric])} becomes {format_metric(smallest.metrics[metric])}"
    return f"{size}; test {metric} {values}."
