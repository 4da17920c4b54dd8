"""Tables of fewer rows, which several ids share: by hashing alone, or told apart by a second table
of quotients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import check_pooled, collections, table_configs_of
from dnis_torchrec.selection.swap import replace_

QUOTIENT = "_quotient"
"""What the name of a table's quotients has behind the table's own, which its remainders keep."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The rows that take the place of a table's N."""

    num_embeddings: int
    remainders: int
    has_quotients: bool

    @property
    def quotients(self) -> int:
        """Rows of the table of quotients; 0 where there is none."""
        is_needed = self.has_quotients and self.remainders < self.num_embeddings
        return -(-self.num_embeddings // self.remainders) if is_needed else 0

    @property
    def rows(self) -> int:
        """Rows of both."""
        return self.remainders + self.quotients


def partition_(model: nn.Module, partitions: Mapping[str, Partition]) -> None:
    """Puts a `PartitionedEmbeddingBagCollection` in place of every EmbeddingBagCollection of a
    model."""
    check_pooled(model, "partitioned tables")
    for collection in collections(model).values():
        wrapper = PartitionedEmbeddingBagCollection(cast(EmbeddingBagCollection, collection), partitions)
        replace_(model, collection, wrapper)


def is_partitioned(model: nn.Module) -> bool:
    """Returns whether ids of a model share rows."""
    return any(isinstance(module, PartitionedEmbeddingBagCollection) for module in model.modules())


def partition_as_exported_(model: nn.Module, scheme: MixedDimensionScheme) -> None:
    """Puts the wrappers into a model that a partitioned model of this scheme had when it was
    exported."""
    partitions = {}
    for collection in collections(model).values():
        for table in table_configs_of(collection):
            check(table.name in scheme.tables, f"table {table.name!r}", "a scheme of its own", "none")
            partitions[table.name] = Partition(
                num_embeddings=table.num_embeddings,
                remainders=scheme.tables[table.name].num_embeddings,
                has_quotients=f"{table.name}{QUOTIENT}" in scheme.tables,
            )
    partition_(model, partitions)


class ShareRows(nn.Module):
    """Rewrites ids as rows of short tables: a key per table of remainders and of quotients that a
    feature reads."""

    def __init__(self, reads: Mapping[str, tuple[str, int, bool]]) -> None:
        super().__init__()
        self._reads = dict(reads)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Rewrites a batch."""
        bags = jagged_by_key(features)
        of_keys = [bags[feature] for feature, _, _ in self._reads.values()]
        parts = [
            own.values() // rows if is_quotient else own.values() % rows
            for own, (_, rows, is_quotient) in zip(of_keys, self._reads.values(), strict=True)
        ]
        has_weights = features.weights_or_none() is not None
        return KeyedJaggedTensor(
            keys=list(self._reads),
            values=torch.cat(parts),
            lengths=torch.cat([own.lengths() for own in of_keys]),
            weights=torch.cat([own.weights() for own in of_keys]) if has_weights else None,
            stride=features.stride(),
        )


class PartitionedEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Looks bags up in tables of fewer rows than there are ids."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, partitions: Mapping[str, Partition]) -> None:
        super().__init__()
        self._tables = list(embedding_bag_collection.embedding_bag_configs())
        self._is_weighted = embedding_bag_collection.is_weighted()
        outputs = [(table, feature) for table in self._tables for feature in table.feature_names]
        reads = {}
        for table, feature in outputs:
            partition, key = partitions[table.name], f"{feature}@{table.name}"
            reads[key] = (feature, partition.remainders, False)
            if partition.quotients:
                reads[f"{key}{QUOTIENT}"] = (feature, partition.remainders, True)
        self.share_rows = ShareRows(reads)
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=list(_short_tables(self._tables, partitions)),
            is_weighted=self._is_weighted,
            device=embedding_bag_collection.device,
        )
        self._begin_as_(embedding_bag_collection, partitions)
        names = embedding_bag_collection._embedding_names
        self.multiply_pooled = MultiplyPooled(
            {
                name: [f"{feature}@{table.name}", *([f"{feature}@{table.name}{QUOTIENT}"] if quotients else [])]
                for name, (table, feature) in zip(names, outputs, strict=True)
                for quotients in [partitions[table.name].quotients]
            }
        )

    @torch.no_grad()
    def _begin_as_(self, whole: EmbeddingBagCollection, partitions: Mapping[str, Partition]) -> None:
        bags = self.embedding_bag_collection.embedding_bags
        for name, bag in whole.embedding_bags.items():
            bags[name].weight.copy_(bag.weight[: partitions[name].remainders])
            if partitions[name].quotients:
                bags[f"{name}{QUOTIENT}"].weight.fill_(1.0)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        return self.multiply_pooled(self.embedding_bag_collection(self.share_rows(features)))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the collection that this one takes the place of."""
        return self._tables

    def is_weighted(self) -> bool:
        """Returns whether bags carry per-sample weights."""
        return self._is_weighted


class MultiplyPooled(nn.Module):
    """Multiplies pooled remainders by pooled quotients: a module of its own, so that TorchRec's
    tracer takes it whole."""

    def __init__(self, factors: Mapping[str, list[str]]) -> None:
        super().__init__()
        self._factors = dict(factors)

    def forward(self, pooled: KeyedTensor) -> KeyedTensor:
        """Multiplies."""
        by_key = pooled.to_dict()
        products = [
            by_key[keys[0]] if len(keys) == 1 else by_key[keys[0]] * by_key[keys[1]] for keys in self._factors.values()
        ]
        return KeyedTensor(
            keys=list(self._factors),
            length_per_key=[product.shape[1] for product in products],
            values=torch.cat(products, dim=1),
        )


def _short_tables(
    tables: Iterable[EmbeddingBagConfig], partitions: Mapping[str, Partition]
) -> Iterable[EmbeddingBagConfig]:
    for table in tables:
        partition = partitions[table.name]
        for suffix, rows in (("", partition.remainders), (QUOTIENT, partition.quotients)):
            if rows:
                yield EmbeddingBagConfig(
                    name=f"{table.name}{suffix}",
                    num_embeddings=rows,
                    embedding_dim=table.embedding_dim,
                    feature_names=[f"{feature}@{table.name}{suffix}" for feature in table.feature_names],
                    pooling=table.pooling,
                    data_type=table.data_type,
                )
