"""The recipe of a run or an artifact: the one that the user names, or the recorded one if its code
is the user's."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.recipe import Recipe, build_recipe, load_recipe
from dnis_torchrec.data.urls import cache_folder
from dnis_torchrec.data.users_code import (
    RecipeError,
    editable_folders,
    is_of_package,
    is_of_python,
    lies_in,
)

_REMEDY = "name your own by --recipe MODULE:FUNCTION"
WRITTEN = ("manifest.json", "package.json", "run.json", "compress.json")
"""Files that make a folder one of this package's; each names its format, all of which begin alike.
"""
_FORMATS = re.compile(rb'"format"\s*:\s*"dnis-torchrec-')


def build_recorded(
    folder: Path, run: Mapping[str, Any], data: Path | None, recipe: str | None = None
) -> Recipe:
    """Calls the recipe of a run or an artifact, as `load_recorded` decides which."""
    spec = load_recorded(folder, run, data, recipe)
    seed, embedding_dim = run.get("seed", 0), run.get("embedding_dim")
    is_seed = type(seed) is int and 0 <= seed < 2**63
    check(is_seed, _place(folder), "a seed, an integer from 0 on", repr(seed), "it was damaged")
    is_dim = embedding_dim is None or (type(embedding_dim) is int and embedding_dim >= 1)
    check(
        is_dim, _place(folder), "embedding_dim to be none or an integer >= 1", repr(embedding_dim)
    )
    return build_recipe(spec, data, seed=seed, embedding_dim=embedding_dim)


def load_recorded(
    folder: Path, run: Mapping[str, Any], data: Path | None = None, recipe: str | None = None
) -> str:
    """Decides which recipe a run or an artifact is read with, and imports it."""
    place, here = _place(folder), Path(os.path.realpath(Path.cwd()))
    requirement, remedy = "a working folder outside of it", "go to the folder of your project"
    check(
        not lies_in(here, _spellings(folder)),
        place,
        f"{requirement}: its files would be modules",
        here,
        remedy,
    )
    requirement, remedy = "a folder that takes no installed module's place", "rename the folder"
    for name in _names_in(here, folder):
        check(
            not _takes_a_place(name, here),
            place,
            requirement,
            f"the package {str(here / name)!r}",
            remedy,
        )
    if recipe is not None:
        load_recipe(recipe)
        return recipe
    spec = run.get("recipe") if isinstance(run, Mapping) else None
    named = isinstance(spec, str) and bool(spec)
    check(
        named,
        place,
        "the name of a recipe",
        "none" if spec is None else repr(spec),
        "give --recipe",
    )
    load_recipe(
        str(spec),
        before_import=partial(_check_users, str(spec), place, _foreign(folder, data, here), here),
    )
    return str(spec)


def _place(folder: Path) -> str:
    return f"{'artifact' if (folder / 'manifest.json').is_file() else 'run folder'} {str(folder)!r}"


def _spellings(folder: Path) -> tuple[Path, ...]:
    """A folder as it is named and as it is reached: a link may lead in, or out."""
    return Path(os.path.abspath(folder)), Path(os.path.realpath(folder))


def _names_in(here: Path, folder: Path) -> set[str]:
    """Returns the names, in the working folder `here`, of the entries through which `folder` is
    reached."""
    return {
        inner.relative_to(here).parts[0]
        for inner in _spellings(folder)
        if inner.is_relative_to(here)
    }


def _takes_a_place(name: str, here: Path) -> bool:
    """Returns whether libraries would import this folder of the working folder instead of the
    package they mean."""
    found = PathFinder.find_spec(name, [str(here)])
    if (
        found is None or found.origin is None
    ):  # no package, or one without code, which any other of the name precedes
        return False
    others = [entry for entry in sys.path if entry and os.path.realpath(entry) != str(here)]
    meant = PathFinder.find_spec(name, others)
    origin = None if meant is None or meant.origin is None else os.path.realpath(meant.origin)
    return origin is not None and (is_of_python(origin) or is_of_package(origin))


def _foreign(folder: Path, data: Path | None, here: Path) -> tuple[Path, ...]:
    """Returns folders that others may have made: the one read and all that came with it, data,
    copies of URLs."""
    found = list(_spellings(folder))
    for inner in _spellings(folder):
        projects = [
            base
            for base in (here, *editable_folders())
            if inner != base and inner.is_relative_to(base)
        ]
        if projects:  # of one in the other the inner one is the project, and the outer one's folder is no archive
            project = max(projects, key=lambda base: len(base.parts))
            found += _spellings(project / inner.relative_to(project).parts[0])
    others = [] if data is None else [data]
    with suppress(OSError):  # who has no cache folder has no copies
        others.append(cache_folder())
    for other in others:
        if not lies_in(here, _spellings(other)):
            found += _spellings(other)
    return tuple(dict.fromkeys(found))


def _check_users(
    spec: str, place: str, foreign: tuple[Path, ...], here: Path, module_name: str
) -> None:
    """Refuses a module unless each of its parts is the user's, or an installed package's. Imports
    nothing."""
    parts, search = module_name.split("."), None
    for end in range(1, len(parts) + 1):
        found = _found(".".join(parts[:end]), search) if end == 1 or search is not None else None
        if found is None or "__main__" in parts or not all(parts):
            requirement = f"a module {module_name!r} in {here}, as {place} names it"
            remedy = f"run it from your project's root, or {_REMEDY}"
            raise RecipeError(describe(f"recipe {spec!r}", requirement, "none", remedy))
        files, search = found
        for file in files:
            requirement = (
                f"code of yours, in {here}, or of an installed package, as {place} names it"
            )
            why = _not_users(file, foreign, here)
            if why:
                raise RecipeError(
                    describe(f"recipe {spec!r}", requirement, f"{file}, {why}", _REMEDY)
                )


def _not_users(file: str, foreign: tuple[Path, ...], here: Path) -> str:
    """Why a file is neither the user's nor a package's; nothing if it is one of them."""
    named, real = Path(os.path.abspath(file)), Path(os.path.realpath(file))
    if not os.path.isabs(file) or is_of_python(real):
        return "which is Python's own"
    if is_of_package(named) and is_of_package(
        real
    ):  # wherever they are installed, as in a project's own environment
        return ""
    if lies_in(named, foreign) or lies_in(real, foreign):
        return "which may have come with what is read"
    if is_of_package(real):
        return ""
    if lies_in(real, (here,)):
        of_others = [
            folder for folder in real.parents if lies_in(folder, (here,)) and _is_written(folder)
        ]
        return f"which lies in {of_others[0]}, a run, an artifact or a package" if of_others else ""
    return "" if lies_in(real, editable_folders()) else "which is somewhere else"


def _is_written(folder: Path) -> bool:
    """Returns whether a folder is a run, an artifact or a package."""
    for file in (folder / name for name in WRITTEN):
        try:
            if _FORMATS.search(file.read_bytes()):
                return True
        except OSError:
            continue
    return False


def _found(name: str, search: Sequence[str] | None) -> tuple[list[str], list[str] | None] | None:
    """The files and folders that a module is made of, and where its submodules are looked for; None
    if there is none."""
    origins: set[str | None] = set()
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if module is not None else _spec(name, search)
    if module is not None:
        origins = {getattr(module, "__file__", None), "" if spec is None else spec.origin}
        inner = getattr(module, "__path__", None)
    elif spec is not None:
        origins, inner = {spec.origin}, spec.submodule_search_locations
    else:
        return None
    folders = None if inner is None else list(inner)
    files = [origin for origin in origins if origin] + [
        folder for folder in folders or [] if os.path.isabs(folder)
    ]
    return (files, folders) if files else None


def _spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """The spec that importing a module would use, found without importing the packages that it lies
    in."""
    for finder in sys.meta_path:
        # A path finder would ask sys.modules for the package of a dotted name; files go by the last
        # part of it.
        asked = name.rpartition(".")[2] if finder is PathFinder else name
        try:
            spec = finder.find_spec(asked, search, None)
        except Exception:
            continue  # it cannot answer yet; it is asked again when what the module lies in has been imported
        if spec is not None:
            return spec
    return None
