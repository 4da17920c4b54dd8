"""Tests of the points of quality against bytes: which are the front, what rows make of them, which are told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.report import ParetoPoint, pareto_front, pareto_points
from dnis_torchrec.report.content import seed_groups
from dnis_torchrec.report.pareto_points import metric_range, told_beyond
from dnis_torchrec.report.tables import TIMES
from tests.report.test_report import make_row


def point(num_bytes: float, mean: float, method: str = "m", **changes: object) -> ParetoPoint:
    fields = {"method": method, "bytes": num_bytes, "mean": mean, "compression": 4e6 / num_bytes}
    return ParetoPoint(**(fields | changes))


def is_beaten(one: ParetoPoint, other: ParetoPoint, sign: int) -> bool:
    as_good = other.bytes <= one.bytes and sign * other.mean >= sign * one.mean
    return as_good and (other.bytes < one.bytes or sign * other.mean > sign * one.mean)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=12), st.booleans())
def test_front_holds_just_what_no_other_point_beats(pairs: list[tuple[int, int]], higher: bool) -> None:
    points = [point(size, value) for size, value in pairs]
    front = pareto_front(points, higher_is_better=higher)
    sign = 1 if higher else -1
    unbeaten = {(p.bytes, p.mean) for p in points if not any(is_beaten(p, other, sign) for other in points)}
    assert [(points[i].bytes, points[i].mean) for i in front] == sorted(unbeaten)
    assert all(points.index(points[i]) == i for i in front), "of equal points the first"


def test_points_of_rows_are_means_at_the_bytes_served() -> None:
    rows = [make_row(seed=seed, ratio=4 + seed / 20) for seed in (0, 1)]
    rows += [make_row("holds nothing", 6400.0, parameters=0), make_row("no metric", metrics={})]
    (only,) = pareto_points(seed_groups(rows), "auc")
    assert (only.method, only.compression, only.num_seeds) == ("dnis", 4.025, 2)
    assert only.bytes == pytest.approx(4 * 6400 / 4.025)
    assert only.mean == pytest.approx(sum(row.metrics["auc"] for row in rows[:2]) / 2)
    assert only.deviation == pytest.approx(abs(rows[0].metrics["auc"] - rows[1].metrics["auc"]) / math.sqrt(2))


def test_rows_of_one_method_are_seeds_of_one_size_within_two_per_cent() -> None:
    def sizes(ratio: float) -> list[int]:
        return [len(group.rows) for group in seed_groups([make_row(), make_row(seed=1, ratio=ratio)])]

    assert sizes(4 * 1.019) == [2]
    assert sizes(4 * 1.021) == [1, 1]


def test_points_far_beyond_the_others_are_told_in_words() -> None:
    near = [point(2.0**index, 0.7 + index / 100) for index in range(7)]
    assert told_beyond(near, higher_is_better=True) == told_beyond([], higher_is_better=True) == ""
    points = [*near, point(1e6, -3.0, "far")]
    low, high = metric_range(points, higher_is_better=True)
    assert -3 < low < 0.7 < 0.76 < high
    told = f"Beyond the axis, which a double click takes away: far -3.0000 at 4{TIMES}."
    assert told_beyond(points, higher_is_better=True) == told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": 0}, "ParetoPoint of 'm': expected bytes > 0, got 0"),
        ({"bytes": math.inf}, "expected bytes > 0, got inf"),
        ({"compression": -1.0}, "expected compression > 0, got -1"),
        ({"mean": math.nan}, "expected a finite mean, got nan"),
        ({"deviation": math.nan}, "expected a finite deviation, got nan"),
    ],
)
def test_points_that_have_no_place_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParetoPoint(**({"method": "m", "bytes": 1.0, "mean": 1.0, "compression": 1.0} | changes))
