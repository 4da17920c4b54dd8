"""Reading text tables line by line at the speed of pandas' C parser, without losing a file to one malformed line.

A chunk of lines goes through pandas; only a chunk that pandas refuses, or whose values are out of range, is read again
line by line, and there each malformed line is recorded and left out.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dnis_torchrec.checks import describe

MAX_MALFORMED_RATIO = 0.01
"""A file with a larger share of malformed lines is refused: it is probably not what the loader was made for."""

CHUNK_BYTES = 1 << 26
_EXCERPT = 80

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MalformedLine:
    """One line that was left out.

    Attributes:
        file: name of the file.
        line_number: counted from 1, as editors do.
        expected: value that the format asks for at this place.
        received: the beginning of the line.
    """

    file: str
    line_number: int
    expected: str
    received: str

    def __str__(self) -> str:
        return describe(f"{self.file}, line {self.line_number}", f"{self.expected}", repr(self.received))


@dataclass(frozen=True)
class MalformedLines:
    """The lines that were left out of one file.

    Attributes:
        file: name of the file.
        num_lines: lines read, blank ones and the header not counted.
        lines: the malformed ones, in file order.
    """

    file: str
    num_lines: int
    lines: tuple[MalformedLine, ...] = ()

    def report(self) -> None:
        """Logs one summary, or refuses the file.

        Raises:
            ValueError: naming the first malformed line, if more than 1 % of the lines are malformed or no line is left.
        """
        if not self.num_lines:
            raise ValueError(describe(self.file, "at least one line", "an empty file", "download it again"))
        if not self.lines:
            return
        share = f"{len(self.lines)} of {self.num_lines} lines malformed"
        if len(self.lines) > MAX_MALFORMED_RATIO * self.num_lines:
            raise ValueError(f"{self.lines[0]} ({share}, at most 1 % are tolerated; is it the publisher's file?)")
        logger.warning("%s: %s and left out; the first: %s", self.file, share, self.lines[0])


@dataclass(frozen=True)
class Column:
    """One column of a text table.

    Attributes:
        name: column name.
        kind: int, float or str.
        minimum: smallest value of an int or float, None for any.
        maximum: largest value of an int or float, None for any.
        pattern: regular expression that a whole str must match, None for anything but an empty field.
        optional: whether an empty field is fine: NaN for numbers (which makes an int column float64), "" for str.
    """

    name: str
    kind: type[int] | type[float] | type[str]
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    optional: bool = False

    @property
    def expected(self) -> str:
        """The requirement in words."""
        if self.kind is str:
            text = f"{self.name} matching {self.pattern!r}" if self.pattern else f"a non-empty {self.name}"
            return text + (" or nothing" if self.optional else "")
        low = "" if self.minimum is None else f" >= {self.minimum:g}"
        high = "" if self.maximum is None else f"{' and' if low else ''} <= {self.maximum:g}"
        number = "an integer" if self.kind is int else "a finite number"
        return f"{number} {self.name}{low}{high}" + (" or nothing" if self.optional else "")

    def parse(self, field: str) -> int | float | str:
        """One field's value.

        Args:
            field: text between two separators.

        Raises:
            ValueError: with the requirement, if the field does not meet it.
        """
        if self.optional and not field:
            return "" if self.kind is str else math.nan
        try:
            # Empty fields make the column float64, whose "1e3" pandas reads; so does this.
            value = float(field) if self.kind is int and self.optional else self.kind(field)
        except ValueError:
            raise ValueError(self.expected) from None
        if isinstance(value, str):
            meets = bool(re.fullmatch(self.pattern, value)) if self.pattern else bool(value)
        else:
            low, high = self._limits
            meets = low <= value <= high and (self.kind is float or value == int(value))
        if not meets:
            raise ValueError(self.expected)
        return value

    def accepts(self, values: pd.Series) -> bool:
        """Returns whether every parsed value meets the requirement.

        Args:
            values: of dtype `dtype`; empty fields are NaN, or "" for str.
        """
        if self.kind is str:
            distinct = values.unique().tolist()
            empty = self.optional or "" not in distinct
            return empty and (self.pattern is None or all(re.fullmatch(self.pattern, v) for v in distinct if v))
        low, high = self._limits
        array = values.to_numpy()
        meets = (array >= low) & (array <= high)
        if self.kind is int:
            meets &= array == np.floor(array)
        return bool((meets | np.isnan(array)).all() if self.optional else meets.all())

    @property
    def dtype(self) -> str:
        """The dtype that pandas is asked for."""
        return {int: "float64" if self.optional else "int64", float: "float64", str: "str"}[self.kind]

    @property
    def _limits(self) -> tuple[float, float]:
        widest = np.iinfo(np.int64) if self.kind is int else np.finfo(np.float64)
        low = widest.min if self.minimum is None else self.minimum
        return low, widest.max if self.maximum is None else self.maximum


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A text format: one record per line.

    Attributes:
        columns: the fields of a line, in order.
        separator: separator of two fields.
        encoding: of the file.
        header: the first line, skipped if it is there; None for a format without one.
        quoted: whether fields may be quoted as in CSV; read line by line then, so for small files only.
    """

    columns: tuple[Column, ...]
    separator: str
    encoding: str = "utf-8"
    header: str | None = None
    quoted: bool = False

    def read(self, path: Path) -> tuple[pd.DataFrame, MalformedLines]:
        """Reads a whole file and reports its malformed lines.

        Args:
            path: a plain or ``.gz`` file.

        Returns:
            One row per good line, and the lines that were left out.

        Raises:
            ValueError: if the file is empty, cut off, or more than 1 % of it is malformed.
        """
        frames, malformed, num_lines = [], [], 0
        for frame, bad in self.chunks(path):
            frames.append(frame)
            malformed += bad
            num_lines += len(frame) + len(bad)
        found = MalformedLines(path.name, num_lines, tuple(malformed))
        found.report()
        return pd.concat(frames, ignore_index=True), found

    def chunks(self, path: Path) -> Iterator[tuple[pd.DataFrame, list[MalformedLine]]]:
        """Reads a file in chunks of about 64 MiB, for whoever must not hold all of its text at once.

        Args:
            path: a plain or ``.gz`` file.

        Yields:
            ``(good lines, one row each; malformed ones)`` of every chunk. Nothing is reported.

        Raises:
            ValueError: if the file is packed and damaged or cut off.
        """
        first_line = 1
        for chunk in line_chunks(path):
            if first_line == 1 and self.header is not None:
                head, _, rest = chunk.partition(b"\n")
                if head.strip().removeprefix(b"\xef\xbb\xbf").decode(self.encoding, "replace") == self.header:
                    chunk, first_line = rest, 2
            frame = None if self.quoted else self._parse_fast(chunk)
            yield (frame, []) if frame is not None else self._parse_carefully(chunk, path.name, first_line)
            first_line += chunk.count(b"\n")

    def _parse_fast(self, chunk: bytes) -> pd.DataFrame | None:
        """All lines through pandas, or None if any of them is not as it should be."""
        separator = self.separator.encode()
        if len(separator) > 1:
            if b"\t" in chunk:
                return None
            chunk, separator = chunk.replace(separator, b"\t"), b"\t"
        try:
            frame = pd.read_csv(
                io.BytesIO(chunk),
                sep=separator.decode(),
                header=None,
                names=[column.name for column in self.columns],
                dtype={column.name: column.dtype for column in self.columns},
                encoding=self.encoding,
                quoting=csv.QUOTE_NONE,
                keep_default_na=False,
                na_values={column.name: [""] for column in self.columns if column.optional and column.kind is not str},
            )
        except (ValueError, OverflowError):
            return None
        # pandas fills short lines with empty fields, and takes the surplus fields of a first line for an index.
        whole = chunk.count(separator) == len(frame) * (len(self.columns) - 1)
        if not whole or not isinstance(frame.index, pd.RangeIndex):
            return None
        return frame if all(column.accepts(frame[column.name]) for column in self.columns) else None

    def _parse_carefully(self, chunk: bytes, file: str, first_line: int) -> tuple[pd.DataFrame, list[MalformedLine]]:
        rows, malformed = [], []
        for number, raw in enumerate(chunk.split(b"\n"), start=first_line):
            line = raw.decode(self.encoding, "replace").rstrip("\r")
            if not line.strip():
                continue
            try:
                rows.append(self._parse_line(line))
            except ValueError as error:
                malformed.append(MalformedLine(file, number, str(error), line[:_EXCERPT]))
        frame = pd.DataFrame(rows, columns=[column.name for column in self.columns])
        return frame.astype({column.name: column.dtype for column in self.columns}), malformed

    def _parse_line(self, line: str) -> list[int | float | str]:
        try:
            fields = next(csv.reader([line], delimiter=self.separator)) if self.quoted else line.split(self.separator)
        except csv.Error:
            raise ValueError(f"fields as in CSV, separated by {self.separator!r}") from None
        if len(fields) != len(self.columns):
            names = self.separator.join(column.name for column in self.columns[:4])
            dots = "..." if len(self.columns) > 4 else ""
            raise ValueError(f"{len(self.columns)} fields {names}{dots} (found {len(fields)})")
        return [column.parse(field) for column, field in zip(self.columns, fields, strict=True)]


def line_chunks(path: Path) -> Iterator[bytes]:
    """Pieces of a plain or ``.gz`` file, each ending with a line.

    Args:
        path: of the file; its suffix says whether it is packed.

    Yields:
        About `CHUNK_BYTES`, unpacked; the last piece what is left.

    Raises:
        ValueError: if the file is packed and damaged or cut off.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk + file.readline()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(describe(str(path), "a whole gzip file", error, "download it again")) from error


def find_file(folder: Path, names: Sequence[str], publisher: str) -> Path:
    """Finds the first of `names` in a folder, plain or with ``.gz``.

    Args:
        folder: where to look; not searched recursively.
        names: names that would do, best first.
        publisher: where to get the file, by name.

    Raises:
        ValueError: saying which names were looked for and where to get them.
    """
    for name in names:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    wanted = " or ".join(f"{name}[.gz]" for name in names)
    entries = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else "no such folder"
    found = entries or "an empty folder"
    raise ValueError(describe(str(folder), f"{wanted}", found, f"get it from {publisher}"))


def number_rows(values: pd.Series) -> tuple[Tensor, int]:
    """Row of a table for every value, and the number of rows: 0..N-1 in rising order of the distinct values.

    Args:
        values: of one field.

    Returns:
        ``(rows (n,) int64, N)``.

    Example:
        >>> rows, num_embeddings = number_rows(pd.Series([30, 10, 30]))
        >>> rows.tolist(), num_embeddings
        ([1, 0, 1], 2)
    """
    codes, distinct = pd.factorize(values, sort=True)
    return torch.from_numpy(codes.astype(np.int64)), len(distinct)


def require_folder(data: Path | None, recipe: str, publisher: str) -> Path:
    """The data folder of a recipe that cannot do without, as an absolute path.

    Args:
        data: folder that the recipe was given, or None.
        recipe: ``module:function``, for the error.
        publisher: where to get the data, for the error.

    Returns:
        The path; whether it exists is not looked at.

    Raises:
        ValueError: if none was given.
    """
    if data is None:
        raise ValueError(describe(f"recipe {recipe!r}", "a data folder", "none", f"get it from {publisher}"))
    return Path(data).resolve()
