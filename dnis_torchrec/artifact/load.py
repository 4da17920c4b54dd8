"""Reads artifacts back: the scheme, serving modules in either form, rows, the model's other
weights. And the rows of a table in either form, as the tensors of a shard."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec import scheme as schemes
from dnis_torchrec.artifact.manifest import MANIFEST, content_id, read_artifact_file, read_manifest
from dnis_torchrec.blocks.codes import decode_rows, row_strides, unpack_fields
from dnis_torchrec.blocks.routing import RowDirectory
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.packed import values_in_codes
from dnis_torchrec.scheme import FORMS, MIXED_DIMENSION, PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.serving import packed, sequences
from dnis_torchrec.serving.packed import PackedTable
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection, table_of_single_ids
from dnis_torchrec.serving.tables import MEAN, UNKNOWN_IDS, MeanForUnknownIds
from dnis_torchrec.serving.trainable import MixedDimensionEmbeddingBagCollection, block_tables

Rows = Callable[[int, int], Tensor]
"""Dense rows of a table: ``rows(first, last)`` gives rows ``first <= i < last`` as ``(last - first,
D)``."""


def load(
    path: Path | str,
    *,
    form: str | None = None,
    collection: str | None = None,
    device: torch.device | str = "cpu",
    unknown_ids: str = "error",
    verify: bool = False,
) -> EmbeddingBagCollectionInterface | ServedEmbeddingCollection:
    """Builds a serving module from an artifact.

    Tables on the CPU stay in the artifact's files, memory-mapped, and are read as rows are looked
    up. A form that the artifact does not hold is made from the other one, in memory.

    Args:
        path: folder that `export` wrote, or ``dnis export``.
        form: ``"packed"``, which serves, or ``"mixed_dimension"``, which can be trained on; None
            takes ``"packed"`` if the artifact holds it.
        collection: FQN of the collection in the model; needed only if the artifact holds several.
        device: device that the tables are put on.
        unknown_ids: ids that are no rows raise (``"error"``), contribute zero (``"zero"``), or the
            mean of the table's coldest rows (``"mean"``, see `MeanForUnknownIds`). They count in
            the length.
        verify: read every file that is used and compare its sha256. Without, sizes and structure
            are checked, and bytes of a table that were changed give other numbers (never an access
            outside the table).

    Returns:
        A drop-in for the model's EmbeddingBagCollection, or a `ServedEmbeddingCollection` for its
        EmbeddingCollection.

    Raises:
        ValueError: if the artifact is damaged, foreign or newer, holds neither form, or
            `collection` is needed or unknown.
    """
    ways = (*UNKNOWN_IDS, MEAN)
    check(unknown_ids in ways, "unknown_ids", f"one of {ways}", repr(unknown_ids))
    form = None if form is None else schemes.form_named(form)
    folder = ArtifactFolder(path)
    form = form or (PACKED if PACKED in folder.manifest["forms"] else MIXED_DIMENSION)
    scheme = folder.collection(collection)
    shards = {name: folder.shards(table, form, verify) for name, table in scheme.tables.items()}
    data = folder.tensors("directories", verify) if form == PACKED else {}
    if sequences.is_unpooled(scheme):
        tables = {
            name: _build(form, table_of_single_ids(table), shards, device, unknown_ids, data)
            for name, table in scheme.tables.items()
        }
        module: Any = ServedEmbeddingCollection(scheme, tables)
    else:
        module = _build(form, scheme, shards, device, unknown_ids, data)
        module.encoder = folder.manifest.get("encoder", "")
    module.content_id, module.sequence = folder.content_id, folder.sequence
    folder.check_unchanged()
    return module


def serve(
    scheme: MixedDimensionScheme,
    tables: Mapping[str, Tensor],
    form: str,
    *,
    device: torch.device | str = "cpu",
    unknown_ids: str = "error",
) -> EmbeddingBagCollectionInterface:
    """Builds a serving module of one collection from its tables, without an artifact."""
    form, shards = schemes.form_named(form), {}
    for name, table in scheme.tables.items():
        shards[name] = [whole_shard(form, table, rows_of(tables[name].detach()))]
    return _build(form, scheme, shards, device, unknown_ids)


def read_scheme(path: Path | str) -> MixedDimensionScheme:
    """Reads the scheme of an artifact."""
    return ArtifactFolder(path).scheme()


def exact_rows(path: Path | str) -> dict[str, Rows]:
    """The values of all tables, bit for bit, from whichever form the artifact holds."""
    folder = ArtifactFolder(path)
    return {name: folder.rows(table, True) for name, table in folder.scheme().tables.items()}


def _build(
    form: str,
    scheme: MixedDimensionScheme,
    shards: Mapping[str, Sequence[Shard]],
    device: torch.device | str,
    unknown_ids: str,
    directories: Mapping[str, Tensor] = MappingProxyType({}),
) -> EmbeddingBagCollectionInterface:
    """A serving module of one collection from its tables' shards, in order of rows."""
    way = "zero" if unknown_ids == MEAN else unknown_ids
    if form == PACKED:
        scheme = scheme.with_float_codes()
        tables = {
            name: packed_table(table, shards[name], directories.get(name))
            for name, table in scheme.tables.items()
        }
        module: Any = packed.PackedEmbeddingBagCollection(scheme, tables, unknown_ids=way)
    else:
        module = MixedDimensionEmbeddingBagCollection(scheme, device="meta", unknown_ids=way)
        for name, table in scheme.tables.items():
            for s, weight in blocks_of_shards(table, shards[name]).items():
                module.load_block(name, s, weight.to(device))
    module = module.to(device)
    return MeanForUnknownIds(scheme, module) if unknown_ids == MEAN else module


def _stamp_of(path: Path | str) -> tuple[int, int]:
    folder = Path(path)
    facts = folder.stat() if folder.exists() else None
    return (facts.st_ino, facts.st_ctime_ns) if facts else (0, 0)


class ArtifactFolder:
    """An artifact that is being read, its manifest checked."""

    def __init__(self, path: Path | str) -> None:
        self._stamp = _stamp_of(path)
        self.path, self.manifest = path, read_manifest(path)
        directories = self.manifest.get("directories", ())  # the scheme says all that they do
        files = self.manifest["files"].items()
        hashes = {name: entry["sha256"] for name, entry in files if name not in directories}
        self.content_id, self.sequence = content_id(hashes), self.manifest.get("sequence", 0)

    def check_unchanged(self) -> None:
        """Refuses what was read while another artifact took this one's place: it may be of both."""
        place, is_same = f"artifact {str(self.path)!r}", _stamp_of(self.path) == self._stamp
        check(is_same, place, "one version while it is read", "two", "load it again")

    def tensors(self, field: str, verify: bool = True) -> dict[str, Tensor]:
        """The tensors of all files that a field names."""
        tensors: dict[str, Tensor] = {}
        for name in self.manifest.get(field, ()):
            tensors |= read_artifact_file(self.path, self.manifest, name, verify=verify)
        return tensors

    def scheme(self) -> MixedDimensionScheme:
        """The scheme of all tables."""
        place = f"artifact {str(self.path)!r}, file {MANIFEST!r}"
        remedy, facts = "export again", self.manifest["tables"]
        check(bool(facts), place, "at least one table", "none", remedy)
        for name, fields in facts.items():
            requirement = f"names of features of table {name!r}"
            check(bool(fields["feature_names"]), place, requirement, "none", remedy)
            for form, shards in fields["shards"].items():
                sizes = [shard["num_rows"] for shard in shards]
                starts = [*(shard["first_row"] for shard in shards), fields["num_embeddings"]]
                follow = starts == [*accumulate(sizes, initial=0)] and min(sizes, default=1) > 0
                requirement = f"shards of table {name!r}, form {form!r}, from first row to last"
                check(follow, place, requirement, reprlib.repr(shards), remedy)
        tensors = self.tensors("scheme")
        try:
            scheme = MixedDimensionScheme.from_parts(facts, tensors)
            return scheme.with_refresh(self.tensors("refresh"))
        except ValueError as error:
            name = next(iter(self.manifest["scheme"]), MANIFEST)
            place = f"artifact {str(self.path)!r}, file {name!r}"
            raise ValueError(f"{place}: {error}; {remedy}") from error

    def collection(self, collection: str | None) -> MixedDimensionScheme:
        """The scheme of one collection's tables."""
        tables = self.scheme().tables
        names = sorted({table.collection for table in tables.values()})
        if collection is None:
            place, remedy = f"artifact {str(self.path)!r}", f"pass collection={names[0]!r}, say"
            requirement = "collection=, because it holds several collections"
            check(len(names) == 1, place, requirement, names, remedy)
            collection = names[0]
        check_known("collection", collection, names)
        return MixedDimensionScheme({n: t for n, t in tables.items() if t.collection == collection})

    def shards(self, table: TableScheme, form: str, verify: bool) -> list[Shard]:
        """A table's shards as they are stored, or one that is made of its values."""
        if form not in self.manifest["tables"][table.name]["shards"]:
            return [whole_shard(form, table, self.rows(table, verify))]
        return self._read(table, form, verify)

    def rows(self, table: TableScheme, verify: bool) -> Rows:
        """The values of a table."""
        forms = self.manifest["tables"][table.name]["shards"]
        place = f"artifact {str(self.path)!r}, table {table.name!r}"
        is_read = bool({*forms} & {*FORMS})
        check(is_read, place, f"one of {FORMS}", sorted(forms), "update dnis_torchrec")
        form = PACKED if PACKED in forms else MIXED_DIMENSION
        shards = self._read(table, form, verify)
        return (rows_of_packed if form == PACKED else rows_of_blocks)(table, shards)

    def _read(self, table: TableScheme, form: str, verify: bool) -> list[Shard]:
        shards = self.manifest["tables"][table.name]["shards"][form]
        return [
            Shard(
                place=f"artifact {str(self.path)!r}, file {shard['file']!r}",
                first_row=shard["first_row"],
                num_rows=shard["num_rows"],
                tensors=read_artifact_file(self.path, self.manifest, shard["file"], verify=verify),
            )
            for shard in shards
        ]


# ---- rows in either form


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some consecutive rows of a table in one form, complete in themselves."""

    place: str
    first_row: int
    num_rows: int
    tensors: Mapping[str, Tensor]

    def check(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Checks that the shard holds just these tensors."""
        target = {name: f"{dtype} {shape}" for name, shape in shapes.items()}
        actual = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in self.tensors.items()}
        requirement, remedy = f"tensors {reprlib.repr(target)}", "export again"
        check(actual == target, self.place, requirement, reprlib.repr(actual), remedy)


def rows_of(weight: Tensor) -> Rows:
    """The rows of a dense table, as forms read them."""
    return lambda first, last: weight[first:last]


def chunks_of(table: TableScheme, rows: Rows, first: int, last: int) -> Iterator[Tensor]:
    """Rows ``first <= i < last``, some thousand at a time."""
    step = schemes.rows_per_chunk(table.embedding_dim)
    for begin in range(first, last, step):
        yield rows(begin, min(begin + step, last))


def whole_shard(form: str, table: TableScheme, rows: Rows) -> Shard:
    """A table in a form, in memory, as one shard."""
    if form == PACKED:
        chunks = chunks_of(table, rows, 0, table.num_embeddings)
        counts = table.routing.row_counts()
        tensors = {"rows": packed.pack_rows(table.with_float_codes(), chunks, counts)}
    else:
        tensors = encode_blocks(table, rows, 0, table.num_embeddings)
    place = f"table {table.name!r}, form {form!r}"
    return Shard(place=place, first_row=0, num_rows=table.num_embeddings, tensors=tensors)


# ---- bit fields


def row_counts_of(table: TableScheme, first: int, last: int) -> Tensor:
    """Counts the rows of every block among ``first <= i < last``."""
    return table.routing.between(first, last).row_counts()


def packed_table(
    table: TableScheme, shards: Sequence[Shard], data: Tensor | None = None
) -> PackedTable:
    """A table as it is looked up, with the directory that its artifact holds or a new one."""
    rows, directory = bit_fields_of(table, shards), None
    if data is not None:
        # others are boundaries, which no map has; lookups check what the bytes say, row by row
        is_fit = data.dtype in (torch.uint8, torch.int32) and data.dim() == 1
        place, requirement = f"{shards[0].place}, directory", "uint8 or int32 in one dimension"
        is_fit = is_fit and table.routing.boundaries is None
        check(is_fit, place, requirement, f"{data.dtype} {tuple(data.shape)}", "export again")
        is_stored = (table.column_bits() > 0).any(dim=1)
        directory = RowDirectory.of(table.routing, is_stored, data)
    return PackedTable.from_rows(table, rows, table.codes.scale, table.codes.shift, directory)


def bit_fields_of(table: TableScheme, shards: Sequence[Shard]) -> Tensor:
    """The rows of a table as they are looked up, from one file or several."""
    codes, strides = table.codes, row_strides(table.codes.bits)
    parts: list[list[Tensor]] = []
    for shard in shards:
        counts = row_counts_of(table, shard.first_row, shard.first_row + shard.num_rows)
        shard.check(torch.uint8, {"rows": (int(counts @ strides),)})
        parts.append(packed.split_blocks(shard.tensors["rows"], counts, codes.bits))
    rows = shards[0].tensors["rows"]
    if len(shards) > 1:
        by_block = zip(*parts, strict=True)
        rows = torch.cat([part.flatten() for of_block in by_block for part in of_block])
    return rows


def rows_of_packed(table: TableScheme, shards: Sequence[Shard]) -> Rows:
    """The values of a table in bit fields, without its lookups."""
    table = table.with_float_codes()
    packed_rows = packed_table(table, shards)
    blocks = packed.split_blocks(packed_rows.rows, packed_rows.row_counts, packed_rows.bits)

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
        f"b{s}": values for s, values in block_tables(table.between(first, last), chunks).items()
    }


def blocks_of_shards(table: TableScheme, shards: Sequence[Shard]) -> dict[int, Tensor]:
    """Every block's table: as it lies in its file, or the parts of several put together."""
    parts: dict[int, list[Tensor]] = {s: [] for s in table.stored_blocks()}
    for shard in shards:
        last = shard.first_row + shard.num_rows
        shapes = table.between(shard.first_row, last).stored_blocks()
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


def _values_of_codes(table: TableScheme, rows: Rows) -> Rows:
    """The values that the codes of a table's rows stand for, which both forms have."""
    if not table.has_codes:
        return rows

    def values(first: int, last: int) -> Tensor:
        blocks = table.routing.block_of(torch.arange(first, last))
        place = f"table {table.name!r}"
        return values_in_codes(rows(first, last), blocks, table.codes, place=place)

    return values
