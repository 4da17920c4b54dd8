"""Deltas: what a refresh changed in an artifact, and how folders and served modules take it."""

import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dnis_torchrec.artifact.export import Predictor
from dnis_torchrec.artifact.load import ArtifactFolder, bit_fields_of
from dnis_torchrec.artifact.manifest import (
    ENCODER,
    MANIFEST,
    MAX_FILE_BYTES,
    File,
    RunOfArtifact,
    check_sizes,
    content_id,
    describe_file,
    read_artifact_file,
    read_own_manifest,
    read_plain_file,
    write_manifest,
)
from dnis_torchrec.artifact.write import as_json, hashes_of, write_artifact, write_group
from dnis_torchrec.blocks.codes import ColumnCodes, row_strides
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import check, check_known, versions
from dnis_torchrec.data.files import FolderKind, Positive, folder_lock, new_folder
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.gate import Gate
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection, PackedTable, split_blocks
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
from dnis_torchrec.serving.tables import MeanForUnknownIds, ServedCollection

DELTA = FolderKind("delta", MANIFEST, "dnis-torchrec-delta")
_VERSION = "1.0"
_ANEW = "write a whole artifact"
_NO_BYTES = torch.empty(0, dtype=torch.uint8)
_PARTS = {
    "newborn": (torch.uint8, 1),  # rows of the block behind the others, as gaps
    "bits": (torch.uint8, 1),  # of its columns
    "moved": (torch.int32, 1),  # blocks whose scales or shifts are others, and the new one
    "scale": (torch.bfloat16, 2),
    "shift": (torch.int16, 2),
    "whole": (torch.int32, 1),  # blocks of which all bytes are here
    "changed": (torch.uint8, 1),  # rows of other blocks, as gaps between their places
    "rows": (torch.uint8, 1),  # the bytes of both, block by block
}
"""Tensors of a table in a delta, by the names that they have there: dtype and dims. A place counts
the rows of all blocks that take bytes, one block after another."""

Parts = Mapping[str, Tensor]
_COUNTS = ("num_blocks", "num_retained")
"""What of a table's description a delta may change."""
_Target = TypeVar("_Target", str, Path, nn.Module, Predictor)
_CHANGE = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedState:
    """All that an artifact of packed tables holds."""

    scheme: MixedDimensionScheme
    rows: Mapping[str, Tensor]
    dense: Mapping[str, Tensor]
    run: Mapping[str, Any]
    encoder: bytes = b""
    content_id: str = ""
    sequence: int = 0

    @property
    def refresh(self) -> dict[str, Tensor]:
        """What trained rows go through before they are encoded."""
        return self.scheme.to_refresh()


@dataclass(frozen=True, kw_only=True, eq=False)
class Delta:
    """What a delta holds, read and checked as far as that goes without its base."""

    place: str
    base: str
    result: str
    sequence: int
    run: Mapping[str, Any]
    tables: Mapping[str, Parts]
    dense: Mapping[str, Tensor]
    refresh: Mapping[str, Tensor]
    encoder: bytes | None

    def check_base(self, base: str, sequence: int) -> None:
        """Refuses any other state than the one that the delta stands on."""
        remedy = "apply deltas in order, each once, to what they were written for"
        requirement = f"a base whose next delta is number {sequence + 1}"
        check(self.sequence == sequence + 1, self.place, requirement, self.sequence, remedy)
        check(self.base == base, self.place, f"the base {base[:12]}", self.base[:12], remedy)


class _Manifest(TypedDict):
    format_version: str
    versions: Any
    sha256: str
    base: str
    result: str
    sequence: Positive
    run: RunOfArtifact
    tables: list[str]
    dense_state: list[str]
    refresh: list[str]
    encoder: NotRequired[str]
    files: dict[str, File]


def apply_delta(target: _Target, delta: Path | str) -> _Target:
    """Brings an artifact, or what was loaded from one, to the state that a delta was written for.

    A module takes it between two lookups, while other threads look up: each answer is that of one
    version. New tensors are built beside the old ones; tables without a change stay as they are, in
    their mapped files. A folder is written whole and takes the old one's place at once; it is then
    what a whole artifact of that state would be, byte for byte. What fails changes nothing. Other
    processes that apply a delta to the folder meanwhile wait.

    Local, no collective.

    Args:
        target: folder of an artifact with packed tables, or what `load`, `load_model` or
            `load_predictor` returned for it. A model has to be called as ``model(...)``. What was
            scripted, traced or packaged before stays as it was.
        delta: folder that ``dnis refresh --delta`` wrote.

    Returns:
        `target`.

    Raises:
        ValueError: if the delta stands on another state (out of order, twice, another artifact), is
            damaged or forged, or the target was never loaded from an artifact.

    Example:
        >>> served = load("artifact")  # doctest: +SKIP
        >>> apply_delta(served, "delta-1")  # doctest: +SKIP
        >>> apply_delta("artifact", "delta-1")  # doctest: +SKIP
    """
    with _CHANGE, torch.inference_mode(False), torch.no_grad():
        change = read_delta(delta)
        if isinstance(target, nn.Module):
            _change_model_(target, change)
        elif isinstance(target, Predictor):
            _change_model_(target.model, change, target)
        else:
            ArtifactFolder(target)
            with folder_lock(Path(os.path.abspath(target)).parent):  # its place is what changes
                write_state(_state_of(read_state(target), change), target, overwrite=True)
    return target


# ---- states


def read_state(path: Path | str) -> ServedState:
    """Reads an artifact, every hash compared; its rows stay in mapped files."""
    folder, place = ArtifactFolder(path), f"artifact {str(path)!r}"
    manifest = folder.manifest
    remedy = "export it with forms=['packed']"
    check(manifest["forms"] == [PACKED], place, "packed tables alone", manifest["forms"], remedy)
    scheme = folder.scheme()
    rows = {
        name: bit_fields_of(table.with_float_codes(), folder.shards(table, PACKED, True))
        for name, table in scheme.tables.items()
    }
    name = manifest.get("encoder")
    state = ServedState(
        scheme=scheme,
        rows=rows,
        dense=folder.tensors("dense_state"),
        run=manifest["run"],
        encoder=read_plain_file(path, manifest, name)[0] if name else b"",
        content_id=folder.content_id,
        sequence=folder.sequence,
    )
    folder.check_unchanged()
    return state


def write_state(state: ServedState, out: Path | str, *, overwrite: bool = False) -> Path:
    """Writes a state as a whole artifact."""
    return write_artifact(
        state.rows,
        state.scheme,
        out,
        forms=(PACKED,),
        dense_state=state.dense,
        run=state.run,
        encoder=state.encoder,
        sequence=state.sequence,
        overwrite=overwrite,
    )


def _id_of(state: ServedState) -> str:
    return content_id(hashes_of(state.rows, state.scheme, state.dense, state.encoder))


def _state_of(state: ServedState, delta: Delta) -> ServedState:
    """The state that a delta was written for."""
    delta.check_base(state.content_id, state.sequence)
    for name in delta.tables:
        check_known("table", name, state.scheme.tables)
    tables, rows = {}, {}
    for name, table in state.scheme.tables.items():
        parts, place = delta.tables.get(name, {}), f"{delta.place}, table {name!r}"
        tables[name] = _table_of(table, parts, place)
        rows[name] = _rows_of(table, tables[name], state.rows[name], parts, place)
    _check_dense(state.dense, delta)
    scheme = MixedDimensionScheme(tables)
    result = ServedState(
        scheme=scheme.with_refresh(scheme.to_refresh() | dict(delta.refresh)),
        rows=rows,
        dense={**state.dense, **delta.dense},
        run=delta.run,
        encoder=state.encoder if delta.encoder is None else delta.encoder,
        content_id=delta.result,
        sequence=delta.sequence,
    )
    actual, remedy = _id_of(result), "get the delta again"
    check(actual == delta.result, delta.place, f"the state {delta.result}", actual, remedy)
    return result


def _check_dense(dense: Mapping[str, Tensor], delta: Delta) -> None:
    """Refuses dense weights that the base has not, or in another shape."""
    for key, value in delta.dense.items():
        place = f"{delta.place}, dense weight {key!r}"
        check_known("dense weight", key, dense)
        shape, actual = tuple(dense[key].shape), tuple(value.shape)
        check(actual == shape, place, f"shape {shape}", actual, _ANEW)


# ---- places of rows, as gaps between them


def gaps_of(places: Tensor) -> Tensor:
    """Rising places as gaps, one byte each: 255 adds 255 and goes on."""
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    num_bytes = gaps // 255 + 1
    result = torch.full((int(num_bytes.sum()),), 255, dtype=torch.uint8)
    result[num_bytes.cumsum(0) - 1] = (gaps % 255).to(torch.uint8)
    return result


def places_of(gaps: Tensor, num_places: int, place: str) -> Tensor:
    """The inverse of `gaps_of`."""
    is_last = gaps != 255
    is_whole = not len(gaps) or bool(is_last[-1])
    sums = gaps.long().cumsum(0)[is_last]
    places = sums + torch.arange(len(sums))
    largest = int(places[-1]) if len(places) else -1
    check(is_whole and largest < num_places, place, f"places below {num_places}", largest)
    return places


# ---- one table


def _table_of(table: TableScheme, parts: Parts, place: str) -> TableScheme:
    """The scheme of a table after a delta: another block, other scales and shifts."""
    if not {"newborn", "moved"} & parts.keys():
        return table
    check(table.has_codes, place, "a table in codes", "one in float32", _ANEW)
    routing, codes, dim = table.routing, table.codes, table.embedding_dim
    bits, scale, shift = codes.bits, codes.scale.clone(), codes.shift.clone()
    if "newborn" in parts:
        new_bits = parts.get("bits", _NO_BYTES)
        check(len(new_bits) == dim, place, f"bits of {dim} columns", len(new_bits))
        check(bool(new_bits.any()), place, "bits of a new block", "none")
        ids = places_of(parts["newborn"], table.num_embeddings, place)
        routing = _with_block(table, ids, place)
        bits = torch.cat([bits, new_bits[None]])
        scale, shift = pad(scale, (0, 0, 0, 1), value=1.0), pad(shift, (0, 0, 0, 1))
    numbers = _blocks_in(parts, "moved", len(bits), place)
    for part, values in {"scale": scale, "shift": shift}.items():
        value = parts.get(part, _NO_BYTES)
        requirement, actual = f"{part} of shape {(len(numbers), dim)}", tuple(value.shape)
        check(actual == (len(numbers), dim), place, requirement, actual)
        values[numbers] = value.to(values.dtype)
    codes, retained = ColumnCodes(bits, scale, shift), bits > 0
    area = int((routing.row_counts() * retained.sum(dim=1)).sum())
    changes = {"routing": routing, "retained": retained, "num_retained": area, **vars(codes)}
    return replace(table, **cast(Any, changes))


def _with_block(table: TableScheme, ids: Tensor, place: str) -> RowRouting:
    """The routing of a table with some rows in a block behind the others."""
    has_bytes = pad(row_strides(table.column_bits()) > 0, (0, 1))
    blocks, last = table.routing.all_blocks(), table.num_blocks
    is_free = not bool(has_bytes[blocks[ids]].any()) and len(ids) > 0
    check(is_free, place, "rows without bytes in the new block", "others", _ANEW)
    blocks[blocks == last] = last + 1
    blocks[ids] = last
    return RowRouting.from_map(blocks, last + 1)


def _blocks_in(parts: Parts, name: str, num_blocks: int, place: str) -> Tensor:
    """Rising numbers of blocks."""
    blocks = parts.get(name, _NO_BYTES).long()
    rises = bool((blocks.diff() > 0).all()) and bool(((blocks >= 0) & (blocks < num_blocks)).all())
    check(rises, place, f"{name!r} to rise in 0..{num_blocks - 1}", "others")
    return blocks


def _rows_of(old: TableScheme, new: TableScheme, rows: Tensor, parts: Parts, place: str) -> Tensor:
    """The bit fields of a table after a delta: the same tensor where none have changed."""
    bits = new.column_bits()
    counts, strides = new.routing.row_counts(), row_strides(bits)
    starts = pad((counts * (strides > 0)).cumsum(0), (1, 0))
    places = places_of(parts.get("changed", _NO_BYTES), int(starts[-1]), place)
    whole = _blocks_in(parts, "whole", len(bits), place)
    has_new = new.num_blocks > old.num_blocks
    is_here = len(bits) - 1 in whole.tolist()
    check(is_here or not has_new, place, "all rows of the new block", "others")
    bounds = torch.searchsorted(places, starts).tolist()
    sizes = torch.tensor(bounds).diff()
    check(not bool(sizes[whole].any()), place, "no row of a whole block once more", "some")
    sizes[whole] = counts[whole]
    content, num_bytes = parts.get("rows", _NO_BYTES), int(sizes @ strides)
    check(len(content) == num_bytes, place, f"{num_bytes} bytes of rows", len(content))
    if not num_bytes:
        return rows
    more = int(counts @ strides) - len(rows)
    result = torch.cat([rows, rows.new_zeros(more)]) if more else rows.clone()
    blocks = split_blocks(result, counts, bits)
    chunks = content.split((sizes * strides).tolist())
    for s in (sizes * strides).nonzero().flatten().tolist():
        values = chunks[s].view(-1, blocks[s].shape[1]).to(rows.device)
        if len(values) == len(blocks[s]):
            blocks[s].copy_(values)
        else:
            here = places[bounds[s] : bounds[s + 1]] - starts[s]
            blocks[s].index_copy_(0, here.to(rows.device), values)
    return result


def _difference(
    old: TableScheme, new: TableScheme, old_rows: Tensor, new_rows: Tensor
) -> dict[str, Tensor]:
    """The parts of a table in a delta."""
    place, parts = f"table {old.name!r}", dict[str, Tensor]()
    num_new, bits = new.num_blocks - old.num_blocks, new.column_bits()
    is_same = num_new in (0, 1) and bits[: old.num_blocks].equal(old.column_bits())
    check(is_same, place, "the blocks and bits of its base", "others", _ANEW)
    if num_new:
        ids = [
            rows.start + (blocks == old.num_blocks).nonzero().flatten()
            for rows, blocks in new.routing.blocks_of_all()
        ]
        parts |= {"newborn": gaps_of(torch.cat(ids)), "bits": bits[-1]}
    if new.has_codes and old.has_codes:
        scale, shift = (pad(x, (0, 0, 0, num_new)) for x in (old.codes.scale, old.codes.shift))
        is_other = (new.codes.scale != scale) | (new.codes.shift != shift)
        numbers = is_other.any(dim=1).nonzero().flatten()
        if len(numbers):
            columns = {"scale": new.codes.scale.bfloat16(), "shift": new.codes.shift}
            parts |= {name: part[numbers] for name, part in columns.items()}
            parts["moved"] = numbers.int()
    schemes = [MixedDimensionScheme({old.name: t}) for t in (_table_of(old, parts, place), new)]
    of_delta, of_state = (scheme.to_tensors() for scheme in schemes)
    is_same = of_delta.keys() == of_state.keys() and not _others(of_delta, of_state)
    check(is_same, place, "the rows of each block as in its base", "others", _ANEW)
    counts, strides = new.routing.row_counts(), row_strides(bits)
    check(len(new_rows) == int(counts @ strides), place, f"{int(counts @ strides)} bytes", "others")
    blocks = split_blocks(new_rows, counts, bits)
    of_old = split_blocks(old_rows, old.routing.row_counts(), old.column_bits())
    first, whole, places, chunks = 0, list[int](), list[Tensor](), list[Tensor]()
    for s, block in enumerate(blocks):
        n, stride = block.shape
        is_new = s >= len(of_old)
        if stride and (is_new or not block.equal(of_old[s])):
            here = torch.empty(0, dtype=torch.int64)
            if not is_new:
                # a row is one value of numpy: a byte at a time takes twice as long
                pair = [part.numpy().view(f"V{stride}").ravel() for part in (block, of_old[s])]
                here = torch.from_numpy((pair[0] != pair[1]).nonzero()[0])
            if is_new or len(here) * (stride + 1) > n * stride:
                whole.append(s)
                chunks.append(block.flatten())
            else:
                places.append(first + here)
                chunks.append(block[here].flatten())
        first += n * (stride > 0)
    rows, no_place = torch.cat([_NO_BYTES, *chunks]), torch.empty(0, dtype=torch.int64)
    parts |= {"whole": torch.tensor(whole, dtype=torch.int32), "rows": rows}
    parts["changed"] = gaps_of(torch.cat([no_place, *places]))
    return {name: part for name, part in parts.items() if len(part)}


# ---- delta folders


def write_delta(
    base: Path | str, state: ServedState, out: Path | str, *, overwrite: bool = False
) -> Path:
    """Writes what a state differs in from the artifact that it was made of.

    Blocks, bits and all that features see are those of the base: a block of newborn rows may stand
    behind the others. `state.content_id` and `state.sequence` are not read."""
    old = read_state(base)
    pairs = [(one.scheme.to_json(), one.dense, one.refresh) for one in (old, state)]
    (facts, dense, refresh), (new_facts, new_dense, new_refresh) = pairs
    for part, names in {"tables": (facts, new_facts), "dense weights": (dense, new_dense)}.items():
        check(list(names[0]) == list(names[1]), part, f"those of {base}", "others", _ANEW)
    tables: dict[str, Tensor] = {}
    for name, table in old.scheme.tables.items():
        kinds = [
            {key: value for key, value in fields[name].items() if key not in _COUNTS}
            for fields in (facts, new_facts)
        ]
        check(kinds[0] == kinds[1], f"table {name!r}", f"{kinds[0]}", kinds[1], _ANEW)
        parts = _difference(table, state.scheme.tables[name], old.rows[name], state.rows[name])
        tables |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
    for key, value in dense.items():
        fits, place = _kind(value) == _kind(new_dense[key]), f"dense weight {key!r}"
        check(fits, place, _kind(value), _kind(new_dense[key]), _ANEW)
    check(refresh.keys() <= new_refresh.keys(), "refresh", "the base's tensors", "fewer", _ANEW)
    check(bool(state.encoder) or not old.encoder, "encoder", "one, as the base has", "none", _ANEW)
    groups = {"tables": tables, "dense_state": _others(dense, new_dense)}
    groups["refresh"] = _others(refresh, new_refresh)
    manifest = {
        "versions": versions(),
        "base": old.content_id,
        "result": _id_of(state),
        "sequence": old.sequence + 1,
        "run": as_json(state.run),
        "files": {},
    }
    with new_folder(Path(out), overwrite=overwrite, kind=DELTA) as folder:
        for stem, tensors in groups.items():
            files = write_group(folder, stem, tensors, MAX_FILE_BYTES)
            manifest |= {stem: list(files), "files": manifest["files"] | files}
        if state.encoder != old.encoder:
            (folder / ENCODER).write_bytes(state.encoder)
            manifest["encoder"] = ENCODER
            manifest["files"] |= {ENCODER: describe_file(folder, ENCODER)}
        write_manifest(folder, manifest, DELTA, _VERSION)
    return Path(out)


def read_delta(path: Path | str) -> Delta:
    """Reads a delta, every hash compared."""
    _, manifest = read_own_manifest(path, DELTA, _VERSION, _Manifest)
    check_sizes(path, manifest, DELTA)
    place, tensors = f"delta {str(path)!r}", dict[str, dict[str, Tensor]]()
    for stem in ("tables", "dense_state", "refresh"):
        tensors[stem] = {}
        for name in manifest[stem]:
            tensors[stem] |= read_artifact_file(path, manifest, name, verify=True, kind=DELTA)
    tables: dict[str, dict[str, Tensor]] = {}
    for key, part in tensors["tables"].items():
        table, _, name = key.rpartition("/")
        check_known("part of a table", name, _PARTS)
        fits, actual = (part.dtype, part.dim()) == _PARTS[name], f"{part.dtype}, {part.dim()} dims"
        check(fits, f"{place}, {key!r}", "{}, {} dims".format(*_PARTS[name]), actual)
        tables.setdefault(table, {})[name] = part
    encoder = manifest.get("encoder")
    return Delta(
        place=place,
        base=manifest["base"],
        result=manifest["result"],
        sequence=manifest["sequence"],
        run=manifest["run"],
        tables=tables,
        dense=tensors["dense_state"],
        refresh=tensors["refresh"],
        encoder=read_plain_file(path, manifest, encoder, DELTA)[0] if encoder else None,
    )


def _others(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `new` that have other bytes in `old`."""
    return {key: new[key] for key in new if key not in old or not _same(old[key], new[key])}


def _same(first: Tensor, second: Tensor) -> bool:
    one, other = (part.detach().cpu().contiguous().flatten() for part in (first, second))
    is_same = _kind(first) == _kind(second)
    return is_same and one.view(torch.uint8).equal(other.view(torch.uint8))


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


# ---- served modules


def _change_model_(model: nn.Module, delta: Delta, predictor: Predictor | None = None) -> None:
    """Brings a served model to the state of a delta, between two calls."""
    served, place = list(dict.fromkeys(_served_in(model))), type(model).__name__
    remedy = "load it by load, load_model or load_predictor"
    is_loaded = bool(served) and all(module.content_id for module in served)
    check(is_loaded, place, "tables of an artifact", "none", remedy)
    for module in served:
        delta.check_base(module.content_id, module.sequence)
    changes = [(module, _with_delta(module, delta)) for module in served]
    dense: list[tuple[Tensor, Tensor]] = []
    if not isinstance(model, ServedCollection):
        names = [name for module in served for name in cast(Any, module).schemes()]
        for name in delta.tables:
            check_known("table", name, names)
        state = model.state_dict(keep_vars=True)
        _check_dense(state, delta)
        dense = [(state[key], value.to(state[key]).clone()) for key, value in delta.dense.items()]
    encoder = None
    if predictor is not None and delta.encoder is not None:
        encoder = type(predictor.encoder).from_bytes(delta.encoder, delta.place)
    is_single = isinstance(model, PackedEmbeddingBagCollection | ServedEmbeddingCollection)
    with nullcontext() if is_single else Gate.of(model).shut():
        for tensor, value in dense:
            tensor.data = value
        for module, other in changes:
            module.take_content_(other)
            module.content_id, module.sequence = delta.result, delta.sequence
        if predictor is not None and encoder is not None:
            predictor.encoder = encoder


def _served_in(model: nn.Module) -> list[ServedCollection]:
    if isinstance(model, ServedCollection):
        return [model]
    return [module for child in model.children() for module in _served_in(child)]


def _with_delta(module: ServedCollection, delta: Delta) -> Any:
    """A collection of the new state, with the old one's tensors where nothing has changed."""
    if isinstance(module, MeanForUnknownIds):
        inner = _with_delta(cast(ServedCollection, module.collection), delta)
        return MeanForUnknownIds(MixedDimensionScheme(inner.schemes()), inner).to(module.device)
    if isinstance(module, ServedEmbeddingCollection):
        tables = {name: _with_delta(cast(Any, part), delta) for name, part in module.tables.items()}
        schemes = {}
        for name, table in module.schemes().items():
            single = tables[name].schemes()[name]
            features = {"pooling": table.pooling, "feature_names": table.feature_names}
            schemes[name] = replace(single, **cast(Any, features))
        return ServedEmbeddingCollection(MixedDimensionScheme(schemes), tables)
    place, remedy = type(module).__name__, "load it with form='packed', and shard it after deltas"
    is_packed = isinstance(module, PackedEmbeddingBagCollection)
    check(is_packed, place, "packed tables", "others", remedy)
    collection = cast(PackedEmbeddingBagCollection, module)
    schemes, packed_tables = {}, {}
    for name, table in collection.schemes().items():
        parts, place = delta.tables.get(name, {}), f"{delta.place}, table {name!r}"
        schemes[name] = new = _table_of(table, parts, place)
        old = collection.table(name)
        rows = _rows_of(table, new, old.rows, parts, place)
        directory = old.directory if new.routing is table.routing else None
        codes = new.codes.scale, new.codes.shift
        packed_tables[name] = PackedTable.from_rows(new, rows, *codes, directory)
    way = "zero" if collection._zero_unknown else "error"
    scheme = MixedDimensionScheme(schemes)
    return PackedEmbeddingBagCollection(scheme, packed_tables, unknown_ids=way).to(module.device)
