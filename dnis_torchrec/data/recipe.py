"""Recipe: the model, data and loss that a user brings. The plug-in knows nothing else about a
model."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.checks import check, check_known, describe, nearest
from dnis_torchrec.data.labels import (
    RankingBatch,
    check_classes,
    check_labels,
    check_labels_are_there,
)
from dnis_torchrec.data.pooled_outputs import pooled_outputs, squared_norm, table_names
from dnis_torchrec.data.split_checks import check_batch
from dnis_torchrec.data.task import (
    LOSS,
    LossTask,
    Outputs,
    Task,
    check_task_is_one,
    detached,
    direction_of,
    task_of,
)
from dnis_torchrec.data.users_code import RecipeError, errors_of_recipe

if TYPE_CHECKING:
    from dnis_torchrec.data.frame_columns import Frame
    from dnis_torchrec.data.frames import FrameSplits

_MISSING: Any = None
"""Default of every split: a split that was not given then gets an error that names a remedy."""


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """The four disjoint parts of a data set, each an iterable of TorchRec Batches that can be
    iterated again and again.

    Attributes:
        train: lower level: weights learn on it. Iterating again gives the next epoch, in a new
            order.
        validation: upper level: alpha learns on it, and on nothing else. An upper step takes a part
            of a batch, cut in the order of its samples, so labels should be mixed within it (see
            `dnis_torchrec.data.batches`).
        selection: early stopping and every other choice is made on it.
        test: reported, never chosen on. Batches of type `RankingBatch` are judged by ranking
            metrics.

    Raises:
        ValueError: if a part is missing, or can be iterated once only.
    """

    train: Iterable[Batch] = _MISSING
    validation: Iterable[Batch] = _MISSING
    selection: Iterable[Batch] = _MISSING
    test: Iterable[Batch] = _MISSING

    def __post_init__(self) -> None:
        for part in fields(DataSplits):
            batches, remedy = (
                getattr(self, part.name),
                f"give the recipe a {part.name} part of its own",
            )
            place = f"DataSplits.{part.name}"
            check(batches is not None, place, "batches", "none", remedy)
            remedy = "give a list, a DataLoader, or an object whose __iter__ begins anew"
            again = "batches that can be iterated again and again"
            check(not isinstance(batches, Iterator), place, again, type(batches).__name__, remedy)

    @staticmethod
    def from_frame(
        frame: Frame,
        *,
        label: Hashable,
        dense: Sequence[Hashable] = (),
        ids: Sequence[str] = (),
        bags: Sequence[str] = (),
        time: Hashable | None = None,
        batch_size: int = 1024,
        seed: int = 0,
    ) -> FrameSplits:
        """Splits a data frame, and makes batches of its columns, in memory.

        Ids may be of any type: numbers, texts, categories, dates or all of them; 7, 7.0 and ``"7"``
        are the same id. An id's row in its table is its place by frequency among the training
        samples, from row 1 on. A missing id is one like any other; in a bag it is left out. All ids
        that no training sample has share row 0, which nothing trains. Dense features get mean 0 and
        variance 1 over the training samples; a missing one is 0 then.

        Args:
            frame: a pandas DataFrame; or the path of a Parquet file, a folder of them, or a CSV
                file.
            label: column of the labels, numbers, none missing: 0 and 1 for clicks, any for ratings.
            dense: columns of the dense features, numbers.
            ids: columns with one id a row. Each is a feature, with a table of its own.
            bags: columns with any number of ids a row, as lists, or as text with ``|`` between the
                ids.
            time: column to split by, numbers or dates: the latest samples are those of test. None
                splits at random.
            batch_size: B of every split.
            seed: of the split, and of the order of every epoch.

        Returns:
            80 % of the rows for train, 5 % each for validation and selection, 10 % for test;
            ``encoder`` has the sizes of the tables, and turns further frames into what a model
            reads.

        Raises:
            ValueError: naming the column, and what is wrong with it.
            TypeError: if it is no frame, or columns are no list.
            FileNotFoundError: if there is no such file.

        Example:
            >>> import pandas as pd
            >>> frame = pd.DataFrame({"user": list("abcd") * 10, "tags": [["x"], []] * 20, "liked": [0, 1] * 20})
            >>> splits = DataSplits.from_frame(frame, label="liked", ids=["user"], bags=["tags"], batch_size=8)
            >>> splits.encoder.num_embeddings, next(iter(splits.test)).sparse_features.keys()
            ({'user': 5, 'tags': 2}, ['user', 'tags'])
        """
        from dnis_torchrec.data.frames import splits_of_frame  # which needs this module

        return splits_of_frame(
            frame,
            label=label,
            dense=dense,
            ids=ids,
            bags=bags,
            time=time,
            batch_size=batch_size,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data and how its weights learn: everything that a search needs from its user.

    Attributes:
        model: a plain TorchRec model, called as ``model(dense_features=..., sparse_features=...)``
            and returning one prediction (a logit for a binary loss) per sample, as torchrec's DLRM
            does; or as `task` calls it.
        data: the four splits.
        loss: ``nn.MSELoss()`` or ``nn.BCEWithLogitsLoss()``, called with (predictions, labels),
            both ``(B,)``; the short way to a task.
        task: for several outputs, labels or losses, or weights of samples: how a batch becomes a
            loss, and what the model is judged by. Instead of `loss`, from which it is made where
            that is given.
        stop_on: metric of the selection split that early stopping and every other choice goes by,
            ``"loss"`` or one of the task's, such as ``"auc"`` or ``"click_auc"``.
        table_optimizer: how tables learn: ``"adam"`` (dense compute kernel) or
            ``"rowwise_adagrad"`` (fused).
        table_learning_rate: learning rate of the tables.
        dense_learning_rate: learning rate (Adam) of everything else.
        embedding_l2: lambda of the L2 penalty on looked-up embeddings, see `TrainTask`: the same
            for everything that trains weights on the training split, be it a plain training, a
            baseline, a search or a fine-tuning.
        row_weights: names of the model's parameters that hold numbers for rows beside the tables,
            such as first-order
            weights: they learn (by Adam) at `table_learning_rate`.
        leave_alone: names of tables that must not be touched: no soft selection, no other axes,
            served in float32. Their bytes count in every size. Methods and commands that cannot
            leave tables alone refuse the recipe.
        redraw: number 1, 2, .. -> the model again with other initial weights, the same ones for the
            same number, on every rank; None where they are given, as by a checkpoint. For methods
            that choose among several searches.
        notes: limits of the data, shown beside every figure that comes from it.
    """

    model: nn.Module
    data: DataSplits
    loss: nn.Module | None = None
    task: Task = _MISSING
    stop_on: str = LOSS
    table_optimizer: str = "adam"
    table_learning_rate: float = 1e-3
    dense_learning_rate: float = 1e-3
    embedding_l2: float = 0.0
    row_weights: tuple[str, ...] = ()
    leave_alone: tuple[str, ...] = ()
    redraw: Callable[[int], nn.Module] | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.loss is not None:
            _check_loss(self.loss)
            is_clear = self.task is None or isinstance(self.task, LossTask)
            check(is_clear, "Recipe", "a loss or a task", "both", "leave the loss to the task")
            object.__setattr__(self, "task", LossTask(self.loss))
        check(self.task is not None, "Recipe", "a loss or a task", "neither")
        check_task_is_one(self.task)
        is_directed = direction_of(self.task, self.stop_on) is not None
        check(
            is_directed,
            "Recipe.stop_on",
            "a metric that is better the higher or the lower",
            repr(self.stop_on),
        )
        check(
            self.table_optimizer in ("adam", "rowwise_adagrad"),
            "Recipe.table_optimizer",
            "'adam' or 'rowwise_adagrad'",
            repr(self.table_optimizer),
        )
        for name in (part.name for part in fields(self) if part.name.endswith("_learning_rate")):
            rate = getattr(self, name)
            is_fit = math.isfinite(rate) and rate > 0
            check(is_fit, f"Recipe.{name}", "a finite number above 0", rate)
        _check_l2("Recipe.embedding_l2", self.embedding_l2)
        if self.leave_alone:
            check_left_alone(self.leave_alone, table_names(self.model), "Recipe.leave_alone")


def check_left_alone(names: Collection[str], tables: Collection[str], place: str) -> None:
    """Checks the names of tables that must not be touched."""
    for name in names:
        check_known(f"table of {place}", name, tables)
    others = set(tables) - set(names)
    check(
        not names or bool(others),
        place,
        "a table beside those that are left alone",
        f"all {len(set(tables))}",
    )


def _check_loss(loss: nn.Module) -> None:
    """Of other losses nobody knows the kind of their predictions."""
    requirement, remedy = "nn.MSELoss or nn.BCEWithLogitsLoss", "put any other into a Recipe.task"
    is_known = isinstance(loss, nn.MSELoss | nn.BCEWithLogitsLoss)
    check(is_known, "Recipe.loss", requirement, type(loss).__name__, remedy)
    reduction = loss.reduction
    check(
        reduction == "mean", "Recipe.loss", "reduction 'mean', which ranks average", repr(reduction)
    )


def _check_l2(place: str, value: float) -> None:
    is_fit = math.isfinite(value) and value >= 0
    check(is_fit, place, "a finite number >= 0", value, "0 leaves embeddings alone")


class TrainTask(nn.Module):
    """A model with its task, in the shape that TorchRec's train pipelines call, as
    torchrec.models.dlrm.DLRMTrain.

    In training mode an L2 penalty on the looked-up embeddings is added to the loss of the data:

        L = L_data + embedding_l2 * 1/B * sum over samples b and features f of |v_bf|^2

    v_bf is the pooled embedding of feature f of sample b as the model reads it: of a single-id
    feature the row itself, of a bag its sum, mean or weighted sum, under soft selection what alpha
    has left of it. So the penalty is the same before alpha is merged into the tables and after, and
    a dropped column has none. Only what a batch looks up is pulled towards zero, as often as it is
    looked up. The gradient comes to the tables through their own backward pass, hence exactly,
    fused optimizers and every sharding included. Over ranks it is averaged as the data's loss is.

    Of an `EmbeddingCollection`, which pools nothing, every id of a sample has such a term of its
    own. Weights that are no tables are not penalised.

    Args:
        model: see `Recipe.model`.
        task: see `Recipe.task`; or a loss, see `Recipe.loss`.
        embedding_l2: lambda, >= 0; 0 for no penalty. See `Recipe.embedding_l2`.

    Attributes:
        data_terms_only: leave the penalty out, as upper steps want it (see `data_terms_only`). A
            subclass that adds terms of its own to the loss may ask it too.

    Raises:
        ValueError: for an `embedding_l2` that is negative, infinite or NaN.
    """

    def __init__(self, model: nn.Module, task: nn.Module, *, embedding_l2: float = 0.0) -> None:
        super().__init__()
        _check_l2("embedding_l2", embedding_l2)
        self.model: nn.Module = model
        self.task = task_of(task)
        self.embedding_l2 = embedding_l2
        self.data_terms_only = False

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Outputs]]:
        """Computes the loss of a batch.

        Args:
            batch: on the model's device, with labels of any dtype, one row per sample.

        Returns:
            ``(loss, (detached loss of the data alone, detached outputs of the model))``.
        """
        is_penalised = self.training and self.embedding_l2 > 0 and not self.data_terms_only
        with ExitStack() as stack:
            pooled = stack.enter_context(pooled_outputs(self.model)) if is_penalised else []
            outputs = self.task.outputs(self.model, batch)
        loss = self.task.loss(batch, outputs)
        returned = (loss.detach(), detached(outputs))
        return (loss + self.embedding_l2 * squared_norm(pooled) if is_penalised else loss), returned


@contextmanager
def data_terms_only(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The loss of a model's `TrainTask` is that of the data alone in the block, in training mode
    too."""
    tasks = [module for module in modules if isinstance(module, TrainTask)]
    before = [task.data_terms_only for task in tasks]
    for task in tasks:
        task.data_terms_only = True
    try:
        yield
    finally:
        for task, value in zip(tasks, before, strict=True):
            task.data_terms_only = value


def checked_batches(batches: Iterable[Batch], task: nn.Module, name: str) -> Iterator[Batch]:
    """The batches of a split, each after a check of its labels, dense features and weights."""
    criterion = of_task.criterion if isinstance(of_task := task_of(task), LossTask) else None
    for index, batch in enumerate(batches):
        place = f"{name} batch {index}"
        check_labels_are_there(batch, place)
        if criterion is not None:
            check_labels(batch.labels, criterion, place)
        check_batch(batch, place)
        if criterion is not None and name in ("selection", "test"):
            if isinstance(criterion, nn.BCEWithLogitsLoss):
                check_classes(batch.labels, place)
            elif isinstance(batch, RankingBatch):
                check_classes(batch.labels, place, "mark relevant candidates by 1, all others by 0")
        yield batch


def draws(build: Callable[[], nn.Module], seed: int) -> Callable[[int], nn.Module]:
    """Initial weights of a model, as many times as one likes: a recipe has number 0, its `redraw`
    makes the others."""

    def draw(number: int) -> nn.Module:
        with _seeded(
            seed
            if number == 0
            else int(np.random.SeedSequence((seed, number)).generate_state(1)[0])
        ):
            return build()

    return draw


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws random numbers from `seed` inside the block and leaves the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


EXAMPLE = "name one such as 'examples.synthetic:demo'"


def load_recipe(
    spec: str, *, before_import: Callable[[str], None] | None = None
) -> Callable[..., Recipe]:
    """Finds the recipe function named by ``module:function``, looking in the current folder first."""
    module_name, colon, function_name = spec.partition(":")
    place = f"recipe {spec!r}"
    check(
        bool(colon and module_name and function_name),
        place,
        "'module:function'",
        repr(spec),
        EXAMPLE,
    )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with errors_of_recipe(spec):
        try:
            module = _import(module_name, before_import)
        except ModuleNotFoundError as error:
            if error.name is None or not (
                module_name == error.name or module_name.startswith(error.name + ".")
            ):
                raise
            requirement, remedy = (
                f"a module {module_name!r} in {here}",
                "run it from your project's root",
            )
            raise RecipeError(describe(place, requirement, "none", remedy)) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            of_module = inspect.getmembers(
                module, lambda value: getattr(value, "__module__", None) == module.__name__
            )
            public = [
                name
                for name, value in of_module
                if inspect.isfunction(value) and not name.startswith("_")
            ]
            requirement, remedy = f"a function in {module_name}", nearest(function_name, public)
            raise RecipeError(describe(place, requirement, repr(function_name), remedy))
    return function


def _import(module_name: str, before_import: Callable[[str], None] | None) -> ModuleType:
    """Imports a module part by part, from its outermost package in."""
    parts = module_name.split(".")
    for end in range(1, len(parts) + 1):
        if before_import is not None:
            before_import(module_name)
        if not all(parts):
            raise ModuleNotFoundError(
                name=module_name
            )  # there is no package that it could be relative to
        module = importlib.import_module(".".join(parts[:end]))
    return module


def build_recipe(
    spec: str, data: Path | None, *, seed: int, embedding_dim: int | None = None
) -> Recipe:
    """Calls a recipe function."""
    function, place = load_recipe(spec), f"recipe {spec!r}"
    given: dict[str, Any] = {"seed": seed, "embedding_dim": embedding_dim}
    _check_takes(function, place, data, given)
    with errors_of_recipe(spec):
        recipe = function(data, **given)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{place}: expected a Recipe, got {type(recipe).__name__}")
    return recipe


def _check_takes(
    function: Callable[..., Any], place: str, data: Path | None, given: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some of what can be called does not say how
    try:
        signature.bind(data, **given)
    except TypeError as error:
        requirement = "a function of (data, *, seed, embedding_dim)"
        raise RecipeError(
            describe(place, requirement, f"one of {signature}", str(error))
        ) from error


def build_recipe_again(spec: str, data: Path | None, record: Mapping[str, Any]) -> Recipe:
    """Builds a recipe with the seed and embedding_dim that a run or an artifact records."""
    seed, dim = record.get("seed", 0), record.get("embedding_dim")
    check(type(seed) is int and 0 <= seed < 2**63, "record", "a seed, an integer >= 0", repr(seed))
    is_dim = dim is None or (type(dim) is int and dim >= 1)
    check(is_dim, "record", "embedding_dim to be none or an integer >= 1", repr(dim))
    return build_recipe(spec, data, seed=seed, embedding_dim=dim)
