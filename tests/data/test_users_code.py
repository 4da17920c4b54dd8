"""Errors of a recipe: one message that names it, the user's own frames below, none of this package's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dnis_torchrec._dependencies import versions
from dnis_torchrec.checks import check
from dnis_torchrec.data import users_code
from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.data.users_code import (
    RecipeError,
    editable_folders,
    errors_of_its_code,
    errors_of_recipe,
    is_of_package,
    is_of_python,
    named_errors,
)
from tests.cli.test_cli import SHORT, Done, dnis
from tests.tiny_artifact import write_tiny_artifact


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; the recipe that is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    sys.modules.pop("ranker", None)


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
        (
            "def recipe(data, seed=0): ...\n",
            "expected a function of (data, *, seed, embedding_dim), got one of (data, seed=0); got an unexp",
        ),
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


USED = """
import torch
from tests.tiny import make_recipe
from dnis_torchrec.data.recipe import Recipe
class Wrong(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, dense_features, sparse_features):
        return self.model(dense_features, sparse_features).view(3, 1000)
class Stream:
    def __iter__(self):
        yield {}["column"]
def recipe(data, *, seed, embedding_dim):
    own = make_recipe()
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "object.__setattr__(own, 'model', Wrong(own.model))",
            "RuntimeError: shape '[3, 1000]' is invalid for input of size",
        ),
        ("own.data.train.batches = Stream()", "KeyError: 'column'"),
    ],
)
def test_what_its_model_and_data_raise_names_the_recipe(gloo, project: Path, change: str, message: str) -> None:
    done = searched(project, f"{USED}    {change}\n    return own\n")
    assert done.returncode == 1
    assert f"error: recipe 'ranker:recipe': {message}" in done.stderr
    assert f'  File "{project}/ranker.py", line ' in done.stderr
    assert_no_frames_of_this_package(done)


def assert_no_frames_of_this_package(done: Done) -> None:
    assert "Traceback" not in done.stderr
    assert "dnis_torchrec" not in done.stderr
    assert "frozen" not in done.stderr


def test_a_verification_says_what_the_recipe_raised(tmp_path: Path) -> None:
    artifact = write_tiny_artifact(tmp_path / "artifact")
    done = dnis("verify", artifact, "--no-measure", "--recipe", "tests.data.test_users_code:raises")
    assert done.returncode == 1
    named = "recipe 'tests.data.test_users_code:raises': ZeroDivisionError: division by zero"
    assert f"error: metric, csr_fp32: {named}" in done.stderr


def raises(data: Path | None, *, seed: int, embedding_dim: int | None) -> None:
    del data, seed, embedding_dim
    print(1 / 0)


def test_causes_are_told_with_their_frames() -> None:
    def fails() -> None:
        try:
            print({}["column"])
        except KeyError as error:
            raise RuntimeError("cannot read") from error

    with pytest.raises(RecipeError) as caught, errors_of_recipe("shop:small"):
        fails()
    lines = str(caught.value).splitlines()
    assert lines[0] == "recipe 'shop:small': RuntimeError: cannot read"
    assert "  because of KeyError: 'column'" in lines
    assert lines[-2].strip() == 'print({}["column"])'
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_recipe_of_an_installed_package_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_code, "_is_users", lambda _: False)
    told = rf"^recipe '{__name__}:small': RuntimeError: no"
    with pytest.raises(RecipeError, match=told), named_errors(), errors_of_its_code(f"{__name__}:small"):
        raise RuntimeError("no")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_error_that_cannot_be_told_names_the_recipe_all_the_same() -> None:
    told = r"^recipe 'shop:small': Unspeakable: its message cannot be shown\n"
    with pytest.raises(RecipeError, match=told), errors_of_recipe("shop:small"):
        raise Unspeakable


def test_an_interrupt_is_no_error_of_the_recipe() -> None:
    with pytest.raises(KeyboardInterrupt), errors_of_recipe("shop:small"):
        raise KeyboardInterrupt


def test_what_this_package_raises_at_work_is_told_as_it_is() -> None:
    with (
        pytest.raises(ValueError, match=r"^seed: expected 1, got 2$"),
        named_errors(),
        errors_of_its_code("shop:small"),
    ):
        check(False, "seed", "1", 2)


def test_an_error_without_code_of_the_user_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_code, "_is_users", lambda _: False)
    with pytest.raises(RuntimeError, match=r"^no$"), named_errors(), errors_of_its_code("shop:small"):
        raise RuntimeError("no")


def test_an_error_at_work_keeps_its_kind_until_a_command_ends() -> None:
    with pytest.raises(RuntimeError, match="no") as caught, errors_of_its_code("shop:small"):
        raise RuntimeError("no")
    assert caught.value.__notes__ == ["recipe 'shop:small'"]
    with pytest.raises(RecipeError, match=r"^recipe 'shop:small': RuntimeError: no"), named_errors():
        raise caught.value


def test_whose_a_file_is() -> None:
    assert is_of_python(os.path.realpath(os.__file__))
    assert not is_of_package(os.path.realpath(os.__file__))
    for module in (torch, np):
        assert is_of_package(os.path.realpath(str(module.__file__)))
        assert not is_of_python(os.path.realpath(str(module.__file__)))
    assert not is_of_package(__file__)
    assert all(folder.is_absolute() for folder in editable_folders())
    assert versions()["python"]


def test_what_can_be_called_but_says_not_how_is_called(project: Path) -> None:
    (project / "ranker.py").write_text("recipe = type('Odd', (), {'__call__': dict, '__signature__': 3})()\n")
    with pytest.raises((TypeError, ValueError), match=r"recipe 'ranker:recipe'"):
        build_recipe("ranker:recipe", None, seed=0)
