"""Files and folders that appear whole or not at all, and JSON that is held against types."""

import ctypes
import fcntl
import json
import math
import os
import re
import shutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as show
from socket import gethostname
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar, get_args, get_origin
from uuid import uuid4

from safetensors import SafetensorError
from torch import Tensor

from dnis_torchrec.checks import check, describe

NotNegative = Annotated[int, 0]
Positive = Annotated[int, 1]  # integers of at least so much
PARTIAL = ".partial"  # suffix of a name while the file or folder is being written

_T = TypeVar("_T")
_LARGEST = 2**63 - 1
_WORDS = {str: "text", bool: "true or false", int: "an integer of 64 bits", float: "a number"}


class FolderKind(NamedTuple):
    """A kind of folder that may be replaced, known by the format in its JSON file."""

    name: str
    manifest: str
    format: str


def _partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{uuid4().hex}{PARTIAL}")


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """Lends a path to write a file to, which takes the file's place once the block ends well."""
    new = _partial_of(Path(path))
    try:
        new.touch()
        mode = new.stat().st_mode & 0o777
        yield new
        os.chmod(new, mode)  # safetensors writes for the owner alone
        _flush(new)
        os.replace(new, path)
    except OSError as error:
        if PARTIAL in str(error.filename):
            error.filename, error.filename2 = str(path), None
        raise
    except SafetensorError as error:  # its way to tell of a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Writes UTF-8 text whole or not at all; returns `path`."""
    with write_whole(path) as new:
        new.write_bytes(text.encode("utf-8"))
    return Path(path)


def write_json(path: Path, content: Any) -> Path:
    """Writes an indented JSON document whole or not at all; returns `path`."""
    return write_text(path, json.dumps(content, indent=1) + "\n")


@contextmanager
def new_folder(path: Path | str, *, overwrite: bool = False, kind: FolderKind) -> Iterator[Path]:
    """A folder that appears under `path` complete, or not at all."""
    target = Path(os.path.abspath(path))
    _check_target(target, overwrite, kind)
    new, old = _partial_of(target), _partial_of(target)
    parents = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    new.mkdir()
    try:
        mode = new.stat().st_mode & 0o666
        yield new
        for file in new.rglob("*"):
            if file.is_file():
                os.chmod(file, mode | (file.stat().st_mode & 0o111))
            _flush(file)
        _check_target(target, overwrite, kind)  # another job may have put something there
        if not (os.path.lexists(target) and _exchange(new, target)):
            if os.path.lexists(target):
                os.rename(target, old)
            os.rename(new, target)
        _flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not target.exists():
            os.rename(old, target)
        shutil.rmtree(new, ignore_errors=True)
        for parent in () if target.exists() else parents:
            parent.rmdir()


_HERE, _BOTH = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def _exchange(first: Path, second: Path) -> bool:
    """Gives two folders each other's name at once; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(first), os.fsencode(second)
    return rename is not None and rename(_HERE, paths[0], _HERE, paths[1], _BOTH) == 0


def _check_target(target: Path, overwrite: bool, kind: FolderKind) -> None:
    if not os.path.lexists(target):
        return
    place, remedy = f"{kind.name} {str(target)!r}", "pass overwrite=True to replace it"
    check(overwrite, place, "a path that does not exist", "an existing one", remedy)
    file, is_ours = target / kind.manifest, False
    if file.is_file() and not target.is_symlink():
        with suppress(ValueError):
            is_ours = read_json(file, dict[str, Any]).get("format") == kind.format
    check(is_ours, place, f"an old {kind.name} to overwrite", "something else", "remove it first")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_plain(folder: Path, place: str) -> None:
    """Refuses a folder of others that holds anything but plain files and folders, at any depth."""
    for root, folders, names in os.walk(folder):
        for path in (Path(root, name) for name in sorted(folders + names)):
            is_plain = not path.is_symlink() and (path.is_file() or path.is_dir())
            kind = "the link " if path.is_symlink() else ""
            name = f"{kind}{path.relative_to(folder).as_posix()!r}"
            check(is_plain, place, "plain files and folders in it", name, "remove it")


@contextmanager
def file_lock(path: Path) -> Iterator[str | None]:
    """Locks a file while the block runs: gives None, or who holds the lock."""
    # The system lets go of it when this process ends, however it ends.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another one"
            return
        if os.fstat(descriptor).st_nlink == 1:  # else it is a second name of somebody's file
            owner = f"process {os.getpid()} on {gethostname()}"
            os.pwrite(descriptor, owner.ljust(127).encode(), 0)
        yield None
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Waits until no other process holds a folder, and holds it while the block runs."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS locks files alone
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors without shared storage (tied weights), as safetensors wants them."""
    pointers: set[int] = set()
    copies = {}
    for name, value in tensors.items():
        is_shared = value.data_ptr() in pointers
        pointers.add(value.data_ptr())
        copies[name] = value.detach().clone() if is_shared else value.detach().contiguous()
    return copies


def read_json(file: Path, kind: type[_T], *, remedy: str = "") -> _T:
    """Reads a JSON file."""
    return parse_json(file.read_bytes(), kind, str(file), remedy=remedy)


def parse_json(content: bytes | str, kind: type[_T], place: str, *, remedy: str = "") -> _T:
    """Parses JSON: UTF-8, no NaN, no infinity, no name twice in an object, of the given type."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object)
    except (RecursionError, ValueError) as error:
        raise ValueError(describe(place, "JSON", str(error), remedy)) from error
    conform(value, kind, place, remedy=remedy)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object with a name twice")
    return value


class _Fault(ValueError):
    """Field, requirement and value of what is of another type."""


def conform(value: object, kind: Any, place: str, *, remedy: str = "") -> None:
    """Checks that a JSON value is of a type: what TypedDicts and dataclasses are made of."""
    try:
        _conform(value, kind, "")
        # Half a character, as an escape may be, has no UTF-8.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except _Fault as fault:
        field, requirement, text = fault.args
        where = f"{place}, field {field}" if field else place
        raise ValueError(describe(where, requirement, text, remedy)) from None
    except (RecursionError, ValueError) as error:
        raise ValueError(describe(place, "JSON", str(error), remedy)) from error


def _conform(value: Any, kind: Any, field: str) -> None:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin in (typing.Union, types.UnionType):
        faults = []
        for one in arguments:
            try:
                return _conform(value, one, field)
            except _Fault as fault:
                faults.append(fault)
        raise max(faults, key=lambda fault: len(fault.args[0]))
    if origin is Annotated:
        least, is_integer = arguments[1], _is_plain(value, int)
        _require(is_integer and value >= least, field, f"an integer >= {least}", value)
    elif origin in (list, tuple, Sequence):
        _require(isinstance(value, list | tuple), field, "a list", value)
        is_fixed = origin is tuple and arguments[-1] is not Ellipsis
        kinds = list(arguments) if is_fixed else [arguments[0]] * len(value)
        _require(len(kinds) == len(value), field, f"a list of {len(kinds)}", value)
        for index, pair in enumerate(zip(value, kinds, strict=True)):
            _conform(*pair, f"{field}[{index}]")
    elif origin in (dict, Mapping) or typing.is_typeddict(kind) or is_dataclass(kind):
        _require(isinstance(value, dict), field, "an object", value)
        members, needs, is_open = _members(kind) if origin is None else ({}, (), True)
        for name in needs:
            _require(name in value, field, f"{name!r} in it", list(value))
        rest = Any if origin is None else arguments[1]
        for name, member in value.items():
            _require(is_open or name in members, field, f"no more than {', '.join(members)}", name)
            _conform(member, members.get(name, rest), f"{field}.{name}".removeprefix("."))
    else:
        _require(_is_plain(value, kind), field, _WORDS.get(kind, "null"), value)


def _require(condition: bool, field: str, requirement: str, value: object) -> None:
    if not condition:
        raise _Fault(field, requirement, show(value))


@cache
def _members(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...], bool]:
    """Types by name, the names that must be there, and whether there may be others."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        needs = [f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        return hints, tuple(f.name for f in needs), False
    free = {n: get_args(hint)[0] for n, hint in hints.items() if get_origin(hint) is NotRequired}
    return hints | free, tuple(name for name in hints if name not in free), True


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is None or kind is types.NoneType:
        return value is None
    if type(value) is int and kind in (int, float):
        return abs(value) <= _LARGEST
    return type(value) is kind and (kind is not float or math.isfinite(value))
