"""Raw categorical values to rows of a table, and numbers to evenly spread ones. Deterministic, on
every machine alike."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

MISSING_ROW = 0
"""The row of missing values, in every hashed table."""
HASH_VERSION = 2
"""Another number whenever a value gets another hash: what was hashed before is then hashed anew."""
_LOWEST, _HIGHEST = str(-(2**63)), str(2**64 - 1)


def hash_values(values: pa.Array) -> np.ndarray:
    """64-bit hashes of integers, strings or bytes; equal values have equal hashes, in whatever file
    and column."""
    if pa.types.is_integer(values.type):
        return _hashed(values.cast(pa.int64(), safe=False))
    numbers, is_number = _as_numbers(values)
    if not is_number.any():
        return _hashed(values)
    hashes = np.empty(len(values), np.uint64)
    hashes[is_number] = _hashed(numbers)
    hashes[~is_number] = _hashed(values.filter(pa.array(~is_number)))
    return hashes


def _hashed(values: pa.Array) -> np.ndarray:
    return pd.util.hash_array(values.to_numpy(zero_copy_only=False), categorize=False)


def _as_numbers(texts: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """(the integers among texts modulo 2**64, as int64; ``(n,)`` bool: which texts are one)."""
    if pa.types.is_binary(texts.type) or pa.types.is_large_binary(texts.type):
        # What looks at bytes is there for strings alone, and does not mind bytes that are no UTF-8.
        texts = texts.view(pa.string() if pa.types.is_binary(texts.type) else pa.large_string())
    if pc.any(pc.ends_with(texts, ".0")).as_py():
        texts = pc.replace_substring_regex(texts, r"\.0\z", "")
    digits = pc.ascii_ltrim(texts, "-")
    signs = pc.subtract(pc.binary_length(texts), pc.binary_length(digits))
    is_zero = pc.equal(texts, "0")
    has_lead = pc.or_(is_zero, pc.invert(pc.starts_with(digits, "0")))
    leads = pc.and_(pc.less_equal(signs, 1), has_lead)
    fits = pc.less(pc.binary_length(texts), len(_HIGHEST))
    if not pc.all(fits).as_py():
        # Of 20 characters, which alone may be too many, "-" sorts before the digits, and these by
        # value.
        in_range = pc.or_(pc.less_equal(texts, _LOWEST), pc.greater_equal(texts, "0"))
        in_range = pc.and_(in_range, pc.less_equal(texts, _HIGHEST))
        fits = pc.or_(fits, pc.and_(pc.equal(pc.binary_length(texts), len(_HIGHEST)), in_range))
    is_number = pc.and_(pc.and_(leads, fits), pc.ascii_is_decimal(digits))
    texts = texts.filter(is_number)
    is_negative = pc.starts_with(texts, "-")
    numbers = pc.if_else(is_negative, "0", texts).cast(pa.uint64()).view(pa.int64())
    if pc.any(is_negative).as_py():
        negative = pc.if_else(is_negative, texts, "0").cast(pa.int64())
        numbers = pc.if_else(is_negative, negative, numbers)
    return numbers, is_number.to_numpy(zero_copy_only=False)


def rows_of_values(values: pa.Array, num_embeddings: int) -> np.ndarray:
    """Hashes raw values into the rows of a table."""
    if pa.types.is_integer(values.type):  # hashed sooner than equal ones are found
        numbers = values.fill_null(0) if values.null_count else values
        rows = 1 + hash_values(numbers) % np.uint64(num_embeddings - 1)
        if values.null_count:
            rows[values.is_null().to_numpy(zero_copy_only=False)] = MISSING_ROW
        return rows.astype(np.int32)
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    modulus = np.uint64(num_embeddings - 1)
    rows = np.full(len(values.dictionary) + 1, MISSING_ROW, np.int32)
    is_value = values.dictionary.is_valid().to_numpy(zero_copy_only=False)
    if is_value.any():  # a dictionary may hold the missing value itself
        rows[:-1][is_value] = 1 + hash_values(values.dictionary.drop_null()) % modulus
    # A missing value's code becomes -1, which picks the last entry; codes may be unsigned.
    codes = values.indices
    if codes.null_count:
        codes = codes.cast(pa.int64()).fill_null(-1)
    return rows[codes.to_numpy(zero_copy_only=False)]


def spread(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Numbers to evenly spread ones in [0, 1): the same seed gives the same ones, another seed
    unrelated ones."""
    gamma = np.random.SeedSequence(seed).generate_state(1, np.uint64)  # a stream per seed
    return (mix(numbers + gamma) >> np.uint64(11)) * 2.0**-53


def mix(numbers: np.ndarray) -> np.ndarray:
    """Numbers to unrelated ones, one to one: the finaliser of SplitMix64."""
    bits = numbers ^ (numbers >> np.uint64(30))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits
