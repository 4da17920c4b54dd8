"""AlphaOptimizer: the upper level's step: normalise, average, step, clip."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check
from dnis_torchrec.selection.alpha import Alpha, normalise_gradient, step_and_clip_

LEARNING_RATE = 0.01
"""Of alpha, as in the paper."""


class AlphaOptimizer:
    """Steps alpha on validation gradients. Local and deterministic: equal gradients give equal
    alphas on all ranks."""

    def __init__(
        self, alpha: Alpha, blocks: RowBlocks, *, averaging: float = 0.0, floor: float = 0.0
    ) -> None:
        check(0 <= averaging < 1, "averaging", "a number in [0, 1)", averaging)
        check(0 <= floor < 1, "floor", "a number in [0, 1)", floor)
        self._alpha, self._averaging, self._floor = alpha, averaging, floor
        self._rows = {
            dim: blocks.per_alpha_row(dim, blocks.seen_rows).to(alpha.of(dim).device)
            for dim in alpha.dims
        }
        self._stands = {
            dim: _rows_left_alone(blocks, dim).to(alpha.of(dim).device) for dim in alpha.dims
        }
        self._averages = {dim: torch.zeros_like(alpha.of(dim)) for dim in alpha.dims}
        self._dead = {dim: torch.zeros_like(alpha.of(dim), dtype=torch.bool) for dim in alpha.dims}
        self.learning_rate = LEARNING_RATE
        self.last_density = alpha.density_there(self._rows)

    def density(self) -> float:
        """Share of the tables' values, of rows that training saw, whose alpha is not zero."""
        return self._alpha.density(self._rows)

    def mean(self) -> float:
        """Mean of alpha over the same values."""
        return self._alpha.mean(self._rows)

    @torch.no_grad()
    def retain_(self, columns: Mapping[int, Tensor]) -> None:
        """Lets all other columns die: their alpha is 0 from now on."""
        for dim, retained in columns.items():
            self._dead[dim] |= ~retained.to(self._dead[dim].device)
            self._alpha.of(dim).masked_fill_(self._dead[dim], 0.0)
        self.last_density = self._alpha.density_there(self._rows)

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor], hits: Mapping[int, Tensor]) -> None:
        """One upper step."""
        for dim in self._alpha.dims:
            moves, average = hits[dim] & ~self._stands[dim], self._averages[dim]
            hit, fresh = moves.unsqueeze(1), normalise_gradient(gradients[dim], moves)
            average.copy_(torch.where(hit, torch.lerp(fresh, average, self._averaging), average))
            alpha = self._alpha.of(dim)
            step_and_clip_(alpha, average * hit, self.learning_rate, floor=self._floor)
            pushes_out = ((alpha >= 1) & (average < 0)) | ((alpha <= self._floor) & (average > 0))
            average.masked_fill_(pushes_out, 0.0)
            alpha.masked_fill_(self._dead[dim], 0.0)
        self.last_density = self._alpha.density_there(self._rows)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a continued search needs, as tensors."""
        state = {}
        for dim in self._alpha.dims:
            state[f"average/{dim}"] = self._averages[dim]
            state[f"dead/{dim}"] = self._dead[dim]
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        for dim in self._alpha.dims:
            self._averages[dim].copy_(state[f"average/{dim}"])
            self._dead[dim].copy_(state[f"dead/{dim}"])
        self.last_density = self._alpha.density_there(self._rows)


def _rows_left_alone(blocks: RowBlocks, dim: int) -> Tensor:
    """``(A,)`` bool."""
    of_table = {
        table: torch.full((routing.num_blocks,), int(table in blocks.left_alone))
        for table, routing in blocks.routings.items()
    }
    return blocks.per_alpha_row(dim, of_table) > 0
