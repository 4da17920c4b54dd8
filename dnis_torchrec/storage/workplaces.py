"""Hidden folders in which a file or folder is written until it is whole, and which do not outlive
their writer."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from uuid import uuid4

PARTIAL = ".partial"
"""Suffix of the name of a file or folder while it is being written."""
OTHER_HOST_SECONDS = 24 * 3600.0
"""Some shared disks keep locks on each host alone: what a writer of another host has locked may be
in use so long."""

_PATTERN = re.compile(r"\..*\.[0-9a-f]{32}\.partial", re.DOTALL)
_SHOWN_BYTES = 150
_WRITER, _NEW, _OLD = "writer", "new", "old"
_HEAD = "dnis_torchrec, process "
_TAKEN = (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY)


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Temporary paths that a writer holds until it is done."""

    new: Path
    old: Path
    file_mode: int

    def set_aside(self, folder: Path) -> None:
        """Moves a folder to `old`; if its place is free when the writer is done or dead, it is put
        back there."""
        self.old.parent.mkdir(exist_ok=True)
        os.rename(folder, self.old)

    def settle_modes(self) -> None:
        """Gives every file written by now the user's umask; some libraries write for their owner
        alone."""
        files = (Path(root, name) for root, _, names in os.walk(self.new) for name in names)
        for file in files if self.new.is_dir() else [self.new]:
            mode = stat.S_IMODE(file.lstat().st_mode)
            settled = self.file_mode | ((self.file_mode & 0o444) >> 2 if mode & stat.S_IXUSR else 0)
            if mode != settled:
                os.chmod(file, settled)


@contextmanager
def workplace(path: Path) -> Iterator[Workplace]:
    """A hidden folder beside a file or folder that is to be written; gone when the block is left,
    however it is left."""
    remove_left(path.parent)
    hidden, descriptor = _locked_folder(path)
    try:
        (hidden / _NEW).mkdir()
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        yield Workplace(
            new=hidden / _NEW / path.name, old=hidden / _OLD / path.name, file_mode=mode
        )
    finally:
        _clear(hidden)
        os.close(descriptor)


def remove_left(folder: Path) -> None:
    """Removes files that killed writers have left in a folder, as far as they can be removed."""
    with suppress(OSError), os.scandir(folder) as entries:
        named = [
            entry
            for entry in entries
            if entry.name.endswith(PARTIAL) and _PATTERN.fullmatch(entry.name)
        ]
        for entry in named:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    _remove_if_left(Path(entry.path))


def _locked_folder(path: Path) -> tuple[Path, int]:
    """A new workplace, and the open file that keeps it locked."""
    shown = os.fsencode(path.name)[:_SHOWN_BYTES].decode(errors="ignore")
    while True:
        hidden = path.with_name(f".{shown}.{uuid4().hex}{PARTIAL}")
        hidden.mkdir(mode=0o700)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            descriptor = os.open(hidden / _WRITER, flags, 0o666)
        except (
            FileNotFoundError
        ):  # another process has just taken the empty folder for one that was left
            continue
        except BaseException:
            hidden.rmdir()
            raise
        try:
            with suppress(OSError):  # of a disk without locks, where nobody removes what is left
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(
                descriptor
            ).st_nlink:  # else another process has locked and removed it just before
                os.write(descriptor, f"{_HEAD}{os.getpid()}{_on_this_host()}".encode())
                return hidden, descriptor
        except BaseException:
            _clear(hidden)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _on_this_host() -> str:
    return f" on {gethostname()}\n"


def _remove_if_left(hidden: Path) -> None:
    """Removes a workplace whose writer is dead, and nothing else that goes by such a name."""
    try:
        descriptor = os.open(hidden / _WRITER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        hidden.rmdir()  # of a writer that got no further; fails if there is anything in it
        return
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            said = os.pread(descriptor, 1000, 0).decode(errors="replace")
            is_ours = said.startswith(_HEAD) or (not said and os.listdir(hidden) == [_WRITER])
            is_of_here = not said or said.endswith(_on_this_host())
            if is_ours and (is_of_here or time.time() - status.st_mtime > OTHER_HOST_SECONDS):
                _clear(hidden)
    finally:
        os.close(descriptor)


def _clear(hidden: Path) -> None:
    """Removes a workplace that this process has locked, the lock last; a folder set aside is put
    back where it can be."""
    if _is_done_with(hidden / _OLD, hidden.parent):
        for part in (hidden / _NEW, hidden / _OLD):
            shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):
            if set(os.listdir(hidden)) <= {_WRITER}:
                (hidden / _WRITER).unlink(missing_ok=True)
                hidden.rmdir()


def _is_done_with(old: Path, folder: Path) -> bool:
    """Puts a folder that was set aside back; False if it could not be, although its place is free."""
    try:
        for kept in old.iterdir() if old.is_dir() and not old.is_symlink() else ():
            if kept.is_dir() and not kept.is_symlink():
                os.rename(
                    kept, folder / kept.name
                )  # what is there stays, unless it is an empty folder
    except OSError as error:
        return error.errno in _TAKEN
    return True
