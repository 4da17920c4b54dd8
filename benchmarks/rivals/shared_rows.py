"""Tables of fewer rows, which several ids share: by hashing alone, or told apart by a second table
of quotients (Shi et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from benchmarks.rivals.rows import round_rows_, rows_bytes
from benchmarks.rivals.task import Served, Task, UnmetError, check_pooled, largest_scale, train
from dnis_torchrec.ops.batches import jagged_by_key
from dnis_torchrec.selection.shards import collections
from dnis_torchrec.selection.swap import replace_

QUOTIENT = "_quotient"
"""What a table of quotients has behind the name of the table of remainders."""
Partitions = Mapping[str, tuple[int, int]]
"""Table -> rows of remainders, and of quotients, 0 where there are none."""


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
    partition_(recipe.model, rows)
    model, _ = train(task, recipe)
    round_rows_(model, task.precision)
    num_bytes = rows_bytes(short_tables(task.tables(), rows), task.precision)
    return Served(model=model, num_bytes=num_bytes, settings={k: sum(v) for k, v in rows.items()})


def partitions(task: Task, *, has_quotients: bool) -> dict[str, tuple[int, int]]:
    """Rows of every table: one share of all of them, the largest within the bytes."""
    tables = task.tables()

    def at(share: float) -> dict[str, tuple[int, int]]:
        return {t.name: _rows(t.num_embeddings, share, has_quotients) for t in tables}

    def num_bytes(share: float) -> int:
        return rows_bytes(short_tables(tables, at(share)), task.precision)

    return at(largest_scale(num_bytes, task.num_bytes, 1.0))


def _rows(whole: int, share: float, has_quotients: bool) -> tuple[int, int]:
    # Fewer remainders than the root of N would want more quotients than they save.
    least = math.ceil(math.sqrt(whole)) if has_quotients else 1
    remainders = min(whole, max(least, math.floor(share * whole)))
    quotients = -(-whole // remainders) if has_quotients and remainders < whole else 0
    return (remainders, quotients) if remainders + quotients < whole else (whole, 0)


def short_tables(tables: list[EmbeddingBagConfig], rows: Partitions) -> list[EmbeddingBagConfig]:
    """The tables that take the place of a model's own; their features are those of `ShareRows`."""
    return [
        replace(
            table,
            name=f"{table.name}{suffix}",
            num_embeddings=number,
            feature_names=[f"{f}@{table.name}{suffix}" for f in table.feature_names],
        )
        for table in tables
        for suffix, number in zip(("", QUOTIENT), rows[table.name], strict=True)
        if number
    ]


def partition_(model: nn.Module, rows: Partitions) -> None:
    """Puts `ShortTables` in the place of every EmbeddingBagCollection of a model."""
    for collection in collections(model).values():
        replace_(model, collection, ShortTables(collection, rows))


class ShareRows(nn.Module):
    """Rewrites ids as rows of short tables: a key per table of remainders and of quotients that a
    feature reads. A module of its own, which TorchRec's tracer takes whole."""

    def __init__(self, reads: Mapping[str, tuple[str, int, bool]]) -> None:
        super().__init__()
        self._reads = dict(reads)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Rewrites a batch."""
        bags, weights = jagged_by_key(features), features.weights_or_none()
        bags_of_keys = [bags[feature] for feature, _, _ in self._reads.values()]
        ids = [
            bag.values() // rows if is_quotient else bag.values() % rows
            for bag, (_, rows, is_quotient) in zip(bags_of_keys, self._reads.values(), strict=True)
        ]
        return KeyedJaggedTensor(
            keys=list(self._reads),
            values=torch.cat(ids),
            lengths=torch.cat([bag.lengths() for bag in bags_of_keys]),
            weights=None if weights is None else torch.cat([b.weights() for b in bags_of_keys]),
            stride=features.stride(),
        )


class ShortTables(EmbeddingBagCollectionInterface):
    """Looks bags up in tables of fewer rows than there are ids."""

    def __init__(self, collection: EmbeddingBagCollection, rows: Partitions) -> None:
        super().__init__()
        self._tables = list(collection.embedding_bag_configs())
        self._is_weighted = collection.is_weighted()
        outputs = [(table, feature) for table in self._tables for feature in table.feature_names]
        reads, factors = {}, {}
        for name, (table, feature) in zip(collection._embedding_names, outputs, strict=True):
            remainders, quotients = rows[table.name]
            factors[name] = [f"{feature}@{table.name}"]
            reads[factors[name][0]] = (feature, remainders, False)
            if quotients:
                factors[name].append(f"{feature}@{table.name}{QUOTIENT}")
                reads[factors[name][1]] = (feature, remainders, True)
        self.share_rows = ShareRows(reads)
        short, device = short_tables(self._tables, rows), collection.device
        self.tables = EmbeddingBagCollection(short, is_weighted=self._is_weighted, device=device)
        self.multiply = Multiply(factors)
        bags = self.tables.embedding_bags
        for name, bag in collection.embedding_bags.items():
            bags[name].weight.data.copy_(bag.weight.data[: rows[name][0]])
            if rows[name][1]:
                bags[f"{name}{QUOTIENT}"].weight.data.fill_(1.0)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up."""
        return self.multiply(self.tables(self.share_rows(features)))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the collection that this one takes the place of."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether bags carry weights of samples."""
        return self._is_weighted


class Multiply(nn.Module):
    """Multiplies sums of remainders by sums of quotients."""

    def __init__(self, factors: Mapping[str, list[str]]) -> None:
        super().__init__()
        self._factors = dict(factors)

    def forward(self, pooled: KeyedTensor) -> KeyedTensor:
        """Multiplies."""
        by_key, products = pooled.to_dict(), []
        for keys in self._factors.values():
            first, *others = (by_key[key] for key in keys)
            products.append(first * others[0] if others else first)
        return KeyedTensor(
            keys=list(self._factors),
            length_per_key=[product.shape[1] for product in products],
            values=torch.cat(products, dim=1),
        )
