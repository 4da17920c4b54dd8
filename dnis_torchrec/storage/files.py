"""Single files at an address, on this machine or on storage: what each of many writers puts there
by itself."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from fsspec import AbstractFileSystem

from dnis_torchrec.storage.access import filesystem, local_path, retrying
from dnis_torchrec.storage.fetching import cache_folder, fetch
from dnis_torchrec.storage.whole_files import written_whole
from dnis_torchrec.storage.workplaces import workplace

Address = str | os.PathLike[str]


def inside(folder: Address, name: str) -> Path | str:
    """The address of a file in a folder."""
    here = local_path(folder)
    return f"{os.fspath(folder).rstrip('/')}/{name}" if here is None else here / name


def holds(folder: Address, address: Address) -> bool:
    """Returns whether an address names a folder or something in it; links on this machine are
    followed."""
    outer, inner = local_path(folder), local_path(address)
    if outer is not None and inner is not None:
        return inner.resolve().is_relative_to(outer.resolve())
    if outer is not None or inner is not None:
        return False
    (files, path), (own_files, own_path) = filesystem(folder), filesystem(address)
    return own_files == files and PurePosixPath(own_path).is_relative_to(path)


def put_file(address: Address, write: Callable[[Path], object]) -> int:
    """Writes a file, through a local one where the address is a URL, and sees to it that it
    survives the machine."""
    here = local_path(address)
    if here is not None:
        with written_whole(here, durable=True) as unfinished:
            write(unfinished)
            return unfinished.stat().st_size
    files, remote = filesystem(address)
    with _temporary_file(posixpath.basename(remote)) as local:
        write(local)
        upload(files, local, remote, f"address {os.fspath(address)}")
        return local.stat().st_size


def upload(files: AbstractFileSystem, local: Path, remote: str, place: str) -> None:
    """Copies a local file to storage, making the folder that it belongs in where there are folders."""

    def put() -> None:
        try:
            files.put_file(str(local), remote)
        except (
            FileNotFoundError
        ):  # object stores need no folders, and may forbid to ask for the bucket's
            files.makedirs(posixpath.dirname(remote), exist_ok=True)
            files.put_file(str(local), remote)

    retrying(put, place)


@contextmanager
def local_file(address: Address) -> Iterator[Path]:
    """A local path with a file's content while the block runs: itself if it is local."""
    here = local_path(address)
    if here is not None:
        yield here
        return
    with _temporary_file(posixpath.basename(os.fspath(address))) as copy:
        yield fetch(address, copy)


def remove_file(address: Address) -> None:
    """Removes a file that may be there."""
    files, path = filesystem(address)
    with suppress(FileNotFoundError):
        retrying(lambda: files.rm_file(path), f"address {os.fspath(address)}")


def file_size(address: Address) -> int | None:
    """Bytes of a file; None if there is none."""
    files, path = filesystem(address)
    files.invalidate_cache()
    try:
        info = retrying(lambda: files.info(path), f"address {os.fspath(address)}")
    except FileNotFoundError:
        return None
    return int(info["size"]) if info["type"] == "file" else None


def file_names(folder: Address) -> list[str]:
    """Names of all files in a folder and in those below it, relative to it; none where there is no
    folder."""
    files, path = filesystem(folder)
    files.invalidate_cache()
    root = path.rstrip("/") + "/"
    found: list[str] = []
    with suppress(FileNotFoundError):
        found = retrying(lambda: files.find(path), f"address {os.fspath(folder)}")
    return sorted(name.removeprefix(root) for name in found if name.startswith(root))


@contextmanager
def _temporary_file(name: str) -> Iterator[Path]:
    """A free path of that name in the cache folder, which is where there is room."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with workplace(cache_folder() / name) as place:
        yield place.new
