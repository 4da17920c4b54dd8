"""Values of columns: no value is no id, and one id is one row, whatever format, type and encoding it comes in."""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.blocks.hashing import mix
from dnis_torchrec.streaming import ParsedStream, StreamSchema, parsed
from dnis_torchrec.streaming.parsing import ParsedChunk

ROWS = 10**6
WHITE = " \t\n\r\v\f"
TEXTS = {
    "string": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "bytes": pa.binary(),
    "byte view": pa.binary_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "large dictionary": pa.dictionary(pa.int8(), pa.large_string()),
}
LISTS = {"list": pa.list_, "large": pa.large_list, "view": pa.list_view, "large view": pa.large_list_view}

pieces = st.sampled_from(["", " ", " \v ", "a", " a", "b ", "é", "7", " 7", "7.0", "007", "-3", "-0", "+7", str(2**64)])
cells = st.lists(st.none() | st.lists(pieces, max_size=4).map("|".join), min_size=1, max_size=6)
numbers = st.sampled_from(["", " ", "0", "7", " 8", "9 ", "012"])
number_cells = st.lists(st.none() | st.lists(numbers, max_size=4).map("|".join), min_size=1, max_size=6)


def row_of(value: int | str) -> int:
    """A hashed value's row, by the definitions."""
    if isinstance(value, str) and re.fullmatch(r"(0|-?[1-9][0-9]*)(\.0)?", value):
        number = int(value.removesuffix(".0"))
        value = number if -(2**63) <= number < 2**64 else value
    if isinstance(value, int):
        return 1 + int(mix(np.array([value % 2**64], np.uint64))[0]) % (ROWS - 1)
    return 1 + int(pd.util.hash_array(np.array([value], object), categorize=False)[0]) % (ROWS - 1)


def bags_of(values: Sequence[Sequence[str | int | None] | None], hashed: bool) -> list[list[int]]:
    """The bags of lists of raw values, value by value."""
    named = [[v.strip(WHITE) if isinstance(v, str) else v for v in row or ()] for row in values]
    to_row = row_of if hashed else int
    return [[to_row(value) for value in row if value is not None and value != ""] for row in named]


def parsed_from(path: Path, schema: StreamSchema) -> ParsedChunk:
    return ParsedStream([path], schema).chunk(0)


def served(chunk: ParsedChunk, feature: str = "f") -> list[list[int]]:
    values, offsets = chunk.bags[feature]
    assert (values.dtype, offsets.dtype) == (torch.int32, torch.int64)
    assert int(offsets[-1]) == values.numel()
    return [values[offsets[row] : offsets[row + 1]].tolist() for row in range(chunk.num_rows)]


def multi_hot(folder: Path, column: pa.Array, *, hashed: bool = True) -> list[list[int]]:
    """The bags of a Parquet column."""
    pq.write_table(pa.table({"y": [1.0] * len(column), "f": column}), folder / "f.parquet")
    return served(parsed_from(folder / "f.parquet", StreamSchema(label="y", multi_hot={"f": ROWS}, hashed=hashed)))


def single_id(folder: Path, column: pa.Array, *, hashed: bool = True) -> list[int]:
    """The rows of a Parquet column."""
    pq.write_table(pa.table({"y": [1.0] * len(column), "f": column}), folder / "f.parquet")
    schema = StreamSchema(label="y", single_id={"f": ROWS}, hashed=hashed)
    return parsed_from(folder / "f.parquet", schema).ids[0].tolist()


def from_text(folder: Path, fields: Sequence[str | None], **features: object) -> ParsedChunk:
    """The same column as text."""
    (folder / "f.tsv").write_bytes("".join(f"1\t{field or ''}\t\n" for field in fields).encode())
    return parsed_from(folder / "f.tsv", StreamSchema(label="y", text_columns=("y", "f", "end"), **features))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For hypothesis, which wants no folder of its own per example."""
    return tmp_path_factory.mktemp("values")


@given(cells, st.sampled_from(sorted(TEXTS)), st.sampled_from(sorted(LISTS)))
def test_text_lists_are_the_same_bags_in_every_format(
    folder: Path, fields: list[str | None], text: str, lists: str
) -> None:
    split = [None if field is None else field.split("|") for field in fields]
    expected = bags_of(split, hashed=True)
    assert served(from_text(folder, fields, multi_hot={"f": ROWS})) == expected
    assert multi_hot(folder, pa.array(fields, pa.string()).cast(TEXTS[text])) == expected
    assert multi_hot(folder, pa.array(split, LISTS[lists](pa.string()))) == expected
    with_missing = [row and [piece or None for piece in row] for row in split]
    assert multi_hot(folder, pa.array(with_missing, pa.list_(pa.string()))) == expected


@given(number_cells, st.sampled_from(sorted(TEXTS)), st.sampled_from(sorted(LISTS)))
def test_lists_of_rows_are_the_same_bags_in_every_format(
    folder: Path, fields: list[str | None], text: str, lists: str
) -> None:
    split = [None if field is None else field.split("|") for field in fields]
    expected = bags_of(split, hashed=False)
    assert served(from_text(folder, fields, multi_hot={"f": ROWS}, hashed=False)) == expected
    assert multi_hot(folder, pa.array(fields, pa.string()).cast(TEXTS[text]), hashed=False) == expected
    assert multi_hot(folder, pa.array(split, LISTS[lists](pa.string())), hashed=False) == expected
    ids = [row and [int(piece) if piece.strip() else None for piece in row] for row in split]
    assert multi_hot(folder, pa.array(ids, LISTS[lists](pa.int16())), hashed=False) == expected
    assert multi_hot(folder, pa.array(ids, LISTS[lists](pa.float32())), hashed=False) == expected


@given(st.lists(st.none() | pieces, min_size=1, max_size=6), st.sampled_from(sorted(TEXTS)))
def test_single_ids_are_the_same_rows_in_every_format(folder: Path, fields: list[str | None], text: str) -> None:
    expected = [row_of(field.strip(WHITE)) if (field or "").strip(WHITE) else 0 for field in fields]
    assert from_text(folder, fields, single_id={"f": ROWS}).ids[0].tolist() == expected
    assert single_id(folder, pa.array(fields, pa.string()).cast(TEXTS[text])) == expected


INTEGERS = [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
ENCODED = [
    *(pa.array([7, None, 12], kind) for kind in INTEGERS),
    *(pa.array([7, None, 12], kind) for kind in (pa.float32(), pa.float64())),
    pa.array(np.array([7, math.nan, 12], np.float16)),
    pa.array([7, math.nan, 12], pa.float64()),
    pa.array([7, None, 12], pa.int32()).dictionary_encode(),
    *(pa.array(["7", "", " 12"], pa.string()).cast(kind) for kind in TEXTS.values()),
]


@pytest.mark.parametrize("column", ENCODED, ids=lambda column: str(column.type))
def test_one_id_is_one_row_whatever_its_type(tmp_path: Path, column: pa.Array) -> None:
    assert single_id(tmp_path, column) == [row_of(7), 0, row_of(12)]
    assert multi_hot(tmp_path, column) == [[row_of(7)], [], [row_of(12)]]
    assert multi_hot(tmp_path, column, hashed=False) == [[7], [], [12]]
    assert single_id(tmp_path, pa.concat_arrays([column[:1], column[2:]]), hashed=False) == [7, 12]
    with pytest.raises(ValueError, match=r"f\.parquet, column 'f': expected an id in every row, got 1 missing$"):
        single_id(tmp_path, column, hashed=False)


def test_one_id_is_one_row_in_part_files_of_other_types_and_formats(tmp_path: Path) -> None:
    """As an export writes them that guesses types file by file."""
    users = {"p0": pa.array([7, 8]), "p1": pa.array(["7", "x"]), "p2": pa.array([7.0, None])}
    tags = {"p0": pa.array([5, 5]), "p1": pa.array(["5|x", ""]), "p2": pa.nulls(2)}
    days = {"p0": pa.array([7, 7], pa.uint8()), "p1": pa.array(["7", " 7"]), "p2": pa.array([7.0, 7.0])}
    for name in users:
        table = pa.table({"y": [1.0, 0.0], "u": users[name], "tags": tags[name], "day": days[name]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "p3.csv").write_text("1,7,5|,7\n0,7.0,|5,7.0\n")
    schema = StreamSchema(
        label="y",
        single_id={"u": ROWS},
        multi_hot={"tags": ROWS},
        text_columns=("y", "u", "tags", "day"),
        separator=",",
        split_by="day",
    )
    stream = ParsedStream([tmp_path], schema)
    chunks = [stream.chunk(number) for number in range(4)]
    seven, eight, five, x = (row_of(value) for value in (7, 8, 5, "x"))
    assert [chunk.ids[0].tolist() for chunk in chunks] == [[seven, eight], [seven, x], [seven, 0], [seven, seven]]
    assert [served(chunk, "tags") for chunk in chunks] == [
        [[five], [five]],
        [[five, x], []],
        [[], []],
        [[five], [five]],
    ]
    assert len({place for number in range(4) for place in stream.split_position(number, seed=3)}) == 1


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(3),
        *(pa.array([[], None, []], make(pa.null())) for make in LISTS.values()),
        pa.array([[None], None, []], pa.list_(pa.null())),
        pa.array([[None, None], None, None], pa.list_(pa.null(), 2)),
        pa.array([None, None, None], pa.list_(pa.int64(), 2)),
        pa.array([None, "", "| |"], pa.string()),
        pa.array([None] * 3, pa.float64()),
        pa.nulls(3, pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_that_is_empty_throughout_is_one_of_empty_bags(tmp_path: Path, column: pa.Array, hashed: bool) -> None:
    assert multi_hot(tmp_path, column, hashed=hashed) == [[], [], []]


def test_columns_of_one_value_that_are_empty_throughout(tmp_path: Path) -> None:
    assert single_id(tmp_path, pa.nulls(2)) == [0, 0]
    with pytest.raises(ValueError, match="expected an id in every row, got 2 missing"):
        single_id(tmp_path, pa.nulls(2), hashed=False)
    pq.write_table(pa.table({"y": [1.0, 0.0], "x": pa.nulls(2), "u": [1, 2]}), tmp_path / "dense.parquet")
    chunk = parsed_from(tmp_path / "dense.parquet", StreamSchema(label="y", dense=("x",), single_id={"u": 9}))
    assert chunk.dense.tolist() == [[0], [0]]


@pytest.mark.parametrize("hashed", [True, False])
def test_lists_of_every_kind_are_read(tmp_path: Path, hashed: bool) -> None:
    ids = [[7, 12], None, [12, 12]]
    expected = bags_of(ids, hashed)
    texts = [row and [str(value) for value in row] for row in ids]
    for make in (*LISTS.values(), lambda kind: pa.list_(kind, 2)):
        for kind in (*INTEGERS, pa.float64()):
            assert multi_hot(tmp_path, pa.array(ids, make(kind)), hashed=hashed) == expected
        assert multi_hot(tmp_path, pa.array(texts, make(pa.string_view())), hashed=hashed) == expected
    encoded = pa.array(texts, pa.list_(pa.dictionary(pa.int32(), pa.string())))
    assert multi_hot(tmp_path, encoded, hashed=hashed) == expected
    overlapping = pa.ListViewArray.from_arrays(pa.array([2, 0, 1]), pa.array([1, 2, 2]), pa.array([7, 12, 8]))
    assert multi_hot(tmp_path, overlapping, hashed=hashed) == bags_of([[8], [7, 12], [12, 8]], hashed)


def test_bytes_that_are_no_text_are_values_as_others_are(tmp_path: Path) -> None:
    column = pa.array([b"\xff\xfe", b"\xff ", b"\xff", b"7"], pa.binary())
    rows = single_id(tmp_path, column)
    assert len(set(rows)) == 3
    assert rows[1:] == [rows[2], rows[2], row_of(7)]
    assert multi_hot(tmp_path, column) == [[row] for row in rows]
    with pytest.raises(ValueError, match=r"column 'f': expected integers, got '\ufffd\ufffd'; clean the data"):
        multi_hot(tmp_path, column, hashed=False)


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize(
    ("value", "received"),
    [
        (True, "bool; cast it to integers or strings"),
        (datetime.date(2024, 1, 2), r"date32\[day\]; cast it to integers or strings"),
        (decimal.Decimal(7), r"decimal128\(1, 0\); cast it to integers or strings"),
        ({"a": 1}, "struct<a: int64>; cast it to integers or strings"),
    ],
    ids=str,
)
def test_what_is_no_id_is_refused_by_type(tmp_path: Path, value: object, received: str, hashed: bool) -> None:
    message = rf"f\.parquet, column 'f': expected integers, strings or bytes, got {received}"
    with pytest.raises(ValueError, match=message):
        single_id(tmp_path, pa.array([value]), hashed=hashed)
    for column in (pa.array([value]), pa.array([[value]])):
        with pytest.raises(ValueError, match=message):
            multi_hot(tmp_path, column, hashed=hashed)


@pytest.mark.parametrize(
    ("column", "bad", "limit"),
    [
        (pa.array([1, 7.5]), "7.5", 2**53),
        (pa.array([2.0**53]), "9007199254740992", 2**53),
        (pa.array([2.0**24], pa.float32()), "16777216", 2**24),
        (pa.array([-math.inf]), "-inf", 2**53),
    ],
)
def test_floats_that_are_no_integers_are_refused(tmp_path: Path, column: pa.Array, bad: str, limit: int) -> None:
    message = rf"column 'f': expected whole numbers below {limit} in a column of floats, got {bad}.*; cast the column"
    for read in (single_id, multi_hot):
        for hashed in (True, False):
            with pytest.raises(ValueError, match=message):
                read(tmp_path, column, hashed=hashed)


def test_lists_in_the_wrong_place_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for make in (*LISTS.values(), lambda kind: pa.list_(kind, 1)):
        lists = pa.array([[7], [8]], make(pa.int64()))
        with pytest.raises(ValueError, match="expected integers, strings or bytes, got lists; name it in multi_hot"):
            single_id(tmp_path, lists)
        pq.write_table(pa.table({"y": [1.0, 0.0], "f": lists, "s": lists}), tmp_path / "f.parquet")
        schema = StreamSchema(label="y", multi_hot={"f": 9}, split_by="s")
        with pytest.raises(ValueError, match=r"column 's', which splits: expected one value.*lists; split by another"):
            parsed_from(tmp_path / "f.parquet", schema)
    with pytest.raises(ValueError, match="expected integers, strings or bytes in lists, got lists of lists; flatten"):
        multi_hot(tmp_path, pa.array([[[7]], [[8]]]))


def test_a_sample_without_a_value_that_splits_is_refused_in_every_format(tmp_path: Path) -> None:
    for value in (None, "", "  "):
        fields = ["7", value]
        pq.write_table(pa.table({"y": [1.0, 0.0], "f": pa.array(fields, pa.string())}), tmp_path / "f.parquet")
        message = "column 'f', which splits: expected a value in every row, got 1 missing"
        with pytest.raises(ValueError, match=message):
            parsed_from(tmp_path / "f.parquet", StreamSchema(label="y", single_id={"f": ROWS}, split_by="f"))
        with pytest.raises(ValueError, match=message):
            from_text(tmp_path, fields, single_id={"f": ROWS}, split_by="f")


def test_ids_beyond_the_table_are_named_whatever_their_width(tmp_path: Path) -> None:
    for column, received in ((pa.array([2**64 - 1], pa.uint64()), 2**64 - 1), (pa.array([-1, 5]), -1)):
        with pytest.raises(ValueError, match=rf"column 'f': expected ids in 0..999999, got {received}; raise"):
            single_id(tmp_path, column, hashed=False)


def test_what_was_hashed_otherwise_is_another_cache_and_another_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"y": [1.0], "f": [7]}), tmp_path / "f.parquet")

    def layouts() -> list[str]:
        streams = []
        for settings in ({"hashed": True}, {"hashed": False}, {"hashed": False, "split_by": "f"}):
            schema = StreamSchema(label="y", single_id={"f": ROWS}, **settings)
            stream = ParsedStream([tmp_path / "f.parquet"], schema, cache=tmp_path / "cache")
            stream.chunk(0)
            streams.append(stream.layout)
        return streams

    before = layouts()
    assert layouts() == before
    assert len(list(tmp_path.glob("cache/parsed_*"))) == 3
    monkeypatch.setattr(parsed, "HASH_VERSION", parsed.HASH_VERSION + 1)
    assert [old == new for old, new in zip(before, layouts(), strict=True)] == [False, True, False]
    assert len(list(tmp_path.glob("cache/parsed_*"))) == 6


def test_a_list_separator_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"StreamSchema.list_separator: expected at least one character, got ''"):
        StreamSchema(label="y", multi_hot={"f": 9}, list_separator="")


@pytest.mark.parametrize("separator", ["§", "\n", "\r", "", "||"])
def test_a_separator_that_no_reader_takes_is_refused(separator: str) -> None:
    with pytest.raises(ValueError, match="separator: expected one character of ASCII that ends no line, got "):
        StreamSchema(label="y", single_id={"f": 10}, separator=separator)


@pytest.mark.parametrize("field", ["7.0", "+7", "99999999999999999999", "seven"])
def test_text_that_is_no_row_is_named_with_its_line(tmp_path: Path, field: str) -> None:
    (tmp_path / "a.csv").write_text(f"1,7\n1, 7 \n1,{field}\n")
    schema = StreamSchema(label="y", single_id={"f": 10}, text_columns=("y", "f"), separator=",", hashed=False)
    with pytest.raises(ValueError, match=rf"line 3: .*, integers in those of ids, got '1,{re.escape(field)}'; clean"):
        ParsedStream([str(tmp_path / "a.csv")], schema).chunk(0)
