"""Files of any size as batches: Parquet and CSV, local or on storage, read by pyarrow.dataset."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

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

from dnis_torchrec.blocks.hashing import (
    HASH_VERSION,
    MISSING_ROW,
    hash_values,
    rows_of_values,
    spread,
)
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.batches import Bags, features_of_samples
from dnis_torchrec.data.recipe import DataSplits
from dnis_torchrec.data.urls import Address, storage
from dnis_torchrec.ranks import rank_of, world_size_of

WINDOW_SAMPLES = 1 << 17
"""Samples that are shuffled together: more no longer fit a CPU's cache, and are read slower."""
SPLIT_FRACTIONS = (0.8, 0.05, 0.05, 0.1)
"""train, validation, selection, test."""
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
        split_by: column whose value decides which part of a split a sample belongs to; None: the
            sample's number does.
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
    split_by: str | None = None

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
        split_by = () if self.split_by is None else (self.split_by,)
        return tuple(
            dict.fromkeys((self.label, *self.dense, *self.single_id, *self.multi_hot, *split_by))
        )


@dataclass(frozen=True)
class Part:
    """The samples whose keys a hash spreads into an interval of 0 to 1."""

    begin: float
    end: float
    seed: int = 0

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Marks the keys of samples that lie in the part, bool."""
        positions = spread(keys, self.seed)
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
    place: Callable[[int], str]


_Samples = dict[str, Tensor | Bags]
"""Columns of some samples: one row, or one bag, for each."""


def _select(samples: _Samples, rows: Tensor) -> _Samples:
    return {
        name: column.select(rows) if isinstance(column, Bags) else column.index_select(0, rows)
        for name, column in samples.items()
    }


def _joined(parts: Sequence[_Samples]) -> _Samples:
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: Bags.joined(column) if isinstance(column[0], Bags) else torch.cat(column)
        for name, column in columns.items()
    }


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
        content = json.dumps([asdict(schema), list(schema.num_embeddings), numbers, HASH_VERSION])
        self.layout = hashlib.sha256(content.encode()).hexdigest()

    @property
    def num_samples(self) -> int:
        """Samples of all files."""
        return sum(chunk.num_rows for chunk in self._chunks)

    def _add_file(self, name: str, files: AbstractFileSystem) -> None:
        place, is_parquet = f"file {name}", name.endswith((".parquet", ".pq"))
        kind = ds.ParquetFileFormat() if is_parquet else self._csv()
        first, unit = (0, "row") if is_parquet else (1 + (not self.schema.text_columns), "line")
        try:
            is_local = isinstance(files, LocalFileSystem)  # which pyarrow reads without Python
            reader = ArrowLocal() if is_local else PyFileSystem(FSSpecHandler(files))
            fragment = kind.make_fragment(name, filesystem=reader)
            for column in self.schema.columns:
                check_known(f"{place}: column", column, fragment.physical_schema.names)
            parts = fragment.split_by_row_group() if is_parquet else [fragment]
            begin = self.num_samples
            for part in parts:
                num_rows = part.row_groups[0].num_rows if is_parquet else part.count_rows()
                first_sample, row = self.num_samples, self.num_samples - begin + first
                if num_rows:
                    at = lambda sample, row=row: f"{place}, {unit} {row + sample}"  # noqa: E731
                    self._chunks.append(_Chunk(part, num_rows, first_sample, at))
        except pa.ArrowInvalid as error:
            raise ValueError(_unreadable(place, error)) from error
        check(self.num_samples > begin, place, "at least one sample", "an empty file")

    def _csv(self) -> ds.CsvFileFormat:
        schema = self.schema
        types = {name: pa.float32() for name in (schema.label, *schema.dense)}
        texts = (*schema.single_id, *schema.multi_hot, schema.split_by)
        types |= {name: pa.binary() for name in texts if name is not None and name not in types}
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
        """Samples of a part in each chunk; reads the column that splits, where one does."""
        if part == WHOLE:
            return np.array([chunk.num_rows for chunk in self._chunks])
        counts, name = np.zeros(len(self._chunks), np.int64), self.schema.split_by
        for index, chunk in enumerate(self._chunks):
            tables: Any = [(0, None)] if name is None else self._read(chunk, [name])
            counts[index] = sum(len(self._rows(chunk, part, *table)) for table in tables)
        return counts

    def _rows(self, chunk: _Chunk, part: Part, first: int, table: Any) -> np.ndarray:
        """Numbers of the rows of a table, which begins with row `first` of a chunk, in a part."""
        name, number = self.schema.split_by, chunk.num_rows if table is None else table.num_rows
        if part == WHOLE:
            return np.arange(number)
        if name is None:
            start = chunk.first_sample + first
            keys = np.arange(start, start + number, dtype=np.uint64)
        else:
            where = f"{chunk.place(first)} and on, column {name!r}, which splits"
            values = _canonical(_decoded(table[name]), where)
            check(values.null_count == 0, where, "a value in every row", "missing ones")
            keys = hash_values(values)
        return np.flatnonzero(part.contains(keys))

    def _read(self, chunk: _Chunk, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows of a chunk in order, and the number of the first one."""
        first = 0
        options = {"batch_size": _READ_ROWS, "batch_readahead": 2, "fragment_readahead": 1}
        try:
            for table in chunk.fragment.to_batches(columns=list(columns), **options):
                yield first, table
                first += table.num_rows
        except pa.ArrowInvalid as error:
            raise ValueError(_unreadable(chunk.place(first), error)) from error
        requirement = f"{chunk.num_rows} rows, as when it was first read"
        check(first == chunk.num_rows, chunk.place(0), requirement, first)

    def read(self, index: int, part: Part, first: int, last: int) -> Iterator[_Samples]:
        """The part's samples in a chunk, from number first to before last."""
        chunk, before = self._chunks[index], 0
        for row, table in self._read(chunk, self.schema.columns):
            rows = self._rows(chunk, part, row, table)
            wanted = rows[max(first - before, 0) : max(last - before, 0)]
            before += len(rows)
            if len(wanted):
                at = lambda number, row=row: chunk.place(row + int(number))  # noqa: E731
                yield _samples_of(table, self.schema, at, wanted)
            if before >= last:
                return


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
        self._samples, self._part = samples, part
        self._rank, self._world_size = rank, world_size
        self._order = _Order(
            counts=samples.counts(part),
            batch_size=batch_size,
            drop_last=drop_last,
            shuffle=shuffle,
            window_batches=window_batches or max(1, WINDOW_SAMPLES // max(1, batch_size)),
            seed=seed,
        )
        self._of_rank()  # refuses too few samples now
        # (epoch, batch): behind the last batch handed out, and where the next iteration begins.
        self._position = self._next = (0, 0)

    def _of_rank(self) -> _Order:
        """The order for this rank; recipes make their batches before there is a process group."""
        rank = rank_of() if self._rank is None else self._rank
        world_size = world_size_of() if self._world_size is None else self._world_size
        return replace(self._order, rank=rank, world_size=world_size)

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
        return self._order.num_samples

    def __len__(self) -> int:
        """Batches of an epoch on this rank, the same number on every rank."""
        return self._of_rank().num_batches

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = self._position = self._next
        self._next = (epoch + 1, 0)
        return self._batches(epoch, first)

    def counted(self) -> Iterator[Batch]:
        """Every sample of the part once, over all ranks, in file order; the position stays."""
        whole = copy(self)
        whole._order = replace(self._order, drop_last=False, shuffle=False)
        return whole._batches(0, 0)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        order, number = self._of_rank(), first
        first_window, skip = divmod(first, order.window_batches)
        bounds = order.bounds
        starts = bounds[first_window * order.window_batches :: order.window_batches]
        windows = self._windows(order, epoch, [*starts, bounds[-1]])
        for window, samples in enumerate(windows, start=first_window):
            rows = torch.from_numpy(
                order.permutation(epoch, window, len(cast(Tensor, samples["labels"])))
            )
            begin = window * order.window_batches
            ends = bounds[begin : begin + order.window_batches + 1]
            for start, end in list(pairwise((ends - ends[0]).tolist()))[skip:]:
                batch = self._batch(_select(samples, rows[start:end]))
                number += 1
                # Before the yield: whoever has the batch finds the position behind it.
                self._position = (epoch, number) if number < order.num_batches else (epoch + 1, 0)
                yield batch
            skip = 0

    def _windows(self, order: _Order, epoch: int, bounds: Sequence[int]) -> Iterator[_Samples]:
        """Samples between two neighbours of `bounds` of an epoch's order, one after the other."""
        waiting: list[_Samples] = []
        parts = (
            part
            for index, first, last in order.pieces(epoch, bounds[0], bounds[-1])
            for part in self._samples.read(index, self._part, first, last)
        )
        for begin, end in pairwise(bounds):
            while sum(len(cast(Tensor, part["labels"])) for part in waiting) < end - begin:
                waiting.append(next(parts))
            samples = _joined(waiting)
            rows = torch.arange(len(cast(Tensor, samples["labels"])))
            waiting = [_select(samples, rows[end - begin :])]
            yield _select(samples, rows[: end - begin])

    def _batch(self, samples: Any) -> Batch:
        schema = self._samples.schema
        bags = [samples[name] for name in schema.multi_hot]
        features = features_of_samples(list(schema.num_embeddings), samples["ids"], bags)
        return Batch(samples["dense"], features, samples["labels"])

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch handed out, and what it is a position in."""
        order = self._of_rank()
        names = ("batch_size", "world_size", "window_batches", "drop_last", "shuffle", "seed")
        return {
            "epoch": self._position[0],
            "batch": self._position[1],
            "num_batches": order.num_batches,
            "layout": self._samples.layout,
            "part": [self._part.begin, self._part.end, self._part.seed],
        } | {name: getattr(order, name) for name in names}

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
    samples: FileSamples,
    *,
    batch_size: int,
    seed: int,
    fractions: Sequence[float] = SPLIT_FRACTIONS,
) -> DataSplits:
    """The four disjoint parts of a search, all split off the same files."""
    train, validation, selection, test = (
        FileBatches(
            samples, part=part, batch_size=batch_size, seed=seed, shuffle=learns, drop_last=learns
        )
        for part, learns in zip(cut(fractions, seed=seed), (True, True, False, False), strict=True)
    )
    return DataSplits(train=train, validation=validation, selection=selection, test=test)


@dataclass(frozen=True, kw_only=True)
class _Order:
    """The order of every epoch, for one rank. Pure: ranks and resumed runs agree."""

    counts: np.ndarray
    batch_size: int
    drop_last: bool
    shuffle: bool
    window_batches: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check(self.batch_size >= 1, "batch_size", "an integer >= 1", self.batch_size)
        check(self.seed >= 0, "seed", "an integer >= 0", self.seed)
        least = self.world_size * (self.batch_size if self.drop_last else 1)
        requirement = f"at least {least} samples for {self.world_size} ranks"
        remedy = "use fewer ranks or a smaller batch"
        check(self.num_samples >= least, "stream", requirement, self.num_samples, remedy)

    @property
    def num_samples(self) -> int:
        return int(self.counts.sum())

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the same number on every rank."""
        if self.drop_last:
            return self.num_samples // (self.world_size * self.batch_size)
        return -(-(self.num_samples // self.world_size) // self.batch_size)

    @property
    def bounds(self) -> np.ndarray:
        """Batch b holds samples ``bounds[b]..bounds[b + 1] - 1`` of the epoch's order."""
        batches = np.arange(self.num_batches + 1)
        if self.drop_last:
            return (self.rank * self.num_batches + batches) * self.batch_size
        first, last = (
            self.num_samples * rank // self.world_size for rank in (self.rank, self.rank + 1)
        )
        return first + (last - first) * batches // self.num_batches

    def pieces(self, epoch: int, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Where the samples from begin to before end are: (chunk, first, last) of each."""
        order = np.arange(len(self.counts))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch, 0)).permutation(order)
        ends = np.cumsum(self.counts[order])
        starts = ends - self.counts[order]
        firsts, lasts = np.maximum(starts, begin) - starts, np.minimum(ends, end) - starts
        pieces = zip(order.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        return [piece for piece in pieces if piece[1] < piece[2]]

    def permutation(self, epoch: int, window: int, number: int) -> np.ndarray:
        """The order of a window's samples."""
        if not self.shuffle:
            return np.arange(number)
        key = (self.seed, epoch, 1 + self.rank, 1 + window)
        return np.random.default_rng(key).permutation(number)


def _unreadable(place: str, error: Exception) -> str:
    requirement = "Parquet, or CSV whose columns are as the schema says"
    return describe(place, requirement, str(error).split("\n")[0], "clean the data")


def _samples_of(
    table: pa.RecordBatch, schema: FileSchema, at: Callable[[int], str], rows: np.ndarray
) -> _Samples:
    """Some rows of a table; `at` says where one of its rows is."""
    if len(rows) == rows[-1] - rows[0] + 1:
        table = table.slice(int(rows[0]), len(rows))
    elif not any("view" in str(kind) for kind in table.schema.types):
        table = table.take(pa.array(rows))
    else:  # which pyarrow does not take rows of
        whole = _samples_of(table, schema, at, np.arange(table.num_rows))
        return _select(whole, torch.from_numpy(rows))
    here = lambda number: at(int(rows[number]))  # noqa: E731
    labels = _numbers(table[schema.label], schema.label, here, math.nan)
    dense = [_numbers(table[name], name, here, 0) for name in schema.dense]
    values = np.stack(dense, axis=1) if dense else np.empty((len(labels), 0), np.float32)
    if schema.log_dense:
        values = np.log1p(np.maximum(values, 0))
    where = {name: f"{here(0)} and on, column {name!r}" for name in schema.num_embeddings}
    ids = [_row_of_each(table[name], schema, name, where[name]) for name in schema.single_id]
    stacked = np.stack(ids, axis=1) if ids else np.empty((len(labels), 0), np.int32)
    arrays = {"dense": values, "ids": stacked, "labels": labels}
    samples: _Samples = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return samples | {n: _bags(table[n], schema, n, where[n]) for n in schema.multi_hot}


def _numbers(column: pa.Array, name: str, at: Callable[[int], str], missing: float) -> np.ndarray:
    """float32, with a number for those that are missing, as NaN is."""
    try:
        numbers = column.cast(pa.float32(), safe=False).fill_null(math.nan)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        where = f"{at(0)} and on, column {name!r}"
        raise ValueError(describe(where, "numbers", str(error), "clean the data")) from error
    values = np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float32)
    values[np.isnan(values)] = missing
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        where = f"{at(bad[0])}, column {name!r}"
        raise ValueError(describe(where, "a finite number", values[bad[0]], "clean the data"))
    return values


def _row_of_each(column: pa.Array, schema: FileSchema, name: str, where: str) -> np.ndarray:
    check(not _is_list(column.type), where, _IDS, "lists", "name it in multi_hot")
    rows = _rows(column, schema, name, where)
    missing = 0 if schema.hashed else int((rows == _NO_ROW).sum())
    check(missing == 0, where, "an id in every row", f"{missing} missing")
    return rows


def _bags(column: pa.Array, schema: FileSchema, name: str, where: str) -> Bags:
    """Of a column of lists, of text with a separator, or of one value per sample."""
    column = _decoded(column)
    if str(column.type) in _TEXTS:
        column = pc.split_pattern(column, schema.list_separator)
    offsets = np.arange(len(column) + 1, dtype=np.int64)
    if _is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        np.cumsum(lengths, out=offsets[1:])
        column = column.flatten()  # leaves out what a missing list may hide, as `values` does not
        check(not _is_list(column.type), where, f"{_IDS} in lists", "lists of lists")
    rows = _rows(column, schema, name, where)
    is_id = rows != (MISSING_ROW if schema.hashed else _NO_ROW)
    if not is_id.all():
        rows, offsets = rows[is_id], np.concatenate([[0], np.cumsum(is_id)])[offsets]
    return Bags(torch.from_numpy(rows), torch.from_numpy(offsets))


def _rows(values: pa.Array, schema: FileSchema, name: str, where: str) -> np.ndarray:
    """Rows of a table, int32: of missing values `MISSING_ROW` if hashed, `_NO_ROW` if not."""
    num_embeddings = schema.num_embeddings[name]
    if schema.hashed:
        # Each distinct text is looked at once.
        values = values.dictionary_encode() if str(values.type) in _TEXTS else values
        return rows_of_values(_canonical(values, where), num_embeddings)
    remedy = "clean the data, or set FileSchema.hashed"
    try:
        ids = _canonical(_decoded(values), where).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(describe(where, "integers", str(error), remedy)) from error
    limits = pc.min_max(ids).as_py()
    lowest, highest = limits["min"] or 0, limits["max"] or 0  # None where there is no id
    is_inside, received = 0 <= lowest <= highest < num_embeddings, min(lowest, 0) or highest
    check(is_inside, where, f"ids in 0..{num_embeddings - 1}", received, remedy)
    return ids.cast(pa.int32()).fill_null(_NO_ROW).to_numpy(zero_copy_only=False).copy()


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
    values = _decoded(values)
    check(str(values.type) in _TEXTS, where, _IDS, kind, "cast it to integers or strings")
    is_large = "large" in str(values.type)
    # Bytes that are no UTF-8 are trimmed as any others: nothing looks at more than single bytes.
    text = pc.ascii_trim_whitespace(values.view(pa.large_string() if is_large else pa.string()))
    text = pc.if_else(pc.equal(pc.binary_length(text), 0), None, text)
    return text.view(pa.large_binary() if is_large else pa.binary())


def _decoded(values: pa.Array) -> pa.Array:
    """Without a dictionary and without views."""
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return values.cast(pa.large_binary()) if str(values.type).endswith("_view") else values


def _is_list(kind: pa.DataType) -> bool:
    return str(kind).partition("<")[0].endswith(("list", "list_view"))
