"""Tables as a model sees them, whoever serves them; what an id that is no row gives."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.nn.functional import pad
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops import batches
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
    def of(scheme: MixedDimensionScheme) -> "LogicalTables":
        """The logical tables of a scheme."""
        tables = list(scheme.tables.values())
        check(bool(tables), "scheme", "at least one table", "none")
        names = [table.name for table in tables]
        check(names == list(scheme.tables), "scheme", "every table under its own name", names)
        check_one_collection(tables)
        configs = [
            replace(torchrec_config(table, table.embedding_dim), name=table.table_name)
            for table in tables
        ]
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

    def positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Position of every feature among the keys of a batch."""
        position_of_key = {key: position for position, key in enumerate(features.keys())}
        for feature in self.features:
            check_known("feature", feature, position_of_key)
        return [position_of_key[feature] for feature in self.features]

    def weights_of(self, features: KeyedJaggedTensor) -> Tensor | None:
        """The per-sample weights, if the collection takes any."""
        weights = features.weights_or_none() if self.is_weighted else None
        fits = not self.is_weighted or weights is not None
        check(fits, "KeyedJaggedTensor", "per-sample weights", "none")
        return weights

    def batch_size_of(self, offsets: Tensor, weights: Tensor | None) -> int:
        """The batch size of bags given as plain tensors."""
        num_features = len(self.features)
        batch_size = (offsets.numel() - 1) // num_features
        if torch.compiler.is_compiling():  # sizes are symbols then, and a check would fix them
            return batch_size
        is_whole = offsets.dim() == 1 and offsets.numel() == num_features * batch_size + 1
        is_whole = is_whole and batch_size >= 0
        has_weights = weights is not None
        if is_whole and offsets.dtype in batches.INTEGERS and has_weights == self.is_weighted:
            return batch_size  # a lookup of one bag has no time for three checks
        requirement = f"{num_features} times the batch size and one more"
        actual = offsets.numel() if offsets.dim() == 1 else tuple(offsets.shape)
        check(is_whole, "offsets", requirement, actual)
        check(offsets.dtype in batches.INTEGERS, "offsets", "int32 or int64", offsets.dtype)
        value = "some" if weights is not None else "none"
        requirement = "some" if self.is_weighted else "none: the collection is not weighted"
        raise ValueError(describe("per_sample_weights", requirement, value))

    @property
    def is_mean(self) -> list[bool]:
        """Per feature whether its table is pooled by MEAN."""
        return [table.pooling == "mean" for table in self.tables]


def divide_means_(
    pooled_values: Tensor,
    features: KeyedJaggedTensor,
    names: list[str],
    dims: list[int],
    is_mean: list[bool],
) -> Tensor:
    """Divides the sums of MEAN tables by the length of the whole bag, as FBGEMM does also for
    weighted bags."""
    keys = features.keys()
    lengths, first = features.lengths().view(len(keys), -1), 0
    for index, name in enumerate(names):
        if is_mean[index]:
            divisors = lengths[keys.index(name)].clamp(min=1).unsqueeze(1)
            pooled_values.narrow(1, first, dims[index]).div_(divisors)
        first += dims[index]
    return pooled_values


def check_one_collection(tables: Sequence[TableScheme]) -> None:
    """Checks that a scheme is that of one collection, and that it is pooled."""
    owners = sorted({(table.collection, table.is_weighted) for table in tables})
    requirement = "the tables of one collection"
    first = owners[0][0] if owners else ""
    items = f"{{k: t for k, t in scheme.tables.items() if t.collection == {first!r}}}"
    remedy = f"take MixedDimensionScheme({items}), and so on"
    check(len(owners) == 1, "scheme", requirement, [name for name, _ in owners], remedy)
    for table in tables:
        place, is_pooled = f"table {table.name!r}", table.pooling != "none"
        remedy = "train its EmbeddingCollection whole, or serve it by a ServedEmbeddingCollection"
        check(is_pooled, place, "a table that is pooled", "none", remedy)


def torchrec_config(table: Any, embedding_dim: int) -> EmbeddingBagConfig:
    """A table, as a scheme or `NarrowTable` describes it, as TorchRec does."""
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
    batches.check_one_batch_size(features)
    keys, batch_size, weights = features.keys(), features.stride(), logical.weights_of(features)
    order, limits_of_keys = None, limits
    if keys != logical.features:
        order = torch.tensor(logical.positions(features), device=limits.device)
        no_limit = torch.full((len(keys),), torch.iinfo(torch.int64).max, device=limits.device)
        limits_of_keys = no_limit.scatter_reduce(0, order, limits, "amin")
    offsets = batches.offsets_of_rows(features, limits_of_keys)
    if offsets is None:
        batches.check_bags(features)
    # FBGEMM's operators take numbers for neighbours, whatever strides say
    ids = batches.integer_ids(features.values(), keys).long().contiguous()
    lengths = features.lengths().contiguous()
    if weights is not None:
        weights = weights.float().contiguous()
    if order is not None:
        by_key = lengths.view(len(keys), batch_size)
        lengths, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
            order.int(), by_key, ids, weights
        )
        lengths = lengths.view(-1)
    if offsets is None:
        counts = lengths.view(len(logical.features), batch_size).sum(dim=1)
        ids = _rows_of(ids, counts, logical, limits, unknown)
    return KeyedJaggedTensor(
        keys=logical.names,
        values=ids,
        weights=weights,
        lengths=lengths,
        offsets=offsets if order is None else None,
        stride=batch_size,
    )


def scripted_bags(
    features: KeyedJaggedTensor,
    keys: list[str],
    names: list[str],
    limits: Tensor,
    zero_unknown: bool,
    is_weighted: bool,
) -> KeyedJaggedTensor:
    """What `checked_bags` gives, of features `keys` with ids below `limits`, in TorchScript."""
    keys_of_batch, batch_size = features.keys(), features.stride()
    counts, weight = features.lengths(), features.weights_or_none()
    fits = weight is None or weight.numel() == features.values().numel()
    # FBGEMM reads what lengths say, be it there or not
    if not fits or bool((counts < 0).any()) or int(counts.sum()) != features.values().numel():
        raise ValueError("KeyedJaggedTensor: expected as many ids as lengths say, got others")
    order = [keys_of_batch.index(key) for key in keys]
    lengths, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
        torch.tensor(order, dtype=torch.int32, device=limits.device),
        features.lengths().view(len(keys_of_batch), batch_size),
        features.values().long().contiguous(),
        features.weights().float().contiguous() if is_weighted else None,
    )
    limit = torch.repeat_interleave(limits, lengths.sum(dim=1))
    is_row = (ids >= 0) & (ids < limit)
    if zero_unknown:
        ids = torch.where(is_row, ids, limit)
    elif not bool(is_row.all()):
        raise ValueError("KeyedJaggedTensor: expected ids of rows, got others")
    return KeyedJaggedTensor(
        keys=names, values=ids, weights=weights, lengths=lengths.view(-1), stride=batch_size
    )


def _rows_of(
    ids: Tensor, counts: Tensor, logical: LogicalTables, limits: Tensor, unknown: Tensor | None
) -> Tensor:
    """Ids of which `checked_bags` has to look at each; `counts` says how many every feature has."""
    limit = torch.repeat_interleave(limits, counts, output_size=ids.numel())
    is_row = (ids >= 0) & (ids < limit)
    if unknown is not None:
        unknown = torch.repeat_interleave(unknown, counts, output_size=ids.numel())
        return torch.where(is_row, ids, unknown)
    if torch.compiler.is_exporting():
        # AOTInductor leaves `_assert_async` out on a CPU, but not the check of a number
        torch._check((~is_row).sum().item() == 0)
    elif ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(is_row.all())
    elif not bool(is_row.all()):
        name_unknown_id(logical, ids.split(counts.tolist()))
    return ids


def name_unknown_id(logical: LogicalTables, ids: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Raises with table, feature and id if one of the ids is unknown."""
    for table, feature, of_feature in zip(logical.tables, logical.features, ids, strict=True):
        unknown = of_feature[(of_feature < 0) | (of_feature >= table.num_embeddings)]
        if unknown.numel():
            rows, place = table.num_embeddings, f"table {table.name!r}, feature {feature!r}"
            requirement = f"ids in 0..{rows - 1} (num_embeddings={rows})"
            remedy = "hash ids as before, or take unknown_ids='zero'"
            raise ValueError(describe(place, requirement, f"id {int(unknown[0])}", remedy))


def padded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags, and as many empty ones that every key has as many as any other."""
    strides = features.stride_per_key()
    most = max(strides)
    if features.inverse_indices_or_none() is None and min(strides) < most:
        raise NotImplementedError(
            "KeyedJaggedTensor: expected one batch size for all features, or inverse indices, "
            "got a batch size per feature; expand the bags to one per sample first"
        )
    rows = [pad(row, [0, most - row.numel()]) for row in features.lengths().split(strides)]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=torch.cat(rows),
        stride=most,
    )


def expanded(
    pooled_values: Tensor, dims: list[int], features: list[str], inverse: tuple[list[str], Tensor]
) -> Tensor:
    """Gives every sample the bag that its inverse index names, feature by feature."""
    names, indices = inverse
    parts = list(pooled_values.split(dims, dim=1))
    for index, feature in enumerate(features):
        parts[index] = parts[index].index_select(0, indices[names.index(feature)])
    return torch.cat(parts, dim=1)


class ServedCollection(nn.Module):
    """What served collections have in common, as a model around them sees it."""

    __jit_unused_properties__: ClassVar[list[str]] = ["device", "whole"]
    _CONTENT: ClassVar[tuple[str, ...]] = ()
    """Attributes that say what the tables hold. A call reads the last of them once."""

    content_id = ""
    """Of the artifact that the tables came from, deltas included."""
    sequence = 0
    """The number of deltas since the first artifact."""

    def take_content_(self, other: Self) -> None:
        """Serves what another collection of the same tables holds, from the next call on."""
        for name in self._CONTENT:
            setattr(self, name, getattr(other, name))

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        tensors = itertools.chain(self.parameters(), self.buffers())
        return next(tensors, torch.empty(0, device="cpu")).device

    @property
    def whole(self) -> Self:
        """This module itself: a graph of torch.fx of it alone calls it by this name."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name in ("embedding_bags", "embeddings"):
            place, remedy = type(self).__name__, "look rows up, or read the configs of the tables"
            requirement = f"no use of {name!r}, because no table is a float32 tensor of N rows"
            raise AttributeError(describe(place, requirement, "one", remedy))
        return super().__getattr__(name)

    def _traced(self, features: Proxy) -> Any:
        """One call of this module in a graph of torch.fx: checks of values cannot be traced."""
        tracer = cast(Tracer, features.tracer)
        path = tracer.path_of_module(self) or "whole"
        return tracer.create_proxy("call_module", path, (features,), {})


class LogicalCollection(ServedCollection, EmbeddingBagCollectionInterface):
    """A collection that a model sees as it was before pruning."""

    encoder = ""
    """The artifact's file that numbers raw ids anew, if it has one."""

    def __init__(self, scheme: MixedDimensionScheme, *, unknown_ids: str) -> None:
        super().__init__()
        check(unknown_ids in UNKNOWN_IDS, "unknown_ids", f"one of {UNKNOWN_IDS}", repr(unknown_ids))
        self._logical, self._zero_unknown = LogicalTables.of(scheme), unknown_ids == "zero"
        # plain lists, because TorchScript reads no dataclass
        self._features, self._names = self._logical.features, self._logical.names
        self._dims, self._is_weighted = self._logical.dims, self._logical.is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up; what is written here and in `_look_up` has to compile in TorchScript."""
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript compiles both sides of `and`
            if isinstance(features, Proxy):
                return self._traced_or_split(features)
        if features.values().device.type == "meta":  # FBGEMM's operators want values
            shape = (features.stride(), sum(self._dims))
            values = torch.empty(shape, device="meta")
            return KeyedTensor(keys=self._names, length_per_key=self._dims, values=values)
        inverse = features.inverse_indices_or_none()
        if inverse is None and not features.variable_stride_per_key():
            return self._look_up(features)
        if not torch.jit.is_scripting() and self._is_sharded():
            batches.check_one_batch_size(features)
        pooled_values = self._look_up(padded(features))
        if inverse is None:
            return pooled_values
        values = expanded(pooled_values.values(), self._dims, self._features, inverse)
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=values)

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up a batch in which every key has as many bags."""
        raise NotImplementedError

    def _is_sharded(self) -> bool:
        return any(hasattr(module, "input_dist") for module in self.modules())

    def _traced_or_split(self, features: Any) -> Any:
        """A train pipeline has to see sharded tables inside, so that this is no one call then."""
        return self._look_up(features) if self._is_sharded() else self._traced(features)

    def extra_repr(self) -> str:
        """A line for each table, and whose ids it takes where they are not the raw ones."""
        tables = {table.name: table for table in self._logical.tables}
        lines = [
            f"{table.table_name}: {table.num_embeddings:,} rows of {table.embedding_dim}, "
            f"{self.bytes_of_table(name):,} bytes"
            for name, table in tables.items()
        ]
        if self.encoder:
            lines.append(f"ids are rows that {self.encoder} numbers; see load_predictor")
        return "\n".join(lines)

    def schemes(self) -> dict[str, TableScheme]:
        """The scheme of every table, by name."""
        return {table.name: table for table in self._logical.tables}

    def bytes_of_table(self, name: str) -> int:
        """Bytes of one table, with the index that says where its values are."""
        raise NotImplementedError

    def table_bytes(self) -> int:
        """Bytes of all tables that this process holds."""
        return sum(self.bytes_of_table(name) for name in self.schemes())

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The logical tables: N rows of D, as before pruning; what DLRM and its like read."""
        return self._logical.configs

    def is_weighted(self) -> bool:
        """Returns whether bags carry per-sample weights."""
        return self._logical.is_weighted


MEAN = "mean"
"""The way to treat unknown ids that this module adds to those of `logical_tables.UNKNOWN_IDS`."""
ROWS_OF_A_BAG = 1 << 8
"""Rows that are added up in float32; the sums of bags are added up in float64."""
BAGS_AT_A_TIME = 1 << 8


class MeanForUnknownIds(LogicalCollection):
    """Looks bags up as another collection does; an unknown id adds the mean of its table's coldest
    rows."""

    _CONTENT: ClassVar[tuple[str, ...]] = ("_logical", "_buffers", "_modules")

    limits: Tensor
    means: Tensor

    def __init__(self, scheme: MixedDimensionScheme, collection: LogicalCollection) -> None:
        super().__init__(scheme, unknown_ids="zero")
        requirement = "one in which unknown ids contribute zero"
        remedy = "build it with unknown_ids='zero'"
        check(collection._zero_unknown, "collection", requirement, "an error", remedy)
        self.collection = collection
        device = collection.device
        self.register_buffer("limits", self._logical.limits().to(device), persistent=False)
        of_table = {name: self._mean_of(table, device) for name, table in scheme.tables.items()}
        means = torch.cat([of_table[table.name] for table in self._logical.tables])
        self.register_buffer("means", means)
        self._is_mean = self._logical.is_mean

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if torch.jit.is_scripting():
            limits, is_weighted = self.limits, self._is_weighted
            bags = scripted_bags(features, self._features, self._names, limits, True, is_weighted)
        else:
            bags = checked_bags(features, self._logical, self.limits, self.limits)
        output: KeyedTensor = self.collection(features)
        pooled_values = output.values()
        lengths, ids, weights = bags.lengths().long(), bags.values(), bags.weights_or_none()
        per_bag = lengths.view(len(self._names), bags.stride())
        limits = torch.repeat_interleave(self.limits, per_bag.sum(1), output_size=ids.numel())
        is_unknown = ids == limits
        share = is_unknown.to(pooled_values.dtype) if weights is None else is_unknown * weights
        bag_of_id = torch.repeat_interleave(lengths, output_size=ids.numel())
        sums = share.new_zeros(lengths.numel()).index_add_(0, bag_of_id, share)
        shares, first = sums.view_as(per_bag), 0
        for position, dim in enumerate(self._dims):
            share = shares[position]
            if self._is_mean[position]:
                share = share / per_bag[position].clamp(min=1)
            pooled_values.narrow(1, first, dim).addr_(share, self.means.narrow(0, first, dim))
            first += dim
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=pooled_values)

    def bytes_of_table(self, name: str) -> int:
        """Bytes of one table, with the index that says where its values are."""
        return self.collection.bytes_of_table(name)

    @torch.no_grad()
    def _mean_of(self, table: TableScheme, device: torch.device) -> Tensor:
        """m of a table, ``(D,)``."""
        total = torch.zeros(table.embedding_dim, dtype=torch.float64)
        last = table.retained.any(dim=1).nonzero()[-1:]  # none where no block retains a column
        num_rows = int(table.routing.row_counts()[last].sum())
        if not num_rows:
            return total.float().to(device)
        for rows, blocks in table.routing.blocks_of_all():
            cold = rows.start + (blocks == last[0]).nonzero().squeeze(1)
            for ids in cold.split(ROWS_OF_A_BAG * BAGS_AT_A_TIME):
                total += self._sum_of(table, ids.to(device)).cpu()
        return (total / num_rows).float().to(device)

    def _sum_of(self, table: TableScheme, ids: Tensor) -> Tensor:
        """The sum of some rows, in bags of the first feature that reads the table; all other
        features have no ids."""
        logical = self._logical
        position = [part.name for part in logical.tables].index(table.name)
        lengths = torch.tensor([len(bag) for bag in ids.split(ROWS_OF_A_BAG)], device=ids.device)
        keys = list(dict.fromkeys(logical.features))
        of_keys = [
            lengths if key == logical.features[position] else torch.zeros_like(lengths)
            for key in keys
        ]
        weights = torch.ones(len(ids), device=ids.device) if self.is_weighted() else None
        bags = KeyedJaggedTensor(keys, ids, weights, torch.cat(of_keys), stride=len(lengths))
        pooled_values = cast(KeyedTensor, self.collection(bags)).values()
        first = logical.first_columns[position]
        sums = pooled_values.narrow(1, first, table.embedding_dim).double()
        return (sums * lengths.unsqueeze(1) if table.pooling == "mean" else sums).sum(0)
