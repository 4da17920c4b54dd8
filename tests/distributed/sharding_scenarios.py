"""What ranks do, and report, about sharding types, pipelining and plans; judged in test_sharding_ranks.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.task import TrainTask, data_terms_only
from dnis_torchrec.search.pipeline import AlphaOptimizer, BilevelTrainPipeline, first_order_gradient
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.torchrec import PrefetchedTables
from dnis_torchrec.selection.wrapper import soft_selection_modules
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import LEARNING_RATE, Net, Stream, plan_as, shard_as, task
from tests.distributed.scenarios import alpha_of, dense_of, recorded_logs, run_steps, tables_of
from tests.models import caches_of, counting_locks

STEPS = 12
ALPHA_LEARNING_RATE = 0.05
COMMUNICATION = {"fp16": CommType.FP16, "bf16": CommType.BF16}
FEW_ROWS, FEW_DIM = 3, 8
"""A model of one table, of fewer rows than four ranks."""


class FewRows(nn.Module):
    """One multi-hot table and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = EmbeddingBagCollection(tables=[few_rows_table()])
        self.over = nn.Linear(FEW_DIM, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit per sample."""
        return self.over(self.collection(sparse_features).values())


def few_rows_table() -> EmbeddingBagConfig:
    """Its config."""
    return EmbeddingBagConfig(name="tag", num_embeddings=FEW_ROWS, embedding_dim=FEW_DIM, feature_names=["tag_id"])


def few_rows_task() -> TrainTask:
    """The prepared model, with the same weights in every process."""
    torch.manual_seed(3)
    counts = FrequencyCounts({"tag": torch.tensor([9, 5, 2])}, {"tag_id": 4}, 16)
    prepared = prepare_(FewRows(), blocks_from_counts(counts, [few_rows_table()], num_blocks=2))
    return TrainTask(prepared, nn.BCEWithLogitsLoss())


class FewRowsStream(Stream):
    """A stream whose tags are one of few."""

    def __init__(self, name: str, num_batches: int, parts: tuple[int, ...]) -> None:
        super().__init__(name, num_batches, parts)
        for batch in self.batches:
            tags = batch.sparse_features["tag_id"]
            batch.sparse_features = KeyedJaggedTensor(
                keys=["tag_id"], values=tags.values() % FEW_ROWS, lengths=tags.lengths()
            )


def make_stream(parts: tuple[int, ...], kind: str = "") -> BilevelStream[Batch]:
    """Batches of both levels; beside frozen tables the validation batches list their keys in another order."""
    of = FewRowsStream if kind.startswith("few rows") else Stream
    if kind.startswith("frozen"):
        validation = Stream("validation", 3, parts)
        for batch in validation.batches:
            batch.sparse_features = batch.sparse_features.permute([2, 0, 3, 1])
        return BilevelStream(Stream("train", 7, parts), validation, LevelSchedule(warm_up_steps=2))
    return BilevelStream(of("train", 7, parts), of("validation", 3, parts), LevelSchedule(warm_up_steps=2))


def make_task(kind: str) -> TrainTask:
    """The model of a kind."""
    return few_rows_task() if kind.startswith("few rows") else task(frozen=kind.startswith("frozen"))


def search_unsharded(parts: tuple[int, ...], kind: str = "") -> Results:
    """The same steps without TorchRec's distributed part: no pipeline, no process group, no sharded module."""
    return steps_unsharded(make_task(kind).train(), make_stream(parts, kind))


def steps_unsharded(
    model: TrainTask, stream: BilevelStream[Batch], steps: int = STEPS, rate: float = LEARNING_RATE
) -> Results:
    """Steps of both levels, in SGD, of a prepared model on one process.

    Args:
        model: in training mode.
        stream: of the samples of all ranks.
        steps: of both levels.
        rate: of the weights.
    """
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


def search_sharded(kind: str, at: Rank, sharder: CpuEmbeddingBagCollectionSharder | None = None) -> Results:
    """Some steps on this rank's part of every batch."""
    is_cached = kind == "cached"
    with recorded_logs() as logs, counting_locks() if is_cached and at.device.type == "cpu" else nullcontext():
        model, optimizer = shard_as(make_task(kind), kind, at.process_group, at.device, sharder)
        if is_cached and at.device.type == "cpu":
            caches_of(model)
        model.train()
        pipeline = BilevelTrainPipeline(model, optimizer, at.device)
        pipeline.alpha_optimizer.learning_rate = ALPHA_LEARNING_RATE
        found = run_steps(pipeline, make_stream((at.rank,), kind), STEPS)
        if is_cached:
            pipeline.detach()
    found = {"losses": found["losses"].cpu(), "levels": found["levels"]}
    found |= {
        name: {key: value.cpu() for key, value in tensors.items()}
        for name, tensors in (("alpha", alpha_of(pipeline)), ("tables", tables_of(model)), ("dense", dense_of(model)))
    }
    not_pipelined = [message for message in logs if "NOT be pipelined" in message]
    pipelined = sorted(message.split("'")[1] for message in logs if "will be pipelined" in message)
    locked = [kernel.lxu_cache_locking_counter for kernel in PrefetchedTables(model).kernels]
    locks = {"num_caches": len(locked), "num_locked": sum(int(lines.abs().sum()) for lines in locked)}
    return found | {"not_pipelined": not_pipelined, "pipelined": pipelined} | locks


def search_with_quantised_communication(kind: str, communication: str, at: Rank) -> Results:
    """The same with pooled embeddings and their gradients in half precision on the wire."""
    precision = COMMUNICATION[communication]
    config = QCommsConfig(forward_precision=precision, backward_precision=precision)
    codecs = get_qcomm_codecs_registry(config, device=at.device)
    return search_sharded(kind, at, CpuEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs))


def trace(at: Rank) -> Results:
    """In which order input_dist of each batch starts and each backward runs, and the level of every batch.

    An event is ``(what, number of the batch)``; input_dist is noted for every collection, backward where the gradient
    reaches the loss, which is where it starts in both levels.
    """
    events: list[tuple[str, int]] = []
    calls: dict[int, int] = {}
    original = ShardedEmbeddingBagCollection.input_dist

    def input_dist(self: ShardedEmbeddingBagCollection, *args: object) -> object:
        calls[id(self)] = calls.get(id(self), -1) + 1
        events.append(("input_dist", calls[id(self)]))
        return original(self, *args)

    whole = task()
    whole.task.criterion.register_forward_hook(lambda *inputs: note_backward(inputs[-1]))
    num_backwards = 0

    def note_backward(loss: torch.Tensor) -> None:
        nonlocal num_backwards
        step, num_backwards = num_backwards, num_backwards + 1
        loss.register_hook(lambda gradient: events.append(("backward", step)))

    ShardedEmbeddingBagCollection.input_dist = input_dist
    try:
        model, optimizer = shard_as(whole, "mixed", at.process_group, at.device)
        model.train()
        found = run_steps(BilevelTrainPipeline(model, optimizer, at.device), make_stream((at.rank,)), 10)
    finally:
        ShardedEmbeddingBagCollection.input_dist = original
    return {"events": [list(event) for event in events], "levels": found["levels"], "num_collections": len(calls)}


def weights_after_sharding(at: Rank) -> Results:
    """Every rank comes with weights of its own: what it came with, and what it holds then."""
    found: dict[str, Results] = {}
    for kind in ("row_wise", "data_parallel"):
        torch.manual_seed(at.rank)
        whole, sharders = Net(), [CpuEmbeddingBagCollectionSharder()]
        before = tables_of(whole)
        plan = plan_as(whole, kind, at.process_group, at.device, sharders)
        sharded = shard_model(whole, at.device, plan, sharders, process_group=at.process_group)
        after = {key: value.cpu() for key, value in tables_of(sharded).items()}
        found[kind] = {"before": before, "after": after}
    on_meta = EmbeddingBagCollection(tables=[few_rows_table()], device=torch.device("meta"))
    sharded = shard_model(on_meta, at.device, process_group=at.process_group)
    parts = [part.weight for module in collections(sharded).values() for part in local_shards(module)]
    found["meta"] = {"is_real": all(bool(part.isfinite().all()) for part in parts)}
    return found


def refusals(at: Rank) -> Results:
    """How ranks answer plans that cannot be: the message, or "none"; nobody hangs."""
    group, sharders = at.process_group, [CpuEmbeddingBagCollectionSharder()]
    few_rows = partial(make_sharding_plan, few_rows_task(), at.device, sharders, process_group=group)
    plan = partial(make_sharding_plan, Net(), at.device, sharders, process_group=group)
    row_wise = plan_as(Net(), "row_wise", group, at.device, sharders)
    column_wise = plan_as(Net(), "column_wise", group, at.device, sharders)
    table_wise = plan_as(Net(), "table_wise", group, at.device, sharders)
    table_wise.plan["first"]["user"].ranks = [at.world_size]
    without = plan_as(Net(), "row_wise", group, at.device, sharders)
    del without.plan["second"]["genre"]
    short = plan_as(Net(), "row_wise", group, at.device, sharders)
    short.plan["first"]["tag"].ranks = [0]
    hosts = plan_as(Net(), "table_row_wise", group, at.device, sharders)
    hosts.plan["first"]["tag"].ranks = [at.world_size - 1]
    other_shape = few_rows_task()
    shard = partial(shard_model, device=at.device, sharders=sharders, process_group=group)
    row_by_row = {"tag": ParameterConstraints(sharding_types=["row_wise"])}
    on_rank_zero = {"user": ParameterConstraints(sharding_types=["row_wise" if at.rank else "rowwise"])}
    tries = {
        "type": lambda: plan(constraints={"user": ParameterConstraints(sharding_types=["rowwise"])}),
        "kernel": lambda: plan(constraints={"user": ParameterConstraints(compute_kernels=["quant"])}),
        "table": lambda: plan(constraints={"users": ParameterConstraints(sharding_types=["row_wise"])}),
        "few rows": lambda: few_rows(constraints=row_by_row),
        "too large": lambda: make_sharding_plan(too_large(), at.device, sharders, process_group=group),
        "rank zero": lambda: plan(constraints=on_rank_zero),
        "more ranks": lambda: shard(Net(), plan=table_wise),
        "fewer ranks": lambda: shard(Net(), plan=short),
        "no host": lambda: shard(Net(), plan=hosts),
        "left out": lambda: shard(Net(), plan=without),
        "other model": lambda: shard(other_shape, plan=row_wise),
        "differing": lambda: shard(Net(), plan=row_wise if at.rank else column_wise),
        "one rank": lambda: shard(Net(), plan=without if at.rank else row_wise),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "none"
        except ValueError as error:
            found[name] = str(error)
    dist.barrier(group)  # all are still there
    return found


def too_large() -> nn.Module:
    """A table that no machine holds, without memory."""
    table = replace(few_rows_table(), num_embeddings=10**12)
    return nn.ModuleDict({"huge": EmbeddingBagCollection(tables=[table], device=torch.device("meta"))})


def scenarios(kinds: Iterable[str]) -> dict[str, Scenario]:
    """All of them by name, in the order in which every rank runs them."""
    found: dict[str, Scenario] = {f"search {kind}": partial(search_sharded, kind) for kind in kinds}
    for communication in COMMUNICATION:
        found[communication] = partial(search_with_quantised_communication, "mixed", communication)
    return found | {"trace": trace, "weights": weights_after_sharding, "refusals": refusals}
