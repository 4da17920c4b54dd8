"""Checks of every batch of every split while the data is read before training: no batch is empty,
no value not finite."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import check_ids_are_integers
from dnis_torchrec.checks import check, describe

CLEAN = "clean the data"
SOME_SAMPLES, NO_EMPTY_BATCHES = "at least one sample", "leave empty batches out"


def check_batch(batch: Batch, place: str) -> None:
    """Checks that a batch has samples, and that its dense features and the weights of its ids are
    finite."""
    check(len(batch.labels) > 0, place, SOME_SAMPLES, "none", NO_EMPTY_BATCHES)
    _check_num_samples(batch, place)
    for name, value in parts_of(batch).items():
        if isinstance(value, KeyedJaggedTensor):
            check_ids_are_integers(
                value.values(), f"{place}, feature {value.keys()[0]!r}" if value.keys() else place
            )
            _check_weights(value, place)
        elif isinstance(value, Tensor) and name != "labels" and not _is_finite(value):
            sample, *column = (~value.isfinite()).nonzero()[0].tolist()
            at = f"{place}, {name}, sample {sample}" + "".join(
                f", column {index}" for index in column
            )
            raise ValueError(describe(at, "finite numbers", float(value[sample, *column]), CLEAN))


def _check_num_samples(batch: Any, place: str) -> None:
    """Checks that there is one label for each sample, and that lengths are of a type that lookups
    take."""
    features, dense, num_labels = batch.sparse_features, batch.dense_features, len(batch.labels)
    requirement, remedy = (
        f"{num_labels} samples, one for each label",
        "leave incomplete samples out",
    )
    if (
        isinstance(features, KeyedJaggedTensor)
        and features.keys()
        and not features.variable_stride_per_key()
    ):
        check(
            features.stride() == num_labels,
            f"{place}, sparse_features",
            requirement,
            features.stride(),
            remedy,
        )
        lengths = features.lengths_or_none()
        kind = torch.int64 if lengths is None else lengths.dtype
        place_of_first = f"{place}, feature {features.keys()[0]!r}"
        check(kind in (torch.int32, torch.int64), place_of_first, "int32 or int64 lengths", kind)
    if isinstance(dense, Tensor) and dense.dim():
        check(
            dense.numel() % num_labels == 0,
            f"{place}, dense_features",
            requirement,
            len(dense),
            remedy,
        )


def parts_of(batch: Batch) -> dict[str, Any]:
    """Returns the fields of a batch by name."""
    if dataclasses.is_dataclass(batch):
        return {part.name: getattr(batch, part.name) for part in dataclasses.fields(batch)}
    return dict(vars(batch))


def _check_weights(features: KeyedJaggedTensor, place: str) -> None:
    weights = features.weights_or_none()
    if weights is None or _is_finite(weights):
        return
    first = int((~weights.isfinite()).nonzero()[0])
    feature = features.keys()[bisect.bisect_right(features.offset_per_key(), first) - 1]
    place = f"{place}, feature {feature!r}"
    raise ValueError(describe(place, "finite weights", float(weights[first]), CLEAN))


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())
