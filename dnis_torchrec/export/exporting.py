"""Writes pruned tables as an artifact and reads artifacts back.

Shapes: N rows, D embedding_dim, S blocks, R retained dims of a block.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.export.artifact import (
    MANIFEST,
    describe_file,
    new_folder,
    read_manifest,
    read_tensors,
    write_manifest,
    write_tensors,
)
from dnis_torchrec.export.sparse import SCIPY_FORMATS, SparseTable, sparse_table, write_scipy
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.csr_collection import CsrEmbeddingBagCollection
from dnis_torchrec.serving.csr_table import CsrTable
from dnis_torchrec.serving.mixed_dimension import (
    MixedDimensionEmbeddingBagCollection,
    block_tables,
    rows_per_chunk,
    stored_blocks,
)

ARTIFACT_FORMS = ("mixed_dimension", "csr")
"""Forms that `write_artifact` knows and `load` serves."""
SCHEME_FILE = "scheme.safetensors"
DENSE_STATE_FILE = "dense_state.safetensors"
TABLE_FIELDS = {
    "collection": str,
    "num_embeddings": int,
    "embedding_dim": int,
    "pooling": str,
    "feature_names": list,
    "is_weighted": bool,
    "num_blocks": int,
    "num_retained": int,
    "files": dict,
}
"""What a manifest has to tell of each table."""


def write_artifact(
    tables: Mapping[str, Tensor],
    scheme: MixedDimensionScheme,
    path: Path | str,
    *,
    forms: Sequence[str] = ARTIFACT_FORMS,
    dense_state: Mapping[str, Tensor] | None = None,
    run: Mapping[str, Any] | None = None,
    scipy_formats: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Writes merged and pruned tables as an artifact: manifest.json, safetensors files, and nothing to unpickle.

    Tables are read one at a time, so beyond the tables themselves only the retained part of one is held.

    Args:
        tables: table name -> ``(N, D)``, merged and pruned: zero outside the retained dims. Views are enough.
        scheme: the retained dims of all tables.
        path: folder to write; missing parents are made.
        forms: ``"mixed_dimension"`` (a table per block, what serving reads) and ``"csr"`` (exact sparse rows).
        dense_state: the model's other weights, for `load_dense_state`.
        run: configuration and figures of the search; any JSON.
        scipy_formats: ``"coo"``, ``"csr"``: scipy.sparse ``.npz`` files beside, for other programs; never read here.
        overwrite: replace an artifact that stands at `path`.

    Returns:
        `path`.

    Raises:
        ValueError: if a table is missing, has another shape, NaN or infinite values, or values outside its retained
            dims; for unknown forms; if `run` is no JSON; if `path` exists and may not be overwritten.
        TypeError: if a table or a value of `dense_state` is no floating point table, or no tensor.

    Example:
        >>> import tempfile
        >>> from dnis_torchrec.row_routing import RowRouting
        >>> table = TableScheme(name="t", collection="ebc", num_embeddings=2, embedding_dim=2, pooling="sum",
        ...     feature_names=("f",), is_weighted=False, routing=RowRouting(2, 1, boundaries=torch.tensor([0, 2])),
        ...     retained=torch.tensor([[False, True]]), num_retained=2)
        >>> weight = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_artifact({"t": weight}, MixedDimensionScheme({"t": table}), f"{folder}/artifact")
        ...     load_csr(path, "t").to_dense().equal(weight)
        True
    """
    _check_arguments(tables, scheme, forms, scipy_formats)
    run = _as_json(run or {})
    path = Path(path)
    with new_folder(path, overwrite=overwrite) as folder:
        files = {SCHEME_FILE: write_tensors(folder, SCHEME_FILE, _own(scheme.to_tensors()))}
        if dense_state is not None:
            files[DENSE_STATE_FILE] = write_tensors(folder, DENSE_STATE_FILE, _own(dense_state))
        described = scheme.to_json()
        for index, (name, table) in enumerate(scheme.tables.items()):
            written = _write_table(folder, index, table, tables[name], forms, scipy_formats)
            files |= {file: entry for entries in written.values() for file, entry in entries.items()}
            described[name]["blocks"] = _describe_blocks(table)
            described[name]["files"] = {form: next(iter(entries)) for form, entries in written.items()}
        kinds = {kind for fields in described.values() for kind in fields["files"]}
        manifest = {
            "versions": _versions(),
            "forms": [form for form in ARTIFACT_FORMS if form in forms],
            "tables": described,
            "parameters": scheme.parameters,
            "bytes": scheme.form_bytes(),
            "bytes_on_disk": {
                kind: sum(files[fields["files"][kind]]["bytes"] for fields in described.values())
                for kind in sorted(kinds)
            },
            "run": run,
            "files": files,
        }
        write_manifest(folder, manifest)
    return path


def read_scheme(path: Path | str) -> MixedDimensionScheme:
    """Reads the scheme of an artifact.

    Args:
        path: the artifact's folder.

    Raises:
        ValueError: if the artifact is damaged or foreign; names the file.
    """
    return _scheme_of(path, read_manifest(path))


@overload
def load(
    path: Path | str, *, form: Literal["csr"], collection: str | None = None, device: torch.device | str = "cpu"
) -> CsrEmbeddingBagCollection:
    """Serves the exact sparse rows."""


@overload
def load(
    path: Path | str,
    *,
    form: Literal["mixed_dimension"] = "mixed_dimension",
    collection: str | None = None,
    device: torch.device | str = "cpu",
) -> MixedDimensionEmbeddingBagCollection:
    """Serves a table per block."""


def load(
    path: Path | str,
    *,
    form: str = "mixed_dimension",
    collection: str | None = None,
    device: torch.device | str = "cpu",
) -> MixedDimensionEmbeddingBagCollection | CsrEmbeddingBagCollection:
    """Builds a serving module from an artifact.

    Args:
        path: the artifact's folder.
        form: ``"mixed_dimension"``, made from the exact sparse rows where the artifact holds only those; or ``"csr"``,
            whose buffers stay in the artifact's files, memory-mapped, while they are on the CPU.
        collection: FQN of the collection in the model; needed only if the artifact holds several.
        device: where the tables go.

    Returns:
        A drop-in for the model's EmbeddingBagCollection.

    Raises:
        ValueError: if the artifact is damaged, foreign or newer, lacks the form, or `collection` is needed or unknown.
    """
    check_known("form", form, ARTIFACT_FORMS)
    manifest = read_manifest(path)
    scheme = _of_collection(path, _scheme_of(path, manifest), collection)
    if form == "csr":
        tables = {name: _read_csr(path, manifest, table) for name, table in scheme.tables.items()}
        rows = {name: CsrTable(embedding_dim=t.embedding_dim, **t.to_tensors()) for name, t in tables.items()}
        return CsrEmbeddingBagCollection(scheme, rows).to(device)
    module = MixedDimensionEmbeddingBagCollection(scheme, device="meta")
    for name, table in scheme.tables.items():
        if "mixed_dimension" in manifest["forms"]:
            blocks = _read_blocks(path, manifest, table)
        else:
            blocks = block_tables(table, _read_csr(path, manifest, table).dense_chunks())
        for s, weight in blocks.items():
            module.load_block(name, s, weight.to(device))
    return module.to(device)


def load_csr(path: Path | str, table: str) -> SparseTable:
    """Reads one table in its exact sparse form.

    Args:
        path: the artifact's folder.
        table: table name.

    Raises:
        ValueError: if the table is unknown, or the artifact does not hold this form or is damaged.
    """
    manifest = read_manifest(path)
    tables = _scheme_of(path, manifest).tables
    check_known("table", table, tables)
    return _read_csr(path, manifest, tables[table])


def load_dense_state(path: Path | str) -> dict[str, Tensor]:
    """Reads the model's other weights, as `write_artifact` was given them.

    Args:
        path: the artifact's folder.

    Raises:
        ValueError: if the artifact holds none or is damaged.
    """
    manifest = read_manifest(path)
    place, remedy = f"artifact {str(path)!r}", "export again with dense_state"
    check(DENSE_STATE_FILE in manifest["files"], place, "expected the model's dense state", "none", remedy)
    return read_tensors(path, manifest, DENSE_STATE_FILE)


def _check_arguments(
    tables: Mapping[str, Tensor],
    scheme: MixedDimensionScheme,
    forms: Sequence[str],
    scipy_formats: Sequence[str],
) -> None:
    check(bool(scheme.tables), "scheme", "expected at least one table", "none", "search and prune a model first")
    check(bool(forms), "forms", f"expected some of {ARTIFACT_FORMS}", "none")
    for form in forms:
        check_known("form", form, ARTIFACT_FORMS)
    for scipy_format in scipy_formats:
        check_known("scipy format", scipy_format, SCIPY_FORMATS)
    for name in scheme.tables:
        check_known("table", name, tables)


def _as_json(run: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(run, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "turn tensors, paths and non-finite numbers into JSON first"
        raise ValueError(describe("run", "expected values that JSON can hold", str(error), remedy)) from error


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: safetensors refuses tensors that share memory, as tied weights do."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(describe(f"dense_state {name!r}", "expected a tensor", type(tensor).__name__))
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _write_table(
    folder: Path, index: int, table: TableScheme, weight: Tensor, forms: Sequence[str], scipy_formats: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Writes one table in every form; returns form -> file -> entry of the manifest."""
    check_table(table, weight)
    stem = f"{index:03d}_{re.sub('[^A-Za-z0-9_-]+', '_', table.name)[:80]}"
    written = {}
    if "mixed_dimension" in forms:
        blocks = block_tables(table, weight.split(rows_per_chunk(table.embedding_dim)))
        name = f"mixed_dimension/{stem}.safetensors"
        written["mixed_dimension"] = {name: write_tensors(folder, name, {f"b{s}": t for s, t in blocks.items()})}
        del blocks
    if "csr" in forms or scipy_formats:
        sparse = sparse_table(weight)
        if "csr" in forms:
            name = f"csr/{stem}.safetensors"
            written["csr"] = {name: write_tensors(folder, name, sparse.to_tensors())}
        for scipy_format in scipy_formats:
            name = f"scipy/{stem}.{scipy_format}.npz"
            (folder / name).parent.mkdir(exist_ok=True)
            write_scipy(sparse, folder / name, scipy_format=scipy_format)
            written[f"scipy_{scipy_format}"] = {name: describe_file(folder, name)}
    return written


def check_table(table: TableScheme, weight: Tensor) -> None:
    """Checks that a dense table can be exported under its scheme without loss.

    Args:
        table: scheme of the table.
        weight: ``(N, D)``.

    Raises:
        TypeError: if it is not floating point.
        ValueError: if its shape differs, a value is NaN or infinite, or a value outside the retained dims is not zero.
    """
    place, shape = f"table {table.name!r}", (table.num_embeddings, table.embedding_dim)
    if not weight.is_floating_point():
        raise TypeError(describe(place, "expected floating point values", weight.dtype))
    check(tuple(weight.shape) == shape, place, f"expected shape {shape}", tuple(weight.shape))
    kept = torch.cat([table.retained, torch.zeros(1, table.embedding_dim, dtype=torch.bool)]).to(weight.device)
    first, num_values = 0, 0
    for chunk in weight.detach().split(rows_per_chunk(table.embedding_dim)):
        finite = chunk.isfinite().all(dim=1)
        if not bool(finite.all()):
            row = first + int((~finite).nonzero()[0])
            check(False, place, "expected finite values", f"NaN or infinity in row {row}", "export the last good state")
        blocks = table.routing.block_of(torch.arange(first, first + len(chunk))).to(weight.device)
        present = chunk != 0
        lost = int((present & ~kept[blocks]).sum())
        requirement = "expected zeros outside the retained dims"
        check(lost == 0, place, requirement, f"{lost} other values", "prune the table first")
        num_values += int(present.sum())
        first += len(chunk)
    requirement = f"expected at most num_retained={table.num_retained} values"
    check(num_values <= table.num_retained, place, requirement, num_values, "prune the table with this scheme first")


def _describe_blocks(table: TableScheme) -> list[dict[str, Any]]:
    rows = table.routing.row_counts().tolist()
    return [
        {"rows": rows[s], "embedding_dim": int(table.dims[s]), "columns": table.columns(s).tolist()}
        for s in range(table.routing.num_blocks)
    ]


def _versions() -> dict[str, str | None]:
    distributions = {
        "dnis_torchrec": ("dnis-torchrec",),
        "torchrec": ("torchrec",),
        "fbgemm_gpu": ("fbgemm-gpu-cpu", "fbgemm-gpu"),
    }
    found = {name: _version_of(names) for name, names in distributions.items()}
    return found | {"torch": str(torch.__version__), "python": platform.python_version()}


def _version_of(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _scheme_of(path: Path | str, manifest: Mapping[str, Any]) -> MixedDimensionScheme:
    _check_described(path, manifest["tables"])
    scheme = MixedDimensionScheme.from_parts(manifest["tables"], read_tensors(path, manifest, SCHEME_FILE))
    place = f"artifact {str(path)!r}, file {SCHEME_FILE!r}"
    for name, table in scheme.tables.items():
        num_blocks = table.routing.num_blocks
        within = table.routing.row_counts(include_unassigned=True).numel() == num_blocks + 1
        check(within, place, f"expected blocks 0..{num_blocks} in table {name!r}", "others", "export again")
    return scheme


def _check_described(path: Path | str, tables: Any) -> None:
    place = f"artifact {str(path)!r}, file {MANIFEST!r}"
    check(isinstance(tables, dict) and bool(tables), place, "expected at least one table", "none", "export again")
    for name, fields in tables.items():
        described = fields if isinstance(fields, dict) else {}
        wrong = [field for field, kind in TABLE_FIELDS.items() if type(described.get(field)) is not kind]
        requirement = f"expected table {name!r} to be described in full"
        check(not wrong, place, requirement, f"no usable {wrong}", "export again")
        names = [*fields["feature_names"], *fields["files"].values()]
        plain = bool(fields["feature_names"]) and all(isinstance(name, str) for name in names)
        check(plain, place, f"expected names of features and files of table {name!r}", names, "export again")


def _of_collection(path: Path | str, scheme: MixedDimensionScheme, collection: str | None) -> MixedDimensionScheme:
    held = sorted({table.collection for table in scheme.tables.values()})
    if collection is None:
        place, remedy = f"artifact {str(path)!r}", f"pass collection={held[0]!r} or another of them"
        check(len(held) == 1, place, "expected collection=, because it holds several collections", held, remedy)
        collection = held[0]
    check_known("collection", collection, held)
    return MixedDimensionScheme({name: t for name, t in scheme.tables.items() if t.collection == collection})


def _file_of(path: Path | str, manifest: Mapping[str, Any], table: TableScheme, form: str) -> str:
    files = manifest["tables"][table.name]["files"]
    place, remedy = f"artifact {str(path)!r}, table {table.name!r}", f"export with forms=[{form!r}]"
    check(form in files, place, f"expected form {form!r}", sorted(files), remedy)
    return files[form]


def _read_blocks(path: Path | str, manifest: Mapping[str, Any], table: TableScheme) -> dict[int, Tensor]:
    name = _file_of(path, manifest, table, "mixed_dimension")
    tensors, stored = read_tensors(path, manifest, name), stored_blocks(table)
    place = f"artifact {str(path)!r}, file {name!r}"
    complete = set(tensors) == {f"b{s}" for s in stored}
    check(complete, place, f"expected tables of blocks {sorted(stored)}", sorted(tensors), "export again")
    return {s: tensors[f"b{s}"] for s in stored}


def _read_csr(path: Path | str, manifest: Mapping[str, Any], table: TableScheme) -> SparseTable:
    name = _file_of(path, manifest, table, "csr")
    tensors = read_tensors(path, manifest, name)
    place = f"artifact {str(path)!r}, file {name!r}"
    complete = set(tensors) == {"values", "columns", "row_pointers"}
    check(complete, place, "expected values, columns and row_pointers", sorted(tensors), "export again")
    sparse = SparseTable(embedding_dim=table.embedding_dim, **tensors)
    requirement = f"expected {table.num_embeddings} rows"
    check(sparse.num_embeddings == table.num_embeddings, place, requirement, sparse.num_embeddings, "export again")
    return sparse
