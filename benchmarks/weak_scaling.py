"""Time of a bi-level step beside a plain training step, on 1, 2 and 4 ranks.

    python -m benchmarks.weak_scaling [--quick] [--ranks 1,2,4] [--batch-size 1024] --json FILE

Weak scaling: every rank has a batch of the same size, whatever their number. A plain TrainPipelineSparseDist of the
unwrapped model and the bi-level pipeline of the wrapped one take turns on the same ranks, step by step: plain, lower,
upper, plain, ... A step of a round takes as long as on its slowest rank. `pair_ratio` is (lower + upper) / plain, the
median over the rounds, with quartiles; it holds on a busy machine too, the milliseconds do not. gloo, processes of one
machine, its cores shared out between them; the planner chooses the sharding types, for both models alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchrec
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from benchmarks import step_time
from benchmarks.cpu_ranks import hidden_gpus
from benchmarks.files import output_file
from benchmarks.step_time import (
    SHAPES,
    STEPS,
    WARM_UP_ROUNDS,
    Bilevel,
    Plain,
    Shape,
    make_batches,
    numbers,
    spread,
    take_turns,
)
from dnis_torchrec.data.files import write_json

RANKS = [1, 2, 4]
BATCH_SIZE = 1024
ROUNDS, QUICK_ROUNDS = 60, 8
TARGET = 1.7
CPU = torch.device("cpu")


@contextmanager
def together() -> Iterator[None]:
    """Lets all ranks begin a step at once."""
    dist.barrier()
    yield


def run_rank(rank: int, world_size: int, folder: str, shape: Shape, rounds: int) -> None:
    """Takes all rounds on one rank; the first writes what they took."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # Other batches than the next rank's, the same ones altogether: so blocks are alike on all ranks.
    train, validation = make_batches(shape, 8, seed=0), make_batches(shape, 4, seed=1)
    train, validation = (own[rank % len(own) :] + own[: rank % len(own)] for own in (train, validation))
    plain, bilevel = Plain(shape, train, validation, CPU), Bilevel(shape, train, validation, CPU)
    taken = [take_turns(plain, bilevel, lambda _: together()) for _ in range(WARM_UP_ROUNDS + rounds)]
    times = torch.tensor([[own[name] for name in STEPS] for own in taken[WARM_UP_ROUNDS:]])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    if rank == 0:
        found = {"times": times.tolist(), "sharding_types": sharding_types(bilevel), "threads": torch.get_num_threads()}
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def sharding_types(bilevel: Bilevel) -> dict[str, int]:
    """Sharding type -> number of tables."""
    found: dict[str, int] = {}
    for module in bilevel.model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for planned in module.module_sharding_plan.values():
                found[planned.sharding_type] = found.get(planned.sharding_type, 0) + 1
    return found


def measure(shape: Shape, world_size: int, rounds: int) -> dict[str, Any]:
    """A row of the JSON file: the rounds in processes of their own."""
    with tempfile.TemporaryDirectory() as folder, hidden_gpus():
        mp.start_processes(
            run_rank, args=(world_size, folder, shape, rounds), nprocs=world_size, start_method=step_time.START_METHOD
        )
        found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    lower = [own[1] / own[0] for own in found["times"]]
    upper = [own[2] / own[0] for own in found["times"]]
    pair = [a + b for a, b in zip(lower, upper, strict=True)]
    return {
        "ranks": world_size,
        "pair_ratio": round(statistics.median(pair), 3),
        "pair_quartiles": spread(pair),
        "lower_ratio": round(statistics.median(lower), 3),
        "upper_ratio": round(statistics.median(upper), 3),
        "plain_ms": round(statistics.median(own[0] for own in found["times"]), 2),
        "batch_size_per_rank": shape.batch_size,
        "num_tables": len(shape.num_embeddings),
        "num_embeddings": max(shape.num_embeddings),
        "embedding_dim": shape.embedding_dim,
        "sharding_types": found["sharding_types"],
        "threads_per_rank": found["threads"],
        "rounds": rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    """One line per number of ranks."""
    low, high = row["pair_quartiles"]
    verdict = "" if row["pair_ratio"] <= TARGET else f"  above the target of {TARGET}"
    print(
        f"{row['ranks']:>5} {row['pair_ratio']:10.3f} [{low:.3f}, {high:.3f}] {row['lower_ratio']:8.3f} "
        f"{row['upper_ratio']:8.3f} {row['plain_ms']:10.1f}{verdict}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--ranks", type=numbers, default=RANKS, metavar="N,N", help="1,2,4 if absent")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help=f"of every rank; {BATCH_SIZE} if absent")
    parser.add_argument("--json", type=output_file, required=True, help="file to write")
    arguments = parser.parse_args(argv)
    shape = replace(SHAPES["criteo"], batch_size=arguments.batch_size)
    print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, {os.cpu_count()} cores")
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}; batch of every rank: {shape.batch_size}")
    print("ranks pair_ratio [quartiles]       lower    upper   plain_ms")
    rows = []
    for world_size in arguments.ranks:
        rows.append(measure(shape, world_size, QUICK_ROUNDS if arguments.quick else ROUNDS))
        print_row(rows[-1])
    write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
