"""The mixed-dimension form trains on, sharded: DistributedModelParallel shards the stock collection inside it.

On one rank and on two, against the unsharded form on the whole batch: the same outputs, before and after training.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.torchrec_inputs import DetachableTrainPipeline
from dnis_torchrec.serving.trainable import MixedDimensionEmbeddingBagCollection
from tests.distributed.harness import Rank, RankResults, Results, run_on_ranks
from tests.reference import two_tables

CPU = torch.device("cpu")
STEPS, HALF, RATE = 6, 8, 0.3
KINDS = {"data_parallel": 1, "table_wise": 4, "row_wise": 4}
"""Sharding type -> what its kernel wants widths to be a multiple of."""


class Net(nn.Module):
    """A searched model in its small form, and a loss."""

    def __init__(self, dim_multiple: int) -> None:
        super().__init__()
        tables, scheme = two_tables()
        self.sparse = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=dim_multiple)
        torch.manual_seed(3)
        self.over = nn.Linear(10, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        predictions = self.over(self.sparse(batch.sparse_features).values()).squeeze(1)
        return nn.functional.mse_loss(predictions, batch.labels), predictions


def make_batch(step: int, halves: tuple[int, ...]) -> Batch:
    """The named halves of a batch; bags of up to three ids."""
    parts = []
    for half in halves:
        generator = torch.Generator().manual_seed(10 * step + half)
        lengths = torch.randint(0, 4, (2, HALF), generator=generator)
        ids = [torch.randint(0, 10, (int(of_key.sum()),), generator=generator) for of_key in lengths]
        parts.append((lengths, ids, torch.rand(HALF, generator=generator)))
    features = KeyedJaggedTensor(
        keys=["movie", "user"],
        values=torch.cat([ids[key] for key in range(2) for _, ids, _ in parts]),
        lengths=torch.cat([lengths[key] for key in range(2) for lengths, _, _ in parts]),
    )
    labels = torch.cat([labels for _, _, labels in parts])
    return Batch(dense_features=torch.zeros(len(labels), 1), sparse_features=features, labels=labels)


def sharded(kind: str, at: Rank) -> tuple[nn.Module, KeyedOptimizerWrapper]:
    """The model, its tables all sharded in one way, and the optimizer of what is not fused."""
    model = Net(KINDS[kind])
    blocks = model.sparse.blocks
    assert type(blocks) is EmbeddingBagCollection
    if kind != "data_parallel":
        apply_optimizer_in_backward(torch.optim.SGD, blocks.parameters(), {"lr": RATE})
    kernels = ["dense"] if kind == "data_parallel" else ["fused"]
    constraint = ParameterConstraints(sharding_types=[kind], compute_kernels=kernels)
    names = [config.name for config in model.sparse.physical_embedding_bag_configs()]
    sharders = [CpuEmbeddingBagCollectionSharder()]
    plan = make_sharding_plan(
        model, CPU, sharders, constraints=dict.fromkeys(names, constraint), process_group=at.process_group
    )
    parallel = shard_model(model, CPU, plan, sharders, process_group=at.process_group)
    rest = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    return parallel, KeyedOptimizerWrapper(rest, lambda params: torch.optim.SGD(params, lr=RATE))


def train(kind: str, at: Rank) -> Results:
    """Outputs of this rank's halves before training, while it goes on (pipelined), and after it."""
    model, optimizer = sharded(kind, at)
    halves = (0, 1) if at.world_size == 1 else (at.rank,)
    found: Results = {"type": type(model.module.sparse.blocks).__name__}
    with torch.no_grad():
        found["before"] = model(make_batch(0, halves))[1]
    pipeline = DetachableTrainPipeline(model, optimizer, CPU, pipeline_postproc=True)
    batches = iter([make_batch(step, halves) for step in range(STEPS)])
    found["while"] = torch.stack([pipeline.progress(batches).detach() for _ in range(STEPS)])
    found["pipelined"] = [module.forward.name for module in pipeline._pipelined_modules]
    pipeline.detach()
    with torch.no_grad():
        found["after"] = model(make_batch(0, halves))[1]
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """What every rank found, of one or of two."""
    folder: Path = tmp_path_factory.mktemp("mixed")
    return run_on_ranks(request.param, {kind: functools.partial(train, kind) for kind in KINDS}, folder)


@functools.cache
def unsharded() -> dict[str, torch.Tensor]:
    """The same on the whole batch, with autograd alone."""
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = {"before": model(make_batch(0, (0, 1)))[1].detach()}
    outputs = []
    for step in range(STEPS):
        loss, predictions = model(make_batch(step, (0, 1)))
        outputs.append(predictions.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found | {"while": torch.stack(outputs), "after": model(make_batch(0, (0, 1)))[1].detach()}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unsharded_form(ranks: RankResults, kind: str) -> None:
    own, expected = ranks[kind], unsharded()
    assert {found["type"] for found in own} == {"ShardedEmbeddingBagCollection"}
    assert all(found["pipelined"] == ["sparse.blocks"] for found in own)
    for when in ("before", "while", "after"):
        torch.testing.assert_close(torch.cat([found[when] for found in own], dim=-1), expected[when])
    assert not torch.allclose(expected["before"], expected["after"], atol=1e-2)
