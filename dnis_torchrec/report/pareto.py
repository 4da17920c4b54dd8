"""The Pareto chart: quality against bytes, a point per method and size, each telling its numbers when pointed at.

One piece of HTML with inline SVG and CSS: no script, nothing loaded, so it works from a file, in a mail and under a
strict Content-Security-Policy. Points are list items that the Tab key reaches and a screen reader reads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.ticker import MaxNLocator

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import DENSE, WITH_VALIDATION, base_method
from dnis_torchrec.report.figures.style import (
    BLACK,
    BLUE,
    BROWN,
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
from dnis_torchrec.report.pareto_points import ParetoPoint, metric_range, pareto_front
from dnis_torchrec.report.rendering import render
from dnis_torchrec.report.tables import PLUS_MINUS, format_megabytes, format_metric, format_ratio, format_seconds

PLOT_WIDTH, PLOT_HEIGHT = 900.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 880.0, 14.0, 346.0
"""Edges of the plotting area, in units of the SVG."""
MARK_RADIUS, LABEL_LINE, LABEL_CHARACTER = 9.0, 15.0, 7.5
"""Room for a mark, for a line of a label beside it and for a character of that, at most."""
SUBJECT = " subject"
"""CSS class of the marks of the method that the chart is about."""
ARROWS = {1: "\N{UPWARDS ARROW}", -1: "\N{DOWNWARDS ARROW}"}
"""Arrows in front of a number above the axis and of one below it."""
DARK = {
    BLUE: "#4fa8e0",
    ORANGE: "#f4894a",
    GREEN: "#2fc79b",
    BLACK: "#e6e8ea",
    PURPLE: "#e3a3c8",
    SKY: "#8fd0f5",
    YELLOW: "#f0b73c",
    GREY: "#a9adb2",
    BROWN: "#c79a78",
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


def pareto_chart(points: Sequence[ParetoPoint], metric: str, *, higher_is_better: bool) -> str:
    """The chart as a piece of HTML, to be put into a page as it is.

    The stair is the Pareto front: what can be had at most for so many bytes. Pointing at a mark, or reaching it with
    the Tab key, shows method, bytes, metric and deviation, compression, seeds and time.

    Args:
        points: points to draw.
        metric: name of the metric.
        higher_is_better: its direction.

    Raises:
        ValueError: if there are no points.

    Example:
        >>> point = ParetoPoint(method="dnis", bytes=1e6, mean=0.8, compression=4, seconds=9)
        >>> chart = pareto_chart([point], "auc", higher_is_better=True)
        >>> "dnis" in chart, "<script" in chart
        (True, False)
    """
    check(len(points) > 0, "points", "at least one point", "none", "leave the chart out")
    scale = _Scale.around(points, higher_is_better=higher_is_better)
    styles = method_styles(point.method for point in points)
    solid = {base_method(method): style for method, style in styles.items()}
    front = pareto_front(points, higher_is_better=higher_is_better)
    places = _places(points, scale)
    labels = _labels_beyond(points, scale, places)
    marks = [
        _mark(point, places[index], scale, styles[point.method], index in front) | {"label": labels.get(index)}
        for index, point in enumerate(points)
    ]
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
        marks=sorted(marks, key=lambda mark: mark["row_class"] == SUBJECT),  # the last one lies on top
        methods=[(short(name), MARK_PATHS[marker], _colours(colour)) for name, (colour, marker) in solid.items()],
        second_row=MARK_PATHS["o"] if any(method.endswith(WITH_VALIDATION) for method in styles) else "",
    )


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Scale that turns bytes and metric into places in the SVG."""

    low_bytes: float
    high_bytes: float
    low: float
    high: float

    @staticmethod
    def around(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> _Scale:
        sizes = [point.bytes for point in points]
        margin = max(1.15, (max(sizes) / min(sizes)) ** 0.06)
        low, high = metric_range(points, higher_is_better=higher_is_better)
        return _Scale(low_bytes=min(sizes) / margin, high_bytes=max(sizes) * margin, low=low, high=high)

    def x(self, num_bytes: float) -> float:
        share = math.log(num_bytes / self.low_bytes) / math.log(self.high_bytes / self.low_bytes)
        return LEFT + share * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def beyond(self, value: float) -> int:
        """1 for a metric above the axis, -1 for one below it, 0 for one on it."""
        return (value > self.high) - (value < self.low)


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


def _method_line(points: Sequence[ParetoPoint], scale: _Scale, style: tuple[str, str]) -> tuple[str, str, str]:
    """SVG points of the line through one method's sizes, its colours and its class."""
    ordered = sorted(points, key=lambda point: point.bytes)
    places = " ".join(f"{_at(scale.x(p.bytes))},{_at(scale.y(p.mean))}" for p in ordered)
    return places, _colours(style[0]), _row_class(ordered[0].method)


def _row_class(method: str) -> str:
    return " second" if method.endswith(WITH_VALIDATION) else SUBJECT if method == "dnis" else ""


def _places(points: Sequence[ParetoPoint], scale: _Scale) -> list[tuple[float, float]]:
    """Returns the place of every mark: at its bytes and metric, or, beyond the axis, apart from others at its edge."""
    places = [(scale.x(point.bytes), scale.y(point.mean)) for point in points]
    for beyond, edge in ((1, TOP), (-1, BOTTOM)):
        outside = [index for index, point in enumerate(points) if scale.beyond(point.mean) == beyond]
        outside.sort(key=lambda index: places[index][0])
        moved = _apart([places[index][0] for index in outside])
        places = [(moved[outside.index(i)], edge) if i in outside else place for i, place in enumerate(places)]
    return places


def _apart(places: Sequence[float]) -> list[float]:
    """Rising places along an edge, moved as little as leaves room for a mark at each; less room if they are many."""
    room = min(2 * MARK_RADIUS, (RIGHT - LEFT) / max(1, len(places)))
    pushed_right = [*accumulate(places, lambda last, x: max(x, last + room))]
    pushed_left = [*accumulate(reversed(places), lambda last, x: min(x, last - room))][::-1]
    last = len(places) - 1
    return [
        max(LEFT + room * index, min(RIGHT - room * (last - index), (right + left) / 2))
        for index, (right, left) in enumerate(zip(pushed_right, pushed_left, strict=True))
    ]


def _mark(
    point: ParetoPoint, place: tuple[float, float], scale: _Scale, style: tuple[str, str], is_front: bool
) -> dict[str, object]:
    """All that the template says about one point: where it is, how it looks, what it tells."""
    (colour, marker), (x, y), bar = style, place, point.bar
    size = format_megabytes(point.bytes) + (f" as {short(point.form)}" if point.form else "")
    return {
        "x": _at(x),
        "y": _at(y),
        "bar": (_at(scale.y(point.mean - bar)), _at(scale.y(point.mean + bar))) if bar else None,
        "row_class": _row_class(point.method),
        "place": f"left: {100 * x / PLOT_WIDTH:.2f}%; top: {100 * y / PLOT_HEIGHT:.2f}%",
        "side": f"{'before' if x > PLOT_WIDTH / 2 else 'after'} {'above' if y > PLOT_HEIGHT / 2 else 'below'}",
        "path": MARK_PATHS[marker],
        "precision": short(point.precision) if scale.beyond(point.mean) == 0 else "",
        "precision_y": _at(y - MARK_RADIUS),
        "colours": _colours(colour),
        "method": short(point.method, 40),
        "is_front": is_front,
        "facts": [
            ("metric", _with_deviation(format_metric(point.mean), point.deviation)),
            *_difference(point),
            ("tables", size),
            ("compression", format_ratio(point.compression)),
            ("seeds", str(point.num_seeds)),
            ("time of one run", format_seconds(point.seconds)),
        ],
    }


def _labels_beyond(
    points: Sequence[ParetoPoint], scale: _Scale, places: Sequence[tuple[float, float]]
) -> dict[int, dict[str, str]]:
    """Index of a point beyond the axis -> its method and number, beside its mark, in the outermost line with room."""
    outside = {index: beyond for index, point in enumerate(points) if (beyond := scale.beyond(point.mean))}
    taken = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for index, beyond in outside.items():
        x, _ = places[index]
        taken[beyond, 0].append((x - MARK_RADIUS, x + MARK_RADIUS))
    labels = {}
    for index, beyond in outside.items():
        (x, edge), point = places[index], points[index]
        text = f"{ARROWS[beyond]} {short(point.method)} {format_metric(point.mean)}"
        anchor, away = ("start", 1) if x < (LEFT + RIGHT) / 2 else ("end", -1)
        near = x + away * MARK_RADIUS
        low, high = sorted((near, near + away * LABEL_CHARACTER * len(text)))
        line = 0
        while any(low < right and left < high for left, right in taken[beyond, line]):
            line += 1
        taken[beyond, line].append((low, high))
        y = edge + beyond * line * LABEL_LINE + 5
        labels[index] = {"text": text, "anchor": anchor, "x": _at(near), "y": _at(y)}
    return labels


def _with_deviation(text: str, deviation: float | None) -> str:
    return text if deviation is None else f"{text} {PLUS_MINUS} {format_metric(deviation)}"


def _difference(point: ParetoPoint) -> list[tuple[str, str]]:
    """The fact that says what a point has lost or gained, nothing where that is not known or it is the model itself."""
    if point.difference is None or point.method == DENSE:
        return []
    return [("against dense", point.difference.told(point.num_seeds))]
