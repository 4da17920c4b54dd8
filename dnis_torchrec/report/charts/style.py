"""What all charts share: colours and marks, axes, the frame around them, and names made safe for
Plotly."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from plotly import graph_objects as go

from dnis_torchrec.report.content import WITH_VALIDATION, base_method
from dnis_torchrec.report.tables import format_ratio

BLUE, ORANGE, GREEN, PURPLE = "#0A78BE", "#D55E00", "#009E73", "#BF5F93"
SKY, YELLOW, GREY, BROWN = "#3A96CE", "#B98000", "#808080", "#A06A45"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BROWN)
MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
METHOD_STYLES = {
    "dnis": (BLUE, "circle"),
    "compress": (BLUE, "diamond"),
    "uniform": (ORANGE, "square"),
    "uniform-grid": (ORANGE, "diamond"),
    "low-rank": (BROWN, "x"),
    "magnitude": (GREEN, "triangle-up"),
    "magnitude-iterative": (GREEN, "triangle-down"),
    "uncompressed": (GREY, "diamond"),
    "dense": (GREY, "hexagon"),
    "int8 rows": (YELLOW, "square"),
    "int4 rows": (YELLOW, "triangle-up"),
    "no-embeddings": (GREY, "star"),
    "dnis-paper": (SKY, "circle"),
    "dnis-unrolled": (SKY, "square"),
    "int4-qat": (ORANGE, "triangle-down"),
    "qr": (BROWN, "diamond"),
    "hash": (BROWN, "circle"),
    "pep": (GREEN, "cross"),
    "mde": (PURPLE, "triangle-down"),
    "random": (YELLOW, "cross"),
    "nis-se": (GREY, "square"),
    "nis-me": (GREY, "x"),
}
"""Methods that look the same in every chart; the others take what is left, see `method_styles`."""
OTHER_COLOURS, OTHER_MARKS = (
    (PURPLE, SKY, YELLOW),
    ("triangle-left", "triangle-right", "star", "hexagon"),
)
COMPRESSION = "compression (log scale)"
"""Label of the one axis that every chart of quality against size has."""
MOST_IN_A_LEGEND = 16
"""Of more lines than that, a name is read by pointing at one."""


def method_styles(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and mark of every method, in the order in which a legend names them: known ones first."""
    present = set(methods)
    others = sorted({base_method(method) for method in present} - METHOD_STYLES.keys())
    styles = dict(METHOD_STYLES)
    for index, method in enumerate(others):
        styles[method] = (
            OTHER_COLOURS[index % len(OTHER_COLOURS)],
            OTHER_MARKS[index % len(OTHER_MARKS)],
        )
    both_rows = (
        (name, style)
        for method, style in styles.items()
        for name in (method, method + WITH_VALIDATION)
    )
    return {name: style for name, style in both_rows if name in present}


def series_style(index: int) -> tuple[str, str]:
    """Colour and mark of a line that is no method; 49 of them differ."""
    return COLOURS[index % len(COLOURS)], MARKS[(index + index // len(COLOURS)) % len(MARKS)]


def plain(name: str, limit: int = 30) -> str:
    """A name cut to a length that fits, with nothing in it that Plotly takes for markup."""
    return html.escape(
        name if len(name) <= limit else name[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}", quote=False
    )


def direction(metric: str, higher_is_better: bool) -> str:
    """Title of a chart that shows a metric of the test split."""
    return f"test {plain(metric)} ({'higher' if higher_is_better else 'lower'} is better)"


def framed(figure: go.Figure, title: str, *, height: int = 400, **layout: Any) -> go.Figure:
    """Gives a figure what all have: a title in place of a label of the y axis, a legend below, no
    colour behind."""
    named = [trace for trace in figure.data if trace.showlegend is not False]
    figure.update_layout(
        template="none",
        title={
            "text": title,
            "font": {"size": 13},
            "x": 0,
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 6, "l": 8},
        },
        height=height,
        margin={"l": 10, "r": 14, "t": 34, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=1 < len(named) <= MOST_IN_A_LEGEND,
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        hovermode="closest",
        hoverlabel={"align": "left"},
        dragmode=False,
        **layout,
    )
    figure.update_xaxes(automargin=True, title_standoff=10, title_font_size=12)
    figure.update_yaxes(automargin=True, zeroline=False, exponentformat="none")
    return figure


def log_axis(
    low: float, high: float, tick_text: Callable[[float], str], title: str
) -> dict[str, Any]:
    """A logarithmic axis from `low` to `high`, a little wider, with round ticks."""
    margin = max(1.1, (high / low) ** 0.06)
    ticks = log_ticks(low / margin, high * margin)
    return {
        "type": "log",
        "range": [math.log10(low / margin), math.log10(high * margin)],
        "tickvals": ticks,
        "ticktext": [tick_text(tick) for tick in ticks],
        "title": {"text": title},
    }


def compression_axis(compressions: Iterable[float]) -> dict[str, Any]:
    """The axis of all charts of quality against size; it holds the uncompressed tables, too."""
    values = [1.0, *compressions]
    return log_axis(min(values), max(values), format_ratio, COMPRESSION)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds: decades for a wide range, finer steps until at least three
    fit."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
        ticks = [step * 10.0**exponent for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    return ticks or [math.sqrt(low * high)]


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    style: tuple[str, str],
    told: list[list[str]],
    **more: Any,
) -> go.Scatter:
    """A line through marks, each of which tells its numbers."""
    is_second = name.endswith(WITH_VALIDATION)
    colour, mark = style
    look: dict[str, Any] = {
        "mode": "lines+markers",
        "marker": {"color": colour, "symbol": f"{mark}-open" if is_second else mark, "size": 10},
        "line": {"color": colour, "width": 2, "dash": "dash" if is_second else "solid"},
    }
    texts = ["<br>".join([f"<b>{plain(name)}</b>", *map(html.escape, lines)]) for lines in told]
    return go.Scatter(name=plain(name), x=x, y=y, hovertext=texts, hoverinfo="text", **look | more)
