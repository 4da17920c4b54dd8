"""Counts what torch allocates: `tracemalloc` does not see tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedPeak(TorchDispatchMode):
    """The most bytes that tensors made inside the block held at one time; temporaries within one operator not counted.

    Args:
        known: tensors whose memory was there before.

    Attributes:
        peak: bytes.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._holders: dict[int, int] = {}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or not size or tensor.is_meta:
            return
        if not self._holders.get(address):
            self._now += size
            self.peak = max(self.peak, self._now)
        self._holders[address] = self._holders.get(address, 0) + 1
        weakref.finalize(tensor, self._release, address, size).atexit = False

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self._now -= size
