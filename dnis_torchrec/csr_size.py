"""What CSR tables weigh while they are served, beside their values: one-byte columns, compact row pointers.

How compact row pointers are laid out, and why, is said in `dnis_torchrec/serving/compact_pointers.py`. Pure numbers.
"""

from __future__ import annotations

RECORD_BYTES = 64
"""A record of compact row pointers."""
START_BYTES = 8
ROWS_PER_RECORD = RECORD_BYTES - START_BYTES
LARGEST_LENGTH = 255
"""Values that a row of compact row pointers may have, so the largest D that they serve."""


def compact_bytes(num_rows: int) -> int:
    """Bytes of the compact row pointers of n rows.

    Example:
        >>> compact_bytes(56), compact_bytes(57)
        (64, 73)
    """
    return num_rows + START_BYTES * -(-num_rows // ROWS_PER_RECORD)


def has_compact_pointers(embedding_dim: int) -> bool:
    """Whether lookups read compact row pointers: up to D = 255.

    Example:
        >>> has_compact_pointers(255), has_compact_pointers(256)
        (True, False)
    """
    return embedding_dim <= LARGEST_LENGTH


def column_bytes(embedding_dim: int) -> int:
    """Bytes of the column of a value."""
    return 1 if embedding_dim <= 256 else 2


def pointer_bytes(num_rows: int, embedding_dim: int, num_values: int = 0) -> int:
    """Bytes of a table's row pointers as lookups read them.

    Args:
        num_rows: n.
        embedding_dim: D; up to 255 row pointers are compact.
        num_values: plain ones take eight bytes instead of four from 2^31 values on.

    Example:
        >>> pointer_bytes(56, 64), pointer_bytes(56, 256), pointer_bytes(56, 256, 2**31)
        (64, 228, 456)
    """
    if has_compact_pointers(embedding_dim):
        return compact_bytes(num_rows)
    return (num_rows + 1) * (4 if num_values < 2**31 else 8)
