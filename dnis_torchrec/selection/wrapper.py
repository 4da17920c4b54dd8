"""SoftSelectionEmbeddingBagCollection: an EmbeddingBagCollection whose output is multiplied by
alpha, block by block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops.bag_splitting import BagSplitter, FeatureSplit
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.bag_check import BagCheck
from dnis_torchrec.selection.plain_names import PlainNames
from dnis_torchrec.selection.pooled_pieces import PooledFeature
from dnis_torchrec.selection.select_pooled import SelectPooled, WatchedOutputs
from dnis_torchrec.selection.torchrec import (
    frozen_tables,
    note_frozen_,
    read_collection_by_name_,
    read_rows_in_order_,
)


class SoftSelectionModule(PlainNames):
    """Base of the wrappers around a model's collections, pooled or not: what the search and the
    tables' readers need."""

    blocks: RowBlocks
    selection: WatchedOutputs
    bag_splitter: BagSplitter | None

    @property
    def alpha(self) -> Alpha:
        """See `Alpha`; wrappers of one model share it."""
        return self.soft_selection

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        raise NotImplementedError

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """The feature and table behind each output key, in order."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """A child that is sharded reads by name from then on: pipelines call it without the
        wrapper."""
        before = vars(self).get("_modules", {}).get(name or self.child_name)
        if isinstance(value, ShardedEmbeddingCollection) and isinstance(
            before, EmbeddingCollection
        ):
            note_frozen_(value, frozen_tables(before.embeddings))
        super().__setattr__(name, value)
        if isinstance(value, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            read_collection_by_name_(value)
        if isinstance(value, ShardedEmbeddingCollection):
            read_rows_in_order_(value)


class SoftSelectionEmbeddingBagCollection(SoftSelectionModule, EmbeddingBagCollectionInterface):
    """Wraps an EmbeddingBagCollection and applies soft selection (paper, eq. 3) to its output."""

    child_name = "embedding_bag_collection"

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
        multi_hot_features: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        plain = self._take(embedding_bag_collection)
        self.blocks = blocks
        self._tables = list(plain.embedding_bag_configs())
        self._is_weighted = plain.is_weighted()
        check_blocks(self._tables, blocks)
        self._outputs = pooled_features(self._tables, blocks, multi_hot_features)
        self.bag_check = BagCheck(self._outputs)
        self.bag_splitter = _bag_splitter(self._outputs, blocks)
        self.embedding_bag_collection = _child(
            plain, self._tables, self._outputs, self.bag_splitter
        )
        self.soft_selection = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection = SelectPooled(self._outputs, blocks, self.alpha)
        self.multiplies_tables = False

    def _take(self, wrapped: nn.Module) -> EmbeddingBagCollection:
        """Returns the collection of what is to be wrapped."""
        if not isinstance(wrapped, EmbeddingBagCollection):
            raise TypeError(
                describe("SoftSelection", "an EmbeddingBagCollection", type(wrapped).__name__)
            )
        return wrapped

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up and multiplies them by alpha."""
        self.bag_check(features)
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        pooled = self.embedding_bag_collection(split)
        return self.selection(pooled, features, split)

    def read_whole_features_(self, *, multiply_tables: bool = False) -> None:
        """Gives the child one key per feature, whatever its blocks, for lookups that split bags for
        themselves."""
        self.multiplies_tables = multiply_tables
        if self.bag_splitter is not None:
            keys = {output.name: (output.whole_key,) for output in self._outputs}
            self.embedding_bag_collection = _reading(
                self.embedding_bag_collection, self._tables, self._outputs, keys
            )

    @property
    def embedding_bags(self) -> nn.ModuleDict:
        """Table -> the module whose `weight` it is, as the plain collection has them."""
        return cast(nn.ModuleDict, self.embedding_bag_collection.embedding_bags)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def is_weighted(self) -> bool:
        """Returns whether bags carry per-sample weights."""
        return self._is_weighted

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        return self.embedding_bag_collection

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """The feature and table behind each output key, in order."""
        return self._outputs


def check_blocks(tables: list[EmbeddingBagConfig], blocks: RowBlocks) -> None:
    """Checks that blocks are of these tables, and that their pooling is known."""
    for table in tables:
        check_known("table", table.name, blocks.routings)
        place, remedy = f"table {table.name!r}", "make the blocks from counts of this table"
        blocked = blocks.routings[table.name].num_embeddings
        fits = blocked == table.num_embeddings
        check(fits, place, f"blocks of num_embeddings={table.num_embeddings} rows", blocked, remedy)
        dim = blocks.embedding_dims[table.name]
        check(
            dim == table.embedding_dim,
            place,
            f"blocks of embedding_dim={table.embedding_dim}",
            dim,
            remedy,
        )
        if table.pooling not in (PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE):
            raise NotImplementedError(
                describe(place, "supported pooling is SUM or MEAN", table.pooling)
            )


def pooled_features(
    tables: list[EmbeddingBagConfig], blocks: RowBlocks, multi_hot_features: Collection[str] | None
) -> tuple[PooledFeature, ...]:
    """Everything that stands behind the output keys of a collection, in their order."""
    all_features = {feature for table in tables for feature in table.feature_names}
    for feature in multi_hot_features or ():
        check_known("feature", feature, all_features)
    if multi_hot_features is None:
        multi_hot_features = {f for f in all_features if blocks.max_bag_lengths.get(f, 2) > 1}
    outputs = []
    for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True):
        for feature, name in zip(table.feature_names, names, strict=True):
            outputs.append(
                PooledFeature(
                    feature=feature,
                    name=name,
                    table=table.name,
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    is_multi_hot=feature in multi_hot_features,
                    divides=table.pooling == PoolingType.MEAN and feature in multi_hot_features,
                    first_alpha_row=blocks.first_alpha_row(table.name),
                    num_blocks=blocks.routings[table.name].num_blocks,
                )
            )
    return tuple(outputs)


def _bag_splitter(outputs: tuple[PooledFeature, ...], blocks: RowBlocks) -> BagSplitter | None:
    if not any(output.is_multi_hot for output in outputs):
        return None
    splits: dict[str, FeatureSplit] = {}
    for output in outputs:
        routing = blocks.routings[output.table] if output.is_multi_hot else None
        split = FeatureSplit(feature=output.feature, keys=output.block_keys, routing=routing)
        splits.setdefault(output.name if output.is_multi_hot else output.feature, split)
    return BagSplitter(list(splits.values()))


def _child(
    wrapped: EmbeddingBagCollection,
    tables: list[EmbeddingBagConfig],
    outputs: tuple[PooledFeature, ...],
    splitter: BagSplitter | None,
) -> EmbeddingBagCollection:
    """The collection that reads split bags: the same tables, under the same names, with the same
    weights."""
    is_torchrecs = (
        type(wrapped) is EmbeddingBagCollection
    )  # sharders look up what to do by this very type
    if (
        is_torchrecs
        and splitter is None
        and all(table.pooling == PoolingType.SUM for table in tables)
    ):
        return wrapped
    return _reading(
        wrapped, tables, outputs, {output.name: output.block_keys for output in outputs}
    )


def _reading(
    wrapped: EmbeddingBagCollection,
    tables: list[EmbeddingBagConfig],
    outputs: tuple[PooledFeature, ...],
    keys_of: Mapping[str, tuple[str, ...]],
) -> EmbeddingBagCollection:
    """The tables of a collection, read by other keys and summed: output -> its keys."""
    configs = []
    for table in tables:
        keys = [
            key for output in outputs if output.table == table.name for key in keys_of[output.name]
        ]
        configs.append(replace(table, feature_names=keys, pooling=PoolingType.SUM))
    child = EmbeddingBagCollection(
        tables=configs, is_weighted=wrapped.is_weighted(), device=torch.device("meta")
    )
    for name, bag in wrapped.embedding_bags.items():
        child.embedding_bags[name].weight = bag.weight
    child._device = wrapped.device
    return child


def soft_selection_modules(model: nn.Module) -> dict[str, SoftSelectionModule]:
    """The wrappers in a model by their FQN inside DistributedModelParallel and DDP."""
    return {
        fqn: module
        for fqn, module in get_unwrapped_module(model).named_modules()
        if isinstance(module, SoftSelectionModule)
    }
