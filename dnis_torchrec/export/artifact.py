"""The artifact: a folder of safetensors files and a manifest.json that names, sizes and hashes each of them.

Written as a whole or not at all; read only after every check. Nothing is ever unpickled, and no path outside the folder
is followed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dnis_torchrec.checks import check, check_known, describe

FORMAT = "dnis-torchrec-artifact"
FORMAT_VERSION = "1.0"
"""Readers accept every minor version of their major one."""
MANIFEST = "manifest.json"
REQUIRED_FIELDS = ("format", "format_version", "versions", "forms", "tables", "bytes", "run", "files", "sha256")

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def new_folder(path: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder that appears under `path` complete, or not at all.

    The caller fills a hidden folder beside `path`; on leaving, its files are flushed to disk and it is renamed. An old
    artifact stays in place until then and is exchanged in one step where the system can do that (Linux), else in two
    renames, the first of which is undone if the second fails. On any error the hidden folder is removed.

    Args:
        path: the folder to make; missing parents are made too.
        overwrite: replace an artifact that exists.

    Yields:
        The folder to fill.

    Raises:
        ValueError: if `path` exists and is not to be, or is no artifact and so cannot be, replaced.
    """
    target = Path(os.path.abspath(path))
    _check_target(target, overwrite)
    made = [parent for parent in target.parents if not parent.exists()]
    partial = _beside(target)
    try:
        partial.mkdir(parents=True)
        yield partial
        _flush(partial)
        replaced = _move_into_place(partial, target)
        _flush_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    if replaced is not None:
        shutil.rmtree(replaced)


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes one safetensors file.

    Args:
        folder: the artifact's folder.
        name: path of the file within it.
        tensors: what it holds; no two may share memory.

    Returns:
        The file's entry for the manifest.
    """
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    file.chmod(0o644)  # safetensors writes for its owner alone; serving often runs as somebody else
    return describe_file(folder, name) | {"tensors": {key: _shape(tensor) for key, tensor in tensors.items()}}


def describe_file(folder: Path, name: str) -> dict[str, Any]:
    """Size and sha256 of a file, for the manifest."""
    return {"sha256": _sha256(folder / name), "bytes": (folder / name).stat().st_size}


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes manifest.json, adding format, version and its own hash."""
    fields = json.loads(json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **manifest}, allow_nan=False))
    fields["sha256"] = _sha256_of_fields(fields)
    (folder / MANIFEST).write_text(json.dumps(fields, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_manifest(path: Path | str) -> dict[str, Any]:
    """Reads and checks an artifact's manifest.

    Every file that it lists has to be there, inside the folder and of the stated size; hashes are checked when a file
    is read (`read_tensors`).

    Args:
        path: the artifact's folder.

    Returns:
        The manifest.

    Raises:
        ValueError: if the folder is no artifact, was written by a newer major version, or is damaged; names the file.
    """
    folder = Path(path)
    check(folder.is_dir(), f"artifact {str(path)!r}", "expected a folder", "none", "check the path")
    place = f"artifact {str(path)!r}, file {MANIFEST!r}"
    file = _file_inside(folder, MANIFEST, place)
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(describe(place, "expected JSON", str(error), "it was damaged; export again")) from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    check(found == FORMAT, place, f"expected format {FORMAT!r}", repr(found), "give a folder that export wrote")
    _check_version(manifest.get("format_version"), place)
    missing = [field for field in REQUIRED_FIELDS if field not in manifest]
    check(not missing, place, "expected all fields", f"none of {missing}", "export again")
    intact = manifest["sha256"] == _sha256_of_fields(manifest)
    check(intact, place, "expected the sha256 that it states of itself", "another", "it was damaged; export again")
    check(isinstance(manifest["forms"], list), place, "expected a list of forms", manifest["forms"], "export again")
    listed = manifest["files"]
    entries = listed.values() if isinstance(listed, dict) else [None]
    complete = all(isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry) for entry in entries)
    check(complete, place, "expected size and sha256 of every file", "less", "export again")
    for name, entry in listed.items():
        place = f"artifact {str(path)!r}, file {name!r}"
        size = _file_inside(folder, name, place).stat().st_size
        check(size == entry["bytes"], place, f"expected {entry['bytes']} bytes", size, "it was damaged; export again")
    return manifest


def read_tensors(path: Path | str, manifest: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Reads one safetensors file after checking its hash, and its tensors' dtypes and shapes.

    Args:
        path: the artifact's folder.
        manifest: from `read_manifest`.
        name: path of the file within the folder.

    Returns:
        Its tensors, on the CPU, backed by the file where safetensors can.

    Raises:
        ValueError: if the manifest does not list the file or the file is not the one listed.
    """
    place = f"artifact {str(path)!r}, file {name!r}"
    check_known("file", name, manifest["files"])
    entry = manifest["files"][name]
    file = _file_inside(Path(path), name, place)
    found = _sha256(file)
    check(found == entry["sha256"], place, f"expected sha256 {entry['sha256']}", found, "it was damaged; export again")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(describe(place, "expected a safetensors file", str(error), "export again")) from error
    shapes = {key: _shape(tensor) for key, tensor in tensors.items()}
    check(shapes == entry.get("tensors"), place, f"expected tensors {entry.get('tensors')}", shapes, "export again")
    return tensors


def _shape(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of_fields(manifest: Mapping[str, Any]) -> str:
    fields = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_version(version: object, place: str) -> None:
    major = version.split(".")[0] if isinstance(version, str) else ""
    check(major.isdecimal(), place, "expected a format_version like '1.0'", repr(version), "export again")
    newest = int(FORMAT_VERSION.split(".")[0])
    remedy = "update dnis_torchrec"
    check(int(major) <= newest, place, f"expected a format_version up to {newest}.x", repr(version), remedy)


def _file_inside(folder: Path, name: str, place: str) -> Path:
    """The file of that name, which has to be a plain file in the folder, reached through no link."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and ".." not in parts and not set(name) & set("\\:\0")
    check(plain and parts[0] != "/", place, "expected a relative path within the folder", repr(name), "do not use it")
    file = folder.joinpath(*parts)
    check(os.path.lexists(file), place, "expected a file", "none", "it is missing; export again")
    direct = file.resolve() == folder.resolve().joinpath(*parts)
    check(direct and file.is_file(), place, "expected a plain file", "a link or a folder", "export again")
    return file


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    place = f"artifact {str(target)!r}"
    remedy = "pass overwrite=True to replace it"
    check(overwrite, place, "expected a path that does not exist", "an existing one", remedy)
    ours = False
    if target.is_dir() and not target.is_symlink() and (target / MANIFEST).is_file():
        try:
            manifest = json.loads((target / MANIFEST).read_bytes())
            ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
        except ValueError:
            ours = False
    check(ours, place, "expected an artifact to overwrite", "something else", "choose another path, or remove it first")


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")


def _move_into_place(partial: Path, target: Path) -> Path | None:
    """Renames `partial` to `target`; returns where the folder that stood there is now."""
    if not os.path.lexists(target):
        os.rename(partial, target)
        return None
    if _exchange(partial, target):
        return partial
    aside = _beside(target)
    os.rename(target, aside)
    try:
        os.rename(partial, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
