"""The measure of the memory benchmark sees what is held for a moment, and what was held before it is not counted."""

from __future__ import annotations

import torch

from benchmarks.pruning_memory import rise_of_memory

MEGABYTE = 1 << 20


def test_a_moment_is_seen_and_the_past_is_not() -> None:
    torch.ones(256 * MEGABYTE, dtype=torch.uint8)
    rise = rise_of_memory(lambda: torch.ones(64 * MEGABYTE, dtype=torch.uint8).numel())
    assert 56 * MEGABYTE < rise < 200 * MEGABYTE
