"""Tables with requires_grad=False keep their bits: in every sharding type and kernel, searched or trained plainly."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import merge_, prepare_, unshard_
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import set_learning_rates_, shard

CPU = torch.device("cpu")
FROZEN, LEARNING = "kept", "learnt"
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{name}"])
    for name in (FROZEN, LEARNING)
]


class Net(nn.Module):
    """Two tables, one of them frozen, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=TABLES)
        self.ebc.embedding_bags[FROZEN].weight.requires_grad_(False)
        self.over = nn.Linear(16, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit per sample."""
        return self.over(self.ebc(sparse_features).values())


def make_batches(num_batches: int, *, longest: int = 1) -> list[Batch]:
    batches = []
    for seed in range(num_batches):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (16,), generator=generator)
        ids = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
        kjt = KeyedJaggedTensor(keys=[f"f_{table.name}" for table in TABLES], values=ids, lengths=lengths)
        batches.append(Batch(torch.zeros(8, 1), kjt, torch.randint(0, 2, (8,), generator=generator).float()))
    return batches


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {name: torch.full((12, 8), torch.nan) for name in (FROZEN, LEARNING)}
    for module in collections(model).values():
        for part in local_shards(module):
            rows = slice(part.first_row, part.first_row + part.weight.shape[0])
            whole[part.table][rows, part.first_column : part.first_column + part.weight.shape[1]] = part.weight
    return whole


def sharded(task: nn.Module, kind: str, kernel: str) -> DistributedModelParallel:
    decay = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, "weight_decay": 0.1}
    sharders = [CpuEmbeddingBagCollectionSharder(fused_params=decay)]
    constraint = ParameterConstraints(sharding_types=[kind], min_partition=4)
    constraints = {table.name: constraint for table in TABLES}
    plan = make_sharding_plan(task, CPU, sharders, constraints=constraints)
    for planned in plan.plan.values():
        for sharding in planned.values():
            sharding.compute_kernel = kernel
    return shard_model(task, CPU, plan, sharders)


def adam_with_decay(model: nn.Module) -> KeyedOptimizerWrapper:
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(rest, lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1))


def prepared(net: Net, batches: list[Batch]) -> Net:
    counts = count_frequencies((batch.sparse_features for batch in batches), TABLES)
    return prepare_(net, blocks_from_counts(counts, TABLES, num_blocks=3))


KERNELS = [(kind, "fused") for kind in ("table_wise", "row_wise", "column_wise")]
KERNELS += [(kind, "dense") for kind in ("data_parallel", "table_wise", "row_wise")]


@pytest.mark.parametrize("longest", [1, 3])
@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize(("kind", "kernel"), KERNELS)
def test_a_frozen_table_keeps_its_bits_and_stays_frozen(
    gloo: dist.ProcessGroup, kind: str, kernel: str, searched: bool, longest: int
) -> None:
    """Under weight decay, too, inside the backward pass and outside of it."""
    batches, net = make_batches(6, longest=longest), Net()
    before = weights_of(copy.deepcopy(net))
    task = TrainTask(prepared(net, batches) if searched else net, nn.BCEWithLogitsLoss())
    model = sharded(task, kind, kernel)
    optimizer = adam_with_decay(model)
    if searched:
        pipeline = BilevelTrainPipeline(model, optimizer, CPU)
        stream = BilevelStream(batches, batches, LevelSchedule(warm_up_steps=100))
        for _ in range(6):
            pipeline.progress(stream)
        pipeline.detach()
    else:
        for batch in batches:
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
    after = weights_of(model)
    assert torch.equal(after[FROZEN], before[FROZEN])
    assert not torch.equal(after[LEARNING], before[LEARNING])
    learns = {name.split(".")[-2]: weight.requires_grad for name, weight in model.named_parameters()}
    assert not learns[FROZEN]
    assert learns[LEARNING]
    plain = merge_(model) if searched else unshard_(model)
    bags = next(iter(collections(plain).values())).embedding_bags
    assert {name: bag.weight.requires_grad for name, bag in bags.items()} == {FROZEN: False, LEARNING: True}
    assert torch.equal(bags[FROZEN].weight, before[FROZEN])


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_plain_training_leaves_a_frozen_table_alone(gloo: dist.ProcessGroup, tmp_path: Path, optimizer: str) -> None:
    batches, net = make_batches(4), Net()
    before = weights_of(copy.deepcopy(net))
    splits = DataSplits(train=batches, validation=batches, selection=batches, test=batches)
    recipe = Recipe(model=net, data=splits, loss=nn.BCEWithLogitsLoss(), table_optimizer=optimizer)
    model, stepper = shard(TrainTask(net, recipe.loss), recipe, CPU)
    set_learning_rates_(model, stepper, tables=0.1, dense=0.1, rows=0.1)
    train_plainly(model, stepper, recipe, CPU, max_epochs=2, patience=2)
    after = weights_of(model)
    assert torch.equal(after[FROZEN], before[FROZEN])
    assert not torch.equal(after[LEARNING], before[LEARNING])


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_frozen_table_of_sequence_embeddings(gloo: dist.ProcessGroup, kind: str) -> None:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=12, embedding_dim=8, feature_names=[f"f_{name}"])
        for name in (FROZEN, LEARNING)
    ]
    model = nn.ModuleDict({"ec": EmbeddingCollection(tables=configs), "over": nn.Linear(1, 1)})
    model["ec"].embeddings[FROZEN].weight.requires_grad_(False)
    before = {name: table.weight.detach().clone() for name, table in model["ec"].embeddings.items()}
    sharders = [EmbeddingCollectionSharder(fused_params={"learning_rate": 0.5})]
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name in before}
    plan = make_sharding_plan(model, CPU, sharders, constraints=constraints)
    model = shard_model(model, CPU, plan, sharders)
    optimizer = adam_with_decay(model)
    for batch in make_batches(2):
        optimizer.zero_grad()
        looked_up = get_unwrapped_module(model)["ec"](batch.sparse_features)
        torch.stack([jagged.values().sum() for jagged in looked_up.values()]).sum().backward()
        optimizer.step()
    tables = unshard_(model)["ec"].embeddings
    assert torch.equal(tables[FROZEN].weight, before[FROZEN])
    assert not torch.equal(tables[LEARNING].weight, before[LEARNING])
    assert {name: table.weight.requires_grad for name, table in tables.items()} == {FROZEN: False, LEARNING: True}


def test_a_model_that_a_user_shards_alone_is_refused(gloo: dist.ProcessGroup) -> None:
    batches = make_batches(2)
    task = TrainTask(prepared(Net(), batches), nn.BCEWithLogitsLoss())
    model = DistributedModelParallel(task, device=CPU)
    with pytest.raises(NotImplementedError, match=r"FQN 'model.ebc': supported are frozen tables .*\['kept'\]"):
        BilevelTrainPipeline(model, adam_with_decay(model), CPU)


def test_a_table_that_is_frozen_after_prepare_is_refused_too(gloo: dist.ProcessGroup) -> None:
    batches, net = make_batches(2), Net().requires_grad_(True)
    task = TrainTask(prepared(net, batches), nn.BCEWithLogitsLoss())
    task.model.ebc.embedding_bag_collection.embedding_bags[FROZEN].weight.requires_grad_(False)
    model = DistributedModelParallel(task, device=CPU)
    with pytest.raises(NotImplementedError, match=r"FQN 'model.ebc': supported are frozen tables .*\['kept'\]"):
        BilevelTrainPipeline(model, adam_with_decay(model), CPU)


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_when_it_is_sharded_counts(gloo: dist.ProcessGroup, frozen: bool) -> None:
    """Between prepare_ and shard_model a table may be frozen, or may be let learn again."""
    batches, net = make_batches(4, longest=3), Net()
    net.ebc.embedding_bags[FROZEN].weight.requires_grad_(frozen)
    net = prepared(net, batches)
    net.ebc.embedding_bag_collection.embedding_bags[FROZEN].weight.requires_grad_(not frozen)
    before = weights_of(copy.deepcopy(net))
    model = sharded(TrainTask(net, nn.BCEWithLogitsLoss()), "table_wise", "fused")
    pipeline = BilevelTrainPipeline(model, adam_with_decay(model), CPU)
    stream = BilevelStream(batches, batches, LevelSchedule(warm_up_steps=100))
    for _ in batches:
        pipeline.progress(stream)
    after = weights_of(pipeline.detach())
    assert torch.equal(after[FROZEN], before[FROZEN]) == frozen
    assert not torch.equal(after[LEARNING], before[LEARNING])


def test_a_schedule_of_all_learning_rates_does_not_wake_a_frozen_table(gloo: dist.ProcessGroup) -> None:
    batches, net = make_batches(4), Net()
    before = weights_of(copy.deepcopy(net))
    model = sharded(TrainTask(net, nn.BCEWithLogitsLoss()), "row_wise", "fused")
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)]
    optimizer = WarmupOptimizer(model.fused_optimizer, stages, lr=0.2)
    for batch in batches:
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    after = weights_of(model)
    assert torch.equal(after[FROZEN], before[FROZEN])
    assert not torch.equal(after[LEARNING], before[LEARNING])
