"""PackedEmbeddingBagCollection: a drop-in for an EmbeddingBagCollection over tables of bit fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import row_strides
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.packed import field_groups
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.buffer_collection import BufferCollection
from dnis_torchrec.serving.held_buffers import HeldBuffers
from dnis_torchrec.serving.packed_table import PackedTable


class _Layout(NamedTuple):
    """The operator's description of features, tables, blocks and groups of columns; see
    `packed_operator`."""

    features: Tensor
    tables: Tensor
    blocks: Tensor
    groups: Tensor


class PackedEmbeddingBagCollection(BufferCollection):
    """Looks bags up in tables of bit fields; same keys and dims as the uncompressed collection."""

    def __init__(
        self,
        scheme: MixedDimensionScheme,
        tables: Mapping[str, PackedTable],
        *,
        unknown_ids: str = "error",
    ) -> None:
        super().__init__(scheme, unknown_ids=unknown_ids)
        buffers: dict[str, Tensor] = {}
        for name, table in scheme.tables.items():
            check_known("table", name, tables)
            _check_table(table, tables[name])
            parts = {"rows": tables[name].rows, "directory": tables[name].directory.directory}
            buffers |= {
                f"{name}/{part}": tensor for part, tensor in parts.items() if tensor.numel()
            }
        self._table_bytes = sum(tables[name].num_bytes for name in scheme.tables)
        # never none: AOTInductor hands an empty list of tensors over as None, which no operator
        # takes
        self.tables = HeldBuffers(buffers or {"none": torch.zeros(1, dtype=torch.uint8)})
        self.outputs = HeldBuffers(
            self._output_layout(tables, list(buffers))._asdict(), persistent=False
        )

    def _output_layout(self, packed: Mapping[str, PackedTable], buffers: list[str]) -> _Layout:
        place_of = {name: place for place, name in enumerate(buffers)}
        table_rows: list[list[int]] = []
        block_rows: list[list[int]] = []
        groups: list[Tensor] = []
        position_of: dict[str, int] = {}
        num_groups = 0
        for table in self._logical.tables:
            if table.name in position_of:
                continue
            position_of[table.name] = len(table_rows)
            of_table = packed[table.name]
            of_blocks = field_groups(of_table.bits, *of_table.scale_and_shift())
            rows = _block_rows(of_table, num_groups, len(of_blocks) // table.routing.num_blocks)
            places = [place_of.get(f"{table.name}/{part}", -1) for part in ("rows", "directory")]
            table_rows.append([table.num_embeddings, len(block_rows), len(rows), *places])
            block_rows += rows
            groups.append(of_blocks)
            num_groups += len(of_blocks)
        features = [
            [position_of[table.name], first, table.embedding_dim, int(table.pooling == "mean")]
            for table, first in zip(self._logical.tables, self._logical.first_columns, strict=True)
        ]
        return _Layout(
            features=torch.tensor(features),
            tables=torch.tensor(table_rows),
            blocks=torch.tensor(block_rows),
            groups=torch.cat(groups),
        )

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
        layout: Any = self._modules["outputs"]
        return torch.ops.dnis_torchrec.packed_embedding_bag.default(
            ids,
            offsets,
            weights,
            list(tables._buffers.values()),
            *layout._buffers.values(),
            keys,
            batch_size,
            self._width,
            self._zero_unknown,
        )

    def table_bytes(self) -> int:
        """Bytes of all tables: rows, scales, shifts, bits and directories."""
        return self._table_bytes


def _block_rows(table: PackedTable, first_group: int, groups_per_block: int) -> list[list[int]]:
    """Rows of the operator's table of blocks: those that a directory may name, and for boundaries
    that of no rows."""
    begins, counts = table.first_bytes().tolist(), table.row_counts.tolist()
    strides, num_blocks = row_strides(table.bits).tolist(), table.directory.num_blocks
    named = range(num_blocks + 1) if table.directory.is_sorted else table.directory.blocks
    return [
        [begins[s], counts[s], strides[s], first_group + s * groups_per_block]
        if s < num_blocks and strides[s] * counts[s]
        else [0, 0, 0, -1]
        for s in named
    ]


def _check_table(table: TableScheme, packed: PackedTable) -> None:
    place, shape = f"table {table.name!r}", (table.num_embeddings, *table.retained.shape)
    received = (packed.directory.num_embeddings, *packed.bits.shape)
    check(received == shape, place, f"rows, blocks and columns {shape}", received)
    check(packed.bits.equal(table.column_bits()), place, "the bits of the scheme", "others")
    counts = table.routing.row_counts()
    check(packed.row_counts.equal(counts), place, f"blocks of {counts.tolist()} rows", "others")
