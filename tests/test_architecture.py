"""The layout stays as it was meant: who imports whom, sizes, nothing unpickled; ruff looks after the rest.

Each rule is a function from source text to offences, tried on a source that breaks it and then on the whole project.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from docs import rooms

ROOT = Path(__file__).parents[1]
PACKAGE = "dnis_torchrec"
LAYERS = (
    {"checks", "ranks"},
    {"blocks"},
    {"data", "ops", "scheme"},
    {"report", "selection", "serving"},
    {"allocation"},
    {"training"},
    {"artifact", "search"},
    {"cli"},
    {"__init__", "__main__"},
)
"""Rooms of the package, and loose modules, from the ground up: each imports only from the sets before its own."""
LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
SERVING_NEEDS = {"blocks", "checks", "ops", "scheme", "serving"}
"""All of the package that a serving module may load: nothing that trains."""

OUTSIDE = {"benchmarks", "examples", "tests", "torchx_components"}
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 750, 60

Rule = Callable[[str, str], list[str]]


def unit_of(path: str) -> str:
    """The module or folder of the package that a file is or lies in: ``"report"`` of dnis_torchrec/report/page.py."""
    return path.split("/")[1].removesuffix(".py")


@lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of a file, the module first; rules that follow one another on a file share them."""
    return list(ast.walk(ast.parse(source)))


def imported(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imports_against_the_flow(path: str, source: str) -> list[str]:
    """Imports from the own layer or above, from outside the package, relative, or from the package's front."""
    unit, offences = unit_of(path), []
    if unit not in LAYER_OF:
        return [f"{path}: not in the table of layers"]
    for line, name in imported(source):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top in OUTSIDE or top == "":
            offences.append(f"{path}:{line} imports {name}")
        elif top == PACKAGE and target not in LAYER_OF:
            offences.append(f"{path}:{line} imports {name}, no module of the table of layers")
        elif top == PACKAGE and target != unit and LAYER_OF[target] >= LAYER_OF[unit]:
            offences.append(f"{path}:{line} in layer {LAYER_OF[unit]} imports {name} of layer {LAYER_OF[target]}")
        elif top == PACKAGE and unit == "serving" and target not in SERVING_NEEDS:
            offences.append(f"{path}:{line} imports {name}, which serving has no use for")
    return offences


def imports_of_training_in_serving(path: str, source: str) -> list[str]:
    """Imports by serving of what trains: optimizers, train pipelines, sharded modules; a sharder needs its types."""
    if unit_of(path) != "serving":
        return []
    trains = ("torch.optim", "torchrec.optim", "torchrec.distributed")
    types = "torchrec.distributed.types." if path.endswith("/sharded.py") else "none"
    names = [(line, name) for line, name in imported(source) if not name.startswith(types)]
    return [f"{path}:{line} imports {name}" for line, name in names if name.startswith(trains)]


def too_long(path: str, source: str) -> list[str]:
    """Files and functions (signature and docstring not counted) over their size."""
    lines = len(source.splitlines())
    offences = [f"{path}: {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            if length > MAX_FUNCTION_LINES and "triton" not in path:  # a launch has an argument a line
                offences.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    return offences


def unpickled(path: str, source: str) -> list[str]:
    """Ways to run somebody's file as code: pickle and its like, and loaders that fall back on it."""
    offences = [f"{path}:{line} imports {name}" for line, name in imported(source) if name.split(".")[0] in UNPICKLERS]
    for node in nodes_of(source):
        if not isinstance(node, ast.Call) or not may_unpickle(node):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in {"weights_only", "allow_pickle"}}
        if called == "torch.load" and given.get("weights_only") != "True":
            offences.append(f"{path}:{node.lineno} torch.load without weights_only=True")
        if given.get("allow_pickle", "False") != "False" or called.split(".")[-1] in {"read_pickle", "to_pickle"}:
            offences.append(f"{path}:{node.lineno} {called} unpickles")
        if called.startswith("yaml.") and "load" in called and not called.startswith("yaml.safe_load"):
            offences.append(f"{path}:{node.lineno} {called} builds any object")
    return offences


def may_unpickle(call: ast.Call) -> bool:
    """Whether it is worth a look: a call of something that loads or pickles, or that is told of pickles."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return "load" in name or "pickle" in name or any(given.arg == "allow_pickle" for given in call.keywords)


def sources(*tops: str) -> dict[str, str]:
    """Path (with forward slashes, from the root) -> text of the Python files below the given folders."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for top in tops
        for path in sorted((ROOT / top).rglob("*.py"))
    }


WHERE: list[tuple[Rule, tuple[str, ...]]] = [
    (imports_against_the_flow, (PACKAGE,)),
    (imports_of_training_in_serving, (PACKAGE,)),
    (too_long, (PACKAGE,)),
    (unpickled, (PACKAGE, "benchmarks", "examples", "tests", "torchx_components")),
]


@pytest.fixture(scope="module")
def offences() -> dict[Rule, list[str]]:
    """Of the whole project: all rules file by file, so that each file is parsed once."""
    files = sources(*{top: None for _, tops in WHERE for top in tops})
    assert f"{PACKAGE}/checks.py" in files
    found: dict[Rule, list[str]] = {rule: [] for rule, _ in WHERE}
    for path, source in files.items():
        for rule, tops in WHERE:
            found[rule] += rule(path, source) if path.startswith(tuple(f"{top}/" for top in tops)) else []
    return found


@pytest.mark.parametrize("rule", [rule for rule, _ in WHERE])
def test_the_project_keeps_the_rule(offences: dict[Rule, list[str]], rule: Rule) -> None:
    assert offences[rule] == []


def test_setup_names_no_registry_and_no_machine() -> None:
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run", *(ROOT / "requirements").iterdir()]
    assert [
        path.name for path in files if re.search(r"://|/home/|/root/|/opt/", path.read_text(encoding="utf-8"))
    ] == []


def test_the_house_is_small() -> None:
    """Rooms, floors, arrows between rooms, and circles: a room that needs more has to take another arrow away."""
    imports = rooms.imports_between_rooms()
    assert len(imports) <= 14
    assert max(rooms.floors(imports).values()) < 9
    assert sum(map(len, imports.values())) <= 60
    assert len(list((ROOT / PACKAGE).glob("*.py"))) == 5


def test_serving_loads_little_and_nothing_that_trains() -> None:
    code = "import sys, dnis_torchrec as dnis; dnis.MixedDimensionEmbeddingBagCollection; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True
    ).stdout
    own = [name for name in loaded.split() if name.startswith(PACKAGE)]
    assert len(own) <= 25
    assert {unit_of(name.replace(".", "/") + ".py") for name in own if "." in name} <= SERVING_NEEDS | {"search"}
    assert not {"pandas", "pyarrow", "fsspec"} & set(loaded.split())


def test_the_face_loads_nothing_before_it_is_asked() -> None:
    code = "import sys, dnis_torchrec; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {name for name in loaded if name.startswith(PACKAGE)} == {PACKAGE, f"{PACKAGE}.checks", f"{PACKAGE}.search"}
    assert not {"torch", "torchrec", "pandas"} & set(loaded)


def test_every_public_name_is_there() -> None:
    face = __import__(PACKAGE)
    assert all(getattr(face, name) is not None for name in face.__all__)
    assert set(face.__all__) <= set(dir(face))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        face.nothing  # noqa: B018


def test_the_picture_and_the_page_know_every_room() -> None:
    imports = rooms.imports_between_rooms()
    assert set(imports) == set(rooms.SAID) == set(LAYER_OF) - {"__init__", "__main__"}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in imports if f"`{room}" not in page] == []
    assert all(LAYER_OF[target] < LAYER_OF[room] for room, target in rooms.needed_arrows(imports))
