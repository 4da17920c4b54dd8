"""Tests of the figures of a report: what each draws, of which rows, and that nothing is cut off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.transforms import Bbox

from dnis_torchrec.report import BlockSummary, ParetoPoint, RowDistribution, figures, tables
from dnis_torchrec.report.pareto_points import Difference
from tests.report.test_report import make_alpha, make_blocks, make_content, make_row, make_rows


def test_alpha_heatmap_sorts_columns_and_shares_one_scale() -> None:
    shuffled = make_alpha()[:, torch.randperm(8, generator=torch.Generator().manual_seed(0))]
    figure = figures.alpha_per_block({"tables of D = 8": shuffled, "0": make_alpha(2, 4)})
    panels = [axis for axis in figure.axes if axis.images]
    assert len(panels) == 2
    assert len(figure.axes) == 3
    assert [axis.get_title(loc="left") for axis in panels] == ["tables of D = 8", "0"]
    assert all(axis.images[0].get_clim() == (0, 1) for axis in panels)
    shown = panels[0].images[0].get_array()
    assert (~shown.mask).sum(axis=0).tolist() == [4, 4, 3, 3, 2, 2, 1, 1]
    assert [text.get_text().strip() for text in panels[0].texts] == ["non-zero", "8", "6", "4", "2"]


@pytest.mark.parametrize("num_tables", [1, 26])
def test_frequency_figure_has_one_collection_per_table(num_tables: int) -> None:
    blocks = make_blocks(*(f"table_{index}" for index in range(num_tables)))
    figure = figures.retained_dims_against_frequency(blocks)
    (axis,) = figure.axes
    assert len(axis.collections) == num_tables
    looks = {(to_hex(dots.get_facecolor()[0]), str(dots.get_paths()[0].vertices)) for dots in axis.collections}
    assert len(looks) == num_tables
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"table_{i}" for i in range(num_tables)]
    points = axis.collections[0].get_offsets()
    assert points[:, 1].tolist() == [0, 1, 4, 8]
    assert points[1:, 0].tolist() == pytest.approx([1000 / 30, 10_000 / 20, 100_000 / 10])
    assert axis.xaxis.get_major_formatter()(points[0, 0]) == "never"


def test_frequency_figure_of_more_tables_than_can_be_told_apart_is_of_one_colour_and_no_higher() -> None:
    few, many = (
        figures.retained_dims_against_frequency(make_blocks(*(f"table_{index}" for index in range(num_tables))))
        for num_tables in (49, 50)
    )
    assert len(few.legends) == 1
    assert not many.legends
    assert many.get_size_inches()[1] < few.get_size_inches()[1] < 11
    (axis,) = many.axes
    looks = {(to_hex(dots.get_facecolor()[0]), str(dots.get_paths()[0].vertices)) for dots in axis.collections}
    assert (len(axis.collections), len(looks)) == (50, 1)


def test_frequency_figure_where_no_row_was_ever_seen() -> None:
    block = BlockSummary(table="t", block=0, num_rows=0, occurrences=0, retained_dims=0, embedding_dim=8)
    (axis,) = figures.retained_dims_against_frequency([block]).axes
    assert len(axis.collections) == 1


def test_quality_figure_draws_one_line_per_method_through_the_means() -> None:
    rows = (*make_rows(), make_row("zero", 6400.0, parameters=0, metrics={"auc": 0.6}))
    figure = figures.quality_against_size(rows, "auc", higher_is_better=True)
    (axis,) = figure.axes
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["dnis", "uniform", "magnitude", "dense", "zero (no embeddings at all)"]
    lines = dict(zip(labels, figure.legends[0].legend_handles, strict=True))
    assert len(axis.lines) == len(labels) + 1, "one line each, and the level of the uncompressed model"
    assert axis.lines[0].get_xydata().tolist() == [pytest.approx([4.01, 0.8105])]
    assert axis.lines[1].get_xdata().tolist() == [2.0, 4.0]
    assert len(axis.collections) == 4, "the seeds of each method"
    assert axis.get_xlim()[1] < 5
    assert axis.get_ylabel() == "auc (higher is better)"
    assert len({to_hex(lines[label].get_color()) for label in labels}) == 5


def test_quality_figure_with_one_method_only_and_metrics_absent() -> None:
    rows = [make_row("dnis", 4.0), make_row("dnis", 8.0, metrics={})]
    (axis,) = figures.quality_against_size(rows, "auc", higher_is_better=True).axes
    assert len(axis.lines) == 1
    assert axis.lines[0].get_xdata().tolist() == [4.0]
    with pytest.raises(ValueError, match="metric 'mse': expected at least one row"):
        figures.quality_against_size(rows, "mse", higher_is_better=False)


def make_point(method: str, ratio: float, mean: float, deviation: float = 0.01) -> ParetoPoint:
    """Of three seeds, within which the metric differs from the uncompressed model's by a deviation."""
    difference = Difference(mean=mean - 0.7, deviation=deviation, num_seeds=3)
    return ParetoPoint(
        method=method,
        bytes=1e6 / ratio,
        mean=mean,
        deviation=0.5,
        num_seeds=3,
        compression=ratio,
        seconds=1.0,
        difference=difference,
    )


def test_names_of_points_beyond_the_axis_do_not_overlap() -> None:
    points = [make_point("dnis", 2.0**step, 0.7 + step / 100) for step in range(1, 5)]
    points += [
        make_point("dnis-paper", 16.0, 3.0),
        make_point("dnis-unrolled", 15.9, 2.9),
        make_point("nis-me", 2, 9.0),
    ]
    figure = figures.quality_at_the_same_bytes(points, "mse", higher_is_better=False)
    (axis,) = figure.axes
    figure.canvas.draw()
    boxes = {text.get_text().split()[1]: text.get_window_extent() for text in axis.texts}
    assert sorted(boxes) == ["dnis-paper", "dnis-unrolled", "nis-me"]
    assert not any(one.overlaps(other) for one, other in combinations(boxes.values(), 2))
    assert boxes["dnis-paper"].y0 > boxes["dnis-unrolled"].y0
    for box in boxes.values():
        assert axis.bbox.x0 <= box.x0 < box.x1 <= axis.bbox.x1


def test_names_beyond_the_axis_from_both_halves_do_not_meet() -> None:
    points = [make_point("dnis", 2.0 ** (1 + step / 3), 0.7 + step / 100) for step in range(10)]
    points += [make_point(f"{side}{'-name' * 4}", ratio, 9.0) for side, ratio in (("left", 5.6), ("right", 5.7))]
    points += [make_point("nis-me", 2.0, 3.0), make_point("nis-se", 16.0, 3.0)]
    figure = figures.quality_at_the_same_bytes(points, "mse", higher_is_better=False)
    (axis,) = figure.axes
    figure.canvas.draw()
    assert [text.get_ha() for text in axis.texts] == ["left", "right", "left", "right"]
    assert not any(a.get_window_extent().overlaps(b.get_window_extent()) for a, b in combinations(axis.texts, 2))
    lines = {round(text.get_window_extent().y0) for text in axis.texts}
    assert len(lines) == 2, "short names share lines with long ones"
    for text in axis.texts:
        channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(text.get_color())]
        luminance = sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
        assert 1.05 / (luminance + 0.05) >= 4.5, text.get_text()


def test_comparison_figure_draws_rows_of_one_method_alike_and_what_is_beyond_as_a_number() -> None:
    points = [make_point("dense", 1, 0.7, 0.0), make_point("dense+validation", 1, 0.69)]
    for ratio in (2.0, 4.0):
        points += [make_point("uniform", ratio, 0.7 + ratio / 100), make_point("dnis", ratio, 0.69 + ratio / 100)]
        points.append(make_point("uniform+validation", ratio, 0.695 + ratio / 100))
    points.append(make_point("dnis-paper", 4.0, 1.9))
    figure = figures.quality_at_the_same_bytes(points, "mse", higher_is_better=False, sizes=(2, 4))
    (axis,) = figure.axes
    labels = [text.get_text().replace(tables.TIMES, "x") for text in figure.legends[0].get_texts()]
    names = ["dnis-paper", "uniform", "dnis"]  # as they stand at the largest compression, from above
    assert labels == [*names, "dense 0.7000", "dense+validation 0.6900", "dashed: +validation"]
    lines = {container[0].get_zorder(): container[0] for container in axis.containers}
    assert [line.get_linestyle() for _, line in sorted(lines.items())] == ["--", "-", "-"]
    assert len({to_hex(container[0].get_color()) for container in axis.containers}) == 3
    assert [text.get_text() for text in axis.texts] == ["\N{UPWARDS ARROW} dnis-paper 1.9000"]
    assert axis.get_ylim()[1] < 0.8
    assert "3 seeds; bars: standard deviation of the difference to dense" in axis.get_title(loc="left")
    (bars,) = axis.containers[0][2]
    assert [end - begin for (_, begin), (_, end) in bars.get_segments()] == [pytest.approx(0.02)] * 2
    with pytest.raises(ValueError, match="expected at least one point"):
        figures.quality_at_the_same_bytes([], "mse", higher_is_better=False)


def test_bytes_figure_labels_bars_in_megabytes() -> None:
    (axis,) = figures.bytes_per_form(
        {"csr_fp32": 640_000, "dense_fp32": 2_560_000, "padded": 5_120_000, "none": 0}
    ).axes
    assert len(axis.patches) == 3
    assert axis.get_xscale() == "log"
    labels = [text.get_text().replace(tables.TIMES, "x") for text in axis.texts]
    assert labels == ["5.12 MB (2x larger)", "2.56 MB", "0.64 MB (4x smaller)"]
    (axis,) = figures.bytes_per_form({"csr_fp32": 30, "dense_fp32": 40_000}).axes
    labels = [text.get_text().replace(tables.TIMES, "x") for text in axis.texts]
    assert labels == ["0.04 MB", "0.00003 MB (1.33kx smaller)"]
    assert axis.xaxis.get_major_formatter()(0.00001) == "0.00001"
    with pytest.raises(ValueError, match="expected at least one form above 0 bytes"):
        figures.bytes_per_form({"none": 0})


def test_history_figure_has_twin_panels_and_draws_what_is_there() -> None:
    losses, density = figures.search_history([{"train_loss": 1.0}, {"train_loss": math.nan}, {"train_loss": 0.5}]).axes
    assert [len(losses.lines), len(density.lines), len(density.texts)] == [1, 0, 0]
    assert losses.lines[0].get_xdata().tolist() == [0, 1, 2]


def test_history_figure_draws_a_line_where_a_phase_begins() -> None:
    losses, density = figures.search_history(make_content().history).axes
    for axis in (losses, density):
        curves, marks = axis.lines[:2], axis.lines[2:]
        assert [len(curve.get_xdata()) for curve in curves] == [6, 6]
        assert [mark.get_xdata()[0] for mark in marks] == [-0.5, 1.5, 2.5]
    assert [text.get_text() for text in density.texts] == ["plain", "ramp", "release"]


@pytest.mark.parametrize(
    "draw",
    [
        figures.alpha_per_block,
        figures.alpha_distribution,
        figures.retained_dims_against_frequency,
        figures.search_history,
    ],
)
def test_figures_of_nothing_are_refused(draw) -> None:
    with pytest.raises(ValueError, match="leave the figure out"):
        draw({})


def test_figures_are_saved_and_deterministic(tmp_path) -> None:
    for number in (1, 2):
        figures.save_png(figures.alpha_per_block({"8": make_alpha()}), tmp_path / f"{number}.png")
        figures.save_svg(figures.alpha_per_block({"8": make_alpha()}), tmp_path / f"{number}.svg")
    assert (tmp_path / "1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
    assert "<svg" in (tmp_path / "1.svg").read_text()
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()
    with pytest.raises(ValueError, match="expected letters, digits and dashes"):
        figures.inline_svg(figures.alpha_per_block({"8": make_alpha()}), 'a" onload="')


def test_names_that_matplotlib_would_hide_or_typeset_are_drawn() -> None:
    figure = figures.retained_dims_against_frequency(make_blocks("_hidden", "$x$"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_hidden", "$x$"]
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())


# The paper's figures


def test_rows_are_counted_by_frequency_and_retained_dims() -> None:
    counts = torch.tensor([0, 0, 1, 9, 10, 99, 100, 1000])
    dims = torch.tensor([0, 0, 1, 1, 2, 3, 3, 3])
    rows = RowDistribution.of([(counts, dims), (torch.tensor([10]), torch.tensor([2]))], embedding_dim=3).num_rows
    assert rows.shape == (14, 4)
    found = {(int(f), int(r)): int(rows[f, r]) for f, r in rows.nonzero()}
    assert found == {(0, 0): 2, (1, 1): 1, (4, 1): 1, (5, 2): 2, (8, 3): 1, (9, 3): 1, (13, 3): 1}


@pytest.mark.parametrize("exponent", range(10))
def test_a_power_of_ten_begins_a_bin(exponent: int) -> None:
    counts = torch.tensor([10**exponent - 1, 10**exponent])
    rows = RowDistribution.of([(counts, torch.zeros(2, dtype=torch.int64))], embedding_dim=1).num_rows
    below, at = rows[:, 0].nonzero().flatten().tolist()
    assert at == 4 * exponent + 1
    assert below == (0 if exponent == 0 else at - 1)


@pytest.mark.parametrize(
    ("counts", "dims", "message"),
    [
        ([1], [1, 1], "expected a frequency and retained dims per row"),
        ([-1], [1], "expected frequencies >= 0 and retained dims in 0..2"),
        ([1], [-1], "expected frequencies >= 0 and retained dims in 0..2"),
        ([1], [3], "expected frequencies >= 0 and retained dims in 0..2"),
        ([], [], "expected at least one row"),
    ],
)
def test_rows_that_cannot_be_are_refused(counts: list[int], dims: list[int], message: str) -> None:
    pairs = [(torch.tensor(counts, dtype=torch.int64), torch.tensor(dims, dtype=torch.int64))]
    with pytest.raises(ValueError, match=message):
        RowDistribution.of(pairs, embedding_dim=2)


def test_joint_figure_has_marginals_and_the_mean_at_every_frequency() -> None:
    counts, dims = torch.tensor([0, 1, 1, 1, 20, 20]), torch.tensor([0, 0, 1, 2, 3, 4])
    figure = figures.joint_distribution(RowDistribution.of([(counts, dims)], embedding_dim=4))
    joint, top, right = figure.axes[:3]
    assert joint.lines[0].get_xydata().tolist() == [[1, 1.0], [6, 3.5]]
    assert [bar.get_height() for bar in top.patches] == [1, 3, 0, 0, 0, 0, 2]
    assert [bar.get_width() for bar in right.patches] == [2, 1, 1, 1, 1]
    shown = joint.images[0].get_array()
    assert shown.filled(0).sum() == 6
    assert shown[:, 1].mask.all(), "what never occurs stands apart"
    assert [label.get_text() for label in joint.get_xticklabels()] == ["1", "10", "never"]
    seen_only = figures.joint_distribution(RowDistribution.of([(counts[1:], dims[1:])], embedding_dim=4))
    assert "never" not in [label.get_text() for label in seen_only.axes[0].get_xticklabels()]


def test_alpha_distribution_draws_the_dimensions_that_are_left_and_counts_the_others() -> None:
    (axis,) = figures.alpha_distribution({"8": make_alpha()}).axes
    dots, rings = axis.lines[::2], axis.lines[1::2]
    assert [len(dot.get_ydata()) for dot in dots] == [8, 6, 4, 2]
    assert all((abs(dot.get_xdata() - block) < 0.4).all() for block, dot in enumerate(dots))
    assert [float(ring.get_ydata()[0]) for ring in rings] == pytest.approx(make_alpha().quantile(0.5, dim=1).tolist())
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0\n0%", "1\n25%", "2\n50%", "3\n75%"]
    panels = figures.alpha_distribution({"0": make_alpha(), "tables of D = 8": make_alpha(30, 4)}).axes
    assert [panel.get_title(loc="left") for panel in panels] == ["0", "tables of D = 8"]
    assert len(panels[1].get_xticks()) == 8


def tick_boxes(axis: Axes) -> list[Bbox]:
    """Where the texts of the x ticks that can be seen stand, from left to right."""
    axis.figure.canvas.draw()
    low, high = axis.get_xlim()
    labels = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
    return [label.get_window_extent() for at, label in labels if low <= at <= high]


@pytest.mark.parametrize("num_tables", [1, 4, 9])
@pytest.mark.parametrize("num_blocks", [5, 8, 12, 30])
def test_ticks_of_the_alpha_distribution_do_not_run_into_each_other(num_tables: int, num_blocks: int) -> None:
    alpha = {f"table {index}": torch.zeros(num_blocks, 8) for index in range(num_tables)}
    boxes = tick_boxes(figures.alpha_distribution(alpha).axes[0])
    assert len(boxes) >= 4
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


@pytest.mark.parametrize("settings", [range(4, 68, 4), range(960, 1025), (60, 62, 64), (8, 16, 32, 64)])
def test_ticks_of_a_setting_do_not_run_into_each_other_and_end_with_the_largest(settings: Sequence[int]) -> None:
    series = {"dnis at 4": [(d, make_row()) for d in settings]}
    (axis,) = figures.quality_against_setting(series, "D", "auc", higher_is_better=True).axes
    boxes = tick_boxes(axis)
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
    assert len(boxes) >= 3
    assert axis.get_xticks()[-1] == settings[-1]


def test_pruning_rate_figure_compares_pruning_methods_only() -> None:
    figure = figures.quality_against_pruning_rate(make_rows(), "auc", higher_is_better=True)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dnis", "magnitude", "dense"]
    (axis,) = figure.axes
    assert axis.lines[0].get_xydata().tolist() == [pytest.approx([100 * (1 - (1600 + 1592) / 2 / 6400), 0.8105])]
    assert axis.lines[1].get_xdata().tolist() == [75.0]
    assert axis.lines[2].get_xdata().tolist() == [0.0]
    gone = figures.quality_against_pruning_rate([make_row("dnis", 6400.0, parameters=0)], "auc", higher_is_better=True)
    assert gone.axes[0].lines[0].get_xdata().tolist() == [100.0]
    with pytest.raises(ValueError, match="expected a row of DNIS or of pruning"):
        figures.quality_against_pruning_rate([make_row("uniform")], "auc", higher_is_better=True)


def test_setting_figure_draws_means_over_seeds_and_their_deviation() -> None:
    rows = [(d, make_row(seed=seed, metrics={"auc": d / 100 + seed / 10})) for d in (16, 4) for seed in (0, 1)]
    rows.append((8, make_row(metrics={})))
    series = {"dnis": rows, "dense": [(4, make_row("dense", 1.0, metrics={"auc": 0.5}))], "none": []}
    figure = figures.quality_against_setting(series, "D", "auc", higher_is_better=True)
    (axis,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dnis", "dense"]
    assert axis.lines[0].get_xydata().tolist() == [pytest.approx([4, 0.09]), pytest.approx([16, 0.21])]
    assert axis.collections[0].get_segments()[0][:, 1].tolist() == pytest.approx(
        [0.09 - 0.0707107, 0.09 + 0.0707107], abs=1e-6
    )
    assert axis.get_xscale() == "log"
    assert axis.get_xticks().tolist() == [4, 16]
    with pytest.raises(ValueError, match="expected at least one row that has it"):
        figures.quality_against_setting(series, "D", "mse", higher_is_better=False)


def test_nothing_sticks_out_of_a_figure() -> None:
    names = [f"a_rather_long_table_name_{index}" for index in range(9)]
    series = {f"dnis at {ratio}": [(d, make_row(ratio=ratio)) for d in (4, 64, 1000)] for ratio in (2, 4, 1000)}
    counts = 10 ** torch.arange(9)
    drawn = {
        "alpha": figures.alpha_per_block({name: make_alpha(10, 64) for name in names}),
        "distribution": figures.alpha_distribution({name: make_alpha(10, 64) for name in names}),
        "blocks": figures.retained_dims_against_frequency(make_blocks(*names)),
        "joint": figures.joint_distribution(RowDistribution.of([(counts, counts.log10().long())], 64)),
        "setting": figures.quality_against_setting(series, "D", "auc", higher_is_better=True),
        "pruning": figures.quality_against_pruning_rate(make_rows(), "auc", higher_is_better=True),
        "history": figures.search_history(make_content().history),
    }
    for name, figure in drawn.items():
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.02, name
