"""Denormals: numbers too small for a float's usual form, which make a CPU's arithmetic ten times
slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """While it lasts this thread's CPU takes denormals for zero, where the CPU can."""
    before = is_flushing()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def is_flushing() -> bool:
    """Returns whether this thread's CPU takes denormals for zero."""
    smallest = torch.tensor(torch.finfo(torch.float32).tiny)
    return float(smallest / 2) == 0
