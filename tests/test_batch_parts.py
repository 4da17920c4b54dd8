"""Batches cut into parts: together they are the batch again, and none is empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.batch_parts import BatchParts, cut
from dnis_torchrec.data_over_ranks import SplitsItself
from dnis_torchrec.recipe import RankingBatch


@st.composite
def batches(draw):
    """Bags of two features, empty ones among them, with or without weights."""
    batch_size = draw(st.integers(1, 7))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=2 * batch_size, max_size=2 * batch_size)))
    ids = torch.arange(int(lengths.sum()))
    weights = ids.float() / 10 if draw(st.booleans()) else None
    features = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths, weights=weights)
    numbers = torch.arange(batch_size)
    return RankingBatch(numbers.float().view(-1, 1), features, numbers.float(), numbers)


def bags_of(batch: Batch) -> list[list[list[float]]]:
    """Sample -> feature -> ids, and weights after them."""
    features = [batch.sparse_features[key] for key in ("a", "b")]
    held = [own.to_dense() + (own.to_dense_weights() if own.weights_or_none() is not None else []) for own in features]
    size = batch.sparse_features.stride()
    return [[own[i].tolist() for own in held for i in range(sample, len(own), size)] for sample in range(size)]


@given(batches(), st.integers(1, 9))
def test_the_parts_are_the_batch(batch: RankingBatch, num_parts: int) -> None:
    parts = list(cut(batch, num_parts))
    sizes = [part.labels.numel() for part in parts]
    assert len(parts) == min(num_parts, batch.labels.numel())
    assert max(sizes) - min(sizes) <= 1
    assert [bag for part in parts for bag in bags_of(part)] == bags_of(batch)
    for name in ("dense_features", "labels", "queries"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert all(isinstance(part, RankingBatch) and part.sparse_features.keys() == ["a", "b"] for part in parts)


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
    assert isinstance(BatchParts(own, 2), SplitsItself)
    assert not isinstance(BatchParts(Counted(), 2), SplitsItself)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parts: expected at least 1, got 0"):
        BatchParts([], 0)
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(NotImplementedError, match="expected one batch size for all features"):
        next(cut(Batch(torch.zeros(1, 1), features, torch.ones(1)), 2))
