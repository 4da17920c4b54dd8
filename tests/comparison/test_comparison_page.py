"""A comparison as tables, as files and as a page: in which order, with which words, and what is left out."""

from __future__ import annotations

import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from dnis_torchrec.comparison.cells import Cell
from dnis_torchrec.comparison.outputs import comparison_frame, comparison_table, write_comparison_json
from dnis_torchrec.comparison.summary import comparison_rows
from dnis_torchrec.report import read_report_rows
from dnis_torchrec.report.compare_lines import compared_lines, cost_lines, missing_reasons
from dnis_torchrec.report.compare_page import render_comparison
from dnis_torchrec.report.provenance import Step
from dnis_torchrec.report.tables import TIMES
from tests.comparison.test_comparison import LEVELS, make_content, make_result, make_rows
from tests.report.pages import assert_runs_its_own_scripts_alone, chart, without_plotly


def test_table_and_csv_and_json_say_the_same(tmp_path: Path) -> None:
    crashed = {f"dnis_{seed}": "RuntimeError: no" for seed in LEVELS}
    content = make_content(make_rows(**crashed))
    out = io.StringIO()
    Console(file=out, width=150).print(comparison_table(content))
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert [line.split()[0] for line in lines] == ["method", "dense", "uniform", "uniform", "dnis"]
    assert "0.8200 ± 0.0917" in lines[3]
    assert "+0.0800 ± 0.0400" in lines[3]
    assert lines[1].endswith("*")
    frame = comparison_frame(content.rows)
    assert frame["metrics.mse"][2] == pytest.approx(0.82)
    assert frame["difference.mse.mean"][2] == pytest.approx(0.08)
    assert frame["seeds"][2] == "0 1 2"
    assert pd.isna(frame["metrics.mse"][3])
    assert frame["reason"].tolist() == ["", "", "", "crashed: RuntimeError: no"]
    write_comparison_json(tmp_path / "a.json", content)
    described = json.loads((tmp_path / "a.json").read_text())
    assert described["rows"] == json.loads(json.dumps([row.to_json() for row in content.rows]))
    assert [row.method for row in read_report_rows(tmp_path / "a.json")] == ["dense", "uniform", "uniform"]
    write_comparison_json(tmp_path / "b.json", make_content(make_rows()))
    assert [row.method for row in read_report_rows(tmp_path / "b.json")] == ["dense", "uniform", "uniform", "dnis"]


def test_a_narrow_table_shows_the_metrics_asked_for() -> None:
    cell = Cell(method="dense", size=None, seed=0)
    result = make_result(cell, 0.7, 4096)
    row = replace(result.trained.row, metrics={"mse": 0.7, "mae": 0.61, "ne": 0.52})
    result = replace(result, trained=replace(result.trained, row=row))
    rows = comparison_rows([cell], {cell: result}, {}, primary_metric="mse", higher_is_better=False)
    out = io.StringIO()
    Console(file=out, width=150).print(comparison_table(make_content(rows), ["mse", "ne"]))
    header, line = out.getvalue().splitlines()
    assert header.split()[6:8] == ["mse", "ne"]
    assert line.split()[7:9] == ["0.7000", "0.5200"]


def test_a_size_is_told_best_first_and_its_best_heads_the_page() -> None:
    content = make_content(make_rows())
    assert [(line.size, line.row.method) for line in compared_lines(content)] == [
        ("-", "dense"),
        ("2", "uniform"),
        ("4", "dnis"),
        ("4", "uniform"),
    ]
    higher = replace(content, higher_is_better=True)
    assert [line.row.method for line in compared_lines(higher)][-2:] == ["uniform", "dnis"]
    page = render_comparison(content)
    told = "Best test mse on tests.tiny:demo, at the same bytes: uniform at compression 2; dnis at compression 4."
    assert told in page
    assert "Best at compression 4: dnis" in page
    assert "+0.0200 ± 0.0100 against dense; next: uniform, 0.8200" in page
    costs = {line.method: line.cells for line in cost_lines(content)}
    assert costs["uniform"] == (("", ""), *[("40.0 s", f"4 runs, the one taken 11.0 s, 3.6{TIMES} dense")] * 2)


def result_rows(results: dict[tuple[str, float | None], dict[int, float]], forms: dict[str, str]) -> tuple:
    """Rows of methods with a loss for each seed, in some form."""
    finished = {}
    for (method, size), losses in results.items():
        for seed, loss in losses.items():
            cell = Cell(method=method, size=size, seed=seed)
            finished[cell] = make_result(cell, loss, int(4096 / (size or 1)), form=forms.get(method, "dense_fp32"))
    return comparison_rows(list(finished), finished, {}, primary_metric="mse", higher_is_better=False)


def test_the_page_leads_with_the_chart_and_marks_precisions() -> None:
    losses = {("dense", None): 0.70, ("uniform", 4): 0.72, ("compress", 4): 0.71}
    forms = {"uniform": "dense_int4", "compress": "packed"}
    rows = result_rows({key: {0: loss} for key, loss in losses.items()}, forms)
    assert [row.to_json()["precision"] for row in rows] == ["fp32", "int4", "codes"]
    page = render_comparison(make_content(rows))
    places = [page.index(part) for part in ("Best test mse", "Best at compression 4", 'id="figure-quality"', "<table")]
    assert places == sorted(places)
    told = {trace["name"]: trace["hovertext"][0].split("<br>") for trace in chart(page, "quality")["data"]}
    precisions = {name: [line for line in lines if "precision" in line] for name, lines in told.items()}
    assert precisions == {"dense": ["precision fp32"], "uniform": ["precision int4"], "compress": ["precision codes"]}
    assert "<td>int4</td>" in page
    out = io.StringIO()
    Console(file=out, width=160).print(comparison_table(make_content(rows)))
    assert [line.split()[5] for line in out.getvalue().splitlines() if "compress " in line] == ["codes"]


def test_one_seed_and_a_lead_below_its_spread_are_said_in_words() -> None:
    alone = render_comparison(make_content(result_rows({("uniform", 4): {0: 0.72}, ("qr", 4): {0: 0.71}}, {})))
    assert "One seed alone: another one may say otherwise." in alone
    assert "next: uniform, 0.7200, of one seed alone" in alone
    unclear = {("uniform", 4): {0: 0.72, 1: 0.74, 2: 0.70}, ("qr", 4): {0: 0.71, 1: 0.70, 2: 0.74}}
    page = render_comparison(make_content(result_rows(unclear, {})))
    assert "next: uniform, 0.7200, a lead below its spread over seeds" in page
    assert "One seed" not in page
    clear = {("uniform", 4): {0: 0.72, 1: 0.75, 2: 0.78}, ("qr", 4): {0: 0.71, 1: 0.74, 2: 0.77}}
    page = render_comparison(make_content(result_rows(clear, {})))
    assert "next: uniform, 0.7500<" in page


def test_no_embeddings_is_a_level_not_a_point() -> None:
    cells = [
        Cell(method=method, size=size, seed=0)
        for method, size in (("no-embeddings", None), ("dense", None), ("dnis", 4))
    ]
    results = dict(
        zip(
            cells,
            (make_result(cells[0], 0.9, 8), make_result(cells[1], 0.7, 4096), make_result(cells[2], 0.71, 1024)),
            strict=True,
        )
    )
    rows = comparison_rows(cells, results, {}, primary_metric="mse", higher_is_better=False)
    assert [row.pareto for row in rows] == [False, True, True]
    page = render_comparison(make_content(rows))
    assert "Uncompressed, and with every embedding zero" in page
    assert [trace["name"] for trace in chart(page, "quality")["data"]] == ["dnis", "dense"]
    assert "Compression 4: 0.00102 MB" in page


def test_rows_of_a_ranking_have_the_mean_of_its_seven_metrics_first() -> None:
    cell = Cell(method="dense", size=None, seed=0)
    values = {
        f"{name}@{k}": k / 10 + index / 100 for index, name in enumerate(("recall", "mrr", "ndcg")) for k in (1, 5, 10)
    }
    result = make_result(cell, 0.5, 100)
    result = replace(
        result, trained=replace(result.trained, row=replace(result.trained.row, metrics={"loss": 0.5} | values))
    )
    (row,) = comparison_rows([cell], {cell: result}, {}, primary_metric="ndcg@10", higher_is_better=True)
    seven = [0.1, 0.5, 1.0, 0.51, 1.01, 0.52, 1.02]
    assert row.to_json()["metrics"]["recall_mrr_ndcg"] == pytest.approx(statistics.fmean(seven))
    assert replace(make_content((row,)), primary_metric="ndcg@10").metrics[:2] == ["ndcg@10", "recall_mrr_ndcg"]


def test_dnis_stands_beside_network_pruning_where_both_were_trained() -> None:
    rows = make_rows()
    assert "figure-pruning-rate" not in render_comparison(make_content(rows))
    cells = [
        Cell(method=method, size=4, seed=0, with_validation=on)
        for method, on in (("magnitude", False), ("magnitude", True))
    ]
    pruned = comparison_rows(
        cells, {cell: make_result(cell, 0.8, 1024) for cell in cells}, {}, primary_metric="mse", higher_is_better=False
    )
    page = render_comparison(make_content((*rows, *pruned)))
    assert [trace["name"] for trace in chart(page, "pruning-rate")["data"]] == ["dnis", "magnitude", "dense"]


def test_one_reason_is_told_once_for_all_rows_that_have_it() -> None:
    content = make_content(
        make_rows(**{f"{method}_{seed}": "E: no" for method in ("uniform", "dnis") for seed in LEVELS})
    )
    assert missing_reasons(content) == [("uniform at 2, uniform at 4, dnis at 4", "crashed: E: no")]


def test_page_shows_every_row_loads_nothing_and_escapes() -> None:
    crashed = {f"dnis_{seed}": "<script>alert(1)</script>" for seed in LEVELS}
    page = render_comparison(make_content(make_rows(**crashed)))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "://" not in without_plotly(page)
    assert "src=" not in without_plotly(page)
    assert_runs_its_own_scripts_alone(page)
    for section in ("summary", "quality", "cost", "bytes", "rules", "reproduce", "versions"):
        assert f'<section id="{section}">' in page
    assert '<td class="worse">+0.0800 ± 0.0400</td>' in page
    assert 'class="best">0.8200' in page
    assert "csr_fp32" in page
    assert 'id="chart-quality"' in page
    assert "while up to 2 cells shared the machine" in page


def test_page_of_nothing_but_crashes() -> None:
    everything = {f"{method}_{seed}": "E: no" for method in ("dense", "uniform", "dnis") for seed in LEVELS}
    page = render_comparison(make_content(make_rows(**everything)))
    assert "No method has finished" in page
    assert "E: no" in page
    assert page.count("<script>") == 1, "nothing to draw"


def test_the_page_and_its_json_tell_the_command_that_compared(tmp_path: Path) -> None:
    step = Step(job="compare", folder="out", command="dnis compare m:f --out out", date="today", machine="two cores")
    content = replace(make_content(make_rows()), provenance=(step,))
    page = render_comparison(content)
    assert "<pre>dnis compare m:f --out out</pre>" in page.partition('id="reproduce"')[2]
    assert "today · two cores" in page
    write_comparison_json(tmp_path / "a.json", content)
    assert json.loads((tmp_path / "a.json").read_text())["provenance"] == [step.to_json()]


def test_three_tiles_tell_the_best_of_the_smallest_the_largest_and_a_size_between() -> None:
    losses = {("uniform", size): {0: 0.7 + size / 100} for size in (2, 4, 8, 16, 32)}
    page = render_comparison(make_content(result_rows(losses, {})))
    assert re.findall("Best at compression ([0-9]+): uniform", page) == ["2", "8", "32"]
