"""TrainingState: everything that a run is made of, and where each part of it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.ranks import rank_of
from dnis_torchrec.selection.shards import collections, lookup_of, table_weight_names, tables_under
from dnis_torchrec.selection.torchrec import (
    ShardedTensor,
    forget_cached_rows,
    lookups,
    writing_to_tables,
)
from dnis_torchrec.selection.wrapper import SoftSelectionModule

ITERATIONS = "fused/iterations"
"""Key of the number of steps that fused kernels have counted."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A local part of a tensor."""

    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class PlacedTensor:
    """A tensor of which this rank holds some chunks, or none."""

    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(value: Tensor | ShardedTensor) -> PlacedTensor:
        """A tensor that every rank holds whole, or the local shards of a sharded one."""
        if isinstance(value, ShardedTensor):
            chunks = (
                Chunk(tuple(shard.metadata.shard_offsets), shard.tensor.detach())
                for shard in value.local_shards()
            )
            return PlacedTensor(tuple(value.metadata().size), tuple(chunks))
        whole = value.detach().view(1) if value.dim() == 0 else value.detach()
        return PlacedTensor(tuple(whole.shape), (Chunk((0,) * whole.dim(), whole),))

    def copy(self) -> PlacedTensor:
        """The same chunks in memory of their own, on the CPU."""
        chunks = (Chunk(part.offset, part.tensor.to("cpu", copy=True)) for part in self.chunks)
        return PlacedTensor(self.size, tuple(chunks))


@dataclass(frozen=True, kw_only=True)
class TableDescription:
    """Description of a table, equal in a checkpoint and in a model that it fits."""

    rows: int
    embedding_dim: int
    column_cuts: tuple[int, ...]
    blocks: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """A whole run at one moment."""

    tensors: Mapping[str, PlacedTensor]
    tables: Mapping[str, TableDescription]
    values: Mapping[str, Any] = field(default_factory=dict)

    def copy(self) -> TrainingState:
        """A snapshot on the CPU that further steps do not change."""
        return replace(self, tensors={key: value.copy() for key, value in self.tensors.items()})


def model_tensors(model: nn.Module) -> dict[str, PlacedTensor]:
    """Tables, dense weights, alpha and buffers of a model, sharded or not."""
    tensors = {f"table/{name}": PlacedTensor.of(value) for name, value in _tables(model)}
    addresses: set[int] = set()  # wrappers share one alpha: it is saved once
    of_tables = table_weight_names(model)
    for name, value in model.state_dict().items():
        is_plain = type(value) in (Tensor, nn.Parameter) and name not in of_tables
        if is_plain and value.data_ptr() not in addresses:
            addresses.add(value.data_ptr())
            tensors[f"model/{name}"] = PlacedTensor.of(value)
    return tensors


def snapshot(model: nn.Module, more: Mapping[str, PlacedTensor] | None = None) -> TrainingState:
    """A copy on the CPU of what a model has learnt, to go back to within a run."""
    return TrainingState(tensors=model_tensors(model) | dict(more or {}), tables={}).copy()


@torch.no_grad()
def take_(
    model: nn.Module, state: TrainingState, more: Mapping[str, PlacedTensor] | None = None
) -> None:
    """Goes back to a snapshot of the same model."""
    with writing_to_tables(model):
        for key, value in (model_tensors(model) | dict(more or {})).items():
            for chunk, source in zip(value.chunks, state.tensors[key].chunks, strict=True):
                chunk.tensor.copy_(source.tensor)


def optimizer_tensors(model: nn.Module, optimizer: Any) -> dict[str, PlacedTensor]:
    """State of the optimizers, both those fused into the tables' backward and the others."""
    tensors = {}
    if isinstance(model, DistributedModelParallel):
        for fqn, states in model.fused_optimizer.state_dict()["state"].items():
            for name, value in states.items():
                table, _, state = name.rpartition(".")
                tensors[f"fused/{table or fqn}/{state}"] = PlacedTensor.of(value)
        counters = _iteration_counters(model)
        if counters:
            steps = torch.stack([part.cpu().max() for part in counters]).max()
            tensors[ITERATIONS] = PlacedTensor.of(steps)
    tables = [PlacedTensor.of(v) for _, v in _tables(model) if isinstance(v, ShardedTensor)]
    shards = {chunk.tensor.data_ptr(): (t.size, chunk) for t in tables for chunk in t.chunks}
    for name, parameter in _parameters(model, optimizer).items():
        size, shard = shards.get(parameter.data_ptr(), ((), None))
        for state, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            part = PlacedTensor.of(value)
            if shard is not None and value.numel() != 1:
                if not value.shape == parameter.shape == shard.tensor.shape:
                    place = f"optimizer state {state!r} of {name!r}"
                    limit = "a state of the shard's shape, in a sharded dense compute kernel"
                    raise NotImplementedError(describe(place, limit, tuple(value.shape)))
                part = PlacedTensor(size, (Chunk(shard.offset, value.detach()),))
            tensors[f"optimizer/{name}/{state}"] = part
    return tensors


def finish_load_(model: nn.Module, tensors: Mapping[str, PlacedTensor]) -> None:
    """Tells kernels that weights were written: caches forget, step counters are set."""
    forget_cached_rows(model)
    if ITERATIONS in tensors:
        for counter in _iteration_counters(model):
            counter.fill_(int(tensors[ITERATIONS].chunks[0].tensor))


def describe_tables(model: nn.Module) -> dict[str, TableDescription]:
    """Describes every table of a model, for comparison with a checkpoint."""
    blocks = {
        table: _fingerprint(module.blocks, table)
        for module in collections(model).values()
        if isinstance(module, SoftSelectionModule)
        for table in module.blocks.routings
    }
    tables = {}
    for name, value in _tables(model):
        cuts = {0}
        if isinstance(value, ShardedTensor):
            cuts = {part.shard_offsets[1] for part in value.metadata().shards_metadata}
        rows, dim = PlacedTensor.of(value).size
        of_blocks, column_cuts = blocks.get(name, ""), tuple(sorted(cuts))
        tables[name] = TableDescription(
            rows=rows, embedding_dim=dim, column_cuts=column_cuts, blocks=of_blocks
        )
    return tables


def rng_tensors(device: torch.device) -> dict[str, PlacedTensor]:
    """State of this rank's random number generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rank{rank_of()}/rng/{kind}": PlacedTensor.of(states[kind]) for kind in states}


def set_rng_(tensors: Mapping[str, PlacedTensor], device: torch.device) -> None:
    """Gives this rank's random number generators the states that `rng_tensors` named."""
    prefix = f"rank{rank_of()}/rng"
    torch.set_rng_state(tensors[f"{prefix}/cpu"].chunks[0].tensor)
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{prefix}/cuda"].chunks[0].tensor, device)


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor | ShardedTensor]]:
    for module in collections(model).values():
        for key, value in lookup_of(module).state_dict().items():
            parts = key.split(".")
            if parts[0] == tables_under(module) and parts[-1] == "weight":
                yield ".".join(parts[1:-1]), value


def _parameters(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """FQN -> parameter of an optimizer."""
    if isinstance(optimizer, KeyedOptimizer):
        return dict(optimizer.params)
    steps = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {name: weight for name, weight in model.named_parameters() if weight in steps}


def _iteration_counters(model: nn.Module) -> list[Tensor]:
    """Counters of fused kernels, by which Adam corrects its bias; all count the same steps."""
    modules = (module for lookup in lookups(model) for module in lookup.modules())
    kernels = (k for k in modules if isinstance(k, SplitTableBatchedEmbeddingBagsCodegen))
    return [counter for kernel in kernels for counter in (kernel.iter, kernel.iter_cpu)]


def _fingerprint(blocks: RowBlocks, table: str) -> str:
    routing = blocks.routings[table]
    head = [blocks.first_alpha_row(table), routing.num_embeddings, routing.num_blocks]
    digest = sha256(repr(head).encode())
    for name, tensor in sorted(routing.to_tensors().items()):
        values = tensor.detach().cpu().contiguous().view(torch.uint8)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()[:16]
