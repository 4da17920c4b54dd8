"""Trainings that are no epochs of a plain model: one pass over a stream, and what later commands
read of it; narrow tables in the scheme of an artifact, and a run of the plain model behind them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.artifact.load import ArtifactFolder
from dnis_torchrec.artifact.narrow import narrow_for_training_, widened_, widened_state
from dnis_torchrec.checks import check
from dnis_torchrec.cli.judge import Judge, block_rows
from dnis_torchrec.cli.progress import progress_of_pass
from dnis_torchrec.cli.run import TRAINING, RunFolder
from dnis_torchrec.cli.settings import SearchCommand, TrainCommand, TrainingCommand
from dnis_torchrec.data.batches import BatchParts
from dnis_torchrec.data.over_ranks import samples_to_measure, split_over_ranks
from dnis_torchrec.data.recipe import SPLITS, DataSplits, Recipe
from dnis_torchrec.data.stream import FrequencyCounts, Stream, StreamSummary, join_batches
from dnis_torchrec.data.task import LossTask, TrainTask, check_task
from dnis_torchrec.data.urls import Address
from dnis_torchrec.ranks import Ranks, on_rank_zero, together
from dnis_torchrec.report.rows import SEARCH
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme
from dnis_torchrec.search.one_pass import OnePassSearch
from dnis_torchrec.search.search import SEARCHED, with_tables_apart
from dnis_torchrec.selection.shards import dense_parameters, name_tables_back_, table_configs
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training import checkpoint as checkpoints
from dnis_torchrec.training import loop as loops
from dnis_torchrec.training.checkpoint import CheckpointFolder, Manifest, StoredTensor
from dnis_torchrec.training.loop import PLAIN, SearchEvents, StreamPipeline, TrainLoop
from dnis_torchrec.training.progressive import WINDOW_REPORTS, Progressive, report_steps
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import shard

STREAM_NOTE = "Metrics are those of the last {} steps; each batch was predicted before its step."
RECENT_NOTE = "Metrics are those of the newest {:,} samples, which training has read once."
SHORT_NOTE = "The stream ended after {:,} of {:,} steps."
SEARCH_NOTE = "Gains are not fitted, because training has read every sample."


def check_pass(recipe: Recipe, settings: TrainCommand | SearchCommand) -> None:
    """Refuses a pass over splits, and epochs of a stream."""
    remedy = "make Recipe.data an iterable of batches; of a table, name --time, too"
    is_fit = recipe.is_stream or not settings.is_pass
    check(is_fit, "--steps or --until", "a stream in Recipe.data", "splits", remedy)
    remedy = "--steps or --until says when its one pass ends"
    is_fit = settings.is_pass or not recipe.is_stream
    check(is_fit, "Recipe.data", "splits, for epochs", "a stream", remedy)


def train_on_stream(
    settings: TrainCommand, recipe: Recipe, seed: int, run: RunFolder, device: torch.device
) -> tuple[DistributedModelParallel, TrainLoop, StreamSummary, NarrowTraining | None]:
    """Trains on each batch once, in the order in which the stream gives them."""
    past = None if settings.source is None else RunFolder.open(settings.source)
    stream = Stream(
        recipe,
        table_configs(recipe.model),
        steps=settings.steps,
        is_time_over=lambda: settings.deadline is not None and time.time() >= settings.deadline,
    )
    with together():
        if not isinstance(recipe.task, LossTask):
            check_task(recipe.model, recipe.task, stream.first_train_batch(), "first batch")
    torch.manual_seed(seed)
    narrow = None
    if settings.scheme is not None:
        narrow = begin_narrow_(recipe, settings.scheme, past)
    elif past is not None and has_axes(Manifest.read(past.latest_checkpoint()).tensors):
        with_axes_(recipe.model)  # as a day of narrow tables has left them
    task = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(task, recipe, device)
    pipeline, steps = StreamPipeline(model, optimizer, device), report_steps(settings.steps)
    if narrow is not None and narrow.states:
        pipeline.begin_with_states(narrow.states, stream)
    elif past is not None:
        pipeline.begin_with(past.latest_checkpoint(), stream.first_train_batch())
    torch.manual_seed(seed)
    window = WINDOW_REPORTS * steps
    progressive = Progressive(stream, model, recipe.task, device, window)
    most: Any = float("inf") if settings.steps is None else settings.steps
    with progress_of_pass() as events:
        model.train()
        loop = TrainLoop(
            *(pipeline, stream, recipe, loops.Plan(loops.Phase(name=PLAIN, steps=most))),
            run.checkpoints,
            Saving(resume=settings.resume, checkpoint_every=loops.STREAM_CHECKPOINT_STEPS),
            events=events,
            steps_per_epoch=steps,
            progressive=progressive,
        )
        loop.run()
    with together():
        counts = None if past is None else past.counts()
    on_rank_zero(lambda: CheckpointFolder(run.checkpoints).remove(but_latest=True))
    return model, loop, stream.summary(counts), narrow


def record_of_stream(steps: int, counts: FrequencyCounts) -> dict[str, Any]:
    """What run.json says of the stream, and that its one epoch is the best."""
    lengths = counts.max_bag_lengths
    stream = {"steps": steps, "samples": counts.num_samples, "max_bag_lengths": lengths}
    return {"best_epoch": 0, "stream": stream}


def search_on_stream(
    settings: SearchCommand,
    recipe: Recipe,
    head: Mapping[str, Any],
    run: RunFolder,
    device: torch.device,
) -> None:
    """Half of the steps as `dnis train` takes them, then those of a search, then bits; leaves a
    finished run. A search that was stopped in its second half begins that again."""
    begin, seed, steps = time.monotonic(), head["seed"], cast(int, settings.steps)
    recipe, folder = with_tables_apart(recipe), CheckpointFolder(run.checkpoints, keep_last=1)
    of_search = {f.name: getattr(settings, f.name) for f in fields(TrainingCommand)}
    plain_steps = TrainCommand(steps=steps // 2, **of_search)
    task, past, summary, _ = train_on_stream(plain_steps, recipe, seed, run, device)
    recipe = replace(recipe, model=cast(TrainTask, unshard_(task)).model)
    checkpoint = cast(Address, folder.latest())
    size = settings.compression
    search = OnePassSearch(recipe, past, checkpoint, summary.counts, size, steps)
    with progress_of_pass() as events:
        loop, state, model = search.run(_stopping(events))
    counts = None if settings.source is None else RunFolder.open(settings.source).counts()
    summary = cast(Progressive, past.progressive).stream.summary(counts)
    seconds, steps = loop.seconds_before + time.monotonic() - begin, loop.history[-1].step
    of_run = {**head, **record_of_stream(steps, summary.counts)}
    run.save_stream(summary)
    run.write_head(TRAINING, of_run)
    data, total, number = data_of_stream(run, Ranks.everyone())
    notes = [RECENT_NOTE.format(number), SEARCH_NOTE]
    if steps < cast(int, settings.steps):
        notes.append(SHORT_NOTE.format(steps, settings.steps))
    judge = Judge(recipe, data, device, seed, total.counts, (), notes, is_left=True)
    plain_rows = judge.plain_rows(model, 4 * dense_parameters(model))
    scheme, of_blocks = search.serve_(model, total, samples_to_measure(data.train))
    metrics = judge.evaluate(model)
    num_bytes, compression = scheme.served_bytes(PACKED), scheme.compression(PACKED)
    rows = [judge.row(SEARCH, metrics, num_bytes, compression, seconds), *plain_rows]
    of_run |= {"origin": SEARCHED, "metrics": metrics["test"]}
    checkpoints.write_checkpoint(folder, steps, state, None)
    more: Any = {"blocks": block_rows(scheme, of_blocks), "split": "recent"}
    model = name_tables_back_(model)
    judge.finish(run, model, scheme, rows, of_run, history=loop.history, **more)


def _stopping(events: SearchEvents) -> SearchEvents:
    """Stops a loop that saves nothing."""

    def on_step(loss: float, density: float) -> None:
        events.on_step(loss, density)
        if events.should_stop():
            text = "stopped on request; the plain steps are saved, --resume goes on behind them"
            raise loops.SearchInterrupted(f"search in one pass: {text}")

    return replace(events, on_step=on_step)


def data_of_stream(run: RunFolder, ranks: Ranks) -> tuple[DataSplits, FrequencyCounts, int]:
    """What a stream has left in place of splits, its counts, and the number of samples left."""
    with together():
        recent, counts = run.recent(), run.counts()
    # Cut anew, evenly: each rank needs a sample of every batch.
    sizes = [len(batch.labels) for batch in recent]
    number = sum(sizes)
    batches = [*BatchParts([join_batches(recent)], max(1, number // max(sizes)))]
    data: dict[str, Any] = dict.fromkeys(SPLITS, batches)
    return split_over_ranks(DataSplits(**data), ranks), counts, number


# Narrow tables

PREFIX = "model."
"""What a `TrainTask` puts ahead of its model's names."""


@dataclass(frozen=True, kw_only=True)
class NarrowTraining:
    """Narrow tables of a run, and the states of optimizers that they begin with."""

    scheme: MixedDimensionScheme
    states: Mapping[str, Tensor]

    def plain_model(
        self, model: nn.Module, checkpoint: Address
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """The recipe's model with whole tables, and the whole state of the run, from its
        checkpoint. Each rank holds all of it."""
        # NOTE[DIFF]: a rank's rows of blocks are no span of a table's rows, so that no rank could
        # write its own part of it.
        state = widened_state(self.scheme, _stored(checkpoint), prefix=PREFIX)
        tables = {name: state[f"table/{name}"] for name in self.scheme.tables}
        task = cast(TrainTask, get_unwrapped_module(model))
        return widened_(task.model, tables), state

    def write_widened(self, run: RunFolder, state: Mapping[str, Tensor]) -> None:
        """Makes the last checkpoint of a run one of the plain model. All ranks call it."""
        folder = CheckpointFolder(run.checkpoints)
        step, tables = folder.steps()[-1], dict[str, checkpoints.TableDescription]()
        for name, table in self.scheme.tables.items():
            rows, dim = table.num_embeddings, table.embedding_dim
            tables[name] = checkpoints.TableDescription(
                rows=rows, embedding_dim=dim, column_cuts=[0], blocks=""
            )
        values = Manifest.read(folder.path_of(step)).values
        tensors = {key: checkpoints.PlacedTensor.of(value) for key, value in state.items()}
        whole = checkpoints.TrainingState(tensors=tensors, tables=tables, values=values)
        checkpoints.write_checkpoint(folder, step, whole, None)


def begin_narrow_(recipe: Recipe, artifact: Path, past: RunFolder | None) -> NarrowTraining:
    """Gives a recipe's model the narrow tables of an artifact, filled from it or from a run."""
    folder, options = ArtifactFolder(artifact), dict[str, Any](prefix=PREFIX)
    if past is not None:
        options["state"] = _stored(past.latest_checkpoint())
        scheme_id = past.read_head()["configuration"].get("scheme_id")
        options["is_turned"] = scheme_id == folder.content_id
    _, states = narrow_for_training_(recipe.model, artifact, **options)
    return NarrowTraining(scheme=folder.scheme().for_training(), states=states)


def _stored(checkpoint: Address) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, not read yet."""
    return Manifest.read(checkpoint).stored(checkpoint)
