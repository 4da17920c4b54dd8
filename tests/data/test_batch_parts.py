"""Batches cut into parts: together they are the batch again, and none is too small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.data.batches import BatchParts, cut_batch
from dnis_torchrec.data.over_ranks import split_over_ranks
from dnis_torchrec.data.recipe import DataSplits
from tests.batches import OneOf, Sample, samples, to_batch, to_samples


@given(st.lists(samples, min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_the_parts_are_the_batch(of: list[Sample], num_parts: int, at_least: int, weighted: bool) -> None:
    parts = list(cut_batch(to_batch(of, weighted=weighted), num_parts, at_least))
    sizes = [part.labels.numel() for part in parts]
    assert len(parts) == max(1, min(num_parts, len(of) // at_least))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(at_least, len(of))
    assert [sample for part in parts for sample in to_samples(part)] == of


class Counted(list):
    """Batches that count their epochs."""

    epoch = 3


def test_the_epoch_is_that_of_the_batches() -> None:
    batches = Counted()
    parts = BatchParts(batches, 2)
    assert parts.epoch == 3
    parts.epoch = 5
    assert batches.epoch == 5
    assert not hasattr(BatchParts([], 2), "epoch")


def test_what_is_split_over_ranks_stays_so() -> None:
    """Else every rank would take a slice of what is its own already."""
    own = Counted()
    own.is_split_over_ranks = True
    for batches, is_left_alone in ((own, True), (Counted(), False)):
        parts = BatchParts(batches, 2)
        data = split_over_ranks(DataSplits(train=parts, validation=parts, selection=parts, test=parts), OneOf(0, 2))
        assert (data.validation is parts) == is_left_alone


def test_less_than_one_part_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parts: expected at least 1, got 0"):
        BatchParts([], 0)
