"""The check of a batch's bags on a GPU: one Triton kernel for all keys, and nobody waits for what
it finds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.ops import triton_bags
from dnis_torchrec.ops.triton_bags import jitted

if triton_bags.triton is not None:
    import triton.language as tl

BAGS_PER_CHECK, IDS_PER_CHECK = 256, 256


def bad_bags(
    ids: Tensor, lengths: Tensor, offsets: Tensor, bounds: Tensor, longest: Tensor, unlimited: int
) -> Tensor:
    """Looks for lengths and ids that may not be. Local; the GPU alone waits for it."""
    has_no_bags, num_keys = lengths.numel() == 0, len(bounds)
    fault = torch.full(
        (1,), int(has_no_bags and ids.numel() > 0), dtype=torch.int32, device=ids.device
    )
    batch_size = lengths.numel() // max(num_keys, 1)
    if not has_no_bags:
        _check_kernel[(triton_bags.triton.cdiv(batch_size, BAGS_PER_CHECK), num_keys)](
            ids,
            lengths,
            offsets,
            bounds,
            longest,
            fault,
            ids.numel(),
            lengths.numel(),
            batch_size,
            unlimited,
            bags_per_program=BAGS_PER_CHECK,
            ids_per_step=IDS_PER_CHECK,
        )
    return fault


def _check_bags(  # type: ignore[no-untyped-def]  # Triton takes every name in an annotation for a value
    ids,
    lengths,
    offsets,
    bounds,
    longest,
    fault,
    num_ids,
    num_bags,
    batch_size,
    unlimited,
    bags_per_program: tl.constexpr,
    ids_per_step: tl.constexpr,
):
    """Checks some bags of one key, and every id in them."""
    first = tl.program_id(0).to(tl.int64) * bags_per_program
    key, last = tl.program_id(1), tl.minimum(first + bags_per_program, batch_size)
    own = first + tl.arange(0, bags_per_program)
    is_bag, bag, begin_of_key = (
        own < last,
        key.to(tl.int64) * batch_size + own,
        key.to(tl.int64) * batch_size,
    )
    length = tl.load(lengths + bag, mask=is_bag, other=0).to(tl.int64)
    begin = tl.load(offsets + bag, mask=is_bag, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=is_bag, other=0).to(tl.int64)
    is_bad = (length < 0) | (length > tl.load(longest + key)) | (end - begin != length)
    bad = tl.max(tl.where(is_bag & is_bad, 1, 0), axis=0)
    low, high = (
        tl.load(offsets + begin_of_key + first).to(tl.int64),
        tl.load(offsets + begin_of_key + last).to(tl.int64),
    )
    is_sound = (low >= 0) & (low <= high) & (high <= num_ids)
    is_sound = is_sound & (tl.load(offsets) == 0) & (tl.load(offsets + num_bags) == num_ids)
    bad |= tl.where(is_sound, 0, 1)
    bound = tl.load(bounds + key)
    high = tl.where(is_sound & (bound != unlimited), high, low)
    for start in range(low, high, ids_per_step):
        place = start + tl.arange(0, ids_per_step)
        id_there = tl.load(ids + place, mask=place < high, other=0).to(tl.int64)
        bad |= tl.max(
            tl.where((place < high) & ((id_there < 0) | (id_there >= bound)), 1, 0), axis=0
        )
    tl.store(fault, 1, mask=bad != 0)


_check_kernel: Any = jitted(_check_bags)
