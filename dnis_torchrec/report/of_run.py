"""Content of a report, made of the files of a search: blocks, alpha by name, and the distribution
of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts, count_chunks
from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME, RowRouting
from dnis_torchrec.report import ReportRow
from dnis_torchrec.report.content import BlockSummary
from dnis_torchrec.report.row_distribution import RowDistribution
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme


def block_summaries(
    scheme: MixedDimensionScheme, blocks: RowBlocks, tables: Mapping[str, Tensor] | None = None
) -> tuple[BlockSummary, ...]:
    """Retained dims and frequency of every block of every table; blocks without rows are left out."""
    summaries = []
    for name, table in scheme.tables.items():
        rows, dims = table.routing.row_counts().tolist(), table.dims.tolist()
        if not table.is_block_structured:
            rows = blocks.seen_rows[name].tolist()
            dims = _mean_dims(
                _retained_dims(table, tables or {}), blocks.routings[name], blocks.seen_rows[name]
            )
        summaries += [
            _summary(name, s, rows[s], blocks, dims[s]) for s in range(len(rows)) if rows[s]
        ]
    return tuple(summaries)


def _mean_dims(of_rows: Tensor, routing: RowRouting, seen_rows: Tensor) -> list[float]:
    """Mean of the retained dims of the rows of each block; those never seen retain nothing and do
    not count."""
    total = torch.zeros(routing.num_blocks + 1, dtype=torch.int64).index_add_(
        0, routing.all_blocks(), of_rows
    )
    return (total[: routing.num_blocks] / seen_rows.clamp(min=1)).tolist()


def searched_summaries(alpha: Mapping[int, Tensor], blocks: RowBlocks) -> tuple[BlockSummary, ...]:
    """Summarises blocks as `block_summaries` does, in the middle of a search: pruning would retain
    alpha that is not 0."""
    summaries = []
    for name, routing in blocks.routings.items():
        dims = _alive(alpha, blocks, name)
        for block, rows in enumerate(routing.row_counts()):
            if rows:
                summaries.append(_summary(name, block, int(rows), blocks, int(dims[block])))
    return tuple(summaries)


def _summary(
    table: str, block: int, num_rows: int, blocks: RowBlocks, retained_dims: float
) -> BlockSummary:
    return BlockSummary(
        table=table,
        block=block,
        num_rows=num_rows,
        occurrences=int(blocks.occurrences[table][block]),
        retained_dims=retained_dims,
        embedding_dim=blocks.embedding_dims[table],
    )


def named_alpha(alpha: Mapping[int, Tensor], blocks: RowBlocks) -> dict[str, Tensor]:
    """alpha as `ReportContent.alpha` wants it: by the D of tables that share it, or by table where
    each has its own."""
    named = {}
    for table, routing in blocks.routings.items():
        first = blocks.first_alpha_row(table)
        named[table] = alpha[blocks.embedding_dims[table]][first : first + routing.num_blocks]
    return named


def count_rows(
    scheme: MixedDimensionScheme,
    counts: FrequencyCounts,
    tables: Mapping[str, Tensor] | None = None,
) -> RowDistribution:
    """Rows of all tables by frequency and retained dims."""
    dims = {name: _retained_dims(table, tables or {}) for name, table in scheme.tables.items()}
    return _distribution(dims, counts, max(table.embedding_dim for table in scheme.tables.values()))


def _distribution(
    dims: Mapping[str, Tensor], counts: FrequencyCounts, embedding_dim: int
) -> RowDistribution:
    """Counts the rows of tables by frequency and retained dims, in chunks that bound the memory."""
    of_tables = (
        zip(count_chunks(counts.counts[name]), per_row.split(ROWS_AT_A_TIME), strict=True)
        for name, per_row in dims.items()
    )
    return RowDistribution.of(chain.from_iterable(of_tables), embedding_dim)


def _alive(alpha: Mapping[int, Tensor], blocks: RowBlocks, table: str) -> Tensor:
    """``(S,)`` int64: columns of each block of a table whose alpha is not 0."""
    first, num_blocks = blocks.first_alpha_row(table), blocks.routings[table].num_blocks
    return (alpha[blocks.embedding_dims[table]][first : first + num_blocks] > 0).sum(dim=1).cpu()


def _of_rows(dims: Tensor, routing: RowRouting) -> Tensor:
    """``(N,)`` int64: dims of the block of each row; rows of no block retain nothing."""
    return torch.cat([dims, torch.zeros(1, dtype=torch.int64)])[routing.all_blocks()]


def _retained_dims(table: TableScheme, tables: Mapping[str, Tensor]) -> Tensor:
    """``(N,)`` int64; rows of no block retain nothing."""
    if not table.is_block_structured:
        return (tables[table.name] != 0).sum(dim=1)
    return _of_rows(table.dims, table.routing)


def scheme_row(
    method: str,
    scheme: MixedDimensionScheme,
    metrics: dict[str, float],
    seed: int,
    seconds: float,
    form: str,
) -> ReportRow:
    """The row of a model whose tables follow a scheme."""
    return ReportRow(
        method=method,
        compression=scheme.compression(form),
        parameters=scheme.parameters,
        dense_parameters=scheme.dense_parameters,
        bytes=scheme.exact_bytes(),
        metrics=metrics,
        seed=seed,
        seconds=seconds,
    )
