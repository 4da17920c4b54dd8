"""Embedding tables of the recipes.

Shapes: D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.checks import check

SCALARS = "scalars"
"""Name of the table of the scalar features."""


def build_tables(
    num_embeddings: Mapping[str, int],
    embedding_dim: int,
    *,
    init_std: float = 0.01,
    scalar_names: Sequence[str] = (),
    device: torch.device | None = None,
) -> EmbeddingBagCollection:
    """One table per feature, all of the same D, with SUM pooling and normal initial weights.

    Args:
        num_embeddings: feature -> rows of its table, which takes the feature's name.
        embedding_dim: D.
        init_std: standard deviation of the initial weights.
        scalar_names: scalar features, given as weighted bags: one row each in the table ``"scalars"``, the bag's weight
            being the value. With any of them the whole collection is weighted (ids by 1).
        device: where to put them, the CPU if None. On "meta" they take no memory until they are sharded, which
            initialises them.

    Raises:
        ValueError: if `embedding_dim` is below 1.

    Example:
        >>> build_tables({"user": 5, "movie": 3}, 4).embedding_bags["movie"].weight.shape
        torch.Size([3, 4])
        >>> weighted = build_tables({"user": 5}, 4, scalar_names=("age", "income"))
        >>> weighted.is_weighted(), weighted.embedding_bags["scalars"].weight.shape
        (True, torch.Size([2, 4]))
    """
    tables = [_table(name, [name], rows, embedding_dim, init_std) for name, rows in num_embeddings.items()]
    if scalar_names:
        tables.append(_table(SCALARS, list(scalar_names), len(scalar_names), embedding_dim, init_std))
    return EmbeddingBagCollection(tables=tables, is_weighted=bool(scalar_names), device=device)


def build_neumf_tables(
    num_embeddings: Mapping[str, int], embedding_dim: int, *, init_std: float = 0.01
) -> EmbeddingBagCollection:
    """The four tables of NeuMF in one collection: a pair of D for its GMF, a pair of 4 D for its MLP.

    Args:
        num_embeddings: two features -> rows of their tables.
        embedding_dim: D.
        init_std: standard deviation of the initial weights.

    Raises:
        ValueError: if `embedding_dim` is below 1.

    Example:
        >>> [(table.name, table.embedding_dim) for table in
        ...     build_neumf_tables({"user": 5, "item": 3}, 2).embedding_bag_configs()]
        [('gmf_user', 2), ('gmf_item', 2), ('mlp_user', 8), ('mlp_item', 8)]
    """
    parts = (("gmf", embedding_dim), ("mlp", 4 * embedding_dim))
    return EmbeddingBagCollection(
        tables=[
            _table(f"{part}_{name}", [name], rows, dim, init_std)
            for part, dim in parts
            for name, rows in num_embeddings.items()
        ]
    )


def _table(name: str, features: list[str], rows: int, embedding_dim: int, init_std: float) -> EmbeddingBagConfig:
    check(embedding_dim >= 1, "embedding_dim", "an integer >= 1", embedding_dim)
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=embedding_dim,
        num_embeddings=rows,
        feature_names=features,
        init_fn=partial(nn.init.normal_, std=init_std),
    )


def network_of_seed(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Builds a model with initial weights of a seed, and leaves torch's generator as it was.

    Args:
        build: makes the model.
        seed: of its weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
