"""Compact row pointers say what the row pointers said, whatever the number of rows and values before them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.ops import compact_pointers
from dnis_torchrec.ops.compact_pointers import compact_bytes, compacted, num_rows_of, row_bounds

ROWS = st.integers(0, 9) | st.sampled_from([55, 56, 57, 111, 112, 113, 300])


def written_out(compact: torch.Tensor) -> list[int]:
    """Row pointers from the bytes, one after the other."""
    content, pointers, begin = compact.tolist(), [], 0
    for first in range(0, len(content), 64):
        begin = int.from_bytes(bytes(content[first : first + 8]), "little", signed=True)
        for length in content[first + 8 : first + 64]:
            pointers.append(begin)
            begin += length
    return [*pointers, begin]


@given(ROWS, st.sampled_from([0, 2**31, 2**45]), st.sampled_from([1, 2, 2**16]), st.integers(0, 2**31))
def test_there_and_back(num_rows: int, begin: int, records_per_chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 256, (num_rows,), generator=generator)
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]) + begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_pointers, "_RECORDS_PER_CHUNK", records_per_chunk)
        compact = compacted(pointers)
    assert compact.numel() == compact_bytes(num_rows)
    assert num_rows_of(compact) == num_rows_of(pointers) == num_rows
    if num_rows:
        assert written_out(compact) == pointers.tolist()
        rows = torch.randint(0, num_rows, (40,), generator=generator)
        for wanted, found in zip(row_bounds(pointers, rows), row_bounds(compact, rows), strict=True):
            assert found.equal(wanted)


def test_takes_little_more_than_a_byte_a_row() -> None:
    assert compact_bytes(10**6) / 10**6 < 1.15
    assert compacted(torch.zeros(1001, dtype=torch.int32)).numel() == compact_bytes(1000)


@pytest.mark.parametrize("pointers", [[0, 3, 2, 4], [0, 1, 257, 257]])
def test_rows_that_do_not_fit_are_named(pointers: list[int]) -> None:
    with pytest.raises(ValueError, match="row pointers: expected rising ones, at most 255 apart, got others in row 1"):
        compacted(torch.tensor(pointers))


@pytest.mark.parametrize("num_bytes", [1, 8, 65, 72])
def test_records_without_a_row_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="compact row pointers: expected whole records, got"):
        num_rows_of(torch.zeros(num_bytes, dtype=torch.uint8))
