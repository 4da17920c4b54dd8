"""The folder of a packaged model: package.json, which says what the model takes and hashes every
other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from dnis_torchrec.artifact.manifest import describe_file, file_inside
from dnis_torchrec.checks import check
from dnis_torchrec.data.files import FolderKind, conform, parse_json

_FORMAT = "dnis-torchrec-package"
_FORMAT_VERSION = "1.0"
_MANIFEST = "package.json"
PACKAGE = FolderKind("package", _MANIFEST, _FORMAT)


class _File(TypedDict):
    bytes: int
    sha256: str


class _Package(TypedDict):
    kind: str
    model: str
    inputs: Any
    feature_names: list[str]
    num_dense: int
    is_weighted: bool
    libraries: list[str]
    files: dict[str, _File]


def write_package_json(folder: Path, fields: Mapping[str, Any]) -> None:
    """Writes package.json, adding format, version, and size and sha256 of every file that is there."""
    names = sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )
    manifest = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        **fields,
        "files": {name: describe_file(folder, name) for name in names},
    }
    (folder / _MANIFEST).write_text(
        json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )


def read_package_json(path: Path | str, *, check_hashes: bool = True) -> dict[str, Any]:
    """Reads package.json and checks every file that it lists."""
    folder, place = Path(path), f"package {str(path)!r}, file {_MANIFEST!r}"
    remedy = "package the model again"
    file = file_inside(folder, _MANIFEST, place, "give a folder that `dnis package` wrote")
    manifest: Any = parse_json(file.read_bytes(), Any, place, remedy=remedy)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    check(
        found == _FORMAT,
        place,
        f"format {_FORMAT!r}",
        repr(found),
        "give a folder that `dnis package` wrote",
    )
    version = str(manifest.get("format_version"))
    check(
        version.split(".")[0] == "1", place, "a format_version 1.x", version, "update dnis_torchrec"
    )
    conform(manifest, _Package, place, remedy=remedy)
    for name, entry in manifest["files"].items():
        place = f"package {str(path)!r}, file {name!r}"
        file = file_inside(folder, name, place, remedy)
        found = describe_file(folder, name) if check_hashes else {"bytes": file.stat().st_size}
        for field, value in found.items():
            check(value == entry[field], place, f"{field} {entry[field]}", value, remedy)
    return manifest
