"""A linear layer for batches as small as those of serving."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TransposedLinear(nn.Module):
    """nn.Linear with its weight stored the other way round, (K, N) instead of (N, K): y = x W^T + b.

    A matrix product copies a weight of (N, K) into the order that its kernel reads, anew for every batch, which small
    batches feel. Stored so, less of it has to be moved. Equal to the layer up to rounding.

    Args:
        linear: the layer; its bias is shared, its weight copied.

    Shape:
        - Input: ``(*, K)``.
        - Output: ``(*, N)``.

    Example:
        >>> linear, inputs = nn.Linear(3, 2), torch.ones(4, 3)
        >>> torch.allclose(TransposedLinear(linear)(inputs), linear(inputs))
        True
    """

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
