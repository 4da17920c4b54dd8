"""CheckpointFolder: which checkpoints there are, which is the latest, which may go.

step-00000120/        a whole checkpoint: it has this name only since its last byte was written
step-00000140.partial one that is being written or deleted; means nothing
latest.json           the name of the last one
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from socket import gethostname
from uuid import uuid4

import torch.distributed as dist

from dnis_torchrec.checkpoint.manifest import write_text
from dnis_torchrec.checks import check
from dnis_torchrec.ranks import on_rank_zero, rank_of, together, world_size_of

LATEST = "latest.json"
SHARED = "shared.partial"
_NAME = re.compile(r"step-(\d{8,})")


def check_shared(path: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Checks that all ranks see the folder that rank 0 sees: on several hosts a path may name one on each.

    Distributed: rank 0 writes a word that every rank reads; three small collectives, none for a process alone.

    Args:
        path: the folder; made if it is not there.
        process_group: the ranks; all of them if None.

    Raises:
        ValueError: on all ranks, naming the first one that sees another folder.
    """
    if world_size_of(process_group) == 1:
        return
    file = path / SHARED

    def write() -> str:
        path.mkdir(parents=True, exist_ok=True)
        word = uuid4().hex
        file.write_text(word, encoding="utf-8")
        return word

    word = on_rank_zero(write, process_group)
    try:
        with together(process_group):
            found = file.read_text(encoding="utf-8") if file.is_file() else "none"
            requirement = "expected the folder that rank 0 writes to, on storage that all hosts have mounted"
            received = "another one" if path.is_dir() else "no such folder"
            remedy = "choose a path that leads to the same folder on all hosts"
            check(found == word, f"folder {path} on {gethostname()}", requirement, received, remedy)
    finally:  # all have read it by now
        if rank_of(process_group) == 0:
            file.unlink(missing_ok=True)


class CheckpointFolder:
    """Checkpoints of one run on a local or shared file system. No collective: rank 0 alone changes names.

    Args:
        path: the folder; need not exist before the first checkpoint.
        keep_last: how many of the last checkpoints are kept, at least 1.

    Example:
        >>> CheckpointFolder(Path("run/checkpoints")).path_of(120).as_posix()
        'run/checkpoints/step-00000120'
    """

    def __init__(self, path: Path, *, keep_last: int = 2) -> None:
        check(keep_last >= 1, "keep_last", "expected at least 1", keep_last)
        self.path = path
        self._keep_last = keep_last

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, once it is whole."""
        return self.path / f"step-{step:08d}"

    def partial_of(self, step: int) -> Path:
        """Where the checkpoint of a step is while it is being written."""
        return self.path / f"step-{step:08d}.partial"

    def steps(self) -> list[int]:
        """Numbers of the whole checkpoints, rising."""
        found = [_NAME.fullmatch(path.name) for path in self.path.glob("step-*")]
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The last whole checkpoint, or None.

        Raises:
            ValueError: if latest.json is damaged, or names a checkpoint that is gone.
        """
        file = self.path / LATEST
        if not file.is_file():
            return None
        place, remedy = str(file), "name a checkpoint of the folder in it"
        try:
            name = json.loads(file.read_text(encoding="utf-8"))["checkpoint"]
        except (ValueError, TypeError, KeyError):
            name = None
        valid = isinstance(name, str) and _NAME.fullmatch(name) is not None
        check(valid, place, 'expected {"checkpoint": "step-..."}', "something else", remedy)
        known = [self.path_of(step).name for step in self.steps()]
        check((self.path / name).is_dir(), place, f"expected one of {known}", repr(name), remedy)
        return self.path / name

    def clean(self) -> None:
        """Removes what is left of checkpoints that never became whole."""
        for path in self.path.glob("step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> None:
        """Makes the folder that all ranks write into."""
        self.partial_of(step).mkdir(parents=True)

    def publish(self, step: int, keep: Collection[int] = ()) -> None:
        """Gives a written checkpoint its name, makes it the latest, and removes those that nobody needs any more.

        Args:
            step: the checkpoint, complete in `partial_of`.
            keep: earlier ones that stay besides the last ones.
        """
        final = self.path_of(step)
        if final.exists():  # of a run that got here before it was interrupted
            self._remove(step)
        os.replace(self.partial_of(step), final)
        write_text(self.path / LATEST, json.dumps({"checkpoint": final.name}) + "\n")
        steps = self.steps()
        # What is above this step is of a future that an interruption has undone.
        past = [known for known in steps if known <= step]
        kept = {*past[-self._keep_last :], *keep}
        for known in steps:
            if known not in kept:
                self._remove(known)

    def _remove(self, step: int) -> None:
        """A name at a time, so that a kill leaves either a whole checkpoint or none."""
        doomed = self.path / f"step-{step:08d}.old.partial"
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(self.path_of(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)
