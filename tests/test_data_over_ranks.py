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

from dnis_torchrec.data_over_ranks import SlicedBatches, check_same, for_counting, slice_of, split_over_ranks
from dnis_torchrec.recipe import DataSplits, RankingBatch
from dnis_torchrec.reductions import Ranks

Sample = tuple[float, float, tuple[tuple[int, ...], ...]]
"""Label, query and the bag of each of two features."""


class OneOf(Ranks):
    """A rank of several that has nobody to talk to."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        return values


@dataclass
class Counting:
    """Batches that count their epochs, as those of the examples do."""

    batches: list[Batch]
    epoch: int = 0

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return iter(self.batches)


samples = st.tuples(
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 3).map(float),
    st.tuples(*[st.lists(st.integers(0, 9), max_size=3).map(tuple)] * 2),
)
batches = st.lists(st.lists(samples, min_size=1, max_size=9), min_size=1, max_size=4)


def to_batch(of: list[Sample], *, weighted: bool) -> RankingBatch:
    bags = [bag for feature in range(2) for _, _, pair in of for bag in (pair[feature],)]
    values = torch.tensor([row for bag in bags for row in bag], dtype=torch.int64)
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=values,
        weights=values / 7 if weighted else None,
        lengths=torch.tensor([len(bag) for bag in bags]),
        stride=len(of),
    )
    labels, queries = torch.tensor([label for label, _, _ in of]), torch.tensor([int(query) for _, query, _ in of])
    return RankingBatch(labels.unsqueeze(1) + 2, features, labels, queries)


def to_samples(batch: RankingBatch) -> list[Sample]:
    assert torch.equal(batch.dense_features.squeeze(1), batch.labels + 2)
    features = batch.sparse_features
    if features.weights_or_none() is not None:
        torch.testing.assert_close(features.weights(), features.values() / 7)
    columns = [features[key].to_dense() for key in ("f", "g")]
    pairs = [tuple(tuple(bag.tolist()) for bag in bags) for bags in zip(*columns, strict=True)]
    return list(zip(batch.labels.tolist(), batch.queries.float().tolist(), pairs, strict=True))


@given(st.lists(samples, min_size=1, max_size=9), st.data(), st.booleans())
def test_a_slice_holds_just_its_samples(of: list[Sample], data: st.DataObject, weighted: bool) -> None:
    first = data.draw(st.integers(0, len(of) - 1))
    last = data.draw(st.integers(first + 1, len(of)))
    sliced = slice_of(to_batch(of, weighted=weighted), first, last)
    assert sliced.sparse_features.stride() == last - first
    assert to_samples(sliced) == of[first:last]


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
    counted = [list(for_counting(SlicedBatches(whole, own, "train", equal=True))) for own in ranks]
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
    assert for_counting(own) is own


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
        list(for_counting(sliced))
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


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^batch: expected a dataclass, as TorchRec's Batch is, got list"):
        slice_of([1], 0, 1)  # type: ignore[arg-type]
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(NotImplementedError, match=r"^batch: supported is one batch size for all features, got several"):
        slice_of(Batch(torch.zeros(2, 1), features, torch.zeros(2)), 0, 1)
