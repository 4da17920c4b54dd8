"""CsrEmbeddingBagCollection: a drop-in for an EmbeddingBagCollection over tables in compressed
sparse rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.interleaved_rows import RowLayout
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.buffer_collection import BufferCollection
from dnis_torchrec.serving.csr_table import CsrTable
from dnis_torchrec.serving.held_buffers import HeldBuffers


class _Placed(NamedTuple):
    """Place of a table's shards among all shards, and the layout of their interleaved rows."""

    first_shard: int
    num_shards: int
    row_layout: RowLayout


class CsrEmbeddingBagCollection(BufferCollection):
    """Looks bags up in tables of compressed sparse rows; same keys, dims and values as the pruned
    collection."""

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, CsrTable | Sequence[CsrTable]],
        *,
        unknown_ids: str = "error",
    ) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        buffers: dict[str, Tensor] = {}
        placed: dict[str, _Placed] = {}
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            given = tables[name]
            shards = [given] if isinstance(given, CsrTable) else list(given)
            dims = {shard.embedding_dim for shard in shards}
            received = (sum(shard.num_embeddings for shard in shards), *dims)
            shape = (table.num_embeddings, table.embedding_dim)
            check(received == shape, f"table {name!r}", f"rows of shape {shape}", received)
            layouts = {shard.row_layout for shard in shards}
            requirement = "shards with values and columns of one dtype"
            check(len(layouts) == 1, f"table {name!r}", requirement, f"{len(layouts)} kinds")
            placed[name] = _Placed(len(buffers) // 2, len(shards), *layouts)
            for index, shard in enumerate(shards):
                suffix = f"_{index}" if index else ""
                buffers |= {
                    f"{name}/{field}{suffix}": buffer
                    for field, buffer in shard.lookup_tensors().items()
                }
        self.tables = HeldBuffers(buffers)
        self.outputs = HeldBuffers({"layout": self._output_layout(placed)}, persistent=False)

    def _output_layout(self, placed: dict[str, _Placed]) -> Tensor:
        """Builds the operator's description of each feature, ``(F, 7)`` int64."""
        rows, first_column = [], 0
        for table in self._logical.tables:
            first_shard, num_shards, row_layout = placed[table.name]
            is_mean = int(table.pooling == "mean")
            rows.append(
                [first_shard, num_shards, first_column, table.embedding_dim, is_mean, *row_layout]
            )
            first_column += table.embedding_dim
        return torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def from_tables(
        cls,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, Tensor],
        *,
        value_dtype: torch.dtype = torch.float32,
        unknown_ids: str = "error",
    ) -> CsrEmbeddingBagCollection:
        """Builds the module from dense tables that were merged and pruned; only retained values are
        copied."""
        for name in scheme.tables:
            check_known("table", name, tables)
        sparse = {
            name: CsrTable.from_dense(tables[name]).quantized(value_dtype) for name in scheme.tables
        }
        return cls(scheme, sparse, unknown_ids=unknown_ids)

    def _read(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
    ) -> Tensor:
        # nn.Module takes longer to find a part by attribute than a lookup of one bag takes
        tables: Any = self._modules["tables"]
        outputs: Any = self._modules["outputs"]
        return torch.ops.dnis_torchrec.csr_embedding_bag.default(
            ids,
            offsets,
            weights,
            list(tables._buffers.values()),
            outputs._buffers["layout"],
            keys,
            batch_size,
            self._width,
            self._zero_unknown,
        )

    def table_bytes(self) -> int:
        """Bytes of all tables, index bytes counted."""
        return sum(buffer.nbytes for buffer in self.tables.buffers())
