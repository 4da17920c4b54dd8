"""Counting row ids against collections.Counter."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks import counts as counts_module
from dnis_torchrec.blocks import routing as routing_module
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.blocks.hashing import MISSING_ROW, hash_values, mix, rows_of_values
from dnis_torchrec.blocks.routing import RecordLayout, RowDirectory, RowRouter, RowRouting, directory_bytes
from dnis_torchrec.search.settings import SearchSettings
from tests.reference import blocks_reference, routings
from tests.tiny import AllocatedPeak

READS = {"user": ["u"], "movie": ["seen", "shown"], "other": ["shown"]}
FEATURES = ("u", "seen", "shown")
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=READS[name])
    for name, rows in (("user", 5), ("movie", 7), ("other", 9))
]
Sample = dict[str, list[int]]

samples = st.fixed_dictionaries({feature: st.lists(st.integers(0, 4), max_size=3) for feature in FEATURES})
batches = st.lists(st.lists(samples, min_size=1, max_size=4), min_size=1, max_size=4)


def kjt(batch: list[Sample], order=FEATURES, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """One batch as TorchRec takes it, with one more key that no table reads."""
    bags = {feature: [sample[feature] for sample in batch] for feature in order} | {"unread": [[99] for _ in batch]}
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row for of_key in bags.values() for bag in of_key for row in bag], dtype=dtype),
        lengths=torch.tensor([len(bag) for of_key in bags.values() for bag in of_key]),
    )


def expected_counts(data: list[Sample]) -> FrequencyCounts:
    counts = {}
    for table in TABLES:
        occurrences = Counter(row for sample in data for f in table.feature_names for row in sample[f])
        counts[table.name] = torch.tensor([occurrences[row] for row in range(table.num_embeddings)])
    longest = {feature: max((len(sample[feature]) for sample in data), default=0) for feature in FEATURES}
    return FrequencyCounts(counts, longest, len(data))


def assert_same(got: FrequencyCounts, expected: FrequencyCounts) -> None:
    assert {name: counts.tolist() for name, counts in got.counts.items()} == {
        name: counts.tolist() for name, counts in expected.counts.items()
    }
    assert got.max_bag_lengths == expected.max_bag_lengths
    assert got.num_samples == expected.num_samples


@given(batches, st.permutations(FEATURES), st.sampled_from([torch.int32, torch.int64]))
def test_counts_of_batches(data: list[list[Sample]], order: list[str], dtype: torch.dtype) -> None:
    got = count_frequencies((kjt(batch, order, dtype) for batch in data), TABLES)
    assert_same(got, expected_counts([sample for batch in data for sample in batch]))
    for name, counts in got.counts.items():
        assert got.never_seen(name).tolist() == [count == 0 for count in counts.tolist()]


def test_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table 'moive': expected a known table.*did you mean 'movie'"):
        expected_counts([]).never_seen("moive")


@pytest.mark.parametrize(
    "batches", [[], [kjt([{"u": [99], "seen": [], "shown": []}])], [kjt([{"u": [-1], "seen": [], "shown": []}])]]
)
def test_no_sample_and_ids_outside_their_table_are_refused(batches: list[KeyedJaggedTensor]) -> None:
    with pytest.raises(ValueError):
        count_frequencies(batches, TABLES)


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


def row_by_row(routing: RowRouting) -> list[int]:
    """The block of every row, told row by row."""
    if routing.boundaries is None:
        return routing.block_of_row.long().tolist()
    cuts = routing.boundaries.tolist()
    return [bisect.bisect_right(cuts[1:], row) for row in range(routing.num_embeddings)]


@given(routings(), st.sampled_from([torch.int32, torch.int64]))
def test_blocks(routing: RowRouting, dtype: torch.dtype) -> None:
    rows = torch.arange(routing.num_embeddings, dtype=dtype)
    expected = row_by_row(routing)
    assert routing.block_of(rows).tolist() == expected
    assert RowRouter(routing)(rows).tolist() == expected
    assert routing.all_blocks().tolist() == expected
    assert routing.block_of(rows.flip(0).view(1, -1)).tolist() == [expected[::-1]]


@given(routings())
def test_row_counts(routing: RowRouting) -> None:
    blocks = row_by_row(routing)
    counts = [blocks.count(block) for block in range(routing.num_blocks + 1)]
    assert routing.row_counts(include_unassigned=True).tolist() == counts
    assert routing.row_counts().tolist() == counts[:-1]


@given(routings())
def test_positions_order_rows_by_block(routing: RowRouting) -> None:
    blocks = row_by_row(routing)
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
    expected = [routing.num_blocks if gone else block for gone, block in zip(dropped, row_by_row(routing), strict=True)]
    assert row_by_row(left) == expected
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
    assert row_by_row(again) == row_by_row(routing)


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


TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
EDGES = [0, 10**18, 10**19, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**20, -(10**18), -(2**63), -(2**63) - 1, -(10**19)]
INDICES = [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=8), st.sampled_from(INDICES))
def test_any_encoding_of_a_column_gives_the_same_rows(values: list[str | None], indices: pa.DataType) -> None:
    plain = pa.array(values, pa.string())
    encoded = plain.dictionary_encode()
    typed = pa.DictionaryArray.from_arrays(encoded.indices.cast(indices), encoded.dictionary)
    rows = rows_of_values(plain, 100).tolist()
    assert rows_of_values(typed, 100).tolist() == rows
    assert [row == MISSING_ROW for row in rows] == [value is None for value in values]


@pytest.mark.parametrize("values", [["a", None, "b"], [7, None, 9], [None]])
def test_a_missing_value_inside_a_dictionary_is_missing(values: list[object]) -> None:
    dictionary = pa.array(values)
    codes = pa.array([0, len(values) - 1, None, 0, min(1, len(values) - 1)], pa.int32())
    rows = rows_of_values(pa.DictionaryArray.from_arrays(codes, dictionary), 100).tolist()
    plain = [None if code is None else values[code] for code in codes.to_pylist()]
    assert rows == rows_of_values(pa.array(plain, dictionary.type), 100).tolist()


@given(
    st.lists(st.integers(-(2**64), 2**65) | st.sampled_from(EDGES) | st.integers(-20, 20), min_size=1, max_size=8),
    st.sampled_from(["", ".0"]),
    st.sampled_from(TEXTS),
)
def test_the_decimal_text_of_an_integer_is_hashed_as_the_integer(ids: list[int], end: str, text: pa.DataType) -> None:
    texts = [f"{number}{end}" for number in ids]
    hashes = hash_values(pa.array(["a", *texts], pa.string()).cast(text)[1:])  # sliced, as a column may be
    for number, written, found in zip(ids, texts, hashes.tolist(), strict=True):
        if -(2**63) <= number < 2**64:
            assert found == int(mix(np.array([number % 2**64], np.uint64))[0])
            kind = pa.int64() if number < 2**63 else pa.uint64()
            assert found == hash_values(pa.array([number], kind))[0]
        else:
            assert found == pd.util.hash_array(np.array([written], object), categorize=False)[0]


@given(st.lists(st.text("0123456789-+. eax\n\0٣", max_size=6), max_size=8), st.sampled_from(TEXTS))
def test_other_text_is_hashed_as_it_always_was(values: list[str], text: pa.DataType) -> None:
    values += ["007", "+7", "-0", "-0.0", "7.00", "7.", ".0", "--7", "7\n", "7.0\n", "7.0.0", "1e3", "0x10", "00", ""]
    values = [value for value in values if not re.fullmatch(r"(0|-?[1-9][0-9]*)(\.0)?", value, re.ASCII)]
    expected = pd.util.hash_array(np.array(values, object), categorize=False).tolist()
    assert hash_values(pa.array(values, pa.string()).cast(text)).tolist() == expected
    mixed = hash_values(pa.array([*values, "7"], pa.string()).cast(text)).tolist()
    assert mixed == [*expected, *hash_values(pa.array([7])).tolist()]
