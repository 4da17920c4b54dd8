"""Settings of searching, in a module without torch: the command line builds its options
from it."""

import math
from dataclasses import dataclass
from typing import Annotated

from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.checks import check

USUAL_EPOCHS = 10
"""Epochs of plain training that weights are taken to have behind them where nobody knows."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The settings of a search: all of them. The defaults are for every recipe."""

    num_blocks: Annotated[int, "Blocks of every table; a table of fewer rows has one for each."] = (
        NUM_BLOCKS
    )
    epochs: Annotated[int, "Epochs at most of the plain training that a search begins with."] = 60
    patience: Annotated[int, "Epochs without a better selection loss before training stops."] = 3
    ramp_share: Annotated[
        float, "Length of the ramp, in which columns die, over that of the plain training."
    ] = 0.3

    def __post_init__(self) -> None:
        for name in ("num_blocks", "epochs", "patience"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        share = self.ramp_share
        check(math.isfinite(share) and share > 0, "ramp_share", "a finite number above 0", share)


def check_compression(compression: float, place: str = "compression") -> None:
    """Checks a size before anything is imported or read for it."""
    is_fit = math.isfinite(compression) and compression > 1
    check(is_fit, place, "a finite number above 1", compression)
