"""StoredCheckpointFolder: checkpoints at a URL, for ranks on several hosts that share no disk."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from uuid import uuid4

from dnis_torchrec.data.urls import (
    Address,
    file_names,
    file_size,
    local_path,
    path_in,
    put_file,
    read_bytes,
    remove_file,
)
from dnis_torchrec.training.checkpoint.folder import (
    LATEST,
    CheckpointFolder,
    LocalCheckpointFolder,
    latest_text,
    step_of,
)
from dnis_torchrec.training.checkpoint.manifest import CHECKPOINT_MANIFEST, Manifest


class StoredCheckpointFolder(CheckpointFolder):
    """Checkpoints at a URL. A checkpoint is whole when its manifest is there, which is put last."""

    def steps(self) -> list[int]:
        """Numbers of the whole checkpoints, rising."""
        return sorted(step for step, files in self._found().items() if CHECKPOINT_MANIFEST in files)

    def clean(self) -> None:
        """Removes the remains of checkpoints that never became whole, or are only half gone."""
        for step, files in self._found().items():
            if CHECKPOINT_MANIFEST not in files:
                self._remove_files(step, files)

    def begin(self, step: int) -> None:
        """Nothing to prepare: storage needs no folders."""

    def add(self, step: int, rank: int, write: Callable[[Path], object]) -> tuple[str, int]:
        """Puts a rank's file there; see the base class."""
        name = f"rank{rank}.{uuid4().hex[:8]}.safetensors"
        return name, put_file(path_in(self.path_of(step), name), write)

    def publish(self, step: int, manifest: Manifest, keep: Collection[int] = ()) -> None:
        """Makes a checkpoint whole and the latest, and removes those that nobody needs any more;
        see the base class."""
        put_file(path_in(self.path_of(step), CHECKPOINT_MANIFEST), partial(_write, manifest.text()))
        put_file(path_in(self.path, LATEST), partial(_write, latest_text(self.path_of(step))))
        found = self._found()
        self._remove_files(
            step,
            [name for name in found[step] if name not in {CHECKPOINT_MANIFEST, *manifest.files}],
        )
        for doomed in self._unneeded(sorted(found), step, keep):
            self._remove_files(doomed, found[doomed])

    def remove(self) -> None:
        """Removes all checkpoints, the name of the latest first."""
        remove_file(path_in(self.path, LATEST))
        for step, files in self._found().items():
            self._remove_files(step, files)

    def _latest_text(self) -> str | None:
        address = path_in(self.path, LATEST)
        return (
            None
            if file_size(address) is None
            else read_bytes(address).decode("utf-8", errors="replace")
        )

    def _found(self) -> dict[int, list[str]]:
        """Step -> names of its files."""
        found: dict[int, list[str]] = {}
        for path in file_names(self.path):
            folder, name = posixpath.split(path)
            step = step_of(folder)
            if step is not None:
                found.setdefault(step, []).append(name)
        return found

    def _remove_files(self, step: int, names: Collection[str]) -> None:
        """The manifest first, so that a kill leaves either a whole checkpoint or none."""
        for name in sorted(names, key=lambda name: name != CHECKPOINT_MANIFEST):
            remove_file(path_in(self.path_of(step), name))


def checkpoint_folder(address: Address, *, keep_last: int = 2) -> CheckpointFolder:
    """The checkpoints at an address: a path that all ranks see, or a URL."""
    here = local_path(address)
    if here is None:
        return StoredCheckpointFolder(str(address), keep_last=keep_last)
    return LocalCheckpointFolder(here, keep_last=keep_last)


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
