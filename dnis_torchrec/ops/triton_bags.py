"""What the lookups on a GPU share: whether Triton is there, the bags of a batch, and what is copied
to the device once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.checks import check

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without
    triton = None

MOST_COLUMNS_PER_PROGRAM = 128
"""Output columns that one program adds up at most; wider tables take several programs per bag."""


def jitted(function: Any) -> Any:
    """Compiles a function when it is first launched; None where Triton is not there."""
    return None if triton is None else triton.jit(function)


def column_programs(embedding_dims: Sequence[int]) -> tuple[int, int]:
    """(columns per program, programs per bag), enough for the widest table; one at D = 0, too: its
    ids are checked."""
    widest = max(1, *embedding_dims)
    columns = min(MOST_COLUMNS_PER_PROGRAM, triton.next_power_of_2(widest))
    return columns, triton.cdiv(widest, columns)


def check_keys(keys: Sequence[int], num_keys: int) -> None:
    """Checks that every feature has bags."""
    has_bags = all(0 <= key < num_keys for key in keys)
    check(has_bags, "offsets", "bags for each feature", f"those of {num_keys} keys")


@functools.lru_cache(maxsize=256)
def on_device(features: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Copies what a kernel reads about features to a device; a module's features stay the same, so
    few calls copy."""
    return torch.tensor(features, dtype=torch.int64).to(device)


def _bag_bounds(offsets, bag, num_bags, num_ids):  # type: ignore[no-untyped-def]
    """Where the ids of bags begin and end, and whether offsets rise from 0 to `num_ids`: where not,
    bags are empty."""
    begin, end = tl.load(offsets + bag).to(tl.int64), tl.load(offsets + bag + 1).to(tl.int64)
    is_sound = (begin >= 0) & (begin <= end) & (end <= num_ids)
    is_sound = is_sound & (tl.load(offsets) == 0) & (tl.load(offsets + num_bags) == num_ids)
    return begin, tl.where(is_sound, end, begin), is_sound


bag_bounds = jitted(_bag_bounds)
