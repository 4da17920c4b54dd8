"""Settings of searching and pruning, in a module without torch: the command line builds its options from it.

A field whose annotation has a text is an option of the command line, and the text is its help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dnis_torchrec.blocks.settings import SCOPES, STRATEGIES, CountLimits
from dnis_torchrec.checks import check

STRUCTURES = ("element", "block")
CUTS = tuple(name for name in STRATEGIES if name != "explicit")
"""Strategies of a search: one that is told its boundaries is for those who call `blocks_from_counts` themselves."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The settings of a search that the command line offers; `SearchConfig` has all others, too."""

    num_blocks: Annotated[int, "Blocks per table set; the recipe's own if not given."] = 10
    scope: Annotated[
        str, "`global`: tables of equal embedding_dim share blocks; `table`: each its own; the recipe's if not given."
    ] = "global"
    strategy: Annotated[str, "How rows are cut: equal_rows (if not given), equal_mass, decades."] = "equal_rows"
    exact_count_rows: Annotated[
        int, "Larger tables are counted in bounded memory, with an error that is said; 2^24 by default."
    ] = CountLimits.exact_rows
    warm_up_epochs: Annotated[int, "Epochs before alpha moves."] = 2
    ramp_epochs: Annotated[int, "Epochs in which alpha is led to the size."] = 12
    release_epochs: Annotated[int, "Epochs at most after the ramp."] = 14
    rotate: Annotated[bool, "Turn tables into their principal axes first, where the model can."] = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "warm_up_epochs", "ramp_epochs", "release_epochs"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        check(self.scope in SCOPES, "scope", f"one of {SCOPES}", repr(self.scope))
        check(self.strategy in CUTS, "strategy", f"one of {CUTS}", repr(self.strategy))
        CountLimits(exact_rows=self.exact_count_rows)


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """Settings by which a finished run is pruned further; the first three are those of `prune`."""

    threshold: Annotated[float | None, "Instead of a size: drop magnitudes up to this."] = None
    structure: Annotated[str, "`block`: whole columns of blocks; `element`: single values."] = "block"
    per_table: Annotated[bool, "Bring every table to the same ratio, instead of one budget for all."] = False
    fine_tune_epochs: Annotated[int, "Epochs at most of masked fine-tuning; 0 for none."] = 10

    def __post_init__(self) -> None:
        check_pruning(structure=self.structure, threshold=self.threshold)
        remedy = "say 0 for no fine-tuning"
        check(self.fine_tune_epochs >= 0, "fine_tune_epochs", "an integer >= 0", self.fine_tune_epochs, remedy)


def check_pruning(*, structure: str, threshold: float | None) -> None:
    """Checks arguments of `prune` that need no model for it.

    Args:
        structure: see `prune`.
        threshold: see `prune`.

    Raises:
        ValueError: for an unknown structure, or a threshold that is negative or NaN.
    """
    check(structure in STRUCTURES, "structure", f"one of {STRUCTURES}", repr(structure))
    check(threshold is None or threshold >= 0, "threshold", "a number >= 0", threshold)
