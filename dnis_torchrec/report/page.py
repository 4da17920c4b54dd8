"""The report: one self-contained HTML page with four charts; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from dnis_torchrec.data.files import write_text
from dnis_torchrec.report.rows import (
    COMPRESS,
    SEARCH,
    TIMES,
    UNCOMPRESSED,
    Results,
    format_count,
    format_megabytes,
    format_metric,
    rows_frame,
    table_lines,
)

BLUE, ORANGE, GREEN, PURPLE = "#0A78BE", "#D55E00", "#009E73", "#BF5F93"
SKY, YELLOW, GREY, BROWN = "#3A96CE", "#B98000", "#808080", "#A06A45"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BROWN)
MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
METHOD_STYLES = {
    SEARCH: (BLUE, "circle"),
    COMPRESS: (SKY, "diamond"),
    UNCOMPRESSED: (GREY, "hexagon"),
    "int8 rows": (YELLOW, "square"),
    "int4 rows": (BROWN, "triangle-up"),
}
COMPRESSION = "compression (log scale)"
MOST_IN_A_LEGEND = 16


def write_report(path: Path, results: Results) -> Path:
    """Writes the page whole or not at all; the same results give the same bytes."""
    return write_text(path, render_report(results))


def render_report(results: Results) -> str:
    """The page as text; every value is escaped."""
    charts = draw_charts(results)
    headings, *lines = table_lines(results)
    scripts = _scripts() if charts else []
    environment = Environment(
        loader=PackageLoader("dnis_torchrec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        results=results,
        numbers=_numbers(results),
        charts={name: Markup(_json(figure)) for name, figure in charts.items()},
        captions=CAPTIONS,
        headings=headings,
        lines=lines,
        scripts=[Markup(text) for text, _ in scripts],
        script_hashes=Markup(" ".join(f"'{digest}'" for _, digest in scripts)),
    )


CAPTIONS = {
    "quality": "The metric of every model against how much smaller its tables are.",
    "loss": "How much the loss rises: predicted before anything was rounded, and measured on test.",
    "history": "Losses by epoch or step; a dotted line begins each phase.",
    "bits": "Bits of a value of every block against how often a row of it occurs in training.",
}
"""What stands below each chart, in the order of the page."""


def draw_charts(results: Results) -> dict[str, go.Figure]:
    """The charts for which there is something to show, by name."""
    frame = rows_frame(results.rows, results.primary_metric)
    sizes = frame[frame["method"] == COMPRESS].dropna(subset=["predicted", "loss_increase"])
    charts = {
        "quality": lambda: quality(frame, results),
        "loss": lambda: loss_increase(sizes),
        "history": lambda: history(results.history),
        "bits": lambda: bits(pd.DataFrame(list(results.blocks))),
    }
    shows = {
        "quality": bool(frame["metric"].notna().any()),
        "loss": len(sizes) > 0,
        "history": len(results.history) > 0,
        "bits": len(results.blocks) > 0,
    }
    return {name: charts[name]() for name in CAPTIONS if shows[name]}


def quality(frame: pd.DataFrame, results: Results) -> go.Figure:
    """A metric over the compression, a line a method; bars are standard deviations over seeds."""
    figure, metric = go.Figure(), results.primary_metric
    for index, (method, rows) in enumerate(frame.dropna(subset=["metric"]).groupby("method")):
        style = METHOD_STYLES.get(str(method), _style(index))
        facts = [
            [
                f"{results.split} {metric} {format_metric(row.metric)}",
                f"{format_count(row.compression)}{TIMES} smaller",
                f"{format_megabytes(row.num_bytes)} served",
            ]
            for row in rows.itertuples()
        ]
        trace = line(str(method), rows["compression"], rows["metric"], style, facts)
        spread = rows["spread"].fillna(0).tolist()
        figure.add_trace(trace.update(error_y={"array": spread, "visible": any(spread)}))
        if method == UNCOMPRESSED:
            width = {"color": style[0], "width": 1, "dash": "dot"}
            figure.add_hline(rows["metric"].iloc[0], line=width)
    better = "higher" if results.higher_is_better else "lower"
    _frame(figure, f"{results.split} {plain(metric)} ({better} is better)", height=420)
    return figure.update_xaxes(_compression_axis(frame["compression"]))


def loss_increase(frame: pd.DataFrame) -> go.Figure:
    """The increase of the loss over the compression, predicted and measured."""
    figure, x = go.Figure(), frame["compression"]
    for name, column, style in (
        ("predicted", "predicted", (ORANGE, "triangle-up")),
        ("measured on test", "loss_increase", (BLUE, "circle")),
    ):
        figure.add_trace(
            line(name, x, frame[column], style, [[f"{v:+.5f}"] for v in frame[column]])
        )
    _frame(figure, "increase of the loss over the uncompressed model", height=360)
    return figure.add_hline(0, line={"color": GREY, "width": 1}).update_xaxes(_compression_axis(x))


def history(epochs: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Losses over the epochs, or over the steps of a stream, phase by phase."""
    frame = pd.DataFrame(list(epochs))
    unit = "step" if "epoch" not in frame and "step" in frame else "epoch"
    x = frame.get(unit, frame.index)
    figure = go.Figure()
    for name, column, style in (
        ("training loss", "train_loss", (GREY, "square")),
        ("selection loss", "selection_loss", (BLUE, "circle")),
        ("window loss", "loss", (BLUE, "circle")),
    ):
        if column in frame:
            facts = [
                [f"{v:.5g} after {unit} {at:g}"] for v, at in zip(frame[column], x, strict=True)
            ]
            figure.add_trace(line(name, x, frame[column], style, facts))
    _frame(figure, "loss", height=360)
    if "phase" in frame:
        starts = frame["phase"].ne(frame["phase"].shift())
        for at, phase in zip(x[starts], frame["phase"][starts], strict=True):
            figure.add_vline(at - 0.5, line={"color": GREY, "width": 1, "dash": "dot"})
            note = {
                "text": plain(str(phase)),
                "showarrow": False,
                "xanchor": "left",
                "yanchor": "top",
            }
            figure.add_annotation(note, x=at - 0.5, y=1, yref="paper")
    ticks: dict[str, Any] = {"title": {"text": unit}}
    if unit == "epoch":
        ticks["dtick"] = max(1, len(frame) // 10)
    return figure.update_xaxes(showgrid=False, zeroline=False, **ticks)


def bits(blocks: pd.DataFrame) -> go.Figure:
    """Bits of a value over occurrences a row: a line a table, the area of a mark by rows."""
    figure, counts = go.Figure(), blocks["occurrences"][blocks["occurrences"] > 0]
    never = float(counts.min() if len(counts) else 1.0) / 4  # where rows that never occur are drawn
    for index, (table, rows) in enumerate(blocks.groupby("table", sort=False)):
        rows = rows.sort_values("occurrences")
        facts = [
            [
                f"block {row.block}: {row.bits:.2f} bits a value",
                f"{row.rows:,} rows",
                f"{format_count(row.occurrences)} occurrences a row",
            ]
            for row in rows.itertuples()
        ]
        x = rows["occurrences"].where(rows["occurrences"] > 0, never)
        sizes = 6 + 16 * (rows["rows"] / blocks["rows"].max()) ** 0.5
        trace = line(str(table), x, rows["bits"], _style(index), facts)
        figure.add_trace(
            trace.update(marker={"size": list(sizes), "opacity": 0.85}, line={"width": 1})
        )
    _frame(figure, "bits of a value, mean over all columns", height=420)
    most = float(counts.max()) if len(counts) else 1.0
    return figure.update_xaxes(
        _log_axis(never, most, "occurrences of a row (log scale)", format_count)
    )


def line(
    name: str,
    x: Iterable[float],
    y: Iterable[float],
    style: tuple[str, str],
    facts: Sequence[Sequence[str]],
) -> go.Scatter:
    """A line through marks, each of which shows its numbers when pointed at."""
    texts = ["<br>".join([f"<b>{plain(name)}</b>", *map(html.escape, lines)]) for lines in facts]
    return go.Scatter(
        name=plain(name),
        x=[float(value) for value in x],
        y=[None if math.isnan(value) else float(value) for value in y],
        hovertext=texts,
        hoverinfo="text",
        mode="lines+markers",
        marker={"color": style[0], "symbol": style[1], "size": 10},
        line={"color": style[0], "width": 2},
    )


def plain(name: str, limit: int = 30) -> str:
    """A name cut to a length that fits, with nothing in it that Plotly takes for markup."""
    short = name if len(name) <= limit else name[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return html.escape(short, quote=False)


def _style(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], MARKS[(index + index // len(COLOURS)) % len(MARKS)]


def _frame(figure: go.Figure, title: str, *, height: int) -> None:
    """A title in place of a label of the y axis, a legend below, no colour behind."""
    figure.update_layout(
        template="none",
        title={"text": title, "font": {"size": 13}, "x": 0, "y": 1, "yanchor": "top"},
        height=height,
        margin={"l": 10, "r": 14, "t": 34, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=1 < len(figure.data) <= MOST_IN_A_LEGEND,
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        hovermode="closest",
        hoverlabel={"align": "left"},
        dragmode=False,
    )
    figure.update_xaxes(automargin=True, title_standoff=10, title_font_size=12)
    figure.update_yaxes(automargin=True, zeroline=False, exponentformat="none")


def _compression_axis(values: Iterable[float]) -> dict[str, Any]:
    sizes = [1.0, *values]
    return _log_axis(min(sizes), max(sizes), COMPRESSION, lambda v: f"{format_count(v)}{TIMES}")


def _log_axis(low: float, high: float, title: str, text: Callable[[float], str]) -> dict[str, Any]:
    """A logarithmic axis a little wider than its values, with round ticks, three at least."""
    margin = max(1.1, (high / low) ** 0.06)
    low, high = low / margin, high * margin
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [s * 10.0**e for e in exponents for s in steps if low <= s * 10.0**e <= high]
        if len(ticks) >= 3:
            break
    bounds = [math.log10(low), math.log10(high)]
    labels = {"tickvals": ticks, "ticktext": list(map(text, ticks))}
    return {"type": "log", "range": bounds, "title": {"text": title}, **labels}


def _numbers(results: Results) -> list[tuple[str, str, str]]:
    """The head of the page: (label, value, detail) of the smallest model."""
    frame = rows_frame(results.rows, results.primary_metric)
    row, metric = frame.iloc[-1], results.primary_metric
    size = f"{format_megabytes(row['num_bytes'])} instead of "
    size += format_megabytes(row["num_bytes"] * row["compression"])
    better = f"{'higher' if results.higher_is_better else 'lower'} is better"
    return [
        ("Compression", f"{format_count(row['compression'])}{TIMES}", size),
        (f"{results.split.capitalize()} {metric}", format_metric(row["metric"]), better),
        ("Seeds", f"{row['seeds']:.0f}", "another seed may change the last digits"),
    ]


def _json(figure: go.Figure) -> str:
    """A chart as JSON that cannot end the element it stands in."""
    return str(figure.to_json()).replace("<", "\\u003c")


@cache
def _scripts() -> list[tuple[str, str]]:
    """Plotly and the script that draws charts, each with the hash that the page's policy names."""
    script = (files("dnis_torchrec.report") / "templates" / "charts.js").read_text(encoding="utf-8")
    digests = (hashlib.sha256(text.encode()).digest() for text in (get_plotlyjs(), script))
    hashes = (f"sha256-{base64.b64encode(digest).decode()}" for digest in digests)
    return list(zip((get_plotlyjs(), script), hashes, strict=True))
