"""Tests of dnis_torchrec.report: rows on disk, figures, the page, tables."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
import torch
from rich.console import Console

from dnis_torchrec.report import BlockSummary, ReportContent, ReportRow, tables
from dnis_torchrec.report.content import read_report_rows, seed_groups, write_rows
from dnis_torchrec.report.page import render_report, write_report
from dnis_torchrec.report.provenance import Step
from tests.report.pages import PageReader, assert_runs_its_own_scripts_alone, without_plotly

HOSTILE = "<script>alert('x')</script>--><img src=\"https://example.org/x.png\" onerror=alert(1)>"
SECTIONS = ["summary", "quality", "search", "blocks", "bytes", "reproduce", "versions", "notes"]


def make_row(method: str = "dnis", ratio: float = 4.0, seed: int = 0, **changes: object) -> ReportRow:
    sizes = {"dense_fp32": 25_600, "csr_fp32": int(32_000 / ratio)}
    metrics = {"auc": 0.8 - 0.01 * math.log(ratio) + 0.001 * seed, "logloss": 0.5}
    fields = {
        "parameters": int(6400 / ratio),
        "dense_parameters": 6400,
        "bytes": sizes,
        "metrics": metrics,
        "seconds": 12.0,
    }
    return ReportRow(**({"method": method, "compression": ratio, "seed": seed} | fields | changes))


def make_rows() -> tuple[ReportRow, ...]:
    rows = []
    for seed in (0, 1):
        rows += [make_row("dense", 1.0, seed), make_row("uniform", 2.0, seed), make_row("uniform", 4.0, seed)]
        rows += [make_row("magnitude", 4.0, seed, metrics={"auc": 0.7 + 0.001 * seed, "logloss": 0.6})]
        rows += [make_row("dnis", 4.0 + 0.02 * seed, seed, metrics={"auc": 0.81 + 0.001 * seed, "logloss": 0.49})]
    return tuple(rows)


def make_blocks(*names: str) -> tuple[BlockSummary, ...]:
    dims = [8, 4, 1, 0]
    counts = [{"num_rows": 10 * (b + 1), "occurrences": 0 if b == 3 else 10 ** (5 - b)} for b in range(4)]
    return tuple(
        BlockSummary(table=table, block=block, retained_dims=dims[block], embedding_dim=8, **counts[block])
        for table in names
        for block in range(4)
    )


def make_alpha(num_blocks: int = 4, embedding_dim: int = 8) -> torch.Tensor:
    kept = torch.arange(embedding_dim) < embedding_dim - 2 * torch.arange(num_blocks).unsqueeze(1)
    return kept * torch.linspace(0.1, 1.0, embedding_dim)


def make_content(**changes: object) -> ReportContent:
    keys = ("step", "epoch", "phase", "train_loss", "selection_loss", "alpha_density", "alpha_mean")
    phases = ("plain", "plain", "ramp", "release", "release", "release")
    history = tuple(
        dict(zip(keys, (10.0 * e, e, phase, 1 / (e + 1), 1.1 / (e + 1), 1 - e / 10, 1 - e / 9), strict=True))
        for e, phase in enumerate(phases)
    )
    fields = {
        "title": "A title",
        "recipe": "examples.synthetic:dlrm",
        "configuration": {"seed": 0, "search": {"compression": 4.0}},
        "rows": make_rows(),
        "primary_metric": "auc",
        "higher_is_better": True,
        "alpha": {"8": make_alpha()},
        "blocks": make_blocks("user", "movie"),
        "history": history,
        "notes": ("A note on the data.",),
        "versions": {"torch": "2.13.0"},
    }
    return ReportContent(**(fields | changes))


# Rows


def test_row_round_trip_through_json() -> None:
    row = make_row()
    described = json.loads(json.dumps(row.to_json()))
    assert set(described) == {
        "method", "compression", "parameters", "dense_parameters", "bytes", "metrics", "seed", "seconds"
    }  # fmt: skip
    assert ReportRow.from_json(described) == row


def test_extra_keys_are_left_out() -> None:
    described = make_row().to_json() | {"git": "abc"}
    assert ReportRow.from_json(described) == make_row()
    assert "git" not in ReportRow.from_json(described).to_json()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"method": ""}, ValueError, "ReportRow.method: expected a non-empty string"),
        ({"method": 3}, TypeError, "ReportRow.method: expected a string, got 3"),
        ({"compression": 0}, ValueError, r"compression: expected a finite number > 0, got 0"),
        ({"compression": math.inf}, ValueError, r"compression: expected a finite number > 0, got inf"),
        ({"compression": "4"}, TypeError, "compression: expected a number"),
        ({"compression": True}, TypeError, "compression: expected a number"),
        ({"parameters": -1}, ValueError, r"parameters: expected an integer >= 0, got -1"),
        ({"parameters": 1.5}, TypeError, "parameters: expected an integer"),
        ({"bytes": {"csr_fp32": -4}}, ValueError, r"bytes\['csr_fp32'\]: expected an integer >= 0"),
        ({"bytes": {"": 4}}, ValueError, "bytes name: expected a non-empty string"),
        ({"bytes": [4]}, TypeError, "bytes: expected a mapping"),
        ({"metrics": {"auc": math.nan}}, ValueError, r"metrics\['auc'\]: expected a finite number, got nan; leave out"),
        ({"metrics": {"auc": "0.8"}}, TypeError, r"metrics\['auc'\]: expected a number"),
        ({"metrics": None}, TypeError, "metrics: expected a mapping"),
        ({"seed": -1}, ValueError, "seed: expected an integer >= 0"),
        ({"seed": 0.0}, TypeError, "seed: expected an integer"),
        ({"seconds": -0.1}, ValueError, "seconds: expected a finite number >= 0"),
        ({"seconds": math.nan}, ValueError, "seconds: expected a finite number >= 0"),
    ],
)
def test_row_validation(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_row(**changes)
    described = make_row().to_json() | changes
    with pytest.raises(ValueError, match="report row: .*" + message):
        ReportRow.from_json(described)


def test_missing_keys_are_named() -> None:
    described = make_row().to_json()
    del described["seed"], described["metrics"]
    with pytest.raises(ValueError, match=r"line 3: expected the keys .*, got none of metrics, seed"):
        ReportRow.from_json(described, place="line 3")


def test_rows_on_disk(tmp_path) -> None:
    path = write_rows(tmp_path / "report.json", make_rows(), recipe="a:b", notes=["n"])
    assert read_report_rows(path) == make_rows()
    assert json.loads(path.read_text())["recipe"] == "a:b"
    assert write_rows(path, [make_row()]) == path
    assert read_report_rows(path) == (make_row(),)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch) -> None:
    path = write_rows(tmp_path / "report.json", [make_row()])
    with pytest.raises(TypeError, match="expected JSON-able values"):
        write_rows(path, [], extra=object())
    with pytest.raises(ValueError, match="expected JSON-able values"):
        write_rows(path, [], extra=math.nan)

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_rows(path, [])
    assert read_report_rows(path) == (make_row(),)
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON, got Expecting"),
        ('{"rows": [NaN]}', "the constant NaN"),
        ("[]", "expected an object, got a list of 0"),
        ('{"rows": {}}', "field rows: expected a list, got an object"),
        ('{"rows": [3]}', r"field rows\[0\]: expected an object, got 3"),
    ],
)
def test_damaged_report_is_refused_by_name(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"report\.json.*" + message):
        read_report_rows(path)


def test_missing_files_and_folders(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: expected a report\.json, got no such file"):
        read_report_rows(tmp_path / "none.json")
    with pytest.raises(ValueError, match="expected an existing folder"):
        write_rows(tmp_path / "no" / "report.json", [])


def test_seeds_are_grouped_and_compared_in_pairs() -> None:
    groups = seed_groups(make_rows())
    assert [group.method for group in groups] == ["dense", "uniform", "magnitude", "uniform", "dnis"]
    assert all(group.seeds == (0, 1) for group in groups)
    lone = seed_groups([make_row("uniform", 4.0, 1, metrics={"auc": 0.5})])[0]
    assert groups[4].difference(lone, "auc") == (pytest.approx(0.311), 1)
    assert groups[4].difference(lone, "logloss") is None
    assert groups[4].deviation("auc") == pytest.approx(0.001 / math.sqrt(2))
    same_seed = seed_groups([make_row("dnis", 4.0), make_row("dnis", 4.01)])
    assert [len(group.rows) for group in same_seed] == [1, 1]


# Content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": " "}, "BlockSummary.table: expected a non-empty string"),
        ({"retained_dims": 9}, "table 'user' block 0: expected retained_dims <= embedding_dim = 8, got 9"),
        ({"num_rows": -1}, "num_rows: expected an integer >= 0"),
        ({"occurrences": -1}, "occurrences: expected an integer >= 0"),
        ({"embedding_dim": 0, "retained_dims": 0}, "embedding_dim: expected an integer > 0"),
    ],
)
def test_block_validation(changes: dict, message: str) -> None:
    fields = {"table": "user", "block": 0, "num_rows": 1, "occurrences": 1, "retained_dims": 1, "embedding_dim": 8}
    with pytest.raises(ValueError, match=message):
        BlockSummary(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"title": ""}, ValueError, "ReportContent.title"),
        ({"rows": ()}, ValueError, "ReportContent.rows: expected at least one row"),
        ({"configuration": {"f": print}}, TypeError, "ReportContent.configuration: expected JSON-able"),
        ({"alpha": {"8": torch.zeros(3)}}, ValueError, r"alpha '8': expected a non-empty \(S, D\), got \(3,\)"),
        ({"alpha": {"8": torch.full((2, 2), 1.5)}}, ValueError, r"alpha '8': expected values in \[0, 1\]"),
        ({"alpha": {"8": torch.full((2, 2), math.nan)}}, ValueError, r"alpha '8': expected values in \[0, 1\]"),
    ],
)
def test_content_validation(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_content(**changes)


def test_subject_is_chosen_by_position_not_by_metric() -> None:
    rows = (make_row("uniform", 2.0), make_row("dnis", 8.0), make_row("dnis", 2.0))
    assert make_content(rows=rows).subject.compression == 8.0
    assert make_content(rows=rows[:1]).subject.method == "uniform"


# Page


def test_page_holds_all_sections_in_order_and_loads_nothing() -> None:
    page = render_report(make_content())
    assert_runs_its_own_scripts_alone(page)
    reader = PageReader(page)
    assert [section for section in reader.values("id") if section in SECTIONS] == SECTIONS
    names = ["quality", "pruning-rate", "history", "alpha", "alpha-distribution", "frequency", "bytes"]
    assert [name for name in reader.values("id") if name.startswith("figure-")] == [f"figure-{n}" for n in names]
    assert "link" not in reader.tags
    assert "://" not in without_plotly(page)
    assert reader.values("src", "xlink:href", "srcset", "data", "action") == []
    ids = reader.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in reader.values("href")} <= set(ids)


def test_page_tells_key_numbers_and_marks_the_best() -> None:
    reader = PageReader(render_report(make_content()))
    text = " ".join(reader.text.split())
    assert "4.01 times smaller: test auc 0.8105, +0.0100 against dense, +0.0239 against uniform of the same" in text
    assert "0.00638 MB instead of 0.0256 MB" in text
    assert "vs uncompressed 0.0100 better" in text
    assert "vs uniform, same size 0.0239 better" in text
    assert "mean of 2 paired seeds" in text
    assert "A note on the data." in text
    assert [value[:6] for value in reader.best] == ["0.8105", "0.4900"]
    worse = PageReader(render_report(make_content(higher_is_better=False)))
    assert "vs uncompressed 0.0100 worse" in " ".join(worse.text.split())


def test_page_escapes_hostile_names() -> None:
    content = make_content(
        title=HOSTILE,
        recipe=HOSTILE,
        configuration={HOSTILE: HOSTILE},
        rows=(make_row(HOSTILE, bytes={HOSTILE: 5}, metrics={HOSTILE: 1.0}), make_row("_x"), make_row("$a$")),
        primary_metric=HOSTILE,
        alpha={HOSTILE: make_alpha(), "_x": make_alpha(), "$\\frac": make_alpha()},
        blocks=make_blocks(HOSTILE, "_x", "$\\frac$"),
        notes=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
    )
    page = render_report(content)
    reader = PageReader(page)
    assert_runs_its_own_scripts_alone(page)
    assert "img" not in reader.tags
    data = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert len(data) == 6
    assert not [chart for chart in data if "<" in chart], "nothing in a chart ends its element"
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert not [value for value in reader.values("src", "href", "xlink:href") if "example.org" in value]
    assert reader.text.count(HOSTILE) >= 8


def test_page_is_deterministic_and_written_atomically(tmp_path) -> None:
    path = tmp_path / "report.html"
    path.write_text("an older one")
    assert write_report(path, make_content()) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == render_report(make_content())


@pytest.mark.parametrize(
    ("changes", "num_figures", "told"),
    [
        ({"history": ()}, 6, "No history of a search was recorded."),
        ({"alpha": {}}, 5, "No alpha was recorded."),
        ({"blocks": ()}, 6, "No blocks were recorded."),
        ({"rows": (make_row("dnis", bytes={}),)}, 5, "No export form was measured."),
        ({"primary_metric": "mse"}, 5, "No row has the metric mse"),
        ({"rows": (make_row("dnis", metrics={}),)}, 5, "not measured"),
        ({"versions": {}}, 7, "No versions were recorded."),
        ({"rows": (make_row("dnis"),), "blocks": make_blocks("only")}, 6, "0.0064 MB instead of 0.0256 MB"),
        ({"rows": (make_row("zero", 6400.0, parameters=0),)}, 5, "hold no parameters at all"),
        ({"notes": (), "configuration": {}}, 7, "Notes and limits"),
    ],
)
def test_page_says_what_is_missing(changes: dict, num_figures: int, told: str) -> None:
    reader = PageReader(render_report(make_content(**changes)))
    assert reader.tags.count("figure") == num_figures
    assert told in " ".join(reader.text.split())
    assert [section for section in reader.values("id") if section in SECTIONS] == SECTIONS


def test_a_difference_on_fewer_seeds_than_the_mean_says_so() -> None:
    rows = (make_row("dnis", seed=0), make_row("dnis", seed=1), make_row("dense", 1.0))
    text = " ".join(PageReader(render_report(make_content(rows=rows))).text.split())
    assert "0.8000 at 1\N{MULTIPLICATION SIGN}; on the one seed that both have" in text


def test_rivals_of_another_size_or_seed_are_not_compared() -> None:
    far = make_content(rows=(make_row("dnis", 8.0), make_row("uniform", 4.0)))
    assert "same size" not in render_report(far).split('id="quality"')[0]
    other_seed = make_content(rows=(make_row("dnis", 8.0), make_row("uniform", 8.0, seed=1)))
    assert "same size" not in render_report(other_seed).split('id="quality"')[0]


def test_the_head_tells_command_date_machine_and_every_step_and_so_does_the_end() -> None:
    train = Step(job="train", folder="runs/mf")
    made = {"command": "dnis search m:f --out runs/x20", "date": "2026-11-27 04:30 UTC", "machine": "Linux, 2 cores"}
    steps = (train, Step(job="search", folder="runs/x20", **made))
    page = render_report(make_content(provenance=steps, reproduce=("dnis again",)))
    text = " ".join(PageReader(page).text.split())
    told = "Recipe examples.synthetic:dlrm · seeds 0, 1 · 2026-11-27 04:30 UTC · Linux, 2 cores · torch 2.13.0"
    assert f"{told} dnis search m:f --out runs/x20 · steps: train → search" in text
    end = page[page.index('id="reproduce"') :]
    assert "<pre>dnis again</pre>" in end
    rows = [" ".join(PageReader(row).text.split()) for row in re.findall("<tr><th scope=.row.*</tr>", end)]
    assert rows[:2] == ["train runs/mf not recorded not recorded", f"search runs/x20 {made['date']} {made['machine']}"]
    bare = render_report(make_content())
    assert "No command was recorded." in bare
    assert "Steps from the first" not in bare


def test_every_table_has_a_caption_and_headings_with_scope() -> None:
    page = without_plotly(render_report(make_content()))
    tables_ = re.findall("<table.*?</table>", page, flags=re.DOTALL)
    assert len(tables_) == 4
    for table in tables_:
        assert "<caption>" in table
        assert table.count("<th ") == table.count("scope=")
        assert table.count('<th scope="row"') == table.count("<tr>") + table.count("<tr class") - 1


# Tables


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.00001234, "0.0000123"),
        (0.5, "0.5"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1k"),
        (99_960, "100k"),
        (999_600, "1M"),
        (999.6e6, "1G"),
        (1.2e13, "12,000G"),
    ],
)
def test_counts_and_ratios_have_no_exponent(value: float, told: str) -> None:
    assert tables.format_count(value) == told
    assert tables.format_ratio(value) == told + tables.TIMES


def test_sizes_have_no_exponent() -> None:
    sizes = [tables.format_megabytes(size) for size in (1, 32, 99_960_000, 12_345_678_901)]
    assert sizes == ["0.000001 MB", "0.000032 MB", "100 MB", "12,346 MB"]


def test_frame_has_a_column_per_form_and_metric() -> None:
    frame = tables.rows_frame([make_row(), make_row("dense", 1.0, metrics={"mse": 2.0}, bytes={})])
    fields = ["method", "seed", "compression", "parameters", "seconds"]
    forms = ["bytes.dense_fp32", "bytes.csr_fp32"]
    assert list(frame.columns) == [*fields, *forms, "metrics.auc", "metrics.logloss", "metrics.mse"]
    assert frame["metrics.mse"].isna().tolist() == [True, False]
    assert frame["bytes.csr_fp32"].isna().tolist() == [False, True]
    assert list(tables.rows_frame([]).columns)[:2] == ["method", "seed"]


def test_terminal_table() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(tables.rows_table((*make_rows(), make_row("[red]odd[/red]", 16.0, metrics={}))))
    text = console.export_text(clear=False)
    lines = [line.split() for line in text.splitlines()]
    first = [line[0] for line in lines]
    assert first == ["method", "dense", "uniform", "magnitude", "uniform", "dnis", "[red]odd[/red]"]
    assert "0.8105" in text
    bold = re.findall(r"<span[^>]*font-weight: bold[^>]*>\s*(0\.\d+)", console.export_html(inline_styles=True))
    assert bold == ["0.8105", "0.4900"]
    some = Console(width=140, record=True, file=io.StringIO())
    some.print(tables.rows_table(make_rows(), ["logloss"]))
    shown = some.export_text()
    assert "0.4900" in shown
    assert "auc" not in shown
    assert "0.8105" not in shown
