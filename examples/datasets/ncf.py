"""The leave-one-out files of NCF: ``ml-1m.train.rating``, ``.test.rating``, ``.test.negative``."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import Bags
from examples.datasets.text_files import find_file, read_table, unpacked

PUBLISHER = "the authors' repository hexiangnan/neural_collaborative_filtering, folder Data"
RATING = {"user": np.int64, "item": np.int64, "rating": np.float64, "timestamp": np.int64}
_PAIR = re.compile(r"\((\d{1,18}),(\d{1,18})\)", re.ASCII)
_ITEM = re.compile(r"\d{1,18}", re.ASCII)
_EXPECTED = "(user,item) and negative items, tab separated"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaveOneOut:
    """Training interactions, and per test case one positive to be ranked among negatives."""

    train_users: Tensor
    train_items: Tensor
    test_users: Tensor
    test_items: Tensor
    negatives: Bags
    num_users: int
    num_items: int
    num_positives_among_negatives: int


@lru_cache(maxsize=1)
def load_leave_one_out(folder: Path, *, name: str = "ml-1m") -> LeaveOneOut:
    """Loads the three files of the leave-one-out protocol."""
    train = read_table(find_file(folder, [f"{name}.train.rating"], PUBLISHER), RATING)
    test = read_table(find_file(folder, [f"{name}.test.rating"], PUBLISHER), RATING)
    path = find_file(folder, [f"{name}.test.negative"], PUBLISHER)
    listed = _read_negatives(path)
    lengths, values, num_dropped = [], [], 0
    for user, item in zip(test["user"], test["item"], strict=True):
        pair = (int(user), int(item))
        place, remedy = f"{path.name}, pair {pair}", "download it again"
        check(pair in listed, place, "a line of negatives", "none", remedy)
        negatives = listed[pair][listed[pair] != item]
        check(negatives.size > 0, place, "negatives beside the positive", "none", remedy)
        num_dropped += int(negatives.size < listed[pair].size)
        lengths.append(negatives.size)
        values.append(negatives)
    if num_dropped:
        logger.warning("%s: in %d lines the positive stood among the negatives; dropped there", path.name, num_dropped)
    all_items = torch.from_numpy(np.concatenate(values))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
    return LeaveOneOut(
        train_users=_column(train, "user"),
        train_items=_column(train, "item"),
        test_users=_column(test, "user"),
        test_items=_column(test, "item"),
        negatives=Bags(all_items, offsets),
        num_users=1 + int(max(train["user"].max(), test["user"].max())),
        num_items=1 + int(max(train["item"].max(), test["item"].max(), all_items.max())),
        num_positives_among_negatives=num_dropped,
    )


def _read_negatives(path: Path) -> dict[tuple[int, int], np.ndarray]:
    """(user, positive) -> the items listed beside it."""
    listed = {}
    for number, raw in enumerate(unpacked(path).splitlines(), start=1):
        line = raw.decode("utf-8", "replace").strip()
        if not line:
            continue
        head, *fields = line.split("\t")
        pair = _PAIR.fullmatch(head)
        if pair is None or not fields or not all(map(_ITEM.fullmatch, fields)):
            place = f"{path.name}, line {number}"
            raise ValueError(describe(place, f"{_EXPECTED}", repr(line[:80]), "download it again"))
        listed[int(pair[1]), int(pair[2])] = np.array(fields, dtype=np.int64)
    return listed


def _column(frame: pd.DataFrame, name: str) -> Tensor:
    return torch.tensor(frame[name].to_numpy())
