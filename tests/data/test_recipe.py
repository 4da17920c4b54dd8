"""Recipes: what a user brings is checked, found and called as it was meant; a data frame is one, too."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import decimal
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.batches import check_batch
from dnis_torchrec.data.columns import id_bags_of, ids_of, numbers_of, order_in_time, text_of
from dnis_torchrec.data.frames import MODELS, recipe_from_frame
from dnis_torchrec.data.recipe import DataSplits, Recipe, load_recipe
from dnis_torchrec.data.task import TrainTask, check_labels
from dnis_torchrec.search.settings import SearchSettings
from tests.models import BATCH_SIZE, NUM_DENSE, dlrm, features
from tests.programs import SHORT, Done, dnis

SPLITS = ("train", "validation", "selection", "test")
LOSSES = (nn.MSELoss, nn.BCEWithLogitsLoss)
NO_DATA = DataSplits(train=[], validation=[], selection=[], test=[])


def test_a_recipe_has_no_settings_of_a_search_and_no_example_gives_any() -> None:
    of_recipe = {part.name for part in dataclasses.fields(Recipe)}
    assert of_recipe == {
        *("model", "data", "loss", "table_optimizer", "table_learning_rate", "dense_learning_rate", "embedding_l2"),
        *("stop_on", "row_weights", "leave_alone"),
    }
    assert not of_recipe & {part.name for part in dataclasses.fields(SearchSettings)}
    num_recipes = 0
    for path in (Path(__file__).parents[2] / "examples").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "SearchSettings" not in source, path
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if getattr(call.func, "id", "") == "Recipe":
                num_recipes += 1
                assert {keyword.arg for keyword in call.keywords} <= {*of_recipe, None}, path
    assert num_recipes > 5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", nn.L1Loss(), "nn.MSELoss or nn.BCEWithLogitsLoss, got L1Loss; put any other into a Task"),
        *(("loss", loss(reduction=of), f"reduction 'mean'.*, got '{of}'") for loss in LOSSES for of in ("sum", "none")),
        ("table_optimizer", "sgd", ""),
        *(
            (f"{part}_learning_rate", rate, f"a finite number above 0, got {rate}$")
            for part in ("table", "dense")
            for rate in (0.0, -1e-3, float("inf"), float("nan"))
        ),
    ],
)
def test_unfit_fields_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Recipe\.{field}.*: expected {message}"):
        Recipe(**{"model": nn.Identity(), "data": NO_DATA, "loss": nn.MSELoss()} | {field: value})


@pytest.mark.parametrize("part", SPLITS)
def test_a_part_is_there_and_can_be_iterated_again(part: str) -> None:
    parts: dict[str, Any] = {name: [] for name in SPLITS if name != part}
    message = rf"^DataSplits\.{part}: expected batches"
    for wrong, got in (
        ({}, ", got none; give a part of its own"),
        ({part: None}, ", got none; give a part of its own"),
        ({part: (batch for batch in ())}, " that can be iterated again and again, got generator; give a list"),
    ):
        with pytest.raises(ValueError, match=message + got):
            DataSplits(**parts | wrong)


class Column(nn.Module):
    """Predicts the first dense feature, as ``(B,)`` or ``(B, 1)``."""

    def __init__(self, *, keep_dim: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.keep_dim = keep_dim

    def forward(self, dense_features: torch.Tensor, sparse_features: object) -> torch.Tensor:
        column = dense_features[:, :1] * self.scale
        return column if self.keep_dim else column.squeeze(1)


@pytest.mark.parametrize("keep_dim", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_train_task(keep_dim: bool, batch_size: int, loss: nn.Module) -> None:
    dense, labels = torch.randn(batch_size, 2), torch.randint(0, 2, (batch_size,))
    task = TrainTask(Column(keep_dim=keep_dim), loss)
    value, (detached, predictions) = task(Batch(dense, None, labels))
    expected = dense[:, 0] * 2
    torch.testing.assert_close(value, loss(expected, labels.float()))
    assert value.requires_grad
    assert not detached.requires_grad
    assert torch.equal(detached, value.detach())
    assert torch.equal(predictions, expected)
    assert not predictions.requires_grad


def test_train_task_of_a_torchrec_model() -> None:
    model = dlrm()
    batch = Batch(torch.randn(BATCH_SIZE, NUM_DENSE), features(), torch.ones(BATCH_SIZE))
    value, (_, predictions) = TrainTask(model, nn.MSELoss())(batch)
    expected = model(batch.dense_features, batch.sparse_features)[:, 0]
    torch.testing.assert_close(predictions, expected)
    torch.testing.assert_close(value, (expected - 1).square().mean())


@given(st.lists(st.floats(-1, 2, width=32), min_size=1), st.booleans())
def test_labels_of_a_binary_loss_lie_in_0_to_1(values: list[float], binary: bool) -> None:
    loss = nn.BCEWithLogitsLoss() if binary else nn.MSELoss()
    outside = [value for value in values if not 0 <= value <= 1]
    if not (binary and outside):
        check_labels(torch.tensor(values), loss, "train batch 3")
        return
    message = (
        f"train batch 3: expected labels in [0, 1] for BCEWithLogitsLoss, got {outside[0]}; map the labels to 0 and 1"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_labels(torch.tensor(values), loss, "train batch 3")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_labels_are_finite(bad: float, loss: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"^test batch 0: expected finite labels, got {bad}; clean the data$"):
        check_labels(torch.tensor([0.5, bad]), loss, "test batch 0")


def test_integer_labels() -> None:
    check_labels(torch.tensor([0, 1]), nn.BCEWithLogitsLoss(), "train batch 0")
    with pytest.raises(ValueError, match=r"got 2\.0"):
        check_labels(torch.tensor([0, 2]), nn.BCEWithLogitsLoss(), "train batch 0")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_recipes_are_found_from_the_current_folder(project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop" / "recipes.py").write_text("def small(data, *, seed, embedding_dim=None):\n    return seed\n")
    assert load_recipe("shop.recipes:small")(None, seed=3) == 3
    assert load_recipe("shop.recipes:small") is load_recipe("shop.recipes:small")
    assert sys.path.count(str(project)) == 1


@pytest.mark.parametrize(
    "spec", ["", "shop", ":small", "shop:", ":", ".kiosk:small", "..kiosk:small", "kiosk.:small", "shop..kiosk:small"]
)
def test_malformed_specs(spec: str) -> None:
    remedy = "name one such as 'examples.synthetic:demo'"
    message = re.escape(f"recipe {spec!r}: expected 'module:function', got {spec!r}; {remedy}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_recipe(spec)


@pytest.mark.parametrize("spec", ["shp:small", "shop.recipe:small", "shp.recipes:small"])
def test_unknown_modules(spec: str, project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop" / "__init__.py").touch()
    module = spec.split(":")[0]
    message = rf"^recipe '{spec}': expected a module '{module}' in .*, got none; start in your project$"
    with pytest.raises(ValueError, match=message):
        load_recipe(spec)


def searched(project: Path, source: str, *, spec: str = "ranker:recipe") -> Done:
    """What `dnis search` says of a recipe with this text."""
    (project / "ranker.py").write_text(source)
    return dnis("search", spec, "--compression", 4, "--out", project / "run", *SHORT, folder=project)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise OSError('no disk')\n", "OSError: no disk\n  File {0}, line 2, in <module>\n    raise OSError"),
        ("def recipe(data:\n    pass\n", "SyntaxError: '(' was never closed\n  File {0}, line 1\n    def recipe(data:"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0\n  File {0}, line 2, in <module>\n    sys.exit(0)"),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'\n  File {0}, line 1"),
        ("def recip(): ...\n", "expected a function in ranker, got 'recipe'; did you mean 'recip'?"),
        ("recipe = 3\n", "expected a function in ranker, got 'recipe'; known names: none"),
    ],
)
def test_what_cannot_be_imported_is_a_wrong_argument(project: Path, source: str, message: str) -> None:
    done = searched(project, source)
    assert (done.returncode, done.stdout) == (2, "")
    file = f'"{project}/ranker.py"'
    assert done.stderr.startswith(f"error: recipe 'ranker:recipe': {message.format(file)}")
    assert_no_frames_of_this_package(done)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def recipe(data, *, seed, embedding_dim):\n    return {}['ratings']\n",
            "KeyError: 'ratings'\n  File {0}, line 2, in recipe\n    return {{}}['ratings']\n",
        ),
        (
            "def recipe(data, *, seed, embedding_dim):\n    import json\n    json.loads('{')\n",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"
            "  File {0}, line 3, in recipe\n    json.loads('{{')\n",
        ),
        ("def recipe(data, seed=0): ...\n", "TypeError: recipe() got an unexpected keyword argument"),
        ("def recipe(data, *, seed, embedding_dim): ...\n", "expected a Recipe, got NoneType\n"),
        (
            "def recipe(data, *, seed, embedding_dim):\n    raise ValueError(\"recipe 'ranker:recipe': no data\")\n",
            "no data\n",
        ),
    ],
)
def test_what_cannot_be_built_fails_with_one_message(project: Path, source: str, message: str) -> None:
    done = searched(project, source)
    assert (done.returncode, done.stdout) == (1, "")
    file = f'"{project}/ranker.py"'
    assert f"error: recipe 'ranker:recipe': {message.format(file)}" in done.stderr
    assert_no_frames_of_this_package(done)
    assert not (project / "run").exists()


def assert_no_frames_of_this_package(done: Done) -> None:
    assert "Traceback" not in done.stderr
    assert "dnis_torchrec" not in done.stderr
    assert "frozen" not in done.stderr


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


def looked_up(splits: DataSplits, feature: str) -> dict[int, list[int]]:
    """Row of the frame -> the ids that its sample looks up."""
    found = {}
    for name in SPLITS:
        batches = getattr(splits, name)
        batches._shuffle = False
        bags = [bag.tolist() for batch in batches for bag in batch.sparse_features[feature].to_dense()]
        found |= dict(zip(batches.rows.tolist(), bags, strict=True))
    return found


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

    @pytest.mark.parametrize(
        ("values", "dtype", "expected"),
        [
            ([3, 3, None, 1], "Int64", ["3", "3", None, "1"]),
            ([3, 3, None, 1], "float64", ["3", "3", None, "1"]),
            ([2**64 - 1, 5, 5, 0], "uint64", [str(2**64 - 1), "5", "5", "0"]),
            ([2**62 + 1, 2**62, None, 0], "Int64", [str(2**62 + 1), str(2**62), None, "0"]),
            ([True, False, None, True], "boolean", ["True", "False", None, "True"]),
            (["b", None, "a", " b"], "category", ["b", None, "a", "b"]),
            (["b", None, "a", " "], "string", ["b", None, "a", None]),
            (["b", None, "a", "\ud800"], "object", ["b", None, "a", "\\ud800"]),
            (["b", None, "a", "b"], "string[pyarrow]", ["b", None, "a", "b"]),
            ([1, None, 2**60 + 1, 1], "int64[pyarrow]", ["1", None, str(2**60 + 1), "1"]),
            ([None] * 4, "object", [None] * 4),
        ],
    )
    def test_every_type_of_column_gives_the_same_texts(self, values: Any, dtype: str, expected: Any) -> None:
        found = ids_of(pd.Series(values, dtype=dtype))
        assert [None if code < 0 else found.texts[code] for code in found.codes] == expected

    def test_a_time_is_the_same_id_in_every_zone(self) -> None:
        berlin = pd.Series(pd.to_datetime(["2026-01-01 01:00"]).tz_localize("Europe/Berlin"))
        assert ids_of(berlin).texts.tolist() == ids_of(berlin.dt.tz_convert("UTC")).texts.tolist()

    def test_what_training_never_saw_has_row_0_and_a_missing_id_its_own(self) -> None:
        frame = a_frame(40, user=["a"] * 20 + [None] * 16 + ["late", None, "a", "late"], day=range(40))
        splits = DataSplits.from_frame(frame, label="clicked", ids=["user"], time="day")
        assert [looked_up(splits, "user")[row] for row in range(36, 40)] == [[0], [2], [1], [0]]
        assert splits.encoder.num_embeddings == {"user": 3}


class TestBags:
    @given(st.lists(st.one_of(st.none(), st.lists(anything, max_size=4)), min_size=30, max_size=40))
    def test_bags_are_those_of_an_oracle_that_goes_row_by_row(self, bags: list[Any]) -> None:
        column = pd.Series(bags, dtype=object)
        found = id_bags_of(column)
        lengths = found.lengths
        expected = [[text_of(value) for value in bag or () if value is not None] for bag in bags]
        expected = [[text for text in bag if text is not None] for bag in expected]
        ends = np.cumsum(lengths)
        texts = [found.texts[code] for code in found.codes]
        assert [texts[end - length : end] for end, length in zip(ends, lengths, strict=True)] == expected

    def test_lists_tuples_arrays_texts_and_single_ids(self) -> None:
        values = [[1, 2], (3,), {4}, np.array([5, 6]), "7|8", "", 9, None, [], [None, 1.0, float("nan")], "a||b"]
        found = id_bags_of(pd.Series(values, dtype=object))
        lengths = found.lengths
        assert [found.texts[code] for code in found.codes] == [*"123456789", "1", "a", "b"]
        assert lengths.tolist() == [2, 1, 1, 2, 2, 0, 1, 0, 0, 1, 2]

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
        assert sorted(rows_of(splits, "test")) == list(range(10))
        assert sorted(rows_of(splits, "selection")) == list(range(10, 15))
        assert sorted(rows_of(splits, "train")) == list(range(20, 100))

    def test_rows_of_one_time_keep_their_order(self) -> None:
        assert order_in_time(pd.Series([2, 1, 2, 1])).tolist() == [1, 3, 0, 2]

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

    def test_ids_of_a_csv_file_are_text(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        a_frame(item=["007", "7"] * 50).to_csv(path, index=False)
        assert DataSplits.from_frame(path, label="clicked", ids=["item"]).encoder.num_embeddings == {"item": 3}

    @pytest.mark.parametrize("name", ["data.parquet", "data.csv"])
    def test_a_column_that_a_file_lacks_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        frame = a_frame()
        frame.to_csv(path) if name.endswith("csv") else frame.to_parquet(path)
        with pytest.raises(ValueError, match=rf"{name}: expected a column 'usr', got none; did you mean 'user'\?"):
            DataSplits.from_frame(str(path), label="clicked", ids=["usr"])

    @pytest.mark.parametrize("name", ["data.parquet", "folder/data.parquet", "data.csv", "data.csv.gz"])
    def test_a_damaged_file_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"" if name.endswith(".csv") else b"PAR1 user")
        given = path.parent if "/" in name else path
        with pytest.raises(ValueError, match="expected whole files of Parquet or CSV, got"):
            DataSplits.from_frame(given, label="clicked", ids=["user"])

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("data.xlsx", ValueError, "data.xlsx: expected a file that ends in .parquet or .csv, got .xlsx"),
            ("none.csv", FileNotFoundError, "none.csv"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path: Path, name: str, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            DataSplits.from_frame(tmp_path / name, label="clicked", ids=["user"])


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
            ({"user.id": 1}, {"ids": ["user.id"]}, r"column 'user.id': .* text without a dot, .*; rename it"),
            ({5: 1}, {"ids": [5]}, "column 5: expected a name of a feature"),
            ({}, {"dense": ["item"]}, r"column 'item', row 0: expected a number, got 'item \d+'; map it to numbers"),
            ({}, {"dense": ["day"]}, r"column 'day', row 0: expected a number, got Timestamp"),
            ({"price": float("inf")}, {"dense": ["price"]}, r"column 'price', row 0: expected a number below 1e\+30"),
            ({}, {"time": "item"}, "time column 'item': expected numbers, dates or texts as ISO 8601 has them, got"),
            ({"day": [None, *range(99)]}, {"time": "day"}, "time column 'day': expected a time in every row, got 1"),
            ({"clicked": [0, 1, None, None] * 25}, {}, "label column 'clicked': .* got 50 missing, the first in row 2"),
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

    def test_numbers_in_the_form_of_text_are_numbers(self) -> None:
        assert numbers_of(pd.Series(["1", "2.5", None], dtype="string")).tolist()[:2] == [1.0, 2.5]


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
        with pytest.raises(ValueError, match="embedding_dim: expected an integer >= 1, got 0"):
            recipe_from_frame(a_frame(), model="dlrm", label="clicked", ids=["user"], embedding_dim=0)
