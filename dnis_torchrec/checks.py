"""Argument checks with one wording for errors: place, requirement, value received, remedy.

Every message of the package is built here, so that a reader who has seen one error knows where to look in the next:

    table 'movie': expected embedding_dim >= 1, got 0; give the table at least one dimension
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 20
"""Known names that one error lists."""


def describe(place: str, requirement: str, received: object, remedy: str = "") -> str:
    """Words one error.

    Args:
        place: where it is wrong, as in ``"table 'movie'"`` or ``"compression_ratio"``.
        requirement: what has to hold, as in ``"expected a number above 1"``.
        received: the value that was given.
        remedy: what to do about it; left out when there is only one thing that could be done.

    Returns:
        ``"{place}: {requirement}, got {received}; {remedy}"``.

    Example:
        >>> describe("seed", "expected an integer >= 0", -1)
        'seed: expected an integer >= 0, got -1'
    """
    message = f"{place}: {requirement}, got {received}"
    return f"{message}; {remedy}" if remedy else message


def check(condition: bool, place: str, requirement: str, received: object, remedy: str = "") -> None:
    """Raises a ValueError in the package's wording unless `condition` holds.

    Args:
        condition: what has to hold.
        place: see `describe`.
        requirement: see `describe`.
        received: see `describe`.
        remedy: see `describe`.

    Raises:
        ValueError: if `condition` is false.

    Example:
        >>> check(4 >= 1, "seed", "expected an integer >= 0", 4)
    """
    if not condition:
        raise ValueError(describe(place, requirement, received, remedy))


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """Names the known names that look most like `name`.

    Args:
        name: what was given.
        known: the names that exist.
        limit: close names in the phrase, at most; 3 by default.

    Returns:
        A phrase for the remedy of an error: the closest names, or all of them when none is close.

    Example:
        >>> nearest("moive", ["movie", "user"])
        "did you mean 'movie'?"
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(map(repr, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
    return f"known names: {shown or 'none'}"


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Checks that `name` is one of `known` and shows the nearest names if it is not.

    Args:
        kind: what is named: ``"table"``, ``"feature"``, ``"FQN"``.
        name: the name that was given.
        known: the names that exist.

    Raises:
        ValueError: if `name` is not in `known`.

    Example:
        >>> check_known("table", "user", ["user", "movie"])
    """
    known = list(known)
    if name not in known:  # looking for near names takes longer than a small lookup
        raise ValueError(describe(f"{kind} {name!r}", f"expected a known {kind}", repr(name), nearest(name, known)))
