"""Tests of the Pareto chart: which points are the front, where marks stand, what they say."""

from __future__ import annotations

import math
import re
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dnis_torchrec.report import ParetoPoint, pareto_chart, pareto_front, pareto_points
from dnis_torchrec.report.content import seed_groups
from dnis_torchrec.report.figures.style import METHOD_STYLES, OTHER_COLOURS, OTHER_MARKERS
from dnis_torchrec.report.pareto import (
    BOTTOM,
    DARK,
    LABEL_CHARACTER,
    LABEL_LINE,
    LEFT,
    MARK_PATHS,
    MARK_RADIUS,
    PLOT_WIDTH,
    RIGHT,
    TOP,
)
from tests.report.test_report import HOSTILE, PageReader, make_row, make_rows


def point(num_bytes: float, mean: float, method: str = "m", **changes: object) -> ParetoPoint:
    fields = {"method": method, "bytes": num_bytes, "mean": mean, "compression": 2.0, "seconds": 1.0}
    return ParetoPoint(**(fields | changes))


def places(chart: str) -> list[tuple[float, float]]:
    """Where the marks of the plot stand."""
    found = re.findall(r'<g transform="translate\(([\d.]+) ([\d.]+)\)"><path class="mark"', chart)
    return [(float(x), float(y)) for x, y in found]


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


def test_points_of_rows_are_means_at_the_smallest_form() -> None:
    rows = [make_row(seed=seed, bytes={"dense_fp32": 900, "csr_fp32": 100 + seed}) for seed in (0, 1)]
    rows += [make_row("no bytes", bytes={}), make_row("no size", bytes={"f": 0}), make_row("no metric", metrics={})]
    (only,) = pareto_points(seed_groups(rows), "auc")
    assert (only.method, only.form, only.bytes, only.num_seeds) == ("dnis", "csr_fp32", 100.5, 2)
    assert only.mean == pytest.approx(sum(row.metrics["auc"] for row in rows[:2]) / 2)
    assert only.deviation == pytest.approx(0.001 / math.sqrt(2))
    assert only.seconds == 12.0


def test_marks_stand_by_logarithm_of_bytes_and_by_metric() -> None:
    chart = pareto_chart([point(1e6, 0.7), point(1e7, 0.8), point(1e8, 0.9)], "auc", higher_is_better=True)
    (x0, y0), (x1, y1), (x2, y2) = places(chart)
    assert LEFT < x0 < x1 < x2 < RIGHT
    assert TOP < y2 < y1 < y0 < BOTTOM
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", chart)
    assert [label for label in labels if label.endswith("MB")] == ["1 MB", "10 MB", "100 MB"]
    assert {"0.70", "0.80", "0.90"} <= set(labels) or {"0.7", "0.8", "0.9"} <= set(labels)
    assert "auc (higher is better)" in labels


def test_stair_goes_along_the_front_and_on_to_the_edge() -> None:
    points = [point(1e6, 0.9), point(2e6, 0.95), point(4e6, 0.8)]
    chart = pareto_chart(points, "mse", higher_is_better=False)
    (first, _, last) = places(chart)
    (stair,) = re.findall(r'<path class="stair" d="(M\d[^"]*)"/>\n', chart.split('class="plot"')[1])
    assert stair == f"M{first[0]:.1f} {first[1]:.1f}H{last[0]:.1f}V{last[1]:.1f}H{RIGHT:.1f}"
    assert chart.count("on the Pareto front") == 2


def test_bars_are_the_deviation_over_seeds() -> None:
    chart = pareto_chart([point(1, 0.5), point(1, 0.7, deviation=0.1)], "auc", higher_is_better=True)
    (_, y0), (_, y1) = places(chart)
    (bar,) = re.findall(r'class="bar" x1="[\d.]+" x2="[\d.]+" y1="([\d.]+)" y2="([\d.]+)"', chart)
    assert [float(end) for end in bar] == [
        pytest.approx(y1 + (y0 - y1) / 2, abs=0.11),
        pytest.approx(y1 - (y0 - y1) / 2, abs=0.11),
    ]


def test_a_far_worse_point_stands_at_the_edge_and_says_its_number() -> None:
    points = [point(2**index, 0.7 + index / 100) for index in range(7)]
    assert max(y for _, y in places(pareto_chart(points, "auc", higher_is_better=True))) < BOTTOM
    for num_bytes, anchor in ((4, "start"), (32, "end")):
        chart = pareto_chart([*points, point(num_bytes, -3.0)], "auc", higher_is_better=True)
        *near, (_, far) = places(chart)
        assert far == BOTTOM
        assert max(y for _, y in near) - min(y for _, y in near) > 0.8 * (BOTTOM - TOP)
        ((y, *label),) = re.findall(r'<text class="beyond" x="[\d.]+" y="([\d.]+)" text-anchor="(\w+)">([^<]*)<', chart)
        assert (float(y), *label) == (BOTTOM + 5, anchor, "\N{DOWNWARDS ARROW} m -3.0000")


# sizes that differ by less than a picture can show stand in no order
@given(
    st.lists(st.floats(1, 1e6).map(lambda size: round(size, 3)), min_size=1, max_size=8), st.sampled_from([-3.0, -1e5])
)
@example([9e5, 9.5e5, 1e6, 3e5], -3.0)
@example([1.0, 1.0, 1.5, 9.0], -1e5)
def test_numbers_of_points_beyond_the_axis_have_room(sizes: list[float], far: float) -> None:
    near = [point(2.0**index, 0.7 + index / 100) for index in range(21)]
    chart = pareto_chart([*near, *(point(size, far) for size in sizes)], "auc", higher_is_better=True)
    labels = re.findall(r'class="beyond" x="([\d.]+)" y="([\d.]+)" text-anchor="(start|end)">([^<]*)<', chart)
    assert len(labels) == len(sizes)
    boxes = []
    for x, y, anchor, text in labels:
        width = LABEL_CHARACTER * len(text)
        low = float(x) if anchor == "start" else float(x) - width
        assert 0 <= low <= low + width <= PLOT_WIDTH
        boxes.append((low, low + width, float(y)))
    for one, other in combinations(boxes, 2):
        assert one[1] <= other[0] + 0.2 or other[1] <= one[0] + 0.2 or abs(one[2] - other[2]) >= LABEL_LINE
    marks = places(chart)[-len(sizes) :]
    for x, y in marks:
        for low, high, label_y in boxes:
            assert high <= x - 8 or x + 8 <= low or label_y < y - 5
    by_size = [x for _, (x, _) in sorted(zip(sizes, marks, strict=True))]
    assert all(right - left >= 2 * MARK_RADIUS - 0.2 for left, right in pairwise(by_size))
    assert all(LEFT <= x <= RIGHT for x in by_size)


def test_marks_beyond_the_axis_stand_apart_and_every_label_names_its_own() -> None:
    near = [point(2.0**index, 0.7 + index / 100) for index in range(7)]
    far = [point(8.0, -mean, f"method-{mean}") for mean in (3, 4, 5)]
    chart = pareto_chart([*near, *far], "auc", higher_is_better=True)
    alone = places(pareto_chart([*near, far[0]], "auc", higher_is_better=True))[-1]
    moved = places(chart)[-3:]
    assert [x - alone[0] for x, _ in moved] == pytest.approx([-2 * MARK_RADIUS, 0, 2 * MARK_RADIUS], abs=0.11)
    labels = re.findall(r'class="beyond"[^>]*>([^<]*)<', chart)
    assert labels == [f"\N{DOWNWARDS ARROW} method-{mean} -{mean}.0000" for mean in (3, 4, 5)]


def test_more_marks_than_have_room_beyond_the_axis_share_all_of_it() -> None:
    near = [point(2.0**index, 0.7 + index / 100) for index in range(121)]
    chart = pareto_chart([*near, *(point(2.0**60, -3.0) for _ in range(60))], "auc", higher_is_better=True)
    xs = [x for x, _ in places(chart)[-60:]]
    assert LEFT <= min(xs) <= max(xs) <= RIGHT
    assert all(right - left > 13 for left, right in pairwise(xs))


def test_the_row_with_validation_is_hollow_and_shares_its_entry_of_the_key() -> None:
    chart = pareto_chart([point(1, 0.5, "uniform"), point(1, 0.6, "uniform+validation")], "auc", higher_is_better=True)
    assert len(re.findall(r'"><path class="mark second" d=', chart)) == 1
    key = chart.split('class="plot"')[0]
    assert (key.count("uniform"), key.count("hollow, dashed: +validation")) == (1, 1)


@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(-1e6, 1e6), st.none() | st.floats(0, 1e3)), min_size=1, max_size=6)
)
def test_any_points_stay_inside_the_plot(values: list[tuple[float, float, float | None]]) -> None:
    chart = pareto_chart([point(b, m, deviation=d) for b, m, d in values], "x", higher_is_better=True)
    marks = places(chart)
    assert len(marks) == len(values)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in marks)
    assert "nan" not in chart


def test_chart_is_self_contained_and_reached_without_a_mouse() -> None:
    chart = pareto_chart(pareto_points(seed_groups(make_rows()), "auc"), "auc", higher_is_better=True)
    reader = PageReader(chart)
    assert "script" not in reader.tags
    assert reader.values("src", "href", "xlink:href", "id") == []
    assert "url(" not in chart
    assert reader.values("tabindex") == ["0"] * 5
    text = " ".join(reader.text.split())
    assert "dnis, on the Pareto front auc 0.8105 \N{PLUS-MINUS SIGN} 0.0007 tables 0.00798 MB as csr_fp32" in text
    assert "seeds 2 time of one run 12.0 s" in text


def test_chart_escapes_hostile_names() -> None:
    chart = pareto_chart([point(1, 1, HOSTILE, form=HOSTILE)], HOSTILE, higher_is_better=True)
    reader = PageReader(chart)
    assert not {"script", "img"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]


def test_every_style_of_a_method_can_be_drawn_on_both_backgrounds() -> None:
    styles = [*METHOD_STYLES.values(), *zip(OTHER_COLOURS * 4, OTHER_MARKERS * 3, strict=True)]
    assert {colour for colour, _ in styles} <= set(DARK)
    assert {marker for _, marker in styles} <= set(MARK_PATHS)
    assert len(set(METHOD_STYLES.values()) | set(styles)) == len(set(styles)) >= 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bytes": 0}, "ParetoPoint of 'm': expected bytes > 0, got 0"),
        ({"num_bytes": math.inf}, "expected bytes > 0, got inf"),
        ({"mean": math.nan}, "expected a finite mean, got nan"),
        ({"deviation": math.nan}, "expected a finite deviation, got nan"),
    ],
)
def test_points_that_have_no_place_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        point(**({"num_bytes": 1.0, "mean": 1.0} | changes))
    with pytest.raises(ValueError, match="expected at least one point"):
        pareto_chart([], "auc", higher_is_better=True)
