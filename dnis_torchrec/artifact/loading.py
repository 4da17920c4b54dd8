"""Reads artifacts back: the scheme, serving modules in any form, sparse tables, the model's other
weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from dnis_torchrec.artifact.forms import (
    Rows,
    Shard,
    build,
    decoded_rows,
    packed_table,
    rows_of,
    rows_of_blocks,
    whole_shard,
)
from dnis_torchrec.artifact.manifest import MANIFEST, read_artifact_file, read_manifest
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.scheme import (
    FORMS,
    MIXED_DIMENSION,
    PACKED,
    MixedDimensionScheme,
    TableScheme,
    form_named,
)
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
    form: Literal["mixed_dimension"],
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
    up. A form that the artifact does not hold is made from the other one, in memory.

    Args:
        path: the artifact's folder.
        form: ``"packed"``, which serves, or ``"mixed_dimension"``, which can be trained on; None
            takes ``"packed"`` if the artifact holds it.
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
    wanted = None if form is None else form_named(form)
    manifest = read_manifest(path)
    wanted = wanted or default_form(manifest)
    scheme = _of_collection(path, _scheme_of(path, manifest), collection)
    shards = {
        name: _shards_in_form(path, manifest, table, wanted, verify)
        for name, table in scheme.tables.items()
    }

    def served(part: MixedDimensionScheme) -> EmbeddingBagCollectionInterface:
        way = "zero" if unknown_ids == MEAN else unknown_ids
        module = build(wanted, part, shards, device=device, unknown_ids=way)
        if unknown_ids != MEAN:
            return module
        return MeanForUnknownIds(part, cast(LogicalCollection, module))

    if not is_unpooled(scheme):
        return served(scheme)
    tables = {name: served(table_of_single_ids(table)) for name, table in scheme.tables.items()}
    return ServedEmbeddingCollection(scheme, tables)


def default_form(manifest: Mapping[str, Any]) -> str:
    """The form that an artifact is served in unless another is asked for."""
    return PACKED if PACKED in manifest["forms"] else MIXED_DIMENSION


def serve(
    scheme: MixedDimensionScheme,
    tables: Mapping[str, Tensor],
    form: str,
    *,
    device: torch.device | str = "cpu",
    unknown_ids: str = "error",
) -> EmbeddingBagCollectionInterface:
    """Builds a serving module of one collection from the pruned tables, without an artifact."""
    form, shards = form_named(form), {}
    for name, table in scheme.tables.items():
        check_known("table", name, tables)
        shape, weight = (table.num_embeddings, table.embedding_dim), tables[name].detach()
        check(
            tuple(weight.shape) == shape, f"table {name!r}", f"shape {shape}", tuple(weight.shape)
        )
        shards[name] = [whole_shard(form, table, rows_of(weight))]
    return build(form, scheme, shards, device=device, unknown_ids=unknown_ids)


def exact_rows(path: Path | str) -> dict[str, Rows]:
    """The values of all tables, bit for bit, from whichever form the artifact holds."""
    manifest = read_manifest(path)
    tables = _scheme_of(path, manifest).tables
    return {name: _exact_rows(path, manifest, table, True) for name, table in tables.items()}


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
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, form: str, verify: bool
) -> list[Shard]:
    """A table's shards as the artifact holds them, or one that is made of its values."""
    if form in manifest["tables"][table.name]["shards"]:
        return _read_shards(path, manifest, table, form, verify)
    return [whole_shard(form, table, _exact_rows(path, manifest, table, verify))]


def _exact_rows(
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, verify: bool
) -> Rows:
    """The values of a table from a form that the artifact holds."""
    form = PACKED if PACKED in manifest["tables"][table.name]["shards"] else MIXED_DIMENSION
    shards = _read_shards(path, manifest, table, form, verify)
    if form == MIXED_DIMENSION:
        return rows_of_blocks(table, shards)
    table = table.with_float_codes()
    return decoded_rows(table, packed_table(table, shards))


def _read_shards(
    path: Path | str, manifest: Mapping[str, Any], table: TableScheme, form: str, verify: bool
) -> list[Shard]:
    held = manifest["tables"][table.name]["shards"]
    is_newer = not set(held) & set(FORMS)  # none of its forms is known here
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
