"""JSON of others, read in one way: parsed strictly, then held against the types that its reader
relies on."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NoReturn,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from dnis_torchrec.checks import describe

_T = TypeVar("_T")

NotNegative = Annotated[int, 0]
Positive = Annotated[int, 1]
"""Integers of at least so much."""

LARGEST = 2**63 - 1
"""Integers of a file count rows, bytes and steps: what int64 cannot hold is damage."""
DEEPEST = 50
"""Levels of lists and objects in each other."""
_SHOWN = 60
"""Characters of a wrong value that an error shows."""
_WORDS = {
    str: "text",
    bool: "true or false",
    int: "an integer of 64 bits",
    float: "a finite number",
    None: "null",
}


def read_json(file: Path, kind: type[_T], *, remedy: str = "") -> _T:
    """Reads a JSON file."""
    return parse_json(file.read_bytes(), kind, str(file), remedy=remedy)


def parse_json(content: bytes | str, kind: type[_T], place: str, *, remedy: str = "") -> _T:
    """Parses JSON: UTF-8, no NaN, no infinity, no name twice in an object."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object
        )
    except RecursionError as error:
        raise ValueError(
            describe(place, "JSON", "one that is nested too deeply", remedy)
        ) from error
    except ValueError as error:
        raise ValueError(describe(place, "JSON", str(error), remedy)) from error
    conform(value, kind, place, remedy=remedy)
    return value


def conform(value: object, kind: Any, place: str, *, remedy: str = "") -> None:
    """Checks that a JSON value is of a type."""
    try:
        _conform(value, kind, "")
    except _FieldError as error:
        field, requirement, received = error.args
        where = f"{place}, field {field}" if field else place
        raise ValueError(describe(where, requirement, received, remedy)) from None


class _FieldError(Exception):
    """Field, requirement, what was received."""


def _conform(value: object, kind: Any, field: str) -> None:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        _check_depth(value, field)
    elif origin in (Union, types.UnionType):
        _conform_to_any(value, arguments, field)
    elif origin is Annotated:
        if not (_is_plain(value, int) and value >= arguments[1]):
            raise _FieldError(field, f"{_words(kind)}", _shown(value))
    elif is_typeddict(kind):
        _conform_members(value, *_of_typed_dict(kind), field)
    elif isinstance(kind, type) and is_dataclass(kind):
        _conform_members(value, *_of_dataclass(kind), field, is_complete=True)
    elif origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _FieldError(field, "an object", _shown(value))
        for name, item in value.items():
            _conform(item, arguments[1], _inside(field, name))
    elif origin in (list, tuple, Sequence):
        _conform_items(value, arguments, origin, field)
    elif not _is_plain(value, kind):
        raise _FieldError(field, f"{_words(kind)}", _shown(value))


def _conform_to_any(value: object, kinds: Sequence[Any], field: str) -> None:
    """To one kind of a union; the error deepest inside of the value tells most."""
    errors = []
    for kind in kinds:
        try:
            _conform(value, kind, field)
            return
        except _FieldError as error:
            errors.append(error)
    deepest = max(errors, key=lambda error: len(error.args[0]))
    if len(deepest.args[0]) > len(field):
        raise deepest
    raise _FieldError(field, f"{' or '.join(map(_words, kinds))}", _shown(value))


def _conform_items(value: object, arguments: Sequence[Any], origin: Any, field: str) -> None:
    if not isinstance(value, list | tuple):
        raise _FieldError(field, "a list", _shown(value))
    is_fixed = origin is tuple and arguments[-1] is not Ellipsis
    if is_fixed and len(value) != len(arguments):
        raise _FieldError(field, f"a list of {len(arguments)}", f"one of {len(value)}")
    for index, item in enumerate(value):
        _conform(item, arguments[index] if is_fixed else arguments[0], f"{field}[{index}]")


@cache
def _of_typed_dict(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Types by name, and the names that have to be there."""
    hints = get_type_hints(
        kind, include_extras=True
    )  # `__required_keys__` does not know of postponed annotations
    free = {
        name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is NotRequired
    }
    return hints | free, tuple(name for name in hints if name not in free)


@cache
def _of_dataclass(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    hints, own = get_type_hints(kind, include_extras=True), fields(kind)
    needed = tuple(f.name for f in own if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in own}, needed


def _conform_members(
    value: object,
    members: Mapping[str, Any],
    needed: Sequence[str],
    field: str,
    *,
    is_complete: bool = False,
) -> None:
    if not isinstance(value, dict):
        raise _FieldError(field, "an object", _shown(value))
    missing = sorted(name for name in needed if name not in value)
    if missing:
        raise _FieldError(field, f"{missing[0]!r} in it", "none")
    unknown = sorted(set(value) - set(members)) if is_complete else []
    if unknown:
        raise _FieldError(field, f"no more than {', '.join(members)}", _shown(unknown[0]))
    for name, kind in members.items():
        if name in value:
            _conform(value[name], kind, _inside(field, name))


def _check_depth(value: object, field: str) -> None:
    """Whoever goes through what may be anything does so by recursion."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        holders = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, dict | list)
        ]
        level = [item for holder in holders for item in holder]
    if any(isinstance(item, dict | list) for item in level):
        raise _FieldError(field, f"at most {DEEPEST} levels", "more")


def _is_plain(value: object, kind: Any) -> bool:
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is str:
        return isinstance(value, str) and not any(
            "\ud800" <= character <= "\udfff" for character in value
        )
    if kind is int:
        return isinstance(value, int) and abs(value) <= LARGEST
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= LARGEST**8 and math.isfinite(value)
    raise TypeError(describe("conform", "a type that JSON has", kind))


def _words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return f"an integer >= {get_args(kind)[1]}"
    if origin in (list, tuple, Sequence):
        return "a list"
    return _WORDS.get(None if kind is types.NoneType else kind, "an object")


def _inside(field: str, name: str) -> str:
    plain = name if name.isidentifier() else _shown(name)
    return f"{field}.{plain}" if field else plain


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    try:
        text = "null" if value is None else repr(value)
    except ValueError:  # Python shows no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"the constant {name}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:_SHOWN]}, which is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's names and values; JSON leaves open which of two values of one name counts."""
    known = dict(pairs)
    if len(known) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object with the name {_shown(twice)} twice")
    return known
