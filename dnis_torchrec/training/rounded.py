"""Tables that obey a rule while they learn: values stay zero, or what they will be served as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from dnis_torchrec.allocation.energies import whole_rows
from dnis_torchrec.blocks.codes import ColumnCodes
from dnis_torchrec.checks import describe
from dnis_torchrec.ops.select import RowRounding
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import (
    TableShard,
    collections,
    frozen_tables_of,
    local_shards,
    ranks_of,
)
from dnis_torchrec.selection.torchrec import lookups, writing_to_tables
from dnis_torchrec.training.checkpoint import Chunk, PlacedTensor

_PARTS = ("bits", "scale", "shift")
"""Parts of codes, by which values are decoded."""


class HeldTables:
    """A rule for the values of tables around every step of the optimizer; this one has none."""

    def before_step_(self) -> None:
        """Prepares gradients; to be called between backward and the optimizer's step."""

    def after_step_(self) -> None:
        """Lets the tables obey again, after the optimizer's step and before the next lookup."""

    def tensors(self) -> Mapping[str, PlacedTensor]:
        """State beside the model's, live, as `TrainingState` and `snapshot` take it. Local."""
        return {}

    def finish_load_(self) -> None:
        """Goes on from `tensors` that were written from outside, as by a checkpoint. Local."""


class HoldingOptimizer(OptimizerWrapper):
    """An optimizer after whose steps tables obey their rule."""

    def __init__(self, optimizer: KeyedOptimizer, rule: HeldTables) -> None:
        super().__init__(optimizer)
        self._rule = rule

    def step(self, closure: Any = None) -> None:
        """Steps, and lets the tables obey, those too that backward has stepped."""
        self._rule.before_step_()
        super().step(closure)
        self._rule.after_step_()


class RoundedTables(HeldTables):
    """Tables of a model that hold what they will be served as, and train on."""

    def __init__(self, model: nn.Module, scheme: MixedDimensionScheme) -> None:
        modules = collections(model).values()
        self._model, self._ranks = model, ranks_of(*modules)
        shards = [shard for module in modules for shard in local_shards(module)]
        self._shards = [_RoundedShard(shard) for shard in shards if shard.table in scheme.tables]
        self._settle_(scheme)
        # A copy, for checkpoints write to it; without feedback and gain, for weights that train on
        # have their nearest codes.
        self._tables = {}
        for name, table in scheme.tables.items():
            parts = (getattr(table.codes, part).clone() for part in _PARTS)
            self._tables[name] = table.with_codes(ColumnCodes(*parts))
        self._take_codes_()
        with writing_to_tables(model), torch.no_grad():
            for latent in self._shards:
                latent.round_()
        self._fused = _fused_lookups(model, self._shards)
        in_kernels = {shard for lookup in self._fused for shard in lookup.shards}
        frozen = {table for module in modules for table in frozen_tables_of(module)}
        rest = [shard for shard in self._shards if shard not in in_kernels]
        self._dense = [latent for latent in rest if latent.shard.table not in frozen]

    @property
    def scheme(self) -> MixedDimensionScheme:
        """What the tables are rounded to now, bit for bit."""
        tables = {name: replace(table, largest_value=None) for name, table in self._tables.items()}
        return MixedDimensionScheme(tables)

    @torch.no_grad()
    def after_step_(self) -> None:
        """Rounds what a step has moved."""
        with writing_to_tables(self._model):
            for lookup in self._fused:
                lookup.round_()
            for shard in self._dense:
                shard.round_()

    def stop_(self) -> None:
        """Leaves the tables as they are: nothing is rounded any more."""
        for lookup in self._fused:
            lookup.hook.remove()
        self._shards, self._fused, self._dense = [], [], []

    def tensors(self) -> Mapping[str, PlacedTensor]:
        """Residuals, which checkpoints may take apart as they do the tables, and codes. Local."""
        tensors = {}
        for name, table in self._tables.items():
            for part in _PARTS:
                tensors[f"codes/{name}/{part}"] = PlacedTensor.of(getattr(table.codes, part))
            residuals = [latent.residual for latent in self._shards if latent.shard.table == name]
            chunks = [Chunk((part.first_row, part.first_column), part.weight) for part in residuals]
            size = table.num_embeddings, table.embedding_dim
            tensors[f"residual/{name}"] = PlacedTensor(size, tuple(chunks))
        return tensors

    def finish_load_(self) -> None:
        """Goes on with `tensors` and tables that a checkpoint was read into. Local."""
        self._tables = {name: table.with_codes(table.codes) for name, table in self._tables.items()}
        self._take_codes_()

    @torch.no_grad()
    def _settle_(self, scheme: MixedDimensionScheme) -> None:
        movers = {name: table for name, table in scheme.tables.items() if table.codes.moves}
        if not movers:
            return
        shapes = {name: (t.num_embeddings, t.embedding_dim) for name, t in movers.items()}
        rows = whole_rows([shard.shard for shard in self._shards], shapes, self._ranks)
        with writing_to_tables(self._model):
            for name, table in movers.items():
                for chunk in rows[name].chunks():
                    blocks = table.routing.block_of(torch.arange(chunk.rows.start, chunk.rows.stop))
                    chunk.write_(table.codes.settle(chunk.values.float().cpu(), blocks))

    def _take_codes_(self) -> None:
        for shard in self._shards:
            shard.take_(self._tables[shard.shard.table])


class _RoundedShard:
    """A shard whose values are rounded."""

    def __init__(self, shard: TableShard) -> None:
        self.shard, dtype = shard, shard.weight.dtype
        if dtype != torch.float32:
            raise TypeError(describe(f"table {shard.table!r}", "float32 weights", dtype))
        zeros = torch.zeros_like(shard.weight, memory_format=torch.contiguous_format)
        self.residual = TableShard(shard.table, zeros, shard.first_row, shard.first_column)

    def take_(self, table: TableScheme) -> None:
        """Takes other codes; values stay as they are."""
        shard = self.shard
        columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        device = shard.weight.device
        self._rounding = RowRounding(table.codes, table.routing, shard.first_row, columns, device)

    def round_(self, rows: Tensor | None = None) -> None:
        """Rounds some rows, counted from the shard's first, or all."""
        self._rounding.round_(self.shard.weight, self.residual.weight, rows)


class _FusedLookup:
    """The rows that a kernel of a fused optimizer has looked up since they were rounded."""

    def __init__(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, shards: list[_RoundedShard | None]
    ) -> None:
        self._tables, self.shards = kernel.feature_table_map, shards
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self.hook = kernel.register_forward_pre_hook(self._note, with_kwargs=True)

    def round_(self) -> None:
        """Rounds the rows that were looked up, each once."""
        rows: dict[int, list[Tensor]] = {}
        for indices, offsets in self._inputs:
            batch_size = (len(offsets) - 1) // len(self._tables)
            begins = offsets[batch_size * torch.arange(1, len(self._tables), device=offsets.device)]
            of_features = indices.tensor_split(begins.long().cpu())
            for table, ids in zip(self._tables, of_features, strict=True):
                rows.setdefault(table, []).append(ids)
        self._inputs.clear()
        for table, ids_of_table in rows.items():
            shard = self.shards[table]
            if shard is not None:
                shard.round_(torch.cat(ids_of_table).long().unique())

    def _note(self, kernel: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if torch.is_grad_enabled():  # else nothing is learnt
            inputs = dict(zip(("indices", "offsets"), args, strict=False)) | arguments
            if inputs.get("batch_size_per_feature_per_rank") is not None:
                limit, sizes = "supported are features of one batch size", "a batch size for each"
                raise NotImplementedError(describe("RoundedTables", limit, sizes))
            self._inputs.append((inputs["indices"], inputs["offsets"]))


def _fused_lookups(model: nn.Module, shards: Iterable[_RoundedShard]) -> list[_FusedLookup]:
    at = {shard.shard.weight.data_ptr(): shard for shard in shards if shard.shard.weight.numel()}
    kernels = []
    for kernel in (module for lookup in lookups(model) for module in lookup.modules()):
        if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
            of_kernel = [at.get(weight.data_ptr()) for weight in kernel.split_embedding_weights()]
            if any(of_kernel):
                kernels.append(_FusedLookup(kernel, of_kernel))
    return kernels
