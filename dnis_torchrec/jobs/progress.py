"""Progress of a search or training for people: lines, curves, images in TensorBoard, and how to stop it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

from torch import Tensor
from tqdm import tqdm

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.frequency import FrequencyCounts
from dnis_torchrec.checks import visible
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.ranks import rank_of
from dnis_torchrec.report import SearchImages
from dnis_torchrec.search.loop import EpochRecord, SearchEvents, SearchInterrupted
from dnis_torchrec.storage.foreign_folders import make_folder
from dnis_torchrec.training.plain import PlainEpoch, PlainEvents
from dnis_torchrec.training.signals import StopRequest

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


@contextmanager
def console_events(run: RunFolder) -> Iterator[SearchEvents]:
    """Progress on standard error (tqdm), TensorBoard events in RUN/tensorboard, and signals that stop it after a step.

    Only rank 0 shows and writes anything. The signals are those of `dnis_torchrec.training.signals`.

    Args:
        run: the folder of the run.

    Yields:
        Events to hand to `search`.
    """
    stop = _StopRequest()
    if rank_of() != 0:
        with stop:
            yield SearchEvents(should_stop=stop.is_requested)
        return
    with _Curves(run) as curves, tqdm(unit="step", dynamic_ncols=True, disable=None) as bar, stop:
        smoothed = _Smoothed()

        def on_start(steps_per_epoch: int, counts: FrequencyCounts, blocks: RowBlocks) -> None:
            run.save_stages(counts, blocks)
            for note in counts.notes():
                bar.write(visible(note), file=sys.stderr)
            curves.start(blocks, counts)

        def on_resume(steps: int, history: Sequence[EpochRecord]) -> None:
            bar.update(steps)
            bar.unpause()  # steps of earlier attempts say nothing about the speed of this one
            bar.write(f"resumed after lower step {steps}, in epoch {len(history)}", file=sys.stderr)

        def on_step(loss: float, density: float) -> None:
            bar.set_postfix_str(f"loss {smoothed.update(loss):.4f}, alpha density {density:.3f}", refresh=False)
            bar.update()

        def on_epoch(record: EpochRecord) -> None:
            run.drop_replaced()
            curves.draw(record)
            losses = f"train loss {record.train_loss:.4f}, selection loss {record.selection_loss:.4f}"
            alpha = f"alpha mean {record.alpha_mean:.3f}, density {record.alpha_density:.3f}"
            bar.write(f"epoch {record.epoch}, {record.phase}: {losses}, {alpha}", file=sys.stderr)

        yield SearchEvents(
            on_start=on_start,
            on_resume=on_resume,
            on_step=on_step,
            on_epoch=on_epoch,
            on_alpha=curves.draw_alpha,
            should_stop=stop.is_requested,
        )


@contextmanager
def plain_progress(notes: Sequence[str] = ()) -> Iterator[PlainEvents]:
    """Progress of a plain training on standard error (tqdm). Only rank 0 shows anything.

    Args:
        notes: notes to show its user before it begins.

    Yields:
        Events to hand to `train_plainly`.
    """
    if rank_of() != 0:
        yield PlainEvents()
        return
    with tqdm(unit="step", dynamic_ncols=True, disable=None) as bar:
        smoothed = _Smoothed()
        for note in notes:
            bar.write(visible(note), file=sys.stderr)

        def on_step(loss: float) -> None:
            bar.set_postfix_str(f"loss {smoothed.update(loss):.4f}", refresh=False)
            bar.update()

        def on_epoch(record: PlainEpoch) -> None:
            losses = f"train loss {record.train_loss:.4f}, selection loss {record.selection_loss:.4f}"
            bar.write(f"epoch {record.epoch}: {losses}", file=sys.stderr)

        yield PlainEvents(on_step=on_step, on_epoch=on_epoch)


class _Smoothed:
    """A running mean, in which the last 50 values or so count."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def update(self, value: float) -> float:
        """Takes a value and returns the mean."""
        self._mean = value if self._mean is None else 0.98 * self._mean + 0.02 * value
        return self._mean


class _Curves:
    """Curves and images in TensorBoard. A disk without room for them ends them, not the search."""

    def __init__(self, run: RunFolder) -> None:
        self._folder = run.path / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._images: SearchImages | None = None

    def start(self, blocks: RowBlocks, counts: FrequencyCounts) -> None:
        """Opens the file of events."""
        from torch.utils.tensorboard import SummaryWriter  # imports slowly; no other job needs it

        with self._surviving():
            folder = make_folder(self._folder, within=self._folder.parent)
            self._writer = SummaryWriter(str(folder), filename_suffix=f".{uuid4().hex}")  # a name nobody can guess
            self._images = SearchImages(self._writer, blocks, counts)

    def draw(self, record: EpochRecord) -> None:
        """Adds an epoch to every curve."""
        with self._surviving():
            for name, value in asdict(record).items():
                if self._writer is not None and name not in ("epoch", "step", "phase"):
                    self._writer.add_scalar(name, value, record.step)

    def draw_alpha(self, record: EpochRecord, alpha: Mapping[int, Tensor], is_last: bool) -> None:
        """Draws alpha now and then."""
        with self._surviving():
            if self._images is not None and (is_last or self._images.is_due()):
                self._images.draw(alpha, record.step)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = self._images = None
            logger.warning("%s: no more curves for TensorBoard, %s", self._folder, error)

    def __enter__(self) -> _Curves:
        return self

    def __exit__(self, *_: object) -> None:
        with self._surviving():
            if self._writer is not None:
                self._writer.close()


class _StopRequest(StopRequest):
    """Tells a search that was stopped which signal it was."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SearchInterrupted):
            error.signal = self.number
        super().__exit__(kind, error, traceback)
