"""Charts of one search: alpha of every block, as a heat map and as a distribution, and the course
of the epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plotly import graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.report.charts.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    YELLOW,
    framed,
    line,
    plain,
    series_style,
)
from dnis_torchrec.report.content import check_alpha
from dnis_torchrec.report.tables import format_metric

LOW_TO_HIGH = ((0.0, YELLOW), (1.0, BLUE))
"""Colours of a value from least to largest, both seen on white and on dark; what has no value stays
blank."""
BLOCK_HEIGHT, LEAST_HEIGHT, MOST_HEIGHT = 14, 240, 1400
"""Pixels of a block in the heat map, and of all of it at least and at most."""


def alpha_per_block(alpha: Mapping[str, Tensor]) -> go.Figure:
    """Heat map of alpha: blocks downwards, table by table; dimensions sorted so that the structure
    can be seen."""
    _check_drawable(alpha)
    cells: list[list[float | None]] = []
    dimensions: list[list[int]] = []
    rows: list[str] = []
    middles = []
    for name, values in alpha.items():
        told = plain(name, len(name))  # whole: rows of one name would be drawn over each other
        kept = values.detach().float().cpu()
        rank = (kept > 0).sum(dim=0) + kept.mean(dim=0) / 2
        order = rank.argsort(descending=True, stable=True).tolist()
        first = len(rows)
        for block, row in enumerate(kept):
            rows.append(
                f"{told}, block {block}: {int((row > 0).sum())} of {len(row)} dimensions left"
            )
            dimensions.append(order)
            cells.append([round(float(row[at]), 4) or None for at in order])
        middles.append(rows[(first + len(rows) - 1) // 2])
        rows.append(f"below {told}")  # a gap
        dimensions.append([])
        cells.append([])
    heat = go.Heatmap(
        y=rows[:-1],
        z=cells[:-1],
        text=dimensions[:-1],
        hovertemplate="<b>%{y}</b><br>dimension %{text}: alpha %{z}<extra></extra>",
        zmin=0,
        zmax=1,
        colorscale=LOW_TO_HIGH,
        ygap=1,
        colorbar={"title": {"text": "alpha"}, "thickness": 12, "len": 1, "outlinewidth": 0},
    )
    height = 90 + BLOCK_HEIGHT * len(cells)
    figure = framed(
        go.Figure(heat),
        "blocks of every table, most frequent first",
        height=min(max(height, LEAST_HEIGHT), MOST_HEIGHT),
    )
    figure.update_xaxes(
        title={"text": "dimension, most widely retained first"}, showgrid=False, zeroline=False
    )
    names = [plain(name, 16) for name in alpha]
    return figure.update_yaxes(
        autorange="reversed", tickvals=middles, ticktext=names, showgrid=False
    )


def alpha_distribution(alpha: Mapping[str, Tensor]) -> go.Figure:
    """Distribution of alpha within every block: a box per block, zeros counted; the paper's figure."""
    _check_drawable(alpha)
    figure = go.Figure()
    for index, (name, values) in enumerate(alpha.items()):
        kept = values.detach().float().cpu()
        blocks = [block for block in range(len(kept)) for _ in range(kept.shape[1])]
        flat = [round(float(value), 4) for value in kept.flatten()]
        colour = series_style(index)[0]
        figure.add_trace(
            go.Box(
                name=plain(name),
                x=blocks,
                y=flat,
                line={"color": colour, "width": 1.5},
                boxpoints=False,
            )
        )
    framed(figure, "alpha of the dimensions of a block", boxmode="group")
    figure.update_xaxes(
        title={"text": "block (0 = most frequent)"}, dtick=1, showgrid=False, zeroline=False
    )
    return figure.update_yaxes(range=[-0.04, 1.04])


def _check_drawable(alpha: Mapping[str, Tensor]) -> None:
    check(len(alpha) > 0, "alpha", "at least one table", "none", "leave the chart out")
    check_alpha(alpha)


def search_history(
    history: Sequence[Mapping[str, Any]], stop_on: str = "loss", *, higher_is_better: bool = False
) -> go.Figure:
    """The search over its epochs, phase by phase: losses above; below, alpha density and mean."""
    check(len(history) > 0, "history", "at least one epoch", "none", "leave the chart out")
    epochs = [float(entry.get("epoch", index)) for index, entry in enumerate(history)]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for row, key, name, style in (
        (1, "train_loss", "training loss", (GREY, "square")),
        (1, "selection_loss", f"selection {stop_on}", (BLUE, "circle")),
        (2, "alpha_density", "share of alpha above 0", (ORANGE, "triangle-up")),
        (2, "alpha_mean", "mean of alpha", (GREEN, "diamond")),
    ):
        sign = -1 if higher_is_better and key == "selection_loss" else 1
        values = [sign * float(entry.get(key, math.nan)) for entry in history]
        if any(map(math.isfinite, values)):
            told = [
                [f"{format_metric(value)} after epoch {at:g}"]
                for at, value in zip(epochs, values, strict=True)
            ]
            drawn = [value if math.isfinite(value) else None for value in values]
            figure.add_trace(line(name, epochs, drawn, style, told), row=row, col=1)
    framed(figure, "loss, and alpha below it", height=460)
    _mark_phases(figure, epochs, [entry.get("phase") for entry in history])
    figure.update_xaxes(title={"text": "epoch"}, row=2, col=1)
    figure.update_xaxes(showgrid=False, zeroline=False, dtick=math.ceil(len(epochs) / 10))
    return figure.update_yaxes(range=[-0.04, 1.06], row=2, col=1)


def _mark_phases(figure: go.Figure, epochs: Sequence[float], phases: Sequence[str | None]) -> None:
    """Draws a thin line before the first epoch of every phase, its name beside it."""
    for before, epoch, phase in zip([None, *phases], epochs, phases, strict=False):
        if phase is not None and phase != before:
            figure.add_vline(epoch - 0.5, line={"color": GREY, "width": 1, "dash": "dot"})
            note = {
                "text": plain(phase),
                "showarrow": False,
                "textangle": -90,
                "xanchor": "left",
                "yanchor": "bottom",
            }
            figure.add_annotation(note, x=epoch - 0.5, y=0, xref="x2", yref="y2 domain")
