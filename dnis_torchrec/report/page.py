"""The report: one self-contained HTML page with four charts; nothing is loaded from elsewhere."""

import base64
import hashlib
import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from dnis_torchrec.data.files import write_text
from dnis_torchrec.report.glossary import MEANINGS
from dnis_torchrec.report.rows import (
    COMPRESS,
    SEARCH,
    TIMES,
    UNCOMPRESSED,
    Results,
    format_count,
    format_difference,
    format_megabytes,
    format_metric,
    headline_size,
    rows_frame,
    table_lines,
)

BLUE, ORANGE, GREEN, PURPLE = "#0A78BE", "#D55E00", "#009E73", "#BF5F93"
SKY, YELLOW, GREY, BROWN = "#3A96CE", "#B98000", "#808080", "#A06A45"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BROWN)
MARKS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
METHOD_STYLES = {
    SEARCH: (BLUE, "circle"),
    COMPRESS: (GREEN, "diamond"),
    UNCOMPRESSED: (GREY, "hexagon"),
    "int8 rows": (YELLOW, "square"),
    "int4 rows": (BROWN, "triangle-up"),
    "cut axes": (PURPLE, "cross"),
}
COMPRESSION = "compression (log scale)"
PLAIN_PHASE = "plain"
"""The phase of weights alone, as a history has it."""
MOST_IN_A_LEGEND = 16
_TERM_OF = {name: term for term in MEANINGS for name in term.split(", ")}
_TERM_OF |= {f"{name}s": term for name, term in _TERM_OF.items() if not name.endswith("s")}
_WORD = re.compile(rf"\b({'|'.join(sorted(_TERM_OF, key=len, reverse=True))})\b", re.IGNORECASE)


def write_report(path: Path, results: Results) -> Path:
    """Writes the page whole or not at all; the same results give the same bytes."""
    return write_text(path, render_report(results))


def render_report(results: Results) -> str:
    """The page as text; every value is escaped."""
    charts = draw_charts(results)
    headings, *lines = table_lines(results)
    scripts = _scripts()[0 if charts else 1 :]
    words = set[str]()
    names = dict.fromkeys(str(record.get("phase", PLAIN_PHASE)) for record in results.history)
    phases = ["plain training" if name == PLAIN_PHASE else name for name in names]
    environment = Environment(
        loader=PackageLoader("dnis_torchrec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["linked"] = partial(_linked, words=words)
    return environment.get_template("report.html.j2").render(
        results=results,
        numbers=_numbers(results),
        seeds=_seeds_line(results),
        charts={name: Markup(_json(figure)) for name, figure in charts.items()},
        captions=CAPTIONS | {"history": f"{CAPTIONS['history']}{', '.join(phases)}."},
        headings=headings,
        lines=lines,
        words=words,
        meanings=MEANINGS,
        scripts=[Markup(text) for text, _ in scripts],
        script_hashes=Markup(" ".join(f"'{digest}'" for _, digest in scripts)),
    )


def _linked(text: str, words: set[str]) -> Markup:
    """A text whose words of the glossary lead to their meaning, escaped; they join `words`."""

    def link(match: re.Match[str]) -> str:
        term = _TERM_OF[match[0].lower()]
        words.add(term)
        return f'<a class="word" href="#word-{term.split(",")[0].replace(" ", "-")}">{match[0]}</a>'

    return Markup(_WORD.sub(link, str(escape(text))))


CAPTIONS = {
    "quality": "Each mark is a model: its metric against its compression, on a log scale.",
    "loss": "The loss increase of each size: predicted before rounding, and measured on test.",
    "history": "Losses of each epoch or step. A dotted line begins a phase: ",
    "bits": "Bits of each block against the occurrences of one of its rows. A larger mark has more "
    "rows.",
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
        "quality": int(frame["metric"].notna().sum()) > 1,
        "loss": len(sizes) > 0,
        "history": len(results.history) > 0,
        "bits": len(results.blocks) > 0,
    }
    return {name: charts[name]() for name in CAPTIONS if shows[name]}


def quality(frame: pd.DataFrame, results: Results) -> go.Figure:
    """A metric over the compression, a line a method; bars are standard deviations over seeds."""
    figure, metric = go.Figure(), results.primary_metric
    colours = iter((ORANGE, SKY, *(f"hsl({137 * n % 360}, 50%, 50%)" for n in range(len(frame)))))
    for index, (method, rows) in enumerate(frame.dropna(subset=["metric"]).groupby("method")):
        style = METHOD_STYLES.get(str(method)) or (next(colours), MARKS[index % len(MARKS)])
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
    bars = "; bars: one standard deviation over seeds" if frame["spread"].notna().any() else ""
    _frame(figure, f"{results.split} {plain(metric)} ({better} is better{bars})", height=420)
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
                "yanchor": "bottom",
            }
            figure.add_annotation(note, x=at - 0.5, y=1, yref="paper")
    ticks: dict[str, Any] = {"title": {"text": unit}}
    if unit == "epoch":
        ticks |= {"dtick": math.ceil(len(frame) / 8), "range": [-0.6, len(frame) - 0.4]}
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
        is_alone = blocks["table"].nunique() > MOST_IN_A_LEGEND  # lines of many hide the marks
        mode, marker = "markers" if is_alone else trace.mode, {"size": list(sizes), "opacity": 0.85}
        figure.add_trace(trace.update(marker=marker, line={"width": 1}, mode=mode))
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
    """The head of the page: (label, value, detail) of the size in the headline, then the others."""
    frame = rows_frame(results.rows, results.primary_metric)
    best, sizes = headline_size(frame), frame[frame["method"].isin([SEARCH, COMPRESS])]
    first = frame.head(1) if best is None else frame.loc[[best.name]]
    cards = []
    for row in pd.concat([first, sizes.drop(first.index, errors="ignore")]).to_dict("records"):
        size = format_megabytes(row["num_bytes"])
        if row["compression"] > 1:
            size += f" instead of {format_megabytes(row['num_bytes'] * row['compression'])}"
        excess = format_difference(row["excess"], lambda value: f"{value:.5f}")
        if excess != "-" and row["method"] != UNCOMPRESSED:
            size += f"; {row['judge']} {excess} of its value"
        label = f"{row['method']}, compression {format_count(row['compression'])}{TIMES}"
        value = f"{results.split} {results.primary_metric} {format_metric(row['metric'])}"
        cards.append((label, value, size))
    return cards


def _seeds_line(results: Results) -> str:
    number = len({row.seed for row in results.rows})
    if number > 1:
        return f"Figures are means over {number} seeds, where a model has as many."
    return "Figures are those of 1 seed; another seed may change the last digits."


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
