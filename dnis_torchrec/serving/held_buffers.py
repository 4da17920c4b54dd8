"""HeldBuffers: buffers that are handed to an operator without the interpreter's lock."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HeldBuffers(nn.Module):
    """Buffers that C++ owns, and not Python alone."""

    def __init__(self, tensors: dict[str, Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=persistent)
        self._hold()

    def _hold(self) -> None:
        with torch.inference_mode(False):  # in which views would not own anything
            self._views = [
                buffer.view_as(buffer) for buffer in self._buffers.values() if buffer is not None
            ]

    def _apply(self, *arguments: Any, **options: Any) -> HeldBuffers:
        moved = super()._apply(*arguments, **options)
        self._hold()
        return moved

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._hold()

    def __getstate__(self) -> dict[str, Any]:
        """Without the views: a copy makes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_views"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the views of a copy, or of tensors that came from another process."""
        super().__setstate__(state)
        self._hold()
