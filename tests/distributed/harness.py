"""Runs named scenarios on spawned ranks: what all tests of several ranks share.

A scenario is a function of a module (or a partial of one) that takes a `Rank` and returns a dict of tensors, numbers,
strings, and lists and dicts of them. All scenarios of a file run one after the other in the same processes, each in a
process group of its own, so that one that hangs fails by itself; the tests then judge what came out:

    with running_ranks(2, joined(sums={"sum": sum_of_ranks}, ...), tmp_path) as ranks:
        first, second = ranks.part("sums")["sum"]  # fails with the traceback of every rank on which it raised
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HANG_SECONDS = 60
"""A collective of a scenario that takes longer has lost a rank."""
DEADLINE_SECONDS = 600
"""All scenarios together, on a machine that has much else to do."""

Results = dict[str, Any]


@dataclass(frozen=True)
class Rank:
    """Where a scenario runs."""

    rank: int
    world_size: int
    folder: Path  # that all ranks see
    process_group: dist.ProcessGroup  # of all ranks, of this scenario alone
    device: torch.device  # this rank's GPU on nccl, else the CPU


Scenario = Callable[[Rank], Results]


class RankResults:
    """What all ranks reported. The first look at it waits for them: until then a test's own process may do its part."""

    def __init__(self, context: mp.ProcessContext, folder: Path, world_size: int) -> None:
        self.folder = folder
        self.world_size = world_size
        self._context = context
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._results: list[dict[str, Results]] = []

    def __getitem__(self, scenario: str) -> list[Results]:
        """The results of a scenario, one per rank; fails with the ranks' tracebacks if it did not go through."""
        self.wait()
        tracebacks = [
            f"rank {rank}: {own[scenario]['traceback']}"
            for rank, own in enumerate(self._results)
            if "traceback" in own[scenario]
        ]
        assert not tracebacks, "\n".join(tracebacks)
        return [own[scenario] for own in self._results]

    def part(self, thing: str) -> Part:
        """What the scenarios of one thing reported."""
        return Part(self, thing)

    def wait(self) -> None:
        """Waits for all ranks."""
        if self._results:
            return
        while not self._context.join(timeout=max(self._deadline - time.monotonic(), 0.1)):
            assert time.monotonic() < self._deadline, "the ranks did not come to an end"
        reports = [_report(self.folder, rank) for rank in range(self.world_size)]
        self._results = [torch.load(report, weights_only=True) for report in reports]


@dataclass(frozen=True)
class Part:
    """The view of one thing's scenarios that were `joined` to others."""

    ranks: RankResults
    thing: str

    def __getitem__(self, scenario: str) -> list[Results]:
        """The results of a scenario, one per rank."""
        return self.ranks[f"{self.thing}/{scenario}"]

    @property
    def folder(self) -> Path:
        """The folder that its scenarios have, which is there once the ranks have come to it."""
        return self.ranks.folder / self.thing


def joined(**things: Mapping[str, Scenario]) -> dict[str, Scenario]:
    """The scenarios of several things for one launch, each thing with a folder of its own."""
    return {f"{thing}/{name}": scenario for thing, own in things.items() for name, scenario in own.items()}


@contextmanager
def running_ranks(
    world_size: int,
    scenarios: Mapping[str, Scenario],
    folder: Path,
    *,
    backend: str = "gloo",
    local_world_size: int | None = None,  # ranks that take themselves for those of one host
) -> Iterator[RankResults]:
    """Starts ranks that run the scenarios in the order given; none is left behind at the end of the block."""
    # A server that has imported everything forks ranks in no time; CUDA may not be forked, and what is to run on CPUs
    # is to see no GPU.
    start_method = "spawn" if backend == "nccl" else "forkserver"
    hidden = {} if backend == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
    with _environment(OMP_NUM_THREADS="1", **hidden):
        context = mp.start_processes(
            _run_rank,
            args=(world_size, dict(scenarios), str(folder), backend, local_world_size or world_size),
            nprocs=world_size,
            join=False,
            start_method=start_method,
        )
    try:
        yield RankResults(context, folder, world_size)
    finally:
        for process in context.processes:
            process.kill()


def _run_rank(
    rank: int, world_size: int, scenarios: dict[str, Scenario], folder: str, backend: str, local_world_size: int
) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    results: dict[str, Results] = {}
    for name, scenario in scenarios.items():
        own = Path(folder) / name.rpartition("/")[0]
        own.mkdir(exist_ok=True)
        process_group = dist.new_group(timeout=timedelta(seconds=HANG_SECONDS))
        try:
            results[name] = scenario(Rank(rank, world_size, own, process_group, device))
        except Exception:
            results[name] = {"traceback": traceback.format_exc()}
    torch.save(results, _report(Path(folder), rank))
    dist.destroy_process_group()


def _report(folder: Path, rank: int) -> Path:
    return folder / f"results.rank{rank}.pt"


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
