"""Blocking against a walk down the sorted rows: ties, rows never seen, tables of fewer rows than blocks."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks import counts as counts_module
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.search.settings import SearchSettings
from tests.allocations import AllocatedPeak
from tests.reference import blocks_reference

DIMS = {"a": 4, "b": 8, "c": 4}
count_lists = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1200)), min_size=1, max_size=12)
Counts = dict[str, list[int]]


def tables_of(counts: Counts) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=len(rows), embedding_dim=DIMS[name], feature_names=[f"f_{name}"])
        for name, rows in counts.items()
    ]


def counts_of(counts: Counts) -> FrequencyCounts:
    longest = {f"f_{name}": index for index, name in enumerate(counts)}
    return FrequencyCounts({name: torch.tensor(rows) for name, rows in counts.items()}, longest, 10)


def blocks_of(counts: Counts, **options) -> RowBlocks:
    return blocks_from_counts(counts_of(counts), tables_of(counts), **options)


@st.composite
def cases(draw) -> tuple[Counts, int]:
    counts = {name: draw(count_lists) for name in draw(st.permutations(list(DIMS)))}
    if draw(st.booleans()):
        counts = {name: sorted(rows, reverse=True) for name, rows in counts.items()}
    return counts, draw(st.integers(1, 6))


@given(cases(), st.integers(1, 14))
def test_blocks_of_every_row(case, rows_at_a_time: int) -> None:
    """However many rows are looked at together; by boundaries where rows stand in the order of their blocks, those
    never seen last, else one byte per row."""
    counts, num_blocks = case
    with patch.object(counts_module, "ROWS_AT_A_TIME", rows_at_a_time):
        blocks = blocks_of(counts, num_blocks=num_blocks)
    assert list(blocks.routings) == list(counts)
    assert blocks.embedding_dims == {name: DIMS[name] for name in counts}
    assert blocks.max_bag_lengths == counts_of(counts).max_bag_lengths
    for name, rows in counts.items():
        routing, of_row = blocks.routings[name], blocks_reference(rows, min(num_blocks, len(rows)))
        assert routing.all_blocks().tolist() == of_row
        members = [[c for c, b in zip(rows, of_row, strict=True) if b == s] for s in range(routing.num_blocks)]
        assert blocks.occurrences[name].tolist() == [sum(member) for member in members]
        assert blocks.seen_rows[name].tolist() == [sum(count > 0 for count in member) for member in members]
        never = [count == 0 for count in rows]
        in_order = of_row == sorted(of_row) and never == sorted(never)
        assert (routing.boundaries is not None) == in_order
        assert in_order or routing.block_of_row.dtype == torch.uint8
        assert (routing.without_rows(torch.tensor(never)).boundaries is not None) == in_order


@given(cases())
def test_rows_of_alpha(case) -> None:
    """Each table has its own, one table of a D after the other."""
    counts, num_blocks = case
    blocks = blocks_of(counts, num_blocks=num_blocks)
    for dim, (num_rows, width) in blocks.alpha_shapes.items():
        names, first, seen = [name for name in counts if DIMS[name] == dim], 0, []
        for name in names:
            assert blocks.first_alpha_row(name) == first
            first += blocks.routings[name].num_blocks
            seen += blocks.seen_rows[name].tolist()
        assert (num_rows, width) == (first, dim)
        assert blocks.per_alpha_row(dim, blocks.seen_rows).tolist() == seen


@given(cases())
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, case) -> None:
    blocks = blocks_of(case[0], num_blocks=case[1], leave_alone=["b"])
    path = tmp_path_factory.mktemp("blocks") / "blocks.safetensors"
    blocks.save(path)
    again = RowBlocks.load(path)
    for field in ("embedding_dims", "max_bag_lengths", "alpha_shapes", "left_alone"):
        assert getattr(again, field) == getattr(blocks, field)
    assert list(again.routings) == list(blocks.routings)  # their order decides the rows of alpha
    for name, routing in blocks.routings.items():
        assert again.routings[name].to_tensors().keys() == routing.to_tensors().keys()
        assert torch.equal(again.routings[name].all_blocks(), routing.all_blocks())
        assert again.routings[name].num_blocks == routing.num_blocks
        assert torch.equal(again.occurrences[name], blocks.occurrences[name])
        assert torch.equal(again.seen_rows[name], blocks.seen_rows[name])


def test_a_large_table_takes_a_byte_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "ROWS_AT_A_TIME", 1000)
    counts = {name: torch.arange(70_000) * 7919 % 211 for name in ("a", "c")}
    tables = tables_of({name: [0] * 70_000 for name in counts})
    with AllocatedPeak(counts.values()) as taken:
        blocks_from_counts(FrequencyCounts(counts, {}, 10), tables)
    assert 2 * 70_000 <= taken.peak < 2 * 70_000 * 1.8


def test_many_blocks_take_a_wider_map() -> None:
    routing = blocks_of({"a": list(range(300))}, num_blocks=300).routings["a"]
    assert routing.block_of_row.dtype == torch.uint16
    assert routing.all_blocks().tolist() == list(range(300))[::-1]


def test_one_default_everywhere() -> None:
    assert blocks_of({"a": list(range(300))}).routings["a"].num_blocks == NUM_BLOCKS
    assert measure_.__kwdefaults__["num_blocks"] == SearchSettings.num_blocks == NUM_BLOCKS


@pytest.mark.parametrize(
    ("counts", "tables", "options", "place"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, {"num_blocks": 0}, "num_blocks"),
        ({"a": [1, 2]}, {"a": [1, 2]}, {"num_blocks": 1 << 16}, "num_blocks"),
        ({"a": [1, 2]}, {"a": [1, 2]}, {"leave_alone": ["z"]}, "table to leave alone"),
        ({"a": [1, 2]}, {"b": [1]}, {}, "table 'b'"),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, {}, "table 'a'"),
    ],
)
def test_what_does_not_fit_is_refused(counts: Counts, tables: Counts, options: dict, place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place}"):
        blocks_from_counts(counts_of(counts), tables_of(tables), **options)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        RowBlocks.load(path)
    blocks_of({"a": [1, 2]}).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        RowBlocks.load(path)
