"""Hashing values to rows: the same row however a value is encoded, row 0 for what is missing alone."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.blocks.hashing import MISSING_ROW, hash_values, mix, rows_of_values

TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
EDGES = [0, 10**18, 10**19, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**20, -(10**18), -(2**63), -(2**63) - 1, -(10**19)]
INDICES = [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=8), st.sampled_from(INDICES))
def test_any_encoding_of_a_column_gives_the_same_rows(values: list[str | None], indices: pa.DataType) -> None:
    plain = pa.array(values, pa.string())
    encoded = plain.dictionary_encode()
    typed = pa.DictionaryArray.from_arrays(encoded.indices.cast(indices), encoded.dictionary)
    rows = rows_of_values(plain, 100).tolist()
    assert rows_of_values(typed, 100).tolist() == rows
    assert [row == MISSING_ROW for row in rows] == [value is None for value in values]


@pytest.mark.parametrize("values", [["a", None, "b"], [7, None, 9], [None]])
def test_a_missing_value_inside_a_dictionary_is_missing(values: list[object]) -> None:
    dictionary = pa.array(values)
    codes = pa.array([0, len(values) - 1, None, 0, min(1, len(values) - 1)], pa.int32())
    rows = rows_of_values(pa.DictionaryArray.from_arrays(codes, dictionary), 100).tolist()
    plain = [None if code is None else values[code] for code in codes.to_pylist()]
    assert rows == rows_of_values(pa.array(plain, dictionary.type), 100).tolist()


@given(
    st.lists(st.integers(-(2**64), 2**65) | st.sampled_from(EDGES) | st.integers(-20, 20), min_size=1, max_size=8),
    st.sampled_from(["", ".0"]),
    st.sampled_from(TEXTS),
)
def test_the_decimal_text_of_an_integer_is_hashed_as_the_integer(ids: list[int], end: str, text: pa.DataType) -> None:
    texts = [f"{number}{end}" for number in ids]
    hashes = hash_values(pa.array(["a", *texts], pa.string()).cast(text)[1:])  # sliced, as a column may be
    for number, written, found in zip(ids, texts, hashes.tolist(), strict=True):
        if -(2**63) <= number < 2**64:
            assert found == int(mix(np.array([number % 2**64], np.uint64))[0])
            kind = pa.int64() if number < 2**63 else pa.uint64()
            assert found == hash_values(pa.array([number], kind))[0]
        else:
            assert found == pd.util.hash_array(np.array([written], object), categorize=False)[0]


@given(st.lists(st.text("0123456789-+. eax\n\0٣", max_size=6), max_size=8), st.sampled_from(TEXTS))
def test_other_text_is_hashed_as_it_always_was(values: list[str], text: pa.DataType) -> None:
    values += ["007", "+7", "-0", "-0.0", "7.00", "7.", ".0", "--7", "7\n", "7.0\n", "7.0.0", "1e3", "0x10", "00", ""]
    values = [value for value in values if not re.fullmatch(r"(0|-?[1-9][0-9]*)(\.0)?", value, re.ASCII)]
    expected = pd.util.hash_array(np.array(values, object), categorize=False).tolist()
    assert hash_values(pa.array(values, pa.string()).cast(text)).tolist() == expected
    mixed = hash_values(pa.array([*values, "7"], pa.string()).cast(text)).tolist()
    assert mixed == [*expected, *hash_values(pa.array([7])).tolist()]
