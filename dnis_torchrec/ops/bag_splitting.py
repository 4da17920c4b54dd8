"""BagSplitter: from a KeyedJaggedTensor to one whose keys are (feature, block) pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops.block_operators import are_compiled, split_bags


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSplit:
    """The rule by which the bags of one feature are split."""

    feature: str
    keys: tuple[str | None, ...]
    routing: RowRouting | None = None

    def __post_init__(self) -> None:
        num_blocks = 1 if self.routing is None else self.routing.num_blocks
        check(
            len(self.keys) == num_blocks,
            f"feature {self.feature!r}",
            f"{num_blocks} keys",
            len(self.keys),
        )


class BagSplitter(nn.Module):
    """Splits bags by block: key f becomes one key per block, in the order given."""

    _slots: Tensor

    def __init__(self, splits: Sequence[FeatureSplit]) -> None:
        super().__init__()
        self._splits = tuple(splits)
        self._keys: list[str] = [key for split in splits for key in split.keys if key is not None]
        check(
            len(set(self._keys)) == len(self._keys),
            "BagSplitter",
            "distinct output keys",
            self._keys,
        )
        # Features that share a routing (several on one table) share its tensors.
        self._routers = nn.ModuleList()
        self._router_of_split: list[int | None] = []
        known: dict[int, int] = {}
        for split in self._splits:
            if split.routing is None:
                self._router_of_split.append(None)
                continue
            if id(split.routing) not in known:
                known[id(split.routing)] = len(self._routers)
                self._routers.append(RowRouter(split.routing))
            self._router_of_split.append(known[id(split.routing)])
        self.register_buffer("_slots", self._slot_of_block(), persistent=False)

    def _slot_of_block(self) -> Tensor:
        """Index of the output key of every (split, block), one past the last key for what is
        dropped."""
        none, slots, slot = len(self._keys), [], 0
        for split in self._splits:
            for key in split.keys:
                slots.append(none if key is None else slot)
                slot += key is not None
            slots.append(none)
        return torch.tensor(slots, dtype=torch.int16 if none < 2**15 else torch.int64)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Splits every bag."""
        bags = select_features(features, [split.feature for split in self._splits])
        weights = bags.weights_or_none()
        learns = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        if (
            bags.values().device.type == "cpu" and are_compiled() and not learns
        ):  # the operator knows no gradient
            values, lengths, weights = self._split_at_once(bags)
        else:
            values, lengths, weights = self._split_by_sorting(bags)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=lengths,
            stride=features.stride(),
        )

    def _split_at_once(self, bags: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Splits bags by the compiled operator: returns ids, lengths and weights of the split bags."""
        none = self._slots.new_empty(0, dtype=torch.int64)
        routings = [
            none if index is None else cast(RowRouter, self._routers[index]).routing_tensor()
            for index in self._router_of_split
        ]
        weights = bags.weights_or_none()
        return split_bags(
            bags.values().contiguous(),
            bags.lengths().contiguous(),
            None if weights is None else weights.contiguous(),
            routings,
            self._slots.long(),
            list(itertools.accumulate((len(split.keys) + 1 for split in self._splits), initial=0)),
            bags.stride(),
            len(self._keys),
        )

    def _split_by_sorting(self, bags: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Splits bags by torch's own operators, on any device; returns the same."""
        slot = self._slots.index_select(
            0, self._blocks_of(bags.values().split(bags.length_per_key()))
        )
        return sort_by_slot(bags, slot, len(self._keys))

    def _blocks_of(self, values: Sequence[Tensor]) -> Tensor:
        """Returns, for each id, the index of its pair of split and block, ``(I,)``."""
        blocks, first = [], 0
        for split, router, ids in zip(self._splits, self._router_of_split, values, strict=True):
            block = (
                torch.zeros_like(ids, dtype=torch.int64)
                if router is None
                else self._routers[router](ids)
            )
            blocks.append(block + first)
            first += len(split.keys) + 1
        return torch.cat(blocks)


def sort_by_slot(
    bags: KeyedJaggedTensor, slot: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Splits bags by the key that each id goes to; ids keep their order within a bag."""
    batch_size, values, weights, lengths = (
        bags.stride(),
        bags.values(),
        bags.weights_or_none(),
        bags.lengths(),
    )
    order = torch.argsort(slot, stable=True)[: int((slot < num_keys).sum())]
    bag = torch.arange(batch_size, device=slot.device).repeat(len(bags.keys()))
    bag = torch.repeat_interleave(bag, lengths, output_size=slot.numel())
    split_lengths = lengths.new_zeros((num_keys + 1) * batch_size)
    one = lengths.new_ones(1).expand(slot.numel())
    split_lengths.scatter_add_(0, slot.long() * batch_size + bag, one)
    split_weights = None if weights is None else weights.index_select(0, order)
    return values.index_select(0, order), split_lengths[: num_keys * batch_size], split_weights


def select_features(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """The bags of the named features, in that order; a name may occur twice."""
    check_one_batch_size(features)
    if features.keys() == list(names):
        return features
    index_of_key = {key: index for index, key in enumerate(features.keys())}
    for name in names:
        check_known("feature", name, index_of_key)
    return features.permute([index_of_key[name] for name in names])


def check_one_batch_size(features: KeyedJaggedTensor) -> None:
    """Refuses batches of TorchRec's variable batch size."""
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        requirement = "one batch size for all features (stride), the only kind supported"
        remedy = "expand the bags to one per sample first"
        raise NotImplementedError(
            describe("KeyedJaggedTensor", requirement, "a batch size per feature", remedy)
        )
