"""What ranks do to measure a sharded model for compression; judged in test_compress_ranks.py."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.data.over_ranks import SlicedBatches
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import collections, local_shards
from tests.allocation.curvature_cases import make_batch, make_model
from tests.distributed.curvature_scenarios import CASES, KINDS, LOSS, batches, sharded
from tests.distributed.harness import Rank, Results, Scenario

CASE = CASES["several ids"]
SIZES = (1.5, 2.5)


def held_out() -> list[Batch]:
    """What teaches scales to grow: the model is right in all, and less sure of it than it could be."""
    model, own = make_model(CASE), [make_batch(CASE, seed, 64) for seed in (100, 101)]
    for batch in own:
        with torch.no_grad():
            batch.labels = (model(batch.dense_features, batch.sparse_features) > 0).float()
    return own


def measured(model: nn.Module, own: Iterable[Batch], others: Iterable[Batch]) -> Results:
    """Two sizes of one measuring, and one with scales that learn, the counts of all rows among what comes back."""
    found = measure_(model, own, loss=LOSS, num_blocks=3)
    learning = measure_(model, own, loss=LOSS, num_blocks=3, counts=found.counts, held_out=others)
    allocations = [found.allocate(compression=size) for size in SIZES]
    allocations.append(learning.allocate(compression=SIZES[0]))
    return {
        "counts": {name: counts[:] for name, counts in found.counts.counts.items()},
        "tensors": [allocation.scheme.to_tensors() for allocation in allocations],
        "bytes": [allocation.num_bytes for allocation in allocations],
        "losses": [allocation.predicted_loss_increase for allocation in allocations],
    }


def measure_all(at: Rank, kind: str) -> Results:
    """Each rank on its slices of the batches."""
    return measured(sharded(CASE, kind, at), *slices(at))


def slices(at: Rank) -> tuple[SlicedBatches, SlicedBatches]:
    """Of this rank, of both splits."""
    ranks = Ranks(at.process_group)
    return (
        SlicedBatches(batches(CASE), ranks, "train", equal=True),
        SlicedBatches(held_out(), ranks, "validation", equal=True),
    )


def measure_alone() -> Results:
    """The same in one process."""
    return measured(make_model(CASE), batches(CASE), held_out())


def refuse(at: Rank) -> Results:
    """The error of every rank, where a value of rank 1 is none."""
    model = sharded(CASE, "row_wise", at)
    if at.rank == 1:
        [*_, shard] = [shard for module in collections(model).values() for shard in local_shards(module)]
        shard.weight.fill_(torch.nan)
    try:
        measured(model, *slices(at))
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}
    return {"error": "none"}


SCENARIOS: dict[str, Scenario] = {kind: partial(measure_all, kind=kind) for kind in KINDS} | {"refused": refuse}
