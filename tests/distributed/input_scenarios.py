"""What ranks do, and report, about inputs and tables of every kind; judged in test_selection_ranks.py.

Unpooled tables, managed collisions, position weights, and tables too narrow for fused kernels.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import holders_of_tables, table_configs
from dnis_torchrec.selection.swap import fold_, merge_, prepare_
from dnis_torchrec.selection.torchrec_inputs import remap
from dnis_torchrec.selection.wrapper import SoftSelectionModule
from tests import models
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU, alpha_of, constraints_of, shards_of, spread, tables_of
from tests.distributed.selection_scenarios import ALPHA_LEARNING_RATE, run_steps, steps_unsharded
from tests.models import DIM, KINDS, LONGEST, sequences, values_of, wrapper_of
from tests.models import SEQUENCE_BATCH_SIZE as BATCH_SIZE
from tests.models import SEQUENCE_ROWS as ROWS
from tests.models import sequence_features as features

LOSS = nn.BCEWithLogitsLoss()
RATE = 0.1
MIXED = "column_wise and row_wise"
SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def loss_of(values: Tensor) -> Tensor:
    """Of a rank's samples, so that the mean over ranks is that of all; every column counts differently."""
    return (values * torch.linspace(-1, 1, DIM)).sin().sum() / BATCH_SIZE


def sharded_sequences(kind: str, at: Rank) -> SoftSelectionModule:
    """The wrapper of a model over the ranks, plain SGD fused into its tables where they are not replicated."""
    model, kinds = sequences(), dict(zip(ROWS, kind.split(" and ") * 2, strict=False))
    for name, holder in holders_of_tables(wrapper_of(model).lookup).items():
        if kinds[name] != "data_parallel":
            apply_optimizer_in_backward(torch.optim.SGD, holder.parameters(), {"lr": RATE})
    return wrapper_of(spread(model, kinds, at, default_sharders()))


def without_ids() -> KeyedJaggedTensor:
    """Bags that are all empty."""
    nothing, lengths = torch.empty(0, dtype=torch.int64), torch.zeros(len(LONGEST) * BATCH_SIZE, dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(LONGEST), values=nothing, lengths=lengths)


def sequences_learn(kind: str, empty_rank: int | None, at: Rank) -> Results:
    """How far both levels are from those of the collection that is not sharded and sees the samples of all ranks.

    A rank may have no ids at all.
    """
    alone = wrapper_of(sequences())
    kjts = [without_ids() if rank == empty_rank else features(20 + rank) for rank in range(at.world_size)]
    with alone.alpha.upper_level() as hits:
        losses = [loss_of(values_of(alone(kjt))) for kjt in kjts]
        alpha = torch.autograd.grad(sum(losses) / at.world_size, alone.alpha.of(DIM))[0]
    values, kjt = values_of(alone(kjts[at.rank])).detach(), kjts[at.rank]
    (sum(loss_of(values_of(alone(kjt))) for kjt in kjts) / at.world_size).backward()
    sharded = sharded_sequences(kind, at)
    with sharded.alpha.upper_level() as own_hits:
        gradient = torch.autograd.grad(loss_of(values_of(sharded(kjt))), sharded.alpha.of(DIM))[0].clone()
    hit = own_hits[DIM].int()
    dist.all_reduce(gradient, group=at.process_group)
    dist.all_reduce(hit, group=at.process_group)
    looked_up = values_of(sharded(kjt))
    loss_of(looked_up).backward()
    rest = [weight for _, weight in in_backward_optimizer_filter(sharded.named_parameters())]
    if rest:
        torch.optim.SGD(rest, lr=RATE).step()
    error = max(
        float((looked_up - values).abs().sum()),
        float((gradient / at.world_size - alpha).abs().max()),
        float(((hit > 0) != hits[DIM]).sum()),
    )
    tables = {
        name: holder.weight.detach() - RATE * holder.weight.grad
        for name, holder in holders_of_tables(alone.lookup).items()
    }
    for own in shards_of(sharded):
        rows = slice(own.first_row, own.first_row + own.weight.shape[0])
        columns = slice(own.first_column, own.first_column + own.weight.shape[1])
        error = max(error, float((own.weight - tables[own.table][rows, columns]).abs().max()))
    before = values_of(sharded(kjt)).detach()
    fold_(sharded)
    return {"error": error, "folded": float((values_of(sharded(kjt)) - before).abs().sum())}


MANAGED_STEPS, MANAGED_RATE = 10, 0.01
MANAGED = {"bags": models.Model, "sequences": models.SequenceModel}
MANAGED_AS = [*(("bags", kind) for kind in SHARDED_AS), ("sequences", "row_wise")]


def managed_task(model_of: str) -> TrainTask:
    """A prepared model whose remapping has learnt ids before."""
    model, tables = models.trained(models.zch, MANAGED[model_of]), [models.USERS, models.ITEMS]
    counts = count_frequencies([remap(model, own.sparse_features) for own in models.BATCHES], tables)
    prepare_(model, blocks_from_counts(counts, tables, num_blocks=4))
    return TrainTask(model, nn.MSELoss())


def managed_stream(ranks: tuple[int, ...]) -> BilevelStream[Batch]:
    """Samples of some ranks, with ids that have no row among them."""
    batches = [models.joined([models.batch(10 * step + rank, 16, ids=40) for rank in ranks]) for step in range(6)]
    return BilevelStream(batches[:4], batches[4:], LevelSchedule(warm_up_steps=2))


def remapping_of(model: nn.Module) -> nn.Module:
    """What gives ids their rows."""
    return model.model.tables._managed_collision_collection


def managed_search(model_of: str, kind: str, at: Rank) -> Results:
    """Steps of both levels on this rank's samples; ranks but the first come with another remapping."""
    model = managed_task(model_of).train()
    before = {name: value.clone() for name, value in remapping_of(model).state_dict().items()}
    if at.rank:
        for value in remapping_of(model).state_dict().values():
            value.zero_()
    sharders, group = default_sharders(), at.process_group
    kinds = constraints_of(dict.fromkeys(("user", "item"), kind))
    plan = make_sharding_plan(model, CPU, sharders, constraints=kinds, process_group=group)
    for of_module in plan.plan.values():
        for own in of_module.values():
            own.compute_kernel = "dense"
    model = shard_model(model, CPU, plan, sharders, process_group=group).train()
    weights = dict(model.named_parameters())
    optimizer = KeyedOptimizerWrapper(weights, lambda parameters: torch.optim.SGD(parameters, lr=MANAGED_RATE))
    pipeline = BilevelTrainPipeline(model, optimizer, CPU)
    pipeline.alpha_optimizer.learning_rate = ALPHA_LEARNING_RATE
    results = {"losses": run_steps(pipeline, managed_stream((at.rank,)), MANAGED_STEPS)["losses"]}
    results |= {"alpha": alpha_of(pipeline), "tables": tables_of(model)}
    pipeline.detach()
    after, probe = remapping_of(get_unwrapped_module(model)).state_dict(), models.batch(99, 16)
    results["moved"] = [name for name, value in before.items() if not torch.equal(value, after[name])]
    with torch.no_grad():
        results["before"] = model.eval()(probe)[1][1]
        results["merged"] = merge_(model)(probe)[1][1]
    return results


def managed_alone(model_of: str) -> Results:
    """The same steps on one process, with the samples of both ranks."""
    return steps_unsharded(managed_task(model_of).train(), managed_stream((0, 1)), MANAGED_STEPS, MANAGED_RATE)


def position_weights(kind: str, at: Rank) -> Results:
    """The weights of all places, and the losses, after a few steps of TorchRec's own module and of ours."""
    net, trained = models.Net, models.Trained
    kinds = {
        "torchrec": trained(net(), kind, by_torchrec=True, rank=at.rank),
        "searched": trained(models.prepared(net()), kind, rank=at.rank),
        "plain": trained(net(), kind, rank=at.rank),
    }
    results: Results = {}
    for name, own in kinds.items():
        losses = own.searched(with_upper_steps=False) if name == "searched" else own.by_itself()
        results[name] = {"losses": losses, "places": places_of(own.model)}
    merge_(kinds["searched"].model)
    return results | {"merged": places_of(kinds["searched"].model)}


def places_of(model: nn.Module) -> dict[str, Tensor]:
    """Clones of the weights of places."""
    return {name: weight.detach().clone() for name, weight in models.weights_of(model).items()}


NARROW_ROWS, NARROW_SIZE, NARROW_RATE = 11, 6, 0.2
NARROW = {"first_order": 1, "six": 6, "wide": 8, "visited": 2}
NARROW_AS = (*SHARDED_AS, "as the planner has it")
FEATURES = ["a", "b", "c", "d"]


class NarrowNet(nn.Module):
    """Three pooled tables of other widths, the narrowest for first-order weights, and an unpooled one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        fields = [
            {"name": name, "num_embeddings": NARROW_ROWS, "embedding_dim": dim, "feature_names": [feature]}
            for (name, dim), feature in zip(NARROW.items(), FEATURES, strict=True)
        ]
        self.bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**own) for own in fields[:-1]])
        self.rows = EmbeddingCollection(tables=[EmbeddingConfig(**fields[-1])])
        self.over = nn.Linear(sum(NARROW.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """A number per sample; every sample has one id of each feature."""
        rows = self.rows(features)["d"].values()
        return self.over(torch.cat([self.bags(features).values(), rows], dim=1))


def narrow_batch(step: int, ranks: tuple[int, ...]) -> KeyedJaggedTensor:
    """The samples of some ranks."""
    seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
    values = torch.cat([torch.randint(0, NARROW_ROWS, (4, NARROW_SIZE), generator=seed) for seed in seeds], dim=1)
    return KeyedJaggedTensor(FEATURES, values.flatten(), lengths=torch.ones(values.numel(), dtype=torch.int64))


def narrow_steps(kind: str | None, at: Rank | None = None) -> Results:
    """A few steps: fused kernels step the tables that they take, whatever is left gets an optimizer."""
    model, kernels = NarrowNet(), {}
    counts = count_frequencies([narrow_batch(step, (0, 1)) for step in range(3)], table_configs(model))
    model = prepare_(model, blocks_from_counts(counts, table_configs(model), num_blocks=2))
    if at is not None:
        kinds = constraints_of(dict.fromkeys(NARROW, kind) if kind in SHARDED_AS else {})
        sharders = default_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": NARROW_RATE})
        plan = make_sharding_plan(model, CPU, sharders, constraints=kinds, process_group=at.process_group)
        kernels = {name: own.compute_kernel for of_module in plan.plan.values() for name, own in of_module.items()}
        model = shard_model(model, CPU, plan, sharders, process_group=at.process_group)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer, losses = torch.optim.SGD(rest.values(), lr=NARROW_RATE), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(narrow_batch(step, (0, 1) if at is None else (at.rank,))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "tables": tables_of(model), "kernels": kernels}


SEQUENCES: dict[str, Scenario] = {f"learn {kind}": partial(sequences_learn, kind, None) for kind in (*KINDS, MIXED)} | {
    f"learn {kind}, no ids on rank 1": partial(sequences_learn, kind, 1) for kind in ("table_wise", MIXED)
}
INPUTS: dict[str, dict[str, Scenario]] = {
    "sequences": SEQUENCES,
    "managed": {f"{model_of} {kind}": partial(managed_search, model_of, kind) for model_of, kind in MANAGED_AS},
    "places": {kind: partial(position_weights, kind) for kind in SHARDED_AS},
    "narrow": {kind: partial(narrow_steps, kind) for kind in NARROW_AS},
}
"""Thing -> its scenarios."""
