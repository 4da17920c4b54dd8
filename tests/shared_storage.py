"""Storage that several processes of this machine reach by a URL, as hosts reach a bucket: ``shared:///a/folder``."""

from __future__ import annotations

import fsspec
from fsspec.implementations.local import LocalFileSystem


class SharedFileSystem(LocalFileSystem):
    """The file system of this machine behind a protocol of its own, so that nothing takes its addresses for paths."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("shared://").strip("/")


def register() -> None:
    """Makes the protocol known in this process."""
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
