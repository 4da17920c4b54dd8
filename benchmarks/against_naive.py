"""The search beside the paper's way as one would write it in plain PyTorch: time to a validation loss, and memory.

    python -m benchmarks.against_naive [--quick] [--num-rows 10000,100000] --json FILE

Both sides learn matrix factorisation (two tables, D = 64, S = 10, batch 4096) with first-order bi-level steps, a lower
and an upper one in turns, on the same generated data, until the validation loss falls below the same target.

- naive: nn.Embedding, alpha gathered and multiplied per lookup, everything through autograd, Adam over whole tables,
  alpha's gradient normalised by rows. Its upper step asks autograd for the gradient of alpha alone.
- dnis: prepare_, training.shard and BilevelTrainPipeline, row-wise Adagrad fused into the tables' backward.

Nine ids in ten come from the same few thousand rows whatever the size of the tables, so that the task stays equally
hard and only the cost of rows grows. Each side's learning rate is the one of its own grid that reaches the target in
the fewest pairs of steps at TUNING_ROWS. The clock runs in steps only; preparation is given beside, evaluation is not.
Every run has a process of its own; its memory is the growth of the peak of its resident memory after the imports.

``time_ratio`` and ``memory_ratio`` are dnis over naive: below 1 this project needs less. They are medians over repeats
in which the sides take turns, each repeat with data and weights of its own. The naive side may take as many times the
seconds of the other as TIME_LIMIT says. Where it is not there by then, ``is_bound`` is true: it would have taken longer
still, so that the ratio is at most what is given. Its memory has peaked in its first step. ``time_cpu_ratio`` is the
same of the CPU time of the processes, which other programs disturb less. Where dnis does not reach the target there are
no ratios of time, and no ratios at all where the naive side would not fit into this machine's memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.files import output_file
from benchmarks.step_time import numbers
from dnis_torchrec import (
    BilevelStream,
    BilevelTrainPipeline,
    DataSplits,
    LevelSchedule,
    Recipe,
    TrainTask,
    blocks_from_counts,
    count_frequencies,
    prepare_,
)
from dnis_torchrec.data.files import write_json
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import process_group, shard
from examples.models import build_tables

FEATURES = ("user", "item")
EMBEDDING_DIM, BATCH_SIZE, NUM_BLOCKS, INIT_STD = 64, 4096, 10, 0.1
HEAD_ROWS, HEAD_SHARE = 2500, 0.9
TRUE_DIMS, NOISE = 2, 0.3
TRAIN_BATCHES, HELD_OUT_BATCHES = 60, 4
ALPHA_LEARNING_RATE = 0.01
LEARNING_RATES = {"naive": (0.03, 0.01, 0.1), "dnis": (0.1, 0.03, 0.3)}
"""Learning rates of Adam over whole tables, and of row-wise Adagrad. The likeliest is first; others have to beat it."""
TUNING_ROWS = 100_000

TARGET_LOSS = 0.35
"""Mean squared error; a constant gives 1.09, the truth 0.09, and the truth of the head rows alone 0.28."""

PAIRS_PER_EVALUATION = 2
MAX_PAIRS = 400
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000, 10_000_000), (10_000, 100_000, 1_000_000)
REPEATS, QUICK_REPEATS = 3, 1
TIME_LIMIT, QUICK_TIME_LIMIT = 100, 20
"""Times the seconds of the other side that the naive one may take."""
NAIVE_COPIES = 6
"""Tables that the naive side holds: weights, gradient, Adam's two moments, and the temporary tensors of its step."""


def true_factors(ids: Tensor, feature: int) -> Tensor:
    """Hidden factors of rows, ``(ids, TRUE_DIMS)``, of mean square 1: made from the id, so that no table is needed."""
    frequencies = torch.tensor([12.9898, 78.233], dtype=torch.float64) + 3.7 * feature
    return math.sqrt(2) * torch.cos(ids.double().unsqueeze(1) * frequencies).float()


def make_batches(num_rows: int, num_batches: int, seed: int) -> list[Batch]:
    """Batches of (user, item, rating); half of the rows belong to each table."""
    generator = torch.Generator().manual_seed(seed)
    rows, batches = num_rows // 2, []
    head = min(HEAD_ROWS, rows)
    for _ in range(num_batches):
        zipf = (head ** torch.rand(2, BATCH_SIZE, generator=generator)).long().sub(1).clamp(0, head - 1)
        anywhere = torch.randint(0, rows, (2, BATCH_SIZE), generator=generator)
        ids = torch.where(torch.rand(2, BATCH_SIZE, generator=generator) < HEAD_SHARE, zipf, anywhere)
        signal = (true_factors(ids[0], 0) * true_factors(ids[1], 1)).sum(1) / math.sqrt(TRUE_DIMS)
        labels = signal + NOISE * torch.randn(BATCH_SIZE, generator=generator)
        lengths = torch.ones(2 * BATCH_SIZE, dtype=torch.int32)
        features = KeyedJaggedTensor(keys=list(FEATURES), values=ids.flatten(), lengths=lengths)
        batches.append(Batch(dense_features=torch.zeros(BATCH_SIZE, 1), sparse_features=features, labels=labels))
    return batches


class Factorisation(nn.Module):
    """The dot product of two pooled embeddings, and a bias."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts a rating per sample."""
        pooled = self.tables(sparse_features)
        return (pooled["user"] * pooled["item"]).sum(1) + self.bias


class NaiveFactorisation(nn.Module):
    """The same in plain PyTorch, with soft selection (paper, eq. 3) as one multiplies it in."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        rows = num_rows // 2
        self.tables = nn.ModuleList(nn.Embedding(rows, EMBEDDING_DIM) for _ in FEATURES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=INIT_STD)
        self.bias = nn.Parameter(torch.zeros(()))
        self.alpha = nn.Parameter(torch.ones(NUM_BLOCKS, EMBEDDING_DIM))
        self.register_buffer("block_of_row", torch.arange(rows) * NUM_BLOCKS // rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Predicts a rating per sample of ids ``(2, B)``."""
        user, item = (
            table(own) * self.alpha[self.block_of_row[own]] for table, own in zip(self.tables, ids, strict=True)
        )
        return (user * item).sum(1) + self.bias


Side = tuple[Callable[[], None], Callable[[], float]]
"""A pair of steps, lower and upper; and the loss on the selection split."""


def naive_side(num_rows: int, learning_rate: float, data: DataSplits) -> Iterator[Side]:
    """The paper's way."""
    model, loss = NaiveFactorisation(num_rows), nn.MSELoss()
    optimizer = torch.optim.Adam([*model.tables.parameters(), model.bias], lr=learning_rate)
    train, validation = endless(data.train), endless(data.validation)

    def loss_of(batch: Batch) -> Tensor:
        return loss(model(batch.sparse_features.values().view(2, -1)), batch.labels)

    def pair() -> None:
        optimizer.zero_grad()
        loss_of(next(train)).backward()
        optimizer.step()
        (gradient,) = torch.autograd.grad(loss_of(next(validation)), [model.alpha])
        with torch.no_grad():
            direction = gradient / (gradient.abs().mean(dim=1, keepdim=True) + 1e-7)
            model.alpha.sub_(ALPHA_LEARNING_RATE * direction).clamp_(0, 1)

    @torch.no_grad()
    def selection_loss() -> float:
        return statistics.mean(float(loss_of(batch)) for batch in data.selection)

    yield pair, selection_loss


def dnis_side(num_rows: int, learning_rate: float, data: DataSplits) -> Iterator[Side]:
    """This project."""
    meta = torch.device("meta")  # where TorchRec wants large tables: it initialises them once they are sharded
    tables = build_tables(dict.fromkeys(FEATURES, num_rows // 2), EMBEDDING_DIM, init_std=INIT_STD, device=meta)
    recipe = Recipe(
        model=Factorisation(tables),
        data=data,
        loss=nn.MSELoss(),
        table_optimizer="rowwise_adagrad",
        table_learning_rate=learning_rate,
    )
    configs = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in data.train), configs)
    blocks = blocks_from_counts(counts, configs, num_blocks=NUM_BLOCKS)
    task = TrainTask(prepare_(recipe.model, blocks), recipe.loss)
    with process_group() as device:
        model, optimizer = shard(task, recipe, device)
        pipeline = BilevelTrainPipeline(model.train(), optimizer, device)
        stream = BilevelStream(data.train, data.validation, LevelSchedule(warm_up_steps=1))

        def pair() -> None:
            for _ in range(2):
                pipeline.progress(stream)

        def selection_loss() -> float:
            with pipeline.detached() as evaluated:
                return evaluate(evaluated, data.selection, recipe.loss, device)["loss"]

        yield pair, selection_loss


SIDES = {"naive": naive_side, "dnis": dnis_side}


def endless(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The batches again and again."""
    while True:
        yield from batches


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one side."""

    side: str
    num_rows: int
    learning_rate: float
    max_pairs: int
    max_seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a job."""

    seconds: float
    cpu_seconds: float
    preparation_seconds: float
    pairs: int
    is_reached: bool
    best_loss: float
    peak_bytes: int


def run_here(job: Job) -> Run:
    """Trains one side in this process until the target, or a limit, is reached."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(job.seed)
    splits = [
        make_batches(job.num_rows, count, 3 * job.seed + split)
        for split, count in enumerate((TRAIN_BATCHES, HELD_OUT_BATCHES, HELD_OUT_BATCHES))
    ]
    data = DataSplits(train=splits[0], validation=splits[1], selection=splits[2], test=())
    seconds, cpu_seconds, pairs, best = 0.0, 0.0, 0, math.inf
    limit = math.inf if job.max_seconds is None else job.max_seconds
    started = time.perf_counter()
    for pair, selection_loss in SIDES[job.side](job.num_rows, job.learning_rate, data):
        preparation = time.perf_counter() - started
        while best > TARGET_LOSS and pairs < job.max_pairs and seconds < limit:
            for _ in range(PAIRS_PER_EVALUATION):
                start, start_cpu = time.perf_counter(), time.process_time()
                pair()
                seconds += time.perf_counter() - start
                cpu_seconds += time.process_time() - start_cpu
                pairs += 1
                if seconds >= limit:
                    break
            best = min(best, selection_loss())
    return Run(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        preparation_seconds=preparation,
        pairs=pairs,
        is_reached=best <= TARGET_LOSS,
        best_loss=best,
        peak_bytes=1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    )


def run_apart(job: Job) -> Run:
    """`run_here` in a fresh process, whose peak memory is its own."""
    command = [sys.executable, "-m", "benchmarks.against_naive", "--run", json.dumps(asdict(job))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


RunJob = Callable[[Job], Run]


def tuned_learning_rate(side: str, num_rows: int, run: RunJob) -> float:
    """The learning rate of a side's grid that reaches the target in the fewest pairs, or comes nearest to it."""
    tried: dict[float, tuple[bool, float]] = {}
    max_pairs = MAX_PAIRS
    for rate in LEARNING_RATES[side]:
        result = run(Job(side=side, num_rows=num_rows, learning_rate=rate, max_pairs=max_pairs))
        tried[rate] = (not result.is_reached, result.pairs if result.is_reached else result.best_loss)
        if result.is_reached:
            max_pairs = result.pairs
    return min(tried, key=tried.__getitem__)


def naive_fits(num_rows: int) -> bool:
    """Returns whether this machine has the memory for NAIVE_COPIES of the tables, and a fifth to spare."""
    return NAIVE_COPIES * num_rows * EMBEDDING_DIM * 4 < 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def compare(num_rows: int, rates: dict[str, float], time_limit: float, repeats: int, run: RunJob) -> dict[str, Any]:
    """The row of one size: the sides in turns, `repeats` times."""
    runs: dict[str, list[Run]] = {"naive": [], "dnis": []}
    fits = naive_fits(num_rows)
    for seed in range(repeats):
        job = Job(side="dnis", num_rows=num_rows, learning_rate=rates["dnis"], max_pairs=MAX_PAIRS, seed=seed)
        runs["dnis"].append(run(job))
        if fits:
            limit = time_limit * runs["dnis"][-1].seconds
            job = replace(job, side="naive", learning_rate=rates["naive"], max_seconds=limit)
            runs["naive"].append(run(job))
    not_reached = [side for side, own in runs.items() if not all(r.is_reached for r in own)]
    has_times = fits and "dnis" not in not_reached

    def ratios(quantity: str) -> list[float]:
        return [getattr(d, quantity) / getattr(n, quantity) for d, n in zip(runs["dnis"], runs["naive"], strict=False)]

    times = ratios("seconds")
    row: dict[str, Any] = {
        "num_rows": num_rows,
        "time_ratio": round(statistics.median(times), 4) if has_times else None,
        "memory_ratio": round(statistics.median(ratios("peak_bytes")), 4) if fits else None,
        "is_bound": has_times and "naive" in not_reached,
        "time_cpu_ratio": round(statistics.median(ratios("cpu_seconds")), 4) if has_times else None,
        "time_ratio_range": [round(min(times), 4), round(max(times), 4)] if has_times else None,
        "not_reached": not_reached,
        "target_loss": TARGET_LOSS,
        "repeats": repeats,
    }
    for side, own in runs.items():
        medians = {name: statistics.median(getattr(r, name) for r in own) for name in QUANTITIES} if own else None
        row[side] = medians and {"learning_rate": rates[side], **medians}
    return row


QUANTITIES = ("seconds", "cpu_seconds", "preparation_seconds", "pairs", "best_loss", "peak_bytes")
"""Fields of a `Run` whose medians stand in a row."""


def print_row(row: dict[str, Any]) -> None:
    """Prints one line of the table, and further ones for facts that it has no column for."""
    sides = "  ".join(
        f"{own['seconds']:9.2f} s {own['pairs']:5.0f} {own['peak_bytes'] / 2**20:8.0f}" if own else f"{'-':>26}"
        for own in (row["naive"], row["dnis"])
    )
    time_ratio, memory_ratio = ("-" if row[n] is None else f"{row[n]:.3f}" for n in ("time_ratio", "memory_ratio"))
    sign = "<=" if row["is_bound"] else ""
    print(f"{row['num_rows']:>10}  {sides}  {sign + time_ratio:>8} {memory_ratio:>7}", flush=True)
    if row["naive"] is None:
        print(f"{'':>10}  naive would need {NAIVE_COPIES} times the tables, more than this machine has", flush=True)
    for side in row["not_reached"]:
        best, seconds = row[side]["best_loss"], row[side]["seconds"]
        print(f"{'':>10}  {side} came down to {best:.3f}, not to {TARGET_LOSS}, in {seconds:.1f} s", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sizes, one repeat, a shorter time limit")
    parser.add_argument("--num-rows", type=numbers, metavar="N,N", help="of both tables together")
    parser.add_argument("--json", type=output_file, help="file to write")
    parser.add_argument("--run", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.num_rows = arguments.num_rows or (QUICK_SIZES if arguments.quick else SIZES)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    arguments = parse(argv)
    if arguments.run:
        print(json.dumps(asdict(run_here(Job(**json.loads(arguments.run))))))
        return
    repeats, limit = (QUICK_REPEATS, QUICK_TIME_LIMIT) if arguments.quick else (REPEATS, TIME_LIMIT)
    tuning_rows = min(TUNING_ROWS, max(arguments.num_rows))
    rates = {side: tuned_learning_rate(side, tuning_rows, run_apart) for side in LEARNING_RATES}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios: dnis over naive")
    print("      rows   naive: time pairs      MiB   dnis: time pairs      MiB      time  memory")
    rows = []
    for num_rows in arguments.num_rows:
        rows.append(compare(num_rows, rates, limit, repeats, run_apart))
        print_row(rows[-1])
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
