r"""What validation loss would lose with a column, to second order: an order of dying that tells worth from size.

Validation gradients say how loss changes with a little less of a column. Where a model has begun to overfit they ask
for less of what is largest, and never say what would be missed if all of it went. That is the second order's to say:

.. math:: \Delta L_{sk} \approx \tfrac12 a_{sk}^2 H_{sk}, \qquad
    H_{sk} \propto \overline{(g_{sk} - \bar g_{sk})^2}

for alpha a and its gradient g of block s and column k (LeCun, Denker, Solla: Optimal Brain Damage, 1990). The curvature
H is the Fisher information, which the variance of gradients from batch to batch gives up to a factor that is the same
for all columns (Theis et al.: Faster gaze prediction with dense networks and Fisher pruning, 2018). An upper step has
these gradients at hand: no further pass is needed.

NOTE[DIFF]: the paper prunes by the size of alpha.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dnis_torchrec.soft_selection import Alpha


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
        """What validation loss would lose with each column, up to a common factor.

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
