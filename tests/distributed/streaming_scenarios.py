"""What each rank does in the tests of streams."""

from __future__ import annotations

from typing import Any

import torch

from dnis_torchrec.streaming import ParsedStream, StreamedBatches, count_stream
from tests.distributed.harness import Rank
from tests.streaming_data import SCHEMA, draw, labels, write_text
from tests.test_streaming_counting import ROUGH, TABLES, make_batches

NUM_SAMPLES = 61


def serve(rank: Rank) -> dict[str, Any]:
    """Two epochs of a stream, with ranks and world_size taken from the process group."""
    path = rank.folder / f"stream_{rank.rank}.tsv"
    write_text(path, draw(NUM_SAMPLES))
    stream = ParsedStream([path], SCHEMA, chunk_rows=8)
    found: dict[str, Any] = {}
    for drop_last in (True, False):
        batches = StreamedBatches(stream, batch_size=4, drop_last=drop_last, window_batches=2)
        found[str(drop_last)] = [labels(list(batches)) for _ in range(2)]
        found[f"length {drop_last}"] = len(batches)
    return found


def own_batches(rank: int) -> int:
    """Ranks have different numbers of batches, and one of them few."""
    return 1 + 6 * rank


def count(rank: Rank) -> dict[str, Any]:
    """Counts with and without room for all ids."""
    batches = make_batches(own_batches(rank.rank), seed=rank.rank)
    found: dict[str, Any] = {}
    for name, limits in (("exact", None), ("rough", ROUGH)):
        counts = count_stream(batches, TABLES, limits=limits, process_group=rank.process_group)
        found[name] = {
            "counts": {table: rows[:] for table, rows in counts.counts.items()},
            "lengths": dict(counts.max_bag_lengths),
            "num_samples": counts.num_samples,
            "error_bounds": counts.error_bounds(),
        }
    return found


def fail_alone(rank: Rank) -> dict[str, Any]:
    """The last rank meets an id outside its table."""
    batches = make_batches(2, seed=0)
    if rank.rank == rank.world_size - 1:
        values = batches[1].values().clone()
        values[0] = 9
        batches[1]._values = values
    try:
        count_stream(batches, TABLES, process_group=rank.process_group)
    except ValueError as error:
        return {"error": str(error), "sum": int(_sum_of_ranks(rank))}
    return {"error": "", "sum": 0}


def _sum_of_ranks(rank: Rank) -> torch.Tensor:
    """A collective that hangs if the ranks are not at the same place."""
    value = torch.tensor(rank.rank)
    torch.distributed.all_reduce(value, group=rank.process_group)
    return value
