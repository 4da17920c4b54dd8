"""Sizes of so many single values, in the form in which these are counted."""

from __future__ import annotations

from collections.abc import Iterable

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
