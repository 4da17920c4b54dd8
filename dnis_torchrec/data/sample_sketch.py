"""SampleSketch: which samples a stream has, and how often each, of a small part that is the same in
all streams."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.ranks import Ranks

SIZE = 8192
"""Hashes that a sketch keeps: it takes 128 KiB, and twice that while it grows."""

LEAST = 10
"""Distinct samples from which two streams are compared."""


class SampleSketch:
    """The smallest distinct hashes of a stream, with how often each occurred."""

    def __init__(self, size: int = SIZE) -> None:
        self._size, self._limit = size, np.uint64(np.iinfo(np.uint64).max)
        self._ids, self._times = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []

    def add(self, hashes: np.ndarray) -> None:
        """Takes in samples."""
        self._pending.append(hashes[hashes <= self._limit])
        if sum(map(len, self._pending)) >= self._size:
            self._settle()

    @property
    def limit(self) -> int:
        """The largest hash up to which all samples of the stream are in the sketch."""
        self._settle()
        return int(self._limit)

    def up_to(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """(distinct hashes up to a limit, how often each occurred), the hashes rising."""
        self._settle()
        end = int(np.searchsorted(self._ids, np.uint64(limit), side="right"))
        return self._ids[:end], self._times[:end]

    def over_ranks(self, ranks: Ranks) -> SampleSketch:
        """The sketch of the samples of all ranks, the same on each. Three reductions of at most the
        sketch's size."""
        if ranks.world_size == 1:
            return self
        limit = -int(ranks.max_(torch.tensor([-(self.limit >> 1)])))
        ids, times = self.up_to(2 * limit)
        merged = SampleSketch(self._size)
        merged._pending = [_gathered(ids.view(np.int64), ranks).view(np.uint64)]
        merged._settle(_gathered(times, ranks))
        merged._limit = min(merged._limit, np.uint64(2 * limit))
        return merged

    def _settle(self, times: np.ndarray | None = None) -> None:
        if not self._pending:
            return
        fresh = np.concatenate(self._pending)
        times = np.ones(len(fresh), np.int64) if times is None else times
        self._pending = []
        self._ids, places = np.unique(np.concatenate([self._ids, fresh]), return_inverse=True)
        summed = np.zeros(len(self._ids), np.int64)
        np.add.at(summed, places, np.concatenate([self._times, times]))
        self._ids, self._times = self._ids[: self._size], summed[: self._size]
        if len(self._ids) == self._size:
            self._limit = self._ids[-1]


def share_found(of: SampleSketch, among: SampleSketch) -> float:
    """Estimates the share of one stream's samples that another stream has too."""
    limit = min(of.limit, among.limit)
    ids, times = of.up_to(limit)
    known, _ = among.up_to(limit)
    if len(ids) < LEAST or not len(known):
        return 0.0
    return float(times[np.isin(ids, known)].sum() / times.sum())


def share_repeated(stream: SampleSketch) -> float:
    """Estimates the share of samples that a stream would have of another stream drawn in the same
    way."""
    _, times = stream.up_to(stream.limit)
    return float(1 - (times == 1).sum() / times.sum()) if len(times) else 0.0


def _gathered(values: np.ndarray, ranks: Ranks) -> np.ndarray:
    own: Tensor = torch.from_numpy(np.ascontiguousarray(values))
    return ranks.concatenate(own).numpy()
