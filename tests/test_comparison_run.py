"""Comparisons with processes: several at a time, crashes, interrupts, resuming; the command from end to end.

Most processes here are stand-ins that need no torch, so that they start at once: STAND_IN does to a cell's folder what
the real one does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torchrec.datasets.utils import Batch

import dnis_torchrec.comparison.run as run_module
from dnis_torchrec import cli
from dnis_torchrec.comparison import Comparison, processes, run_comparison
from dnis_torchrec.comparison.cells import Cell, CellTask, read_crash, read_result
from dnis_torchrec.comparison.processes import COMMAND, SECONDS_TO_END, run_cells
from dnis_torchrec.recipe import Recipe
from tests import tiny
from tests.test_cli import ROOT, Done, dnis, environment
from tests.test_comparison import REGISTRY, make_comparison, make_result

STAND_IN = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
out = folder.parents[1]
task = json.loads((folder / "task.json").read_text())
helps = sys.argv[2:] == ["helps"]
with (out / "calls").open("a") as calls:
    calls.write(("helps-" if helps else "") + folder.name + chr(10))
size = task["cell"]["size"] or 1
if size in (11, 12):
    trials = folder / "work" / "trials-0"
    if helps:
        print("helps", flush=True)
        if size == 11:
            (trials / f"{os.getpid()}.lock").touch()
            time.sleep(60)
        sys.exit(1)
    trials.mkdir(parents=True)
    (trials / "0.lock").touch()
    (trials / "trials.json").write_text(json.dumps({"trials": 3, "threads": 1}))
    begin = time.time()
    while size == 11 and len(list(trials.glob("*.lock"))) < int(os.environ["LOCKS"]) and time.time() < begin + 60:
        time.sleep(0.01)
    time.sleep(0.5)  # in which one too many would begin
    (folder / "pids").write_text(" ".join(lock.stem for lock in trials.glob("*.lock")))
if size == 3 and not (out / "calm").exists():
    (folder / "crash.txt").write_text("Traceback" + chr(10) + "RuntimeError: not today")
    sys.exit(1)
if size == 5:
    print("so much memory", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if size in (7, 8):
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(60)
if size == 9:
    begin = time.time()
    (folder / "begun").touch()
    wanted = int(os.environ["AT_ONCE"])
    while len(list(out.glob("cells/*/begun"))) < wanted and time.time() < begin + 60:
        time.sleep(0.01)
    time.sleep(0.3)  # in which one too many would begin
    (folder / "times").write_text(json.dumps([begin, time.time(), os.environ.get("OMP_NUM_THREADS")]))
result = json.loads((out / "canned.json").read_text())
result |= {"cell": task["cell"], "rules": task["rules"], "seed": task["cell"]["seed"], "size": size}
(folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Folder of a comparison, with the result that stand-ins give."""
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    canned = make_result(Cell(method="uniform", size=2, seed=0), 0.5, 100).to_json()
    own_tables = {"dense_bytes": 4 * 8 * 52}
    (out / "canned.json").write_text(json.dumps(canned | {"metrics": {"auc": 0.8}} | own_tables))
    return out


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets comparisons run stand-ins."""
    command = (sys.executable, "-c", STAND_IN)
    monkeypatch.setattr(run_module, "run_cells", partial(run_cells, command=command))


def make_folders(out: Path, *sizes: float, seeds: int = 1) -> list[Path]:
    folders = []
    for cell in (Cell(method="uniform", size=size, seed=seed) for size in sizes for seed in range(seeds)):
        folders.append(out / "cells" / cell.name)
        CellTask(cell=cell, rules={}, registry=REGISTRY, cells_at_once=1, artifact=False).write(folders[-1])
    return folders


def stand_in(folders: list[Path], *, jobs: int, on_done: Callable[[Path], None] = lambda folder: None) -> None:
    run_cells(folders, jobs=jobs, on_done=on_done, command=(sys.executable, "-c", STAND_IN))


def calls(out: Path) -> list[str]:
    return sorted((out / "calls").read_text().split())


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.timeout(60)
def test_a_cell_that_cannot_be_begun_is_an_error_and_no_endless_wait(out: Path) -> None:
    """As on a full disk; the next cell would have waited for the slot of the first."""
    folders = make_folders(out, 2, 3, 4, 5)
    for folder in folders[:-1]:
        (folder / "log.txt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"log\.txt"):
        stand_in(folders, jobs=1)


def test_a_cell_knows_nothing_of_a_torchrun_around_it(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RANK and MASTER_PORT of its parent a cell would wait for ranks that are none of its own."""
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OUTLIVES", "all of them")
    program = "import os, sys, json; json.dump(dict(os.environ), open(sys.argv[1] + '/seen.json', 'w'))"
    (folder,) = make_folders(out, 2)
    run_cells([folder], jobs=1, on_done=lambda folder: None, command=(sys.executable, "-c", program))
    seen = json.loads((folder / "seen.json").read_text())
    assert seen["OUTLIVES"] == "all of them"
    assert not told.keys() & seen.keys()


def test_every_folder_ends_with_a_result_or_a_crash_and_one_crash_leaves_the_others_alone(out: Path) -> None:
    folders, done = make_folders(out, 2, 3, 5, 4), []
    stand_in(folders, jobs=2, on_done=done.append)
    assert sorted(done) == sorted(folders)
    assert [read_result(folder) is not None for folder in folders] == [True, False, False, True]
    assert [read_crash(folder) for folder in folders] == [
        None,
        "RuntimeError: not today",
        "the process was killed by signal 9",
        None,
    ]
    assert "so much memory" in (folders[2] / "crash.txt").read_text()


@pytest.mark.parametrize(
    ("jobs", "threads", "share"), [(1, 8, None), (2, 2, "1"), (2, 8, "4"), (2, 1, "1"), (3, 16, "5")]
)
def test_so_many_at_a_time_share_the_threads(
    out: Path, jobs: int, threads: int, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("AT_ONCE", str(jobs))  # each waits until so many have begun
    folders = make_folders(out, 9, seeds=3)
    stand_in(folders, jobs=jobs)
    told = [json.loads((folder / "times").read_text()) for folder in folders]
    at_once = [sum(begin <= other[0] < end for other in told) for begin, end, _ in told]
    assert max(at_once) == jobs
    assert {own for _, _, own in told} == {share}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for trials to help with more often than there is need for."""
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.05)


@pytest.mark.parametrize(("jobs", "helpers"), [(1, 0), (2, 1), (3, 2), (5, 2)])
def test_free_processes_help_where_trials_are_left_and_end_with_what_they_help(
    out: Path, often: None, jobs: int, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three trials is taken; each helper takes one."""
    monkeypatch.setenv("LOCKS", str(1 + helpers))
    (folder,), done = make_folders(out, 11), []
    stand_in([folder], jobs=jobs, on_done=done.append)
    assert done == [folder]
    assert calls(out) == sorted([folder.name, *[f"helps-{folder.name}"] * helpers])
    pids = [int(pid) for pid in (folder / "pids").read_text().split() if pid != "0"]
    assert len(pids) == helpers
    assert not any(is_alive(pid) for pid in pids)
    assert (folder / "log.txt").read_text().count("helps") == helpers
    assert read_result(folder) is not None


def test_cells_come_before_help(out: Path, often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS", "2")
    folders = make_folders(out, 11, 2, 4)
    stand_in(folders, jobs=2)
    assert (out / "calls").read_text().split()[-1] == f"helps-{folders[0].name}"
    assert all(read_result(folder) is not None for folder in folders)


def test_what_one_helper_left_alone_is_helped_no_more(out: Path, often: None) -> None:
    """Or one that fails at once would be begun again and again."""
    (folder,) = make_folders(out, 12)
    stand_in([folder], jobs=2)
    assert calls(out) == sorted([folder.name, f"helps-{folder.name}"])
    assert read_result(folder) is not None
    assert read_crash(folder) is None


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of SIGINT; a shell starts what runs in the background with that signal ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("interruptible", "often")
def test_an_interrupt_ends_helpers_too(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS", "4")  # one more than come
    (folder,) = make_folders(out, 11)

    def interrupt() -> None:
        while len(list(folder.glob("work/trials-0/*.lock"))) < 3:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)  # in this thread: it wakes no wait, as if it came just before

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        stand_in([folder], jobs=3)
    pids = [int(path.stem) for path in folder.glob("work/trials-0/*.lock") if path.stem != "0"]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert read_result(folder) is None
    assert read_crash(folder) is None


def test_an_interrupt_ends_all_processes_and_starts_no_other(out: Path) -> None:
    folders = make_folders(out, 7, 2, 8, 4)  # the first and the third sleep, the fourth never has its turn
    interrupted: list[float] = []

    def interrupt(folder: Path) -> None:
        while not (folders[0] / "pid").exists():
            time.sleep(0.01)
        interrupted.append(time.monotonic())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stand_in(folders, jobs=2, on_done=interrupt)
    assert time.monotonic() - interrupted[0] < SECONDS_TO_END  # asked to end, they need not be killed
    assert not is_alive(int((folders[0] / "pid").read_text()))
    assert [read_result(folder) is not None for folder in folders] == [False, True, False, False]
    assert folders[3].name not in calls(out)
    assert read_crash(folders[0]) is None  # it did not crash: it was ended


def test_a_real_process_ends_when_its_parent_is_gone(out: Path) -> None:
    cell = Cell(method="sleeper", size=2, seed=0)
    rules = {"recipe": "tests.tiny:demo", "data": None, "patience": 3, "max_epochs": 2, "trials": None}
    folder = out / "cells" / cell.name
    CellTask(cell=cell, rules=rules, registry=REGISTRY, cells_at_once=1, artifact=False).write(folder)
    command = [*COMMAND, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 120
            while not (out / "calls").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert read_result(folder) is None
    assert read_crash(folder) is None
    assert not (folder / "work").exists()


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
    faster = replace(tiny.make_recipe(), table_learning_rate=0.5)
    monkeypatch.setattr(tiny, "demo", lambda data, *, seed, embedding_dim: faster)
    with pytest.raises(ValueError, match=r"settings: expected .*'table_learning_rate': 0.01.* as when it was run, got"):
        run_comparison(comparison)
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
    monkeypatch.setattr(cli.compare, "Comparison", partial(Comparison, registry=REGISTRY))
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
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "quality.svg").read_text()
    assert "dense+validation" in done.stdout
    assert f"comparison: {out / 'comparison.html'}" in done.stdout
    assert "[3/3] " in done.stderr
    assert (out / "cells" / "dnis-size4-seed0" / "artifact" / "manifest.json").is_file()
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
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.compare, "run_comparison", interrupted)
    done = compare(monkeypatch, "--methods", "dnis", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: interrupted; what has finished is kept, the same command goes on from there" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "unifrom"], "did you mean 'uniform'?"),
        (["--methods", "uniform,"], "--methods: expected names with commas between them, got 'uniform,'"),
        (["--methods", "uniform", "--sizes", "two"], "--sizes: expected numbers with commas between them, got 'two'"),
        (["--methods", "uniform", "--sizes", "1"], "sizes: expected compression ratios above 1, got 1.0"),
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
