"""One id is one row whatever its type: in a frame, in its CSV and Parquet files, and in what is served."""

from __future__ import annotations

import datetime
import decimal
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dnis_torchrec.data.columns import SEPARATOR, ids_of, text_of
from dnis_torchrec.data.frames import FrameSplits
from dnis_torchrec.data.recipe import DataSplits

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


@settings(max_examples=50)
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
    texts = [
        "7",
        "007",
        "1e5",
        "100000",
        "10000e02",
        "1000e003",
        "NA",
        "nan",
        "null",
        "None",
        "true",
        "True",
        "1",
        "7,0",
    ]
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
    def test_a_line_that_has_other_fields_than_the_header_is_refused(
        self, tmp_path: Path, lines: Any, row: int
    ) -> None:
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
            ({"y": [1, 2] * 50}, {}, "label column 'y': two values, 1 and 2: map them to 0 and 1"),
            ({"y": [-1, 1] * 50}, {}, "label column 'y': two values, -1 and 1"),
            ({"shop": [None] * 100}, {"ids": ["user", "shop"]}, "column 'shop': missing in all rows"),
            ({"rate": np.nan}, {"dense": ["rate"]}, "column 'rate': missing in all rows"),
            ({"tags": [[], None] * 50}, {"bags": ["tags"]}, "column 'tags': missing in all rows"),
            ({"row": range(100)}, {"ids": ["user", "row"]}, "column 'row': an id of its own in every row"),
            ({"day": 3}, {"time": "day"}, "time column 'day': one time in all rows"),
            ({"rate": 1e9 + np.arange(100)}, {"dense": ["rate"]}, "dense column 'rate': not divided by its spread"),
            ({"app": ["1.1", "1.10"] * 50}, {"ids": ["app"]}, "column 'app': '1.1' and '1.10' are one id"),
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
    splits.encoder(pd.DataFrame({"user": pd.Series([7, 8], dtype=pd.ArrowDtype(pa.int8()))}))
