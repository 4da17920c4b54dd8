"""Short tables, whose rows several ids share: by hashing alone, or told apart by a second table of
quotients (Shi et al. 2020)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks.rivals.rows import round_rows_, rows_bytes
from benchmarks.rivals.task import Served, Task, UnmetError, check_pooled, largest_scale, shards_of, train
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.selection.swap import replace_


@dataclass(frozen=True, eq=False)
class ShortTable:
    """A table of fewer rows than there are ids."""

    rows: Tensor
    rows_of: nn.Module  # ids -> rows
    index_bytes: int = 0  # that it reads for that


Parts = Sequence[Sequence[ShortTable]]
"""For every part of a table's columns the short tables whose rows are added up, or multiplied."""


class RowOf(nn.Module):
    """The row of an id is its remainder, or its quotient."""

    def __init__(self, divisor: int, *, is_quotient: bool = False) -> None:
        super().__init__()
        self._divisor, self._is_quotient = divisor, is_quotient

    def forward(self, ids: Tensor) -> Tensor:
        """Rows."""
        return ids // self._divisor if self._is_quotient else ids % self._divisor


class ShareRows(nn.Module):
    """Rewrites ids as rows of short tables: a key for every short table that a feature reads. A module
    of its own, which TorchRec's tracer takes whole."""

    def __init__(self, reads: Mapping[str, tuple[str, str]], rows_of: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._reads, self.rows_of = dict(reads), nn.ModuleDict(rows_of)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Rewrites a batch."""
        bags, weights = jagged_by_key(features), features.weights_or_none()
        bags_of_keys = [bags[feature] for feature, _ in self._reads.values()]
        names = [name for _, name in self._reads.values()]
        ids = [self.rows_of[name](bag.values()) for name, bag in zip(names, bags_of_keys, strict=True)]
        return KeyedJaggedTensor(
            keys=list(self._reads),
            values=torch.cat(ids),
            lengths=torch.cat([bag.lengths() for bag in bags_of_keys]),
            weights=None if weights is None else torch.cat([b.weights() for b in bags_of_keys]),
            stride=features.stride(),
        )


def short_name(table: str, part: int, index: int) -> str:
    """The name of a short table."""
    return f"{table}_part{part}_{index}"


class Substitute(EmbeddingBagCollectionInterface):
    """A collection that takes the place of another: its configs are those of that one."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self._tables, self._is_weighted = collection.embedding_bag_configs(), collection.is_weighted()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the tables that are gone."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether bags carry weights of samples."""
        return self._is_weighted


class ShortTables(Substitute):
    """Looks bags up in short tables; `combine` makes one of the sums of those of a part."""

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        parts: Mapping[str, Parts],
        combine: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(collection)
        self.short = {
            short_name(table.name, part, index): (table, short)
            for table in self._tables
            for part, shorts in enumerate(parts[table.name])
            for index, short in enumerate(shorts)
        }
        reads, configs = {}, []
        for name, (table, short) in self.short.items():
            keys = {f"{feature}@{name}": (feature, name) for feature in table.feature_names}
            number, width = short.rows.shape
            reads |= keys
            configs.append(
                replace(table, name=name, num_embeddings=number, embedding_dim=width, feature_names=list(keys))
            )
        self.share_rows = ShareRows(reads, {name: short.rows_of for name, (_, short) in self.short.items()})
        self.tables = EmbeddingBagCollection(configs, is_weighted=self._is_weighted, device=collection.device)
        for name, bag in self.tables.embedding_bags.items():
            bag.weight.data.copy_(self.short[name][1].rows)
        outputs = [(table, feature) for table in self._tables for feature in table.feature_names]
        keys_of = {
            output: [
                [f"{feature}@{short_name(table.name, part, index)}" for index in range(len(shorts))]
                for part, shorts in enumerate(parts[table.name])
            ]
            for output, (table, feature) in zip(collection._embedding_names, outputs, strict=True)
        }
        self.compose = Compose(keys_of, combine)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        return self.compose(self.tables(self.share_rows(features)))


def side_by_side(keys: list[str], outputs: list[Tensor]) -> KeyedTensor:
    """What a collection of bags gives back."""
    return KeyedTensor(keys, [output.shape[1] for output in outputs], torch.cat(outputs, dim=1))


class Compose(nn.Module):
    """Combines the sums of every part of the columns, and puts the parts side by side."""

    def __init__(self, keys_of: Mapping[str, list[list[str]]], combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._keys_of, self._combine = dict(keys_of), combine

    def forward(self, pooled: KeyedTensor) -> KeyedTensor:
        """Composes."""
        by_key, outputs = pooled.to_dict(), []
        for parts in self._keys_of.values():
            of_parts = []
            for first, *others in parts:
                part = by_key[first]
                for key in others:
                    part = self._combine(part, by_key[key])
                of_parts.append(part)
            outputs.append(torch.cat(of_parts, dim=1))
        return side_by_side(list(self._keys_of), outputs)


def shorten_(
    model: nn.Module, parts: Mapping[str, Parts], combine: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> None:
    """Puts `ShortTables` in the place of every EmbeddingBagCollection of a model."""
    for collection in collections(model).values():
        replace_(model, collection, ShortTables(collection, parts, combine))


def table_bytes(num_rows: int, width: int, precision: str) -> int:
    """Bytes of a table's rows."""
    table = EmbeddingBagConfig(name="t", num_embeddings=num_rows, embedding_dim=width, feature_names=["f"])
    return rows_bytes([table], precision)


def short_bytes(parts: Mapping[str, Parts], precision: str) -> int:
    """Bytes of short tables, and of what finds their rows."""
    shorts = [short for of_table in parts.values() for part in of_table for short in part]
    return sum(table_bytes(*short.rows.shape, precision) + short.index_bytes for short in shorts)


def hash_rows(task: Task) -> Served:
    """Every table with the same share of its rows, an id in row ``id mod m``."""
    return _train(task, has_quotients=False)


def quotient_remainder(task: Task) -> Served:
    """The same, times a row of a second table that tells the ids of a row apart."""
    model = task.build(None).model
    if any(module.is_weighted() for module in collections(model).values()):
        raise UnmetError("bags with weights of samples are not supported")
    return _train(task, has_quotients=True)


def _train(task: Task, *, has_quotients: bool) -> Served:
    recipe = task.build(None)
    check_pooled(recipe.model)
    rows = partitions(task, has_quotients=has_quotients)
    parts = {shard.table: partition(shard.weight.detach(), *rows[shard.table]) for shard in shards_of(recipe.model)}
    shorten_(recipe.model, parts, torch.mul)
    model, _ = train(task, recipe)
    round_rows_(model, task.precision)
    num_bytes = short_bytes(parts, task.precision)
    return Served(model=model, num_bytes=num_bytes, settings={k: sum(v) for k, v in rows.items()})


def partition(weight: Tensor, remainders: int, quotients: int) -> Parts:
    """The first rows of a table, and quotients of one."""
    short = [ShortTable(weight[:remainders], RowOf(remainders))]
    if quotients:
        ones = torch.ones(quotients, weight.shape[1])
        short.append(ShortTable(ones, RowOf(remainders, is_quotient=True)))
    return [short]


def partitions(task: Task, *, has_quotients: bool) -> dict[str, tuple[int, int]]:
    """Rows of remainders and of quotients: one share of every table's, the largest within the bytes."""
    tables = task.tables()

    def at(share: float) -> dict[str, tuple[int, int]]:
        return {t.name: _rows(t.num_embeddings, share, has_quotients) for t in tables}

    def num_bytes(share: float) -> int:
        rows = at(share)
        return sum(table_bytes(sum(rows[t.name]), t.embedding_dim, task.precision) for t in tables)

    return at(largest_scale(num_bytes, task.num_bytes, 1.0))


def _rows(whole: int, share: float, has_quotients: bool) -> tuple[int, int]:
    # Fewer remainders than the root of N would want more quotients than they save.
    least = math.ceil(math.sqrt(whole)) if has_quotients else 1
    remainders = min(whole, max(least, math.floor(share * whole)))
    quotients = -(-whole // remainders) if has_quotients and remainders < whole else 0
    return (remainders, quotients) if remainders + quotients < whole else (whole, 0)
