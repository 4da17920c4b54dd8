"""BlockCollection: bags of logical tables, looked up in a table per block of rows, whatever module
holds these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.forms import block_index_bytes, rounded_up, stored_blocks
from dnis_torchrec.ops.csr_operator import load_operator
from dnis_torchrec.ops.mixed_dimension_operator import LANES
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.bag_routing import BagRouter
from dnis_torchrec.serving.logical_tables import LogicalTables, OperatorCollection


class BlockCollection(OperatorCollection):
    """Bags of logical tables, looked up in a stock table per block; see the module that derives
    from it."""

    def __init__(
        self, scheme: MixedDimensionScheme, *, dim_multiple: int, unknown_ids: str
    ) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        self._scheme = scheme
        shapes = {name: stored_blocks(table) for name, table in scheme.tables.items()}
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
        self._layout = BlockLayout.of(self._logical, self._stored, self.router.positions)
        self._compiled = load_operator()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        if self._is_compiled_on(features.values()):
            return self._logical.keyed(self._of_batch(features))
        split = self.router(features)
        pooled = None
        if self.blocks is not None and not self._is_stock_without_samples(features):
            pooled = self.blocks(split)
        return self.merge(pooled, features)

    def _is_stock_without_samples(self, features: KeyedJaggedTensor) -> bool:
        """TorchRec's unsharded collection takes no batch of 0 samples; in a sharded one other ranks
        may wait."""
        return type(self.blocks) is EmbeddingBagCollection and features.stride() == 0

    def _stock_tables(self) -> list[Tensor] | None:
        """The stored tables in the order of `_stored`; None where no stock module on the CPU holds
        them."""
        raise NotImplementedError

    def _wants_gradient(self) -> bool:
        raise NotImplementedError

    def _is_compiled_on(self, ids: Tensor) -> bool:
        if not self._compiled or self._wants_gradient() or self._stock_tables() is None:
            return False
        return ids.device.type == "cpu"

    def lookup(
        self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Looks bags up from plain tensors, as nn.EmbeddingBag takes them: for callers that have no
        KeyedJaggedTensor."""
        batch_size = self._logical.batch_size_of(offsets, per_sample_weights)
        if self._is_compiled_on(ids):
            return self._pooled(
                ids, offsets, per_sample_weights, None, batch_size, self._logical.features
            )
        keys = self._logical.features
        bags = KeyedJaggedTensor(keys, ids, per_sample_weights, offsets=offsets, stride=batch_size)
        return self(bags).values()

    def _by_operator(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
    ) -> Tensor:
        return self._layout.lookup(
            ids,
            offsets,
            weights,
            self._stock_tables() or [],
            keys,
            batch_size=batch_size,
            zero_unknown=self._zero_unknown,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the operator there in a process that received the module from another."""
        super().__setstate__(state)
        self._compiled = load_operator()

    def _check_block(self, table: str, block: int) -> tuple[str, tuple[int, int]]:
        """Place of a stored block in errors, and its shape ``(rows, R)``."""
        check_known("table", table, self._scheme.tables)
        place, shapes = f"table {table!r}, block {block}", stored_blocks(self._scheme.tables[table])
        check(block in shapes, place, "a block with rows and retained dims", "one without")
        return place, shapes[block]

    def physical_embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables that exist: ``"<table>/b<s>"`` with a block's rows and its columns."""
        return self._physical

    def table_bytes(self) -> int:
        """Bytes of all tables on whatever device, of a rank's own shards, and of what tells where
        values are."""
        tables = self._stock_tables()
        if tables is None:
            tables = [] if self.blocks is None else list(self.blocks.parameters())
        index = sum(block_index_bytes(table) for table in self._scheme.tables.values())
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


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockLayout:
    """Layout that the operator reads: tensors on the CPU, small beside the tables."""

    features: Tensor
    tables: Tensor
    blocks: Tensor
    masks: Tensor
    positions: list[Tensor]
    width: int

    @staticmethod
    def of(
        logical: LogicalTables, stored: Sequence[tuple[str, int]], maps: Sequence[Tensor | None]
    ) -> BlockLayout:
        """Lays a collection out."""
        index_of, position_of = (
            {block: index for index, block in enumerate(stored)},
            dict[str, int](),
        )
        positions: list[Tensor] = []
        table_rows: list[list[int]] = []
        blocks: list[list[int]] = []
        masks: list[Tensor] = []
        for table, positions_of_table in zip(logical.tables, maps, strict=True):
            if table.name in position_of:
                continue
            position_of[table.name] = len(table_rows)
            at, num_blocks, dims = -1, table.routing.num_blocks, table.dims.tolist()
            if positions_of_table is not None:
                at = len(positions)
                positions.append(positions_of_table)
            table_rows.append([table.num_embeddings, len(blocks), num_blocks, at])
            of_table = _masks(table.retained)
            for s, end in enumerate(table.routing.row_counts().cumsum(0).tolist()):
                first = sum(map(len, masks))
                blocks.append(
                    [end, index_of.get((table.name, s), -1), dims[s], first, len(of_table[s])]
                )
                masks.append(of_table[s])
        features = [
            [position_of[table.name], first, table.embedding_dim, int(table.pooling == "mean")]
            for table, first in zip(logical.tables, logical.first_columns, strict=True)
        ]
        return BlockLayout(
            features=torch.tensor(features),
            tables=torch.tensor(table_rows),
            blocks=torch.tensor(blocks),
            masks=torch.cat(masks),
            # never none: AOTInductor hands an empty list of tensors over as None, which no operator
            # takes
            positions=positions or [torch.zeros(1, dtype=torch.int32)],
            width=sum(logical.dims),
        )

    def lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        tables: list[Tensor],
        keys: list[int] | None,
        *,
        batch_size: int,
        zero_unknown: bool,
    ) -> Tensor:
        """Pools the bags of all features with the compiled operator."""
        return torch.ops.dnis_torchrec.mixed_dimension_bag.default(
            ids.contiguous(),
            offsets.contiguous(),
            None if weights is None else weights.contiguous(),
            tables,
            self.positions,
            self.features,
            self.tables,
            self.blocks,
            self.masks,
            keys,
            batch_size,
            self.width,
            zero_unknown,
        )


def _masks(retained: Tensor) -> Tensor:
    """Bits of the retained columns of every block: ``(S, D / 16 rounded up)`` int16."""
    num_blocks, dim = retained.shape
    num_masks = -(-dim // LANES)
    padded = torch.zeros(num_blocks, num_masks * LANES, dtype=torch.int32)
    padded[:, :dim] = retained
    bits = (
        padded.view(num_blocks, num_masks, LANES) << torch.arange(LANES, dtype=torch.int32)
    ).sum(2)
    return bits.to(torch.int32).to(
        torch.int16
    )  # from 2^15 on it wraps around: the operator reads bits
