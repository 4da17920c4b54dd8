"""TorchEasyRec: packed tables at its export, by a switch beside its INT8.

Its export fills a model from a checkpoint, quantizes the model's collections in place and saves it.
`pack_embeddings` stands where it quantizes. Nothing of TorchEasyRec is imported.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

import dnis_torchrec as dnis
from dnis_torchrec.data.batches import WholeBatch
from dnis_torchrec.training.weights import fill_, weights_for_

SWITCH = "PACKED_EMB"
"""Environment variable: the compression, such as 20; unset or 0 leaves their own switch alone."""
BASE = "__BASE__"
"""Their name of the data group that all features of a sample are in."""


def compression_of_switch() -> float:
    """Returns the compression that the environment asks for, 0 where it asks for none."""
    return float(os.environ.get(SWITCH) or 0)


@dataclass
class GroupBatch(WholeBatch):
    """A batch of theirs whose samples can be cut: each tensor has a row a sample.

    Attributes:
        sequences: dense features of sequences, padded, side by side.
        sequence_lengths: their lengths.
        source: their batch, of which `of_theirs` takes all else.
    """

    sequences: Tensor
    sequence_lengths: Tensor
    weights: Tensor
    source: Any


def to_samples(batch: Any) -> GroupBatch:
    """Makes samples of a batch of theirs."""
    groups = {*batch.dense_features, *batch.sparse_features}
    if groups != {BASE} or BASE not in batch.sparse_features:
        raise NotImplementedError(f"supported are ids in data group {BASE} alone, not {groups}")
    if getattr(batch, "sequence_mulval_lengths", None):
        raise NotImplementedError("sequences with several ids a place are not supported")
    features = batch.sparse_features[BASE]
    size = features.stride()
    dense = batch.dense_features.get(BASE)
    sequences = list(getattr(batch, "sequence_dense_features", {}).values())
    padded = [part.to_padded_dense().reshape(size, -1) for part in sequences]
    return GroupBatch(
        torch.zeros(size, 0) if dense is None else dense.values(),
        features,
        _columns(batch.labels.values(), size),
        torch.cat([torch.zeros(size, 0), *padded], dim=1),
        _columns((part.lengths() for part in sequences), size).long(),
        _columns(getattr(batch, "sample_weights", {}).values(), size),
        batch,
    )


def _columns(columns: Iterable[Tensor], size: int) -> Tensor:
    parts = [column.reshape(size, 1).float() for column in columns]
    return torch.cat([torch.zeros(size, 0), *parts], dim=1)


def of_theirs(batch: GroupBatch) -> Any:
    """Makes a batch of theirs of samples."""
    source, parts = batch.source, {"sparse_features": {BASE: batch.sparse_features}}
    if source.dense_features:
        dense = source.dense_features[BASE]
        tensor = KeyedTensor(dense.keys(), dense.length_per_key(), batch.dense_features)
        parts["dense_features"] = {BASE: tensor}
    parts["labels"] = _by_name(source.labels, batch.labels)
    if getattr(source, "sample_weights", {}):
        parts["sample_weights"] = _by_name(source.sample_weights, batch.weights)
    sequences, start = getattr(source, "sequence_dense_features", {}), 0
    if sequences:
        parts["sequence_dense_features"] = {}
    for place, (name, feature) in enumerate(sequences.items()):
        lengths, width = batch.sequence_lengths[:, place], feature.values()[:1].numel()
        longest = int(feature.lengths().max())
        rows = batch.sequences[:, start : start + longest * width]
        is_real = torch.arange(longest) < lengths.unsqueeze(1)
        values = rows.reshape(-1, longest, *feature.values().shape[1:])[is_real]
        parts["sequence_dense_features"][name] = JaggedTensor(values, lengths=lengths)
        start += longest * width
    return replace(source, **parts)


def _by_name(source: Mapping[str, Tensor], columns: Tensor) -> dict[str, Tensor]:
    """Returns columns under their names, each of its own kind of values."""
    pairs = zip(source.items(), columns.unbind(1), strict=True)
    return {name: column.to(tensor.dtype) for (name, tensor), column in pairs}


class OfTheirs(dnis.Task):
    """Calls a model with its own batches; takes its own losses, or another one of their kind."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        if hasattr(model, "init_loss"):
            model.init_loss()
        self._losses = model.loss

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Returns what the losses read: all but the probabilities."""
        outputs = model(of_theirs(batch))
        return {name: part for name, part in outputs.items() if not name.startswith("probs")}

    def loss(self, batch: Any, outputs: Any) -> Tensor:
        """Sums their losses."""
        return torch.stack([*self._losses(outputs, of_theirs(batch)).values()]).sum()


def core_of(model: nn.Module) -> nn.Module:
    """Returns what their wrappers for training, prediction and scripting hold, or the model."""
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, nn.Module) else model


def fill_from_checkpoint_(model: nn.Module, checkpoint: Path) -> None:
    """Fills a model from a folder ``model.ckpt-N`` of theirs, of which nothing is unpickled."""
    core = core_of(model)
    fill_(core, weights_for_(core, checkpoint / "model"))


def pack_embeddings(
    model: nn.Module,
    batches: Iterable[Any],
    loss: dnis.Task | None = None,
    compression: float = 20.0,
    *,
    folder: Path | str | None = None,
    leave_alone: Collection[str] = (),
) -> Any:
    """Puts packed tables where a trained model has its collections, as their INT8 does.

    Args:
        model: theirs, filled, with or without a wrapper; changed in place.
        batches: theirs, of training data, with labels.
        loss: None takes the model's own losses.
        compression: bytes of the float32 tables over bytes served.
        folder: where to write the artifact; None writes none.
        leave_alone: names of tables to keep as they are.
    """
    core = core_of(model).eval()
    samples = [to_samples(batch) for batch in batches]
    options = {"compression": compression, "leave_alone": leave_alone}
    result = dnis.compress(core, samples, loss=loss or OfTheirs(core), **options)
    if folder is not None:
        dnis.export(core, result.scheme, folder)
    return result


def load_packed(model: nn.Module, folder: Path | str) -> nn.Module:
    """Fills a model, built anew, with an artifact of `pack_embeddings`."""
    dnis.load_model(core_of(model), folder)
    return model
