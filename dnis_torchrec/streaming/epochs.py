"""EpochOrder: which samples each rank gets in which batch of an epoch. Pure: ranks, workers and resumed runs agree.

An epoch's order is the part's samples chunk by chunk, the chunks shuffled. It is cut into one run of neighbours per
rank, a run into batches, some batches make a window, and a window's samples are shuffled among themselves. So a rank
reads a W-th of the data, in long pieces, and holds one window.

The same number of batches on all ranks, without padding, with n samples, W ranks and batch size B:

    drop_last  each rank has floor(n / (W B)) batches of exactly B; the tail of fewer than W B samples is left out, and
               with chunks shuffled it is another one every epoch
    otherwise  each rank has floor(n / W) samples or one more, in ceil(floor(n / W) / B) batches of equal size up to one
               sample: every sample is served, and a batch may hold one sample more than B
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dnis_torchrec.checks import check


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of every epoch, for one rank.

    Attributes:
        chunk_samples: ``(num_chunks,)`` int64, samples of the part in each chunk.
        batch_size: B.
        rank: this one.
        world_size: W.
        drop_last: see above.
        shuffle: whether the order is a new one each epoch; otherwise that of the files.
        window_batches: batches of a window, which are shuffled together.
        seed: of the shuffling.
        place: which stream it is, for errors.

    Raises:
        ValueError: if there are too few samples for one batch on every rank.

    Example:
        >>> order = EpochOrder(chunk_samples=np.array([5, 5]), batch_size=2, rank=1, world_size=2, drop_last=True,
        ...     shuffle=False, window_batches=1, seed=0)
        >>> order.num_batches, order.pieces(0, 0), order.pieces(0, 1)
        (2, [(0, 4, 5), (1, 0, 1)], [(1, 1, 3)])
    """

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
        """``(num_batches + 1,)`` int64: batch b holds samples ``bounds[b]..bounds[b + 1] - 1`` of the epoch's order."""
        batches = np.arange(self.num_batches + 1)
        if self.drop_last:
            return (self.rank * self.num_batches + batches) * self.batch_size
        first, last = (self.num_samples * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return first + (last - first) * batches // self.num_batches

    def window_bounds(self, window: int) -> np.ndarray:
        """Returns where the batches of a window begin and end, counted from the window's first sample.

        Args:
            window: its number, 0..num_windows - 1.

        Returns:
            ``(batches of the window + 1,)`` int64, rising from 0.
        """
        first = window * self.window_batches
        bounds = self.bounds[first : first + self.window_batches + 1]
        return bounds - bounds[0]

    def pieces(self, epoch: int, window: int) -> list[tuple[int, int, int]]:
        """Returns the samples that make up a window, chunk by chunk.

        Args:
            epoch: its number, from 0.
            window: its number, 0..num_windows - 1.

        Returns:
            ``(chunk, first, last)`` each: the part's samples in that chunk from number first to before last.
        """
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
        """The order of a window's samples, counted from the window's first one; int64.

        Args:
            epoch: its number, from 0.
            window: its number, 0..num_windows - 1.

        Returns:
            ``(samples of the window,)``.
        """
        num_samples = int(self.window_bounds(window)[-1])
        if not self.shuffle:
            return np.arange(num_samples)
        return np.random.default_rng((self.seed, epoch, 1 + self.rank, 1 + window)).permutation(num_samples)

    def _chunk_order(self, epoch: int) -> np.ndarray:
        num_chunks = len(self.chunk_samples)
        if not self.shuffle:
            return np.arange(num_chunks)
        return np.random.default_rng((self.seed, epoch, 0)).permutation(num_chunks)
