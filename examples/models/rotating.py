"""Rotation of the tables of models whose embeddings go into a tower side by side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.axes import LinearReader, RotationGroup


def groups_of_tower(tables: Sequence[EmbeddingBagConfig], tower: nn.Module) -> list[RotationGroup]:
    """A group for each table, read by the first linear layer of a tower.

    Args:
        tables: whose pooled features are the tower's inputs, one after the other.
        tower: a module that begins with its first linear layer.
    """
    first = next(module for module in tower.modules() if isinstance(module, nn.Linear))
    groups, column = [], 0
    for table in tables:
        readers = []
        for _ in table.feature_names:
            readers.append(LinearReader(weight=first.weight, first_column=column))
            column += table.embedding_dim
        groups.append(RotationGroup(tables=(table.name,), readers={table.name: tuple(readers)}))
    return groups


def joined(groups: Sequence[RotationGroup]) -> RotationGroup:
    """One group of all tables, for those that also meet in dot products.

    Args:
        groups: as `groups_of_tower` gives them, of distinct tables.

    Returns:
        A group with the readers of all of them.
    """
    readers = {table: own for group in groups for table, own in group.readers.items()}
    return RotationGroup(tables=tuple(readers), readers=readers)
