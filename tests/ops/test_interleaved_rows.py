"""Interleaved rows: what is written is what the format says, byte by byte, and what is read is what was written.

Rows without values, full rows, no rows at all, every dtype of values and columns, chunks that end anywhere.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.ops.interleaved_rows import RowLayout, interleaved, read_rows


def taken_apart(
    rows: torch.Tensor, pointers: torch.Tensor, value_bytes: int, column_bytes: int
) -> dict[str, torch.Tensor | None]:
    """Canonical arrays again, a row at a time."""
    content, place = rows.numpy().tobytes(), 0
    parts: dict[str, bytes] = {"scales": b"", "values": b"", "columns": b""}
    for begin, end in pairwise(pointers.tolist()):
        scale_bytes = 2 if value_bytes == 1 else 0
        sizes = {"scales": scale_bytes, "values": value_bytes * (end - begin), "columns": column_bytes * (end - begin)}
        for name, size in sizes.items():
            parts[name] += content[place : place + size]
            place += size
    assert place == len(content)
    kinds = {4: np.float32, 2: np.float16, 1: np.int8}, {1: np.uint8, 2: np.uint16}
    scales = torch.from_numpy(np.frombuffer(bytearray(parts["scales"]), np.int16)).view(torch.bfloat16)
    return {
        "values": torch.from_numpy(np.frombuffer(bytearray(parts["values"]), kinds[0][value_bytes])),
        "columns": torch.from_numpy(np.frombuffer(bytearray(parts["columns"]), kinds[1][column_bytes])),
        "scales": scales if value_bytes == 1 else None,
    }


@st.composite
def canonical(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    counts = torch.tensor(draw(st.lists(st.integers(0, 5) | st.just(70), max_size=12)), dtype=torch.int64)
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int8]))
    column_dtype = draw(st.sampled_from([torch.uint8, torch.uint16]))
    num_values = int(counts.sum())
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    arrays = {
        "values": torch.randint(-127, 128, (num_values,), generator=generator).to(dtype),
        "columns": torch.randint(0, 256, (num_values,), generator=generator).to(column_dtype),
        "row_pointers": pointers.to(draw(st.sampled_from([torch.int32, torch.int64]))),
    }
    if dtype == torch.int8:
        arrays["scales"] = torch.rand(len(counts), generator=generator).bfloat16()
    return arrays


@given(canonical(), st.sampled_from([1, 3, 2**16]))
def test_written_and_read(arrays: dict[str, torch.Tensor], rows_per_chunk: int) -> None:
    rows = interleaved(**arrays, rows_per_chunk=rows_per_chunk)
    layout = RowLayout.of(arrays["values"].dtype, arrays["columns"].dtype)
    pointers, scales = arrays["row_pointers"].long(), arrays.get("scales")
    assert rows.nbytes == sum(array.nbytes for name, array in arrays.items() if name != "row_pointers")
    assert rows.nbytes == layout.num_bytes(len(pointers) - 1, len(arrays["values"]))
    apart = taken_apart(rows, pointers, *layout)
    for name, wanted in {**arrays, "scales": scales}.items():
        found = apart.get(name, arrays["row_pointers"])
        assert (found is None) == (wanted is None)
        assert wanted is None or wanted.equal(found)

    index = torch.arange(len(pointers) - 1).repeat(2).flip(0)  # any order, and some rows twice
    row, columns, values, factors = read_rows(rows, layout, index, pointers[index], pointers.diff()[index])
    position = torch.cat([torch.arange(pointers[i], pointers[i + 1]) for i in index.tolist()] or [index])
    assert row.equal(torch.arange(len(index)).repeat_interleave(pointers.diff()[index]))
    assert columns.equal(arrays["columns"].long()[position])
    assert values.equal(arrays["values"].float()[position])
    assert factors.equal(torch.ones(len(index)) if scales is None else scales.float()[index])


def test_row_pointers_that_fall() -> None:
    with pytest.raises(ValueError, match="row pointers: expected rising ones, got others from row 2 on"):
        interleaved(torch.ones(3), torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 1, 3, 2, 3]), rows_per_chunk=2)
