"""The search beside the paper's way as one would write it in plain PyTorch: time to a validation loss, and memory.

    python -m benchmarks.against_naive [--quick] [--num-rows 10000,100000] --json FILE

Both sides learn matrix factorisation (two tables, D = 64, S = 10, batch 4096) with first-order bi-level steps, a lower
and an upper one in turns, on the same generated data, until the validation loss falls below the same target.

- naive: nn.Embedding, alpha gathered and multiplied per lookup, everything through autograd, Adam over whole tables,
  alpha's gradient normalised by rows. Its upper step asks autograd for the gradient of alpha alone.
- dnis: prepare_, training.shard and BilevelTrainPipeline, row-wise Adagrad fused into the tables' backward.

Nine ids in ten come from the same few thousand rows whatever the size of the tables, so that the task stays equally
hard and only the cost of rows grows. Each side's learning rate is the one of its own grid that reaches the target in
the fewest pairs of steps at the smallest size. The clock runs in steps only, not in preparation or evaluation. Every
run has a process of its own; its memory is the growth of its peak after the imports.

``time_ratio`` and ``memory_ratio`` are dnis over naive: below 1 this project needs less. They are medians over repeats
in which the sides take turns. A side that does not reach the target is named in ``not_reached``, and ``time_ratio`` is
null.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
from dnis_torchrec.search import table_configs
from dnis_torchrec.training import evaluate, process_group, shard
from examples.models import build_tables

FEATURES = ("user", "item")
EMBEDDING_DIM, BATCH_SIZE, NUM_BLOCKS, INIT_STD = 64, 4096, 10, 0.1
HEAD_ROWS, HEAD_SHARE = 2500, 0.9
TRUE_DIMS, NOISE = 2, 0.3
TRAIN_BATCHES, HELD_OUT_BATCHES = 60, 4
ALPHA_LEARNING_RATE = 0.01
LEARNING_RATES = {"naive": (0.01, 0.03, 0.1), "dnis": (0.03, 0.1, 0.3)}
"""Of Adam over whole tables, and of row-wise Adagrad."""

TARGET_LOSS = 0.5
"""Mean squared error; a constant gives 1.09, the truth 0.09, and the truth of the head rows alone 0.28."""

PAIRS_PER_EVALUATION = 2
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000, 10_000_000), (10_000, 100_000)
MAX_PAIRS, QUICK_MAX_PAIRS = 600, 200


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
    tables = build_tables(dict.fromkeys(FEATURES, num_rows // 2), EMBEDDING_DIM, init_std=INIT_STD)
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
    del tables  # else the tables that TorchRec has copied into its kernels are held twice
    with process_group() as device:
        model, optimizer = shard(task, recipe, device)
        pipeline = BilevelTrainPipeline(model.train(), optimizer, device, alpha_learning_rate=ALPHA_LEARNING_RATE)
        stream = BilevelStream(data.train, data.validation, LevelSchedule(warm_up_steps=1, upper_every=1))

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
class Run:
    """What one run of one side came to.

    Attributes:
        seconds: in steps, until the target was reached or the pairs ran out.
        pairs: of steps, taken until then.
        is_reached: whether the target was.
        best_loss: lowest selection loss seen.
        peak_bytes: growth of the process's peak memory.
    """

    seconds: float
    pairs: int
    is_reached: bool
    best_loss: float
    peak_bytes: int


def run_here(side: str, num_rows: int, learning_rate: float, max_pairs: int) -> Run:
    """Trains one side in this process until the target is reached."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    splits = [
        make_batches(num_rows, count, seed)
        for seed, count in enumerate((TRAIN_BATCHES, HELD_OUT_BATCHES, HELD_OUT_BATCHES))
    ]
    data = DataSplits(train=splits[0], validation=splits[1], selection=splits[2], test=())
    seconds, pairs, best = 0.0, 0, math.inf
    for pair, selection_loss in SIDES[side](num_rows, learning_rate, data):
        while best > TARGET_LOSS and pairs < max_pairs:
            start = time.perf_counter()
            for _ in range(PAIRS_PER_EVALUATION):
                pair()
            seconds += time.perf_counter() - start
            pairs += PAIRS_PER_EVALUATION
            best = min(best, selection_loss())
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return Run(seconds=seconds, pairs=pairs, is_reached=best <= TARGET_LOSS, best_loss=best, peak_bytes=peak)


def run_apart(side: str, num_rows: int, learning_rate: float, max_pairs: int) -> Run:
    """`run_here` in a fresh process, whose peak memory is its own."""
    values = [side, str(num_rows), str(learning_rate), str(max_pairs)]
    command = [sys.executable, "-m", "benchmarks.against_naive", "--run", *values]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


RunSide = Callable[[str, int, float, int], Run]


def tuned_learning_rate(side: str, num_rows: int, max_pairs: int, run: RunSide) -> float:
    """The learning rate of a side's grid that reaches the target in the fewest pairs, or comes nearest to it."""

    def badness(learning_rate: float) -> tuple[bool, float]:
        tried = run(side, num_rows, learning_rate, max_pairs)
        return not tried.is_reached, tried.pairs if tried.is_reached else tried.best_loss

    return min(LEARNING_RATES[side], key=badness)


def compare(num_rows: int, learning_rates: dict[str, float], max_pairs: int, repeats: int, run: RunSide) -> dict:
    """The row of one size: the sides in turns, `repeats` times."""
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            runs[side].append(run(side, num_rows, learning_rates[side], max_pairs))
    pairs = list(zip(runs["dnis"], runs["naive"], strict=True))
    times = [dnis.seconds / naive.seconds for dnis, naive in pairs]
    not_reached = [side for side in SIDES if not all(own.is_reached for own in runs[side])]
    row: dict[str, Any] = {
        "num_rows": num_rows,
        "time_ratio": None if not_reached else round(statistics.median(times), 4),
        "memory_ratio": round(statistics.median(dnis.peak_bytes / naive.peak_bytes for dnis, naive in pairs), 4),
        "time_ratio_range": None if not_reached else [round(min(times), 4), round(max(times), 4)],
        "not_reached": not_reached,
        "target_loss": TARGET_LOSS,
        "repeats": repeats,
    }
    for side, own in runs.items():
        row[side] = {
            "learning_rate": learning_rates[side],
            "seconds": round(statistics.median(r.seconds for r in own), 3),
            "pairs": statistics.median(r.pairs for r in own),
            "peak_bytes": statistics.median(r.peak_bytes for r in own),
            "best_loss": round(min(r.best_loss for r in own), 4),
        }
    return row


def print_row(row: dict[str, Any]) -> None:
    """One line of the table, and a second one where a side did not get there."""
    sides = "  ".join(
        f"{row[side]['seconds']:9.2f} s {row[side]['pairs']:5.0f} {row[side]['peak_bytes'] / 2**20:8.0f}"
        for side in SIDES
    )
    ratio = "   none" if row["time_ratio"] is None else f"{row['time_ratio']:7.3f}"
    print(f"{row['num_rows']:>10}  {sides}  {ratio} {row['memory_ratio']:7.3f}", flush=True)
    for side in row["not_reached"]:
        best, target = row[side]["best_loss"], row["target_loss"]
        print(f"{'':>10}  {side} came down to {best}, not to {target}, so there is no time to compare", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes, one repeat")
    parser.add_argument(
        "--num-rows", type=lambda text: [int(part) for part in text.split(",")], help="of both tables together"
    )
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--run", nargs=4, metavar=("SIDE", "ROWS", "RATE", "PAIRS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.run:
        side, num_rows, learning_rate, max_pairs = arguments.run
        print(json.dumps(vars(run_here(side, int(num_rows), float(learning_rate), int(max_pairs)))))
        return
    sizes = arguments.num_rows or (QUICK_SIZES if arguments.quick else SIZES)
    max_pairs, repeats = (QUICK_MAX_PAIRS, 1) if arguments.quick else (MAX_PAIRS, 3)
    rates = {side: tuned_learning_rate(side, min(sizes), max_pairs, run_apart) for side in SIDES}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ratios: dnis over naive")
    print("      rows   naive: time pairs      MiB   dnis: time pairs      MiB     time  memory")
    rows = []
    for num_rows in sizes:
        rows.append(compare(num_rows, rates, max_pairs, repeats, run_apart))
        print_row(rows[-1])
    if arguments.json:
        temporary = arguments.json.with_name(f"{arguments.json.name}.partial")
        temporary.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, arguments.json)


if __name__ == "__main__":
    main()
