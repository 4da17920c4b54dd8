"""Soft selection on whole tables: every row times its alpha, before a kernel looks anything up.
CPU, compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.ops.batches import jagged_by_key, sort_by_slot
from dnis_torchrec.ops.select import Packing, are_compiled, pack_bags, select_packed
from dnis_torchrec.selection.alpha import (
    Alpha,
    PooledFeature,
    WatchedOutputs,
    one_per_bag,
    select_per_block,
    select_per_sample,
)
from dnis_torchrec.selection.torchrec import PrefetchedTables, read_collection_by_name_
from dnis_torchrec.selection.wrapper import (
    SoftSelectionEmbeddingBagCollection,
    soft_selection_modules,
)


class _MultiplyRows(torch.autograd.Function):
    """out[n] = weights[n] * alpha[rows[n]], zero where rows[n] is -1."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
        num_rows, dim = alpha.shape
        flat, layout = (
            alpha.flatten(),
            torch.tensor([[0, 0, dim, 0, 0, 0, num_rows]]),
        )  # one piece, see `select_pieces`
        ctx.save_for_backward(flat, rows, layout, weights if ctx.needs_input_grad[1] else None)
        ctx.alpha_shape = alpha.shape
        out = torch.empty_like(weights)
        torch.ops.dnis_torchrec.select_pooled(weights, flat, rows, None, layout, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        flat, rows, layout, weights = ctx.saved_tensors
        grad_weights = grad_alpha = None
        grad, operators = grad.contiguous(), torch.ops.dnis_torchrec
        if ctx.needs_input_grad[1]:
            grad_alpha = torch.empty_like(flat)
            operators.sum_alpha_gradient(grad, weights, rows, None, layout, grad_alpha)
            grad_alpha = grad_alpha.view(ctx.alpha_shape)
        if ctx.needs_input_grad[0]:
            grad_weights = torch.empty_like(grad)
            operators.spread_gradient(grad, flat, rows, None, layout, False, grad_weights)
        return grad_weights, grad_alpha, None


def multiply_rows(weights: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Every row of a table times its row of alpha: ``weights[n] * alpha[rows[n]]``. CPU, compiled."""
    return _MultiplyRows.apply(weights, alpha, rows)


class TableSelection:
    """Looks bags up in multiplied tables. Local, no collective."""

    def __init__(
        self, kernel: nn.Module, rows: Tensor, first_rows: Sequence[int], num_columns: int
    ) -> None:
        self._kernel = kernel
        self._rows = rows.to(torch.int32).unsqueeze(1)
        self._first_rows = list(first_rows)
        self._num_columns = num_columns

    def look_up(
        self,
        lookup: Callable[[KeyedJaggedTensor], Tensor],
        features: KeyedJaggedTensor,
        alpha: Tensor,
        *,
        weights_learn: bool,
    ) -> Tensor:
        """Soft selection of whole bags."""
        own = cast(Tensor, self._kernel.weights)
        weights = own if weights_learn else own.detach()
        multiplied = multiply_rows(
            weights.view(-1, self._num_columns), alpha.to(weights.dtype), self._rows
        )
        if not features.stride():  # no kernel takes an empty batch
            nothing = multiplied.new_empty(0, len(self._first_rows) * self._num_columns)
            return nothing + multiplied.sum() * 0
        with self._in_place_of_weights(multiplied.flatten()):
            return lookup(features)

    def rows_of(self, features: KeyedJaggedTensor) -> Tensor:
        """Row of alpha of every id, ``(I,)``, -1 for an id of no block."""
        ids = features.values().split(features.length_per_key())
        rows = [
            self._rows[own.long() + first] for own, first in zip(ids, self._first_rows, strict=True)
        ]
        return torch.cat(rows).squeeze(1)

    @contextmanager
    def _in_place_of_weights(self, multiplied: Tensor) -> Iterator[None]:
        """Puts a product in place of the weights, as `functional_call` does, for a kernel that its
        owner calls."""
        own = self._kernel._parameters["weights"]
        self._kernel._parameters["weights"] = multiplied  # type: ignore[assignment]  # no parameter, and none is wanted
        try:
            yield
        finally:
            self._kernel._parameters["weights"] = own


def select_on_shards_(model: nn.Module) -> nn.Module:
    """Moves soft selection of multi-hot features to the ranks that hold the shards; see the top of
    this module."""
    for wrapper in soft_selection_modules(model).values():
        if not isinstance(wrapper, SoftSelectionEmbeddingBagCollection):
            continue  # an EmbeddingCollection pools nothing: its volume is the plain model's
        collection = wrapper.embedding_bag_collection
        if (
            isinstance(collection, ShardedEmbeddingBagCollection)
            and wrapper.bag_splitter is not None
        ):
            lookups = [_without_ddp(lookup) for lookup in collection._lookups]
            is_torchrecs = all(type(lookup) is GroupedPooledEmbeddingsLookup for lookup in lookups)
            if is_torchrecs and not PrefetchedTables(collection):
                _select_on_shards_(wrapper, collection)
    return model


def _select_on_shards_(
    wrapper: SoftSelectionEmbeddingBagCollection, collection: ShardedEmbeddingBagCollection
) -> None:
    routers = _routers(
        wrapper.outputs, wrapper.blocks, wrapper.alpha.of(wrapper.alpha.dims[0]).device
    )
    for kind, lookup in zip(collection._sharding_types, collection._lookups, strict=True):
        travels = kind != ShardingType.DATA_PARALLEL.value
        division = collection._env.world_size if travels else 1
        for part, features in _parts_of(lookup, wrapper.outputs, routers):
            tables = _table_selection(part, features) if wrapper.multiplies_tables else None
            # as TorchRec's pipelines replace forwards: no module, and so no name, changes
            part.forward = ShardSelection(part.forward, features, wrapper.alpha, division, tables)
    collection._embedding_shardings = [
        _sharding_of_whole_bags(collection, kind, wrapper.outputs)
        for kind in collection._sharding_types
    ]
    collection._input_dists, collection._feature_splits, collection._features_order = [], [], []
    collection._has_uninitialized_input_dist = collection._has_features_permute = True
    collection._output_dists, collection._embedding_names, collection._embedding_dims = [], [], []
    collection._uncombined_embedding_names, collection._uncombined_embedding_dims = [], []
    collection._create_output_dist()
    read_collection_by_name_(
        collection, anew=True
    )  # it may have been called before, with a key for every block
    wrapper.bag_splitter = None
    wrapper.selection = SelectedPooled(wrapper.outputs, wrapper.alpha)


def _parts_of(
    lookup: nn.Module, outputs: Sequence[PooledFeature], routers: dict[str, RowRouter]
) -> list[tuple[nn.Module, list[ShardFeature]]]:
    """Returns the modules of a lookup that select for themselves, which are its kernels, and the
    features they read."""
    grouped = _without_ddp(lookup)
    of_kernels = [
        _features_of(config.embedding_tables, outputs, routers)
        for config in grouped.grouped_configs
    ]
    if isinstance(lookup, DistributedDataParallel) or not of_kernels:
        return [(lookup, list(itertools.chain.from_iterable(of_kernels)))]
    grouped._feature_splits = [len(features) for features in of_kernels]  # of whole bags
    return list(zip(grouped._emb_modules, of_kernels, strict=True))


def _without_ddp(lookup: nn.Module) -> GroupedPooledEmbeddingsLookup:
    return lookup.module if isinstance(lookup, DistributedDataParallel) else lookup


def _routers(
    outputs: Sequence[PooledFeature], blocks: RowBlocks, device: torch.device
) -> dict[str, RowRouter]:
    return {
        table: RowRouter(blocks.routings[table]).to(device)
        for table in {output.table for output in outputs}
    }


def _sharding_of_whole_bags(
    collection: ShardedEmbeddingBagCollection, kind: str, outputs: Sequence[PooledFeature]
) -> Any:
    """Builds the sharding that makes one sharding type's input_dist and output_dist for the user's
    own features."""
    infos = []
    for info in collection.sharding_type_to_sharding_infos[kind]:
        own = [output for output in outputs if output.table == info.embedding_config.name]
        names = {
            "feature_names": [o.feature for o in own],
            "embedding_names": [o.name for o in own],
        }
        infos.append(replace(info, embedding_config=replace(info.embedding_config, **names)))
    return collection.create_embedding_bag_sharding(
        infos,
        collection._env,
        collection._device,
        permute_embeddings=True,
        qcomm_codecs_registry=collection.qcomm_codecs_registry,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardFeature:
    """A feature, as the lookup of one shard knows it."""

    output: PooledFeature
    router: RowRouter
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    keys: tuple[str, ...]

    @property
    def num_keys(self) -> int:
        """Returns the number of keys that the lookup reads for it."""
        return len(self.keys)


def _features_of(
    tables: Sequence[ShardedEmbeddingTable],
    outputs: Sequence[PooledFeature],
    routers: dict[str, RowRouter],
) -> list[ShardFeature]:
    """Returns the features in the order in which the lookup reads them: a table's features follow
    one another."""
    features = []
    for table in tables:
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        own, keys = (
            [output for output in outputs if output.table == table.name],
            iter(table.feature_names),
        )
        is_whole = len(own) == len(table.feature_names)
        features += [
            ShardFeature(
                output=output,
                router=routers[table.name],
                first_row=row,
                num_rows=table.local_rows,
                first_column=column,
                num_columns=table.local_cols,
                keys=tuple(itertools.islice(keys, 1 if is_whole else len(output.block_keys))),
            )
            for output in own
        ]
    return features


def _table_selection(part: nn.Module, features: Sequence[ShardFeature]) -> TableSelection | None:
    """Returns the selection on whole tables, or None for a kernel without it."""
    if not isinstance(part, BatchedDenseEmbeddingBag) or not are_compiled():
        return None
    weights = part.emb_module.weights
    columns = {(own.output.embedding_dim, own.first_column, own.num_columns) for own in features}
    if (
        weights.device.type != "cpu"
        or weights.dtype not in (torch.float32, torch.float64)
        or len(columns) != 1
    ):
        return None
    rows, first_rows, num_rows = [], [], 0
    for own, last in zip(features, [None, *features], strict=False):
        if last is None or (own.output.table, own.first_row) != (last.output.table, last.first_row):
            blocks = own.router(torch.arange(own.first_row, own.first_row + own.num_rows))
            rows.append(
                torch.where(blocks < own.output.num_blocks, own.output.first_alpha_row + blocks, -1)
            )
            num_rows += own.num_rows
        first_rows.append(num_rows - own.num_rows)
    return TableSelection(part.emb_module, torch.cat(rows), first_rows, features[0].num_columns)


class ShardSelection:
    """Soft selection around a kernel, or around the whole lookup of a sharding type: what its
    forward is replaced by."""

    def __init__(
        self,
        lookup: Callable[[KeyedJaggedTensor], Tensor],
        features: Sequence[ShardFeature],
        alpha: Alpha,
        gradient_division: int,
        tables: TableSelection | None = None,
    ) -> None:
        self._lookup = lookup
        self._features = list(features)
        self._alpha = alpha
        self._gradient_division = gradient_division
        self._tables = tables
        # As in the lookup's own list of features, a name occurs once for every shard that reads it.
        self._keys = [key for feature in features for key in feature.keys]
        self._num_keys = [feature.num_keys for feature in features]
        self._width = sum(feature.num_columns for feature in features)
        self._layout = self._make_layout()

    def _make_layout(self) -> Tensor:
        """See `select_packed`."""
        begins, fields, in_column, out_column = self._alpha.begins, [], 0, 0
        for feature in self._features:
            dim, columns = feature.output.embedding_dim, feature.num_columns
            first = begins[dim] + feature.first_column
            fields.append((in_column, out_column, columns, feature.num_keys, first, dim))
            in_column += feature.num_keys * columns
            out_column += columns
        return torch.tensor(fields, dtype=torch.int64).view(-1, 6)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks bags up and multiplies them by alpha."""
        if self._tables is not None:
            return self._select_on_tables(features, self._tables)
        is_for_compiled = features.values().device.type == "cpu" and are_compiled()
        return self._select_packed(features) if is_for_compiled else self._select_by_torch(features)

    def _pool(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks up; in an upper step without gradients, for the lookup would learn from validation
        data."""
        pooled = self._lookup(features)
        return pooled.detach() if self._alpha.is_upper else pooled

    def _alphas(self) -> dict[int, Tensor]:
        """Alpha by embedding_dim; its gradient is multiplied by what TorchRec has divided it by."""
        factor = self._gradient_division if get_gradient_division() else 1
        return {dim: _ScaleGradient.apply(self._alpha.of(dim), factor) for dim in self._alpha.dims}

    def _select_on_tables(self, features: KeyedJaggedTensor, tables: TableSelection) -> Tensor:
        """Selects by multiplying the tables themselves."""
        first = self._features[0]
        dim, columns = (
            first.output.embedding_dim,
            slice(first.first_column, first.first_column + first.num_columns),
        )
        alpha = self._alphas()[dim][:, columns]
        if self._alpha.is_upper:
            self._alpha.record_hits(dim, tables.rows_of(features))
        return tables.look_up(self._lookup, features, alpha, weights_learn=not self._alpha.is_upper)

    def _select_packed(self, features: KeyedJaggedTensor) -> Tensor:
        """Selects by the compiled operators; blocks that do not occur are left out."""
        packings = [
            Packing(
                routing=feature.router.routing_tensor(),
                first_row=feature.first_row,
                first_alpha_row=feature.output.first_alpha_row,
                num_blocks=feature.output.num_blocks,
                num_keys=feature.num_keys,
            )
            for feature in self._features
        ]
        values, lengths, weights = features.values(), features.lengths(), features.weights_or_none()
        weights = None if weights is None else weights.contiguous()
        bags = pack_bags(
            values.contiguous(), lengths.contiguous(), weights, packings, features.stride()
        )
        packed = KeyedJaggedTensor(
            keys=self._keys,
            values=bags.ids,
            weights=bags.weights,
            lengths=bags.lengths,
            stride=bags.num_rows,
        )
        pooled = self._pool(packed)
        if self._alpha.is_upper:
            for dim in {feature.output.embedding_dim for feature in self._features}:
                of_dim = [
                    f
                    for f, feature in enumerate(self._features)
                    if feature.output.embedding_dim == dim
                ]
                self._alpha.record_hits(dim, bags.rows_of(of_dim))
        exact = pooled if pooled.dtype in (torch.float32, torch.float64) else pooled.float()
        alphas = torch.cat([alpha.to(exact.dtype).flatten() for alpha in self._alphas().values()])
        return select_packed(exact, alphas, bags, self._layout, self._width).to(pooled.dtype)

    def _select_by_torch(self, features: KeyedJaggedTensor) -> Tensor:
        """Selects by torch's own operators, on any device; every block has a place."""
        batch_size, blocks = features.stride(), self._blocks_of(features)
        slots, first_slot = [], 0
        for feature, block in zip(self._features, blocks, strict=True):
            own = block if feature.output.is_multi_hot else torch.zeros_like(block)
            dropped = block >= feature.output.num_blocks
            slots.append(torch.where(dropped, len(self._keys), first_slot + own))
            first_slot += feature.num_keys
        slot = torch.cat(slots) if slots else features.values().new_empty(0)
        values, lengths, weights = sort_by_slot(features, slot, len(self._keys))
        split = KeyedJaggedTensor(
            keys=self._keys, values=values, weights=weights, lengths=lengths, stride=batch_size
        )
        pooled, alphas, parts = self._pool(split), self._alphas(), []
        widths = [feature.num_keys * feature.num_columns for feature in self._features]
        lengths_of = features.lengths().view(len(self._features), batch_size)
        for index, part in enumerate(pooled.split(widths, dim=1) if widths else ()):
            parts.append(
                self._select(self._features[index], part, blocks[index], lengths_of[index], alphas)
            )
        # Also where this rank holds nothing: the ranks that do need it in the collectives of
        # alpha's backward pass.
        nothing = torch.stack([alpha.sum() for alpha in alphas.values()]).sum() * 0
        return (torch.cat(parts, dim=1) if parts else pooled) + nothing.to(pooled.dtype)

    def _select(
        self,
        feature: ShardFeature,
        part: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        alphas: dict[int, Tensor],
    ) -> Tensor:
        """Pooled pieces of one feature, ``(B, keys * columns)``, added up: ``(B, columns)``."""
        output = feature.output
        rows = slice(output.first_alpha_row, output.first_alpha_row + output.num_blocks)
        columns = slice(feature.first_column, feature.first_column + feature.num_columns)
        alpha = alphas[output.embedding_dim][rows, columns].to(part.dtype)
        self._alpha.record_hits(
            output.embedding_dim,
            torch.where(blocks < output.num_blocks, output.first_alpha_row + blocks, -1),
        )
        pieces = part.view(len(part), feature.num_keys, feature.num_columns)
        if output.is_multi_hot:
            return select_per_block(pieces, alpha)
        row_of_bag = one_per_bag(blocks.clamp(max=output.num_blocks - 1), lengths, 0)
        return select_per_sample(pieces, alpha, row_of_bag.unsqueeze(1)).squeeze(1)

    def _blocks_of(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Block of every id, feature by feature."""
        ids = features.values().split(features.length_per_key()) if self._features else ()
        return [
            feature.router(own.long() + feature.first_row)
            for feature, own in zip(self._features, ids, strict=True)
        ]


class _ScaleGradient(torch.autograd.Function):
    """The same values, and a gradient times a number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class SelectedPooled(WatchedOutputs):
    """The part of a wrapper behind lookups that have multiplied by alpha: local, no collective, no
    parameter."""

    def __init__(self, outputs: tuple[PooledFeature, ...], alpha: Alpha) -> None:
        super().__init__(outputs)
        self._alpha = [alpha]  # in a list: the wrapper registers it, once

    def forward(
        self, pooled: KeyedTensor, features: KeyedJaggedTensor, split: KeyedJaggedTensor
    ) -> KeyedTensor:
        """Orders and divides."""
        values = pooled.values()
        if pooled.keys() != self._keys or any(output.divides for output in self._outputs):
            by_key, jagged = pooled.to_dict(), jagged_by_key(features)
            parts = [
                by_key[output.name] / jagged[output.feature].lengths().clamp(min=1).unsqueeze(1)
                if output.divides
                else by_key[output.name]
                for output in self._outputs
            ]
            values = torch.cat(parts, dim=1)
        if values.requires_grad and not self._alpha[0].is_upper:
            self._watch(values)
        return KeyedTensor(keys=self._keys, values=values, length_per_key=self._dims)
