"""The whole search: train plainly, let columns die while weights train on, spend bits on what is
left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.axes import rotate_, rotation_groups, with_axes_
from dnis_torchrec.allocation.bits import Allocation, Prediction, allocate
from dnis_torchrec.allocation.curvature import Curvature, curvature_of_read_tables
from dnis_torchrec.allocation.energies import blocked_tables
from dnis_torchrec.allocation.held_out import LossSample, OutputBias, output_bias
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.over_ranks import measured_samples
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import LOSS, TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.ramp import LEAST_STEPS, Ramp, check_reachable
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.search.started import StartedSearch
from dnis_torchrec.selection.swap import fold_, merge_
from dnis_torchrec.training.checkpoint import CheckpointWriteError
from dnis_torchrec.training.evaluate import is_ahead, part_losses, selection_loss
from dnis_torchrec.training.loop import (
    EpochRecord,
    FinishedPhase,
    Phase,
    PlainEvents,
    SearchEvents,
    SearchLoop,
    train_plainly,
)
from dnis_torchrec.training.rounded import RoundedTables
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import set_learning_rates_

DEFAULTS = SearchSettings()

PLAIN, GIVEN, RAMP, RELEASE, FINISH = "plain", "given", "ramp", "release", "finish"
SEARCHED, COMPRESSED = "search", "compress"

GIVEN_STEPS = 1000
"""Steps at most in which the optimizers of a given model see gradients: as many as Adam's average
of squares lasts."""
DENSE_SHARE = 0.01
"""Rate of dense weights behind plain training, over the one of before."""
ALPHA_AVERAGING = 0.98
"""Share of the old average in the running mean of alpha's gradients, which are noisy."""
ALPHA_FLOOR = 0.005
"""A living alpha goes no lower."""
PARTS = 2
"""Parts of a validation batch: an upper step takes one, and costs less."""
FINISHING_EPOCHS, FINISHING_SHARE = 3, 0.3
"""Epochs at most of training through the rounding, and the tables' rate in them over that of
before: small steps add up in what rounding leaves out, large ones only overfit."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SearchOutcome:
    """Results of a search."""

    model: nn.Module
    scheme: MixedDimensionScheme
    predicted_loss_increase: float
    origin: str
    selection_losses: dict[str, float]
    counts: FrequencyCounts
    blocks: RowBlocks
    alpha: dict[int, torch.Tensor]
    history: tuple[EpochRecord, ...]
    best_epoch: int
    seconds_before: float = 0.0

    @property
    def selection_loss(self) -> float:
        """Selection loss of what is returned."""
        return self.selection_losses[self.origin]


def search(
    recipe: Recipe,
    compression: float,
    checkpoints: Address,
    device: torch.device,
    *,
    settings: SearchSettings = DEFAULTS,
    trained_epochs: int | None = None,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
) -> SearchOutcome:
    """Trains a model so that its tables can be served in a fraction of the bytes.

    Needs a process group, which `dnis_torchrec.training.shard.process_group` makes.

    Distributed: every rank calls it with the same recipe and settings. Its data is split over ranks
        (see
    `data.over_ranks`), counts are added up, tables are sharded as the planner sees fit and stay so,
    and alpha, blocks, scheme and history are the same on every rank.

    Args:
        recipe: model, data and loss. Its model is used up: take the one of the outcome.
        compression: bytes of the float32 tables over bytes served, above 1; met from below.
        checkpoints: folder for the last checkpoints and the best ones, a path that all ranks see or
            a URL (see `CheckpointFolder`).
        device: where to train.
        settings: how to search.
        trained_epochs: epochs of plain training that the recipe's model has behind it already, up
            to its best one: the search then begins at the axes, with the weights as they are. They
            say how long ramp and release may be; `dnis_torchrec.search.settings.USUAL_EPOCHS` where
            nobody knows them. None trains the model first.
        events: who listens.
        saving: when to save, and whether to resume from a checkpoint in `checkpoints`.

    Returns:
        The model with its scheme.

    Raises:
        ValueError: for bad data, blocks or a size that cannot be met, a model that could not be
            evaluated (see `check_pooling`), or other data or other settings than those of the
            checkpoint to go on from, before training starts; on all ranks alike.
        NonFiniteError: if a loss or gradient is NaN or infinite; the last good checkpoint stays.
        SearchInterrupted: if `events` asked to stop; everything was saved first, or the message
            says otherwise.
        CheckpointWriteError: if a checkpoint could not be written, and that is to stop the search,
            or none of a phase.
    """
    events = events or SearchEvents()
    with together():
        check(compression > 1, "compression", "a number above 1", compression)
        is_fit = trained_epochs is None or trained_epochs >= 1
        check(
            is_fit,
            "trained_epochs",
            "an integer >= 1",
            trained_epochs,
            "None trains the model first",
        )
        with_axes_(recipe.model)
        turned = [
            table
            for group in rotation_groups(recipe.model, recipe.leave_alone)
            for table in group.tables
        ]
    started = StartedSearch.of(
        recipe,
        partial(_blocks, recipe, compression, settings.num_blocks),
        device,
        events,
        whole_rows=turned,
        parts=PARTS,
        alpha_averaging=ALPHA_AVERAGING,
        alpha_floor=ALPHA_FLOOR,
    )
    plan = _Plan(started, compression, settings, trained_epochs, is_turned=bool(turned))
    configuration = asdict(settings) | {
        "compression": compression,
        "trained_epochs": trained_epochs,
    }
    loop = started.loop(plan, checkpoints, events, saving or Saving(), configuration)
    loop.run()
    alpha = {dim: value.detach().cpu().clone() for dim, value in _alphas(started).items()}
    finishing = _Finishing(started, loop, compression, is_turned=bool(turned))
    found, origin, losses = finishing.best()
    return SearchOutcome(
        model=cast(TrainTask, get_unwrapped_module(merge_(started.model))).model,
        scheme=found.scheme,
        predicted_loss_increase=found.predicted_loss_increase,
        origin=origin,
        selection_losses=losses,
        counts=started.counts,
        blocks=started.blocks,
        alpha=alpha,
        history=tuple(loop.history),
        best_epoch=loop.finished[-1 if origin == SEARCHED else 0].best.epoch,
        seconds_before=loop.seconds_before,
    )


def _blocks(
    recipe: Recipe,
    compression: float,
    num_blocks: int,
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
) -> RowBlocks:
    """Blocks of every table by itself; rows that were never seen stay in the last one."""
    left_alone = recipe.leave_alone
    blocks = blocks_from_counts(counts, tables, num_blocks=num_blocks, leave_alone=left_alone)
    check_reachable(blocked_tables(recipe.model, blocks), blocks, compression)
    return blocks


def _alphas(started: StartedSearch) -> dict[int, torch.Tensor]:
    alpha = started.pipeline.alpha
    return {dim: alpha.of(dim) for dim in alpha.dims}


class _Plan:
    """The phases of the search, see `dnis_torchrec.training.loop.Plan`."""

    def __init__(
        self,
        started: StartedSearch,
        compression: float,
        settings: SearchSettings,
        trained_epochs: int | None,
        *,
        is_turned: bool,
    ) -> None:
        self._started, self._settings, self._is_turned = started, settings, is_turned
        self._trained_steps = (
            None if trained_epochs is None else trained_epochs * started.steps_per_epoch
        )
        self._ramp = Ramp(
            started.pipeline, started.stream, started.blocks, started.recipe.task, compression
        )

    def phase_after(self, finished: Sequence[FinishedPhase]) -> Phase | None:
        settings, patience = self._settings, self._settings.patience
        if not finished:
            steps = self._started.steps_per_epoch
            if self._trained_steps is not None:
                return Phase(name=GIVEN, steps=min(GIVEN_STEPS, steps))
            return Phase(name=PLAIN, steps=settings.epochs * steps, patience=patience)
        if min(phase.best.step for phase in finished) < 0:
            requirement, remedy = (
                "the checkpoint of an epoch, to go back to",
                "make room for them, then --resume",
            )
            raise CheckpointWriteError(
                describe(f"phase {finished[-1].name!r}", requirement, "none", remedy)
            )
        to_best = self._trained_steps or finished[0].best.lower_step
        ramp = Phase(name=RAMP, steps=max(LEAST_STEPS, round(settings.ramp_share * to_best)))
        release = Phase(name=RELEASE, steps=to_best, patience=patience, starts_best=True)
        return (ramp, release, None)[len(finished) - 1]

    def begin(self, phase: Phase, finished: Sequence[FinishedPhase]) -> None:
        started = self._started
        if phase.name == GIVEN:
            set_learning_rates_(started.model, started.optimizer, tables=0.0, dense=0.0, rows=0.0)
        elif phase.name != PLAIN:
            _set_rates_(started)
            started.stream.alternate(started.pipeline.lower_steps + started.pipeline.upper_steps)

    def after_step(self, phase: Phase, done: int) -> None:
        if phase.name == RAMP:
            self._ramp.follow(done, phase.steps)

    def end(self, phase: Phase) -> None:
        if phase.name in (PLAIN, GIVEN) and self._is_turned:
            started = self._started
            with started.pipeline.detached():
                _turn_(started)


def _turn_(started: StartedSearch) -> None:
    rotate_(started.model, started.counts, started.optimizer, started.recipe.leave_alone)


def _set_rates_(started: StartedSearch, table_share: float = 1.0) -> None:
    """Slows dense weights down, and tables to a share of their rate."""
    recipe = started.recipe
    tables, dense = (
        table_share * recipe.table_learning_rate,
        DENSE_SHARE * recipe.dense_learning_rate,
    )
    set_learning_rates_(started.model, started.optimizer, tables=tables, dense=dense, rows=tables)


class _Finishing:
    """Bits for the tables that a search, or its plain training, ends with; weights adapt to the
    rounding."""

    def __init__(
        self, started: StartedSearch, loop: SearchLoop, compression: float, *, is_turned: bool
    ) -> None:
        self._started, self._loop, self._compression, self._is_turned = (
            started,
            loop,
            compression,
            is_turned,
        )
        plain, release = loop.finished[0], loop.finished[-1]
        self._checkpoints = {
            COMPRESSED: loop.checkpoint_of(plain),
            SEARCHED: loop.checkpoint_of(release),
        }
        self._batch = started.stream.first_train_batch()

    def best(self) -> tuple[Allocation, str, dict[str, float]]:
        """Leaves the better of the two in the model."""
        compressed, compressed_loss = self._compress()
        rival = self._part_losses()
        searched, searched_loss = self._search()
        losses = {SEARCHED: searched_loss, COMPRESSED: compressed_loss}
        if searched is not None and searched_loss < compressed_loss and self._is_ahead(rival):
            return searched, SEARCHED, losses
        self._go_back_to_plain_training()
        return self._served_(compressed, self._output_bias()), COMPRESSED, losses

    def _go_back_to_plain_training(self) -> None:
        started = self._started
        started.pipeline.go_back(self._checkpoints[COMPRESSED])
        if self._is_turned:
            _turn_(started)

    def _compress(self) -> tuple[Allocation, float]:
        """Goes back to plain training, and gives its tables bits without a further step."""
        self._go_back_to_plain_training()
        sample = self._sample()
        found = self._allocated(self._worth(warns=True), predict=sample.predict)
        self._served_(found, sample.bias)
        return found, self._selection_loss()

    def _sample(self) -> LossSample:
        """Held-out samples, which teach scales and say where the output bias goes."""
        started, recipe = self._started, self._started.recipe
        held_out, bias = measured_samples(recipe.data.validation), self._output_bias()
        return LossSample(
            started.model, held_out, started.blocks, loss=recipe.task, is_held_out=True, bias=bias
        )

    def _output_bias(self) -> OutputBias | None:
        return output_bias(
            self._started.model, self._batch, self._started.recipe.task, Ranks.everyone()
        )

    def _served_(self, found: Allocation, bias: OutputBias | None) -> Allocation:
        """Gives tables the values of their codes, and the output bias its place; returns the codes
        of these values."""
        rounded = RoundedTables(self._started.model, found.scheme)
        rounded.stop_()
        if bias is not None:
            bias.shift_(self._started.model, found.output_shift)
        return replace(found, scheme=rounded.scheme)

    def _search(self) -> tuple[Allocation | None, float]:
        """Goes back to the end of the release, gives its tables bits, and trains on in them; then
        scales learn."""
        started = self._started
        started.pipeline.go_back(self._checkpoints[SEARCHED])
        fold_(started.model)
        worth = self._worth(warns=False)
        if worth.is_zero:
            return None, self._selection_loss()
        found = self._allocated(worth)
        rounded = RoundedTables(started.model, found.scheme)
        _set_rates_(started, FINISHING_SHARE)
        self._loop.announce(
            Phase(name=FINISH, steps=FINISHING_EPOCHS * started.steps_per_epoch, patience=1)
        )
        recipe = started.recipe
        train_plainly(
            started.model,
            started.optimizer,
            recipe,
            started.pipeline.device,
            max_epochs=FINISHING_EPOCHS,
            patience=1,
            held=rounded,
            starts_trained=True,
            events=PlainEvents(on_step=lambda _: self._loop.stop_if_requested()),
        )
        rounded.stop_()
        sample = self._sample()
        said = sample.predict(rounded.scheme)
        found = replace(found, scheme=said.scheme or rounded.scheme, output_shift=said.output_shift)
        return self._served_(found, sample.bias), self._selection_loss()

    def _worth(self, *, warns: bool) -> Curvature:
        started, recipe = self._started, self._started.recipe
        batches, loss = recipe.data.train, recipe.task
        return curvature_of_read_tables(
            started.model, batches, started.blocks, loss=loss, warns=warns
        )

    def _allocated(
        self, worth: Curvature, predict: Callable[[MixedDimensionScheme], Prediction] | None = None
    ) -> Allocation:
        started, size = self._started, self._compression
        return allocate(
            started.plain, started.blocks, started.counts, worth, compression=size, predict=predict
        )

    def _is_ahead(self, rival: torch.Tensor) -> bool:
        """Whether the lead over compressed plain training is more than chance; of other metrics any
        lead counts."""
        if self._started.recipe.stop_on != LOSS:
            return True
        return is_ahead(self._part_losses(), rival, Ranks.everyone())

    def _part_losses(self) -> torch.Tensor:
        started, recipe = self._started, self._started.recipe
        return part_losses(
            started.model, recipe.data.selection, recipe.task, started.pipeline.device
        )

    def _selection_loss(self) -> float:
        started = self._started
        return selection_loss(started.model, started.recipe, started.pipeline.device)
