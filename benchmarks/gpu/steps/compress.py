"""Compressing a trained model whose tables, 20 GB of them, lie on the GPU: every part of it, as it is over."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from benchmarks import step_time
from benchmarks.compress_scale import PARTS
from benchmarks.gpu.step import Run
from benchmarks.gpu.timing import PeakMemory, seconds_of
from dnis_torchrec.allocation import compress
from examples.models import build_dlrm, build_tables

ROWS, BATCH_SIZE, NUM_BATCHES = 3_000_000, 16_384, 4
SMALL_ROWS, SMALL_TABLES, SMALL_BATCH = 200, 2, 64
COMPRESSION, SMALL_COMPRESSION = 20.0, 6.0


def run(run: Run) -> None:
    """Notes each part's seconds when it is over; parts of the measuring are in the whole of it, too."""
    shape = replace(step_time.SHAPES["criteo"], batch_size=BATCH_SIZE)
    shape = step_time.vary(shape, None, ROWS, None)
    if run.is_stand_in:
        shape = step_time.vary(shape, SMALL_TABLES, SMALL_ROWS, None, batch_size=SMALL_BATCH)
    dim, num_embeddings = shape.embedding_dim, dict(zip(shape.features, shape.num_embeddings, strict=True))
    batches, device = step_time.make_batches(shape, NUM_BATCHES, seed=0), run.device
    tables = build_tables(num_embeddings, dim, device=device)
    model = build_dlrm(tables, dense_in_features=step_time.NUM_DENSE, dense_layers=[64], over_layers=[64]).to(device)
    num_bytes = sum(4 * rows * dim for rows in num_embeddings.values())
    run.figures.note("tables", num_bytes / 1e9, "GB")

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            found: list[Any] = []
            seconds = seconds_of(lambda: found.append(call(*given, **named)), device)
            run.figures.note("part", seconds, "s", name=name)
            return found[0]

        return timed

    for name, (module, function) in (*PARTS.items(), ("count", (compress, "count_over_ranks"))):
        setattr(module, function, noted(name, getattr(module, function)))
    compression = SMALL_COMPRESSION if run.is_stand_in else COMPRESSION
    with PeakMemory(device) as memory:
        measured = noted("measured, all parts", compress.measure_)(model, batches, loss=nn.BCEWithLogitsLoss())
        found = noted("allocation", measured.allocate)(compression=compression)
    if memory.num_bytes is not None:
        run.figures.note("peak memory beyond the model", memory.num_bytes / 1e9, "GB")
    run.figures.note("compression", found.compression)
    packed = noted("codes", compress.packed_collections)(model, found.scheme)
    held = sum(tensor.nbytes for module in packed.values() for tensor in module.buffers())
    run.figures.note("tables in codes", held / 1e9, "GB")
