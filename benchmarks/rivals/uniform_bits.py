"""Uniform bits: every retained column of a table in as many bits, for tables whose columns have
none of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dnis_torchrec.artifact.forms import Rows
from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes, fit_codes
from dnis_torchrec.checks import check_known
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, rows_per_chunk

SAMPLED_PER_BLOCK = 4096
"""Rows of a block that its scales are fitted to, evenly spread over it."""


def with_uniform_bits(scheme: MixedDimensionScheme, rows: Mapping[str, Rows], bits: int) -> MixedDimensionScheme:
    """The same tables with every retained column in so many bits, for the form ``"packed"``. Reads
    the tables once."""
    coded = {}
    for name, table in scheme.tables.items():
        check_known("table", name, rows)
        coded[name] = table if table.has_codes else table.with_codes(_uniform_codes(table, rows[name], bits))
    return MixedDimensionScheme(coded)


def _uniform_codes(table: TableScheme, rows: Rows, bits: int) -> ColumnCodes:
    widths = (table.retained.byte() * bits).to(torch.uint8)
    scale, shift = torch.ones(widths.shape), torch.zeros(widths.shape, dtype=torch.int16)
    for s, values in _samples(table, rows).items() if bits < FLOAT_BITS else ():
        columns = table.columns(s)
        fitted = fit_codes(values[:, columns], torch.ones(len(values)), [bits])
        scale[s, columns], shift[s, columns] = fitted.scale[0], fitted.shift[0]
    return ColumnCodes(widths, scale, shift)


def _samples(table: TableScheme, rows: Rows) -> dict[int, Tensor]:
    """Block -> ``(n, D)``: every k-th of its rows."""
    counts = table.routing.row_counts()
    every = (-(-counts // SAMPLED_PER_BLOCK)).tolist()
    seen, found = [0] * len(every), {s: list[Tensor]() for s in range(len(every)) if counts[s]}
    step = rows_per_chunk(table.embedding_dim)
    for first in range(0, table.num_embeddings, step):
        last = min(first + step, table.num_embeddings)
        chunk, blocks = (rows(first, last).detach().cpu().float(), table.routing.block_of(torch.arange(first, last)))
        for s, kept in found.items():
            of_block = (blocks == s).nonzero().squeeze(1)
            kept.append(chunk[of_block[-seen[s] % every[s] :: every[s]]])
            seen[s] += len(of_block)
    return {s: torch.cat(kept) for s, kept in found.items()}
