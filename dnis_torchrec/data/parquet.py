"""Files of any size as batches: Parquet and CSV, local or on storage, read by pyarrow.dataset."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.dataset as ds
import torch
from fsspec import AbstractFileSystem
from torch import Tensor
from torchrec.datasets.utils import Batch

from dnis_torchrec.blocks.hashing import MISSING_ROW, rows_of_values, spread
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.batches import CLEAN, SPLIT_RATIOS, Bags, features_of_samples
from dnis_torchrec.data.recipe import SPLITS, DataSplits
from dnis_torchrec.data.urls import Address, storage
from dnis_torchrec.ranks import rank_of, world_size_of

WINDOW_SAMPLES = 1 << 17  # are shuffled together: more would not fit a CPU's cache
_READ_ROWS = 1 << 16
_IDS = "integers, strings or bytes"
_TEXTS = ("string", "binary", "large_string", "large_binary")


@dataclass(frozen=True, kw_only=True)
class FileSchema:
    """The meaning of every column. Ids are hashed into rows 1 and up, missing ones into row 0."""

    label: str
    dense: tuple[str, ...] = ()  # a missing number is 0
    single_id: Mapping[str, int] = field(default_factory=dict)  # one id a row -> rows of its table
    multi_hot: Mapping[str, int] = field(default_factory=dict)  # ids in lists, or text -> rows
    log_dense: bool = False  # dense features become log(1 + max(x, 0))
    text_columns: tuple[str, ...] = ()  # names of all columns of CSV files without a header line
    separator: str = "\t"  # between the fields of CSV files
    list_separator: str = "|"  # between the ids of a bag that is text; an empty piece is no id

    def __post_init__(self) -> None:
        has_any, requirement = bool(self.num_embeddings), "a feature in single_id or multi_hot"
        check(has_any, "FileSchema", requirement, "none")
        twice = sorted(set(self.single_id) & set(self.multi_hot))
        check(not twice, "FileSchema.multi_hot", "features that single_id lacks", twice)
        for name, rows in self.num_embeddings.items():
            check(1 < rows < 2**31, f"feature {name!r}", "num_embeddings in 2..2**31-1", rows)

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


def cut(fractions: Sequence[float], *, seed: int = 0) -> tuple[Part, ...]:
    """Cuts all samples into disjoint parts; a hash alone decides where a sample goes."""
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

    @property
    def num_samples(self) -> int:
        """Samples of all files."""
        return sum(chunk.num_rows for chunk in self._chunks)

    def _add_file(self, name: str, files: AbstractFileSystem) -> None:
        place, is_parquet = f"file {name}", name.endswith((".parquet", ".pq"))
        kind = ds.ParquetFileFormat() if is_parquet else self._csv()
        unit, row = ("row", 0) if is_parquet else ("line", 1 + (not self.schema.text_columns))
        num_chunks = len(self._chunks)
        try:
            (fragment,) = ds.dataset(name, format=kind, filesystem=files).get_fragments()
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
        check(len(self._chunks) > num_chunks, place, "at least one sample", "an empty file")

    def _csv(self) -> ds.CsvFileFormat:
        schema = self.schema
        types = {name: pa.float32() for name in (schema.label, *schema.dense)}
        types = {name: pa.binary() for name in schema.num_embeddings} | types
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
    """Batches of one part of the samples of files; every rank reads its own share, as many batches
    as any other. Each iteration is the next epoch."""

    is_split_over_ranks = True  # else `over_ranks` would split it again

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
    ) -> None:
        check(batch_size >= 1, "batch_size", "an integer >= 1", batch_size)
        self._samples, self._part, self._counts = samples, part, samples.counts(part)
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        # What does not fill a batch on every rank is left out, else batches may be smaller.
        self._drop_last = drop_last
        self._window_batches = window_batches or max(1, WINDOW_SAMPLES // batch_size)
        self.epoch = 0
        len(self)  # refuses too few samples now

    @property
    def num_samples(self) -> int:
        """Samples of the part, on all ranks together."""
        return int(self._counts.sum())

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same number on every rank."""
        # Late: recipes are built before there is a process group.
        world_size = world_size_of()
        least = world_size * (self._batch_size if self._drop_last else 1)
        requirement = f"at least {least} samples for {world_size} ranks"
        remedy = "use fewer ranks or a smaller batch"
        check(self.num_samples >= least, "stream", requirement, self.num_samples, remedy)
        if self._drop_last:
            return self.num_samples // least
        return -(-(self.num_samples // world_size) // self._batch_size)

    def _bounds(self) -> np.ndarray:
        """Batch b holds samples ``bounds[b]..bounds[b + 1] - 1`` of an epoch's order."""
        batches, rank, world_size = np.arange(len(self) + 1), rank_of(), world_size_of()
        if self._drop_last:
            return (rank * len(self) + batches) * self._batch_size
        first, last = (self.num_samples * r // world_size for r in (rank, rank + 1))
        return first + (last - first) * batches // len(self)

    def _tables(self, epoch: int, begin: int, end: int) -> Iterator[pa.Table]:
        """The samples from begin to before end of an epoch's order."""
        order, start = np.arange(len(self._counts)), 0
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch, 0)).permutation(order)
        for chunk in order.tolist():
            first, last = max(begin - start, 0), min(end - start, self._counts[chunk])
            if first < last:
                yield from self._samples.read(chunk, self._part, first, last)
            start += self._counts[chunk]

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return self._batches(self.epoch - 1)

    def each_sample(self) -> Iterator[Batch]:
        """Every sample of the part once, over all ranks, in file order; no epoch."""
        whole = copy(self)
        whole._drop_last = whole._shuffle = False
        return whole._batches(0)

    def _batches(self, epoch: int) -> Iterator[Batch]:
        bounds = self._bounds()
        tables = self._tables(epoch, bounds[0], bounds[-1])
        rest = next(tables)
        for window, first in enumerate(range(0, len(self), self._window_batches)):
            ends = bounds[first : first + self._window_batches + 1]
            size = int(ends[-1] - ends[0])
            while rest.num_rows < size:
                rest = pa.concat_tables([rest, next(tables)])
            (samples,) = rest[:size].combine_chunks().to_batches()
            rest = rest[size:]
            if self._shuffle:
                key = (self._seed, epoch, 1 + rank_of(), 1 + window)
                samples = samples.take(np.random.default_rng(key).permutation(size))
            for start, end in pairwise((ends - ends[0]).tolist()):
                yield self._batch(samples[start:end])

    def _batch(self, samples: pa.RecordBatch) -> Batch:
        schema, columns = self._samples.schema, samples.columns
        num_dense, num_single = len(schema.dense), len(schema.single_id)
        num_plain = 1 + num_dense + num_single
        ids_of_bags = [(_tensor(c.flatten()), pc.list_value_length(c)) for c in columns[num_plain:]]
        bags = [Bags.of_lengths(ids, _tensor(lengths)) for ids, lengths in ids_of_bags]
        labels, *rows = (_tensor(column) for column in columns[:num_plain])
        none = torch.empty(len(labels), 0)
        dense = torch.stack(rows[:num_dense], dim=1) if num_dense else none
        ids = torch.stack(rows[num_dense:], dim=1) if num_single else none
        features = features_of_samples(list(schema.num_embeddings), ids, bags)
        return Batch(dense, features, labels)


def split_files(
    samples: FileSamples, *, batch_size: int, seed: int, fractions: Sequence[float] = SPLIT_RATIOS
) -> DataSplits:
    """The four disjoint parts of a search, all split off the same files."""
    splits: dict[str, Any] = {}
    for name, part in zip(SPLITS, cut(fractions, seed=seed), strict=True):
        learns = name in ("train", "validation")
        how: Any = {"batch_size": batch_size, "seed": seed, "shuffle": learns, "drop_last": learns}
        splits[name] = FileBatches(samples, part=part, **how)
    return DataSplits(**splits)


def _unreadable(place: str, error: Exception) -> str:
    requirement = "Parquet, or CSV whose columns are as the schema says"
    return describe(place, requirement, str(error).split("\n")[0], CLEAN)


def _tensor(column: pa.Array) -> Tensor:
    return torch.tensor(column.to_numpy(zero_copy_only=False))


def _encode(
    table: pa.RecordBatch, schema: FileSchema, chunk: _Chunk, begin: int, rows: np.ndarray
) -> pa.Table:
    """Rows of a table that begins with row `begin` of a chunk: labels, dense features, ids."""
    table = pa.RecordBatch.from_pydict({name: _plain(table[name]) for name in schema.columns})
    is_slice = len(rows) == rows[-1] - rows[0] + 1
    table = table.slice(rows[0], len(rows)) if is_slice else table.take(pa.array(rows))
    here = lambda number: chunk.place(begin + int(rows[number]))  # noqa: E731
    arrays = [pa.array(_numbers(table[schema.label], schema.label, here, math.nan))]
    for name in schema.dense:
        values = _numbers(table[name], name, here, 0)
        arrays.append(pa.array(np.log1p(np.maximum(values, 0)) if schema.log_dense else values))
    for name in schema.num_embeddings:
        where = f"{here(0)} and on, column {name!r}"
        arrays.append(_ids(table[name], schema, name, where))
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


def _ids(column: pa.Array, schema: FileSchema, name: str, where: str) -> pa.Array:
    """Rows of a table, int32: one a sample, or lists: of lists, of text, or of one value each."""
    is_single, num_embeddings = name in schema.single_id, schema.num_embeddings[name]
    if str(column.type) in _TEXTS and not is_single:
        column = _plain(pc.split_pattern(column, schema.list_separator))
    offsets = np.arange(len(column) + 1)
    if pa.types.is_large_list(column.type) and not is_single:
        offsets[1:] = np.cumsum(pc.list_value_length(column))
        column = column.flatten()
    requirement = _IDS if is_single else f"{_IDS} in lists"
    check(not pa.types.is_large_list(column.type), where, requirement, "lists in place of an id")
    # Each distinct text is looked at once.
    values = column.dictionary_encode() if str(column.type) in _TEXTS else column
    rows = rows_of_values(_canonical(values, where), num_embeddings)
    if is_single:
        return pa.array(rows)
    is_id = rows != MISSING_ROW
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(is_id))[offsets], rows[is_id])


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
