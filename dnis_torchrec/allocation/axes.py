"""Axes: tables of a model that may be turned, and the layers that turn with them, so that no
prediction changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from dnis_torchrec.checks import check, check_known


@dataclass(frozen=True, kw_only=True)
class LinearReader:
    """Columns of a linear layer that read one embedding."""

    weight: Tensor
    first_column: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightedProduct:
    """Columns of a linear layer with one output that read the product of two embeddings, column by
    column."""

    weight: Tensor
    first_column: int = 0


@dataclass(frozen=True, kw_only=True)
class RotationGroup:
    """Tables of equal embedding_dim that may be rotated, all by the same matrix."""

    tables: tuple[str, ...]
    readers: Mapping[str, tuple[LinearReader, ...]] = field(default_factory=dict)
    product: WeightedProduct | None = None
    along: tuple[LinearReader, ...] = ()

    def turning(self) -> list[LinearReader]:
        """All columns that turn with the tables."""
        return [*(reader for readers in self.readers.values() for reader in readers), *self.along]

    def layers(self) -> list[Tensor]:
        """Weights of everything that turns with the tables, or weighs their product."""
        layers = [columns.weight for columns in self.turning()]
        return layers if self.product is None else [*layers, self.product.weight]


@runtime_checkable
class Rotatable(Protocol):
    """A model that says which of its tables may be rotated."""

    def rotation_groups(self) -> Sequence[RotationGroup]:
        """Groups of tables; a table is in one of them at most."""


def check_groups(groups: Sequence[RotationGroup], embedding_dims: Mapping[str, int]) -> None:
    """Checks that groups fit a model and each other. Local, no collective."""
    named = [table for group in groups for table in group.tables]
    twice = sorted({table for table in named if named.count(table) > 1})
    check(not twice, "rotation groups", "every table in one group at most", twice)
    for group in groups:
        _check_group(group, embedding_dims)


def _check_group(group: RotationGroup, embedding_dims: Mapping[str, int]) -> None:
    place = f"rotation group {group.tables}"
    for table in group.tables:
        check_known("table", table, embedding_dims)
    dims = {embedding_dims[table] for table in group.tables}
    check(
        len(dims) == 1, place, "tables of one embedding_dim", sorted(dims), "make a group for each"
    )
    for table, readers in group.readers.items():
        check(table in group.tables, place, "readers of its own tables", repr(table))
        for reader in readers:
            _check_width(reader, max(dims), f"{place}, reader of {table!r}")
    for columns in group.along:
        _check_width(columns, max(dims), f"{place}, along")
    if group.product is not None:
        is_pair = len(group.tables) == 2 and not group.turning()
        check(is_pair, place, "two tables without readers beside a product", list(group.tables))
        outputs = group.product.weight.shape[0]
        check(outputs == 1, f"{place}, product", "a layer with one output", outputs)
        _check_width(group.product, max(dims), f"{place}, product")


def _check_width(columns: LinearReader | WeightedProduct, dim: int, place: str) -> None:
    wanted, inputs = columns.first_column + dim, columns.weight.shape[1]
    check(inputs >= wanted, place, f"at least {wanted} inputs", inputs)
