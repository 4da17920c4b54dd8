"""Writes pruned tables as an artifact, in any forms, in files of bounded size.

Shapes: N rows, D embedding_dim, S blocks, R retained dims of a block.
"""

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
from dnis_torchrec.artifact.forms import Rows, check_codes, encode_shard, rows_of, values_of_codes
from dnis_torchrec.artifact.manifest import (
    ARTIFACT,
    MAX_FILE_BYTES,
    RunOfArtifact,
    describe_file,
    file_bytes,
    write_artifact_file,
    write_manifest,
)
from dnis_torchrec.artifact.predictions import describe_forms
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.forms import PACKED, WRITTEN_BY_DEFAULT, Form, form_named
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk
from dnis_torchrec.serving.csr_table import CsrTable
from dnis_torchrec.storage.json_files import conform
from dnis_torchrec.storage.whole_folders import new_folder

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
    scipy_formats: Sequence[str] = (),
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Writes merged and pruned tables as an artifact: manifest, model card, safetensors files, nothing to unpickle.

    Tables are read one at a time, so beyond the tables themselves only the retained part of one is held.

    Args:
        tables: table name -> ``(N, D)``, merged and pruned: zero outside the retained dims, unless the scheme has
            codes, to which they are rounded. Views are enough.
        scheme: the retained dims of all tables.
        path: folder to write; missing parents are made.
        forms: some of `dnis_torchrec.forms.FORMS`, by name. From ``"csr_fp32"``, the canonical one, every other can be
            made. None: ``"packed"`` alone for a scheme that has codes, else `dnis_torchrec.forms.WRITTEN_BY_DEFAULT`.
        dense_state: the model's other weights, for `load_dense_state`.
        run: configuration and figures of the search; any JSON.
        scipy_formats: ``"coo"``, ``"csr"``: scipy.sparse ``.npz`` files beside, for other programs; never read here.
        overwrite: replace an artifact that stands at `path`.
        max_file_bytes: tables that take more are cut into shards of rows, a file each.

    Returns:
        `path`.

    Raises:
        ValueError: if a table is missing, has another shape, NaN or infinite values, or values outside its retained
            dims; for unknown forms, and ``"packed"`` of a scheme without codes; if `run` is no JSON; if `path` exists
            and may not be overwritten; if a single row, or a tensor of `dense_state`, does not fit into a file.
        TypeError: if a table or a value of `dense_state` is no floating point table, or no tensor.
        OSError: if the disk is full; then what stood at `path` still stands there, and nothing else is left.

    Example:
        >>> import tempfile
        >>> from dnis_torchrec.artifact import load_csr
        >>> from dnis_torchrec.blocks.row_routing import RowRouting
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=2, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(2, 1, boundaries=torch.tensor([0, 2])),
        ...     retained=torch.tensor([[False, True]]), num_retained=2)
        >>> weight = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_artifact({"t": weight}, MixedDimensionScheme({"t": table}), f"{folder}/artifact")
        ...     load_csr(path, "t").to_dense().equal(weight)
        True
    """
    check(bool(scheme.tables), "scheme", "at least one table", "none", "search and prune a model first")
    forms = forms_of(scheme) if forms is None else forms
    check_forms(forms, scipy_formats, scheme)
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
                of_form, written = write_shards(folder, form, index, table, rows_of(weight), span, max_file_bytes)
                shards[name][form] = of_form
                files |= written
            files |= _write_scipy_files(folder, index, table, weight, scipy_formats)
        manifest = manifest_of(
            scheme, forms, shards, files, scheme_files=scheme_files, dense_files=dense_files, run=run
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
    """Writes consecutive rows of a table in one form, as many files as `max_file_bytes` asks for.

    Args:
        folder: the artifact's folder.
        form: one of `dnis_torchrec.forms.FORMS`.
        index: number of the table, for the names of files.
        table: scheme of the table.
        rows: gives its dense rows, within `span`.
        span: the first row and the one after the last: all of the table, or a part that somebody else completes.
        max_file_bytes: limit on the bytes of a file.

    Returns:
        The shards and the files, as the manifest lists them.

    Raises:
        ValueError: if a single row does not fit into a file.
        OSError: if a file cannot be written.
    """
    known = form_named(form)
    shards: list[dict[str, Any]] = []
    files: Files = {}

    def encode(begin: int, end: int) -> dict[str, Tensor]:
        return encode_shard(known, table, rows, begin, end)

    for file in files_of(known, index, table, span, encode, max_file_bytes):
        files[file.name] = write_artifact_file(folder, file.name, file.tensors)
        shards.append(file.shard())
    return shards, files


class FileOfRows(NamedTuple):
    """A file of consecutive rows of a table in one form: its path in the artifact, its rows, what it holds."""

    name: str
    begin: int
    end: int
    tensors: Mapping[str, Tensor]

    def shard(self) -> dict[str, Any]:
        """The shard, as the manifest lists it."""
        return {"file": self.name, "first_row": self.begin, "num_rows": self.end - self.begin}


def files_of(
    form: Form,
    index: int,
    table: TableScheme,
    span: tuple[int, int],
    encode: Callable[[int, int], Mapping[str, Tensor]],
    max_file_bytes: int,
) -> Iterator[FileOfRows]:
    """Cuts consecutive rows of a table into files, as many as `max_file_bytes` asks for.

    Args:
        form: how they are written.
        index: number of the table, for the names of files.
        table: scheme of the table.
        span: see `write_shards`.
        encode: makes what a file of rows ``begin <= i < end`` holds; where only sizes count, on the meta device.
        max_file_bytes: limit on the bytes of a file.

    Yields:
        The files, in the order of their rows.

    Raises:
        ValueError: if a single row does not fit into a file.
    """
    first, last = span
    if first == last:  # a rank that holds none of the table's rows
        return
    predicted = form.file_bytes(table) * (last - first) / table.num_embeddings
    step = math.ceil((last - first) / max(1, math.ceil(predicted / max_file_bytes)))
    spans = deque((begin, min(begin + step, last)) for begin in range(first, last, step))
    while spans:
        begin, end = spans.popleft()
        tensors = encode(begin, end)
        if file_bytes(tensors) > max_file_bytes:
            place, requirement = f"table {table.name!r}, form {form.name!r}", f"a row within {max_file_bytes} bytes"
            check(end - begin > 1, place, requirement, file_bytes(tensors), "raise max_file_bytes")
            middle = (begin + end) // 2
            spans.extendleft([(middle, end), (begin, middle)])
            continue
        suffix = "" if (begin, end) == (0, table.num_embeddings) else f"_from_{begin}"
        yield FileOfRows(f"{form.name}/{_stem(index, table.name)}{suffix}.safetensors", begin, end, tensors)


def write_packed(folder: Path, stem: str, tensors: Mapping[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES) -> Files:
    """Writes tensors to as few files as hold them: ``<stem>.safetensors``, ``<stem>_1.safetensors`` and so on.

    Args:
        folder: the artifact's folder.
        stem: beginning of the files' names.
        tensors: tensors to write; without any no file is made.
        max_file_bytes: limit on the bytes of a file.

    Returns:
        The files, as the manifest lists them.

    Raises:
        TypeError: if a value is no tensor.
        ValueError: if a tensor does not fit into a file.
        OSError: if a file cannot be written.
    """
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
    return {name: write_artifact_file(folder, name, _unshared(pack)) for name, pack in zip(names, packs, strict=True)}


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
    """Builds the content of manifest.json without format, version and hash, which `write_manifest` adds.

    Args:
        scheme: the retained dims of all tables.
        forms: the forms that every table was written in.
        shards: table name -> form -> shards, from `write_shards`.
        files: every file of the folder.
        scheme_files: those of the scheme.
        dense_files: those of the model's other weights.
        run: any JSON.
    """
    described = scheme.to_json()
    for name, table in scheme.tables.items():
        described[name] |= {"blocks": _describe_blocks(table), "shards": shards[name]}
    on_disk = {form: sum(files[s["file"]]["bytes"] for t in shards.values() for s in t[form]) for form in forms}
    return {
        "versions": versions(),
        "forms": list(forms),
        "tables": described,
        "scheme": list(scheme_files),
        "dense_state": list(dense_files),
        "parameters": scheme.parameters,
        "bytes": scheme.exact_bytes(),
        "serving_forms": describe_forms(scheme),
        "bytes_on_disk": on_disk,
        "run": run,
        "files": files,
    }


def scipy_file(index: int, table: str, scipy_format: str) -> str:
    """The place of a table's file for other programs, the only one of an artifact that its manifest lists alone.

    Args:
        index: number of the table.
        table: its name.
        scipy_format: one of `SCIPY_FORMATS`.

    Example:
        >>> scipy_file(0, "movie", "csr")
        'scipy/000_movie.csr.npz'
    """
    return f"scipy/{_stem(index, table)}.{scipy_format}.npz"


def forms_of(scheme: MixedDimensionScheme) -> tuple[str, ...]:
    """The forms that a scheme is written in unless others are asked for.

    Args:
        scheme: the retained dims of all tables.
    """
    return (PACKED.name,) if scheme.has_codes else WRITTEN_BY_DEFAULT


def check_forms(
    forms: Sequence[str], scipy_formats: Sequence[str] = (), scheme: MixedDimensionScheme | None = None
) -> None:
    """Checks that an artifact can be written in these forms.

    Args:
        forms: see `write_artifact`.
        scipy_formats: see `write_artifact`.
        scheme: what is to be written, if it is known yet.

    Raises:
        ValueError: for no form, one that is there twice or unknown, or one that stores codes where a table has none.
    """
    check(bool(forms), "forms", f"some, such as {WRITTEN_BY_DEFAULT}", "none")
    check(len(set(forms)) == len(forms), "forms", "each once", tuple(forms))
    for form in map(form_named, forms):
        for table in () if scheme is None else scheme.tables.values():
            check_codes(form, table)
    for scipy_format in scipy_formats:
        check_known("scipy format", scipy_format, SCIPY_FORMATS)


def check_table(table: TableScheme, weight: Tensor) -> None:
    """Checks that a dense table can be exported under its scheme without other loss than that of its codes.

    Args:
        table: scheme of the table.
        weight: ``(N, D)``.

    Raises:
        TypeError: if it is not floating point.
        ValueError: if its shape differs, a value is NaN or infinite, or a value outside the retained dims is not zero.
            Values of a table of codes are read when they are encoded, once, and checked then.
    """
    place, shape = f"table {table.name!r}", (table.num_embeddings, table.embedding_dim)
    if not weight.is_floating_point():
        raise TypeError(describe(place, "floating point values", weight.dtype))
    check(tuple(weight.shape) == shape, place, f"shape {shape}", tuple(weight.shape))
    if table.has_codes:
        return
    num_values = count_values(table, weight, 0)
    requirement = f"at most num_retained={table.num_retained} values"
    check(num_values <= table.num_retained, place, requirement, num_values, "prune the table with this scheme first")


def count_values(table: TableScheme, weight: Tensor, first_row: int) -> int:
    """Counts the non-zero values of consecutive rows of a table, and checks them.

    Args:
        table: scheme of the table.
        weight: ``(rows, D)`` floating point.
        first_row: which row of the table its first is.

    Raises:
        ValueError: if a value is NaN or infinite, or one outside the retained dims is not zero.
    """
    place, first, num_values = f"table {table.name!r}", first_row, 0
    kept = torch.cat([table.retained, torch.zeros(1, table.embedding_dim, dtype=torch.bool)]).to(weight.device)
    for chunk in weight.detach().split(rows_per_chunk(table.embedding_dim)):
        finite = chunk.float().isfinite().all(dim=1)
        if not bool(finite.all()):
            row = first + int((~finite).nonzero()[0])
            check(False, place, "finite values", f"NaN or infinity in row {row}", "export the last good state")
        blocks = table.routing.block_of(torch.arange(first, first + len(chunk))).to(weight.device)
        present = chunk != 0
        lost = int((present & ~kept[blocks]).sum())
        check(lost == 0, place, "zeros outside the retained dims", f"{lost} other values", "prune the table first")
        num_values += int(present.sum())
        first += len(chunk)
    return num_values


def as_json(run: Mapping[str, Any]) -> Any:
    """`run` as it will stand in the manifest.

    Args:
        run: description of where the tables come from.

    Raises:
        ValueError: if it holds what JSON cannot.
    """
    try:
        described = json.loads(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "turn tensors, paths and non-finite numbers into JSON first"
        raise ValueError(describe("run", "values that JSON can hold", str(error), remedy)) from error
    conform(described, RunOfArtifact, "run")
    return described


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: safetensors refuses tensors that share memory, as tied weights do."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _stem(index: int, table: str) -> str:
    return f"{index:03d}_{re.sub('[^A-Za-z0-9_-]+', '_', table)[:80]}"


def _write_scipy_files(
    folder: Path, index: int, table: TableScheme, weight: Tensor, scipy_formats: Sequence[str]
) -> Files:
    if not scipy_formats:
        return {}
    files: Files = {}
    values = values_of_codes(table, rows_of(weight))
    sparse = CsrTable.from_rows(values, 0, table.num_embeddings, embedding_dim=table.embedding_dim)
    for scipy_format in scipy_formats:
        name = scipy_file(index, table.name, scipy_format)
        (folder / name).parent.mkdir(exist_ok=True)
        write_scipy(sparse, folder / name, scipy_format=scipy_format)
        files[name] = describe_file(folder, name)
    return files


def _describe_blocks(table: TableScheme) -> list[dict[str, Any]]:
    rows = table.routing.row_counts().tolist()
    return [
        {"rows": rows[s], "embedding_dim": int(table.dims[s]), "columns": table.columns(s).tolist()}
        for s in range(table.routing.num_blocks)
    ]


SCIPY_FORMATS = ("coo", "csr")
"""Interchange files that `write_scipy` knows."""


def write_scipy(table: CsrTable, path: Path, *, scipy_format: str) -> None:
    """Writes a table as a scipy.sparse ``.npz`` file, for interchange; nothing here reads it back.

    Args:
        table: the table, with float32 values.
        path: file to write.
        scipy_format: one of `SCIPY_FORMATS`.
    """
    # scipy takes most of a second to import and only this needs it
    from scipy import sparse

    shape = (table.num_embeddings, table.embedding_dim)
    arrays = (table.values.numpy(), table.columns.int().numpy(), table.row_pointers.numpy())
    matrix: Any = sparse.csr_matrix(arrays, shape=shape)
    build: Callable[[Any], Any] = sparse.coo_matrix if scipy_format == "coo" else sparse.csr_matrix
    sparse.save_npz(path, build(matrix))
