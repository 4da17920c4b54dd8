"""Access to storage: addresses, file systems, attempts; nothing is copied to this machine."""

from __future__ import annotations

import glob
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
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
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
"""Protocol -> the package that fsspec needs for it; none of them is installed with this one."""

_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_CALLER = (AttributeError, NotImplementedError, TypeError, ValueError)

logger = logging.getLogger(__name__)


class StorageError(RuntimeError):
    """Storage could not be reached, or refused what was asked of it, after every retry."""


def is_url(address: str | os.PathLike[str]) -> bool:
    """Returns whether an address names storage through fsspec, and not a path of this machine."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", os.fspath(address)))


def local_path(address: str | os.PathLike[str]) -> Path | None:
    """The path that an address names on this machine, or None for one on storage."""
    text = os.fspath(address)
    if text.startswith(("file://", "local://")):
        return Path(LocalFileSystem._strip_protocol(text))
    return None if is_url(text) else Path(text)


def filesystem(address: str | os.PathLike[str]) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of an address, and the path in it."""
    text = os.fspath(address)
    if not is_url(text):
        return LocalFileSystem(), os.path.abspath(text)
    protocol = re.split("::|://", text)[0]
    try:
        return fsspec.core.url_to_fs(text)
    except ImportError as error:
        package = PACKAGES.get(protocol, str(error))
        remedy = f"pip install {package}" if protocol in PACKAGES else "install it"
        requirement = f"the package for {protocol}:// to be installed"
        raise ValueError(
            describe(f"address {text}", requirement, f"no {package}", remedy)
        ) from error
    except ValueError as error:
        known = "file, memory, s3 (package s3fs), gs (package gcsfs), abfs (package adlfs)"
        requirement = "a protocol that fsspec knows"
        raise ValueError(
            describe(f"address {text}", requirement, repr(protocol), f"use {known}")
        ) from error


def retrying(action: Callable[[], Result], place: str) -> Result:
    """Does what may fail for a moment, up to `ATTEMPTS` times, waiting twice as long each time."""
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
                requirement = f"storage that answers ({attempt} of {ATTEMPTS} attempts made)"
                raise StorageError(describe(place, requirement, received, remedy)) from error
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            logger.warning("%s: %s; attempt %d in %g s", place, received, attempt + 1, wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def read_bytes(address: str | os.PathLike[str], start: int = 0, end: int | None = None) -> bytes:
    """Reads a file or a range of its bytes."""
    files, path = filesystem(address)
    return retrying(
        lambda: files.cat_file(path, start=start, end=end), f"address {os.fspath(address)}"
    )


def version_of(info: dict[str, Any]) -> str:
    """Returns a text that differs between versions of a file: its size and checksum, or time where
    there is none."""
    names = (
        "ETag",
        "etag",
        "md5Hash",
        "content_md5",
        "mtime",
        "LastModified",
        "updated",
        "last_modified",
        "created",
    )
    version = next((str(info[name]) for name in names if info.get(name) is not None), "")
    return f"{info.get('size')}:{version}"


def exists(address: str | os.PathLike[str]) -> bool:
    """Returns whether a file or folder is there."""
    files, path = filesystem(address)
    return retrying(lambda: files.exists(path), f"address {os.fspath(address)}")


def expand(addresses: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The files that addresses and globs stand for, each once, in the order given, those of a glob
    or a folder by name."""
    expanded: dict[str, None] = {}
    for address in addresses:
        files, path = filesystem(address)
        place = f"address {os.fspath(address)}"
        is_glob = any(sign in path for sign in "*?[") and not retrying(
            partial(files.isfile, path), place
        )
        if retrying(partial(files.isdir, path), place):
            is_glob, path = True, glob.escape(path.rstrip("/")) + "/*"
        found = [path]
        if is_glob:
            found = sorted(retrying(partial(files.glob, path), place))
        here = [name for name in found if retrying(partial(files.isfile, name), place)]
        check(bool(here), place, "at least one file", "none")
        is_local = local_path(address) is not None
        expanded |= dict.fromkeys(
            name if is_local else files.unstrip_protocol(name) for name in here
        )
    return tuple(expanded)


def is_plain_file(path: Path) -> bool:
    """Returns whether a path names a file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def make_folder(folder: Path, *, within: Path) -> Path:
    """Makes a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
