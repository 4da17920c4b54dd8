"""The search: train plainly, let columns die while weights train on, spend bits on the rest."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.allocation.axes import rotate_, rotation_groups, with_axes_
from dnis_torchrec.allocation.bits import (
    Allocation,
    Prediction,
    allocate,
    sizes_as_html,
    sizes_as_text,
)
from dnis_torchrec.allocation.curvature import Curvature, curvature_of_read_tables
from dnis_torchrec.allocation.energies import blocked_tables
from dnis_torchrec.allocation.held_out import LossSample, OutputBias, output_bias
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import BatchParts, LookupBatches
from dnis_torchrec.data.over_ranks import read_splits, samples_to_measure, split_over_ranks
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import LOSS, TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, together, world_size_of
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.ramp import LEAST_STEPS, Ramp, check_reachable
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.settings import SearchSettings, check_compression
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import fold_, merge_, prepare_
from dnis_torchrec.training.evaluate import (
    evaluate,
    is_ahead,
    losses_in_words,
    part_losses,
    primary_metric,
    selection_loss,
)
from dnis_torchrec.training.loop import (
    PLAIN,
    EpochRecord,
    FinishedPhase,
    Phase,
    Plan,
    SearchEvents,
    TrainLoop,
    train_plainly,
)
from dnis_torchrec.training.rounded import RoundedTables
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import check_pooling, process_group, set_learning_rates_, shard

MakeBlocks = Callable[[FrequencyCounts, Sequence[EmbeddingBagConfig]], RowBlocks]


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """A search before its first step."""

    recipe: Recipe
    model: DistributedModelParallel
    optimizer: KeyedOptimizerWrapper
    counts: FrequencyCounts
    blocks: RowBlocks
    pipeline: BilevelTrainPipeline
    stream: BilevelStream[Batch]
    steps_per_epoch: int
    fingerprints: Mapping[str, int]

    @staticmethod
    def of(
        recipe: Recipe,
        blocks_of: MakeBlocks,
        device: torch.device,
        events: SearchEvents,
        *,
        whole_rows: Sequence[str] = (),
        parts: int = 1,
        alpha_averaging: float = 0.0,
        alpha_floor: float = 0.0,
    ) -> Setup:
        """Counts, cuts blocks, prepares and shards."""
        ranks = Ranks.everyone()
        with together():
            tables = table_configs(recipe.model)
            check_pooling(recipe.model)
        whole, counts, fingerprints = read_splits(recipe, tables, ranks)
        recipe = replace(
            recipe, data=replace(whole, validation=_in_parts(recipe.data, parts, ranks))
        )
        with together():
            blocks = blocks_of(counts, tables)
        steps_per_epoch = sum(1 for _ in recipe.data.train)
        with together():
            events.on_start(steps_per_epoch, counts, blocks)
        task = TrainTask(
            prepare_(recipe.model, blocks), recipe.task, embedding_l2=recipe.embedding_l2
        )
        model, optimizer = shard(
            task,
            recipe,
            device,
            whole_rows=whole_rows,
            is_prefetched=True,
            batch_size=counts.num_samples // steps_per_epoch,
        )
        pipeline = BilevelTrainPipeline(
            model, optimizer, device, alpha_averaging=alpha_averaging, alpha_floor=alpha_floor
        )
        data = recipe.data
        train, validation = (
            LookupBatches(data.train, "train"),
            LookupBatches(data.validation, "validation"),
        )
        stream = BilevelStream(
            train, validation, LevelSchedule(warm_up_steps=None)
        )  # the plan says when: `alternate`
        model.train()
        return Setup(
            recipe=recipe,
            model=model,
            optimizer=optimizer,
            counts=counts,
            blocks=blocks,
            pipeline=pipeline,
            stream=stream,
            steps_per_epoch=steps_per_epoch,
            fingerprints=fingerprints,
        )

    def loop(
        self,
        plan: Plan,
        folder: Address,
        events: SearchEvents,
        saving: Saving,
        configuration: Mapping[str, Any],
    ) -> TrainLoop:
        """Makes the loop that takes the steps."""
        return TrainLoop(
            self.pipeline,
            self.stream,
            self.recipe,
            plan,
            folder,
            saving,
            steps_per_epoch=self.steps_per_epoch,
            events=events,
            data=self.fingerprints,
            configuration=configuration,
        )

    @property
    def plain(self) -> nn.Module:
        """The recipe's own model, prepared and sharded still."""
        return cast(TrainTask, get_unwrapped_module(self.model)).model


def _in_parts(data: DataSplits, parts: int, ranks: Ranks) -> Iterable[Batch]:
    """This rank's share of every part of the validation batches."""
    validation = BatchParts(data.validation, parts, at_least=ranks.world_size)
    return split_over_ranks(replace(data, validation=validation), ranks).validation


DEFAULTS = SearchSettings()

GIVEN, RAMP, RELEASE, FINISH = "given", "ramp", "release", "finish"
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

    Needs a process group; every rank calls it alike, its data is split over ranks, and all but the
    tables is the same on every rank.

    Args:
        recipe: model, data and loss. Its model is used up: take the one of the outcome.
        compression: bytes of the float32 tables over bytes served, above 1; met from below.
        checkpoints: folder for checkpoints, a path that all ranks see or a URL.
        device: device that this rank trains on.
        settings: the settings; their defaults are for every recipe.
        trained_epochs: epochs of plain training that the recipe's model has behind it already, up
            to its best one: the search then begins at the axes, with the weights as they are. They
            say how long ramp and release may be. None trains the model first.
        events: what is called as the search goes on.
        saving: when to save, and whether to resume from a checkpoint in `checkpoints`.
    """
    events = events or SearchEvents()
    with together():
        check(compression > 1, "compression", "a number above 1", compression)
        is_fit, remedy = (
            trained_epochs is None or trained_epochs >= 1,
            "None trains the model first",
        )
        check(is_fit, "trained_epochs", "an integer >= 1", trained_epochs, remedy)
        with_axes_(recipe.model)
        turned = [
            table
            for group in rotation_groups(recipe.model, recipe.leave_alone)
            for table in group.tables
        ]
    setup = Setup.of(
        recipe,
        partial(_blocks, recipe, compression, settings.num_blocks),
        device,
        events,
        whole_rows=turned,
        parts=PARTS,
        alpha_averaging=ALPHA_AVERAGING,
        alpha_floor=ALPHA_FLOOR,
    )
    plan = _Plan(setup, compression, settings, trained_epochs, is_turned=bool(turned))
    configuration = asdict(settings) | {
        "compression": compression,
        "trained_epochs": trained_epochs,
    }
    loop = setup.loop(plan, checkpoints, events, saving or Saving(), configuration)
    loop.run()
    alpha = {dim: value.detach().cpu().clone() for dim, value in _alphas(setup).items()}
    finishing = _Finishing(setup, loop, compression, is_turned=bool(turned))
    found, origin, losses = finishing.best()
    return SearchOutcome(
        model=cast(TrainTask, get_unwrapped_module(merge_(setup.model))).model,
        scheme=found.scheme,
        predicted_loss_increase=found.predicted_loss_increase,
        origin=origin,
        selection_losses=losses,
        counts=setup.counts,
        blocks=setup.blocks,
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


def _alphas(setup: Setup) -> dict[int, torch.Tensor]:
    alpha = setup.pipeline.alpha
    return {dim: alpha.of(dim) for dim in alpha.dims}


class _Plan(Plan):
    """The phases of the search, see `dnis_torchrec.training.loop.Plan`."""

    def __init__(
        self,
        setup: Setup,
        compression: float,
        settings: SearchSettings,
        trained_epochs: int | None,
        *,
        is_turned: bool,
    ) -> None:
        self._setup, self._settings, self._is_turned = setup, settings, is_turned
        self._trained_steps = (
            None if trained_epochs is None else trained_epochs * setup.steps_per_epoch
        )
        self._ramp = Ramp(
            setup.pipeline, setup.stream, setup.blocks, setup.recipe.task, compression
        )

    def phase_after(self, finished: Sequence[FinishedPhase]) -> Phase | None:
        settings, patience = self._settings, self._settings.patience
        if not finished:
            steps = self._setup.steps_per_epoch
            if self._trained_steps is not None:
                return Phase(name=GIVEN, steps=min(GIVEN_STEPS, steps))
            return Phase(name=PLAIN, steps=settings.epochs * steps, patience=patience)
        to_best = self._trained_steps or finished[0].best.lower_step
        ramp = Phase(name=RAMP, steps=max(LEAST_STEPS, round(settings.ramp_share * to_best)))
        release = Phase(name=RELEASE, steps=to_best, patience=patience, starts_best=True)
        return (ramp, release, None)[len(finished) - 1]

    def begin(self, phase: Phase, finished: Sequence[FinishedPhase]) -> None:
        setup = self._setup
        if phase.name == GIVEN:
            set_learning_rates_(setup.model, setup.optimizer, tables=0.0, dense=0.0)
        elif phase.name != PLAIN:
            _set_rates_(setup)
            setup.stream.alternate(setup.pipeline.lower_steps + setup.pipeline.upper_steps)

    def after_step(self, phase: Phase, done: int) -> None:
        if phase.name == RAMP:
            self._ramp.follow(done, int(phase.steps))

    def end(self, phase: Phase) -> None:
        if phase.name in (PLAIN, GIVEN) and self._is_turned:
            setup = self._setup
            with setup.pipeline.detached():
                _turn_(setup)


def _turn_(setup: Setup) -> None:
    rotate_(setup.model, setup.counts, setup.optimizer, setup.recipe.leave_alone)


def _set_rates_(setup: Setup, table_share: float = 1.0) -> None:
    """Slows dense weights down, and tables to a share of their rate."""
    recipe = setup.recipe
    tables, dense = (
        table_share * recipe.table_learning_rate,
        DENSE_SHARE * recipe.dense_learning_rate,
    )
    set_learning_rates_(setup.model, setup.optimizer, tables=tables, dense=dense)


class _Finishing:
    """Bits for the tables that a search, or its plain training, ends with; weights adapt to the
    rounding."""

    def __init__(
        self, setup: Setup, loop: TrainLoop, compression: float, *, is_turned: bool
    ) -> None:
        self._setup, self._loop, self._compression, self._is_turned = (
            setup,
            loop,
            compression,
            is_turned,
        )
        plain, release = loop.finished[0], loop.finished[-1]
        self._checkpoints = {
            COMPRESSED: loop.checkpoint_of(plain),
            SEARCHED: loop.checkpoint_of(release),
        }
        self._batch = setup.stream.first_train_batch()

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
        setup = self._setup
        setup.pipeline.go_back(self._checkpoints[COMPRESSED])
        if self._is_turned:
            _turn_(setup)

    def _compress(self) -> tuple[Allocation, float]:
        """Goes back to plain training, and gives its tables bits without a further step."""
        self._go_back_to_plain_training()
        sample = self._sample()
        found = self._allocated(self._worth(warns=True), predict=sample.predict)
        self._served_(found, sample.bias)
        return found, self._selection_loss()

    def _sample(self) -> LossSample:
        """Held-out samples, which teach scales and say where the output bias goes."""
        setup, recipe = self._setup, self._setup.recipe
        held_out, bias = samples_to_measure(recipe.data.validation), self._output_bias()
        return LossSample(
            setup.model, held_out, setup.blocks, loss=recipe.task, is_held_out=True, bias=bias
        )

    def _output_bias(self) -> OutputBias | None:
        return output_bias(
            self._setup.model, self._batch, self._setup.recipe.task, Ranks.everyone()
        )

    def _served_(self, found: Allocation, bias: OutputBias | None) -> Allocation:
        """Gives tables the values of their codes, and the output bias its place; returns the codes
        of these values."""
        rounded = RoundedTables(self._setup.model, found.scheme)
        rounded.stop_()
        if bias is not None:
            bias.shift_(self._setup.model, found.output_shift)
        return replace(found, scheme=rounded.scheme)

    def _search(self) -> tuple[Allocation | None, float]:
        """Goes back to the end of the release, gives its tables bits, and trains on in them; then
        scales learn."""
        setup = self._setup
        setup.pipeline.go_back(self._checkpoints[SEARCHED])
        fold_(setup.model)
        worth = self._worth(warns=False)
        if worth.is_zero:
            return None, self._selection_loss()
        found = self._allocated(worth)
        rounded = RoundedTables(setup.model, found.scheme)
        _set_rates_(setup, FINISHING_SHARE)
        self._loop.announce(
            Phase(name=FINISH, steps=FINISHING_EPOCHS * setup.steps_per_epoch, patience=1)
        )
        recipe = setup.recipe
        train_plainly(
            setup.model,
            setup.optimizer,
            recipe,
            setup.pipeline.device,
            max_epochs=FINISHING_EPOCHS,
            patience=1,
            rule=rounded,
            starts_trained=True,
            events=SearchEvents(on_step=lambda *_: self._loop.stop_if_requested()),
        )
        rounded.stop_()
        sample = self._sample()
        said = sample.predict(rounded.scheme)
        found = replace(found, scheme=said.scheme or rounded.scheme, output_shift=said.output_shift)
        return self._served_(found, sample.bias), self._selection_loss()

    def _worth(self, *, warns: bool) -> Curvature:
        setup, recipe = self._setup, self._setup.recipe
        batches, loss = recipe.data.train, recipe.task
        return curvature_of_read_tables(setup.model, batches, setup.blocks, loss=loss, warns=warns)

    def _allocated(
        self, worth: Curvature, predict: Callable[[MixedDimensionScheme], Prediction] | None = None
    ) -> Allocation:
        setup, size = self._setup, self._compression
        return allocate(
            setup.plain, setup.blocks, setup.counts, worth, compression=size, predict=predict
        )

    def _is_ahead(self, rival: torch.Tensor) -> bool:
        """Whether the lead over compressed plain training is more than chance; of other metrics any
        lead counts."""
        if self._setup.recipe.stop_on != LOSS:
            return True
        return is_ahead(self._part_losses(), rival, Ranks.everyone())

    def _part_losses(self) -> torch.Tensor:
        setup, recipe = self._setup, self._setup.recipe
        return part_losses(setup.model, recipe.data.selection, recipe.task, setup.pipeline.device)

    def _selection_loss(self) -> float:
        setup = self._setup
        return selection_loss(setup.model, setup.recipe, setup.pipeline.device)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SearchResult:
    """What a search has found; prints as a table of a few lines."""

    outcome: SearchOutcome
    allocation: Allocation
    metrics: dict[str, float]
    metric: str

    @property
    def model(self) -> nn.Module:
        """The plain model; its tables are float32 and hold the values that are served."""
        return self.outcome.model

    @property
    def scheme(self) -> MixedDimensionScheme:
        """Bits of every column of every block, for `dnis_torchrec.export`."""
        return self.allocation.scheme

    @property
    def compression(self) -> float:
        """Bytes of the float32 tables over the bytes served."""
        return self.allocation.compression

    def __repr__(self) -> str:
        """A headline, and a line for each table."""
        return "\n".join([*self._headlines(), *sizes_as_text(self.scheme)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return sizes_as_html(self.scheme, self._headlines())

    def _headlines(self) -> list[str]:
        size = f"{self.compression:.2f} times smaller: {self.allocation.num_bytes:,} bytes served"
        lines = [
            f"{size}; test {self.metric} {self.metrics[self.metric]:.4f}, "
            f"loss {self.metrics['loss']:.4f}"
        ]
        if self.outcome.origin == COMPRESSED:
            lines.append("The search gained nothing. This holds the plain model, compressed.")
        return lines


def search_once(
    recipe: Recipe, compression: float = 20.0, *, settings: SearchSettings | None = None
) -> SearchResult:
    """Trains a recipe's model so that its tables can be served in a fraction of the bytes:
    ``dnis.search``.

    On one process: a process group and a folder for checkpoints are made, and gone again when it
    returns; a process group of one that is there already is used. The recipe is left as it was, so
    the same call gives the same result as far as torch's random numbers do: the model is copied,
    and the splits count their epochs anew. For several ranks, progress and resuming there is ``dnis
    search``. Every epoch is logged at level INFO.

    Args:
        recipe: model, data, and loss or task.
        compression: bytes of the float32 tables over bytes served, above 1; met from below.
        settings: how to search; the defaults are for every recipe.

    Returns:
        The model, its scheme, and its metrics on the test split.

    Raises:
        ValueError: for bad data or a size that cannot be met, before training.
        NotImplementedError: in a process group of several ranks.
        NonFiniteError: if a loss becomes NaN or infinite.

    Example:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from dnis_torchrec.data.frames import recipe_from_frame
        >>> users = np.random.default_rng(0).integers(0, 50, 400)
        >>> frame = pd.DataFrame({"user": users, "liked": users % 2})
        >>> recipe = recipe_from_frame(
        ...     frame, model="dlrm", label="liked", ids=["user"], embedding_dim=8
        ... )
        >>> found = search_once(recipe, 4, settings=SearchSettings(epochs=2, num_blocks=2))
        >>> found.compression >= 4, sorted(found.metrics)
        (True, ['auc', 'calibration', 'logloss', 'loss', 'ne'])
    """
    check_compression(compression)
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        if world_size_of() > 1:
            remedy = "run `torchrun -m dnis_torchrec search` with the recipe's name"
            raise NotImplementedError(
                describe("search", "supported is one process", f"{world_size_of()}", remedy)
            )
        own = replace(recipe, model=copy.deepcopy(recipe.model), data=_from_its_epoch(recipe.data))
        events = SearchEvents(on_epoch=partial(_log, recipe))
        outcome = search(
            own,
            compression,
            Path(folder),
            device,
            settings=settings or SearchSettings(),
            events=events,
        )
        metrics = evaluate(
            TrainTask(outcome.model, recipe.task), recipe.data.test, recipe.task, device
        )
    metric, _ = primary_metric(recipe.task, recipe.data.test)
    found = Allocation(
        scheme=outcome.scheme,
        predicted_loss_increase=outcome.predicted_loss_increase,
        num_bytes=sum(table.served_bytes(PACKED) for table in outcome.scheme.tables.values()),
    )
    return SearchResult(
        outcome=outcome,
        allocation=found,
        metrics=metrics,
        metric=metric if metric in metrics else "loss",
    )


def _from_its_epoch(data: DataSplits) -> DataSplits:
    """Streams of the search's own, which begin where those of the recipe stand."""
    return replace(
        data, **{part.name: copy.copy(getattr(data, part.name)) for part in fields(DataSplits)}
    )


def _log(recipe: Recipe, record: EpochRecord) -> None:
    losses = losses_in_words(recipe, record.train_loss, record.selection_loss)
    logger.info("epoch %d, %s: %s", record.epoch, record.phase, losses)
