"""Text files of publishers, read by pandas: the file is named where something else than the format stands in it."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dnis_torchrec.checks import describe

LINES_AT_A_TIME = 1 << 20


def read_table(path: Path, dtypes: Mapping[str, Any], separator: str = "\t", **more: Any) -> pd.DataFrame:
    """Reads a whole file, see `table_chunks`."""
    return pd.concat(table_chunks(path, dtypes, separator, **more), ignore_index=True)


def table_chunks(
    path: Path, dtypes: Mapping[str, Any], separator: str = "\t", *, has_header: bool = False, encoding: str = "utf-8"
) -> Iterator[pd.DataFrame]:
    """Reads a file a million lines at a time; empty text is text, empty numbers of dtype float64 are NaN."""
    numbers = {name: [""] for name, dtype in dtypes.items() if dtype is not str}
    source: Any = path
    try:
        if len(separator) > 1:
            source = io.BytesIO(unpacked(path).replace(separator.encode(), b"\t"))
        with pd.read_csv(
            source,
            sep=separator if len(separator) == 1 else "\t",
            header=0 if has_header else None,
            names=list(dtypes),
            dtype=dict(dtypes),
            encoding=encoding,
            keep_default_na=False,
            na_values=numbers,
            quoting=0 if separator == "," else 3,
            on_bad_lines="error",
            chunksize=LINES_AT_A_TIME,
        ) as chunks:
            for frame in chunks:
                if not isinstance(frame.index, pd.RangeIndex):  # pandas takes surplus fields for an index
                    raise ValueError(f"lines of more than {len(dtypes)} fields")
                if frame.empty:
                    raise ValueError("no line")
                yield frame
    except (ValueError, OverflowError, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            describe(str(path), f"fields {list(dtypes)[:4]}", str(error).strip(), "download it again")
        ) from error


def unpacked(path: Path) -> bytes:
    """The bytes of a plain or ``.gz`` file."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(describe(str(path), "a whole gzip file", error, "download it again")) from error


def find_file(folder: Path, names: Sequence[str], publisher: str) -> Path:
    """Finds the first of `names` in a folder, plain or with ``.gz``."""
    for name in names:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    wanted = " or ".join(f"{name}[.gz]" for name in names)
    entries = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else "no such folder"
    found = entries or "an empty folder"
    raise ValueError(describe(str(folder), f"{wanted}", found, f"get it from {publisher}"))


def number_rows(values: pd.Series) -> tuple[Tensor, int]:
    """Row of a table for every value, and the number of rows: 0..N-1 in rising order of the distinct values."""
    codes, distinct = pd.factorize(values, sort=True)
    return torch.from_numpy(codes.astype(np.int64)), len(distinct)


def require_folder(data: Path | None, recipe: str, publisher: str) -> Path:
    """The data folder of a recipe that cannot do without, as an absolute path."""
    if data is None:
        raise ValueError(describe(f"recipe {recipe!r}", "a data folder", "none", f"get it from {publisher}"))
    return Path(data).resolve()
