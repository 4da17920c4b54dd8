"""What ranks do, and report, about rotation; judged in test_rotation_ranks.py."""

from __future__ import annotations

from functools import partial

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dnis_torchrec.allocation.rotation import rotate_, rotation_groups
from dnis_torchrec.soft_selection.sharding import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.soft_selection.table_shards import collections, local_shards
from tests.allocation.test_rotation import build, counts_of, optimizer_of, sgd
from tests.distributed.harness import Rank, Results, Scenario

MODELS = ("deepfm", "mlp", "neumf")
"""Models with groups of two tables, and of one: then a rank may hold nothing of a group."""
TURNED = ("table_wise", "row_wise", "data_parallel")
REFUSED = "column_wise"


def rotate(rank: Rank, name: str, sharding_type: str) -> Results:
    """Shards and turns a model: this rank's shards, the rotations, and what read the tables; or the error."""
    model = build(name)
    counts = counts_of(model)
    if sharding_type != "data_parallel":
        for module in model.modules():
            if isinstance(module, EmbeddingBagCollection):
                apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    constraint = ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
    sharders = [CpuEmbeddingBagCollectionSharder()]
    constraints = {table: constraint for table in counts.counts}
    plan = make_sharding_plan(model, rank.device, sharders, constraints=constraints)
    sharded = shard_model(model, rank.device, plan, sharders)
    try:
        rotations = rotate_(sharded, counts, optimizer_of(sharded, sgd))
    except NotImplementedError as error:
        return {"error": str(error)}
    parts = [part for module in collections(sharded).values() for part in local_shards(module)]
    return {
        "rotations": rotations,
        "shards": [[part.table, part.first_row, part.weight.clone()] for part in parts],
        "reader": next(value for name, value in sharded.named_parameters() if name.endswith("0._linear.weight")),
        "groups": [list(group.tables) for group in rotation_groups(sharded)],
    }


SCENARIOS: dict[str, Scenario] = {
    f"{name} {kind}": partial(rotate, name=name, sharding_type=kind) for name in MODELS for kind in (*TURNED, REFUSED)
}
