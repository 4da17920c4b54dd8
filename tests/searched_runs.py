"""Searches of the tiny recipe that take about a second, for tests of what runs are made of and used for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dnis_torchrec.cli.settings import SearchCommand
from dnis_torchrec.search.settings import SearchSettings

QUICK = SearchSettings(num_blocks=3, epochs=1, patience=1)


def quick_search(out: Path, **changes: Any) -> SearchCommand:
    """A search of the tiny recipe; `changes` are other fields of its settings."""
    settings = SearchCommand(recipe="tests.tiny:demo", out=out, compression=4.0, epochs=1)
    return dataclasses.replace(settings, **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
