"""The measure of the memory benchmark sees what is held for a moment, and what was held before it is not counted."""

from __future__ import annotations

import mmap

import torch

from benchmarks.pruning_memory import rise_of_memory

MEGABYTE = 1 << 20


def hold(megabytes: int) -> None:
    """Takes fresh pages from the system for a moment; a tensor of torch might get pages of the heap that are resident
    already, left by whatever the process did before.
    """
    torch.frombuffer(mmap.mmap(-1, megabytes * MEGABYTE), dtype=torch.uint8).fill_(1)


def test_a_moment_is_seen_and_the_past_is_not() -> None:
    hold(256)
    rise = rise_of_memory(lambda: hold(64))
    assert 56 * MEGABYTE < rise < 200 * MEGABYTE
