"""Copies of files on storage, in a cache folder of this machine."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from dnis_torchrec.checks import check
from dnis_torchrec.storage.access import filesystem, local_path, retrying, version_of
from dnis_torchrec.storage.foreign_folders import check_plain, is_plain_file, make_folder
from dnis_torchrec.storage.json_files import read_json
from dnis_torchrec.storage.user_folders import user_cache_folder
from dnis_torchrec.storage.whole_files import write_json, written_whole

CACHE_VARIABLE = "DNIS_CACHE"
FETCHED = ".fetched.json"
"""File in which a copy keeps the versions of its files. A file of that name on storage is left
where it is."""


def cache_folder() -> Path:
    """Returns the folder of copies from storage: ``$DNIS_CACHE``, or dnis_torchrec in the user's
    cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else user_cache_folder() / "dnis_torchrec"


def local_copy_of(url: str) -> Path:
    """The folder of the cache that stands for a URL; it need not exist."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rstrip("/").rsplit("/", 1)[-1]) or "root"
    return cache_folder() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / name


def fetch(
    address: str | os.PathLike[str], into: Path | None = None, *, skip: Collection[str] = ()
) -> Path:
    """A local path with the content of an address: itself if it is local, else a copy in the cache."""
    here, text = local_path(address), os.fspath(address)
    if here is not None:
        return here
    files, path = filesystem(text)
    place = f"address {text}"
    found = retrying(lambda: files.find(path, detail=True), place)
    check(bool(found), place, "a file or a folder with files", "nothing there")
    target = into or local_copy_of(text)
    if list(found) == [path]:
        _fetch_files(files, {path: target.name}, found, target.parent, place)
        return target
    root = path.rstrip("/") + "/"
    relative = {name: name.removeprefix(root).lstrip("/") for name in found}
    left = (FETCHED, *skip)
    relative = {
        name: own
        for name, own in relative.items()
        if not any(fnmatchcase(own, pattern) for pattern in left)
    }
    _fetch_files(files, relative, found, target, place)
    return target


def _fetch_files(
    files: fsspec.AbstractFileSystem,
    names: dict[str, str],
    infos: dict[str, dict[str, Any]],
    folder: Path,
    place: str,
) -> None:
    """Copies files (remote name -> name in the folder) that are not there in their present version."""
    for name in names.values():
        check(_is_inside(name), place, "names inside the folder", repr(name))
        check(
            posixpath.normpath(name) != FETCHED,
            place,
            f"no {FETCHED}, which a copy keeps for itself",
            repr(name),
        )
    if not names:
        return  # all was to be left where it is: no folder stands for none
    record = folder / FETCHED
    make_folder(folder, within=cache_folder() if folder.is_relative_to(cache_folder()) else folder)
    check_plain(folder, f"copy {folder}")
    known = (
        read_json(record, dict[str, str], remedy="remove the folder") if record.is_file() else {}
    )
    for name in known:
        check(
            _is_inside(name),
            f"file {record}",
            "names inside the folder",
            repr(name),
            "remove the folder",
        )
    for gone in sorted(set(known) - set(names.values())):
        (folder / gone).unlink(missing_ok=True)
    present = {}
    for remote, name in names.items():
        target, version = folder / name, version_of(infos[remote])
        if known.get(name) != version or not is_plain_file(target):
            make_folder(target.parent, within=folder)
            with written_whole(target) as unfinished:
                retrying(partial(files.get_file, remote, str(unfinished)), place)
        present[name] = version
    write_json(record, present)


def _is_inside(name: str) -> bool:
    return not posixpath.isabs(name) and ".." not in name.split("/")
