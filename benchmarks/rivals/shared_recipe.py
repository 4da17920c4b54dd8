"""One recipe of a comparison: its data are read once in a process, however many models its methods
build."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace

from dnis_torchrec.data.recipe import DataSplits, Recipe


class SharedRecipe:
    """Fresh recipes of one seed, at any embedding_dim, that share the data of the first one."""

    def __init__(self, call: Callable[[int | None], Recipe]) -> None:
        self._call = call
        self._own: Recipe | None = None
        self._last: tuple[int, Recipe] | None = None

    def __call__(self, embedding_dim: int | None) -> Recipe:
        """A recipe with a fresh model, and with streams that begin at their first epoch."""
        if self._own is None:
            self._own = self._call(None)
        made = self._own
        if embedding_dim is not None:
            if self._last is None or self._last[0] != embedding_dim:
                self._last = embedding_dim, self._call(embedding_dim)
            made = self._last[1]
        return replace(made, model=copy.deepcopy(made.model), data=_from_the_start(self._own.data))


def _from_the_start(data: DataSplits) -> DataSplits:
    """The same samples in streams of their own: a stream counts its epochs, and what one training
    reads is its own."""
    return replace(data, **{part.name: copy.copy(getattr(data, part.name)) for part in fields(data)})
