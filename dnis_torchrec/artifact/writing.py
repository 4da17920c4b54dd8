"""Writes pruned tables as an artifact, in any forms, in files of bounded size."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dnis_torchrec._dependencies import versions
from dnis_torchrec.artifact.card import write_card
from dnis_torchrec.artifact.forms import Rows, encode_shard, rows_of
from dnis_torchrec.artifact.manifest import (
    ARTIFACT,
    MAX_FILE_BYTES,
    RunOfArtifact,
    file_bytes,
    write_artifact_file,
    write_manifest,
)
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.files import conform, new_folder
from dnis_torchrec.scheme import (
    FORMS,
    MixedDimensionScheme,
    TableScheme,
    form_named,
    rows_per_chunk,
)

Shards = dict[str, list[dict[str, Any]]]
"""Form -> shards of a table, as the manifest lists them."""
Files = dict[str, dict[str, Any]]
"""Path -> entry of the manifest."""


def write_artifact(
    tables: Mapping[str, Tensor],
    scheme: MixedDimensionScheme,
    path: Path | str,
    *,
    forms: Sequence[str] | None = None,
    dense_state: Mapping[str, Tensor] | None = None,
    run: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Writes merged and pruned tables as an artifact: manifest, model card, safetensors files,
    nothing to unpickle."""
    check(
        bool(scheme.tables),
        "scheme",
        "at least one table",
        "none",
        "search and prune a model first",
    )
    forms = (scheme.form,) if forms is None else check_forms(forms)
    for name in scheme.tables:
        check_known("table", name, tables)
    run = as_json(run or {})
    path = Path(path)
    with new_folder(path, overwrite=overwrite, kind=ARTIFACT) as folder:
        scheme_files = write_packed(folder, "scheme", scheme.to_tensors(), max_file_bytes)
        dense_files = write_packed(folder, "dense_state", dense_state or {}, max_file_bytes)
        files = scheme_files | dense_files
        shards: dict[str, Shards] = {}
        for index, (name, table) in enumerate(scheme.tables.items()):
            weight = tables[name]
            check_table(table, weight)
            shards[name] = {}
            for form in forms:
                span = (0, table.num_embeddings)
                of_form, written = write_shards(
                    folder, form, index, table, rows_of(weight), span, max_file_bytes
                )
                shards[name][form] = of_form
                files |= written
        manifest = manifest_of(
            scheme,
            forms,
            shards,
            files,
            scheme_files=scheme_files,
            dense_files=dense_files,
            run=run,
        )
        write_card(folder, scheme, manifest)
        write_manifest(folder, manifest)
    return path


def write_shards(
    folder: Path,
    form: str,
    index: int,
    table: TableScheme,
    rows: Rows,
    span: tuple[int, int],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> tuple[list[dict[str, Any]], Files]:
    """Writes consecutive rows of a table in one form, as many files as `max_file_bytes` asks for."""
    shards: list[dict[str, Any]] = []
    files: Files = {}

    def encode(begin: int, end: int) -> dict[str, Tensor]:
        return encode_shard(form, table, rows, begin, end)

    for file in files_of(form, index, table, span, encode, max_file_bytes):
        files[file.name] = write_artifact_file(folder, file.name, file.tensors)
        shards.append(file.shard())
    return shards, files


class FileOfRows(NamedTuple):
    """A file of consecutive rows of a table in one form: its path in the artifact, its rows, what
    it holds."""

    name: str
    begin: int
    end: int
    tensors: Mapping[str, Tensor]

    def shard(self) -> dict[str, Any]:
        """The shard, as the manifest lists it."""
        return {"file": self.name, "first_row": self.begin, "num_rows": self.end - self.begin}


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
    predicted = table.file_bytes(form) * (last - first) / table.num_embeddings
    step = math.ceil((last - first) / max(1, math.ceil(predicted / max_file_bytes)))
    spans = deque((begin, min(begin + step, last)) for begin in range(first, last, step))
    while spans:
        begin, end = spans.popleft()
        tensors = encode(begin, end)
        if file_bytes(tensors) > max_file_bytes:
            place, requirement = (
                f"table {table.name!r}, form {form!r}",
                f"a row within {max_file_bytes} bytes",
            )
            check(end - begin > 1, place, requirement, file_bytes(tensors), "raise max_file_bytes")
            middle = (begin + end) // 2
            spans.extendleft([(middle, end), (begin, middle)])
            continue
        suffix = "" if (begin, end) == (0, table.num_embeddings) else f"_from_{begin}"
        yield FileOfRows(
            f"{form}/{_stem(index, table.name)}{suffix}.safetensors", begin, end, tensors
        )


def write_packed(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES
) -> Files:
    """Writes tensors to as few files as hold them: ``<stem>.safetensors``, ``<stem>_1.safetensors``
    and so on."""
    packs: list[dict[str, Tensor]] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(describe(f"{stem} {name!r}", "a tensor", type(tensor).__name__))
        size = file_bytes({name: tensor})
        check(size <= max_file_bytes, f"tensor {name!r}", f"at most {max_file_bytes} bytes", size)
        if not packs or file_bytes(packs[-1] | {name: tensor}) > max_file_bytes:
            packs.append({})
        packs[-1][name] = tensor
    names = [f"{stem}{f'_{index}' if index else ''}.safetensors" for index in range(len(packs))]
    return {
        name: write_artifact_file(folder, name, _unshared(pack))
        for name, pack in zip(names, packs, strict=True)
    }


def manifest_of(
    scheme: MixedDimensionScheme,
    forms: Sequence[str],
    shards: Mapping[str, Shards],
    files: Files,
    *,
    scheme_files: Iterable[str],
    dense_files: Iterable[str],
    run: Any,
) -> dict[str, Any]:
    """Builds the content of manifest.json without format, version and hash, which `write_manifest`
    adds."""
    described = scheme.to_json()
    for name, table in scheme.tables.items():
        described[name] |= {"blocks": _describe_blocks(table), "shards": shards[name]}
    on_disk = {
        form: sum(files[s["file"]]["bytes"] for t in shards.values() for s in t[form])
        for form in forms
    }
    return {
        "versions": versions(),
        "forms": list(forms),
        "tables": described,
        "scheme": list(scheme_files),
        "dense_state": list(dense_files),
        "parameters": scheme.parameters,
        "bytes": scheme.exact_bytes(),
        "bytes_on_disk": on_disk,
        "run": run,
        "files": files,
    }


def check_forms(forms: Sequence[str]) -> tuple[str, ...]:
    """Checks that an artifact can be written in these forms, and spells them as they are spelt
    now."""
    check(bool(forms), "forms", f"some of {FORMS}", "none")
    check(len(set(forms)) == len(forms), "forms", "each once", tuple(forms))
    return tuple(map(form_named, forms))


def check_table(table: TableScheme, weight: Tensor) -> None:
    """Checks that a dense table can be exported under its scheme without other loss than that of
    its codes."""
    place, shape = f"table {table.name!r}", (table.num_embeddings, table.embedding_dim)
    if not weight.is_floating_point():
        raise TypeError(describe(place, "floating point values", weight.dtype))
    check(tuple(weight.shape) == shape, place, f"shape {shape}", tuple(weight.shape))
    if table.has_codes:
        return
    num_values = count_values(table, weight, 0)
    requirement = f"at most num_retained={table.num_retained} values"
    check(
        num_values <= table.num_retained,
        place,
        requirement,
        num_values,
        "prune the table with this scheme first",
    )


def count_values(table: TableScheme, weight: Tensor, first_row: int) -> int:
    """Counts the non-zero values of consecutive rows of a table, and checks them."""
    place, first, num_values = f"table {table.name!r}", first_row, 0
    kept = torch.cat([table.retained, torch.zeros(1, table.embedding_dim, dtype=torch.bool)]).to(
        weight.device
    )
    for chunk in weight.detach().split(rows_per_chunk(table.embedding_dim)):
        finite = chunk.float().isfinite().all(dim=1)
        if not bool(finite.all()):
            row = first + int((~finite).nonzero()[0])
            check(
                False,
                place,
                "finite values",
                f"NaN or infinity in row {row}",
                "export the last good state",
            )
        blocks = table.routing.block_of(torch.arange(first, first + len(chunk))).to(weight.device)
        present = chunk != 0
        lost = int((present & ~kept[blocks]).sum())
        check(
            lost == 0,
            place,
            "zeros outside the retained dims",
            f"{lost} other values",
            "prune the table first",
        )
        num_values += int(present.sum())
        first += len(chunk)
    return num_values


def as_json(run: Mapping[str, Any]) -> Any:
    """`run` as it will stand in the manifest."""
    try:
        described = json.loads(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "turn tensors, paths and non-finite numbers into JSON first"
        raise ValueError(
            describe("run", "values that JSON can hold", str(error), remedy)
        ) from error
    conform(described, RunOfArtifact, "run")
    return described


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: safetensors refuses tensors that share memory, as tied weights do."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _stem(index: int, table: str) -> str:
    return f"{index:03d}_{re.sub('[^A-Za-z0-9_-]+', '_', table)[:80]}"


def _describe_blocks(table: TableScheme) -> list[dict[str, Any]]:
    rows = table.routing.row_counts().tolist()
    return [
        {"rows": rows[s], "embedding_dim": int(table.dims[s]), "columns": table.columns(s).tolist()}
        for s in range(table.routing.num_blocks)
    ]
