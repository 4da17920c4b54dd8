"""Comparisons without processes: plan, splits, cells on disk, rows, spread, the Pareto front, tables and the page."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.artifact import read_manifest
from dnis_torchrec.comparison import plan, registry
from dnis_torchrec.comparison.cells import (
    Cell,
    CellResult,
    CellTask,
    TrainedCell,
    forget_crash,
    read_crash,
    read_result,
    write_crash,
)
from dnis_torchrec.comparison.methods import METHODS
from dnis_torchrec.comparison.outputs import joined_versions, missing_lines
from dnis_torchrec.comparison.plan import Comparison, parse_names, parse_seeds, parse_sizes
from dnis_torchrec.comparison.summary import comparison_rows
from dnis_torchrec.comparison.worker import run_cell
from dnis_torchrec.data.over_ranks import NotedBatches
from dnis_torchrec.data.recipe import load_recipe
from dnis_torchrec.forms import form_named
from dnis_torchrec.jobs.artifact_jobs import run_evaluate
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.compare_content import ComparisonContent, ComparisonRow
from dnis_torchrec.report.compare_lines import compared_lines
from tests.tiny import make_collection, make_recipe

ROOT = Path(__file__).parents[2]
REGISTRY = "tests.comparison_methods:METHODS"
LEVELS = {0: 0.70, 1: 0.72, 2: 0.80}
"""Test loss of the uncompressed model under each seed."""


def make_comparison(out: Path, **changes: object) -> Comparison:
    fields = {"recipe": "tests.tiny:demo", "data": None, "methods": ("uniform", "dnis"), "sizes": (2.0, 4.0)}
    return Comparison(**({"out": out, "registry": REGISTRY, "seeds": (0, 1), "jobs": 1} | fields | changes))


def make_result(cell: Cell, loss: float, num_bytes: int, **changes: object) -> CellResult:
    row = ReportRow(
        method=cell.row_name,
        compression=4096 / num_bytes,
        parameters=num_bytes // 4,
        dense_parameters=1024,
        bytes={"dense_fp32": num_bytes, "csr_fp32": num_bytes + 3},
        metrics={"loss": loss, "mse": loss},
        seed=cell.seed,
        seconds=10.0 + cell.seed,
    )
    fields = {"form": "dense_fp32", "embedding_bytes": num_bytes, "extra_bytes": 0, "selection_loss": loss}
    fields |= {"trials": 4, "seconds_of_trials": 40.0, "settings": {"dim": 2.0}, "device": "cpu", "cells_at_once": 2}
    in_int4 = {"dense_int4": num_bytes // 8} if cell.seed else {}
    fields["resident_bytes"] = {"csr_fp32": num_bytes + cell.seed} | in_int4
    trained = TrainedCell(**({"row": row, "dense_bytes": 4096} | fields | changes))
    return CellResult(cell=cell, rules={"patience": 3}, versions={"torch": "2"}, trained=trained)


def make_rows(**changes: str) -> tuple[ComparisonRow, ...]:
    """dense, uniform at 2 and 4, dnis at 4, under three seeds; `changes` say what crashed: dnis_0="why"."""
    cells, finished, crashes = [], {}, {}
    for seed, level in LEVELS.items():
        for method, size, change in (("dense", None, 0), ("uniform", 2, 0.02), ("uniform", 4, 0.04), ("dnis", 4, 0.01)):
            cell = Cell(method=method, size=size, seed=seed)
            cells.append(cell)
            if reason := changes.get(f"{method}_{seed}"):
                crashes[cell] = reason
            else:
                finished[cell] = make_result(cell, level + change * (1 + seed), int(4096 / (size or 1)))
    return comparison_rows(cells, finished, crashes, primary_metric="mse", higher_is_better=False)


def make_content(rows: tuple[ComparisonRow, ...]) -> ComparisonContent:
    return ComparisonContent(
        recipe="tests.tiny:demo", rows=rows, primary_metric="mse", higher_is_better=False, rules={"patience": 3}
    )


def test_plan_has_each_method_at_each_size_and_a_second_row_for_those_that_need_no_alpha(tmp_path: Path) -> None:
    comparison = make_comparison(tmp_path, seeds=(0,), methods=("uniform", "dense", "dnis"))
    assert [cell.name for cell in comparison.cells()] == [
        "dense-seed0",
        "dense+validation-seed0",
        *("uniform-size2-seed0", "uniform+validation-size2-seed0"),
        *("uniform-size4-seed0", "uniform+validation-size4-seed0"),
        *("dnis-size2-seed0", "dnis-size4-seed0"),
    ]
    by_mark = make_comparison(tmp_path, seeds=(0,), methods=("reader", "learner"), sizes=(2.0,)).cells()
    assert [cell.name for cell in by_mark[2:]] == [
        *("reader-size2-seed0", "reader+validation-size2-seed0", "learner-size2-seed0")
    ]
    without_size = make_comparison(tmp_path, seeds=(0,), methods=("no-embeddings",), registry=registry.REGISTRY).cells()
    assert [cell.name for cell in without_size] == [
        *("dense-seed0", "dense+validation-seed0", "no-embeddings-seed0", "no-embeddings+validation-seed0")
    ]
    names = [cell.name for cell in make_comparison(tmp_path, sizes=(2.0, 2.0000001, 1e7, 1.5)).cells()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": ("unifrom",)},
            "method 'unifrom': expected a known method, got 'unifrom'; did you mean 'uniform'?",
        ),
        ({"methods": ()}, "methods: expected at least one"),
        ({"methods": ("dnis", "dnis")}, "methods: expected each once"),
        ({"sizes": (2.0, 1.0)}, "sizes: expected compressions above 1, got 1.0"),
        ({"sizes": (float("nan"),)}, "sizes: expected compressions above 1, got nan"),
        ({"sizes": (2.0, 2)}, "sizes: expected each once"),
        ({"seeds": ()}, "seeds: expected at least one"),
        ({"seeds": (-1,)}, "seeds: expected integers >= 0, got -1"),
        ({"precisions": ("int3",)}, "precision 'int3': expected a known precision, got 'int3'; did you mean 'int8'"),
        ({"precisions": ()}, "precisions: expected at least one"),
        ({"precisions": ("int8", "int8")}, "precisions: expected each once"),
        ({"patience": 0}, "patience: expected at least 1, got 0"),
        ({"max_epochs": 0}, "max_epochs: expected at least 1, got 0"),
        ({"trials": 0}, "trials: expected at least 1, got 0"),
        ({"jobs": 0}, "jobs: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        make_comparison(tmp_path, **changes)


def test_a_model_that_no_cell_could_evaluate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(make_recipe(), model=make_collection(is_weighted=True))
    monkeypatch.setattr(plan, "build_recipe", lambda *_, **__: recipe)
    with pytest.raises(ValueError, match="table 'genre': expected SUM pooling of bags with weights, got MEAN"):
        plan.recipe_facts(make_comparison(tmp_path / "out"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="expected a new folder or one of a comparison"):
        make_comparison(tmp_path)
    (tmp_path / "cells").mkdir()
    make_comparison(tmp_path)
    with pytest.raises(ValueError, match=r"mine: expected a folder, got a file; choose another name"):
        make_comparison(tmp_path / "mine")


@pytest.mark.parametrize(
    ("parse", "text", "what"),
    [
        (parse_names, "a,,b", "names"),
        (parse_sizes, "2,x", "numbers"),
        (parse_sizes, "2,", "numbers"),
        (parse_seeds, "three", "a number of seeds, or seeds"),
        (parse_seeds, "1.5,", "a number of seeds, or seeds"),
        (parse_seeds, "", "a number of seeds, or seeds"),
    ],
)
def test_lists_that_are_none_are_refused(parse, text: str, what: str) -> None:
    with pytest.raises(ValueError, match=rf"--here: expected {what} with commas between them, got"):
        parse(text, "--here")


@pytest.mark.parametrize("text", ["0", "-1"])
def test_no_seed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"--seeds: expected at least one seed, got {text}$"):
        parse_seeds(text, "--seeds")


def test_rows_with_validation_see_all_of_it_and_nothing_else(gloo, tmp_path: Path) -> None:
    data, seen = make_recipe().data, {}
    for method, with_validation in (("reader", False), ("reader", True), ("learner", False)):
        cell = Cell(method=method, size=2, seed=0, with_validation=with_validation)
        run_task(tmp_path, cell)
        described = json.loads((tmp_path / f"{cell.name}.json").read_text())
        seen[cell.row_name] = described["seen"]
        assert described["rules"] == {"patience": 5, "max_epochs": 7, "trials": 2}

    def labels(*names: str) -> list:
        return sorted(batch.labels.tolist() for name in names for batch in getattr(data, name))

    for epoch in range(2):
        assert sorted(seen["reader"]["train"][epoch]) == labels("train")
        assert sorted(seen["learner"]["train"][epoch]) == labels("train")
        assert sorted(seen["reader+validation"]["train"][epoch]) == labels("train", "validation")
        for name in ("selection", "test"):
            assert sorted(seen["reader+validation"][name][epoch]) == labels(name)
    for row in seen.values():
        assert sorted(row["search"][0]) == labels("train")


def run_task(out: Path, cell: Cell, *, artifact: bool = False) -> CellResult:
    rules = {"recipe": "tests.tiny:demo", "data": None, "patience": 5, "max_epochs": 7, "trials": 2}
    folder = out / "cells" / cell.name
    CellTask(cell=cell, rules=rules, registry=REGISTRY, cells_at_once=1, artifact=artifact).write(folder)
    return run_cell(folder)


def test_a_cell_measures_what_the_method_made_against_the_uncompressed_tables(gloo, tmp_path: Path) -> None:
    cell = Cell(method="uniform", size=4.0, seed=1)
    result = run_task(tmp_path, cell, artifact=True)
    trained = result.trained
    assert trained is not None
    assert (trained.row.parameters, trained.row.compression, trained.dense_bytes) == (104, 1664 / 420, 4 * 416)
    assert (trained.form, trained.embedding_bytes, trained.extra_bytes) == ("dense_fp32", 4 * 104 + 4, 4)
    narrow = make_recipe(embedding_dim=2).model
    assert trained.network_bytes == 4 * sum(p.numel() for p in narrow.parameters()) - 4 * 104 - 4
    assert (trained.trials, trained.row.seconds, trained.seconds_of_trials) == (2, 1.5, 3.0)
    assert {"auc", "logloss"} <= set(trained.row.metrics)
    folder = tmp_path / "cells" / cell.name
    assert read_result(folder) == result
    older = json.loads((folder / "result.json").read_text())
    newer = {"network_bytes": 0, "resident_bytes": {}, "test_fingerprint": None}
    for name in newer:
        del older[name]
    assert CellResult.from_json(older).trained == replace(trained, **newer)
    test = NotedBatches(make_recipe(seed=1).data.test)
    assert len(list(test)) > 0
    assert trained.test_fingerprint == test.fingerprint != 0
    forms = json.loads((folder / "artifact" / "manifest.json").read_text())["serving_forms"]["forms"]
    held = {form["form"]: form["resident_bytes"] for form in forms if form["resident_bytes"] is not None}
    assert trained.resident_bytes == held
    assert not (folder / "work").exists()


def test_a_process_that_helps_trains_trials_of_a_cell_and_leaves_the_result_to_the_one_that_leads(
    gloo, tmp_path: Path
) -> None:
    cell = Cell(method="tries-two", size=2.0, seed=0)
    result = run_task(tmp_path, cell)
    assert (tmp_path / "helped").read_text() == "1.json"  # when the first was still being made
    assert result.trained is not None
    assert result.trained.trials == 2
    assert result.trained.row.compression == 2.0  # the other one is larger than was asked for
    assert sorted(path.name for path in (tmp_path / "cells" / cell.name).iterdir()) == ["result.json", "task.json"]


def test_a_size_that_cannot_be_met_is_a_finished_cell(gloo, tmp_path: Path) -> None:
    cell = Cell(method="modest", size=8.0, seed=0)
    result = run_task(tmp_path, cell)
    assert result.trained is None
    assert read_result(tmp_path / "cells" / cell.name) == result
    (row,) = comparison_rows([cell], {cell: result}, {}, primary_metric="auc", higher_is_better=True)
    reason = "compression: expected at most 4, got 8"
    nothing = {"seeds": [], "metrics": {}, "spread": {}, "trials": 0, "pareto": False}
    assert row.to_json() == {"method": "modest", "size": 8.0, **nothing, "reason": reason}


def test_a_method_that_cannot_work_on_the_model_is_a_finished_cell(gloo, tmp_path: Path) -> None:
    cell, spec = Cell(method="low-rank", size=2.0, seed=0), "tests.comparison.test_baselines_low_rank:cross_layers"
    folder = tmp_path / "cells" / cell.name
    rules = {"recipe": spec, "data": None, "patience": 1, "max_epochs": 1, "trials": None}
    CellTask(cell=cell, rules=rules, registry=registry.REGISTRY, cells_at_once=1, artifact=False).write(folder)
    assert "low-rank: supported are models that may be rotated" in run_cell(folder).reason
    assert read_result(folder).trained is None


@pytest.mark.parametrize("keep", [0, 1, 40, -3])
def test_a_half_written_result_counts_as_none(tmp_path: Path, keep: int) -> None:
    cell = Cell(method="uniform", size=2.0, seed=0)
    result = make_result(cell, 0.5, 100)
    result.write(tmp_path)
    assert read_result(tmp_path) == result
    text = (tmp_path / "result.json").read_text()
    (tmp_path / "result.json").write_text(text[:keep])
    assert read_result(tmp_path) is None
    (tmp_path / "result.json").write_text(text.replace('"trials"', '"trails"'))
    assert read_result(tmp_path) is None
    (tmp_path / "result.json").write_text("[]")
    assert read_result(tmp_path) is None


def test_a_result_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    cell = Cell(method="uniform", size=2.0, seed=0)
    with pytest.raises(ValueError, match="JSON"):
        make_result(cell, 0.5, 100, selection_loss=float("nan")).write(tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_a_crash_stays_until_it_is_forgotten(tmp_path: Path) -> None:
    write_crash(tmp_path, "Traceback\n  line\nRuntimeError: not today\n")
    assert read_crash(tmp_path) == "RuntimeError: not today"
    cell = Cell(method="uniform", size=2.0, seed=0)
    task = CellTask(cell=cell, rules={"patience": 3}, registry=REGISTRY, cells_at_once=1, artifact=False)
    task.write(tmp_path)
    assert CellTask.read(tmp_path) == task
    assert read_crash(tmp_path) is not None
    forget_crash(tmp_path)
    assert read_crash(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
            "RuntimeError: CUDA error: out of range\nCUDA kernel errors might come later.\n\nCompile with `X`.\n",
            "RuntimeError: CUDA error: out of range",
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 1\nwith more\n\n'
            "During handling of the above exception, another exception occurred:\n\n"
            'Traceback (most recent call last):\n  File "a.py", line 2, in f\n    g()\n    ~^\nValueError: no\n  why\n',
            "ValueError: no",
        ),
        ('  File "a.py", line 1\nUserWarning: slow\nthe process was killed', "the process was killed"),
        ("", "no message"),
    ],
)
def test_a_crash_is_told_by_the_line_that_names_the_error(tmp_path: Path, text: str, told: str) -> None:
    write_crash(tmp_path, text)
    assert read_crash(tmp_path) == told


def test_other_rules_are_refused_by_name(tmp_path: Path) -> None:
    comparison = make_comparison(tmp_path / "out")
    cell = comparison.cells()[0]
    comparison.folder(cell).mkdir(parents=True)
    dims = {"embedding_dims": {"user": 8}}
    replace(make_result(cell, 0.5, 100), rules=comparison.rules() | dims).write(comparison.folder(cell))
    assert list(make_comparison(tmp_path / "out", seeds=(0, 5), sizes=(3.0,)).finished()) == [cell]
    for changes, told in (
        ({"patience": 4}, "dense-seed0, patience: expected 3 as when it was run, got 4"),
        ({"recipe": "tests.tiny:other"}, "recipe: expected 'tests.tiny:demo' as when it was run"),
        ({"data": tmp_path}, "data: expected None as when it was run"),
        ({"trials": 2}, "trials: expected None as when it was run, got 2"),
        ({"max_epochs": 2}, "max_epochs: expected 60 as when it was run, got 2"),
    ):
        with pytest.raises(ValueError, match=told):
            make_comparison(tmp_path / "out", **changes)
    with pytest.raises(ValueError, match="embedding_dims: expected"):
        comparison.check_rules({"embedding_dims": {"user": 4}})
    comparison.check_rules({"settings": {"num_blocks": 3}})  # what an older version did not write down cannot differ


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("my_module", "registry 'my_module': expected 'module:name', got 'my_module'; name one such as"),
        ("no.such:METHODS", "registry 'no.such:METHODS': expected a module 'no.such', got none"),
        (
            "dnis_torchrec.comparison.methods:METHOD",
            "registry .*: expected a mapping from name to method, got NoneType",
        ),
        ("dnis_torchrec.comparison.methods:uniform", "registry .*: expected a mapping from name to method, got "),
    ],
)
def test_a_registry_that_is_none_is_refused_by_name(tmp_path: Path, spec: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_comparison(tmp_path / "out", registry=spec)


def test_cells_of_a_version_without_precisions_are_of_float32(tmp_path: Path) -> None:
    comparison = make_comparison(tmp_path / "out", precisions=("fp32",))
    cell = comparison.cells()[0]
    comparison.folder(cell).mkdir(parents=True)
    older = {name: value for name, value in comparison.rules().items() if name != "precisions"}
    replace(make_result(cell, 0.5, 100), rules=older).write(comparison.folder(cell))
    assert list(make_comparison(tmp_path / "out", precisions=("fp32",)).finished()) == [cell]
    with pytest.raises(ValueError, match=r"precisions: expected \['fp32'\] as when it was run, got \['fp32', 'int8'"):
        make_comparison(tmp_path / "out")


def test_data_of_an_address_are_the_same_wherever_their_copy_lies(tmp_path: Path) -> None:
    (here, there), address = (tmp_path / "here", tmp_path / "there"), "s3://bucket/data"
    comparison = make_comparison(tmp_path / "out", data=here, data_address=address)
    cell = comparison.cells()[0]
    comparison.folder(cell).mkdir(parents=True)
    replace(make_result(cell, 0.5, 100), rules=comparison.rules()).write(comparison.folder(cell))
    again = make_comparison(tmp_path / "out", data=there, data_address=address)
    assert list(again.finished()) == [cell]
    task = again.task(cell, again.rules(), cells_at_once=1)
    assert (task.data, task.rules["data"]) == (str(there), address)
    with pytest.raises(ValueError, match=r"data: expected 's3://bucket/data' as when it was run, got .*there"):
        make_comparison(tmp_path / "out", data=there)


small = st.integers(1, 5)


@given(st.lists(st.tuples(small, small), min_size=1, max_size=12), st.booleans())
def test_pareto_front_is_what_nothing_dominates(points: list[tuple[int, int]], higher: bool) -> None:
    def dominated(mine: tuple[int, int]) -> bool:
        return any(
            theirs[0] <= mine[0] and (theirs[1] >= mine[1] if higher else theirs[1] <= mine[1]) and theirs != mine
            for theirs in points
        )

    cells = [Cell(method=f"m{index}", size=2, seed=0) for index in range(len(points))]
    finished = {cell: make_result(cell, point[1], point[0]) for cell, point in zip(cells, points, strict=True)}
    rows = comparison_rows(cells, finished, {}, primary_metric="mse", higher_is_better=higher)
    assert [row.pareto for row in rows] == [not dominated(point) for point in points]


def test_rows_hold_means_spread_and_differences_within_each_seed() -> None:
    rows = {(row.method, row.size): row.to_json() for row in make_rows()}
    row = rows["uniform", 4]
    losses = [0.74, 0.80, 0.92]
    assert row["metrics"]["mse"] == pytest.approx(statistics.fmean(losses))
    assert row["spread"]["mse"] == pytest.approx(statistics.stdev(losses))
    difference = row["difference"]["mse"]
    assert difference == {"mean": pytest.approx(0.08), "deviation": pytest.approx(0.04), "num_seeds": 3}
    assert rows["dense", None]["difference"]["mse"]["mean"] == 0
    assert (row["seeds"], row["size"], row["trials"]) == ([0, 1, 2], 4, 4)
    assert (row["seconds"], row["seconds_of_trials"]) == (11.0, 40.0)
    assert (row["form"], row["embedding_bytes"], row["compression"]) == ("dense_fp32", 1024, 4.0)
    assert row["bytes"] == {"dense_fp32": 1024, "csr_fp32": 1027}
    assert row["resident_bytes"] == {"csr_fp32": 1025, "dense_int4": 128}, "means over the seeds that have the form"
    assert "reason" not in row
    assert "missing" not in row
    on_front = {key for key, value in rows.items() if value["pareto"]}
    assert on_front == {("dense", None), ("dnis", 4)}  # uniform at 2 has more bytes than dnis at 4 and is worse


def test_a_row_without_all_its_seeds_says_so_and_stands_aside_from_the_front() -> None:
    rows = {(row.method, row.size): row for row in make_rows(dnis_2="RuntimeError: no", dense_0="ValueError: no")}
    partial = rows["dnis", 4]
    assert partial.to_json()["missing"] == {"2": "crashed: RuntimeError: no"}
    assert partial.to_json()["seeds"] == [0, 1]
    assert not partial.pareto  # without the worst seed its mean would beat everything
    assert partial.difference["mse"].num_seeds == 1  # seed 0 lacks the uncompressed model
    assert partial.difference["mse"].deviation is None
    assert rows["uniform", 4].pareto
    lines = {line.row.method: line for line in compared_lines(make_content(tuple(rows.values()))) if line.row.size == 4}
    assert lines["dnis"].metrics == (("0.7250 ± 0.0212", False),)
    assert lines["uniform"].metrics[0][1]
    assert missing_lines(rows.values()) == [
        "dense: seed 0: crashed: ValueError: no",
        "dnis at 4: seed 2: crashed: RuntimeError: no",
    ]


def test_two_seeds_have_a_deviation_of_their_difference() -> None:
    rows = {(row.method, row.size): row for row in make_rows(dnis_2="RuntimeError: no")}
    difference = rows["dnis", 4].difference["mse"]  # .01 and .02
    assert (difference.mean, difference.num_seeds) == (pytest.approx(0.015), 2)
    assert difference.deviation == pytest.approx(0.01 / 2**0.5)


def test_versions_of_all_cells() -> None:
    result = make_result(Cell(method="dnis", size=2, seed=0), 0.5, 10)
    other = replace(result, versions={"torch": "3", "python": "3.12"})
    assert joined_versions([result, other, result]) == {"torch": "2, 3", "python": "3.12"}


OF_FLOATS = (
    *("uniform", "mde", "random", "magnitude", "nis-me", "qr", "hash", "pep"),
    *("dnis-paper", "dnis-unrolled"),
)


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *((method, "fp32") for method in OF_FLOATS),
        *((method, "int8") for method in ("uniform", "mde", "magnitude", "qr")),
        *(("int4-qat", "int4"), ("compress", "codes"), ("dnis", "codes")),
    ],
)
def test_the_artifact_of_a_cell_is_evaluated_as_any_other_and_says_the_same(
    gloo, tmp_path: Path, method: str, precision: str
) -> None:
    """Of each way in which methods make a model: another D, projections, whole columns, single values, a search."""
    size = 2.0 if method == "mde" else 2.5  # MDE keeps a dimension of every block, and the tables here are tiny
    cell = Cell(method=method, size=size, seed=0)
    rules = {"recipe": "tests.tiny:demo", "data": None, "patience": 1, "max_epochs": 1, "trials": 1}
    rules |= {"precisions": [precision]}
    folder = tmp_path / "cells" / cell.name
    CellTask(cell=cell, rules=rules, registry=registry.REGISTRY, cells_at_once=1, artifact=True).write(folder)
    trained = run_cell(folder).trained
    assert trained is not None
    assert form_named(trained.form).precision.name == ("codes" if (method, precision) == ("mde", "int8") else precision)
    evaluated = run_evaluate(folder / "artifact", None)
    assert evaluated["metrics"] == pytest.approx(trained.row.metrics, abs=1e-6)
    assert evaluated["parameters"] == trained.row.parameters
    described = read_manifest(folder / "artifact")["run"]
    assert described["configuration"] == {"method": method, "size": size, **trained.settings}


def test_commands_in_the_documentation_name_methods_and_recipes_that_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = re.findall(r"--methods ([\w,-]+)", text)
    assert len(named) > 4
    assert {name for names in named for name in names.split(",")} <= METHODS.keys()
    recipes = re.findall(r"dnis compare (examples\.\w+:)(\w+)", text)
    assert recipes
    assert all(callable(load_recipe(module + name)) for module, name in recipes)
    looped = re.findall(r"for \w+ in ([\w ]+); do.*\n +dnis compare (examples\.\w+:)\$", text)
    assert len(looped) == 3
    assert all(callable(load_recipe(module + name)) for names, module in looped for name in names.split())
