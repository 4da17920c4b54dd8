"""The search itself as a method among the others: with pressure, tuned, as in the paper, its scheme trained anew."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from dnis_torchrec.comparison.methods.best_trial import best_of
from dnis_torchrec.comparison.methods.method import (
    MethodResult,
    MethodTask,
    NotApplicableError,
    SizeNotMetError,
    learns_on_validation,
)
from dnis_torchrec.comparison.methods.shared_trials import FinishedTrial
from dnis_torchrec.comparison.methods.trained_scheme import Candidate
from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.scheme import DescribedTable, MixedDimensionScheme
from dnis_torchrec.search.budget import Size, SizeOutOfReachError
from dnis_torchrec.search.config import SearchConfig
from dnis_torchrec.search.hypergradient import UnrollingError
from dnis_torchrec.search.search import search
from dnis_torchrec.storage.whole_files import read_tensors, unshared, write_tensors
from dnis_torchrec.training.evaluation import evaluate

WHOLE_COLUMNS, SINGLE_VALUES = "mixed_dimension_fp32", "csr_fp32"
RATE_FACTORS = (1.0, 0.8, 1.25, 0.64, 1.5625)
"""Factors on the tables' learning rate, one per search of `dnis_tuned`; after the last the first comes again."""
NUM_SEARCHES = len(RATE_FACTORS)
"""Default number of searches of `dnis_tuned`: they cost about as much as 16 trainings."""
_FOUND = "search.safetensors"


class _Head(TypedDict):
    scheme: dict[str, DescribedTable]
    settings: dict[str, float | str]


@learns_on_validation
def dnis(task: MethodTask) -> MethodResult:
    """The search with pressure (`search.search`): one run, whole columns of blocks, no fine-tuning.

    Args:
        task: recipe and size; its `trials` is not looked at.

    Returns:
        The merged and pruned model with its scheme, in the form ``"mixed_dimension_fp32"``.

    Raises:
        SizeNotMetError: if the size is out of reach for whole columns.
    """
    return _searched(task, WHOLE_COLUMNS, {})


@learns_on_validation
def dnis_tuned(task: MethodTask) -> MethodResult:
    """The best, on the selection split, of several searches as `dnis` has one, of other initial weights and rates.

    Five cost about what the 16 trainings of `random` and `mde` do, which choose in the same way;
    `MethodTask.trials` may be smaller, or larger. The first is `dnis` itself. The others begin with weights drawn
    anew (`Recipe.redraw`), where the recipe can; their tables learn at the recipe's rate, before
    the release, times `RATE_FACTORS`. Where the recipe cannot draw, there are no more searches than rates.

    Args:
        task: recipe, size and number of searches: `NUM_SEARCHES` where its `trials` is None.

    Returns:
        The best search, with its rate factor and, where the recipe can draw, the number of its initial weights among
        its settings; the number and the wall time of all searches.

    Raises:
        SizeNotMetError: if the size is out of reach for whole columns.
    """
    num_searches = task.trials or NUM_SEARCHES
    if task.build(None).redraw is None:
        num_searches = min(num_searches, len(RATE_FACTORS))
    return best_of(task, {f"search {number}": partial(TunedSearch, number) for number in range(num_searches)})


@dataclass(frozen=True)
class TunedSearch:
    """One of the searches of `dnis_tuned`, see `dnis_torchrec.comparison.methods.best_trial.Trial`.

    Attributes:
        number: of the initial weights, from 0; the table's rate follows from it.
    """

    number: int

    def train(self, task: MethodTask) -> MethodResult:
        """Searches, and writes the results to the task's folder.

        Args:
            task: with an empty folder of this search's own.

        Raises:
            SizeNotMetError: if the size is out of reach for whole columns.
        """
        recipe = task.build(None)
        factor = RATE_FACTORS[self.number % len(RATE_FACTORS)]
        settings = {"table_rate_factor": factor}
        if recipe.redraw is not None:
            settings["initial_weights"] = self.number
        rate = factor * (recipe.search_table_learning_rate or recipe.table_learning_rate)
        changes = {"search_table_learning_rate": rate}
        found = _searched(task, WHOLE_COLUMNS, changes, initial_weights=self.number)
        found = replace(found, settings={**found.settings, **settings})
        tensors = {f"model/{name}": value for name, value in found.model.state_dict().items()}
        tensors |= {f"scheme/{name}": value for name, value in found.scheme.to_tensors().items()}
        head = {"scheme": found.scheme.to_json(), "settings": dict(found.settings)}
        write_tensors(task.folder / _FOUND, unshared(tensors), "tuned_search", head)
        return found

    def restore(self, task: MethodTask, finished: FinishedTrial) -> MethodResult:
        """Reads the results that `train` wrote.

        Args:
            task: with the folder that `train` had.
            finished: the results of the search.
        """
        tensors, head = read_tensors(task.folder / _FOUND, "tuned_search", _Head)
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "scheme": {}}
        for path, value in tensors.items():
            part, name = path.split("/", 1)
            parts[part][name] = value
        model = task.build(None).model
        model.load_state_dict(parts["model"])
        return MethodResult(
            model=model,
            scheme=MixedDimensionScheme.from_parts(head["scheme"], parts["scheme"]),
            form=WHOLE_COLUMNS,
            selection_loss=finished.selection_loss,
            seconds=finished.seconds,
            seconds_of_trials=finished.seconds,
            settings=head["settings"],
        )


@learns_on_validation
def dnis_paper(task: MethodTask) -> MethodResult:
    """The search as in the paper: first order, no pressure, then the smallest values are dropped and that is all.

    Source: Cheng, Shen, Huang, Differentiable Neural Input Search for Recommender Systems, 2020, algorithm 1; alpha
    learns at 0.01 without a running mean.

    NOTE[DIFF]: the first epoch, of all that the recipe's search has, is one of lower steps alone; the paper alternates
    from the first step. The number of blocks and the learning rates of tables and network are the recipe's, as for
    every other method, which may be others than the paper's.

    Args:
        task: recipe and size.

    Returns:
        The merged and pruned model with its scheme of single values, in the form ``"csr_fp32"``.

    Raises:
        SizeNotMetError: if the size is out of reach.
    """
    return _searched(task, SINGLE_VALUES, _PAPER)


@learns_on_validation
def dnis_unrolled(task: MethodTask) -> MethodResult:
    """Searches as `dnis_paper` does, with alpha's gradient through one unrolled step of the weights (second order).

    Args:
        task: recipe and size; the recipe's tables have to learn by ``"adam"``.

    Returns:
        As `dnis_paper`.

    Raises:
        SizeNotMetError: if the size is out of reach.
        NotApplicableError: for tables with a fused optimizer.
    """
    return _searched(task, SINGLE_VALUES, {**_PAPER, "unrolled": True})


def dnis_retrained(task: MethodTask) -> MethodResult:
    """The scheme that `dnis` finds, its weights thrown away and trained from scratch, as plain tables are.

    With the validation split as training data the scheme is found without it, the weights then learn on both.

    Args:
        task: recipe and size; the search runs on `MethodTask.for_search`, the training on the task itself.

    Returns:
        The retrained model with the scheme; its seconds are those of search and training together.

    Raises:
        SizeNotMetError: if the size is out of reach for whole columns.
    """
    found = dnis(task.for_search())
    candidate = Candidate(recipe=task.build(None), scheme=found.scheme, form=found.form, settings=found.settings)
    result = candidate.train(task)
    seconds = found.seconds + result.seconds
    return replace(result, seconds=seconds, seconds_of_trials=seconds)


_PAPER: dict[str, Any] = {
    "scope": "global",
    "pressure": False,
    "rotate": False,
    "upper_every": 1,
    "upper_batch_parts": 1,
    "structure": "element",
    "alpha_learning_rate": 0.01,
    "alpha_averaging": 0.0,
}


def _searched(task: MethodTask, form: str, settings: dict[str, Any], *, initial_weights: int = 0) -> MethodResult:
    recipe = task.build(None)
    if initial_weights and recipe.redraw is not None:
        recipe = replace(recipe, model=recipe.redraw(initial_weights))
    size = Size(embedding_bytes=task.embedding_bytes(), form=form)
    config = SearchConfig.of(recipe, size, {"patience": task.patience, **settings}).within(task.max_epochs)
    if not config.pressure:  # a warm-up is for what comes after it: rotation and the ramp
        both_levels = config.release_epochs + config.warm_up_epochs - 1
        config = replace(config, warm_up_epochs=1, release_epochs=both_levels)
    torch.manual_seed(task.seed)
    started = time.monotonic()
    try:
        outcome = search(recipe, config, task.folder, task.device)
    except SizeOutOfReachError as error:
        raise SizeNotMetError(str(error)) from error
    except UnrollingError as error:
        raise NotApplicableError(str(error)) from error
    seconds = time.monotonic() - started
    found = TrainTask(outcome.model, recipe.loss)
    return MethodResult(
        model=outcome.model,
        scheme=outcome.scheme,
        form=form,
        selection_loss=evaluate(found, recipe.data.selection, recipe.loss, task.device)["loss"],
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={"num_blocks": config.num_blocks, "epochs": len(outcome.history), "best_epoch": outcome.best_epoch},
    )
