"""What ranks do, and report, about curvature; judged in test_curvature_ranks.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import PoolingType

from dnis_torchrec import prepare_
from dnis_torchrec.allocation.curvature import Curvature, curvature, curvature_of_read_tables
from dnis_torchrec.data.over_ranks import SlicedBatches
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from tests.allocation.curvature_cases import COLLECTIONS, ROWS, Case, make_batch, make_blocks, make_model
from tests.distributed.harness import Rank, Results, Scenario

LOSS = nn.BCEWithLogitsLoss()
CASES = {
    "several ids": Case(),
    "one id": Case(lengths=(1, 1, 1, 1)),
    "mean": Case(pooling=PoolingType.MEAN, unassigned=2),
    "weighted": Case(is_weighted=True),
}
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
PAIRS = [("several ids", kind) for kind in KINDS]
PAIRS += [(name, kind) for name in ("one id", "mean", "weighted") for kind in ("row_wise", "column_wise")]
"""What is tried on two ranks: every sharding type, and every other case where bags are cut by rows and by columns."""
SIZE = 8


def batches(case: Case, num_batches: int = 2) -> list[Batch]:
    """Of all ranks together."""
    return [make_batch(case, seed, SIZE) for seed in range(num_batches)]


def sharded(case: Case, kind: str, at: Rank, *, prepared: bool = False) -> nn.Module:
    """The case's model over the ranks, every table in one sharding type."""
    model = make_model(case)
    model = prepare_(model, make_blocks(case)) if prepared else model
    sharders = [CpuEmbeddingBagCollectionSharder()]
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in ROWS}
    plan = make_sharding_plan(model, at.device, sharders, constraints=constraints, process_group=at.process_group)
    assert len(plan.plan) == len(COLLECTIONS)
    return shard_model(model, at.device, plan, sharders, process_group=at.process_group)


def reported(found: Curvature) -> Results:
    """All of it."""
    return {
        "gradient": dict(found.gradient),
        "curvature": dict(found.curvature),
        "couplings": dict(found.couplings),
        "num_samples": found.num_samples,
        "relative_error": found.relative_error,
    }


def measure(at: Rank, name: str, kind: str, *, prepared: bool = False, num_samples: int | None = None) -> Results:
    """Curvature of a sharded model, every rank's batches its slices of all samples."""
    case = CASES[name]
    model = sharded(case, kind, at, prepared=prepared)
    own = SlicedBatches(batches(case), Ranks(at.process_group), "train", equal=True)
    return reported(curvature(model, own, make_blocks(case), loss=LOSS, num_samples=num_samples))


def measure_cut(at: Rank, name: str, kind: str) -> Results:
    """`measure`, one sample at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dnis_torchrec.allocation.curvature.BYTES_AT_A_TIME", 1)
        return measure(at, name, kind)


def refuse(at: Rank, what: str) -> Results:
    """The error of every rank, where something is wrong on rank 1 alone."""
    case = CASES["several ids"]
    own = list(SlicedBatches(batches(case), Ranks(at.process_group), "train", equal=True))
    model = sharded(case, "row_wise", at)
    if at.rank == 1 and what == "batches":
        own.pop()
    if at.rank == 1 and what == "labels":
        own[1].labels[-1] = torch.nan
    if at.rank == 1 and what == "predictions":
        model.module.over[3].bias.data.fill_(torch.nan)
    try:
        curvature(model, own, make_blocks(case), loss=LOSS)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


def grow(at: Rank) -> Results:
    """Samples that grow until a table is read that only the second batch of rank 1 reads."""
    case, without = CASES["several ids"], Case(lengths=(1, 0, 0, 3))
    own = [make_batch(case if (at.rank, place) == (1, 1) else without, place, SIZE) for place in range(8)]
    model = sharded(case, "table_wise", at)
    found = curvature_of_read_tables(model, own, make_blocks(case), loss=LOSS, num_samples=1)
    return {"num_samples": found.num_samples, "unread": sorted(found.unread)}


SCENARIOS: dict[str, Scenario] = {f"{name} {kind}": partial(measure, name=name, kind=kind) for name, kind in PAIRS}
SCENARIOS["prepared"] = partial(measure, name="several ids", kind="row_wise", prepared=True)
SCENARIOS["cut"] = partial(measure_cut, name="several ids", kind="row_wise")
SCENARIOS["enough"] = partial(measure, name="several ids", kind="table_wise", num_samples=SIZE)
SCENARIOS["growing"] = grow
SCENARIOS |= {f"refused {what}": partial(refuse, what=what) for what in ("batches", "labels", "predictions")}
