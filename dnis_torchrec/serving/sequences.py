"""ServedEmbeddingCollection: a drop-in for an EmbeddingCollection over pruned tables, whatever form
they have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
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
from dnis_torchrec.serving.tables import ServedCollection


def is_unpooled(scheme: MixedDimensionScheme) -> bool:
    """Whether a scheme is that of an EmbeddingCollection."""
    return any(table.pooling == "none" for table in scheme.tables.values())


def table_of_single_ids(table: TableScheme) -> MixedDimensionScheme:
    """The scheme of a pooled collection of one table, whose only feature has the table's name."""
    single = replace(table, pooling="sum", feature_names=(table.name,))
    return MixedDimensionScheme({table.name: single})


def bags_of_single_ids(key: str, ids: Tensor, num_empty: int = 0) -> KeyedJaggedTensor:
    """One key with a bag for every id, and at most one empty bag after them."""
    num_ids, lengths = ids.shape[0], torch.ones_like(ids)
    # without offsets, TorchRec would reach for FBGEMM
    offsets = torch.arange(num_ids + 1, dtype=ids.dtype, device=ids.device)
    if num_empty:
        lengths, offsets = torch.cat([lengths, offsets[:1]]), torch.cat([offsets, offsets[-1:]])
    return KeyedJaggedTensor(
        keys=[key], values=ids, lengths=lengths, offsets=offsets, stride=num_ids + num_empty
    )


class ServedEmbeddingCollection(ServedCollection, EmbeddingCollectionInterface):
    """Looks ids up in pruned tables; same keys and D as the uncompressed EmbeddingCollection."""

    _CONTENT: ClassVar[tuple[str, ...]] = ("_schemes", "_modules")

    def __init__(
        self, scheme: MixedDimensionScheme, tables: Mapping[str, EmbeddingBagCollectionInterface]
    ) -> None:
        super().__init__()
        for name, table in scheme.tables.items():
            place, kind = f"table {name!r}", table.pooling
            check(kind == "none", place, "one that is not pooled", kind)
            check_known("table", name, tables)
        self._schemes = list(scheme.tables.values())
        self._configs = [
            EmbeddingConfig(
                name=table.table_name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
            )
            for table in self._schemes
        ]
        self._names = get_embedding_names_by_table(self._configs)
        self._table_names = [table.name for table in self._schemes]
        self._features = [list(table.feature_names) for table in self._schemes]
        self._need_indices = any(table.need_indices for table in self._schemes)
        self.tables = nn.ModuleDict({name: cast(nn.Module, tables[name]) for name in scheme.tables})

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up; what is written here has to compile in TorchScript."""
        num_empty = 0
        if torch.jit.is_scripting():
            if features.lengths().numel():
                bags = features.to_dict()
            else:  # which TorchRec's script takes for a batch without keys
                no_bags = JaggedTensor(values=features.values(), lengths=features.lengths())
                bags = {key: no_bags for key in features.keys()}  # noqa: SIM118
        elif isinstance(features, Proxy):
            return cast(dict[str, JaggedTensor], self._traced(features))
        else:
            bags = self._checked(features)
            # TorchRec's graphs take no batch of 0 bags, and a feature may have no ids
            num_empty = int(torch.compiler.is_compiling())
        outputs: dict[str, JaggedTensor] = {}
        for index, module in enumerate(self.tables.values()):
            ids = [bags[feature].values() for feature in self._features[index]]
            single = ids[0] if len(ids) == 1 else torch.cat(ids)
            pooled_values: KeyedTensor = module(
                bags_of_single_ids(self._table_names[index], single, num_empty)
            )
            sizes = [part.shape[0] for part in ids]
            sizes.append(num_empty)
            rows = pooled_values.values().split(sizes)
            for number, feature in enumerate(self._features[index]):
                bag = bags[feature]
                outputs[self._names[index][number]] = JaggedTensor(
                    values=rows[number],
                    lengths=bag.lengths(),
                    weights=bag.values() if self._need_indices else None,
                )
        return outputs

    def _checked(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The bags of every key, after checks."""
        if features.values().device.type == "cpu":
            check_bags(features)
        bags = jagged_by_key(features)
        for names in self._features:
            for feature in names:
                check_known("feature", feature, bags)
        return bags

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
        tables: dict[str, Tensor] = {}
        for module in self.tables.values():
            tables |= cast(Any, module).bit_fields()
        return tables
