"""Time and memory of bi-level steps beside plain ones, on tables of 10 GB and more, and of soft selection alone."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from benchmarks import step_time
from benchmarks.gpu.step import Run
from benchmarks.gpu.timing import PeakMemory, copied_bytes_per_second, milliseconds, seconds_of
from dnis_torchrec import blocks_from_counts, prepare_
from dnis_torchrec.data.over_ranks import count_over_ranks
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from examples.models import build_tables

ROWS, BATCH_SIZES = 1_600_000, (16_384, 65_536, 131_072)
"""At the first batch size the GPU waits for the host, in plain steps, too; at the others the host for the GPU."""
SMALL_ROWS, SMALL_BATCHES, SMALL_TABLES = 50, (64, 96, 128), 3
STATES = {"rowwise_adagrad": 1, "adam": 3}
"""Table optimizer -> floats that it keeps for one of a table, that one counted."""
FREE_SHARE = 0.85
"""Of the memory that is free, which tables of both pipelines may take."""
ROUNDS, PAIRS_IN_A_ROW = 30, 20
SMALL_ROUNDS, SMALL_PAIRS = 2, 2
COPIED_BYTES, SMALL_COPIED_BYTES = 1 << 30, 1 << 20


def run(run: Run) -> None:
    """Soft selection first, which takes seconds, then both table optimizers, then the first on large batches."""
    first, *larger = SMALL_BATCHES if run.is_stand_in else BATCH_SIZES
    tables = (SMALL_TABLES, SMALL_ROWS) if run.is_stand_in else (None, None)
    shape = step_time.vary(step_time.SHAPES["criteo"], *tables, None, batch_size=first)
    of_selection(run, replace(shape, num_embeddings=(SMALL_ROWS,) * len(shape.features)))
    shapes = [replace(shape, table_optimizer=optimizer) for optimizer in STATES]
    num_threads = torch.get_num_threads()
    for own in (*shapes, *(replace(shapes[0], batch_size=size) for size in larger)):
        of_steps(run, own)
        torch.set_num_threads(num_threads)
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def of_selection(run: Run, shape: step_time.Shape) -> None:
    """Notes the time of soft selection alone, forward and backward, and its share of the memory bandwidth.

    What it cannot do without: a lower step reads the pooled embeddings, writes the output, reads its gradient and
    writes that of the pooled embeddings; an upper step reads these two, and writes alpha's gradient, which is small."""
    device, batch = run.device, step_time.make_batches(shape, 1, seed=0)[0]
    wrapper = wrapped_tables(shape, device)
    features = batch.sparse_features.to(device)
    width = shape.embedding_dim * len(shape.features)
    pooled = torch.randn(shape.batch_size, width, device=device, requires_grad=True)
    gradient = torch.randn_like(pooled)

    def select() -> torch.Tensor:
        keyed = KeyedTensor(shape.features, [shape.embedding_dim] * len(shape.features), pooled)
        return wrapper.selection(keyed, features, features).values()

    def lower() -> None:
        torch.autograd.grad(select(), pooled, gradient)

    def upper() -> None:
        with wrapper.alpha.upper_level():
            torch.autograd.grad(select(), wrapper.alpha.of(shape.embedding_dim), gradient)

    bandwidth = copied_bytes_per_second(device, SMALL_COPIED_BYTES if run.is_stand_in else COPIED_BYTES)
    run.figures.note("bandwidth of a copy", bandwidth / 1e9, "GB/s")
    of = {"batch": shape.batch_size, "tables": len(shape.features)}
    for level, call in (("lower", lower), ("upper", upper)):
        median = statistics.median(milliseconds(call, device, SMALL_ROUNDS if run.is_stand_in else ROUNDS))
        run.figures.note("selection", median, "ms", level=level, **of)
        share = 4 * pooled.nbytes / (median / 1e3) / bandwidth
        run.figures.note("selection, share of that bandwidth", share, level=level, **of)


def wrapped_tables(shape: step_time.Shape, device: torch.device) -> SoftSelectionEmbeddingBagCollection:
    """The wrapped collection of a shape, not sharded."""
    model = nn.ModuleList(
        [build_tables(dict(zip(shape.features, shape.num_embeddings, strict=True)), shape.embedding_dim)]
    )
    tables = table_configs(model)
    batches = (batch.sparse_features for batch in step_time.make_batches(shape, 1, seed=0))
    blocks = blocks_from_counts(count_over_ranks(batches, tables), tables, num_blocks=shape.num_blocks)
    wrapper = prepare_(model, blocks)[0].to(device)
    assert isinstance(wrapper, SoftSelectionEmbeddingBagCollection)
    return wrapper


def of_steps(run: Run, shape: step_time.Shape) -> None:
    """Notes times of plain, lower and upper steps in turns, of pairs in a row, and the peak of the memory."""
    rounds, in_a_row = (SMALL_ROUNDS, SMALL_PAIRS) if run.is_stand_in else (ROUNDS, PAIRS_IN_A_ROW)
    with step_time.process_group() as device:
        if not run.is_stand_in:
            shape = replace(shape, num_embeddings=(rows_for(shape, device),) * len(shape.features))
        train, validation = step_time.make_batches(shape, 8, seed=0), step_time.make_batches(shape, 4, seed=1)
        torch.set_num_threads(1)  # as torchrun gives a process that is one of several: more wait for each other
        of = {"tables": shape.table_optimizer, "batch": shape.batch_size}
        num_bytes = 4 * sum(shape.num_embeddings) * shape.embedding_dim
        run.figures.note("tables", num_bytes / 1e9, "GB", **of)

        def made(kind: type, name: str) -> step_time.Plain | step_time.Bilevel:
            with PeakMemory(device) as memory:
                pipeline = kind(shape, train, validation, device)
                for _ in range(step_time.STEPS_FOR_MEMORY):
                    pipeline.step()
            if memory.num_bytes is not None:
                run.figures.note("peak memory", memory.num_bytes / 1e9, "GB", pipeline=name, **of)
            return pipeline

        plain, bilevel = made(step_time.Plain, "plain"), made(step_time.Bilevel, "bi-level")
        times: dict[str, list[float]] = {name: [] for name in step_time.STEPS}
        for index in range(step_time.WARM_UP_ROUNDS + rounds):
            taken = step_time.take_turns(plain, bilevel)
            if index >= step_time.WARM_UP_ROUNDS:
                for name, own in times.items():
                    own.append(taken[name])
        note_ratios(run, times, of)
        note_in_a_row(run, plain.step, bilevel.step, in_a_row, device, of)


def note_ratios(run: Run, times: dict[str, list[float]], of: dict[str, object]) -> None:
    """Notes medians of the steps and, with the middle half, of what they take beside a plain step of the same round."""
    for name, own in times.items():
        run.figures.note("step", statistics.median(own), "ms", step=name, **of)
    for name, ratios in step_time.ratios(times, "").items():
        middle = step_time.spread(ratios)
        run.figures.note("times a plain step", statistics.median(ratios), step=name, middle_half=middle, **of)


def note_in_a_row(
    run: Run,
    plain: Callable[[], object],
    level: Callable[[], object],
    number: int,
    device: torch.device,
    of: dict[str, object],
) -> None:
    """Notes the same of steps that nobody waits for, as in training: the host runs ahead of the GPU where it can."""
    seconds = {
        "plain": seconds_of(lambda: [plain() for _ in range(number)], device) / number,
        "pair": seconds_of(lambda: [level() for _ in range(2 * number)], device) / number,
    }
    for name, own in seconds.items():
        run.figures.note("in a row", 1e3 * own, "ms", step=name, **of)
    run.figures.note("pair in a row, times a plain step", seconds["pair"] / seconds["plain"], **of)


def rows_for(shape: step_time.Shape, device: torch.device) -> int:
    """Rows of every table: as many as are wanted, or as the GPU has room for in two models of these tables."""
    free, _ = torch.cuda.mem_get_info(device)
    row = 4 * shape.embedding_dim * len(shape.features) * STATES[shape.table_optimizer] * 2
    return min(ROWS, int(FREE_SHARE * free / row))
