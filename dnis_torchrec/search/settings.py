"""Settings of searching and pruning, in a module without torch: the command line builds its options
from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from dnis_torchrec.blocks import NUM_BLOCKS
from dnis_torchrec.blocks.settings import CountLimits
from dnis_torchrec.checks import check

USUAL_EPOCHS = 10
"""Epochs of plain training that weights are taken to have behind them where nobody knows."""
STRUCTURES = ("element", "block")


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
    exact_count_rows: Annotated[
        int,
        "Larger tables are counted in bounded memory, with an error that is said; 2^24 by default.",
    ] = CountLimits.exact_rows

    def __post_init__(self) -> None:
        for name in ("num_blocks", "epochs", "patience"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        share = self.ramp_share
        check(math.isfinite(share) and share > 0, "ramp_share", "a finite number above 0", share)
        CountLimits(exact_rows=self.exact_count_rows)


def check_compression(compression: float, place: str = "compression") -> None:
    """Checks a size before anything is imported or read for it."""
    is_fit = math.isfinite(compression) and compression > 1
    check(is_fit, place, "a finite number above 1", compression)


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """Settings by which a finished run is pruned further; the first three are those of `prune`."""

    threshold: Annotated[float | None, "Instead of a size: drop magnitudes up to this."] = None
    structure: Annotated[str, "`block`: whole columns of blocks; `element`: single values."] = (
        "block"
    )
    per_table: Annotated[
        bool, "Bring every table to the same ratio, instead of one budget for all."
    ] = False
    fine_tune_epochs: Annotated[int, "Epochs at most of masked fine-tuning; 0 for none."] = 10

    def __post_init__(self) -> None:
        check_pruning(structure=self.structure, threshold=self.threshold)
        remedy = "say 0 for no fine-tuning"
        check(
            self.fine_tune_epochs >= 0,
            "fine_tune_epochs",
            "an integer >= 0",
            self.fine_tune_epochs,
            remedy,
        )


def check_pruning(*, structure: str, threshold: float | None) -> None:
    """Checks arguments of `prune` that need no model for it."""
    check(structure in STRUCTURES, "structure", f"one of {STRUCTURES}", repr(structure))
    check(threshold is None or threshold >= 0, "threshold", "a number >= 0", threshold)
