"""Parsing: one chunk of a file to tensors, through pyarrow's readers; no Python runs per row.

Shapes: n samples of the chunk, F1 single-id features.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.hashing import hash_values, rows_of_values
from dnis_torchrec.storage import filesystem, read_bytes, retrying
from dnis_torchrec.streaming.chunks import Chunk, is_parquet
from dnis_torchrec.streaming.schema import StreamSchema

_EXCERPT = 80


@dataclass(frozen=True, eq=False)
class ParsedChunk:
    """The samples of a chunk.

    Attributes:
        dense: ``(n, num_dense)`` float32.
        ids: ``(F1, n)`` int32: one row per feature, so that a feature's ids of a batch lie side by side, as in a KJT.
        labels: ``(n,)`` float32.
        bags: multi-hot feature -> ``(values, offsets)``, int32 and ``(n + 1,)`` int64.
        split_keys: ``(n,)`` int64, the bits of the hashes of the column that splits; None where sample numbers do.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor
    bags: Mapping[str, tuple[Tensor, Tensor]]
    split_keys: Tensor | None

    @property
    def num_rows(self) -> int:
        """n."""
        return self.labels.numel()

    def slice(self, first: int, last: int) -> ParsedChunk:
        """The samples from first to before last, without copying; without what splits.

        Args:
            first: the first sample.
            last: the one after the last.
        """
        bags = {}
        for feature, (values, offsets) in self.bags.items():
            begin, end = int(offsets[first]), int(offsets[last])
            bags[feature] = (values[begin:end], offsets[first : last + 1] - begin)
        return ParsedChunk(self.dense[first:last], self.ids[:, first:last], self.labels[first:last], bags, None)

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything by name, as a file holds it."""
        tensors = {"dense": self.dense, "ids": self.ids, "labels": self.labels}
        for feature, (values, offsets) in self.bags.items():
            tensors |= {f"values/{feature}": values, f"offsets/{feature}": offsets}
        return tensors if self.split_keys is None else tensors | {"split_keys": self.split_keys}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], schema: StreamSchema) -> ParsedChunk:
        """What `to_tensors` gave.

        Args:
            tensors: by name.
            schema: what they were parsed with; it names the multi-hot features.

        Raises:
            KeyError: if one that every chunk of this schema has is missing.
        """
        bags = {feature: (tensors[f"values/{feature}"], tensors[f"offsets/{feature}"]) for feature in schema.multi_hot}
        return ParsedChunk(tensors["dense"], tensors["ids"], tensors["labels"], bags, tensors.get("split_keys"))


def parse_chunk(address: str, chunk: Chunk, schema: StreamSchema) -> ParsedChunk:
    """Reads and parses one chunk.

    Args:
        address: of the chunk's file.
        chunk: which piece of it.
        schema: what the columns mean.

    Raises:
        ValueError: naming the file, the column and, for text, the line, if a line is malformed, a label is missing or
            not finite, a dense value is not finite, or an id lies outside its table.
        StorageError: if storage does not answer.
    """
    table = _read_row_group(address, chunk, schema) if is_parquet(address) else _read_text(address, chunk, schema)
    place = f"address {address}"
    received = table.num_rows
    check(received == chunk.num_rows, place, f"expected {chunk.num_rows} samples from row {chunk.first_row}", received)
    columns = {name: table[name].combine_chunks() for name in schema.columns}
    labels = _numbers(columns[schema.label], f"{place}, column {schema.label!r}", missing=math.nan)
    _check_finite(labels, address, chunk, schema.label, "expected a finite label")
    dense = [_dense(columns[name], address, chunk, name) for name in schema.dense]
    ids = [_rows(columns[name], rows, schema, place, name) for name, rows in schema.single_id.items()]
    return ParsedChunk(
        dense=torch.from_numpy(_transformed(dense, chunk.num_rows, schema.log_dense)),
        ids=torch.from_numpy(np.stack(ids) if ids else np.empty((0, chunk.num_rows), np.int32)),
        labels=torch.from_numpy(labels),
        bags={name: _bags(columns[name], rows, schema, place, name) for name, rows in schema.multi_hot.items()},
        split_keys=_split_keys(columns[schema.split_by], place) if schema.split_by is not None else None,
    )


def _read_row_group(address: str, chunk: Chunk, schema: StreamSchema) -> pa.Table:
    files, path = filesystem(address)

    def read() -> pa.Table:
        with files.open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            for name in schema.columns:
                check_known(f"address {address}: column", name, parquet.schema_arrow.names)
            return parquet.read_row_group(chunk.start, columns=list(schema.columns), use_threads=False)

    return retrying(read, f"address {address}")


def _read_text(address: str, chunk: Chunk, schema: StreamSchema) -> pa.Table:
    place, names = f"address {address}", list(schema.text_columns)
    remedy = "name them in StreamSchema.text_columns"
    check(bool(names), place, "expected the names of all columns of a text file", "none", remedy)
    text = read_bytes(address, chunk.start, chunk.end)
    types = {name: pa.float32() for name in (schema.label, *schema.dense)}
    types |= {name: pa.dictionary(pa.int32(), pa.binary()) for name in schema.single_id}
    types |= {
        name: pa.binary() for name in (*schema.multi_hot, schema.split_by) if name is not None and name not in types
    }
    if not schema.hashed:
        types |= dict.fromkeys(schema.single_id, pa.int64())
    try:
        return pv.read_csv(
            io.BytesIO(text),
            read_options=pv.ReadOptions(column_names=names, use_threads=False, block_size=len(text) + 1),
            parse_options=pv.ParseOptions(delimiter=schema.separator, quote_char=False, ignore_empty_lines=False),
            convert_options=pv.ConvertOptions(
                column_types=types, include_columns=list(schema.columns), null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid as error:
        line, received = _first_malformed(text, schema)
        where = f"{place}, line {chunk.first_row + line + 1}" if line >= 0 else place
        requirement = f"expected {len(names)} fields, with numbers in label and dense columns"
        raise ValueError(describe(where, requirement, received or str(error), "clean the data")) from error


def _first_malformed(text: bytes, schema: StreamSchema) -> tuple[int, str]:
    """(number, beginning) of the first line that pyarrow would refuse; (-1, "") if none is found."""
    separator = schema.separator.encode()
    numbers: dict[str, type[int] | type[float]] = {name: float for name in (schema.label, *schema.dense)}
    if not schema.hashed:
        numbers |= {name: int for name in schema.single_id}
    kinds = [numbers.get(name) for name in schema.text_columns]
    for number, line in enumerate(text.splitlines()):
        fields = line.split(separator)
        excerpt = repr(line[:_EXCERPT].decode("utf-8", "replace"))
        if len(fields) != len(kinds):
            return number, f"{len(fields)}: {excerpt}"
        for field, kind in zip(fields, kinds, strict=True):
            try:
                if kind is not None and field:
                    kind(field)
            except ValueError:
                return number, excerpt
    return -1, ""


def _numbers(column: pa.Array, place: str, *, missing: float) -> np.ndarray:
    """float32, with a number for those that are missing."""
    is_number = (
        pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
    )
    check(is_number, place, "expected numbers", column.type)
    numbers = column.cast(pa.float32(), safe=False).fill_null(missing)
    return np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float32)


def _dense(column: pa.Array, address: str, chunk: Chunk, name: str) -> np.ndarray:
    """float32, 0 where missing: in Parquet NaN says so too, as arrays have no other word for it."""
    values = _numbers(column, f"address {address}, column {name!r}", missing=0)
    if is_parquet(address):
        values[np.isnan(values)] = 0
    _check_finite(values, address, chunk, name, "expected a finite number")
    return values


def _check_finite(values: np.ndarray, address: str, chunk: Chunk, name: str, requirement: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = chunk.first_row + int(bad[0])
        sample = f"row {row}" if is_parquet(address) else f"line {row + 1}"
        where = f"address {address}, {sample}, column {name!r}"
        raise ValueError(describe(where, requirement, values[bad[0]], "clean the data"))


def _transformed(columns: list[np.ndarray], num_rows: int, log_dense: bool) -> np.ndarray:
    dense = np.stack(columns, axis=1) if columns else np.empty((num_rows, 0), np.float32)
    return np.log1p(np.maximum(dense, 0, out=dense), out=dense) if log_dense else dense


def _rows(column: pa.Array, num_embeddings: int, schema: StreamSchema, place: str, name: str) -> np.ndarray:
    """Rows of a table, int32."""
    where = f"{place}, column {name!r}"
    if schema.hashed:
        _check_hashable(column, where)
        return rows_of_values(column, num_embeddings)
    check(pa.types.is_integer(column.type), where, "expected integer ids", column.type, "or set StreamSchema.hashed")
    check(column.null_count == 0, where, "expected an id in every row", f"{column.null_count} missing")
    ids = column.cast(pa.int64(), safe=False).to_numpy()
    lowest, highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    in_range = lowest >= 0 and highest < num_embeddings
    remedy = "raise num_embeddings or set StreamSchema.hashed"
    received = lowest if lowest < 0 else highest
    check(in_range, where, f"expected ids in 0..{num_embeddings - 1}", received, remedy)
    return ids.astype(np.int32)


def _check_hashable(column: pa.Array, where: str) -> None:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    tests = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    received = "lists" if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    remedy = "name it in multi_hot" if received == "lists" else "cast it"
    check(any(test(kind) for test in tests), where, "expected integers, strings or bytes", received, remedy)


def _bags(column: pa.Array, num_embeddings: int, schema: StreamSchema, place: str, name: str) -> tuple[Tensor, Tensor]:
    """(values, offsets) of a column of lists, or of text with a separator."""
    if any(test(column.type) for test in (pa.types.is_binary, pa.types.is_string, pa.types.is_large_string)):
        column = pc.split_pattern(column, schema.list_separator)
        if not schema.hashed:
            column = _integer_lists(column, f"{place}, column {name!r}")
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    check(is_list, f"{place}, column {name!r}", "expected lists", column.type, "name it in single_id")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    # `flatten` leaves out what a missing list may hide, which `values` does not.
    values = _rows(column.flatten(), num_embeddings, schema, place, name)
    return torch.from_numpy(values), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))


def _integer_lists(column: pa.Array, where: str) -> pa.Array:
    """Lists of text as lists of integers."""
    texts = column.cast(pa.list_(pa.string()))
    try:
        return texts.cast(pa.list_(pa.int64()))
    except pa.ArrowInvalid as error:
        bad = next(text for row in texts.to_pylist() for text in row or () if not _is_integer(text))
        remedy = "clean the data, or set StreamSchema.hashed"
        raise ValueError(describe(where, "expected integers", repr(bad), remedy)) from error


def _is_integer(text: str | None) -> bool:
    try:
        return pa.scalar(text, pa.string()).cast(pa.int64()).is_valid
    except pa.ArrowInvalid:
        return False


def _split_keys(column: pa.Array, place: str) -> Tensor:
    where = f"{place}, column that splits"
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    _check_hashable(column, where)
    check(column.null_count == 0, where, "expected a value in every row", f"{column.null_count} missing")
    return torch.from_numpy(hash_values(column).view(np.int64))
