"""Level schedule: which level steps when. Pure, so that every rank and every resumed run agrees without talking."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dnis_torchrec.checks import check, describe

T = TypeVar("T")


class Level(enum.Enum):
    """The two levels of the bi-level problem."""

    LOWER = "lower"
    UPPER = "upper"


@dataclass(frozen=True, kw_only=True)
class LevelSchedule:
    """When the upper level steps.

    Attributes:
        warm_up_steps: lower steps before the first upper step; at least 1, because DistributedDataParallel learns its
            buckets in the first backward pass, which has to be that of a whole training step.
        upper_every: one upper step after this many lower steps.

    Example:
        >>> schedule = LevelSchedule(warm_up_steps=1, upper_every=2)
        >>> [schedule.level(step).value[0] for step in range(7)]
        ['l', 'l', 'l', 'u', 'l', 'l', 'u']
    """

    warm_up_steps: int = 1
    upper_every: int = 1

    def __post_init__(self) -> None:
        check(self.warm_up_steps >= 1, "warm_up_steps", "expected at least 1", self.warm_up_steps)
        check(self.upper_every >= 1, "upper_every", "expected at least 1", self.upper_every)

    def level(self, step: int) -> Level:
        """Level of the step with this number, both levels counted, from 0."""
        return Level.UPPER if self.is_upper(step) else Level.LOWER

    def is_upper(self, step: int) -> bool:
        """Whether the step with this number is an upper step."""
        since = step - self.warm_up_steps
        return since >= 0 and since % (self.upper_every + 1) == self.upper_every

    def steps_for(self, lower_steps: int) -> int:
        """Steps of both levels that contain this many lower steps and every upper step up to and after the last one."""
        return lower_steps + self.upper_steps_for(lower_steps)

    def upper_steps_for(self, lower_steps: int) -> int:
        """Upper steps among `steps_for` as many lower steps."""
        return max(0, lower_steps - self.warm_up_steps) // self.upper_every


class BilevelStream(Generic[T]):
    """Batches of both levels in the order of a schedule: the one iterator that the pipeline reads.

    Either stream starts again when it ends: the shorter one is cycled, neither is cut short. An iterable that
    reorders itself (a DataLoader with shuffle) gives a new order each time.

    Args:
        train: batches of the lower level.
        validation: batches of the upper level.
        schedule: which level steps when.

    Example:
        >>> stream = BilevelStream(["t0", "t1", "t2"], ["v0"], LevelSchedule(warm_up_steps=2))
        >>> [next(stream) for _ in range(6)]
        ['t0', 't1', 't2', 'v0', 't0', 'v0']
    """

    def __init__(self, train: Iterable[T], validation: Iterable[T], schedule: LevelSchedule) -> None:
        self._streams = {Level.LOWER: train, Level.UPPER: validation}
        self._iterators: dict[Level, Iterator[T]] = {}
        self.schedule = schedule
        self._step = 0
        self.last_level = Level.LOWER

    def __iter__(self) -> BilevelStream[T]:
        return self

    def __next__(self) -> T:
        level = self.schedule.level(self._step)
        batch = self._next_of(level)
        self._step += 1
        self.last_level = level
        return batch

    def _next_of(self, level: Level) -> T:
        if level in self._iterators:
            for batch in self._iterators[level]:
                return batch
        self._iterators[level] = iter(self._streams[level])
        for batch in self._iterators[level]:
            return batch
        name = "training" if level is Level.LOWER else "validation"
        raise ValueError(describe(f"{name} stream", "expected at least one batch", "none", "check the data splits"))
