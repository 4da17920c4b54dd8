"""What ranks do, and report, about searches under every sharding type, and inputs and tables of every kind.

Unpooled tables, managed collisions, position weights, and tables too narrow for fused kernels. Judged in
test_selection_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec import blocks_from_counts, count_frequencies, make_sharding_plan, merge_, prepare_, shard_model
from dnis_torchrec.data.task import TrainTask, data_terms_only
from dnis_torchrec.search.pipeline import AlphaOptimizer, BilevelTrainPipeline, first_order_gradient
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, default_sharders
from dnis_torchrec.selection.shards import holders_of_tables, table_configs
from dnis_torchrec.selection.swap import fold_
from dnis_torchrec.selection.torchrec_inputs import remap
from dnis_torchrec.selection.wrapper import SoftSelectionModule, soft_selection_modules
from tests import models
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import (
    CPU,
    KINDS,
    LEARNING_RATE,
    Net,
    Stream,
    alpha_of,
    constraints_of,
    dense_of,
    outcome_of,
    plan_as,
    shard_as,
    shards_of,
    spread,
    tables_of,
    task,
)
from tests.models import caches_of, counting_locks

STEPS = 12
ALPHA_LEARNING_RATE = 0.05


def few_rows_table() -> EmbeddingBagConfig:
    """Of fewer rows than two ranks."""
    return EmbeddingBagConfig(name="tag", num_embeddings=1, embedding_dim=8, feature_names=["tag_id"])


def make_stream(parts: tuple[int, ...], kind: str = "") -> BilevelStream[Batch]:
    """Batches of both levels; beside frozen tables the validation batches list their keys in another order."""
    train, validation = Stream("train", 7, parts), Stream("validation", 3, parts)
    if kind.startswith("frozen"):
        for batch in validation.batches:
            batch.sparse_features = batch.sparse_features.permute([2, 0, 3, 1])
    return BilevelStream(train, validation, LevelSchedule(warm_up_steps=2))


def search_unsharded(parts: tuple[int, ...], kind: str = "") -> Results:
    """The same steps without TorchRec's distributed part: no pipeline, no process group, no sharded module."""
    return steps_unsharded(task(frozen=kind.startswith("frozen")).train(), make_stream(parts, kind))


def steps_unsharded(
    model: TrainTask, stream: BilevelStream[Batch], steps: int = STEPS, rate: float = LEARNING_RATE
) -> Results:
    """Steps of both levels, in SGD, of a prepared model on one process, on the samples of all ranks."""
    first = next(iter(soft_selection_modules(model).values()))
    alpha = first.alpha
    weights = torch.optim.SGD(model.parameters(), lr=rate)
    upper = AlphaOptimizer(alpha, first.blocks)
    upper.learning_rate = ALPHA_LEARNING_RATE
    losses = []
    for _ in range(steps):
        batch = next(stream)
        if stream.last_level is Level.LOWER:
            weights.zero_grad()
            loss, (of_data, *_) = model(batch)
            loss.backward()
            weights.step()
        else:
            with alpha.upper_level() as hits, data_terms_only(model.modules()):
                loss, (of_data, *_) = model(batch)
                upper.step(dict(zip(alpha.dims, first_order_gradient(loss, alpha), strict=True)), hits)
        losses.append(of_data)
    values = {str(dim): alpha.of(dim).detach().clone() for dim in alpha.dims}
    return {"losses": torch.stack(losses), "alpha": values, "tables": tables_of(model), "dense": dense_of(model)}


def run_steps(pipeline: BilevelTrainPipeline, stream: BilevelStream, steps: int) -> Results:
    """Steps, noting the loss of each, and what every upper step was told of hits."""
    losses, hits = [], []
    original = pipeline.alpha_optimizer.step

    def step(gradients: dict[int, torch.Tensor], hit: dict[int, torch.Tensor]) -> None:
        hits.append({str(dim): rows.cpu().clone() for dim, rows in hit.items()})
        original(gradients, hit)

    pipeline.alpha_optimizer.step = step
    losses = [pipeline.progress(stream)[0].cpu().clone() for _ in range(steps)]
    return {"losses": torch.stack(losses), "hits": hits}


def search_sharded(kind: str, at: Rank, sharder: CpuEmbeddingBagCollectionSharder | None = None) -> Results:
    """Some steps on this rank's part of every batch; then alpha is folded, and merged."""
    is_cached_here = kind == "cached" and at.device.type == "cpu"
    with counting_locks() if is_cached_here else nullcontext():
        model, optimizer = shard_as(task(frozen=kind.startswith("frozen")), kind, at.process_group, at.device, sharder)
        if is_cached_here:
            caches_of(model)
        return steps_and_merge(model.train(), optimizer, kind, at, is_exact=sharder is None)


def steps_and_merge(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, at: Rank, *, is_exact: bool
) -> Results:
    """The steps of `search_sharded`, and what follows them."""
    pipeline = BilevelTrainPipeline(model, optimizer, at.device)
    pipeline.alpha_optimizer.learning_rate = ALPHA_LEARNING_RATE
    results = run_steps(pipeline, make_stream((at.rank,), kind), STEPS)
    pipeline.detach()
    results |= {"alpha": alpha_of(pipeline), "tables": tables_of(model), "dense": dense_of(model)}
    if kind not in KINDS or not is_exact:
        return results
    probe = Stream("probe", 1, (at.rank,)).batches[0].to(at.device)
    model.eval()
    with torch.no_grad():
        results["before"] = model(probe)[1][1]
        fold_(model)
        results |= {"folded": tables_of(model), "folded alpha": alpha_of(pipeline), "after": model(probe)[1][1]}
        for dim in pipeline.alpha.dims:
            pipeline.alpha.of(dim).fill_(0.5)
        results |= {"halved": model(probe)[1][1], "merged": merge_(model)(probe)[1][1]}
    return results


def search_with_quantised_communication(at: Rank) -> Results:
    """The same with pooled embeddings and their gradients in half precision on the wire."""
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    codecs = get_qcomm_codecs_registry(config, device=at.device)
    return search_sharded("mixed", at, CpuEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs))


def weights_after_sharding(at: Rank) -> Results:
    """Every rank comes with weights of its own: what it came with, and what it holds then."""
    results: dict[str, Results] = {}
    for kind in ("row_wise", "data_parallel"):
        torch.manual_seed(at.rank)
        net, sharders = Net(), [CpuEmbeddingBagCollectionSharder()]
        before = tables_of(net)
        plan = plan_as(net, kind, at.process_group, at.device, sharders)
        sharded = shard_model(net, at.device, plan, sharders, process_group=at.process_group)
        results[kind] = {"before": before, "after": tables_of(sharded)}
    on_meta = EmbeddingBagCollection(tables=[few_rows_table()], device=torch.device("meta"))
    sharded = shard_model(on_meta, at.device, process_group=at.process_group)
    results["meta"] = {"is_real": all(bool(part.weight.isfinite().all()) for part in shards_of(sharded))}
    return results


def bad_plans(at: Rank) -> Results:
    """How ranks answer plans that cannot be; nobody hangs."""
    group, sharders = at.process_group, [CpuEmbeddingBagCollectionSharder()]
    plan = partial(make_sharding_plan, Net(), at.device, sharders, process_group=group)
    shard = partial(shard_model, device=at.device, sharders=sharders, process_group=group)
    of_kind = {kind: plan_as(Net(), kind, group, at.device, sharders) for kind in ("row_wise", "column_wise")}
    more, less, short, hosts = (
        plan_as(Net(), kind, group, at.device, sharders)
        for kind in ("table_wise", "row_wise", "row_wise", "table_row_wise")
    )
    more.plan["first"]["user"].ranks = [at.world_size]
    del less.plan["second"]["genre"]
    short.plan["first"]["tag"].ranks = [0]
    hosts.plan["first"]["tag"].ranks = [at.world_size - 1]

    def of_meta(table: EmbeddingBagConfig, **settings: Any) -> ShardingPlan:
        model = nn.ModuleDict({"model": EmbeddingBagCollection(tables=[table], device=torch.device("meta"))})
        return make_sharding_plan(model, at.device, sharders, process_group=group, **settings)

    row_by_row = ParameterConstraints(sharding_types=["row_wise"])
    misspelt = ParameterConstraints(sharding_types=["rowwise"])
    tries = {
        "type": lambda: plan(constraints={"user": misspelt}),
        "kernel": lambda: plan(constraints={"user": ParameterConstraints(compute_kernels=["quant"])}),
        "table": lambda: plan(constraints={"users": row_by_row}),
        "few rows": lambda: of_meta(few_rows_table(), constraints={"tag": row_by_row}),
        "too large": lambda: of_meta(replace(few_rows_table(), num_embeddings=10**12)),
        "type on rank 0": lambda: plan(constraints={"user": row_by_row if at.rank else misspelt}),
        "more ranks": lambda: shard(Net(), plan=more),
        "fewer ranks": lambda: shard(Net(), plan=short),
        "no host": lambda: shard(Net(), plan=hosts),
        "left out": lambda: shard(Net(), plan=less),
        "other model": lambda: shard(nn.ModuleDict({"model": Net()}), plan=of_kind["row_wise"]),
        "another on rank 1": lambda: shard(Net(), plan=of_kind["row_wise" if at.rank else "column_wise"]),
        "left out on rank 1": lambda: shard(Net(), plan=less if at.rank else of_kind["row_wise"]),
    }
    outcomes = {name: outcome_of(attempt) for name, attempt in tries.items()}
    dist.barrier(group)  # all are still there
    return outcomes


def scenarios(kinds: Iterable[str]) -> dict[str, Scenario]:
    """Searches by name, in the order in which every rank runs them."""
    return {kind: partial(search_sharded, kind) for kind in kinds}


OF_ONE_HOST: dict[str, Scenario] = {"fp16": search_with_quantised_communication, "weights": weights_after_sharding}
OF_ONE_HOST["plans"] = bad_plans


SEQUENCE_RATE = 0.1
MIXED = "column_wise and row_wise"
SHARDED_AS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def loss_of(values: Tensor) -> Tensor:
    """Of a rank's samples, so that the mean over ranks is that of all; every column counts differently."""
    return (values * torch.linspace(-1, 1, models.DIM)).sin().sum() / models.SEQUENCE_BATCH_SIZE


def sharded_sequences(kind: str, at: Rank) -> SoftSelectionModule:
    """The wrapper of a model over the ranks, plain SGD fused into its tables where they are not replicated."""
    model, kinds = models.sequences(), dict(zip(models.SEQUENCE_ROWS, kind.split(" and ") * 2, strict=False))
    for name, holder in holders_of_tables(models.wrapper_of(model).lookup).items():
        if kinds[name] != "data_parallel":
            apply_optimizer_in_backward(torch.optim.SGD, holder.parameters(), {"lr": SEQUENCE_RATE})
    return models.wrapper_of(spread(model, kinds, at, default_sharders()))


def without_ids() -> KeyedJaggedTensor:
    """Bags that are all empty."""
    nothing, lengths = (
        torch.empty(0, dtype=torch.int64),
        torch.zeros(len(models.LONGEST) * models.SEQUENCE_BATCH_SIZE, dtype=torch.int64),
    )
    return KeyedJaggedTensor(keys=list(models.LONGEST), values=nothing, lengths=lengths)


def sequences_learn(kind: str, empty_rank: int | None, at: Rank) -> Results:
    """How far both levels are from those of the collection that is not sharded and sees the samples of all ranks.

    A rank may have no ids at all.
    """
    alone = models.wrapper_of(models.sequences())
    kjts = [
        without_ids() if rank == empty_rank else models.sequence_features(20 + rank) for rank in range(at.world_size)
    ]
    with alone.alpha.upper_level() as hits:
        losses = [loss_of(models.values_of(alone(kjt))) for kjt in kjts]
        alpha = torch.autograd.grad(sum(losses) / at.world_size, alone.alpha.of(models.DIM))[0]
    values, kjt = models.values_of(alone(kjts[at.rank])).detach(), kjts[at.rank]
    (sum(loss_of(models.values_of(alone(kjt))) for kjt in kjts) / at.world_size).backward()
    sharded = sharded_sequences(kind, at)
    with sharded.alpha.upper_level() as own_hits:
        gradient = torch.autograd.grad(loss_of(models.values_of(sharded(kjt))), sharded.alpha.of(models.DIM))[0].clone()
    hit = own_hits[models.DIM].int()
    dist.all_reduce(gradient, group=at.process_group)
    dist.all_reduce(hit, group=at.process_group)
    looked_up = models.values_of(sharded(kjt))
    loss_of(looked_up).backward()
    rest = [weight for _, weight in in_backward_optimizer_filter(sharded.named_parameters())]
    if rest:
        torch.optim.SGD(rest, lr=SEQUENCE_RATE).step()
    error = max(
        float((looked_up - values).abs().sum()),
        float((gradient / at.world_size - alpha).abs().max()),
        float(((hit > 0) != hits[models.DIM]).sum()),
    )
    tables = {
        name: holder.weight.detach() - SEQUENCE_RATE * holder.weight.grad
        for name, holder in holders_of_tables(alone.lookup).items()
    }
    for own in shards_of(sharded):
        rows = slice(own.first_row, own.first_row + own.weight.shape[0])
        columns = slice(own.first_column, own.first_column + own.weight.shape[1])
        error = max(error, float((own.weight - tables[own.table][rows, columns]).abs().max()))
    before = models.values_of(sharded(kjt)).detach()
    fold_(sharded)
    return {"error": error, "folded": float((models.values_of(sharded(kjt)) - before).abs().sum())}


MANAGED_STEPS, MANAGED_RATE = 10, 0.01
MANAGED = {"bags": models.Model, "sequences": models.SequenceModel}
MANAGED_AS = [*(("bags", kind) for kind in SHARDED_AS), ("sequences", "row_wise")]


def managed_task(model_of: str) -> TrainTask:
    """A prepared model whose remapping has learnt ids before."""
    model, tables = models.trained(models.zch, MANAGED[model_of]), [models.USERS, models.ITEMS]
    counts = count_frequencies([remap(model, own.sparse_features) for own in models.BATCHES], tables)
    prepare_(model, blocks_from_counts(counts, tables, num_blocks=4, least_rows=1))
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


PLACES_AS = ("row_wise", "column_wise")


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
    model = prepare_(model, blocks_from_counts(counts, table_configs(model), num_blocks=2, least_rows=1))
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


SEQUENCES: dict[str, Scenario] = {
    f"learn {kind}": partial(sequences_learn, kind, None) for kind in (*models.KINDS, MIXED)
} | {f"learn {kind}, no ids on rank 1": partial(sequences_learn, kind, 1) for kind in ("table_wise", MIXED)}
INPUTS: dict[str, dict[str, Scenario]] = {
    "sequences": SEQUENCES,
    "managed": {f"{model_of} {kind}": partial(managed_search, model_of, kind) for model_of, kind in MANAGED_AS},
    "places": {kind: partial(position_weights, kind) for kind in PLACES_AS},
    "narrow": {kind: partial(narrow_steps, kind) for kind in NARROW_AS},
}
"""Thing -> its scenarios."""
