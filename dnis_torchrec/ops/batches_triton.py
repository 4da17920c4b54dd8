"""Bags on a GPU: what the kernels share, and the check of a batch, for whose finds nobody waits."""

# mypy: allow-untyped-defs, allow-incomplete-defs

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


def jit(function: Any) -> Any:
    """Compiles a function when it is first launched; without Triton it stays as it is."""
    return function if triton is None else triton.jit(function)


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


BAGS_PER_CHECK, IDS_PER_CHECK = 256, 256


def bad_bags(
    ids: Tensor, lengths: Tensor, offsets: Tensor, bounds: Tensor, longest: Tensor, no_limit: int
) -> Tensor:
    """Looks for lengths and ids that may not be. Local; the GPU alone waits for it."""
    has_no_bags, num_keys = lengths.numel() == 0, len(bounds)
    is_bad = int(has_no_bags and ids.numel() > 0)
    fault = torch.full((1,), is_bad, dtype=torch.int32, device=ids.device)
    batch_size = lengths.numel() // max(num_keys, 1)
    if not has_no_bags:
        sizes = (ids.numel(), lengths.numel(), batch_size, no_limit)
        check_bags = _check_kernel[(triton.cdiv(batch_size, BAGS_PER_CHECK), num_keys)]
        check_bags(ids, lengths, offsets, bounds, longest, fault, *sizes)
    return fault


def _check_bags(
    ids,
    lengths,
    offsets,
    bounds,
    longest,
    fault,
    num_ids,
    num_bags,
    batch_size,
    no_limit,
    bags_per_program: tl.constexpr = BAGS_PER_CHECK,
    ids_per_step: tl.constexpr = IDS_PER_CHECK,
):
    """Checks some bags of one key, and every id in them."""
    first = tl.program_id(0).to(tl.int64) * bags_per_program
    key, last = tl.program_id(1), tl.minimum(first + bags_per_program, batch_size)
    sample = first + tl.arange(0, bags_per_program)
    begin_of_key = key.to(tl.int64) * batch_size
    is_bag, bag = sample < last, begin_of_key + sample
    length = tl.load(lengths + bag, mask=is_bag, other=0).to(tl.int64)
    begin = tl.load(offsets + bag, mask=is_bag, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=is_bag, other=0).to(tl.int64)
    is_bad = (length < 0) | (length > tl.load(longest + key)) | (end - begin != length)
    bad = tl.max(tl.where(is_bag & is_bad, 1, 0), axis=0)
    low = tl.load(offsets + begin_of_key + first).to(tl.int64)
    high = tl.load(offsets + begin_of_key + last).to(tl.int64)
    is_sound = (low >= 0) & (low <= high) & (high <= num_ids)
    is_sound = is_sound & (tl.load(offsets) == 0) & (tl.load(offsets + num_bags) == num_ids)
    bad |= tl.where(is_sound, 0, 1)
    bound = tl.load(bounds + key)
    high = tl.where(is_sound & (bound != no_limit), high, low)
    for start in range(low, high, ids_per_step):
        place = start + tl.arange(0, ids_per_step)
        id_there = tl.load(ids + place, mask=place < high, other=0).to(tl.int64)
        is_bad_id = (place < high) & ((id_there < 0) | (id_there >= bound))
        bad |= tl.max(tl.where(is_bad_id, 1, 0), axis=0)
    tl.store(fault, 1, mask=bad != 0)


_check_kernel: Any = jit(_check_bags)
