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
from dnis_torchrec.soft_selection.table_shards import collections, local_shards
from tests.allocation.curvature_cases import make_model
from tests.distributed.curvature_scenarios import CASES, KINDS, LOSS, batches, sharded
from tests.distributed.harness import Rank, Results, Scenario

CASE = CASES["several ids"]
SIZES = (1.5, 2.5)


def measured(model: nn.Module, own: Iterable[Batch]) -> Results:
    """Two sizes of one measuring, the counts of all rows among what comes back."""
    found = measure_(model, own, loss=LOSS, num_blocks=3)
    allocations = [found.allocate(compression=size) for size in SIZES]
    return {
        "counts": {name: counts[:] for name, counts in found.counts.counts.items()},
        "tensors": [allocation.scheme.to_tensors() for allocation in allocations],
        "bytes": [allocation.num_bytes for allocation in allocations],
        "losses": [allocation.predicted_loss_increase for allocation in allocations],
    }


def measure_all(at: Rank, kind: str) -> Results:
    """Each rank on its slices of the batches."""
    return measured(sharded(CASE, kind, at), SlicedBatches(batches(CASE), Ranks(at.process_group), "train", equal=True))


def measure_alone() -> Results:
    """The same in one process."""
    return measured(make_model(CASE), batches(CASE))


def refuse(at: Rank) -> Results:
    """The error of every rank, where a value of rank 1 is none."""
    model = sharded(CASE, "row_wise", at)
    if at.rank == 1:
        [*_, shard] = [shard for module in collections(model).values() for shard in local_shards(module)]
        shard.weight.fill_(torch.nan)
    try:
        measured(model, SlicedBatches(batches(CASE), Ranks(at.process_group), "train", equal=True))
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}
    return {"error": "none"}


SCENARIOS: dict[str, Scenario] = {kind: partial(measure_all, kind=kind) for kind in KINDS} | {"refused": refuse}
