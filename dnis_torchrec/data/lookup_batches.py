"""Batches as lookups take them: ids as int32 or int64, weights as float32, whatever the data holds
them in."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import check_ids_are_integers
from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import CutBatches, WholeBatch
from dnis_torchrec.data.split_checks import NO_EMPTY_BATCHES, SOME_SAMPLES, parts_of

ID_TYPES = (torch.int64, torch.int32)


class LookupBatches(CutBatches):
    """The batches of a stream that is learned on, each as `for_lookup` gives it. Local."""

    def __init__(self, batches: Iterable[Batch], name: str) -> None:
        super().__init__(batches)
        self._name = name

    def __iter__(self) -> Iterator[Batch]:
        """The batches."""
        for index, batch in enumerate(self._batches):
            check(
                len(batch.labels) > 0,
                f"{self._name} batch {index}",
                SOME_SAMPLES,
                "none",
                NO_EMPTY_BATCHES,
            )
            yield for_lookup(batch)


def for_lookup(batch: Batch) -> Batch:
    """A batch whose ids and weights are of types that kernels take; the batch itself where they are
    so already."""
    if type(batch) is Batch and batch.dense_features is None:
        batch = WholeBatch(batch.dense_features, batch.sparse_features, batch.labels)
    bags = _bags_of(batch)
    ready = {name: features_for_lookup(part) for name, part in bags.items()}
    if all(ready[name] is bags[name] for name in bags):
        return batch
    converted = copy.copy(batch)  # whatever its __init__ wants
    for name, part in ready.items():
        setattr(converted, name, part)
    return converted


def with_ids_counted(batch: Batch) -> Batch:
    """A batch that knows, on the CPU, how many ids each feature has: it needs not ask the GPU that
    it goes to."""
    for part in _bags_of(batch).values() if hasattr(batch, "__dict__") else ():
        if part.keys() and part.values().device.type == "cpu":
            part.sync()
    return batch


def features_of(batch: Batch) -> KeyedJaggedTensor:
    """All bags of a batch in one KeyedJaggedTensor; of several of them without the weights of their
    ids."""
    bags = list(_bags_of(batch).values())
    if len(bags) == 1:
        return bags[0]
    keys = [key for part in bags for key in part.keys()]  # noqa: SIM118
    twice = sorted({key for key in keys if keys.count(key) > 1})
    check(
        not twice,
        "batch",
        "features in one KeyedJaggedTensor each",
        twice,
        "give them names of their own",
    )
    bare = (
        KeyedJaggedTensor(own.keys(), own.values(), lengths=own.lengths(), stride=own.stride())
        for own in bags
    )
    return KeyedJaggedTensor.concat(list(bare))


def _bags_of(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {
        name: part for name, part in parts_of(batch).items() if isinstance(part, KeyedJaggedTensor)
    }


def features_for_lookup(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Bags whose ids and weights are of types that kernels take; `features` itself where they are
    so already."""
    ids, weights = features.values(), features.weights_or_none()
    if not features.keys() or (
        ids.dtype in ID_TYPES and (weights is None or weights.dtype == torch.float32)
    ):
        return features
    check_ids_are_integers(ids, f"features {', '.join(map(repr, features.keys()))}")
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids if ids.dtype in ID_TYPES else ids.long(),
        weights=None if weights is None else weights.float(),
        lengths=features.lengths(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
