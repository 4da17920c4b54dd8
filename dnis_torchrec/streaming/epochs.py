"""EpochOrder: which samples each rank gets in which batch of an epoch. Pure: ranks, workers and
resumed runs agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dnis_torchrec.checks import check


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of every epoch, for one rank."""

    chunk_samples: np.ndarray
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    shuffle: bool
    window_batches: int
    seed: int
    place: str = "stream"

    def __post_init__(self) -> None:
        for name in ("batch_size", "world_size", "window_batches"):
            check(getattr(self, name) >= 1, name, "an integer >= 1", getattr(self, name))
        check(0 <= self.rank < self.world_size, "rank", f"0..{self.world_size - 1}", self.rank)
        check(self.seed >= 0, "seed", "an integer >= 0", self.seed)
        needed = self.world_size * (self.batch_size if self.drop_last else 1)
        remedy = "use fewer ranks or a smaller batch"
        requirement = f"at least {needed} samples for {self.world_size} ranks"
        check(self.num_samples >= needed, self.place, requirement, self.num_samples, remedy)

    @property
    def num_samples(self) -> int:
        """n: samples of the part, on all ranks together."""
        return int(self.chunk_samples.sum())

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the same number on every rank."""
        if self.drop_last:
            return self.num_samples // (self.world_size * self.batch_size)
        return -(-(self.num_samples // self.world_size) // self.batch_size)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, the same number on every rank."""
        return -(-self.num_batches // self.window_batches)

    @property
    def bounds(self) -> np.ndarray:
        """``(num_batches + 1,)`` int64: batch b holds samples ``bounds[b]..bounds[b + 1] - 1`` of
        the epoch's order."""
        batches = np.arange(self.num_batches + 1)
        if self.drop_last:
            return (self.rank * self.num_batches + batches) * self.batch_size
        first, last = (
            self.num_samples * rank // self.world_size for rank in (self.rank, self.rank + 1)
        )
        return first + (last - first) * batches // self.num_batches

    def window_bounds(self, window: int) -> np.ndarray:
        """Returns where the batches of a window begin and end, counted from the window's first
        sample."""
        first = window * self.window_batches
        bounds = self.bounds[first : first + self.window_batches + 1]
        return bounds - bounds[0]

    def pieces(self, epoch: int, window: int) -> list[tuple[int, int, int]]:
        """Returns the samples that make up a window, chunk by chunk."""
        first_batch = window * self.window_batches
        bounds = self.bounds[first_batch : first_batch + self.window_batches + 1]
        order = self._chunk_order(epoch)
        ends = np.cumsum(self.chunk_samples[order])
        begins = ends - self.chunk_samples[order]
        touched = np.flatnonzero((begins < bounds[-1]) & (ends > bounds[0]) & (ends > begins))
        return [
            (
                int(order[place]),
                int(max(bounds[0], begins[place]) - begins[place]),
                int(min(bounds[-1], ends[place]) - begins[place]),
            )
            for place in touched
        ]

    def permutation(self, epoch: int, window: int) -> np.ndarray:
        """The order of a window's samples, counted from the window's first one; int64."""
        num_samples = int(self.window_bounds(window)[-1])
        if not self.shuffle:
            return np.arange(num_samples)
        return np.random.default_rng((self.seed, epoch, 1 + self.rank, 1 + window)).permutation(
            num_samples
        )

    def _chunk_order(self, epoch: int) -> np.ndarray:
        num_chunks = len(self.chunk_samples)
        if not self.shuffle:
            return np.arange(num_chunks)
        return np.random.default_rng((self.seed, epoch, 0)).permutation(num_chunks)
