"""Tables that obey a rule while they learn: values stay zero, or what they will be served as."""

from collections.abc import Iterable
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
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import (
    TableShard,
    collections,
    frozen_tables_of,
    local_shards,
    ranks_of,
)
from dnis_torchrec.selection.torchrec import lookups, writing_to_tables


class HeldTables:
    """A rule for the values of tables around every step of the optimizer; this one has none."""

    def before_step_(self) -> None:
        """Prepares gradients; to be called between backward and the optimizer's step."""

    def after_step_(self) -> None:
        """Lets the tables obey again, after the optimizer's step and before the next lookup."""


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
        tables = {}
        for name, table in scheme.tables.items():
            # Without feedback and gain, for weights that train on have their nearest codes.
            codes = ColumnCodes(table.codes.bits, table.codes.scale, table.codes.shift)
            tables[name] = replace(table.with_codes(codes), largest_value=None)
        # What the tables are rounded to, bit for bit.
        self.scheme = MixedDimensionScheme(tables)
        modules, self._model = collections(model).values(), model
        shards = [shard for module in modules for shard in local_shards(module)]
        shards = [shard for shard in shards if shard.table in tables]
        self._shards = [_RoundedShard(shard, tables[shard.table]) for shard in shards]
        with writing_to_tables(model), torch.no_grad():
            _settle_(shards, scheme, ranks_of(*modules))
            for latent in self._shards:
                latent.round_()
        self._fused = _fused_lookups(model, self._shards)
        in_kernels = {shard for lookup in self._fused for shard in lookup.shards}
        frozen = {table for module in modules for table in frozen_tables_of(module)}
        rest = [shard for shard in self._shards if shard not in in_kernels]
        self._dense = [latent for latent in rest if latent.shard.table not in frozen]

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


def _settle_(shards: list[TableShard], scheme: MixedDimensionScheme, ranks: Ranks) -> None:
    """Gives whole rows the values of their codes by error feedback."""
    movers = {name: table for name, table in scheme.tables.items() if table.codes.moves}
    shapes = {name: (table.num_embeddings, table.embedding_dim) for name, table in movers.items()}
    for name, rows in whole_rows(shards, shapes, ranks).items():
        table = movers[name]
        for chunk in rows.chunks():
            blocks = table.routing.block_of(torch.arange(chunk.rows.start, chunk.rows.stop))
            chunk.write_(table.codes.settle(chunk.values.float().cpu(), blocks))


class _RoundedShard:
    """A shard whose values are rounded."""

    def __init__(self, shard: TableShard, table: TableScheme) -> None:
        self.shard, weight = shard, shard.weight
        if weight.dtype != torch.float32:
            raise TypeError(describe(f"table {shard.table!r}", "float32 weights", weight.dtype))
        zeros = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        self.residual = TableShard(shard.table, zeros, shard.first_row, shard.first_column)
        rows, (_, columns) = shard.first_row, shard.window
        self._rounding = RowRounding(table.codes, table.routing, rows, columns, weight.device)

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
