"""The rows of a table in either form: as the tensors of a shard, and as they are read from it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.blocks.codes import decode_rows, encode_rows, row_strides, unpack_fields
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME, RowRouting
from dnis_torchrec.checks import check
from dnis_torchrec.scheme import PACKED, TableScheme, rows_per_chunk
from dnis_torchrec.serving.packed import PackedTable, pack_rows, split_blocks
from dnis_torchrec.serving.trainable import block_tables

Rows = Callable[[int, int], Tensor]
"""Dense rows of a table: ``rows(first, last)`` gives rows ``first <= i < last`` as ``(last - first,
D)``."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some consecutive rows of a table in one form, complete in themselves."""

    place: str
    first_row: int
    num_rows: int
    tensors: Mapping[str, Tensor]

    def check(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that the shard holds just these tensors."""
        names, tensors, remedy = sorted(shapes), sorted(self.tensors), "export again"
        check(tensors == names, self.place, reprlib.repr(names), reprlib.repr(tensors), remedy)
        for name, shape in shapes.items():
            tensor, requirement = self.tensors[name], f"{name!r} as {dtype} of shape {shape}"
            fits = tensor.dtype == dtype and tuple(tensor.shape) == shape
            actual = f"{tensor.dtype} {tuple(tensor.shape)}"
            check(fits, self.place, requirement, actual, remedy)


def rows_of(weight: Tensor) -> Rows:
    """The rows of a dense table, as forms read them."""
    return lambda first, last: weight[first:last]


def chunks_of(table: TableScheme, rows: Rows, first: int, last: int) -> Iterator[Tensor]:
    """Rows ``first <= i < last``, some thousand at a time."""
    step = rows_per_chunk(table.embedding_dim)
    for begin in range(first, last, step):
        yield rows(begin, min(begin + step, last))


def whole_shard(form: str, table: TableScheme, rows: Rows) -> Shard:
    """A table in a form, in memory, as one shard."""
    if form == PACKED:
        chunks = chunks_of(table, rows, 0, table.num_embeddings)
        counts = table.routing.row_counts()
        tensors = {"rows": pack_rows(table.with_float_codes(), chunks, counts)}
    else:
        tensors = encode_blocks(table, rows, 0, table.num_embeddings)
    place = f"table {table.name!r}, form {form!r}"
    return Shard(place=place, first_row=0, num_rows=table.num_embeddings, tensors=tensors)


# ---- bit fields


def row_counts_of(table: TableScheme, first: int, last: int) -> Tensor:
    """Counts the rows of every block among ``first <= i < last``."""
    routing = table.routing
    if (first, last) == (0, table.num_embeddings):
        return routing.row_counts()
    if routing.boundaries is not None:
        return routing.boundaries.clamp(first, last).diff()
    counts = torch.zeros(routing.num_blocks + 1, dtype=torch.int64)
    for begin in range(first, last, ROWS_AT_A_TIME):
        blocks = routing.block_of(torch.arange(begin, min(begin + ROWS_AT_A_TIME, last)))
        counts += torch.bincount(blocks, minlength=len(counts))
    return counts[:-1]


def packed_table(table: TableScheme, shards: Sequence[Shard]) -> PackedTable:
    """The rows of a table as they are looked up: as they lie in their file, or those of several put
    together."""
    codes, strides = table.codes, row_strides(table.codes.bits)
    parts: list[list[Tensor]] = []
    for shard in shards:
        counts = row_counts_of(table, shard.first_row, shard.first_row + shard.num_rows)
        shard.check(torch.uint8, {"rows": (int(counts @ strides),)})
        parts.append(split_blocks(shard.tensors["rows"], counts, codes.bits))
    rows = shards[0].tensors["rows"]
    if len(shards) > 1:
        by_block = zip(*parts, strict=True)
        rows = torch.cat([part.flatten() for of_block in by_block for part in of_block])
    return PackedTable.from_rows(table, rows, codes.scale, codes.shift)


def rows_of_packed(table: TableScheme, shards: Sequence[Shard]) -> Rows:
    """The values of a table in bit fields, without its lookups: what the other form is made of, and
    compared with."""
    table = table.with_float_codes()
    packed_rows = packed_table(table, shards)
    blocks = split_blocks(packed_rows.rows, packed_rows.row_counts, packed_rows.bits)

    def rows(first: int, last: int) -> Tensor:
        block, position = packed_rows.directory.locate(torch.arange(first, last))
        fields = torch.zeros(last - first, table.embedding_dim, dtype=torch.int32)
        for s in block.unique().tolist():
            if s < len(blocks) and blocks[s].numel():
                here = block == s
                fields[here] = unpack_fields(blocks[s][position[here]], packed_rows.bits[s])
        return decode_rows(fields, block, table.codes)

    return rows


# ---- a table per block


def encode_blocks(table: TableScheme, rows: Rows, first: int, last: int) -> dict[str, Tensor]:
    """Rows ``first <= i < last`` of a table as a float32 tensor per block."""
    chunks = chunks_of(table, _values_of_codes(table, rows), first, last)
    return {
        f"b{s}": values for s, values in block_tables(_part(table, first, last), chunks).items()
    }


def blocks_of_shards(table: TableScheme, shards: Sequence[Shard]) -> dict[int, Tensor]:
    """Every block's table: as it lies in its file, or the parts of several put together."""
    parts: dict[int, list[Tensor]] = {s: [] for s in table.stored_blocks()}
    for shard in shards:
        last = shard.first_row + shard.num_rows
        shapes = _part(table, shard.first_row, last).stored_blocks()
        shard.check(torch.float32, {f"b{s}": shape for s, shape in shapes.items()})
        for s in shapes:
            parts[s].append(shard.tensors[f"b{s}"])
    return {s: of_s[0] if len(of_s) == 1 else torch.cat(of_s) for s, of_s in parts.items()}


def rows_of_blocks(table: TableScheme, shards: Sequence[Shard]) -> Rows:
    """The values of a table that is stored block by block."""
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


def _part(table: TableScheme, first: int, last: int) -> TableScheme:
    """The scheme of some consecutive rows, as if they were a table."""
    if (first, last) == (0, table.num_embeddings):
        return table
    blocks = table.routing.block_of(torch.arange(first, last))
    fields: dict[str, Any] = {
        "routing": RowRouting.from_map(blocks, table.routing.num_blocks),
        "num_retained": 0,
    }
    fields |= dict.fromkeys(("bits", "scale", "shift", "feedback", "gain"))
    return replace(table, num_embeddings=last - first, **fields)


def _values_of_codes(table: TableScheme, rows: Rows) -> Rows:
    """The values that the codes of a table's rows stand for: a table of codes has these values in
    both forms."""
    if not table.has_codes:
        return rows

    def values(first: int, last: int) -> Tensor:
        blocks = table.routing.block_of(torch.arange(first, last))
        chunk = rows(first, last).detach().cpu().float()
        fields = encode_rows(chunk, blocks, table.codes, place=f"table {table.name!r}")
        return decode_rows(fields, blocks, table.codes)

    return values
