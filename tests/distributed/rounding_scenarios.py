"""A search in codes on two ranks: steps of both levels, scales fitted and learnt, gone on with from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.training.checkpoint import CheckpointFolder, CheckpointSaver
from dnis_torchrec.training.rounded import HoldingOptimizer, RoundedTables
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU, ROWS, Stream, blocks, shard_as, tables, task
from tests.distributed.scenarios import alpha_of, tables_of
from tests.reference import scheme_of, with_feedback

STEPS, MORE_STEPS = 6, 3
KINDS = ("row_wise", "table_wise", "column_wise", "mixed", "dense")
OTHERWISE = (("row_wise", "row_wise"), ("mixed", "mixed"), ("row_wise", "table_wise"))
"""(sharding that wrote, sharding that goes on)."""


class Run:
    """A search whose tables are rounded, by SGD; scales are fitted to the tables before the first step."""

    def __init__(self, kind: str, group: dist.ProcessGroup, halves: tuple[int, ...], *, seed: int = 0) -> None:
        self.model, optimizer = shard_as(task(), kind, group)
        self.model.train()
        scheme = scheme_of(tables(), blocks().routings, seed=seed, widths=(0, 2, 3, 4, 6, 32))
        self.held = RoundedTables(self.model, scheme)
        counts = {name: torch.arange(rows, 0, -1) for name, rows in ROWS.items()}
        self.held.refit_(FrequencyCounts(counts, {}, 1))
        stepper = HoldingOptimizer(optimizer, self.held)
        self.pipeline = BilevelTrainPipeline(self.model, stepper, CPU)
        self.pipeline.alpha_optimizer.learning_rate = 0.05
        schedule = LevelSchedule(warm_up_steps=1)
        self.stream = BilevelStream(Stream("train", 5, halves), Stream("validation", 3, halves), schedule)

    def steps(self, number: int) -> None:
        """Steps of both levels."""
        for _ in range(number):
            self.pipeline.progress(self.stream)

    def found(self) -> Results:
        """What it has come to."""
        with self.held.latents():
            latents = tables_of(self.model)
        codes = self.held.scheme.to_tensors()
        return {"tables": tables_of(self.model), "latents": latents, "alpha": alpha_of(self.pipeline), "codes": codes}


def trains(kind: str, group: dist.ProcessGroup, halves: tuple[int, ...]) -> Results:
    """Some steps, and alpha made part of the scales."""
    run = Run(kind, group, halves)
    begin = tables_of(run.model)
    run.steps(STEPS)
    trained = run.found()
    run.held.fold_()
    return {"begin": begin, "trained": trained, "folded": run.found()}


def trains_on_ranks(kind: str, at: Rank) -> Results:
    """Each rank has its half of every batch."""
    return trains(kind, at.process_group, (at.rank,))


def goes_on(kind: str, then: str, at: Rank) -> Results:
    """The same run without and with an interruption."""
    folder = CheckpointFolder(at.folder / f"rounded_{kind}_{then}")
    run = Run(kind, at.process_group, (at.rank,))
    run.steps(STEPS)
    with CheckpointSaver(folder) as saver:
        state = run.pipeline.state(run.stream)
        saver.save(STEPS, replace(state, tensors={**state.tensors, **run.held.tensors()}))
    resumed = Run(then, at.process_group, (at.rank,), seed=5)
    resumed.pipeline.restore(folder.path_of(STEPS), resumed.stream, resumed.held.tensors())
    resumed.held.finish_load_()
    for each in (run, resumed):
        each.steps(MORE_STEPS)
    return {"whole": run.found(), "resumed": resumed.found()}


def settles(kind: str, at: Rank) -> Results:
    """Tables before their first rounding, with error feedback, and after it."""
    model, _ = shard_as(task(), kind, at.process_group)
    before = tables_of(model)
    held = RoundedTables(model, fed_back_scheme())
    return {
        "before": before,
        "after": tables_of(model),
        "has_feedback": held.scheme.tables["user"].feedback is not None,
    }


def fed_back_scheme() -> MixedDimensionScheme:
    """Of few bits, so that much is to be made good."""
    return with_feedback(scheme_of(tables(), blocks().routings, seed=2, widths=(0, 1, 2)))


def refuses(at: Rank) -> Results:
    """NaN in the shards of one rank."""
    model, _ = shard_as(task(), "row_wise", at.process_group)
    if at.rank == 1:
        next(shard for m in collections(model).values() for shard in local_shards(m)).weight[0, 0] = torch.nan
    try:
        RoundedTables(model, scheme_of(tables(), blocks().routings))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


def scenarios() -> dict[str, Scenario]:
    """All of them by name."""
    found: dict[str, Scenario] = {kind: partial(trains_on_ranks, kind) for kind in KINDS}
    found |= {f"{kind} to {then}": partial(goes_on, kind, then) for kind, then in OTHERWISE}
    found |= {f"settles {kind}": partial(settles, kind) for kind in KINDS}
    return found | {"nan": refuses}
