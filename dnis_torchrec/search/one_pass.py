"""Search in one pass over a stream: the ramp and the steps after it."""

from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.bits import allocate
from dnis_torchrec.allocation.curvature import curvature_of_read_tables
from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search import search
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.ramp import Ramp
from dnis_torchrec.search.schedule import LevelSchedule, OnePass
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.training.checkpoint import (
    TrainingState,
    describe_tables,
    model_tensors,
    optimizer_tensors,
)
from dnis_torchrec.training.loop import PLAIN, Phase, Plan, SearchEvents, TrainLoop
from dnis_torchrec.training.progressive import Progressive
from dnis_torchrec.training.rounded import RoundedTables
from dnis_torchrec.training.shard import shard

FIRST_LOWER_STEPS = 2
"""Lower steps that a pipeline takes before its first upper one."""


class OnePassSearch(Plan):
    """The second half of a search on a stream: columns die in a ramp, then plain steps follow.

    In the ramp, each batch teaches alpha first and then the weights. After it alpha stays fixed.
    """

    def __init__(
        self,
        recipe: Recipe,
        past: TrainLoop,
        checkpoint: Address,
        counts: FrequencyCounts,
        compression: float,
        steps: int,
    ) -> None:
        """`recipe` has the plain model, `past` took its steps and `checkpoint` holds its state."""
        self._recipe, self._compression, self._past = recipe, compression, past
        self._progressive = cast(Progressive, past.progressive)
        stream, device = self._progressive.stream, self._progressive.device
        stream.go_on(steps)
        batch, remedy = stream.peek(), "name fewer --steps, or train plainly and compress"
        requirement = f"more than the plain steps of {steps:,}"
        check(batch is not None, "training stream", requirement, "no more batches", remedy)
        blocks = search.blocks_to_search(recipe, compression, NUM_BLOCKS, counts, self._tables)
        self._model, self._optimizer = shard(
            TrainTask(
                prepare_(recipe.model, blocks), recipe.task, embedding_l2=recipe.embedding_l2
            ),
            recipe,
            device,
            is_prefetched=True,
            batch_size=len(cast(Batch, batch).labels),
        )
        of_alpha = {"alpha_averaging": search.ALPHA_AVERAGING, "alpha_floor": search.ALPHA_FLOOR}
        self._pipeline = BilevelTrainPipeline(self._model, self._optimizer, device, **of_alpha)
        self._pipeline.begin_with(checkpoint, batch, is_plain=True)
        ramp_steps = max(1, steps // 5)
        upper_steps = max(0, ramp_steps - FIRST_LOWER_STEPS)
        schedule = LevelSchedule(warm_up_steps=1, upper_steps=upper_steps)
        self._stream: OnePass[Batch] = OnePass(stream, schedule)
        self._ramp = Ramp(self._pipeline, self._stream, blocks, recipe.task, compression)
        rest = steps - past.finished[-1].last_step - ramp_steps
        ramp, release = (
            Phase(name=search.RAMP, steps=ramp_steps),
            Phase(name=search.RELEASE, steps=rest),
        )
        super().__init__(Phase(name=PLAIN), ramp, release)

    @property
    def _tables(self) -> list[EmbeddingBagConfig]:
        return table_configs(self._recipe.model)

    def after_step(self, phase: Phase, done: int) -> None:
        """Lets columns die in the ramp."""
        if phase.name == search.RAMP:
            self._ramp.follow(done, int(phase.steps))

    def run(self, events: SearchEvents) -> tuple[TrainLoop, TrainingState, nn.Module]:
        """Takes the steps; returns their loop, the state for later days, and the plain model."""
        loop = TrainLoop(
            *(self._pipeline, self._stream, self._recipe, self),
            events=events,
            steps_per_epoch=self._past.steps_per_epoch,
            progressive=self._progressive,
        )
        loop.go_on_behind(self._past)
        self._model.train()
        loop.run()
        states, steps = optimizer_tensors(self._model, self._optimizer), self._pipeline.lower_steps
        task = merge_(self._model)
        tensors, tables = {**model_tensors(task), **states}, describe_tables(task)
        state = TrainingState(tensors=tensors, tables=tables, values={"lower_steps": steps})
        return loop, state.copy(), cast(TrainTask, task).model

    def serve_(
        self, model: nn.Module, counts: FrequencyCounts, batches: Iterable[Batch]
    ) -> tuple[MixedDimensionScheme, Mapping[str, Tensor]]:
        """Gives the plain model's tables bits in blocks of all counts, and the values that are
        served; returns their scheme and how often rows of each block occurred."""
        # No gains, for weights have learnt from all samples that there are; and no turning, which
        # would mix columns that died with others. Tables turned ahead of the ramp learn worse.
        recipe = self._recipe
        blocks = search.blocks_to_search(
            recipe, self._compression, NUM_BLOCKS, counts, self._tables
        )
        worth = curvature_of_read_tables(model, batches, blocks, loss=recipe.task)
        allocation = allocate(model, blocks, counts, worth, compression=self._compression)
        tables = RoundedTables(model, allocation.scheme)
        tables.stop_()
        return tables.scheme, blocks.occurrences
