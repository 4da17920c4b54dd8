"""AlphaOptimizer: the upper level's step: normalise, average, press, step, clip.

Pressure goes beyond the paper. NOTE[DIFF]: the paper lets validation loss alone move alpha, and prunes what happens to
be small; nothing drives alpha to zero, and from compression 4 on the result is worse than a smaller table. Here a
number lambda is added to the normalised gradient and adapts so that the mean of alpha falls towards the requested size
(the ramp). On the way columns die: at least as many as a line of their own asks for, so that the weights have time to
adapt to every loss and the ramp does not end in a cliff. Then exactly as many columns as the budget allows are kept,
lambda fades, and both levels train on (the release).

Which columns die first is one of three orders (`Pressure.order`), and lambda follows from it: `column_order`.

Both lines fall geometrically: at share p of the ramp, the mean to :math:`(0.6 t)^p` and the living columns to
:math:`t^p` of the whole, where t is the requested density. Each step takes the same share of what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.search.budget import Budget, Size
from dnis_torchrec.search.column_order import (
    ADAPTATION,
    FIRST_PRESSURE,
    ORDERS,
    AlphaOrder,
    ColumnOrder,
    FreeImportanceOrder,
    ImportanceOrder,
    RampState,
)
from dnis_torchrec.soft_selection.alpha import Alpha, normalise_gradient, step_and_clip_

MEAN_SHARE = 0.6
"""The mean of alpha is led to this share of the requested density: by then about that density of columns is alive."""

FLOOR = 0.005
"""Under pressure a living alpha goes no lower: columns die in their order, not because alphas sink together."""

FADE_SHARE = 0.15
"""Share of the ramp in which a column fades out before it dies."""

FADED_TO = 0.02
"""Share of a column's alpha that is left when it dies."""

SWING = 88.0
"""Number of times that alpha could cross the way of the ramp, if its normalised gradient always pointed one way."""

MAX_LEARNING_RATE = 0.03
"""Bounds the step of short ramps: above it alpha follows noise (measured on MovieLens-1M: docs/design.md)."""

RELEASE_DECAY = 3.0
"""The learning rate of alpha falls by e^-3 in a release as long as the ramp."""

MAX_DECAY = 0.5
"""Share of it that one upper step takes at most, so that a ramp of a few steps has a release behind it."""

LEAST_RATE = torch.finfo(torch.float32).tiny
"""The rate falls no lower in a release without end: alpha stands still by then, and a rate of 0 is none."""


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """Leads the search to a requested size; nobody has to tune lambda.

    Attributes:
        size: size that the tables have to come down to.
        ramp_steps: upper steps in which the mean of alpha is led from 1 to the size.
        column_sharing: weight of what a column is worth to all blocks beside what it is worth to its own, in the order
            in which columns die. 0: every block loses the columns it needs least. The more, the more the blocks keep
            the same ones, which models want that take dot products between features and whose tables cannot be turned.
        order: the order in which columns die: ``"alpha"``, ``"importance"`` or ``"free_importance"``, see
            `column_order`.

    Example:
        >>> Pressure(size=Size(compression=4), ramp_steps=2000).ramp_steps
        2000
    """

    size: Size
    ramp_steps: int
    column_sharing: float = 0.0
    order: str = "alpha"

    def __post_init__(self) -> None:
        check(self.ramp_steps >= 1, "ramp_steps", "at least 1", self.ramp_steps)
        check(self.column_sharing >= 0, "column_sharing", "a number >= 0", self.column_sharing)
        check_known("order", self.order, ORDERS)


class AlphaOptimizer:
    """Steps alpha on validation gradients. Local and deterministic: equal gradients give equal alphas on all ranks.

    Args:
        alpha: the alpha that is stepped.
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
        check(0 <= averaging < 1, "averaging", "a number in [0, 1)", averaging)
        check(learning_rate is None or learning_rate > 0, "learning_rate", "a number above 0", learning_rate)
        self._alpha, self._blocks, self._pressure, self._averaging = alpha, blocks, pressure, averaging
        budget = None if pressure is None else Budget.of(pressure.size, blocks, by_alpha_row=True)
        seen = {dim: blocks.per_alpha_row(dim, blocks.seen_rows) for dim in alpha.dims}
        self._costs = seen if budget is None else budget.cost_per_alpha_row(blocks)
        self._target = 1.0 if budget is None else budget.share(blocks)
        self._amount = float("inf") if budget is None else budget.amount
        self._column_costs = torch.cat([self._costs[dim].repeat_interleave(dim) for dim in alpha.dims])
        self._total = float(self._column_costs.sum())
        is_seen = torch.cat([(seen[dim] > 0).repeat_interleave(dim) for dim in alpha.dims])
        self._is_within_reach = is_seen & (self._column_costs <= self._amount * (1 + 1e-9))
        self._averages = {dim: torch.zeros_like(alpha.of(dim)) for dim in alpha.dims}
        self._floor = 0.0 if pressure is None else FLOOR
        self._dead = {dim: torch.zeros_like(alpha.of(dim), dtype=torch.bool) for dim in alpha.dims}
        self._order = _order_of(pressure, alpha, self._costs)
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
        """True once the ramp is over and the columns to keep are settled; always without pressure."""
        return self._pressure is None or self._is_released

    def scale_columns(self, scales: Mapping[int, Tensor]) -> None:
        """Takes what columns carry, which the order of alpha multiplies alpha by.

        Args:
            scales: see `ColumnOrder.scale_columns`.
        """
        self._order.scale_columns(scales)

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
        self._order.observe(gradients)
        for dim in self._alpha.dims:
            hit = hits[dim].unsqueeze(1)
            fresh = normalise_gradient(gradients[dim], hits[dim])
            average = self._averages[dim]
            average.copy_(torch.where(hit, torch.lerp(fresh, average, self._averaging), average))
            direction = torch.where(hit, average + self.pressure_now, torch.zeros_like(average))
            alpha = self._alpha.of(dim)
            step_and_clip_(alpha, direction, self.learning_rate, floor=self._floor)
            pushes_out = ((alpha >= 1) & (average < 0)) | ((alpha <= self._floor) & (average > 0))
            average.masked_fill_(pushes_out, 0.0)
            alpha.masked_fill_(self._dead[dim], 0.0)
        self.num_steps += 1
        if self._pressure is not None:
            self._follow_ramp(self._pressure)
        self.last_density = self.density()

    def _follow_ramp(self, pressure: Pressure) -> None:
        if self.is_released:
            self.pressure_now *= 1 - ADAPTATION
            decay = min(RELEASE_DECAY / pressure.ramp_steps, MAX_DECAY)
            self.learning_rate = max(self.learning_rate * (1 - decay), LEAST_RATE)
            return
        progress = self.num_steps / pressure.ramp_steps
        ramp = RampState(
            progress=progress,
            mean=self.mean(),
            line=(MEAN_SHARE * self._target) ** progress,
            mean_gradient=self._mean_gradient(),
            learning_rate=self.learning_rate,
        )
        self.pressure_now = self._order.next_pressure(self.pressure_now, ramp)
        self._is_released = progress >= 1
        if self._is_released:
            self._let_die(~self._affordable())
            for dim in self._alpha.dims:
                self._alpha.of(dim).clamp_(max=self._order.restarted_at)
        else:
            living, bright = self._first([self._line(progress), self._line(progress + FADE_SHARE)])
            self._let_die(~living)
            self._fade(~bright, pressure.ramp_steps)

    def _mean_gradient(self) -> float:
        """Mean of the averaged gradients over the living columns, weighted by cost."""
        living = {dim: (~dead).double() for dim, dead in self._dead.items()}
        summed = self._alpha.weighted({dim: self._averages[dim] * alive for dim, alive in living.items()}, self._costs)
        return summed / max(self._alpha.weighted(living, self._costs), 1e-9)

    def _line(self, progress: float) -> float:
        """Returns how much the living columns may cost."""
        return max(self._amount, self._target**progress * self._total)

    def _first(self, amounts: Sequence[float]) -> list[Tensor]:
        """The columns of highest score, as many as cost an amount: bool, one after the other over all embedding_dims.

        The last one may exceed it by a part of its cost. The best of those that the budget could pay for by itself is
        always among them: where dearer ones outlived them all, the ramp would end with nothing.

        Args:
            amounts: one answer for each.
        """
        scores, order = self._all_scores().sort(descending=True, stable=True)
        costs = self._column_costs[order]
        spent_before = torch.empty_like(costs)
        spent_before[order] = (costs.cumsum(0) - costs).masked_fill_(scores < 0, torch.inf)
        spent_before[self._last_resort(order)] = 0.0
        return [spent_before < amount * (1 - 1e-9) for amount in amounts]

    def _affordable(self) -> Tensor:
        """The columns of highest score that the budget has room for, as `_first`, but none exceeds it.

        What is kept now trains on and is not pruned afterwards: one more column, cut off the finished model, may cost
        more than all that the release gained.
        """
        scores, costs = self._all_scores(), self._column_costs.tolist()
        kept, room = torch.zeros(scores.numel(), dtype=torch.bool), self._amount * (1 + 1e-9)
        order = torch.argsort(scores, descending=True, stable=True)
        for column in (self._last_resort(order), *order.tolist()):
            if scores[column] >= 0 and costs[column] <= room and not kept[column]:
                kept[column] = True
                room -= costs[column]
        return kept

    def _last_resort(self, order: Tensor) -> int:
        """The first column of an order, of rows that training saw, that the budget can pay for by itself."""
        return int(order[self._is_within_reach[order]][0])

    def _all_scores(self) -> Tensor:
        """Returns the score of every column, one after the other over all embedding_dims; -1 for the dead."""
        scores = {dim: self._order.scores(dim).masked_fill(dead, -1.0) for dim, dead in self._dead.items()}
        return torch.cat([scores[dim].cpu().flatten() for dim in self._alpha.dims])

    def _let_die(self, columns: Tensor) -> None:
        for dim, dead in self._per_dim(columns):
            self._dead[dim] = dead
            self._alpha.of(dim).masked_fill_(dead, 0.0)

    def _fade(self, columns: Tensor, ramp_steps: int) -> None:
        factor = FADED_TO ** (1 / max(1.0, FADE_SHARE * ramp_steps))
        for dim, dying in self._per_dim(columns):
            alpha = self._alpha.of(dim)
            alpha.copy_(torch.where(dying, alpha * factor, alpha))

    def _per_dim(self, columns: Tensor) -> list[tuple[int, Tensor]]:
        alphas = [(dim, self._alpha.of(dim)) for dim in self._alpha.dims]
        parts = columns.split([alpha.numel() for _, alpha in alphas])
        return [
            (dim, part.view(alpha.shape).to(alpha.device)) for (dim, alpha), part in zip(alphas, parts, strict=True)
        ]

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
            state[f"dead/{dim}"] = self._dead[dim]
        return state | self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        self.num_steps, self._is_released = int(state["num_steps"]), bool(state["is_released"])
        self.learning_rate, self.pressure_now = float(state["learning_rate"]), float(state["pressure_now"])
        for dim in self._alpha.dims:
            self._averages[dim].copy_(state[f"average/{dim}"])
            self._dead[dim].copy_(state[f"dead/{dim}"])
        self._order.load_state_dict(state)
        self.last_density = self.density()


def _order_of(pressure: Pressure | None, alpha: Alpha, costs: Mapping[int, Tensor]) -> ColumnOrder:
    """Without pressure no column dies, and the order is never asked."""
    if pressure is None:
        return AlphaOrder(alpha, costs)
    if pressure.order == "alpha":
        return AlphaOrder(alpha, costs, column_sharing=pressure.column_sharing)
    by_importance = ImportanceOrder if pressure.order == "importance" else FreeImportanceOrder
    return by_importance(alpha, costs, ramp_steps=pressure.ramp_steps, column_sharing=pressure.column_sharing)
