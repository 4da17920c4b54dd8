r"""Output bias: what a model adds to its one output, and the number that keeps its mean derivative where it was.

Tables in few bits move predictions, and not by 0 in the mean: what is dropped of two embeddings is missing in their
product. A model of clicks then predicts too few of them. Its output bias makes that good; it goes up by the b that
solves

.. math:: \sum_n L_n'(\hat z_n + b) = \sum_n L_n'(z_n)

over the samples n of a `LossSample`. Of squared error that keeps the mean prediction, of binary cross entropy the mean
of the probabilities: as many clicks are predicted as before.

Shapes: B batch.
"""

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
from dnis_torchrec.soft_selection.table_shards import dense_state

ADDED, EVEN = 1.0, 1e-3
"""What is added to a number to see what it does, and how far outputs may move unevenly, over how far they move."""


@dataclass(frozen=True, kw_only=True)
class OutputBias:
    """A parameter, or a buffer, of one number that adds the same to the output of every sample.

    Attributes:
        name: in the plain model's state_dict.
        gain: how far the output moves when it goes up by 1.
    """

    name: str
    gain: float

    @torch.no_grad()
    def shift_(self, model: nn.Module, shift: float) -> None:
        """Adds to the output. Local, the same on every rank.

        Args:
            model: the one it was found in, or a copy.
            shift: by how much.
        """
        self._number(model).add_(shift / self.gain)

    @contextmanager
    def shifted(self, model: nn.Module, shift: float) -> Iterator[None]:
        """The same within a block; afterwards the number is what it was, bit for bit.

        Args:
            model: see `shift_`.
            shift: by how much.
        """
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


def output_bias(model: nn.Module, batch: Batch, loss: Loss | Task, ranks: Ranks) -> OutputBias | None:
    """Finds a model's output bias by adding to each of its single numbers, and looking at a batch.

    Distributed: a forward pass of the batch and two all_reduces of two numbers for each of them.

    Args:
        model: trained, sharded or not; it is as it was afterwards.
        batch: of this rank.
        loss: see `curvature`.
        ranks: that hold the model.

    Returns:
        The first that there is. None for a model of several outputs, or without one.
    """
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
            total, count = ranks.sum_(torch.tensor([float(moved.sum()), len(moved)], dtype=torch.float64)).tolist()
            return OutputBias(name=name, gain=total / count / ADDED)
    return None
