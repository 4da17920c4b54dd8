"""Progress of a search or training for people: lines, curves, images in TensorBoard, and how to
stop it."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import Tensor
from torchrec.datasets.utils import Batch
from tqdm import tqdm

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.ranks import rank_of, world_size_of
from dnis_torchrec.report import SearchImages
from dnis_torchrec.training.evaluate import losses_in_words
from dnis_torchrec.training.loop import (
    EpochRecord,
    Phase,
    PlainEvents,
    SearchEvents,
    SearchInterrupted,
)
from dnis_torchrec.training.settings import StopRequest

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

CURVES = {
    "train_loss": "loss/train",
    "selection_loss": "loss/selection",
    "alpha_mean": "alpha/mean",
    "alpha_density": "alpha/density",
}
"""Field of an epoch's record -> its curve in TensorBoard, which groups curves by what stands before
the slash."""


@contextmanager
def console_events(run: RunFolder, recipe: Recipe) -> Iterator[SearchEvents]:
    """Progress on standard error (tqdm), TensorBoard events in RUN/tensorboard, and signals that
    stop it after a step."""
    stop = _StopRequest()
    if rank_of() != 0:
        with stop:
            yield SearchEvents(should_stop=stop.is_requested)
        return
    with _Curves(run) as curves, progress_bar() as bar, stop:
        steps, of_epoch, of_step = _Steps(bar), list[float](), list[float]()

        def on_start(steps_per_epoch: int, counts: FrequencyCounts, blocks: RowBlocks) -> None:
            of_epoch.append(counts.num_samples)
            run.save_stages(counts, blocks)
            curves.start(blocks)

        def on_phase(phase: Phase, done: int, steps_per_epoch: int) -> None:
            of_step.append(of_epoch[-1] / steps_per_epoch)
            epochs, may_stop = phase.steps / steps_per_epoch, phase.patience is not None
            steps.begin(
                phase.name, epochs, of_epoch[-1], done=done * of_step[-1], may_stop=may_stop
            )

        def on_resume(done: int, history: Sequence[EpochRecord]) -> None:
            bar.write(f"resumed after lower step {done}, in epoch {len(history)}", file=sys.stderr)

        def on_epoch(record: EpochRecord) -> None:
            run.drop_replaced()
            curves.draw(record)
            losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
            alpha = f"alpha mean {record.alpha_mean:.3f}, density {record.alpha_density:.3f}"
            bar.write(f"epoch {record.epoch}, {record.phase}: {losses}, {alpha}", file=sys.stderr)

        yield SearchEvents(
            on_start=on_start,
            on_resume=on_resume,
            on_phase=on_phase,
            on_step=lambda loss, density: steps.take(
                of_step[-1], loss, f"alpha density {density:.3f}"
            ),
            on_epoch=on_epoch,
            on_alpha=curves.draw_alpha,
            should_stop=stop.is_requested,
        )


@contextmanager
def plain_progress(
    recipe: Recipe, samples: int, max_epochs: int
) -> Iterator[tuple[PlainEvents, Iterable[Batch]]]:
    """Progress of a plain training on standard error (tqdm). Only rank 0 shows anything."""
    if rank_of() != 0:
        yield PlainEvents(), recipe.data.train
        return
    watched, shown = _Watched(recipe.data.train), [0]
    with progress_bar() as bar:
        steps = _Steps(bar)
        steps.begin("training", max_epochs, samples, may_stop=True)

        def on_step(loss: float) -> None:
            shown.append(watched.samples)
            steps.take((shown[-1] - shown.pop(0)) * world_size_of(), loss)

        def on_epoch(record: EpochRecord) -> None:
            losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
            bar.write(f"epoch {record.epoch}: {losses}", file=sys.stderr)

        yield PlainEvents(on_step=on_step, on_epoch=on_epoch), watched


def curves_of(record: EpochRecord) -> dict[str, float]:
    """The curves of an epoch by their names in TensorBoard."""
    return {CURVES[name]: value for name, value in asdict(record).items() if name in CURVES}


def tell_tensorboard(
    run: RunFolder, settings: Mapping[str, Any], metrics: Mapping[str, float], step: int
) -> None:
    """Puts settings and test metrics beside a run's curves, where TensorBoard compares runs by
    them."""
    with _Curves(run) as curves:
        curves.tell(settings, metrics, step)


def progress_bar() -> tqdm:
    """A bar on standard error that counts samples, and says from its first moment on what is being
    done."""
    return tqdm(
        desc="reading the data", unit=" samples", unit_scale=True, dynamic_ncols=True, disable=None
    )


class _Steps:
    """Steps of one phase after the other on a bar: its name, the epoch of how many, samples a
    second, time left."""

    def __init__(self, bar: tqdm) -> None:
        self._bar, self._smoothed = bar, _Smoothed()
        self._name, self._epochs, self._of_epoch, self._done = "", "", 1.0, 0.0

    def begin(
        self, name: str, epochs: float, of_epoch: float, *, done: float = 0.0, may_stop: bool
    ) -> None:
        """Begins a phase, or goes on in the middle of it."""
        self._name, self._epochs = name, f"{'at most ' if may_stop else ''}{math.ceil(epochs)}"
        self._of_epoch, self._done = of_epoch, done
        self._bar.reset(total=round(epochs * of_epoch))
        self._bar.initial = self._bar.n = round(done)
        self._describe(0.0)

    def take(self, samples: float, loss: float, told: str = "") -> None:
        """Takes a step."""
        shown = f"loss {self._smoothed.update(loss):.4f}" + (f", {told}" if told else "")
        self._bar.set_postfix_str(shown, refresh=False)
        self._describe(samples / 2)
        self._done += samples
        self._bar.update(samples)

    def _describe(self, ahead: float) -> None:
        epoch = int((self._done + ahead) / self._of_epoch) + 1
        self._bar.set_description(
            f"{self._name}, epoch {epoch} of {self._epochs}", refresh=not ahead
        )


class _Watched:
    """Batches that count their samples while they are read."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches, self.samples = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.samples += len(batch.labels)
            yield batch


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
        self._folder = (
            run.path / "tensorboard" / run.path.resolve().name
        )  # TensorBoard calls a run as its folder
        self._writer: SummaryWriter | None = None
        self._images: SearchImages | None = None

    def start(self, blocks: RowBlocks) -> None:
        """Opens the file of events, for curves and images."""
        with self._surviving():
            self._writer = self._opened()
            self._images = SearchImages(self._writer, blocks)

    def tell(self, settings: Mapping[str, Any], metrics: Mapping[str, float], step: int) -> None:
        """Adds the test metrics, and the settings that led to them."""
        from torch.utils.tensorboard.summary import hparams

        named = {f"test/{name}": value for name, value in metrics.items()}
        plain = {
            name: value if isinstance(value, int | float) else str(value)
            for name, value in settings.items()
        }
        with self._surviving():
            self._writer = self._opened()
            for summary in hparams(plain, named):
                self._writer._get_file_writer().add_summary(summary)
            for name, value in named.items():
                self._writer.add_scalar(name, value, step)

    def _opened(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # imports slowly; no other job needs it

        self._folder.mkdir(parents=True, exist_ok=True)
        return SummaryWriter(
            str(self._folder), filename_suffix=f".{uuid4().hex}"
        )  # a name nobody can guess

    def draw(self, record: EpochRecord) -> None:
        """Adds an epoch to every curve."""
        with self._surviving():
            for name, value in curves_of(record).items():
                if self._writer is not None:
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SearchInterrupted):
            error.signal = self.number
        super().__exit__(kind, error, traceback)
