"""Pruning: which values of the merged tables are retained, exactly for a requested size, on one
rank or many."""

from dnis_torchrec.search.pruning.elements import (
    affordable_values,
    check_form_of_elements,
    keep_largest_,
    num_elements,
)
from dnis_torchrec.search.pruning.prune import drop_zeros_, prune
from dnis_torchrec.training.rounded import RetainedMask

__all__ = [
    "RetainedMask",
    "affordable_values",
    "check_form_of_elements",
    "drop_zeros_",
    "keep_largest_",
    "num_elements",
    "prune",
]
