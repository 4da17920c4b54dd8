"""StartedSearch: what every search makes before its first step: counts, blocks, a sharded model,
both levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.batches import BatchParts, LookupBatches
from dnis_torchrec.data.over_ranks import read_before_training, split_over_ranks
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.training.loop import Plan, SearchEvents, SearchLoop
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import check_pooling, shard

MakeBlocks = Callable[[FrequencyCounts, Sequence[EmbeddingBagConfig]], RowBlocks]


@dataclass(frozen=True, eq=False, kw_only=True)
class StartedSearch:
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
    ) -> StartedSearch:
        """Counts, cuts blocks, prepares and shards."""
        ranks = Ranks.everyone()
        with together():
            tables = table_configs(recipe.model)
            check_pooling(recipe.model)
        whole, counts, fingerprints = read_before_training(recipe, tables, ranks)
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
            prefetched=True,
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
        return StartedSearch(
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
    ) -> SearchLoop:
        """Makes the loop that takes the steps."""
        return SearchLoop(
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
