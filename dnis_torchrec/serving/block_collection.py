"""BlockCollection: bags of logical tables, looked up in a table per block of rows, whatever module
holds these."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.bag_routing import BagRouter
from dnis_torchrec.serving.logical_tables import LogicalCollection, LogicalTables


def rounded_up(dim: int, multiple: int) -> int:
    """The least multiple that is no less than a number of columns."""
    return -(-dim // multiple) * multiple


class BlockCollection(LogicalCollection):
    """Bags of logical tables, looked up in a stock table per block; see the module that derives
    from it."""

    def __init__(
        self, scheme: MixedDimensionScheme, *, dim_multiple: int, unknown_ids: str
    ) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        self._scheme = scheme
        shapes = {name: table.stored_blocks() for name, table in scheme.tables.items()}
        most = max(table.routing.num_blocks for table in scheme.tables.values())
        self._stored = [
            (name, s) for s in range(most) for name in scheme.tables if s in shapes[name]
        ]
        readers = [
            (index, s)
            for s in range(most)
            for index, table in enumerate(self._logical.tables)
            if s in shapes[table.name]
        ]
        self._physical = [
            EmbeddingBagConfig(
                name=f"{name}/b{s}",
                num_embeddings=shapes[name][s][0],
                embedding_dim=rounded_up(shapes[name][s][1], dim_multiple),
                feature_names=[
                    f"{self._logical.names[index]}/b{s}"
                    for index, table in enumerate(self._logical.tables)
                    if table.name == name
                ],
            )
            for name, s in self._stored
        ]
        self.router = BagRouter(self._logical, readers, unknown_ids=unknown_ids)
        self.merge = BlockMerge(self._logical, readers, dim_multiple=dim_multiple)
        self.blocks: nn.Module | None = None

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        split = self.router(features)
        pooled = None
        if self.blocks is not None and not self._is_stock_without_samples(features):
            pooled = self.blocks(split)
        return self.merge(pooled, features)

    def _is_stock_without_samples(self, features: KeyedJaggedTensor) -> bool:
        """TorchRec's unsharded collection takes no batch of 0 samples; in a sharded one other ranks
        may wait."""
        return type(self.blocks) is EmbeddingBagCollection and features.stride() == 0

    def lookup(
        self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Looks bags up from plain tensors, as nn.EmbeddingBag takes them: for callers that have no
        KeyedJaggedTensor."""
        batch_size = self._logical.batch_size_of(offsets, per_sample_weights)
        keys = self._logical.features
        bags = KeyedJaggedTensor(keys, ids, per_sample_weights, offsets=offsets, stride=batch_size)
        return self(bags).values()

    def _check_block(self, table: str, block: int) -> tuple[str, tuple[int, int]]:
        """Place of a stored block in errors, and its shape ``(rows, R)``."""
        check_known("table", table, self._scheme.tables)
        place, shapes = (
            f"table {table!r}, block {block}",
            self._scheme.tables[table].stored_blocks(),
        )
        check(block in shapes, place, "a block with rows and retained dims", "one without")
        return place, shapes[block]

    def physical_embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables that exist: ``"<table>/b<s>"`` with a block's rows and its columns."""
        return self._physical

    def table_bytes(self) -> int:
        """Bytes of all tables on whatever device, of a rank's own shards, and of what tells where
        values are."""
        tables = [] if self.blocks is None else list(self.blocks.parameters())
        index = sum(table.block_index_bytes() for table in self._scheme.tables.values())
        return sum(table.nbytes for table in tables) + index


class BlockMerge(nn.Module):
    """Adds what each block's table gave to its columns of the output; divides MEAN tables by L.
    Local, no parameter."""

    columns: Tensor
    kept: Tensor | None

    def __init__(
        self, logical: LogicalTables, stored: list[tuple[int, int]], *, dim_multiple: int
    ) -> None:
        super().__init__()
        self._logical, self._width = logical, sum(logical.dims)
        self._keys = [f"{logical.names[feature]}/b{s}" for feature, s in stored]
        first_columns, columns, kept, first = logical.first_columns, [], [], 0
        for feature, s in stored:
            of_block = logical.tables[feature].columns(s)
            columns.append(first_columns[feature] + of_block)
            kept.append(first + torch.arange(len(of_block)))
            first += rounded_up(len(of_block), dim_multiple)
        none = [torch.empty(0, dtype=torch.int64)]
        self.register_buffer("columns", torch.cat(columns or none), persistent=False)
        is_whole = first == self.columns.numel()
        self.register_buffer("kept", None if is_whole else torch.cat(kept), persistent=False)

    def forward(self, pooled: KeyedTensor | None, features: KeyedJaggedTensor) -> KeyedTensor:
        """Merges the blocks' parts."""
        merged = torch.zeros(features.stride(), self._width, device=features.values().device)
        if pooled is not None:
            values = self._in_order(pooled)
            if self.kept is not None:
                values = values.index_select(1, self.kept)
            merged = merged.index_add(1, self.columns, values)
        return self._logical.keyed(self._logical.divide_means_(merged, features))

    def _in_order(self, pooled: KeyedTensor) -> Tensor:
        """Values in the order of the keys; a sharded collection may group its keys by sharding
        type."""
        if pooled.keys() == self._keys:
            return pooled.values()
        by_key = pooled.to_dict()
        return torch.cat([by_key[key] for key in self._keys], dim=1)
