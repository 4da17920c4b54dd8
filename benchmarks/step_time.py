"""What a bi-level step costs beside a plain training step, and what it is spent on.

    python -m benchmarks.step_time [--quick] [--shape NAME] [--batch-size 1024,4096 ...] --json FILE

A plain TrainPipelineSparseDist of the unwrapped model and the bi-level pipeline of the wrapped one take turns, step by
step, in one process: plain, lower, upper, plain, ... Ratios are medians over those rounds, with their quartiles: they
hold on a busy machine too, the milliseconds do not. The breakdown gives each step's parts as shares of the plain step,
by the PyTorch profiler, which slows small operators down more than large ones: read it as where to look. Peak memory is
that of a process of its own, without what the imports take. CPU or one GPU, one rank.

Shapes: `criteo`, `dlrm_v2` (multi-hot) and `movielens`, each varied by the options, every combination of the values
given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchrec
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM
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
from dnis_torchrec.embedding_modules import SelectPooled
from dnis_torchrec.search import table_configs
from dnis_torchrec.training import process_group, shard
from examples.models import build_tables
from examples.models.collaborative import MatrixFactorization

NUM_DENSE = 13
STEPS = ("plain", "lower", "upper")
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS, PROFILED_ROUNDS = 60, 6, 2, 3
STEPS_FOR_MEMORY = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batches.

    Attributes:
        name: of the shape it was varied from.
        model: ``"dlrm"`` (512-256-D / 512-256-1) or ``"mf"``.
        num_embeddings: N of every table.
        poolings: ids in every bag of every table.
        embedding_dim: D.
        batch_size: B.
        num_blocks: S.
        table_optimizer: see `dnis_torchrec.Recipe`.
    """

    name: str
    model: str
    num_embeddings: tuple[int, ...]
    poolings: tuple[int, ...]
    embedding_dim: int = 64
    batch_size: int = 4096
    num_blocks: int = 6
    table_optimizer: str = "rowwise_adagrad"

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
    """The model of a shape."""
    tables = build_tables(dict(zip(shape.features, shape.num_embeddings, strict=True)), shape.embedding_dim)
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
        self.model = model.train()
        self.pipeline = TrainPipelineSparseDist(model, optimizer, device)
        self._stream = endless(train)

    def step(self) -> None:
        """One training step."""
        self.pipeline.progress(self._stream)


class Bilevel:
    """The bi-level pipeline on the wrapped model; lower and upper steps alternate, a lower one first."""

    def __init__(self, shape: Shape, train: list[Batch], validation: list[Batch], device: torch.device) -> None:
        recipe = make_recipe(shape, train, validation)
        tables = table_configs(recipe.model)
        counts = count_frequencies((batch.sparse_features for batch in train), tables)
        blocks = blocks_from_counts(counts, tables, num_blocks=shape.num_blocks)
        model, optimizer = shard(TrainTask(prepare_(recipe.model, blocks), recipe.loss), recipe, device)
        self.model = model.train()
        pressure = Pressure(size=Size(compression_ratio=8), ramp_steps=10_000)
        self.pipeline = BilevelTrainPipeline(model, optimizer, device, pressure=pressure)
        self._stream = BilevelStream(train, validation, LevelSchedule(warm_up_steps=1, upper_every=1))
        self.pipeline.progress(self._stream)  # the warm-up step: from here on lower and upper alternate

    def step(self) -> None:
        """One step of the level whose turn it is."""
        self.pipeline.progress(self._stream)


def take_turns(
    plain: Plain, bilevel: Bilevel, around: Callable[[str], AbstractContextManager[Any]]
) -> dict[str, float]:
    """One round: milliseconds of a plain, a lower and an upper step, each taken inside ``around(name)``."""
    times = {}
    for name, pipeline in zip(STEPS, (plain, bilevel, bilevel), strict=True):
        with around(name):
            start = time.perf_counter()
            pipeline.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name] = 1000 * (time.perf_counter() - start)
    return times


def measure(shape: Shape, rounds: int) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Times of the steps in turns, and the breakdown of some more rounds.

    Returns:
        Step -> milliseconds of every round; step -> part -> share of the plain step.
    """
    train, validation = make_batches(shape, 8, seed=0), make_batches(shape, 4, seed=1)
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    with process_group() as device:
        plain, bilevel = Plain(shape, train, validation, device), Bilevel(shape, train, validation, device)
        for index in range(WARM_UP_ROUNDS + rounds):
            for name, milliseconds in take_turns(plain, bilevel, lambda _: nullcontext()).items():
                if index >= WARM_UP_ROUNDS:
                    times[name].append(milliseconds)
        for model in (plain.model, bilevel.model):
            record_modules(model)
        bilevel.pipeline.alpha_optimizer.step = recorded("alpha_step", bilevel.pipeline.alpha_optimizer.step)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            for _ in range(PROFILED_ROUNDS):
                take_turns(plain, bilevel, lambda name: record_function(f"step {name}"))
    return times, breakdown(profiler.events())


PART_OF = (
    ("_SelectBackward", "select"),
    ("_SelectBlocksBackward", "select"),
    ("select_pooled", "select"),
    ("alpha_step", "optimizer"),
    ("LookupFunction", "lookup"),
    ("embedding_lookup", "lookup"),
    ("autograd::engine::evaluate_function", "backward"),
    ("## copy_batch_to_gpu", "copy"),
    ("sparse_data_dist", "input_dist"),
    ("## forward", "dense_forward"),
    ("## backward", "backward"),
    ("## optimizer", "optimizer"),
    ("## zero_grad", "optimizer"),
)
"""What a profiled name begins or contains, and the part of a step that it and everything inside it belong to."""

PARTS = (*dict.fromkeys(part for _, part in PART_OF), "other")


def part_of(names: Iterable[str]) -> str:
    """Part of a step that an event belongs to.

    A backward pass runs inside `## forward` in an upper step, so the innermost name that says something decides.
    The lookup's part holds its backward with the fused table optimizer too.

    Args:
        names: of the event and those around it, innermost first.
    """
    known = (part for name in names for pattern, part in PART_OF if pattern in name)
    return next(known, "other")


def breakdown(events: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Step -> part -> its time as a share of the plain step; the parts of a step add up to it."""
    times: dict[str, dict[str, float]] = {name: defaultdict(float) for name in STEPS}
    for event in events:
        around, names = event, []
        while around is not None:
            names.append(around.name)
            around = around.cpu_parent
        if names[-1].startswith("step "):
            times[names[-1].removeprefix("step ")][part_of(names)] += event.self_cpu_time_total
    whole = sum(times["plain"].values())
    return {name: {part: round(own[part] / whole, 3) for part in PARTS} for name, own in times.items()}


def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, seen by the profiler under a name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


def record_modules(model: nn.Module) -> None:
    """Lets the profiler see lookup and soft selection, inside the pipeline's own `## forward`."""
    for module in model.modules():
        if isinstance(module, SelectPooled | ShardedEmbeddingBagCollection):
            name = "select_pooled" if isinstance(module, SelectPooled) else "embedding_lookup"
            record_module(module, name)


def record_module(module: nn.Module, name: str) -> None:
    """Puts a module's forward under a name; by hooks, because a pipeline has put its own `forward` in place."""
    running: list[record_function] = []

    def begin(*_: Any) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def peak_memory(shape: Shape, which: str) -> int:
    """Bytes that a fresh process takes above its imports, for some steps of one kind of pipeline."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--memory-of", which, json.dumps(asdict(shape))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def run_for_memory(shape: Shape, which: str) -> int:
    """Takes steps of one kind of pipeline in this process; returns by how many bytes its peak has grown."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train, validation = make_batches(shape, 4, seed=0), make_batches(shape, 2, seed=1)
    with process_group() as device:
        pipeline = (Plain if which == "plain" else Bilevel)(shape, train, validation, device)
        for _ in range(STEPS_FOR_MEMORY):
            pipeline.step()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def spread(values: list[float]) -> list[float]:
    """Quartiles of the middle half: [25 %, 75 %]."""
    quartiles = statistics.quantiles(values, n=4)
    return [round(quartiles[0], 3), round(quartiles[2], 3)]


def report(shape: Shape, times: dict[str, list[float]], parts: dict[str, Any], memory_ratio: float) -> dict[str, Any]:
    """A row of the JSON file."""
    lower = [a / b for a, b in zip(times["lower"], times["plain"], strict=True)]
    upper = [a / b for a, b in zip(times["upper"], times["plain"], strict=True)]
    pair = [a + b for a, b in zip(lower, upper, strict=True)]
    return {
        "shape": shape.name,
        "ranks": 1,
        "batch_size": shape.batch_size,
        "embedding_dim": shape.embedding_dim,
        "num_blocks": shape.num_blocks,
        "num_tables": len(shape.num_embeddings),
        "num_embeddings": max(shape.num_embeddings),
        "pooling": round(statistics.mean(shape.poolings), 2),
        "plain_ms": round(statistics.median(times["plain"]), 2),
        "lower_ratio": round(statistics.median(lower), 3),
        "upper_ratio": round(statistics.median(upper), 3),
        "pair_ratio": round(statistics.median(pair), 3),
        "peak_memory_ratio": round(memory_ratio, 3),
        "lower_quartiles": spread(lower),
        "upper_quartiles": spread(upper),
        "pair_quartiles": spread(pair),
        "breakdown": parts,
        "rounds": len(lower),
        "threads": torch.get_num_threads(),
    }


def print_row(row: dict[str, Any]) -> None:
    """The figures of one shape, and its breakdown."""
    numbers = " ".join(f"{name}={row[name]}" for name in list(row)[2:8])
    print(f"\n{row['shape']}: {numbers} plain_ms={row['plain_ms']} rounds={row['rounds']}")
    for name in ("lower", "upper", "pair"):
        low, high = row[f"{name}_quartiles"]
        print(f"  {name:>11} {row[f'{name}_ratio']:6.3f} of the plain step [{low:.3f}, {high:.3f}]")
    print(f"  {'peak memory':>11} {row['peak_memory_ratio']:6.3f} of plain training")
    print("  by the profiler, shares of the plain step")
    print("  ".join([f"{'':>9}", *(f"{part:>13}" for part in PARTS)]))
    for name, parts in row["breakdown"].items():
        print("  ".join([f"{name:>9}", *(f"{parts[part]:13.3f}" for part in PARTS)]), flush=True)


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes ``{"rows": [...]}`` in one piece."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def numbers(text: str) -> list[int]:
    """The positive integers of a comma-separated list."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected integers >= 1, got {text!r}")
    return values


VARIED = ("batch_size", "embedding_dim", "num_blocks", "num_tables", "num_embeddings", "pooling")


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
    parser.add_argument("--json", type=Path, help="file to write")
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
    memory = [peak_memory(shape, "bilevel") / peak_memory(shape, "plain") for shape in shapes]
    print(f"torch {torch.__version__}, torchrec {torchrec.__version__}, {os.cpu_count()} cores")
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    rows = []
    for shape, memory_ratio in zip(shapes, memory, strict=True):
        times, parts = measure(shape, QUICK_ROUNDS if arguments.quick else ROUNDS)
        rows.append(report(shape, times, parts, memory_ratio))
        print_row(rows[-1])
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
