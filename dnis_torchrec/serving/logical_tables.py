"""LogicalTables, LogicalCollection: tables as a model sees them, and who serves them, whatever form
they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ops.batches import (
    INTEGERS,
    check_bags,
    check_one_batch_size,
    integer_ids,
    named,
    offsets_of_rows,
    readable_bags,
)
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

UNKNOWN_IDS = ("error", "zero")
"""Ways to treat an id that is no row of its table: an error, or a vector of zeros."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogicalTables:
    """The tables of ONE collection, and who reads them, in TorchRec's order."""

    configs: list[EmbeddingBagConfig]
    tables: list[TableScheme]
    features: list[str]
    names: list[str]
    is_weighted: bool

    @staticmethod
    def of(scheme: MixedDimensionScheme) -> LogicalTables:
        """The logical tables of a scheme."""
        tables = list(scheme.tables.values())
        check(bool(tables), "scheme", "at least one table", "none")
        owners = sorted({(table.collection, table.is_weighted) for table in tables})
        remedy = "build one module for each collection"
        check(
            len(owners) == 1,
            "scheme",
            "the tables of one collection",
            [name for name, _ in owners],
            remedy,
        )
        remedy = "serve it by a ServedEmbeddingCollection"
        for table in tables:
            check(
                table.pooling != "none",
                f"table {table.name!r}",
                "a table that is pooled",
                "none",
                remedy,
            )
        configs = [torchrec_config(table, table.embedding_dim) for table in tables]
        return LogicalTables(
            configs=configs,
            tables=[table for table in tables for _ in table.feature_names],
            features=[feature for table in tables for feature in table.feature_names],
            names=[name for names in get_embedding_names_by_table(configs) for name in names],
            is_weighted=tables[0].is_weighted,
        )

    @property
    def dims(self) -> list[int]:
        """Per feature D."""
        return [table.embedding_dim for table in self.tables]

    @property
    def first_columns(self) -> list[int]:
        """Per feature its first column of the output."""
        return [sum(self.dims[:index]) for index in range(len(self.dims))]

    def limits(self) -> Tensor:
        """Per feature N: ``(F,)`` int64."""
        return torch.tensor([table.num_embeddings for table in self.tables], dtype=torch.int64)

    def keyed(self, pooled: Tensor) -> KeyedTensor:
        """The output of a lookup, ``(B, sum of D over features)``, by key."""
        return KeyedTensor(keys=self.names, length_per_key=self.dims, values=pooled)

    def positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Position of every feature among the keys of a batch."""
        position_of_key = {key: position for position, key in enumerate(features.keys())}
        for feature in self.features:
            check_known("feature", feature, position_of_key)
        return [position_of_key[feature] for feature in self.features]

    def weights_of(self, features: KeyedJaggedTensor) -> Tensor | None:
        """The per-sample weights, if the collection takes any."""
        weights = features.weights_or_none() if self.is_weighted else None
        check(
            not self.is_weighted or weights is not None,
            "KeyedJaggedTensor",
            "per-sample weights",
            "none",
        )
        return weights

    def batch_size_of(self, offsets: Tensor, weights: Tensor | None) -> int:
        """The batch size of bags given as plain tensors."""
        num_features = len(self.features)
        batch_size = (offsets.numel() - 1) // num_features
        if torch.compiler.is_compiling():  # sizes are symbols then, and a check would fix them
            return batch_size
        is_whole = (
            offsets.dim() == 1
            and offsets.numel() == num_features * batch_size + 1
            and batch_size >= 0
        )
        if (
            not is_whole
            or offsets.dtype not in INTEGERS
            or (weights is not None) != self.is_weighted
        ):
            self._refuse_plain(offsets, weights, is_whole=is_whole)
        return batch_size

    def _refuse_plain(self, offsets: Tensor, weights: Tensor | None, *, is_whole: bool) -> None:
        """Says what is wrong with bags given as plain tensors: a lookup of one bag has no time for
        three checks."""
        requirement = f"{len(self.features)} times the batch size and one more"
        check(
            is_whole,
            "offsets",
            requirement,
            offsets.numel() if offsets.dim() == 1 else tuple(offsets.shape),
        )
        check(offsets.dtype in INTEGERS, "offsets", "int32 or int64", offsets.dtype)
        given = "some" if weights is not None else "none"
        requirement = "some" if self.is_weighted else "none: the collection is not weighted"
        check(False, "per_sample_weights", requirement, given)

    def divide_means_(self, pooled: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """Divides the sums of MEAN tables by the length of the whole bag, as FBGEMM does also for
        weighted bags."""
        if all(table.pooling == "sum" for table in self.tables):
            return pooled
        lengths = features.lengths().view(len(features.keys()), -1)
        for table, first, key in zip(
            self.tables, self.first_columns, self.positions(features), strict=True
        ):
            if table.pooling == "mean":
                pooled.narrow(1, first, table.embedding_dim).div_(
                    lengths[key].clamp(min=1).unsqueeze(1)
                )
        return pooled


def check_num_bags(names: list[str], offsets: Tensor, batch_size: int) -> None:
    """Checks that a batch has as many bags as its batch size and its keys say."""
    # a batch size that is a symbol would be fixed by looking at it
    if type(batch_size) is int and offsets.numel() != len(names) * batch_size + 1:
        check(
            False,
            named(names),
            f"{len(names) * batch_size} lengths, one for each bag",
            max(offsets.numel() - 1, 0),
        )


class _Table(Protocol):
    """A table as schemes and narrow tables describe it."""

    @property
    def name(self) -> str:
        """Name of the table."""

    @property
    def num_embeddings(self) -> int:
        """N."""

    @property
    def feature_names(self) -> Sequence[str]:
        """Features that read it."""

    @property
    def pooling(self) -> str:
        """``"sum"`` or ``"mean"``."""


def torchrec_config(table: _Table, embedding_dim: int) -> EmbeddingBagConfig:
    """A table as TorchRec describes it."""
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=embedding_dim,
        feature_names=list(table.feature_names),
        pooling=PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM,
    )


def checked_bags(
    features: KeyedJaggedTensor, logical: LogicalTables, limits: Tensor, unknown: Tensor | None
) -> KeyedJaggedTensor:
    """The bags that a collection reads, in its order, with int64 ids that stand for rows."""
    check_one_batch_size(features)
    keys, batch_size, weights = features.keys(), features.stride(), logical.weights_of(features)
    order, limits_of_keys = None, limits
    if keys != logical.features:
        order = torch.tensor(logical.positions(features), device=limits.device)
        unlimited = torch.full((len(keys),), torch.iinfo(torch.int64).max, device=limits.device)
        limits_of_keys = unlimited.scatter_reduce(0, order, limits, "amin")
    offsets = offsets_of_rows(features, limits_of_keys)
    if offsets is None:
        check_bags(features)
    # FBGEMM's operators take numbers for neighbours, whatever strides say
    ids, lengths = (
        integer_ids(features.values(), keys).long().contiguous(),
        features.lengths().contiguous(),
    )
    if weights is not None:
        weights = weights.float().contiguous()
    if order is not None:
        by_key = lengths.view(len(keys), batch_size)
        lengths, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
            order.int(), by_key, ids, weights
        )
        lengths = lengths.view(-1)
    if offsets is None:
        ids = _rows_of(
            ids,
            lengths.view(len(logical.features), batch_size).sum(dim=1),
            logical,
            limits,
            unknown,
        )
    return KeyedJaggedTensor(
        keys=logical.names,
        values=ids,
        weights=weights,
        lengths=lengths,
        offsets=offsets if order is None else None,
        stride=batch_size,
    )


def _rows_of(
    ids: Tensor, counts: Tensor, logical: LogicalTables, limits: Tensor, unknown: Tensor | None
) -> Tensor:
    """Ids of which `checked_bags` has to look at each; `counts` says how many every feature has."""
    limit = torch.repeat_interleave(limits, counts, output_size=ids.numel())
    is_row = (ids >= 0) & (ids < limit)
    if unknown is not None:
        return torch.where(
            is_row, ids, torch.repeat_interleave(unknown, counts, output_size=ids.numel())
        )
    if ids.device.type != "cpu":
        torch._assert_async(is_row.all())
    elif not bool(is_row.all()):
        name_unknown_id(logical, ids.split(counts.tolist()))
    return ids


def name_unknown_id(logical: LogicalTables, ids: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Raises with table, feature and id if one of the ids is unknown."""
    for table, feature, of_feature in zip(logical.tables, logical.features, ids, strict=True):
        unknown = of_feature[(of_feature < 0) | (of_feature >= table.num_embeddings)]
        requirement = (
            f"ids in 0..{table.num_embeddings - 1} (num_embeddings={table.num_embeddings})"
        )
        place, remedy = (
            f"table {table.name!r}, feature {feature!r}",
            "hash ids as before, or take unknown_ids='zero'",
        )
        if unknown.numel():
            check(False, place, requirement, f"id {int(unknown[0])}", remedy)


class LogicalCollection(EmbeddingBagCollectionInterface):
    """A collection that a model sees as it was before pruning."""

    def __init__(self, scheme: MixedDimensionScheme, *, unknown_ids: str) -> None:
        super().__init__()
        check(unknown_ids in UNKNOWN_IDS, "unknown_ids", f"one of {UNKNOWN_IDS}", repr(unknown_ids))
        self._logical, self._zero_unknown = LogicalTables.of(scheme), unknown_ids == "zero"

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Looks bags up. In a graph of torch.fx it is one call of this module: checks of values
        cannot be traced."""
        tracer = next(
            (value.tracer for value in (*inputs, *named.values()) if isinstance(value, Proxy)), None
        )
        if tracer is None or any(hasattr(module, "input_dist") for module in self.modules()):
            return super().__call__(*inputs, **named)
        return tracer.create_proxy(
            "call_module", cast(Tracer, tracer).path_of_module(self), inputs, named
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The logical tables: N rows of D, as before pruning; what DLRM and its like read."""
        return self._logical.configs

    def is_weighted(self) -> bool:
        """Returns whether bags carry per-sample weights."""
        return self._logical.is_weighted


class OperatorCollection(LogicalCollection):
    """A collection whose lookups one compiled operator does, which checks ids and offsets on its
    way."""

    def _of_batch(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings of a batch whose keys may stand in any order, ``(B, sum of D over
        features)``."""
        logical = self._logical
        names = features.keys()
        keys = None if names == logical.features else logical.positions(features)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            check_one_batch_size(features)  # says why this is refused
        weights, offsets, batch_size = (
            logical.weights_of(features),
            features.offsets(),
            features.stride(),
        )
        if keys is not None:  # else the operator sees that there are as many as features
            check_num_bags(names, offsets, batch_size)
        return self._pooled(features.values(), offsets, weights, keys, batch_size, names)

    def _pooled(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
        names: list[str],
    ) -> Tensor:
        """Pooled embeddings; bags that the operator does not read as they came are made readable,
        or refused."""
        try:
            return self._by_operator(ids, offsets, weights, keys, batch_size)
        except ValueError:
            check_num_bags(names, offsets, batch_size)
            taken = readable_bags(names, ids, offsets, weights)
            if taken[0] is not ids or taken[1] is not weights:
                return self._pooled(taken[0], offsets, taken[1], keys, batch_size, names)
            if not self._zero_unknown:
                positions = range(len(self._logical.features)) if keys is None else keys
                bounds = [
                    (int(offsets[key * batch_size]), int(offsets[(key + 1) * batch_size]))
                    for key in positions
                ]
                name_unknown_id(self._logical, [ids[first:last] for first, last in bounds])
            raise

    def _by_operator(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
    ) -> Tensor:
        raise NotImplementedError
