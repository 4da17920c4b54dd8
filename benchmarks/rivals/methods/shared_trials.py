"""The trials of a method, shared by processes of one machine: which process trains which, and the
results of each."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from dnis_torchrec.data.files import conform, file_lock, read_json, write_text
from dnis_torchrec.report.content import json_text

_SECONDS_BETWEEN_LOOKS = 0.2
_ANNOUNCEMENT = "trials.json"


class _Announcement(TypedDict):
    trials: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class FinishedTrial:
    """Results of a trial that has finished."""

    selection_loss: float
    embedding_bytes: int
    seconds: float


class SharedTrials:
    """Deals out trials to whichever process asks first, and gathers their results."""

    def __init__(self, parent: Path, names: Sequence[str]) -> None:
        digest = hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]
        self._folder = parent / f"trials-{digest}"
        self._num_trials = len(names)

    @contextmanager
    def leading(self, *, threads: int) -> Iterator[None]:
        """The time in which trials are trained; entered by one process, others may help within it."""
        self._folder.mkdir()
        announcement = {"trials": self._num_trials, "threads": threads}
        write_text(self._folder / _ANNOUNCEMENT, json_text(announcement, str(self._folder)))
        try:
            yield
        finally:  # by a new name first: a late helper finds nothing, and adds nothing to what is being removed
            over = self._folder.rename(self._folder.with_name(f"over-{self._folder.name}"))
            shutil.rmtree(over)

    def threads(self) -> int | None:
        """Threads to train with, None where these trials have not begun or are over."""
        try:
            announcement = read_json(self._folder / _ANNOUNCEMENT, _Announcement)
        except FileNotFoundError:
            return None
        return announcement["threads"]

    def folder(self, index: int) -> Path:
        """Returns the folder in which a trial is trained; the caller holds the trial's lock."""
        return self._folder / str(index)

    def to_train(self, *, until_all_have_finished: bool) -> Iterator[int]:
        """The trials that this process is to train; each is its own until the next one is asked
        for."""
        while unfinished := [index for index in range(self._num_trials) if not self._record(index).exists()]:
            has_trained = False
            for index in unfinished:
                with self._claim(index) as is_ours:
                    if is_ours and not self._record(index).exists():
                        shutil.rmtree(self.folder(index), ignore_errors=True)
                        self.folder(index).mkdir()
                        yield index
                        has_trained = True
            if not has_trained and not until_all_have_finished:
                return
            if not has_trained:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def finish(self, index: int, trial: FinishedTrial) -> None:
        """Writes the results of a trial."""
        write_text(self._record(index), json_text(asdict(trial), str(self._folder)))

    def finished(self) -> dict[int, FinishedTrial]:
        """All that have finished, by their numbers."""
        records = {index: self._record(index) for index in range(self._num_trials)}
        read = {index: read_json(path, dict[str, Any]) for index, path in records.items() if path.exists()}
        for index, fields in read.items():
            conform(fields, FinishedTrial, str(records[index]))
        return {index: FinishedTrial(**fields) for index, fields in read.items()}

    def best(self, *, num_bytes: int) -> int | None:
        """The finished trial of the lowest selection loss among those of at most so many bytes, the
        first of equals."""
        return _best(self.finished(), num_bytes)

    def drop_beaten(self, *, num_bytes: int) -> None:
        """Removes the states of finished trials that cannot be the best any more, so that few lie
        on disk at a time."""
        finished = self.finished()  # once: what another process finishes meanwhile may be better than the best here
        for index in finished.keys() - {_best(finished, num_bytes)}:
            shutil.rmtree(self.folder(index), ignore_errors=True)

    def _record(self, index: int) -> Path:
        return self._folder / f"{index}.json"

    @contextmanager
    def _claim(self, index: int) -> Iterator[bool]:
        """Returns whether a trial is this process's to train, as long as the context lasts."""
        with file_lock(self._folder / f"{index}.lock") as owner:
            yield owner is None


def _best(finished: Mapping[int, FinishedTrial], num_bytes: int) -> int | None:
    within = {index: trial for index, trial in finished.items() if trial.embedding_bytes <= num_bytes}
    return min(within, key=lambda index: (within[index].selection_loss, index), default=None)


def unclaimed_trials(parent: Path) -> int:
    """Counts the announced trials below a folder that no process has begun yet."""
    unclaimed = 0
    for announcement in parent.glob(f"trials-*/{_ANNOUNCEMENT}"):
        try:
            num_trials = read_json(announcement, _Announcement)["trials"]
        except FileNotFoundError:  # over in between
            continue
        unclaimed += max(0, num_trials - len(list(announcement.parent.glob("*.lock"))))
    return unclaimed
