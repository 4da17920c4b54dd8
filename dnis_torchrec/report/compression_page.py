"""A compressed model as one self-contained HTML page, and as a terminal table: quality against
compression."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dnis_torchrec.data.files import write_text
from dnis_torchrec.report import charts
from dnis_torchrec.report.compression_content import COMPRESS, CompressionContent
from dnis_torchrec.report.content import UNCOMPRESSED, json_text
from dnis_torchrec.report.key_numbers import KeyNumber, compared_number
from dnis_torchrec.report.page import quality_caption
from dnis_torchrec.report.pareto_points import ParetoPoint
from dnis_torchrec.report.provenance import commands
from dnis_torchrec.report.rendering import render
from dnis_torchrec.report.tables import (
    MINUS,
    cell,
    format_megabytes,
    format_metric,
    format_ratio,
    format_seconds,
)
from dnis_torchrec.report.verdict import ONE_SEED, Rival, sentence


def write_compression(path: Path, content: CompressionContent) -> Path:
    """Writes the page as one HTML file, atomically; the same content gives the same bytes."""
    metric, higher = content.primary_metric, content.higher_is_better
    points = _points(content)
    drawn = {"quality": charts.quality(points, metric, higher_is_better=higher)} if points else {}
    headings, *lines = compression_lines(content)
    page = render(
        "compression.html.j2",
        charts=drawn | {"loss": charts.loss_increase(content)},
        content=content,
        title="Quality against compression",
        facts=[f"seed {content.uncompressed.seed}"],
        sentence=verdict(content),
        key_numbers=_key_numbers(content),
        quality_caption=quality_caption(points, higher_is_better=higher),
        doubts=[ONE_SEED, *content.doubts],
        headings=headings,
        lines=lines,
        reproduce=commands(content.provenance),
        configuration_title="Settings",
        configuration=json_text(content.configuration, "CompressionContent.configuration"),
    )
    return write_text(path, page)


def compression_lines(content: CompressionContent) -> list[list[str]]:
    """Headings, then a line per row, as text, smallest compression first."""
    metric = content.primary_metric
    headings = ["model", "compression", "bytes", f"selection {metric}", f"test {metric}"]
    headings += ["predicted loss", "selection loss", "test loss", "time"]
    lines = [headings]
    for row in sorted(content.rows, key=lambda row: row.compression):
        values = [
            format_metric(split[metric]) if metric in split else "-"
            for split in (row.selection, row.metrics)
        ]
        if row.method == UNCOMPRESSED:
            losses, time = ["-", "-", "-"], "-"
        else:
            measured = [content.loss_increase(row, split) for split in ("selection", "metrics")]
            predicted = _signed(row.predicted_loss_increase) if row.method == COMPRESS else "-"
            losses, time = [predicted, *map(_signed, measured)], format_seconds(row.seconds)
        name = row.name or row.method
        lines.append(
            [name, format_ratio(row.compression), f"{row.bytes:,}", *values, *losses, time]
        )
    return lines


def compression_table(content: CompressionContent) -> Table:
    """A terminal table of `compression_lines`."""
    headings, *lines = compression_lines(content)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(cell(heading), justify="left" if index == 0 else "right")
    for line in lines:
        table.add_row(*map(cell, line))
    return table


def _key_numbers(content: CompressionContent) -> list[KeyNumber]:
    """Size, test metric, and how that compares with the model as it was, of the smallest size."""
    smallest, before, metric = content.compressed[-1], content.uncompressed, content.primary_metric
    bytes_served = f"{format_megabytes(smallest.bytes)} instead of {format_megabytes(before.bytes)}"
    numbers = [
        KeyNumber(
            label="Compression", value=format_ratio(smallest.compression), detail=bytes_served
        )
    ]
    if metric in smallest.metrics and metric in before.metrics:
        direction = f"{'higher' if content.higher_is_better else 'lower'} is better"
        value, was = smallest.metrics[metric], before.metrics[metric]
        numbers.append(
            KeyNumber(label=f"Test {metric}", value=format_metric(value), detail=direction)
        )
        detail, higher = format_metric(was), content.higher_is_better
        numbers.append(
            compared_number("vs uncompressed", value - was, detail, higher_is_better=higher)
        )
    return numbers


def _points(content: CompressionContent) -> list[ParetoPoint]:
    metric = content.primary_metric
    return [
        ParetoPoint(
            method=row.method,
            bytes=row.bytes,
            mean=row.metrics[metric],
            compression=row.compression,
        )
        for row in content.rows
        if metric in row.metrics
    ]


def _signed(increase: float) -> str:
    """A change of the loss: far smaller than the loss itself, so with a digit more than metrics
    have."""
    return f"{'+' if increase >= 0 else MINUS}{abs(increase):.5f}"


def verdict(content: CompressionContent) -> str:
    """What the smallest size has gained, in one sentence."""
    smallest, metric = content.compressed[-1], content.primary_metric
    value = smallest.metrics.get(metric)
    rivals = [
        Rival(
            name=row.method,
            compression=row.compression,
            gain=None
            if value is None or metric not in row.metrics
            else value - row.metrics[metric],
        )
        for row in (content.uncompressed, *content.compared)
    ]
    return sentence(
        smallest.compression, metric, value, rivals, higher_is_better=content.higher_is_better
    )
