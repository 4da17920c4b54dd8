"""Reads artifacts back: the scheme, serving modules in any form, sparse tables, the model's other
weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.csr_forms import VALUE_DTYPES, csr_of_shard
from dnis_torchrec.artifact.forms import Rows, Shard, codec_of, whole_shard
from dnis_torchrec.artifact.manifest import (
    FORMS_OF_1_0,
    MANIFEST,
    read_artifact_file,
    read_manifest,
)
from dnis_torchrec.artifact.mixed_dimension_form import retired_rows
from dnis_torchrec.artifact.packed_form import decoded_rows, packed_table
from dnis_torchrec.artifact.uniform_bits import with_uniform_bits
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.forms import (
    CANONICAL_FORM,
    DEFAULT_FORM,
    FORMS,
    PACKED,
    RETIRED_FORMS,
    Form,
    form_named,
)
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.csr_collection import CsrEmbeddingBagCollection
from dnis_torchrec.serving.csr_table import CsrTable
from dnis_torchrec.serving.logical_tables import UNKNOWN_IDS, LogicalCollection
from dnis_torchrec.serving.mixed_dimension import MixedDimensionEmbeddingBagCollection
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.sequences import (
    ServedEmbeddingCollection,
    is_unpooled,
    table_of_single_ids,
)
from dnis_torchrec.serving.unknown_ids import MEAN, MeanForUnknownIds


def read_scheme(path: Path | str) -> MixedDimensionScheme:
    """Reads the scheme of an artifact."""
    return _scheme_of(path, read_manifest(path))


@overload
def load(
    path: Path | str,
    *,
    form: Literal["csr_fp32", "csr_fp16", "csr_int8"],
    collection: str | None = None,
    device: torch.device | str = "cpu",
    unknown_ids: Literal["error", "zero"] = "error",
    verify: bool = False,
) -> CsrEmbeddingBagCollection:
    """Serves compressed sparse rows."""


@overload
def load(
    path: Path | str,
    *,
    form: Literal["mixed_dimension_fp32"],
    collection: str | None = None,
    device: torch.device | str = "cpu",
    unknown_ids: Literal["error", "zero"] = "error",
    verify: bool = False,
) -> MixedDimensionEmbeddingBagCollection:
    """Serves a table per block."""


@overload
def load(
    path: Path | str,
    *,
    form: Literal["packed"],
    collection: str | None = None,
    device: torch.device | str = "cpu",
    unknown_ids: Literal["error", "zero"] = "error",
    verify: bool = False,
) -> PackedEmbeddingBagCollection:
    """Serves bit fields."""


@overload
def load(
    path: Path | str,
    *,
    form: str | None = None,
    collection: str | None = None,
    device: torch.device | str = "cpu",
    unknown_ids: str = "error",
    verify: bool = False,
) -> EmbeddingBagCollectionInterface | ServedEmbeddingCollection:
    """Serves any form."""


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
    up. A form that the artifact does not hold is made from its exact sparse rows, or from what its
    codes stand for, in memory.

    Args:
        path: the artifact's folder.
        form: one of `dnis_torchrec.forms.FORMS`; None takes ``"packed"`` if the artifact holds it,
            else `dnis_torchrec.forms.DEFAULT_FORM`. The names of format 1.0 will do; of its forms
            in float16, int8 and int4 a table per block is now ``"packed"`` with as many bits for
            every column.
        collection: FQN of the collection in the model; needed only if the artifact holds several.
        device: where the tables go.
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
        ValueError: if the artifact is damaged, foreign or newer, holds neither the form nor one
            that it can be made from, or `collection` is needed or unknown.
    """
    ways = (*UNKNOWN_IDS, MEAN)
    check(unknown_ids in ways, "unknown_ids", f"one of {ways}", repr(unknown_ids))
    wanted = None if form is None else FORMS_OF_1_0.get(form, form)
    known = None if wanted is None else PACKED if wanted in RETIRED_FORMS else form_named(wanted)
    manifest = read_manifest(path)
    known = known or form_named(default_form(manifest))
    scheme = _of_collection(path, _scheme_of(path, manifest), collection)
    if wanted in RETIRED_FORMS and not scheme.has_codes:
        scheme, shards = _in_uniform_bits(path, manifest, scheme, wanted, verify)
    else:
        shards = {
            n: _shards_in_form(path, manifest, table, known, verify)
            for n, table in scheme.tables.items()
        }
    codec, reads_mean = codec_of(known), unknown_ids == MEAN

    def build(
        own: MixedDimensionScheme, shards: Mapping[str, Sequence[Shard]]
    ) -> EmbeddingBagCollectionInterface:
        way = "zero" if reads_mean else unknown_ids
        served = codec.build(known, own, shards, device=device, unknown_ids=way)
        return MeanForUnknownIds(own, cast(LogicalCollection, served)) if reads_mean else served

    if not is_unpooled(scheme):
        return build(scheme, shards)
    tables = {
        name: build(table_of_single_ids(table), shards) for name, table in scheme.tables.items()
    }
    return ServedEmbeddingCollection(scheme, tables)


def default_form(manifest: Mapping[str, Any]) -> str:
    """The form that an artifact is served in unless another is asked for."""
    return PACKED.name if PACKED.name in manifest["forms"] else DEFAULT_FORM


def exact_rows(path: Path | str) -> dict[str, Rows] | None:
    """The values of all tables, bit for bit: from the exact sparse rows, or from codes."""
    manifest = read_manifest(path)
    found = {
        n: _exact_rows(path, manifest, table, True)
        for n, table in _scheme_of(path, manifest).tables.items()
    }
    exact = {name: rows for name, rows in found.items() if rows is not None}
    return exact if len(exact) == len(found) else None


def load_csr(path: Path | str, table: str) -> CsrTable:
    """Reads one table in its exact sparse form, with all that can be checked of it."""
    manifest = read_manifest(path)
    tables = _scheme_of(path, manifest).tables
    check_known("table", table, tables)
    return _read_csr(path, manifest, tables[table], verify=True)


def load_dense_state(path: Path | str) -> dict[str, Tensor]:
    """Reads the model's other weights, as `write_artifact` was given them; none of a model that is
    tables alone."""
    return _read_all(path, read_manifest(path), "dense_state")


def _read_all(path: Path | str, manifest: Mapping[str, Any], field: str) -> dict[str, Tensor]:
    """The tensors of all files that a field of the manifest names. They are read as a whole, so
    hashes cost little."""
    tensors: dict[str, Tensor] = {}
    for name in manifest[field]:
        tensors |= read_artifact_file(path, manifest, name, verify=True)
    return tensors


def _scheme_of(path: Path | str, manifest: Mapping[str, Any]) -> MixedDimensionScheme:
    _check_described(path, manifest["tables"])
    tensors = _read_all(path, manifest, "scheme")
    try:
        return MixedDimensionScheme.from_parts(manifest["tables"], tensors)
    except ValueError as error:
        name = next(iter(manifest["scheme"]), MANIFEST)
        raise ValueError(f"artifact {str(path)!r}, file {name!r}: {error}; export again") from error


def _check_described(path: Path | str, tables: Mapping[str, Any]) -> None:
    place = f"artifact {str(path)!r}, file {MANIFEST!r}"
    check(bool(tables), place, "at least one table", "none", "export again")
    for name, fields in tables.items():
        check(
            bool(fields["feature_names"]),
            place,
            f"names of features of table {name!r}",
            "none",
            "export again",
        )
        for form, shards in fields["shards"].items():
            _check_shards(place, f"table {name!r}, form {form!r}", shards, fields["num_embeddings"])


def _check_shards(
    place: str, where: str, shards: Sequence[Mapping[str, Any]], num_embeddings: int
) -> None:
    """Shards have to follow each other from the first row to the last."""
    rows = 0
    for shard in shards:
        follows = shard["first_row"] == rows and shard["num_rows"] > 0
        check(follows, place, f"a shard of {where} from row {rows} on", shard, "export again")
        rows += shard["num_rows"]
    check(
        rows == num_embeddings,
        place,
        f"shards of {where} of {num_embeddings} rows",
        rows,
        "export again",
    )


def _of_collection(
    path: Path | str, scheme: MixedDimensionScheme, collection: str | None
) -> MixedDimensionScheme:
    held = sorted({table.collection for table in scheme.tables.values()})
    if collection is None:
        place, remedy = f"artifact {str(path)!r}", f"pass collection={held[0]!r} or another of them"
        check(
            len(held) == 1, place, "collection=, because it holds several collections", held, remedy
        )
        collection = held[0]
    check_known("collection", collection, held)
    return MixedDimensionScheme(
        {name: t for name, t in scheme.tables.items() if t.collection == collection}
    )


def _shards_in_form(
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, form: Form, verify: bool
) -> list[Shard]:
    """A table's shards as the artifact holds them, or one that is made of its exact values."""
    held = manifest["tables"][table.name]["shards"]
    rows = None if form.name in held else _exact_rows(path, manifest, table, verify)
    if rows is None:
        return _read_shards(path, manifest, table, form.name, verify)
    return [whole_shard(form, table, rows)]


def _in_uniform_bits(
    path: Path | str,
    manifest: Mapping[str, Any],
    scheme: MixedDimensionScheme,
    form: str,
    verify: bool,
) -> tuple[MixedDimensionScheme, dict[str, list[Shard]]]:
    """Tables that are wanted in a form of earlier versions, as `PACKED`; what was rounded once gets
    16 bits."""
    bits, rows = RETIRED_FORMS[form], dict[str, Rows]()
    for name, table in scheme.tables.items():
        exact = _exact_rows(path, manifest, table, verify)
        bits = bits if exact else 16
        rows[name] = exact or retired_rows(
            form, table, _read_shards(path, manifest, table, form, verify)
        )
    coded = with_uniform_bits(scheme, rows, bits)
    return coded, {
        name: [whole_shard(PACKED, table, rows[name])] for name, table in coded.tables.items()
    }


def _exact_rows(
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, verify: bool
) -> Rows | None:
    """The values of a table from a form that holds them bit for bit, if there is one."""
    held = manifest["tables"][table.name]["shards"]
    if CANONICAL_FORM in held:
        return _read_csr(path, manifest, table, verify=verify).rows
    if PACKED.name in held:
        return decoded_rows(
            table, packed_table(table, _read_shards(path, manifest, table, PACKED.name, verify))
        )
    return None


def _read_shards(
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, form: str, verify: bool
) -> list[Shard]:
    held = manifest["tables"][table.name]["shards"]
    is_newer = not set(held) & {*FORMS, *RETIRED_FORMS}  # none of its forms is known here
    remedy = (
        "update dnis_torchrec, which knows none of its forms"
        if is_newer
        else f"export with forms=[{form!r}]"
    )
    check(
        form in held,
        f"artifact {str(path)!r}, table {table.name!r}",
        f"form {form!r}",
        sorted(held),
        remedy,
    )
    return [
        Shard(
            place=f"artifact {str(path)!r}, file {shard['file']!r}",
            first_row=shard["first_row"],
            num_rows=shard["num_rows"],
            tensors=read_artifact_file(path, manifest, shard["file"], verify=verify),
        )
        for shard in held[form]
    ]


def _read_csr(
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, *, verify: bool
) -> CsrTable:
    """The exact sparse rows as one table that was read and checked throughout."""
    shards = _read_shards(path, manifest, table, CANONICAL_FORM, verify)
    sparse = CsrTable.concatenate(
        [csr_of_shard(table, shard, VALUE_DTYPES["fp32"]) for shard in shards]
    )
    try:
        sparse.check_rows()
    except ValueError as error:
        raise ValueError(f"{shards[0].place}: {error}; export again") from error
    return sparse
