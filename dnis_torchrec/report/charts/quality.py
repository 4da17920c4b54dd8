"""Charts of results: a metric against compression, pruning rate or a setting; the loss; bytes per
form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from plotly import graph_objects as go

from dnis_torchrec.checks import check
from dnis_torchrec.report.charts.style import (
    BLUE,
    GREY,
    ORANGE,
    compression_axis,
    direction,
    framed,
    line,
    log_axis,
    method_styles,
    plain,
    series_style,
)
from dnis_torchrec.report.compression_content import COMPRESS, CompressionContent
from dnis_torchrec.report.content import (
    DENSE,
    UNCOMPRESSED_ROWS,
    ReportRow,
    RowGroup,
    base_method,
    seed_groups,
)
from dnis_torchrec.report.pareto_points import ParetoPoint, metric_range, pareto_front
from dnis_torchrec.report.tables import (
    PLUS_MINUS,
    format_count,
    format_megabytes,
    format_metric,
    format_number,
    format_ratio,
)

PRUNING_METHODS = ("dnis", "magnitude", "dense")
"""Prefixes of the names of the methods that the chart of pruning rates compares."""


def quality(points: Sequence[ParetoPoint], metric: str, *, higher_is_better: bool) -> go.Figure:
    """A metric over the compression: a line per method, and the level of the uncompressed model."""
    check(len(points) > 0, "points", "at least one point", "none", "leave the chart out")
    front = [points[index] for index in pareto_front(points, higher_is_better=higher_is_better)]
    figure = go.Figure()
    for method, style in method_styles(point.method for point in points).items():
        mine = sorted(
            (point for point in points if point.method == method),
            key=lambda point: point.compression,
        )
        x, y = [point.compression for point in mine], [point.mean for point in mine]
        bars = {
            "array": [point.bar or 0.0 for point in mine],
            "visible": any(point.bar for point in mine),
        }
        trace = line(
            method,
            x,
            y,
            style,
            [_facts(point, metric, point in front) for point in mine],
            error_y=bars,
        )
        if method in ("dnis", COMPRESS):
            trace.update(line={"width": 3.5}, zorder=1)
        figure.add_trace(trace)
        if base_method(method) in UNCOMPRESSED_ROWS:
            figure.add_hline(y[0], line={"color": style[0], "width": 1, "dash": "dot"})
    framed(figure, direction(metric, higher_is_better), height=420)
    figure.update_xaxes(compression_axis(point.compression for point in points))
    figure.update_yaxes(range=metric_range(points, higher_is_better=higher_is_better))
    return figure


def _facts(point: ParetoPoint, metric: str, is_on_front: bool) -> list[str]:
    """What a point tells when it is pointed at."""
    spread = "" if point.deviation is None else f" {PLUS_MINUS} {format_metric(point.deviation)}"
    facts = [f"test {metric} {format_metric(point.mean)}{spread}"]
    if point.difference is not None and point.method != DENSE:
        facts.append(f"{point.difference.told(point.num_seeds)} against dense")
    facts += [
        f"{format_ratio(point.compression)} smaller",
        f"{format_megabytes(point.bytes)} served",
    ]
    facts += [f"precision {point.precision}"] if point.precision else []
    facts += [f"{point.num_seeds} seeds"] if point.num_seeds > 1 else []
    return [*facts, *(["on the Pareto front"] if is_on_front else [])]


def pruning_rate(rows: Sequence[ReportRow], metric: str, *, higher_is_better: bool) -> go.Figure:
    """A metric over the share of parameters that is gone, for DNIS and for magnitude pruning: the
    paper's comparison."""
    groups = seed_groups(
        [row for row in rows if metric in row.metrics and row.method.startswith(PRUNING_METHODS)]
    )
    check(
        len(groups) > 0,
        f"metric {metric!r}",
        "a row of DNIS or of pruning",
        "none",
        "leave the chart out",
    )
    figure = go.Figure()
    for method, style in method_styles(group.method for group in groups).items():
        mine = {
            1 - group.parameters / group.dense_parameters: group
            for group in groups
            if group.method == method
        }
        told = [[*_measured(group, metric), f"{rate:.1%} pruned"] for rate, group in mine.items()]
        figure.add_trace(line(method, list(mine), _means(mine.values(), metric), style, told))
    framed(figure, direction(metric, higher_is_better))
    title = {"text": "pruning rate: share of parameters gone"}
    return figure.update_xaxes(range=[-0.03, 1.03], tickformat=".0%", title=title)


def setting(
    series: Mapping[str, Sequence[tuple[float, ReportRow]]],
    name: str,
    metric: str,
    *,
    higher_is_better: bool,
) -> go.Figure:
    """A metric over a setting of the search, such as embedding_dim or the number of blocks: one
    line per series."""
    drawn: dict[str, dict[float, RowGroup]] = {}
    for label, points in series.items():
        for value in sorted({value for value, row in points if metric in row.metrics}):
            rows = tuple(row for at, row in points if at == value and metric in row.metrics)
            drawn.setdefault(label, {})[value] = RowGroup(method=rows[0].method, rows=rows)
    check(
        len(drawn) > 0,
        f"metric {metric!r}",
        "at least one row that has it",
        "none",
        "leave the chart out",
    )
    figure = go.Figure()
    for index, (label, groups) in enumerate(drawn.items()):
        bars = {"array": [group.deviation(metric) or 0.0 for group in groups.values()]}
        told = [[*_measured(group, metric), f"{name} {value:g}"] for value, group in groups.items()]
        values = _means(groups.values(), metric)
        figure.add_trace(line(label, list(groups), values, series_style(index), told, error_y=bars))
    framed(figure, direction(metric, higher_is_better))
    values = sorted({value for groups in drawn.values() for value in groups})
    axis = log_axis(values[0], values[-1], format_count, f"{name} (log scale)")
    return figure.update_xaxes(
        axis | {"tickvals": values, "ticktext": list(map(format_count, values))}
    )


def _measured(group: RowGroup, metric: str) -> list[str]:
    mean, deviation = group.mean(metric) or 0.0, group.deviation(metric)
    spread = (
        ""
        if deviation is None
        else f" {PLUS_MINUS} {format_metric(deviation)} over {len(group.rows)} seeds"
    )
    return [
        f"test {metric} {format_metric(mean)}{spread}",
        f"{format_ratio(group.compression)} smaller",
    ]


def _means(groups: Iterable[RowGroup], metric: str) -> list[float]:
    return [mean for group in groups if (mean := group.mean(metric)) is not None]


def loss_increase(content: CompressionContent) -> go.Figure:
    """The increase of the loss over the compression: predicted before anything was rounded, and
    measured."""
    rows = content.compressed
    check(len(rows) > 0, "rows", "at least one compressed one", "none", "leave the chart out")
    lines = {
        "predicted": ((ORANGE, "triangle-up"), [row.predicted_loss_increase for row in rows]),
        "measured on test": ((BLUE, "circle"), [content.loss_increase(row) for row in rows]),
        "measured on selection": (
            (GREY, "square"),
            [content.loss_increase(row, "selection") for row in rows],
        ),
    }
    x, figure = [row.compression for row in rows], go.Figure()
    for name, (style, values) in lines.items():
        told = [
            [f"{value:+.5f}", f"{format_ratio(at)} smaller"]
            for at, value in zip(x, values, strict=True)
        ]
        dash = "dash" if name == "predicted" else "solid"
        figure.add_trace(line(name, x, values, style, told).update(line={"dash": dash}))
    framed(figure, "increase of the loss over the uncompressed model", height=360)
    return figure.add_hline(0, line={"color": GREY, "width": 1}).update_xaxes(compression_axis(x))


def bytes_per_form(form_bytes: Mapping[str, int]) -> go.Figure:
    """A bar per export form on a log scale, with its size and what it saves."""
    sizes = {form: size for form, size in form_bytes.items() if size > 0}
    check(len(sizes) > 0, "form_bytes", "at least one form above 0 bytes", dict(form_bytes))
    forms, dense = sorted(sizes, key=lambda form: (sizes[form], form)), sizes.get("dense_fp32")
    told = []
    for form in forms:
        change = 1.0 if dense is None else dense / sizes[form]
        saved = f"<br>{format_ratio(max(change, 1 / change))} {'smaller' if change > 1 else 'larger'} than dense_fp32"
        told.append(
            f"<b>{plain(form)}</b><br>{sizes[form]:,} bytes" + (saved if change != 1 else "")
        )
    megabytes = [sizes[form] / 1e6 for form in forms]
    bars = go.Bar(
        x=megabytes,
        y=[plain(form) for form in forms],
        orientation="h",
        text=[format_megabytes(sizes[form]) for form in forms],
        textposition="outside",
        cliponaxis=False,
        marker={"color": [GREY if form == "dense_fp32" else BLUE for form in forms]},
        hovertext=told,
        hoverinfo="text",
    )
    figure = framed(go.Figure(bars), "all tables, index bytes counted", height=90 + 34 * len(forms))
    axis = log_axis(
        megabytes[0] / 3,
        megabytes[-1] * 3,
        format_number,
        "MB of 10\N{SUPERSCRIPT SIX} bytes (log scale)",
    )
    return figure.update_xaxes(axis).update_yaxes(ticklen=0)
