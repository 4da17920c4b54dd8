"""The interface of all methods of a comparison: the task that each is given, and the result that
each returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rivals.forms import CODES, PRECISIONS, form_named
from benchmarks.rivals.settings import TrainingRules
from dnis_torchrec.artifact.load import serve
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.report import ReportRow
from dnis_torchrec.scheme import MixedDimensionScheme, compression_of
from dnis_torchrec.selection.shards import collections, dense_parameters, local_shards, table_configs
from dnis_torchrec.selection.swap import replace_
from dnis_torchrec.training.evaluate import evaluate

STEP_SHARE = 0.02
"""Bytes of a result are equal to those asked for if they are above them by no more than this share.
"""


@dataclass(frozen=True, kw_only=True)
class MethodTask(TrainingRules):
    """Task of one cell of a comparison: a recipe, a size and the rules."""

    build: Callable[[int | None], Recipe]
    compression: float
    seed: int
    device: torch.device
    folder: Path
    precision: str = "fp32"
    processes: int = 1
    helps: bool = False
    build_for_search: Callable[[int | None], Recipe] | None = None
    trained: Path | None = None
    tables_of_dims: dict[int | None, list[EmbeddingBagConfig]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.compression >= 1, "compression", "a number >= 1", self.compression)
        check(self.processes >= 1, "processes", "at least 1", self.processes)
        check_known("precision", self.precision, (*PRECISIONS, CODES.name))

    def tables(self, embedding_dim: int | None = None) -> list[EmbeddingBagConfig]:
        """The tables of the recipe at an embedding_dim; the recipe is built once for each."""
        if embedding_dim not in self.tables_of_dims:
            self.tables_of_dims[embedding_dim] = table_configs(self.build(embedding_dim).model)
        return self.tables_of_dims[embedding_dim]

    def dense_bytes(self) -> int:
        """Bytes of the uncompressed float32 tables: the sum of 4 N D."""
        return sum(4 * table.num_embeddings * table.embedding_dim for table in self.tables())

    def embedding_bytes(self) -> int:
        """Bytes that the compressed tables may take."""
        return int(self.dense_bytes() / self.compression)

    def for_search(self) -> MethodTask:
        """The task of a part that learns on the validation split: its weights never train on that
        split."""
        return self if self.build_for_search is None else replace(self, build=self.build_for_search)


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodResult:
    """Result of a method: a model to evaluate, a scheme to export it with, and its cost."""

    model: nn.Module
    scheme: MixedDimensionScheme
    form: str
    embedding_dim: int | None = None
    extra_bytes: int = 0
    selection_loss: float
    seconds: float
    trials: int = 1
    seconds_of_trials: float
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        form_named(self.form)

    def embedding_bytes(self) -> int:
        """Bytes of the tables as they are served in `form`, everything beside them counted."""
        return self.scheme.served_bytes(self.form) + self.extra_bytes

    @property
    def precision(self) -> str:
        """What values are stored in; ``"codes"`` where columns differ in bits."""
        stored = form_named(self.form).precision
        bits = {k for t in self.scheme.tables.values() if t.bits is not None for k in t.bits.unique().tolist() if k}
        uniform = [precision.name for precision in PRECISIONS.values() if bits == {precision.bits}]
        return uniform[0] if stored == CODES and uniform else stored.name

    @contextmanager
    def served(self, device: torch.device) -> Iterator[nn.Module]:
        """The model as it is served, for the block: in place of its collections what an artifact in
        `form` would load."""
        model, own = self.model.to(device), collections(self.model)
        served = {}
        for fqn, collection in own.items() if self.scheme.parameters else ():
            tables = {name: table for name, table in self.scheme.tables.items() if table.collection == fqn}
            weights = {shard.table: shard.weight.detach().cpu() for shard in local_shards(collection)}
            served[fqn] = serve(MixedDimensionScheme(tables), weights, self.form, device=device)
        with collections_in_place(model, served):
            yield model


@contextmanager
def collections_in_place(model: nn.Module, served: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """A model with other collections in place of its own, for the block."""
    own = collections(model)
    try:
        for fqn, module in served.items():
            replace_(model, own[fqn], module)
        yield model
    finally:
        for fqn, module in served.items():
            replace_(model, module, own[fqn])


def result_row(
    name: str, made: MethodResult, recipe: Recipe, test: Iterable[Batch], *, seed: int, device: torch.device
) -> ReportRow:
    """Builds the row of a method's result: its size, and the metrics of one evaluation of the model
    as it is served."""
    # Of the recipe's own tables: the scheme of a method with smaller tables knows those only.
    uncompressed = dense_parameters(recipe.model)
    with made.served(device) as model:
        metrics = evaluate(TrainTask(model, recipe.task), test, recipe.task, device)
    return ReportRow(
        method=name,
        compression=compression_of(uncompressed, made.embedding_bytes()),
        parameters=made.scheme.parameters,
        dense_parameters=uncompressed,
        bytes=made.scheme.exact_bytes() | {made.form: made.scheme.served_bytes(made.form)},
        metrics=metrics,
        seed=seed,
        seconds=made.seconds,
    )


class SizeNotMetError(ValueError):
    """A method cannot come to the requested size; the comparison leaves its row empty and says why."""


class NotApplicableError(NotImplementedError):
    """A method cannot work on this model at any size; the comparison leaves its rows empty and says
    why."""


class HelpIsOverError(RuntimeError):
    """A process that only helps has nothing left to train; the one that leads has the result."""


Method = Callable[[MethodTask], MethodResult]

_LEAVES_ALONE = "leaves_alone"
_LEARNS, _PRECISIONS = "learns_on_validation", "precisions"


def leaves_alone(method: Method) -> Method:
    """Marks a method that leaves the tables of `Recipe.leave_alone` alone; others do not apply to
    such a recipe."""
    setattr(method, _LEAVES_ALONE, True)
    return method


def check_leaves_alone(method: Method, recipe: Recipe) -> None:
    """Checks that a method touches no table that a recipe wants left alone."""
    if recipe.leave_alone and not getattr(method, _LEAVES_ALONE, False):
        supported = "supported are recipes without tables to leave alone"
        raise NotApplicableError(describe("Recipe.leave_alone", supported, ", ".join(recipe.leave_alone)))


def learns_on_validation(method: Method) -> Method:
    """Marks a method whose result learnt on the validation split: a comparison gives it that split
    for nothing else."""
    setattr(method, _LEARNS, True)
    return method


def needs_validation(method: Method) -> bool:
    """Returns whether a method is marked by `learns_on_validation`, so that the split cannot be
    training data too."""
    return getattr(method, _LEARNS, False)


def served_in(*precisions: str) -> Callable[[Method], Method]:
    """Marks a method by the precisions in which it can serve tables; one without a mark serves
    float32 alone."""

    def mark(method: Method) -> Method:
        setattr(method, _PRECISIONS, precisions)
        return method

    return mark


def precisions_of(method: Method, asked: Sequence[str]) -> tuple[str, ...]:
    """The precisions that a method is run in: those asked for that it can serve, or its own where
    it can serve none."""
    own: tuple[str, ...] = getattr(method, _PRECISIONS, ("fp32",))
    return tuple(precision for precision in asked if precision in own) or own
