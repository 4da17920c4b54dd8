"""SoftSelectionEmbeddingCollection: an EmbeddingCollection whose embeddings are multiplied by
alpha, block by block."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.row_routing import RowRouter
from dnis_torchrec.checks import describe
from dnis_torchrec.ops.block_operators import can_select, select_pieces
from dnis_torchrec.ops.jagged import jagged_by_key
from dnis_torchrec.selection.alpha import Alpha, select_per_sample
from dnis_torchrec.selection.bag_check import BagCheck
from dnis_torchrec.selection.pooled_pieces import PooledFeature
from dnis_torchrec.selection.select_pooled import WatchedOutputs
from dnis_torchrec.selection.sequence_tables import as_bags
from dnis_torchrec.selection.wrapper import SoftSelectionModule, check_blocks, pooled_features


class SoftSelectionEmbeddingCollection(SoftSelectionModule, EmbeddingCollectionInterface):
    """Wraps an EmbeddingCollection and applies soft selection (paper, eq. 3) to its output."""

    child_name = "embedding_collection"

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(embedding_collection, EmbeddingCollection):
            received = type(embedding_collection).__name__
            raise TypeError(describe("SoftSelection", "an EmbeddingCollection", received))
        self.blocks = blocks
        self._tables = list(embedding_collection.embedding_configs())
        self._need_indices = embedding_collection.need_indices()
        tables = [as_bags(table) for table in self._tables]
        check_blocks(tables, blocks)
        self._outputs = pooled_features(tables, blocks, ())
        self.bag_check = BagCheck(
            tuple(replace(output, is_multi_hot=True) for output in self._outputs)
        )
        self.bag_splitter = None
        self.embedding_collection = embedding_collection
        self.soft_selection = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection = SelectSequences(self._outputs, blocks, self.alpha)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and multiplies their embeddings by alpha."""
        self.bag_check(features)
        embeddings = self.embedding_collection(features)
        return self.selection(embeddings, features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def need_indices(self) -> bool:
        """Returns whether ids are passed on as the weights of the outputs."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Returns D, which all tables of an EmbeddingCollection share."""
        return self._tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output keys of each table."""
        return [
            [output.name for output in self._outputs if output.table == table.name]
            for table in self._tables
        ]

    @property
    def embeddings(self) -> nn.ModuleDict:
        """Table -> the module whose `weight` it is, as the plain collection has them."""
        return cast(nn.ModuleDict, self.embedding_collection.embeddings)

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        return self.embedding_collection

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """The feature and table behind each output key, in order."""
        return self._outputs


class SelectSequences(WatchedOutputs):
    """The part of the wrapper behind the lookup: local, no collective, no parameter."""

    _across = 1

    def __init__(self, outputs: tuple[PooledFeature, ...], blocks: RowBlocks, alpha: Alpha) -> None:
        super().__init__(outputs)
        self._alpha = [alpha]  # in a list: the wrapper registers it, once
        tables = list(dict.fromkeys(output.table for output in outputs))
        self._router_of = {table: index for index, table in enumerate(tables)}
        self._routers = nn.ModuleList(RowRouter(blocks.routings[table]) for table in tables)
        self._sizes: list[int] = []

    def forward(
        self, embeddings: dict[str, JaggedTensor], features: KeyedJaggedTensor
    ) -> dict[str, JaggedTensor]:
        """Multiplies embeddings by alpha, those of all output keys at once."""
        own, bags, alpha = (
            [embeddings[key] for key in self._keys],
            jagged_by_key(features),
            self._alpha[0],
        )
        ids = [bags[output.feature].values() for output in self._outputs]
        rows = torch.cat([self._alpha_rows(*pair) for pair in zip(self._outputs, ids, strict=True)])
        values = (
            own[0].values() if len(own) == 1 else torch.cat([jagged.values() for jagged in own])
        )
        self._sizes = [len(of_output) for of_output in ids]
        if alpha.is_upper:
            alpha.record_hits(self._dims[0], rows)
            values = (
                values.detach()
            )  # the tables behind the lookup would learn from validation data
        selected = self._select(values, rows).split(self._sizes)
        return {
            key: JaggedTensor(
                values=part, lengths=jagged.lengths(), weights=jagged.weights_or_none()
            )
            for key, part, jagged in zip(self._keys, selected, own, strict=True)
        }

    def _select(self, values: Tensor, rows: Tensor) -> Tensor:
        dim, alpha = self._dims[0], self._alpha[0].of(self._dims[0])
        if can_select(values):
            layout, own = (
                torch.tensor([[0, 0, dim, 0, 0, 0, len(alpha)]]),
                rows.to(torch.int32).unsqueeze(1),
            )
            flat = alpha.to(torch.promote_types(values.dtype, torch.float32)).flatten()
            return select_pieces(values, flat, own, None, layout, dim, watch=self._check_gradient)
        selected = select_per_sample(values.unsqueeze(1), alpha, rows.unsqueeze(1)).squeeze(1)
        if selected.requires_grad and not self._alpha[0].is_upper:
            self._watch(selected)
        return selected

    def _alpha_rows(self, output: PooledFeature, ids: Tensor) -> Tensor:
        """Row of alpha of each id."""
        router = cast(RowRouter, self._routers[self._router_of[output.table]])
        return router(ids) + output.first_alpha_row

    def _sizes_of_parts(self) -> list[int]:
        return self._sizes
