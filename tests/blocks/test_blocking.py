"""Blocking against a walk down the sorted rows: every strategy, both scopes, ties, rows never seen."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dnis_torchrec.blocks import counts as counts_module
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.sketch import BoundedCounter, EstimatedCounts
from tests.allocations import AllocatedPeak
from tests.reference import blocks_reference

DIMS = {"a": 4, "b": 8, "c": 4}
count_lists = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1200)), min_size=1, max_size=12)


def tables_of(counts: dict[str, list[int]]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=len(rows), embedding_dim=DIMS[name], feature_names=[f"f_{name}"])
        for name, rows in counts.items()
    ]


def counts_of(counts: dict[str, list[int]]) -> FrequencyCounts:
    longest = {f"f_{name}": index for index, name in enumerate(counts)}
    return FrequencyCounts({name: torch.tensor(rows) for name, rows in counts.items()}, longest, 10)


def expected_blocks(counts: dict[str, list[int]], scope: str, **options) -> dict[str, list[int]]:
    """table -> block of every row."""
    together = {}
    for name in counts:
        together.setdefault(DIMS[name] if scope == "global" else name, []).append(name)
    blocks = {}
    for names in together.values():
        rows = [count for name in names for count in counts[name]]
        wanted = min(options["num_blocks"], len(rows)) if scope == "table" else options["num_blocks"]
        merged = blocks_reference(rows, **options | {"num_blocks": wanted})
        for name in names:
            blocks[name], merged = merged[: len(counts[name])], merged[len(counts[name]) :]
    return blocks


@st.composite
def cases(draw):
    counts = {name: draw(count_lists) for name in draw(st.permutations(list(DIMS)))}
    if draw(st.booleans()):
        counts = {name: sorted(rows, reverse=True) for name, rows in counts.items()}
    options = {
        "strategy": draw(st.sampled_from(["equal_rows", "equal_mass", "decades", "explicit"])),
        "num_blocks": draw(st.integers(1, 6)),
    }
    if options["strategy"] == "explicit":
        positions = range(1, min(len(rows) for rows in counts.values()))
        options["boundaries"] = [position for position in positions if draw(st.booleans())]
    return counts, draw(st.sampled_from(["global", "table"])), options


@example(({name: [0, 1, 2] for name in DIMS}, "table", {"strategy": "equal_mass", "num_blocks": 4}), 1)
@given(cases(), st.integers(1, 14))
def test_blocks_of_every_row(case, rows_at_a_time: int) -> None:
    """However many rows are looked at together."""
    counts, scope, options = case
    with patch.object(counts_module, "ROWS_AT_A_TIME", rows_at_a_time):
        blocks = blocks_from_counts(counts_of(counts), tables_of(counts), scope=scope, **options)
    expected = expected_blocks(counts, scope, **options)
    assert {name: routing.all_blocks().tolist() for name, routing in blocks.routings.items()} == expected
    assert list(blocks.routings) == list(counts)
    assert (blocks.scope, blocks.strategy) == (scope, options["strategy"])
    assert blocks.embedding_dims == {name: DIMS[name] for name in counts}
    assert blocks.max_bag_lengths == counts_of(counts).max_bag_lengths
    for name, rows in counts.items():
        num_blocks = blocks.routings[name].num_blocks
        members = [[c for c, b in zip(rows, expected[name], strict=True) if b == s] for s in range(num_blocks)]
        assert blocks.occurrences[name].tolist() == [sum(member) for member in members]
        assert blocks.seen_rows[name].tolist() == [sum(count > 0 for count in member) for member in members]


@given(cases())
def test_boundaries_or_the_smallest_map(case) -> None:
    """By boundaries where rows stand in the order of their blocks, those never seen last; else one byte per row."""
    counts, scope, options = case
    blocks = blocks_from_counts(counts_of(counts), tables_of(counts), scope=scope, **options)
    for name, of_row in expected_blocks(counts, scope, **options).items():
        served = [(count == 0, block) for count, block in zip(counts[name], of_row, strict=True)]
        in_order = of_row == sorted(of_row) and [s[0] for s in served] == sorted(s[0] for s in served)
        assert (blocks.routings[name].boundaries is not None) == in_order
        assert in_order or blocks.routings[name].block_of_row.dtype == torch.uint8
        dropped = blocks.routings[name].without_rows(torch.tensor(counts[name]) == 0)
        assert (dropped.boundaries is not None) == in_order


@given(cases())
def test_rows_of_alpha(case) -> None:
    """Tables of equal D share all rows of alpha (global), or each has its own, one table after the other."""
    counts, scope, options = case
    blocks = blocks_from_counts(counts_of(counts), tables_of(counts), scope=scope, **options)
    num_blocks = {name: routing.num_blocks for name, routing in blocks.routings.items()}
    for dim, (num_rows, width) in blocks.alpha_shapes.items():
        names = [name for name in counts if DIMS[name] == dim]
        assert width == dim
        together = 0
        for name in names:
            assert blocks.first_alpha_row(name) == (0 if scope == "global" else together)
            together += num_blocks[name]
        assert num_rows == (max(num_blocks[name] for name in names) if scope == "global" else together)
        seen = [0] * num_rows
        for name in names:
            for block, rows in enumerate(blocks.seen_rows[name].tolist()):
                seen[blocks.first_alpha_row(name) + block] += rows
        assert blocks.per_alpha_row(dim, blocks.seen_rows).tolist() == seen


@given(cases())
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, case) -> None:
    counts, scope, options = case
    blocks = blocks_from_counts(counts_of(counts), tables_of(counts), scope=scope, **options)
    path = tmp_path_factory.mktemp("blocks") / "blocks.safetensors"
    blocks.save(path)
    again = RowBlocks.load(path)
    for field in ("scope", "strategy", "embedding_dims", "max_bag_lengths", "alpha_shapes"):
        assert getattr(again, field) == getattr(blocks, field)
    assert list(again.routings) == list(blocks.routings)  # their order decides the rows of alpha
    for name, routing in blocks.routings.items():
        assert again.routings[name].to_tensors().keys() == routing.to_tensors().keys()
        assert torch.equal(again.routings[name].all_blocks(), routing.all_blocks())
        assert again.routings[name].num_blocks == routing.num_blocks
        assert torch.equal(again.occurrences[name], blocks.occurrences[name])
        assert torch.equal(again.seen_rows[name], blocks.seen_rows[name])


def test_a_save_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "blocks.safetensors"
    counts, tables = counts_of({"a": [3, 2, 1]}), tables_of({"a": [3, 2, 1]})
    blocks_from_counts(counts, tables, num_blocks=2).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["blocks.safetensors"]

    def break_off(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("dnis_torchrec.data.files.save_file", break_off)
    with pytest.raises(OSError, match="disk full"):
        blocks_from_counts(counts, tables, num_blocks=3).save(path)
    assert RowBlocks.load(path).routings["a"].num_blocks == 2


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.sampled_from(["equal_rows", "equal_mass", "decades"]))
def test_estimated_counts_are_blocked_as_the_same_numbers_in_a_tensor_are(ids: list[int], strategy: str) -> None:
    counter = BoundedCounter(exact_ids=8, epsilon=0.3, delta=0.2)
    counter.add(np.array(ids))
    estimated, tables = EstimatedCounts(counter, 61), tables_of({"a": [0] * 61, "b": [3, 1]})
    others = {"b": torch.tensor([3, 1])}
    found, wanted = (
        blocks_from_counts(FrequencyCounts({"a": counts} | others, {}, 80), tables, strategy=strategy)
        for counts in (estimated, estimated[:])
    )
    assert found.routings["a"].all_blocks().equal(wanted.routings["a"].all_blocks())
    assert found.occurrences["a"].equal(wanted.occurrences["a"])
    assert found.seen_rows["a"].equal(wanted.seen_rows["a"])


@pytest.mark.parametrize("scope", ["global", "table"])
def test_a_large_table_takes_a_byte_per_row(monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    monkeypatch.setattr(counts_module, "ROWS_AT_A_TIME", 1000)
    counts = {name: torch.arange(70_000) * 7919 % 211 for name in ("a", "c")}
    tables = tables_of({name: [0] * 70_000 for name in counts})
    with AllocatedPeak(counts.values()) as taken:
        blocks_from_counts(FrequencyCounts(counts, {}, 10), tables, scope=scope)
    assert 2 * 70_000 <= taken.peak < 2 * 70_000 * 1.8


def one(counts: list[int], **options) -> list[int]:
    return (
        blocks_from_counts(counts_of({"a": counts}), tables_of({"a": counts}), **options)
        .routings["a"]
        .all_blocks()
        .tolist()
    )


def test_cuts_by_hand() -> None:
    assert one([9, 1, 5, 5], num_blocks=2) == [0, 1, 0, 1]
    assert one([6, 3, 2, 1], num_blocks=2, strategy="equal_mass") == [0, 1, 1, 1]
    assert one([1000, 999, 99, 10, 9, 0], strategy="decades") == [0, 1, 2, 2, 3, 3]
    assert one([1000, 20, 0], strategy="decades") == [0, 1, 1]
    assert one([4, 3, 2, 1], strategy="explicit", boundaries=[1]) == [0, 1, 1, 1]
    assert one([0, 0, 0, 0], num_blocks=2) == [0, 0, 1, 1]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 60))
def test_equal_mass_is_exact(counts: list[int], num_blocks: int) -> None:
    assert one(counts, num_blocks=num_blocks, strategy="equal_mass") == blocks_reference(
        counts, "equal_mass", num_blocks
    )


def test_equal_mass_of_even_rows_is_even() -> None:
    """k / 49 * 49 in floating point is not always k."""
    for num_blocks in range(1, 100):
        assert one([1] * num_blocks, num_blocks=num_blocks, strategy="equal_mass") == list(range(num_blocks))


def test_never_seen_rows_among_seen_ones_take_a_map() -> None:
    """Boundaries could not say which rows are left once those are dropped, and sizes told from them would be wrong."""
    for counts, by_boundaries in (([3, 2, 0], True), ([3, 0, 2], False), ([0, 3], False), ([0, 0], True)):
        blocks = blocks_from_counts(counts_of({"a": counts}), tables_of({"a": counts}), num_blocks=1)
        assert (blocks.routings["a"].boundaries is not None) == by_boundaries


def test_many_blocks_take_a_wider_map() -> None:
    counts = list(range(300))
    blocks = blocks_from_counts(counts_of({"a": counts}), tables_of({"a": counts}), num_blocks=300)
    assert blocks.routings["a"].block_of_row.dtype == torch.uint16
    assert blocks.routings["a"].all_blocks().tolist() == counts[::-1]


def test_fewer_blocks_than_wanted_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        one([3, 2], num_blocks=2)
        assert caplog.messages == []
        one([3, 2], num_blocks=5)
        one([3, 2], num_blocks=5, scope="table")  # a small table among others
        one([1000, 1], num_blocks=5, strategy="decades")
    assert caplog.messages == ["blocking: 2 blocks came out of 5 wanted (too few rows)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "tabel"}, r"scope: expected one of \('global', 'table'\), got 'tabel'"),
        ({"strategy": "equal"}, r"strategy: expected one of \('equal_rows'.*got 'equal'"),
        ({"num_blocks": 0}, "num_blocks: expected at least 1, got 0"),
        ({"boundaries": [1]}, r"boundaries: expected exactly with strategy 'explicit', got \[1\] with 'equal_rows'"),
        ({"strategy": "explicit"}, "boundaries: expected exactly with strategy 'explicit', got None with 'explicit'"),
        *(
            ({"strategy": "explicit", "boundaries": cuts}, r"boundaries: expected rising positions in 1\.\.3, got ")
            for cuts in ([0], [2, 2], [3, 1], [4], [-1])
        ),
    ],
)
def test_unfit_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        one([4, 3, 2, 1], **options)


def test_unfit_counts_are_refused() -> None:
    counts = counts_of({"a": [1, 2]})
    with pytest.raises(ValueError, match="table 'b': expected a known table, got 'b'; known names: 'a'"):
        blocks_from_counts(counts, tables_of({"b": [1]}))
    with pytest.raises(ValueError, match="table 'a': expected counts of num_embeddings=3 rows, got 2"):
        blocks_from_counts(counts, tables_of({"a": [1, 2, 3]}))
    with pytest.raises(ValueError, match="table 'z': expected a known table"):
        blocks_from_counts(counts, tables_of({"a": [1, 2]})).first_alpha_row("z")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"other\.safetensors: expected a file of row blocks, got another file"):
        RowBlocks.load(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"other\.safetensors: expected a whole safetensors file"):
        RowBlocks.load(path)
