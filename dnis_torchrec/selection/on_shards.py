"""Soft selection on the ranks of the shards: the output all-to-all is the plain model's.

A multi-hot feature is sharded with a key for every block. What travels knows of no blocks:

    input_dist     the user's bags, whole, as in the plain model
    lookup         on the rank of the shard: bags split by block, pooled, times alpha, added up
    output_dist    one pooled embedding per feature, as in the plain model

`select_on_shards_` puts a `ShardSelection` around each kernel of TorchRec's lookups. CPU kernels
without a fused optimizer may multiply whole tables by alpha instead (`KernelTables`): a third
less time where tables are small beside a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.ops.batches import jagged_by_key, sort_by_slot
from dnis_torchrec.ops.select import BagPieces, are_compiled, gather_bags, select_sparse
from dnis_torchrec.selection import torchrec
from dnis_torchrec.selection.alpha import (
    Alpha,
    PooledFeature,
    WatchedOutputs,
    select_feature,
    select_rows,
)
from dnis_torchrec.selection.wrapper import (
    SoftSelectionEmbeddingBagCollection,
    soft_selection_modules,
)


def select_on_shards_(model: nn.Module) -> nn.Module:
    """Moves soft selection of multi-hot features to the shards, before a pipeline. Local."""
    # Weights, optimizers and the state_dict stay as they are; TorchRec makes process groups for
    # hosts if it has none yet.
    for wrapper in soft_selection_modules(model).values():
        if not isinstance(wrapper, SoftSelectionEmbeddingBagCollection):
            continue  # an EmbeddingCollection pools nothing: its volume is the plain model's
        collection = wrapper.embedding_bag_collection
        if (
            isinstance(collection, ShardedEmbeddingBagCollection)
            and wrapper.bag_splitter is not None
            and all(
                type(lookup) is GroupedPooledEmbeddingsLookup
                for lookup in torchrec.lookups(collection)
            )
            and not torchrec.PrefetchedTables(collection)
        ):
            _select_on_shards_(wrapper, collection)
    return model


def _select_on_shards_(
    wrapper: SoftSelectionEmbeddingBagCollection, collection: ShardedEmbeddingBagCollection
) -> None:
    outputs, device = wrapper.outputs, wrapper.alpha.of(wrapper.alpha.dims[0]).device
    of_table: dict[str, list[PooledFeature]] = {}
    for output in outputs:
        of_table.setdefault(output.table, []).append(output)
    routers = {name: RowRouter(wrapper.blocks.routings[name]).to(device) for name in of_table}
    for kind, lookup in torchrec.lookups_by_type(collection):
        travels = kind != ShardingType.DATA_PARALLEL.value
        division = torchrec.sharding_env(collection).world_size if travels else 1
        parts = [
            (part, _features_of(tables, of_table, routers))
            for part, tables in torchrec.kernels_of(lookup)
        ]
        if parts[0][0] is not lookup:
            torchrec.set_features_per_kernel_(lookup, [len(features) for _, features in parts])
        for part, features in parts:
            to_multiply = _tables_to_multiply(part, features) if wrapper.multiplies_tables else None
            forward = cast(Callable[[KeyedJaggedTensor], Tensor], part.forward)
            selection = ShardSelection(forward, features, wrapper.alpha, division, to_multiply)
            torchrec.replace_forward_(part, selection)
    torchrec.read_whole_bags_(
        collection,
        lambda table: [output.feature for output in of_table.get(table, ())],
        lambda table: [output.name for output in of_table.get(table, ())],
    )
    wrapper.bag_splitter = None
    wrapper.selection = SelectSums(outputs, wrapper.alpha)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardFeature:
    """A feature as the lookup of a shard knows it; it reads one key, or one per block."""

    output: PooledFeature
    router: RowRouter
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    keys: tuple[str, ...]


def _features_of(
    tables: Sequence[ShardedEmbeddingTable],
    of_table: dict[str, list[PooledFeature]],
    routers: dict[str, RowRouter],
) -> list[ShardFeature]:
    """Returns the features in the order in which the lookup reads them, table by table."""
    features = []
    for table in tables:
        row, column = (0, 0) if table.local_metadata is None else table.local_metadata.shard_offsets
        outputs, keys = of_table[table.name], iter(table.feature_names)
        is_whole = len(outputs) == len(table.feature_names)
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
            for output in outputs
        ]
    return features


def _tables_to_multiply(part: nn.Module, features: Sequence[ShardFeature]) -> KernelTables | None:
    """The tables of a kernel that is not fused, on a CPU, if all have the same columns."""
    if not isinstance(part, BatchedDenseEmbeddingBag) or not are_compiled():
        return None
    weights = part.emb_module.weights
    columns = {(f.output.embedding_dim, f.first_column, f.num_columns) for f in features}
    is_exact = weights.dtype in (torch.float32, torch.float64)
    if weights.device.type != "cpu" or not is_exact or len(columns) != 1:
        return None
    rows, first_rows, num_rows = [], [], 0
    for feature, last in zip(features, [None, *features], strict=False):
        output, first = feature.output, feature.first_row
        if last is None or (output.table, first) != (last.output.table, last.first_row):
            blocks = feature.router(torch.arange(first, first + feature.num_rows))
            has_block = blocks < output.num_blocks
            rows.append(torch.where(has_block, output.first_alpha_row + blocks, -1))
            num_rows += feature.num_rows
        first_rows.append(num_rows - feature.num_rows)
    return KernelTables(part.emb_module, torch.cat(rows).to(torch.int32).unsqueeze(1), first_rows)


@dataclass(frozen=True, eq=False)
class KernelTables:
    """Tables of a kernel, the row of alpha of each of their rows, and where each feature begins."""

    kernel: nn.Module
    rows: Tensor
    first_rows: list[int]


class ShardSelection:
    """Replaces the forward of a kernel, or of the whole lookup of a sharding type."""

    def __init__(
        self,
        lookup: Callable[[KeyedJaggedTensor], Tensor],
        features: Sequence[ShardFeature],
        alpha: Alpha,
        gradient_division: int,
        tables: KernelTables | None = None,
    ) -> None:
        self._lookup = lookup
        self._features = list(features)
        self._alpha = alpha
        self._gradient_division = gradient_division
        self._tables = tables
        self._keys = [key for feature in features for key in feature.keys]
        begins, fields, in_column, out_column = alpha.begins, [], 0, 0
        for feature in features:
            dim, columns = feature.output.embedding_dim, feature.num_columns
            num_keys, first = len(feature.keys), begins[dim] + feature.first_column
            fields.append((in_column, out_column, columns, num_keys, first, dim))
            in_column += num_keys * columns
            out_column += columns
        self._width = out_column
        self._layout = torch.tensor(fields, dtype=torch.int64).view(-1, 6)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks bags up and multiplies them by alpha."""
        if self._tables is not None:
            return self._select_on_tables(features, self._tables)
        is_for_compiled = features.values().device.type == "cpu" and are_compiled()
        return self._select_sparse(features) if is_for_compiled else self._select_by_torch(features)

    def _pool(self, features: KeyedJaggedTensor) -> Tensor:
        """Pools the bags of every feature."""
        sums = self._lookup(features)
        return sums.detach() if self._alpha.is_upper else sums  # it learns no validation data

    def _alphas(self) -> dict[int, Tensor]:
        """Alpha by embedding_dim; its gradient is multiplied by what TorchRec has divided it by."""
        factor = self._gradient_division if get_gradient_division() else 1
        alphas = {dim: self._alpha.of(dim).view_as(self._alpha.of(dim)) for dim in self._alpha.dims}
        for alpha in alphas.values():
            if alpha.requires_grad:
                alpha.register_hook(lambda gradient: gradient * factor)
        return alphas

    def _select_on_tables(self, features: KeyedJaggedTensor, tables: KernelTables) -> Tensor:
        """Selects by multiplying the tables themselves."""
        first, is_upper = self._features[0], self._alpha.is_upper
        dim, columns = first.output.embedding_dim, first.num_columns
        if is_upper:
            ids = features.values().split(features.length_per_key())
            pairs = zip(ids, tables.first_rows, strict=True)
            hits = [tables.rows[part.long() + row] for part, row in pairs]
            self._alpha.record_hits(dim, torch.cat(hits))
        alpha = self._alphas()[dim][:, first.first_column : first.first_column + columns]
        weights = cast(Tensor, tables.kernel.weights)
        weights = weights.detach() if is_upper else weights  # see `_pool`
        # a view of the weights is not written to
        product = select_rows(weights.view(-1, columns), alpha, tables.rows)
        if not features.stride():  # no kernel takes an empty batch
            return product.new_empty(0, self._width) + product.sum() * 0
        with torchrec.replace_weights(tables.kernel, product.flatten()):
            return self._lookup(features)

    def _select_sparse(self, features: KeyedJaggedTensor) -> Tensor:
        """Selects by the compiled operators; blocks that do not occur are left out."""
        pieces = [
            BagPieces(
                routing=feature.router.routing_tensor(),
                first_row=feature.first_row,
                first_alpha_row=feature.output.first_alpha_row,
                num_blocks=feature.output.num_blocks,
                num_keys=len(feature.keys),
            )
            for feature in self._features
        ]
        values, lengths = features.values().contiguous(), features.lengths().contiguous()
        weights = features.weights_or_none()
        weights = None if weights is None else weights.contiguous()
        bags = gather_bags(values, lengths, weights, pieces, features.stride())
        compact = KeyedJaggedTensor(
            keys=self._keys,
            values=bags.ids,
            weights=bags.weights,
            lengths=bags.lengths,
            stride=bags.num_rows,
        )
        sums = self._pool(compact)
        if self._alpha.is_upper:
            dims = [feature.output.embedding_dim for feature in self._features]
            for dim in set(dims):
                places = [place for place, other in enumerate(dims) if other == dim]
                self._alpha.record_hits(dim, bags.rows_of(places))
        exact = sums if sums.dtype in (torch.float32, torch.float64) else sums.float()
        alphas = torch.cat([alpha.to(exact.dtype).flatten() for alpha in self._alphas().values()])
        return select_sparse(exact, alphas, bags, self._layout, self._width).to(sums.dtype)

    def _select_by_torch(self, features: KeyedJaggedTensor) -> Tensor:
        """Selects by torch's own operators, on any device; every block has a place."""
        batch_size, slots, first_slot = features.stride(), [], 0
        ids = features.values().split(features.length_per_key()) if self._features else ()
        blocks = [
            feature.router(part.long() + feature.first_row)
            for feature, part in zip(self._features, ids, strict=True)
        ]
        for feature, block in zip(self._features, blocks, strict=True):
            slot = block if feature.output.is_multi_hot else torch.zeros_like(block)
            has_block = block < feature.output.num_blocks
            slots.append(torch.where(has_block, first_slot + slot, len(self._keys)))
            first_slot += len(feature.keys)
        slot = torch.cat(slots) if slots else features.values().new_empty(0)
        values, lengths, weights = sort_by_slot(features, slot, len(self._keys))
        split = KeyedJaggedTensor(
            keys=self._keys, values=values, weights=weights, lengths=lengths, stride=batch_size
        )
        sums, alphas, parts = self._pool(split), self._alphas(), []
        widths = [len(feature.keys) * feature.num_columns for feature in self._features]
        lengths_of = features.lengths().view(len(self._features), batch_size)
        for index, part in enumerate(sums.split(widths, dim=1) if widths else ()):
            feature = self._features[index]
            parts.append(self._select(feature, part, blocks[index], lengths_of[index], alphas))
        # Also where this rank holds nothing: others need it in alpha's backward collectives.
        zero = torch.stack([alpha.sum() for alpha in alphas.values()]).sum() * 0
        return (torch.cat(parts, dim=1) if parts else sums) + zero.to(sums.dtype)

    def _select(
        self,
        feature: ShardFeature,
        part: Tensor,
        blocks: Tensor,
        lengths: Tensor,
        alphas: dict[int, Tensor],
    ) -> Tensor:
        """Sums of one feature, ``(B, keys * columns)``, times alpha, added up."""
        output = feature.output
        rows = slice(output.first_alpha_row, output.first_alpha_row + output.num_blocks)
        columns = slice(feature.first_column, feature.first_column + feature.num_columns)
        alpha = alphas[output.embedding_dim][rows, columns].to(part.dtype)
        hits = torch.where(blocks < output.num_blocks, output.first_alpha_row + blocks, -1)
        self._alpha.record_hits(output.embedding_dim, hits)
        sums = part.view(len(part), len(feature.keys), feature.num_columns)
        return select_feature(output, sums, blocks, lengths, alpha)


class SelectSums(WatchedOutputs):
    """The part of a wrapper behind lookups that have multiplied by alpha. Local, no parameter."""

    def forward(
        self, sums: KeyedTensor, features: KeyedJaggedTensor, _: KeyedJaggedTensor
    ) -> KeyedTensor:
        """Orders output keys, and divides MEAN by the length of the whole bag."""
        values = sums.values()
        if sums.keys() != self._keys or any(output.divides for output in self._outputs):
            by_key, bags, parts = sums.to_dict(), jagged_by_key(features), []
            for output in self._outputs:
                part = by_key[output.name]
                if output.divides:
                    part = part / bags[output.feature].lengths().clamp(min=1).unsqueeze(1)
                parts.append(part)
            values = torch.cat(parts, dim=1)
        self._watch(values)
        return KeyedTensor(keys=self._keys, values=values, length_per_key=self._dims)
