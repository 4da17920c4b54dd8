"""The artifact: a folder of safetensors files and a manifest.json that names, sizes and hashes each
of them."""

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NotRequired, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.files import FolderKind, NotNegative, Positive, conform, parse_json
from dnis_torchrec.scheme import FORMS_OF_0_1, DescribedTable, is_gone

_FORMAT = "dnis-torchrec-artifact"
_FORMAT_VERSION = "1.4"
"""Readers accept every minor version of their major one."""
MANIFEST = "manifest.json"
CARD = "MODEL_CARD.md"
"""What an artifact is, for people; its owner may write more into it."""
ENCODER = "encoder.arrow"
"""The file that turns rows of a data frame into what the model reads."""
MAX_FILE_BYTES = 2_000_000_000
"""Most bytes of a file of an artifact."""
_MOST_JSON_BYTES = 100_000_000
"""Most bytes of a manifest and of the header of a file; safetensors has the same limit."""
_LONGEST_NAME = 255
SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes of an artifact's tensors, by their name in a safetensors header."""


class RunOfArtifact(TypedDict):
    """The fields of a manifest's ``run`` that others rely on; it may hold more."""

    recipe: NotRequired[str | None]
    seed: NotRequired[NotNegative]
    embedding_dim: NotRequired[Positive | None]
    metrics: NotRequired[dict[str, float]]


class _Shard(TypedDict):
    file: str
    first_row: int
    num_rows: int


class _Table(DescribedTable):
    shards: dict[str, list[_Shard]]


class File(TypedDict):
    """The entry of a file."""

    bytes: int
    sha256: str
    tensors: NotRequired[dict[str, Any]]


class _Manifest(TypedDict):
    format_version: str
    versions: Any
    bytes: Any
    sha256: str
    forms: list[str]
    tables: dict[str, _Table]
    scheme: list[str]
    dense_state: list[str]
    refresh: NotRequired[list[str]]
    directories: NotRequired[list[str]]
    encoder: NotRequired[str]
    sequence: NotRequired[NotNegative]
    run: RunOfArtifact
    files: dict[str, File]


ARTIFACT = FolderKind("artifact", MANIFEST, _FORMAT)
_UNHASHED = 64 * "0"
_AGAIN = "it was damaged; export again"


def write_artifact_file(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes one safetensors file; returns its entry of the manifest."""
    for key, tensor in tensors.items():
        fits = tensor.dtype in SAFETENSORS_DTYPES.values()
        check(fits, f"tensor {key!r}", "a dtype of safetensors", tensor.dtype, "convert it first")
    (folder / name).parent.mkdir(exist_ok=True)
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    except SafetensorError as error:
        place = f"artifact, file {name!r}"
        raise OSError(describe(place, "it to be written", str(error))) from error
    return describe_tensors(folder, name)


def file_header(name: str, tensor: Tensor) -> bytes:
    """The bytes of a safetensors file of one tensor that stand before its values."""
    dtype = next(text for text, dtype in SAFETENSORS_DTYPES.items() if dtype == tensor.dtype)
    fields = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
    header = json.dumps({name: fields}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """At most how large a file of these tensors becomes, header included."""
    return 16 + sum(
        tensor.nbytes + 160 + 6 * len(name) + 20 * tensor.dim() for name, tensor in tensors.items()
    )


def describe_file(folder: Path, name: str) -> dict[str, Any]:
    """Size and sha256 of a file, for the manifest."""
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def describe_tensors(folder: Path, name: str) -> dict[str, Any]:
    """Size, sha256 and tensors of a safetensors file, for the manifest."""
    return describe_file(folder, name) | {"tensors": read_header(folder / name, name)}


def content_id(hashes: Mapping[str, str]) -> str:
    """One name for what the files of an artifact hold, given the sha256 of each."""
    lines = "".join(f"{digest} {name}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(
    folder: Path,
    manifest: Mapping[str, Any],
    kind: FolderKind = ARTIFACT,
    version: str = _FORMAT_VERSION,
) -> None:
    """Writes manifest.json, adding format, version and its own hash."""
    fields = {"format": kind.format, "format_version": version, **manifest, "sha256": _UNHASHED}
    content = (json.dumps(fields, indent=2, allow_nan=False) + "\n").encode()
    _check_size(len(content), _MOST_JSON_BYTES, MANIFEST, "form fewer blocks, or put less in run")
    content = _with_digits(content, _UNHASHED, hashlib.sha256(content).hexdigest())
    (folder / MANIFEST).write_bytes(content)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Reads and checks an artifact's manifest, and the size of every file that it lists."""
    place, manifest = read_own_manifest(path, ARTIFACT, _FORMAT_VERSION, _Manifest)
    _spell_forms_(manifest, place)
    check_names({name: of["feature_names"] for name, of in manifest["tables"].items()}, place)
    check_sizes(path, manifest)
    return manifest


def read_own_manifest(
    path: Path | str, kind: FolderKind, newest: str, fields: type
) -> tuple[str, dict[str, Any]]:
    """Reads a manifest that states its own hash, and says in words where it is."""
    folder = Path(path)
    check(folder.is_dir(), f"{kind.name} {str(path)!r}", "a folder", "none", "check the path")
    place, content, manifest = read_description(folder, kind, newest, fields)
    digits = manifest["sha256"]
    is_intact = re.fullmatch("[0-9a-f]{64}", digits) is not None
    digest = hashlib.sha256(_with_digits(content, digits, _UNHASHED)).hexdigest()
    requirement = "the sha256 that it states of itself"
    check(is_intact and digits == digest, place, requirement, "another", _AGAIN)
    return place, manifest


def check_sizes(path: Path | str, manifest: Mapping[str, Any], kind: FolderKind = ARTIFACT) -> None:
    """Checks that every file that a manifest lists is there, as large as it says."""
    for name, entry in manifest["files"].items():
        place = f"{kind.name} {str(path)!r}, file {name!r}"
        size = file_inside(Path(path), name, place).stat().st_size
        check(size == entry["bytes"], place, f"{entry['bytes']} bytes", size, _AGAIN)
        _check_size(size, MAX_FILE_BYTES, place, "export again")


def _check_size(size: int, most: int, place: str, remedy: str) -> None:
    check(size <= most, place, f"at most {most} bytes", size, remedy)


def check_names(features_of: Mapping[str, Sequence[str]], place: str) -> None:
    """Refuses names of tables and features that torch or a file system cannot hold."""
    of_torch = nn.ModuleDict()  # in which TorchRec keeps tables: its attributes name no table
    for table, features in features_of.items():
        fits = "." not in table and "" not in table.split("/") and not hasattr(of_torch, table)
        check(fits, place, "names of tables that torch takes", reprlib.repr(table), "rename it")
        for name in (table, *features):
            fits = name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME
            requirement = f"names of 1 to {_LONGEST_NAME} bytes that can be printed"
            check(fits, place, requirement, reprlib.repr(name), "rename it")


def read_description(
    folder: Path, kind: FolderKind, newest: str, fields: type
) -> tuple[str, bytes, dict[str, Any]]:
    """Reads the JSON file of a folder of a kind: its place in words, its bytes, what it says."""
    place = f"{kind.name} {str(folder)!r}, file {kind.manifest!r}"
    is_run, remedy = (folder / "run.json").is_file(), "export again"
    remedy = "this is a run: name a folder in it, or export it first" if is_run else remedy
    file = file_inside(folder, kind.manifest, place, remedy)
    _check_size(file.stat().st_size, _MOST_JSON_BYTES, place, _AGAIN)
    content = file.read_bytes()
    description: Any = parse_json(content, Any, place, remedy=_AGAIN)
    name = description.get("format") if isinstance(description, dict) else None
    foreign = f"give the folder of one {kind.name}"
    check(name == kind.format, place, f"format {kind.format!r}", repr(name), foreign)
    version, last = description.get("format_version"), newest.split(".")[0]
    major = version.split(".")[0] if isinstance(version, str) else ""
    is_version, requirement = re.fullmatch("[0-9]{1,9}", major), f"a format_version up to {last}.x"
    check(is_version is not None, place, requirement, repr(version), "export again")
    check(int(major) <= int(last), place, requirement, repr(version), "update dnis_torchrec")
    conform(description, fields, place, remedy="export again")
    return place, content, description


def _spell_forms_(manifest: dict[str, Any], place: str) -> None:
    """Gives forms of release 0.1.0 their present names, and passes over those that are gone."""
    names = manifest["forms"]
    manifest["forms"] = [FORMS_OF_0_1.get(form, form) for form in names if not is_gone(form)]
    is_read, remedy = bool(manifest["forms"]) or not names, "dnis_torchrec 0.1.0 reads it"
    check(is_read, place, "tables in a form that is read", names, f"{remedy}; export again")
    for table in manifest["tables"].values():
        table["shards"] = {
            FORMS_OF_0_1.get(form, form): shards
            for form, shards in table["shards"].items()
            if not is_gone(form)
        }


def file_inside(folder: Path, name: str, place: str, remedy: str = "export again") -> Path:
    """The file of that name, which has to be a plain file in the folder, reached by no link."""
    parts = PurePosixPath(name).parts
    is_plain = bool(parts) and "/".join(parts) == name and ".." not in parts
    is_plain = is_plain and not set(name) & set("\\:\0") and parts[0] != "/"
    check(is_plain, place, "a relative path within the folder", repr(name), "do not use it")
    file = folder.joinpath(*parts)
    check(os.path.lexists(file), place, "a file", "none", remedy)
    is_direct = file.resolve() == folder.resolve().joinpath(*parts) and file.is_file()
    check(is_direct, place, "a plain file", "a link or a folder", remedy)
    return file


def read_artifact_file(
    path: Path | str,
    manifest: Mapping[str, Any],
    name: str,
    *,
    verify: bool = False,
    kind: FolderKind = ARTIFACT,
) -> dict[str, Tensor]:
    """Maps a safetensors file into memory, once its header is as the manifest says."""
    file, place = _listed(path, manifest, name, kind, verify=verify)
    header, tensors = read_header(file, place), manifest["files"][name].get("tensors")
    requirement = f"tensors {reprlib.repr(tensors)}"
    check(header == tensors, place, requirement, reprlib.repr(header), _AGAIN)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(describe(place, "a safetensors file", str(error), _AGAIN)) from error


def read_plain_file(
    path: Path | str, manifest: Mapping[str, Any], name: str, kind: FolderKind = ARTIFACT
) -> tuple[bytes, str]:
    """A file that a manifest lists, its hash compared, and where it is."""
    file, place = _listed(path, manifest, name, kind, verify=True)
    return file.read_bytes(), place


def _listed(
    path: Path | str, manifest: Mapping[str, Any], name: str, kind: FolderKind, *, verify: bool
) -> tuple[Path, str]:
    """A file that a manifest lists, which `check_sizes` has seen, and where it is."""
    file, place = Path(path, name), f"{kind.name} {str(path)!r}, file {name!r}"
    check_known("file", name, manifest["files"])
    if verify:
        target = manifest["files"][name]["sha256"]
        digest = describe_file(Path(path), name)["sha256"]
        check(digest == target, place, f"sha256 {target}", digest, _AGAIN)
    return file, place


def read_header(file: Path, place: str) -> dict[str, Any]:
    """Dtype, shape and offset of every tensor of a safetensors file, from its header alone."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        fits = length <= file.stat().st_size - 8
        check(fits, place, "a safetensors file", "another", "export again")
        _check_size(length, _MOST_JSON_BYTES, f"{place}, header", "export again")
        content = stream.read(length)
    try:
        return {
            name: {
                "dtype": str(SAFETENSORS_DTYPES[fields["dtype"]]).removeprefix("torch."),
                "shape": fields["shape"],
                "offset": 8 + length + fields["data_offsets"][0],
            }
            for name, fields in json.loads(content).items()
        }
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        actual = f"header: {error}"
        raise ValueError(describe(place, "a safetensors file", actual, _AGAIN)) from error


def _with_digits(content: bytes, old: str, new: str) -> bytes:
    """`content` with the last `old` in it replaced by `new`, which is as long."""
    head, _, tail = content.rpartition(old.encode())
    return head + new.encode() + tail
