"""CheckpointSaver: writes checkpoints while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch.distributed as dist

from dnis_torchrec.checks import check_known
from dnis_torchrec.data.urls import local_path
from dnis_torchrec.ranks import rank_of
from dnis_torchrec.training.checkpoint.folder import CheckpointFolder, check_shared
from dnis_torchrec.training.checkpoint.placement import TrainingState
from dnis_torchrec.training.checkpoint.transfer import CheckpointWriteError, write_checkpoint
from dnis_torchrec.training.settings import ON_ERROR

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Copies a run's state to the CPU and writes it in a thread; never two at once."""

    def __init__(self, folder: CheckpointFolder, *, on_error: str = "stop") -> None:
        check_known("on_error", on_error, ON_ERROR)
        here = local_path(folder.path)
        if here is not None:
            check_shared(here)
        self._folder, self._on_error = folder, on_error
        self._process_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: tuple[int, Future[None]] | None = None
        self.failed_steps: set[int] = set()
        self.last_step: int | None = None

    def save(self, step: int, state: TrainingState, *, keep: Collection[int] = ()) -> None:
        """Starts to write a checkpoint, after waiting for the one before."""
        self.wait()
        copied = state.copied()
        write = self._executor.submit(
            write_checkpoint, self._folder, step, copied, self._process_group, keep=frozenset(keep)
        )
        self._running = (step, write)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._running is None:
            return
        step, write = self._running
        self._running = None
        try:
            write.result()
            self.last_step = step
        except CheckpointWriteError as error:
            self.failed_steps.add(step)
            if self._on_error == "stop":
                raise
            if rank_of() == 0:
                logger.warning("%s; the run goes on without it", error)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._executor.shutdown()
            if self._process_group is not None and error is None:
                dist.destroy_process_group(self._process_group)
