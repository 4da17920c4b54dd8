"""Results: the JSON file, the frame, the sentence, the table and the page, against what is counted by hand."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from dnis_torchrec.report.glossary import MEANINGS
from dnis_torchrec.report.page import draw_charts, render_report, write_report
from dnis_torchrec.report.rows import (
    COMPRESS,
    UNCOMPRESSED,
    ResultRow,
    Results,
    format_count,
    format_difference,
    format_metric,
    format_number,
    format_seconds,
    is_higher_better,
    join_results,
    read_results,
    rows_frame,
    table_lines,
    terminal_table,
    write_results,
)

ROOT = Path(__file__).parents[2]


def row(method: str, compression: float, auc: float, seed: int = 0, **more) -> ResultRow:
    values = {"metrics": {"auc": auc, "loss": 1 - auc}, "selection": {"auc": auc + 0.01, "loss": 0.9 - auc}}
    served = round(4000 / compression)
    return ResultRow(method=method, compression=compression, num_bytes=served, seed=seed, seconds=1.5, **values | more)


ROWS = (
    row(UNCOMPRESSED, 1.0, 0.8),
    row(COMPRESS, 8.0, 0.81, predicted_loss_increase=-0.011, name="x8"),
    row(COMPRESS, 40.0, 0.79, predicted_loss_increase=0.02, name="x40"),
    row("int4 rows", 7.0, 0.78),
)
RESULTS = Results(
    recipe="module:recipe",
    rows=ROWS,
    primary_metric="auc",
    higher_is_better=True,
    history=(
        {"epoch": 0, "train_loss": 0.5, "selection_loss": 0.6, "phase": "plain"},
        {"epoch": 1, "train_loss": 0.4, "selection_loss": 0.5, "phase": "ramp"},
    ),
    blocks=(
        {"table": "item", "block": 0, "rows": 10, "occurrences": 7.5, "bits": 4.0},
        {"table": "item", "block": 1, "rows": 90, "occurrences": 0.0, "bits": 0.5},
    ),
    notes=("a random split",),
    commands=("dnis train module:recipe", "dnis compress run"),
    versions={"torch": "2.13.0"},
)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    again = read_results(write_results(tmp_path / "results.json", RESULTS))
    assert again == dataclasses.replace(RESULTS, versions=dict(RESULTS.versions))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("rows"),
        lambda content: content["rows"].clear(),
        lambda content: content["rows"][0].pop("seed"),
        lambda content: content["rows"][0].update(num_bytes="many"),
        lambda content: content.update(primary_metric=3),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, change) -> None:
    path = write_results(tmp_path / "results.json", RESULTS)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises((ValueError, TypeError)):
        read_results(path)


def test_the_frame_has_means_over_seeds_and_the_increase_within_each_seed() -> None:
    other = tuple(
        dataclasses.replace(r, seed=1, metrics={"auc": r.metrics["auc"] + 0.04, "loss": r.metrics["loss"] + 1})
        for r in ROWS
    )
    frame = rows_frame((*ROWS, *other), "auc").set_index("size")
    assert frame.loc["x8", "metric"] == pytest.approx(0.83)
    assert frame.loc["x8", "spread"] == pytest.approx(math.sqrt(2) * 0.02)
    assert frame.loc["x40", "loss_increase"] == pytest.approx(0.01)
    assert frame["seeds"].tolist() == [2] * 4
    assert frame["compression"].tolist() == [1.0, 7.0, 8.0, 40.0]


def without_links(page: str) -> str:
    return re.sub(r"<a [^>]+>|</a>", "", page)


def sizes(*selection_losses: float) -> Results:
    """An uncompressed model of loss 0.5, and sizes 10, 20, ... with these losses; test says the opposite."""
    losses = dict(enumerate((0.5, *selection_losses)))
    rows = [
        row(COMPRESS if n else UNCOMPRESSED, 10.0 * n or 1.0, 0.8 - n / 100, selection={"auc": 0.8, "loss": loss})
        for n, loss in losses.items()
    ]
    return dataclasses.replace(RESULTS, rows=tuple(rows))


@pytest.mark.parametrize(
    ("results", "size", "words"),
    [
        (sizes(0.5, 0.5004, 0.51), 20, ("largest size", "0.7900 at 10 times, 0.7700 at 30 times")),
        (sizes(0.49, 0.52, 0.5005), 30, ("largest size", "0.7900 at 10 times, 0.7800 at 20 times")),
        (sizes(0.52, 0.51, 0.53), 20, ("At no size", "comes closest", "0.7900 at 10 times, 0.7700 at 30 times")),
        (sizes(0.5001), 10, ("The selection loss rises by at most 0.001 of its value",)),
    ],
)
def test_the_headline_is_about_the_largest_size_within_the_tolerance(results, size, words) -> None:
    headline = results.headline
    assert headline.startswith(f"The tables are {size} times smaller. The test auc is ")
    assert ", uncompressed it is 0.8000: " in headline
    assert "(higher is better)" in headline
    assert all(word in headline for word in words)
    assert f'<div class="best"><dt>compress, compression {size}' in without_links(render_report(results))


def test_a_trained_model_has_a_page_and_a_sentence() -> None:
    trained = dataclasses.replace(RESULTS, rows=ROWS[:1])
    assert trained.headline == "The test auc of the uncompressed model is 0.8000."
    assert list(draw_charts(trained)) == ["history", "bits"]
    assert "those of 1 seed" in without_links(render_report(trained))


def test_every_word_of_a_page_leads_to_its_meaning_in_the_glossary() -> None:
    page = render_report(RESULTS)
    links, places = (set(re.findall(pattern, page)) for pattern in (r'href="#(word-[^"]+)"', r'id="(word-[^"]+)"'))
    assert links == places
    assert {"word-compression", "word-seed", "word-loss-increase", "word-plain-training"} <= links
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", text, re.MULTILINE))
    assert {word: rows.get(word, "").replace("`", "") for word in MEANINGS} == MEANINGS


def test_no_two_methods_have_one_colour() -> None:
    others = [row(f"method {n}", 2.0 + n, 0.7) for n in range(8)]
    figure = draw_charts(dataclasses.replace(RESULTS, rows=(*ROWS, *others)))["quality"]
    colours = [trace.marker.color for trace in figure.data]
    assert len(set(colours)) == len(colours) == 11


def test_table_terminal_and_page_hold_the_same_numbers(tmp_path: Path) -> None:
    lines = table_lines(RESULTS)
    assert [line[0] for line in lines[1:]] == [UNCOMPRESSED, "int4 rows", COMPRESS, COMPRESS]
    assert lines[3][5:7] == ["\N{MINUS SIGN}0.01000", "\N{MINUS SIGN}0.01100"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal_table(RESULTS))
    terminal, page = console.export_text(), write_report(tmp_path / "report.html", RESULTS).read_text()
    page = without_links(page)
    for cell in (cell for line in lines for cell in line):
        assert cell in terminal
        assert cell in page
    assert list(draw_charts(RESULTS)) == ["quality", "loss", "history", "bits"]
    assert "a random split" in page
    assert "dnis compress run" in page


def test_charts_hold_the_numbers_of_the_rows() -> None:
    charts = draw_charts(RESULTS)
    lines = {trace.name: (list(trace.x), list(trace.y)) for trace in charts["quality"].data}
    assert lines[COMPRESS] == ([8.0, 40.0], [0.81, 0.79])
    measured = {trace.name: list(trace.y) for trace in charts["loss"].data}
    assert measured["predicted"] == [-0.011, 0.02]
    assert measured["measured on test"] == pytest.approx([-0.01, 0.01])
    assert list(charts["history"].data[1].y) == [0.6, 0.5]
    assert list(charts["bits"].data[0].y) == [0.5, 4.0]


def test_a_page_without_history_and_metric_has_no_empty_chart() -> None:
    bare = dataclasses.replace(RESULTS, history=(), blocks=(), primary_metric="ndcg")
    assert list(draw_charts(bare)) == ["loss"]
    assert "chart-quality" not in render_report(bare)


def test_names_of_others_cannot_add_markup() -> None:
    name = "</script><script>alert(1)</script>"
    hostile = dataclasses.replace(
        RESULTS, recipe=name, rows=(*ROWS, row(name, 3.0, 0.7)), notes=(name,), commands=(name,), versions={name: name}
    )
    page = render_report(hostile)
    assert name not in page
    assert page.count("<script>") == 2
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2


def test_runs_are_joined_on_one_page() -> None:
    other = dataclasses.replace(RESULTS, rows=(row(COMPRESS, 8.0, 0.82, seed=1, name="x8"),), notes=("another",))
    joined = join_results([RESULTS, other])
    assert len(joined.rows) == 5
    assert joined.notes == ("a random split", "another")
    for field, value in (("primary_metric", "mse"), ("split", "recent")):
        with pytest.raises(ValueError, match=value):
            join_results([RESULTS, dataclasses.replace(other, **{field: value})])
    with pytest.warns(UserWarning, match=r"other losses: uncompressed \(0\.2000 and 0\.3000\)\. Only the last"):
        assert join_results([RESULTS, dataclasses.replace(RESULTS, rows=(row(UNCOMPRESSED, 1.0, 0.7),))]).notes[1:]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (format_metric, 0.12345, "0.1235"),
        (format_metric, math.nan, "-"),
        (format_metric, 1234.5, "1234"),
        (format_difference, -0.00001, "0.0000"),
        (format_difference, 0.5, "+0.5000"),
        (format_count, 999_600, "1M"),
        (format_number, 0.0001234, "0.000123"),
        (format_seconds, 3599.9, "1 h 0 min"),
        (format_seconds, 7260, "2 h 1 min"),
        (is_higher_better, "test_auc", True),
        (is_higher_better, "recall@10", True),
        (is_higher_better, "logloss", False),
        (is_higher_better, "speed", None),
    ],
)
def test_numbers_are_printed_alike_everywhere(function, value, text) -> None:
    assert function(value) == text
