"""Tensors in chunks: any part of any partition is copied as naive indexing would; what is missing is named."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.jobs import stored_tensors
from dnis_torchrec.jobs.stored_tensors import Cut, StoredChunk, StoredTensor


def opened(part: torch.Tensor) -> Cut:
    return part.__getitem__


def stored_in(tensor: torch.Tensor, cuts: list[list[int]]) -> StoredTensor:
    """The tensor in a grid of chunks, cut at these places of each dimension."""
    spans = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(cuts, tensor.shape, strict=True)]
    chunks = []
    for grid in itertools.product(*spans):
        part = tensor[tuple(slice(*span) for span in grid)].clone()
        chunks.append(StoredChunk(tuple(start for start, _ in grid), tuple(part.shape), partial(opened, part)))
    return StoredTensor("t", tuple(tensor.shape), tuple(reversed(chunks)))


@given(st.lists(st.integers(1, 6), max_size=3), st.data(), st.integers(1, 9))
def test_any_part_of_any_chunks_is_copied(shape: list[int], data: st.DataObject, at_a_time: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    inner = [st.lists(st.integers(1, size - 1), unique=True).map(sorted) if size > 1 else st.just([]) for size in shape]
    stored = stored_in(tensor, [data.draw(cuts) for cuts in inner])
    first = [data.draw(st.integers(0, size - 1)) for size in shape]
    last = [data.draw(st.integers(begin + 1, size)) for begin, size in zip(first, shape, strict=True)]
    part = tensor[tuple(map(slice, first, last))]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(stored_tensors, "VALUES_AT_A_TIME", at_a_time)
        stored.copy_to_(found := torch.full_like(part, -1), first)
        assert found.equal(part)
        assert stored.whole().equal(tensor)


def test_what_no_chunk_holds_is_missed_where_it_is_asked_for() -> None:
    stored = stored_in(torch.arange(6).view(3, 2), [[1], []])
    first_row = StoredTensor("table 't'", (3, 2), stored.chunks[1:])
    first_row.copy_to_(found := torch.zeros(1, 2, dtype=torch.int64))
    assert found.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match=r"^table 't': expected chunks of 4 values, got 0; copy all files of it"):
        first_row.copy_to_(torch.zeros(2, 2), (1, 0))
    for of_none in (first_row, StoredTensor("table 't'", (3, 2), ())):
        with pytest.raises(ValueError, match=r"^table 't': expected chunks of"):
            of_none.whole()
