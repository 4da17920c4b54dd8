"""Progress of a training on standard error."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.std import EMA

from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.ranks import progress_bar, rank_of
from dnis_torchrec.training.evaluate import losses_in_words
from dnis_torchrec.training.loop import PLAIN, EpochRecord, Phase, SearchEvents


@contextmanager
def progress(
    recipe: Recipe, write: Callable[[str], None], epoch_samples: float = 1.0
) -> Iterator[SearchEvents]:
    """Shows a training and the time left on a terminal; `write` has a line for each epoch."""
    loss_mean = EMA(0.02)
    samples, words = {"epoch": epoch_samples, "step": 1.0}, {"phase": "", "epochs": ""}
    bar = progress_bar(None, "reading the data", unit=" samples", unit_scale=True)

    def on_start(steps_per_epoch: int, counts: Any, blocks: Any) -> None:
        samples["epoch"] = counts.num_samples

    def on_phase(phase: Phase, done: int, steps_per_epoch: float) -> None:
        samples["step"] = samples["epoch"] / steps_per_epoch
        words["phase"] = phase.name
        at_most = "" if phase.patience is None else "at most "
        words["epochs"] = f"{at_most}{math.ceil(phase.steps / steps_per_epoch)}"
        bar.reset(total=math.ceil(phase.steps * samples["step"]))
        bar.initial = bar.n = int(done * samples["step"])  # it may go on in the middle
        describe(refresh=True)

    def describe(refresh: bool = False) -> None:
        epoch = int((bar.n + samples["step"] / 2) / samples["epoch"]) + 1
        bar.set_description(f"{words['phase']}, epoch {epoch} of {words['epochs']}", refresh)

    def on_step(loss: float, density: float) -> None:
        more = f", alpha density {density:.3f}" if density < 1 else ""
        bar.set_postfix_str(f"loss {loss_mean(loss):.4f}{more}", refresh=False)
        describe()
        bar.update(samples["step"])

    def on_resume(done: int, history: Sequence[EpochRecord]) -> None:
        write(f"resumed after lower step {done}, in epoch {len(history)}")

    def on_epoch(record: EpochRecord) -> None:
        losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
        if record.phase != PLAIN:
            losses += f", alpha mean {record.alpha_mean:.3f}, density {record.alpha_density:.3f}"
        write(f"epoch {record.epoch}, {record.phase}: {losses}")

    callbacks: tuple[Any, ...] = on_start, on_resume, on_phase, on_step, on_epoch
    with bar:
        if rank_of() == 0:
            yield SearchEvents(**{callback.__name__: callback for callback in callbacks})
        else:
            yield SearchEvents()
