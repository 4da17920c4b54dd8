"""Level schedules and the stream of both levels against plain Python lists."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.search.level_schedule import MAX_AHEAD, BilevelStream, Level, LevelSchedule

schedules = st.builds(LevelSchedule, warm_up_steps=st.integers(1, 7), upper_every=st.integers(1, 4))


def levels_of(schedule: LevelSchedule, num_steps: int) -> list[Level]:
    """Warm up, then again and again upper_every lower steps and one upper step."""
    rounds = itertools.cycle([Level.LOWER] * schedule.upper_every + [Level.UPPER])
    return list(itertools.islice(itertools.chain([Level.LOWER] * schedule.warm_up_steps, rounds), num_steps))


@given(schedules)
def test_levels(schedule: LevelSchedule) -> None:
    expected = levels_of(schedule, 60)
    assert [schedule.level(step) for step in range(60)] == expected
    assert [schedule.is_upper(step) for step in range(60)] == [level is Level.UPPER for level in expected]


@given(schedules, st.integers(0, 20))
def test_steps_for(schedule: LevelSchedule, lower_steps: int) -> None:
    lower = upper = 0
    for level in levels_of(schedule, 200):
        if level is Level.LOWER and lower == lower_steps:
            break
        lower, upper = (lower + 1, upper) if level is Level.LOWER else (lower, upper + 1)
    assert schedule.upper_steps_for(lower_steps) == upper
    assert schedule.steps_for(lower_steps) == lower + upper


def test_default_warms_up_for_one_step_and_alternates() -> None:
    assert [LevelSchedule().level(step).value for step in range(5)] == ["lower", "lower", "upper", "lower", "upper"]


@pytest.mark.parametrize("name", ["warm_up_steps", "upper_every"])
@pytest.mark.parametrize("value", [0, -1])
def test_schedules_need_positive_numbers(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected at least 1, got {value}$"):
        LevelSchedule(**{name: value})


@given(schedules, st.integers(1, 6), st.integers(1, 6))
def test_stream_cycles_both_levels_in_the_order_of_the_schedule(
    schedule: LevelSchedule, num_train: int, num_validation: int
) -> None:
    train = [("train", i) for i in range(num_train)]
    validation = [("validation", i) for i in range(num_validation)]
    stream = BilevelStream(train, validation, schedule)
    assert iter(stream) is stream
    endless = {Level.LOWER: itertools.cycle(train), Level.UPPER: itertools.cycle(validation)}
    for level in levels_of(schedule, 40):
        assert next(stream) == next(endless[level])
        assert stream.last_level is level


class Reordering:
    """An iterable that gives a new order each time, as a shuffling DataLoader does."""

    def __init__(self) -> None:
        self.epoch = -1

    def __iter__(self):
        self.epoch += 1
        return iter([f"{self.epoch}a", f"{self.epoch}b"])


def test_stream_iterates_anew_when_a_level_ends() -> None:
    stream = BilevelStream(Reordering(), Reordering(), LevelSchedule(warm_up_steps=3))
    assert [next(stream) for _ in range(8)] == ["0a", "0b", "1a", "1b", "0a", "2a", "0b", "2b"]


def test_empty_streams_are_refused() -> None:
    remedy = "expected at least one batch, got none; check the data splits"
    with pytest.raises(ValueError, match=f"^training stream: {remedy}$"):
        next(BilevelStream([], ["v"], LevelSchedule()))
    stream = BilevelStream(["t"], [], LevelSchedule())
    assert [next(stream), next(stream)] == ["t", "t"]
    with pytest.raises(ValueError, match=f"^validation stream: {remedy}$"):
        next(stream)


def test_a_stream_that_cannot_start_again_is_refused_when_it_ends() -> None:
    stream = BilevelStream(iter(["t0", "t1"]), ["v"], LevelSchedule(warm_up_steps=5))
    assert [next(stream), next(stream)] == ["t0", "t1"]
    with pytest.raises(ValueError, match="training stream: expected at least one batch"):
        next(stream)


class Counting:
    """Batches in an order that its epoch decides, as `examples.datasets.in_memory` has them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.epoch = name, size, 0

    def __iter__(self) -> Iterator[str]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
        return (f"{self.name}{epoch}.{number}" for number in order)


class Drawing:
    """Batches in an order drawn from torch's own random numbers, as a shuffling DataLoader has them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __iter__(self) -> Iterator[str]:
        for number in torch.randperm(self.size).tolist():
            yield f"{self.name}{number}"


@pytest.mark.parametrize("kind", [Counting, Drawing])
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    warm_up=st.integers(1, 6),
    every=st.integers(1, 3),
    stepped=st.integers(0, 25),
    ahead=st.integers(0, MAX_AHEAD),
)
def test_a_stream_goes_on_where_the_steps_were(kind, sizes, warm_up, every, stepped, ahead) -> None:
    """Whatever a pipeline had read ahead of its steps."""
    schedule = LevelSchedule(warm_up_steps=warm_up, upper_every=every)

    def stream() -> BilevelStream[str]:
        return BilevelStream(kind("t", sizes[0]), kind("v", sizes[1]), schedule)

    torch.manual_seed(1)
    interrupted = stream()
    seen = [next(interrupted) for _ in range(stepped + ahead)]
    state = json.loads(json.dumps(interrupted.state_dict(stepped)))
    torch.manual_seed(2)  # another process
    resumed, before = stream(), torch.get_rng_state()
    resumed.first_train_batch()
    last = resumed.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
    train = [batch for step, batch in enumerate(seen[:stepped]) if not schedule.is_upper(step)]
    assert last == (train[-1] if train else None)
    expected = seen[stepped:] + [next(interrupted) for _ in range(5)]
    assert [next(resumed) for _ in expected] == expected


def test_a_stream_does_not_touch_random_numbers() -> None:
    stream = BilevelStream(Drawing("t", 3), Drawing("v", 2), LevelSchedule())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = [next(stream) for _ in range(12)]
    assert torch.equal(torch.get_rng_state(), before)
    assert first[:4] != first[4:8] or first[4:8] != first[8:]  # every epoch has an order of its own


def test_a_stream_that_became_shorter_is_refused() -> None:
    stream = BilevelStream(Counting("t", 5), Counting("v", 2), LevelSchedule(warm_up_steps=9))
    for _ in range(4):
        next(stream)
    shorter = BilevelStream(Counting("t", 3), Counting("v", 2), LevelSchedule(warm_up_steps=9))
    message = "training stream: expected at least 4 batches, as before the interruption, got 3; resume with the data of"
    with pytest.raises(ValueError, match=message):
        shorter.load_state_dict(stream.state_dict(4))


def test_a_stream_knows_the_latest_steps_alone() -> None:
    stream = BilevelStream(Counting("t", 5), Counting("v", 2), LevelSchedule())
    for _ in range(MAX_AHEAD + 5):
        next(stream)
    with pytest.raises(RuntimeError, match=rf"expected a step from 5 to {MAX_AHEAD + 5}, got 4"):
        stream.state_dict(4)
