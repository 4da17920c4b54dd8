"""Soft selection of a FeatureProcessedEmbeddingBagCollection: processors see whole bags, then bags
are split by block."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, cast

from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.distributed.utils import modify_input_for_feature_processor
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import describe
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.torchrec import read_by_name_
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection

FEATURE_PROCESSED = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
"""TorchRec's modules that process features in front of the collection that they hold."""
INNER = "_embedding_bag_collection"
"""The attribute by which they hold it."""


class SoftSelectionFeatureProcessedEmbeddingBagCollection(SoftSelectionEmbeddingBagCollection):
    """Wraps a FeatureProcessedEmbeddingBagCollection and applies soft selection to its output."""

    child_name = "feature_processed"

    def __init__(
        self,
        feature_processed: FeatureProcessedEmbeddingBagCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
        multi_hot_features: Collection[str] | None = None,
    ) -> None:
        super().__init__(
            cast(EmbeddingBagCollection, feature_processed),
            blocks,
            alpha=alpha,
            multi_hot_features=multi_hot_features,
        )

    def _take(self, wrapped: nn.Module) -> EmbeddingBagCollection:
        if type(wrapped) is not FeatureProcessedEmbeddingBagCollection:
            received = type(wrapped).__name__
            raise TypeError(
                describe("SoftSelection", "a FeatureProcessedEmbeddingBagCollection", received)
            )
        collection = wrapped._embedding_bag_collection
        self.feature_processed = with_processors_of(wrapped, collection)
        return collection

    def __setattr__(self, name: str, value: Any) -> None:
        """The collection stays where TorchRec has it; sharded, it reads by name from then on."""
        if name == "embedding_bag_collection":
            self.feature_processed._embedding_bag_collection = value
        else:
            super().__setattr__(name, value)
        if isinstance(value, ShardedFeatureProcessedEmbeddingBagCollection):
            read_by_name_(value)

    @property
    def embedding_bag_collection(self) -> EmbeddingBagCollection | ShardedEmbeddingBagCollection:
        """The collection behind the processors."""
        return self.feature_processed._embedding_bag_collection

    @property
    def _embedding_bag_collection(self) -> EmbeddingBagCollection | ShardedEmbeddingBagCollection:
        """The same, by the name that it has in the plain model."""
        return self.embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Processes features, looks bags up, and multiplies them by alpha."""
        self.bag_check(features)
        if self.bag_splitter is None:
            return self.selection(self.feature_processed(features), features, features)
        if isinstance(self.feature_processed, ShardedModule):
            remedy = "call soft_selection.on_shards.select_on_shards_, as BilevelTrainPipeline does"
            raise RuntimeError(
                describe("feature processors", "selection on the shards", "split bags", remedy)
            )
        return self.look_up_processed(self.processed(features))

    def processed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Bags with the weights that the processors give them, made here. Local, no collective."""
        processors, bags = self.feature_processed._feature_processors, copy.copy(features)
        bags._weights = bags._jt_dict = None
        is_collection = isinstance(processors, FeatureProcessorsCollection)
        if any(getattr(module, "_pre_processed", False) for module in processors.modules()):
            modify_input_for_feature_processor(
                bags, processors, is_collection
            )  # they now want places as weights
        return (
            processors(bags) if is_collection else apply_feature_processors_to_kjt(bags, processors)
        )

    def look_up_processed(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up that have their weights, and multiplies them by alpha."""
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        return self.selection(self.embedding_bag_collection(split), features, split)


def with_processors_of(
    holder: nn.Module, collection: EmbeddingBagCollection
) -> FeatureProcessedEmbeddingBagCollection:
    """An unsharded module with the processors of another, around a collection."""
    processors: Any = holder._feature_processors
    for module in processors.modules():
        if hasattr(module, "_pre_processed"):  # set for good where TorchRec shards rows
            module._pre_processed = False
    if not isinstance(processors, FeatureProcessorsCollection):
        processors = dict(processors.items())
    return FeatureProcessedEmbeddingBagCollection(collection, processors).train(holder.training)
