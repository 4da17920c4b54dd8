"""What ranks do, and report, about training: checkpoints, tables in codes, plain names, stops, metrics and data.

Judged in test_training_ranks.py.
"""

from __future__ import annotations

import errno
import itertools
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.codes import ColumnCodes, decode_rows, encode_rows
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.batches import RankingBatch
from dnis_torchrec.data.parquet import FileSamples, split_files
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, Level, LevelSchedule
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.on_shards import select_on_shards_
from dnis_torchrec.selection.plan import CpuEmbeddingBagCollectionSharder, shard_model
from dnis_torchrec.selection.swap import merge_, prepare_
from dnis_torchrec.selection.wrapper import plain_state_dict, soft_selection_modules
from dnis_torchrec.training.checkpoint import CheckpointFolder, CheckpointSaver, CheckpointWriteError
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.loop import SearchEvents, train_plainly
from dnis_torchrec.training.rounded import HoldingOptimizer, RoundedTables
from dnis_torchrec.training.settings import Saving
from dnis_torchrec.training.shard import shard
from dnis_torchrec.training.weights import distributed_checkpoint as distributed_checkpoint
from tests.distributed.harness import Rank, Results, Scenario
from tests.distributed.model import (
    CPU,
    KINDS,
    MORE_KINDS,
    Net,
    Stream,
    alpha_of,
    blocks,
    dense_of,
    outcome_of,
    plan_as,
    shard_as,
    tables,
    tables_of,
    task,
)
from tests.models import blocks_of
from tests.reference import latent_tables, scheme_of, with_feedback
from tests.tiny import SCHEMA, draw, make_recipe, read_late, tasks_make_recipe, two_sided, write_text
from tests.training.test_evaluate import FirstDense, ranking_batches

SAVED_AT, STEPS = 9, 12
COLUMNS_DIE_AT = 5
SAME = {"mixed": (1, 2, SAVED_AT), "grid_shard": (SAVED_AT,)}
"""Shardings that a run goes on with as it was -> steps that it was saved at.

Around the first steps the buckets of DistributedDataParallel change.
"""
OTHERWISE = (("row_wise", "column_wise"), ("column_wise", "data_parallel"), ("mixed", "dense"))
"""(sharding that wrote, sharding that goes on)."""
SAVED_BY_TORCH = ("row_wise", "mixed")
"""Shardings that torch saves on two ranks."""


def with_adagrad(net: nn.Module, kind: str, at: Rank) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Fused row-wise Adagrad for the tables of fused kernels, Adam for the rest."""
    types = (KINDS | MORE_KINDS)[kind]
    for collection in (module for module in net.modules() if isinstance(module, EmbeddingBagCollection)):
        for name, bag in collection.embedding_bags.items():
            if types[name] != "data_parallel" and "dense" not in types[name]:
                apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": 0.05})
    sharders, group = [CpuEmbeddingBagCollectionSharder()], at.process_group
    model = shard_model(net, CPU, plan_as(net, kind, group, CPU, sharders), sharders, process_group=group)
    select_on_shards_(model)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adam(parameters, lr=0.05))


class Run:
    """A search with dead columns whose tables learn by SGD, or by row-wise Adagrad with Adam for the rest."""

    def __init__(self, kind: str, at: Rank, *, adagrad: bool = False) -> None:
        halves = (0, 1) if at.world_size == 1 else (at.rank % 2,)
        self.model, optimizer = with_adagrad(task(), kind, at) if adagrad else shard_as(task(), kind, at.process_group)
        self.model.train()
        self.pipeline = BilevelTrainPipeline(
            self.model, self.stepper(optimizer), CPU, alpha_averaging=0.9, alpha_floor=0.01
        )
        self.pipeline.alpha_optimizer.learning_rate = 0.05
        schedule = LevelSchedule(warm_up_steps=2)
        self.stream = BilevelStream(Stream("train", 7, halves), Stream("validation", 3, halves), schedule)

    def stepper(self, optimizer: KeyedOptimizerWrapper) -> Any:
        return optimizer

    def steps(self, number: int) -> list[float]:
        return [self._step() for _ in range(number)]

    def _step(self) -> float:
        loss, pipeline = float(self.pipeline.progress(self.stream)[0]), self.pipeline
        if pipeline.lower_steps + pipeline.upper_steps == COLUMNS_DIE_AT:
            alphas = {dim: pipeline.alpha.of(dim) for dim in pipeline.alpha.dims}
            pipeline.alpha_optimizer.retain_({dim: torch.arange(dim).expand_as(a) % 2 > 0 for dim, a in alphas.items()})
        return loss

    def state(self) -> Results:
        return {"alpha": alpha_of(self.pipeline), "dense": dense_of(self.model), "tables": tables_of(self.model)}


def run_and_save(
    kind: str, at: Rank, folder: Path, saved_at: tuple[int, ...] = (SAVED_AT,), **settings: bool
) -> tuple[Results, CheckpointFolder]:
    run, losses = Run(kind, at, **settings), []
    checkpoints = CheckpointFolder(folder, keep_last=len(saved_at))
    with CheckpointSaver(checkpoints) as saver:
        for step in range(1, STEPS + 1):
            losses += run.steps(1)  # beside the thread that writes
            if step in saved_at:
                saver.save(step, run.pipeline.state(run.stream))
    dist.barrier(at.process_group)
    return run.state() | {"losses": losses}, checkpoints


def goes_on(kind: str, then: str, at: Rank, saved_at: tuple[int, ...] = (SAVED_AT,), *, adagrad: bool = False):
    """The same run without an interruption, and with one at each of some steps."""
    folder = at.folder / f"{kind} {then} {adagrad}".replace(" ", "_")
    unbroken, checkpoints = run_and_save(kind, at, folder, saved_at, adagrad=adagrad)
    results: Results = {}
    for step in saved_at:
        run, path = Run(then, at, adagrad=adagrad), checkpoints.path_of(step)
        torch.manual_seed(3)
        values = run.pipeline.restore(path, run.stream)
        results[str(step)] = {
            "whole": unbroken | {"losses": unbroken["losses"][step:]},
            "resumed": {"losses": run.steps(STEPS - step)} | run.state(),
            "steps": values["lower_steps"] + values["upper_steps"],
            "path": str(path),
        }
    return results


def written_by_one(at: Rank) -> Results:
    run = Run("table_wise", at)
    run.steps(SAVED_AT)
    with CheckpointSaver(CheckpointFolder(at.folder)) as saver:
        saver.save(SAVED_AT, run.pipeline.state(run.stream))
    return {"losses": run.steps(STEPS - SAVED_AT)} | run.state()


def goes_on_on_two(then: str, folder: Path, at: Rank) -> Results:
    """A run of one process goes on on all ranks, each with its half of every batch."""
    run = Run(then, at)
    run.pipeline.restore(CheckpointFolder(folder).path_of(SAVED_AT), run.stream)
    return {"losses": run.steps(STEPS - SAVED_AT)} | run.state()


def bad_checkpoints(at: Rank) -> Results:
    """Row-wise Adagrad from two column shards to one, and to SGD; a file of rank 1 that is missing."""
    folders = (at.folder / name for name in ("column_wise_column_wise_True", "row_wise_column_wise_False"))
    columns, path = (CheckpointFolder(folder).path_of(SAVED_AT) for folder in folders)  # that `goes_on` has left
    if at.rank == 0:
        next(path.glob("rank1.*")).unlink()
    dist.barrier(at.process_group)
    tries = {
        "column shards": (Run("table_wise", at, adagrad=True), columns),
        "other optimizer": (Run("table_wise", at), columns),
        "missing file": (Run("row_wise", at), path),
    }
    return {name: outcome_of(partial(run.pipeline.restore, own, run.stream)) for name, (run, own) in tries.items()}


def full_disk(at: Rank) -> Results:
    """Rank 1 alone has no room left in one of three saves."""
    run = Run("row_wise", at)
    folder, errors = CheckpointFolder(at.folder / "full", keep_last=3), ""

    def no_room(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if at.rank == 1 and "step-00000004" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_file(tensors, path)

    with patch("dnis_torchrec.training.checkpoint.save_file", no_room):
        try:
            with CheckpointSaver(folder) as saver:
                for step in (2, 4, 6):
                    run.steps(2)
                    saver.save(step, run.pipeline.state(run.stream))
        except CheckpointWriteError as error:
            errors = str(error)
    dist.barrier(at.process_group)
    return {
        "errors": errors,
        "steps": folder.steps(),
        "latest": folder.latest().name,
        "partial": sorted(path.name for path in folder.path.glob("*.partial")),
        "taken": run.pipeline.lower_steps + run.pipeline.upper_steps,
    }


def saved_by_torch(kind: str, at: Rank) -> Results:
    """All ranks save a sharded model's state_dict with torch; returns the model's tensors before sharding."""
    model, sharders = task(), [CpuEmbeddingBagCollectionSharder()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_as(model, kind, at.process_group, CPU, sharders)
    sharded = shard_model(model, CPU, plan, sharders, process_group=at.process_group)
    dcp.save(sharded.state_dict(), checkpoint_id=at.folder / f"saved {kind}", process_group=at.process_group)
    return before


def checkpoints(folder_of_one: Path) -> dict[str, Scenario]:
    """Of two ranks, and of the run of one process."""
    results: dict[str, Scenario] = {
        f"{kind} to {kind}": partial(goes_on, kind, kind, saved_at=steps) for kind, steps in SAME.items()
    }
    results |= {f"{kind} to {then}": partial(goes_on, kind, then) for kind, then in OTHERWISE}
    for kind, then in (("column_wise", "column_wise"), ("table_wise", "row_wise")):
        results[f"adagrad {kind} to {then}"] = partial(goes_on, kind, then, adagrad=True)
    results["one to mixed"] = partial(goes_on_on_two, "mixed", folder_of_one)
    results |= {f"saved {kind}": partial(saved_by_torch, kind) for kind in SAVED_BY_TORCH}
    return results | {"bad": bad_checkpoints, "full disk": full_disk}


ROUNDED_STEPS = 6
ROUNDED_AS = ("mixed", "dense")


class RoundedRun(Run):
    """A search whose tables are in codes, by SGD."""

    def __init__(self, kind: str, at: Rank, *, seed: int = 0) -> None:
        self.seed = seed
        super().__init__(kind, at)

    def stepper(self, optimizer: KeyedOptimizerWrapper) -> HoldingOptimizer:
        scheme = scheme_of(tables(), blocks().routings, seed=self.seed, widths=(0, 2, 3, 4, 6, 32))
        self.held = RoundedTables(self.model, scheme)
        return HoldingOptimizer(optimizer, self.held)

    def state(self) -> Results:
        with latent_tables(self.model, self.held):
            latents = tables_of(self.model)
        return super().state() | {"latents": latents, "codes": self.held.scheme.to_tensors()}


def trains_in_codes(kind: str, at: Rank) -> Results:
    run = RoundedRun(kind, at)
    begin = tables_of(run.model)
    run.steps(ROUNDED_STEPS)
    return {"begin": begin, "trained": run.state()}


def settles(kind: str, at: Rank) -> Results:
    """Tables before their first rounding, with error feedback, and after it."""
    model, _ = shard_as(task(), kind, at.process_group)
    before = tables_of(model)
    held = RoundedTables(model, scheme_with_feedback())
    has_feedback = held.scheme.tables["user"].feedback is not None
    return {"before": before, "after": tables_of(model), "has_feedback": has_feedback}


def in_codes(weight: torch.Tensor, rows: torch.Tensor, codes: ColumnCodes) -> torch.Tensor:
    return decode_rows(encode_rows(weight, rows, codes), rows, codes)


def scheme_with_feedback() -> MixedDimensionScheme:
    """Of few bits, so that much is to be made good."""
    return with_feedback(scheme_of(tables(), blocks().routings, seed=2, widths=(0, 1, 2)))


CODES: dict[str, Scenario] = {kind: partial(trains_in_codes, kind) for kind in ROUNDED_AS}
CODES |= {f"settles {kind}": partial(settles, kind) for kind in ROUNDED_AS}


class Trained:
    """A sharded model after two steps, plain or prepared."""

    def __init__(self, kind: str, at: Rank, seed: int, *, is_prepared: bool) -> None:
        torch.manual_seed(seed)
        net = prepare_(Net(), blocks()) if is_prepared else Net()
        self.model, self.optimizer = with_adagrad(TrainTask(net, nn.BCEWithLogitsLoss()), kind, at)
        self._batches = Stream("train", 4, (at.rank % 2,)).batches
        self.losses = [self.step(batch) for batch in self._batches[:2]]

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch)[0]
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        fused, rest = self.model.fused_optimizer.state_dict(), self.optimizer.state_dict()
        return {"model": plain_state_dict(self.model), "fused": fused, "rest": rest}

    def load(self, folder: Path, group: dist.ProcessGroup) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        self.model.load_state_dict(state["model"])
        self.model.fused_optimizer.load_state_dict(state["fused"])
        self.optimizer.load_state_dict(state["rest"])

    def names(self) -> dict[str, list[str]]:
        states = {"fused": self.model.fused_optimizer, "rest": self.optimizer}
        return {
            "state_dict": sorted(plain_state_dict(self.model)),
            "parameters": sorted(name for name, _ in self.model.named_parameters()),
        } | {kind: sorted(optimizer.state_dict()["state"]) for kind, optimizer in states.items()}

    def goes_on(self) -> Results:
        """Tables, and the losses of two more steps, in which all optimizers' states play a part."""
        return {"tables": tables_of(self.model), "losses": [self.step(batch) for batch in self._batches[2:]]}


def there_and_back(kind: str, at: Rank) -> Results:
    """Plain to prepared and prepared to plain, each by a folder of torch.distributed.checkpoint."""
    plain, prepared, third = (Trained(kind, at, seed, is_prepared=seed == 2) for seed in (1, 2, 3))
    results: Results = {"plain names": plain.names(), "prepared names": prepared.names()}
    results["added"] = sorted(set(prepared.model.state_dict()) - set(plain.model.state_dict()))
    folders = {name: at.folder / f"{kind}_{name}" for name in ("plain", "prepared")}
    dcp.save(plain.state(), checkpoint_id=folders["plain"], process_group=at.process_group)
    with_alpha = prepared.state() | {"model": prepared.model.state_dict()}
    dcp.save(with_alpha, checkpoint_id=folders["prepared"], process_group=at.process_group)
    results |= {"plain trained": plain.goes_on(), "prepared trained": prepared.goes_on()}
    [alpha, *_] = [wrapper.alpha for wrapper in soft_selection_modules(prepared.model).values()]
    for dim in alpha.dims:
        alpha.of(dim).fill_(0.5)
    for name, other, source in (("prepared", prepared, "plain"), ("plain", third, "prepared")):
        other.load(folders[source], at.process_group)
        results[f"{name} loaded"] = other.goes_on()
    results["alpha is 1"] = all(bool((alpha.of(dim) == 1).all()) for dim in alpha.dims)
    results["merged names"] = sorted(plain_state_dict(merge_(prepared.model)))
    dist.barrier(at.process_group)
    return results


STOPS = (
    *((Level.LOWER, what, late) for what in ("loss", "gradient", "dense gradient") for late in (False, True)),
    *((Level.UPPER, "loss", False), (Level.UPPER, "gradient", True)),
)
"""Level of a step, what is bad in it, and whether ranks read that a step late."""


def poison_(model: nn.Module, what: str) -> None:
    """From now on this rank's loss is NaN, or the gradient of its finite loss is, or that of one dense weight alone."""
    if what == "dense gradient":
        weight = next(p for name, p in model.named_parameters() if "over" in name)
        weight.register_hook(lambda gradient: gradient * float("nan"))
        return
    module = next(module for module in model.modules() if isinstance(module, TrainTask))
    original = module.task.criterion.forward

    def forward(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = original(predictions, targets)
        if what == "loss":
            return loss * float("nan")
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    module.task.criterion.forward = forward


def stops(level: Level, what: str, at: Rank, *, late: bool = False) -> Results:
    """Rank 1 alone meets a value that is not finite in a step of a level: how that step ends, and the next one.

    Ranks may read what a step gives a step late.
    """
    with read_late() if late else patch.dict({}):
        run = Run("mixed", at)
        run.steps(5)
        while run.pipeline.level is not level:
            run.steps(1)
        if at.rank == 1:
            poison_(run.model, what)
        before = run.state()
        outcomes = [outcome_of(partial(run.pipeline.progress, run.stream)) for _ in range(1 + late)]
    after = [(name, value, before[part][name]) for part, own in run.state().items() for name, value in own.items()]
    return {
        "outcomes": outcomes,
        "changed": [name for name, value, old in after if not torch.equal(value, old)],
        "bad": [name for name, value, _ in after if not bool(value.isfinite().all())],
    }


def plain_training_stops(at: Rank) -> Results:
    """`train_plainly` with a loss that is NaN on rank 1 alone."""
    recipe = make_recipe()
    model, optimizer = shard(TrainTask(recipe.model, recipe.loss), recipe, CPU)
    if at.rank == 1:
        poison_(model, "loss")
    return {"outcome": outcome_of(lambda: train_plainly(model, optimizer, recipe, CPU, max_epochs=1, patience=1))}


STOPPED: dict[str, Scenario] = {
    f"{level.value} {what}{' late' * late}": partial(stops, level, what, late=late) for level, what, late in STOPS
}
STOPPED["plain"] = plain_training_stops


def counts_apart(at: Rank) -> Results:
    """A search whose ranks have blocks from their own samples alone."""
    recipe = make_recipe()
    blocks_here = blocks_of(recipe.model, recipe.data.train.batches[at.rank : at.rank + 1])
    model = shard_model(TrainTask(prepare_(recipe.model, blocks_here), recipe.loss), CPU)
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), torch.optim.Adam)
    return {"outcome": outcome_of(lambda: BilevelTrainPipeline(model, optimizer, CPU))}


STOPPED["apart"] = counts_apart


def ranking_parts() -> list[RankingBatch]:
    """Seven batches of 20 queries, cut across the queries."""
    batches, order = ranking_batches(20, 13), torch.randperm(260, generator=torch.Generator().manual_seed(1))
    names, sizes = ("dense_features", "labels", "queries"), (50, 40, 10, 60, 20, 70, 10)
    columns = [torch.cat([getattr(batch, name) for batch in batches])[order].split(sizes) for name in names]
    return [
        RankingBatch(dense, KeyedJaggedTensor.empty(), label, query)
        for dense, label, query in zip(*columns, strict=True)
    ]


def metrics_of_rank(at: Rank) -> Results:
    return metrics_of((at.rank,))


def metrics_of(ranks: tuple[int, ...]) -> Results:
    """Metrics of the batches of some ranks: queries go across ranks, and rank 0 has more batches than rank 1."""
    loss, recipe = nn.BCEWithLogitsLoss(), tasks_make_recipe()
    parts = [part for rank in ranks for part in (ranking_parts()[:5], ranking_parts()[5:])[rank]]
    clicks = [Batch(part.dense_features, part.sparse_features, part.labels) for part in parts]
    several = [(two_sided(40, 1), two_sided(30, 2))[rank] for rank in ranks]
    return {
        "ranking": evaluate(TrainTask(FirstDense(), loss), parts, loss, CPU),
        "clicks": evaluate(TrainTask(FirstDense(), loss), clicks, loss, CPU),
        "tasks": evaluate(TrainTask(recipe.model, recipe.task), several, recipe.task, CPU),
    }


SIZE = 2.0
STREAMED = SearchSettings(num_blocks=2, epochs=2, patience=1)
"""How `search_stream` searches."""


def recipe_of(file: Path) -> Recipe:
    """Clicks streamed from a file, and a DLRM for them."""
    stream = FileSamples([file], SCHEMA)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name])
        for name, rows in SCHEMA.num_embeddings.items()
    ]
    torch.manual_seed(0)
    return Recipe(
        model=DLRM(EmbeddingBagCollection(tables=configs), len(SCHEMA.dense), [8, 4], [8, 1]),
        data=split_files(stream, batch_size=16, seed=0, fractions=(0.4, 0.2, 0.2, 0.2)),
        loss=torch.nn.BCEWithLogitsLoss(),
        table_optimizer="rowwise_adagrad",
    )


def write_clicks(path: Path) -> Path:
    return write_text(path, [replace(sample, y=sample.y % 2) for sample in draw(240)])


def searched(file: Path, folder: Path, events: SearchEvents | None = None, *, resume: bool = False) -> list[Results]:
    folder.mkdir(exist_ok=True)
    saving = Saving(resume=resume)
    outcome = search(recipe_of(file), SIZE, folder, CPU, settings=STREAMED, events=events, policy=saving)
    return [asdict(record) for record in outcome.history]


def search_stream(at: Rank) -> Results:
    """A search of data that splits itself, and the same after a stop within its ramp."""
    own = write_clicks(at.folder / f"clicks_{at.rank}.tsv")
    seen: list[FrequencyCounts] = []
    events = SearchEvents(on_start=lambda steps, counts, blocks: seen.append(counts))
    whole, stopped, steps = at.folder / "whole", at.folder / "stopped", itertools.count()
    stop = SearchEvents(should_stop=lambda: next(steps) > 5)
    results: Results = {"whole": searched(own, whole, events)}
    results["outcome"] = outcome_of(lambda: searched(own, stopped, stop))
    results["resumed"] = searched(own, stopped, resume=True)
    return results | {"counts": {name: rows[:] for name, rows in seen[0].counts.items()}}


DATA: dict[str, Scenario] = {"metrics": metrics_of_rank, "search": search_stream}
