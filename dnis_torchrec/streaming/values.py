"""Values: the entries of a column in one canonical form for all formats, and the rows of a table
that they become."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dnis_torchrec.blocks.hashing import MISSING_ROW, hash_values, rows_of_values
from dnis_torchrec.checks import check, describe
from dnis_torchrec.streaming.schema import StreamSchema

_NO_ROW = -1
_WANTED = "integers, strings or bytes"
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def canonical(values: pa.Array, where: str) -> pa.Array:
    """Raw values in the one form that becomes rows: integers, or bytes of text, missing where there
    is none."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(values.indices, canonical(values.dictionary, where))
    if pa.types.is_integer(kind):
        return values
    if pa.types.is_null(kind):
        return values.cast(pa.int64())
    if pa.types.is_floating(kind):
        return _whole(values, where)
    values = _decoded(values)
    check(_is_text(values.type), where, _WANTED, kind, "cast it to integers or strings")
    is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    # Bytes that are no UTF-8 are trimmed as any others: nothing looks at more than single bytes.
    trimmed = pc.ascii_trim_whitespace(values.view(pa.large_string() if is_large else pa.string()))
    known = pc.if_else(pc.equal(pc.binary_length(trimmed), 0), None, trimmed)
    return known.view(pa.large_binary() if is_large else pa.binary())


def rows_of_column(
    column: pa.Array, num_embeddings: int, schema: StreamSchema, where: str
) -> np.ndarray:
    """The row of each sample, of a column with one value per sample."""
    check(not _is_lists(column.type), where, _WANTED, "lists", "name it in multi_hot")
    rows = _rows(column, num_embeddings, schema, where)
    missing = 0 if schema.hashed else int((rows == _NO_ROW).sum())
    check(missing == 0, where, "an id in every row", f"{missing} missing")
    return rows


def bags_of_column(
    column: pa.Array, num_embeddings: int, schema: StreamSchema, where: str
) -> tuple[Tensor, Tensor]:
    """The bag of each sample, of a column of lists, of text with a separator, or of one value per
    sample."""
    column = _decoded(column)
    if _is_text(column.type):
        column = pc.split_pattern(column, schema.list_separator)
    offsets = np.arange(len(column) + 1, dtype=np.int64)
    if _is_lists(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        np.cumsum(lengths, out=offsets[1:])
        column = (
            column.flatten()
        )  # leaves out what a missing list may hide, which `values` does not
        check(
            not _is_lists(column.type),
            where,
            f"{_WANTED} in lists",
            "lists of lists",
            "flatten them",
        )
    rows = _rows(column, num_embeddings, schema, where)
    known = rows != (MISSING_ROW if schema.hashed else _NO_ROW)
    if not known.all():
        rows, offsets = rows[known], np.concatenate([[0], np.cumsum(known)])[offsets]
    return torch.from_numpy(rows), torch.from_numpy(offsets)


def split_keys(column: pa.Array, where: str) -> Tensor:
    """Hashes the values that decide which part of a split each sample belongs to."""
    check(
        not _is_lists(column.type),
        where,
        "one value per sample",
        "lists",
        "split by another column",
    )
    values = canonical(_decoded(column), where)
    check(values.null_count == 0, where, "a value in every row", f"{values.null_count} missing")
    return torch.from_numpy(hash_values(values).view(np.int64))


def _rows(values: pa.Array, num_embeddings: int, schema: StreamSchema, where: str) -> np.ndarray:
    """Rows of a table, int32: of missing values `MISSING_ROW` if they are hashed, `_NO_ROW` if not."""
    if schema.hashed:
        # Each distinct text is looked at once.
        values = values.dictionary_encode() if _is_text(values.type) else values
        return rows_of_values(canonical(values, where), num_embeddings)
    ids = _integers(canonical(_decoded(values), where), where)
    limits = pc.min_max(ids).as_py()
    lowest, highest = limits["min"] or 0, limits["max"] or 0  # None where there is no id
    received = lowest if lowest < 0 else highest
    remedy = "raise num_embeddings or set StreamSchema.hashed"
    in_range = lowest >= 0 and highest < num_embeddings
    check(in_range, where, f"ids in 0..{num_embeddings - 1}", received, remedy)
    rows = ids.cast(pa.int32())
    return (rows.fill_null(_NO_ROW) if rows.null_count else rows).to_numpy().copy()


def _integers(values: pa.Array, where: str) -> pa.Array:
    """Canonical values as integers."""
    if pa.types.is_integer(values.type):
        return values
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        bad = next(text for text in values.to_pylist() if not _is_integer(text))
        remedy = "clean the data, or set StreamSchema.hashed"
        raise ValueError(
            describe(where, "integers", repr(bad.decode("utf-8", "replace")), remedy)
        ) from error


def _is_integer(text: bytes | None) -> bool:
    try:
        pa.scalar(text, pa.binary()).cast(pa.int64())
    except pa.ArrowInvalid:
        return False
    return True


def _whole(values: pa.Array, where: str) -> pa.Array:
    """Floats as int64, NaN as missing."""
    limit = {16: 2**11, 32: 2**24, 64: 2**53}[
        values.type.bit_width
    ]  # the first whose neighbour rounds to it
    numbers = values.cast(pa.float64())
    numbers = pc.if_else(pc.is_nan(numbers), None, numbers)
    is_exact = pc.and_(pc.equal(pc.trunc(numbers), numbers), pc.less(pc.abs(numbers), limit))
    if not pc.all(is_exact, min_count=0).as_py():
        bad = numbers.filter(pc.invert(is_exact))[0]
        remedy = "cast the column to integers or strings"
        raise ValueError(
            describe(where, f"whole numbers below {limit} in a column of floats", bad, remedy)
        )
    return numbers.cast(pa.int64())


def _decoded(values: pa.Array) -> pa.Array:
    """Without a dictionary and without views."""
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return values.cast(_VIEWS[values.type]) if values.type in _VIEWS else values


def _is_lists(kind: pa.DataType) -> bool:
    return any(test(kind) for test in _LISTS)


def _is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in _TEXTS)
