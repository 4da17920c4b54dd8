"""A data frame is a recipe: one id is one row whatever its type, and raw rows are predicted in a fresh process."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dnis_torchrec as dnis
from dnis_torchrec.artifact.manifest import CARD, ENCODER, read_manifest
from dnis_torchrec.artifact.verify import FAILED, verify
from dnis_torchrec.data.batches import check_batch
from dnis_torchrec.data.frames import MODELS, SEPARATOR, FrameEncoder, FrameSplits, ids_of, recipe_from_frame, text_of
from dnis_torchrec.data.recipe import DataSplits
from tests.programs import run_python

SPLITS = ("train", "validation", "selection", "test")
COUNTRIES = ["NA", "null", "None", "nan", "US"]
NO_LETTERS = {"blacklist_categories": ["Cs"], "blacklist_characters": f"\r{SEPARATOR}"}  # a CSV file has no word for \r
letters = st.characters(**NO_LETTERS)
numbers = st.sampled_from(
    ["7", "7.0", "7.00", "007", "-0", "1.10", "1e5", "1e+16", "1E-9", "2026-01-01", "b'a'", "True"]
)
texts = st.text(letters, max_size=3) | numbers | st.sampled_from(COUNTRIES)
days = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1))
IDS: dict[str, st.SearchStrategy[Any]] = {
    "str": st.none() | texts,
    "int64": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9),
    "Int64": st.none() | st.integers(2**53, 2**53 + 9),
    "float64": st.none() | st.floats(allow_nan=False) | st.integers(2**53, 2**60).map(float),
    "float32": st.none() | st.floats(width=32, allow_nan=False) | st.sampled_from([0.1, 7.0, 2.0**30]),
    "float[pyarrow]": st.none() | st.sampled_from([0.1, 7.0, 1234567.9, 1e-5]),
    "Float32": st.none() | st.sampled_from([0.1, 7.0, 1234567.9, 1e-5]),
    "bool": st.booleans(),
    "boolean": st.none() | st.booleans(),
    "decimal": st.none() | st.decimals(-1000, 1000, places=3) | st.sampled_from([decimal.Decimal("7.00")]),
    "datetime64[ns]": st.none() | days,
    "datetime64[s, Europe/Berlin]": days.map(lambda day: day.replace(tzinfo=datetime.UTC, microsecond=0)),
    "date": st.none() | st.dates(),
    "timedelta64[s]": st.integers(0, 9**5).map(lambda seconds: datetime.timedelta(seconds=seconds)),
    "bytes": st.binary(max_size=2) | st.sampled_from([b"7", b"'", b"a|"]),
    "uint64": st.integers(2**64 - 3, 2**64 - 1),
    "string": st.none() | texts,
    "string[pyarrow]": st.none() | texts,
    "int64[pyarrow]": st.none() | st.integers(2**60, 2**60 + 9),
    "category": st.none() | st.sampled_from(COUNTRIES),
}
LABELS = {"int64": st.integers(0, 1), "bool": st.booleans(), "float64": st.floats(-9, 9, width=32)}


def looked_up(splits: FrameSplits, feature: str) -> dict[int, list[int]]:
    """Row of the frame -> the ids that its sample looks up."""
    rows: dict[int, list[int]] = {}
    for name in SPLITS:
        batches = getattr(splits, name)
        batches._shuffle = False
        bags = [bag.tolist() for batch in batches for bag in batch.sparse_features[feature].to_dense()]
        rows |= dict(zip(batches.rows.tolist(), bags, strict=True))
    return rows


def labels_of(splits: FrameSplits) -> list[float]:
    labels = {}
    for name in SPLITS:
        batches = getattr(splits, name)
        batches._shuffle = False
        of_rows = torch.cat([batch.labels for batch in batches]).tolist()
        labels |= dict(zip(batches.rows.tolist(), of_rows, strict=True))
    return [labels[row] for row in sorted(labels)]


def read(source: Any, **columns: Any) -> FrameSplits:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DataSplits.from_frame(source, **{"label": "y"} | columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("columns")


@given(st.data())
def test_a_frame_its_csv_and_its_parquet_give_the_same_rows_and_labels(folder: Path, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(IDS)), min_size=1, max_size=3))
    frame = pd.DataFrame(index=range(data.draw(st.integers(20, 24))))
    size = {"min_size": len(frame), "max_size": len(frame)}
    for number, kind in enumerate(kinds):
        dtype = "object" if kind in ("decimal", "date", "bytes") else kind
        frame[f"id {number}"] = pd.Series(data.draw(st.lists(IDS[kind], **size)), dtype=dtype)
    frame["tags"] = data.draw(st.lists(st.lists(texts, max_size=3), **size))
    dtype = data.draw(st.sampled_from(sorted(LABELS)))
    frame["y"] = pd.Series([0, 1, *data.draw(st.lists(LABELS[dtype], **size))][: len(frame)]).astype(dtype)
    features = [name for name in frame if name.startswith("id ")]
    frame.assign(tags=frame["tags"].map(SEPARATOR.join)).to_csv(folder / "f.csv", index=False)
    frame.to_parquet(folder / "f.parquet")
    columns = {"ids": features, "bags": ["tags"]}
    want = read(frame, **columns)
    for splits in (read(folder / "f.csv", **columns), read(folder / "f.parquet", **columns)):
        assert labels_of(splits) == labels_of(want)
        for feature in (*features, "tags"):
            assert looked_up(splits, feature) == looked_up(want, feature), feature
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            of_file, of_frame = splits.encoder(folder / "f.csv")[1], want.encoder(frame)[1]
        assert of_file.values().equal(of_frame.values())


@pytest.mark.parametrize(
    "values",
    [
        [7, 7.0, np.float32(7), "7", "7.00", " 7 ", decimal.Decimal("7.00"), b"7", np.int64(7), "b'7'", "7e+0"],
        [0.1, np.float32(0.1), float(np.float32(0.1)), "0.1", "0.10", decimal.Decimal("0.1"), "1e-01"],
        [2**60, float(2**60), "1.152921504606847e+18", str(2**60)],
        [True, "True", np.bool_(True)],
        [*(pd.Timestamp("2026-01-01"), datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1)), "2026-01-01"],
        [pd.Timestamp("2026-01-01 12:00Z"), pd.Timestamp("2026-01-01 13:00+01:00"), "2026-01-01T12:00:00Z"],
        [b"a\xff", "a\\xff", "b'a\\xff'"],
        ["\ud800", "\\ud800"],
    ],
)
def test_one_text_of_an_id_whatever_its_type(values: list[Any]) -> None:
    assert {text_of(value) for value in values} == {text_of(values[0])}


def test_what_are_two_ids_stay_two() -> None:
    texts = ["7", "007", "1e5", "100000", "10000e02", "1000e003", "NA", "nan", "null", "None", "true", "True", "7,0"]
    assert len({text_of(text) for text in texts}) == len(texts)
    assert [text_of(value) for value in (None, float("nan"), "", " \n", np.float32("nan"))] == [None] * 5
    mixed = ids_of(pd.Series([1, True, 0.0, False, "1", None], dtype=object))
    assert [mixed.texts[code] for code in mixed.codes[:5]] == ["1", "True", "0", "False", "1"]


class TestCsv:
    @pytest.mark.parametrize(
        ("lines", "row"),
        [
            (["1,US,3,"] * 30, 2),
            ([*["1,US,3"] * 20, "1,US,title, with a comma,5"], 22),
            ([*["1,US,3"] * 20, "1,US,3,4"], 22),
            ([*["1,US,3"] * 20, "1,US"], 22),
        ],
    )
    def test_a_line_that_has_other_fields_than_the_header_is_refused(self, tmp_path, lines: Any, row: int) -> None:
        (tmp_path / "f.csv").write_text("\n".join(["y,country,price", *lines, ""]))
        with pytest.raises(ValueError, match=rf"f\.csv: expected .*Row #{row}: Expected 3 columns, got "):
            read(tmp_path / "f.csv", ids=["country"])

    def test_only_an_empty_field_is_missing(self, tmp_path: Path) -> None:
        rows = [*COUNTRIES, ""] * 10
        lines = [
            f"{row % 2},{country},{price}"
            for row, (country, price) in enumerate(zip(rows, ["NA", "2"] * 30, strict=True))
        ]
        (tmp_path / "f.csv").write_text("\n".join(["y,country,price", *lines, ""]))
        splits = read(tmp_path / "f.csv", ids=["country"], dense=["price"])
        assert splits.encoder.num_embeddings == {"country": 7}
        assert splits.columns.loc["country", "missing"] == pytest.approx(1 / 6)
        assert splits.columns.loc["price", "missing"] == 0.5  # of a number NA says that there is none

    def test_types_are_not_guessed_of_the_first_lines(self, tmp_path: Path) -> None:
        lines = [f"{row % 2},{row},{row}" for row in range(10)] + ["1,x,2.5", "0,y,2026.5"] * 10
        (tmp_path / "f.csv").write_text("\n".join(["y,user,time", *lines, ""]))
        splits = read(tmp_path / "f.csv", ids=["user"], dense=["time"], time="time")
        assert splits.encoder.num_embeddings["user"] == 13


class TestTable:
    """What is printed of every frame, and the warnings."""

    def frame(self, **columns: Any) -> pd.DataFrame:
        return pd.DataFrame({"y": [0, 1] * 50, "user": [1, 2, None, 4] * 25, "price": range(100)} | columns)

    def test_is_printed_once_and_logged(self, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> None:
        columns: dict[str, Any] = {"label": "y", "ids": ["user"], "dense": ["price"], "bags": ["tags"], "time": "day"}
        frame = self.frame(tags=["a|b", ""] * 50, day=range(100))
        frame.loc[80:84, "user"] = 9
        splits = DataSplits.from_frame(frame, **columns)
        table = splits.columns
        assert table.loc["user"].tolist()[:4] == ["ids", 5, 0.24, 1.0]
        assert table.loc["tags"].tolist()[:4] == ["bags", 3, 0.5, 0.0]
        assert table["kind"].to_dict() == {"price": "dense", "user": "ids", "tags": "bags", "day": "time", "y": "label"}
        assert table.loc["y", "note"] == "BCEWithLogitsLoss: all labels are 0 or 1"
        assert table.to_string() in capsys.readouterr().err
        with caplog.at_level(logging.INFO, logger="dnis_torchrec"):
            DataSplits.from_frame(frame, **columns)
        assert table.to_string() in caplog.text
        assert capsys.readouterr().err == ""

    def test_says_why_the_loss_is_that_of_numbers(self) -> None:
        splits = DataSplits.from_frame(self.frame(y=[1, 2, 5, 3] * 25), label="y", ids=["user"])
        assert splits.columns.loc["y", "note"] == "MSELoss: 4 values from 1 to 5, not 0 and 1"

    @pytest.mark.parametrize(
        ("column", "roles", "message"),
        [
            ({"tags": ["['a','b']"] * 100}, {"bags": ["tags"]}, r"column 'tags': \"\['a','b'\]\" is read as one id"),
            (
                {"tags": ['["a", "b"]'] * 100},
                {"bags": ["tags"]},
                r"column 'tags': '\[\"a\", \"b\"\]' is read as one id",
            ),
            ({"tags": ["a,b"] * 100}, {"bags": ["tags"]}, "column 'tags': 'a,b' is read as one id: give lists, or"),
            ({"y": [1, 2] * 50}, {}, "label column 'y': two values, 1 to 2: map them to 0 and 1"),
            ({"y": [-1, 1] * 50}, {}, "label column 'y': two values, -1 to 1"),
            ({"shop": [None] * 100}, {"ids": ["user", "shop"]}, "column 'shop': missing in all rows"),
            ({"rate": np.nan}, {"dense": ["rate"]}, "column 'rate': missing in all rows"),
            ({"tags": [[], None] * 50}, {"bags": ["tags"]}, "column 'tags': missing in all rows"),
            ({"row": range(100)}, {"ids": ["user", "row"]}, "column 'row': an id of its own in every row"),
            ({"day": 3}, {"time": "day"}, "time column 'day': one time in all rows"),
            ({"rate": 1e9 + np.arange(100)}, {"dense": ["rate"]}, "dense column 'rate': not divided by its spread"),
        ],
    )
    def test_warns_of_what_looks_wrong(self, column: Any, roles: Any, message: str) -> None:
        with pytest.warns(UserWarning, match=message):
            DataSplits.from_frame(self.frame(**column), **{"label": "y", "ids": ["user"]} | roles)

    def test_dense_columns_that_hardly_vary_are_not_divided(self) -> None:
        splits = read(self.frame(rate=1e9 + np.arange(100) % 2), ids=["user"], dense=["rate"])
        dense = torch.cat([batch.dense_features for batch in splits.train])
        assert dense.abs().max() <= 1

    def test_a_column_that_one_file_of_a_folder_lacks_is_named(self, tmp_path: Path) -> None:
        self.frame().to_parquet(tmp_path / "a.parquet")
        self.frame().drop(columns="user").to_parquet(tmp_path / "b.parquet")
        self.frame(user=["1", "2", "x", None] * 25).to_parquet(tmp_path / "c.parquet")
        with pytest.warns(UserWarning, match=r"column 'user': missing in .*b\.parquet"):
            splits = DataSplits.from_frame(tmp_path, label="y", ids=["user"], dense=["price"])
        assert splits.encoder.num_embeddings == {"user": 6}  # 1 and 2 of both files, 4, x, none


def test_many_unknown_ids_in_a_batch_are_named() -> None:
    splits = read(pd.DataFrame({"y": [0, 1] * 50, "user": [7, 8, 9, 10] * 25}), ids=["user"])
    with pytest.warns(UserWarning, match=r"column 'user': 6 of 7 ids .*, such as '1', '2', '3', '4', '5': they share"):
        _, features = splits.encoder({"user": [1, 2, 3, 4, 5, 6, 7, None]})
    assert features.values().tolist()[:6] == [0] * 6
    splits.encoder({"user": ["7", "8.0", 5]})
    with pytest.raises(ValueError, match="a list of values for each column, all as long"):
        splits.encoder({"user": 7})
    splits.encoder(pd.DataFrame({"user": pd.Series([7, 8], dtype=pd.ArrowDtype(pa.int8()))}))


def a_frame(num_rows: int = 100, **columns: Any) -> pd.DataFrame:
    random = np.random.default_rng(0)
    drawn = {
        "clicked": random.integers(0, 2, num_rows),
        "price": random.normal(50, 9, num_rows),
        "user": random.integers(0, 12, num_rows),
        "item": [f"item {number}" for number in random.integers(0, 40, num_rows)],
        "tags": [["new", "red", "blue"][: number % 4] for number in range(num_rows)],
        "day": pd.date_range("2026-01-01", periods=num_rows, freq="h", tz="Europe/Berlin"),
    }
    return pd.DataFrame(drawn | columns)


def rows_of(splits: DataSplits, name: str) -> list[int]:
    return getattr(splits, name).rows.tolist()


def table_rows(values: list[Any], training: list[int]) -> list[int]:
    """The oracle: row by row, with what Python has for that. Equal counts keep the order of the frame."""
    texts = [None if value is None else text_of(value) for value in values]
    first = {text: number for number, text in reversed(list(enumerate(texts)))}
    first[None] = -1
    counts = Counter(texts[row] for row in training)
    ranked = sorted(counts, key=lambda text: (-counts[text], first[text]))
    return [ranked.index(text) + 1 if text in counts else 0 for text in texts]


anything = st.one_of(
    st.none(),
    st.sampled_from([0, 1, 7, "7", " 7 ", "7.0", 7.0, "007", True, False, "", "a", "é", "\U0001f600", 2**70, -(2**63)]),
    st.sampled_from([0.5, float("inf"), b"a", (1, 2), decimal.Decimal("1.5"), datetime.date(2026, 1, 1)]),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=2),
)


class TestIds:
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @given(st.lists(anything, min_size=30, max_size=60), st.randoms())
    def test_rows_are_those_of_an_oracle_that_goes_row_by_row(self, values: list[Any], random: Any) -> None:
        frame = a_frame(len(values), user=pd.Series(values, dtype=object))
        frame["clicked"] = [0, 1] * (len(values) // 2) + [0] * (len(values) % 2)
        splits = DataSplits.from_frame(frame, label="clicked", ids=["user"], batch_size=9, seed=random.randint(0, 9))
        expected = table_rows(values, rows_of(splits, "train"))
        assert looked_up(splits, "user") == {row: [expected[row]] for row in range(len(values))}
        assert splits.encoder.num_embeddings == {"user": 1 + len(set(expected) - {0})}


class TestBags:
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_lists_tuples_arrays_texts_and_single_ids(self) -> None:
        odd = [[1, 2], (3,), {4}, np.array([5, 6]), "7|8", "", 9, None, [], [None, 1.0, float("nan")], "a||b"]
        plain = [["1", "2"], ["3"], ["4"], ["5", "6"], ["7", "8"], [], ["9"], [], [], ["1"], ["a", "b"]]
        frames = [a_frame(110, tags=pd.Series(values * 10, dtype=object)) for values in (odd, plain)]
        splits = [DataSplits.from_frame(frame, label="clicked", bags=["tags"]) for frame in frames]
        assert looked_up(splits[0], "tags") == looked_up(splits[1], "tags")

    def test_unseen_ids_of_a_bag_have_row_0(self) -> None:
        frame = a_frame(40, tags=[["x"]] * 36 + [["x", "new"], [], None, ["new"]], day=range(40))
        splits = DataSplits.from_frame(frame, label="clicked", bags=["tags"], time="day")
        batch = next(iter(splits.test)).sparse_features["tags"]
        assert (batch.values().tolist(), batch.lengths().tolist()) == ([1, 0, 0], [2, 0, 0, 1])


class TestDense:
    def test_scaled_by_training_samples_alone_and_missing_is_the_mean(self) -> None:
        frame = a_frame(price=[*range(80), *[1e6] * 19, None], day=range(100))
        splits = DataSplits.from_frame(frame, label="clicked", ids=["user"], dense=["price"], time="day")
        training, test = splits.train, next(iter(splits.test)).dense_features
        values = torch.cat([batch.dense_features for batch in training])
        assert values.mean().abs() < 1e-6
        assert values.std(unbiased=False).isclose(torch.tensor(1.0))
        assert test[-1] == 0
        assert test[0].isclose(torch.tensor((1e6 - 39.5) / np.std(range(80)), dtype=torch.float32))

    @pytest.mark.parametrize("values", [3.0, None, [None, 5] * 50, [True, False] * 50])
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_odd_columns_stay_finite(self, values: Any) -> None:
        splits = DataSplits.from_frame(a_frame(price=values), label="clicked", ids=["user"], dense=["price"])
        for batch in splits.train:
            check_batch(batch, "train")

    def test_without_any_there_is_one_of_zeros(self) -> None:
        splits = DataSplits.from_frame(a_frame(), label="clicked", ids=["user"])
        assert next(iter(splits.test)).dense_features.tolist() == [[0.0]] * 10
        assert splits.encoder.num_dense == 1


class TestSplits:
    def test_every_row_is_in_one_split_and_keeps_its_label(self) -> None:
        frame = a_frame(clicked=range(100))
        splits = DataSplits.from_frame(frame, label="clicked", ids=["user", "item"], bags=["tags"], batch_size=16)
        rows = [row for name in SPLITS for row in rows_of(splits, name)]
        assert sorted(rows) == list(range(100))
        assert [len(rows_of(splits, name)) for name in SPLITS] == [80, 5, 5, 10]
        for name in SPLITS:
            labels = [label for batch in getattr(splits, name) for label in batch.labels.tolist()]
            assert sorted(labels) == sorted(rows_of(splits, name))
        assert next(iter(splits.train)).sparse_features.keys() == ["user", "item", "tags"]

    def test_the_seed_decides_the_split(self) -> None:
        splits = [DataSplits.from_frame(a_frame(), label="clicked", ids=["user"], seed=seed) for seed in (0, 0, 1)]
        tests = [rows_of(split, "test") for split in splits]
        assert tests[0] == tests[1] != tests[2]

    @pytest.mark.parametrize(
        "times",
        [
            np.arange(100)[::-1],
            pd.date_range("2026-01-01", periods=100, tz="Europe/Berlin")[::-1],
            pd.Series(range(100, 0, -1), dtype="Int64"),
            [str(day) for day in pd.date_range("2026-01-01", periods=100)[::-1]],
        ],
    )
    def test_the_latest_are_those_of_test(self, times: Any) -> None:
        splits = DataSplits.from_frame(a_frame(day=times), label="clicked", ids=["user"], time="day")
        assert splits.is_by_time
        assert sorted(rows_of(splits, "test")) == list(range(10))
        assert sorted(rows_of(splits, "selection")) == list(range(10, 15))
        assert sorted(rows_of(splits, "train")) == list(range(20, 100))

    def test_rows_of_one_time_keep_their_order(self) -> None:
        splits = DataSplits.from_frame(a_frame(day=[1, 0] * 50), label="clicked", ids=["user"], time="day")
        assert rows_of(splits, "test") == list(range(80, 100, 2))

    def test_the_index_and_columns_that_are_not_asked_for_do_not_matter(self) -> None:
        frame = a_frame()
        odd = pd.concat([frame, frame[["price"]], pd.DataFrame({3: range(100)})], axis=1).set_index(frame["item"])
        splits = [DataSplits.from_frame(of, label="clicked", ids=["user"]) for of in (frame, odd)]
        assert looked_up(splits[0], "user") == looked_up(splits[1], "user")

    def test_the_encoder_reads_further_frames_as_it_read_the_first(self) -> None:
        frame = a_frame()
        splits = DataSplits.from_frame(frame, label="clicked", dense=["price"], ids=["user"], bags=["tags"])
        of_rows = frame.loc[rows_of(splits, "test"), ["tags", "user", "price"]].astype({"user": str})
        dense, features = splits.encoder(of_rows)
        batch = next(iter(splits.test))
        assert dense.equal(batch.dense_features)
        assert features.values().equal(batch.sparse_features.values())
        assert features.lengths().equal(batch.sparse_features.lengths())


class TestFiles:
    @pytest.mark.parametrize("name", ["data.parquet", "folder", "data.csv", "data.csv.gz"])
    def test_a_file_gives_the_batches_of_its_frame(self, tmp_path: Path, name: str) -> None:
        frame = a_frame(user=pd.Series([2**60 + 1, None, 7, 8] * 25, dtype="Int64"))
        path = tmp_path / name
        if ".csv" in name:
            frame.assign(tags=frame["tags"].map("|".join)).to_csv(path, index=False)
        else:
            path = path / "part.parquet" if name == "folder" else path
            path.parent.mkdir(exist_ok=True)
            frame.to_parquet(path)
        columns = {"label": "clicked", "dense": ["price"], "ids": ["user", "item"], "bags": ["tags"], "time": "day"}
        of_frame = DataSplits.from_frame(frame, **columns)
        of_file = DataSplits.from_frame(tmp_path / name, **columns)
        assert of_file.encoder.num_embeddings == of_frame.encoder.num_embeddings
        for feature in ("user", "item", "tags"):
            assert looked_up(of_file, feature) == looked_up(of_frame, feature)
        assert next(iter(of_file.test)).dense_features.allclose(next(iter(of_frame.test)).dense_features)

    def test_a_folder_holds_one_form_at_any_depth(self, tmp_path: Path) -> None:
        frame, roles = a_frame(), {"label": "clicked", "ids": ["user"]}
        (tmp_path / "day=2").mkdir()
        frame[:60].to_csv(tmp_path / "a.csv", index=False)
        frame[60:].to_csv(tmp_path / "day=2" / "b.csv", index=False)
        for name in ("a.csv.bak", "._a.csv", "notes.txt"):
            frame.to_csv(tmp_path / name)
        splits = DataSplits.from_frame(tmp_path, **roles)
        assert looked_up(splits, "user") == looked_up(DataSplits.from_frame(frame, **roles), "user")
        frame.to_parquet(tmp_path / "c.parquet")
        with pytest.raises(ValueError, match=r"files of one form, got a\.csv, c\.parquet; use two folders"):
            DataSplits.from_frame(tmp_path, **roles)

    @pytest.mark.parametrize(
        ("name", "content", "error", "place"),
        [
            ("data.csv", b"usr,clicked\n1,0\n", ValueError, r"data\.csv: .* 'user'"),
            ("data.csv", b"user;clicked\n1;0\n", ValueError, r"data\.csv: .*';' between its columns"),
            ("data.csv", b"user\tclicked\n1\t0\n", ValueError, r"data\.csv: .*'\\t' between its columns"),
            ("data.csv", b"17,shoe,0\n18,hat,1\n", ValueError, r"data\.csv: .*first line is 17, shoe, 0"),
            ("data.parquet", a_frame().drop(columns="user").to_parquet(), ValueError, r"data\.parquet: .* 'user'"),
            ("data.csv", b" user,clicked\n1,0\n", ValueError, "rename ' user': the command takes no space"),
            ("data.csv", b'"a,user",clicked\n1,0\n', ValueError, "rename 'a,user'"),
            ("data.csv", b"", ValueError, "whole files"),
            ("folder/.a.csv", b"user,clicked\n1,0\n", ValueError, "folder: expected files that end"),
            *(
                (name, b"PAR1 user", ValueError, "whole files")
                for name in ("a.parquet", "folder/a.parquet", "a.csv.gz")
            ),
            ("data.xlsx", b"", ValueError, r"data\.xlsx"),
            ("none.csv", None, FileNotFoundError, r"none\.csv"),
        ],
    )
    def test_files_that_hold_no_frame_are_named(
        self, tmp_path: Path, name: str, content: bytes | None, error: type[Exception], place: str
    ) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(error, match=place):
            DataSplits.from_frame(path.parent if "/" in name else str(path), label="clicked", ids=["user"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "columns", "message"),
        [
            ({}, {"ids": ["usr"]}, r"frame: expected a column 'usr', got none; did you mean 'user'\?"),
            ({}, {"ids": []}, "from_frame: expected at least one column in ids or bags, got none"),
            ({}, {"ids": ["user"], "bags": ["user"]}, "ids and bags columns: expected every column once, got 'user'"),
            ({}, {"dense": ["price", "price"]}, "dense columns: expected every column once, got 'price'"),
            ({}, {"dense": ["clicked"]}, "column 'clicked': expected a label that is no feature, got both"),
            ({}, {"ids": ["tags"]}, "column 'tags': expected one id in every row, got lists; name it in bags"),
            ({"tags": [[[1]]] * 100}, {"bags": ["tags"]}, "column 'tags': expected lists of ids, got lists of lists"),
            ({"user.id": 1}, {"ids": ["user.id"]}, "column 'user.id': expected text without a dot"),
            ({5: 1}, {"ids": [5]}, "column 5: expected text"),
            ({}, {"dense": ["item"]}, r"column 'item', row 0: expected a number, got 'item \d+'; map it to numbers"),
            ({}, {"dense": ["day"]}, r"column 'day', row 0: expected a number, got Timestamp"),
            ({"price": float("inf")}, {"dense": ["price"]}, r"column 'price', row 0: expected a number below 1e\+30"),
            (
                {"day": ["2024-12-31", "31.12.2024"] * 50},
                {"time": "day"},
                r"'day': expected numbers, dates .* ISO 8601 has them, got '31\.12\.2024'; write 2024-01-31",
            ),
            ({}, {"time": "item"}, "time column 'item': expected numbers, dates or texts as ISO 8601 has them, got"),
            ({"day": [None, *range(99)]}, {"time": "day"}, "time column 'day': expected a time in every row, got 1"),
            ({"clicked": [0, 1, None, None] * 25}, {}, "label column 'clicked': .* got 50 missing"),
            ({"clicked": 1}, {}, "label column 'clicked': expected labels that differ, got 1 in all rows"),
            ({"clicked": ["no", "yes"] * 50}, {}, "column 'clicked', row 0: expected a number, got 'no'"),
        ],
    )
    def test_says_place_requirement_received_and_remedy(self, changed: Any, columns: Any, message: str) -> None:
        frame = a_frame().assign(**{str(name): value for name, value in changed.items()}).rename(columns={"5": 5})
        with pytest.raises(ValueError, match=message):
            DataSplits.from_frame(frame, **{"label": "clicked", "ids": ["user"]} | columns)

    @pytest.mark.parametrize(
        ("frame", "columns", "message"),
        [
            (a_frame(19), ["user"], "expected at least 20 samples"),
            (a_frame()[:0], ["user"], "frame: expected at least one row, got none"),
            (pd.concat([a_frame(), a_frame()[["user"]]], axis=1), ["user"], "frame: expected a column 'user', got 2"),
            (a_frame(), "user", r"ids: expected a list of columns, got 'user'; give \['user'\]"),
            ([1], ["user"], "frame: expected a pandas DataFrame, a dict of columns or the path of a file, got list"),
        ],
    )
    def test_what_is_no_frame_or_no_list_of_columns(self, frame: Any, columns: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            DataSplits.from_frame(frame, label="clicked", ids=columns)


class TestRecipe:
    @pytest.mark.parametrize("model", sorted(MODELS))
    @pytest.mark.parametrize("dense", [(), ("price", "user")])
    def test_a_model_takes_the_batches_and_learns(self, model: str, dense: Any) -> None:
        frame = a_frame(type=["a", "b"] * 50)
        recipe = recipe_from_frame(
            frame, model=model, label="clicked", dense=dense, ids=["user", "type"], bags=["tags"], embedding_dim=4
        )
        assert isinstance(recipe.loss, torch.nn.BCEWithLogitsLoss)
        batch = next(iter(recipe.data.train))
        predictions = recipe.model(batch.dense_features, batch.sparse_features)
        assert predictions.numel() == 80
        assert not any(isinstance(module, torch.nn.Sigmoid) for module in recipe.model.modules())
        recipe.loss(predictions.flatten(), batch.labels).backward()
        assert all(parameter.grad is not None for parameter in recipe.model.parameters())

    def test_ratings_have_a_squared_error_and_the_unseen_row_is_zero(self) -> None:
        ratings = np.arange(100) % 5
        recipe = recipe_from_frame(a_frame(clicked=ratings), model="dlrm", label="clicked", ids=["user"])
        assert isinstance(recipe.loss, torch.nn.MSELoss)
        weight = recipe.model.sparse_arch.embedding_bag_collection.embedding_bags["user_table"].weight
        assert weight.shape[1] == 64
        assert not weight[0].any()
        assert bool(weight[1:].all())

    def test_an_unknown_model_is_refused_with_what_there_is(self) -> None:
        with pytest.raises(ValueError, match="model 'dlmr': expected a known model, got 'dlmr'; did you mean 'dlrm'"):
            recipe_from_frame(a_frame(), model="dlmr", label="clicked", ids=["user"])
        for dim in (0, 2.5):
            with pytest.raises(ValueError, match=f"embedding_dim: expected an integer >= 1, got {dim}"):
                recipe_from_frame(a_frame(), model="dlrm", label="clicked", ids=["user"], embedding_dim=dim)  # type: ignore[arg-type]


def draw_frame(size: int = 600) -> pd.DataFrame:
    random = np.random.default_rng(0)
    users = random.integers(0, 40, size) * 7 + 3
    return pd.DataFrame(
        {
            "user": users,
            "item": [None if item == 0 else f"item {item}" for item in random.integers(0, 9, size)],
            "tags": [["a", "b", "c"][: user % 4] for user in users],
            "price": random.gamma(2, 10, size),
            "click": (users % 2).astype(float),
        }
    )


def compressed(**columns: Any) -> tuple[dnis.Recipe, Any]:
    roles: dict[str, Any] = {"label": "click", "ids": ["user", "item"], "bags": ["tags"], "dense": ["price"]}
    recipe = dnis.recipe_from_frame(draw_frame(), **roles, embedding_dim=8, **{"model": "dlrm"} | columns)
    for parameter in recipe.model.parameters():  # as if it had learned
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    return recipe, dnis.compress(recipe.model, list(recipe.data.train), loss=recipe.task, compression=4)


def predictions(recipe: dnis.Recipe, frame: Any) -> torch.Tensor:
    with torch.no_grad():
        return recipe.model(*recipe.data.encoder(frame)).flatten()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dnis.Recipe, Any, Path]:
    recipe, result = compressed()
    path = tmp_path_factory.mktemp("served") / "artifact"
    return recipe, result, dnis.export(recipe.model, result.scheme, path, encoder=recipe.data.encoder)


ROWS = {
    "user": [3, 10.0, "17"],
    "item": ["item 1", None, "item 2"],
    "tags": [["a"], [], ["a", "c"]],
    "price": [1, 2, None],
}


def test_a_fresh_process_predicts_from_raw_rows(exported: Any, tmp_path: Path) -> None:
    recipe, _, path = exported
    program = (
        "import json, sys, dnis_torchrec as dnis\n"
        "predict = dnis.load_predictor(sys.argv[1])\n"
        "print(json.dumps(predict(json.loads(sys.argv[2])).tolist()))"
    )
    done = run_python(tmp_path, program, path, json.dumps(ROWS))
    assert done.returncode == 0, done.stderr
    assert torch.tensor(json.loads(done.stdout)).equal(predictions(recipe, ROWS))


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"dlrm"}))
def test_every_model_of_a_frame_is_built_by_its_name(tmp_path: Path, model: str) -> None:
    recipe, result = compressed(model=model)
    dnis.export(recipe.model, result.scheme, tmp_path / "a", encoder=recipe.data.encoder)
    predict = dnis.load_predictor(tmp_path / "a")
    frame = draw_frame().head(50)
    assert predict(frame).equal(predictions(recipe, frame))
    frame.assign(tags=frame["tags"].map("|".join)).to_csv(tmp_path / "f.csv")
    assert predict(tmp_path / "f.csv").equal(predictions(recipe, frame))
    assert predict(frame.head(1)).shape == (1,)


def test_a_model_of_ones_own_is_filled(exported: Any, tmp_path: Path) -> None:
    recipe, result, path = exported
    fresh = dnis.recipe_from_frame(
        draw_frame(), model="dlrm", label="click", ids=["user", "item"], bags=["tags"], dense=["price"], embedding_dim=8
    )
    predict = dnis.load_predictor(path, fresh.model)
    assert predict.model is fresh.model
    assert predict(ROWS).equal(predictions(recipe, ROWS))
    data = dnis.DataSplits.from_frame(draw_frame(), label="click", ids=["user", "item"], bags=["tags"], dense=["price"])
    dnis.export(recipe.model, result.scheme, tmp_path / "own", encoder=data.encoder)
    with pytest.raises(ValueError, match=r"expected a model of recipe_from_frame, .*; pass the model"):
        dnis.load_predictor(tmp_path / "own")


def test_the_encoder_is_a_file_of_the_artifact_as_others_are(exported: Any) -> None:
    recipe, _, path = exported
    manifest = read_manifest(path)
    assert manifest["encoder"] == ENCODER
    assert manifest["files"][ENCODER]["bytes"] == (path / ENCODER).stat().st_size
    with pa.ipc.open_file(path / ENCODER) as file:
        texts = file.read_all()["id"].to_pylist()
    assert texts[:40] == sorted(texts[:40], key=recipe.data.encoder.rows["user"].__getitem__)
    assert not [finding for finding in verify(path).findings if finding.status == FAILED]
    assert "load_predictor" in (path / CARD).read_text()
    assert f"ids are rows that {ENCODER} numbers" in repr(dnis.load(path))


def other_bytes(path: Path) -> None:
    content = bytearray((path / ENCODER).read_bytes())
    content[len(content) // 2] ^= 1
    (path / ENCODER).write_bytes(content)


def linked(path: Path) -> None:
    (path / ENCODER).rename(path.parent / "elsewhere")
    (path / ENCODER).symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_bytes, f"file '{ENCODER}': expected sha256"),
        (lambda path: os.truncate(path / ENCODER, 8), f"file '{ENCODER}': expected .* bytes"),
        (linked, f"file '{ENCODER}': expected a plain file"),
        (lambda path: (path / ENCODER).unlink(), f"file '{ENCODER}': expected a file"),
    ],
)
def test_a_damaged_encoder_is_refused(tmp_path: Path, change: Callable[[Path], None], message: str, exported) -> None:
    recipe, result, _ = exported
    path = dnis.export(recipe.model, result.scheme, tmp_path / "a", encoder=recipe.data.encoder)
    change(path)
    with pytest.raises(ValueError, match=message):
        dnis.load_predictor(path)


def table(**settings: Any) -> bytes:
    """The file of an encoder of one feature with two ids, with other settings."""
    plain = {"dense": [], "features": [["user", 2]], "bags": [], "model": None, "embedding_dim": None}
    ids = pa.table({"id": pa.array(settings.pop("id", ["a", None]))})
    ids = ids.replace_schema_metadata({"encoder": json.dumps(plain | settings)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, ids.schema) as file:
        file.write_table(ids)
    return sink.getvalue().to_pybytes()


def test_what_is_no_encoder_is_refused() -> None:
    assert FrameEncoder.from_bytes(table(), "f").rows == {"user": {"a": 1, None: 2}}
    hostile = [b"", b"ARROW1\0\0", table(features=[["user", 3]]), table(features=[["user", 1]]), table(bags="user")]
    hostile += [table(id=["a", "a"]), table(id=[[1], [2]]), table(embedding_dim=0), table(dense=[["x", None, 1]])]
    hostile += [table(dense=[["x", 0.0, 0.0]])]
    for content in hostile:
        with pytest.raises(ValueError, match="^f"):
            FrameEncoder.from_bytes(content, "f")


def test_an_artifact_without_an_encoder_and_an_encoder_of_other_tables_are_refused(exported: Any, tmp_path) -> None:
    recipe, result, _ = exported
    dnis.export(recipe.model, result.scheme, tmp_path / "a")
    with pytest.raises(ValueError, match="expected an encoder of raw rows, got none; export with encoder="):
        dnis.load_predictor(tmp_path / "a")
    assert "encoder" not in (tmp_path / "a" / CARD).read_text() + repr(dnis.load(tmp_path / "a"))
    frame = draw_frame(9000).assign(user=range(9000))
    with pytest.warns(UserWarning, match="an id of its own"):
        other = dnis.DataSplits.from_frame(frame, label="click", ids=["user", "item"], bags=["tags"])
    with pytest.raises(ValueError, match="encoder, feature 'user': expected"):
        dnis.export(recipe.model, result.scheme, tmp_path / "b", encoder=other.encoder)
    assert not (tmp_path / "b").exists()
