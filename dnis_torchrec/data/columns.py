"""Columns of a data frame or of its file: ids of any type by one text, bags, numbers, times."""

from __future__ import annotations

import ast
import os
import re
import string
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.dataset as ds
from pandas.api import types

from dnis_torchrec.checks import check, describe, nearest
from dnis_torchrec.data.batches import CLEAN

Frame: TypeAlias = "pd.DataFrame | Mapping[str, Any] | str | os.PathLike[str]"
SEPARATOR = "|"
"""Between the ids of a bag that is given as text, as a CSV file has to."""
LARGEST_NUMBER = 1e30
"""Numbers below it fit into float32."""
_FORMS = re.compile(r"\.(parquet|pq|csv(\.gz|\.bz2|\.zst|\.lz4)?)$")
_NO_NUMBER = pa.array(["", "NA", "N/A", "<NA>", "NaN", "nan", "NULL", "null", "None"])
"""Texts that stand for a missing number. Only an empty text is a missing id."""
_DIGITS = tuple("-0123456789")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-][0-9]{1,3})?")
_TIME = re.compile(r"[0-9]{4}(-[0-9]{2}){2}([T ][0-9]{2}:[0-9]{2}[0-9:.]*(Z|[+-][0-9:]+)?)?")
_BYTES = re.compile(r"""b(['"]).*\1""", re.DOTALL)
_BLOCK_BYTES = 1 << 24
"""Of a CSV file; a line has to fit in."""


# Files


def frame_of(source: Frame, columns: Iterable[Hashable]) -> pd.DataFrame:
    """The columns that are needed of a frame, a dict of columns or a file."""
    columns, place = list(dict.fromkeys(columns)), "frame"
    if isinstance(source, str | os.PathLike):
        place = os.fspath(source)
        source = _file(place, columns)
    elif isinstance(source, Mapping):
        source = pd.DataFrame(source)
    if not isinstance(source, pd.DataFrame):
        requirement = "a pandas DataFrame, a dict of columns or the path of a file"
        remedy = "call its to_pandas() if it has one"
        raise TypeError(describe(place, requirement, type(source).__name__, remedy))
    _check_columns(place, source.columns, columns)
    check(len(source) > 0, place, "at least one row", "none")
    return source.loc[:, columns].reset_index(drop=True)


def _file(place: str, columns: list[Hashable]) -> pd.DataFrame:
    """The files of a folder one by one: a column may have another type in each."""
    path, remedy = Path(place), "mend it, or read it and give its frame"
    requirement, ending = "a file that ends in .parquet or .csv", "".join(path.suffixes[-2:])
    is_fit = path.is_dir() or _FORMS.search(path.name) is not None
    check(is_fit, place, requirement, ending or "no ending", remedy)
    csv_files = sorted(path.glob("*.csv*")) if path.is_dir() else [path] * (".csv" in ending)
    source, kind = (list(map(str, csv_files)), _csv(columns)) if csv_files else (place, "parquet")
    frames = []
    try:
        files = list(ds.dataset(source, format=kind).get_fragments())
        schemas = [file.physical_schema for file in files]
        _check_columns(place, dict.fromkeys(n for s in schemas for n in s.names), columns)
        for file, schema in zip(files, schemas, strict=True):
            if csv_files:
                _check_columns(file.path, schema.names, columns)
            names = [name for name in columns if name in schema.names]
            for name in (name for name in columns if name not in names):
                warn(f"column {name!r}: missing in {file.path}, though other files have it")
            table = file.to_table(schema, columns=names, use_threads=False)  # errors name the line
            frames.append(table.to_pandas(types_mapper=pd.ArrowDtype))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        requirement, reason = "whole files of Parquet or CSV", str(error).split("\n")[0]
        raise ValueError(describe(place, requirement, reason, remedy)) from error
    for name in columns:
        kinds = {frame[name].dtype for frame in frames if name in frame.columns}
        for frame in frames if len(kinds) > 1 else ():
            if name in frame.columns:
                frame[name] = frame[name].astype(object)
    return pd.concat(frames, ignore_index=True)


def _csv(columns: list[Hashable]) -> ds.CsvFileFormat:
    """All columns are text: a type guessed from the first lines may not fit the last."""
    return ds.CsvFileFormat(
        # A line with more or fewer fields than the header is an error, which pandas lets pass.
        parse_options=pv.ParseOptions(newlines_in_values=True),
        read_options=pv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        convert_options=pv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.large_string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _check_columns(place: str, names: Iterable[Hashable], columns: list[Hashable]) -> None:
    names = list(names)
    for name in columns:
        number = names.count(name)
        remedy = "" if number else nearest(str(name), map(str, names))
        check(number == 1, place, f"a column {name!r}", f"{number or 'none'}", remedy)


def warn(text: str) -> None:
    """Warns whoever gave the frame."""
    warnings.warn(text, stacklevel=2)


# Ids


@dataclass(frozen=True, eq=False)
class Ids:
    """Entries of a column: the code of each, -1 where it is missing, the text of each code, how
    many of the entries each row has, and two texts that are one id in other spellings."""

    codes: np.ndarray
    texts: Sequence[str]
    lengths: np.ndarray
    spellings: tuple[str, ...] = ()


def ids_of(column: pd.Series) -> Ids:
    """A column with one id a row, of any type. Python looks at each distinct value once."""
    kind = column.dtype
    if isinstance(kind, pd.ArrowDtype) and pa.types.is_dictionary(kind.pyarrow_dtype):
        # Its codes would be in the order of the dictionary, not in that of the rows.
        column = column.astype(pd.ArrowDtype(kind.pyarrow_dtype.value_type))
    try:
        codes, values = pd.factorize(column)
    except (TypeError, NotImplementedError) as error:
        place, remedy = f"column {column.name!r}", "name it in bags"
        raise ValueError(describe(place, "one id in every row", "lists", remedy)) from error
    if types.is_object_dtype(kind) and types.infer_dtype(column).startswith("mixed"):
        # Python's True equals 1, so that they were one value.
        codes, values = pd.factorize(column.map(text_of, na_action="ignore"))
    if isinstance(kind, pd.CategoricalDtype):
        values = values.categories.take(values.codes)
    if values.dtype.kind == "f":
        values = values.to_numpy()  # as Python's floats, those of float32 would have other digits
    of_values, texts = pd.factorize(np.array([text_of(value) for value in values], dtype=object))
    lengths = np.ones(len(column), np.int64)
    return Ids(np.append(of_values, -1)[codes], texts, lengths, _spellings(values, of_values))


def _spellings(values: Sequence[Any], codes: np.ndarray) -> tuple[str, ...]:
    """The first two texts, if any, that are one id though they differ in more than space."""
    firsts: dict[int, str] = {}
    for code, value in zip(codes.tolist(), values, strict=True):
        if isinstance(value, str) and firsts.setdefault(code, value).strip() != value.strip():
            return firsts[code], value
    return ()


def text_of(value: Any) -> str | None:
    """The text by which an id is known, whatever type its column has: what pandas writes of it into
    a CSV file gives the same one."""
    if value is None or value != value:
        return None
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    text = text.strip(string.whitespace)
    if not text.isascii():  # half a character, as an escape may be, has no UTF-8
        text = text.encode("utf-8", "backslashreplace").decode()
    if text.startswith(_DIGITS):
        if _NUMBER.fullmatch(text):
            return _text_of_number(text)
        text = text.removesuffix(" 00:00:00")  # of timedeltas; of times pandas leaves it out, too
        return _text_of_time(text) if _TIME.fullmatch(text) else text
    if _BYTES.fullmatch(text):
        try:
            return text_of(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            pass
    return text or None


def _text_of_number(text: str) -> str:
    """A number without exponent, zeros at the end and a minus before 0."""
    if not text.lstrip("-").isdigit():
        value = float(text)
        if value.is_integer() and repr(value) == text:
            return str(int(value))
        if (
            repr(value) == text
            and abs(value) < LARGEST_NUMBER
            and float(np.float32(value)) == value
        ):
            text = str(np.float32(value))  # 0.1 in float32, with the digits of float64
        text = format(Decimal(text), "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _text_of_time(text: str) -> str:
    try:
        time = pd.Timestamp(text)
    except ValueError:
        return text
    time = time if time.tzinfo is None else time.tz_convert("UTC")
    return time.isoformat().removesuffix("T00:00:00")


def id_bags_of(column: pd.Series) -> Ids:
    """A column with any number of ids a row."""
    entries, kind = column.reset_index(drop=True), column.dtype
    of_lists = getattr(getattr(kind, "pyarrow_dtype", None), "value_type", pa.null())
    if of_lists == pa.null():  # no lists, or lists that are all empty
        values = entries.astype(object)
        _check_form([value for value in values if isinstance(value, str)], str(column.name))
        split = [value.split(SEPARATOR) if isinstance(value, str) else value for value in values]
        entries = pd.Series(split, dtype=object)
    entries = entries.explode()
    try:
        ids = ids_of(entries)
    except ValueError as error:
        place = f"column {column.name!r}"
        raise ValueError(describe(place, "lists of ids", "lists of lists", "flatten")) from error
    is_id = ids.codes >= 0
    lengths = np.bincount(entries.index.to_numpy()[is_id], minlength=len(column))
    return Ids(ids.codes[is_id], ids.texts, lengths, ids.spellings)


def _check_form(bags: Sequence[str], name: str) -> None:
    """Warns of bags whose text has another form than ids with the separator between them."""
    is_list = 2 * sum(bag.lstrip().startswith(("[", "(", "{")) for bag in bags) > len(bags)
    has_commas = 2 * sum("," in bag for bag in bags) > len(bags)
    if is_list or (has_commas and not any(SEPARATOR in bag for bag in bags)):
        bag = next(bag for bag in bags if "," in bag or "[" in bag or not has_commas)
        words = (
            f"{bag[:60]!r} is read as one id: give lists, or ids with {SEPARATOR!r} between them"
        )
        warn(f"column {name!r}: {words}")


# Numbers and times


def numbers_of(column: pd.Series) -> np.ndarray:
    """A column as numbers; booleans are 0 and 1."""
    column = _parsed(column, (pa.float64(), pa.bool_()))
    is_plain = types.is_numeric_dtype(column.dtype) and not types.is_complex_dtype(column.dtype)
    values = column if is_plain else column.astype(object)
    try:
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError, OverflowError) as error:
        row = next(row for row, value in enumerate(values) if not _is_number(value))
        place, remedy = f"column {column.name!r}, row {row}", "map it to numbers, or name it in ids"
        raise ValueError(describe(place, "a number", repr(values.iloc[row]), remedy)) from error
    bad = np.flatnonzero(np.abs(numbers) >= LARGEST_NUMBER)
    if len(bad):
        place, requirement = f"column {column.name!r}, row {bad[0]}", f"below {LARGEST_NUMBER:g}"
        raise ValueError(describe(place, f"a number {requirement}", numbers[bad[0]], CLEAN))
    return numbers


def _parsed(column: pd.Series, kinds: Sequence[pa.DataType]) -> pd.Series:
    """A column of text as the first of the kinds that fits all of it; itself where none does."""
    if not types.is_string_dtype(column.dropna()):
        return column
    texts = pc.utf8_trim_whitespace(pa.array(column, pa.large_string(), from_pandas=True))
    texts = pc.if_else(pc.is_in(texts, _NO_NUMBER), None, texts)
    for kind in kinds:
        try:
            values = texts.cast(kind)
        except pa.ArrowInvalid:
            continue
        return pd.Series(values.to_pandas(types_mapper=pd.ArrowDtype), name=column.name)
    return column


def _is_number(value: Any) -> bool:
    try:
        return pd.isna(value) is True or float(value) is not None
    except (TypeError, ValueError, OverflowError):
        return False


def order_in_time(column: pd.Series) -> np.ndarray:
    """The rows from the earliest to the latest; those of one time keep their order."""
    place, column = f"time column {column.name!r}", _parsed(column, (pa.int64(), pa.float64()))
    if not types.is_numeric_dtype(column.dtype):
        try:
            column = pd.to_datetime(column.astype(object), format="ISO8601", utc=True)
        except (TypeError, ValueError) as error:
            requirement = "numbers, dates or texts as ISO 8601 has them"
            remedy = "convert it, as pd.to_datetime does"
            raise ValueError(describe(place, requirement, str(error), remedy)) from error
    number = int(column.isna().sum())
    check(number == 0, place, "a time in every row", f"{number} missing", "leave those rows out")
    if column.nunique() == 1:
        warn(f"{place}: one time in all rows: the split goes by their order")
    return column.argsort(kind="stable").to_numpy(copy=True)
