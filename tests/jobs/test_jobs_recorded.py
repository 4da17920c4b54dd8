"""Which recipe a run or an artifact is read with: code of the user's, by the user's word; never what came with it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import py_compile
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dnis_torchrec.artifact import package as packages
from dnis_torchrec.artifact import read_manifest
from dnis_torchrec.artifact.manifest import write_manifest
from dnis_torchrec.artifact.verify import verify
from dnis_torchrec.data import users_code
from dnis_torchrec.data.urls import cache_folder
from dnis_torchrec.jobs import artifact_jobs, recorded
from dnis_torchrec.jobs.recorded import build_recorded, load_recorded
from tests.cli.test_cli import dnis
from tests.jobs.test_jobs_prune import run as run  # a fixture
from tests.tiny_artifact import write_tiny_artifact

HARMLESS = "from tests.tiny import demo as recipe\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the user stands in, with a recipe; what is imported from it is forgotten afterwards."""
    folder = tmp_path / "project"
    (folder / "shop").mkdir(parents=True)
    (folder / "shop" / "recipes.py").write_text(HARMLESS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        places = [getattr(sys.modules[name], "__file__", ""), *getattr(sys.modules[name], "__path__", ())]
        if str(tmp_path) in str(places) or name == "known":
            del sys.modules[name]


class Attack:
    """Puts code where others could; it leaves a mark if it ever runs."""

    def __init__(self, project: Path) -> None:
        self.project, self.mark = project, project.parent / "mark"
        self.folder = project / "artifact"
        self.folder.mkdir()

    def put(self, file: str | Path, *, more: str = "") -> Path:
        """A module that marks, at a path from the project's folder."""
        path = self.project / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from pathlib import Path\nPath({str(self.mark)!r}).touch()\n{HARMLESS}{more}")
        return path


@pytest.fixture
def attack(project: Path) -> Attack:
    return Attack(project)


def in_a_namespace(attack: Attack) -> str:
    attack.put("artifact/evil.py")
    return "artifact.evil"


def deeper_in_a_namespace(attack: Attack) -> str:
    attack.put("artifact/one/two/evil.py")
    return "artifact.one.two.evil"


def the_folder_itself(attack: Attack) -> str:
    attack.put("artifact/__init__.py")
    return "artifact"


def in_a_package(attack: Attack) -> str:
    attack.put("artifact/__init__.py")
    attack.put("artifact/evil/__init__.py")
    return "artifact.evil"


def behind_a_link_to_a_file(attack: Attack) -> str:
    (attack.project / "good.py").symlink_to(attack.put("artifact/evil.py"))
    return "good"


def behind_a_link_to_the_folder(attack: Attack) -> str:
    attack.put("artifact/evil.py")
    (attack.project / "mine").symlink_to(attack.folder)
    return "mine.evil"


def behind_a_link_in_a_package_of_the_user(attack: Attack) -> str:
    attack.put("trade/__init__.py")  # the user's, but not asked for, as nothing of the name may be used
    (attack.project / "trade" / "evil.py").symlink_to(attack.put("artifact/evil.py"))
    return "trade.evil"


def through_a_link_out_of_the_folder(attack: Attack) -> str:
    attack.put("trade/recipes.py")
    (attack.folder / "out").symlink_to(attack.project / "trade")
    return "artifact.out.recipes"


def in_a_folder_that_is_a_link(attack: Attack) -> str:
    attack.folder.rmdir()
    attack.put("../elsewhere/evil.py")
    attack.folder.symlink_to(attack.project.parent / "elsewhere")
    return "artifact.evil"


def compiled(attack: Attack) -> str:
    source = attack.put("artifact/evil.py")
    py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    source.unlink()
    return "artifact.evil"


def an_extension(attack: Attack) -> str:
    attack.put(f"artifact/evil{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    return "artifact.evil"


def in_a_zip(attack: Attack) -> str:
    source = attack.put("artifact/evil.py")
    with zipfile.ZipFile(attack.folder / "code.zip", "w") as file:
        file.write(source, "evil.py")
    source.unlink()
    sys.path.insert(0, str(attack.folder / "code.zip"))
    return "evil"


def found_by_python(attack: Attack) -> str:
    attack.put("artifact/evil.py")
    sys.path.insert(0, str(attack.folder))
    return "evil"


def found_by_python_through_a_link_out(attack: Attack) -> str:
    attack.put("trade/evil.py")
    (attack.folder / "out").symlink_to(attack.project / "trade")
    sys.path.insert(0, str(attack.folder / "out"))
    return "evil"


def in_a_portion_of_a_namespace(attack: Attack) -> str:
    attack.put("artifact/shop/evil.py")
    sys.path.append(str(attack.folder))
    return "shop.recipes"


def beside_the_artifact_in_what_was_unpacked(attack: Attack) -> str:
    attack.put("bundle/evil.py")
    attack.folder = attack.project / "bundle" / "artifact"
    attack.folder.mkdir()
    return "bundle.evil"


def around_a_run_in_the_artifact(attack: Attack) -> str:
    attack.put("artifact/evil.py")
    attack.folder /= "run"
    attack.folder.mkdir()
    return "artifact.evil"


def in_another_artifact(attack: Attack) -> str:
    attack.put("other/deep/evil.py")
    (attack.project / "other" / "manifest.json").write_text('{"format": "dnis-torchrec-artifact"}')
    return "other.deep.evil"


def in_the_data(attack: Attack) -> str:
    attack.put("data/evil.py")
    return "data.evil"


def in_copies_of_urls(attack: Attack) -> str:
    os.environ["DNIS_CACHE"] = str(attack.project / "copies")
    attack.put("copies/abc/evil.py")
    assert cache_folder() == attack.project / "copies"
    return "copies.abc.evil"


def imported_before(attack: Attack) -> str:
    described = importlib.util.spec_from_file_location("known", attack.put("artifact/evil.py"))
    assert described is not None
    sys.modules["known"] = importlib.util.module_from_spec(described)
    sys.modules["known"].recipe = lambda data, *, seed, embedding_dim: attack.mark.touch()  # type: ignore[attr-defined]
    return "known"


def somewhere_else(attack: Attack) -> str:
    attack.put("../elsewhere/evil.py")
    sys.path.append(str(attack.project.parent / "elsewhere"))
    return "evil"


PLACES: list[Callable[[Attack], str]] = [
    in_a_namespace,
    deeper_in_a_namespace,
    the_folder_itself,
    in_a_package,
    behind_a_link_to_a_file,
    behind_a_link_to_the_folder,
    behind_a_link_in_a_package_of_the_user,
    through_a_link_out_of_the_folder,
    in_a_folder_that_is_a_link,
    compiled,
    an_extension,
    in_a_zip,
    found_by_python,
    found_by_python_through_a_link_out,
    in_a_portion_of_a_namespace,
    beside_the_artifact_in_what_was_unpacked,
    around_a_run_in_the_artifact,
    in_another_artifact,
    in_the_data,
    in_copies_of_urls,
    imported_before,
    somewhere_else,
]


@pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
def test_code_that_is_not_the_users_never_runs(place: Callable[[Attack], str], attack: Attack) -> None:
    spec = f"{place(attack)}:recipe"
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=rf"^recipe '{spec}': expected code of yours, in .*--recipe MODULE:FUNCTION$"):
        load_recorded(attack.folder, {"recipe": spec}, attack.project / "data")
    assert not attack.mark.exists()


@pytest.mark.parametrize("recipe", [None, "shop.recipes:recipe"])
def test_a_folder_takes_no_installed_modules_place(attack: Attack, recipe: str | None) -> None:
    """Libraries import some modules late, when the working folder is looked in first."""
    for name, inner in (("networkx", ""), ("wave", "runs"), ("sympy", "")):
        attack.put(f"{name}/__init__.py")
        folder = attack.project / name / inner
        folder.mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"that takes no installed module's place, got the package '.*/{name}'"):
            load_recorded(folder, {"recipe": "shop.recipes:recipe"}, recipe=recipe)
    assert not attack.mark.exists()
    attack.put("bundle/__init__.py")
    (attack.project / "yaml").mkdir()
    for name in ("yaml", "bundle"):  # one without code of its own takes no place, and a project may be a package
        load_recorded(attack.project / name, {"recipe": "shop.recipes:recipe"}, recipe=recipe)


def test_other_programs_files_make_no_folder_a_strangers(attack: Attack) -> None:
    (attack.project / "package.json").write_text('{"name": "dnis-torchrec-demo", "format": "cjs"}')
    assert load_recorded(attack.folder, {"recipe": "shop.recipes:recipe"}) == "shop.recipes:recipe"


def test_a_package_that_looks_elsewhere_once_it_is_imported_is_looked_at_again(attack: Attack) -> None:
    (attack.project / "trade").mkdir()
    (attack.project / "trade" / "__init__.py").write_text(f"__path__.insert(0, {str(attack.folder)!r})\n")
    (attack.project / "trade" / "recipes.py").write_text(HARMLESS)
    attack.put("artifact/recipes.py")
    with pytest.raises(ValueError, match="which may have come with what is read"):
        load_recorded(attack.folder, {"recipe": "trade.recipes:recipe"})
    assert not attack.mark.exists()


@pytest.mark.parametrize(
    "spec",
    [
        "os:system",
        "os.path:join",
        "subprocess:run",
        "builtins:exec",
        "sys:exit",
        "antigravity:recipe",
        "__main__:main",
        "dnis_torchrec.__main__:main",
        ".evil:recipe",
        "..artifact.evil:recipe",
        "artifact/evil:recipe",
        "artifact..evil:recipe",
        "artifact.evil.:recipe",
        "evil\0:recipe",
        "\033[2Jevil:recipe",
        "evil.py:recipe",
        "no such:recipe",
    ],
)
def test_names_that_lead_to_no_code_of_the_user_are_refused(attack: Attack, spec: str) -> None:
    attack.put("artifact/evil.py")
    attack.put("evil.py")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"^recipe '[^\0\033]*--recipe MODULE:FUNCTION$"):
        load_recorded(attack.folder, {"recipe": spec})
    assert (set(sys.modules) - before, attack.mark.exists()) == (set(), False)


def test_python_is_no_code_of_somebody_who_stands_above_it(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    for spec in ("subprocess:run", "antigravity:recipe"):
        with pytest.raises(ValueError, match=r"\.py, which is Python's own; name"):
            load_recorded(attack.folder, {"recipe": spec})


@pytest.mark.parametrize("recipe", [None, "", 5, [], {"a": 1}, True])
def test_what_is_no_name_is_refused(attack: Attack, recipe: object) -> None:
    with pytest.raises(
        ValueError, match=r"^run folder '.*artifact': expected the name of a recipe, got .*; give --recipe$"
    ):
        load_recorded(attack.folder, {"recipe": recipe})


@pytest.mark.parametrize("run", [None, "shop.recipes:recipe", 5, []])
def test_a_run_that_is_no_object_names_no_recipe(attack: Attack, run: Any) -> None:
    with pytest.raises(ValueError, match="expected the name of a recipe, got none"):
        load_recorded(attack.folder, run)


def test_code_of_the_working_folder_and_of_installed_packages_is_taken(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = attack.project.parent / "checkout"
    checkout.mkdir()
    (checkout / "linked.py").write_text(HARMLESS)
    monkeypatch.setattr(recorded, "editable_folders", lambda: (checkout,))
    monkeypatch.syspath_prepend(checkout)
    for spec in ("shop.recipes:recipe", "numpy.linalg:norm", "linked:recipe"):
        assert load_recorded(attack.folder, {"recipe": spec}) == spec
    assert build_recorded(attack.folder, {"recipe": "shop.recipes:recipe"}, None).notes == ("generated for tests",)
    data = attack.project  # which holds the working folder, so that it can be no stranger's
    assert load_recorded(attack.folder, {"recipe": "shop.recipes:recipe"}, data) == "shop.recipes:recipe"


def test_a_project_in_a_checkout_has_its_runs_beside_its_recipes(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the checkout that the project lies in holds all of it, and is no archive that was unpacked."""
    monkeypatch.setattr(recorded, "editable_folders", lambda: (attack.project.parent,))
    assert load_recorded(attack.folder, {"recipe": "shop.recipes:recipe"}) == "shop.recipes:recipe"
    attack.put("bundle/evil.py")
    with pytest.raises(ValueError, match="which may have come with what is read"):
        load_recorded(attack.project / "bundle" / "artifact", {"recipe": "bundle.evil:recipe"})
    assert not attack.mark.exists()


def test_packages_are_installed_wherever_the_user_stands(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment within the project, seen from the folder above."""
    installed = attack.project / ".venv" / "site-packages"
    attack.put("shop/evil.py")
    monkeypatch.chdir(attack.project.parent)
    (installed / "bought").mkdir(parents=True)
    (installed / "bought" / "__init__.py").write_text(HARMLESS)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(users_code, "_of_packages", lambda: (installed,))
    assert load_recorded(attack.folder, {"recipe": "bought:recipe"}) == "bought:recipe"
    with pytest.raises(ValueError, match="which may have come with what is read"):
        load_recorded(attack.folder, {"recipe": "project.shop.evil:recipe"})
    assert not attack.mark.exists()


def test_who_has_no_home_has_no_copies(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DNIS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert load_recorded(attack.folder, {"recipe": "shop.recipes:recipe"}) == "shop.recipes:recipe"
    with pytest.raises(OSError, match=r"^cache folder: expected a home folder or XDG_CACHE_HOME, got neither; set "):
        cache_folder()


@pytest.mark.parametrize("field", [{"seed": "0"}, {"seed": -1}, {"seed": True}, {"seed": 2**63}, {"seed": None}])
def test_a_seed_that_is_none_is_refused(attack: Attack, field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a seed, an integer from 0 on"):
        build_recorded(attack.folder, {"recipe": "shop.recipes:recipe"} | field, None)


@pytest.mark.parametrize("dim", ["8", 0, True, 8.0, [8]])
def test_a_width_that_is_none_is_refused(attack: Attack, dim: object) -> None:
    with pytest.raises(ValueError, match="expected embedding_dim to be none or an integer >= 1"):
        build_recorded(attack.folder, {"recipe": "shop.recipes:recipe", "embedding_dim": dim}, None)


def test_by_the_users_own_word_anything_is_taken(attack: Attack) -> None:
    attack.put("artifact/evil.py")
    assert load_recorded(attack.folder, {}, recipe="artifact.evil:recipe") == "artifact.evil:recipe"
    assert attack.mark.exists()


@pytest.mark.parametrize("recipe", [None, "shop.recipes:recipe"])
def test_nothing_is_imported_by_somebody_who_stands_in_the_folder(
    attack: Attack, monkeypatch: pytest.MonkeyPatch, recipe: str | None
) -> None:
    attack.put("artifact/deep/shop/recipes.py")
    monkeypatch.chdir(attack.folder / "deep")
    with pytest.raises(ValueError, match="expected a working folder outside of it: its files would be modules, got"):
        load_recorded(attack.folder, {"recipe": "shop.recipes:recipe"}, recipe=recipe)
    assert not attack.mark.exists()


def with_recipe(artifact: Path, spec: str) -> None:
    manifest = read_manifest(artifact)
    write_manifest(artifact, manifest | {"run": manifest["run"] | {"recipe": spec}})


@pytest.fixture
def hostile_artifact(attack: Attack) -> Path:
    attack.folder.rmdir()
    write_tiny_artifact(attack.folder)
    with_recipe(attack.folder, "artifact.evil:recipe")
    attack.put("artifact/evil.py")
    return attack.folder


@pytest.fixture
def hostile_run(attack: Attack, run: Path) -> Path:
    folder = Path(shutil.copytree(run, attack.project / "run"))
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(head | {"recipe": "run.evil:recipe"}))
    attack.put("run/evil.py")
    return folder


def test_every_command_refuses_a_strangers_code_by_name(
    attack: Attack, hostile_artifact: Path, hostile_run: Path
) -> None:
    tried = [
        dnis("evaluate", "artifact", folder=attack.project),
        dnis("package", "artifact", "--out", "out", folder=attack.project),
        dnis("evaluate", "run", folder=attack.project),
        dnis("prune", "run", "--compression", 5, "--out", "out", folder=attack.project),
    ]
    for done in tried:
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "evil:recipe': expected code of yours" in done.stderr
        assert "--recipe" in done.stderr
    findings = verify(
        hostile_artifact, make_recipe=lambda: artifact_jobs.recipe_of_artifact(hostile_artifact, None)
    ).findings
    assert {finding.subject for finding in findings if finding.is_failure} == {"evil.py"}  # and goes no further
    (hostile_artifact / "evil.py").rename(hostile_artifact.parent / "run" / "aside.py")
    with_recipe(hostile_artifact, "run.aside:recipe")
    (failed,) = verify(
        hostile_artifact, make_recipe=lambda: artifact_jobs.recipe_of_artifact(hostile_artifact, None)
    ).failures
    assert "expected code of yours" in failed.detail
    assert sorted(path.name for path in attack.project.iterdir()) == ["artifact", "run", "shop"]
    assert not attack.mark.exists()


def test_every_command_takes_a_recipe_of_the_users(
    gloo, attack: Attack, hostile_artifact: Path, hostile_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("--recipe", "shop.recipes:recipe")
    for path in ("artifact", "run"):
        done = dnis("evaluate", path, *own, folder=attack.project)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["recipe"] == "shop.recipes:recipe"
    done = dnis(
        "prune", "run", "--compression", 5, "--fine-tune-epochs", 0, "--out", "out", *own, folder=attack.project
    )
    assert done.returncode == 0, done.stderr
    assert artifact_jobs.recorded_run(Path("out"))["recipe"] == "shop.recipes:recipe"
    assert artifact_jobs.run_evaluate(Path("out"), None)["recipe"] == "shop.recipes:recipe"
    described: list[dict[str, str]] = []
    monkeypatch.setattr(packages, "write_package", lambda *_, **given: described.append(given["notes"]))
    assert dnis("package", "artifact", "--out", "package", *own, folder=attack.project).returncode == 0
    assert described == [{"recipe": "shop.recipes:recipe", "form": "csr_fp32"}]
    (hostile_artifact / "evil.py").unlink()
    done = dnis("verify", "artifact", *own, folder=attack.project)
    assert done.returncode == 0, done.stderr
    assert not attack.mark.exists()


@pytest.mark.parametrize("command", ["evaluate", "package", "prune", "verify"])
def test_a_recipe_that_is_mistyped_is_a_wrong_argument(
    attack: Attack, hostile_artifact: Path, hostile_run: Path, command: str
) -> None:
    out = ["--out", "out"] if command in ("package", "prune") else []
    size = ["--compression", 5] if command == "prune" else []
    folder = "run" if command == "prune" else "artifact"
    done = dnis(command, folder, *out, *size, "--recipe", "shop.recipe:recipe", folder=attack.project)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: recipe 'shop.recipe:recipe': expected a module 'shop.recipe' in ")
