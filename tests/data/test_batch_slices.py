"""Slices of batches against naive Python: a slice holds just its samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import slice_of
from tests.batches import Sample, samples, to_batch, to_samples


@given(st.lists(samples, min_size=1, max_size=9), st.data(), st.booleans())
def test_a_slice_holds_just_its_samples(of: list[Sample], data: st.DataObject, weighted: bool) -> None:
    first = data.draw(st.integers(0, len(of) - 1))
    last = data.draw(st.integers(first + 1, len(of)))
    sliced = slice_of(to_batch(of, weighted=weighted), first, last)
    assert sliced.sparse_features.stride() == last - first
    assert sliced.sparse_features.lengths().is_contiguous()  # as collectives want it
    assert to_samples(sliced) == of[first:last]


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
