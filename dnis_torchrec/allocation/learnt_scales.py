r"""Learnt scales: held-out samples teach what codes stand for, in a few steps of soft selection; weights stay.

Codes of a column (block s, column c) stand for multiples of its scale. To multiply the scale is to choose alpha, as in
the paper's upper level: on samples that weights were not trained on, by the gradient of the loss. `curvature` gives it
for all columns at once, and with it how far to go:

.. math:: \alpha_{sc} = 1 - \eta \, \frac{G_{sc}}{H_{sc}} \left(1 - \frac{\sigma^2_{sc}}{G_{sc}^2}\right)_+,
    \quad \sigma^2_{sc} = \frac{\varphi H_{sc}}{N}, \quad \varphi = \frac{\sum_n L_n'^2}{\sum_n L_n''}

A Newton step of each column by itself, shortened by eta because columns move predictions together, and by what the
gradient may be by chance (James and Stein, 1961): G is a mean over N samples, whose variance is that of L' times what a
column does; for the logistic loss phi is 1, for squared error twice the mean squared residual. A column whose gradient
is no more than chance stays where it is.

NOTE[DIFF]: the paper steps along the normalised gradient, and stays within [0, 1]. Here alpha may be above 1: what is
dropped of two embeddings is missing in their product.

Shapes: N samples, S blocks, D embedding_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dnis_torchrec.allocation.curvature import curvature
from dnis_torchrec.allocation.loss_derivatives import Loss
from dnis_torchrec.allocation.rows_in_codes import RowsInCodes
from dnis_torchrec.blocks.bit_fields import is_coded
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.data.task import Task
from dnis_torchrec.scheme import MixedDimensionScheme

NEWTON_SHARE, LONGEST_ALPHA_STEP = 0.5, 0.2
"""Eta, and how far alpha moves in a step at most."""


class ScaleLearner:
    """What some held-out batches teach the scales of all columns to be multiplied by, a step at a time.

    Distributed: all ranks make it, and step, alike, and have the same gains.

    Args:
        model: as `curvature` takes it.
        in_codes: its rows that batches read.
        scheme: with these codes.
        batches: of this rank.
        blocks: of the codes.
        loss: see `curvature`.
        noise: phi over N; infinite for a loss that does not bend, which teaches nothing.

    Attributes:
        gains: table -> ``(S, D)`` float64; 1 where a column has no codes, and everywhere before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        in_codes: RowsInCodes,
        scheme: MixedDimensionScheme,
        batches: Sequence[Batch],
        blocks: RowBlocks,
        *,
        loss: Loss | Task,
        noise: float,
    ) -> None:
        self._model, self._in_codes, self._batches, self._blocks = model, in_codes, batches, blocks
        self._loss, self._noise = loss, noise
        self._coded = {name: is_coded(table.codes.bits) for name, table in scheme.tables.items()}
        self.gains = {name: torch.ones(bits.shape, dtype=torch.float64) for name, bits in self._coded.items()}

    def step_(self) -> None:
        """Takes a step. Rows hold its gains afterwards. Distributed: that of `curvature`."""
        self._in_codes.multiply_(self.gains)
        if self._noise == math.inf:
            return
        found = curvature(
            self._model,
            self._batches,
            self._blocks,
            loss=self._loss,
            num_samples=None,
            warns=False,
            couplings=False,
        )
        for name, gain in self.gains.items():
            gradient, bend = (part[name].double().cpu() for part in (found.gradient, found.curvature))
            gain *= torch.where(self._coded[name], 1 - alpha_step(gradient, bend, self._noise), 1.0)
        self._in_codes.multiply_(self.gains)


def alpha_step(gradient: Tensor, curvature: Tensor, noise: float) -> Tensor:
    """How far alpha goes down in a step, see the top of this module.

    Args:
        gradient: G, any shape.
        curvature: H, at least 0.
        noise: phi over N.

    Returns:
        Of the same shape.

    Example:
        >>> alpha_step(torch.tensor([0.2, 0.01, -9.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]), 1e-3).tolist()
        [0.09750000387430191, 0.0, -0.20000000298023224, 0.0]
    """
    is_more_than_chance = gradient.square() > noise * curvature
    moves = is_more_than_chance & (curvature > 0)
    square, bend = torch.where(moves, gradient.square(), 1.0), torch.where(moves, curvature, 1.0)
    step = NEWTON_SHARE * gradient / bend * (1 - noise * bend / square)
    return torch.where(moves, step.clamp(-LONGEST_ALPHA_STEP, LONGEST_ALPHA_STEP), 0.0)


def with_gains(scheme: MixedDimensionScheme, gains: Mapping[str, Tensor]) -> MixedDimensionScheme:
    """The scheme with its scales multiplied.

    Args:
        scheme: with codes.
        gains: table -> ``(S, D)``, see `ScaleLearner`.
    """
    tables = {
        name: table.with_codes(table.codes.with_gain(gains[name].float())) for name, table in scheme.tables.items()
    }
    return MixedDimensionScheme(tables)


def mean_gains(learners: Sequence[ScaleLearner]) -> dict[str, Tensor]:
    """What learners of the same scheme say in the mean, table -> ``(S, D)``.

    Args:
        learners: at least one.
    """
    return {name: torch.stack([own.gains[name] for own in learners]).mean(0) for name in learners[0].gains}


def gains_over(scheme: MixedDimensionScheme, learnt: MixedDimensionScheme) -> dict[str, Tensor]:
    """What scales were multiplied by, table -> ``(S, D)``: bfloat16s over one another.

    Args:
        scheme: before.
        learnt: after `with_gains`.
    """
    return {name: table.codes.scale / scheme.tables[name].codes.scale for name, table in learnt.tables.items()}
