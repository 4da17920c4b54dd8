"""The tables to prune, as one rank knows them: its own shards, and facts about the others that all
ranks know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts, RowCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import (
    TableShard,
    check_merged,
    collections,
    is_weighted,
    local_shards,
    num_copies,
    ranks_of,
    table_configs_of,
)


@dataclass(frozen=True, eq=False)
class PrunedTable:
    """One table to prune."""

    config: EmbeddingBagConfig
    collection: str
    is_weighted: bool
    routing: RowRouting
    counts: RowCounts
    shards: tuple[TableShard, ...]
    counted: tuple[TableShard, ...]

    @property
    def name(self) -> str:
        """Table name."""
        return self.config.name

    @property
    def num_values(self) -> int:
        """N times D, over all ranks."""
        return self.config.num_embeddings * self.config.embedding_dim

    def chunks(self) -> Iterator[tuple[Tensor, slice, slice]]:
        """Every value that this rank holds, a few rows at a time (see `TableShard.chunks`)."""
        for shard in self.shards:
            yield from shard.chunks()

    def counted_chunks(self) -> Iterator[tuple[Tensor, slice, slice]]:
        """Every value that this rank counts: over all ranks, each value of the table once."""
        for shard in self.counted:
            yield from shard.chunks()

    def blocks_of(self, rows: slice) -> Tensor:
        """Blocks of some rows, int64; S for "no block"."""
        return self.routing.block_of(torch.arange(rows.start, rows.stop))


def pruned_tables(
    model: nn.Module, blocks: RowBlocks, counts: FrequencyCounts
) -> tuple[list[PrunedTable], Ranks]:
    """The tables of a merged model that have blocks, in its table order, and the ranks that hold
    them."""
    found = collections(model)
    check(bool(found), "prune", "a model with an embedding collection", type(model).__name__)
    blocked = {
        fqn: module
        for fqn, module in found.items()
        if any(config.name in blocks.routings for config in table_configs_of(module))
    }
    chosen = blocked or found  # blocks of another model: the loop names the unknown table
    ranks = ranks_of(*chosen.values())
    for fqn, module in chosen.items():
        check_merged(fqn, module, ranks)
    configs = [
        (fqn, config) for fqn, module in chosen.items() for config in table_configs_of(module)
    ]
    for _, config in configs:
        check_known("table", config.name, blocks.routings)
        check_known("table", config.name, counts.counts)
    local = {config.name: _shards_of(config.name, chosen[fqn]) for fqn, config in configs}
    shapes = {config.name: (config.num_embeddings, config.embedding_dim) for _, config in configs}
    copies = num_copies(local, shapes, ranks)
    tables = [
        PrunedTable(
            config=config,
            collection=fqn,
            is_weighted=is_weighted(chosen[fqn]),
            routing=blocks.routings[config.name],
            counts=counts.counts[config.name],
            shards=local[config.name],
            counted=local[config.name] if copies[config.name] == 1 or ranks.is_first else (),
        )
        for fqn, config in configs
    ]
    _check_finite(tables, ranks)
    return tables, ranks


@torch.no_grad()
def zero_never_seen_(tables: list[PrunedTable]) -> None:
    """Zeroes the rows that training never looked up. Local, no collective."""
    for table in tables:
        for chunk, rows, _ in table.chunks():
            chunk[(table.counts[rows] == 0).to(chunk.device)] = 0


def _shards_of(table: str, collection: nn.Module) -> tuple[TableShard, ...]:
    return tuple(shard for shard in local_shards(collection) if shard.table == table)


def _check_finite(tables: list[PrunedTable], ranks: Ranks) -> None:
    bad = torch.zeros(len(tables), dtype=torch.int64)
    for index, table in enumerate(tables):
        bad[index] = sum(1 for chunk, _, _ in table.chunks() if not bool(chunk.isfinite().all()))
    ranks.max_(bad)
    for table, count in zip(tables, bad.tolist(), strict=True):
        remedy = "go back to the last good checkpoint"
        check(count == 0, f"table {table.name!r}", "finite values", "NaN or infinity", remedy)
