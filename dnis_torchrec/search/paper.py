"""The search as in the paper: alpha learns on validation loss alone, then the smallest values are
dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import torch
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.recipe import Recipe, TrainTask
from dnis_torchrec.data.urls import Address
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.budget import Size, check_compresses
from dnis_torchrec.search.global_blocks import global_blocks
from dnis_torchrec.search.loop import EpochRecord, FinishedPhase, Phase, SearchEvents
from dnis_torchrec.search.pruning import num_elements, prune
from dnis_torchrec.search.started import StartedSearch, highest_rate
from dnis_torchrec.selection.shards import dense_parameters
from dnis_torchrec.selection.swap import merge_
from dnis_torchrec.training.settings import Saving

WARM_UP, BOTH_LEVELS = "warm-up", "both levels"


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Settings of the paper's search."""

    size: Size
    epochs: int = 30
    patience: int = 3
    num_blocks: int = 10
    is_unrolled: bool = False

    def __post_init__(self) -> None:
        check(self.epochs >= 2, "epochs", "at least 2", self.epochs)
        check(self.patience >= 1, "patience", "at least 1", self.patience)


@dataclass(frozen=True, kw_only=True)
class PaperOutcome:
    """Results of the paper's search."""

    model: torch.nn.Module
    scheme: MixedDimensionScheme
    history: tuple[EpochRecord, ...]
    best_epoch: int


def search_as_published(
    recipe: Recipe,
    settings: PaperSettings,
    checkpoints: Address,
    device: torch.device,
    events: SearchEvents | None = None,
    saving: Saving | None = None,
) -> PaperOutcome:
    """Finds which values to retain as the paper does."""
    events = events or SearchEvents()
    if recipe.leave_alone:
        supported = "supported are recipes without tables to leave alone"
        raise NotImplementedError(
            describe("Recipe.leave_alone", supported, recipe.leave_alone, "search by `search`")
        )
    check_compresses(settings.size, dense_parameters(recipe.model))
    started = StartedSearch.of(
        recipe, partial(_blocks, settings), device, events, is_unrolled=settings.is_unrolled
    )
    plan = _PaperPlan(started, settings)
    loop = started.loop(plan, checkpoints, events, saving or Saving(), asdict(settings))
    loop.run()
    plain = cast(TrainTask, get_unwrapped_module(merge_(started.model))).model
    scheme = prune(plain, started.blocks, started.counts, size=settings.size, structure="element")
    return PaperOutcome(
        model=plain,
        scheme=scheme,
        history=tuple(loop.history),
        best_epoch=loop.finished[-1].best.epoch,
    )


def _blocks(
    settings: PaperSettings, counts: FrequencyCounts, tables: Sequence[EmbeddingBagConfig]
) -> RowBlocks:
    blocks = global_blocks(counts, tables, settings.num_blocks)
    num_elements(settings.size, blocks)
    return blocks


class _PaperPlan:
    """A warm-up of one epoch, then both levels until the selection loss stops improving."""

    def __init__(self, started: StartedSearch, settings: PaperSettings) -> None:
        self._started, self._settings = started, settings

    def phase_after(self, finished: Sequence[FinishedPhase]) -> Phase | None:
        settings, steps = self._settings, self._started.steps_per_epoch
        both = Phase(
            name=BOTH_LEVELS, steps=(settings.epochs - 1) * steps, patience=settings.patience
        )
        return (Phase(name=WARM_UP, steps=steps), both, None)[len(finished)]

    def begin(self, phase: Phase, _: Sequence[FinishedPhase]) -> None:
        started = self._started
        if self._settings.is_unrolled:
            started.pipeline.set_unrolled_step(highest_rate(started.optimizer))
        if phase.name == BOTH_LEVELS:
            started.stream.alternate(started.pipeline.lower_steps)

    def after_step(self, phase: Phase, done: int) -> None:
        pass

    def end(self, phase: Phase) -> None:
        pass
