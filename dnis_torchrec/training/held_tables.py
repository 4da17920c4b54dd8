"""HeldTables: tables whose values obey a rule while they learn, whatever their kernel and
optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from dnis_torchrec.training.checkpoint import PlacedTensor


class HeldTables:
    """A rule for the values of tables, kept around every step of the optimizer; this one holds
    nothing."""

    def before_step_(self) -> None:
        """Prepares gradients; to be called when backward is done and before the optimizer's step."""

    def after_step_(self) -> None:
        """Lets the tables obey again; to be called after the optimizer's step and before the next
        lookup."""

    def tensors(self) -> Mapping[str, PlacedTensor]:
        """State beside the model's, live, as `TrainingState` and `save_checkpoint` take it. Local."""
        return {}

    def finish_load_(self) -> None:
        """Goes on from `tensors` that were written from outside, as by a checkpoint. Local."""


class HoldingOptimizer(OptimizerWrapper):
    """An optimizer after whose steps tables obey their rule; in all else the optimizer that it is
    given."""

    def __init__(self, optimizer: KeyedOptimizer, held: HeldTables) -> None:
        super().__init__(optimizer)
        self._held = held

    def step(self, closure: Any = None) -> None:
        """Steps, and lets the tables obey; those of fused kernels were stepped in the backward
        pass."""
        self._held.before_step_()
        super().step(closure)
        self._held.after_step_()
