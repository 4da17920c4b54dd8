"""What each of two ranks does, and what it reports: everything is run here and judged in test_two_ranks.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.data.task import LossTask, TrainTask
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.ramp import Ramp
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import fold_, merge_, prepare_
from dnis_torchrec.training.checkpoint import CheckpointFolder, go_back_, write_checkpoint
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.pipeline import NonFiniteError
from dnis_torchrec.training.shard import shard
from dnis_torchrec.training.state import TrainingState, describe_tables, model_tensors
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU, KINDS, Stream, blocks, shard_as, task
from tests.models import state_tensors
from tests.tiny import make_recipe, read_late

STEPS = 20
STEPS_WHILE_COLUMNS_DIE = 24
STOPS = (
    (Level.LOWER, "loss"),
    (Level.LOWER, "gradient"),
    (Level.LOWER, "dense gradient"),
    (Level.UPPER, "loss"),
    (Level.UPPER, "gradient"),
)


def make_pipeline(
    kind: str, group: dist.ProcessGroup, halves: tuple[int, ...], **settings: Any
) -> tuple[BilevelTrainPipeline, BilevelStream, nn.Module]:
    """A pipeline in SGD, its stream, and the sharded model."""
    model, optimizer = shard_as(task(), kind, group)
    model.train()
    pipeline = BilevelTrainPipeline(model, optimizer, CPU, **settings)
    pipeline.alpha_optimizer.learning_rate = 0.05
    stream = BilevelStream(Stream("train", 7, halves), Stream("validation", 3, halves), LevelSchedule(warm_up_steps=2))
    return pipeline, stream, model


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """``"table/first row/first column"`` -> clone of the local shard."""
    shards = [part for module in collections(model).values() for part in local_shards(module)]
    return {f"{part.table}/{part.first_row}/{part.first_column}": part.weight.detach().clone() for part in shards}


def dense_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Dense weights."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".embedding_bags." not in name}


def alpha_of(pipeline: BilevelTrainPipeline) -> dict[str, torch.Tensor]:
    """Clones of alpha by D."""
    return {str(dim): pipeline.alpha.of(dim).clone() for dim in pipeline.alpha.dims}


def run_steps(pipeline: BilevelTrainPipeline, stream: BilevelStream, steps: int) -> Results:
    """Steps, noting the level and loss of each, and what every upper step was given."""
    losses, levels, hits, alpha_gradients = [], [], [], []
    original = pipeline.alpha_optimizer.step

    def step(gradients: dict[int, torch.Tensor], hit: dict[int, torch.Tensor]) -> None:
        hits.append({str(dim): rows.clone() for dim, rows in hit.items()})
        alpha_gradients.append({str(dim): gradient.clone() for dim, gradient in gradients.items()})
        original(gradients, hit)

    pipeline.alpha_optimizer.step = step
    for _ in range(steps):
        before = pipeline.upper_steps
        losses.append(pipeline.progress(stream)[0].clone())
        levels.append("upper" if pipeline.upper_steps > before else "lower")
    return {"losses": torch.stack(losses), "levels": levels, "hits": hits, "alpha_gradients": alpha_gradients}


def everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Local tables, dense weights and every optimizer state, dense and fused."""
    found = {f"table/{name}": value for name, value in tables_of(model).items()}
    found |= {f"dense/{name}": value for name, value in dense_of(model).items()}
    for kind, states in (("dense", optimizer), ("fused", model.fused_optimizer)):
        found |= {f"state/{kind}/{name}": value.clone() for name, value in _local(states.state_dict()["state"])}
    return found


def _local(tree: dict, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _local(value, f"{prefix}{name}/")
        elif hasattr(value, "local_shards"):
            yield from ((f"{prefix}{name}/{i}", part.tensor) for i, part in enumerate(value.local_shards()))
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value


@contextmanager
def recorded_logs() -> Iterator[list[str]]:
    """Everything that TorchRec logs inside."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("torchrec")
    level, logger.propagate = logger.level, False
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


def search_and_fold(kind: str, at: Rank) -> Results:
    """Twenty steps; a checkpoint there and back; fold_ on one rank after the other; merge_."""
    with recorded_logs() as logs:
        pipeline, stream, model = make_pipeline(kind, at.process_group, (at.rank,))
        found = run_steps(pipeline, stream, STEPS) | {"alpha": alpha_of(pipeline), "dense": dense_of(model)}
    found |= {"tables": tables_of(model), "logs": logs, "checkpoint": round_trip(model, kind, at)}
    pipeline.detach()
    model.eval()
    probe = Stream("probe", 1, (at.rank,)).batches[0]
    with torch.no_grad():
        found["before"] = model(probe)[1][1]
        for turn in range(2):  # fold_ is local: the other rank is not there
            if turn == at.rank:
                fold_(model)
            else:
                found[f"while_rank_{turn}_folds"] = tables_of(model)
            dist.barrier(at.process_group)
        found |= {"folded": tables_of(model), "folded_alpha": alpha_of(pipeline), "after": model(probe)[1][1]}
        for dim in pipeline.alpha.dims:
            pipeline.alpha.of(dim).fill_(0.5)
        halved = model(probe)[1][1]
        merged = merge_(model)
        found |= {"is_same": merged is model, "halved": halved, "after_merge": merged(probe)[1][1]}
    return found | {"merged_alpha": alpha_of(pipeline)}


def round_trip(model: nn.Module, kind: str, at: Rank) -> Results:
    """Saves, and loads into a model with other weights."""
    folder = CheckpointFolder(at.folder / f"{kind}_last")
    state = TrainingState(tensors=model_tensors(model), tables=describe_tables(model))
    write_checkpoint(folder, 1, state, at.process_group)
    other, _ = shard_as(task(), kind, at.process_group)
    with torch.no_grad():
        for value in state_tensors(other).values():
            value.fill_(-7.0)
    go_back_(folder.path_of(1), other, model_tensors(other), at.process_group)
    return {
        "saved": {name: value.clone() for name, value in state_tensors(model).items()},
        "loaded": {name: value.clone() for name, value in state_tensors(other).items()},
    }


def search_while_columns_die(at: Rank) -> Results:
    """Through a ramp of eight lower steps, where alpha's steps depend on its own past, and beyond its end."""
    settings = {"alpha_averaging": 0.9, "alpha_floor": 0.01}
    pipeline, stream, _ = make_pipeline("mixed", at.process_group, (at.rank,), **settings)
    ramp = Ramp(pipeline, stream, blocks(), nn.BCEWithLogitsLoss(), compression=14)
    for _ in range(STEPS_WHILE_COLUMNS_DIE):
        before = pipeline.lower_steps
        pipeline.progress(stream)
        if before < pipeline.lower_steps <= 8:
            ramp.follow(pipeline.lower_steps, 8)
    return {"alpha": alpha_of(pipeline)}


def upper_steps_move_alpha_alone(optimizer: str, at: Rank) -> Results:
    """What each of some steps changed on this rank: model and optimizers of `training.shard`, as a search has them."""
    recipe = make_recipe(optimizer=optimizer)
    tables = table_configs(recipe.model)
    counts = count_frequencies((batch.sparse_features for batch in recipe.data.train), tables)
    prepared = prepare_(recipe.model, blocks_from_counts(counts, tables, num_blocks=3))
    model, dense_optimizer = shard(TrainTask(prepared, recipe.loss), recipe, CPU)
    model.train()
    pipeline = BilevelTrainPipeline(model, dense_optimizer, CPU)
    train, validation = recipe.data.train.batches[at.rank :: 2], recipe.data.validation.batches[at.rank :]
    stream = BilevelStream(train, validation, LevelSchedule(warm_up_steps=2))
    for _ in range(5):
        pipeline.progress(stream)
    steps = []
    for _ in range(6):
        level, before, alpha = pipeline.level, everything(model, dense_optimizer), alpha_of(pipeline)
        pipeline.progress(stream)
        after = everything(model, dense_optimizer)
        changed = sorted(name for name, value in before.items() if not torch.equal(value, after[name]))
        alpha_moved = not torch.equal(alpha["8"], alpha_of(pipeline)["8"])
        steps.append({"level": level.value, "changed": changed, "alpha_moved": alpha_moved})
    return {"steps": steps, "names": sorted(before), "dense": dense_of(model)}


def poison_(model: nn.Module, what: str) -> None:
    """From now on this rank's loss is NaN, or the gradient of its finite loss is, or that of one dense weight alone."""
    if what == "dense gradient":
        weight = next(p for name, p in model.named_parameters() if "over" in name)
        weight.register_hook(lambda gradient: gradient * float("nan"))
        return
    module = next(module for module in model.modules() if isinstance(module, TrainTask))
    original = module.task.criterion.forward

    def forward(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = original(predictions, labels)
        if what == "loss":
            return loss * float("nan")
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    module.task.criterion.forward = forward


def poisoned_pipeline(level: Level, what: str, at: Rank) -> tuple[BilevelTrainPipeline, BilevelStream, nn.Module]:
    """Some steps on, in front of a step of a level in which rank 1 alone meets a non-finite value."""
    pipeline, stream, model = make_pipeline("mixed", at.process_group, (at.rank,))
    for _ in range(5):
        pipeline.progress(stream)
    while pipeline.level is not level:
        pipeline.progress(stream)
    if at.rank == 1:
        poison_(model, what)
    return pipeline, stream, model


def stops(level: Level, what: str, at: Rank) -> Results:
    """Rank 1 alone meets a non-finite value; every rank tells how its step ended and what it changed."""
    pipeline, stream, model = poisoned_pipeline(level, what, at)
    before = tables_of(model) | dense_of(model) | alpha_of(pipeline)
    outcome = _outcome_of(pipeline, stream)
    after = tables_of(model) | dense_of(model) | alpha_of(pipeline)
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    return {"outcome": outcome, "changed": changed}


def _outcome_of(pipeline: BilevelTrainPipeline, stream: BilevelStream) -> str:
    try:
        pipeline.progress(stream)
        return "went on"
    except NonFiniteError as error:
        return f"NonFiniteError: {error}"


def stops_late(level: Level, what: str, at: Rank) -> Results:
    """The same where ranks read a step late: how the step ended, how the next one did, and what is not finite."""
    with read_late():
        pipeline, stream, model = poisoned_pipeline(level, what, at)
        step = {Level.LOWER: pipeline.lower_steps, Level.UPPER: pipeline.upper_steps}[level]
        outcomes = [_outcome_of(pipeline, stream) for _ in range(2)]
    after = tables_of(model) | dense_of(model) | alpha_of(pipeline)
    bad = [name for name, value in after.items() if not bool(torch.isfinite(value).all())]
    return {"outcomes": outcomes, "place": f"{level.value} step {step}", "bad": bad}


def plain_training_stops(at: Rank) -> Results:
    """`train_plainly` with a loss that is NaN on rank 1 alone."""
    recipe = make_recipe()
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    if at.rank == 1:
        poison_(model, "loss")
    try:
        train_plainly(model, optimizer, recipe, CPU, max_epochs=1, patience=1)
        return {"outcome": "went on"}
    except NonFiniteError as error:
        return {"outcome": f"NonFiniteError: {error}"}


def metrics(at: Rank) -> Results:
    """Metrics over ranks whose batches differ in size."""
    return {name: evaluate_halves(at.process_group, (at.rank,), loss) for name, loss in losses().items()}


def losses() -> dict[str, nn.Module]:
    """The losses that a recipe may have."""
    return {"binary": nn.BCEWithLogitsLoss(), "mse": nn.MSELoss()}


def evaluate_halves(group: dist.ProcessGroup, halves: tuple[int, ...], loss: nn.Module) -> dict[str, float]:
    """Metrics of the fresh model on some halves of three batches, the first half larger than the second."""
    whole = task()
    whole.task = LossTask(loss)
    model, _ = shard_as(whole, "row_wise", group)
    return evaluate(model, Stream("evaluation", 3, halves, sizes=(13, 6)), loss, CPU)


def scenarios() -> dict[str, Scenario]:
    """All of them by name, in the order in which every rank runs them."""
    found: dict[str, Scenario] = {f"search {kind}": partial(search_and_fold, kind) for kind in KINDS}
    found |= {"ramp": search_while_columns_die}
    for optimizer in ("adam", "rowwise_adagrad"):
        found[f"upper {optimizer}"] = partial(upper_steps_move_alpha_alone, optimizer)
    found["metrics"] = metrics
    for level, what in STOPS:
        found[f"stops {level.value} {what}"] = partial(stops, level, what)
        found[f"stops late {level.value} {what}"] = partial(stops_late, level, what)
    return found | {"stops plain training": plain_training_stops}
