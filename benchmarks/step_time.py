"""Time of a bi-level step beside a plain training step.

    python -m benchmarks.step_time [--quick] [--shape NAME] [--batch-size 1024,4096 ...] [--ranks 1,2] --json FILE

A plain TrainPipelineSparseDist of the unwrapped model and the bi-level pipeline of the wrapped one take turns, step by
step, in one process: plain, lower, upper, plain, ... Ratios are medians over those rounds, with their quartiles: they
hold on a busy machine too, the milliseconds do not, and best of all do those of the CPU time that the process itself
took (``_cpu_ratio``; it sees neither waiting nor a GPU). Peak memory is that of processes of their own on one rank,
without what the imports take. ``output_volume_ratio`` is what the collections hand back, and so what the output
all-to-all carries over ranks, beside the plain model's.

CPU or one GPU. On several ranks, gloo on this machine's CPU, every rank has batches of its own and rank 0 reports.

Shapes: `criteo`, `dlrm_v2` (multi-hot) and `movielens`, each varied by the options, every combination of the values
given.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.cpu_ranks import hidden_gpus
from benchmarks.files import output_file
from dnis_torchrec import (
    BilevelStream,
    BilevelTrainPipeline,
    DataSplits,
    LevelSchedule,
    Recipe,
    TrainTask,
    blocks_from_counts,
    prepare_,
)
from dnis_torchrec.data.batches import BatchParts
from dnis_torchrec.data.files import write_json
from dnis_torchrec.data.over_ranks import count_over_ranks
from dnis_torchrec.search.search import PARTS as UPPER_PARTS
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from dnis_torchrec.training.shard import process_group, shard
from examples.models import build_tables
from examples.models.collaborative import MatrixFactorization

NUM_DENSE = 13
STEPS = ("plain", "lower", "upper")
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS = 60, 6, 2
STEPS_FOR_MEMORY = 4
START_METHOD = "spawn"
MEMORY_RUNS, QUICK_MEMORY_RUNS = 3, 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batches."""

    name: str
    model: str
    num_embeddings: tuple[int, ...]
    poolings: tuple[int, ...]
    embedding_dim: int = 64
    batch_size: int = 4096
    num_blocks: int = 6
    table_optimizer: str = "rowwise_adagrad"
    upper_batch_parts: int = UPPER_PARTS
    ranks: int = 1

    @property
    def features(self) -> list[str]:
        """KJT keys, one per table."""
        return [f"c{index}" for index in range(len(self.num_embeddings))]


DLRM_V2_POOLINGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per bag of the 26 features of MLPerf's DLRM-DCNv2 benchmark (multi-hot Criteo)."""

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="criteo", model="dlrm", num_embeddings=(40_000,) * 26, poolings=(1,) * 26),
        Shape(name="dlrm_v2", model="dlrm", num_embeddings=(40_000,) * 26, poolings=DLRM_V2_POOLINGS),
        Shape(
            name="movielens",
            model="mf",
            num_embeddings=(6040, 3706),
            poolings=(1, 1),
            num_blocks=10,
            table_optimizer="adam",
        ),
    )
}


def vary(shape: Shape, num_tables: int | None, num_embeddings: int | None, pooling: int | None, **fields: Any) -> Shape:
    """A shape with some of its numbers replaced; None leaves one as it is."""
    count = len(shape.num_embeddings) if num_tables is None else num_tables
    rows = itertools.cycle(shape.num_embeddings if num_embeddings is None else (num_embeddings,))
    poolings = itertools.cycle(shape.poolings if pooling is None else (pooling,))
    return replace(
        shape,
        num_embeddings=tuple(itertools.islice(rows, count)),
        poolings=tuple(itertools.islice(poolings, count)),
        **{name: value for name, value in fields.items() if value is not None},
    )


def make_batches(shape: Shape, num_batches: int, seed: int) -> list[Batch]:
    """Batches of ids drawn from a Zipf-like law, rows sorted by frequency."""
    generator = torch.Generator().manual_seed(seed)
    size, batches = shape.batch_size, []
    lengths = torch.tensor(shape.poolings, dtype=torch.int32).repeat_interleave(size)
    for _ in range(num_batches):
        ids = [
            (rows ** torch.rand(size * pooling, generator=generator)).long().sub(1).clamp(0, rows - 1)
            for rows, pooling in zip(shape.num_embeddings, shape.poolings, strict=True)
        ]
        features = KeyedJaggedTensor(keys=shape.features, values=torch.cat(ids), lengths=lengths)
        dense = torch.rand(size, NUM_DENSE, generator=generator)
        labels = torch.randint(0, 2, (size,), generator=generator).float()
        batches.append(Batch(dense_features=dense, sparse_features=features, labels=labels))
    return batches


def make_recipe(shape: Shape, train: list[Batch], validation: list[Batch]) -> Recipe:
    """The model of a shape; its tables wait on "meta", as TorchRec wants large ones, until they are sharded."""
    num_embeddings = dict(zip(shape.features, shape.num_embeddings, strict=True))
    tables = build_tables(num_embeddings, shape.embedding_dim, device=torch.device("meta"))
    loss: nn.Module = nn.BCEWithLogitsLoss()
    if shape.model == "dlrm":
        model: nn.Module = DLRM(tables, NUM_DENSE, [512, 256, shape.embedding_dim], [512, 256, 1])
    else:
        model, loss = MatrixFactorization(tables, global_mean=0.5), nn.MSELoss()
    data = DataSplits(train=train, validation=validation, selection=validation, test=validation)
    return Recipe(model=model, data=data, loss=loss, table_optimizer=shape.table_optimizer)


def endless(batches: list[Batch]) -> Iterator[Batch]:
    """The batches again and again."""
    while True:
        yield from batches


class Plain:
    """TorchRec's own pipeline on the unwrapped model."""

    def __init__(self, shape: Shape, train: list[Batch], validation: list[Batch], device: torch.device) -> None:
        recipe = make_recipe(shape, train, validation)
        model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, device)
        self.pipeline = TrainPipelineSparseDist(model.train(), optimizer, device)
        self._stream = endless(train)

    def step(self) -> None:
        """One training step."""
        self.pipeline.progress(self._stream)


class Bilevel:
    """The bi-level pipeline on the wrapped model; lower and upper steps alternate, a lower one first."""

    def __init__(self, shape: Shape, train: list[Batch], validation: list[Batch], device: torch.device) -> None:
        recipe = make_recipe(shape, train, validation)
        tables = table_configs(recipe.model)
        counted = (batch.sparse_features for batch in train[:2])
        counts = count_over_ranks(counted, tables, process_group=dist.group.WORLD)
        blocks = blocks_from_counts(counts, tables, num_blocks=shape.num_blocks)
        prepared = prepare_(recipe.model, blocks)
        model, optimizer = shard(TrainTask(prepared, recipe.loss), recipe, device)
        self.pipeline = BilevelTrainPipeline(model.train(), optimizer, device)
        self.output_volume_ratio = output_volume_ratio(model)
        parts = BatchParts(validation, shape.upper_batch_parts)
        self._stream = BilevelStream(train, parts, LevelSchedule(warm_up_steps=1))
        self.pipeline.progress(self._stream)  # the warm-up step: from here on lower and upper alternate

    def step(self) -> None:
        """One step of the level whose turn it is."""
        self.pipeline.progress(self._stream)


def output_volume_ratio(model: nn.Module) -> float:
    """Columns that the sharded collections inside wrappers hand back, over those of the wrapped ones."""
    wrappers = [m for m in model.modules() if isinstance(m, SoftSelectionEmbeddingBagCollection)]
    handed_back = sum(dim for wrapper in wrappers for dim in wrapper.embedding_bag_collection._embedding_dims)
    return handed_back / sum(output.embedding_dim for wrapper in wrappers for output in wrapper.outputs)


def take_turns(plain: Plain, bilevel: Bilevel) -> dict[str, float]:
    """One round: milliseconds of a plain, a lower and an upper step.

    ``NAME_cpu`` is the CPU time that this process took, in all its threads.
    """
    times = {}
    for name, pipeline in zip(STEPS, (plain, bilevel, bilevel), strict=True):
        start, start_cpu = time.perf_counter(), time.process_time()
        pipeline.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[name] = 1000 * (time.perf_counter() - start)
        times[f"{name}_cpu"] = 1000 * (time.process_time() - start_cpu)
    return times


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one shape."""

    times: dict[str, list[float]]
    output_volume_ratio: float


def measure(shape: Shape, rounds: int) -> Measured:
    """Takes the steps in turns; on one of several ranks, in step with them."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    train, validation = make_batches(shape, 8, seed=2 * rank), make_batches(shape, 4, seed=2 * rank + 1)
    times: dict[str, list[float]] = {name: [] for step in STEPS for name in (step, f"{step}_cpu")}
    with process_group() as device:
        plain, bilevel = Plain(shape, train, validation, device), Bilevel(shape, train, validation, device)
        for index in range(WARM_UP_ROUNDS + rounds):
            for name, milliseconds in take_turns(plain, bilevel).items():
                if index >= WARM_UP_ROUNDS:
                    times[name].append(milliseconds)
    return Measured(times=times, output_volume_ratio=bilevel.output_volume_ratio)


def measure_on_rank(rank: int, shape: Shape, rounds: int, folder: str) -> None:
    """One process of `measure_over_ranks`."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", shape.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=shape.ranks)
    try:
        measured = measure(shape, rounds)
    finally:
        torch.distributed.destroy_process_group()
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(asdict(measured)), encoding="utf-8")


def measure_over_ranks(shape: Shape, rounds: int) -> Measured:
    """`measure` in as many processes as the shape has ranks; here if that is one."""
    if shape.ranks == 1:
        return measure(shape, rounds)
    with tempfile.TemporaryDirectory() as folder, hidden_gpus():
        arguments = (shape, rounds, folder)
        torch.multiprocessing.start_processes(measure_on_rank, arguments, shape.ranks, start_method=START_METHOD)
        return Measured(**json.loads((Path(folder) / "measured.json").read_text(encoding="utf-8")))


def peak_memory(shape: Shape, which: str) -> int:
    """Bytes that a fresh process takes above its imports, for some steps of one kind of pipeline."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--memory-of", which, json.dumps(asdict(shape))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1])


def memory_ratios(shapes: Sequence[Shape], num_runs: int, at_once: int) -> list[list[float]]:
    """Peak memory of the bi-level pipeline over the plain one's, run by run, on one rank; so many processes at once."""
    kinds = ("plain", "bilevel")
    runs = [(replace(shape, ranks=1), which) for shape in shapes for _ in range(num_runs) for which in kinds]
    with ThreadPoolExecutor(at_once) as pool:
        peaks = list(pool.map(lambda run: peak_memory(*run), runs))
    ratios_of_runs = [bilevel / plain for plain, bilevel in zip(peaks[::2], peaks[1::2], strict=True)]
    return [ratios_of_runs[first : first + num_runs] for first in range(0, len(ratios_of_runs), num_runs)]


def run_for_memory(shape: Shape, which: str) -> int:
    """Takes steps of one kind of pipeline in this process; returns by how many bytes its peak has grown.

    Of the GPU's memory if there is one: what torch has given out there at most.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train, validation = make_batches(shape, 4, seed=0), make_batches(shape, 2, seed=1)
    with process_group() as device:
        pipeline = (Plain if which == "plain" else Bilevel)(shape, train, validation, device)
        for _ in range(STEPS_FOR_MEMORY):
            pipeline.step()
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def spread(values: list[float]) -> list[float]:
    """Quartiles of the middle half: [25 %, 75 %]."""
    quartiles = statistics.quantiles(values, n=4)
    return [round(quartiles[0], 3), round(quartiles[2], 3)]


def ratios(times: Mapping[str, list[float]], clock: str) -> dict[str, list[float]]:
    """Lower, upper and both over the plain step, round by round; `clock` is ``""`` or ``"_cpu"``."""
    lower, upper = (
        [own / plain for own, plain in zip(times[f"{name}{clock}"], times[f"plain{clock}"], strict=True)]
        for name in ("lower", "upper")
    )
    return {"lower": lower, "upper": upper, "pair": [a + b for a, b in zip(lower, upper, strict=True)]}


def report(shape: Shape, measured: Measured, memory: Sequence[float]) -> dict[str, Any]:
    """A row of the JSON file."""
    wall, cpu = ratios(measured.times, ""), ratios(measured.times, "_cpu")
    return {
        "shape": shape.name,
        "batch_size": shape.batch_size,
        "embedding_dim": shape.embedding_dim,
        "num_blocks": shape.num_blocks,
        "num_tables": len(shape.num_embeddings),
        "num_embeddings": max(shape.num_embeddings),
        "pooling": round(statistics.mean(shape.poolings), 2),
        "upper_batch_parts": shape.upper_batch_parts,
        "ranks": shape.ranks,
        "plain_ms": round(statistics.median(measured.times["plain"]), 2),
        **{f"{name}_ratio": round(statistics.median(values), 3) for name, values in wall.items()},
        **{f"{name}_cpu_ratio": round(statistics.median(values), 3) for name, values in cpu.items()},
        "peak_memory_ratio": round(statistics.median(memory), 3),
        "peak_memory_range": [round(min(memory), 3), round(max(memory), 3)],
        "output_volume_ratio": round(measured.output_volume_ratio, 3),
        **{f"{name}_quartiles": spread(values) for name, values in wall.items()},
        **{f"{name}_cpu_quartiles": spread(values) for name, values in cpu.items()},
        "rounds": len(wall["lower"]),
        "threads": torch.get_num_threads(),
    }


def print_row(row: dict[str, Any]) -> None:
    """The figures of one shape."""
    numbers = " ".join(f"{name}={row[name]}" for name in list(row)[1:9])
    print(f"\n{row['shape']}: {numbers} plain_ms={row['plain_ms']} rounds={row['rounds']}")
    for name in ("lower", "upper", "pair"):
        (low, high), (low_cpu, high_cpu) = row[f"{name}_quartiles"], row[f"{name}_cpu_quartiles"]
        cpu = f"CPU time {row[f'{name}_cpu_ratio']:6.3f} [{low_cpu:.3f}, {high_cpu:.3f}]"
        print(f"  {name:>13} {row[f'{name}_ratio']:6.3f} of the plain step [{low:.3f}, {high:.3f}]; {cpu}")
    low, high = row["peak_memory_range"]
    print(f"  {'peak memory':>13} {row['peak_memory_ratio']:6.3f} of plain training [{low:.3f} to {high:.3f}]")
    print(f"  {'output volume':>13} {row['output_volume_ratio']:6.3f} of the plain model's", flush=True)


def numbers(text: str) -> list[int]:
    """The positive integers of a comma-separated list."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected integers >= 1, got {text!r}")
    return values


VARIED = (
    "batch_size",
    "embedding_dim",
    "num_blocks",
    "num_tables",
    "num_embeddings",
    "pooling",
    "upper_batch_parts",
    "ranks",
)


def chosen_shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Every combination of the values given, for every shape asked for."""
    values = [getattr(arguments, name) or [None] for name in VARIED]
    bases = [SHAPES[name] for name in arguments.shape or SHAPES]
    combinations = list(itertools.product(*values))
    return [vary(base, **dict(zip(VARIED, chosen, strict=True))) for base in bases for chosen in combinations]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="may be repeated; all of them if absent")
    for name in VARIED:
        parser.add_argument(f"--{name.replace('_', '-')}", type=numbers, metavar="N,N", help="instead of the shape's")
    parser.add_argument("--json", type=output_file, help="file to write")
    parser.add_argument("--memory-of", nargs=2, metavar=("PIPELINE", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    tables = set(arguments.num_tables or ())
    if tables - {2} and "movielens" in (arguments.shape or SHAPES):
        parser.error("--num-tables: matrix factorisation has 2 tables; name other shapes, as in --shape criteo")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    arguments = parse(argv)
    torch.manual_seed(0)
    if arguments.memory_of:
        which, fields = arguments.memory_of[0], json.loads(arguments.memory_of[1])
        print(run_for_memory(Shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}), which))
        return
    shapes = chosen_shapes(arguments)
    # Before anything is built here: to the kernel, what a process has used counts for those that it starts.
    memory_runs, at_once = (QUICK_MEMORY_RUNS, 2) if arguments.quick else (MEMORY_RUNS, 1)
    memory = memory_ratios(shapes, memory_runs, at_once)
    print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, {os.cpu_count()} cores")
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    rows = []
    for shape, memory_of_runs in zip(shapes, memory, strict=True):
        measured = measure_over_ranks(shape, rounds)
        rows.append(report(shape, measured, memory_of_runs))
        print_row(rows[-1])
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
