"""A linear layer for batches as small as those of serving."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TransposedLinear(nn.Module):
    """nn.Linear with its weight stored the other way round, (K, N) instead of (N, K): y = x W^T +
    b."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)
        self.bias: nn.Parameter | None = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiplies and adds the bias."""
        if self.bias is None:
            return inputs @ self.weight
        if inputs.dim() == 2:
            return torch.addmm(self.bias, inputs, self.weight)
        return inputs @ self.weight + self.bias
