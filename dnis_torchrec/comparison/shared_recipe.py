"""One recipe of a comparison: its data are read once in a process, however many models its methods build."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace

from dnis_torchrec.data.recipe import DataSplits, Recipe


class SharedRecipe:
    """Fresh recipes of one seed, at any embedding_dim, that share the data of the first one.

    A recipe function reads its data whenever it is called. Methods want a fresh model for every training, and models of
    other embedding_dims: the function is called once for its own embedding_dim, whose model is then copied, and
    otherwise when the embedding_dim changes, for the model alone.

    Args:
        call: embedding_dim (None for the recipe's own) -> recipe of this seed.

    Example:
        >>> from examples.synthetic import demo
        >>> build = SharedRecipe(lambda dim: demo(None, seed=0, embedding_dim=dim))
        >>> first, second, narrow = build(None), build(None), build(4)
        >>> first.model is second.model, narrow.data.train.rows is first.data.train.rows
        (False, True)
    """

    def __init__(self, call: Callable[[int | None], Recipe]) -> None:
        self._call = call
        self._own: Recipe | None = None
        self._last: tuple[int, Recipe] | None = None

    def __call__(self, embedding_dim: int | None) -> Recipe:
        """A recipe with a fresh model, and with streams that begin at their first epoch.

        Args:
            embedding_dim: D of the tables; None for the recipe's own.
        """
        if self._own is None:
            self._own = self._call(None)
        made = self._own
        if embedding_dim is not None:
            if self._last is None or self._last[0] != embedding_dim:
                self._last = embedding_dim, self._call(embedding_dim)
            made = self._last[1]
        return replace(made, model=copy.deepcopy(made.model), data=_from_the_start(self._own.data))


def _from_the_start(data: DataSplits) -> DataSplits:
    """The same samples in streams of their own: a stream counts its epochs, and what one training reads is its own."""
    return replace(data, **{part.name: copy.copy(getattr(data, part.name)) for part in fields(data)})
