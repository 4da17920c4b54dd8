"""Recipe: the model, data and loss that a user brings."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from dnis_torchrec.checks import check, check_known, describe, nearest
from dnis_torchrec.data.task import LOSS, Task, check_kinds, check_l2, direction_of, task_of

if TYPE_CHECKING:
    from dnis_torchrec.data.frames import Frame, FrameSplits

SPLITS = ("train", "validation", "selection", "test")

_MISSING: Any = None  # a split that was not given then gets an error as others do


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
        is_by_time: whether each part is later than those before it: reports say so.

    Raises:
        ValueError: if a part is missing, or can be iterated once only.
    """

    train: Iterable[Batch] = _MISSING
    validation: Iterable[Batch] = _MISSING
    selection: Iterable[Batch] = _MISSING
    test: Iterable[Batch] = _MISSING
    is_by_time: bool = False

    def __post_init__(self) -> None:
        for name in SPLITS:
            batches, place = getattr(self, name), f"DataSplits.{name}"
            check(batches is not None, place, "batches", "none", "give a part of its own")
            is_again, kind = not isinstance(batches, Iterator), type(batches).__name__
            check(is_again, place, "batches that can be iterated again and again", kind)

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

        Ids may be of any type: numbers, texts, categories, dates or all of them; 7, 7.0 and
        ``"7.00"`` are the same id, and any id is that of the frame's CSV file. An id's row in its
        table is its place by frequency among the training samples, from row 1 on. A missing id is
        one like any other; in a bag it is left out. All ids that no training sample has share row
        0, which nothing trains. Dense features get mean 0 and variance 1 over the training samples;
        a missing one is 0 then. What became of each column is printed and logged.

        Args:
            frame: a pandas DataFrame or a dict of columns; or the path of a Parquet or CSV file, or
                of a folder of them.
            label: column of the labels, numbers, none missing: 0 and 1 for clicks, any for ratings.
            dense: columns of the dense features, numbers.
            ids: columns with one id a row. Each is a feature, with a table of its own.
            bags: columns with any number of ids a row, as lists, or as text with ``|`` between the
                ids.
            time: column to split by, numbers or dates: the latest samples are those of test. None
                splits at random.
            batch_size: samples in a batch of every split.
            seed: of the split, and of the order of every epoch.

        Returns:
            80 % of the rows for train, 5 % each for validation and selection, 10 % for test;
            ``encoder`` has the sizes of the tables, and turns further frames into what a model
            reads; ``columns`` is the table that was printed.

        Raises:
            ValueError: naming the column, and what is wrong with it.
            TypeError: if it is no frame, or columns are no list.
            FileNotFoundError: if there is no such file.

        Example:
            >>> import pandas as pd
            >>> columns = {"user": list("abcd") * 10, "tags": [["x"], []] * 20}
            >>> frame = pd.DataFrame(columns | {"liked": [0, 1] * 20})
            >>> splits = DataSplits.from_frame(
            ...     frame, label="liked", ids=["user"], bags=["tags"], batch_size=8
            ... )
            >>> splits.encoder.num_embeddings, next(iter(splits.test)).sparse_features.keys()
            ({'user': 5, 'tags': 2}, ['user', 'tags'])
        """
        from dnis_torchrec.data.frames import Roles, splits_of_frame  # which needs this module

        return splits_of_frame(frame, Roles(label, dense, ids, bags, time), batch_size, seed)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data and how its weights learn: everything that a search needs from its user.

    Attributes:
        model: a plain TorchRec model, called as ``model(dense_features=..., sparse_features=...)``
            and returning one prediction (a logit for a binary loss) per sample, as torchrec's DLRM
            does; or as the task calls it.
        data: the four splits: train, validation, selection and test. Or a stream: any other
            iterable of Batches, an iterator or a DataLoader, that is read once, in the order of
            time. Where it has ``state_dict`` and ``load_state_dict``, as torchdata's
            StatefulDataLoader, of plain values and tensors, a run that was stopped goes on from
            them; else it skips what it had read.
        loss: ``nn.MSELoss()`` or ``nn.BCEWithLogitsLoss()``, called with (predictions, labels),
            both ``(B,)``; or a `Task`, for several outputs, labels or losses, or weights of
            samples: how a batch becomes a loss, and what the model is judged by.
        stop_on: metric of the selection split that early stopping and every other choice goes by,
            ``"loss"`` or one of the task's, such as ``"auc"`` or ``"click_auc"``.
        table_optimizer: how tables learn: ``"adam"`` (dense compute kernel) or
            ``"rowwise_adagrad"`` (fused).
        table_learning_rate: learning rate of the tables.
        dense_learning_rate: learning rate (Adam) of everything else.
        embedding_l2: lambda of the L2 penalty on looked-up embeddings, see `TrainTask`: the same
            for everything that trains weights on the training split.
        row_weights: names of the model's parameters that hold numbers for rows beside the tables,
            such as first-order weights: they learn (by Adam) at `table_learning_rate`.
        leave_alone: names of tables that must not be touched: no soft selection, no other axes,
            served in float32. Their bytes count in every size.
    """

    model: nn.Module
    data: Any  # DataSplits or Iterable[Batch]
    loss: nn.Module
    stop_on: str = LOSS
    table_optimizer: str = "adam"
    table_learning_rate: float = 1e-3
    dense_learning_rate: float = 1e-3
    embedding_l2: float = 0.0
    row_weights: tuple[str, ...] = ()
    leave_alone: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind = type(self.data).__name__
        is_iterable = not self.is_stream or isinstance(self.data, Iterable)
        check(is_iterable, "Recipe.data", "DataSplits or an iterable of batches", kind)
        if not isinstance(self.loss, Task):  # of other losses nobody knows the kind of predictions
            is_fit = isinstance(self.loss, nn.MSELoss | nn.BCEWithLogitsLoss)
            requirement = "nn.MSELoss, nn.BCEWithLogitsLoss or a Task"
            check(is_fit, "Recipe.loss", requirement, type(self.loss).__name__)
            reduction = self.loss.reduction
            check(reduction == "mean", "Recipe.loss", "reduction 'mean'", repr(reduction))
        check_kinds(self.task)
        has_direction = direction_of(self.task, self.stop_on) is not None
        check(has_direction, "Recipe.stop_on", "a metric with a better side", repr(self.stop_on))
        kinds = ("adam", "rowwise_adagrad")
        check_known("Recipe.table_optimizer", self.table_optimizer, kinds)
        for name in ("table_learning_rate", "dense_learning_rate"):
            rate = getattr(self, name)
            check(0 < rate < math.inf, f"Recipe.{name}", "a finite number above 0", rate)
        check_l2(self.embedding_l2)
        check_left_alone(self.leave_alone, table_names(self.model), "Recipe.leave_alone")

    @property
    def is_stream(self) -> bool:
        """Whether the data are a stream."""
        return not isinstance(self.data, DataSplits)

    @property
    def task(self) -> Task:
        """The task that `loss` is or stands for."""
        return task_of(self.loss)


def table_names(model: nn.Module) -> list[str]:
    """Names of the tables of a model's collections, pooled or not, which nobody has sharded yet."""
    names: list[str] = []
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollectionInterface):
            names += [table.name for table in module.embedding_bag_configs()]
        elif isinstance(module, EmbeddingCollectionInterface):
            names += [table.name for table in module.embedding_configs()]
    return list(dict.fromkeys(names))


def check_left_alone(names: Collection[str], tables: Collection[str], place: str) -> None:
    """Checks the names of tables that must not be touched."""
    for name in names:
        check_known(f"table of {place}", name, tables)
    is_some = not names or bool(set(tables) - set(names))
    check(is_some, place, "a table beside those that are left alone", f"all {len(tables)}")


class RecipeError(ValueError):
    """A recipe that failed where its user can mend it; the message shows that place alone."""


@contextmanager
def errors_of_recipe(spec: str) -> Iterator[None]:
    """Whatever a recipe raises becomes one error that names it and the lines of its user."""
    try:
        yield
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        place, reasons = f"recipe {spec!r}", list[str]()
        current: BaseException | None = error
        while current is not None and len(reasons) < 10:
            text = current.msg if isinstance(current, SyntaxError) else str(current)
            if isinstance(current, ValueError) and text.startswith(place):  # it says so itself
                raise RecipeError(text) from error
            stack = traceback.extract_tb(current.__traceback__)
            lines = [f"{type(current).__name__}: {text}".rstrip(": ")]
            lines += traceback.format_list([line for line in stack if _is_users(line.filename)])
            if isinstance(current, SyntaxError):
                lines += traceback.format_exception_only(current)[:-1]
            reasons.append("\n".join(line.rstrip("\n") for line in lines))
            hidden = None if current.__suppress_context__ else current.__context__
            current = current.__cause__ or hidden
        raise RecipeError(f"{place}: " + "\n  because of ".join(reasons)) from error


def _is_users(file: str) -> bool:
    """Whether a file is neither this package's, nor Python's, nor that of an installed package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [Path(sysconfig.get_path(name)).resolve() for name in names]
    folders.append(Path(__file__).resolve().parents[1])
    parents = Path(file).resolve().parents
    return not file.startswith("<") and not any(folder in parents for folder in folders)


def load_recipe(spec: str) -> Callable[..., Recipe]:
    """Finds the recipe function named by ``module:function``, in the current folder first."""
    module_name, _, function_name = spec.partition(":")
    place, here = f"recipe {spec!r}", str(Path.cwd())
    is_fit = bool(function_name) and all(module_name.split("."))
    check(is_fit, place, "'module:function'", repr(spec))
    if here not in sys.path:
        sys.path.insert(0, here)
    with errors_of_recipe(spec):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise
            requirement = f"a module {module_name!r} in {here}"
            raise RecipeError(describe(place, requirement, "none")) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        requirement, remedy = f"a function in {module_name}", nearest(function_name, names)
        raise RecipeError(describe(place, requirement, repr(function_name), remedy))
    return function


def build_recipe(
    spec: str, data: Path | None, *, seed: int, embedding_dim: int | None = None
) -> Recipe:
    """Calls a recipe function."""
    function, place = load_recipe(spec), f"recipe {spec!r}"
    with errors_of_recipe(spec):
        recipe = function(data, seed=seed, embedding_dim=embedding_dim)
    if not isinstance(recipe, Recipe):
        raise TypeError(describe(place, "a Recipe", type(recipe).__name__))
    return recipe
