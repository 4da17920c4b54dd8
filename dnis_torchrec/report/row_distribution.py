"""Joint distribution of the rows over frequency and retained dims; it is small, however large the
tables are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.checks import check

BINS_PER_DECADE = 4
"""Bins of frequency per power of ten."""


@dataclass(frozen=True, eq=False)
class RowDistribution:
    """Number of rows by frequency and retained dims."""

    num_rows: Tensor

    def __post_init__(self) -> None:
        is_matrix = self.num_rows.dim() == 2 and self.num_rows.shape[1] > 1
        check(is_matrix, "RowDistribution", "(F, D + 1)", tuple(self.num_rows.shape))
        check(int(self.num_rows.sum()) > 0, "RowDistribution", "at least one row", "none")

    @property
    def embedding_dim(self) -> int:
        """The largest D."""
        return self.num_rows.shape[1] - 1

    @staticmethod
    def of(tables: Iterable[tuple[Tensor, Tensor]], embedding_dim: int) -> RowDistribution:
        """Counts the rows of all tables together."""
        total = torch.zeros(1, embedding_dim + 1, dtype=torch.int64)
        for counts, dims in tables:
            same = counts.shape == dims.shape and counts.dim() == 1
            check(
                same,
                "RowDistribution",
                "a frequency and retained dims per row",
                tuple(counts.shape),
            )
            within = bool((counts >= 0).all()) and bool(
                ((dims >= 0) & (dims <= embedding_dim)).all()
            )
            requirement = f"frequencies >= 0 and retained dims in 0..{embedding_dim}"
            check(within, "RowDistribution", requirement, "a value outside")
            total = _add(total, _count(counts, dims, embedding_dim))
        return RowDistribution(total)


def _count(counts: Tensor, dims: Tensor, embedding_dim: int) -> Tensor:
    bins = (counts.clamp(min=1).double().log10() * BINS_PER_DECADE).floor().long() + 1
    bins[counts == 0] = 0
    width = embedding_dim + 1
    flat = torch.bincount(bins * width + dims)
    return torch.nn.functional.pad(flat, (0, -len(flat) % width)).view(-1, width)


def _add(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two matrices of as many columns, the shorter one filled up with zeros."""
    long, short = (one, other) if len(one) >= len(other) else (other, one)
    total = long.clone()
    total[: len(short)] += short
    return total
