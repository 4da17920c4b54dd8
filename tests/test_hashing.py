"""Hashing values to rows: the same row however a value is encoded, row 0 for what is missing alone."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.hashing import MISSING_ROW, rows_of_values

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
