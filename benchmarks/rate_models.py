"""The trained models of `benchmarks.rate_distortion`: trained once, kept in a folder, and what methods make of each."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rate_compress import Prepared, prepare
from benchmarks.rivals.quantized_rows import PRECISIONS, Precision
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.files import read_tensors, unshared, write_tensors
from dnis_torchrec.data.over_ranks import read_before_training
from dnis_torchrec.data.recipe import Recipe, build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import dense_parameters, table_configs
from dnis_torchrec.selection.swap import unshard_
from dnis_torchrec.training.loop import train_plainly
from dnis_torchrec.training.shard import process_group, shard
from dnis_torchrec.training.weights import load_state_

MAX_EPOCHS, PATIENCE = 60, 3
"""Of plain training: what `dnis train` takes by default."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Which trained model.

    Attributes:
        recipe: ``module:function``.
        data: its folder.
        seed: of weights, splits and batch order.
        embedding_l2: of every plain training; None takes the recipe's.
        cache: folder in which trained weights are kept.
    """

    recipe: str
    data: Path | None
    seed: int
    embedding_l2: float | None
    cache: Path


class Trained:
    """A plain model trained to its own early stop, and what several methods make of it, each made once.

    Args:
        case: which.
        embedding_dim: D of the tables; the recipe's own if not given.
    """

    def __init__(self, case: Case, embedding_dim: int | None = None) -> None:
        self.case = case
        self.embedding_dim = embedding_dim

    @cached_property
    def recipe(self) -> Recipe:
        """With a model that is not trained yet, until `model` is asked for."""
        built = build_recipe(self.case.recipe, self.case.data, seed=self.case.seed, embedding_dim=self.embedding_dim)
        l2 = self.case.embedding_l2
        return built if l2 is None else replace(built, embedding_l2=l2)

    @property
    def embedding_l2(self) -> float:
        """Of every plain training."""
        return self.recipe.embedding_l2

    @cached_property
    def counts(self) -> FrequencyCounts:
        """Of the training split."""
        return read_before_training(self.recipe, self.configs, Ranks())[1]

    @cached_property
    def configs(self) -> list[EmbeddingBagConfig]:
        """All tables."""
        return table_configs(self.recipe.model)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the float32 tables."""
        return 4 * dense_parameters(self.recipe.model)

    @cached_property
    def _weights(self) -> tuple[nn.Module, _Training]:
        case, path = self.case, self.case.cache / self._file_name()
        if not path.is_file():
            _train(self.recipe, case, path)
        tensors, training = read_tensors(path, "plain_model", _Training)
        model = copy.deepcopy(self.recipe.model)
        load_state_(model, tensors, str(path))
        return model.eval(), training

    def _file_name(self) -> str:
        dim = "" if self.embedding_dim is None else f"-dim{self.embedding_dim}"
        recipe, name = self.recipe, self.case.recipe.replace(":", ".")
        rates = f"{recipe.table_learning_rate:g}_{recipe.dense_learning_rate:g}"
        return f"{name}-l2_{recipe.embedding_l2:g}-rates_{rates}{dim}-seed{self.case.seed}.safetensors"

    @property
    def model(self) -> nn.Module:
        """In its best state."""
        return self._weights[0]

    @property
    def training(self) -> _Training:
        """How the model was trained."""
        return self._weights[1]

    @property
    def best_epochs(self) -> int:
        """Epochs of training up to the best one, behind which `PATIENCE` more were waited for."""
        epochs = self.training["epochs"]
        return epochs if epochs >= MAX_EPOCHS else epochs - PATIENCE

    @cached_property
    def turned(self) -> Prepared:
        """Tables in their principal axes, and what bits are allocated by."""
        return self._prepared(copy.deepcopy(self.model), turns=True)

    @cached_property
    def not_turned(self) -> Prepared:
        """The same in the axes that training has left."""
        return self._prepared(self.model, turns=False)

    def _prepared(self, model: nn.Module, *, turns: bool) -> Prepared:
        recipe = self.recipe
        data = recipe.data
        return prepare(model, data.train, self.counts, loss=recipe.task, turns=turns, held_out=data.validation)

    def bytes_of(self, size: float | str | None) -> int:
        """Bytes that a size leaves for all tables."""
        if isinstance(size, str):
            return row_bytes(self.configs, PRECISIONS[size.removesuffix(" rows")], None)
        return math.floor(self.dense_bytes / (size or 1))


class _Training(TypedDict):
    """The record that is kept beside the weights of a trained model."""

    seconds: float
    epochs: int


def _train(recipe: Recipe, case: Case, path: Path) -> None:
    """Trains as `dnis train` does, and keeps the weights."""
    with process_group() as device:
        torch.manual_seed(case.seed)
        started = time.monotonic()
        task = TrainTask(copy.deepcopy(recipe.model), recipe.task, embedding_l2=recipe.embedding_l2)
        model, optimizer = shard(task, recipe, device)
        trained = train_plainly(model, optimizer, recipe, device, max_epochs=MAX_EPOCHS, patience=PATIENCE)
        seconds = time.monotonic() - started
        plain = cast(TrainTask, unshard_(model)).model.cpu()
    head = {"seconds": seconds, "epochs": len(trained.history)}
    write_tensors(path, unshared(plain.state_dict()), "plain_model", head)


def row_bytes(configs: Sequence[EmbeddingBagConfig], precision: Precision, columns: int | None) -> int:
    """Bytes of the first columns of all tables, all of them if not given."""
    widths = [min(config.embedding_dim, columns or config.embedding_dim) for config in configs]
    stored = [-(-width // precision.dim_multiple) * precision.dim_multiple for width in widths]
    return sum(c.num_embeddings * precision.row_bytes(width) for c, width in zip(configs, stored, strict=True))
