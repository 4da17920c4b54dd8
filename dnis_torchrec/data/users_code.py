"""Whose code a file holds, and errors of a recipe told by its user's own frames, without those of
this package."""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_PLACE = "recipe "
_OWN = Path(os.path.realpath(__file__)).parents[1]


class RecipeError(ValueError):
    """A recipe that failed where its user can mend it; the message names it and shows the user's
    frames alone."""


@contextmanager
def errors_of_recipe(spec: str) -> Iterator[None]:
    """Whatever the block raises, the import or the call of a recipe, becomes one error that names
    the recipe."""
    try:
        yield
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(_told(_place(spec), error)) from error


@contextmanager
def errors_of_its_code(spec: str) -> Iterator[None]:
    """Adds a note that names the recipe to errors from its data or model at work, see
    `named_errors`."""
    try:
        yield
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        is_at_work = any(_is_users(file) or lies_in(file, _package_of(spec)) for file in files)
        if not isinstance(error, RecipeError) and not _is_own(files[-1]) and is_at_work:
            error.add_note(_place(spec))
        raise


@contextmanager
def named_errors() -> Iterator[None]:
    """Errors with the note of `errors_of_its_code` leave the block as those of the recipe; all
    others as they are."""
    try:
        yield
    except Exception as error:
        for note in getattr(error, "__notes__", ()):
            if note.startswith(_PLACE):
                raise RecipeError(_told(note, error)) from error
        raise


def lies_in(file: Path | str, folders: tuple[Path, ...]) -> bool:
    """Returns whether a file, or a folder, is one of these folders or lies in one."""
    return any(Path(file).is_relative_to(folder) for folder in folders)


def is_of_python(file: Path | str) -> bool:
    """Returns whether a file belongs to Python's standard library."""
    return lies_in(file, _of_python()) and not lies_in(file, _of_packages())


def is_of_package(file: Path | str) -> bool:
    """Returns whether a file lies where packages are installed; those installed as links to a
    checkout do not."""
    return lies_in(file, _of_packages())


@cache
def editable_folders() -> tuple[Path, ...]:
    """Folders of the checkouts that are installed as links, as ``pip install -e`` does."""
    folders = []
    for package in metadata.distributions():
        try:
            described = json.loads(package.read_text("direct_url.json") or "null")
            if described and described.get("dir_info", {}).get("editable"):
                folders.append(
                    Path(os.path.realpath(url2pathname(urlsplit(described["url"]).path)))
                )
        except (AttributeError, KeyError, OSError, TypeError, ValueError):
            continue  # a record that cannot be read speaks for nothing
    return tuple(folders)


@cache
def _of_python() -> tuple[Path, ...]:
    return _real(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


@cache
def _of_packages() -> tuple[Path, ...]:
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    named = (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
        *users,
    )
    return tuple(dict.fromkeys((*_real(*named), *map(Path, map(os.path.abspath, named)))))


def _real(*folders: str) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))


def _is_own(file: str) -> bool:
    return lies_in(os.path.realpath(file), (_OWN,))


def _is_users(file: str) -> bool:
    """Returns whether a frame's file is the user's own: neither a library's nor code without a
    file."""
    real = os.path.realpath(file)
    return not (file.startswith("<") or _is_own(file) or is_of_python(real) or is_of_package(real))


def _package_of(spec: str) -> tuple[Path, ...]:
    """Files and folders of the outermost package that a recipe lies in, which may be an installed
    one."""
    package = sys.modules.get(spec.partition(":")[0].partition(".")[0])
    found = [*getattr(package, "__path__", ()), getattr(package, "__file__", None)]
    return tuple(Path(file) for file in found if file)


def _place(spec: str) -> str:
    return f"{_PLACE}{spec!r}"


def _told(place: str, error: BaseException) -> str:
    if isinstance(error, ValueError) and str(error).startswith(f"{place}: "):
        return str(error)
    lines: list[str] = []
    before, seen = f"{place}: ", set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines += [before + _summary(current), *_frames(current)]
        before = "  because of "
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    return "\n".join(lines)


def _summary(error: BaseException) -> str:
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)
    except Exception:
        text = "its message cannot be shown"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _frames(error: BaseException) -> list[str]:
    """The user's frames, those of installed packages where there is none, and the line of a syntax
    error."""
    found = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in found if _is_users(frame.filename)] or [
        frame
        for frame in found
        if is_of_package(os.path.realpath(frame.filename)) and not _is_own(frame.filename)
    ]
    lines = traceback.StackSummary.from_list(shown).format()
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(error)[:-1]
    return "".join(lines).rstrip().splitlines()
