"""Search: both levels in one pipeline, which columns die, what is retained. Import from its
modules."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dnis_torchrec.data.recipe import Recipe
    from dnis_torchrec.search.one_call import SearchResult
    from dnis_torchrec.search.settings import SearchSettings


class _Room(ModuleType):
    """Python makes every folder an attribute of the package: the face has one name for the room and
    for the call."""

    def __call__(
        self, recipe: Recipe, compression: float = 20.0, *, settings: SearchSettings | None = None
    ) -> SearchResult:
        from dnis_torchrec.search.one_call import search_once  # loads torch

        return search_once(recipe, compression, settings=settings)


sys.modules[__name__].__class__ = _Room
