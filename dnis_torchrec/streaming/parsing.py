"""Parsing: one chunk of a file to tensors, through pyarrow's readers; no Python runs per row."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.streaming.access import filesystem, read_bytes, retrying
from dnis_torchrec.streaming.chunks import FileChunk, is_parquet
from dnis_torchrec.streaming.schema import StreamSchema
from dnis_torchrec.streaming.values import bags_of_column, rows_of_column, split_keys

_EXCERPT = 80


@dataclass(frozen=True, eq=False)
class ParsedChunk:
    """The samples of a chunk."""

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
        """The samples from first to before last, without copying; without what splits."""
        bags = {}
        for feature, (values, offsets) in self.bags.items():
            begin, end = int(offsets[first]), int(offsets[last])
            bags[feature] = (values[begin:end], offsets[first : last + 1] - begin)
        return ParsedChunk(
            self.dense[first:last], self.ids[:, first:last], self.labels[first:last], bags, None
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything by name, as a file holds it."""
        tensors = {"dense": self.dense, "ids": self.ids, "labels": self.labels}
        for feature, (values, offsets) in self.bags.items():
            tensors |= {f"values/{feature}": values, f"offsets/{feature}": offsets}
        return tensors if self.split_keys is None else tensors | {"split_keys": self.split_keys}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], schema: StreamSchema) -> ParsedChunk:
        """Rebuilds a chunk from the tensors that `to_tensors` gave."""
        bags = {
            feature: (tensors[f"values/{feature}"], tensors[f"offsets/{feature}"])
            for feature in schema.multi_hot
        }
        return ParsedChunk(
            tensors["dense"], tensors["ids"], tensors["labels"], bags, tensors.get("split_keys")
        )


def parse_chunk(address: str, chunk: FileChunk, schema: StreamSchema) -> ParsedChunk:
    """Reads and parses one chunk."""
    table = (
        _read_row_group(address, chunk, schema)
        if is_parquet(address)
        else _read_text(address, chunk, schema)
    )
    place = f"address {address}"
    received = table.num_rows
    check(
        received == chunk.num_rows,
        place,
        f"{chunk.num_rows} samples from row {chunk.first_row}",
        received,
    )
    columns = {name: table[name].combine_chunks() for name in schema.columns}
    labels = _numbers(columns[schema.label], f"{place}, column {schema.label!r}", missing=math.nan)
    _check_finite(labels, address, chunk, schema.label, "a finite label")
    dense = [_dense(columns[name], address, chunk, name) for name in schema.dense]
    ids = [
        rows_of_column(columns[name], rows, schema, f"{place}, column {name!r}")
        for name, rows in schema.single_id.items()
    ]
    bags = {
        name: bags_of_column(columns[name], rows, schema, f"{place}, column {name!r}")
        for name, rows in schema.multi_hot.items()
    }
    split_by = f"{place}, column {schema.split_by!r}, which splits"
    return ParsedChunk(
        dense=torch.from_numpy(_transformed(dense, chunk.num_rows, schema.log_dense)),
        ids=torch.from_numpy(np.stack(ids) if ids else np.empty((0, chunk.num_rows), np.int32)),
        labels=torch.from_numpy(labels),
        bags=bags,
        split_keys=split_keys(columns[schema.split_by], split_by)
        if schema.split_by is not None
        else None,
    )


def _read_row_group(address: str, chunk: FileChunk, schema: StreamSchema) -> pa.Table:
    files, path = filesystem(address)

    def read() -> pa.Table:
        with files.open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            for name in schema.columns:
                check_known(f"address {address}: column", name, parquet.schema_arrow.names)
            return parquet.read_row_group(
                chunk.start, columns=list(schema.columns), use_threads=False
            )

    return retrying(read, f"address {address}")


def _read_text(address: str, chunk: FileChunk, schema: StreamSchema) -> pa.Table:
    place, names = f"address {address}", list(schema.text_columns)
    remedy = "name them in StreamSchema.text_columns"
    check(bool(names), place, "the names of all columns of a text file", "none", remedy)
    text = read_bytes(address, chunk.start, chunk.end)
    types = {name: pa.float32() for name in (schema.label, *schema.dense)}
    types |= {name: pa.dictionary(pa.int32(), pa.binary()) for name in schema.single_id}
    types |= {
        name: pa.binary()
        for name in (*schema.multi_hot, schema.split_by)
        if name is not None and name not in types
    }
    if not schema.hashed:
        types |= dict.fromkeys(schema.single_id, pa.int64())
    try:
        return pv.read_csv(
            io.BytesIO(text),
            read_options=pv.ReadOptions(
                column_names=names, use_threads=False, block_size=len(text) + 1
            ),
            parse_options=pv.ParseOptions(
                delimiter=schema.separator, quote_char=False, ignore_empty_lines=False
            ),
            convert_options=pv.ConvertOptions(
                column_types=types,
                include_columns=list(schema.columns),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        line, received = _first_malformed(text, schema)
        where = f"{place}, line {chunk.first_row + line + 1}" if line >= 0 else place
        requirement = f"{len(names)} fields, with numbers in label and dense columns"
        requirement += "" if schema.hashed else ", integers in those of ids"
        raise ValueError(
            describe(where, requirement, received or str(error), "clean the data")
        ) from error


def _first_malformed(text: bytes, schema: StreamSchema) -> tuple[int, str]:
    """(number, beginning) of the first line that pyarrow would refuse; (-1, "") if none is found."""
    separator = schema.separator.encode()
    numbers: dict[str, Callable[[bytes], object]] = {
        name: float for name in (schema.label, *schema.dense)
    }
    if not schema.hashed:
        numbers |= dict.fromkeys(schema.single_id, _integer)
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


def _integer(field: bytes) -> pa.Scalar:
    """Raises ArrowInvalid, a ValueError, where pyarrow finds no integer: Python's own finds more."""
    return pa.scalar(field.strip(), pa.binary()).cast(pa.int64())


def _numbers(column: pa.Array, place: str, *, missing: float) -> np.ndarray:
    """float32, with a number for those that are missing."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    check(any(test(column.type) for test in tests), place, "numbers", column.type)
    numbers = column.cast(pa.float32(), safe=False).fill_null(missing)
    return np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float32)


def _dense(column: pa.Array, address: str, chunk: FileChunk, name: str) -> np.ndarray:
    """float32, 0 where missing: in Parquet NaN says so too, as arrays have no other word for it."""
    values = _numbers(column, f"address {address}, column {name!r}", missing=0)
    if is_parquet(address):
        values[np.isnan(values)] = 0
    _check_finite(values, address, chunk, name, "a finite number")
    return values


def _check_finite(
    values: np.ndarray, address: str, chunk: FileChunk, name: str, requirement: str
) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = chunk.first_row + int(bad[0])
        sample = f"row {row}" if is_parquet(address) else f"line {row + 1}"
        where = f"address {address}, {sample}, column {name!r}"
        raise ValueError(describe(where, requirement, values[bad[0]], "clean the data"))


def _transformed(columns: list[np.ndarray], num_rows: int, log_dense: bool) -> np.ndarray:
    dense = np.stack(columns, axis=1) if columns else np.empty((num_rows, 0), np.float32)
    return np.log1p(np.maximum(dense, 0, out=dense), out=dense) if log_dense else dense
