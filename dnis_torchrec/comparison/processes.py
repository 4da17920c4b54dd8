"""One process per cell, several at a time; a crash in one leaves the others alone, and an interrupt ends them all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

import torch

from dnis_torchrec.comparison.cells import read_crash, read_result, write_crash

COMMAND = (sys.executable, "-m", "dnis_torchrec.comparison.worker")
SECONDS_TO_END = 15
"""Longer than a worker gives itself."""

TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the names of torchrun's environment variables."""


def default_jobs() -> int:
    """Cells at a time if nothing is said: one per GPU, else one per core that this process may use."""
    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def run_cells(
    folders: Sequence[Path],
    *,
    jobs: int,
    on_done: Callable[[Path], None],
    command: Sequence[str] = COMMAND,
) -> None:
    """Runs cells, each in a process of its own, and waits for all of them.

    Every folder ends with a result.json or a crash.txt. Processes share the threads that torch has in this one, which
    are as many as cores, or OMP_NUM_THREADS; GPUs are dealt out, one per process, in turn.

    Args:
        folders: of the cells, each with its task.json.
        jobs: processes at a time.
        on_done: called with each folder when its process has ended.
        command: the program that is given the folder; its standard input is open as long as this process lives.

    Raises:
        BaseException: whatever `on_done` raises, an interrupt, or a process or its log that cannot be begun; all
            processes have been ended then.
    """
    environments: SimpleQueue[Mapping[str, str]] = SimpleQueue()
    for slot in range(jobs):
        environments.put(_environment(slot, jobs))
    running: set[subprocess.Popen[bytes]] = set()
    lock, stopping = threading.Lock(), threading.Event()

    def run(folder: Path, environment: Mapping[str, str]) -> None:
        with (folder / "log.txt").open("wb") as log:
            with lock:  # an interrupt finds a process among the running ones, or it is never started
                if stopping.is_set():
                    return
                process = subprocess.Popen(
                    [*command, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    process_group=0,  # Ctrl-C reaches this process only, which then ends the others in order
                )
                running.add(process)
            with process:
                process.wait()
        running.discard(process)
        if not stopping.is_set() and read_result(folder) is None and read_crash(folder) is None:
            write_crash(folder, _silent_end(folder, process.returncode))

    def run_in_slot(folder: Path) -> None:
        environment = environments.get()
        try:
            run(folder, environment)
        finally:  # whoever waits for the slot would wait for ever
            environments.put(environment)

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run_in_slot, folder): folder for folder in folders}
        try:
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        except BaseException:
            with lock:
                stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            _end(list(running))
            raise


def _environment(slot: int, num_slots: int) -> Mapping[str, str]:
    """The environment of the processes that run in one slot, one after the other.

    What torchrun told this process is left out: a cell is a job of one rank, of its own.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(TORCHRUN_PREFIXES)}
    if num_slots > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // num_slots))
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = visible.split(",")[:count] if visible else [str(device) for device in range(count)]
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % count]
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
    """What to say of a process that left neither a result nor a traceback, as one that ran out of memory does."""
    tail = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
    end = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit status {returncode}"
    return f"{tail}\nthe process {end}"
