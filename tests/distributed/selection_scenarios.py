"""What ranks do, and report, about searches under every sharding type; judged in test_selection_ranks.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.data.task import TrainTask, data_terms_only
from dnis_torchrec.search.pipeline import AlphaOptimizer, BilevelTrainPipeline, first_order_gradient
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.swap import fold_, merge_
from dnis_torchrec.selection.wrapper import soft_selection_modules
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import (
    KINDS,
    LEARNING_RATE,
    Net,
    Stream,
    alpha_of,
    dense_of,
    outcome_of,
    plan_as,
    shard_as,
    shards_of,
    tables_of,
    task,
)
from tests.models import caches_of, counting_locks

STEPS = 12
ALPHA_LEARNING_RATE = 0.05
COMMUNICATION = {"fp16": CommType.FP16, "bf16": CommType.BF16}


def few_rows_table() -> EmbeddingBagConfig:
    """Of fewer rows than four ranks."""
    return EmbeddingBagConfig(name="tag", num_embeddings=3, embedding_dim=8, feature_names=["tag_id"])


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


def search_with_quantised_communication(communication: str, at: Rank) -> Results:
    """The same with pooled embeddings and their gradients in half precision on the wire."""
    precision = COMMUNICATION[communication]
    config = QCommsConfig(forward_precision=precision, backward_precision=precision)
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
    """All of them by name, in the order in which every rank runs them."""
    results: dict[str, Scenario] = {kind: partial(search_sharded, kind) for kind in kinds}
    results |= {name: partial(search_with_quantised_communication, name) for name in COMMUNICATION}
    return results | {"weights": weights_after_sharding, "plans": bad_plans}
