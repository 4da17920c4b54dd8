"""Schedule: which level steps when. Pure, so that every rank and every resumed run agrees."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, cast

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
SAMPLE_BATCHES = 16
"""Batches of a stream, its newest, that something is measured on."""
EPOCH_OF_SAMPLES = 1 << 20
"""Number of the epoch, in data that counts them, that samples begin with: one that no search comes
to."""


class Level(enum.Enum):
    """The two levels of the bi-level problem."""

    LOWER = "lower"
    UPPER = "upper"


@dataclass(frozen=True, kw_only=True)
class LevelSchedule:
    """Says when the upper level steps: after every lower step, once a warm-up of at least one step
    is over; with None for its length once `BilevelStream.alternate` says so. It takes `upper_steps`
    at most.
    """

    # DistributedDataParallel learns its buckets in the first backward pass, which has to be that of
    # a whole training step.
    warm_up_steps: int | None = 1
    upper_steps: int | None = None

    def __post_init__(self) -> None:
        steps = self.warm_up_steps
        check(steps is None or steps >= 1, "warm_up_steps", "at least 1", steps)

    def level(self, step: int) -> Level:
        """Level of the step with this number, both levels counted, from 0."""
        steps, most = self.warm_up_steps, self.upper_steps
        is_upper = steps is not None and step > steps and (step - steps) % 2 == 1
        if is_upper and steps is not None and most is not None:
            is_upper = step - steps < 2 * most
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
    upper_steps: NotRequired[int | None]
    lower: StreamPosition
    upper: StreamPosition


class BilevelStream(Generic[_T]):
    """Batches of both levels in the order of a schedule: the one iterator that the pipeline reads.

    Either stream starts again when it ends: the shorter one is cycled, neither is cut short. An
    iterable that reorders itself (a DataLoader with shuffle) gives a new order each time. A resumed
    run goes on with the batches that it would have seen, if the order of an epoch depends on
    nothing but the iterable's attribute ``epoch``, where it has one, and on torch's random numbers.
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
        self._past = deque([(0, self._positions)], maxlen=MAX_AHEAD + 1)
        self.last_level = Level.LOWER

    def __iter__(self) -> BilevelStream[_T]:
        return self

    def __next__(self) -> _T:
        level = self.schedule.level(self._step)
        batch = self._next_of(level)
        self._step += 1
        self._past.append((self._step, self._positions))
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
        for past, positions in self._past:
            if past == step:
                state = {"seed": self._seed, "step": step} | asdict(self.schedule)
                return state | {level.value: asdict(place) for level, place in positions.items()}
        requirement = f"a step from {self._past[0][0]} to {self._past[-1][0]}"
        raise RuntimeError(describe("BilevelStream.state_dict", requirement, step))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state_dict` was taken: begins the interrupted epochs again and skips what
        had been read, which is not compared with the run's (`data.over_ranks` compares it)."""
        conform(state, _State, "stream of the checkpoint")
        positions = {level: StreamPosition(**state[level.value]) for level in Level}
        place, requirement = "stream of the checkpoint", "its seed and its epochs to be >= 0"
        for value in (state["seed"], *(position.epoch for position in positions.values())):
            check(value >= 0, place, requirement, value)
        self._seed, self._step = state["seed"], state["step"]
        lengths = {name: state.get(name) for name in ("warm_up_steps", "upper_steps")}
        self.schedule = LevelSchedule(**lengths)
        for level, position in positions.items():
            self._iterators.pop(level, None)
            if position.epoch:
                self._skip(level, position)
        self._past = deque([(self._step, self._positions)], maxlen=MAX_AHEAD + 1)

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

    def _skip(self, level: Level, target: StreamPosition) -> None:
        remedy = "resume with the data of the run"
        if target.data_epoch is not None:
            requirement, counts = "data that counts its epochs", self._data_epoch(level) is not None
            check(counts, _name(level), f"{requirement}, as before", "one that does not", remedy)
            self._streams[level].epoch = target.data_epoch  # type: ignore[attr-defined]
        requirement = f"at least {target.batches} batches, as before the interruption"
        self._positions = {**self._positions, level: StreamPosition(target.epoch - 1)}
        while self._positions[level] != target:
            num_batches = self._positions[level].batches
            self._next_of(level)
            is_same_epoch = self._positions[level].epoch == target.epoch
            check(is_same_epoch, _name(level), requirement, num_batches, remedy)

    def _next_of(self, level: Level) -> _T:
        if level in self._iterators:
            # The random numbers go on where this stream's last batch left them.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._random_numbers[level])
                batch = next(self._iterators[level], None)
                self._random_numbers[level] = torch.get_rng_state()
            if batch is not None:
                return self._count(level, batch)
        epoch, data_epoch = self._positions[level].epoch + 1, self._data_epoch(level)
        with _seeded((self._seed, list(Level).index(level), epoch)):
            self._iterators[level] = iter(self._streams[level])
            first = next(self._iterators[level], None)  # where some shuffle
            self._random_numbers[level] = torch.get_rng_state()
        if first is None:
            remedy = "check the data splits"
            raise ValueError(describe(_name(level), "at least one batch", "none", remedy))
        self._positions = {**self._positions, level: StreamPosition(epoch, data_epoch)}
        return self._count(level, first)

    def _count(self, level: Level, batch: _T) -> _T:
        position = self._positions[level]
        position = replace(position, batches=position.batches + 1)
        self._positions = {**self._positions, level: position}
        return batch


class OnePass(BilevelStream[_T]):
    """Batches of one stream, read once, for both levels: an upper step sees a batch first, and the
    next lower step trains on it. So alpha learns from batches that no weight has learnt from.
    """

    def __init__(self, source: Iterable[_T], schedule: LevelSchedule = LevelSchedule()) -> None:
        super().__init__((), (), schedule)
        self._source = iter(source)
        self._ahead: list[_T] = []  # the next one to train on, if it is read
        self._newest = deque[_T](maxlen=SAMPLE_BATCHES)
        self._positions = dict.fromkeys(Level, StreamPosition(epoch=1))

    def sample(self, number: int) -> Iterator[_T]:
        """The newest batches: there are no others to measure on."""
        return iter([*self._newest])

    def first_train_batch(self) -> _T:
        """The next batch to train on, which stays the next."""
        batch = self._look()
        check(batch is not None, _name(Level.LOWER), "at least one batch", "none")
        return cast(_T, batch)

    def _skip(self, level: Level, target: StreamPosition) -> None:
        # A batch that upper steps alone have had is the next one to train on.
        self._positions = {**self._positions, level: target}
        number, remedy = target.batches if level is Level.LOWER else 0, "resume with the run's data"
        for index in range(number):
            requirement = f"at least {number} batches, as before the interruption"
            check(self._look() is not None, _name(level), requirement, index, remedy)
            self._ahead.pop()

    def _next_of(self, level: Level) -> _T:
        batch = self._look()
        if batch is None:
            raise StopIteration
        if level is Level.LOWER:
            self._ahead.pop()
        return self._count(level, batch)

    def _look(self) -> _T | None:
        if not self._ahead:
            self._ahead.extend(itertools.islice(self._source, 1))
            self._newest.extend(self._ahead)
        return self._ahead[0] if self._ahead else None


def _name(level: Level) -> str:
    return "training stream" if level is Level.LOWER else "validation stream"


@contextmanager
def _seeded(entropy: tuple[int, ...]) -> Iterator[None]:
    """Torch's random numbers of the CPU, seeded inside and untouched outside."""
    with torch.random.fork_rng(devices=[]):
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        torch.default_generator.manual_seed(seed)
        yield
