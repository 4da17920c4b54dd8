"""Points of quality against bytes, a method at a size each, and which of them no other one beats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dnis_torchrec.checks import check
from dnis_torchrec.report.content import RowGroup
from dnis_torchrec.report.tables import PLUS_MINUS, format_difference, format_metric, format_ratio, of_fewer_seeds

_FAR, _FEW = 5, 6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric minus that of the uncompressed model within each seed.

    Attributes:
        mean: over the seeds.
        deviation: sample standard deviation, None below two seeds.
        num_seeds: how many seeds both have.
    """

    mean: float
    deviation: float | None
    num_seeds: int

    def told(self, num_seeds: int) -> str:
        """Formats the difference; if the row has more seeds, the text says how many this one has.

        Args:
            num_seeds: seeds of the row.

        Example:
            >>> Difference(mean=0.5, deviation=None, num_seeds=1).told(3)
            '+0.5000 (1 seed)'
        """
        text = format_difference(self.mean)
        if self.deviation is not None:
            text += f" {PLUS_MINUS} {format_metric(self.deviation)}"
        return text + of_fewer_seeds(self.num_seeds, num_seeds)


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """One point of the chart: a method at a size.

    Attributes:
        method: the method.
        bytes: bytes of all embedding tables as served, index bytes counted.
        mean: mean of the metric over the seeds.
        deviation: standard deviation over the seeds, None for a single one.
        compression: bytes of the float32 tables over `bytes`.
        num_seeds: number of seeds.
        precision: what its values are stored in; empty to leave it out.
        difference: of the metric to the uncompressed model, where that was trained under the same seeds.

    Raises:
        ValueError: if a number is not finite, or a size is not above 0, where a logarithmic axis has no place for it.
    """

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
        """Half the length of the bar that says how sure the mean is, None for a single seed.

        The standard deviation of the difference to the uncompressed model where there is one: splits differ in level,
        which all methods share and which says nothing about a method.
        """
        return self.deviation if self.difference is None else self.difference.deviation


def pareto_points(groups: Iterable[RowGroup], metric: str) -> tuple[ParetoPoint, ...]:
    """The points of groups of rows, each at the bytes that it is served in; groups without the metric have none.

    Args:
        groups: of at least one row each; those whose tables hold nothing have no place on a logarithmic axis.
        metric: its name.

    Returns:
        In the order of the groups; sizes are means over the seeds.
    """
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
    """Positions of the points that no other one beats: none is as small and better, or smaller and as good.

    Args:
        points: in any order.
        higher_is_better: direction of their metric.

    Returns:
        Positions, by rising bytes; of equal points the first.

    Example:
        >>> at = dict(method="m", compression=1)
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


def metric_range(points: Sequence[ParetoPoint], *, higher_is_better: bool) -> tuple[float, float]:
    """Ends of an axis that shows points and their bars.

    Where a few of more than `_FEW` points are so much worse than the others that they would press them together, the
    axis ends before them: those more than `_FAR` times as far from the best mean as the median mean is, if that saves a
    third.

    Args:
        points: at least one.
        higher_is_better: direction of their metric.

    Returns:
        Lower and upper end, the former below the latter.

    Example:
        >>> at = dict(method="m", bytes=1, compression=1)
        >>> points = [ParetoPoint(mean=mean, **at) for mean in (0.70, 0.71, 0.72, 0.73, 0.74, 0.74, 0.99)]
        >>> [round(end, 2) for end in metric_range(points, higher_is_better=False)]
        [0.7, 0.74]
    """
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
    """A sentence that names the points beyond `metric_range`; empty if there are none.

    Args:
        points: of one chart.
        higher_is_better: direction of their metric.
    """
    if not points:
        return ""
    low, high = metric_range(points, higher_is_better=higher_is_better)
    told = [
        f"{point.method} {format_metric(point.mean)} at {format_ratio(point.compression)}"
        for point in points
        if not low <= point.mean <= high
    ]
    return f"Beyond the axis, which a double click takes away: {', '.join(told)}." if told else ""
