"""The operator ``dnis_torchrec::bag_offsets``: where bags begin, from their lengths, which are checked on the way.

What packaged models begin with: they take lengths from strangers, and run where no Python names a feature. Compiled for
the CPU (csrc/lookups/bag_offsets.cpp), and from torch's own operators where nothing can be compiled.

Shapes: B batch, F features (keys of the batch), I ids of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dnis_torchrec.checks import check
from dnis_torchrec.ops.batch_checks import INTEGERS, are_sound, named, refuse_bags
from dnis_torchrec.ops.native_build import NAMESPACE

_NAME = "bag_offsets"
_SCHEMA = f"{_NAME}(Tensor lengths, Tensor ids, Tensor features) -> Tensor"


def register_bag_offsets(*, compiled: bool) -> None:
    """Makes the operator there; `load_operator` does so, once in a process.

    Args:
        compiled: whether the library is loaded, which defines it.
    """
    if not compiled:
        torch.library.define(f"{NAMESPACE}::{_NAME}", _SCHEMA.removeprefix(_NAME))
    # on the CPU the compiled implementation goes before this one
    torch.library.impl(f"{NAMESPACE}::{_NAME}", "CompositeExplicitAutograd", torch_bag_offsets)
    torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake)


def names_tensor(features: Sequence[str]) -> Tensor:
    """Names as the operator takes them: a tensor, because torch loses the memory of every string that it hands over.

    Args:
        features: F names; a line break in one is written as a space.

    Example:
        >>> names_tensor(["f", "g"]).tolist()
        [102, 10, 103]
    """
    text = "\n".join(name.replace("\n", " ") for name in features)
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def bag_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    """Returns the offsets at which the bags of a batch begin. `load_operator` has to be called before.

    Args:
        lengths: ``(F, B)`` int32 or int64.
        ids: ``(I,)``; only their number is looked at.
        features: their names, see `names_tensor`.

    Returns:
        ``(F * B + 1,)`` int64, rising from 0 to I.

    Raises:
        ValueError: unless all lengths are at least 0 and add up to I; names the feature.

    Example:
        >>> from dnis_torchrec.serving import load_operator
        >>> _ = load_operator()
        >>> bag_offsets(torch.tensor([[2, 0], [1, 1]]), torch.tensor([5, 6, 7, 8]), names_tensor(["f", "g"])).tolist()
        [0, 2, 2, 3, 4]
    """
    return torch.ops.dnis_torchrec.bag_offsets.default(lengths.contiguous(), ids, features)


def torch_bag_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    """The operator's meaning, from torch's own operators; same arguments and result as the compiled one.

    Args:
        lengths: as for `bag_offsets`, and all that follows.
        ids: as there.
        features: as there.
    """
    names = bytes(features.tolist()).decode().split("\n")
    fits = lengths.dim() == 2 and len(lengths) == len(names)
    check(fits, named(names), "contiguous lengths of shape (F, B) on the CPU", "others")
    check(lengths.dtype in INTEGERS, named(names), "int32 or int64 lengths", "others")
    if not are_sound(lengths, lengths.numel(), ids.numel()):
        refuse_bags(names, lengths, [lengths.shape[1]] * len(names), ids.flatten())
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0, dtype=torch.int64)])


def _fake(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    return lengths.new_empty(lengths.shape[0] * lengths.shape[1] + 1, dtype=torch.int64)
