"""Folders that are filled here and published on storage, while they are filled and when they are
whole."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dnis_torchrec.checks import describe
from dnis_torchrec.storage.access import StorageError, exists, filesystem, local_path, retrying
from dnis_torchrec.storage.claim import Claim, claimed
from dnis_torchrec.storage.fetching import FETCHED, cache_folder, fetch, local_copy_of
from dnis_torchrec.storage.files import upload
from dnis_torchrec.storage.foreign_folders import is_plain_file, make_folder
from dnis_torchrec.storage.json_files import read_json
from dnis_torchrec.storage.whole_files import write_json
from dnis_torchrec.storage.workplaces import PARTIAL

MIRROR_SECONDS = 30.0
"""Seconds between two passes that copy changed files of an output folder to storage."""
SHARED_WAIT_SECONDS, SHARED_POLL_SECONDS = 600.0, 0.1
"""Seconds that processes wait for the one among them that fetches, and seconds between their looks.
"""
LAST_FILES = ("manifest.json", "run.json", "comparison.json", "compress.json")
"""Files that say that a folder is whole: published after everything else."""
_MANIFEST, _RUN = "manifest.json", "run.json"
"""The first names every file beside it. The second vouches for a run that has finished, and may get
a report later."""
SMALL_BYTES = 1 << 20
"""Files up to this size are copied before they are published, so that the published file is the
listed one."""

logger = logging.getLogger(__name__)


class Mirror:
    """Mirrors a local folder to a folder on storage: copies files that change, and removes those
    that are removed."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url.rstrip("/")
        self._files, self._root = filesystem(self.url)
        # What was fetched from storage is there already.
        self._published = self._versions()
        self._vouching = {
            name for name in LAST_FILES if name in self._published and self._vouches(name)
        }

    def push(self) -> None:
        """Copies every file that is new or has changed; one that is being written (``.partial``)
        waits."""
        versions = self._versions()
        for name in self._outdated(versions):
            self._remove(name)
        for name in sorted(versions, key=lambda name: (name in LAST_FILES, versions[name])):
            if self._published.get(name) != versions[name]:
                try:
                    if not self._put(name, versions[name]):
                        continue
                except FileNotFoundError as error:
                    if (self.folder / name).exists():
                        raise StorageError(
                            describe(f"address {self.url}", "a place to write to", error)
                        ) from error
                    continue  # removed since it was listed
                self._published[name] = versions[name]
        for name in sorted(set(self._published) - set(versions)):
            self._remove(name)

    def _outdated(self, versions: dict[str, tuple[int, int]]) -> list[str]:
        """Published files that vouch for content that is no longer there, or soon will not be."""
        changed = {
            name for name, version in self._published.items() if versions.get(name) != version
        }
        return sorted(
            name for name in self._vouching if name in changed or (name == _MANIFEST and changed)
        )

    def _vouches(self, name: str) -> bool:
        """Returns whether a file of `LAST_FILES`, as it is here, says that the folder is whole."""
        if name != _RUN:
            return True
        try:
            return read_json(self.folder / name, dict[str, Any]).get("status") == "finished"
        except (OSError, ValueError):
            return True

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Name -> (time of the last change in ns, size) of the files of the folder."""
        versions = {}
        for root, folders, files in os.walk(
            self.folder
        ):  # which passes over a folder that is gone when it comes there
            folders[:] = [name for name in folders if not name.endswith(PARTIAL)]
            for path in (
                Path(root, name) for name in files if name != FETCHED and not name.endswith(PARTIAL)
            ):
                try:
                    status = path.lstat()  # a link is not published
                except FileNotFoundError:  # replaced or removed between the listing and now
                    continue
                if stat.S_ISREG(status.st_mode):
                    versions[path.relative_to(self.folder).as_posix()] = _version(status)
        return versions

    def _put(self, name: str, version: tuple[int, int]) -> bool:
        """Publishes a file as it was listed; False if it has changed since."""
        path, remote, place = (
            self.folder / name,
            posixpath.join(self._root, name),
            f"address {self.url}/{name}",
        )
        with tempfile.TemporaryDirectory() as held:
            if version[1] <= SMALL_BYTES:
                copy = Path(held, path.name)
                shutil.copyfile(path, copy)
            else:
                copy = path
            if _version(path.stat()) != version:
                return False
            upload(self._files, copy, remote, place)
        if name in LAST_FILES:
            self._vouching = (self._vouching - {name}) | ({name} if self._vouches(name) else set())
        return True

    def _remove(self, name: str) -> None:
        remote = posixpath.join(self._root, name)
        with suppress(FileNotFoundError):
            retrying(lambda: self._files.rm_file(remote), f"address {self.url}/{name}")
        del self._published[name]
        self._vouching.discard(name)


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


@contextmanager
def output(
    address: str | os.PathLike[str], *, job: str = "", skip: Collection[str] = ()
) -> Iterator[Path]:
    """Gives a local folder for the output at an address: itself if it is local, else a copy
    mirrored to storage."""
    here, url = local_path(address), os.fspath(address)
    if here is not None:
        yield here
        return
    with claimed(url, job=job) as claim:
        # A folder of its own, because another process may be writing a copy of the same URL.
        parent = make_folder(cache_folder() / "outputs", within=cache_folder())
        staging = Path(tempfile.mkdtemp(dir=parent))
        folder = staging / local_copy_of(url).name
        try:
            if exists(url):
                fetch(url, folder, skip=skip)
            mirror = Mirror(folder, url)
        except BaseException:
            shutil.rmtree(staging)
            raise
        with _mirrored(mirror, claim):
            yield folder


@contextmanager
def shared_output(
    address: str | os.PathLike[str],
    *,
    job: str,
    attempt: str,
    is_first: bool,
    skip: Collection[str] = (),
) -> Iterator[Path]:
    """`output` for several processes of one machine that fill one folder: the first prepares and
    publishes it for all."""
    key = hashlib.sha256(f"{job} {attempt} {os.fspath(address)}".encode()).hexdigest()[:16]
    told = cache_folder() / "outputs" / f"{key}.json"
    if not is_first:
        yield _told_folder(told, f"address {os.fspath(address)}")
        return
    with output(address, job=job, skip=skip) as folder:
        make_folder(told.parent, within=cache_folder())
        write_json(told, {"folder": str(folder)})
        try:
            yield folder
        finally:
            told.unlink()


def _told_folder(told: Path, place: str) -> Path:
    """Waits until the first process says where it has put the folder, and returns that path."""
    until = time.monotonic() + SHARED_WAIT_SECONDS
    while not is_plain_file(told):
        if time.monotonic() > until:
            remedy = "look at what the first process of this machine says"
            requirement = f"the first process to prepare it within {SHARED_WAIT_SECONDS:g} s"
            raise StorageError(describe(place, requirement, "nothing", remedy))
        time.sleep(SHARED_POLL_SECONDS)
    return Path(read_json(told, dict[str, str])["folder"])


@contextmanager
def _mirrored(mirror: Mirror, claim: Claim) -> Iterator[None]:
    """Pushes now and then while the caller works, and all of it when the caller is done; then
    deletes the folder."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_mirror_until, args=(mirror, claim, stop), name="dnis-mirror", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        try:
            claim.check_kept()
            mirror.push()
        except StorageError as error:
            received = (
                f"{error}; nothing is lost: {mirror.folder} has it, copy it when storage is back"
            )
            raise StorageError(received) from error
        shutil.rmtree(mirror.folder.parent)


def _mirror_until(mirror: Mirror, claim: Claim, stop: threading.Event) -> None:
    while not stop.wait(MIRROR_SECONDS):
        try:
            claim.check_kept()
            mirror.push()
        except (
            Exception
        ) as error:  # whatever it is: the last push, which the caller makes, tells it if it lasts
            logger.warning("%s; the search goes on, the next pass tries again", error)
