"""Tests of the charts of a page: what each draws, of which rows, and what its marks tell."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from plotly import graph_objects as go

from dnis_torchrec.report import BlockSummary, RowDistribution, charts
from dnis_torchrec.report.charts import style
from dnis_torchrec.report.compression_content import CompressionContent, CompressionRow
from dnis_torchrec.report.pareto_points import Difference
from dnis_torchrec.report.tables import PLUS_MINUS, TIMES
from tests.report.test_report import HOSTILE, make_alpha, make_blocks, make_content, make_row, make_rows
from tests.report.test_report_pareto import point


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("background", ["#ffffff", "#1d2125"])
def test_every_colour_stands_out_from_a_light_and_from_a_dark_page(background: str) -> None:
    colours = {
        *style.COLOURS,
        style.GREY,
        *style.OTHER_COLOURS,
        *(colour for colour, _ in style.METHOD_STYLES.values()),
    }
    behind = luminance(background)
    for colour in colours:
        low, high = sorted((luminance(colour), behind))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_no_two_methods_look_alike() -> None:
    others = [*zip(style.OTHER_COLOURS * 4, style.OTHER_MARKS * 3, strict=True)]
    looks = [*style.METHOD_STYLES.values(), *others]
    assert len(set(looks)) == len(style.METHOD_STYLES) + len(set(others))
    assert style.METHOD_STYLES["dense"][1] != style.METHOD_STYLES["uncompressed"][1]
    assert len({style.series_style(index) for index in range(49)}) == 49


def test_quality_is_a_line_per_method_over_compression_and_marks_tell_their_numbers() -> None:
    difference = Difference(mean=-0.01, deviation=0.002, num_seeds=3)
    points = [
        point(4e6, 0.8, "uncompressed"),
        point(1e6, 0.79, "uniform", deviation=0.5, num_seeds=3, difference=difference),
        point(2e6, 0.795, "uniform"),
        point(1e6, 0.78, "uniform+validation", precision="int4"),
    ]
    figure = charts.quality(points, "auc", higher_is_better=True)
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines) == ["uniform", "uniform+validation", "uncompressed"]
    assert (lines["uniform"].x, lines["uniform"].y) == ((2, 4), (0.795, 0.79))
    assert lines["uniform"].error_y.array == (0, 0.002)
    assert lines["uniform"].hovertext[1].split("<br>") == [
        "<b>uniform</b>",
        f"test auc 0.7900 {PLUS_MINUS} 0.5000",
        f"\N{MINUS SIGN}0.0100 {PLUS_MINUS} 0.0020 against dense",
        f"4{TIMES} smaller",
        "1 MB served",
        "3 seeds",
        "on the Pareto front",
    ]
    assert "precision int4" in lines["uniform+validation"].hovertext[0]
    assert "Pareto" not in lines["uniform+validation"].hovertext[0]
    assert lines["uniform+validation"].marker.symbol == "square-open"
    assert lines["uniform+validation"].line.dash == "dash"
    assert [shape.y0 for shape in figure.layout.shapes] == [0.8], "the level of the uncompressed model"
    axis = figure.layout.xaxis
    assert (axis.type, axis.title.text) == ("log", style.COMPRESSION)
    assert axis.ticktext == tuple(f"{at}{TIMES}" for at in ("1", "1.5", "2", "3", "4"))
    assert figure.layout.title.text == "test auc (higher is better)"
    with pytest.raises(ValueError, match="expected at least one point"):
        charts.quality([], "auc", higher_is_better=True)


def test_all_charts_of_quality_against_size_have_one_axis_that_begins_with_the_uncompressed_tables() -> None:
    figures = [
        charts.quality([point(1e6, 0.5)], "auc", higher_is_better=True),
        charts.loss_increase(make_compression()),
    ]
    for figure in figures:
        assert figure.layout.xaxis.title.text == style.COMPRESSION
        assert figure.layout.xaxis.range[0] < 0 < math.log10(4) < figure.layout.xaxis.range[1]


def make_compression() -> CompressionContent:
    fields = {"metrics": {"loss": 0.5}, "selection": {"loss": 0.5}, "seed": 0, "seconds": 1.0}
    rows = [CompressionRow(method="uncompressed", compression=1.0, bytes=400, predicted_loss_increase=0.0, **fields)]
    for size in (20.0, 4.0):
        row = fields | {"metrics": {"loss": 0.5 + size / 1e4}, "selection": {"loss": 0.5 + size / 1e5}}
        rows.append(
            CompressionRow(method="compress", compression=size, bytes=9, predicted_loss_increase=size / 1e6, **row)
        )
    return CompressionContent(
        recipe="m:f", rows=tuple(rows), primary_metric="loss", higher_is_better=False, num_samples=1, relative_error=0.1
    )


def test_loss_is_drawn_as_predicted_and_as_measured() -> None:
    predicted, test, selection = charts.loss_increase(make_compression()).data
    assert predicted.x == test.x == selection.x == (4, 20)
    assert predicted.y == pytest.approx((4e-6, 2e-5))
    assert test.y == pytest.approx((4e-4, 2e-3))
    assert selection.y == pytest.approx((4e-5, 2e-4))


def test_pruning_rate_compares_pruning_methods_only() -> None:
    figure = charts.pruning_rate(make_rows(), "auc", higher_is_better=True)
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines) == ["dnis", "magnitude", "dense"]
    assert lines["dnis"].x == pytest.approx((1 - (1600 + 1592) / 2 / 6400,))
    assert lines["dnis"].y == pytest.approx((0.8105,))
    assert (lines["magnitude"].x, lines["dense"].x) == ((0.75,), (0,))
    with pytest.raises(ValueError, match="expected a row of DNIS or of pruning"):
        charts.pruning_rate([make_row("uniform")], "auc", higher_is_better=True)


def test_a_setting_is_drawn_as_means_over_seeds_and_their_deviation() -> None:
    rows = [(d, make_row(seed=seed, metrics={"auc": d / 100 + seed / 10})) for d in (16, 4) for seed in (0, 1)]
    rows.append((8, make_row(metrics={})))
    figure = charts.setting({"dnis": rows, "none": []}, "D", "auc", higher_is_better=True)
    (line,) = figure.data
    assert (line.x, line.y) == ((4, 16), pytest.approx((0.09, 0.21)))
    assert line.error_y.array == pytest.approx((0.0707107, 0.0707107), abs=1e-6)
    assert figure.layout.xaxis.tickvals == (4, 16)
    with pytest.raises(ValueError, match="expected at least one row that has it"):
        charts.setting({"dnis": rows}, "D", "mse", higher_is_better=False)


def test_bytes_are_bars_in_megabytes_that_tell_what_they_save() -> None:
    sizes = {"csr_fp32": 640_000, "dense_fp32": 2_560_000, "padded": 5_120_000, "none": 0}
    (bars,) = charts.bytes_per_form(sizes).data
    assert bars.y == ("csr_fp32", "dense_fp32", "padded")
    assert bars.text == ("0.64 MB", "2.56 MB", "5.12 MB")
    assert bars.x == (0.64, 2.56, 5.12)
    told = [text.split("<br>")[1:] for text in bars.hovertext]
    smaller, larger = f"4{TIMES} smaller than dense_fp32", f"2{TIMES} larger than dense_fp32"
    assert told == [["640,000 bytes", smaller], ["2,560,000 bytes"], ["5,120,000 bytes", larger]]
    with pytest.raises(ValueError, match="expected at least one form above 0 bytes"):
        charts.bytes_per_form({"none": 0})


def test_alpha_is_sorted_by_how_widely_a_dimension_is_retained() -> None:
    shuffled = make_alpha()[:, torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    figure = charts.alpha_per_block({"tables of D = 8": shuffled, "0": make_alpha(2, 4)})
    (heat,) = figure.data
    assert [len([cell for cell in row if cell is not None]) for row in heat.z] == [8, 6, 4, 2, 0, 4, 2]
    assert all(cell is not None for row, kept in zip(heat.z, (8, 6, 4, 2), strict=False) for cell in row[:kept])
    assert heat.y[1] == "tables of D = 8, block 1: 6 of 8 dimensions left"
    assert (heat.zmin, heat.zmax) == (0, 1)
    assert figure.layout.yaxis.ticktext == ("tables of D = 8", "0")
    assert heat.text[0][0] == int(shuffled[0].argmax()) or shuffled[:, heat.text[0][0]].count_nonzero() == 4


def test_blocks_of_long_names_that_begin_alike_are_drawn_apart() -> None:
    """Plotly draws all rows of one name in one place."""
    names = [f"items_of_the_last_session_of_user_{end}" for end in "ab"]
    (heat,) = charts.alpha_per_block({name: make_alpha(2, 4) for name in names}).data
    assert len(set(heat.y)) == len(heat.y) == 5


def test_alpha_distribution_has_a_box_per_block() -> None:
    (box,) = charts.alpha_distribution({"8": make_alpha()}).data
    assert box.x == tuple(block for block in range(4) for _ in range(8))
    assert box.y == pytest.approx(make_alpha().flatten().tolist(), abs=1e-4)


def test_history_draws_what_is_there_and_a_line_where_a_phase_begins() -> None:
    figure = charts.search_history(make_content().history)
    assert [trace.name for trace in figure.data] == [
        *("training loss", "selection loss", "share of alpha above 0", "mean of alpha")
    ]
    assert sorted({shape.x0 for shape in figure.layout.shapes}) == [-0.5, 1.5, 2.5]
    assert [note.text for note in figure.layout.annotations] == ["plain", "ramp", "release"]
    (line,) = charts.search_history([{"train_loss": 1.0}, {"train_loss": math.nan}, {"train_loss": 0.5}]).data
    assert (line.x, line.y) == ((0, 1, 2), (1, None, 0.5))


def test_a_metric_that_a_search_stops_on_has_its_own_name_and_sign() -> None:
    (line,) = charts.search_history([{"selection_loss": -0.75}], "auc", higher_is_better=True).data
    assert (line.name, line.y) == ("selection auc", (0.75,))
    (line,) = charts.search_history([{"selection_loss": 0.25}], "logloss").data
    assert (line.name, line.y) == ("selection logloss", (0.25,))


@pytest.mark.parametrize("num_tables", [1, 26])
def test_retained_dims_have_a_line_per_table_and_never_seen_rows_apart(num_tables: int) -> None:
    figure = charts.retained_dims(make_blocks(*(f"table_{index}" for index in range(num_tables))))
    assert len(figure.data) == num_tables
    assert figure.layout.showlegend == (1 < num_tables <= style.MOST_IN_A_LEGEND)
    line, axis = figure.data[0], figure.layout.xaxis
    assert line.y == (0, 1, 4, 8)
    assert line.x[1:] == pytest.approx((1000 / 30, 10_000 / 20, 100_000 / 10))
    assert (axis.tickvals[0], axis.ticktext[0]) == (line.x[0], "never")
    assert line.x[0] < line.x[1] / 2
    assert line.hovertext[3].split("<br>")[1:] == ["block 0: 8 of 8 dims", "10 rows", "10k occurrences per row"]
    block = BlockSummary(table="t", block=0, num_rows=0, occurrences=0, retained_dims=0, embedding_dim=8)
    assert charts.retained_dims([block]).layout.xaxis.ticktext == ("never", "1", "2", "5", "10")


def test_the_joint_distribution_has_marginals_and_the_mean_at_every_frequency() -> None:
    counts, dims = torch.tensor([0, 1, 1, 1, 20, 20]), torch.tensor([0, 0, 1, 2, 3, 4])
    figure = charts.joint_distribution(RowDistribution.of([(counts, dims)], embedding_dim=4))
    heat, mean, top, right = figure.data
    assert (mean.x, mean.y) == ((1, 6), (1, 3.5))
    assert top.y == (1, 3, 0, 0, 0, 0, 2)
    assert right.x == (2, 1, 1, 1, 1)
    assert sum(10**cell for row in heat.z for cell in row if cell is not None) == pytest.approx(6)
    assert heat.text[0][0] == "<b>1 rows</b><br>0 dims retained<br>never seen in training"
    assert heat.text[3][6].endswith("seen 18 to 31 times")
    assert "never" in figure.layout.xaxis3.ticktext
    seen = charts.joint_distribution(RowDistribution.of([(counts[1:], dims[1:])], embedding_dim=4))
    assert "never" not in seen.layout.xaxis3.ticktext


@pytest.mark.parametrize(
    "draw", [charts.alpha_per_block, charts.alpha_distribution, charts.retained_dims, charts.search_history]
)
def test_charts_of_nothing_are_refused(draw: Callable[..., go.Figure]) -> None:
    with pytest.raises(ValueError, match="leave the chart out"):
        draw({})


def test_hostile_names_are_text_and_not_markup() -> None:
    figures = [
        charts.quality([point(1, 1, HOSTILE), point(2, 2, "<b>")], HOSTILE, higher_is_better=True),
        charts.retained_dims(make_blocks(HOSTILE)),
        charts.alpha_per_block({HOSTILE: make_alpha()}),
        charts.bytes_per_form({HOSTILE: 4}),
    ]
    for figure in figures:
        told = json.dumps(figure.to_dict(), default=str)
        assert "&lt;script" in told
        assert "<script" not in told
        assert "<img" not in told
