"""Data sets of one tab-separated file with a header: a label, and integer fields that are each one id a sample."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dnis_torchrec.checks import check, describe
from examples.datasets.in_memory import Samples
from examples.datasets.text_files import find_file, number_rows


def load_tab_separated(
    folder: Path, name: str, *, label: str, fields: Mapping[str, str], publisher: str, seed: int, time: str = ""
) -> Samples:
    """Loads some columns of a file; the one dense feature, which torchrec's DLRM needs, is the constant 1. Splits are
    by the column `time`, or at random without one."""
    samples = _parse(find_file(folder, [name], publisher), label, tuple(fields.items()), time)
    return samples.sorted_by_frequency(samples.rows_of_splits(seed)[0])


@lru_cache(maxsize=2)
def _parse(path: Path, label: str, fields: tuple[tuple[str, str], ...], time: str) -> Samples:
    columns = [column for _, column in fields] + [time] * bool(time)
    frame = read_columns(path, {label: np.float32} | dict.fromkeys(columns, np.int64))
    frame = frame.sort_values(time, kind="stable") if time else frame
    codes = {feature: number_rows(frame[column]) for feature, column in fields}
    return Samples(
        dense=torch.ones(len(frame), 1),
        ids=torch.stack([rows for rows, _ in codes.values()], dim=1),
        labels=torch.tensor(frame[label].to_numpy()),
        feature_names=tuple(codes),
        num_embeddings={name: num_rows for name, (_, num_rows) in codes.items()},
        is_by_time=bool(time),
    )


def read_columns(path: Path, dtypes: Mapping[str, type]) -> pd.DataFrame:
    """Reads columns of a tab-separated file with a header; empty text is text."""
    names = [*dtypes]
    try:
        frame = pd.read_csv(path, sep="\t", dtype=dict(dtypes), keep_default_na=False)
    except (ValueError, OverflowError, EOFError, OSError) as error:
        raise ValueError(describe(path.name, f"numbers in {names}", error, "download it again")) from error
    missing = [name for name in names if name not in frame]
    check(not missing, path.name, f"columns {names}", f"none of {missing}", "download it again")
    return frame[names]
