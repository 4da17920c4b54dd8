"""Slices of batches against naive Python: every sample goes to one rank, and steps of all ranks are as many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.lookup_batches import features_of
from dnis_torchrec.data.over_ranks import (
    SPLITS,
    NotedBatches,
    SlicedBatches,
    all_samples,
    check_same,
    fingerprints,
    measured_samples,
    split_over_ranks,
    with_notes,
)
from dnis_torchrec.data.recipe import DataSplits
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.streaming.checked_counts import count_training_data
from tests.batches import OneOf, Sample, samples, to_batch, to_samples
from tests.tiny import make_batch, make_recipe
from tests.tiny_tasks import two_sided

batches = st.lists(st.lists(samples, min_size=1, max_size=9), min_size=1, max_size=4)


@dataclass
class Counting:
    """Batches that count their epochs, as those of the examples do."""

    batches: list[Batch]
    epoch: int = 0

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return iter(self.batches)


@given(batches, st.integers(2, 4))
def test_learning_takes_equal_slices_on_all_ranks(of: list[list[Sample]], world_size: int) -> None:
    whole = [to_batch(part, weighted=False) for part in of]
    taken = [list(SlicedBatches(whole, OneOf(r, world_size), "train", equal=True)) for r in range(world_size)]
    kept = [part for part in of if len(part) >= world_size]
    for own in taken:
        assert [batch.labels.numel() for batch in own] == [len(part) // world_size for part in kept]
    for number, part in enumerate(kept):
        together = [sample for own in taken for sample in to_samples(own[number])]
        assert together == part[: len(part) // world_size * world_size]


@given(batches, st.integers(2, 4))
def test_judging_and_counting_leave_nothing_out(of: list[list[Sample]], world_size: int) -> None:
    whole = [to_batch(part, weighted=False) for part in of]
    ranks = [OneOf(rank, world_size) for rank in range(world_size)]
    counted = [list(all_samples(SlicedBatches(whole, own, "train", equal=True))) for own in ranks]
    together = [sample for own in counted for batch in own for sample in to_samples(batch)]
    assert sorted(together) == sorted(sample for part in of for sample in part)
    judged = [SlicedBatches(whole, own, "test", equal=False) for own in ranks]
    short = next((number for number, part in enumerate(of) if len(part) < world_size), None)
    for own in judged:
        if short is not None:
            with pytest.raises(ValueError, match=f"^test batch {short}: expected at least one sample for each of"):
                list(own)
    if short is None:
        for number, part in enumerate(of):
            assert [sample for own in judged for sample in to_samples(list(own)[number])] == part


@given(batches, st.integers(2, 4))
def test_measuring_takes_all_of_what_every_rank_has_a_sample_of(of: list[list[Sample]], world_size: int) -> None:
    whole = [to_batch(part, weighted=False) for part in of]
    learned = [SlicedBatches(whole, OneOf(r, world_size), "train", equal=True) for r in range(world_size)]
    measured = [measured_samples(own) for own in learned]
    kept = [part for part in of if len(part) >= world_size]
    for _ in range(2):  # again and again
        taken = [list(own) for own in measured]
        assert [len(own) for own in taken] == [len(kept)] * world_size
        for number, part in enumerate(kept):
            assert [sample for own in taken for sample in to_samples(own[number])] == part
    assert measured_samples(whole) is whole


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_sample_of_what_is_learned_on_stays_unchecked(split: str) -> None:
    """Sample 6 of 7 is in no rank's third, but in a rank's share of the second half, which is what an upper step takes.

    An error that one rank met in training would leave the others waiting.
    """
    recipe = make_recipe()
    batch = make_batch(7, seed=0)
    batch.sparse_features.values()[6] = 40
    data = split_over_ranks(replace(recipe.data, **{split: [batch]}), OneOf(2, 3))
    with pytest.raises(ValueError, match=r"table 'user', feature 'user'.*: expected ids in 0\.\.39, got 40"):
        count_training_data(data, recipe.loss, table_configs(recipe.model))


def splits(*names: str, of: list[Sample]) -> DataSplits:
    """The same batch in every split; those named hold it twice."""
    batch = to_batch(of, weighted=False)
    made = {name: [batch] * (1 + (name in names)) for name in ("train", "validation", "selection", "test")}
    return DataSplits(**made)


SAMPLES: list[Sample] = [(0.0, 0.0, ((1, 2), ())), (1.0, 1.0, ((3,), (4,)))]


def test_one_rank_gets_the_data_itself() -> None:
    data = splits(of=SAMPLES)
    assert split_over_ranks(data, Ranks()) is data


def test_data_that_splits_itself_is_left_alone() -> None:
    own = Counting(splits(of=SAMPLES).train)
    own.is_split_over_ranks = True
    data = split_over_ranks(replace(splits(of=SAMPLES), train=own), OneOf(0, 2))
    assert data.train is own
    assert isinstance(data.test, SlicedBatches)
    assert all_samples(own) is own


def test_the_epoch_of_the_batches_goes_through() -> None:
    whole = Counting(splits(of=SAMPLES).train)
    sliced = SlicedBatches(whole, OneOf(0, 2), "train", equal=True)
    assert (len(list(sliced)), sliced.epoch) == (1, 1)
    sliced.epoch = 7
    assert whole.epoch == 7
    assert getattr(SlicedBatches([], OneOf(0, 2), "train", equal=True), "epoch", None) is None


def test_another_label_id_or_order_is_seen() -> None:
    def fingerprint(of: list[list[Sample]]) -> int | None:
        sliced = SlicedBatches([to_batch(part, weighted=False) for part in of], OneOf(0, 2), "train", equal=True)
        assert sliced.fingerprint is None
        list(all_samples(sliced))
        return sliced.fingerprint

    (first, second), other = SAMPLES, (0.0, 1.0, ((3,), (5,)))
    variants = [[[first, second]], [[second, first]], [[first, other]], [[first], [second]], [[second], [first]]]
    assert len({fingerprint(of) for of in variants}) == len(variants)
    assert fingerprint(variants[0]) == fingerprint(variants[0])


def test_other_batches_on_another_rank_are_named() -> None:
    class Talking(OneOf):
        def max_(self, values: torch.Tensor) -> torch.Tensor:
            return torch.maximum(values, torch.tensor([5, -5]))

    data = split_over_ranks(splits(of=SAMPLES), Talking(0, 2))
    for part in (data.train, data.validation, data.selection, data.test):
        list(part)
    message = "^train stream: expected the same batches in the same order on every rank, got others; let their order"
    with pytest.raises(ValueError, match=message):
        check_same(data, Talking(0, 2))
    check_same(data, OneOf(0, 2))


def noted_of(of: list[list[Sample]], ranks: Ranks | None = None) -> int:
    """The fingerprint of what a rank counts; of one process if None."""
    whole = [to_batch(part, weighted=False) for part in of]
    noted = NotedBatches(whole if ranks is None else SlicedBatches(whole, ranks, "train", equal=True))
    list(all_samples(noted))
    return noted.fingerprint


@given(batches, st.integers(2, 4), st.randoms(use_true_random=False))
def test_the_same_samples_have_one_fingerprint_however_they_come(
    of: list[list[Sample]], world_size: int, order
) -> None:
    together = [sample for part in of for sample in part]
    expected = noted_of(of)
    order.shuffle(together)
    assert noted_of([together]) == expected
    assert sum(noted_of(of, OneOf(rank, world_size)) for rank in range(world_size)) % (1 << 40) == expected


def test_other_samples_have_another_fingerprint() -> None:
    first, second = SAMPLES
    variants = {
        "as they are": [first, second],
        "another label": [first, (0.0, *second[1:])],
        "labels swapped": [(1.0, *first[1:]), (0.0, *second[1:])],
        "another id": [first, (*second[:2], ((3,), (5,)))],
        "an id of row 0 more": [first, (*second[:2], ((3, 0), (4,)))],
        "ids swapped between samples": [(*first[:2], ((1, 3), ())), (*second[:2], ((2,), (4,)))],
        "ids swapped between features": [first, (*second[:2], ((4,), (3,)))],
        "a sample more": [first, second, second],
        "a sample less": [first],
    }
    found = {name: noted_of([of]) for name, of in variants.items()}
    assert len(set(found.values())) == len(found), found


def test_every_split_has_a_fingerprint_of_its_last_pass() -> None:
    data = split_over_ranks(splits("test", of=SAMPLES), OneOf(0, 2))
    noted = with_notes(data)
    for _ in range(2):
        for name in SPLITS:
            list(all_samples(getattr(noted, name)))
    found = fingerprints(noted, Ranks())
    assert list(found) == list(SPLITS)
    assert found["train"] == found["validation"] == found["selection"] == noted_of([SAMPLES[:1]])
    assert found["test"] == 2 * found["train"] % (1 << 40)


def test_batches_of_two_labels_and_two_sides_are_sliced_and_told_apart() -> None:
    whole = two_sided(7, seed=1)
    parts = [list(SlicedBatches([whole], OneOf(rank, 2), "test", equal=False)) for rank in range(2)]
    first, second = parts[0][0], parts[1][0]
    assert (first.labels.shape, second.labels.shape) == ((3, 2), (4, 2))
    joined = torch.cat([first.labels, second.labels]).nan_to_num(-1)
    assert torch.equal(joined, whole.labels.nan_to_num(-1))
    for rank, part in enumerate((first, second)):
        rows = slice(0, 3) if rank == 0 else slice(3, 7)
        assert torch.equal(part.weights, whole.weights[rows])
        lengths = whole.candidates.lengths()[rows]
        assert torch.equal(part.candidates.lengths(), lengths)

    def fingerprint(batch: Batch) -> int:
        noted = NotedBatches([batch])
        list(noted)
        return noted.fingerprint

    ratings, genres = whole.labels.clone(), whole.candidates.values().clone()
    ratings[2, 1] = 9.0
    genres[0] = (genres[0] + 1) % 12
    other = KeyedJaggedTensor(whole.candidates.keys(), genres, lengths=whole.candidates.lengths())
    changed = [replace(whole, labels=ratings), replace(whole, candidates=other)]
    assert len({fingerprint(batch) for batch in (whole, *changed)}) == 3


def test_a_feature_belongs_to_one_side() -> None:
    whole = two_sided(4, seed=1)
    assert features_of(whole).keys() == ["user", "genre"]
    with pytest.raises(ValueError, match=r"^batch: expected features in one KeyedJaggedTensor each, got \['user'\]"):
        features_of(replace(whole, candidates=whole.sparse_features))
