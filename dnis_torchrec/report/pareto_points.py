"""Points of quality against bytes, a method at a size each, and which of them no other one beats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import RowGroup
from dnis_torchrec.report.tables import (
    PLUS_MINUS,
    format_difference,
    format_metric,
    format_ratio,
    of_fewer_seeds,
)

_FAR, _FEW = 5, 6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric minus that of the uncompressed model within each seed."""

    mean: float
    deviation: float | None
    num_seeds: int

    def told(self, num_seeds: int) -> str:
        """Formats the difference; if the row has more seeds, the text says how many this one has."""
        text = format_difference(self.mean)
        if self.deviation is not None:
            text += f" {PLUS_MINUS} {format_metric(self.deviation)}"
        return text + of_fewer_seeds(self.num_seeds, num_seeds)


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """One point of the chart: a method at a size."""

    method: str
    bytes: float
    mean: float
    compression: float
    deviation: float | None = None
    num_seeds: int = 1
    precision: str = ""
    difference: Difference | None = None

    def __post_init__(self) -> None:
        place = f"ParetoPoint of {self.method!r}"
        for name in ("bytes", "compression"):
            size = getattr(self, name)
            check(math.isfinite(size) and size > 0, place, f"{name} > 0", size)
        for name in ("mean", "deviation"):
            value = getattr(self, name)
            check(value is None or math.isfinite(value), place, f"a finite {name}", value)

    @property
    def bar(self) -> float | None:
        """Half the length of the bar that says how sure the mean is, None for a single seed."""
        return self.deviation if self.difference is None else self.difference.deviation


def pareto_points(groups: Iterable[RowGroup], metric: str) -> tuple[ParetoPoint, ...]:
    """The points of groups of rows, each at the bytes that it is served in; groups without the
    metric have none."""
    points = []
    for group in groups:
        mean = group.mean(metric)
        if mean is not None and group.parameters > 0:
            point = ParetoPoint(
                method=group.method,
                bytes=4 * group.dense_parameters / group.compression,
                mean=mean,
                deviation=group.deviation(metric),
                compression=group.compression,
                num_seeds=len(group.rows),
            )
            points.append(point)
    return tuple(points)


def pareto_front(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> tuple[int, ...]:
    """Positions of the points that no other one beats: none is as small and better, or smaller and
    as good."""
    sign = 1 if higher_is_better else -1
    front: list[int] = []
    best = -math.inf
    for index in sorted(
        range(len(points)), key=lambda i: (points[i].bytes, -sign * points[i].mean)
    ):
        if sign * points[index].mean > best:
            best = sign * points[index].mean
            front.append(index)
    return tuple(front)


def metric_range(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> tuple[float, float]:
    """Ends of an axis that shows points and their bars."""
    means = sorted((point.mean for point in points), reverse=higher_is_better)
    distances = [abs(mean - means[0]) for mean in means]
    near = [distance for distance in distances if distance <= _FAR * statistics.median(distances)]
    has_outliers = len(points) > _FEW and distances[-1] > 1.5 * near[-1] > 0
    farthest = near[-1] if has_outliers else distances[-1]
    shown = [point for point in points if abs(point.mean - means[0]) <= farthest]
    ends = [point.mean + sign * (point.bar or 0.0) for point in shown for sign in (-1, 1)]
    padding = 0.07 * (max(ends) - min(ends)) or 0.05 * abs(ends[0]) or 1.0
    return min(ends) - padding, max(ends) + padding


def told_beyond(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> str:
    """A sentence that names the points beyond `metric_range`; empty if there are none."""
    if not points:
        return ""
    low, high = metric_range(points, higher_is_better=higher_is_better)
    told = [
        f"{point.method} {format_metric(point.mean)} at {format_ratio(point.compression)}"
        for point in points
        if not low <= point.mean <= high
    ]
    return f"Beyond the axis, which a double click takes away: {', '.join(told)}." if told else ""
