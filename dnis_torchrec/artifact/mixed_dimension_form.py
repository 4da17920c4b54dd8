"""The forms ``"mixed_dimension"``, ``"mixed_dimension_fp16"``, ``_int8`` and ``_int4``: a table per block of rows.

Each is as wide as the block's retained dims. The first is float32 and trains; the others are to serve.

Shapes: N rows of a table, S blocks, R retained dims of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.forms import Form, Rows, Shard, register
from dnis_torchrec.blocks.row_routing import RowRouting
from dnis_torchrec.checks import check
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.block_collection import stored_blocks, stored_width
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection, block_tables
from dnis_torchrec.serving.quantized import QuantizedMixedDimensionEmbeddingBagCollection, quantized_block_rows
from dnis_torchrec.serving.quantized_rows import PRECISIONS

MIXED_DIMENSION = "mixed_dimension"


def chunks_of(table: TableScheme, rows: Rows, first: int, last: int) -> Iterator[Tensor]:
    """Rows ``first <= i < last``, some thousand at a time.

    Args:
        table: scheme of the table.
        rows: gives its dense rows.
        first: the first of them.
        last: the one after the last.
    """
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
    parts: dict[int, list[Tensor]] = {s: [] for s in widths}
    for shard in shards:
        shapes = stored_blocks(_of_rows(table, shard.first_row, shard.first_row + shard.num_rows))
        shard.check_names({f"b{s}" for s in shapes})
        for s, (num_rows, _) in shapes.items():
            part, shape = shard.tensors[f"b{s}"], (num_rows, widths[s])
            fits = part.dtype == dtype and tuple(part.shape) == shape
            requirement = f"block {s}: {str(dtype).removeprefix('torch.')} of shape {shape}"
            check(fits, shard.place, requirement, f"{part.dtype} {tuple(part.shape)}", "export again")
            parts[s].append(part)
    return {s: found[0] if len(found) == 1 else torch.cat(found) for s, found in parts.items()}


def _encode(table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
    blocks = block_tables(_of_rows(table, first, last), chunks_of(table, rows, first, last))
    return {f"b{s}": weight for s, weight in blocks.items()}


def _build(
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


def _predicted_bytes(table: TableScheme) -> int:
    return 4 * table.block_area


def row_bytes(table: TableScheme, precision: str) -> dict[int, int]:
    """Bytes of a row of every stored block.

    Args:
        table: scheme of the table.
        precision: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``.
    """
    stored = PRECISIONS[precision]
    return {s: stored.row_bytes(stored_width(dim, stored.dim_multiple)) for s, (_, dim) in stored_blocks(table).items()}


def _quantized_form(precision: str) -> Form:
    def encode(table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
        blocks = block_tables(_of_rows(table, first, last), chunks_of(table, rows, first, last))
        return {f"b{s}": stored for s, stored in quantized_block_rows(table, blocks, precision).items()}

    def build(
        scheme: MixedDimensionScheme,
        shards: Mapping[str, Sequence[Shard]],
        *,
        device: torch.device | str,
        unknown_ids: str,
    ) -> EmbeddingBagCollectionInterface:
        rows = {
            f"{name}/b{s}": stored
            for name, table in scheme.tables.items()
            for s, stored in _blocks_of_shards(table, shards[name], row_bytes(table, precision), torch.uint8).items()
        }
        return QuantizedMixedDimensionEmbeddingBagCollection(
            scheme, rows, precision=precision, device=device, unknown_ids=unknown_ids
        )

    def predicted_bytes(table: TableScheme) -> int:
        shapes = stored_blocks(table)
        return sum(shapes[s][0] * of_row for s, of_row in row_bytes(table, precision).items())

    return Form(name=f"{MIXED_DIMENSION}_{precision}", encode=encode, build=build, predicted_bytes=predicted_bytes)


register(Form(name=MIXED_DIMENSION, encode=_encode, build=_build, predicted_bytes=_predicted_bytes))
for _precision in ("fp16", "int8", "int4"):
    register(_quantized_form(_precision))
