"""Folders that are written whole or not at all."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dnis_torchrec.checks import check
from dnis_torchrec.storage.foreign_folders import check_outside
from dnis_torchrec.storage.json_files import parse_json
from dnis_torchrec.storage.workplaces import Workplace, workplace


class FolderKind(NamedTuple):
    """A kind of folder that may be replaced, told from all others by its JSON file and the format
    named there."""

    name: str
    manifest: str
    format: str


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def new_folder(path: Path | str, *, overwrite: bool = False, kind: FolderKind) -> Iterator[Path]:
    """A folder that appears under `path` complete, or not at all."""
    target = Path(os.path.abspath(path))
    _check_target(target, overwrite, kind)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with workplace(target) as place:
            place.new.mkdir()
            yield place.new
            place.settle_modes()
            _flush(place.new)
            _check_target(
                target, overwrite, kind
            )  # another job may have put something there meanwhile
            _move_into_place(place, target)
    except BaseException:
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def _check_target(target: Path, overwrite: bool, kind: FolderKind) -> None:
    if not os.path.lexists(target):
        return
    place = f"{kind.name} {str(target)!r}"
    check(
        overwrite,
        place,
        "a path that does not exist",
        "an existing one",
        "pass overwrite=True to replace it",
    )
    check_outside(target, place)
    ours = False
    if target.is_dir() and not target.is_symlink() and (target / kind.manifest).is_file():
        try:
            content = (target / kind.manifest).read_bytes()
            ours = parse_json(content, dict[str, Any], place).get("format") == kind.format
        except ValueError:
            ours = False
    check(
        ours,
        place,
        f"an old {kind.name} to overwrite",
        "something else",
        "choose another path, or remove it first",
    )


def _move_into_place(place: Workplace, target: Path) -> None:
    """Renames the new folder to `target`; what stood there is put back if that fails, or cannot be
    made to last."""
    is_replaced = os.path.lexists(target)
    if not is_replaced:
        os.rename(place.new, target)
    elif _exchange(place.new, target):
        place.set_aside(place.new)
    else:
        place.set_aside(target)
        os.rename(place.new, target)
    try:
        _flush_folder(target.parent)
    except BaseException:
        if is_replaced:
            os.rename(target, place.new)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return (
        renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
        == 0
    )


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
