"""CCE (Tsang and Ahle 2023): every id points at a row of a table of clusters and of a helper table,
part by part of the columns. Both begin as hashed tables; between epochs k-means finds clusters of
their sums, and the helper begins anew, at zero and under another hash."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.rivals import shared_rows
from benchmarks.rivals.product_quantisation import Pointers, k_means, pointer_bytes
from benchmarks.rivals.rows import TRAINED_MULTIPLE, round_rows_
from benchmarks.rivals.shared_rows import Parts, RowOf, ShortTable, ShortTables, short_name, table_bytes
from benchmarks.rivals.task import (
    Served,
    Task,
    best_of,
    check_pooled,
    counts_of,
    largest_scale,
    plain,
    shards_of,
    train,
)

PARTS = (1, 2, 4)
"""Of the columns."""
CLUSTERINGS = 3
"""Spread evenly over as many epochs as plain training takes."""


def cce(task: Task) -> Served:
    """The best of one, two and four parts."""
    check_pooled(task.build(None).model)
    dims = [table.embedding_dim for table in task.tables()]
    fits = [parts for parts in PARTS if all(dim % (TRAINED_MULTIPLE * parts) == 0 for dim in dims)]
    return best_of(task, [partial(_train, task, parts, most_rows(task, parts)) for parts in fits])


def most_rows(task: Task, parts: int) -> int:
    """The most rows of a table of clusters within the task's bytes, the same for all tables."""
    tables = task.tables()

    def num_bytes(scale: float) -> int:
        return sum(_bytes(table, parts, max(1, int(scale)), task.precision) for table in tables)

    return max(1, int(largest_scale(num_bytes, task.num_bytes, max(t.num_embeddings for t in tables))))


def _is_whole(num_ids: int, rows: int) -> bool:
    """Whether a table stays as it is: it has no more rows than what would take its place."""
    return num_ids <= 2 * rows


def _bytes(table: EmbeddingBagConfig, parts: int, rows: int, precision: str) -> int:
    if _is_whole(table.num_embeddings, rows):
        return table_bytes(table.num_embeddings, table.embedding_dim, precision)
    of_part = table_bytes(2 * rows, table.embedding_dim // parts, precision)
    return parts * (of_part + pointer_bytes(table.num_embeddings, rows))


def hashed(weight: Tensor, parts: int, rows: int, generator: torch.Generator) -> Parts:
    """A table at the beginning: clusters by a hash, helpers of zero, whose hash takes no bytes."""
    num_ids, dim = weight.shape
    if _is_whole(num_ids, rows):
        return [[ShortTable(weight, RowOf(num_ids))]]
    num_bytes = pointer_bytes(num_ids, rows)
    return [
        [
            ShortTable(part[:rows], Pointers(torch.randint(rows, (num_ids,), generator=generator)), num_bytes),
            ShortTable(torch.zeros_like(part[:rows]), Pointers(torch.randint(rows, (num_ids,), generator=generator))),
        ]
        for part in weight.split(dim // parts, dim=1)
    ]


@torch.no_grad()
def cluster_(tables: ShortTables, is_read: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """Finds clusters of what ids have learnt. Rows that training never reads have no say."""
    rows_of, bags = tables.share_rows.rows_of, tables.tables.embedding_bags
    for table in tables.embedding_bag_configs():
        ids, part = torch.arange(table.num_embeddings), 0
        while (helper := short_name(table.name, part, 1)) in bags:
            clusters, part = short_name(table.name, part, 0), part + 1
            rows = sum(bags[name].weight[rows_of[name](ids)] for name in (clusters, helper))
            centres, pointers = k_means(rows, is_read[table.name], bags[clusters].num_embeddings, generator)
            bags[clusters].weight[: len(centres)] = centres
            rows_of[clusters].pointers.copy_(pointers)
            bags[helper].weight.zero_()
            rows_of[helper].pointers.random_(0, bags[helper].num_embeddings, generator=generator)


def _train(task: Task, parts: int, rows: int) -> Served:
    generator, counts, recipe = torch.Generator().manual_seed(task.seed), counts_of(task), task.build(None)
    weights = {shard.table: shard.weight.detach() for shard in shards_of(recipe.model)}
    is_read = {table: 1 - counts.never_seen(table).float() for table in weights}
    short = {table: hashed(weight, parts, rows, generator) for table, weight in weights.items()}
    model: nn.Module = recipe.model
    shared_rows.shorten_(model, short)
    epochs = max(1, (plain(task)[1] + 1) // (CLUSTERINGS + 1))
    for _ in range(CLUSTERINGS):
        part = replace(task, max_epochs=epochs, with_validation=False)
        model = train(part, replace(task.build(None), model=model))[0].cpu()
        for tables in (module for module in model.modules() if isinstance(module, ShortTables)):
            cluster_(tables, is_read, generator)
    model, _ = train(task, replace(task.build(None), model=model), starts_trained=True)
    round_rows_(model, task.precision)
    return Served(
        model=model, num_bytes=shared_rows.short_bytes(short, task.precision), settings={"parts": parts, "rows": rows}
    )
