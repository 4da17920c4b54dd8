"""Batches: samples in memory, batches cut and made ready for lookups, and their checks."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import check_ids_are_integers
from dnis_torchrec.checks import check, describe

SPLIT_RATIOS = (0.8, 0.05, 0.05, 0.1)
"""train, validation, selection, test: 8:1:1, with the middle part halved between the upper level
and early stopping."""
CLEAN = "clean the data"
_B = TypeVar("_B", bound=Any)
_IDS_FOR_LOOKUP = (torch.int64, torch.int32)


@dataclasses.dataclass
class WholeBatch(Batch):
    """A batch that moves with all of its fields; TorchRec's own has three, none of them missing."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch on a device."""
        return _changed(self, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory."""
        return _changed(self, lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until the stream has passed."""
        _changed(self, lambda part: part.record_stream(stream))


@dataclasses.dataclass
class RankingBatch(WholeBatch):
    """Candidates to be ranked within their queries: their split is judged by ranking metrics."""

    queries: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Bags:
    """The bags of one multi-hot feature for all samples, in CSR form."""

    values: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        """How many ids each bag has."""
        return self.offsets.diff()

    @classmethod
    def of_lengths(cls, values: Tensor, lengths: Tensor) -> Bags:
        """Bags one after the other, by how many ids each has."""
        return cls(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))

    def select(self, rows: Tensor) -> Bags:
        """The bags of some samples."""
        starts = self.offsets.index_select(0, rows)
        lengths = self.offsets.index_select(0, rows + 1) - starts
        bags = Bags.of_lengths(self.values, lengths)
        total = int(bags.offsets[-1])
        shift = torch.repeat_interleave(starts - bags.offsets[:-1], lengths, output_size=total)
        return Bags(self.values.index_select(0, shift + torch.arange(total)), bags.offsets)


def features_of_samples(
    keys: Sequence[str], ids: Tensor, bags: Sequence[Bags], scalars: Tensor | None = None
) -> KeyedJaggedTensor:
    """Ids of one each, ``(B, F)``, then bags, then scalars as weighted bags."""
    batch_size, num_single = ids.shape
    num_scalars = 0 if scalars is None else scalars.shape[1]
    ones = torch.ones(batch_size, dtype=torch.int64)
    lengths = [ones] * num_single + [bag.lengths for bag in bags] + [ones] * num_scalars
    sizes = [batch_size] * num_single + [len(bag.values) for bag in bags]
    values = [ids.t().reshape(-1).long(), *(bag.values.long() for bag in bags)]
    values.append(torch.arange(num_scalars).repeat_interleave(batch_size))
    weights = None
    if scalars is not None:
        weights = torch.cat([torch.ones(sum(sizes)), scalars.t().reshape(-1)])
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat(values),
        weights=weights,
        lengths=torch.cat(lengths),
        stride=batch_size,
        length_per_key=sizes + [batch_size] * num_scalars,
    )


def split_rows(
    num_samples: int, *, seed: int, group_size: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cuts samples at random into train, validation, selection and test, by `SPLIT_RATIOS`."""
    number = num_samples // group_size
    check(number >= 20, "split_rows", "at least 20 samples, or groups, for four splits", number)
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    sizes = [int(ratio * number) for ratio in SPLIT_RATIOS[1:]]
    train, validation, selection, test = (
        (part.sort().values.unsqueeze(1) * group_size + torch.arange(group_size)).flatten()
        for part in order.split([number - sum(sizes), *sizes])
    )
    return train, validation, selection, test


class InMemoryBatches:
    """Batches of a data set in memory; each iteration is the next epoch."""

    def __init__(
        self,
        dense: Tensor,
        ids: Tensor,
        labels: Tensor,
        *,
        feature_names: Sequence[str],
        batch_size: int,
        shuffle: bool,
        seed: int,
        multi_hot: Mapping[str, Bags] | None = None,
        scalar_names: Sequence[str] = (),
        queries: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        place, num_samples, bags = "InMemoryBatches", len(labels), dict(multi_hot or {})
        check(batch_size >= 1, f"{place}.batch_size", "an integer >= 1", batch_size)
        keys = [*feature_names, *bags, *scalar_names]
        self._dense, self._ids, self._labels = dense.float(), ids, labels.float()
        self._bags, self._keys, self._queries = tuple(bags.values()), keys, queries
        self._has_scalars = bool(scalar_names)
        self.rows = torch.arange(num_samples) if rows is None else rows
        self._batch_size, self._shuffle, self._seed, self.epoch = batch_size, shuffle, seed, 0
        check(len(self) > 0, place, "at least one batch", f"{self.rows.numel()} samples")

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.rows.numel() // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = self.rows
        if self._shuffle:
            # Torch's CPU generator reads 32 bits of a seed: both numbers go into these.
            seed = int(np.random.SeedSequence((self._seed, self.epoch)).generate_state(1)[0])
            generator = torch.Generator().manual_seed(seed)
            order = order[torch.randperm(order.numel(), generator=generator)]
        self.epoch += 1
        return (self._batch(rows) for rows in order.split(self._batch_size))

    def in_order(self) -> InMemoryBatches:
        """Batches of all samples of the data set, as they stand: a stream where that is by time."""
        batches = copy.copy(self)
        batches.rows, batches._shuffle = torch.arange(len(self._labels)), False
        return batches

    def rows_of_tables(self) -> dict[str, Tensor]:
        """Feature -> the ids that all samples together look up."""
        features = self._batch(self.rows).sparse_features
        return {name: bag.values() for name, bag in features.to_dict().items()}

    def _batch(self, rows: Tensor) -> Batch:
        dense, labels = self._dense.index_select(0, rows), self._labels.index_select(0, rows)
        bags = [of_feature.select(rows) for of_feature in self._bags]
        scalars = dense if self._has_scalars else None
        features = features_of_samples(self._keys, self._ids.index_select(0, rows), bags, scalars)
        if self._queries is None:
            return Batch(dense, features, labels)
        return RankingBatch(dense, features, labels, self._queries.index_select(0, rows))


class CutBatches:
    """Batches that are cut out of others, which say what epoch it is."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches: Any = batches
        # whether they are this rank's already, see `data.over_ranks`
        self.is_split_over_ranks = getattr(batches, "is_split_over_ranks", False)

    @property
    def epoch(self) -> int:
        """Number of the next epoch, where the batches count them; set it to resume."""
        return self._batches.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        """Sets it in the batches."""
        self._batches.epoch = epoch


class LookupBatches(CutBatches):
    """The batches of a stream that is learned on, each as `for_lookup` gives it. Local."""

    def __init__(self, batches: Iterable[Batch], name: str) -> None:
        super().__init__(batches)
        self._name = name

    def __iter__(self) -> Iterator[Batch]:
        """The batches."""
        for index, batch in enumerate(self._batches):
            check_not_empty(batch, f"{self._name} batch {index}")
            yield for_lookup(batch)


class BatchParts(CutBatches):
    """The batches of a stream, each cut into so many parts of equal size, give or take a sample."""

    def __init__(self, batches: Iterable[Batch], num_parts: int, at_least: int = 1) -> None:
        super().__init__(batches)
        self._num_parts, self._at_least = num_parts, at_least

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            size = batch.sparse_features.stride()
            num_parts = min(self._num_parts, size // self._at_least)
            if num_parts < 2:
                yield batch
                continue
            bounds = torch.linspace(0, size, num_parts + 1).round().long().tolist()
            for first, last in itertools.pairwise(bounds):
                yield slice_of(batch, first, last)


def slice_of(batch: Batch, first: int, last: int) -> Batch:
    """Samples ``first <= i < last`` of a batch."""
    if not dataclasses.is_dataclass(batch):
        raise TypeError(describe("batch", "a dataclass, as Batch is", type(batch).__name__))
    cut = slice(first, last)
    return _changed(batch, lambda p: p[cut] if isinstance(p, Tensor) else _slice_features(p, cut))


def samples_where(batch: Batch, keeps: Tensor) -> Batch:
    """The samples of a batch for which a bool of each says so."""

    def samples_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[keeps]
        bags, lengths = keeps.repeat(len(part.keys())), part.lengths()
        ids, weights = bags.repeat_interleave(lengths), part.weights_or_none()
        weights = None if weights is None else weights[ids]
        parts = {"values": part.values()[ids], "weights": weights, "lengths": lengths[bags]}
        return KeyedJaggedTensor(keys=part.keys(), **parts, stride=int(keeps.sum()))

    return _changed(batch, samples_of)


def _changed(batch: _B, change: Callable[[Any], Any]) -> _B:
    """A dataclass with what becomes of each of its tensors and KeyedJaggedTensors."""
    kinds, parts = (Tensor, KeyedJaggedTensor), parts_of(batch)
    parts = {name: change(part) for name, part in parts.items() if isinstance(part, kinds)}
    return dataclasses.replace(batch, **parts)


def _slice_features(features: KeyedJaggedTensor, cut: slice) -> KeyedJaggedTensor:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise NotImplementedError(describe("batch", "supported is one batch size", "several"))
    num_features, stride = len(features.keys()), features.stride()
    starts, offsets = torch.arange(num_features) * stride, features.offsets().cpu()
    bounds = offsets[starts + cut.start].tolist(), offsets[starts + cut.stop].tolist()
    spans = [slice(*pair) for pair in zip(*bounds, strict=True)]
    values, weights = features.values(), features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat([values[span] for span in spans]),
        weights=None if weights is None else torch.cat([weights[span] for span in spans]),
        # Of one sample it would be a view, which no collective takes.
        lengths=features.lengths().view(num_features, stride)[:, cut].reshape(-1).contiguous(),
        stride=cut.stop - cut.start,
    )


def for_lookup(batch: Batch) -> Batch:
    """A batch whose ids and weights are of types that kernels take; itself where they are so."""
    if type(batch) is Batch and batch.dense_features is None:
        batch = WholeBatch(batch.dense_features, batch.sparse_features, batch.labels)
    bags = {name: _features_for_lookup(part) for name, part in _bags_of(batch).items()}
    if all(part is getattr(batch, name) for name, part in bags.items()):
        return batch
    batch = copy.copy(batch)  # whatever its __init__ wants
    for name, part in bags.items():
        setattr(batch, name, part)
    return batch


def _features_for_lookup(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    ids, weights = features.values(), features.weights_or_none()
    is_ready = ids.dtype in _IDS_FOR_LOOKUP and (weights is None or weights.dtype == torch.float32)
    if not features.keys() or is_ready:
        return features
    check_ids_are_integers(ids, f"features {', '.join(map(repr, features.keys()))}")
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=ids if ids.dtype in _IDS_FOR_LOOKUP else ids.long(),
        weights=None if weights is None else weights.float(),
        lengths=features.lengths(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def features_of(batch: Batch) -> KeyedJaggedTensor:
    """All bags of a batch in one KeyedJaggedTensor; of several without the weights of their ids."""
    fields = ("dense_features", "sparse_features", "labels")
    bags = list(_bags_of(batch).values()) if all(hasattr(batch, name) for name in fields) else []
    if not bags:
        requirement = "tensors as its dense_features, sparse_features and labels"
        remedy = "make torchrec's Batch of it, or a WholeBatch: see docs/models.md"
        raise TypeError(describe("batch", requirement, type(batch).__name__, remedy))
    if len(bags) == 1:
        return bags[0]
    keys = [key for part in bags for key in part.keys()]  # noqa: SIM118
    twice = sorted({key for key in keys if keys.count(key) > 1})
    check(not twice, "batch", "features in one KeyedJaggedTensor each", twice)
    parts = [
        KeyedJaggedTensor(part.keys(), part.values(), lengths=part.lengths(), stride=part.stride())
        for part in bags
    ]
    return KeyedJaggedTensor.concat(parts)


def parts_of(batch: Any) -> dict[str, Any]:
    """The fields of a batch by name."""
    if not dataclasses.is_dataclass(batch):
        return dict(vars(batch))
    return {part.name: getattr(batch, part.name) for part in dataclasses.fields(batch) if part.init}


def _bags_of(batch: Batch) -> dict[str, KeyedJaggedTensor]:
    return {n: part for n, part in parts_of(batch).items() if isinstance(part, KeyedJaggedTensor)}


def check_not_empty(batch: Batch, place: str) -> None:
    """Checks that a batch has samples."""
    check(len(batch.labels) > 0, place, "at least one sample", "none", "leave empty batches out")


def check_batch(batch: Batch, place: str) -> None:
    """Checks a batch before training: ids and lengths that lookups take, finite numbers."""
    labels: object = getattr(batch, "labels", None)
    shape = tuple(labels.shape) if isinstance(labels, Tensor) else ()
    check(bool(shape), f"{place}, labels", "a tensor with a row a sample", shape or "none")
    check_not_empty(batch, place)
    num_labels, remedy = shape[0], "leave incomplete samples out"
    requirement = f"{num_labels} samples, one for each label"
    features, dense = batch.sparse_features, batch.dense_features
    has_keys = isinstance(features, KeyedJaggedTensor) and bool(features.keys())
    if has_keys and not features.variable_stride_per_key():
        stride, lengths = features.stride(), features.lengths_or_none()
        check(stride == num_labels, f"{place}, sparse_features", requirement, stride, remedy)
        kind = torch.int64 if lengths is None else lengths.dtype
        where = f"{place}, feature {features.keys()[0]!r}"
        check(kind in _IDS_FOR_LOOKUP, where, "int32 or int64 lengths", kind)
    if isinstance(dense, Tensor) and dense.dim():
        is_fit = dense.numel() % num_labels == 0
        check(is_fit, f"{place}, dense_features", requirement, len(dense), remedy)
    for name, value in parts_of(batch).items():
        if isinstance(value, KeyedJaggedTensor):
            where = f"{place}, feature {value.keys()[0]!r}" if value.keys() else place
            check_ids_are_integers(value.values(), where)
            weights = value.weights_or_none()
            if weights is not None and not _is_finite(weights):
                first = int((~weights.isfinite()).nonzero()[0])
                key = value.keys()[bisect.bisect_right(value.offset_per_key(), first) - 1]
                where = f"{place}, feature {key!r}"
                raise ValueError(describe(where, "finite weights", float(weights[first]), CLEAN))
        elif isinstance(value, Tensor) and name != "labels" and not _is_finite(value):
            at = (~value.isfinite()).nonzero()[0].tolist()
            columns = "".join(f", column {column}" for column in at[1:])
            where = f"{place}, {name}, sample {at[0]}{columns}"
            raise ValueError(describe(where, "finite numbers", float(value[tuple(at)]), CLEAN))


def _is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())
