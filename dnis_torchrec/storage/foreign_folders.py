"""Folders that strangers may have filled: nothing in them is read or written through a link."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import BinaryIO

from dnis_torchrec.checks import check

_OWNER_BYTES = 128


def is_plain_file(path: Path) -> bool:
    """Returns whether a path names a file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_plain(folder: Path, place: str) -> None:
    """Refuses a folder that holds anything but plain files and folders, at any depth."""
    for path in _special_files(folder):
        kind = "the link" if path.is_symlink() else "the special file"
        received = f"{kind} {path.relative_to(folder).as_posix()!r}"
        check(False, place, "plain files and folders in it", received, "remove it")


def check_outside(folder: Path, place: str) -> None:
    """Refuses to replace a folder that this process stands in: relative paths would go on in the
    old one."""
    here = Path.cwd()
    is_inside = here.resolve().is_relative_to(folder.resolve())
    check(
        not is_inside,
        place,
        "a working folder outside of what is replaced",
        here,
        "go to another folder",
    )


def _special_files(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _special_files(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                yield Path(entry.path)


def make_folder(folder: Path, *, within: Path) -> Path:
    """Makes a folder and those that lead to it, where they are missing, through no link."""
    within.mkdir(parents=True, exist_ok=True)
    reached = within
    for name in folder.relative_to(within).parts:
        reached = reached / name
        with suppress(FileExistsError):
            reached.mkdir()
        is_folder = stat.S_ISDIR(reached.lstat().st_mode)
        received = "a link" if reached.is_symlink() else "something else"
        check(is_folder, f"folder {reached}", "a plain folder", received, "remove it")
    return folder


@contextmanager
def file_lock(path: Path) -> Iterator[str | None]:
    """Locks a file while the block runs. The system lets go of it when this process ends, however
    it ends."""
    place, requirement = f"lock {path}", "a plain file"
    check(not path.is_symlink(), place, requirement, "a link", "remove it")
    check(
        is_plain_file(path) or not path.exists(), place, requirement, "something else", "remove it"
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(descriptor, _OWNER_BYTES, 0).decode(errors="replace")
            yield said.partition("\n")[0].strip() or "another one"
            return
        if os.fstat(descriptor).st_nlink == 1:
            owner = f"process {os.getpid()} on {gethostname()}"
            os.pwrite(descriptor, f"{owner.ljust(_OWNER_BYTES - 1)}\n".encode(), 0)
        yield None
    finally:
        os.close(descriptor)


def open_log(path: Path, *, anew: bool) -> BinaryIO:
    """Opens a file to add to, and no link to one."""
    if anew:
        path.unlink(missing_ok=True)
    flags = (
        os.O_WRONLY
        | os.O_CREAT
        | os.O_APPEND
        | os.O_NOFOLLOW
        | os.O_NONBLOCK
        | (os.O_EXCL if anew else 0)
    )
    return os.fdopen(os.open(path, flags, 0o666), "ab")
