"""Storage: files and folders that are named by an address, wherever fsspec can reach them, with retries.

An address is a path of this machine, or a URL that fsspec knows: ``s3://bucket/run``, ``gs://bucket/run``,
``memory://run``, ``file:///run``. Work is done on local folders alone, so nothing else of the package has to know:

    fetch(url)    -> local folder     inputs, copied to a cache folder; what is there already is not copied again
    output(url)   -> local folder     filled by the caller, mirrored while it is, published when it is whole

Object stores cannot rename a folder, so "whole" is told by a file: the one that names the others (``manifest.json``,
``run.json``) is written last and removed first, and whatever reads the folder asks for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import posixpath
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dnis_torchrec.checks import check, describe

Result = TypeVar("Result")

ATTEMPTS = 5
FIRST_WAIT_SECONDS = 0.5
"""The wait before each further attempt is twice the one before: 0.5, 1, 2 and 4 seconds."""
MIRROR_SECONDS = 30.0
"""Seconds between two passes that copy to storage what changed in an output folder."""
SHARED_WAIT_SECONDS, SHARED_POLL_SECONDS = 600.0, 0.1
"""How long processes wait for the one among them that fetches, and how often they look."""
LAST_FILES = ("manifest.json", "run.json", "comparison.json")
"""Files that say that a folder is whole: published after everything else."""
CACHE_VARIABLE = "DNIS_CACHE"
PARTIAL = ".partial"
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs"}
"""Protocol -> the package that fsspec needs for it; none of them is installed with this one."""

_FETCHED = ".fetched.json"
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_CALLER = (AttributeError, NotImplementedError, TypeError, ValueError)

logger = logging.getLogger(__name__)


class StorageError(RuntimeError):
    """Storage could not be reached, or refused what was asked of it, after every retry."""


def is_url(address: str | os.PathLike[str]) -> bool:
    """Whether an address names storage through fsspec, and not a path of this machine.

    Example:
        >>> is_url("s3://bucket/run"), is_url("/data/run"), is_url("run")
        (True, False, False)
    """
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", os.fspath(address)))


def local_path(address: str | os.PathLike[str]) -> Path | None:
    """The path that an address names on this machine, or None for one on storage.

    Example:
        >>> local_path("run"), local_path("file:///run"), local_path("s3://bucket/run")
        (PosixPath('run'), PosixPath('/run'), None)
    """
    text = os.fspath(address)
    if text.startswith(("file://", "local://")):
        return Path(LocalFileSystem._strip_protocol(text))
    return None if is_url(text) else Path(text)


def filesystem(address: str | os.PathLike[str]) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of an address, and the path in it.

    Raises:
        ValueError: if the protocol is unknown, or its package is not installed; the package is named.
    """
    text = os.fspath(address)
    if not is_url(text):
        return LocalFileSystem(), os.path.abspath(text)
    protocol = re.split("::|://", text)[0]
    try:
        return fsspec.core.url_to_fs(text)
    except ImportError as error:
        package = PACKAGES.get(protocol, str(error))
        remedy = f"pip install {package}" if protocol in PACKAGES else "install it"
        requirement = f"expected the package for {protocol}:// to be installed"
        raise ValueError(describe(f"address {text}", requirement, f"no {package}", remedy)) from error
    except ValueError as error:
        known = "file, memory, s3 (package s3fs), gs (package gcsfs), abfs (package adlfs)"
        requirement = "expected a protocol that fsspec knows"
        raise ValueError(describe(f"address {text}", requirement, repr(protocol), f"use {known}")) from error


def retrying(action: Callable[[], Result], place: str) -> Result:
    """Does what may fail for a moment, up to `ATTEMPTS` times, waiting twice as long each time.

    What waiting cannot mend (a file that is missing, a right that is lacking) is not tried again.

    Args:
        action: what to do; may be done more than once.
        place: what it is about, for the error.

    Raises:
        StorageError: naming the place and the last error.
        FileNotFoundError: if what is to be read does not exist.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except (*_CALLER, FileNotFoundError):
            raise
        except Exception as error:  # each storage has its own errors for a network that is down
            is_last = attempt == ATTEMPTS or isinstance(error, _PERMANENT)
            received = f"{type(error).__name__}: {error}"
            if is_last:
                remedy = "check address, credentials and network"
                requirement = f"expected storage that answers ({attempt} of {ATTEMPTS} attempts made)"
                raise StorageError(describe(place, requirement, received, remedy)) from error
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            logger.warning("%s: %s; attempt %d in %g s", place, received, attempt + 1, wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def read_bytes(address: str | os.PathLike[str], start: int = 0, end: int | None = None) -> bytes:
    """Reads a file or a range of its bytes.

    Args:
        address: of the file.
        start: first byte.
        end: byte after the last one; None reads to the end.

    Raises:
        StorageError: if storage does not answer.
        FileNotFoundError: if there is no such file.
    """
    files, path = filesystem(address)
    return retrying(lambda: files.cat_file(path, start=start, end=end), f"address {os.fspath(address)}")


def version_of(info: dict[str, Any]) -> str:
    """What tells two versions of a file apart unread: its size, and its checksum if storage keeps one, else its time.

    Args:
        info: what fsspec's ``info`` or ``find(detail=True)`` says about the file.
    """
    names = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "updated", "last_modified", "created")
    version = next((str(info[name]) for name in names if info.get(name) is not None), "")
    return f"{info.get('size')}:{version}"


def exists(address: str | os.PathLike[str]) -> bool:
    """Whether a file or folder is there.

    Raises:
        StorageError: if storage does not answer.
    """
    files, path = filesystem(address)
    return retrying(lambda: files.exists(path), f"address {os.fspath(address)}")


def cache_folder() -> Path:
    """Where copies of what lies on storage are kept: ``$DNIS_CACHE``, or dnis_torchrec in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "dnis_torchrec"


def local_copy_of(url: str) -> Path:
    """The folder of the cache that stands for a URL; it need not exist."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rstrip("/").rsplit("/", 1)[-1]) or "root"
    return cache_folder() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / name


def fetch(address: str | os.PathLike[str], into: Path | None = None) -> Path:
    """A local path with the content of an address: itself if it is local, else a copy in the cache.

    Files that have not changed since they were last fetched are not copied again; files that are gone are removed.

    Args:
        address: of a file or a folder.
        into: copy to this path instead of the cache.

    Returns:
        The local path.

    Raises:
        ValueError: if there is nothing at the address, or a name in it leads out of its folder.
        StorageError: if storage does not answer.

    Example:
        >>> fetch("data")
        PosixPath('data')
    """
    here, text = local_path(address), os.fspath(address)
    if here is not None:
        return here
    files, path = filesystem(text)
    place = f"address {text}"
    found = retrying(lambda: files.find(path, detail=True), place)
    check(bool(found), place, "expected a file or a folder with files", "nothing there")
    target = into or local_copy_of(text)
    if list(found) == [path]:
        _fetch_files(files, {path: target.name}, found, target.parent, place)
        return target
    root = path.rstrip("/") + "/"
    relative = {name: name.removeprefix(root).lstrip("/") for name in found}
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
        inside = not posixpath.isabs(name) and ".." not in name.split("/")
        check(inside, place, "expected names inside the folder", repr(name))
    record = folder / _FETCHED
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    for gone in sorted(set(known) - set(names.values())):
        (folder / gone).unlink(missing_ok=True)
    present = {}
    for remote, name in names.items():
        target, version = folder / name, version_of(infos[remote])
        if known.get(name) != version or not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            # The process id: several on this machine may fetch the same file.
            unfinished = target.with_name(f"{target.name}.{os.getpid()}{PARTIAL}")
            retrying(partial(files.get_file, remote, str(unfinished)), place)
            os.replace(unfinished, target)
        present[name] = version
    _write_record(record, present)


def _write_record(record: Path, content: dict[str, str]) -> None:
    unfinished = record.with_name(f"{record.name}.{os.getpid()}{PARTIAL}")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, record)


class Mirror:
    """Copies what changes in a local folder to a folder on storage, and removes there what is removed here.

    In the order of the last change, because a file that points to others is written after them; `LAST_FILES` last.

    Args:
        folder: the local folder.
        url: where its content goes.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url.rstrip("/")
        self._files, self._root = filesystem(self.url)
        # What was fetched from storage is there already.
        self._published = self._versions()

    def push(self) -> None:
        """Copies every file that is new or has changed; one that is being written (``.partial``) waits.

        Raises:
            StorageError: if storage does not answer; what was copied is remembered.
        """
        versions = self._versions()
        for name in sorted(versions, key=lambda name: (name in LAST_FILES, versions[name])):
            if self._published.get(name) != versions[name]:
                try:
                    self._put(name)
                except FileNotFoundError as error:
                    if (self.folder / name).exists():
                        place = f"address {self.url}"
                        raise StorageError(describe(place, "expected a place to write to", error)) from error
                    continue  # removed since it was listed
                self._published[name] = versions[name]
        for name in sorted(set(self._published) - set(versions)):
            self._remove(name)

    def withdraw(self) -> None:
        """Removes `LAST_FILES` from storage if anything has changed: what is there is about to be replaced.

        Raises:
            StorageError: if storage does not answer.
        """
        if self._published != self._versions():
            for name in sorted(set(LAST_FILES) & set(self._published)):
                self._remove(name)

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Name -> (time of the last change in ns, size) of the files of the folder."""
        versions = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            if path.name == _FETCHED or any(part.endswith(PARTIAL) for part in name.parts):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # replaced or removed between the listing and now
                continue
            if stat.S_ISREG(status.st_mode):
                versions[name.as_posix()] = (status.st_mtime_ns, status.st_size)
        return versions

    def _put(self, name: str) -> None:
        local, remote = self.folder / name, posixpath.join(self._root, name)

        def put() -> None:
            self._files.makedirs(posixpath.dirname(remote), exist_ok=True)
            self._files.put_file(str(local), remote)

        retrying(put, f"address {self.url}/{name}")

    def _remove(self, name: str) -> None:
        remote = posixpath.join(self._root, name)
        with suppress(FileNotFoundError):
            retrying(lambda: self._files.rm_file(remote), f"address {self.url}/{name}")
        del self._published[name]


@contextmanager
def output(address: str | os.PathLike[str]) -> Iterator[Path]:
    """A local folder for what is to lie at an address: itself if it is local, else a copy that is mirrored to storage.

    What stands at a URL is fetched first, so that whoever resumes or refuses to overwrite sees it as if it were local.
    While the caller works, changes go to storage every `MIRROR_SECONDS`, so a lost machine loses no more than that; if
    storage does not answer then, it is said and tried again. When the caller is done, also by an exception, the rest is
    published and the copy deleted. What is replaced is not whole on storage until all of it is: its `LAST_FILES` are
    removed first.

    Args:
        address: of the folder.

    Yields:
        The local folder; it need not exist.

    Raises:
        StorageError: if the result cannot be published; it names the local folder, which has it.
    """
    here, url = local_path(address), os.fspath(address)
    if here is not None:
        yield here
        return
    # A folder of its own, because another process may be writing a copy of the same URL.
    parent = cache_folder() / "outputs"
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=parent))
    folder = staging / local_copy_of(url).name
    try:
        if exists(url):
            fetch(url, folder)
        mirror = Mirror(folder, url)
    except BaseException:
        shutil.rmtree(staging)
        raise
    with _mirrored(mirror):
        yield folder


@contextmanager
def shared_output(address: str | os.PathLike[str], *, job: str, is_first: bool) -> Iterator[Path]:
    """`output` for several processes of one machine that fill one folder: the first prepares and publishes it for all.

    No collective: the others wait for a file in which the first says where the folder is. What is written after the
    first has left is not published.

    Args:
        address: of the folder, the same for all.
        job: names these processes together, and no others.
        is_first: whether this is the one that talks to storage.

    Yields:
        The local folder, the same for all.

    Raises:
        StorageError: if the result cannot be published, or the first process does not show up within
            `SHARED_WAIT_SECONDS`.
    """
    key = hashlib.sha256(f"{job} {os.fspath(address)}".encode()).hexdigest()[:16]
    told = cache_folder() / "outputs" / f"{key}.json"
    if not is_first:
        yield _told_folder(told, f"address {os.fspath(address)}")
        return
    with output(address) as folder:
        told.parent.mkdir(parents=True, exist_ok=True)
        _write_record(told, {"folder": str(folder)})
        try:
            yield folder
        finally:
            told.unlink()


def _told_folder(told: Path, place: str) -> Path:
    """Where the first process has put the folder."""
    until = time.monotonic() + SHARED_WAIT_SECONDS
    while not told.is_file():
        if time.monotonic() > until:
            remedy = "look at what the first process of this machine says"
            requirement = f"expected the first process to prepare it within {SHARED_WAIT_SECONDS:g} s"
            raise StorageError(describe(place, requirement, "nothing", remedy))
        time.sleep(SHARED_POLL_SECONDS)
    return Path(json.loads(told.read_text(encoding="utf-8"))["folder"])


@contextmanager
def _mirrored(mirror: Mirror) -> Iterator[None]:
    """Pushes now and then while the caller works, and all of it when the caller is done; then deletes the folder."""
    stop = threading.Event()
    thread = threading.Thread(target=_mirror_until, args=(mirror, stop), name="dnis-mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        try:
            mirror.withdraw()
            mirror.push()
        except StorageError as error:
            received = f"{error}; nothing is lost: {mirror.folder} has it, copy it when storage is back"
            raise StorageError(received) from error
        shutil.rmtree(mirror.folder.parent)


def _mirror_until(mirror: Mirror, stop: threading.Event) -> None:
    while not stop.wait(MIRROR_SECONDS):
        try:
            mirror.push()
        except StorageError as error:
            logger.warning("%s; the search goes on, the next pass tries again", error)


def expand(addresses: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The files that addresses and globs stand for, each once, in the order given, those of a glob or a folder by name.

    Raises:
        ValueError: if an address or a glob stands for no file.
        StorageError: if storage does not answer.
    """
    expanded: dict[str, None] = {}
    for address in addresses:
        files, path = filesystem(address)
        place = f"address {os.fspath(address)}"
        if retrying(partial(files.isdir, path), place):
            path = path.rstrip("/") + "/*"
        found = [path]
        if any(sign in path for sign in "*?["):
            found = sorted(retrying(partial(files.glob, path), place))
        here = [name for name in found if retrying(partial(files.isfile, name), place)]
        check(bool(here), place, "expected at least one file", "none")
        is_local = local_path(address) is not None
        expanded |= dict.fromkeys(name if is_local else files.unstrip_protocol(name) for name in here)
    return tuple(expanded)
