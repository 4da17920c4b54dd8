"""The controller of NIS: one softmax per choice, learned by advantage actor-critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dnis_torchrec.checks import check

TRAVEL = 50.0
"""Learning rate times steps: how far Adam can move a logit over a search."""
BETAS = (0.9, 0.98)
ENTROPY_WEIGHT = 0.01
SCALE_DECAY = 0.95
"""Decay of the running mean square by which advantages are divided."""
SMALLEST_SCALE = 1e-6
"""Differences in reward far below this are rounding, not to be blown up."""


class Controller:
    """A distribution over combinations of options: independent softmaxes, uniform at first."""

    def __init__(self, num_options: Sequence[int], *, num_steps: int, seed: int) -> None:
        check(len(num_options) > 0 and min(num_options) > 0, "num_options", "some of each", num_options)
        shape = len(num_options), max(num_options)
        absent = torch.arange(shape[1]) >= torch.tensor(num_options).unsqueeze(1)
        self._absent = torch.zeros(shape).masked_fill(absent, -torch.inf)
        self._logits = torch.zeros(shape, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._logits], lr=TRAVEL / num_steps, betas=BETAS)
        self._generator = torch.Generator().manual_seed(seed)
        self._mean_square: Tensor | None = None

    def sample(self, num_samples: int) -> Tensor:
        """Draws combinations."""
        probabilities = self.log_probabilities().exp()
        return torch.multinomial(probabilities, num_samples, replacement=True, generator=self._generator).T

    def learn(self, picked: Tensor, rewards: Tensor) -> None:
        """One step of advantage actor-critic."""
        check(len(rewards) >= 2, "rewards", "those of at least 2 samples", len(rewards))
        log_p = self._log_softmax()
        taken = log_p.gather(1, picked.T).sum(0)
        entropy = -(log_p.exp() * log_p.masked_fill(self._absent < 0, 0.0)).sum()
        loss = -(self._advantages(rewards) * taken).mean() - ENTROPY_WEIGHT * entropy
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def log_probabilities(self) -> Tensor:
        """``(C, n)``; minus infinity where a choice has no such option."""
        return self._log_softmax().detach()

    def most_probable(self) -> list[int]:
        """The most probable option of each choice."""
        return self.log_probabilities().argmax(dim=1).tolist()

    def _log_softmax(self) -> Tensor:
        return torch.log_softmax(self._logits + self._absent, dim=1)

    def _advantages(self, rewards: Tensor) -> Tensor:
        num_samples = len(rewards)
        critic = (rewards.sum() - rewards) / (num_samples - 1)
        advantages = rewards - critic
        mean_square = advantages.square().mean()
        if self._mean_square is not None:
            mean_square = SCALE_DECAY * self._mean_square + (1 - SCALE_DECAY) * mean_square
        self._mean_square = mean_square
        return advantages / (mean_square.sqrt() + SMALLEST_SCALE)
