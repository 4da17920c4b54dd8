"""Argument checks with one wording for errors: place, requirement, value received, remedy."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable

SHOWN = 20
"""Known names that one error lists."""


def describe(place: str, requirement: str, received: object, remedy: str = "") -> str:
    """Words one error."""
    wanted = requirement if requirement.startswith("supported ") else f"expected {requirement}"
    message = f"{place}: {wanted}, got {received}"
    return f"{message}; {remedy}" if remedy else message


_SYSTEM = {
    errno.ENOSPC: ("room on the disk", "make room, or choose another place"),
    errno.EROFS: ("a place that can be written to", "choose another place"),
    errno.EACCES: ("the right to read or write it", "change its rights, or choose another place"),
    errno.ENAMETOOLONG: ("a name that the file system takes", "choose a shorter one"),
    errno.ENOTDIR: ("folders on the way to it", "choose another place"),
    errno.EISDIR: ("a file", "choose another name"),
    errno.EEXIST: ("nothing there", "choose another name"),
    errno.ENOENT: ("it to be there", "check the path"),
    errno.EMFILE: ("to open one more file", "allow more of them, as ulimit -n does"),
    errno.ESTALE: ("a file that its server still has", "try again"),
}
_SYSTEM[errno.EDQUOT] = _SYSTEM[errno.ENOSPC]
_SYSTEM[errno.EPERM] = _SYSTEM[errno.EACCES]
_SYSTEM[errno.ENFILE] = _SYSTEM[errno.EMFILE]
"""Requirement and remedy of what the operating system refuses; `describe_error` words the others.
"""


def describe_error(error: BaseException) -> str:
    """Words an error in one line, also one that the operating system has raised."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        requirement, remedy = _SYSTEM.get(error.errno, ("the system to read and write", ""))
        names = [
            os.fsdecode(name)
            for name in (error.filename, error.filename2)
            if isinstance(name, str | bytes)
        ]
        return describe(", ".join(names) or "file system", requirement, error.strerror, remedy)
    text = str(error)
    found = [words for number, words in _SYSTEM.items() if os.strerror(number) in text]
    if not found or ": expected " in text:
        return text
    return describe("file system", found[0][0], " ".join(text.split()), found[0][1])


def is_of_system(error: BaseException) -> bool:
    """Returns whether the operating system has refused something, in whatever error a library has
    wrapped that."""
    return isinstance(error, OSError) or any(
        os.strerror(number) in str(error) for number in _SYSTEM
    )


def visible(text: str) -> str:
    r"""A text as a terminal may show it: what would steer the terminal, or turn the text around,
    becomes an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    """Escapes a character as JSON does, so that escaped JSON has the same meaning."""
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def check(
    condition: bool, place: str, requirement: str, received: object, remedy: str = ""
) -> None:
    """Raises a ValueError in the package's wording unless `condition` holds."""
    if not condition:
        raise ValueError(describe(place, requirement, received, remedy))


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the known names that look most like `name`."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(map(repr, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
    return f"known names: {shown or 'none'}"


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Checks that `name` is one of `known` and shows the nearest names if it is not."""
    known = list(known)
    if name not in known:  # looking for near names takes longer than a small lookup
        raise ValueError(
            describe(f"{kind} {name!r}", f"a known {kind}", repr(name), nearest(name, known))
        )
