"""Criteo Kaggle's ``train.txt``: a label, 13 integers and 26 hexadecimal categories per line, tab separated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import split_rows
from examples.datasets.in_memory import Samples
from examples.datasets.text_files import find_file, table_chunks

PUBLISHER = "Criteo Labs' Display Advertising Challenge page (Kaggle), unpacked"
FILES = ("train.txt",)
COLUMNS: dict[str, type] = {
    DEFAULT_LABEL_NAME: np.int64,
    **dict.fromkeys(DEFAULT_INT_NAMES, np.float64),
    **dict.fromkeys(DEFAULT_CAT_NAMES, str),
}


@dataclass(frozen=True, eq=False)
class CriteoLines:
    """The file as tensors, categories numbered in order of appearance, before any of them is left out."""

    dense: Tensor
    codes: Tensor
    labels: Tensor
    num_codes: tuple[int, ...]


@lru_cache(maxsize=1)
def read_lines(folder: Path) -> CriteoLines:
    """Reads ``train.txt`` in chunks; a chunk's text is dropped before the next is read."""
    path = find_file(folder, FILES, PUBLISHER)
    numbers: list[dict[str, int]] = [{} for _ in DEFAULT_CAT_NAMES]
    dense, codes, labels = [], [], []
    for frame in table_chunks(path, COLUMNS):
        dense.append(_log_transformed(frame[DEFAULT_INT_NAMES].to_numpy(np.float64)))
        fields = zip(DEFAULT_CAT_NAMES, numbers, strict=True)
        codes.append(np.stack([_numbered(frame[name], known) for name, known in fields], axis=1))
        labels.append(frame[DEFAULT_LABEL_NAME].to_numpy(np.float32))
        check(bool(np.isin(labels[-1], (0, 1)).all()), str(path), "labels 0 and 1", "others", "download it again")
    return CriteoLines(
        dense=torch.from_numpy(np.concatenate(dense)),
        codes=torch.from_numpy(np.concatenate(codes)),
        labels=torch.from_numpy(np.concatenate(labels)),
        num_codes=tuple(len(known) for known in numbers),
    )


@lru_cache(maxsize=2)
def load_criteo(folder: Path, *, seed: int, min_count: int = 2) -> Samples:
    """Loads Criteo Kaggle with one dictionary per field, built on the training part alone."""
    check(min_count >= 1, "min_count", "an integer >= 1", min_count)
    lines = read_lines(folder)
    train_rows = split_rows(lines.labels.numel(), seed=seed)[0]
    ids, num_embeddings = torch.empty_like(lines.codes), {}
    for column, (name, num_codes) in enumerate(zip(DEFAULT_CAT_NAMES, lines.num_codes, strict=True)):
        codes = lines.codes[:, column].long()
        kept = torch.bincount(codes[train_rows], minlength=num_codes) >= min_count
        row_of_code = torch.where(kept, kept.cumsum(0), 0)
        ids[:, column] = row_of_code[codes]
        num_embeddings[name] = int(kept.sum()) + 1
    samples = Samples(
        dense=lines.dense,
        ids=ids,
        labels=lines.labels,
        feature_names=tuple(DEFAULT_CAT_NAMES),
        num_embeddings=num_embeddings,
    )
    return samples.sorted_by_frequency(train_rows)


def _log_transformed(counts: np.ndarray) -> np.ndarray:
    """``log(1 + max(x, 0))``, 0 where missing, float32."""
    return np.log1p(np.maximum(np.nan_to_num(counts, nan=0.0), 0.0)).astype(np.float32)


def _numbered(values: pd.Series, known: dict[str, int]) -> np.ndarray:
    """Numbers of the categories of one chunk, int32; new ones are added to `known`."""
    codes, distinct = pd.factorize(values)
    numbers = np.array([known.setdefault(value, len(known)) for value in distinct.tolist()], dtype=np.int32)
    return numbers[codes]
