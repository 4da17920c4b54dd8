r"""Output bias: what a model adds to its one output, and the number that keeps its mean derivative
where it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.loss_derivatives import Loss
from dnis_torchrec.allocation.predictions import predictions_of
from dnis_torchrec.data.task import Task
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection.table_shards import dense_state

ADDED, EVEN = 1.0, 1e-3
"""What is added to a number to see what it does, and how far outputs may move unevenly, over how
far they move."""


@dataclass(frozen=True, kw_only=True)
class OutputBias:
    """A parameter, or a buffer, of one number that adds the same to the output of every sample."""

    name: str
    gain: float

    @torch.no_grad()
    def shift_(self, model: nn.Module, shift: float) -> None:
        """Adds to the output. Local, the same on every rank."""
        self._number(model).add_(shift / self.gain)

    @contextmanager
    def shifted(self, model: nn.Module, shift: float) -> Iterator[None]:
        """The same within a block; afterwards the number is what it was, bit for bit."""
        number = self._number(model)
        own = number.clone()
        try:
            self.shift_(model, shift)
            yield
        finally:
            with torch.no_grad():
                number.copy_(own)

    def _number(self, model: nn.Module) -> Tensor:
        return dense_state(model)[self.name]  # shares its memory


def output_bias(
    model: nn.Module, batch: Batch, loss: Loss | Task, ranks: Ranks
) -> OutputBias | None:
    """Finds a model's output bias by adding to each of its single numbers, and looking at a batch."""
    before = predictions_of(model, batch, loss, "batch 0", ranks).values
    if before.shape[1] != 1:
        return None
    for name, value in dense_state(model).items():
        if value.numel() != 1 or not value.is_floating_point():
            continue
        with OutputBias(name=name, gain=1.0).shifted(model, ADDED):
            after = predictions_of(model, batch, loss, "batch 0", ranks).values
        moved = (after - before).flatten().cpu()
        highest, lowest = ranks.max_(torch.stack([moved.max(), -moved.min()])).tolist()
        if highest + lowest <= EVEN * abs(highest) and highest:
            total, count = ranks.sum_(
                torch.tensor([float(moved.sum()), len(moved)], dtype=torch.float64)
            ).tolist()
            return OutputBias(name=name, gain=total / count / ADDED)
    return None
