r"""Learnt scales: held-out samples teach what codes stand for, in a few steps of soft selection;
weights stay."""

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
    """What some held-out batches teach the scales of all columns to be multiplied by, a step at a
    time."""

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
        self.gains = {
            name: torch.ones(bits.shape, dtype=torch.float64) for name, bits in self._coded.items()
        }

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
            gradient, bend = (
                part[name].double().cpu() for part in (found.gradient, found.curvature)
            )
            gain *= torch.where(self._coded[name], 1 - alpha_step(gradient, bend, self._noise), 1.0)
        self._in_codes.multiply_(self.gains)


def alpha_step(gradient: Tensor, curvature: Tensor, noise: float) -> Tensor:
    """How far alpha goes down in a step, see the top of this module."""
    is_more_than_chance = gradient.square() > noise * curvature
    moves = is_more_than_chance & (curvature > 0)
    square, bend = torch.where(moves, gradient.square(), 1.0), torch.where(moves, curvature, 1.0)
    step = NEWTON_SHARE * gradient / bend * (1 - noise * bend / square)
    return torch.where(moves, step.clamp(-LONGEST_ALPHA_STEP, LONGEST_ALPHA_STEP), 0.0)


def with_gains(scheme: MixedDimensionScheme, gains: Mapping[str, Tensor]) -> MixedDimensionScheme:
    """The scheme with its scales multiplied."""
    tables = {
        name: table.with_codes(table.codes.with_gain(gains[name].float()))
        for name, table in scheme.tables.items()
    }
    return MixedDimensionScheme(tables)


def mean_gains(learners: Sequence[ScaleLearner]) -> dict[str, Tensor]:
    """What learners of the same scheme say in the mean, table -> ``(S, D)``."""
    return {
        name: torch.stack([own.gains[name] for own in learners]).mean(0)
        for name in learners[0].gains
    }


def gains_over(scheme: MixedDimensionScheme, learnt: MixedDimensionScheme) -> dict[str, Tensor]:
    """What scales were multiplied by, table -> ``(S, D)``: bfloat16s over one another."""
    return {
        name: table.codes.scale / scheme.tables[name].codes.scale
        for name, table in learnt.tables.items()
    }
