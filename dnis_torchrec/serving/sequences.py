"""ServedEmbeddingCollection: a drop-in for an EmbeddingCollection over pruned tables, whatever form
they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.batches import check_bags, jagged_by_key
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme


def is_unpooled(scheme: MixedDimensionScheme) -> bool:
    """Whether a scheme is that of an EmbeddingCollection."""
    return any(table.pooling == "none" for table in scheme.tables.values())


def table_of_single_ids(table: TableScheme) -> MixedDimensionScheme:
    """The scheme of a pooled collection of one table, whose only feature has the table's name."""
    return MixedDimensionScheme(
        {table.name: replace(table, pooling="sum", feature_names=(table.name,))}
    )


class ServedEmbeddingCollection(EmbeddingCollectionInterface):
    """Looks ids up in pruned tables; same keys and D as the uncompressed EmbeddingCollection."""

    def __init__(
        self, scheme: MixedDimensionScheme, tables: Mapping[str, EmbeddingBagCollectionInterface]
    ) -> None:
        super().__init__()
        for name, table in scheme.tables.items():
            check(
                table.pooling == "none", f"table {name!r}", "one that is not pooled", table.pooling
            )
            check_known("table", name, tables)
        self._schemes = list(scheme.tables.values())
        self._configs = [
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
            )
            for table in self._schemes
        ]
        self._names = get_embedding_names_by_table(self._configs)
        self._need_indices = any(table.need_indices for table in self._schemes)
        self.tables = nn.ModuleDict({name: cast(nn.Module, tables[name]) for name in scheme.tables})

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up."""
        if features.values().device.type == "cpu":
            check_bags(features)
        bags, outputs = jagged_by_key(features), {}
        for table, names in zip(self._schemes, self._names, strict=True):
            for feature in table.feature_names:
                check_known("feature", feature, bags)
            bags_of_table = [bags[feature] for feature in table.feature_names]
            ids = [jagged.values() for jagged in bags_of_table]
            rows = self._rows(table, ids[0] if len(ids) == 1 else torch.cat(ids))
            for name, jagged, values in zip(
                names, bags_of_table, rows.split([part.shape[0] for part in ids]), strict=True
            ):
                weights = jagged.values() if self._need_indices else None
                outputs[name] = JaggedTensor(
                    values=values, lengths=jagged.lengths(), weights=weights
                )
        return outputs

    def _rows(self, table: TableScheme, ids: Tensor) -> Tensor:
        """The rows of some ids, ``(I, D)``: bags of one id each."""
        num_ids = ids.shape[0]
        if (
            not torch.compiler.is_compiling() and not num_ids
        ):  # TorchRec's own modules take no batch of 0 samples
            return torch.zeros(0, table.embedding_dim, device=ids.device)
        offsets = torch.arange(
            num_ids + 1, dtype=ids.dtype, device=ids.device
        )  # else TorchRec reaches for FBGEMM
        lengths = torch.ones_like(ids)
        bags = KeyedJaggedTensor(
            keys=[table.name], values=ids, lengths=lengths, offsets=offsets, stride=num_ids
        )
        pooled: KeyedTensor = self.tables[table.name](bags)
        return pooled.values()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the tables as they were before pruning."""
        return self._configs

    def embedding_dim(self) -> int:
        """Returns D, which all tables of an EmbeddingCollection share."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output keys of each table."""
        return self._names

    def need_indices(self) -> bool:
        """Returns whether ids are passed on as the weights of the outputs."""
        return self._need_indices

    def pass_indices_(self, need_indices: bool) -> None:
        """Says whether ids are passed on as the weights of the outputs."""
        self._need_indices = need_indices

    def schemes(self) -> dict[str, TableScheme]:
        """The scheme of every table, by name."""
        return {table.name: table for table in self._schemes}

    def bit_fields(self) -> dict[str, Tensor]:
        """The rows of every packed table as they lie in memory, ``(bytes,)`` uint8."""
        modules = self.tables.values()
        return {
            name: rows
            for module in modules
            for name, rows in cast(Any, module).bit_fields().items()
        }
