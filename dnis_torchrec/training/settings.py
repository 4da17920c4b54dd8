"""Settings of a plain training, in a module without torch: the command line builds its options from
it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from dnis_torchrec.checks import check


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings by which the plain model is trained."""

    seed: Annotated[int, "Of weights, splits and batch order."] = 0
    embedding_dim: Annotated[int | None, "D of the tables; the recipe's own if not given."] = None
    embedding_l2: Annotated[
        float | None, "L2 penalty on looked-up embeddings; the recipe's own if not given."
    ] = None
    epochs: Annotated[int, "Epochs at most."] = 60
    patience: Annotated[
        int, "Epochs without a better selection loss before the training stops."
    ] = 3

    def __post_init__(self) -> None:
        check(self.seed >= 0, "seed", "an integer >= 0", self.seed)
        dim, l2, remedy = self.embedding_dim, self.embedding_l2, "leave it out for the recipe's"
        check(dim is None or dim >= 1, "embedding_dim", "an integer >= 1", dim, remedy)
        is_fit = l2 is None or (math.isfinite(l2) and l2 >= 0)
        check(is_fit, "embedding_l2", "a finite number >= 0", l2, remedy)
        check(self.epochs >= 1, "epochs", "an integer >= 1", self.epochs)
        check(self.patience >= 1, "patience", "an integer >= 1", self.patience)
