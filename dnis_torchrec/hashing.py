"""Raw categorical values to rows of a table, and numbers to evenly spread ones. Deterministic, on every machine alike.

Strings are hashed by SipHash with a fixed key, integers by the finaliser of SplitMix64, both as pandas does it; a test
holds some values still, because everything that was ever hashed depends on them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

MISSING_ROW = 0
"""The row of missing values, in every hashed table."""


def hash_values(values: pa.Array) -> np.ndarray:
    """64-bit hashes of integers, strings or bytes; equal values have equal hashes, in whatever file and column.

    A string and its UTF-8 bytes are the same value; an integer and its digits are not.

    Args:
        values: none missing.

    Returns:
        ``(n,)`` uint64.

    Example:
        >>> hash_values(pa.array(["68fd1e64", "a"])).tolist() == hash_values(pa.array([b"68fd1e64", b"a"])).tolist()
        True
    """
    if pa.types.is_integer(values.type):
        return pd.util.hash_array(values.cast(pa.int64(), safe=False).to_numpy(), categorize=False)
    return pd.util.hash_array(values.to_numpy(zero_copy_only=False), categorize=False)


def rows_of_values(values: pa.Array, num_embeddings: int) -> np.ndarray:
    """Hashes raw values into the rows of a table.

    .. math:: \\text{row} = 1 + \\text{hash}(\\text{value}) \\bmod (N - 1)

    Row 0 is that of missing values alone. Each distinct value of a chunk is hashed once; no Python runs per row.

    Args:
        values: integers, strings, bytes or a dictionary of them; may be missing.
        num_embeddings: N, at least 2.

    Returns:
        ``(n,)`` int32, each in ``0..N-1``.

    Example:
        >>> rows_of_values(pa.array(["a", None, "b", "a"]), 100).tolist()
        [1, 0, 17, 1]
    """
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    modulus = np.uint64(num_embeddings - 1)
    rows = np.full(len(values.dictionary) + 1, MISSING_ROW, np.int32)
    known = values.dictionary.is_valid().to_numpy(zero_copy_only=False)
    if known.any():  # a dictionary may hold the missing value itself
        rows[:-1][known] = 1 + hash_values(values.dictionary.drop_null()) % modulus
    # A missing value's code becomes -1, which picks the last entry; codes may be unsigned.
    codes = values.indices.cast(pa.int64()).fill_null(-1) if values.indices.null_count else values.indices
    return rows[codes.to_numpy(zero_copy_only=False)]


def spread(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Numbers to evenly spread ones in [0, 1): the same seed gives the same ones, another seed unrelated ones.

    Args:
        numbers: ``(n,)`` uint64, as sample numbers or hashes.
        seed: any integer >= 0.

    Returns:
        ``(n,)`` float64, exact multiples of 2 ** -53.
    """
    gamma = np.random.SeedSequence(seed).generate_state(1, np.uint64)  # a stream per seed
    return (mix(numbers + gamma) >> np.uint64(11)) * 2.0**-53


def mix(numbers: np.ndarray) -> np.ndarray:
    """Numbers to unrelated ones, one to one: the finaliser of SplitMix64.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.

    Args:
        numbers: uint64, of any shape.

    Returns:
        uint64, of the same shape; 0 stays 0.

    Example:
        >>> mix(np.array([0, 1, 2], np.uint64)).tolist()
        [0, 6238072747940578789, 15839785061582574730]
    """
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
