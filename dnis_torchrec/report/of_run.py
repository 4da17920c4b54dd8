"""From what a search leaves behind to what a report shows: blocks, alpha by name, and the distribution of the rows.

Shapes: N rows of a table, D embedding_dim, S blocks, A rows of alpha for one D.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor

from dnis_torchrec.blocking import RowBlocks
from dnis_torchrec.frequency import ROWS_AT_A_TIME, FrequencyCounts, pieces
from dnis_torchrec.report.content import BlockSummary
from dnis_torchrec.report.row_distribution import RowDistribution
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme


def block_summaries(scheme: MixedDimensionScheme, blocks: RowBlocks) -> tuple[BlockSummary, ...]:
    """Retained dims and frequency of every block of every table; blocks without rows are left out."""
    return tuple(
        _summary(name, block, int(rows), blocks, int(table.dims[block]))
        for name, table in scheme.tables.items()
        for block, rows in enumerate(table.routing.row_counts())
        if rows
    )


def searched_summaries(alpha: Mapping[int, Tensor], blocks: RowBlocks) -> tuple[BlockSummary, ...]:
    """As `block_summaries`, in the middle of a search: what pruning would retain is where alpha is not 0.

    Args:
        alpha: embedding_dim -> ``(A, D)``.
        blocks: the row blocks.
    """
    summaries = []
    for name, routing in blocks.routings.items():
        first = blocks.first_alpha_row(name)
        dims = (alpha[blocks.embedding_dims[name]] > 0).sum(dim=1)[first : first + routing.num_blocks]
        for block, rows in enumerate(routing.row_counts()):
            if rows:
                summaries.append(_summary(name, block, int(rows), blocks, int(dims[block])))
    return tuple(summaries)


def _summary(table: str, block: int, num_rows: int, blocks: RowBlocks, retained_dims: int) -> BlockSummary:
    return BlockSummary(
        table=table,
        block=block,
        num_rows=num_rows,
        occurrences=int(blocks.occurrences[table][block]),
        retained_dims=retained_dims,
        embedding_dim=blocks.embedding_dims[table],
    )


def named_alpha(alpha: Mapping[int, Tensor], blocks: RowBlocks) -> dict[str, Tensor]:
    """alpha as `ReportContent.alpha` wants it: by the D of tables that share it, or by table where each has its own.

    Args:
        alpha: embedding_dim -> ``(A, D)``.
        blocks: the row blocks.

    Returns:
        ``"tables of D = 8"``, say, or table name -> ``(S, D)``.
    """
    if blocks.scope == "global":
        return {f"tables of D = {dim}": values for dim, values in alpha.items()}
    named = {}
    for table, routing in blocks.routings.items():
        first = blocks.first_alpha_row(table)
        named[table] = alpha[blocks.embedding_dims[table]][first : first + routing.num_blocks]
    return named


def count_rows(
    scheme: MixedDimensionScheme, counts: FrequencyCounts, tables: Mapping[str, Tensor] | None = None
) -> RowDistribution:
    """Rows of all tables by frequency and retained dims.

    Args:
        scheme: the retained dims.
        counts: training frequencies.
        tables: table -> ``(N, D)`` pruned weights; needed only where single elements were pruned, because a scheme
            knows just the columns of such a block: the retained dims of a row are then its values that are not 0.
    """
    dims = {name: _retained_dims(table, tables or {}) for name, table in scheme.tables.items()}
    of_tables = (zip(pieces(counts.counts[name]), own.split(ROWS_AT_A_TIME), strict=True) for name, own in dims.items())
    of_pieces = chain.from_iterable(of_tables)
    return RowDistribution.of(of_pieces, max(table.embedding_dim for table in scheme.tables.values()))


def _retained_dims(table: TableScheme, tables: Mapping[str, Tensor]) -> Tensor:
    """``(N,)`` int64; rows of no block retain nothing."""
    if not table.is_block_structured:
        return (tables[table.name] != 0).sum(dim=1)
    of_block = torch.cat([table.dims, torch.zeros(1, dtype=torch.int64)])
    return of_block[table.routing.all_blocks()]
