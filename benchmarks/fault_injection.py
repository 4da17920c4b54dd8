"""Test that a search survives being killed: kills random ranks under the agent of torchrun, and compares the results.

    python -m benchmarks.fault_injection [--kills N] [--ranks W] --json FILE

A small search on several ranks, with fused, sharded tables, runs once undisturbed. Then jobs of the same search are
started, and in each of their attempts a random rank gets SIGKILL at a random moment: in a step, in a collective, while
a checkpoint is being written. The agent starts all ranks again and they resume, until the search has finished. Printed
and written: {"kills", "finished", "identical"}: how many kills there were, how many of them were in jobs that finished,
and how many in jobs whose alpha and tables are those of the undisturbed search, bit for bit. Every attempt first reads
all checkpoints that it finds; one that cannot be read fails the job.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.files import output_file
from dnis_torchrec.data.files import write_json
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.search.search import Saving, SearchEvents, search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training.checkpoint import CheckpointFolder, Manifest
from dnis_torchrec.training.shard import process_group
from examples.datasets.synthetic import generate
from examples.models import build_dlrm, build_tables, network_of_seed

KILLS_PER_JOB, EPOCHS = 5, 4
STEPS_PER_ATTEMPT = 40
"""A kill comes after at most so many steps of an attempt: the whole search is 150 lower steps."""
CHECKPOINT_EVERY = 7
LONGEST_DELAY = 0.05
"""Seconds from the step to the kill: long enough to hit whatever comes after it."""
JOB_SECONDS = 900


def recipe() -> Recipe:
    """A DLRM on generated data whose tables are fused and cut over the ranks; 25 steps an epoch."""
    samples = generate(4000, seed=0).samples

    def build() -> nn.Module:
        tables = build_tables(samples.num_embeddings, 8, init_std=0.1)
        return build_dlrm(tables, dense_in_features=samples.dense.shape[1], dense_layers=[16], over_layers=[16])

    return Recipe(
        model=network_of_seed(build, 0),
        data=samples.split(batch_size=128, seed=0),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer="rowwise_adagrad",
        table_learning_rate=0.02,
        dense_learning_rate=2e-3,
    )


def work(folder: Path) -> None:
    """Runs the search on one rank, and kills this rank where the plan of this attempt says so."""
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    steps = 0

    def on_step(loss: float, density: float) -> None:
        nonlocal steps
        steps += 1
        kills = plan["kills"]
        if attempt < len(kills) and [dist.get_rank(), steps] == [kills[attempt]["rank"], kills[attempt]["step"]]:
            (folder / f"killed{attempt}").touch()
            threading.Timer(kills[attempt]["delay"], os.kill, (os.getpid(), signal.SIGKILL)).start()

    with process_group() as device:
        rank = dist.get_rank()
        checkpoints = folder / "checkpoints"
        if rank == 0:
            read_all(checkpoints)
        torch.manual_seed(0)
        own = recipe()
        saving = Saving(checkpoint_every=CHECKPOINT_EVERY, resume=True)
        settings, events = SearchSettings(epochs=plan["epochs"], num_blocks=4), SearchEvents(on_step=on_step)
        outcome = search(own, 4.0, checkpoints, device, settings=settings, events=events, saving=saving)
        if rank == 0:
            (folder / "history.json").write_text(json.dumps([vars(record) for record in outcome.history]))
        found = {f"alpha/{dim}": value for dim, value in outcome.alpha.items()}
        for module in collections(outcome.model).values():
            for shard in local_shards(module):
                found[f"table/{shard.table}/{shard.first_row}/{shard.first_column}"] = shard.weight.contiguous()
        save_file(found, folder / f"result.rank{rank}.safetensors")


def read_all(checkpoints: Path) -> None:
    """Reads every checkpoint that there is, whole.

    Raises:
        ValueError: if one is damaged.
    """
    folder = CheckpointFolder(checkpoints)
    folder.latest()
    for step in folder.steps():
        path = folder.path_of(step)
        for name in Manifest.read(path).files:
            load_file(path / name)


def start(folder: Path, kills: list[dict[str, Any]], ranks: int, epochs: int) -> BaseProcess:
    """Starts a job in a folder of its own."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"kills": kills, "epochs": epochs}), encoding="utf-8")
    # a server that has imported everything forks the ranks of every attempt in no time
    job = multiprocessing.get_context("forkserver").Process(target=launch, args=(folder, len(kills), ranks))
    job.start()
    return job


def launch(folder: Path, max_restarts: int, ranks: int) -> None:
    """Does what torchrun does: starts all ranks, and all of them again as one has died."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    multiprocessing.set_forkserver_preload([__name__])  # a forked process begins a server of its own
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else restarted ranks find the addresses of the dead ones
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method="forkserver",
    )
    elastic_launch(config, work)(folder)


def has_finished(job: BaseProcess) -> bool:
    """Waits for a job; one that takes too long is ended with all its ranks."""
    job.join(JOB_SECONDS)
    if job.exitcode is None:
        job.terminate()  # and it ends its ranks
        job.join(JOB_SECONDS)
    return job.exitcode == 0


def is_identical(folder: Path, undisturbed: Path) -> bool:
    """Returns whether alpha, tables and history of two jobs are the same, bit for bit."""
    names = sorted(path.name for path in undisturbed.glob("result.rank*.safetensors"))
    return all((folder / name).read_bytes() == (undisturbed / name).read_bytes() for name in ["history.json", *names])


def inject(kills: int, folder: Path, seed: int, ranks: int, epochs: int = EPOCHS) -> dict[str, int]:
    """Runs all jobs, the undisturbed one beside the first.

    Args:
        kills: how many.
        folder: existing and empty.
        seed: of ranks, steps and moments.
        ranks: of every job.
        epochs: of the search, at most.

    Returns:
        ``{"kills", "finished", "identical"}``.
    """
    draw = random.Random(seed)
    plan = [
        {
            "rank": draw.randrange(ranks),
            "step": draw.randint(1, STEPS_PER_ATTEMPT),
            "delay": draw.uniform(0, LONGEST_DELAY),
        }
        for _ in range(kills)
    ]
    found = {"kills": 0, "finished": 0, "identical": 0}
    reference = start(folder / "undisturbed", [], ranks, epochs)
    reference_finished: bool | None = None
    for number, first in enumerate(range(0, kills, KILLS_PER_JOB)):
        own = folder / f"job{number}"
        started = time.monotonic()
        finished = has_finished(start(own, plan[first : first + KILLS_PER_JOB], ranks, epochs))
        if reference_finished is None:
            reference_finished = has_finished(reference)
        done = len(list(own.glob("killed*")))
        found["kills"] += done
        found["finished"] += done * finished
        found["identical"] += done * (finished and reference_finished and is_identical(own, folder / "undisturbed"))
        seconds = time.monotonic() - started
        print(f"job {number}: {done} kills, finished: {finished}, {seconds:.0f} s", file=sys.stderr)
        if not finished:
            print((own / "log").read_text(encoding="utf-8")[-4000:], file=sys.stderr)
    return found


def main() -> None:
    """Parses, runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many")
    parser.add_argument("--ranks", type=int, default=2, help="of every job")
    parser.add_argument("--seed", type=int, default=0, help="of ranks, steps and moments")
    parser.add_argument("--json", type=output_file, help="also write the result here")
    given = parser.parse_args()
    multiprocessing.set_forkserver_preload(["benchmarks.fault_injection"])
    with tempfile.TemporaryDirectory() as folder:
        result = inject(given.kills, Path(folder), given.seed, given.ranks)
    print(json.dumps(result))
    if given.json is not None:
        write_json(given.json, result)


if __name__ == "__main__":
    main()
