"""Writes the tables of a model as an artifact: every rank the rows that it holds, rank 0 the
manifest. Files of bit fields are those of one process, byte for byte."""

import hashlib
import json
import math
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from dnis_torchrec import scheme as schemes
from dnis_torchrec.artifact import manifest as manifests
from dnis_torchrec.artifact.load import Rows, chunks_of, encode_blocks, row_counts_of
from dnis_torchrec.artifact.manifest import ARTIFACT, CARD, ENCODER, MAX_FILE_BYTES, write_manifest
from dnis_torchrec.blocks.codes import row_strides
from dnis_torchrec.blocks.routing import RowDirectory
from dnis_torchrec.checks import check, check_known, describe, versions, visible
from dnis_torchrec.data.files import FolderKind, conform, new_folder
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MIXED_DIMENSION, PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.selection.shards import TableShard, num_copies
from dnis_torchrec.serving.packed import packed_chunks, split_blocks

Files = dict[str, dict[str, Any]]
"""Path -> entry of the manifest."""
Entry = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Table, form, shard and file, as the manifest lists the latter two."""
SpanOfRows = tuple[int, int, Rows]
"""Rows of a table that a rank writes, ``first <= i < last``, and where it takes them from."""

_COLUMNS = "columns"
"""Folder of an unfinished artifact through which ranks pass columns to each other."""
_SHARE_OF_SHARD, _SMALLEST_FILE_BYTES = 8, 1 << 24
"""Ranks encode a file of the mixed-dimension form in memory before they write it: it may take this
part of the largest shard, or 16 MiB."""


def write_artifact(
    tables: Mapping[str, Tensor | Sequence[TableShard]],
    scheme: MixedDimensionScheme,
    path: Path | str,
    ranks: Ranks | None = None,
    *,
    forms: Sequence[str] | None = None,
    dense_state: Mapping[str, Tensor] | None = None,
    run: Mapping[str, Any] | None = None,
    encoder: bytes = b"",
    sequence: int = 0,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Writes tables as an artifact: each is whole, this rank's shards, or bit fields (uint8).

    `sequence` is the number of deltas that were applied since the first artifact."""
    ranks, path = ranks or Ranks(), Path(path)
    with ranks.together():
        check(bool(scheme.tables), "scheme", "a table", "none", "search and prune a model first")
        forms = check_forms((scheme.form,) if forms is None else forms)
        features_of = {name: table.feature_names for name, table in scheme.tables.items()}
        manifests.check_names(features_of, "scheme")
        parts, bit_fields = _parts(tables, scheme)
        notes = as_json(run or {})
        bit_files = _packed_files(scheme, max_file_bytes) if PACKED in forms else []
    limit = max_file_bytes
    if ranks.world_size > 1:
        largest = max((s.weight.nbytes for shards in parts.values() for s in shards), default=0)
        limit = min(limit, max(_SMALLEST_FILE_BYTES, largest // _SHARE_OF_SHARD))
    with shared_folder(path, overwrite=overwrite, kind=ARTIFACT, ranks=ranks) as folder:
        spans = _spans(folder, scheme, parts, ranks)
        with ranks.together():
            for file in bit_files if ranks.is_first else ():
                file.make(folder, bit_fields.get(file.table.name))
        entries: list[Entry] = []
        with ranks.together():
            num_values = torch.zeros(len(scheme.tables), dtype=torch.int64)
            for index, (name, table) in enumerate(scheme.tables.items()):
                for span in spans.get(name, ()):
                    num_values[index] += count_values(table, *span)
                    if MIXED_DIMENSION in forms:
                        entries += _write_blocks(folder, index, table, span, limit)
                    for file in bit_files:
                        if file.table.name == name:
                            file.fill(folder, *span)
        counts = ranks.sum_(num_values).tolist()
        for table, count in zip(scheme.tables.values(), counts, strict=True):
            requirement = f"at most num_retained={table.num_retained} values"
            remedy = "prune the table with this scheme first"
            check(count <= table.num_retained, f"table {table.name!r}", requirement, count, remedy)
        with ranks.together():
            for file in bit_files[ranks.rank :: ranks.world_size]:
                facts = manifests.describe_tensors(folder, file.name)
                entries.append((file.table.name, PACKED, file.shard(), facts))
        of_ranks = ranks.gather(entries)
        with ranks.together():
            if ranks.is_first:
                shutil.rmtree(folder / _COLUMNS, ignore_errors=True)
                fields = _merge(scheme, forms, [entry for of_rank in of_ranks for entry in of_rank])
                fields |= {"sequence": sequence} if sequence else {}
                _write_rest(
                    folder, scheme, fields, dense_state or {}, notes, encoder, max_file_bytes
                )
    return path


def _parts(
    tables: Mapping[str, Tensor | Sequence[TableShard]], scheme: MixedDimensionScheme
) -> tuple[dict[str, tuple[TableShard, ...]], dict[str, Tensor]]:
    """Shards of every table that this rank holds, and tables that are bit fields already."""
    parts, bit_fields = {}, {}
    for name, table in scheme.tables.items():
        check_known("table", name, tables)
        part, shape = tables[name], (table.num_embeddings, table.embedding_dim)
        if not isinstance(part, Tensor):
            parts[name] = tuple(part)
        elif part.dtype == torch.uint8:
            bit_fields[name] = part
        else:
            if not part.is_floating_point():
                raise TypeError(describe(f"table {name!r}", "floating point values", part.dtype))
            check(tuple(part.shape) == shape, f"table {name!r}", f"shape {shape}", part.shape)
            parts[name] = (TableShard(name, part.detach()),)
    return parts, bit_fields


def check_forms(forms: Sequence[str]) -> tuple[str, ...]:
    """Checks forms that are to be written, and gives them their present names."""
    check(bool(forms), "forms", f"some of {schemes.FORMS}", "none")
    check(len(set(forms)) == len(forms), "forms", "each once", tuple(forms))
    return tuple(map(schemes.form_named, forms))


@contextmanager
def shared_folder(
    path: Path, *, overwrite: bool = False, kind: FolderKind, ranks: Ranks
) -> Iterator[Path]:
    """`new_folder` of rank 0, which all ranks fill: it appears once all have left without error."""
    with ExitStack() as stack:
        folder = path
        with ranks.together():
            if ranks.is_first:
                folder = stack.enter_context(new_folder(path, overwrite=overwrite, kind=kind))
        folder = ranks.gather(folder)[0]
        with ranks.together():
            place, remedy = f"{kind.name} {str(path)!r}", "write to storage that all ranks see"
            check(folder.is_dir(), place, "to see the folder of rank 0", "none", remedy)
        yield folder
        with ranks.together():
            stack.close()


# ---- the rows that each rank writes


def _spans(
    folder: Path,
    scheme: MixedDimensionScheme,
    parts: Mapping[str, tuple[TableShard, ...]],
    ranks: Ranks,
) -> dict[str, list[SpanOfRows]]:
    """Rows of each table that this rank writes: of a table in several copies one rank writes all;
    of one that is cut by columns every rank the W-th part, once all have passed theirs."""
    tables = {name: scheme.tables[name] for name in parts}
    shapes = {name: (t.num_embeddings, t.embedding_dim) for name, t in tables.items()}
    copies = num_copies(parts, shapes, ranks)
    are_cut = [any(s.weight.shape[1] < shapes[n][1] for s in parts[n]) for n in shapes]
    is_cut = ranks.max_(torch.tensor(are_cut, dtype=torch.int64))
    with ranks.together():
        for index, name in enumerate(shapes):
            for shard in parts[name] if is_cut[index] else ():
                # as plain float32, where the other ranks find it
                (folder / _COLUMNS).mkdir(exist_ok=True)
                file = f"{index}.{shard.first_row}.{shard.first_column}.npy"
                np.save(folder / _COLUMNS / file, shard.weight.float().cpu().numpy())
    spans: dict[str, list[SpanOfRows]] = {}
    for index, (name, table) in enumerate(tables.items()):
        is_others = copies[name] > 1 and index % ranks.world_size != ranks.rank
        if is_cut[index]:
            spans[name] = _spans_of_columns(folder, index, table, ranks)
        else:
            spans[name] = [] if is_others else [_span_of_shard(shard) for shard in parts[name]]
    return spans


def _span_of_shard(shard: TableShard) -> SpanOfRows:
    first, weight = shard.first_row, shard.weight
    return first, first + len(weight), lambda begin, end: weight[begin - first : end - first]


def _spans_of_columns(
    folder: Path, index: int, table: TableScheme, ranks: Ranks
) -> list[SpanOfRows]:
    """The W-th part of a table's rows, read from the columns that all ranks have passed."""
    first, last = ranks.share(table.num_embeddings)
    files = sorted((folder / _COLUMNS).glob(f"{index}.*"))

    def rows(begin: int, end: int) -> Tensor:
        chunk = torch.full((end - begin, table.embedding_dim), torch.nan)
        for file in files:
            first_row, first_column = map(int, file.name.split(".")[1:3])
            part = np.load(file, mmap_mode="r")
            low, high = max(begin, first_row), min(end, first_row + len(part))
            if low < high:
                values = torch.from_numpy(part[low - first_row : high - first_row].copy())
                columns = slice(first_column, first_column + part.shape[1])
                chunk[low - begin : high - begin, columns] = values
        return chunk

    return [(first, last, rows)] if first < last else []


def count_values(table: TableScheme, first: int, last: int, rows: Rows) -> int:
    """Counts non-zero values of consecutive rows, and refuses those that cannot be stored."""
    place, num_values = f"table {table.name!r}", 0
    no_block = torch.zeros(1, table.embedding_dim, dtype=torch.bool)
    columns = torch.cat([table.retained, no_block])
    for chunk in () if table.has_codes else chunks_of(table, rows, first, last):
        values = chunk.detach().cpu().float()
        is_bad = ~values.isfinite().all(dim=1)
        if bool(is_bad.any()):
            actual = f"NaN or infinity in row {first + int(is_bad.nonzero()[0])}"
            check(False, place, "finite values", actual, "export the last good state")
        blocks = table.routing.block_of(torch.arange(first, first + len(values)))
        strays = int(((values != 0) & ~columns[blocks]).sum())
        requirement, remedy = "zeros outside the retained dims", "prune the table first"
        check(strays == 0, place, requirement, f"{strays} other values", remedy)
        num_values += int((values != 0).sum())
        first += len(values)
    return num_values


# ---- files


class FileOfRows(NamedTuple):
    """A file of consecutive rows of a table in one form. Of bit fields one rank makes it, then all
    fill it; their tensors here have no values."""

    table: TableScheme
    name: str
    begin: int
    end: int
    tensors: Mapping[str, Tensor]

    def shard(self) -> dict[str, Any]:
        """The shard, as the manifest lists it."""
        return {"file": self.name, "first_row": self.begin, "num_rows": self.end - self.begin}

    @property
    def header(self) -> bytes:
        """What stands before the values."""
        return manifests.file_header("rows", self.tensors["rows"])

    def make(self, folder: Path, rows: Tensor | None = None) -> None:
        """Makes the file as large as it is going to be, of a whole table's bit fields if they are
        there. Local, for one rank."""
        (folder / self.name).parent.mkdir(exist_ok=True)
        with (folder / self.name).open("wb") as file:
            file.write(self.header)
            for part in () if rows is None else self.parts(rows):
                file.write(part)
            file.truncate(len(self.header) + self.tensors["rows"].nbytes)

    def fill(self, folder: Path, first: int, last: int, rows: Rows) -> None:
        """Writes the rows of a span that the file holds. Local; others may write meanwhile."""
        table, begin, end = self.table, self.begin, self.end
        first, last = max(first, begin), min(last, end)
        if first >= last:
            return
        strides = row_strides(table.codes.bits)
        sizes = row_counts_of(table, begin, end) * strides
        offsets = row_counts_of(table, begin, first) * strides
        at = (len(self.header) + sizes.cumsum(0) - sizes + offsets).tolist()
        with (folder / self.name).open("r+b") as file:
            for s, fields in packed_chunks(table, chunks_of(table, rows, first, last), first=first):
                file.seek(at[s])
                file.write(fields.contiguous().numpy().data)
                at[s] += fields.nbytes

    def parts(self, rows: Tensor) -> Iterator[memoryview]:
        """Those of a whole table's bit fields that the file holds, block by block."""
        table, begin, end = self.table, self.begin, self.end
        blocks = split_blocks(rows, table.routing.row_counts(), table.codes.bits)
        starts = row_counts_of(table, 0, begin)
        ends = starts + row_counts_of(table, begin, end)
        for block, start, stop in zip(blocks, starts.tolist(), ends.tolist(), strict=True):
            yield block[start:stop].flatten().cpu().numpy().data


def files_of(
    form: str,
    index: int,
    table: TableScheme,
    span: tuple[int, int],
    encode: Callable[[int, int], Mapping[str, Tensor]],
    max_file_bytes: int,
) -> Iterator[FileOfRows]:
    """Cuts consecutive rows of a table into files, as many as `max_file_bytes` asks for."""
    first, last = span
    if first == last:  # a rank that holds none of the table's rows
        return
    num_bytes = table.file_bytes(form) * (last - first) / table.num_embeddings
    step = math.ceil((last - first) / max(1, math.ceil(num_bytes / max_file_bytes)))
    spans = deque((begin, min(begin + step, last)) for begin in range(first, last, step))
    stem = f"{form}/{index:03d}_{re.sub('[^A-Za-z0-9_-]+', '_', table.name)[:80]}"
    while spans:
        begin, end = spans.popleft()
        tensors = encode(begin, end)
        num_bytes, middle = manifests.file_bytes(tensors), (begin + end) // 2
        if num_bytes > max_file_bytes:
            place, requirement = f"table {table.name!r}", f"a row within {max_file_bytes} bytes"
            check(middle > begin, place, requirement, num_bytes, "raise max_file_bytes")
            spans.extendleft([(middle, end), (begin, middle)])
            continue
        suffix = "" if (begin, end) == (0, table.num_embeddings) else f"_from_{begin}"
        yield FileOfRows(table, f"{stem}{suffix}.safetensors", begin, end, tensors)


def _write_blocks(
    folder: Path, index: int, table: TableScheme, span: SpanOfRows, max_file_bytes: int
) -> Iterator[Entry]:
    """Writes consecutive rows of a table in the mixed-dimension form."""
    first, last, rows = span
    encode = partial(encode_blocks, table, rows)
    for file in files_of(MIXED_DIMENSION, index, table, (first, last), encode, max_file_bytes):
        facts = manifests.write_artifact_file(folder, file.name, file.tensors)
        yield table.name, MIXED_DIMENSION, file.shard(), facts


def _packed_files(scheme: MixedDimensionScheme, max_file_bytes: int) -> list[FileOfRows]:
    """The files of all tables in bit fields, the same on every rank."""
    files: list[FileOfRows] = []
    for index, table in enumerate(scheme.with_float_codes().tables.values()):
        span, encode = (0, table.num_embeddings), partial(_empty_rows, table)
        files += files_of(PACKED, index, table, span, encode, max_file_bytes)
    return files


def _empty_rows(table: TableScheme, first: int, last: int) -> dict[str, Tensor]:
    """Consecutive rows of a table in bit fields, without their values."""
    size = int(row_counts_of(table, first, last) @ row_strides(table.codes.bits))
    return {"rows": torch.empty(size, dtype=torch.uint8, device="meta")}


def hashes_of(
    tables: Mapping[str, Tensor],
    scheme: MixedDimensionScheme,
    dense_state: Mapping[str, Tensor],
    encoder: bytes,
) -> dict[str, str]:
    """The sha256 of every file that `write_artifact` makes of tables in bit fields."""
    hashes = {ENCODER: hashlib.sha256(encoder).hexdigest()} if encoder else {}
    for file in _packed_files(scheme, MAX_FILE_BYTES):
        digest = hashlib.sha256(file.header)
        for part in file.parts(tables[file.table.name]):
            digest.update(part)
        hashes[file.name] = digest.hexdigest()
    groups = {"scheme": scheme.to_tensors(), "dense_state": dense_state}
    for stem, tensors in (groups | {"refresh": scheme.to_refresh()}).items():
        for name, group in _groups(stem, tensors, MAX_FILE_BYTES).items():
            hashes[name] = hashlib.sha256(save(group)).hexdigest()
    return hashes


def write_group(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], max_file_bytes: int
) -> Files:
    """Writes tensors to as few files as hold them."""
    groups = _groups(stem, tensors, max_file_bytes).items()
    return {name: manifests.write_artifact_file(folder, name, part) for name, part in groups}


def _groups(
    stem: str, tensors: Mapping[str, Tensor], max_file_bytes: int
) -> dict[str, dict[str, Tensor]]:
    """The tensors of files ``<stem>``, ``<stem>_1`` and so on, as few as hold all."""
    groups: list[dict[str, Tensor]] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(describe(f"{stem} {name!r}", "a tensor", type(tensor).__name__))
        size = manifests.file_bytes({name: tensor})
        check(size <= max_file_bytes, f"tensor {name!r}", f"at most {max_file_bytes} bytes", size)
        if not groups or manifests.file_bytes(groups[-1] | {name: tensor}) > max_file_bytes:
            groups.append({})
        # copies on the CPU: safetensors refuses tensors that share memory, as tied weights do
        groups[-1][name] = tensor.detach().cpu().contiguous().clone()
    names = [f"{stem}{f'_{index}' if index else ''}.safetensors" for index in range(len(groups))]
    return dict(zip(names, groups, strict=True))


# ---- the manifest


def _merge(
    scheme: MixedDimensionScheme, forms: Sequence[str], entries: Sequence[Entry]
) -> dict[str, Any]:
    """The fields of the manifest that say where rows are, from the entries of all ranks."""
    shards: dict[str, Any] = {name: {form: [] for form in forms} for name in scheme.tables}
    for table, form, shard, facts in entries:
        shards[table][form].append((shard, facts))
    tables, on_disk = scheme.to_json(), dict.fromkeys(forms, 0)
    files: dict[str, Any] = {}
    for name, of_table in scheme.tables.items():
        rows, dims = of_table.routing.row_counts().tolist(), of_table.dims.tolist()
        blocks = [
            {"rows": rows[s], "embedding_dim": dims[s], "columns": of_table.columns(s).tolist()}
            for s in range(of_table.num_blocks)
        ]
        tables[name] |= {"blocks": blocks, "shards": {}}
        for form in forms:
            of_form = sorted(shards[name][form], key=lambda pair: pair[0]["first_row"])
            covers = sum(shard["num_rows"] for shard, _ in of_form)
            place, requirement = f"table {name!r}, form {form!r}", f"{of_table.num_embeddings} rows"
            check(covers == of_table.num_embeddings, place, requirement, covers)
            tables[name]["shards"][form] = [shard for shard, _ in of_form]
            files |= {shard["file"]: facts for shard, facts in of_form}
            on_disk[form] += sum(facts["bytes"] for _, facts in of_form)
    return {"forms": list(forms), "tables": tables, "bytes_on_disk": on_disk, "files": files}


def _write_rest(
    folder: Path,
    scheme: MixedDimensionScheme,
    fields: Mapping[str, Any],
    dense_state: Mapping[str, Tensor],
    run: Any,
    encoder: bytes,
    max_file_bytes: int,
) -> None:
    """Scheme, dense state, model card and manifest, by rank 0."""
    groups = {"scheme": scheme.to_tensors(), "dense_state": dense_state}
    groups |= {"refresh": scheme.to_refresh(), "directories": {}}
    if PACKED in fields["forms"]:
        groups["directories"] = _directories(scheme, max_file_bytes)
    manifest: dict[str, Any] = {"versions": versions(), **fields}
    files: Files = {}
    for stem, tensors in groups.items():
        of_group = write_group(folder, stem, tensors, max_file_bytes)
        manifest[stem], files = list(of_group), files | of_group
        if stem == "directories" and of_group:
            num_bytes = sum(entry["bytes"] for entry in of_group.values())
            manifest["bytes_on_disk"][PACKED] += num_bytes
    manifest |= {"parameters": scheme.parameters, "bytes": scheme.exact_bytes(), "run": run}
    manifest["files"] = files | manifest["files"]
    if encoder:
        size, requirement = len(encoder), f"at most {max_file_bytes} bytes"
        check(size <= max_file_bytes, "encoder", requirement, size, "raise max_file_bytes")
        (folder / ENCODER).write_bytes(encoder)
        manifest["encoder"] = ENCODER
        manifest["files"] |= {ENCODER: manifests.describe_file(folder, ENCODER)}
    card = card_of(scheme, manifest)
    (folder / CARD).write_text(card, encoding="utf-8", newline="\n")
    write_manifest(folder, manifest)


def _directories(scheme: MixedDimensionScheme, max_file_bytes: int) -> dict[str, Tensor]:
    """Where the rows of every table with a map lie, as lookups read it: a load need not build
    it."""
    directories: dict[str, Tensor] = {}
    for name, table in scheme.tables.items():
        if table.routing.boundaries is None:
            is_stored = (table.column_bits() > 0).any(dim=1)
            directory = RowDirectory.of(table.routing, is_stored).directory
            # one that no file can hold is built at each load
            if directory.numel() and manifests.file_bytes({name: directory}) <= max_file_bytes:
                directories[name] = directory
    return directories


def as_json(run: Mapping[str, Any]) -> Any:
    """`run` as it will stand in the manifest."""
    try:
        content = json.loads(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(describe("run", "values that JSON holds", str(error))) from error
    conform(content, manifests.RunOfArtifact, "run")
    return content


# ---- the model card, which no reader looks at

_LOAD = "`dnis_torchrec.load(path)` gives a module that takes the EmbeddingBagCollection's place."
_PREDICT = (
    "Its ids are rows, numbered anew: raw ids look other rows up without an error.\n"
    "`encoder.arrow` has the row of every id. `dnis_torchrec.load_predictor(path)` reads raw rows."
)

_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]()#+!|~$"})
_TEXT = """\
# Model card

Embedding tables that dnis_torchrec made {times:.2f} times smaller: {num_bytes:,} bytes as served
({form}), {dense:,} in float32.

## Tables

{tables}

Blocks are rows of similar frequency, the most frequent first; bits are means over all dims.

## Where it comes from

{origin}

## How to use it

{use} Nothing in
the folder is code.

## To be written by the owner

What the model is for, and what it is not for; whose data it was trained on, and from when; for whom
it was seen to be worse. Nothing of this is known to the program that wrote the tables.
"""


def card_of(scheme: MixedDimensionScheme, manifest: Mapping[str, Any]) -> str:
    """The text of the card."""
    run = manifest["run"]
    facts = {name: run.get(name) for name in ("recipe", "seed")} | dict(manifest["versions"])
    facts |= {name: f"{value:.5g}" for name, value in (run.get("metrics") or {}).items()}
    head = ("table", "features", "rows", "dims", "retained dims by block", "bits by block", "bytes")
    return _TEXT.format(
        times=scheme.compression(),
        num_bytes=scheme.served_bytes(scheme.form),
        form=scheme.form,
        dense=4 * scheme.dense_parameters,
        tables=_table(head, (_row_of(table, scheme.form) for table in scheme.tables.values())),
        use=f"{_LOAD} {_PREDICT}" if "encoder" in manifest else _LOAD,
        origin=_table(("what", "which"), ((n, str(v)) for n, v in facts.items() if v is not None)),
    )


def _row_of(table: TableScheme, form: str) -> tuple[str, ...]:
    bits = table.column_bits().float().mean(dim=1).tolist()
    features, dims = ", ".join(table.feature_names), ", ".join(map(str, table.dims.tolist()))
    head = table.name, features, f"{table.num_embeddings:,}", str(table.embedding_dim), dims
    return *head, ", ".join(f"{value:.1f}" for value in bits), f"{table.served_bytes(form):,}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown, whose cells others have named: none ends early or is markup."""
    lines = [head, tuple("---" for _ in head), *(tuple(map(_plain, row)) for row in rows)]
    return "\n".join("|".join(["", *line, ""]) for line in lines)


def _plain(text: str) -> str:
    one_line = " ".join(visible(text).split())
    return escape(one_line, quote=False).translate(_MARKS)
