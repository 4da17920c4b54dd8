"""What a person sees of a search that runs: progress on the console, curves and images in TensorBoard, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor
from tqdm import tqdm

from dnis_torchrec.blocking import RowBlocks
from dnis_torchrec.frequency import FrequencyCounts
from dnis_torchrec.report import SearchImages
from dnis_torchrec.run_folder import RunFolder
from dnis_torchrec.search import EpochRecord, SearchEvents


@contextmanager
def console_events(run: RunFolder) -> Iterator[SearchEvents]:
    """Progress on standard error (tqdm), TensorBoard events in RUN/tensorboard, and Ctrl-C that stops after the step.

    Yields:
        Events to hand to `search`.
    """
    from torch.utils.tensorboard import SummaryWriter  # imports slowly; no other job needs it

    stop = _StopRequest()
    with (
        SummaryWriter(str(run.path / "tensorboard")) as writer,
        tqdm(unit="step", dynamic_ncols=True, disable=None) as bar,
        stop,
    ):
        smoothed: list[float] = []
        images: list[SearchImages] = []

        def on_start(steps_per_epoch: int, counts: FrequencyCounts, blocks: RowBlocks) -> None:
            run.save_stages(counts, blocks)
            images.append(SearchImages(writer, blocks))

        def on_step(loss: float, density: float) -> None:
            smoothed.append(loss if not smoothed else 0.98 * smoothed[-1] + 0.02 * loss)
            del smoothed[:-1]
            bar.set_postfix_str(f"loss {smoothed[0]:.4f}, alpha density {density:.3f}", refresh=False)
            bar.update()

        def on_epoch(record: EpochRecord) -> None:
            for name, value in asdict(record).items():
                if name not in ("epoch", "step"):
                    writer.add_scalar(name, value, record.step)
            losses = f"train loss {record.train_loss:.4f}, selection loss {record.selection_loss:.4f}"
            alpha = f"alpha mean {record.alpha_mean:.3f}, density {record.alpha_density:.3f}"
            bar.write(f"epoch {record.epoch}: {losses}, {alpha}", file=sys.stderr)

        def on_alpha(record: EpochRecord, alpha: Mapping[int, Tensor], is_last: bool) -> None:
            if is_last or images[0].is_due():
                images[0].draw(alpha, record.step)

        yield SearchEvents(
            on_start=on_start,
            on_step=on_step,
            on_epoch=on_epoch,
            on_alpha=on_alpha,
            should_stop=stop.is_requested,
        )


class _StopRequest:
    """Turns the first SIGINT into a request to stop after the current step; a second one interrupts at once."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: Any = None

    def is_requested(self) -> bool:
        return self._requested

    def __enter__(self) -> _StopRequest:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, *_: object) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, self._previous)
