"""The manifest of a checkpoint: its tensors, their files, and whether it fits a run. JSON, never
unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import Positive, check_plain, conform, parse_json, write_text
from dnis_torchrec.data.urls import Address, file_size, local_path, path_in, read_bytes
from dnis_torchrec.training.checkpoint.placement import ITERATIONS, TableDescription

_FORMAT = "dnis-torchrec-checkpoint"
_FORMAT_VERSION = 3
CHECKPOINT_MANIFEST = "manifest.json"
_OTHER = "use another checkpoint"
_SHOWN = 8
"""Differences that one error names."""


class _Chunk(TypedDict):
    offset: list[int]
    size: list[int]
    file: str


class _Tensor(TypedDict):
    dtype: str
    size: list[int]
    chunks: list[_Chunk]


class _Head(TypedDict):
    world_size: Positive
    files: dict[str, int]
    tables: dict[str, TableDescription]
    values: dict[str, Any]
    tensors: dict[str, _Tensor]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint: its files, tables, values and tensors."""

    world_size: int
    files: Mapping[str, int]
    tables: Mapping[str, TableDescription]
    values: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]

    def text(self) -> str:
        """The content of manifest.json."""
        return (
            json.dumps({"format": _FORMAT, "format_version": _FORMAT_VERSION, **asdict(self)})
            + "\n"
        )

    def write(self, folder: Path) -> None:
        """Writes manifest.json, whole or not at all."""
        write_text(folder / CHECKPOINT_MANIFEST, self.text(), durable=True)

    @staticmethod
    def read(folder: Address) -> Manifest:
        """Reads the manifest, and looks whether every file that it names is there and whole."""
        place = f"checkpoint {folder}"
        file, here = path_in(folder, CHECKPOINT_MANIFEST), local_path(folder)
        if here is not None:
            check_plain(here, place)
        check(file_size(file) is not None, place, "a checkpoint", f"no {CHECKPOINT_MANIFEST} in it")
        head: dict[str, Any] = parse_json(
            read_bytes(file), dict[str, Any], str(file), remedy=_OTHER
        )
        check(head.get("format") == _FORMAT, place, f"format {_FORMAT!r}", repr(head.get("format")))
        version, remedy = (
            head.get("format_version"),
            "use the version of dnis_torchrec that wrote it",
        )
        check(
            version == _FORMAT_VERSION, place, f"format version {_FORMAT_VERSION}", version, remedy
        )
        conform(head, _Head, str(file), remedy=_OTHER)
        for name, size in head["files"].items():
            check(os.path.basename(name) == name, place, "names of files in it", repr(name))
            found = file_size(path_in(folder, name))
            rank = name.removeprefix("rank").partition(".")[0]
            received = "no such file" if found is None else f"{found} bytes"
            remedy = f"put back what rank {rank} wrote, or resume from another checkpoint"
            check(found == size, f"{place}, {name}", f"{size} bytes", received, remedy)
        tables = {
            name: TableDescription(**{**described, "column_cuts": tuple(described["column_cuts"])})
            for name, described in head["tables"].items()
        }
        for key, entry in head["tensors"].items():
            _check_tensor(entry, head["files"], f"{file}, tensor {key!r}")
        keys = ("world_size", "files", "values", "tensors")
        return Manifest(tables=tables, **{key: head[key] for key in keys})

    def to_metadata(self) -> Metadata:
        """The same in the words of torch.distributed.checkpoint."""
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        stored = {}
        for key, entry in self.tensors.items():
            chunks = []
            for chunk in entry["chunks"]:
                offset = torch.Size(chunk["offset"])
                chunks.append(ChunkStorageMetadata(offsets=offset, sizes=torch.Size(chunk["size"])))
                stored[MetadataIndex(key, offset)] = chunk["file"]
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=stored)


def _check_tensor(entry: _Tensor, files: Mapping[str, int], place: str) -> None:
    """Checks what torch.distributed.checkpoint takes for granted: dtypes of torch, chunks inside of
    their tensor."""
    known = isinstance(getattr(torch, entry["dtype"], None), torch.dtype)
    check(known, place, "a dtype of torch", repr(entry["dtype"]), _OTHER)
    whole = entry["size"]
    for chunk in entry["chunks"]:
        check(
            chunk["file"] in files, place, "a file of the checkpoint", repr(chunk["file"]), _OTHER
        )
        offset, size = chunk["offset"], chunk["size"]
        fits = len(offset) == len(size) == len(whole)
        fits = fits and all(
            0 <= o <= o + s <= w for o, s, w in zip(offset, size, whole, strict=True)
        )
        check(fits, place, f"chunks inside of {whole}", f"{size} at {offset}", _OTHER)


def chunk_name(key: str, offset: Iterable[int]) -> str:
    """The name of a chunk in its file."""
    return f"{key}@{','.join(map(str, offset))}"


def tensor_entries(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """`Manifest.tensors` of a checkpoint whose storage_data names the file of every chunk."""
    entries: dict[str, dict[str, Any]] = {}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(describe(key, "tensors alone", type(tensor).__name__))
        chunks = [
            {
                "offset": list(chunk.offsets),
                "size": list(chunk.sizes),
                "file": metadata.storage_data[MetadataIndex(key, chunk.offsets)],
            }
            for chunk in tensor.chunks
        ]
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        entries[key] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return entries


def check_fits(
    manifest: Manifest,
    tables: Mapping[str, TableDescription],
    sizes: Mapping[str, tuple[int, ...]],
    place: str,
) -> None:
    """Checks that a checkpoint is one of the same tables, blocks, weights and optimizers. Local, no
    collective."""
    differences = [
        *_table_differences(manifest.tables, tables),
        *_tensor_differences(manifest, sizes),
    ]
    shown = "; ".join(differences[:_SHOWN]) + (
        f"; and {len(differences) - _SHOWN} more" if differences[_SHOWN:] else ""
    )
    remedy = "resume with the recipe, data and settings that the run was started with"
    check(not differences, place, "a checkpoint of this run", f"one in which {shown}", remedy)
    for name, own in tables.items():
        per_column_shard = [
            key for key in sizes if key.startswith(f"fused/{name}/") and len(sizes[key]) == 1
        ]
        if per_column_shard and manifest.tables[name].column_cuts != own.column_cuts:
            saved, now = len(manifest.tables[name].column_cuts), len(own.column_cuts)
            supported = (
                f"supported for row-wise optimizers is the checkpoint's {saved} column shards"
            )
            remedy = "resume with the sharding plan or number of ranks of the checkpoint"
            raise NotImplementedError(
                describe(f"{place}, table {name!r}", supported, f"{now} column shards", remedy)
            )


def _table_differences(
    saved: Mapping[str, TableDescription], own: Mapping[str, TableDescription]
) -> Iterator[str]:
    for name in sorted(set(saved) ^ set(own)):
        yield f"table {name!r} is only in the {'checkpoint' if name in saved else 'run'}"
    for name in sorted(set(saved) & set(own)):
        for field in ("rows", "embedding_dim"):
            if getattr(saved[name], field) != getattr(own[name], field):
                yield f"table {name!r} has {field} {getattr(saved[name], field)} instead of {getattr(own[name], field)}"
        if saved[name].blocks != own[name].blocks:
            yield f"table {name!r} has other row blocks"


def _tensor_differences(manifest: Manifest, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yields differences in tensors beside the tables; those of one rank, or of the kernels it
    uses, may differ."""

    def compared(keys: Iterable[str]) -> set[str]:
        return {key for key in keys if not key.startswith(("rank", "table/")) and key != ITERATIONS}

    saved, own = compared(manifest.tensors), compared(sizes)
    for key in sorted(saved ^ own):
        yield f"{key} is only in the {'checkpoint' if key in saved else 'run'}"
    for key in sorted(saved & own):
        is_per_shard = key.startswith("fused/") and len(sizes[key]) == 1
        size = tuple(manifest.tensors[key]["size"])
        if size != sizes[key] and not is_per_shard:
            yield f"{key} has shape {size} instead of {sizes[key]}"
