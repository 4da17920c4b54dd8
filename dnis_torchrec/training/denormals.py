"""Denormals: numbers too small for a float's usual form, which make a CPU's arithmetic ten times slower.

A search makes many of them: once a column has died its gradients are zero, and Adam's average of them shrinks by a
tenth a step until it is a denormal, at which rounding keeps it for good. Every further step then works on denormals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """While it lasts this thread's CPU takes denormals for zero, where the CPU can.

    Threads that torch starts meanwhile for a single operation do so too, and go on with it; those that it had before
    do not. GPUs are not concerned.

    Example:
        >>> with flushing_denormals():
        ...     is_flushing()
        True
    """
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
