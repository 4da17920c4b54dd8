"""Sizes that pay for so many single values, in the form in which these are counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from hypothesis import assume

from dnis_torchrec.forms import pointer_bytes
from dnis_torchrec.search.budget import Size


def size_of_values(num_values: int, shapes: Iterable[tuple[int, int]]) -> Size:
    """What pays for so many values of tables of at most 256 columns, and for no further one.

    Args:
        num_values: of all tables.
        shapes: N and D of every table.
    """
    pointers = sum(pointer_bytes(num_rows, dim) for num_rows, dim in shapes)
    return Size(embedding_bytes=pointers + 5 * num_values, form="csr_fp32")


def affordable(tables: Sequence[torch.Tensor], share: float) -> tuple[int, Size]:
    """A share of the values that sparse rows of no more bytes than the dense tables can hold, and their size."""
    shapes = [(table.shape[0], table.shape[1]) for table in tables]
    dense_bytes = 4 * sum(table.numel() for table in tables)
    most = (dense_bytes - sum(pointer_bytes(rows, dim) for rows, dim in shapes)) // 5
    assume(most >= 1)
    num_values = max(1, int(share * most))
    return num_values, size_of_values(num_values, shapes)
