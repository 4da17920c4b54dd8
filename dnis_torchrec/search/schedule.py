"""Schedule: which level steps when. Pure, so that every rank and every resumed run agrees."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import conform

_T = TypeVar("_T")

MAX_AHEAD = 32
"""Batches that a pipeline may have taken from a BilevelStream and not stepped on yet."""
QUEUE = 4
"""Batches behind which upper steps begin once they are asked for: more than a pipeline holds."""
EPOCH_OF_SAMPLES = 1 << 20
"""Number of the epoch, in data that counts them, that samples begin with: one that no search comes
to."""


class Level(enum.Enum):
    """The two levels of the bi-level problem."""

    LOWER = "lower"
    UPPER = "upper"


@dataclass(frozen=True, kw_only=True)
class LevelSchedule:
    """Says when the upper level steps: after every lower step, once a warm-up is over.

    Attributes:
        warm_up_steps: lower steps before the first upper step, at least 1. None: no upper step
            until `BilevelStream.alternate`.

    Example:
        >>> schedule = LevelSchedule(warm_up_steps=2)
        >>> [schedule.level(step).value[0] for step in range(6)]
        ['l', 'l', 'l', 'u', 'l', 'u']
    """

    # DistributedDataParallel learns its buckets in the first backward pass, which has to be that of
    # a whole training step.
    warm_up_steps: int | None = 1

    def __post_init__(self) -> None:
        steps = self.warm_up_steps
        check(steps is None or steps >= 1, "warm_up_steps", "at least 1", steps)

    def level(self, step: int) -> Level:
        """Level of the step with this number, both levels counted, from 0."""
        steps = self.warm_up_steps
        is_upper = steps is not None and step > steps and (step - steps) % 2 == 1
        return Level.UPPER if is_upper else Level.LOWER


@dataclass(frozen=True)
class StreamPosition:
    """Position up to which one of the two streams has been read."""

    epoch: int = 0
    data_epoch: int | None = None
    batches: int = 0


class _State(TypedDict):
    """State that `BilevelStream.state_dict` returns: the position of each level's stream."""

    seed: int
    step: int
    warm_up_steps: int | None
    lower: StreamPosition
    upper: StreamPosition


class BilevelStream(Generic[_T]):
    """Batches of both levels in the order of a schedule: the one iterator that the pipeline reads.

    Either stream starts again when it ends: the shorter one is cycled, neither is cut short. An
    iterable that reorders itself (a DataLoader with shuffle) gives a new order each time. A resumed
    run goes on with the batches that it would have seen, if the order of an epoch depends on
    nothing but the iterable's attribute ``epoch``, where it has one, and on torch's random numbers.

    Args:
        train: batches of the lower level.
        validation: batches of the upper level.
        schedule: which level steps when; `alternate` may say so later.

    Example:
        >>> stream = BilevelStream(["t0", "t1", "t2"], ["v0"], LevelSchedule(warm_up_steps=2))
        >>> [next(stream) for _ in range(6)]
        ['t0', 't1', 't2', 'v0', 't0', 'v0']
    """

    def __init__(
        self,
        train: Iterable[_T],
        validation: Iterable[_T],
        schedule: LevelSchedule = LevelSchedule(),
    ) -> None:
        self._streams = {Level.LOWER: train, Level.UPPER: validation}
        self._iterators: dict[Level, Iterator[_T]] = {}
        self._random_numbers: dict[Level, Tensor] = {}
        self._positions = dict.fromkeys(Level, StreamPosition())
        self.schedule = schedule
        self._seed = torch.initial_seed()
        self._step = 0
        self._passed = deque([(0, self._positions)], maxlen=MAX_AHEAD + 1)
        self.last_level = Level.LOWER

    def __iter__(self) -> BilevelStream[_T]:
        return self

    def __next__(self) -> _T:
        level = self.schedule.level(self._step)
        batch = self._next_of(level)
        self._step += 1
        self._passed.append((self._step, self._positions))
        self.last_level = level
        return batch

    def alternate(self, step: int) -> None:
        """Lets upper steps begin, unless they have: `QUEUE` batches behind this step, so that no
        batch that a pipeline has read ahead changes sides."""
        if self.schedule.warm_up_steps is None:
            self.schedule = LevelSchedule(warm_up_steps=max(1, step + QUEUE))

    def sample(self, number: int) -> Iterator[_T]:
        """Validation batches to measure something on, in an order of their own for each number;
        leaves the stream as it is."""
        stream, epoch = self._streams[Level.UPPER], self._data_epoch(Level.UPPER)
        if epoch is not None:
            stream.epoch = EPOCH_OF_SAMPLES + number  # type: ignore[attr-defined]
        try:
            with _seeded((self._seed, len(Level), number)):
                batches = iter(stream)
                batch, random_numbers = next(batches, None), torch.get_rng_state()
        finally:
            if epoch is not None:
                stream.epoch = epoch  # type: ignore[attr-defined]
        while batch is not None:
            yield batch
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(random_numbers)
                batch, random_numbers = next(batches, None), torch.get_rng_state()

    def state_dict(self, step: int) -> dict[str, Any]:
        """The stream's position after the batch of a step, at most `MAX_AHEAD` batches ago, as JSON
        takes it; the same on all ranks."""
        for passed, positions in self._passed:
            if passed == step:
                places = {level.value: asdict(position) for level, position in positions.items()}
                return {
                    "seed": self._seed,
                    "step": step,
                    "warm_up_steps": self.schedule.warm_up_steps,
                    **places,
                }
        requirement = f"a step from {self._passed[0][0]} to {self._passed[-1][0]}"
        raise RuntimeError(describe("BilevelStream.state_dict", requirement, step))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state_dict` was taken: begins the interrupted epochs again and skips what
        had been read, which is not compared with the run's (`data.over_ranks` compares it)."""
        conform(state, _State, "stream of the checkpoint")
        positions = {level: StreamPosition(**state[level.value]) for level in Level}
        for value in (state["seed"], *(position.epoch for position in positions.values())):
            check(
                value >= 0, "stream of the checkpoint", "its seed and its epochs to be >= 0", value
            )
        self._seed, self._step = state["seed"], state["step"]
        self.schedule = LevelSchedule(warm_up_steps=state["warm_up_steps"])
        for level, wanted in positions.items():
            self._iterators.pop(level, None)
            if wanted.epoch:
                self._skip(level, wanted)
        self._passed = deque([(self._step, self._positions)], maxlen=MAX_AHEAD + 1)

    def leave(self) -> None:
        """Leaves data that counts its epochs in one that does not depend on how far a pipeline had
        read ahead."""
        for level, stream in self._streams.items():
            if self._data_epoch(level) is not None:
                stream.epoch = EPOCH_OF_SAMPLES  # type: ignore[attr-defined]

    def first_train_batch(self) -> _T:
        """A training batch to try things on before the stream is read; the stream stays."""
        stream, epoch = self._streams[Level.LOWER], self._data_epoch(Level.LOWER)
        with _seeded((self._seed,)):
            batch = next(iter(stream))
        if epoch is not None:
            stream.epoch = epoch  # type: ignore[attr-defined]
        return batch

    def _data_epoch(self, level: Level) -> int | None:
        epoch = getattr(self._streams[level], "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def _skip(self, level: Level, wanted: StreamPosition) -> None:
        if wanted.data_epoch is not None:
            received, remedy = "one that does not", "resume with the data of the run"
            counts = self._data_epoch(level) is not None
            check(counts, _name(level), "data that counts its epochs, as before", received, remedy)
            self._streams[level].epoch = wanted.data_epoch  # type: ignore[attr-defined]
        self._positions = {**self._positions, level: StreamPosition(wanted.epoch - 1)}
        while self._positions[level] != wanted:
            before = self._positions[level].batches
            self._next_of(level)
            requirement = f"at least {wanted.batches} batches, as before the interruption"
            same_epoch = self._positions[level].epoch == wanted.epoch
            check(same_epoch, _name(level), requirement, before, "resume with the data of the run")

    def _next_of(self, level: Level) -> _T:
        if level in self._iterators:
            with self._its_random_numbers(level):
                for batch in self._iterators[level]:
                    return self._count(level, batch)
        epoch = self._positions[level].epoch + 1
        data_epoch = self._data_epoch(level)
        with _seeded(
            (self._seed, list(Level).index(level), epoch)
        ):  # some shuffle when asked for their first batch
            self._iterators[level] = iter(self._streams[level])
            first = next(self._iterators[level], None)
            self._random_numbers[level] = torch.get_rng_state()
        if first is None:
            raise ValueError(
                describe(_name(level), "at least one batch", "none", "check the data splits")
            )
        self._positions = {**self._positions, level: StreamPosition(epoch, data_epoch)}
        return self._count(level, first)

    @contextmanager
    def _its_random_numbers(self, level: Level) -> Iterator[None]:
        """Torch's random numbers of the CPU go on inside where this stream's batch before left
        them."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random_numbers[level])
        try:
            yield
        finally:
            self._random_numbers[level] = torch.get_rng_state()
            torch.set_rng_state(before)

    def _count(self, level: Level, batch: _T) -> _T:
        position = self._positions[level]
        self._positions = {
            **self._positions,
            level: replace(position, batches=position.batches + 1),
        }
        return batch


def _name(level: Level) -> str:
    return "training stream" if level is Level.LOWER else "validation stream"


@contextmanager
def _seeded(entropy: tuple[int, ...]) -> Iterator[None]:
    """Torch's random numbers of the CPU, seeded inside and untouched outside."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    try:
        yield
    finally:
        torch.set_rng_state(before)
