"""Writes the tables of a sharded model as one artifact: every rank its own part, rank 0 the
manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.artifact.card import write_card
from dnis_torchrec.artifact.forms import Rows
from dnis_torchrec.artifact.manifest import (
    ARTIFACT,
    MAX_FILE_BYTES,
    describe_tensors,
    write_manifest,
)
from dnis_torchrec.artifact.packed_files import SharedPackedFile, packed_files
from dnis_torchrec.artifact.writing import (
    Files,
    Shards,
    as_json,
    check_forms,
    count_values,
    manifest_of,
    write_packed,
    write_shards,
)
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.files import FolderKind, new_folder
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.selection.shards import TableShard, num_copies

_COLUMNS = "columns"
"""Folder of an unfinished artifact through which ranks pass columns to each other."""

_SHARE_OF_SHARD, _SMALLEST_FILE_BYTES = 8, 1 << 24
"""A file is encoded in memory before it is written, so it may take this part of the rank's largest
shard, or 16 MiB."""

Span = tuple[int, int]
_SpanOfRows = tuple[Span, Rows]
"""Rows of a table that a rank writes, and where it takes them from."""


@contextmanager
def shared_folder(
    path: Path, *, overwrite: bool = False, kind: FolderKind, ranks: Ranks
) -> Iterator[Path]:
    """`new_folder` of rank 0, for all ranks to fill: it appears once all have left without error."""
    with ExitStack() as stack:
        with together(ranks.group):
            made = (
                str(stack.enter_context(new_folder(path, overwrite=overwrite, kind=kind)))
                if ranks.is_first
                else ""
            )
        folder = Path(ranks.gather_texts(made)[0])
        with together(ranks.group):
            place, remedy = f"{kind.name} {str(path)!r}", "write to storage that all ranks see"
            check(folder.is_dir(), place, "to see the folder of rank 0", "none", remedy)
        yield folder
        with together(ranks.group):
            stack.close()


def write_over_ranks(
    shards: Mapping[str, Sequence[TableShard]],
    scheme: MixedDimensionScheme,
    path: Path,
    ranks: Ranks,
    *,
    forms: Sequence[str],
    dense_state: Mapping[str, Tensor],
    run: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Writes merged and pruned tables that are spread over ranks as one artifact."""
    with together(ranks.group):
        forms = check_forms(forms)
        for name in scheme.tables:
            check_known("table", name, shards)
        run = as_json(run or {})
    here = {name: tuple(shards[name]) for name in scheme.tables}
    copies = num_copies(
        here, {n: (t.num_embeddings, t.embedding_dim) for n, t in scheme.tables.items()}, ranks
    )
    by_columns = _cut_by_columns(here, scheme, ranks)
    largest = max((shard.weight.nbytes for held in here.values() for shard in held), default=0)
    limit = min(max_file_bytes, max(_SMALLEST_FILE_BYTES, largest // _SHARE_OF_SHARD))
    apart = _Apart([form for form in forms if form != PACKED], limit)
    packed = _packed_files(scheme, max_file_bytes) if PACKED in forms else {}
    with shared_folder(path, overwrite=overwrite, kind=ARTIFACT, ranks=ranks) as folder:
        with together(ranks.group):
            for name in by_columns:
                _pass_columns(folder, here[name])
            for file in _all(packed) if ranks.is_first else ():
                file.make(folder)
        written = _Written({name: {form: [] for form in forms} for name in scheme.tables}, {})
        with together(ranks.group):
            num_values = torch.zeros(len(scheme.tables), dtype=torch.int64)
            for index, (name, table) in enumerate(scheme.tables.items()):
                if name in by_columns:
                    spans = _spans_of_column_shards(folder, table, ranks)
                elif copies[name] > 1 and index % ranks.world_size != ranks.rank:
                    spans = []
                else:
                    spans = [_span_of_shard(shard) for shard in here[name]]
                num_values[index] = _count(table, spans)
                for span, rows in spans:
                    apart.write(folder, index, table, span, rows, written)
                    for file in packed.get(name, ()):
                        file.fill(folder, rows, span)
        _check_counts(scheme, ranks.sum_(num_values))
        with together(ranks.group):
            for file in _all(packed)[ranks.rank :: ranks.world_size]:
                written.note(
                    file.table.name,
                    PACKED,
                    file.file.shard(),
                    describe_tensors(folder, file.file.name),
                )
        texts = ranks.gather_texts(json.dumps(vars(written)))
        with together(ranks.group):
            if ranks.is_first:
                shutil.rmtree(folder / _COLUMNS, ignore_errors=True)
                _write_rest(folder, scheme, forms, texts, dense_state, run, max_file_bytes)
    return path


def _cut_by_columns(
    here: Mapping[str, tuple[TableShard, ...]], scheme: MixedDimensionScheme, ranks: Ranks
) -> list[str]:
    """Tables of which some rank holds parts of rows. One all_reduce of a number per table."""
    dims = {name: table.embedding_dim for name, table in scheme.tables.items()}
    cut = torch.tensor(
        [
            max((int(s.weight.shape[1] < dims[n]) for s in held), default=0)
            for n, held in here.items()
        ]
    )
    return [name for name, is_cut in zip(here, ranks.max_(cut).tolist(), strict=True) if is_cut]


def _span_of_shard(shard: TableShard) -> _SpanOfRows:
    first = shard.first_row
    return (first, first + shard.weight.shape[0]), lambda begin, end: shard.weight[
        begin - first : end - first
    ]


def _pass_columns(folder: Path, shards: Sequence[TableShard]) -> None:
    """Writes column shards, as plain float32, where the other ranks find them by name."""
    for shard in shards:
        (folder / _COLUMNS).mkdir(exist_ok=True)
        place = (shard.first_row, shard.first_column, *shard.weight.shape)
        with (folder / _COLUMNS / f"{_stem(shard.table)}.{'.'.join(map(str, place))}").open(
            "wb"
        ) as file:
            for chunk, _, _ in shard.chunks():
                chunk.float().cpu().contiguous().numpy().tofile(file)


def _spans_of_column_shards(folder: Path, table: TableScheme, ranks: Ranks) -> list[_SpanOfRows]:
    """The W-th part of a table's rows that this rank writes, read from the columns that all ranks
    have passed."""
    first, last = ranks.share(table.num_embeddings)
    files = sorted((folder / _COLUMNS).glob(f"{_stem(table.name)}.*"))

    def rows(begin: int, end: int) -> Tensor:
        chunk = torch.full((end - begin, table.embedding_dim), torch.nan)
        for file in files:
            first_row, first_column, num_rows, num_columns = map(int, file.name.split(".")[1:])
            low, high = max(begin, first_row), min(end, first_row + num_rows)
            if low < high:
                count, offset = (high - low) * num_columns, 4 * (low - first_row) * num_columns
                values = torch.from_numpy(
                    np.fromfile(file, dtype=np.float32, count=count, offset=offset)
                )
                place = (
                    slice(low - begin, high - begin),
                    slice(first_column, first_column + num_columns),
                )
                chunk[place] = values.view(-1, num_columns)
        return chunk

    return [((first, last), rows)] if first < last else []


def _stem(table: str) -> str:
    return table.encode().hex()


@dataclass(frozen=True)
class _Written:
    """Entries of the manifest: table -> form -> its shards, and every file."""

    shards: dict[str, Shards]
    files: Files

    def note(self, table: str, form: str, shard: dict[str, Any], file: dict[str, Any]) -> None:
        self.shards[table][form].append(shard)
        self.files[shard["file"]] = file


@dataclass(frozen=True)
class _Apart:
    """Forms of which every rank writes files of its own."""

    forms: Sequence[str]
    max_file_bytes: int

    def write(
        self,
        folder: Path,
        index: int,
        table: TableScheme,
        span: Span,
        rows: Rows,
        written: _Written,
    ) -> None:
        for form in self.forms:
            shards, files = write_shards(
                folder, form, index, table, rows, span, self.max_file_bytes
            )
            for shard in shards:
                written.note(table.name, form, shard, files[shard["file"]])


def _packed_files(
    scheme: MixedDimensionScheme, max_file_bytes: int
) -> dict[str, list[SharedPackedFile]]:
    return {
        name: packed_files(index, table, max_file_bytes)
        for index, (name, table) in enumerate(scheme.tables.items())
    }


def _all(files: Mapping[str, Sequence[SharedPackedFile]]) -> list[SharedPackedFile]:
    return [file for of_table in files.values() for file in of_table]


def _count(table: TableScheme, spans: Sequence[_SpanOfRows]) -> int:
    """Counts and checks the values that this rank writes; of a table of codes whatever is not
    retained is dropped."""
    step, total = rows_per_chunk(table.embedding_dim), 0
    for span, rows in () if table.has_codes else spans:
        for begin in range(*span, step):
            total += count_values(table, rows(begin, min(begin + step, span[1])), begin)
    return total


def _check_counts(scheme: MixedDimensionScheme, num_values: Tensor) -> None:
    for table, found in zip(scheme.tables.values(), num_values.tolist(), strict=True):
        requirement = f"at most num_retained={table.num_retained} values"
        remedy = "prune the table with this scheme first"
        check(found <= table.num_retained, f"table {table.name!r}", requirement, found, remedy)


def _write_rest(
    folder: Path,
    scheme: MixedDimensionScheme,
    forms: Sequence[str],
    texts: Sequence[str],
    dense_state: Mapping[str, Tensor],
    run: Any,
    max_file_bytes: int,
) -> None:
    """Scheme, dense state, model card and manifest, by rank 0."""
    written = [json.loads(text) for text in texts]
    found: Files = {name: file for of_rank in written for name, file in of_rank["files"].items()}
    scheme_files = write_packed(folder, "scheme", scheme.to_tensors(), max_file_bytes)
    dense = {
        name: value.detach().cpu().clone() for name, value in dense_state.items()
    }  # tied weights share memory
    dense_files = write_packed(folder, "dense_state", dense, max_file_bytes)
    files = scheme_files | dense_files
    shards: dict[str, Shards] = {name: {} for name in scheme.tables}
    for name, table in scheme.tables.items():
        for form in forms:
            in_order = sorted(
                (s for one in written for s in one["shards"][name][form]),
                key=lambda s: s["first_row"],
            )
            covered = sum(shard["num_rows"] for shard in in_order)
            if covered != table.num_embeddings:
                raise ValueError(
                    describe(
                        f"table {name!r}, form {form!r}", f"{table.num_embeddings} rows", covered
                    )
                )
            shards[name][form] = in_order
            files |= {shard["file"]: found[shard["file"]] for shard in in_order}
    manifest = manifest_of(
        scheme, forms, shards, files, scheme_files=scheme_files, dense_files=dense_files, run=run
    )
    write_card(folder, scheme, manifest)
    write_manifest(folder, manifest)
