"""Folders that the system gives each user."""

from __future__ import annotations

import os
from pathlib import Path

from dnis_torchrec.checks import describe


def user_cache_folder() -> Path:
    """``$XDG_CACHE_HOME``, or ``.cache`` in the user's home folder."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        remedy = "set XDG_CACHE_HOME to a folder of yours"
        raise OSError(
            describe("cache folder", "a home folder or XDG_CACHE_HOME", "neither", remedy)
        ) from error
