"""Checkpoints of two ranks: gone on from on two and on one, sharded alike and otherwise, damaged, and not writable."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, shard_model
from dnis_torchrec.training.checkpoint import CheckpointFolder, CheckpointSaver, CheckpointWriteError
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import CPU, Stream, plan_as, shard_as, task
from tests.distributed.scenarios import alpha_of, dense_of, tables_of

SAVED_AT, STEPS = 9, 12
COLUMNS_DIE_AT = 5
SAME = ("row_wise", "mixed", "grid_shard")
"""Shardings that a run goes on with as it was."""
FOUR = {"table_wise": (SAVED_AT,), "mixed": (1, 2, 3, SAVED_AT), "data_parallel": (SAVED_AT,)}
"""Shardings that four ranks go on with as they were -> steps that they were saved at.

Around the first steps the buckets of DistributedDataParallel change.
"""
OTHERWISE = (
    ("table_wise", "row_wise"),
    ("row_wise", "column_wise"),
    ("column_wise", "data_parallel"),
    ("mixed", "dense"),
)
"""(sharding that wrote, sharding that goes on)."""
FROM_ONE = "of_one_process"
ONE_TO_TWO = ("row_wise", "mixed", "table_wise")
"""Shardings in which two ranks go on with what one process wrote."""


def adagrad_as(kind: str, group: dist.ProcessGroup) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Fused row-wise Adagrad for the tables, Adam for the rest."""
    whole = task()
    for collection in (module for module in whole.modules() if isinstance(module, EmbeddingBagCollection)):
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    sharders = [CpuEmbeddingBagCollectionSharder()]
    model = shard_model(whole, CPU, plan_as(whole, kind, group, CPU, sharders), sharders, process_group=group)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=0.05))


class Run:
    """A search with dead columns whose tables learn by SGD, or by row-wise Adagrad with Adam for the rest."""

    def __init__(self, kind: str, group: dist.ProcessGroup, halves: tuple[int, ...], *, adagrad: bool = False) -> None:
        self.model, optimizer = adagrad_as(kind, group) if adagrad else shard_as(task(), kind, group)
        self.model.train()
        self.pipeline = BilevelTrainPipeline(self.model, optimizer, CPU, alpha_averaging=0.9, alpha_floor=0.01)
        self.pipeline.alpha_optimizer.learning_rate = 0.05
        schedule = LevelSchedule(warm_up_steps=2)
        self.stream = BilevelStream(Stream("train", 7, halves), Stream("validation", 3, halves), schedule)

    def steps(self, number: int) -> list[float]:
        """Losses of some steps."""
        return [self._step() for _ in range(number)]

    def _step(self) -> float:
        loss, pipeline = float(self.pipeline.progress(self.stream)[0]), self.pipeline
        if pipeline.lower_steps + pipeline.upper_steps == COLUMNS_DIE_AT:
            alphas = {dim: pipeline.alpha.of(dim) for dim in pipeline.alpha.dims}
            pipeline.alpha_optimizer.retain_({dim: torch.arange(dim).expand_as(a) % 2 > 0 for dim, a in alphas.items()})
        return loss

    def found(self) -> Results:
        """What it has come to."""
        return {"alpha": alpha_of(self.pipeline), "dense": dense_of(self.model), "tables": tables_of(self.model)}


def saved_while_it_runs(
    kind: str, at: Rank, folder: Path, *, saved_at: tuple[int, ...] = (SAVED_AT,), **settings: bool
) -> tuple[Results, CheckpointFolder]:
    """A run that is saved in the middle; what it came to, with the losses of all steps, and its checkpoints."""
    run, losses = Run(kind, at.process_group, half_of(at), **settings), []
    checkpoints = CheckpointFolder(folder, keep_last=len(saved_at))
    with CheckpointSaver(checkpoints) as saver:
        for step in range(1, STEPS + 1):
            losses += run.steps(1)  # beside the thread that writes
            if step in saved_at:
                saver.save(step, run.pipeline.state(run.stream))
    dist.barrier(at.process_group)
    return run.found() | {"losses": losses}, checkpoints


def half_of(at: Rank) -> tuple[int, ...]:
    """Which half of every batch a rank has; of four ranks two have the same."""
    return (at.rank % 2,)


def goes_on(kind: str, then: str, at: Rank, *, adagrad: bool = False) -> Results:
    """The same run without and with an interruption."""
    return goes_on_from_each(kind, then, at, (SAVED_AT,), adagrad=adagrad)[str(SAVED_AT)]


def goes_on_from_each(kind: str, then: str, at: Rank, saved_at: tuple[int, ...], *, adagrad: bool = False) -> Results:
    """The same run without an interruption, and with one at each of some steps."""
    name = f"{kind} {then} {adagrad}".replace(" ", "_")
    whole, checkpoints = saved_while_it_runs(kind, at, at.folder / name, saved_at=saved_at, adagrad=adagrad)
    found: Results = {}
    for step in saved_at:
        resumed, path = Run(then, at.process_group, half_of(at), adagrad=adagrad), checkpoints.path_of(step)
        torch.manual_seed(3)
        values = resumed.pipeline.restore(path, resumed.stream)
        found[str(step)] = {
            "whole": whole | {"losses": whole["losses"][step:]},
            "resumed": {"losses": resumed.steps(STEPS - step)} | resumed.found(),
            "steps": values["lower_steps"] + values["upper_steps"],
            "path": str(path),
        }
    return found


def written_by_one(folder: Path, group: dist.ProcessGroup) -> Results:
    """What a process alone saves in the middle, for `goes_on_on_two`, and what it comes to."""
    run = Run("table_wise", group, (0, 1))
    run.steps(SAVED_AT)
    with CheckpointSaver(CheckpointFolder(folder / FROM_ONE)) as saver:
        saver.save(SAVED_AT, run.pipeline.state(run.stream))
    return {"losses": run.steps(STEPS - SAVED_AT)} | run.found()


def goes_on_on_two(then: str, at: Rank) -> Results:
    """A run of one process goes on on all ranks, each with its half of every batch."""
    run = Run(then, at.process_group, (at.rank,))
    run.pipeline.restore(CheckpointFolder(at.folder / FROM_ONE).path_of(SAVED_AT), run.stream)
    return {"losses": run.steps(STEPS - SAVED_AT)} | run.found()


def outcome_of(action: Any) -> str:
    """The error of an action, with its type."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def column_shards(at: Rank) -> Results:
    """Row-wise Adagrad from two column shards to one."""
    path = saved_while_it_runs("column_wise", at, at.folder / "columns", adagrad=True)[1].path_of(SAVED_AT)
    other = Run("table_wise", at.process_group, (at.rank,), adagrad=True)
    refusal = outcome_of(lambda: other.pipeline.restore(path, other.stream))
    sgd = Run("table_wise", at.process_group, (at.rank,))
    return {"refusal": refusal, "other optimizer": outcome_of(lambda: sgd.pipeline.restore(path, sgd.stream))}


def damage(at: Rank) -> Results:
    """What ranks say when files are missing, and what happened to their weights."""
    path = saved_while_it_runs("row_wise", at, at.folder / "damage")[1].path_of(SAVED_AT)
    if at.rank == 0:
        next(Path(path).glob("rank1.*")).unlink()
    dist.barrier(at.process_group)
    run = Run("row_wise", at.process_group, (at.rank,))
    return {"refusal": outcome_of(lambda: run.pipeline.restore(path, run.stream))}


def full_disk(on_error: str, at: Rank) -> Results:
    """Rank 1 alone has no room left in one of three saves."""
    run = Run("row_wise", at.process_group, (at.rank,))
    folder = CheckpointFolder(at.folder / f"full_{on_error}", keep_last=3)
    messages: list[str] = []
    errors = ""

    def no_room(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if at.rank == 1 and "step-00000004" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_file(tensors, path)

    with (
        patch("dnis_torchrec.training.checkpoint.save_file", no_room),
        patch("dnis_torchrec.training.checkpoint.logger.warning", lambda text, *given: messages.append(text % given)),
    ):
        try:
            with CheckpointSaver(folder, on_error=on_error) as saver:
                for step in (2, 4, 6):
                    run.steps(2)
                    saver.save(step, run.pipeline.state(run.stream))
        except CheckpointWriteError as error:
            errors = str(error)
    dist.barrier(at.process_group)
    return {
        "errors": errors,
        "messages": messages,
        "steps": folder.steps(),
        "latest": folder.latest().name,
        "partial": sorted(path.name for path in folder.path.glob("*.partial")),
        "taken": run.pipeline.lower_steps + run.pipeline.upper_steps,
    }


def scenarios_of_four() -> dict[str, Scenario]:
    """Runs of four ranks, which add gradients up in an order that depends on DistributedDataParallel's buckets."""
    return {f"four {kind}": partial(goes_on_from_each, kind, kind, saved_at=steps) for kind, steps in FOUR.items()}


def scenarios() -> dict[str, Scenario]:
    """All of them by name."""
    found: dict[str, Scenario] = {f"same {kind}": partial(goes_on, kind, kind) for kind in SAME}
    found |= {f"{kind} to {then}": partial(goes_on, kind, then) for kind, then in OTHERWISE}
    found["adagrad column_wise"] = partial(goes_on, "column_wise", "column_wise", adagrad=True)
    found["adagrad table_wise to row_wise"] = partial(goes_on, "table_wise", "row_wise", adagrad=True)
    found |= {f"one to {then}": partial(goes_on_on_two, then) for then in ONE_TO_TWO}
    found |= {"column shards": column_shards, "damage": damage}
    return found | {f"full disk {kind}": partial(full_disk, kind) for kind in ("stop", "continue")}
