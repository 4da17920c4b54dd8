"""The operator ``dnis_torchrec::bag_offsets``: where bags begin, from their lengths, which are
checked on the way."""

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
    """Makes the operator there; `load_operator` does so, once in a process."""
    if not compiled:
        torch.library.define(f"{NAMESPACE}::{_NAME}", _SCHEMA.removeprefix(_NAME))
    # on the CPU the compiled implementation goes before this one
    torch.library.impl(f"{NAMESPACE}::{_NAME}", "CompositeExplicitAutograd", torch_bag_offsets)
    torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake)


def names_tensor(features: Sequence[str]) -> Tensor:
    """Names as the operator takes them: a tensor, because torch loses the memory of every string
    that it hands over."""
    text = "\n".join(name.replace("\n", " ") for name in features)
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def bag_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    """Returns the offsets at which the bags of a batch begin. `load_operator` has to be called
    before."""
    return torch.ops.dnis_torchrec.bag_offsets.default(lengths.contiguous(), ids, features)


def torch_bag_offsets(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    """The operator's meaning, from torch's own operators; same arguments and result as the compiled
    one."""
    names = bytes(features.tolist()).decode().split("\n")
    fits = lengths.dim() == 2 and len(lengths) == len(names)
    check(fits, named(names), "contiguous lengths of shape (F, B) on the CPU", "others")
    check(lengths.dtype in INTEGERS, named(names), "int32 or int64 lengths", "others")
    if not are_sound(lengths, lengths.numel(), ids.numel()):
        refuse_bags(names, lengths, [lengths.shape[1]] * len(names), ids.flatten())
    return torch.cat(
        [lengths.new_zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0, dtype=torch.int64)]
    )


def _fake(lengths: Tensor, ids: Tensor, features: Tensor) -> Tensor:
    return lengths.new_empty(lengths.shape[0] * lengths.shape[1] + 1, dtype=torch.int64)
