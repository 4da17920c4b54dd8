"""Recipes: what a user brings is checked, found and called as it was meant."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.labels import check_labels
from dnis_torchrec.data.recipe import DataSplits, Recipe, TrainTask, load_recipe
from dnis_torchrec.search.settings import SearchSettings
from tests import tiny
from tests.small_models import BATCH_SIZE, NUM_DENSE, dlrm, features

NO_DATA = DataSplits(train=[], validation=[], selection=[], test=[])


def test_defaults() -> None:
    recipe = Recipe(model=nn.Identity(), data=NO_DATA, loss=nn.MSELoss())
    assert (recipe.table_optimizer, recipe.embedding_l2, recipe.notes) == ("adam", 0.0, ())


def test_a_recipe_has_no_settings_of_a_search_and_no_example_gives_any() -> None:
    of_recipe = {part.name for part in dataclasses.fields(Recipe)}
    assert of_recipe == {
        *("model", "data", "loss", "table_optimizer", "table_learning_rate", "dense_learning_rate", "embedding_l2"),
        *("task", "stop_on", "row_weights", "leave_alone", "redraw", "notes"),
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
    ("fields", "message"),
    [
        (
            {"loss": nn.L1Loss()},
            r"Recipe\.loss: expected nn\.MSELoss or nn\.BCEWithLogitsLoss, got L1Loss; "
            "put any other into a Recipe.task",
        ),
        ({"table_optimizer": "sgd"}, r"Recipe\.table_optimizer: expected 'adam' or 'rowwise_adagrad', got 'sgd'"),
    ],
)
def test_unfit_fields_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Recipe(**({"model": nn.Identity(), "data": NO_DATA, "loss": nn.MSELoss()} | fields))


@pytest.mark.parametrize("rate", [0.0, -1e-3, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["table_learning_rate", "dense_learning_rate"])
def test_a_learning_rate_that_teaches_nothing_is_refused(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match=rf"^Recipe\.{name}: expected a finite number above 0, got {rate}$"):
        Recipe(**{"model": nn.Identity(), "data": NO_DATA, "loss": nn.MSELoss(), name: rate})


@pytest.mark.parametrize("part", ["train", "validation", "selection", "test"])
def test_a_part_of_the_data_that_is_missing_is_refused(part: str) -> None:
    parts = {name: [] for name in ("train", "validation", "selection", "test") if name != part}
    message = f"DataSplits.{part}: expected batches, got none; give the recipe a {part} part of its own"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DataSplits(**parts)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DataSplits(**parts | {part: None})


@pytest.mark.parametrize("part", ["train", "validation", "selection", "test"])
def test_a_part_that_can_be_iterated_once_only_is_refused(part: str) -> None:
    parts = dict.fromkeys(("train", "validation", "selection", "test"), ())
    message = f"DataSplits.{part}: expected batches that can be iterated again and again, got generator; give a list"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        DataSplits(**parts | {part: (batch for batch in ())})


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


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss])
def test_losses_are_means(loss: type, reduction: str) -> None:
    with pytest.raises(ValueError, match=rf"^Recipe\.loss: expected reduction 'mean'.*, got '{reduction}'"):
        dataclasses.replace(tiny.make_recipe(), loss=loss(reduction=reduction))


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


@pytest.mark.parametrize("spec", ["", "shop", ":small", "shop:", ":"])
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
    message = rf"^recipe '{spec}': expected a module '{module}' in .*, got none; run it from your project's root$"
    with pytest.raises(ValueError, match=message):
        load_recipe(spec)


def test_unknown_functions(project: Path) -> None:
    (project / "stall.py").write_text("SIZE = 3\ndef small(): ...\ndef _hidden(): ...\n")
    with pytest.raises(ValueError, match="expected a function in stall, got 'smal'; did you mean 'small'"):
        load_recipe("stall:smal")
    with pytest.raises(ValueError, match=r"expected a function in stall, got 'SIZE'; known names: 'small'$"):
        load_recipe("stall:SIZE")


def test_a_recipe_that_fails_to_import_shows_its_own_error(project: Path) -> None:
    (project / "kiosk.py").write_text("import no_such_library\n")
    message = f"""recipe 'kiosk:small': ModuleNotFoundError: No module named 'no_such_library'
  File "{project}/kiosk.py", line 1, in <module>
    import no_such_library"""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_recipe("kiosk:small")


def test_relative_names_are_no_modules(project: Path) -> None:
    (project / "kiosk.py").touch()
    for spec in (".kiosk:small", "..kiosk:small", "kiosk.:small", "shop..kiosk:small"):
        with pytest.raises(ValueError, match=rf"^recipe '{re.escape(spec)}': expected a module .*, got none"):
            load_recipe(spec)


def test_a_module_may_be_refused_before_any_part_of_it_is_imported(project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop" / "__init__.py").write_text("raise RuntimeError('imported')\n")

    def refuse(module: str) -> None:
        raise ValueError(f"not {module}")

    with pytest.raises(ValueError, match=r"not shop\.recipes"):
        load_recipe("shop.recipes:small", before_import=refuse)
    asked: list[str] = []
    (project / "shop" / "__init__.py").write_text("")
    (project / "shop" / "recipes.py").write_text("def small(): ...\n")
    load_recipe("shop.recipes:small", before_import=asked.append)
    assert asked == ["shop.recipes", "shop.recipes"]  # of shop, and of what lies in it
