"""The form ``"packed"``: every column of every block in bits of its own, for schemes that have
codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dnis_torchrec.artifact.forms import Codec, Rows, Shard, register_codec
from dnis_torchrec.artifact.mixed_dimension_form import chunks_of
from dnis_torchrec.blocks.codes import decode_rows, row_strides, unpacked_fields
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME
from dnis_torchrec.checks import check
from dnis_torchrec.forms import PACKED, Form
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.packed_table import PackedTable, pack_rows, split_blocks


def packed_table(table: TableScheme, shards: Sequence[Shard]) -> PackedTable:
    """The rows of a table as they are looked up: as they lie in their file, or those of several put
    together."""
    requirement = "a scheme with bits, scales and shifts of its columns"
    check(table.has_codes, shards[0].place, requirement, "none", "export again")
    codes, of_shards = table.codes, [_blocks_of_shard(table, shard) for shard in shards]
    if len(shards) == 1:
        rows = shards[0].tensors["rows"]
    else:
        rows = torch.cat(
            [part.flatten() for of_block in zip(*of_shards, strict=True) for part in of_block]
        )
    return PackedTable.from_rows(table, rows, codes.scale, codes.shift)


def decoded_rows(table: TableScheme, packed: PackedTable) -> Rows:
    """The values of a packed table, without its lookups: what other forms are made of, and compared
    with."""
    blocks = split_blocks(packed.rows, packed.row_counts, packed.bits)

    def rows(first: int, last: int) -> Tensor:
        block, position = packed.directory.locate(torch.arange(first, last))
        encoded = torch.zeros(last - first, table.embedding_dim, dtype=torch.int32)
        for s in block.unique().tolist():
            if s < len(blocks) and blocks[s].numel():
                here = block == s
                encoded[here] = unpacked_fields(blocks[s][position[here]], packed.bits[s])
        return decode_rows(encoded, block, table.codes)

    return rows


def row_counts_of(table: TableScheme, first: int, last: int) -> Tensor:
    """Counts the rows of every block among ``first <= i < last``."""
    routing = table.routing
    if (first, last) == (0, table.num_embeddings):
        return routing.row_counts()
    counts = torch.zeros(routing.num_blocks + 1, dtype=torch.int64)
    for begin in range(first, last, ROWS_AT_A_TIME):
        blocks = routing.block_of(torch.arange(begin, min(begin + ROWS_AT_A_TIME, last)))
        counts += torch.bincount(blocks, minlength=len(counts))
    return counts[:-1]


def _blocks_of_shard(table: TableScheme, shard: Shard) -> list[Tensor]:
    shard.check_names({"rows"})
    counts, rows = (
        row_counts_of(table, shard.first_row, shard.first_row + shard.num_rows),
        shard.tensors["rows"],
    )
    size = int(counts @ row_strides(table.codes.bits))
    fits = rows.dtype == torch.uint8 and tuple(rows.shape) == (size,)
    check(
        fits,
        shard.place,
        f"uint8 of shape {(size,)}",
        f"{rows.dtype} {tuple(rows.shape)}",
        "export again",
    )
    return split_blocks(rows, counts, table.codes.bits)


def _encode(form: Form, table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
    counts = row_counts_of(table, first, last)
    return {"rows": pack_rows(table, chunks_of(table, rows, first, last), counts, first=first)}


def _build(
    form: Form,
    scheme: MixedDimensionScheme,
    shards: Mapping[str, Sequence[Shard]],
    *,
    device: torch.device | str,
    unknown_ids: str,
) -> PackedEmbeddingBagCollection:
    tables = {name: packed_table(table, shards[name]) for name, table in scheme.tables.items()}
    return PackedEmbeddingBagCollection(scheme, tables, unknown_ids=unknown_ids).to(device)


register_codec(PACKED.layout, Codec(encode=_encode, build=_build))
