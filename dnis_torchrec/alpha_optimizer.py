"""AlphaOptimizer: the upper level's step: normalise, average, press, step, clip.

Pressure goes beyond the paper. NOTE[DIFF]: the paper lets validation loss alone move alpha, and prunes what happens to
be small; nothing drives alpha to zero, and from compression 4 on the result is worse than a smaller table. Here a
number lambda is added to the normalised gradient and adapts so that the mean of alpha follows a straight line down
towards the requested size (the ramp); it is zero where validation loss alone takes alpha down faster. Then exactly as
many columns as the budget allows are kept, lambda fades, and both levels train on (the release).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocking import RowBlocks
from dnis_torchrec.budget import Budget, Size
from dnis_torchrec.checks import check
from dnis_torchrec.soft_selection import Alpha, normalise_gradient, step_and_clip_

ADAPTATION = 0.02
"""Share of itself by which lambda grows or shrinks in one upper step."""

FIRST_PRESSURE = 0.1
"""lambda at the first upper step, and what its change is at least a share of, so that it can leave zero again."""

MEAN_SHARE = 0.6
"""The mean of alpha is led to this share of the requested density: by then about that density of columns is alive."""

SWING = 88.0
"""How many times alpha could cross the way of the ramp, if its normalised gradient always pointed one way."""

MAX_LEARNING_RATE = 0.03
"""Bounds the step of short ramps: above it alpha follows noise (measured on MovieLens-1M: docs/design.md)."""

RELEASE_DECAY = 3.0
"""The learning rate of alpha falls by e^-3 in a release as long as the ramp."""


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """Leads the search to a requested size; nobody has to tune lambda.

    Attributes:
        size: what the tables have to come down to.
        ramp_steps: upper steps in which the mean of alpha is led from 1 to the size.
        snap_below: alphas that fall below are 0 for good (and alphas that survive the ramp stay above).

    Example:
        >>> Pressure(size=Size(compression_ratio=4), ramp_steps=2000).snap_below
        0.05
    """

    size: Size
    ramp_steps: int
    snap_below: float = 0.05

    def __post_init__(self) -> None:
        check(self.ramp_steps >= 1, "ramp_steps", "expected at least 1", self.ramp_steps)
        check(0 < self.snap_below < 1, "snap_below", "expected a number between 0 and 1", self.snap_below)


class AlphaOptimizer:
    """Steps alpha on validation gradients. Local and deterministic: equal gradients give equal alphas on all ranks.

    Args:
        alpha: what is stepped.
        blocks: blocks of the tables that alpha multiplies.
        pressure: where to go, or None for the paper's search without pressure.
        learning_rate: step length; None takes 0.01 (paper) without pressure, and with it SWING times the slope of the
            ramp, at most MAX_LEARNING_RATE.
        averaging: share of the old average in the running mean of normalised gradients. Under noisy gradients every
            alpha would random-walk at full speed otherwise.
    """

    def __init__(
        self,
        alpha: Alpha,
        blocks: RowBlocks,
        *,
        pressure: Pressure | None = None,
        learning_rate: float | None = None,
        averaging: float = 0.98,
    ) -> None:
        check(0 <= averaging < 1, "averaging", "expected a number in [0, 1)", averaging)
        check(learning_rate is None or learning_rate > 0, "learning_rate", "expected a number above 0", learning_rate)
        self._alpha, self._blocks, self._pressure, self._averaging = alpha, blocks, pressure, averaging
        budget = None if pressure is None else Budget.of(pressure.size, blocks)
        seen = {dim: blocks.per_alpha_row(dim, blocks.seen_rows) for dim in alpha.dims}
        self._costs = seen if budget is None else budget.cost_per_alpha_row(blocks)
        self._target = 1.0 if budget is None else budget.share(blocks)
        self._amount = float("inf") if budget is None else budget.amount
        self._averages = {dim: torch.zeros_like(alpha.of(dim)) for dim in alpha.dims}
        self._floors = {dim: torch.zeros_like(alpha.of(dim)) for dim in alpha.dims}
        self._dead = {dim: torch.zeros_like(alpha.of(dim), dtype=torch.bool) for dim in alpha.dims}
        self.num_steps = 0
        self.last_density = 1.0
        self._is_released = False
        self.pressure_now = 0.0
        self.learning_rate = 0.01 if learning_rate is None else learning_rate
        if pressure is not None:
            self.pressure_now = FIRST_PRESSURE
            slope = (1 - MEAN_SHARE * self._target) / pressure.ramp_steps
            self.learning_rate = learning_rate or min(SWING * slope, MAX_LEARNING_RATE)

    @property
    def is_released(self) -> bool:
        """True once the ramp is over and the columns to keep are settled."""
        return self._is_released

    def density(self) -> float:
        """Share of the tables' cost whose alpha is not zero."""
        return self._alpha.density(self._costs)

    def mean(self) -> float:
        """Mean of alpha, weighted by cost."""
        return self._alpha.mean(self._costs)

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor], hits: Mapping[int, Tensor]) -> None:
        """One upper step.

        Args:
            gradients: embedding_dim -> ``(A, D)``, averaged over ranks.
            hits: embedding_dim -> ``(A,)`` bool; rows of alpha without a hit on any rank do not move.
        """
        for dim in self._alpha.dims:
            hit = hits[dim].unsqueeze(1)
            fresh = normalise_gradient(gradients[dim], hits[dim])
            average = self._averages[dim]
            average.copy_(torch.where(hit, torch.lerp(fresh, average, self._averaging), average))
            direction = torch.where(hit, average + self.pressure_now, torch.zeros_like(average))
            alpha = self._alpha.of(dim)
            step_and_clip_(alpha, direction, self.learning_rate, floor=self._floors[dim])
            pushes_out = ((alpha >= 1) & (average < 0)) | ((alpha <= self._floors[dim]) & (average > 0))
            average.masked_fill_(pushes_out, 0.0)
            alpha.masked_fill_(self._dead[dim], 0.0)
        self.num_steps += 1
        self.last_density = self.density()
        if self._pressure is not None:
            self._follow_ramp(self._pressure)

    def _follow_ramp(self, pressure: Pressure) -> None:
        if self._is_released:
            self.pressure_now *= 1 - ADAPTATION
            self.learning_rate *= 1 - RELEASE_DECAY / pressure.ramp_steps
            return
        wanted = 1 - (1 - MEAN_SHARE * self._target) * self.num_steps / pressure.ramp_steps
        change = ADAPTATION * max(self.pressure_now, FIRST_PRESSURE)
        self.pressure_now = max(0.0, self.pressure_now + (change if self.mean() > wanted else -change))
        falling = {dim: self._alpha.of(dim) < pressure.snap_below for dim in self._alpha.dims}
        left = self._alpha.weighted({dim: (~falling[dim]).double() for dim in falling}, self._costs)
        if left <= self._target or self.num_steps >= pressure.ramp_steps:
            self._settle(pressure.snap_below)
            return
        for dim in self._alpha.dims:
            self._dead[dim] |= falling[dim]
            self._alpha.of(dim).masked_fill_(self._dead[dim], 0.0)

    def _settle(self, floor: float) -> None:
        """Keeps the columns of largest alpha until the budget is reached, and lets none of them die any more.

        The last one may exceed the budget by a part of its cost, which pruning takes off after merging: there, columns
        are those of one table and so much finer.
        """
        dims = self._alpha.dims
        scores = torch.cat([self._alpha.of(dim).masked_fill(self._dead[dim], -1.0).cpu().flatten() for dim in dims])
        costs = torch.cat([self._costs[dim].repeat_interleave(dim) for dim in dims])
        order = torch.argsort(scores, descending=True, stable=True)
        spent_before = costs[order].cumsum(0) - costs[order]
        kept = torch.zeros(scores.numel(), dtype=torch.bool)
        kept[order] = (spent_before < self._amount * (1 - 1e-9)) & (scores[order] >= 0)
        for dim, mask in zip(dims, kept.split([self._alpha.of(dim).numel() for dim in dims]), strict=True):
            alpha = self._alpha.of(dim)
            alive = mask.view(alpha.shape).to(alpha.device)
            self._dead[dim] = ~alive
            self._floors[dim] = alive.to(alpha.dtype) * floor
            alpha.masked_fill_(~alive, 0.0).clamp_(min=self._floors[dim])
        self._is_released = True
        self.last_density = self.density()

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a continued search needs, as tensors."""
        state = {
            "num_steps": torch.tensor(self.num_steps),
            "is_released": torch.tensor(self._is_released),
            "learning_rate": torch.tensor(self.learning_rate, dtype=torch.float64),
            "pressure_now": torch.tensor(self.pressure_now, dtype=torch.float64),
        }
        for dim in self._alpha.dims:
            state[f"average/{dim}"] = self._averages[dim]
            state[f"floor/{dim}"] = self._floors[dim]
            state[f"dead/{dim}"] = self._dead[dim]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        self.num_steps, self._is_released = int(state["num_steps"]), bool(state["is_released"])
        self.learning_rate, self.pressure_now = float(state["learning_rate"]), float(state["pressure_now"])
        for dim in self._alpha.dims:
            self._averages[dim].copy_(state[f"average/{dim}"])
            self._floors[dim].copy_(state[f"floor/{dim}"])
            self._dead[dim].copy_(state[f"dead/{dim}"])
