"""Stand-ins for the processes of a comparison, which need no torch and so start at once.

STAND_IN does to a cell's folder what the real one does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dnis_torchrec.comparison import processes
from dnis_torchrec.comparison.cells import Cell, CellTask
from dnis_torchrec.comparison.processes import run_cells
from tests.comparison.test_comparison import REGISTRY, make_result

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


def make_out(tmp_path: Path) -> Path:
    """Folder of a comparison, with the result that stand-ins give."""
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    canned = make_result(Cell(method="uniform", size=2, seed=0), 0.5, 100).to_json()
    own_tables = {"dense_bytes": 4 * 8 * 52}
    (out / "canned.json").write_text(json.dumps(canned | {"metrics": {"auc": 0.8}} | own_tables))
    return out


def make_folders(out: Path, *sizes: float, seeds: int = 1) -> list[Path]:
    folders = []
    for cell in (Cell(method="uniform", size=size, seed=seed) for size in sizes for seed in range(seeds)):
        folders.append(out / "cells" / cell.name)
        CellTask(cell=cell, rules={}, registry=REGISTRY, cells_at_once=1, artifact=False).write(folders[-1])
    return folders


def stand_in(folders: list[Path], *, jobs: int, on_done: Callable[[Path], None] = lambda folder: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "COMMAND", (sys.executable, "-c", STAND_IN))
        run_cells(folders, jobs=jobs, on_done=on_done)


def calls(out: Path) -> list[str]:
    return sorted((out / "calls").read_text().split())


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
