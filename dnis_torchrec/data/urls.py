"""Addresses: paths of this machine, or URLs of storage that fsspec reaches."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from dnis_torchrec.checks import check, describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Address = str | os.PathLike[str]
LAST_FILES = ("manifest.json", "run.json", "compress.json")  # they say that a folder is whole
_URL_OF: dict[Path, str] = {}


def cache_folder() -> Path:
    """``$DNIS_CACHE``, or dnis_torchrec in the user's cache folder: copies from storage."""
    folder, of_user = os.environ.get("DNIS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(folder or Path(of_user or Path.home() / ".cache") / "dnis_torchrec")


def local_path(address: Address) -> Path | None:
    """The path that an address names on this machine, or None for one on storage."""
    text = os.fspath(address)
    if text.startswith(("file://", "local://")):
        return Path(text.split("://", 1)[1])
    return None if re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", text) else Path(text)


def url_of(path: Path | None) -> str | None:
    """The URL that a local copy stands for; None where the user named the path itself."""
    return None if path is None else _URL_OF.get(path)


def address_of(path: Path) -> str:
    """A path as the user named it: the URL that a local copy stands for, or the path itself."""
    return url_of(path) or str(path)


def path_in(folder: Address, name: str) -> Path | str:
    """The address of a file in a folder."""
    here = local_path(folder)
    return f"{os.fspath(folder).rstrip('/')}/{name}" if here is None else here / name


@contextmanager
def storage(address: Address) -> Iterator[tuple[AbstractFileSystem, str]]:
    """The file system of an address and the path in it; each library's errors become OSErrors."""
    import fsspec  # what serves local files loads no fsspec

    place = f"address {os.fspath(address)}"
    try:
        files, path = fsspec.core.url_to_fs(os.fspath(address))
    except (ImportError, ValueError) as error:
        requirement = "a protocol that fsspec knows here"
        raise ValueError(describe(place, requirement, error, "install its package")) from error
    try:
        files.invalidate_cache()
        yield files, path.rstrip("/")
    except (OSError, ValueError):
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise OSError(describe(place, "storage that answers", cause)) from error


def read_bytes(address: Address) -> bytes:
    """Reads a file."""
    with storage(address) as (files, path):
        return bytes(files.cat_file(path))


def put_file(address: Address, write: Callable[[Path], object]) -> int:
    """Writes a file that survives the machine, through a local one for a URL; returns its bytes."""
    here = local_path(address)
    if here is not None:
        from dnis_torchrec.data.files import write_whole  # loads torch, which --help needs not

        with write_whole(here) as file:
            write(file)
            return file.stat().st_size
    with _temporary_folder() as folder, storage(address) as (files, path):
        local = folder / posixpath.basename(path)
        write(local)
        _put(files, local, path)
        return local.stat().st_size


def _put(files: AbstractFileSystem, local: Path, path: str) -> None:
    files.makedirs(posixpath.dirname(path), exist_ok=True)  # not all storage does without folders
    files.put_file(str(local), path)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    cache_folder().mkdir(parents=True, exist_ok=True)  # where there is room
    with tempfile.TemporaryDirectory(dir=cache_folder(), suffix=".partial") as folder:
        yield Path(folder)


def remove_file(address: Address) -> None:
    """Removes a file that may be there."""
    with storage(address) as (files, path), suppress(FileNotFoundError):
        files.rm_file(path)


def file_size(address: Address) -> int | None:
    """Bytes of a file; None if there is none."""
    with storage(address) as (files, path), suppress(FileNotFoundError):
        info = files.info(path)
        return int(info["size"]) if info["type"] == "file" else None
    return None


def file_names(folder: Address, skip: Collection[str] = ()) -> list[str]:
    """Names of all files in a folder and below it, relative to it, but for those of `skip`."""
    with storage(folder) as (files, path):
        names = [name.removeprefix(f"{path}/") for name in files.find(path) if name != path]
    return sorted(n for n in names if not any(fnmatchcase(n, pattern) for pattern in skip))


def fetch(address: Address) -> Path:
    """A local path with the content of an address: itself if it is local, else a cached copy."""
    here, url = local_path(address), os.fspath(address).rstrip("/")
    if here is not None:
        return here
    with storage(url) as (files, root):
        infos = files.find(root, detail=True)
        check(bool(infos), f"address {url}", "a file or a folder with files", "nothing there")
        # What is on storage tells a copy's name: one that is there is whole and up to date.
        version = hashlib.sha256(f"{url} {sorted(map(str, infos.values()))}".encode()).hexdigest()
        target = cache_folder() / "fetched" / version[:24] / posixpath.basename(root)
        if not target.exists():
            with _temporary_folder() as folder:
                _get(files, root, list(infos), folder / "copy" / target.name)
                target.parent.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):  # another process has fetched it, too
                    os.rename(folder / "copy", target.parent)
    _URL_OF[target] = url
    return target


def _get(files: AbstractFileSystem, root: str, names: Sequence[str], target: Path) -> None:
    paths = [name.removeprefix(root).lstrip("/") for name in names]
    for name, path in zip(names, paths, strict=True):
        is_inside = name.startswith(root) and ".." not in path.split("/")
        check(is_inside, f"address {root}", "names inside the folder", repr(name))
    files.get(list(names), [str(target / path) for path in paths])


def publish(folder: Path, url: str, *, skip: Collection[str] = ()) -> None:
    """Makes a folder on storage like a local one, but for files of the patterns `skip`."""
    with storage(url) as (files, root):
        plain = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        names = [path.relative_to(folder).as_posix() for path in plain]
        names = [name for name in names if ".partial" not in name]
        for name in sorted(names, key=lambda name: (name in LAST_FILES, name)):
            _put(files, folder / name, f"{root}/{name}")
        for name in set(file_names(url, skip)) - set(names):
            files.rm_file(f"{root}/{name}")


def output_folder(url: str, job: str) -> Path:
    """The local folder in which a job fills what is published at a URL."""
    key = hashlib.sha256(f"{job} {url}".encode()).hexdigest()[:24]
    folder = cache_folder() / "outputs" / key / (posixpath.basename(url.rstrip("/")) or "root")
    _URL_OF[folder] = url
    return folder


@contextmanager
def output(url: str, job: str, *, skip: Collection[str] = ()) -> Iterator[Path]:
    """A local folder with what is at a URL; published however the block is left."""
    folder = output_folder(url, job)
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir(parents=True)
    with storage(url) as (files, root):
        _get(files, root, [f"{root}/{name}" for name in file_names(url, skip)], folder)
    try:
        yield folder
    finally:
        try:
            if folder.exists():
                publish(folder, url, skip=skip)
        except OSError as error:
            raise OSError(f"{error}; {folder} has what was to be published: copy it") from error
        shutil.rmtree(folder.parent)
