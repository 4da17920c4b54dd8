"""Recipes: what a user brings is checked, found and called as it was meant; a data frame is one, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.data.recipe import DataSplits, Recipe, load_recipe
from dnis_torchrec.data.task import TrainTask
from tests.programs import SHORT, Done, dnis

SPLITS = ("train", "validation", "selection", "test")
LOSSES = (nn.MSELoss, nn.BCEWithLogitsLoss)
NO_DATA = DataSplits(train=[], validation=[], selection=[], test=[])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", nn.L1Loss(), ".* a Task, got L1Loss"),
        *(("loss", loss(reduction=of), f"reduction 'mean', got '{of}'") for loss in LOSSES for of in ("sum", "none")),
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
        ({part: (batch for batch in ())}, " that can be iterated again and again, got generator"),
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
    with pytest.raises(ValueError, match=f"^recipe '{re.escape(spec)}': expected 'module:function'"):
        load_recipe(spec)


@pytest.mark.parametrize("spec", ["shp:small", "shop.recipe:small", "shp.recipes:small"])
def test_unknown_modules(spec: str, project: Path) -> None:
    (project / "shop").mkdir()
    (project / "shop" / "__init__.py").touch()
    module = spec.split(":")[0]
    message = rf"^recipe '{spec}': expected a module '{module}' in .*, got none$"
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
