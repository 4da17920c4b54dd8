"""Keeps two jobs from writing to one URL. Storage has no locks: a small file beside the folder says
who writes there."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import gethostname
from typing import TypedDict
from uuid import uuid4

from dnis_torchrec.checks import check, describe
from dnis_torchrec.storage.access import StorageError, filesystem, retrying
from dnis_torchrec.storage.json_files import parse_json

RENEW_SECONDS, DEAD_SECONDS, SETTLE_SECONDS = 10.0, 45.0, 1.0
"""Between two signs of life; without one until a writer is taken for dead; until a new claim is
looked at again."""

logger = logging.getLogger(__name__)


@contextmanager
def claimed(url: str, *, job: str = "") -> Iterator[Claim]:
    """Claims a URL for this process while the block runs."""
    claim = Claim(url, job or uuid4().hex)
    claim.take()
    done = threading.Event()
    thread = threading.Thread(
        target=claim.renew_until, args=(done,), name="dnis-claim", daemon=True
    )
    thread.start()
    try:
        yield claim
    finally:
        done.set()
        thread.join()
        claim.release()


class _Told(TypedDict):
    writer: str
    job: str


class Claim:
    """This process's claim to a URL."""

    def __init__(self, url: str, job: str) -> None:
        self._url = url.rstrip("/")
        self._files, root = filesystem(self._url)
        self._path, self._place = f"{root.rstrip('/')}.writer", f"address {self._url}"
        self._job = f"{gethostname()} {job}"
        self._told = b""
        self._lost_to: str | None = None

    def take(self) -> None:
        """Waits until it is clear whether somebody else is alive, and claims the URL if nobody is."""
        found = self._read()
        until = time.monotonic() + DEAD_SECONDS
        while found and not self._is_own(found) and time.monotonic() < until:
            time.sleep(min(SETTLE_SECONDS, DEAD_SECONDS))
            now = self._read()
            self._refuse(now, unless=not now or now == found)
            found = now
        self._write()
        if found is None or not self._is_own(found):
            time.sleep(SETTLE_SECONDS)
            now = self._read()
            self._refuse(now, unless=now == self._told)

    def renew_until(self, done: threading.Event) -> None:
        """Shows that this process is alive, until it is done; what fails is tried again the next
        time."""
        while self._lost_to is None and not done.wait(RENEW_SECONDS):
            try:
                found = self._read()
                if found and not self._is_own(found):
                    self._lost_to = self._parsed(found)["writer"]
                else:
                    self._write()
            except (StorageError, ValueError) as error:
                logger.warning("%s; the claim is renewed later", error)

    def check_kept(self) -> None:
        """Checks that nobody has taken the URL over."""
        if self._lost_to is not None:
            requirement = "to keep the claim to it, which was not renewed in time"
            remedy = "end one of the two jobs"
            raise StorageError(
                describe(self._place, requirement, f"taken over by {self._lost_to}", remedy)
            )

    def release(self) -> None:
        """Lets go of the URL, if it is ours still. If storage does not answer, the claim dies by
        itself."""
        with suppress(StorageError, FileNotFoundError, ValueError):
            found = self._read()
            if found and self._is_own(found):
                retrying(lambda: self._files.rm_file(self._path), self._place)

    def _refuse(self, found: bytes | None, *, unless: bool) -> None:
        writer = self._parsed(found)["writer"] if found else "nobody"
        check(
            unless,
            self._place,
            "no other job at work there",
            writer,
            "wait for it, or choose another --out",
        )

    def _is_own(self, told: bytes) -> bool:
        return self._parsed(told)["job"] == self._job

    def _parsed(self, told: bytes) -> _Told:
        remedy = "remove the file if no other job is at work there"
        return parse_json(told, _Told, f"{self._place}.writer", remedy=remedy)

    def _read(self) -> bytes | None:
        self._files.invalidate_cache()
        try:
            return bytes(retrying(lambda: self._files.cat_file(self._path), self._place))
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        writer = f"process {os.getpid()} on {gethostname()}"
        self._told = json.dumps({"writer": writer, "job": self._job, "sign": uuid4().hex}).encode()

        def write() -> None:
            try:
                self._files.pipe_file(self._path, self._told)
            except (
                FileNotFoundError
            ):  # object stores need no folders, and may forbid to ask for the bucket's
                self._files.makedirs(os.path.dirname(self._path), exist_ok=True)
                self._files.pipe_file(self._path, self._told)

        retrying(write, self._place)
