"""BagCheck: bags are checked before they are looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops.batch_checks import INTEGERS, check_bags, named
from dnis_torchrec.ops.block_operators import are_compiled, are_good_bags, can_select
from dnis_torchrec.ops.jagged import jagged_by_key
from dnis_torchrec.selection.pooled_pieces import PooledFeature

UNLIMITED = torch.iinfo(torch.int64).max
"""Limit of the ids and bags of a key that nobody reads."""


class BagCheck(nn.Module):
    """Checks bags before they are looked up, so that a bad id is named and never trains a row."""

    def __init__(self, outputs: tuple[PooledFeature, ...]) -> None:
        super().__init__()
        self._outputs = outputs
        self._limits: dict[tuple[tuple[str, ...], torch.device], tuple[Tensor, Tensor]] = {}

    def forward(self, features: KeyedJaggedTensor) -> None:
        """Checks lengths of single-id bags and the range of every id."""
        if features.variable_stride_per_key():
            raise NotImplementedError(
                describe("features", "supported are batches of one size for all keys", "several")
            )
        if self._are_good(features):
            return
        ids = features.values()
        if ids.dtype not in INTEGERS:
            remedy = "convert them with .long()"
            raise TypeError(
                describe(named(features.keys()), "int32 or int64 ids", ids.dtype, remedy)
            )
        if ids.device.type == "cpu":
            check_bags(features)
        for output in self._outputs:
            check_known(f"feature of table {output.table!r}", output.feature, features.keys())
        if ids.device.type != "cpu":
            self._assert_good(features)
            return
        jagged = jagged_by_key(features)
        for output in self._outputs:
            ids, lengths = jagged[output.feature].values(), jagged[output.feature].lengths()
            if ids.numel():
                _check_on_cpu(
                    output, ids, lengths, f"table {output.table!r}, feature {output.feature!r}"
                )

    def _are_good(self, features: KeyedJaggedTensor) -> bool:
        """The usual case on a CPU, decided for all features at once; False where each has to be
        looked at."""
        ids, lengths, keys = features.values(), features.lengths(), tuple(features.keys())
        weights = features.weights_or_none()
        has_weights = weights is None or weights.numel() == ids.numel()
        if ids.device.type != "cpu" or ids.dtype not in INTEGERS or not has_weights:
            return False
        if not {output.feature for output in self._outputs} <= set(keys):
            return False
        bounds, longest = self._limits_there(keys, ids.device)
        if are_compiled():
            return are_good_bags(ids, lengths, bounds, longest)
        if ids.numel() != lengths.numel() or not ids.numel() or not bool((lengths == 1).all()):
            return False
        lowest, highest = torch.aminmax(ids.view(len(keys), -1), dim=1)
        return bool((lowest >= 0).all()) and bool((highest < bounds).all())

    def _assert_good(self, features: KeyedJaggedTensor) -> None:
        """The same on a GPU, for all features at once: nobody waits for what it finds, and launches
        are few."""
        ids, lengths = features.values(), features.lengths()
        bounds, longest = self._limits_there(tuple(features.keys()), ids.device)
        if ids.is_cuda and can_select(torch.empty(0, device=ids.device)):
            from dnis_torchrec.ops.bag_check_triton import bad_bags  # Triton takes seconds to load

            fault = bad_bags(ids, lengths, features.offsets(), bounds, longest, UNLIMITED)
            torch._assert_async(fault == 0)
            return
        of_keys = lengths.view(len(bounds), features.stride())
        torch._assert_async(((of_keys >= 0) & (of_keys <= longest.unsqueeze(1))).all())
        ends = of_keys.sum(1).cumsum(0)
        torch._assert_async(ends[-1] == ids.numel())
        key = torch.bucketize(torch.arange(ids.numel(), device=ids.device), ends, right=True)
        bound = bounds[key.clamp(max=len(bounds) - 1)]  # where the lengths are wrong, too
        torch._assert_async(((ids >= 0) & (ids < bound) | (bound == UNLIMITED)).all())

    def _limits_there(self, keys: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns `_limits_of` on a device, copied there once."""
        known = self._limits.get((keys, device))
        if known is None:
            bounds, longest = self._limits_of(keys)
            known = self._limits[keys, device] = bounds.to(device), longest.to(device)
        return known

    def _limits_of(self, keys: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Returns every key's rows in its smallest table, and the most ids of its bags; keys not
        read have no limit."""
        bounds, longest = dict.fromkeys(keys, UNLIMITED), dict.fromkeys(keys, UNLIMITED)
        for output in self._outputs:
            bounds[output.feature] = min(bounds[output.feature], output.num_embeddings)
            if not output.is_multi_hot:
                longest[output.feature] = 1
        last = {key: place for place, key in enumerate(keys)}
        is_read = [last[key] == place for place, key in enumerate(keys)]
        limits = [
            [limit[key] if read else UNLIMITED for key, read in zip(keys, is_read, strict=True)]
            for limit in (bounds, longest)
        ]
        return torch.tensor(limits[0]), torch.tensor(limits[1])


def _check_on_cpu(output: PooledFeature, ids: Tensor, lengths: Tensor, place: str) -> None:
    if not output.is_multi_hot:
        longest = int(lengths.max())
        remedy = f"name it in multi_hot_features=[{output.feature!r}]"
        check(longest <= 1, place, "bags of at most one id", f"a bag of {longest}", remedy)
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    within = lowest >= 0 and highest < output.num_embeddings
    received = lowest if lowest < 0 else highest
    remedy = "hash the ids into the table, or raise its num_embeddings"
    check(within, place, f"ids in 0..{output.num_embeddings - 1}", received, remedy)
