"""Files of any size as batches: Parquet and CSV, local or on storage, read by pyarrow.dataset."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.dataset as ds
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from pyarrow.fs import LocalFileSystem as ArrowLocal
from torch import Tensor
from torchrec.datasets.utils import Batch

from dnis_torchrec.blocks.hashing import HASH_VERSION, MISSING_ROW, rows_of_values, spread
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.batches import CLEAN, SPLIT_RATIOS, Bags, features_of_samples
from dnis_torchrec.data.recipe import DataSplits
from dnis_torchrec.data.urls import Address, storage
from dnis_torchrec.ranks import rank_of, world_size_of

WINDOW_SAMPLES = 1 << 17
"""Samples that are shuffled together: more no longer fit a CPU's cache, and are read slower."""
_READ_ROWS = 1 << 16
_NO_ROW = -1
_IDS = "integers, strings or bytes"
_TEXTS = ("string", "binary", "large_string", "large_binary")


@dataclass(frozen=True, kw_only=True)
class FileSchema:
    """The meaning of every column of the files.

    Attributes:
        label: column that holds the labels, as numbers.
        dense: columns of the dense features; a missing number is 0.
        single_id: column with one id a row -> rows of its table.
        multi_hot: column with any number of ids a row, as a list or as text -> rows of its table.
        hashed: ids are hashed into rows 1 and up, row 0 is that of missing ones; False: they are
            rows.
        log_dense: dense features become ``log(1 + max(x, 0))``.
        text_columns: names of all columns of CSV files without a header line; none: the first line
            has the names.
        separator: between the fields of CSV files.
        list_separator: between the ids of a bag that is text; an empty piece is no id.
    """

    label: str
    dense: tuple[str, ...] = ()
    single_id: Mapping[str, int] = field(default_factory=dict)
    multi_hot: Mapping[str, int] = field(default_factory=dict)
    hashed: bool = True
    log_dense: bool = False
    text_columns: tuple[str, ...] = ()
    separator: str = "\t"
    list_separator: str = "|"

    def __post_init__(self) -> None:
        place, lowest = "FileSchema", 2 if self.hashed else 1
        check(bool(self.num_embeddings), place, "a feature in single_id or multi_hot", "none")
        twice = sorted(set(self.single_id) & set(self.multi_hot))
        check(not twice, f"{place}.multi_hot", "features that single_id lacks", twice)
        for name, rows in self.num_embeddings.items():
            requirement = f"num_embeddings in {lowest}..2**31-1"
            check(lowest <= rows < 2**31, f"feature {name!r}", requirement, rows)
        is_one = len(self.separator) == 1 and self.separator.isascii()
        check(is_one, f"{place}.separator", "one character of ASCII", repr(self.separator))
        check(bool(self.list_separator), f"{place}.list_separator", "at least one character", "''")
        is_once = len(set(self.text_columns)) == len(self.text_columns)
        check(is_once, f"{place}.text_columns", "distinct names", self.text_columns)
        for name in self.columns if self.text_columns else ():
            check_known(f"{place}: column", name, self.text_columns)

    @property
    def num_embeddings(self) -> dict[str, int]:
        """Feature -> rows of its table, in the order of the KJT: single-id features first."""
        return dict(self.single_id) | dict(self.multi_hot)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        return tuple(dict.fromkeys((self.label, *self.dense, *self.num_embeddings)))


@dataclass(frozen=True)
class Part:
    """The samples whose numbers a hash spreads into an interval of 0 to 1."""

    begin: float
    end: float
    seed: int = 0

    def contains(self, numbers: np.ndarray) -> np.ndarray:
        """Marks the numbers of samples that lie in the part, bool."""
        positions = spread(numbers, self.seed)
        return (positions >= self.begin) & (positions < self.end)


WHOLE = Part(0.0, 1.0)
"""All samples."""


def cut(fractions: Sequence[float], *, seed: int = 0) -> tuple[Part, ...]:
    """Cuts all samples into disjoint parts; a hash alone decides where a sample goes."""
    check(seed >= 0, "seed", "an integer >= 0", seed)
    check(bool(fractions) and min(fractions) > 0, "fractions", "> 0", fractions)
    check(math.fsum(fractions) <= 1 + 1e-9, "fractions", "a sum of at most 1", fractions)
    ends = [math.fsum(fractions[: index + 1]) for index in range(len(fractions))]
    # Rounding must not leave the last samples without a part.
    ends = [1.0 if abs(end - 1) < 1e-9 else end for end in ends]
    return tuple(Part(begin, end, seed) for begin, end in zip([0.0, *ends[:-1]], ends, strict=True))


class _Chunk(NamedTuple):
    """A row group of a Parquet file, or a whole CSV file."""

    fragment: ds.Fragment
    num_rows: int
    first_sample: int
    file: str
    first_row: int

    def place(self, row: int) -> str:
        """Where a row of the chunk is."""
        return f"{self.file} {self.first_row + row}"

    def rows(self, part: Part, begin: int, size: int) -> np.ndarray:
        """Which of so many rows are in a part, numbered from `begin`."""
        if part == WHOLE:
            return np.arange(size)
        numbers = np.arange(size, dtype=np.uint64) + np.uint64(self.first_sample + begin)
        return np.flatnonzero(part.contains(numbers))


class FileSamples:
    """All samples of files, folders and globs, on this machine or wherever fsspec reaches:
    ``.parquet`` and ``.pq`` are Parquet, all others CSV. None is held in memory."""

    def __init__(self, addresses: Sequence[Address], schema: FileSchema) -> None:
        check(not isinstance(addresses, str), "addresses", "a list of them", repr(addresses))
        self.schema = schema
        self._chunks: list[_Chunk] = []
        for address in addresses:
            with storage(address) as (files, path):
                is_glob = any(sign in path for sign in "*?[") and not files.exists(path)
                names = sorted(files.glob(path) if is_glob else files.find(path))
                names = [name for name in names if files.isfile(name)]
                check(bool(names), f"address {address}", "at least one file", "none")
                for name in names:
                    self._add_file(name, files)
        numbers = [chunk.num_rows for chunk in self._chunks]
        settings = asdict(schema) | {"split_by": None}  # a setting of earlier checkpoints
        content = json.dumps([settings, list(schema.num_embeddings), numbers, HASH_VERSION])
        self.layout = hashlib.sha256(content.encode()).hexdigest()

    @property
    def num_samples(self) -> int:
        """Samples of all files."""
        return sum(chunk.num_rows for chunk in self._chunks)

    def _add_file(self, name: str, files: AbstractFileSystem) -> None:
        place, is_parquet = f"file {name}", name.endswith((".parquet", ".pq"))
        kind = ds.ParquetFileFormat() if is_parquet else self._csv()
        unit, row = ("row", 0) if is_parquet else ("line", 1 + (not self.schema.text_columns))
        num_samples = self.num_samples
        try:
            is_local = isinstance(files, LocalFileSystem)  # which pyarrow reads without Python
            reader = ArrowLocal() if is_local else PyFileSystem(FSSpecHandler(files))
            fragment = kind.make_fragment(name, filesystem=reader)
            for column in self.schema.columns:
                check_known(f"{place}: column", column, fragment.physical_schema.names)
            for part in fragment.split_by_row_group() if is_parquet else [fragment]:
                num_rows = part.row_groups[0].num_rows if is_parquet else part.count_rows()
                if num_rows:
                    chunk = _Chunk(part, num_rows, self.num_samples, f"{place}, {unit}", row)
                    self._chunks.append(chunk)
                row += num_rows
        except pa.ArrowInvalid as error:
            raise ValueError(_unreadable(place, error)) from error
        check(self.num_samples > num_samples, place, "at least one sample", "an empty file")

    def _csv(self) -> ds.CsvFileFormat:
        schema = self.schema
        types = {name: pa.float32() for name in (schema.label, *schema.dense)}
        types = {name: pa.binary() for name in schema.num_embeddings} | types
        if not schema.hashed:
            types |= dict.fromkeys(schema.single_id, pa.int64())
        lines = {"delimiter": schema.separator, "quote_char": False, "ignore_empty_lines": False}
        values = {"column_types": types, "null_values": [""], "strings_can_be_null": True}
        return ds.CsvFileFormat(
            read_options=pv.ReadOptions(column_names=list(schema.text_columns) or None),
            parse_options=pv.ParseOptions(**lines),
            convert_options=pv.ConvertOptions(**values),
        )

    def counts(self, part: Part) -> np.ndarray:
        """Samples of a part in each chunk."""
        return np.array([len(chunk.rows(part, 0, chunk.num_rows)) for chunk in self._chunks])

    def read(self, index: int, part: Part, first: int, last: int) -> Iterator[pa.Table]:
        """Samples first <= i < last of a part in a chunk, as `_encode` has them."""
        chunk, begin, number = self._chunks[index], 0, 0
        options = {"batch_size": _READ_ROWS, "batch_readahead": 2, "fragment_readahead": 1}
        try:
            for table in chunk.fragment.to_batches(columns=list(self.schema.columns), **options):
                rows = chunk.rows(part, begin, table.num_rows)
                inside = rows[max(first - number, 0) : max(last - number, 0)]
                if len(inside):
                    yield _encode(table, self.schema, chunk, begin, inside)
                begin, number = begin + table.num_rows, number + len(rows)
                if number >= last:
                    return
        except pa.ArrowInvalid as error:
            raise ValueError(_unreadable(chunk.place(begin), error)) from error
        requirement = f"{chunk.num_rows} rows, as when it was first read"
        raise ValueError(describe(chunk.place(0), requirement, begin))


class FileBatches:
    """Batches of one part of the samples of files, to be iterated again and again: each time is the
    next epoch.

    Chunks (row groups, or whole CSV files) come in a new order each epoch, and samples are shuffled
    within windows. Every rank reads its own share, as many batches on every rank. ``state_dict``
    and ``load_state_dict`` keep the position behind the last batch. With `drop_last` what does not
    fill a batch on every rank is left out; else all samples come, in batches that may be smaller.
    """

    is_split_over_ranks = True
    """Told to `dnis_torchrec.data.over_ranks`, which would split it again otherwise."""

    def __init__(
        self,
        samples: FileSamples,
        *,
        batch_size: int,
        part: Part = WHOLE,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        window_batches: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check(batch_size >= 1, "batch_size", "an integer >= 1", batch_size)
        check(seed >= 0, "seed", "an integer >= 0", seed)
        self._samples, self._part, self._counts = samples, part, samples.counts(part)
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last, self._rank, self._world_size = drop_last, rank, world_size
        self._window_batches = window_batches or max(1, WINDOW_SAMPLES // batch_size)
        # (epoch, batch): behind the last batch handed out, and where the next iteration begins.
        self._position = self._next = (0, 0)
        len(self)  # refuses too few samples now

    @property
    def epoch(self) -> int:
        """Number of the next epoch, from 0; set it to resume at the beginning of one."""
        return self._next[0]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch."""
        self._position = self._next = (epoch, 0)

    @property
    def num_samples(self) -> int:
        """Samples of the part, on all ranks together."""
        return int(self._counts.sum())

    def _ranks(self) -> tuple[int, int]:
        """Rank and number of ranks, late: recipes are built before there is a process group."""
        rank = rank_of() if self._rank is None else self._rank
        return rank, world_size_of() if self._world_size is None else self._world_size

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same number on every rank."""
        _, world_size = self._ranks()
        least = world_size * (self._batch_size if self._drop_last else 1)
        requirement = f"at least {least} samples for {world_size} ranks"
        remedy = "use fewer ranks or a smaller batch"
        check(self.num_samples >= least, "stream", requirement, self.num_samples, remedy)
        if self._drop_last:
            return self.num_samples // least
        return -(-(self.num_samples // world_size) // self._batch_size)

    def _bounds(self) -> np.ndarray:
        """Batch b holds samples ``bounds[b]..bounds[b + 1] - 1`` of an epoch's order."""
        batches, (rank, world_size) = np.arange(len(self) + 1), self._ranks()
        if self._drop_last:
            return (rank * len(self) + batches) * self._batch_size
        first, last = (self.num_samples * r // world_size for r in (rank, rank + 1))
        return first + (last - first) * batches // len(self)

    def _pieces(self, epoch: int, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Where the samples from begin to before end are: (chunk, first, last) of each."""
        order = np.arange(len(self._counts))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch, 0)).permutation(order)
        ends = np.cumsum(self._counts[order])
        starts = ends - self._counts[order]
        firsts, lasts = np.maximum(starts, begin) - starts, np.minimum(ends, end) - starts
        pieces = zip(order.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        return [piece for piece in pieces if piece[1] < piece[2]]

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = self._position = self._next
        self._next = (epoch + 1, 0)
        return self._batches(epoch, first)

    def each_sample(self) -> Iterator[Batch]:
        """Every sample of the part once, over all ranks, in file order; the position stays."""
        whole = copy(self)
        whole._drop_last = whole._shuffle = False
        return whole._batches(0, 0)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        bounds, num_windows = self._bounds(), -(-len(self) // self._window_batches)
        first_window = first // self._window_batches
        begin = bounds[first_window * self._window_batches]
        tables = (
            table
            for piece in self._pieces(epoch, begin, bounds[-1])
            for table in self._samples.read(piece[0], self._part, *piece[1:])
        )
        rest = next(tables)
        for window in range(first_window, num_windows):
            number = window * self._window_batches
            ends = bounds[number : number + self._window_batches + 1]
            size = int(ends[-1] - ends[0])
            while rest.num_rows < size:
                rest = pa.concat_tables([rest, next(tables)])
            (samples,) = rest[:size].combine_chunks().to_batches()
            rest = rest[size:]
            if self._shuffle:
                key = (self._seed, epoch, 1 + self._ranks()[0], 1 + window)
                samples = samples.take(np.random.default_rng(key).permutation(size))
            for start, end in pairwise((ends - ends[0]).tolist()):
                number += 1
                if number > first:
                    # Before the yield: whoever has the batch finds the position behind it.
                    self._position = (epoch + 1, 0) if number == len(self) else (epoch, number)
                    yield self._batch(samples[start:end])

    def _batch(self, samples: pa.RecordBatch) -> Batch:
        schema, columns = self._samples.schema, samples.columns
        num_dense, num_single = len(schema.dense), len(schema.single_id)
        lists = columns[1 + num_dense + num_single :]
        bags = [
            Bags.of_lengths(_tensor(of.flatten()), _tensor(pc.list_value_length(of)))
            for of in lists
        ]
        labels, *rows = (_tensor(column) for column in columns[: len(columns) - len(lists)])
        none = torch.empty(len(labels), 0)
        dense = torch.stack(rows[:num_dense], dim=1) if num_dense else none
        ids = torch.stack(rows[num_dense:], dim=1) if num_single else none
        features = features_of_samples(list(schema.num_embeddings), ids, bags)
        return Batch(dense, features, labels)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch handed out, and what it is a position in."""
        return {
            "epoch": self._position[0],
            "batch": self._position[1],
            "num_batches": len(self),
            "layout": self._samples.layout,
            "part": [self._part.begin, self._part.end, self._part.seed],
            "batch_size": self._batch_size,
            "world_size": self._ranks()[1],
            "window_batches": self._window_batches,
            "drop_last": self._drop_last,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position: the next iteration begins with the batch behind it."""
        remedy = "resume with the data, settings and ranks of the checkpoint"
        for name, value in self.state_dict().items():
            same = name in ("epoch", "batch") or state.get(name) == value
            check(same, f"stream's {name}", f"{value}", state.get(name), remedy)
        epoch, batch = int(state["epoch"]), int(state["batch"])
        check(0 <= batch < len(self), "stream's batch", f"0..{len(self) - 1}", batch)
        self._position = self._next = (epoch, batch)


def split_files(
    samples: FileSamples, *, batch_size: int, seed: int, fractions: Sequence[float] = SPLIT_RATIOS
) -> DataSplits:
    """The four disjoint parts of a search, all split off the same files."""
    train, validation, selection, test = (
        FileBatches(
            samples, part=part, batch_size=batch_size, seed=seed, shuffle=learns, drop_last=learns
        )
        for part, learns in zip(cut(fractions, seed=seed), (True, True, False, False), strict=True)
    )
    return DataSplits(train=train, validation=validation, selection=selection, test=test)


def _unreadable(place: str, error: Exception) -> str:
    requirement = "Parquet, or CSV whose columns are as the schema says"
    return describe(place, requirement, str(error).split("\n")[0], CLEAN)


def _tensor(column: pa.Array) -> Tensor:
    return torch.tensor(column.to_numpy(zero_copy_only=False))


def _encode(
    table: pa.RecordBatch, schema: FileSchema, chunk: _Chunk, begin: int, rows: np.ndarray
) -> pa.Table:
    """Rows of a table, which begins with row `begin` of a chunk: the columns label, dense,
    single_id and multi_hot, as numbers, rows of embedding tables and lists of such rows."""
    table = pa.RecordBatch.from_pydict({name: _plain(table[name]) for name in schema.columns})
    is_slice = len(rows) == rows[-1] - rows[0] + 1
    table = table.slice(rows[0], len(rows)) if is_slice else table.take(pa.array(rows))
    here = lambda number: chunk.place(begin + int(rows[number]))  # noqa: E731
    arrays = [pa.array(_numbers(table[schema.label], schema.label, here, math.nan))]
    for name in schema.dense:
        values = _numbers(table[name], name, here, 0)
        arrays.append(pa.array(np.log1p(np.maximum(values, 0)) if schema.log_dense else values))
    for name in schema.num_embeddings:
        encode = _row_of_each if name in schema.single_id else _bags
        where = f"{here(0)} and on, column {name!r}"
        arrays.append(encode(table[name], schema, name, where))
    return pa.Table.from_arrays(arrays, names=[str(number) for number in range(len(arrays))])


def _plain(column: pa.Array) -> pa.Array:
    """A column without dictionaries and views, and with one kind of list, none of them missing."""
    kind = column.type
    if str(kind).partition("<")[0].endswith(("list", "list_view")):
        offsets = np.zeros(len(column) + 1, np.int64)
        np.cumsum(pc.fill_null(pc.list_value_length(column), 0), out=offsets[1:])
        # `flatten` leaves out what a missing list may hide, as `values` does not.
        return pa.LargeListArray.from_arrays(offsets, _plain(column.flatten()))
    if pa.types.is_dictionary(kind):
        return _plain(column.dictionary_decode())
    return column.cast(pa.large_binary()) if str(kind).endswith("_view") else column


def _numbers(column: pa.Array, name: str, at: Callable[[int], str], default: float) -> np.ndarray:
    """float32, with a number for those that are missing, as NaN is."""
    try:
        numbers = column.cast(pa.float32(), safe=False).fill_null(math.nan)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        where = f"{at(0)} and on, column {name!r}"
        raise ValueError(describe(where, "numbers", str(error), CLEAN)) from error
    values = np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float32)
    values[np.isnan(values)] = default
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        where = f"{at(bad[0])}, column {name!r}"
        raise ValueError(describe(where, "a finite number", values[bad[0]], CLEAN))
    return values


def _row_of_each(column: pa.Array, schema: FileSchema, name: str, where: str) -> pa.Array:
    check(not pa.types.is_large_list(column.type), where, _IDS, "lists", "name it in multi_hot")
    rows = _rows(column, schema, name, where)
    number = 0 if schema.hashed else int((rows == _NO_ROW).sum())
    check(number == 0, where, "an id in every row", f"{number} missing")
    return pa.array(rows)


def _bags(column: pa.Array, schema: FileSchema, name: str, where: str) -> pa.Array:
    """Of a column of lists, of text with a separator, or of one value per sample."""
    if str(column.type) in _TEXTS:
        column = _plain(pc.split_pattern(column, schema.list_separator))
    offsets = np.arange(len(column) + 1)
    if pa.types.is_large_list(column.type):
        offsets[1:] = np.cumsum(pc.list_value_length(column))
        column = column.flatten()
    check(not pa.types.is_large_list(column.type), where, f"{_IDS} in lists", "lists of lists")
    rows = _rows(column, schema, name, where)
    is_id = rows != (MISSING_ROW if schema.hashed else _NO_ROW)
    offsets = np.concatenate([[0], np.cumsum(is_id)])[offsets]
    return pa.LargeListArray.from_arrays(offsets, rows[is_id])


def _rows(values: pa.Array, schema: FileSchema, name: str, where: str) -> np.ndarray:
    """Rows of a table, int32: of missing values `MISSING_ROW` if hashed, `_NO_ROW` if not."""
    num_embeddings = schema.num_embeddings[name]
    if schema.hashed:
        # Each distinct text is looked at once.
        values = values.dictionary_encode() if str(values.type) in _TEXTS else values
        return rows_of_values(_canonical(values, where), num_embeddings)
    remedy = "clean the data, or set FileSchema.hashed"
    try:
        ids = _canonical(values, where).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(describe(where, "integers", str(error), remedy)) from error
    limits = pc.min_max(ids).as_py()
    lowest, highest = limits["min"] or 0, limits["max"] or 0  # None where there is no id
    is_inside, id_outside = 0 <= lowest <= highest < num_embeddings, min(lowest, 0) or highest
    check(is_inside, where, f"ids in 0..{num_embeddings - 1}", id_outside, remedy)
    return ids.cast(pa.int32()).fill_null(_NO_ROW).to_numpy(zero_copy_only=False)


def _canonical(values: pa.Array, where: str) -> pa.Array:
    """Integers, or bytes of text; missing where there is none: equal in whatever file they are."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(values.indices, _canonical(values.dictionary, where))
    if pa.types.is_integer(kind):
        return values
    if pa.types.is_null(kind):
        return values.cast(pa.int64())
    if pa.types.is_floating(kind):
        try:
            return pc.if_else(pc.is_nan(values), None, values).cast(pa.int64())
        except pa.ArrowInvalid as error:
            remedy = "cast the column to integers or text"
            raise ValueError(describe(where, "whole numbers", str(error), remedy)) from error
    check(str(kind) in _TEXTS, where, _IDS, kind, "cast it to integers or strings")
    is_large = "large" in str(kind)
    # Bytes that are no UTF-8 are trimmed as any others: nothing looks at more than single bytes.
    text = pc.ascii_trim_whitespace(values.view(pa.large_string() if is_large else pa.string()))
    text = pc.if_else(pc.equal(pc.binary_length(text), 0), None, text)
    return text.view(pa.large_binary() if is_large else pa.binary())
