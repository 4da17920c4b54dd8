"""What every method is given, what it gives back, and the training that all of them share."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from benchmarks.rivals.streams import train_on_validation
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.batches import features_of
from dnis_torchrec.data.files import unshare, write_whole
from dnis_torchrec.data.over_ranks import all_samples
from dnis_torchrec.data.recipe import SPLITS, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.selection.shards import TableShard, collections, local_shards, table_configs
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.evaluate import selection_loss
from dnis_torchrec.training.loop import PlainTraining, SearchEvents, train_plainly
from dnis_torchrec.training.shard import shard
from examples.paper.pruning import ValueMask


class UnmetError(ValueError):
    """A method has nothing of so few bytes, or does not apply to the model; the message says why."""


class Recipes:
    """Fresh recipes of one seed, at any embedding_dim, that share the data of the first one."""

    def __init__(self, call: Callable[[int | None], Recipe]) -> None:
        self._call = call
        self._of_dims: dict[int | None, Recipe] = {}

    def __call__(self, embedding_dim: int | None = None) -> Recipe:
        """A recipe with a fresh model, and with streams that begin at their first epoch."""
        for dim in (None, embedding_dim):
            if dim not in self._of_dims:
                self._of_dims[dim] = self._call(dim)
        recipe, data = self._of_dims[embedding_dim], self._of_dims[None].data
        # A stream counts its epochs, and what one training reads is its own.
        streams = {name: copy.copy(getattr(data, name)) for name in SPLITS}
        return replace(recipe, model=copy.deepcopy(recipe.model), data=replace(data, **streams))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One cell: a recipe, a size, a seed, and the rules of every training."""

    build: Callable[[int | None], Recipe]  # embedding_dim, None for the recipe's own -> a fresh recipe
    size: float = 1.0  # bytes of the float32 tables over bytes served
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "fp32"
    max_epochs: int = 60
    patience: int = 3
    trials: int | None = None  # of methods that choose among several; None for their own number
    cache: Path | None = None  # the plain model's weights, which methods that begin with it share
    with_validation: bool = False  # train anew on validation samples, too, for as many epochs as were best

    def tables(self, embedding_dim: int | None = None) -> list[EmbeddingBagConfig]:
        """The tables of the recipe at an embedding_dim."""
        return table_configs(self.build(embedding_dim).model)

    @property
    def dim(self) -> int:
        """The widest table's embedding_dim."""
        return max(table.embedding_dim for table in self.tables())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the float32 tables."""
        return sum(4 * table.num_embeddings * table.embedding_dim for table in self.tables())

    @property
    def num_bytes(self) -> int:
        """Bytes that may be served."""
        return int(self.dense_bytes / self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """What a method comes to: a model as it is served, and what its tables take."""

    model: nn.Module
    num_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)
    trials: int = 1


def shards_of(model: nn.Module) -> list[TableShard]:
    """The tables of a model of one process."""
    return [s for module in collections(model).values() for s in local_shards(module)]


def counts_of(task: Task) -> FrequencyCounts:
    """How often training reads every row."""
    samples = (features_of(batch) for batch in all_samples(task.build(None).data.train))
    return count_frequencies(samples, task.tables())


def check_pooled(model: nn.Module) -> None:
    """Refuses models of sequences, which a method does not know."""
    if any(isinstance(module, EmbeddingCollection) for module in collections(model).values()):
        raise UnmetError("tables of sequences are not supported")


def train(task: Task, recipe: Recipe, *, starts_trained: bool = False, **rules: Any) -> tuple[nn.Module, PlainTraining]:
    """Trains to the best epoch on the selection split, then on the validation split, too, if the task
    wants that; the plain model. `rules` are those of `_fit`."""
    start = copy.deepcopy(recipe.model) if task.with_validation else None
    model, result = _fit(task, recipe, task.max_epochs, starts_trained=starts_trained, **rules)
    if start is None or result.best_epoch < 0:
        return model, result
    both = train_on_validation(replace(recipe, model=start, data=task.build(None).data))
    return _fit(task, both, result.best_epoch + 1, **rules | {"patience": None})


def _fit(
    task: Task,
    recipe: Recipe,
    max_epochs: int,
    *,
    masks: bool = False,  # values that are zero stay so
    # (sharded model, its optimizer) -> what steps in its place, and sees the gradients of tables
    stepper: Callable[[nn.Module, Any], Any] | None = None,
    starts_trained: bool = False,  # the state at the beginning may be the best
    events: SearchEvents | None = None,
    patience: int | None = -1,  # in epochs, the task's if it is -1; None ends with the last epoch, not the best
) -> tuple[nn.Module, PlainTraining]:
    """One training."""
    torch.manual_seed(task.seed)
    whole = TrainTask(recipe.model, recipe.task, embedding_l2=recipe.embedding_l2)
    model, optimizer = shard(whole, recipe, task.device, is_replicated=stepper is not None)
    result = train_plainly(
        model,
        optimizer if stepper is None else stepper(model, optimizer),
        recipe,
        task.device,
        max_epochs=max_epochs,
        patience=task.patience if patience == -1 else patience,
        rule=ValueMask(model) if masks else None,
        starts_trained=starts_trained,
        events=events or SearchEvents(),
    )
    return cast(TrainTask, unshard_(model)).model, result


BEST_EPOCH = "best_epoch"
"""Tensor of a cached model's file that is none of the model's."""


def plain(task: Task) -> tuple[nn.Module, int]:
    """The uncompressed model, trained once for all methods that begin with it, and its best epoch."""
    return keep(task, "", lambda: train(task, task.build(None)))


def keep(task: Task, name: str, make: Callable[[], tuple[nn.Module, PlainTraining]]) -> tuple[nn.Module, int]:
    """A model that a cell before this one has made, or makes it; and its best epoch."""
    file = None if task.cache is None else task.cache.with_name(f"{task.cache.stem}{name}.safetensors")
    if file is not None and file.is_file():
        model, tensors = task.build(None).model, load_file(file)
        best_epoch = int(tensors.pop(BEST_EPOCH))
        model.load_state_dict(tensors)
        return model, best_epoch
    model, training = make()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = unshare(model.state_dict()) | {BEST_EPOCH: torch.tensor(training.best_epoch)}
        with write_whole(file) as unfinished:
            save_file(tensors, unfinished)
    return model, training.best_epoch


def loss_on_selection(task: Task, model: nn.Module) -> float:
    """The loss by which everything is chosen, of a model as it is served."""
    recipe = task.build(None)
    whole = TrainTask(model.to(task.device), recipe.task)
    return selection_loss(whole, recipe, task.device)


def best_of(task: Task, trials: Iterable[Callable[[], Served]]) -> Served:
    """The trial of the lowest selection loss among those within a task's bytes."""
    best, lowest, number = None, float("inf"), 0
    for trial in trials:
        served, number = trial(), number + 1
        if served.num_bytes > task.num_bytes:
            continue
        loss = loss_on_selection(task, served.model)
        if best is None or loss < lowest:
            best, lowest = served, loss
    if best is None:
        raise UnmetError(f"none of {number} trials comes to {task.num_bytes} bytes")
    return replace(best, trials=number)


def largest_scale(num_bytes: Callable[[float], int], budget: int, high: float) -> float:
    """The largest scale in (0, high] whose bytes are within a budget, where bytes grow with it."""
    if num_bytes(high) <= budget:
        return high
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if num_bytes(middle) <= budget else (low, middle)
    if num_bytes(low) > budget:
        raise UnmetError(f"expected at least {num_bytes(low)} bytes, got {budget}")
    return low
