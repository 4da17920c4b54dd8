"""Cells in processes: several at a time, help with trials, crashes, interrupts; most processes are stand-ins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dnis_torchrec.comparison import processes, worker
from dnis_torchrec.comparison.cells import Cell, CellTask, read_crash, read_result
from dnis_torchrec.comparison.processes import COMMAND, SECONDS_TO_END, run_cells
from dnis_torchrec.data.recipe import Recipe
from tests.cli.test_cli import ROOT, environment
from tests.comparison.test_comparison import REGISTRY
from tests.comparison_stand_ins import calls, is_alive, make_folders, make_out, stand_in
from tests.tiny import make_recipe


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return make_out(tmp_path)


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
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", program))
    run_cells([folder], jobs=1, on_done=lambda folder: None)
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


def ended_while_built(data: Path | None, *, seed: int, embedding_dim: int | None) -> Recipe:
    del data
    signal.raise_signal(signal.SIGTERM)
    return make_recipe(seed=seed, embedding_dim=embedding_dim)


def test_a_cell_that_is_ended_while_its_recipe_is_built_did_not_crash(
    gloo, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(method="uniform", size=2, seed=0)
    recipe = f"{__name__}:{ended_while_built.__name__}"
    rules = {"recipe": recipe, "data": None, "patience": 3, "max_epochs": 2, "trials": None}
    folder = out / "cells" / cell.name
    CellTask(cell=cell, rules=rules, registry=REGISTRY, cells_at_once=1, artifact=False).write(folder)
    monkeypatch.setattr(sys, "argv", ["worker", str(folder)])
    monkeypatch.setattr(worker, "_end_with_parent", lambda: None)
    with pytest.raises(SystemExit) as ended:
        worker.run_process()
    assert ended.value.code == 128 + signal.SIGTERM
    assert read_crash(folder) is None
    assert not (folder / "work").exists()
