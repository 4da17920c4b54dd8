"""One sharding plan from TorchRec's own planner, on the meta device: what it puts where, and how
long it reckons with."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    Stats,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dnis_torchrec.jobs.planning.cluster import Cluster
from dnis_torchrec.jobs.planning.tables import PlannedTable

_OPTIMIZER_CLASSES = {"rowwise_adagrad": RowWiseAdagrad, "adam": torch.optim.Adam}
"""TorchRec's planner counts the state of these."""
_INFERIOR_PROPOSALS = 10
"""TorchRec's greedy proposer stops after this many plans in a row that are no faster: the rest
costs minutes."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One sharding plan, as TorchRec estimates it."""

    hbm_bytes: tuple[int, ...]
    ddr_bytes: tuple[int, ...]
    step_ms: float
    sharding: dict[str, int]

    @property
    def fullest_rank_bytes(self) -> int:
        """Memory of the rank that needs most."""
        return max(hbm + ddr for hbm, ddr in zip(self.hbm_bytes, self.ddr_bytes, strict=True))


class _BestPlan(Stats):
    """Keeps what TorchRec's planner would otherwise only log."""

    def __init__(self) -> None:
        self.options: list[ShardingOption] = []

    def log(self, *, best_plan: list[ShardingOption], **_: object) -> None:
        self.options = best_plan


def place(tables: Sequence[PlannedTable], cluster: Cluster, *, thorough: bool) -> Placement | None:
    """Runs TorchRec's planner."""
    rank_numbers = range(cluster.world_size)
    needed = sum(table.training_bytes(cluster.optimizer) for table in tables)
    if needed > cluster.world_size * cluster.table_bytes_per_rank:
        return None
    if not tables:
        return Placement(
            hbm_bytes=(0,) * len(rank_numbers),
            ddr_bytes=(0,) * len(rank_numbers),
            step_ms=0.0,
            sharding={},
        )
    kernels = [EmbeddingComputeKernel.FUSED.value]
    if cluster.compute == "cuda" and cluster.ddr_bytes:
        kernels.append(EmbeddingComputeKernel.FUSED_UVM_CACHING.value)
    best = _BestPlan()
    planner = EmbeddingShardingPlanner(
        topology=cluster.topology(),
        batch_size=cluster.batch_size,
        storage_reservation=FixedPercentageStorageReservation(
            0.0
        ),  # taken off in the topology, from DDR as well
        proposer=[
            UniformProposer(),
            *([GreedyProposer(threshold=_INFERIOR_PROPOSALS)] if thorough else []),
        ],
        constraints={
            table.name: ParameterConstraints(
                compute_kernels=kernels,
                pooling_factors=[table.pooling_factor] * table.num_features,
                is_weighted=table.is_weighted,
            )
            for table in tables
        },
        stats=best,
        debug=False,
    )
    with _quiet():
        try:
            planner.plan(_model(tables, cluster.optimizer), [EmbeddingBagCollectionSharder()])
        except PlannerError:
            return None
    return _placement(best.options, cluster.world_size)


def _placement(options: Sequence[ShardingOption], world_size: int) -> Placement:
    hbm, ddr, milliseconds = [0] * world_size, [0] * world_size, [0.0] * world_size
    for option in options:
        for shard in option.shards:
            hbm[shard.rank] += shard.storage.hbm
            ddr[shard.rank] += shard.storage.ddr
            milliseconds[shard.rank] += shard.perf.total
    return Placement(
        hbm_bytes=tuple(hbm),
        ddr_bytes=tuple(ddr),
        step_ms=max(milliseconds),
        sharding=dict(Counter(option.sharding_type for option in options)),
    )


def _model(tables: Sequence[PlannedTable], optimizer: str) -> nn.Module:
    """The tables on the meta device, which gives no memory to them, in a model as the planner walks
    it."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=[f"{table.name}/f{number}" for number in range(table.num_features)],
        )
        for table in tables
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    optimizer_class = _OPTIMIZER_CLASSES.get(optimizer)
    if optimizer_class is not None:
        apply_optimizer_in_backward(optimizer_class, collection.parameters(), {"lr": 0.01})
    return nn.ModuleDict({"collection": collection})


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the planner's advice on topologies: this one is of no cluster that a job runs on."""
    logger = logging.getLogger("torchrec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
