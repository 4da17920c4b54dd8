"""Addresses that local copies stand for: what is told or recorded names what the user named.
Imports no storage."""

from __future__ import annotations

from pathlib import Path

_ADDRESS_OF: dict[Path, str] = {}


def stands_for(path: Path, address: str) -> None:
    """Notes which address a local copy of this process stands for."""
    _ADDRESS_OF[path] = address


def address_of(path: Path | None) -> str | None:
    """The address that a local copy stands for; None where the user named the path itself, or
    nothing."""
    return None if path is None else _ADDRESS_OF.get(path)


def shown(path: Path) -> str:
    """A path as the user named it: the address that a local copy stands for, or the path itself."""
    return address_of(path) or str(path)
