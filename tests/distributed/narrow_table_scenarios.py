"""Tables too narrow for fused kernels beside others, on several ranks: steps with the plan that the project makes."""

from __future__ import annotations

from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import prepare_
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU
from tests.distributed.scenarios import tables_of

ROWS, SIZE, STEPS, RATE = 11, 6, 3, 0.2
DIMS = {"first_order": 1, "six": 6, "wide": 8, "visited": 2}
SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel", "as the planner has it")
FEATURES = ["a", "b", "c", "d"]


class Net(nn.Module):
    """Three pooled tables of other widths, the narrowest for first-order weights, and an unpooled one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = dict(zip(DIMS, FEATURES, strict=True))
        *pooled, last = DIMS
        fields = {name: {"num_embeddings": ROWS, "embedding_dim": DIMS[name]} for name in DIMS}
        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name=name, feature_names=[names[name]], **fields[name]) for name in pooled]
        )
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(name=last, feature_names=[names[last]], **fields[last])]
        )
        self.over = nn.Linear(sum(DIMS.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """A number per sample; every sample has one id of each feature."""
        rows = self.rows(features)["d"].values()
        return self.over(torch.cat([self.bags(features).values(), rows], dim=1))


def batch(step: int, ranks: tuple[int, ...]) -> KeyedJaggedTensor:
    """The samples of some ranks."""
    parts = [
        torch.randint(0, ROWS, (4, SIZE), generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks
    ]
    values = torch.cat(parts, dim=1)
    return KeyedJaggedTensor(FEATURES, values.flatten(), lengths=torch.ones(values.numel(), dtype=torch.int64))


def prepared() -> Net:
    """The model with soft selection, in blocks of two kinds of rows."""
    model = Net()
    counts = count_frequencies([batch(step, (0, 1)) for step in range(STEPS)], table_configs(model))
    return prepare_(model, blocks_from_counts(counts, table_configs(model), num_blocks=2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: tuple[int, ...]) -> Tensor:
    """Losses of a few steps, of these ranks' samples."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, ranks)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def unsharded() -> Results:
    """The same steps on one process."""
    model = prepared()
    losses = stepped(model, torch.optim.SGD(model.parameters(), lr=RATE), (0, 1))
    return {"losses": losses, "tables": tables_of(model)}


def sharded(kind: str, at: Rank) -> Results:
    """Fused kernels step the tables that they take; whatever is left gets an optimizer."""
    model = prepared()
    kinds = {} if kind not in SHARDED_AS[:-1] else dict.fromkeys(DIMS, ParameterConstraints(sharding_types=[kind]))
    sharders = default_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE})
    plan = make_sharding_plan(model, CPU, sharders, constraints=kinds, process_group=at.process_group)
    kernels = {name: own.compute_kernel for of_module in plan.plan.values() for name, own in of_module.items()}
    model = shard_model(model, CPU, plan, sharders, process_group=at.process_group)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    losses = stepped(model, torch.optim.SGD(rest.values(), lr=RATE), (at.rank,))
    return {"losses": losses, "tables": tables_of(model), "kernels": kernels}


def scenarios() -> dict[str, Scenario]:
    """One for every kind of sharding."""
    return {kind: partial(sharded, kind) for kind in SHARDED_AS}
