"""Magnitude pruning with masked fine-tuning (Han et al. 2015): train, drop the smallest values,
train the rest on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import torch
from torch import nn

from benchmarks.rivals.methods.method import MethodResult, MethodTask, SizeNotMetError, served_in
from benchmarks.rivals.methods.trained_scheme import Candidate, columns_of_dims, prune_to_columns_, row_blocks
from benchmarks.rivals.settings import TrainingRules
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.prune import Size, SizeOutOfReachError, drop_zeros_
from dnis_torchrec.selection.shards import collections, local_shards
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.selection.torchrec import writing_to_tables
from dnis_torchrec.training.loop import PlainTraining, train_plainly
from dnis_torchrec.training.shard import rest_optimizer, shard
from examples.paper.pruning import ValueMask, keep_largest_, num_values

ELEMENT_PRECISIONS = ("fp32", "fp16", "int8")
"""Precisions in which single values are served: those of the compressed sparse rows."""
NUM_STAGES = 5
"""Number of prunings of the iterative method; each drops the same share of the values that are
left."""


class MagnitudePruning:
    """Prunings of a trained model with masked fine-tuning, each from where the last one ended."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, *, device: torch.device, folder: Path, rules: TrainingRules
    ) -> None:
        self._recipe, self._device = recipe, device
        self._rules, self._folder = rules, folder
        self._model, _ = shard(TrainTask(model, recipe.task, embedding_l2=recipe.embedding_l2), recipe, device)
        self._shards = [
            table_shard for module in collections(self._model).values() for table_shard in local_shards(module)
        ]

    def prune_(self, num_keep: int) -> PlainTraining:
        """Prunes the model from the state that it is in, and trains what is left on; the best state
        may be the first."""
        with writing_to_tables(self._model):
            keep_largest_([one.weight for one in self._shards], num_keep)
        return train_plainly(
            self._model,
            rest_optimizer(self._model, self._recipe),
            self._recipe,
            self._device,
            max_epochs=self._rules.max_epochs,
            patience=self._rules.patience,
            held=ValueMask(self._model),
            starts_trained=True,
        )

    def unshard_(self) -> nn.Module:
        """The plain model in its present state; the last call to make."""
        return cast(TrainTask, unshard_(self._model)).model


@served_in(*ELEMENT_PRECISIONS)
def magnitude(task: MethodTask) -> MethodResult:
    """One-shot: train densely, keep the largest values that the budget pays for in CSR form, train
    these on."""
    return _pruned_in_stages(task, 1)


@served_in(*ELEMENT_PRECISIONS)
def magnitude_iterative(task: MethodTask) -> MethodResult:
    """Iterative: prune a share, train what is left to its best epoch, and again, down to the budget
    in five stages."""
    return _pruned_in_stages(task, NUM_STAGES)


def stage_sizes(num_all: int, num_keep: int, num_stages: int) -> list[int]:
    """Values to keep in each stage: a geometric series from all of them, exclusive, to `num_keep`,
    inclusive."""
    share = (num_keep / num_all) ** (1 / num_stages)
    return [round(num_all * share**stage) for stage in range(1, num_stages)] + [num_keep]


def _pruned_in_stages(task: MethodTask, num_stages: int) -> MethodResult:
    recipe = task.build(None)
    counts, blocks = row_blocks(task)
    num_keep = affordable_elements(task, blocks)
    dims = blocks.embedding_dims
    every_column = {table: torch.full((blocks.routings[table].num_blocks,), dim) for table, dim in dims.items()}
    seen = prune_to_columns_(recipe.model, blocks, counts, columns_of_dims(blocks, every_column))
    num_keep = min(num_keep, seen.parameters)
    dense = Candidate(recipe=recipe, scheme=seen, is_shared=True).train(task)
    started = time.monotonic()
    torch.manual_seed(task.seed)
    pruning = MagnitudePruning(dense.model, recipe, device=task.device, folder=task.folder, rules=task)
    trained = [pruning.prune_(size) for size in stage_sizes(seen.parameters, num_keep, num_stages)][-1]
    model = pruning.unshard_()
    scheme = drop_zeros_(model, blocks, counts)
    seconds = dense.seconds + time.monotonic() - started
    return MethodResult(
        model=model,
        scheme=scheme,
        form=element_form(task),
        selection_loss=trained.selection_loss,
        seconds=seconds,
        seconds_of_trials=seconds,
        settings={"stages": num_stages},
    )


def element_form(task: MethodTask) -> str:
    """The form in which single values are served in a task's precision."""
    return f"csr_{task.precision}"


def affordable_elements(task: MethodTask, blocks: RowBlocks) -> int:
    """Single values that a task's bytes pay for in its precision."""
    try:
        shapes = [(routing.num_embeddings, blocks.embedding_dims[t]) for t, routing in blocks.routings.items()]
        return num_values(Size(embedding_bytes=task.embedding_bytes()), shapes)
    except SizeOutOfReachError as error:
        raise SizeNotMetError(str(error)) from error
