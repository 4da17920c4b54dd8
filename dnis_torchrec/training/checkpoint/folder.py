"""CheckpointFolder: which checkpoints there are, which is the latest, which may go; here those on a
file system."""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname
from tempfile import NamedTemporaryFile
from typing import TypedDict

import torch.distributed as dist

from dnis_torchrec.checks import check
from dnis_torchrec.data.files import PARTIAL, check_plain, parse_json, write_text
from dnis_torchrec.data.urls import Address, path_in, put_file
from dnis_torchrec.ranks import on_rank_zero, together, world_size_of
from dnis_torchrec.training.checkpoint.manifest import Manifest

LATEST = "latest.json"
ASIDE = ".old.partial"


class _Latest(TypedDict):
    checkpoint: str


_NAME = re.compile(r"step-(\d{8,})")


def check_shared(path: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks see the folder that rank 0 sees: on several hosts a path may name one
    on each."""
    if world_size_of(process_group) == 1:
        return
    with ExitStack() as stack:

        def write() -> str:
            path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(NamedTemporaryFile(dir=path, suffix=PARTIAL))
            return os.path.basename(file.name)

        name = on_rank_zero(write, process_group)
        with together(process_group):  # all have looked when it is left
            requirement = "the folder that rank 0 writes to, on storage that all hosts have mounted"
            received = "another one" if path.is_dir() else "no such folder"
            remedy = "choose a path that leads to the same folder on all hosts"
            check(
                (path / name).is_file(),
                f"folder {path} on {gethostname()}",
                requirement,
                received,
                remedy,
            )


def step_of(name: str) -> int | None:
    """The number in the name of a whole checkpoint; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def latest_text(path: Address) -> str:
    """Returns the content of the file `LATEST` for a checkpoint that is the latest."""
    return json.dumps({"checkpoint": os.path.basename(path)}) + "\n"


class CheckpointFolder(ABC):
    """Checkpoints of one run, wherever they are: which there are, which is the latest, which may
    go. No collective."""

    def __init__(self, path: Address, *, keep_last: int = 2) -> None:
        check(keep_last >= 1, "keep_last", "at least 1", keep_last)
        self.path = path
        self._keep_last = keep_last

    def path_of(self, step: int) -> Address:
        """Returns the address of the checkpoint of a step, once it is whole."""
        return path_in(self.path, f"step-{step:08d}")

    def latest(self) -> Address | None:
        """The last whole checkpoint, or None."""
        text = self._latest_text()
        if text is None:
            return None
        place, remedy = str(path_in(self.path, LATEST)), "name a checkpoint of the folder in it"
        name = parse_json(text, _Latest, place, remedy=remedy)["checkpoint"]
        check(step_of(name) is not None, place, '{"checkpoint": "step-..."}', repr(name), remedy)
        known = {os.path.basename(self.path_of(step)): step for step in self.steps()}
        check(name in known, place, f"one of {list(known)}", repr(name), remedy)
        return self.path_of(known[name])

    @abstractmethod
    def steps(self) -> list[int]:
        """Numbers of the whole checkpoints, rising."""

    @abstractmethod
    def clean(self) -> None:
        """Removes the remains of checkpoints that never became whole, or are only half gone."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Prepares the folder that all ranks write into."""

    @abstractmethod
    def add(self, step: int, rank: int, write: Callable[[Path], object]) -> tuple[str, int]:
        """Writes the file of a rank, on that rank, after `begin` and before `publish`."""

    @abstractmethod
    def publish(self, step: int, manifest: Manifest, keep: Collection[int] = ()) -> None:
        """Makes a checkpoint whole and the latest, and removes those that nobody needs any more."""

    @abstractmethod
    def remove(self) -> None:
        """Removes all checkpoints."""

    @abstractmethod
    def _latest_text(self) -> str | None:
        """Returns the content of the file `LATEST`, or None if there is no such file."""

    def _unneeded(self, steps: list[int], latest: int, keep: Collection[int]) -> list[int]:
        """Returns the steps whose checkpoints may be removed, of steps that rise."""
        # What is above the latest step is of a future that an interruption has undone.
        past = [step for step in steps if step <= latest]
        kept = {*past[-self._keep_last :], *keep}
        return [step for step in steps if step not in kept]


class LocalCheckpointFolder(CheckpointFolder):
    """Checkpoints on a local or shared file system, which all ranks must see (see `check_shared`)."""

    def __init__(self, path: Path, *, keep_last: int = 2) -> None:
        super().__init__(path, keep_last=keep_last)
        self._folder = Path(path)

    def partial_of(self, step: int) -> Path:
        """Returns the path of the checkpoint of a step while it is being written."""
        return self._folder / f"step-{step:08d}.partial"

    def steps(self) -> list[int]:
        """Numbers of the whole checkpoints, rising."""
        found = [step_of(path.name) for path in self._folder.glob("step-*")]
        return sorted(step for step in found if step is not None)

    def clean(self) -> None:
        """Removes the remains of checkpoints that never became whole, or are only half gone; see
        the base class."""
        check_plain(self._folder, f"checkpoints {self._folder}")
        for file in self._folder.glob(f".*{PARTIAL}"):
            file.unlink()
        for path in self._folder.glob("step-*.partial"):
            final = path.with_name(path.name.removesuffix(ASIDE))
            is_latest = path.name.endswith(ASIDE) and self._latest_text() == latest_text(final)
            if is_latest and not final.exists():
                os.replace(path, final)  # whole: it was to be replaced by one of the same step
            else:
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> None:
        """Makes the folder that all ranks write into."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.partial_of(step).mkdir()

    def add(self, step: int, rank: int, write: Callable[[Path], object]) -> tuple[str, int]:
        """Writes a rank's file; see the base class."""
        name = f"rank{rank}.safetensors"
        return name, put_file(self.partial_of(step) / name, write)

    def publish(self, step: int, manifest: Manifest, keep: Collection[int] = ()) -> None:
        """Makes a checkpoint whole and the latest, and removes those that nobody needs any more;
        see the base class."""
        manifest.write(self.partial_of(step))
        final = Path(self.path_of(step))
        aside = (
            self._put_aside(step) if final.exists() else None
        )  # of a run that got here before it was interrupted
        os.replace(self.partial_of(step), final)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        write_text(self._folder / LATEST, latest_text(final), durable=True)
        for doomed in self._unneeded(self.steps(), step, keep):
            shutil.rmtree(self._put_aside(doomed), ignore_errors=True)

    def remove(self) -> None:
        """Removes all checkpoints."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _latest_text(self) -> str | None:
        check_plain(self._folder, f"checkpoints {self._folder}")
        file = self._folder / LATEST
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None

    def _put_aside(self, step: int) -> Path:
        """Takes a checkpoint its name before it is removed, so that a kill leaves either a whole
        one or none."""
        aside = self._folder / f"step-{step:08d}{ASIDE}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(self.path_of(step), aside)
        return aside
