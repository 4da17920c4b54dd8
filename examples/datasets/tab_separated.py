"""Data sets of one tab-separated file with a header: a label, and integer fields that are each one id a sample."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dnis_torchrec.checks import check, describe
from examples.datasets.in_memory import Samples, split_rows
from examples.datasets.text_files import find_file


def load_tab_separated(
    folder: Path, name: str, *, label: str, fields: Mapping[str, str], publisher: str, seed: int
) -> Samples:
    """Loads some columns of a file; the one dense feature, which torchrec's DLRM needs, is the constant 1.

    Args:
        folder: holds the file, plain or ``.gz``. Parsed once per process.
        name: of the file, such as ``"anime.tsv"``.
        label: column of the labels.
        fields: feature -> its column, integers of any range; the distinct ones become rows of a table.
        publisher: where to get the file, by name.
        seed: of the split; rows are numbered by falling frequency in its training part.

    Raises:
        ValueError: if the file is missing, lacks a column, or holds something else than numbers.
    """
    samples = _parse(find_file(folder, [name], publisher), label, tuple(fields.items()))
    return samples.sorted_by_frequency(split_rows(samples.labels.numel(), seed=seed)[0])


@lru_cache(maxsize=2)
def _parse(path: Path, label: str, fields: tuple[tuple[str, str], ...]) -> Samples:
    columns = [column for _, column in fields]
    try:
        frame = pd.read_csv(path, sep="\t", dtype=dict.fromkeys(columns, np.int64) | {label: np.float32})
    except (ValueError, OverflowError, EOFError, OSError) as error:
        raise ValueError(describe(path.name, f"numbers in {columns}", error, "download it again")) from error
    missing = [column for column in (label, *columns) if column not in frame]
    check(not missing, path.name, f"columns {[label, *columns]}", f"none of {missing}", "download it again")
    codes = {feature: pd.factorize(frame[column], sort=True) for feature, column in fields}
    return Samples(
        dense=torch.ones(len(frame), 1),
        ids=torch.stack([torch.from_numpy(ids) for ids, _ in codes.values()], dim=1),
        labels=torch.tensor(frame[label].to_numpy()),
        feature_names=tuple(codes),
        num_embeddings={name: len(distinct) for name, (_, distinct) in codes.items()},
    )
