"""The paper's blocks: the rows of all tables of one embedding_dim, cut together, share alpha."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting


class GlobalBlocks(RowBlocks):
    """Row blocks in which tables of one embedding_dim have the same rows of alpha."""

    def first_alpha_row(self, table: str) -> int:
        """0 for every table."""
        return 0


def global_blocks(counts: FrequencyCounts, tables: Sequence[EmbeddingBagConfig], num_blocks: int = 10) -> GlobalBlocks:
    """Cuts the rows of all tables of one embedding_dim, sorted together, into blocks of equal size."""
    exact = {table.name: counts.counts[table.name].long() for table in tables}
    routings, occurrences, seen_rows = {}, {}, {}
    for dim in dict.fromkeys(table.embedding_dim for table in tables):
        names = [table.name for table in tables if table.embedding_dim == dim]
        together = torch.cat([exact[name] for name in names])
        places = torch.empty(len(together), dtype=torch.int64)
        places[together.argsort(descending=True, stable=True)] = torch.arange(len(together))
        starts = torch.unique(torch.arange(num_blocks) * len(together) // num_blocks)
        blocks = torch.searchsorted(starts, places, right=True) - 1
        sizes = [len(exact[name]) for name in names]
        for name, block in zip(names, blocks.split(sizes), strict=True):
            rows, count = torch.bincount(block, minlength=len(starts)), exact[name]
            occurrences[name] = torch.zeros(len(starts), dtype=torch.int64)
            occurrences[name].index_add_(0, block, count)
            seen_rows[name] = torch.bincount(block[count > 0], minlength=len(starts))
            in_order = bool((block * 2 + (count == 0)).diff().ge(0).all())
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
            routings[name] = (
                RowRouting(len(block), len(starts), boundaries=ends)
                if in_order
                else RowRouting.from_map(block, len(starts))
            )
    return GlobalBlocks(
        routings={table.name: routings[table.name] for table in tables},
        embedding_dims={table.name: table.embedding_dim for table in tables},
        max_bag_lengths=dict(counts.max_bag_lengths),
        occurrences={table.name: occurrences[table.name] for table in tables},
        seen_rows={table.name: seen_rows[table.name] for table in tables},
    )
