"""A model, batches and shardings that are the same on any number of ranks: what every process of these tests builds.

Four tables of two embedding_dims in two collections: single-id and multi-hot, SUM and MEAN, with numbers of rows that
neither two nor four ranks can divide. The batch of a step is made in parts, two of them called halves: rank r
takes part r, a rank alone takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, Sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.swap import prepare_
from tests.distributed.harness import Rank, Results
from tests.models import shards_of

CPU = torch.device("cpu")
NUM_DENSE = 3
HALF = 12
LEARNING_RATE = 0.2
EMBEDDING_L2 = 0.05
ROWS = {"user": 41, "item": 31, "genre": 13, "tag": 21}
DIMS = {"user": 8, "item": 16, "genre": 8, "tag": 16}
MULTI_HOT = {"genre": 3, "tag": 4}
MEAN = {"item", "genre"}
NUM_BLOCKS = 3

KINDS: dict[str, dict[str, str]] = {
    kind: dict.fromkeys(ROWS, kind) for kind in ("table_wise", "column_wise", "row_wise", "data_parallel")
}
KINDS["mixed"] = {"user": "row_wise", "item": "column_wise", "genre": "data_parallel", "tag": "table_wise"}
MORE_KINDS: dict[str, dict[str, str]] = {
    kind: dict.fromkeys(ROWS, kind) for kind in ("table_row_wise", "table_column_wise", "grid_shard")
}
MORE_KINDS["dense"] = {
    "user": "row_wise dense",
    "item": "table_wise dense",
    "genre": "column_wise dense",
    "tag": "table_row_wise dense",
}
MORE_KINDS["mixed hosts"] = {
    "user": "grid_shard",
    "item": "table_row_wise",
    "genre": "row_wise dense",
    "tag": "table_column_wise",
}
MORE_KINDS["mixed pooling"] = {"user": "row_wise", "item": "row_wise", "genre": "table_wise", "tag": "column_wise"}
MORE_KINDS["cached"] = {
    "user": "row_wise",
    "item": "column_wise fused_uvm_caching",
    "genre": "data_parallel",
    "tag": "table_wise fused_uvm_caching",
}
MORE_KINDS |= {f"frozen {kind}": (KINDS | MORE_KINDS)[kind] for kind in ("mixed", "dense", "data_parallel")}
"""Name -> sharding type of every table, followed by its kernel where that is not the fused one."""


class Net(nn.Module):
    """Two collections, each with both kinds of features and both embedding_dims, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = EmbeddingBagCollection(tables=tables("user", "tag"))
        self.second = EmbeddingBagCollection(tables=tables("item", "genre"))
        self.over = nn.Sequential(nn.Linear(sum(DIMS.values()) + NUM_DENSE, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit per sample."""
        pooled = [collection(sparse_features).values() for collection in (self.first, self.second)]
        return self.over(torch.cat([*pooled, dense_features], dim=1))


def tables(*names: str) -> list[EmbeddingBagConfig]:
    """Configs of some of the four tables, or of all."""
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIMS[name],
            feature_names=[f"{name}_id"],
            pooling=PoolingType.MEAN if name in MEAN else PoolingType.SUM,
        )
        for name in names or ROWS
    ]


def blocks() -> RowBlocks:
    """Every table has its own rows of alpha; `user` is in frequency order, the others are not."""
    generator = torch.Generator().manual_seed(5)
    counts = {name: torch.randint(0, 30, (rows,), generator=generator) for name, rows in ROWS.items()}
    counts["user"] = torch.arange(ROWS["user"], 0, -1)
    longest = {f"{name}_id": MULTI_HOT.get(name, 1) for name in ROWS}
    return blocks_from_counts(FrequencyCounts(counts, longest, 100), tables(), num_blocks=NUM_BLOCKS, least_rows=1)


def make_half(stream: str, step: int, half: int, size: int = HALF) -> list[dict]:
    """Samples of one half of a batch.

    In the validation stream the halves differ in the blocks they hit: neither has a user of the last block, the second
    has users of the first block alone and no tag at all.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * half + len(stream))
    limits = dict(ROWS)
    if stream == "validation":
        limits["user"] = (27, 13)[half % 2]
    samples = []
    for _ in range(size):
        sample = {"dense": torch.rand(NUM_DENSE, generator=generator)}
        for name in ROWS:
            most = MULTI_HOT.get(name, 1)
            least = 1 if name == "user" else 0
            length = int(torch.randint(least, most + 1, (1,), generator=generator))
            if stream == "validation" and half == 1 and name == "tag":
                length = 0
            sample[name] = torch.randint(0, limits[name], (length,), generator=generator)
        sample["label"] = float(sample["user"][0] % 3 == 0 or sample["dense"][0] > 0.8)
        samples.append(sample)
    return samples


def to_batch(samples: list[dict]) -> Batch:
    """The samples as one TorchRec batch."""
    features = KeyedJaggedTensor(
        keys=[f"{name}_id" for name in ROWS],
        values=torch.cat([sample[name] for name in ROWS for sample in samples]),
        lengths=torch.tensor([len(sample[name]) for name in ROWS for sample in samples]),
    )
    labels = torch.tensor([sample["label"] for sample in samples])
    return Batch(torch.stack([sample["dense"] for sample in samples]), features, labels)


class Stream:
    """Batches of a stream, fresh at every iteration."""

    def __init__(
        self, name: str, num_batches: int, halves: tuple[int, ...], sizes: tuple[int, int] = (HALF, HALF)
    ) -> None:
        self.batches = [
            to_batch([sample for half in halves for sample in make_half(name, step, half, sizes[half % 2])])
            for step in range(num_batches)
        ]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


FROZEN = ("user", "genre", "tag")


def task(*, frozen: bool = False) -> TrainTask:
    """The prepared model, with the same weights in every process; perhaps with some tables that do not learn."""
    torch.manual_seed(11)
    net = Net()
    for collection in (net.first, net.second):
        for name, bag in collection.embedding_bags.items():
            bag.weight.requires_grad_(not (frozen and name in FROZEN))
    return TrainTask(prepare_(net, blocks()), nn.BCEWithLogitsLoss(), embedding_l2=EMBEDDING_L2)


def constraints_of(kinds: Mapping[str, str]) -> dict[str, ParameterConstraints]:
    """What gives every table its sharding type, columns in parts of four."""
    return {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in kinds.items()}


def spread(model: nn.Module, kinds: Mapping[str, str], at: Rank, sharders: Sharders | None = None) -> nn.Module:
    """A model over the ranks, every table in its sharding type."""
    sharders, group = sharders or [CpuEmbeddingBagCollectionSharder()], at.process_group
    plan = make_sharding_plan(model, at.device, sharders, constraints=constraints_of(kinds), process_group=group)
    return shard_model(model, at.device, plan, sharders, process_group=group)


def plan_as(
    whole: nn.Module, kind: str, group: dist.ProcessGroup, device: torch.device, sharders: Sharders
) -> ShardingPlan:
    """A plan that gives every table its sharding type and kernel."""
    chosen = {name: value.split() for name, value in (KINDS | MORE_KINDS)[kind].items()}
    constraints = constraints_of({name: value[0] for name, value in chosen.items()})
    plan = make_sharding_plan(whole, device, sharders, constraints=constraints, process_group=group)
    for planned in plan.plan.values():
        for name, sharding in planned.items():
            if len(chosen[name]) == 2:  # the planner knows dense kernels for data_parallel alone, and caches for GPUs
                sharding.compute_kernel = chosen[name][1]
            if sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
                sharding.cache_params = CacheParams(load_factor=0.5, prefetch_pipeline=True)
    return plan


def shard_as(
    whole: TrainTask,
    kind: str,
    group: dist.ProcessGroup,
    device: torch.device = CPU,
    sharder: CpuEmbeddingBagCollectionSharder | None = None,
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Shards a task over the ranks of a group, and plain SGD for all of it: fused, or in the dense kernel."""
    types = (KINDS | MORE_KINDS)[kind]
    for collection in (module for module in whole.modules() if isinstance(module, EmbeddingBagCollection)):
        for name, bag in collection.embedding_bags.items():
            is_fused = types[name] != "data_parallel" and "dense" not in types[name]
            if is_fused and bag.weight.requires_grad:
                apply_optimizer_in_backward(torch.optim.SGD, bag.parameters(), {"lr": LEARNING_RATE})
    sharders = [sharder or CpuEmbeddingBagCollectionSharder()]
    plan = plan_as(whole, kind, group, device, sharders)
    model = shard_model(whole, device, plan, sharders, process_group=group)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """``"table/first row/first column"`` -> clone of the local shard."""
    return {
        f"{part.table}/{part.first_row}/{part.first_column}": part.weight.detach().cpu().clone()
        for part in shards_of(model)
    }


def dense_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Dense weights."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if ".embedding_bags." not in name}


def alpha_of(pipeline: BilevelTrainPipeline) -> dict[str, torch.Tensor]:
    """Clones of alpha by D."""
    return {str(dim): pipeline.alpha.of(dim).cpu().clone() for dim in pipeline.alpha.dims}


def whole(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tables put together from what `tables_of` gave on all ranks.

    Every value is held once, unless ranks hold the same whole table.
    """
    shards = [(place.rsplit("/", 2), weight) for part in parts for place, weight in part.items()]
    shapes: dict[str, tuple[int, int]] = {}
    for (name, row, column), weight in shards:
        rows, columns = shapes.get(name, (0, 0))
        shapes[name] = max(rows, int(row) + weight.shape[0]), max(columns, int(column) + weight.shape[1])
    tables = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for (name, row, column), weight in shards:
        rows, columns = (
            slice(int(first), int(first) + size) for first, size in zip((row, column), weight.shape, strict=True)
        )
        target = tables[name][rows, columns]
        is_replica = weight.shape == tables[name].shape and torch.equal(target, weight)
        assert target.isnan().all() or is_replica, (name, row, column)
        target.copy_(weight)
    assert not [name for name, table in tables.items() if table.isnan().any()]
    return tables


def assert_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """To the bit."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_near(first: Any, second: Any, tolerance: float = 1e-5) -> None:
    """Up to how sums over ranks are rounded."""
    torch.testing.assert_close(first, second, atol=tolerance, rtol=tolerance)


def described(scheme: MixedDimensionScheme) -> Results:
    """A scheme as the report of a scenario can hold it."""
    return {"json": str(scheme.to_json()), "tensors": {k: v.clone() for k, v in scheme.to_tensors().items()}}


def assert_same_scheme(first: Results, second: Results) -> None:
    """To the bit, too."""
    assert first["json"] == second["json"]
    assert_same(first["tensors"], second["tensors"])


def outcome_of(action: Callable[[], Any]) -> str:
    """How an action ends."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def assert_outcome(outcomes: Sequence[str], kind: str, place: str, rank: int | None = None) -> None:
    """Every rank ends with an error that names the place.

    What is wrong on one rank has its kind there, and the others say which rank that is.
    """
    for number, outcome in enumerate(outcomes):
        assert place in outcome, (number, outcome)
        if rank is None or number == rank:
            assert outcome.startswith(f"{kind}: "), (number, outcome)
            assert rank is None or f"rank {rank}: " not in outcome, (number, outcome)
        else:
            assert f"rank {rank}: " in outcome, (number, outcome)
