"""Searches of the tiny recipe that take about a second, for tests of what runs are made of and used for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dnis_torchrec.jobs import progress
from dnis_torchrec.jobs.search_job import SearchJob
from dnis_torchrec.search.settings import SearchSettings

QUICK = SearchSettings(num_blocks=3, epochs=1, patience=1)
"""Of a search with 10 plain steps, 8 in the ramp and 10 in the release."""


def quick_job(out: Path, **changes: Any) -> SearchJob:
    """A search of the tiny recipe.

    Args:
        out: its run folder.
        changes: other fields of the job.
    """
    job = SearchJob(recipe="tests.tiny:demo", data=None, out=out, compression=4.0, settings=QUICK, stored_rows=False)
    return dataclasses.replace(job, **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _NoImages:
    def __init__(self, *_: object) -> None:
        pass

    def is_due(self) -> bool:
        return False

    def draw(self, *_: object) -> None:
        pass


@contextmanager
def without_images() -> Iterator[None]:
    """Searches of this process draw no images for TensorBoard in the block: they take longer than the search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SearchImages", _NoImages)
        yield
