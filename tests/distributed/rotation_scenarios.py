"""What ranks do, and report, about rotation; judged in test_rotation_ranks.py."""

from __future__ import annotations

from functools import partial

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dnis_torchrec.allocation.axes import rotate_, rotation_groups, with_axes_
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from tests.allocation.test_rotation import build, counts_of, optimizer_of, sgd
from tests.allocation.turnable import ROWS, logits_of
from tests.allocation.turnable import build as build_of_torchrec
from tests.allocation.turnable import counts as counts_of_torchrec
from tests.distributed.harness import Rank, Results, Scenario

MODELS = ("deepfm", "mlp", "neumf")
"""Models with groups of two tables, and of one: then a rank may hold nothing of a group."""
TURNED = ("table_wise", "row_wise", "data_parallel")
REFUSED = "column_wise"
MIXED = {"user": "column_wise", "movie": "row_wise", "genre": "table_wise"}
OF_TORCHREC = {
    "dlrm": (*TURNED, "column_wise", "grid_shard", "mixed"),
    "projection": ("row_wise", "column_wise"),
    "deepfm": ("row_wise", "column_wise"),
}
"""Turned after training, cut rows put together a chunk at a time; ``"mixed"`` is `MIXED`."""
WEIGHTED = ("row_wise", "grid_shard")
"""What has weighted bags, and with them no MEAN, which TorchRec does not offer under grid_shard."""


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


def rotate_after_training(rank: Rank, name: str, sharding_type: str) -> Results:
    """Turns one of TorchRec's models that is sharded already: its shards, axes, and how far its logits moved."""
    is_weighted = sharding_type in WEIGHTED
    model = build_of_torchrec(name, is_weighted=is_weighted)
    if sharding_type != "data_parallel":
        fused = model.sparse_arch.embedding_bag_collection.parameters()
        apply_optimizer_in_backward(torch.optim.SGD, fused, {"lr": 1.0})
    kinds = MIXED if sharding_type == "mixed" else dict.fromkeys(ROWS, sharding_type)
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in kinds.items()}
    sharders = [CpuEmbeddingBagCollectionSharder()]
    plan = make_sharding_plan(model, rank.device, sharders, constraints=constraints)
    sharded = shard_model(model, rank.device, plan, sharders)
    with torch.no_grad():
        before = logits_of(sharded, is_weighted=is_weighted)
        rotations = rotate_(with_axes_(sharded), counts_of_torchrec())
        moved = float((logits_of(sharded, is_weighted=is_weighted) - before).abs().max())
    shards = [shard for module in collections(sharded).values() for shard in local_shards(module)]
    return {
        "moved": moved,
        "rotations": rotations,
        "shards": [[shard.table, shard.first_row, shard.first_column, shard.weight.clone()] for shard in shards],
        "axes": [value for key, value in sharded.named_buffers() if key.endswith("axes")],
    }


SCENARIOS: dict[str, Scenario] = {
    f"{name} {kind}": partial(rotate, name=name, sharding_type=kind) for name in MODELS for kind in (*TURNED, REFUSED)
}
SCENARIOS |= {
    f"{name} of torchrec {kind}": partial(rotate_after_training, name=name, sharding_type=kind)
    for name, kinds in OF_TORCHREC.items()
    for kind in kinds
}
