"""Bags of a batch: checked, split by block, and taken apart by key."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from dnis_torchrec.checks import SHOWN, check, check_known, describe
from dnis_torchrec.ops.select import are_compiled, split_bags

INTEGERS = (torch.int32, torch.int64)
"""Dtypes of the ids, lengths and offsets that operators take."""
_FEW_BAGS = 128
"""Numbers that Python adds up before torch has begun."""
_RAISES, _NO_WARNING = 0, torch.zeros(1, dtype=torch.int64)
"""Arguments with which FBGEMM's check of bounds raises, and changes nothing."""


def name_features(features: Sequence[str]) -> str:
    """Features as errors name them: ``"feature 'f'"``, ``"features 'f', 'g'"``."""
    more = ", ..." if len(features) > SHOWN else ""
    names_shown = ", ".join(map(repr, features[:SHOWN])) + more
    return f"features {names_shown}" if len(features) > 1 else f"feature {names_shown}"


def check_bags(features: KeyedJaggedTensor) -> None:
    """Checks that lengths, offsets and weights of a batch are those of its ids."""
    lengths, ids, weights = features.lengths(), features.values(), features.weights_or_none()
    if torch.compiler.is_exporting():
        is_wrong = (lengths < 0).any() | (lengths.sum() != ids.numel())
        torch._check(is_wrong.long().item() == 0)
    if torch.compiler.is_compiling():
        return
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
        check(agree, name_features(names), "offsets that rise from 0 by the lengths", "others")


def offsets_of_rows(features: KeyedJaggedTensor, limits: Tensor) -> Tensor | None:
    """Returns the offsets of a sound batch, in which every id is a row, in one pass: the usual
    case."""
    ids, weights = features.values(), features.weights_or_none()
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return None
    lengths, lengths_of_keys = features.lengths(), features.offsets_or_none()
    num_bags = len(limits) * features.stride()
    fits = ids.dim() == lengths.dim() == 1 and lengths.numel() == num_bags > 0
    fits = fits and ids.dtype in INTEGERS and lengths.dtype in INTEGERS
    if not fits or not (weights is None or weights.numel() == ids.numel()):
        return None
    # where their sum overflows, they fall
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    if lengths_of_keys is not None:
        agrees = lengths_of_keys.dtype == offsets.dtype and torch.equal(lengths_of_keys, offsets)
        if not agrees:
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
        counts = lengths.flatten().tolist()
        return sum(counts) == num_ids and min(counts, default=0) >= 0
    # no length above the number of ids: their sum does not overflow
    lowest, highest = torch.aminmax(lengths)
    return int(lowest) >= 0 and int(highest) <= num_ids and int(lengths.sum()) == num_ids


def refuse_bags(
    names: Sequence[str],
    lengths: Tensor,
    strides: Sequence[int],
    ids: Tensor,
    weights: Tensor | None = None,
) -> None:
    """Says what is wrong with the bags of a batch; looks at one after the other."""
    everywhere, num_ids, num_bags = name_features(names), ids.numel(), sum(strides)
    check(lengths.dtype in INTEGERS, everywhere, "int32 or int64 lengths", lengths.dtype)
    requirement = f"{num_bags} lengths, one for each bag"
    check(lengths.numel() == num_bags, everywhere, requirement, lengths.numel())
    check(ids.dim() == 1, everywhere, "ids of one dimension", tuple(ids.shape))
    bags = [(name, n) for name, size in zip(names, strides, strict=True) for n in range(size)]
    rest = num_ids
    for (name, number), length in zip(bags, lengths.flatten().tolist(), strict=True):
        place, sample = name_features([name]), f"in sample {number}"
        check(length >= 0, place, "lengths of at least 0", f"{length} {sample}")
        value = f"a bag of {length} {sample}, with {rest} left"
        check(length <= rest, place, "no more ids than there are", value)
        rest -= length
    requirement = f"as many ids as their lengths add up to, {num_ids - rest}"
    check(rest == 0, everywhere, requirement, num_ids)
    if weights is not None:
        value = f"{weights.numel()} weights"
        check(weights.numel() == num_ids, everywhere, f"a weight for each of {num_ids} ids", value)


def readable_bags(
    names: Sequence[str], ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Checks bags that an operator has refused, and converts them to dtypes that it takes."""
    everywhere = name_features(names)
    check(offsets.dtype in INTEGERS, everywhere, "int32 or int64 offsets", offsets.dtype)
    first = int(offsets[0]) if offsets.numel() else None
    check(first == 0, everywhere, "offsets that rise from 0", first)
    strides = [(offsets.numel() - 1) // max(len(names), 1)] * len(names)
    refuse_bags(names, offsets.long().diff(), strides, ids, weights)
    return integer_ids(ids, names), weights if weights is None else weights.float()


def integer_ids(ids: Tensor, names: Sequence[str]) -> Tensor:
    """Ids as operators take them: what is no integer is refused."""
    if ids.dtype in INTEGERS:
        return ids
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(describe(name_features(names), "integer ids", ids.dtype, "convert them"))
    return ids.long()


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSplit:
    """The rule by which the bags of one feature are split."""

    feature: str
    keys: tuple[str | None, ...]
    routing: RowRouting | None = None

    def __post_init__(self) -> None:
        num_blocks = 1 if self.routing is None else self.routing.num_blocks
        place, count = f"feature {self.feature!r}", len(self.keys)
        check(count == num_blocks, place, f"{num_blocks} keys", count)


class BagSplitter(nn.Module):
    """Splits bags by block: key f becomes one key per block, in the order given."""

    _slots: Tensor

    def __init__(self, splits: Sequence[FeatureSplit]) -> None:
        super().__init__()
        self._splits = tuple(splits)
        self._keys: list[str] = [key for split in splits for key in split.keys if key is not None]
        are_distinct = len(set(self._keys)) == len(self._keys)
        check(are_distinct, "BagSplitter", "distinct output keys", self._keys)
        # Features that share a routing (several on one table) share its tensors.
        self._routers = nn.ModuleList()
        self._router_of_split: list[int | None] = []
        place_of_routing: dict[int, int] = {}
        for split in self._splits:
            if split.routing is None:
                self._router_of_split.append(None)
                continue
            if id(split.routing) not in place_of_routing:
                place_of_routing[id(split.routing)] = len(self._routers)
                self._routers.append(RowRouter(split.routing))
            self._router_of_split.append(place_of_routing[id(split.routing)])
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
        # the operator knows no gradient
        is_at_once = bags.values().device.type == "cpu" and are_compiled() and not learns
        split = self._split_at_once if is_at_once else self._split_by_sorting
        values, lengths, weights = split(bags)
        return KeyedJaggedTensor(self._keys, values, weights, lengths, stride=features.stride())

    def _split_at_once(self, bags: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, lengths and weights of the split bags, by the compiled operator."""
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
        values = bags.values().split(bags.length_per_key())
        blocks, first = [], 0  # the number of each id's pair of split and block
        for split, router, ids in zip(self._splits, self._router_of_split, values, strict=True):
            block = ids.new_zeros(len(ids), dtype=torch.int64)
            blocks.append((block if router is None else self._routers[router](ids)) + first)
            first += len(split.keys) + 1
        slot = self._slots.index_select(0, torch.cat(blocks))
        return sort_by_slot(bags, slot, len(self._keys))


def sort_by_slot(
    bags: KeyedJaggedTensor, slot: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Splits bags by the key that each id goes to; ids keep their order within a bag."""
    values, weights, lengths = bags.values(), bags.weights_or_none(), bags.lengths()
    batch_size = bags.stride()
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


def jagged_by_key(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The bags of every key: what `KeyedJaggedTensor.to_dict` gives, on the device where the batch
    is."""
    if not features.lengths().numel():
        no_bags = JaggedTensor(
            values=features.values(), lengths=features.lengths(), weights=features.weights_or_none()
        )
        return dict.fromkeys(features.keys(), no_bags)
    bags_of_keys = features.to_dict()
    if any(bags.values().device != features.device() for bags in bags_of_keys.values()):
        features._jt_dict = None
        bags_of_keys = features.to_dict()
    return bags_of_keys
