"""What a bi-level step costs beside a plain training step.

    python -m benchmarks.step_time [--quick] --json FILE

Criteo-shaped: 26 tables of 40,000 rows, D = 64, batch 4096, DLRM 512-256-64 / 512-256-1, row-wise Adagrad fused, CPU,
one rank. A plain TrainPipelineSparseDist of the unwrapped model and the bi-level pipeline of the wrapped one take
turns, step by step, in one process: plain, lower, upper, plain, ... Ratios are medians over those rounds, with their
quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torchrec
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import (
    BilevelStream,
    BilevelTrainPipeline,
    DataSplits,
    LevelSchedule,
    Pressure,
    Recipe,
    Size,
    TrainTask,
    blocks_from_counts,
    count_frequencies,
    prepare_,
)
from dnis_torchrec.level_schedule import Level
from dnis_torchrec.training import process_group, shard

NUM_TABLES, NUM_EMBEDDINGS, EMBEDDING_DIM, BATCH_SIZE, NUM_DENSE, NUM_BLOCKS = 26, 40_000, 64, 4096, 13, 6


def make_batches(num_batches: int, seed: int) -> list[Batch]:
    """Batches of single ids drawn from a Zipf-like law, rows sorted by frequency."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        uniform = torch.rand(NUM_TABLES * BATCH_SIZE, generator=generator)
        ids = (NUM_EMBEDDINGS**uniform).long().sub(1).clamp(0, NUM_EMBEDDINGS - 1)
        features = KeyedJaggedTensor(
            keys=[f"c{i}" for i in range(NUM_TABLES)], values=ids, lengths=torch.ones_like(ids, dtype=torch.int32)
        )
        dense = torch.rand(BATCH_SIZE, NUM_DENSE, generator=generator)
        labels = torch.randint(0, 2, (BATCH_SIZE,), generator=generator).float()
        batches.append(Batch(dense_features=dense, sparse_features=features, labels=labels))
    return batches


def make_recipe(train: list[Batch], validation: list[Batch]) -> Recipe:
    """The DLRM of the benchmark."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=NUM_EMBEDDINGS, embedding_dim=EMBEDDING_DIM, feature_names=[f"c{i}"]
        )
        for i in range(NUM_TABLES)
    ]
    model = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=[512, 256, EMBEDDING_DIM],
        over_arch_layer_sizes=[512, 256, 1],
    )
    data = DataSplits(train=train, validation=validation, selection=validation, test=validation)
    return Recipe(model=model, data=data, loss=nn.BCEWithLogitsLoss(), table_optimizer="rowwise_adagrad")


def endless(batches: list[Batch]) -> Iterator[Batch]:
    """The batches again and again."""
    while True:
        yield from batches


def plain_pipeline(train: list[Batch], validation: list[Batch], device: torch.device) -> TrainPipelineSparseDist:
    """TorchRec's own pipeline on the unwrapped model."""
    recipe = make_recipe(train, validation)
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, device)
    model.train()
    return TrainPipelineSparseDist(model, optimizer, device)


def bilevel_pipeline(train: list[Batch], validation: list[Batch], device: torch.device) -> BilevelTrainPipeline:
    """The bi-level pipeline on the wrapped model."""
    recipe = make_recipe(train, validation)
    tables = recipe.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    blocks = blocks_from_counts(
        count_frequencies((b.sparse_features for b in train), tables), tables, num_blocks=NUM_BLOCKS
    )
    model, optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, device)
    model.train()
    pressure = Pressure(size=Size(compression_ratio=8), ramp_steps=10_000)
    return BilevelTrainPipeline(model, optimizer, device, pressure=pressure)


def measure(rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Milliseconds of every plain, lower and upper step, taken in turns."""
    train, validation = make_batches(8, seed=0), make_batches(4, seed=1)
    times: dict[str, list[float]] = {"plain": [], "lower": [], "upper": []}
    with process_group() as device:
        plain, bilevel = plain_pipeline(train, validation, device), bilevel_pipeline(train, validation, device)
        plain_stream = endless(train)
        stream = BilevelStream(train, validation, LevelSchedule(warm_up_steps=1, upper_every=1))
        bilevel.progress(stream)  # the warm-up step: from here on lower and upper alternate
        for index in range(warm_up + rounds):
            timed = {}
            start = time.perf_counter()
            plain.progress(plain_stream)
            timed["plain"] = time.perf_counter() - start
            for _ in range(2):
                name = "lower" if bilevel.level is Level.LOWER else "upper"
                start = time.perf_counter()
                bilevel.progress(stream)
                timed[name] = time.perf_counter() - start
            if index >= warm_up:
                for name, seconds in timed.items():
                    times[name].append(1000 * seconds)
    return times


def peak_memory(which: str, steps: int) -> int:
    """Peak resident bytes of a process that takes some steps of one kind of pipeline."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--memory-of", which, "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def run_for_memory(which: str, steps: int) -> int:
    """Takes steps of one kind of pipeline in this process; returns its peak resident bytes."""
    train, validation = make_batches(4, seed=0), make_batches(2, seed=1)
    with process_group() as device:
        if which == "plain":
            pipeline, stream = plain_pipeline(train, validation, device), endless(train)
        else:
            pipeline = bilevel_pipeline(train, validation, device)
            stream = BilevelStream(train, validation, LevelSchedule())
        for _ in range(steps):
            pipeline.progress(stream)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def spread(values: list[float]) -> list[float]:
    """Quartiles of the middle half: [25 %, 75 %]."""
    quartiles = statistics.quantiles(values, n=4)
    return [round(quartiles[0], 3), round(quartiles[2], 3)]


def report(times: dict[str, list[float]], memory_ratio: float) -> dict[str, object]:
    """The row of the JSON file."""
    lower = [a / b for a, b in zip(times["lower"], times["plain"], strict=True)]
    upper = [a / b for a, b in zip(times["upper"], times["plain"], strict=True)]
    pair = [a + b for a, b in zip(lower, upper, strict=True)]
    return {
        "shape": "criteo",
        "ranks": 1,
        "plain_ms": round(statistics.median(times["plain"]), 2),
        "lower_ratio": round(statistics.median(lower), 3),
        "upper_ratio": round(statistics.median(upper), 3),
        "pair_ratio": round(statistics.median(pair), 3),
        "peak_memory_ratio": round(memory_ratio, 3),
        "lower_quartiles": spread(lower),
        "upper_quartiles": spread(upper),
        "pair_quartiles": spread(pair),
        "rounds": len(lower),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 rounds instead of 60, in under a minute")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--memory-of", choices=("plain", "bilevel"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.memory_of:
        print(run_for_memory(arguments.memory_of, arguments.steps))
        return
    memory_ratio = peak_memory("bilevel", arguments.steps) / peak_memory("plain", arguments.steps)
    row = report(measure(12 if arguments.quick else 60, warm_up=3), memory_ratio)
    print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, {os.cpu_count()} cores")
    for name, value in row.items():
        print(f"{name:>18}  {value}")
    if arguments.json:
        temporary = arguments.json.with_name(f"{arguments.json.name}.partial")
        temporary.write_text(json.dumps({"rows": [row]}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, arguments.json)


if __name__ == "__main__":
    main()
