"""The search: train plainly, let columns die while weights train on, spend bits on the rest."""

import copy
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation import bits
from dnis_torchrec.allocation.axes import rotate_, rotation_groups, with_axes_
from dnis_torchrec.allocation.curvature import Curvature, curvature_of_read_tables
from dnis_torchrec.allocation.energies import blocked_tables
from dnis_torchrec.allocation.gains import LossSample, OutputBias, is_ahead, output_bias
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe, tell
from dnis_torchrec.data.batches import BatchParts, LookupBatches
from dnis_torchrec.data.over_ranks import read_splits, samples_to_measure, split_over_ranks
from dnis_torchrec.data.recipe import SPLITS, DataSplits, Recipe
from dnis_torchrec.data.task import LOSS, TrainTask, direction_of
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, together, world_size_of
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.ramp import LEAST_STEPS, Ramp, check_reachable
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.search.settings import SearchSettings, check_compression
from dnis_torchrec.selection.shards import name_tables_apart_, name_tables_back_, table_configs
from dnis_torchrec.selection.swap import fold_, in_float32_, merge_, prepare_
from dnis_torchrec.training.evaluate import evaluate, part_losses, primary_metric, selection_loss
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
from dnis_torchrec.training.progress import progress
from dnis_torchrec.training.rounded import RoundedTables
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import check_pooling, process_group, set_learning_rates_, shard

MakeBlocks = Callable[[FrequencyCounts, Sequence[EmbeddingBagConfig]], RowBlocks]

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


class Setup:
    """A search before its first step: counts, blocks, and the prepared and sharded model."""

    def __init__(
        self,
        recipe: Recipe,
        blocks_of: MakeBlocks,
        device: torch.device,
        events: SearchEvents,
        *,
        whole_rows: Sequence[str] = (),
    ) -> None:
        ranks = Ranks.everyone()
        with together():
            tables = table_configs(recipe.model)
            check_pooling(recipe.model)
        data, self.counts, self.fingerprints = read_splits(recipe, tables, ranks)
        parts = BatchParts(recipe.data.validation, PARTS, at_least=ranks.world_size)
        validation = split_over_ranks(replace(recipe.data, validation=parts), ranks).validation
        self.recipe = recipe = replace(recipe, data=replace(data, validation=validation))
        with together():
            self.blocks = blocks_of(self.counts, tables)
        self.steps_per_epoch = sum(1 for _ in recipe.data.train)
        with together():
            events.on_start(self.steps_per_epoch, self.counts, self.blocks)
        model = prepare_(recipe.model, self.blocks)
        self.model, self.optimizer = shard(
            TrainTask(model, recipe.task, embedding_l2=recipe.embedding_l2),
            recipe,
            device,
            whole_rows=whole_rows,
            is_prefetched=True,
            batch_size=self.counts.num_samples // self.steps_per_epoch,
        )
        of_alpha = {"alpha_averaging": ALPHA_AVERAGING, "alpha_floor": ALPHA_FLOOR}
        self.pipeline = BilevelTrainPipeline(self.model, self.optimizer, device, **of_alpha)
        train = LookupBatches(recipe.data.train, "train")
        schedule = LevelSchedule(warm_up_steps=None)  # the plan says when: `alternate`
        self.stream: BilevelStream[Batch] = BilevelStream(
            train, LookupBatches(validation, "validation"), schedule
        )
        self.model.train()

    def loop(self, plan: Plan, folder: Address, events: SearchEvents, policy: Saving) -> TrainLoop:
        """Makes the loop that takes the steps."""
        return TrainLoop(
            *(self.pipeline, self.stream, self.recipe, plan, folder, policy),
            steps_per_epoch=self.steps_per_epoch,
            events=events,
            data=self.fingerprints,
        )

    @property
    def plain(self) -> nn.Module:
        """The recipe's own model, prepared and sharded still."""
        return cast(TrainTask, get_unwrapped_module(self.model)).model


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
    settings: SearchSettings | None = None,
    trained_epochs: int | None = None,
    events: SearchEvents | None = None,
    policy: Saving | None = None,
) -> SearchOutcome:
    """Trains a model so that its tables can be served in a fraction of the bytes. The recipe's own
    is used up. Every rank of a process group calls it alike."""
    # Epochs of plain training that the model has behind it, up to its best one, let the search
    # begin at the axes; they say how long ramp and release may be. None trains the model first.
    settings, events = settings or SearchSettings(), events or SearchEvents()
    with together():
        check(compression > 1, "compression", "a number above 1", compression)
        is_fit, remedy = trained_epochs is None or trained_epochs >= 1, "None trains it first"
        check(is_fit, "trained_epochs", "an integer >= 1", trained_epochs, remedy)
        recipe = with_tables_apart(recipe)
        in_float32_(with_axes_(recipe.model))
        groups = rotation_groups(recipe.model, recipe.leave_alone)
    to_turn = [table for group in groups for table in group.tables]
    blocks_of = partial(blocks_to_search, recipe, compression, settings.num_blocks)
    setup = Setup(recipe, blocks_of, device, events, whole_rows=to_turn)
    plan = _Plan(setup, compression, settings, trained_epochs, is_turned=bool(to_turn))
    loop = setup.loop(plan, checkpoints, events, policy or Saving())
    loop.run()
    alphas = setup.pipeline.alphas().items()
    alpha = {dim: value.detach().cpu().clone() for dim, value in alphas}
    finish = _Finish(setup, loop, compression, is_turned=bool(to_turn))
    allocation, origin, losses = finish.best()
    model = cast(TrainTask, get_unwrapped_module(merge_(setup.model)))
    return SearchOutcome(
        model=name_tables_back_(model.model),
        scheme=allocation.scheme,
        predicted_loss_increase=allocation.predicted_loss_increase,
        origin=origin,
        selection_losses=losses,
        counts=setup.counts,
        blocks=setup.blocks,
        alpha=alpha,
        history=tuple(loop.history),
        best_epoch=loop.finished[-1 if origin == SEARCHED else 0].best.epoch,
        seconds_before=loop.seconds_before,
    )


def blocks_to_search(
    recipe: Recipe,
    compression: float,
    num_blocks: int,
    counts: FrequencyCounts,
    tables: Sequence[EmbeddingBagConfig],
) -> RowBlocks:
    """Blocks of every table by itself; rows that were never seen stay in the last one."""
    alone = recipe.leave_alone
    blocks = blocks_from_counts(counts, tables, num_blocks=num_blocks, leave_alone=alone)
    check_reachable(blocked_tables(recipe.model, blocks), blocks, compression)
    return blocks


def with_tables_apart(recipe: Recipe) -> Recipe:
    """A recipe whose tables have names of their own, see `name_tables_apart_`; its model is
    changed."""
    names = name_tables_apart_(recipe.model)
    left_alone = [key for name in recipe.leave_alone for key in names.get(name, [name])]
    return replace(recipe, leave_alone=tuple(left_alone))


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
        self._trained_steps = (trained_epochs or 0) * setup.steps_per_epoch
        task = setup.recipe.task
        self._ramp = Ramp(setup.pipeline, setup.stream, setup.blocks, task, compression)

    def phase_after(self, results: Sequence[FinishedPhase]) -> Phase | None:
        settings, patience = self._settings, self._settings.patience
        if not results:
            steps = self._setup.steps_per_epoch
            if self._trained_steps:
                return Phase(name=GIVEN, steps=min(GIVEN_STEPS, steps))
            return Phase(name=PLAIN, steps=settings.epochs * steps, patience=patience)
        to_best = self._trained_steps or results[0].best.lower_step
        ramp = Phase(name=RAMP, steps=max(LEAST_STEPS, round(settings.ramp_share * to_best)))
        release = Phase(name=RELEASE, steps=to_best, patience=patience, starts_best=True)
        return (ramp, release, None)[len(results) - 1]

    def begin(self, phase: Phase, results: Sequence[FinishedPhase]) -> None:
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
    tables = table_share * recipe.table_learning_rate
    dense = DENSE_SHARE * recipe.dense_learning_rate
    set_learning_rates_(setup.model, setup.optimizer, tables=tables, dense=dense)


class _Finish:
    """Bits for the tables that a search, or its plain training, ends with; weights adapt to the
    rounding."""

    def __init__(
        self, setup: Setup, loop: TrainLoop, compression: float, *, is_turned: bool
    ) -> None:
        self._setup, self._loop = setup, loop
        self._compression, self._is_turned = compression, is_turned
        self._plain = loop.checkpoint_of(loop.finished[0])
        self._release = loop.checkpoint_of(loop.finished[-1])
        self._batch = setup.stream.first_train_batch()

    def best(self) -> tuple[bits.Allocation, str, dict[str, float]]:
        """Leaves the better of the two in the model."""
        without, loss_without = self._compress()
        rival = self._part_losses()
        result, loss = self._search()
        losses = {SEARCHED: loss, COMPRESSED: loss_without}
        if result is not None and loss < loss_without and self._is_ahead(rival):
            return result, SEARCHED, losses
        self._go_back_to_plain_training()
        return self._serve_(without, self._output_bias()), COMPRESSED, losses

    def _go_back_to_plain_training(self) -> None:
        setup = self._setup
        setup.pipeline.go_back(self._plain)
        if self._is_turned:
            _turn_(setup)

    def _compress(self) -> tuple[bits.Allocation, float]:
        """Goes back to plain training, and gives its tables bits without a further step."""
        self._go_back_to_plain_training()
        sample = self._sample()
        allocation = self._allocate(self._worth(warns=True), predict=sample.predict)
        self._serve_(allocation, sample.bias)
        return allocation, self._selection_loss()

    def _sample(self) -> LossSample:
        """Held-out samples, which teach scales and say where the output bias goes."""
        setup, recipe = self._setup, self._setup.recipe
        held_out, bias = samples_to_measure(recipe.data.validation), self._output_bias()
        model, blocks, loss = setup.model, setup.blocks, recipe.task
        return LossSample(model, held_out, blocks, loss=loss, is_held_out=True, bias=bias)

    def _output_bias(self) -> OutputBias | None:
        task = self._setup.recipe.task
        return output_bias(self._setup.model, self._batch, task, Ranks.everyone())

    def _serve_(self, allocation: bits.Allocation, bias: OutputBias | None) -> bits.Allocation:
        """Gives tables the values of their codes, and the output bias its place; returns the codes
        of these values."""
        tables = RoundedTables(self._setup.model, allocation.scheme)
        tables.stop_()
        if bias is not None:
            bias.shift_(self._setup.model, allocation.output_shift)
        return replace(allocation, scheme=tables.scheme)

    def _search(self) -> tuple[bits.Allocation | None, float]:
        """Goes back to the end of the release, gives its tables bits, and trains on in them; then
        scales learn."""
        setup = self._setup
        setup.pipeline.go_back(self._release)
        fold_(setup.model)
        worth = self._worth(warns=False)
        if worth.is_zero:
            return None, self._selection_loss()
        allocation = self._allocate(worth)
        tables = RoundedTables(setup.model, allocation.scheme)
        _set_rates_(setup, FINISHING_SHARE)
        steps = FINISHING_EPOCHS * setup.steps_per_epoch
        self._loop.announce(Phase(name=FINISH, steps=steps, patience=1))
        train_plainly(
            *(setup.model, setup.optimizer, setup.recipe, setup.pipeline.device),
            max_epochs=FINISHING_EPOCHS,
            patience=1,
            rule=tables,
            starts_trained=True,
            events=SearchEvents(on_step=lambda *_: self._loop.stop_if_requested()),
        )
        tables.stop_()
        sample = self._sample()
        prediction = sample.predict(tables.scheme)
        scheme = prediction.scheme or tables.scheme
        allocation = replace(allocation, scheme=scheme, output_shift=prediction.output_shift)
        return self._serve_(allocation, sample.bias), self._selection_loss()

    def _worth(self, *, warns: bool) -> Curvature:
        setup, recipe = self._setup, self._setup.recipe
        batches, loss = recipe.data.train, recipe.task
        return curvature_of_read_tables(setup.model, batches, setup.blocks, loss=loss, warns=warns)

    def _allocate(
        self,
        worth: Curvature,
        predict: Callable[[MixedDimensionScheme], bits.Prediction] | None = None,
    ) -> bits.Allocation:
        setup, size = self._setup, self._compression
        parts = setup.plain, setup.blocks, setup.counts, worth
        return bits.allocate(*parts, compression=size, predict=predict)

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
    """What a search comes to; prints as a table of a few lines."""

    outcome: SearchOutcome
    metrics: dict[str, float]
    metric: str
    sentence: str

    @property
    def model(self) -> nn.Module:
        """The plain model; its tables are float32 and hold the values that are served."""
        return self.outcome.model

    @property
    def scheme(self) -> MixedDimensionScheme:
        """Bits of every column of every block, for `dnis_torchrec.export`."""
        return self.outcome.scheme

    @property
    def compression(self) -> float:
        """Bytes of the float32 tables over the bytes served."""
        return self.scheme.compression(PACKED)

    def __repr__(self) -> str:
        """A headline, and a line for each table."""
        return "\n".join([*self._headlines(), *bits.sizes_as_text(self.scheme)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return bits.sizes_as_html(self.scheme, self._headlines())

    def _headlines(self) -> list[str]:
        note = "The search gained nothing. This holds the plain model, compressed."
        return [self.sentence] + [note] * (self.outcome.origin == COMPRESSED)


def search_once(
    recipe: Recipe, compression: float = 20.0, *, settings: SearchSettings | None = None
) -> SearchResult:
    """`dnis_torchrec.search`, which says what it does."""
    check_compression(compression)
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        if world_size_of() > 1:
            place, remedy = (
                "search",
                "run `torchrun -m dnis_torchrec search` with the recipe's name",
            )
            requirement = "supported is one process"
            raise NotImplementedError(describe(place, requirement, world_size_of(), remedy))
        copies = replace(
            recipe, model=copy.deepcopy(recipe.model), data=_from_its_epoch(recipe.data)
        )
        with progress(recipe, logger.info) as events:
            outcome = search(
                copies, compression, Path(folder), device, settings=settings, events=events
            )
        task = TrainTask(outcome.model, recipe.task)
        metrics = evaluate(task, recipe.data.test, recipe.task, device)
    metric, _ = primary_metric(recipe.task, recipe.data.test)
    metric = metric if metric in metrics else LOSS
    sentence = _sentence(recipe, outcome, f"test {metric} {metrics[metric]:.4f}")
    tell(sentence)
    return SearchResult(outcome=outcome, metrics=metrics, metric=metric, sentence=sentence)


def _sentence(recipe: Recipe, outcome: SearchOutcome, metric: str) -> str:
    """The result beside the uncompressed model, which plain training has left."""
    num_bytes, plain = outcome.scheme.served_bytes(PACKED), 4 * outcome.scheme.dense_parameters
    size = f"{plain / num_bytes:.2f} times smaller: {num_bytes:,} bytes instead of {plain:,}"
    losses = [r.selection_loss for r in outcome.history if r.phase == PLAIN]
    sign = -1 if direction_of(recipe.task, recipe.stop_on) else 1
    new, old = sign * outcome.selection_loss, sign * min(losses)
    loss = f"selection {recipe.stop_on} {new:.4f}, uncompressed {old:.4f}"
    return f"Tables are {size}; {metric}; {loss}."


def _from_its_epoch(data: DataSplits) -> DataSplits:
    """Streams of the search's own, which begin where those of the recipe stand."""
    return replace(data, **{name: copy.copy(getattr(data, name)) for name in SPLITS})
