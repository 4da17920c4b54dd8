"""Tests of benchmarks/by_seed.py: margins within each seed, from cells on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import by_seed
from dnis_torchrec.comparison.cells import Cell, CellResult, TrainedCell
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.tables import MINUS

RULES = {"recipe": "my:recipe", "data": None, "patience": 3, "max_epochs": 60, "trials": None}
CLICKS = {
    "dnis-size4": ({"auc": 0.82, "logloss": 0.50, "loss": 0.50, "calibration": 1.1}, {"auc": 0.80, "logloss": 0.53}),
    "dense": ({"auc": 0.81, "logloss": 0.52}, {"auc": 0.81, "logloss": 0.52}),
    "dense+validation": ({"auc": 0.83, "logloss": 0.51}, {"auc": 0.79, "logloss": 0.53}),
    "uniform-size2": ({"auc": 0.80, "logloss": 0.49}, {"auc": 0.78, "logloss": 0.55}),
    "uniform-size4": ({"auc": 0.79, "logloss": 0.54}, {"auc": 0.77, "logloss": 0.56}),
    "mde-size4": ({"auc": 0.78, "logloss": 0.53}, {"auc": 0.785, "logloss": 0.57}),
}
"""row and size -> metrics of seeds 0 and 1."""


def write_cells(out: Path, metrics: Mapping[str, tuple[Mapping[str, float], ...]], **rules: object) -> Path:
    """A folder of a comparison with one finished cell per row, size and seed."""
    for name, of_seeds in metrics.items():
        row_name, _, size = name.partition("-size")
        method, _, with_validation = row_name.partition("+")
        for seed, values in enumerate(of_seeds):
            cell = Cell(
                method=method, size=float(size) if size else None, seed=seed, with_validation=bool(with_validation)
            )
            row = ReportRow(
                method=row_name,
                compression=1,
                parameters=1,
                dense_parameters=1,
                bytes={"csr_fp32": 4},
                metrics=values,
                seed=seed,
                seconds=1,
            )
            trained = TrainedCell(
                row=row,
                dense_bytes=4,
                form="csr_fp32",
                embedding_bytes=4,
                extra_bytes=0,
                selection_loss=0.5,
                trials=1,
                seconds_of_trials=1,
                settings={},
                device="cpu",
                cells_at_once=1,
            )
            folder = out / "cells" / cell.name
            folder.mkdir(parents=True)
            CellResult(cell=cell, rules=RULES | rules, versions={}, trained=trained).write(folder)
    return out


def margins_of(folders: list[Path], method: str = "dnis") -> dict[tuple[float, str, str], dict[int, float]]:
    rows = by_seed.margins(by_seed.read_cells(folders), method)
    return {(row.size, row.metric, row.rival): pytest.approx(dict(row.by_seed)) for row in rows}


def test_margins_are_taken_within_each_seed_of_the_best_there_and_positive_is_better(tmp_path: Path) -> None:
    assert margins_of([write_cells(tmp_path, CLICKS)]) == {
        (4, "auc", "dense"): {0: 0.01, 1: -0.01},
        (4, "auc", by_seed.BEST_UNIFORM): {0: -0.01, 1: -0.01},
        (4, "auc", by_seed.BEST_OTHER): {0: 0.03, 1: 0.015},
        (4, "auc", "dense+validation"): {0: -0.01, 1: 0.01},
        (4, "auc", "uniform"): {0: 0.03, 1: 0.03},
        (4, "auc", "mde"): {0: 0.04, 1: 0.015},
        (4, "logloss", "dense"): {0: 0.02, 1: -0.01},
        (4, "logloss", by_seed.BEST_UNIFORM): {0: -0.01, 1: -0.01},
        (4, "logloss", by_seed.BEST_OTHER): {0: 0.03, 1: 0.03},
        (4, "logloss", "dense+validation"): {0: 0.01, 1: 0.0},
        (4, "logloss", "uniform"): {0: 0.04, 1: 0.03},
        (4, "logloss", "mde"): {0: 0.03, 1: 0.04},
    }


def test_several_folders_are_one_comparison_and_the_first_one_counts(tmp_path: Path) -> None:
    ours = write_cells(tmp_path / "ours", {"dnis-size4": ({"mse": 0.7}, {"mse": 0.8}), "dense": ({"mse": 0.75},)})
    theirs = {"nis-se-size4": ({"mse": 0.9}, {"mse": 0.85}), "dense": ({"mse": 0.6}, {"mse": 0.8})}
    found = margins_of([ours, write_cells(tmp_path / "theirs", theirs, trials=2)])
    assert found[4, "mse", "dense"] == {0: 0.05, 1: 0.0}
    assert found[4, "mse", by_seed.BEST_OTHER] == {0: 0.2, 1: 0.05}


def test_a_seed_that_a_rival_lacks_has_no_margin_to_it(tmp_path: Path) -> None:
    found = margins_of(
        [write_cells(tmp_path, {"dnis-size2": ({"mse": 0.7}, {"mse": 0.8}), "uniform-size2": ({"mse": 0.75},)})]
    )
    assert found[2, "mse", by_seed.BEST_OTHER] == {0: 0.05}
    assert (2, "mse", "dense") not in found


def test_rankings_are_judged_by_the_mean_of_their_metrics_too(tmp_path: Path) -> None:
    names = [f"{name}@{k}" for k in (1, 5, 10) for name in ("recall", "mrr", "ndcg")]
    found = margins_of(
        [
            write_cells(
                tmp_path, {"dnis-size4": (dict.fromkeys(names, 0.5),), "nis-me-size4": (dict.fromkeys(names, 0.4),)}
            )
        ]
    )
    assert found[4, "recall_mrr_ndcg", by_seed.BEST_OTHER] == {0: 0.1}


def test_a_seed_without_a_metric_is_left_out_of_it(tmp_path: Path) -> None:
    """A test split of one class has no AUC."""
    no_auc = {name: ({"logloss": m["logloss"]}, other) for name, (m, other) in CLICKS.items()}
    found = margins_of([write_cells(tmp_path, no_auc)])
    assert found[4, "auc", by_seed.BEST_OTHER] == {1: 0.015}
    assert found[4, "logloss", by_seed.BEST_OTHER] == {0: 0.03, 1: 0.03}


def test_tables_of_another_width_are_refused_where_both_say_it(tmp_path: Path) -> None:
    dims = [{"embedding_dims": {"t": dim}} for dim in (8, 4)]
    wide, narrow = (write_cells(tmp_path / str(k), CLICKS, **own) for k, own in enumerate(dims))
    with pytest.raises(ValueError, match=r"1, embedding_dims: expected {'t': 8} as in .*0, got {'t': 4}"):
        by_seed.read_cells([wide, narrow])
    assert by_seed.read_cells([wide, write_cells(tmp_path / "older", CLICKS)])


def test_what_is_no_comparison_or_another_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"folder {tmp_path}: expected finished cells of `dnis compare`, got none"):
        by_seed.read_cells([tmp_path])
    first, other = write_cells(tmp_path / "a", CLICKS), write_cells(tmp_path / "b", CLICKS, recipe="my:other")
    with pytest.raises(ValueError, match=r"b, recipe: expected 'my:recipe' as in .*a, got 'my:other'"):
        by_seed.read_cells([first, other])
    with pytest.raises(ValueError, match=r"--method: expected one of \['dnis', 'mde', 'uniform'\], got 'dnsi'"):
        by_seed.margins(by_seed.read_cells([first]), "dnsi")


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "by_seed.json"
    monkeypatch.setattr("sys.argv", ["by_seed", str(write_cells(tmp_path / "out", CLICKS)), "--json", str(path)])
    by_seed.main()
    values, ahead = (table.splitlines() for table in capsys.readouterr().out.split("\n\n"))
    assert values[0] == "size | of bytes | row | metric | seed 0 | seed 1 | mean | deviation"
    assert values[1] == "- | 1.00 | dense | auc | 0.8100 | 0.8100 | 0.8100 | 0.0000"
    assert values[-4] == "4 | 1.00 | mde | auc | 0.7800 | 0.7850 | 0.7825 | 0.0035"
    assert ahead[0] == "size | metric | ahead of | seed 0 | seed 1 | mean | deviation | least"
    assert ahead[1] == f"4 | auc | dense | +0.0100 | {MINUS}0.0100 | 0.0000 | 0.0141 | {MINUS}0.0100"
    written = json.loads(path.read_text())
    assert written["method"] == "dnis"
    assert len(written["rows"]) == len(ahead) - 1 == 12
    assert len(written["measured"]) == len(values) - 1 == 12


def test_the_command_says_what_is_wrong_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["by_seed", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        by_seed.main()
    assert f"error: folder {tmp_path}: expected finished cells of `dnis compare`, got none" in capsys.readouterr().err
