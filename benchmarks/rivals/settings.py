"""Settings of a comparison, in a module without torch: the command line builds its options from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from dnis_torchrec.checks import check

COMPARED_PRECISIONS = ("fp32", "int8", "int4")
"""Precisions in which rivals are served unless others are asked for: those that a user has for
nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainingRules:
    """Limits on the training of every method; a search begins with such a training."""

    patience: Annotated[int, "Epochs without a better selection loss before a training stops."] = 3
    max_epochs: Annotated[int, "Epochs of one training at most."] = 60
    trials: Annotated[int | None, "Of methods that need several; each method's own number if not given."] = None

    def __post_init__(self) -> None:
        for place, value in training_rules(vars(self)).items():
            check(value is None or value >= 1, place, "at least 1", value)


@dataclass(frozen=True, kw_only=True)
class CompareSettings(TrainingRules):
    """Settings by which a comparison is run."""

    jobs: Annotated[
        int | None,
        "Processes at a time, one for each cell and, when no cell waits, more for those that have trials left;"
        " as many as cores (or GPUs) if not given. Of several ranks, each runs so many.",
    ] = None
    artifacts: Annotated[bool, "Export every cell that runs, to OUT/cells/CELL/artifact."] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.jobs is None or self.jobs >= 1, "jobs", "at least 1", self.jobs)


def training_rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `TrainingRules` among others."""
    return {part.name: rules[part.name] for part in fields(TrainingRules)}
