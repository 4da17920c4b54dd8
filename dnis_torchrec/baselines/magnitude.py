"""Magnitude pruning with masked fine-tuning (Han et al. 2015): train, drop the smallest values, train the rest on."""

from __future__ import annotations

from pathlib import Path

import torch

from dnis_torchrec.baselines.uniform import MAX_EPOCHS
from dnis_torchrec.checkpoint import load_checkpoint, save_checkpoint
from dnis_torchrec.pruning import RetainedMask, keep_largest_
from dnis_torchrec.recipe import Recipe, TrainTask
from dnis_torchrec.report import ReportRow
from dnis_torchrec.table_shards import collections, local_shards
from dnis_torchrec.training import evaluate, rest_optimizer, shard, train_plainly


class MagnitudePruning:
    """One dense training, then one pruning with masked fine-tuning per requested size.

    Single values are pruned over all tables together, by magnitude, from the dense model's best state (one-shot).

    Args:
        recipe: built with its full embedding_dim; its model is trained in place.
        seed: for the rows.
        device: where to train.
        folder: existing folder for checkpoints.
        patience: epochs without a better selection loss before stopping, in training and fine-tuning alike.
    """

    def __init__(self, recipe: Recipe, *, seed: int, device: torch.device, folder: Path, patience: int) -> None:
        self._recipe, self._seed, self._device, self._patience = recipe, seed, device, patience
        self._folder = folder
        self._model, _ = shard(TrainTask(recipe.model, recipe.loss), recipe, device)
        self._dense = self._train(None)
        save_checkpoint(folder / "dense", self._model)
        self._shards = [part for module in collections(self._model).values() for part in local_shards(module)]
        self._dense_parameters = sum(part.weight.numel() for part in self._shards)

    def dense_row(self) -> ReportRow:
        """The row of the uncompressed model."""
        load_checkpoint(self._folder / "dense", self._model)
        return self._row("dense", self._dense_parameters, self._dense)

    def pruned_row(self, compression_ratio: float) -> ReportRow:
        """Prunes the dense model to a size, fine-tunes what is left, and evaluates it.

        Args:
            compression_ratio: parameters of the uncompressed tables over those retained; met to the value.
        """
        load_checkpoint(self._folder / "dense", self._model)
        num_keep = int(self._dense_parameters / compression_ratio)
        keep_largest_(self._shards, num_keep)
        seconds = self._train(RetainedMask(self._model))
        return self._row("magnitude", num_keep, self._dense + seconds)

    def _train(self, mask: RetainedMask | None) -> float:
        trained = train_plainly(
            self._model,
            rest_optimizer(self._model, self._recipe),
            self._recipe,
            self._device,
            max_epochs=MAX_EPOCHS,
            patience=self._patience,
            folder=self._folder,
            mask=mask,
        )
        return trained.seconds

    def _row(self, method: str, parameters: int, seconds: float) -> ReportRow:
        csr = 0
        for part in self._shards:
            num_rows, dim = part.weight.shape
            csr += int((part.weight != 0).sum()) * (5 if dim <= 256 else 6) + 4 * (num_rows + 1)
        sizes = {"dense_fp32": 4 * self._dense_parameters} | ({} if method == "dense" else {"csr_fp32": csr})
        return ReportRow(
            method=method,
            compression_ratio=self._dense_parameters / parameters,
            parameters=parameters,
            bytes=sizes,
            metrics=evaluate(self._model, self._recipe.data.test, self._recipe.loss, self._device),
            seed=self._seed,
            seconds=seconds,
        )
