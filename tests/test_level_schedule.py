"""Level schedules and the stream of both levels against plain Python lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.level_schedule import BilevelStream, Level, LevelSchedule

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
