r"""The orders of the ramp: they say which columns die first under pressure, and how hard lambda has to press.

"alpha"             those of smallest alpha, or of smallest alpha times what they carry. lambda is zero where validation
                    loss alone takes alpha down faster than its line.
"importance"        those that validation loss would miss least for their cost (below). lambda may be
                    negative and keeps the mean of alpha on its line, so that a model that overfits does not take all
                    alphas down to the floor, where they say nothing. The release begins with all living alphas near
                    zero: embeddings grow anew, led by alpha, which learns on data that the tables do not see.
"free_importance"   the same columns; lambda and the release as in the order of alpha, so that validation is free to
                    take embeddings down, where that is what keeps a model from overfitting, as long as the mean of
                    alpha stays above a lowest line, which is the same for all sizes.

In all of them a block may go by what its column is worth to all blocks, too (`column_sharing`): models that take dot
products between features see only what both retain, and where their tables cannot be turned no column means the same to
all by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dnis_torchrec.soft_selection.alpha import Alpha

ORDERS = ("alpha", "importance", "free_importance")
"""Orders in which columns may die; see the head of this module."""

ADAPTATION = 0.02
"""Share of itself by which lambda grows or shrinks in one upper step, where it is never negative and in any release."""

FIRST_PRESSURE = 0.1
"""lambda at the first upper step. Its change is a share of this at least, so that it can leave zero again."""

CORRECTED_AT_ONCE = 0.1
"""Share of the way back to its line that the mean of alpha is sent in one upper step, where a line is held."""

LOWEST_MEAN = 0.03
"""End of the lowest line of the mean of alpha. The line is geometric, as the line to the size is. A size whose own line
ends lower takes that line instead."""

RESTARTED_AT = 0.02
"""Value of living alphas, at most, when the release begins in the order of importance."""

IMPORTANCE_WINDOW = 0.2
"""Share of the ramp over which the variance of alpha's gradients is taken."""


@dataclass(frozen=True, kw_only=True)
class RampState:
    """State of a ramp at one upper step.

    Attributes:
        progress: share of its upper steps that have been taken, in (0, 1].
        mean: of alpha, weighted by cost.
        line: value to which the mean is led, at this step.
        mean_gradient: mean over the living columns of alpha's normalised, averaged gradients, weighted by cost.
        learning_rate: step length of alpha.
    """

    progress: float
    mean: float
    line: float
    mean_gradient: float
    learning_rate: float

    def pressure_towards(self, line: float) -> float:
        """Returns the pressure that takes the mean of alpha back to a line, against the validation loss.

        It may be negative.

        Args:
            line: mean of alpha to go to.

        Returns:
            lambda for one upper step: `CORRECTED_AT_ONCE` of the way, were all columns alive and no alpha clipped.
        """
        return CORRECTED_AT_ONCE * (self.mean - line) / self.learning_rate - self.mean_gradient


class ColumnOrder(ABC):
    """Base of the orders in which columns die. Local and deterministic: equal gradients give equal answers.

    Args:
        alpha: whose columns are put in order.
        costs: embedding_dim -> ``(A,)``, the cost of a column of each row of alpha.
        column_sharing: weight of a column's mean score over all blocks beside its own.

    Attributes:
        restarted_at: the largest value that a living alpha has when the release begins; larger ones are cut to it.
    """

    restarted_at = 1.0

    def __init__(self, alpha: Alpha, costs: Mapping[int, Tensor], *, column_sharing: float = 0.0) -> None:
        self._alpha, self._costs, self._column_sharing = alpha, costs, column_sharing

    @abstractmethod
    def scale_columns(self, scales: Mapping[int, Tensor]) -> None:
        """Takes what columns carry.

        Args:
            scales: embedding_dim -> ``(A, D)``, not negative; only their ratios matter.
        """

    @abstractmethod
    def observe(self, gradients: Mapping[int, Tensor]) -> None:
        """Takes in the gradients of one upper step.

        Args:
            gradients: embedding_dim -> ``(A, D)``, averaged over ranks, not normalised.
        """

    def scores(self, embedding_dim: int) -> Tensor:
        """``(A, D)``, not negative: columns of small scores die first.

        o[s, k] + column_sharing * mean over s of o[s, k], weighted by cost, for the own scores o.

        Args:
            embedding_dim: D of the alpha.
        """
        of_blocks, costs = self._block_scores(embedding_dim), self._costs[embedding_dim]
        return of_blocks + self._column_sharing * ((costs / costs.sum()).to(of_blocks) @ of_blocks)

    @abstractmethod
    def _block_scores(self, embedding_dim: int) -> Tensor:
        """``(A, D)``, not negative: what a column is worth to its own block."""

    def next_pressure(self, pressure_now: float, ramp: RampState) -> float:
        """lambda for the next upper step: a little more above the line, a little less below, never under 0.

        Args:
            pressure_now: lambda of this one.
            ramp: how far the ramp has come.
        """
        change = ADAPTATION * max(pressure_now, FIRST_PRESSURE)
        return max(0.0, pressure_now + (change if ramp.mean > ramp.line else -change))

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything a continued search needs, as tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave.

        Args:
            state: name -> tensor; may hold what belongs to others, too.
        """


class AlphaOrder(ColumnOrder):
    """Columns die in the order of alpha times a scale, such as what they carry; see the head of this module.

    Args:
        alpha: see `ColumnOrder`.
        costs: see `ColumnOrder`.
        column_sharing: see `ColumnOrder`.
    """

    def __init__(self, alpha: Alpha, costs: Mapping[int, Tensor], *, column_sharing: float = 0.0) -> None:
        super().__init__(alpha, costs, column_sharing=column_sharing)
        self._scales = {dim: torch.ones_like(alpha.of(dim)) for dim in alpha.dims}

    def scale_columns(self, scales: Mapping[int, Tensor]) -> None:
        """Sets what alpha is multiplied by; 1 before."""
        for dim, scale in scales.items():
            self._scales[dim].copy_(scale / scale.mean())

    def observe(self, gradients: Mapping[int, Tensor]) -> None:
        """Has no use for them: they have moved alpha."""

    def _block_scores(self, embedding_dim: int) -> Tensor:
        """``(A, D)``: alpha times its scale."""
        return self._alpha.of(embedding_dim) * self._scales[embedding_dim]

    def state_dict(self) -> dict[str, Tensor]:
        """The scales."""
        return {f"scale/{dim}": scale for dim, scale in self._scales.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the scales; the rest of `state` is not read."""
        for dim, scale in self._scales.items():
            scale.copy_(state[f"scale/{dim}"])


class FreeImportanceOrder(ColumnOrder):
    """Columns die in the order of what validation loss would miss for their cost; see the head of this module.

    Args:
        alpha: see `ColumnOrder`.
        costs: see `ColumnOrder`.
        column_sharing: see `ColumnOrder`.
        ramp_steps: upper steps of the ramp.
    """

    def __init__(
        self, alpha: Alpha, costs: Mapping[int, Tensor], *, ramp_steps: int, column_sharing: float = 0.0
    ) -> None:
        super().__init__(alpha, costs, column_sharing=column_sharing)
        self._importance = ColumnImportance(alpha, window=IMPORTANCE_WINDOW * ramp_steps)

    def scale_columns(self, scales: Mapping[int, Tensor]) -> None:
        """Has no use for them: gradients of alpha say what columns carry."""

    def observe(self, gradients: Mapping[int, Tensor]) -> None:
        """Takes them into the running variance."""
        self._importance.update(gradients)

    def _block_scores(self, embedding_dim: int) -> Tensor:
        """``(A, D)``: what validation loss would lose with a column, over what it costs."""
        losses = self._importance.losses(embedding_dim)
        return losses / self._costs[embedding_dim].to(losses).unsqueeze(1).clamp(min=1e-9)

    def next_pressure(self, pressure_now: float, ramp: RampState) -> float:
        """Adapts the pressure as the order of alpha does; below the lowest line it also takes the mean back to it."""
        adapted, lowest = super().next_pressure(pressure_now, ramp), min(ramp.line, LOWEST_MEAN**ramp.progress)
        return adapted if ramp.mean >= lowest else min(adapted, ramp.pressure_towards(lowest))

    def state_dict(self) -> dict[str, Tensor]:
        """The running moments."""
        return {f"importance/{name}": value for name, value in self._importance.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the running moments; the rest of `state` is not read."""
        self._importance.load_state_dict({name.removeprefix("importance/"): value for name, value in state.items()})


class ImportanceOrder(FreeImportanceOrder):
    """The same columns; the mean of alpha is kept on its line, and the release begins near zero."""

    restarted_at = RESTARTED_AT

    def next_pressure(self, pressure_now: float, ramp: RampState) -> float:
        """Returns the pressure that takes the mean of alpha back to its line."""
        return ramp.pressure_towards(ramp.line)


class ColumnImportance:
    r"""Running mean and variance of alpha's gradients, and :math:`a^2 \mathrm{Var}(g)` from them.

    Local and deterministic: fed with gradients that are averaged over ranks it is the same on all of them.

    Args:
        alpha: whose columns are judged.
        window: upper steps that a running mean goes back, e-folding.

    Shape:
        Gradients and losses ``(A, D)`` for every embedding_dim D with A rows of alpha.

    Example:
        >>> importance = ColumnImportance(Alpha({2: (1, 2)}), window=10)
        >>> for sign in (1.0, -1.0, 1.0, -1.0):
        ...     importance.update({2: torch.tensor([[sign, 3 * sign]])})
        >>> losses = importance.losses(2)
        >>> round(float(losses[0, 1] / losses[0, 0]), 3)
        9.0
    """

    def __init__(self, alpha: Alpha, *, window: float) -> None:
        self._alpha, self._fresh = alpha, 1 / max(1.0, window)
        self._sums = {dim: torch.zeros(2, *alpha.of(dim).shape, device=alpha.of(dim).device) for dim in alpha.dims}
        self._weight = torch.zeros((), dtype=torch.float64)

    def update(self, gradients: Mapping[int, Tensor]) -> None:
        """Takes in one upper step.

        Args:
            gradients: embedding_dim -> ``(A, D)``, averaged over ranks, not normalised. Rows of alpha without a hit
                have zeros, which count: what few batches see is missed by few.
        """
        for dim, gradient in gradients.items():
            self._sums[dim].lerp_(torch.stack([gradient, gradient.square()]), self._fresh)
        self._weight.lerp_(torch.ones_like(self._weight), self._fresh)

    def losses(self, embedding_dim: int) -> Tensor:
        """Estimates how much validation loss would rise without each column, up to a common factor.

        Args:
            embedding_dim: D of the tables.

        Returns:
            ``(A, D)``, not negative; 0 before the first step.
        """
        means, squares = self._sums[embedding_dim] / max(float(self._weight), self._fresh)
        return self._alpha.of(embedding_dim).square() * (squares - means.square()).clamp(min=0)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a continued search needs, as tensors."""
        return {f"sums/{dim}": value for dim, value in self._sums.items()} | {"weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        for dim in self._sums:
            self._sums[dim].copy_(state[f"sums/{dim}"])
        self._weight.copy_(state["weight"])
