"""Cells in processes of their own, several at a time; a crash leaves the others alone, an interrupt
ends them all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from dnis_torchrec.comparison.cells import (
    HELPS,
    WORK,
    forget_crash,
    read_crash,
    read_result,
    write_crash,
)
from dnis_torchrec.comparison.methods.shared_trials import unclaimed_trials

COMMAND = (sys.executable, "-m", "dnis_torchrec.comparison.worker")
"""Leads a cell: it is given the folder, and `HELPS` if it is to help; its input stays open while
this process lives."""
SECONDS_TO_END = 15
"""Longer than a worker gives itself."""
SECONDS_BETWEEN_LOOKS = 1
"""Between looks for trials to help with, and for an interrupt: one that comes just before a wait
does not wake it."""

TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the names of torchrun's environment variables."""


def default_jobs() -> int:
    """Cells at a time if nothing is said: one per GPU, else one per core, of those that are left to
    this rank."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (torch.cuda.device_count() or len(os.sched_getaffinity(0))) // ranks_here)


def run_cells(folders: Sequence[Path], *, jobs: int, on_done: Callable[[Path], None]) -> None:
    """Runs cells, each led by a process of its own, and waits for all of them."""
    cells_at_once = min(jobs, len(folders))
    free = deque(_environment(slot, cells_at_once) for slot in range(jobs))
    schedule, processes = _Schedule(folders), _Processes()
    at_work: dict[Future[None], tuple[_Job, Mapping[str, str]]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while True:
                while free and (job := schedule.next_job()):
                    environment = free.popleft()
                    at_work[pool.submit(processes.run, job, environment)] = (job, environment)
                if not at_work:
                    return
                ended, _ = wait(at_work, SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
                for future in ended:
                    job, environment = at_work.pop(future)
                    free.append(environment)
                    schedule.end(job)
                    future.result()
                    if not job.helps:
                        processes.end_helpers(job.folder)
                        on_done(job.folder)
        except BaseException:
            processes.end_all()
            raise


@dataclass(frozen=True, eq=False)
class _Job:
    """A process to be: it leads a cell, or helps it."""

    folder: Path
    helps: bool = False


class _Schedule:
    """Says what is next: cells in their order, then help for those at work that have trials nobody
    has begun."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._waiting = deque(folders)
        self._helpers: dict[Path, int] = {}  # of cells at work that may be helped

    def next_job(self) -> _Job | None:
        if self._waiting:
            folder = self._waiting.popleft()
            self._helpers[folder] = 0
            return _Job(folder)
        wanting = [
            folder
            for folder, number in self._helpers.items()
            if number < unclaimed_trials(folder / WORK)
        ]
        if not wanting:
            return None
        folder = min(wanting, key=lambda folder: self._helpers[folder])
        self._helpers[folder] += 1
        return _Job(folder, helps=True)

    def end(self, job: _Job) -> None:
        """Takes note of an end. A cell whose helper has ended, whyever, is helped no more."""
        self._helpers.pop(job.folder, None)


class _Processes:
    """The processes at work. `run` is called from threads, all else from one."""

    def __init__(self) -> None:
        self._running: dict[_Job, subprocess.Popen[bytes]] = {}
        self._lock, self._stopping = threading.Lock(), threading.Event()

    def run(self, job: _Job, environment: Mapping[str, str]) -> None:
        """Runs a job and waits for it."""
        folder = job.folder
        with (folder / "log.txt").open("ab" if job.helps else "wb") as log:
            with (
                self._lock
            ):  # an interrupt finds a process among the running ones, or it is never started
                if self._stopping.is_set():
                    return
                if not job.helps:
                    forget_crash(folder)
                process = subprocess.Popen(
                    [*COMMAND, str(folder), *([HELPS] if job.helps else [])],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    process_group=0,  # Ctrl-C reaches this process only, which then ends the others in order
                )
                self._running[job] = process
            with process:
                process.wait()
        with self._lock:
            del self._running[job]
        has_left_something = read_result(folder) is not None or read_crash(folder) is not None
        if not job.helps and not has_left_something and not self._stopping.is_set():
            write_crash(folder, _silent_end(folder, process.returncode))

    def end_helpers(self, folder: Path) -> None:
        """Ends processes that help a cell which needs no help any more."""
        with self._lock:
            helpers = [
                process
                for job, process in self._running.items()
                if job.helps and job.folder == folder
            ]
        _end(helpers)

    def end_all(self) -> None:
        """Ends everything and lets nothing begin."""
        with self._lock:
            self._stopping.set()
            running = list(self._running.values())
        _end(running)


def _environment(slot: int, cells_at_once: int) -> Mapping[str, str]:
    """The environment of the processes that run in one slot, one after the other."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIXES)
    }
    if cells_at_once > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // cells_at_once))
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = (
            visible.split(",")[:count] if visible else [str(device) for device in range(count)]
        )
        ranks_here, rank = (
            int(os.environ.get(name, n)) for name, n in (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        environment["CUDA_VISIBLE_DEVICES"] = devices[(slot * ranks_here + rank) % count]
    return environment


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()


def _silent_end(folder: Path, returncode: int) -> str:
    """Describes the end of a process without result or traceback, such as one that ran out of
    memory."""
    tail = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
    end = (
        f"was killed by signal {-returncode}"
        if returncode < 0
        else f"ended with exit status {returncode}"
    )
    return f"{tail}\nthe process {end}"
