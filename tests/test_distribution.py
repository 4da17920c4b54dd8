"""Wheel and sdist: what is in them, and that the wheel alone works where nobody has a clone. `make dist` runs it, too.

Nothing is downloaded: the clean environment sees the packages of this one, but not the project's editable install.
"""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

import pytest
import yaml

from hatch_build import standalone

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")

OWN_RECIPE = """
import sys
from importlib.metadata import entry_points

import numpy as np, pandas as pd
import dnis_torchrec as dnis

users = np.random.default_rng(0).integers(0, 50, 400)
frame = pd.DataFrame({"user": users, "liked": users % 2})
recipe = dnis.recipe_from_frame(frame, model="dlrm", label="liked", ids=["user"], embedding_dim=8)
found = dnis.search(recipe, compression=4)
print(dnis.__version__, dnis.__file__, dnis.export(found.model, found.scheme, "artifact"), sep="\\n")
(program,) = entry_points(group="console_scripts", name="dnis")
sys.argv = ["dnis", "--help"]
program.load()()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that has to succeed, without a way to the clone."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=bare, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source: Path, out: Path, *targets: str) -> None:
    """Builds with what is installed: no isolation, hence no download."""
    run(sys.executable, "-m", "hatchling", "build", "--directory", out, *targets, cwd=source)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist: that of `make dist`, or a new one."""
    if "DNIS_DIST" in os.environ:
        return Path(os.environ["DNIS_DIST"]).resolve()
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (sdist,) = built.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def metadata_of(wheel: Path) -> Message:
    (name,) = [name for name in names_in(wheel) if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_whole_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"dnis_torchrec", "torchx_components"}
    ours = [path for top in sorted(tops) for path in (ROOT / top).rglob("*") if path.is_file()]
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in ours
        if "__pycache__" not in path.parts and path.name != "ruff.toml"
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert "dnis_torchrec/py.typed" in names
    assert any(name.startswith("dnis_torchrec/ops/csrc/") for name in names)


def test_metadata_says_who_and_what_and_names_no_address_that_nobody_has(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("dnis-torchrec", PROJECT["version"])
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None
    needs = [need for need in metadata.get_all("Requires-Dist") if re.match(r"torch\b|torchrec|fbgemm", need)]
    assert len(needs) == 3
    assert all("extra == 'cuda'" in need for need in needs)  # a plain install leaves those of the environment alone


def test_the_readme_of_an_index_has_no_relative_picture_or_link(wheel: Path) -> None:
    text = metadata_of(wheel).get_payload()
    assert text.strip() == standalone(README).strip()
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", re.sub(r"`[^`\n]*`", "", outside_code))
    assert [target for target in targets if not target.startswith(("https://", "http://", "#"))] == []
    assert README.count("```") == text.count("```")


def test_the_sdist_makes_the_same_wheel_and_holds_what_its_tests_need(
    wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    build(unpacked, tmp_path, "-t", "wheel")
    (again,) = tmp_path.glob("*.whl")
    assert names_in(again) == names_in(wheel)
    tracked = run("git", "ls-files", cwd=ROOT).split("\n") if (ROOT / ".git").exists() else []
    left_out = [name for name in tracked if name and not (unpacked / name).exists()]
    assert left_out == []


def test_the_wheel_alone_searches_a_frame_where_nobody_has_a_clone(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "outer.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    python = environment / "bin" / "python"
    pip: Sequence[str] = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile")
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=tmp_path)
    version, file, artifact, *lines = run(python, "-c", OWN_RECIPE, cwd=tmp_path).split("\n")
    assert version == PROJECT["version"]
    assert Path(file).is_relative_to(site_packages)
    assert (tmp_path / artifact / "MODEL_CARD.md").is_file()
    assert (environment / "bin" / "dnis").is_file()
    assert "search" in " ".join(lines)


def test_the_version_stands_in_one_place() -> None:
    version = re.escape(PROJECT["version"])
    for name in ("CITATION.cff", "hatch_build.py", "dnis_torchrec/__init__.py", "Makefile"):
        assert not re.search(rf"(?<![\d.]){version}(?![\d.])", (ROOT / name).read_text(encoding="utf-8")), name


def test_the_workflow_runs_what_has_to_hold_before_a_merge() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert workflow["permissions"] == {"contents": "read"}
