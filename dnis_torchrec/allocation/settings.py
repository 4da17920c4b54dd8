"""Settings of compressing a trained model, without torch: a command line reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.checks import check

ENOUGH_SAMPLES = 1 << 14
"""Samples that columns are measured on: the error of the sum of their worth is about a hundredth
then, and four times as many give tables that are no better."""


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How a trained model is measured, and how far it may be compressed where that is no size."""

    max_loss: Annotated[
        float | None,
        "Instead of --compression: predicted increase of the loss, at most, in the fewest bytes.",
    ] = None
    num_blocks: Annotated[
        int, "Blocks of every table; fewer where one would have less than 64 rows."
    ] = NUM_BLOCKS
    num_samples: Annotated[int, "Training samples that columns are measured on."] = ENOUGH_SAMPLES
    seed: Annotated[int | None, "Of a recipe's splits, 0 if not given; a run has its own."] = None

    def __post_init__(self) -> None:
        loss = self.max_loss
        is_positive = loss is None or (math.isfinite(loss) and loss > 0)
        check(is_positive, "max_loss", "a finite number above 0", loss)
        check(self.num_blocks >= 1, "num_blocks", "an integer >= 1", self.num_blocks)
        check(self.num_samples >= 1, "num_samples", "an integer >= 1", self.num_samples)
        check(self.seed is None or self.seed >= 0, "seed", "an integer >= 0", self.seed)
