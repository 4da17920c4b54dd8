"""LateValues: numbers that the host reads from a GPU without stopping it, a step after they were
asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Reader = Callable[[Tensor], None]


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Values on their way to the host."""

    values: Tensor
    is_there: torch.cuda.Event | None
    then: Reader


def is_read_late(device: torch.device) -> bool:
    """Returns whether to read a number of this device at once would stop it."""
    return device.type == "cuda"


class LateValues:
    """Copies on their way to the host. Local, no collective."""

    def __init__(self) -> None:
        self._coming: list[_Copy] = []

    def read(self, values: Tensor, then: Reader) -> bool:
        """Has values read: on a CPU now, those of a GPU when `settle` is called next."""
        if not is_read_late(values.device):
            then(values.detach())
            return True
        copied = values.detach().to(
            "cpu", non_blocking=True, copy=True
        )  # pinned, where it comes from a GPU
        is_there = (
            torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
        )
        self._coming.append(_Copy(values=copied, is_there=is_there, then=then))
        return False

    def settle(self) -> None:
        """Reads all that is on its way, and waits for it where that has to be; one that raises ends
        the reading."""
        coming, self._coming = self._coming, []
        for copy in coming:
            if copy.is_there is not None:
                copy.is_there.synchronize()
            copy.then(copy.values)
