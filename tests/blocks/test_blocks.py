"""Counts, blocks, where a row lies, values in k bits, and hashes of raw values: against counts by hand."""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks import codes as codes_module
from dnis_torchrec.blocks import counts as counts_module
from dnis_torchrec.blocks import routing as routing_module
from dnis_torchrec.blocks.blocking import LEAST_ROWS, RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.codes import WIDTHS, ColumnCodes, decode_rows, encode_rows, feedback_of, fit_codes
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.blocks.hashing import MISSING_ROW, hash_values, mix, rows_of_values
from dnis_torchrec.blocks.routing import RecordLayout, RowDirectory, RowRouter, RowRouting, directory_bytes
from dnis_torchrec.scheme import PACKED, TableScheme
from dnis_torchrec.search.settings import SearchSettings
from tests import reference
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


@given(batches, st.permutations(FEATURES), st.sampled_from([torch.int32, torch.int64]))
def test_counts_of_batches(data: list[list[Sample]], order: list[str], dtype: torch.dtype) -> None:
    counts = count_frequencies((kjt(batch, order, dtype) for batch in data), TABLES)
    expected = expected_counts([sample for batch in data for sample in batch])
    assert counts.max_bag_lengths == expected.max_bag_lengths
    assert counts.num_samples == expected.num_samples
    for table in TABLES:
        of_rows = counts.counts[table.name].tolist()
        assert of_rows == expected.counts[table.name].tolist()
        assert counts.never_seen(table.name).tolist() == [count == 0 for count in of_rows]


@pytest.mark.parametrize("ids", [None, 99, -1])
def test_no_sample_and_ids_outside_their_table_are_refused(ids: int | None) -> None:
    with pytest.raises(ValueError):
        count_frequencies([] if ids is None else [kjt([{"u": [ids], "seen": [], "shown": []}])], TABLES)
    with pytest.raises(ValueError, match=r"table 'moive': expected a known table.*did you mean 'movie'"):
        expected_counts([]).never_seen("moive")


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
    return blocks_from_counts(counts_of(counts), tables_of(counts), **{"least_rows": 1} | options)


@st.composite
def cases(draw) -> tuple[Counts, int]:
    counts = {name: draw(count_lists) for name in draw(st.permutations(list(DIMS)))}
    if draw(st.booleans()):
        counts = {name: sorted(rows, reverse=True) for name, rows in counts.items()}
    return counts, draw(st.integers(1, 6))


@given(cases(), st.integers(1, 14), st.integers(1, 5))
def test_blocks_of_every_row(case, rows_at_a_time: int, least_rows: int) -> None:
    """However many rows are looked at together; by boundaries where rows stand in the order of their blocks, those
    never seen last, else one byte per row."""
    counts, num_blocks = case
    with patch.object(counts_module, "ROWS_AT_A_TIME", rows_at_a_time):
        blocks = blocks_of(counts, num_blocks=num_blocks, least_rows=least_rows)
    assert list(blocks.routings) == list(counts)
    assert blocks.embedding_dims == {name: DIMS[name] for name in counts}
    assert blocks.max_bag_lengths == counts_of(counts).max_bag_lengths
    for name, rows in counts.items():
        routing, of_row = blocks.routings[name], reference.blocks_reference(rows, num_blocks, least_rows)
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


def test_one_default_everywhere() -> None:
    assert blocks_of({"a": list(range(300))}).routings["a"].num_blocks == NUM_BLOCKS
    for seen, unseen, num_blocks in [(499, 0, 1), (500, 0, 2), (1999, 249, 8), (5000, 250, 8), (600, 250, 3)]:
        counts = {"a": [1] * seen + [0] * unseen}
        default = blocks_from_counts(counts_of(counts), tables_of(counts)).routings["a"]
        assert default.num_blocks == num_blocks
        assert default.row_counts()[-1] == unseen or unseen < LEAST_ROWS
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
        blocks_from_counts(counts_of(counts), tables_of(tables), **options, least_rows=1)


def row_by_row(routing: RowRouting) -> list[int]:
    """The block of every row, told row by row."""
    if routing.boundaries is None:
        return routing.block_of_row.long().tolist()
    cuts = routing.boundaries.tolist()
    return [bisect.bisect_right(cuts[1:], row) for row in range(routing.num_embeddings)]


@given(reference.routings(), st.sampled_from([torch.int32, torch.int64]))
def test_routings(routing: RowRouting, dtype: torch.dtype) -> None:
    rows, blocks = torch.arange(routing.num_embeddings, dtype=dtype), row_by_row(routing)
    assert routing.block_of(rows).tolist() == blocks
    assert RowRouter(routing)(rows).tolist() == blocks
    assert RowRouter(routing).state_dict() == {}
    assert routing.all_blocks().tolist() == blocks
    assert routing.block_of(rows.flip(0).view(1, -1)).tolist() == [blocks[::-1]]
    counts = [blocks.count(block) for block in range(routing.num_blocks + 1)]
    assert routing.row_counts(include_unassigned=True).tolist() == counts
    assert routing.row_counts().tolist() == counts[:-1]
    order, positions = sorted(range(len(blocks)), key=lambda row: blocks[row]), routing.positions()
    if positions is None:
        assert order == list(range(len(blocks)))
    else:
        assert [order.index(row) for row in range(len(blocks))] == positions.tolist()
        assert positions.dtype == torch.int32
    tensors = routing.to_tensors()
    assert len(tensors) == 1
    again = RowRouting.from_tensors(routing.num_embeddings, routing.num_blocks, tensors)
    assert row_by_row(again) == blocks


@given(reference.routings(), st.data())
def test_without_rows(routing: RowRouting, data: st.DataObject) -> None:
    size = routing.num_embeddings
    dropped = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    left = routing.without_rows(torch.tensor(dropped))
    expected = [routing.num_blocks if gone else block for gone, block in zip(dropped, row_by_row(routing), strict=True)]
    assert row_by_row(left) == expected
    assert left.num_blocks == routing.num_blocks


@pytest.mark.parametrize(("num_blocks", "dtype"), [(255, torch.uint8), (256, torch.uint16), (40_000, torch.uint16)])
def test_map_takes_the_smallest_dtype(num_blocks: int, dtype: torch.dtype) -> None:
    blocks = torch.tensor([num_blocks, 0, num_blocks - 1])
    routing = RowRouting.from_map(blocks, num_blocks)
    assert routing.block_of_row.dtype == dtype
    assert routing.block_of(torch.arange(3)).tolist() == blocks.tolist()
    assert routing.positions().tolist() == [2, 0, 1]


ENDS, MAP = torch.tensor([0, 4]), torch.zeros(4, dtype=torch.uint8)
OF_300, ONE_BLOCK = RowRouting.from_map(torch.arange(300), 300), torch.zeros(1, dtype=torch.int64)
FOUR_BITS = ColumnCodes(torch.full((1, 2), 4).byte(), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowRouting(4, 0, boundaries=ENDS), r"num_blocks: expected 1\.\.65535, got 0"),
        (lambda: RowRouting(4, 1), "exactly one of boundaries and block_of_row, got neither"),
        (lambda: RowRouting(4, 1, ENDS, MAP), "exactly one of boundaries and block_of_row, got both"),
        (lambda: RowRouting(4, 2, ENDS), "boundaries: expected 3 rising row numbers"),
        (lambda: RowRouting(4, 2, torch.tensor([0, 3, 2])), "rising"),
        (lambda: RowRouting(4, 2, torch.tensor([1, 2, 3])), "from 0"),
        (lambda: RowRouting(4, 2, torch.tensor([0, 2, 5])), "to at most 4"),
        (lambda: RowRouting(4, 2, block_of_row=MAP[:3]), "one block for each of 4 rows"),
        (lambda: RowRouting.from_map(torch.tensor([0, -1]), 2), r"block_of_row: expected values in 0\.\.2"),
        (lambda: RowRouting.from_map(torch.tensor([0, 3]), 2), r"block_of_row: expected values in 0\.\.2"),
        (lambda: directory_bytes(OF_300, torch.ones(300).bool()), "at most 255 blocks, got 300"),
        (lambda: RowDirectory.of(OF_300, torch.ones(300).bool()), "at most 255 blocks, got 300"),
        (lambda: directory(blocks=(1, 0)), "blocks: expected rising numbers in 0..2"),
        (lambda: directory(blocks=(0, 3)), "blocks: expected rising numbers in 0..2"),
        (lambda: directory(blocks=()), "blocks: expected rising numbers in 0..2"),
        (lambda: directory(directory=torch.zeros(9).byte()), "expected 36 bytes for 3 rows of 2 blocks"),
        (lambda: directory(directory=torch.zeros(4).long()), "expected 3 boundaries"),
        (lambda: encode_rows(torch.full((1, 2), torch.nan), ONE_BLOCK, FOUR_BITS), "codes: .*in block 0, column 0"),
        (lambda: replace(FOUR_BITS, feedback=torch.zeros(1, 2)), "ColumnCodes.feedback"),
    ],
)
def test_what_is_malformed_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def directory(**changes: object) -> RowDirectory:
    fields = {"num_embeddings": 3, "num_blocks": 2, "blocks": (0, 1), "directory": torch.zeros(36, dtype=torch.uint8)}
    return RowDirectory(**fields | changes)


@pytest.mark.parametrize(("num_blocks", "bytes_per_row"), [(5, 1), (300, 2)])
def test_a_large_table_takes_a_byte_or_two_per_row(monkeypatch, num_blocks: int, bytes_per_row: int) -> None:
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


def check_against_count(routing: RowRouting, is_stored: list[bool] | None = None) -> RowDirectory:
    """Block and position of every stored row, counted; no stored block for the others."""
    stored = [True] * routing.num_blocks if is_stored is None else is_stored
    directory = RowDirectory.of(routing, torch.tensor(stored))
    blocks, positions = (part.tolist() for part in directory.locate(torch.arange(routing.num_embeddings)))
    expected = reference.places_reference(row_by_row(routing), stored)
    for block, position, place in zip(blocks, positions, expected, strict=True):
        assert place == (block, position) if place else block == len(stored) or not stored[block]
    assert directory.directory.nbytes == directory_bytes(routing, torch.tensor(stored))
    return directory


HOT_ROWS = {
    "none": [],
    "all": range(3000),
    "one": [1700],
    "the first": [0],
    "the last": [2999],
    "a run of a record and more": range(1000, 2100),
    "one of each group": range(5, 3000, 8),
    "one of each record": range(7, 3000, 1024),
    "a tenth": [row * 7919 % 3000 for row in range(300)],
}


@pytest.mark.parametrize("num_hot", [1, 2, 7])
@pytest.mark.parametrize("hot", HOT_ROWS.values(), ids=HOT_ROWS.keys())
def test_a_sparse_directory_finds_hot_rows_wherever_they_stand(hot: Iterable[int], num_hot: int) -> None:
    for num_rows in (3000, 2048):
        rows = torch.tensor([row for row in hot if row < num_rows], dtype=torch.int64)
        of_row = torch.full((num_rows,), num_hot)
        of_row[rows] = rows * 31 % num_hot
        routing = RowRouting.from_map(of_row, num_hot + 1)
        found = check_against_count(routing, [True] * num_hot + [False])
        assert found.is_sparse == (0 < len(rows) < num_rows)


@pytest.mark.parametrize("column", range(6))
def test_a_damaged_sparse_directory_leads_nowhere_else(column: int) -> None:
    of_row = torch.arange(3000) % 97 > 0
    found = RowDirectory.of(RowRouting.from_map(of_row, 2), torch.tensor([True, False]))
    for value in (-1, -(2**31), 2**31 - 1):
        directory = found.directory.clone()
        directory[2:20].view(-1, 6)[:, column] = value
        blocks, positions = replace(found, directory=directory).locate(torch.arange(3000))
        assert set(blocks.tolist()) <= {0, 2}
        assert int(positions.min()) >= 0
        assert int(positions.max()) < int((~of_row).sum())


@given(
    routing=reference.routings(max_rows=40, max_blocks=5),
    data=st.data(),
    num_blocks=st.sampled_from([1, 2, 3, 8, 9, 15, 16]),
    num_rows=st.sampled_from([1, 127, 128, 129, 255, 256, 257, 700]),
    has_unassigned=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_finds_every_row_whose_block_is_stored(
    routing: RowRouting, data: st.DataObject, num_blocks: int, num_rows: int, has_unassigned: bool, seed: int
) -> None:
    """In both forms, and in many records."""
    check_against_count(routing)
    check_against_count(routing, [data.draw(st.booleans()) for _ in range(routing.num_blocks)])
    blocks = torch.randint(num_blocks + has_unassigned, (num_rows,), generator=torch.Generator().manual_seed(seed))
    check_against_count(RowRouting.from_map(blocks, num_blocks))


@pytest.mark.parametrize("num_blocks", [5, 255])
def test_counts_go_on_behind_65536_rows_and_from_chunk_to_chunk(num_blocks: int, monkeypatch) -> None:
    monkeypatch.setattr(routing_module, "ROWS_AT_A_TIME", 1 << 17)
    torch.manual_seed(0)
    routing = RowRouting.from_map(torch.randint(num_blocks + 1, (150_001,)), num_blocks)
    directory = RowDirectory.of(routing, torch.ones(routing.num_blocks, dtype=torch.bool))
    order = torch.argsort(routing.all_blocks(), stable=True)
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
    assert [directory_bytes(routing, torch.ones(3).bool()) for routing in all_in_one] == [0, 0]
    assert directory_bytes(RowRouting(9, 3, boundaries=torch.tensor([0, 2, 9, 9])), torch.ones(3).bool()) == 32
    assert directory_bytes(RowRouting.from_map(torch.tensor([0, 1] * 100), 2), torch.ones(2).bool()) == 16 + 2 * 20


def test_memory_of_a_large_table_is_that_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_module, "ROWS_AT_A_TIME", 1 << 16)
    routing = RowRouting.from_map(torch.randint(8, (1 << 21,)), 8)
    with AllocatedPeak([routing.block_of_row]) as allocated:
        directory = RowDirectory.of(routing, torch.ones(routing.num_blocks, dtype=torch.bool))
    assert allocated.peak < directory.directory.nbytes + 80 * (1 << 16)


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


@given(bits=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=40))
def test_fields_follow_one_another_and_floats_begin_at_whole_bytes(bits: list[int]) -> None:
    end, expected = 0, []
    for width in bits:
        if width == 32:
            while end % 8:
                end += 1
        expected.append(end)
        end += width
    assert codes_module.field_offsets(torch.tensor([bits]))[0].tolist() == expected
    assert codes_module.row_strides(torch.tensor([bits])).tolist() == [(end + 7) // 8]


def table_scheme(bits: Tensor | None) -> TableScheme:
    """Three rows of two columns in two blocks; the second block keeps its second column."""
    routing, retained = RowRouting(3, 2, boundaries=torch.tensor([0, 1, 3])), torch.tensor([[1, 1], [0, 1]]).bool()
    return replace(reference.table_scheme("t", routing, retained), bits=bits)


@pytest.mark.parametrize(
    ("bits", "requirement"),
    [
        ([[8, 3], [4, 32]], "expected bits of shape"),
        ([[8, 0], [0, 32]], "expected bits of shape"),
        ([[8, 3]], "expected bits of shape"),
        ([[9, 3], [0, 32]], "expected bits among"),
    ],
)
def test_bits_that_do_not_fit_are_refused(bits: list[list[int]], requirement: str) -> None:
    with pytest.raises(ValueError, match=requirement):
        table_scheme(torch.tensor(bits))
    with pytest.raises(ValueError, match="whole columns"):
        replace(table_scheme(torch.tensor([[8, 3], [0, 32]])), num_retained=3)


def test_served_bytes_are_rows_scales_bits_and_the_directory() -> None:
    """One row of the first block, two of the second; 4 bytes of bits and 24 of boundaries."""
    mixed = table_scheme(torch.tensor([[8, 3], [0, 32]], dtype=torch.uint8))
    assert mixed.served_bytes(PACKED) == (2 + 2 * 4) + 2 * 4 + 4 + 24
    assert table_scheme(None).served_bytes(PACKED) == (8 + 2 * 4) + 4 + 24
    nothing = torch.zeros(2, 2, dtype=torch.uint8)
    assert replace(table_scheme(None), retained=nothing > 0, num_retained=0, bits=nothing).served_bytes(PACKED) == 0


KINDS = {
    "normal": lambda normal: normal,
    "heavy": lambda normal: normal**5,
    "one-sided": lambda normal: normal.abs() + 0.1,
    "far from zero": lambda normal: normal * 1e-3 + 50,
    "two values": lambda normal: normal.sign() + 0.3,
    "tiny": lambda normal: normal * 1e-12,
    "huge": lambda normal: normal * 1e30,
}


def draw(kind: str, rows: int, columns: int = 3) -> Tensor:
    return KINDS[kind](torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 300])
def test_errors_are_those_of_naive_rounding_with_what_is_stored(kind: str, rows: int) -> None:
    """By boundaries between codes (300 rows) and by values (up to 3)."""
    values, weights = draw(kind, rows), torch.rand(rows, generator=torch.Generator().manual_seed(0)) + 0.1
    fitted = fit_codes(values, weights, WIDTHS)
    for index, width in enumerate(WIDTHS):
        if not 0 < width <= 8:
            continue
        for column in range(values.shape[1]):
            found = float(fitted.error[index, column])
            scale, shift = float(fitted.scale[index, column]), int(fitted.shift[index, column])
            expected = reference.rounding_error_reference(
                values[:, column].tolist(), weights.tolist(), scale, shift, width
            )
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_bfloat16_and_more_bits_never_err_by_more(kind: str) -> None:
    values = draw(kind, 300)
    fitted = fit_codes(values, torch.ones(300), WIDTHS)
    assert torch.equal(fitted.scale, fitted.scale.bfloat16().float())
    assert bool((fitted.scale > 0).all())
    assert fitted.error[0].tolist() == [1.0] * 3
    assert fitted.error[-1].tolist() == [0.0] * 3
    upto_8 = fitted.error[: WIDTHS.index(8) + 1]
    assert bool((upto_8.diff(dim=0) <= 1e-13).all())


@pytest.mark.parametrize("kind", ["normal", "heavy", "one-sided", "two values"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_no_scale_and_shift_of_a_fine_grid_is_much_better(kind: str, width: int) -> None:
    values = draw(kind, 40, columns=1)
    fitted = fit_codes(values, torch.ones(40), [width])
    found, reach = float(fitted.error[0, 0]), float(values.abs().max())
    scales = torch.logspace(-2.5, 0.4, 60).mul(2 * reach).bfloat16().float().tolist()
    x = values[:, 0].double()
    errors = []
    for scale in scales:
        shifts = torch.arange(-int(2 * reach / scale) - 2**width - 1, int(2 * reach / scale) + 2)
        codes = (x / scale - shifts[:, None] / 2).round().clamp(0, 2**width - 1)
        errors.append(float((scale * (codes + shifts[:, None] / 2) - x).square().sum(1).min() / x.square().sum()))
    assert found <= 1.1 * min(errors) + 1e-3


def test_rows_that_are_looked_up_more_are_rounded_better() -> None:
    values = torch.tensor([[0.1], [0.2], [0.7], [0.9], [-0.8], [10.0]])
    rare = fit_codes(values, torch.tensor([1, 1, 1, 1, 1, 1e-6]), [3])
    often = fit_codes(values, torch.ones(6), [3])
    assert float(rare.scale[0, 0]) < 0.5 < float(often.scale[0, 0])


@pytest.mark.parametrize("value", [0.0, 1.0, -77.7, 0.12345678, 3.3e-5, 1e30])
def test_constant_columns_are_exact(value: float) -> None:
    """Half a bfloat16 times an int16 comes within a few float32 roundings of any value."""
    values = torch.full((5, 1), value)
    fitted = fit_codes(values, torch.ones(5), WIDTHS)
    for index, width in enumerate(WIDTHS):
        codes = ColumnCodes(torch.tensor([[width]]).byte(), fitted.scale[index, None], fitted.shift[index, None])
        block = torch.zeros(5, dtype=torch.int64)
        if width:
            torch.testing.assert_close(rounded(values, block, codes), values, rtol=5e-7, atol=0)


@pytest.mark.parametrize("values_of_one", [[0.12345678] * 9, [0.0] * 9])
def test_a_constant_column_changes_nothing_of_the_one_beside_it(values_of_one: list[float]) -> None:
    columns = [torch.tensor(values_of_one).unsqueeze(1), draw("normal", 9, 1)]
    both = fit_codes(torch.cat(columns, dim=1), torch.ones(9), WIDTHS)
    for place, column in enumerate(columns):
        alone = fit_codes(column, torch.ones(9), WIDTHS)
        for name in ("scale", "shift", "error"):
            assert getattr(both, name)[:, place].equal(getattr(alone, name)[:, 0]), name


def test_a_huge_outlier_is_kept_where_that_errs_least() -> None:
    values = torch.cat([torch.randn(999, 1, generator=torch.Generator().manual_seed(0)), torch.tensor([[1e6]])])
    fitted = fit_codes(values, torch.ones(1000), [2, 4])
    assert bool((fitted.error < 1e-5).all())


@settings(max_examples=30, deadline=None)
@given(data=st.data(), blocks=st.integers(1, 3), columns=st.integers(1, 4), rows=st.integers(0, 6))
def test_codes_are_the_nearest_ones(data: st.DataObject, blocks: int, columns: int, rows: int) -> None:
    def drawn(choices: list[float], height: int) -> torch.Tensor:
        size = height * columns
        return torch.tensor(data.draw(st.lists(st.sampled_from(choices), min_size=size, max_size=size))).view(
            -1, columns
        )

    bits, scale = drawn([*WIDTHS], blocks).byte(), drawn([0.25, 0.75, 2.0], blocks)
    shift = drawn([-7, -3, 0, 2], blocks).short()
    codes = ColumnCodes(bits, scale, shift)
    values = drawn([-9.3, -1.01, 0.0, 0.3, 0.77, 5.2], rows).float()
    of_rows = torch.tensor(data.draw(st.lists(st.integers(0, blocks), min_size=rows, max_size=rows)), dtype=torch.int64)
    encoded = encode_rows(values, of_rows, codes)
    decoded = decode_rows(encoded, of_rows, codes)
    assert encoded.dtype == torch.int32
    for row in range(rows):
        for column in range(columns):
            block, value = int(of_rows[row]), float(values[row, column])
            width = int(bits[block, column]) if block < blocks else 0
            if width == 32:
                assert float(decoded[row, column]) == value
            elif width == 0:
                assert (int(encoded[row, column]), float(decoded[row, column])) == (0, 0.0)
            elif width <= 8:
                step, half = float(scale[block, column]), int(shift[block, column])
                (nearest,) = (step * (q + half / 2) for q in reference.rounded_reference([value], step, half, width))
                found = step * (int(encoded[row, column]) + half / 2)
                assert abs(found - value) == pytest.approx(abs(nearest - value), abs=1e-6)  # two may be as near
                assert float(decoded[row, column]) == pytest.approx(found, abs=1e-6)


COARSE = (0, 1, 2, 3, 32)
"""Coarse ones: a value as good as half way between two codes, where float32 decides otherwise than float64, is rare."""


def couplings_of(num_blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    """Those of random slopes, of which fewer than D are independent; a last block that nothing reads."""
    slopes = torch.randn(num_blocks, max(1, dim // 2), dim, generator=generator, dtype=torch.float64)
    found = slopes.mT @ slopes
    found[num_blocks - 1] *= float(num_blocks == 1)
    return found


def codes_of(num_blocks: int, dim: int, generator: torch.Generator) -> ColumnCodes:
    bits = torch.tensor(COARSE)[torch.randint(len(COARSE), (num_blocks, dim), generator=generator)]
    coded = (bits > 0) & (bits < 32)
    scale = torch.where(coded, (2.0 ** -bits.clamp(max=10) * 4).bfloat16().float(), 1.0)
    shift = torch.where(coded, -(2 ** bits.clamp(max=15) - 1), 0).short()
    return ColumnCodes(bits.byte(), scale, shift)


def rounded(rows: Tensor, blocks: Tensor, codes: ColumnCodes) -> Tensor:
    return decode_rows(encode_rows(rows, blocks, codes), blocks, codes)


def shrunk(couplings: Tensor) -> Tensor:
    """By the formula: each of trace 1, a share of the table's, a share of the diagonal's."""
    trace = [float(torch.trace(own)) for own in (*couplings, couplings.sum(0))]
    of_table = couplings.sum(0) / (trace[-1] or 1)
    eye = torch.eye(couplings.shape[1], dtype=torch.float64) / couplings.shape[1]
    shared = codes_module.TABLE_SHARE * of_table + codes_module.DIAGONAL_SHARE * eye
    return torch.stack([own / (t or 1) + shared for own, t in zip(couplings, trace, strict=False)])


@settings(max_examples=40, deadline=None)
@given(num_blocks=st.integers(1, 3), dim=st.integers(1, 6), num_rows=st.integers(0, 9), seed=st.integers(0, 999))
def test_it_is_the_move_that_costs_least(num_blocks: int, dim: int, num_rows: int, seed: int) -> None:
    """Column by column, also of blocks that no sample reads; rows of no block are nothing, in chunks as at once."""
    generator = torch.Generator().manual_seed(seed)
    couplings, codes = couplings_of(num_blocks, dim, generator), codes_of(num_blocks, dim, generator)
    rows = torch.randn(num_rows, dim, generator=generator)
    blocks = torch.randint(0, num_blocks + 1, (num_rows,), generator=generator)
    moves = replace(codes, feedback=feedback_of(couplings, codes.bits))
    found = rounded(rows, blocks, moves)
    one_by_one = [rounded(rows[i : i + 1], blocks[i : i + 1], moves) for i in range(num_rows)]
    assert torch.equal(found, torch.cat([torch.zeros(0, dim), *one_by_one]))
    for row, block, own in zip(rows, blocks.tolist(), found, strict=True):
        if block == num_blocks:
            assert not own.any()
            continue

        def nearest(column: int, value: float, block: int = block) -> float:
            width = int(codes.bits[block, column])
            if width in (0, 32):
                return value if width else 0.0
            scale, shift = float(codes.scale[block, column]), float(codes.shift[block, column]) / 2
            return scale * (min(max(round(value / scale - shift), 0), 2**width - 1) + shift)

        order = sorted(range(dim), key=lambda column, block=block: int(codes.bits[block, column]))
        wanted = reference.error_feedback_reference(row, shrunk(couplings)[block], order, nearest)
        torch.testing.assert_close(own.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("couplings", [torch.eye(3, dtype=torch.float64)[None], torch.zeros(1, 3, 3).double()])
def test_columns_that_do_not_meet_have_their_nearest_codes(couplings: Tensor) -> None:
    assert not feedback_of(couplings, torch.tensor([[2, 0, 4]])).any()


def test_values_that_were_settled_have_the_same_codes() -> None:
    """So that a table may train on from them, or be written once more, without feedback."""
    generator = torch.Generator().manual_seed(1)
    couplings, codes = couplings_of(2, 5, generator), codes_of(2, 5, generator)
    of = replace(codes, feedback=feedback_of(couplings, codes.bits))
    rows, blocks = torch.randn(50, 5, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    moved = of.settle(rows, blocks)
    assert torch.equal(rounded(moved, blocks, codes), rounded(rows, blocks, of))
    assert not torch.equal(rounded(rows, blocks, codes), rounded(rows, blocks, of))
    assert torch.equal(moved[blocks == 2], rows[blocks == 2])
