"""Checks that a batch holds as many ids as its lengths ask for, before anything reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import SHOWN, check, describe

INTEGERS = (torch.int32, torch.int64)
"""Dtypes of the ids, lengths and offsets that operators take."""
_FEW_BAGS = 128
"""Numbers that Python adds up before torch has begun."""


_RAISES, _NO_WARNING = 0, torch.zeros(1, dtype=torch.int64)
"""Arguments with which FBGEMM's check of bounds raises, and changes nothing."""


def named(features: Sequence[str]) -> str:
    """Features as errors name them: ``"feature 'f'"``, ``"features 'f', 'g'"``."""
    listed = ", ".join(map(repr, features[:SHOWN])) + (", ..." if len(features) > SHOWN else "")
    return f"features {listed}" if len(features) > 1 else f"feature {listed}"


def check_bags(features: KeyedJaggedTensor) -> None:
    """Checks that lengths, offsets and weights of a batch are those of its ids."""
    if torch.compiler.is_compiling():
        return
    lengths, ids, weights = features.lengths(), features.values(), features.weights_or_none()
    if ids.device.type != "cpu":
        torch._assert_async((lengths >= 0).all() & (lengths.sum() == ids.numel()))
        return
    names, strides = features.keys(), features.stride_per_key()
    num_bags = sum(strides)
    fits = ids.dim() == 1 and (weights is None or weights.numel() == ids.numel())
    if not fits or not are_sound(lengths, num_bags, ids.numel()):
        refuse_bags(names, lengths, strides, ids, weights)
    offsets = features.offsets_or_none()
    if offsets is not None and num_bags:
        agree = int(offsets[0]) == 0 and bool((offsets.diff() == lengths).all())
        check(agree, named(names), "offsets that rise from 0 by the lengths", "others")


def offsets_of_rows(features: KeyedJaggedTensor, limits: Tensor) -> Tensor | None:
    """Returns the offsets of a sound batch, in which every id is a row, in one pass: the usual
    case."""
    ids, weights = features.values(), features.weights_or_none()
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return None
    lengths, given, num_bags = (
        features.lengths(),
        features.offsets_or_none(),
        len(limits) * features.stride(),
    )
    fits = ids.dim() == lengths.dim() == 1 and lengths.numel() == num_bags > 0
    fits = fits and ids.dtype in INTEGERS and lengths.dtype in INTEGERS
    if not fits or not (weights is None or weights.numel() == ids.numel()):
        return None
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(
        lengths
    )  # where their sum overflows, they fall
    if given is not None and not (given.dtype == offsets.dtype and torch.equal(given, offsets)):
        return None
    try:
        torch.ops.fbgemm.bounds_check_indices(limits, ids, offsets, _RAISES, _NO_WARNING)
    except RuntimeError:
        return None
    # -1 is nothing to FBGEMM, where it stands for rows that were pruned
    return offsets if not ids.numel() or int(ids.min()) >= 0 else None


def are_sound(lengths: Tensor, num_bags: int, num_ids: int) -> bool:
    """Returns whether no length is below 0, and they add up to the number of ids."""
    if lengths.dtype not in INTEGERS or lengths.numel() != num_bags:
        return False
    if num_bags <= _FEW_BAGS:
        listed = lengths.flatten().tolist()
        return sum(listed) == num_ids and min(listed, default=0) >= 0
    lowest, highest = torch.aminmax(
        lengths
    )  # no length above the number of ids: their sum does not overflow
    return int(lowest) >= 0 and int(highest) <= num_ids and int(lengths.sum()) == num_ids


def refuse_bags(
    names: Sequence[str],
    lengths: Tensor,
    strides: Sequence[int],
    ids: Tensor,
    weights: Tensor | None = None,
) -> None:
    """Says what is wrong with the bags of a batch; looks at one after the other."""
    everywhere, num_ids, num_bags = named(names), ids.numel(), sum(strides)
    check(lengths.dtype in INTEGERS, everywhere, "int32 or int64 lengths", lengths.dtype)
    check(
        lengths.numel() == num_bags,
        everywhere,
        f"{num_bags} lengths, one for each bag",
        lengths.numel(),
    )
    check(ids.dim() == 1, everywhere, "ids of one dimension", tuple(ids.shape))
    bags = [
        (name, number)
        for name, stride in zip(names, strides, strict=True)
        for number in range(stride)
    ]
    left = num_ids
    for (name, number), length in zip(bags, lengths.flatten().tolist(), strict=True):
        place, sample = named([name]), f"in sample {number}"
        check(length >= 0, place, "lengths of at least 0", f"{length} {sample}")
        received = f"a bag of {length} {sample}, with {left} left"
        check(length <= left, place, "no more ids than there are", received)
        left -= length
    check(
        left == 0, everywhere, f"as many ids as their lengths add up to, {num_ids - left}", num_ids
    )
    if weights is not None:
        received = f"{weights.numel()} weights"
        check(
            weights.numel() == num_ids, everywhere, f"a weight for each of {num_ids} ids", received
        )


def readable_bags(
    names: Sequence[str], ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Checks bags that an operator has refused, and converts them to dtypes that it takes."""
    everywhere = named(names)
    check(offsets.dtype in INTEGERS, everywhere, "int32 or int64 offsets", offsets.dtype)
    first = int(offsets[0]) if offsets.numel() else None
    check(first == 0, everywhere, "offsets that rise from 0", first)
    num_bags = offsets.numel() - 1
    refuse_bags(
        names, offsets.long().diff(), [num_bags // max(len(names), 1)] * len(names), ids, weights
    )
    return integer_ids(ids, names), weights if weights is None else weights.float()


def integer_ids(ids: Tensor, names: Sequence[str]) -> Tensor:
    """Ids as operators take them; others than integers would be rounded, or read as something else."""
    if ids.dtype in INTEGERS:
        return ids
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(describe(named(names), "integer ids", ids.dtype, "convert them"))
    return ids.long()
