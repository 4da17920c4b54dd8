"""RowRouting and RowRouter against Python lists."""

from __future__ import annotations

import bisect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.blocks import routing as routing_module
from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from tests.allocations import AllocatedPeak
from tests.serving_reference import routings


def blocks_of(routing: RowRouting) -> list[int]:
    """The block of every row, told row by row."""
    if routing.boundaries is None:
        return routing.block_of_row.long().tolist()
    cuts = routing.boundaries.tolist()
    return [bisect.bisect_right(cuts[1:], row) for row in range(routing.num_embeddings)]


@given(routings(), st.sampled_from([torch.int32, torch.int64]))
def test_blocks(routing: RowRouting, dtype: torch.dtype) -> None:
    rows = torch.arange(routing.num_embeddings, dtype=dtype)
    expected = blocks_of(routing)
    assert routing.block_of(rows).tolist() == expected
    assert RowRouter(routing)(rows).tolist() == expected
    assert routing.all_blocks().tolist() == expected
    assert routing.block_of(rows.flip(0).view(1, -1)).tolist() == [expected[::-1]]


@given(routings())
def test_row_counts(routing: RowRouting) -> None:
    blocks = blocks_of(routing)
    counts = [blocks.count(block) for block in range(routing.num_blocks + 1)]
    assert routing.row_counts(include_unassigned=True).tolist() == counts
    assert routing.row_counts().tolist() == counts[:-1]


@given(routings())
def test_positions_order_rows_by_block(routing: RowRouting) -> None:
    blocks = blocks_of(routing)
    order = sorted(range(len(blocks)), key=lambda row: blocks[row])
    positions = routing.positions()
    if positions is None:
        assert order == list(range(len(blocks)))
    else:
        assert [order.index(row) for row in range(len(blocks))] == positions.tolist()
        assert positions.dtype == torch.int32


@given(routings(), st.data())
def test_without_rows(routing: RowRouting, data: st.DataObject) -> None:
    size = routing.num_embeddings
    dropped = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    left = routing.without_rows(torch.tensor(dropped))
    expected = [routing.num_blocks if gone else block for gone, block in zip(dropped, blocks_of(routing), strict=True)]
    assert blocks_of(left) == expected
    assert left.num_blocks == routing.num_blocks


def test_without_the_last_rows_keeps_boundaries() -> None:
    routing = RowRouting(5, 2, boundaries=torch.tensor([0, 2, 5]))
    assert routing.without_rows(torch.tensor([0, 0, 0, 1, 1]).bool()).boundaries.tolist() == [0, 2, 3]
    assert routing.without_rows(torch.tensor([1, 1, 1, 1, 1]).bool()).boundaries.tolist() == [0, 0, 0]
    assert routing.without_rows(torch.zeros(5).bool()) is routing


@given(routings())
def test_tensors_round_trip(routing: RowRouting) -> None:
    tensors = routing.to_tensors()
    assert len(tensors) == 1
    again = RowRouting.from_tensors(routing.num_embeddings, routing.num_blocks, tensors)
    assert blocks_of(again) == blocks_of(routing)


@pytest.mark.parametrize(("num_blocks", "dtype"), [(255, torch.uint8), (256, torch.uint16), (40_000, torch.uint16)])
def test_map_takes_the_smallest_dtype(num_blocks: int, dtype: torch.dtype) -> None:
    blocks = torch.tensor([num_blocks, 0, num_blocks - 1])
    routing = RowRouting.from_map(blocks, num_blocks)
    assert routing.block_of_row.dtype == dtype
    assert routing.block_of(torch.arange(3)).tolist() == blocks.tolist()
    assert routing.positions().tolist() == [2, 0, 1]


def test_router_keeps_out_of_state_dict() -> None:
    assert RowRouter(RowRouting.from_map(torch.tensor([0, 1]), 2)).state_dict() == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 0, "boundaries": torch.tensor([0])}, r"num_blocks: expected 1\.\.65535, got 0"),
        ({"num_blocks": 1}, "exactly one of boundaries and block_of_row, got neither"),
        (
            {"num_blocks": 1, "boundaries": torch.tensor([0, 4]), "block_of_row": torch.zeros(4, dtype=torch.uint8)},
            "exactly one of boundaries and block_of_row, got both",
        ),
        ({"num_blocks": 2, "boundaries": torch.tensor([0, 4])}, "boundaries: expected 3 rising row numbers"),
        ({"num_blocks": 2, "boundaries": torch.tensor([0, 3, 2])}, "rising"),
        ({"num_blocks": 2, "boundaries": torch.tensor([1, 2, 3])}, "from 0"),
        ({"num_blocks": 2, "boundaries": torch.tensor([0, 2, 5])}, "to at most 4"),
        ({"num_blocks": 2, "block_of_row": torch.zeros(3, dtype=torch.uint8)}, "one block for each of 4 rows"),
    ],
)
def test_malformed_routings_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowRouting(4, **fields)


@pytest.mark.parametrize("block", [-1, 3])
def test_map_outside_the_blocks_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"block_of_row: expected values in 0\.\.2"):
        RowRouting.from_map(torch.tensor([0, block]), 2)


@pytest.mark.parametrize(("num_blocks", "bytes_per_row"), [(5, 1), (300, 2)])
def test_a_large_table_takes_a_byte_or_two_per_row(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, bytes_per_row: int
) -> None:
    monkeypatch.setattr(routing_module, "ROWS_AT_A_TIME", 1000)
    num_rows, generator = 100_500, torch.Generator().manual_seed(0)
    blocks = torch.randint(0, num_blocks + 1, (num_rows,), generator=generator)
    routing, dropped = RowRouting.from_map(blocks, num_blocks), torch.rand(num_rows, generator=generator) < 0.3
    with AllocatedPeak([blocks, dropped, routing.block_of_row]) as taken:
        counts = routing.row_counts(include_unassigned=True)
        without = routing.without_rows(dropped)
    assert counts.equal(torch.bincount(blocks, minlength=num_blocks + 1))
    assert without.all_blocks().equal(blocks.masked_fill(dropped, num_blocks))
    assert num_rows * bytes_per_row <= taken.peak < num_rows * (bytes_per_row + 1)
