"""Schemes made from pruned tables: they say what the tables retain, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.search.pruning.tables import PrunedTable
from dnis_torchrec.selection.shards import collections, is_weighted, table_configs_of


@torch.no_grad()
def scheme_of(
    tables: list[PrunedTable], retained: Mapping[str, Tensor], ranks: Ranks
) -> MixedDimensionScheme:
    """The scheme of pruned tables."""
    schemes = {}
    for table in tables:
        has_values, num_values = _nonzero_rows_and_values(table, ranks)
        routing = _without_empty_rows(table.routing, has_values, retained[table.name])
        columns = retained[table.name] & (routing.row_counts() > 0).unsqueeze(1)
        structured = int((routing.row_counts() * columns.sum(1)).sum())
        config = table.config
        schemes[table.name] = TableScheme(
            name=table.name,
            collection=table.collection,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            pooling=config.pooling.value.lower(),
            feature_names=tuple(config.feature_names),
            is_weighted=table.is_weighted,
            routing=routing,
            retained=columns,
            num_retained=min(num_values, structured),
        )
    return MixedDimensionScheme(schemes)


def uncompressed_scheme(model: nn.Module) -> MixedDimensionScheme:
    """The scheme of tables of which everything is retained, all rows in one block. Local, no
    collective."""
    schemes = {}
    for fqn, collection in collections(model).items():
        for config in table_configs_of(collection):
            boundaries = torch.tensor([0, config.num_embeddings])
            schemes[config.name] = TableScheme(
                name=config.name,
                collection=fqn,
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                pooling=config.pooling.value.lower(),
                feature_names=tuple(config.feature_names),
                is_weighted=is_weighted(collection),
                routing=RowRouting(config.num_embeddings, 1, boundaries=boundaries),
                retained=torch.ones(1, config.embedding_dim, dtype=torch.bool),
                num_retained=config.num_embeddings * config.embedding_dim,
            )
    return MixedDimensionScheme(schemes)


def _nonzero_rows_and_values(table: PrunedTable, ranks: Ranks) -> tuple[Tensor, int]:
    """(which rows hold a value that is not zero, ``(N,)`` bool; how many such values there are),
    over all ranks."""
    has_values = torch.zeros(table.config.num_embeddings, dtype=torch.uint8)
    num_values = torch.zeros(1, dtype=torch.int64)
    for chunk, rows, _ in table.counted_chunks():
        has_values[rows] |= (chunk != 0).any(dim=1).cpu()
        num_values += int(chunk.count_nonzero())
    return ranks.max_(has_values).bool(), int(ranks.sum_(num_values))


def _without_empty_rows(routing: RowRouting, has_values: Tensor, retained: Tensor) -> RowRouting:
    """Drops rows that hold nothing, unless the id remap that this takes costs more than their
    zeros."""
    dropped = routing.without_rows(~has_values)
    if routing.boundaries is None or dropped.boundaries is not None:
        return dropped
    end = len(has_values) - int(has_values.flip(0).byte().argmax())
    tail = torch.zeros_like(has_values)
    tail[end:] = True
    trimmed = routing.without_rows(tail)
    saved = (trimmed.row_counts() - dropped.row_counts()) @ retained.sum(1)
    return dropped if int(saved) > routing.num_embeddings else trimmed
