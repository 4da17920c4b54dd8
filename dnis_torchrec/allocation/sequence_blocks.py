"""Contributions of every block to the outputs of a collection that pools nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.allocation.pooled_blocks import (
    Apart,
    CollectionBlocks,
    Entries,
    Lookup,
    Reads,
    WatchedCollection,
    one_of_each,
)
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.row_routing import RowRouter
from dnis_torchrec.ops.jagged import jagged_by_key
from dnis_torchrec.selection.table_shards import is_pooled, table_configs_of
from dnis_torchrec.selection.wrapper import check_blocks, pooled_features


def watched_collection(
    collection: nn.Module, blocks: RowBlocks, device: torch.device
) -> WatchedCollection:
    """A collection and the blocks of its tables, whether it pools or not."""
    kind = CollectionBlocks if is_pooled(collection) else SequenceBlocks
    return kind(collection, blocks, device)


class SequenceBlocks(WatchedCollection):
    """An EmbeddingCollection of a model, and the blocks of its tables; see `watched_collection`."""

    num_slots = 0

    def __init__(self, collection: nn.Module, blocks: RowBlocks, device: torch.device) -> None:
        tables = table_configs_of(collection)
        check_blocks(tables, blocks)
        self.collection = collection
        self.outputs = pooled_features(tables, blocks, ())
        self._routers = {
            table.name: RowRouter(blocks.routings[table.name]).to(device) for table in tables
        }
        ids = sum(blocks.max_bag_lengths.get(output.feature, 1) for output in self.outputs)
        self.floats_per_sample = max(1, 3 * ids * self.outputs[0].embedding_dim)

    def note(self, features: KeyedJaggedTensor, output: Mapping[str, JaggedTensor]) -> Lookup:
        """A call of the collection, its output replaced by views of a leaf that requires a
        gradient."""
        own = [output[feature.name] for feature in self.outputs]
        leaf = torch.cat([jagged.values().detach() for jagged in own]).requires_grad_()
        parts = leaf.split([len(jagged.values()) for jagged in own])
        seen = {
            feature.name: JaggedTensor(
                values=part, lengths=jagged.lengths(), weights=jagged.weights_or_none()
            )
            for feature, part, jagged in zip(self.outputs, parts, own, strict=True)
        }
        return Lookup(self, features, seen, leaf)

    def entries(
        self, lookup: Lookup, apart: Apart | None, gradient: Tensor
    ) -> Iterator[tuple[str, Entries]]:
        """Yields the reads of every feature, block by block. Local, no collective."""
        batch_size = lookup.features.stride()
        for table, samples, blocks, values, slopes in self._ids(lookup, gradient):
            yield (
                table,
                one_of_each(blocks * batch_size + samples, (values * slopes).double(), batch_size),
            )

    def reads(self, lookup: Lookup, gradient: Tensor) -> Iterator[tuple[str, Reads]]:
        """Yields which rows every feature reads, and what they are worth. Local, no collective."""
        for table, samples, blocks, _, slopes in self._ids(lookup, gradient):
            yield (
                table,
                Reads(samples, blocks, torch.ones_like(blocks, dtype=torch.float64), slopes),
            )

    def _ids(
        self, lookup: Lookup, gradient: Tensor
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
        """Of every feature: table; sample and block of each id that has one; embeddings, and the
        gradient in them."""
        bags, of_samples = (
            jagged_by_key(lookup.features),
            torch.arange(lookup.features.stride(), device=gradient.device),
        )
        of_features = [bags[output.feature] for output in self.outputs]
        sizes = [own.values().numel() for own in of_features]
        parts = zip(lookup.leaf.detach().split(sizes), gradient.split(sizes, dim=1), strict=True)
        for output, own, (values, slopes) in zip(self.outputs, of_features, parts, strict=True):
            samples, blocks = (
                of_samples.repeat_interleave(own.lengths()),
                self._routers[output.table](own.values()),
            )
            is_in_block = blocks < output.num_blocks
            here = samples[is_in_block], blocks[is_in_block]
            yield output.table, *here, values[is_in_block], slopes[:, is_in_block]
