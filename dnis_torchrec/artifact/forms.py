"""How the rows of the two forms are written, and how a serving module is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.blocks.codes import decode_rows, encode_rows, row_strides, unpacked_fields
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME, RowRouting
from dnis_torchrec.checks import check
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection, block_tables
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.packed_table import PackedTable, pack_rows, split_blocks

Rows = Callable[[int, int], Tensor]
"""Dense rows of a table: ``rows(first, last)`` gives rows ``first <= i < last`` as ``(last - first,
D)``."""


def rows_of(weight: Tensor) -> Rows:
    """The rows of a dense table, as forms read them."""
    return lambda first, last: weight[first:last]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some consecutive rows of a table in one form, complete in themselves."""

    place: str
    first_row: int
    num_rows: int
    tensors: Mapping[str, Tensor]

    def check_names(self, expected: set[str]) -> None:
        """Checks that the shard holds just the tensors that its form has."""
        requirement = f"tensors {sorted(expected)}"
        check(
            set(self.tensors) == expected,
            self.place,
            requirement,
            sorted(self.tensors),
            "export again",
        )


def values_of_codes(table: TableScheme, rows: Rows) -> Rows:
    """The values that the codes of a table's rows stand for: in every form, a table of codes has
    these values."""
    if not table.has_codes:
        return rows

    def values(first: int, last: int) -> Tensor:
        blocks, chunk = (
            table.routing.block_of(torch.arange(first, last)),
            rows(first, last).detach().cpu().float(),
        )
        encoded = encode_rows(chunk, blocks, table.codes, place=f"table {table.name!r}")
        return decode_rows(encoded, blocks, table.codes)

    return values


def encode_shard(
    form: str, table: TableScheme, rows: Rows, first: int, last: int
) -> dict[str, Tensor]:
    """Writes rows ``first <= i < last`` of a table as the tensors of one shard."""
    if form == PACKED:
        table, counts = table.with_float_codes(), row_counts_of(table, first, last)
        chunks = chunks_of(table, rows, first, last)
        return {"rows": pack_rows(table, chunks, counts, first=first)}
    chunks = chunks_of(table, values_of_codes(table, rows), first, last)
    blocks = block_tables(_of_rows(table, first, last), chunks)
    return {f"b{s}": weight for s, weight in blocks.items()}


def whole_shard(form: str, table: TableScheme, rows: Rows) -> Shard:
    """A table in a form, in memory, as one shard."""
    tensors = encode_shard(form, table, rows, 0, table.num_embeddings)
    place = f"table {table.name!r}, form {form!r}"
    return Shard(place=place, first_row=0, num_rows=table.num_embeddings, tensors=tensors)


def build(
    form: str,
    scheme: MixedDimensionScheme,
    shards: Mapping[str, Sequence[Shard]],
    *,
    device: torch.device | str,
    unknown_ids: str,
) -> EmbeddingBagCollectionInterface:
    """Makes a serving module of one collection from its tables' shards, in order of rows."""
    if form == PACKED:
        scheme = scheme.with_float_codes()
        tables = {name: packed_table(table, shards[name]) for name, table in scheme.tables.items()}
        return PackedEmbeddingBagCollection(scheme, tables, unknown_ids=unknown_ids).to(device)
    module = MixedDimensionEmbeddingBagCollection(scheme, device="meta", unknown_ids=unknown_ids)
    for name, table in scheme.tables.items():
        for s, weight in blocks_of_shards(table, shards[name]).items():
            module.load_block(name, s, weight.to(device))
    return module.to(device)


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


def blocks_of_shards(table: TableScheme, shards: Sequence[Shard]) -> dict[int, Tensor]:
    """Every stored block's table: as it lies in its file, or the parts of several put together."""
    chunks: dict[int, list[Tensor]] = {s: [] for s in table.stored_blocks()}
    for shard in shards:
        last = shard.first_row + shard.num_rows
        shapes = _of_rows(table, shard.first_row, last).stored_blocks()
        shard.check_names({f"b{s}" for s in shapes})
        for s, shape in shapes.items():
            chunk = shard.tensors[f"b{s}"]
            fits = chunk.dtype == torch.float32 and tuple(chunk.shape) == shape
            requirement = f"block {s}: float32 of shape {shape}"
            check(
                fits,
                shard.place,
                requirement,
                f"{chunk.dtype} {tuple(chunk.shape)}",
                "export again",
            )
            chunks[s].append(chunk)
    return {s: parts[0] if len(parts) == 1 else torch.cat(parts) for s, parts in chunks.items()}


def rows_of_blocks(table: TableScheme, shards: Sequence[Shard]) -> Rows:
    """The values of a table of the mixed-dimension form."""
    blocks, positions = blocks_of_shards(table, shards), table.routing.positions()
    starts = table.routing.row_counts().cumsum(0) - table.routing.row_counts()

    def rows(first: int, last: int) -> Tensor:
        of_rows = table.routing.block_of(torch.arange(first, last))
        ids = torch.arange(first, last) if positions is None else positions[first:last].long()
        values = torch.zeros(last - first, table.embedding_dim)
        for s in of_rows.unique().tolist():
            if s in blocks:
                here = (of_rows == s).nonzero()
                values[here, table.columns(s)] = blocks[s][ids[here.squeeze(1)] - starts[s]]
        return values

    return rows


def packed_table(table: TableScheme, shards: Sequence[Shard]) -> PackedTable:
    """The rows of a table as they are looked up: as they lie in their file, or those of several put
    together."""
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
