"""Growth of a bi-level pair of steps: linear with the batch, and none with the rows of a table.

    python -m benchmarks.step_growth [--quick] [--batch-size 1024,2048] [--num-embeddings 10000,10000000] --json FILE

Bi-level pipelines of the criteo shape of `benchmarks.step_time` (26 tables for the batch, one for the rows, which then
may have 10 million) are built beside each other in one process and take turns: a lower and an upper step of the first,
of the second, ... A round's times are divided by that of the first value, and the median over rounds is what is given,
with quartiles; `time_cpu_ratio` is the same of the process's CPU time, which other programs disturb less. For the batch
`per_sample_ratio` divides the CPU time once more by how much larger the batch is: 1 is linear, less is better than
linear, because some of a step does not depend on the batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torchrec

from benchmarks.files import output_file
from benchmarks.step_time import SHAPES, WARM_UP_ROUNDS, Bilevel, Shape, make_batches, numbers, spread, vary
from dnis_torchrec.data.files import write_json
from dnis_torchrec.training.shard import process_group

BATCH_SIZES = [1024, 2048, 4096, 8192]
NUM_EMBEDDINGS = [10_000, 100_000, 1_000_000, 10_000_000]
ROUNDS, QUICK_ROUNDS = 40, 8
WANTED = 0.1
"""Share by which a step may differ from its expected time."""


def shapes_of(varied: str, values: Sequence[int]) -> list[Shape]:
    """The criteo shape with every value of ``"batch_size"``, or one table with every value of ``"num_embeddings"``."""
    num_tables = 1 if varied == "num_embeddings" else None
    nothing = {"num_tables": num_tables, "num_embeddings": None, "pooling": None}
    return [vary(SHAPES["criteo"], **{**nothing, varied: value}) for value in values]


def take_turns(pipelines: Sequence[Bilevel]) -> tuple[list[float], list[float]]:
    """Seconds of a lower and an upper step of every pipeline: by the clock, and of this process's CPU time."""
    seconds, cpu_seconds = [], []
    for pipeline in pipelines:
        start, start_cpu = time.perf_counter(), time.process_time()
        pipeline.step()
        pipeline.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - start_cpu)
    return seconds, cpu_seconds


def measure(varied: str, values: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measures the steps for each value of the quantity that is varied: a row per value, over the first one."""
    with process_group() as device:
        pipelines = [
            Bilevel(shape, make_batches(shape, 4, seed=0), make_batches(shape, 2, seed=1), device)
            for shape in shapes_of(varied, values)
        ]
        taken = [take_turns(pipelines) for _ in range(WARM_UP_ROUNDS + rounds)][WARM_UP_ROUNDS:]
    rows = []
    for index, value in enumerate(values):
        times, cpu_times = ([one[clock][index] / one[clock][0] for one in taken] for clock in (0, 1))
        row = {
            "varied": varied,
            "value": value,
            "pair_ms": round(1000 * statistics.median(seconds[index] for seconds, _ in taken), 2),
            "time_ratio": round(statistics.median(times), 3),
            "time_quartiles": spread(times),
            "time_cpu_ratio": round(statistics.median(cpu_times), 3),
            "time_cpu_quartiles": spread(cpu_times),
            "rounds": rounds,
        }
        if varied == "batch_size":
            row["per_sample_ratio"] = round(statistics.median(cpu_times) * values[0] / value, 3)
        rows.append(row)
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table of the rows."""
    print(f"\n{rows[0]['varied']:>15}    pair ms      time over the first's    CPU time over the first's  per sample")
    for row in rows:
        (low, high), (low_cpu, high_cpu) = row["time_quartiles"], row["time_cpu_quartiles"]
        own = f"{row['time_ratio']:8.3f} [{low:6.3f}, {high:6.3f}]  {row['time_cpu_ratio']:8.3f}"
        grown = row.get("per_sample_ratio", row["time_cpu_ratio"])
        per_sample = f"{row['per_sample_ratio']:10.3f}" if "per_sample_ratio" in row else f"{'':>10}"
        off = f"  off by {grown - 1:+.0%}" if abs(grown - 1) > WANTED else ""
        print(f"{row['value']:>15} {row['pair_ms']:10.1f}  {own} [{low_cpu:6.3f}, {high_cpu:6.3f}]  {per_sample}{off}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table for the batch and one for the rows, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--batch-size", type=numbers, default=BATCH_SIZES, metavar="N,N")
    parser.add_argument("--num-embeddings", type=numbers, default=NUM_EMBEDDINGS, metavar="N,N", help="of the table")
    parser.add_argument("--json", type=output_file, help="file to write")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, {os.cpu_count()} cores")
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    rows = []
    for varied in ("batch_size", "num_embeddings"):
        found = measure(varied, getattr(arguments, varied), QUICK_ROUNDS if arguments.quick else ROUNDS)
        print_rows(found)
        rows += found
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
