"""A GPU's stand-in for what it is read by: on this CPU, too, numbers are read a step late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dnis_torchrec.training import pipeline as late_values


@contextmanager
def read_late() -> Iterator[None]:
    """Has everything read a step late that would be on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_values, "is_read_late", lambda device: True)
        yield
