"""Columns of a data frame or of its file: numbers, ids of any type, bags of ids, times. No Python
runs per row of ids."""

from __future__ import annotations

import gzip
import math
import os
import re
import string
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
from pandas.api import types

from dnis_torchrec.checks import check, describe, nearest

Frame: TypeAlias = "pd.DataFrame | str | os.PathLike[str]"

SEPARATOR = "|"
"""Between the ids of a bag that is given as text, as a CSV file has to."""
LARGEST_NUMBER = 1e30
"""Numbers below it fit into float32."""

_DAMAGED = (
    pa.ArrowInvalid,
    pd.errors.ParserError,
    pd.errors.EmptyDataError,
    UnicodeDecodeError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
)
"""What readers raise of files that are damaged or of another kind."""
_WHOLE_FLOAT = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0")


@dataclass(frozen=True, kw_only=True)
class FrameColumns:
    """Which columns of a frame are what."""

    label: Hashable
    dense: tuple[Hashable, ...]
    ids: tuple[str, ...]
    bags: tuple[str, ...]
    time: Hashable | None

    def __post_init__(self) -> None:
        features = (*self.ids, *self.bags)
        check(
            bool(features),
            "from_frame",
            "at least one column in ids or bags",
            "none",
            "tables are made of them",
        )
        for name in features:
            is_fit = isinstance(name, str) and name != "" and "." not in name
            remedy = "rename it, as frame.rename(columns={...}) does"
            check(
                is_fit,
                f"column {name!r}",
                "a name of a feature: text without a dot",
                repr(name),
                remedy,
            )
        for kind, names in (("ids and bags", features), ("dense", self.dense)):
            twice = [name for name in names if names.count(name) > 1]
            check(not twice, f"{kind} columns", "every column once", repr(twice[:1])[1:-1])
        is_leaked = self.label in (*self.dense, *features)
        check(
            not is_leaked,
            f"column {self.label!r}",
            "a label that is no feature",
            "both",
            "leave it out of them",
        )

    @property
    def features(self) -> tuple[str, ...]:
        """Of the tables, in the order of the KJT's keys."""
        return (*self.ids, *self.bags)

    @property
    def all(self) -> tuple[Hashable, ...]:
        """Every column that is needed, each once."""
        time = () if self.time is None else (self.time,)
        return tuple(dict.fromkeys((self.label, *self.dense, *self.features, *time)))


def names_of(place: str, given: Sequence[Any]) -> tuple[Any, ...]:
    """Returns names of columns as a tuple."""
    if isinstance(given, str):
        raise TypeError(describe(place, "a list of columns", repr(given), f"give [{given!r}]"))
    return tuple(given)


def frame_of(source: Frame, columns: Sequence[Hashable], texts: Iterable[str]) -> pd.DataFrame:
    """A frame, or the columns of a file that are needed."""
    if isinstance(source, pd.DataFrame):
        frame, place = source, "frame"
    elif isinstance(source, str | os.PathLike):
        place = os.fspath(source)
        frame = _file(place, columns, set(texts))
    else:
        requirement, remedy = (
            "a pandas DataFrame or the path of a file",
            "call its to_pandas() if it has one",
        )
        raise TypeError(describe("frame", requirement, type(source).__name__, remedy))
    _check_columns(place, frame.columns, columns)
    for name in columns:
        found = list(frame.columns).count(name)
        check(
            found == 1,
            f"column {name!r}",
            "a name that one column has",
            f"{found} of them",
            "rename the others",
        )
    check(len(frame) > 0, place, "at least one row", "none")
    return frame.loc[:, list(columns)].reset_index(drop=True)


def _file(place: str, columns: Sequence[Hashable], texts: set[str]) -> pd.DataFrame:
    kinds, is_folder = PurePath(place).suffixes[-2:], os.path.isdir(place)
    if not os.path.exists(place):
        raise FileNotFoundError(describe(place, "a file", "none", "check the path"))
    is_known = is_folder or ".csv" in kinds or kinds[-1:] in ([".parquet"], [".pq"])
    received = "".join(kinds) or "no ending"
    check(
        is_known,
        place,
        "a file that ends in .parquet or .csv",
        received,
        "read it, and give its frame",
    )
    try:
        return (
            _csv(place, columns, texts)
            if ".csv" in kinds and not is_folder
            else _parquet(place, columns)
        )
    except _DAMAGED as error:
        requirement, told = (
            "whole files of Parquet, or one of CSV in UTF-8",
            str(error).split("\n")[0],
        )
        raise ValueError(
            describe(place, requirement, told, "read it, and give its frame")
        ) from error


def _csv(place: str, columns: Sequence[Hashable], texts: set[str]) -> pd.DataFrame:
    _check_columns(place, pd.read_csv(place, nrows=0).columns, columns)
    return pd.read_csv(
        place, usecols=list(columns), dtype=dict.fromkeys(texts, "string"), low_memory=False
    )


def _parquet(place: str, columns: Sequence[Hashable]) -> pd.DataFrame:
    files = ds.dataset(place, format="parquet")
    _check_columns(place, files.schema.names, columns)
    return files.to_table(columns=list(columns)).to_pandas(types_mapper=pd.ArrowDtype)


def _check_columns(place: str, there: Iterable[Hashable], wanted: Sequence[Hashable]) -> None:
    known = list(there)
    for name in wanted:
        if name not in known:
            raise ValueError(
                describe(place, f"a column {name!r}", "none", nearest(str(name), map(str, known)))
            )


def numbers_of(column: pd.Series) -> np.ndarray:
    """A column as numbers; booleans are 0 and 1."""
    is_plain = types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
    values, remedy = (
        column if is_plain else column.astype(object),
        "map it to numbers, or name it in ids",
    )
    try:
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError, OverflowError) as error:
        row = next(row for row, value in enumerate(values) if not _is_number(value))
        place = f"column {column.name!r}, row {row}"
        raise ValueError(describe(place, "a number", repr(values.iloc[row]), remedy)) from error
    bad = np.flatnonzero(np.abs(numbers) >= LARGEST_NUMBER)
    if len(bad):
        place = f"column {column.name!r}, row {bad[0]}"
        raise ValueError(
            describe(place, f"a number below {LARGEST_NUMBER:g}", numbers[bad[0]], "clean the data")
        )
    return numbers


def _is_number(value: Any) -> bool:
    try:
        return pd.isna(value) is True or math.isfinite(float(value)) or True
    except (TypeError, ValueError, OverflowError):
        return False


def labels_of(column: pd.Series) -> np.ndarray:
    """A column of labels."""
    labels, place = numbers_of(column), f"label column {column.name!r}"
    missing = np.flatnonzero(np.isnan(labels))
    received = f"{len(missing)} missing, the first in row {missing[0]}" if len(missing) else ""
    check(not len(missing), place, "a label in every row", received, "leave those rows out")
    is_one = bool((labels == labels[0]).all())
    check(
        not is_one,
        place,
        "labels that differ",
        f"{labels[0]:g} in all rows",
        "there is nothing to predict",
    )
    return labels


def order_in_time(column: pd.Series) -> np.ndarray:
    """The rows from the earliest to the latest; those of one time keep their order."""
    place, remedy = f"time column {column.name!r}", "convert it, as pd.to_datetime does"
    missing = int(column.isna().sum())
    check(missing == 0, place, "a time in every row", f"{missing} missing", "leave those rows out")
    if not types.is_numeric_dtype(column.dtype):
        try:
            column = pd.to_datetime(column.astype(object), format="ISO8601", utc=True)
        except (TypeError, ValueError) as error:
            requirement = "numbers, dates or texts as ISO 8601 has them"
            raise ValueError(describe(place, requirement, str(error), remedy)) from error
    return column.argsort(kind="stable").to_numpy(copy=True)


@dataclass(frozen=True, eq=False)
class Ids:
    """Entries of a column."""

    codes: np.ndarray
    texts: Sequence[str]


def ids_of(column: pd.Series) -> Ids:
    """A column with one id a row, of any type. Python looks at each distinct value once."""
    try:
        codes, values = pd.factorize(column)
    except (TypeError, NotImplementedError) as error:
        place, remedy = f"column {column.name!r}", "name it in bags"
        raise ValueError(describe(place, "one id in every row", "lists", remedy)) from error
    merged, texts = pd.factorize(np.array([text_of(value) for value in values], dtype=object))
    return Ids(np.append(merged, -1)[codes], texts)


def text_of(value: Any) -> str | None:
    """The text by which an id is known, whatever type its column has."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if float(value).is_integer() else repr(float(value))
    if isinstance(value, datetime) and value.tzinfo is not None:
        return pd.Timestamp(value).tz_convert("UTC").isoformat()
    if isinstance(value, datetime):
        return pd.Timestamp(value).isoformat()
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    text = text.strip(string.whitespace)
    whole = _WHOLE_FLOAT.fullmatch(text)
    return (whole[1] if whole else text) or None


def id_bags_of(column: pd.Series) -> tuple[Ids, np.ndarray]:
    """A column with any number of ids a row."""
    entries = column.reset_index(drop=True)
    kind = entries.dtype
    if not (isinstance(kind, pd.ArrowDtype) and pa.types.is_nested(kind.pyarrow_dtype)):
        split = [
            value.split(SEPARATOR) if isinstance(value, str) else value
            for value in entries.astype(object)
        ]
        entries = pd.Series(split, dtype=object)
    entries = entries.explode()
    try:
        found = ids_of(entries)
    except ValueError as error:
        place = f"column {column.name!r}"
        raise ValueError(
            describe(place, "lists of ids", "lists of lists", "flatten them")
        ) from error
    is_there = found.codes >= 0
    lengths = np.bincount(entries.index.to_numpy()[is_there], minlength=len(column))
    return Ids(found.codes[is_there], found.texts), lengths
