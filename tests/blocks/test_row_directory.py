"""The row directory against counting rows one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.blocks import routing as routing_module
from dnis_torchrec.blocks.routing import RecordLayout, RowDirectory, RowRouting, directory_bytes
from tests.allocations import AllocatedPeak
from tests.serving_reference import routings


def located(routing: RowRouting) -> tuple[list[int], list[int]]:
    """Block and position of every row, counted."""
    blocks, seen, positions = routing.all_blocks().tolist(), dict[int, int](), []
    for block in blocks:
        positions.append(seen.get(block, 0))
        seen[block] = positions[-1] + 1
    return blocks, positions


def check_against_count(routing: RowRouting) -> None:
    directory = RowDirectory.of(routing)
    found = directory.locate(torch.arange(routing.num_embeddings))
    blocks, positions = located(routing)
    assert found[0].tolist() == blocks
    assigned = found[0] < routing.num_blocks
    assert found[1][assigned].tolist() == torch.tensor(positions)[assigned].tolist()
    assert directory.directory.nbytes == directory_bytes(routing)


@given(routings(max_rows=20, max_blocks=5))
def test_finds_every_row(routing: RowRouting) -> None:
    check_against_count(routing)


@given(
    num_blocks=st.sampled_from([1, 2, 3, 8, 9, 15, 16]),
    num_rows=st.sampled_from([1, 127, 128, 129, 255, 256, 257, 700]),
    seed=st.integers(0, 2**31),
    has_unassigned=st.booleans(),
)
def test_finds_rows_of_many_records(num_blocks: int, num_rows: int, seed: int, has_unassigned: bool) -> None:
    drawn = torch.randint(num_blocks + has_unassigned, (num_rows,), generator=torch.Generator().manual_seed(seed))
    check_against_count(RowRouting.from_map(drawn, num_blocks))


@pytest.mark.parametrize("num_blocks", [5, 64, 255])
def test_counts_go_on_behind_65536_rows_and_from_chunk_to_chunk(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_module, "ROWS_AT_A_TIME", 1 << 17)
    torch.manual_seed(0)
    routing = RowRouting.from_map(torch.randint(num_blocks + 1, (150_001,)), num_blocks)
    directory, order = RowDirectory.of(routing), torch.argsort(routing.all_blocks(), stable=True)
    positions = torch.empty_like(order)
    counts = routing.row_counts(include_unassigned=True)
    positions[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    ids = torch.cat([torch.randint(150_001, (2_000,)), torch.tensor([0, 65_535, 65_536, 131_071, 131_072, 150_000])])
    blocks, found = directory.locate(ids)
    assert blocks.equal(routing.block_of(ids))
    assert found.equal(positions[ids])


@pytest.mark.parametrize(
    ("num_blocks", "planes", "rows", "num_bytes"),
    [(2, 1, 128, 20), (3, 2, 128, 38), (8, 3, 128, 64), (9, 4, 256, 146), (16, 4, 256, 160), (256, 8, 1024, 1536)],
)
def test_size_of_records(num_blocks: int, planes: int, rows: int, num_bytes: int) -> None:
    layout = RecordLayout(num_blocks)
    assert (layout.num_planes, layout.rows_per_record, layout.record_bytes) == (planes, rows, num_bytes)


def test_size_by_kind_of_routing() -> None:
    all_in_one = [RowRouting(9, 3, boundaries=torch.tensor([0, 9, 9, 9])), RowRouting.from_map(torch.full((9,), 2), 3)]
    assert [directory_bytes(routing) for routing in all_in_one] == [0, 0]
    assert directory_bytes(RowRouting(9, 3, boundaries=torch.tensor([0, 2, 9, 9]))) == 32
    assert directory_bytes(RowRouting.from_map(torch.tensor([0, 1] * 100), 2)) == 16 + 2 * 20


def test_memory_of_a_large_table_is_that_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_module, "ROWS_AT_A_TIME", 1 << 16)
    routing = RowRouting.from_map(torch.randint(8, (1 << 21,)), 8)
    with AllocatedPeak([routing.block_of_row]) as allocated:
        directory = RowDirectory.of(routing)
    assert allocated.peak < directory.directory.nbytes + 80 * (1 << 16)


def test_more_blocks_than_a_record_knows_are_refused() -> None:
    routing = RowRouting.from_map(torch.arange(300), 300)
    for refused in (directory_bytes, RowDirectory.of):
        with pytest.raises(ValueError, match=r"row directory: expected at most 255 blocks, got 300"):
            refused(routing)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"blocks": (1, 0)}, "blocks: expected rising numbers in 0..2"),
        ({"blocks": (0, 3)}, "blocks: expected rising numbers in 0..2"),
        ({"blocks": ()}, "blocks: expected rising numbers in 0..2"),
        ({"directory": torch.zeros(9, dtype=torch.uint8)}, "expected 36 bytes for 3 rows of 2 blocks"),
        ({"directory": torch.zeros(4, dtype=torch.int64)}, "expected 3 boundaries"),
    ],
)
def test_parts_that_do_not_fit(changed: dict, message: str) -> None:
    fields = {"num_embeddings": 3, "num_blocks": 2, "blocks": (0, 1), "directory": torch.zeros(36, dtype=torch.uint8)}
    RowDirectory(**fields)
    with pytest.raises(ValueError, match=message):
        RowDirectory(**fields | changed)
