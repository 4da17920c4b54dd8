"""Comparisons with processes: resuming, what is refused before anything runs; the command from end to end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torchrec.datasets.utils import Batch

import dnis_torchrec.comparison.run as run_module
from dnis_torchrec.comparison import processes
from dnis_torchrec.comparison.cells import CellTask
from dnis_torchrec.comparison.plan import Comparison, recipe_facts
from dnis_torchrec.comparison.run import run_comparison
from dnis_torchrec.data.recipe import Recipe
from tests import tiny
from tests.cli.test_cli import Done, dnis
from tests.comparison.test_comparison import REGISTRY, make_comparison
from tests.comparison_stand_ins import STAND_IN, calls, make_out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return make_out(tmp_path)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets comparisons run stand-ins."""
    command = (sys.executable, "-c", STAND_IN)
    monkeypatch.setattr(processes, "COMMAND", command)


def test_what_has_finished_is_never_run_again_and_what_crashed_is(out: Path, stand_ins: None) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(2.0, 3.0), seeds=(0,), jobs=2)
    first = run_comparison(comparison)
    names = ["dense+validation-seed0", "dense-seed0", "dnis-size2-seed0", "dnis-size3-seed0"]
    assert calls(out) == names
    assert [cell.name for cell in first.crashes] == ["dnis-size3-seed0"]
    assert "not today" in first.crashes[comparison.cells()[-1]].read_text()
    assert [row.reason for row in first.content.rows] == ["", "", "", "crashed: RuntimeError: not today"]
    run_comparison(comparison)
    assert calls(out) == sorted([*names, "dnis-size3-seed0"])
    tasks = [json.loads((out / "cells" / name / "task.json").read_text()) for name in names]
    told = [(task["cells_at_once"], task["processes"]) for task in tasks]
    assert told == [(2, 1), (2, 1), (2, 1), (1, 2)]  # the last one was alone when it ran again
    (out / "calm").touch()
    (out / "cells" / "dnis-size2-seed0" / "result.json").write_text('{"format": "dnis-torch')  # half-written
    last = run_comparison(comparison)
    assert calls(out) == sorted([*names, *["dnis-size3-seed0"] * 2, "dnis-size2-seed0"])
    assert not last.crashes
    assert not any(row.is_empty for row in last.content.rows)
    assert not (out / "cells" / "dnis-size3-seed0" / "crash.txt").exists()
    run_comparison(make_comparison(out, methods=("dnis",), sizes=(2.0, 3.0), seeds=(0, 1)))
    assert len([name for name in calls(out) if "seed1" in name]) == 4
    assert len(calls(out)) == 7 + 4


def test_what_lies_in_the_folder_says_neither_which_recipe_nor_which_methods_run(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(3.0,), seeds=(0,), jobs=1)
    named: set[tuple[str, str]] = set()

    def noted(folders: list[Path], **_: object) -> None:
        named.update((CellTask.read(folder).registry, CellTask.read(folder).rules["recipe"]) for folder in folders)

    monkeypatch.setattr(run_module, "run_cells", noted)
    for cell in comparison.cells():
        forged = comparison.task(cell, comparison.rules() | {"recipe": "out.evil:recipe"}, cells_at_once=1)
        replace(forged, registry="out.evil:METHODS").write(comparison.folder(cell))
    run_comparison(comparison)
    assert named == {(comparison.registry, comparison.recipe)}


def test_a_traceback_stays_until_its_cell_begins_again(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(3.0,), seeds=(0,), jobs=1)
    [(_, crash)] = run_comparison(comparison).crashes.items()
    text = crash.read_text()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "run_cells", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_comparison(comparison)
    assert crash.read_text() == text
    (out / "calm").touch()
    assert not run_comparison(comparison).crashes
    assert not crash.exists()


def test_recipes_that_change_or_lack_a_split_are_refused_before_anything_runs(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0,))
    run_comparison(comparison)
    before = calls(out)

    def changed(data: Path | None, *, seed: int, embedding_dim: int | None) -> Recipe:
        return tiny.make_recipe(seed=seed, embedding_dim=4)

    def lacking(name: str) -> Callable[..., Recipe]:
        def build(data: Path | None, *, seed: int, embedding_dim: int | None) -> Recipe:
            recipe = tiny.make_recipe(seed=seed)
            object.__setattr__(recipe.data, name, tiny.Repeatable([]))
            return recipe

        return build

    more = make_comparison(out, methods=("dnis",), sizes=(2.0, 4.0), seeds=(0,))
    monkeypatch.setattr(tiny, "demo", changed)
    with pytest.raises(ValueError, match=r"embedding_dims: expected \{'user': 8, 'genre': 8\} as when it was run"):
        run_comparison(more)
    for name in ("validation", "selection", "test", "train"):
        monkeypatch.setattr(tiny, "demo", lacking(name))
        with pytest.raises(ValueError, match=f"'tests.tiny:demo': expected at least one {name} batch, got none; give"):
            run_comparison(more)
    assert calls(out) == before


def test_data_that_only_some_methods_would_refuse_is_refused_before_anything_runs(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_part(**changed: list[Batch]) -> None:
        recipe = tiny.make_recipe()
        changed_recipe = replace(recipe, data=replace(recipe.data, **changed))
        monkeypatch.setattr(tiny, "demo", lambda data, *, seed, embedding_dim: changed_recipe)

    comparison = make_comparison(out, methods=("uniform",), sizes=(2.0,), seeds=(0,))
    batch = tiny.make_batch(12, seed=0)
    stars = replace(batch, labels=torch.full((12,), 5.0))
    shares = replace(batch, labels=torch.full((12,), 0.5))
    with_part(train=[batch, stars])
    with pytest.raises(ValueError, match=r"train batch 1: expected labels in \[0, 1\]"):
        run_comparison(comparison)
    with_part(test=[shares])
    with pytest.raises(ValueError, match=r"test batch 0: expected labels 0 or 1"):
        run_comparison(comparison)
    with_part(test=[tiny.ranked(batch, 4)])
    with pytest.raises(ValueError, match=r"test split, query 0: expected at least k=10 candidates, got 4"):
        run_comparison(comparison)
    assert not (out / "calls").exists()


def test_cells_of_other_settings_of_the_recipe_are_refused_before_anything_runs(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0,))
    run_comparison(comparison)
    before = calls(out)
    plain = tiny.make_recipe()
    of_others = {
        r"settings\.table_learning_rate: expected 0\.01 as when it was run, got 0\.5": {"table_learning_rate": 0.5},
        r"settings\.network: expected .*over_arch.* as when it was run, got ": {
            "model": tiny.make_recipe("deepfm").model
        },
        r"settings\.batch_size: expected 64 as when it was run, got 16": {
            "data": replace(plain.data, train=tiny.Repeatable([tiny.make_batch(16, 0)]))
        },
    }
    for told, changes in of_others.items():
        other = replace(plain, **changes)
        monkeypatch.setattr(tiny, "demo", lambda data, *, seed, embedding_dim, other=other: other)
        with pytest.raises(ValueError, match=told):
            run_comparison(comparison)
    assert calls(out) == before


def test_another_seed_may_have_other_rows_beside_the_tables(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First-order weights and biases have as many as the split's vocabulary."""

    def of_split(data: Path | None, *, seed: int, embedding_dim: int | None) -> Recipe:
        recipe = tiny.make_recipe(seed=seed)
        recipe.model.register_parameter("biases", torch.nn.Parameter(torch.zeros(10 + seed, 1)))
        return recipe

    monkeypatch.setattr(tiny, "demo", of_split)
    for seed in (0, 1):
        assert not run_comparison(make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(seed,))).crashes


def test_other_data_in_the_same_place_is_refused_before_anything_runs(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0,))
    canned = json.loads((out / "canned.json").read_text())
    (out / "canned.json").write_text(
        json.dumps(canned | {"test_fingerprint": recipe_facts(comparison).test_fingerprint})
    )
    run_comparison(comparison)
    run_comparison(comparison)
    before = calls(out)
    recipe = tiny.make_recipe()
    more = replace(recipe, data=replace(recipe.data, test=[*recipe.data.test, tiny.make_batch(12, seed=9)]))
    monkeypatch.setattr(tiny, "demo", lambda data, *, seed, embedding_dim: more)
    message = "seed0, test split: expected the samples that it was evaluated on, got others; give another --out"
    with pytest.raises(ValueError, match=message):
        run_comparison(replace(comparison, sizes=(2.0, 4.0)))
    assert calls(out) == before


def test_tables_of_another_environment_are_refused_before_anything_runs(out: Path, stand_ins: None) -> None:
    canned = json.loads((out / "canned.json").read_text())
    (out / "canned.json").write_text(json.dumps(canned | {"dense_bytes": 4 * 8 * 50}))
    run_comparison(make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(1,)))
    before = calls(out)
    more = make_comparison(out, methods=("dnis",), sizes=(2.0, 4.0), seeds=(1, 0))
    message = "seed1, uncompressed tables: expected 1600 bytes as when it was run, got 1664; set the environment of the"
    with pytest.raises(ValueError, match=message):
        run_comparison(more)
    assert calls(out) == before
    run_comparison(make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0, 1)))  # seeds may have their own


def test_a_second_comparison_at_work_in_the_folder_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0,))

    def meanwhile(folders: list[Path], *, jobs: int, on_done: Callable[[Path], None]) -> None:
        run_comparison(comparison)

    monkeypatch.setattr(run_module, "run_cells", meanwhile)
    with pytest.raises(ValueError, match="expected no comparison at work, got one; wait for it"):
        run_comparison(comparison)


def compare(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Done:
    monkeypatch.setattr("dnis_torchrec.comparison.plan.Comparison", partial(Comparison, registry=REGISTRY))
    return dnis("compare", "tests.tiny:demo", *arguments)


def test_the_command_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = tmp_path / "out", tmp_path / "rows.json"
    arguments = ("--methods", "dnis", "--sizes", 4, "--seeds", 1, "--out", out, "--json", file, "--artifacts")
    done = compare(monkeypatch, *arguments)
    assert done.returncode == 0, done.stderr
    described = json.loads(file.read_text())
    assert described == json.loads((out / "comparison.json").read_text())
    assert described["recipe"] == "tests.tiny:demo"
    assert "torch" in described["versions"]
    rows = described["rows"]
    assert [row["method"] for row in rows] == ["dense", "dense+validation", "dnis"]
    assert [row["parameters"] for row in rows] == [416, 416, 104]
    assert all(0 < row["metrics"]["auc"] < 1 for row in rows)
    assert rows[2]["difference"]["auc"]["mean"] == rows[2]["metrics"]["auc"] - rows[0]["metrics"]["auc"]
    assert pd.read_csv(out / "comparison.csv")["metrics.auc"].tolist() == [row["metrics"]["auc"] for row in rows]
    assert "generated for tests" in (out / "comparison.html").read_text()
    assert "Linux" in described["provenance"][0]["machine"]
    assert "dense+validation" in done.stdout
    assert f"comparison: {out / 'comparison.html'}" in done.stdout
    assert "[3/3] " in done.stderr
    assert (out / "cells" / "dnis-size4-seed0" / "artifact" / "manifest.json").is_file()
    assert described["rules"]["precisions"] == ["fp32", "int8", "int4"]
    assert [row["precision"] for row in rows] == ["fp32"] * 3
    task = json.loads((out / "cells" / "dense+validation-seed0" / "task.json").read_text())
    assert task["trained"] == str(out / "trained" / "seed0+validation")
    assert not (out / "trained").exists()
    number_of_calls = len((out / "calls").read_text().splitlines())
    again = compare(monkeypatch, *arguments)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert len((out / "calls").read_text().splitlines()) == number_of_calls == 3


def test_a_crash_is_told_after_everything_is_written_and_exits_with_1(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = compare(monkeypatch, "--methods", "dnis", "--sizes", "2,3", "--seeds", "0,", "--out", out)
    assert done.returncode == 1
    crash = out / "cells" / "dnis-size3-seed0" / "crash.txt"
    assert f"error: 1 cells crashed; the same command tries them again:\n  {crash}" in done.stderr
    assert "dnis at 3: crashed: RuntimeError: not today" in done.stderr
    assert "dnis" in done.stdout
    assert (out / "comparison.html").is_file()


def test_data_at_a_url_may_be_fetched_elsewhere_the_next_time(
    out: Path, stand_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryFileSystem().pipe("/bucket/data/file", b"1")
    arguments = ("--data", "memory://bucket/data", "--methods", "dnis", "--sizes", 2, "--seeds", 1, "--out", out)
    for cache in ("here", "there"):
        monkeypatch.setenv("DNIS_CACHE", str(tmp_path / cache))
        done = compare(monkeypatch, *arguments)
        assert done.returncode == 0, done.stderr
    assert calls(out) == ["dense+validation-seed0", "dense-seed0", "dnis-size2-seed0"]  # nothing ran again
    task = json.loads((out / "cells" / "dense-seed0" / "task.json").read_text())
    assert Path(task["data"]).is_relative_to(tmp_path / "here")
    assert task["rules"]["data"] == "memory://bucket/data"


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(comparison: Comparison) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run_module, "run_comparison", interrupted)
    done = compare(monkeypatch, "--methods", "dnis", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (143, "")
    assert "error: stopped by SIGTERM; what has finished is kept, the same command goes on from there" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "unifrom"], "did you mean 'uniform'?"),
        (["--methods", "uniform,"], "--methods: expected names with commas between them, got 'uniform,'"),
        (["--methods", "uniform", "--precisions", "int3"], "precision 'int3': expected a known precision, got 'int3'"),
        (["--methods", "uniform", "--sizes", "two"], "--sizes: expected numbers with commas between them, got 'two'"),
        (["--methods", "uniform", "--sizes", "1"], "sizes: expected compressions above 1, got 1.0"),
        (["--methods", "uniform", "--seeds", "0"], "--seeds: expected at least one seed, got 0"),
        (["--methods", "uniform", "--data", "no/such"], "expected a folder, got none"),
        (["--methods", "uniform", "--json", "no/such/file.json"], "expected an existing folder, got no/such"),
        ([], "Missing option '--methods'"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = compare(monkeypatch, *arguments, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_other_rules_than_those_of_the_folder_exit_with_2(
    out: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--methods", "dnis", "--sizes", 2, "--seeds", 1, "--out", out)
    assert compare(monkeypatch, *arguments).returncode == 0
    done = compare(monkeypatch, *arguments, "--patience", 7)
    assert done.returncode == 2
    assert "patience: expected 3 as when it was run, got 7; give the arguments of the older comparison" in done.stderr


@pytest.mark.parametrize("name", ["cells/dnis-size2-seed0", "cells", "comparison.html", "lock"])
def test_links_in_a_comparison_are_named(out: Path, stand_ins: None, name: str) -> None:
    outside = out.parent / "outside"
    if name == "cells":
        (out / "cells").rename(outside)
    else:
        outside.mkdir()
    (out / name).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(ValueError, match=f"expected plain files and folders in it, got the link '{name}'; remove it"):
        make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0,))
    assert sorted(outside.rglob("*")) == before


def test_files_outside_that_a_comparison_has_a_second_name_of_stay(out: Path, stand_ins: None) -> None:
    cell, outside = out / "cells" / "dnis-size2-seed0", out.parent / "outside"
    cell.mkdir()
    outside.write_text("years of work")
    for name in ("lock", "comparison.json"):
        (out / name).hardlink_to(outside)
    for name in ("log.txt", "task.json", "crash.txt"):
        (cell / name).hardlink_to(outside)
    assert not run_comparison(make_comparison(out, methods=("dnis",), sizes=(2.0,), seeds=(0,))).crashes
    assert outside.read_text() == "years of work"
