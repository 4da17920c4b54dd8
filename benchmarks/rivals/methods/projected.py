"""Mixed dimensions with learned projections: blocks of d_s columns, each multiplied up to the base
dimension D."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.checks import check_known
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import check_pooled, collections, table_configs_of
from dnis_torchrec.selection.wrapper import PooledFeature, SoftSelectionEmbeddingBagCollection
from examples.paper.blocks import GlobalBlocks


@dataclass(frozen=True, kw_only=True)
class ProjectedDims:
    """Numbers of columns that blocks keep, and the projections that they need."""

    blocks: RowBlocks
    dims: Mapping[str, Tensor]

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Projection -> ``(d_s, D)``. Tables of equal D share those of a block; unseen blocks need
        none."""
        return {
            name: (int(self.dims[table][s]), self.blocks.embedding_dims[table])
            for table in self.dims
            for s, name in enumerate(self.projection_names(table))
            if name is not None
        }

    def projection_names(self, table: str) -> list[str | None]:
        """The projection of each block of a table; None where the block is as wide as the base, or
        never seen."""
        dim, first = self.blocks.embedding_dims[table], self.blocks.first_alpha_row(table)
        seen = self.blocks.seen_rows[table].tolist()
        return [
            f"D{dim}_b{first + s}_d{d}" if d < dim and seen[s] else None
            for s, d in enumerate(self.dims[table].tolist())
        ]


def project_(model: nn.Module, plan: ProjectedDims) -> None:
    """Puts a `ProjectedEmbeddingBagCollection` around every EmbeddingBagCollection of a model; all
    share projections."""
    check_pooled(model, "projected tables")
    projections = Projections(plan)
    found = {id(module): module for module in collections(model).values()}
    wrappers = {key: ProjectedEmbeddingBagCollection(module, plan, projections) for key, module in found.items()}
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in wrappers:
            model.set_submodule(fqn, wrappers[id(module)])


def is_projected(model: nn.Module) -> bool:
    """Returns whether a model's tables are looked up through projections."""
    return any(isinstance(module, ProjectedEmbeddingBagCollection) for module in model.modules())


def project_as_exported_(model: nn.Module, scheme: MixedDimensionScheme) -> None:
    """Puts the wrappers around a model's collections that a projected model of this scheme had when
    it was exported."""
    configs = [table for module in collections(model).values() for table in table_configs_of(module)]
    for table in configs:
        check_known("table", table.name, scheme.tables)
    tables = {table.name: scheme.tables[table.name] for table in configs}
    dims = {name: table.retained.sum(1) for name, table in tables.items()}
    whole = {feature for table in tables.values() for feature in table.feature_names}
    blocks = GlobalBlocks(
        routings={name: table.routing for name, table in tables.items()},
        embedding_dims={name: table.embedding_dim for name, table in tables.items()},
        # A feature whose bags were split by block has keys of its blocks in the scheme instead of
        # its own name.
        max_bag_lengths={name: 1 if name in whole else 2 for table in configs for name in table.feature_names},
        occurrences={},
        seen_rows=dims,  # a block that was never seen retains nothing
    )
    project_(model, ProjectedDims(blocks=blocks, dims=dims))


class Projections(nn.Module):
    """The learned ``(d_s, D)`` projections of a model, Xavier-initialised."""

    def __init__(self, plan: ProjectedDims) -> None:
        super().__init__()
        shapes = plan.projection_shapes()
        self.matrices = nn.ParameterDict({name: torch.empty(shape) for name, shape in shapes.items()})
        for matrix in self.matrices.values():
            nn.init.xavier_uniform_(matrix)
        # One more for "no block": rows that a scheme dropped are zero under every projection.
        self._names = {table: [*plan.projection_names(table), None] for table in plan.dims}

    def forward(self, pooled: Tensor, table: str, block: int) -> Tensor:
        """Projects sums of rows of one block."""
        name = self._names[table][block]
        if name is None:
            return pooled
        matrix = self.matrices[name]
        return pooled[:, : matrix.shape[0]] @ matrix


class ProjectedEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Wraps an EmbeddingBagCollection whose blocks keep their first d_s columns, and projects these
    to D."""

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, plan: ProjectedDims, projections: Projections
    ) -> None:
        super().__init__()
        self._tables = list(embedding_bag_collection.embedding_bag_configs())
        self._is_weighted = embedding_bag_collection.is_weighted()
        soft = SoftSelectionEmbeddingBagCollection(embedding_bag_collection, plan.blocks)
        self.bag_check, self.bag_splitter = soft.bag_check, soft.bag_splitter
        self.embedding_bag_collection = soft.embedding_bag_collection
        self.project_pooled = ProjectPooled(soft.outputs, plan.blocks, projections)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up and projects them; raises as `SoftSelectionEmbeddingBagCollection` does."""
        self.bag_check(features)
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        pooled = self.embedding_bag_collection(split)
        return self.project_pooled(pooled, features)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def is_weighted(self) -> bool:
        """Returns whether bags carry per-sample weights."""
        return self._is_weighted


class ProjectPooled(nn.Module):
    """The part of the wrapper behind the lookup: a module of its own, so that TorchRec's tracer
    takes it for a leaf."""

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, projections: Projections) -> None:
        super().__init__()
        self._outputs = outputs
        self.projections = projections
        tables = sorted({output.table for output in outputs if not output.is_multi_hot})
        self._router_of = {table: index for index, table in enumerate(tables)}
        self._routers = nn.ModuleList(RowRouter(blocks.routings[table]) for table in tables)

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        """Projects pooled embeddings."""
        by_key, bags = pooled.to_dict(), jagged_by_key(features)
        parts = [
            self._multi_hot(output, [by_key[key] for key in output.block_keys], bags[output.feature])
            if output.is_multi_hot
            else self._single_id(output, by_key[output.name], bags[output.feature])
            for output in self._outputs
        ]
        return KeyedTensor(
            keys=[output.name for output in self._outputs],
            length_per_key=[output.embedding_dim for output in self._outputs],
            values=torch.cat(parts, dim=1),
        )

    def _multi_hot(self, output: PooledFeature, per_block: list[Tensor], bags: JaggedTensor) -> Tensor:
        projected = [self.projections(part, output.table, s) for s, part in enumerate(per_block)]
        total = torch.stack(projected).sum(dim=0)
        return total / bags.lengths().clamp(min=1).unsqueeze(1) if output.divides else total

    def _single_id(self, output: PooledFeature, pooled: Tensor, bags: JaggedTensor) -> Tensor:
        """Bags sorted by block, so that each projection multiplies its own only, and put back into
        their order."""
        ids, lengths = bags.values(), bags.lengths()
        block = self._routers[self._router_of[output.table]](ids)
        if len(ids) < len(lengths):  # an empty bag is zero under every projection
            block = torch.zeros_like(lengths, dtype=block.dtype).masked_scatter(lengths > 0, block)
        order = torch.argsort(block, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        sizes = torch.bincount(block, minlength=output.num_blocks).tolist()
        per_block = _Permute.apply(pooled, order, place).split(sizes)
        projected = torch.cat([self.projections(part, output.table, s) for s, part in enumerate(per_block)])
        return _Permute.apply(projected, place, order)


class _Permute(torch.autograd.Function):
    """``values[order]``, with ``gradient[inverse]`` for its gradient: index_select's adds row by
    row to zeros."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
