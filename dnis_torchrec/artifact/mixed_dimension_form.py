"""The form ``"mixed_dimension_fp32"``: a table per block of rows, as wide as the block's retained
dims. It trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.forms import Codec, Rows, Shard, register_codec, rows_of
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import check
from dnis_torchrec.forms import PRECISIONS, Form, MixedDimension, stored_blocks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection, block_tables
from dnis_torchrec.serving.quantized_rows import values_of_rows


def chunks_of(table: TableScheme, rows: Rows, first: int, last: int) -> Iterator[Tensor]:
    """Rows ``first <= i < last``, some thousand at a time."""
    step = rows_per_chunk(table.embedding_dim)
    for begin in range(first, last, step):
        yield rows(begin, min(begin + step, last))


def _of_rows(table: TableScheme, first: int, last: int) -> TableScheme:
    """The scheme of some consecutive rows, as if they were a table."""
    if (first, last) == (0, table.num_embeddings):
        return table
    blocks = table.routing.block_of(torch.arange(first, last))
    routing = RowRouting.from_map(blocks, table.routing.num_blocks)
    fields = {**vars(table), "num_embeddings": last - first, "routing": routing, "num_retained": 0}
    return TableScheme(**fields)


def _blocks_of_shards(
    table: TableScheme, shards: Sequence[Shard], widths: Mapping[int, int], dtype: torch.dtype
) -> dict[int, Tensor]:
    """Every stored block's table: as it lies in its file, or the parts of several put together."""
    chunks: dict[int, list[Tensor]] = {s: [] for s in widths}
    for shard in shards:
        shapes = stored_blocks(_of_rows(table, shard.first_row, shard.first_row + shard.num_rows))
        shard.check_names({f"b{s}" for s in shapes})
        for s, (num_rows, _) in shapes.items():
            chunk, shape = shard.tensors[f"b{s}"], (num_rows, widths[s])
            fits = chunk.dtype == dtype and tuple(chunk.shape) == shape
            requirement = f"block {s}: {str(dtype).removeprefix('torch.')} of shape {shape}"
            check(
                fits,
                shard.place,
                requirement,
                f"{chunk.dtype} {tuple(chunk.shape)}",
                "export again",
            )
            chunks[s].append(chunk)
    return {s: found[0] if len(found) == 1 else torch.cat(found) for s, found in chunks.items()}


def _encode(form: Form, table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
    blocks = block_tables(_of_rows(table, first, last), chunks_of(table, rows, first, last))
    return {f"b{s}": stored for s, stored in blocks.items()}


def _build(
    form: Form,
    scheme: MixedDimensionScheme,
    shards: Mapping[str, Sequence[Shard]],
    *,
    device: torch.device | str,
    unknown_ids: str,
) -> EmbeddingBagCollectionInterface:
    module = MixedDimensionEmbeddingBagCollection(scheme, device="meta", unknown_ids=unknown_ids)
    for name, table in scheme.tables.items():
        widths = {s: dim for s, (_, dim) in stored_blocks(table).items()}
        for s, weight in _blocks_of_shards(table, shards[name], widths, torch.float32).items():
            module.load_block(name, s, weight.to(device))
    return module.to(device)


def retired_rows(form: str, table: TableScheme, shards: Sequence[Shard]) -> Rows:
    """The values of a table that an earlier version stored in FBGEMM's rows, block by block. Takes
    4 N D bytes."""
    stored = PRECISIONS[form.removeprefix(f"{MixedDimension.layout}_")]
    widths = {
        s: stored.row_bytes(stored.stored_width(dim))
        for s, (_, dim) in stored_blocks(table).items()
    }
    weight, block_of_row = (
        torch.zeros(table.num_embeddings, table.embedding_dim),
        table.routing.all_blocks(),
    )
    for s, rows in _blocks_of_shards(table, shards, widths, torch.uint8).items():
        columns = table.columns(s)
        weight[(block_of_row == s).nonzero(), columns] = values_of_rows(rows, stored)[
            :, : len(columns)
        ]
    return rows_of(weight)


register_codec(MixedDimension.layout, Codec(encode=_encode, build=_build))
