"""Level schedules and the stream of both levels against plain Python lists."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.search.schedule import MAX_AHEAD, QUEUE, BilevelStream, Level, LevelSchedule

schedules = st.builds(LevelSchedule, warm_up_steps=st.none() | st.integers(1, 7))


def levels_of(schedule: LevelSchedule, num_steps: int) -> list[Level]:
    """Warm up, then a lower and an upper step again and again; lower steps alone while nobody knows the warm-up."""
    warm_up = num_steps if schedule.warm_up_steps is None else schedule.warm_up_steps
    rounds = itertools.cycle([Level.LOWER, Level.UPPER])
    return list(itertools.islice(itertools.chain([Level.LOWER] * warm_up, rounds), num_steps))


@given(schedules)
def test_levels(schedule: LevelSchedule) -> None:
    assert [schedule.level(step) for step in range(60)] == levels_of(schedule, 60)


def test_both_levels_step_unless_a_warm_up_is_asked_for() -> None:
    expected = ["t", "t", "v", "t", "v"]
    assert [next(stream) for stream in [BilevelStream(["t"], ["v"])] for _ in range(5)] == expected
    assert [next(stream) for stream in [BilevelStream(["t"], ["v"], LevelSchedule())] for _ in range(5)] == expected


@pytest.mark.parametrize("value", [0, -1])
def test_a_warm_up_has_a_step(value: int) -> None:
    with pytest.raises(ValueError, match=rf"^warm_up_steps: expected at least 1, got {value}$"):
        LevelSchedule(warm_up_steps=value)


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
        next(BilevelStream([], ["v"], LevelSchedule(warm_up_steps=1)))
    stream = BilevelStream(["t"], [], LevelSchedule(warm_up_steps=1))
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
    stepped=st.integers(0, 25),
    ahead=st.integers(0, MAX_AHEAD),
)
def test_a_stream_goes_on_where_the_steps_were(kind, sizes, warm_up, stepped, ahead) -> None:
    """Whatever a pipeline had read ahead of its steps."""
    schedule = LevelSchedule(warm_up_steps=warm_up)

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
    levels = levels_of(schedule, stepped)
    train = [batch for batch, level in zip(seen, levels, strict=False) if level is Level.LOWER]
    assert last == (train[-1] if train else None)
    expected = seen[stepped:] + [next(interrupted) for _ in range(5)]
    assert [next(resumed) for _ in expected] == expected


@given(stepped=st.integers(0, 12), ahead=st.integers(0, QUEUE), saved_behind=st.none() | st.integers(0, 9))
def test_upper_steps_begin_behind_the_queue_once_they_are_asked_for(
    stepped: int, ahead: int, saved_behind: int | None
) -> None:
    """None of the batches that were read ahead changes sides, and a stream that was saved before or after goes on so.

    Saved before, whoever goes on asks for upper steps anew.
    """
    stream = BilevelStream(Drawing("t", 5), Drawing("v", 3), LevelSchedule(warm_up_steps=None))
    seen = [next(stream) for _ in range(stepped + ahead)]
    state = stream.state_dict(stepped)
    stream.alternate(stepped)
    assert stream.schedule == LevelSchedule(warm_up_steps=stepped + QUEUE)
    stream.alternate(stepped + 3)  # they have begun
    assert stream.schedule == LevelSchedule(warm_up_steps=stepped + QUEUE)
    saved_at = stepped + (saved_behind or 0)
    while len(seen) < saved_at + 4:
        seen.append(next(stream))
    if saved_behind is not None:
        state = stream.state_dict(saved_at)
    seen += [next(stream) for _ in range(10)]
    is_train = [batch[0] == "t" for batch in seen]
    assert is_train == [level is Level.LOWER for level in levels_of(stream.schedule, len(seen))]
    resumed = BilevelStream(Drawing("t", 5), Drawing("v", 3), LevelSchedule(warm_up_steps=None))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.alternate(saved_at)
    assert [next(resumed) for _ in seen[saved_at:]] == seen[saved_at:]


class DrawingEach(Drawing):
    """Batches that are drawn one by one, as a data set that adds noise has them."""

    def __iter__(self) -> Iterator[str]:
        left = list(range(self.size))
        while left:
            yield f"{self.name}{left.pop(int(torch.randint(len(left), ())))}"


@pytest.mark.parametrize("kind", [Counting, Drawing, DrawingEach])
def test_samples_have_orders_of_their_own_and_leave_everything_as_it_is(kind: type) -> None:
    def stream() -> BilevelStream[str]:
        return BilevelStream(kind("t", 5), kind("v", 7), LevelSchedule(warm_up_steps=1))

    torch.manual_seed(1)
    undisturbed = stream()
    expected = [next(undisturbed) for _ in range(30)]
    measured, seen, samples, before = stream(), [], [], torch.get_rng_state()
    for step in range(30):
        if step % 7 == 3:
            sample = measured.sample(step)
            samples.append([next(sample)[-1] for _ in range(3)])
            seen.append(next(measured))  # the stream goes on while somebody measures
            samples[-1] += [batch[-1] for batch in sample]
        else:
            seen.append(next(measured))
    assert seen == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert [sorted(sample) for sample in samples] == [list("0123456")] * len(samples)
    assert len({tuple(sample) for sample in samples}) == len(samples)
    assert [batch[-1] for batch in measured.sample(3)] == samples[0]


def test_a_stream_does_not_touch_random_numbers() -> None:
    stream = BilevelStream(Drawing("t", 3), Drawing("v", 2), LevelSchedule(warm_up_steps=1))
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
    stream = BilevelStream(Counting("t", 5), Counting("v", 2), LevelSchedule(warm_up_steps=1))
    for _ in range(MAX_AHEAD + 5):
        next(stream)
    with pytest.raises(RuntimeError, match=rf"expected a step from 5 to {MAX_AHEAD + 5}, got 4"):
        stream.state_dict(4)
