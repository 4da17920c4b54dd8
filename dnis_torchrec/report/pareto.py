"""The Pareto chart: quality against bytes, a point per method and size, each telling its numbers when pointed at.

One piece of HTML with inline SVG and CSS: no script, nothing loaded, so it works from a file, in a mail and under a
strict Content-Security-Policy. Points are list items that the Tab key reaches and a screen reader reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import RowGroup
from dnis_torchrec.report.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    direction,
    log_ticks,
    method_styles,
    short,
)
from dnis_torchrec.report.rendering import render
from dnis_torchrec.report.tables import PLUS_MINUS, format_megabytes, format_metric, format_ratio, format_seconds

PLOT_WIDTH, PLOT_HEIGHT = 900.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 72.0, 880.0, 14.0, 346.0
"""Edges of the plotting area, in units of the SVG."""
DARK = {
    BLUE: "#4fa8e0",
    ORANGE: "#f4894a",
    GREEN: "#2fc79b",
    BLACK: "#e6e8ea",
    PURPLE: "#e3a3c8",
    SKY: "#8fd0f5",
    YELLOW: "#f0b73c",
    GREY: "#a9adb2",
}
"""Colour of a method on white -> its colour on a dark page."""
MARK_PATHS = {
    "o": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "s": "M-4.6 -4.6h9.2v9.2h-9.2z",
    "^": "M0 -5.8l5.6 10h-11.2z",
    "v": "M0 5.8l5.6 -10h-11.2z",
    "<": "M-5.8 0l10 -5.6v11.2z",
    ">": "M5.8 0l-10 -5.6v11.2z",
    "D": "M0 -6.2l6.2 6.2l-6.2 6.2l-6.2 -6.2z",
    "P": "M-1.9 -5.6h3.8v3.7h3.7v3.8h-3.7v3.7h-3.8v-3.7h-3.7v-3.8h3.7z",
    "X": "M-5.4 -3l2.4 -2.4l3 3l3 -3l2.4 2.4l-3 3l3 3l-2.4 2.4l-3 -3l-3 3l-2.4 -2.4l3 -3z",
    "h": "M0 -5.8l5 2.9v5.8l-5 2.9l-5 -2.9v-5.8z",
    "*": "M0 -6.6l1.5 4.4l4.8 .1l-3.8 2.8l1.4 4.5l-3.9 -2.7l-3.9 2.7l1.4 -4.5l-3.8 -2.8l4.8 -.1z",
}
"""Marker of matplotlib -> the same shape around the origin, as an SVG path."""


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """One point of the chart: a method at a size.

    Attributes:
        method: the method.
        bytes: bytes of all embedding tables as served, index bytes counted.
        mean: mean of the metric over the seeds.
        deviation: standard deviation over the seeds, None for a single one.
        compression_ratio: as the row tells it.
        num_seeds: number of seeds.
        seconds: mean wall time of one run.
        form: the export form that `bytes` belongs to; empty to leave it out.

    Raises:
        ValueError: if a number is not finite, or `bytes` is not above 0, where a logarithmic axis has no place for it.
    """

    method: str
    bytes: float
    mean: float
    compression_ratio: float
    seconds: float
    deviation: float | None = None
    num_seeds: int = 1
    form: str = ""

    def __post_init__(self) -> None:
        place = f"ParetoPoint of {self.method!r}"
        check(math.isfinite(self.bytes) and self.bytes > 0, place, "expected bytes > 0", self.bytes)
        for name in ("mean", "deviation"):
            value = getattr(self, name)
            check(value is None or math.isfinite(value), place, f"expected a finite {name}", value)


def pareto_points(groups: Iterable[RowGroup], metric: str) -> tuple[ParetoPoint, ...]:
    """The points of groups of rows, each at its smallest export form; groups without the metric or bytes have none."""
    points = []
    for group in groups:
        sizes = {form: size for form, size in group.rows[0].bytes.items() if size > 0}
        mean = group.mean(metric)
        if mean is None or not sizes:
            continue
        form = min(sizes, key=lambda name: sizes[name])
        measured = [row.bytes[form] for row in group.rows if form in row.bytes]
        points.append(
            ParetoPoint(
                method=group.method,
                bytes=sum(measured) / len(measured),
                mean=mean,
                deviation=group.deviation(metric),
                compression_ratio=group.compression_ratio,
                num_seeds=len(group.rows),
                seconds=group.seconds,
                form=form,
            )
        )
    return tuple(points)


def pareto_front(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> tuple[int, ...]:
    """Positions of the points that no other one beats: none is as small and better, or smaller and as good.

    Returns:
        Positions, by rising bytes; of equal points the first.

    Example:
        >>> at = dict(method="m", compression_ratio=1, seconds=0)
        >>> points = [ParetoPoint(bytes=b, mean=m, **at) for b, m in ((4, 0.8), (2, 0.7), (3, 0.6), (4, 0.7))]
        >>> pareto_front(points, higher_is_better=True)
        (1, 0)
    """
    sign = 1 if higher_is_better else -1
    front: list[int] = []
    best = -math.inf
    for index in sorted(range(len(points)), key=lambda i: (points[i].bytes, -sign * points[i].mean)):
        if sign * points[index].mean > best:
            best = sign * points[index].mean
            front.append(index)
    return tuple(front)


def pareto_chart(points: Sequence[ParetoPoint], metric: str, *, higher_is_better: bool) -> str:
    """The chart as a piece of HTML, to be put into a page as it is.

    The stair is the Pareto front: what can be had at most for so many bytes. Pointing at a mark, or reaching it with
    the Tab key, shows method, bytes, metric and deviation, compression ratio, seeds and time.

    Args:
        points: what to draw.
        metric: name of the metric.
        higher_is_better: its direction.

    Raises:
        ValueError: if there are no points.

    Example:
        >>> point = ParetoPoint(method="dnis", bytes=1e6, mean=0.8, compression_ratio=4, seconds=9)
        >>> chart = pareto_chart([point], "auc", higher_is_better=True)
        >>> "dnis" in chart, "<script" in chart
        (True, False)
    """
    check(len(points) > 0, "points", "expected at least one point", "none", "leave the chart out")
    scale = _Scale.around(points)
    styles = method_styles(point.method for point in points)
    front = pareto_front(points, higher_is_better=higher_is_better)
    return render(
        "pareto.html.j2",
        width=PLOT_WIDTH,
        height=PLOT_HEIGHT,
        left=LEFT,
        right=RIGHT,
        top=TOP,
        bottom=BOTTOM,
        metric=short(metric, 40),
        metric_label=direction(metric, higher_is_better),
        x_ticks=[(_at(scale.x(tick)), format_megabytes(tick)) for tick in log_ticks(scale.low_bytes, scale.high_bytes)],
        y_ticks=_metric_ticks(scale),
        front=_stair([points[index] for index in front], scale),
        lines=[_method_line([p for p in points if p.method == method], scale, styles[method]) for method in styles],
        marks=[_mark(point, scale, styles[point.method], index in front) for index, point in enumerate(points)],
        methods=[(short(name), MARK_PATHS[marker], _colours(colour)) for name, (colour, marker) in styles.items()],
    )


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """From bytes and metric to places in the SVG."""

    low_bytes: float
    high_bytes: float
    low: float
    high: float

    @staticmethod
    def around(points: Sequence[ParetoPoint]) -> _Scale:
        sizes = [point.bytes for point in points]
        margin = max(1.15, (max(sizes) / min(sizes)) ** 0.06)
        ends = [point.mean + sign * (point.deviation or 0.0) for point in points for sign in (-1, 1)]
        padding = 0.07 * (max(ends) - min(ends)) or 0.05 * abs(ends[0]) or 1.0
        return _Scale(
            low_bytes=min(sizes) / margin,
            high_bytes=max(sizes) * margin,
            low=min(ends) - padding,
            high=max(ends) + padding,
        )

    def x(self, num_bytes: float) -> float:
        share = math.log(num_bytes / self.low_bytes) / math.log(self.high_bytes / self.low_bytes)
        return LEFT + share * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)


def _at(coordinate: float) -> str:
    return f"{coordinate:.1f}"


def _colours(colour: str) -> str:
    """Custom properties with the colour of a method on a light and on a dark page."""
    return f"--on-light: {colour}; --on-dark: {DARK[colour]}"


def _metric_ticks(scale: _Scale) -> list[tuple[str, str]]:
    ticks = MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]).tick_values(scale.low, scale.high)
    step = float(ticks[1] - ticks[0])
    decimals = max(0, math.ceil(-math.log10(step) + 1e-9))
    decimals += round(step * 10**decimals, 6) != round(step * 10**decimals)  # 0.025 needs one more than 0.02
    return [
        (_at(scale.y(tick)), f"{tick:.{decimals}f}") for tick in map(float, ticks) if scale.low <= tick <= scale.high
    ]


def _stair(front: Sequence[ParetoPoint], scale: _Scale) -> str:
    """SVG path of the front: level until the next point's bytes, then up or down to its metric."""
    first, *rest = front
    steps = [f"M{_at(scale.x(first.bytes))} {_at(scale.y(first.mean))}"]
    steps += [f"H{_at(scale.x(point.bytes))}V{_at(scale.y(point.mean))}" for point in rest]
    return "".join([*steps, f"H{_at(RIGHT)}"])


def _method_line(points: Sequence[ParetoPoint], scale: _Scale, style: tuple[str, str]) -> tuple[str, str]:
    """SVG points of the line through one method's sizes, and its colours."""
    ordered = sorted(points, key=lambda point: point.bytes)
    return " ".join(f"{_at(scale.x(p.bytes))},{_at(scale.y(p.mean))}" for p in ordered), _colours(style[0])


def _mark(point: ParetoPoint, scale: _Scale, style: tuple[str, str], is_front: bool) -> dict[str, object]:
    """All that the template says about one point: where it is, how it looks, what it tells."""
    (colour, marker), x, y, deviation = style, scale.x(point.bytes), scale.y(point.mean), point.deviation
    value = format_metric(point.mean) + (f" {PLUS_MINUS} {format_metric(deviation)}" if deviation is not None else "")
    size = format_megabytes(point.bytes) + (f" as {short(point.form)}" if point.form else "")
    return {
        "x": _at(x),
        "y": _at(y),
        "bar": (_at(scale.y(point.mean - deviation)), _at(scale.y(point.mean + deviation))) if deviation else None,
        "place": f"left: {100 * x / PLOT_WIDTH:.2f}%; top: {100 * y / PLOT_HEIGHT:.2f}%",
        "side": f"{'before' if x > PLOT_WIDTH / 2 else 'after'} {'above' if y > PLOT_HEIGHT / 2 else 'below'}",
        "path": MARK_PATHS[marker],
        "colours": _colours(colour),
        "method": short(point.method, 40),
        "is_front": is_front,
        "facts": [
            ("metric", value),
            ("tables", size),
            ("compression", format_ratio(point.compression_ratio)),
            ("seeds", str(point.num_seeds)),
            ("time of one run", format_seconds(point.seconds)),
        ],
    }
