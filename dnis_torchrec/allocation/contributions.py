"""What every block of every table adds to a model output: pooled pieces, and those of sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.checks import check
from dnis_torchrec.ops.batches import BagSplitter, FeatureSplit, check_one_batch_size, jagged_by_key
from dnis_torchrec.selection.alpha import PooledFeature
from dnis_torchrec.selection.shards import is_pooled, table_configs_of
from dnis_torchrec.selection.wrapper import (
    SoftSelectionEmbeddingBagCollection,
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
    check_blocks,
    pooled_features,
)


@dataclass(frozen=True, eq=False)
class Entries:
    """Reads of one table's blocks through one feature: an entry is a pair of a sample and a block
    that it reads."""

    samples: Tensor
    blocks: Tensor
    worth: Tensor


@dataclass(frozen=True, eq=False)
class Reads:
    """Which samples read which blocks of one table through one feature, and how often."""

    samples: Tensor
    blocks: Tensor
    times: Tensor
    slopes: Tensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """What blocks of one table add to the output of one feature: ``values[e]`` of ``blocks[e]`` to
    row ``rows[e]`` of the output, which has `num_rows`."""

    name: str
    table: str
    rows: Tensor
    blocks: Tensor
    values: Tensor
    num_rows: int

    def times(self, alpha: Tensor) -> Tensor:
        """The output of the feature where blocks are multiplied by rows of alpha, ``(S, D)``."""
        parts = self.values * alpha.index_select(0, self.blocks)
        if len(parts) == self.num_rows and self.is_whole:
            return parts
        return parts.new_zeros(self.num_rows, parts.shape[1]).index_add(0, self.rows, parts)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every row of the output is one block's, in the order of rows."""
        return bool((self.rows == torch.arange(len(self.rows), device=self.rows.device)).all())


@dataclass(frozen=True, eq=False)
class Apart:
    """Outputs of a collection for bags that each hold the ids of a single block."""

    sums: Mapping[str, Tensor]
    lengths: Mapping[str, Tensor]


class _Blocks:
    """A collection of a model, and the blocks of its tables."""

    def __init__(
        self,
        collection: nn.Module,
        blocks: RowBlocks,
        device: torch.device,
        multi_hot: Collection[str] | None,
    ) -> None:
        tables = table_configs_of(collection)
        check_blocks(tables, blocks)
        self.collection = collection
        self.outputs = pooled_features(tables, blocks, multi_hot)
        self._routers = {
            table.name: RowRouter(blocks.routings[table.name]).to(device) for table in tables
        }


class CollectionBlocks(_Blocks):
    """A pooled collection of a model, and the blocks of its tables."""

    def __init__(self, collection: nn.Module, blocks: RowBlocks, device: torch.device) -> None:
        multi_hot = None
        if isinstance(collection, SoftSelectionEmbeddingBagCollection):
            multi_hot = {output.feature for output in collection.outputs if output.is_multi_hot}
        super().__init__(collection, blocks, device, multi_hot)
        self._features = list(dict.fromkeys(output.feature for output in self.outputs))
        self._first_slot: dict[str, int] = {}
        splits, slots = [], []
        for feature in self._features:
            keys = list[str]()
            for output in self.outputs:
                if output.is_multi_hot and output.feature == feature:
                    self._first_slot[output.name] = len(keys)
                    keys += output.block_keys
                    routing = blocks.routings[output.table]
                    splits.append(
                        FeatureSplit(feature=feature, keys=output.block_keys, routing=routing)
                    )
            slots.append(len(keys))
        self._num_slots = max(slots)
        self.floats_per_sample = (self._num_slots + 2) * sum(
            output.embedding_dim for output in self.outputs
        )
        self._splitter = BagSplitter(splits).to(device)
        # the splitter's bag for each slot; bag 0 is empty, for slots that a feature does not need
        sizes, nth = torch.tensor(slots)[:, None], torch.arange(self._num_slots)
        bags = 1 + sizes.cumsum(0) - sizes + nth
        self._bag_of_slot = bags.where(nth < sizes, 0).flatten().to(device)

    def apart(self, lookup: Lookup) -> Apart | None:
        """Looks bags up again, one bag a block; None if no feature is multi-hot. Distributed."""
        if not self._num_slots:
            return None
        bags = self._block_by_block(lookup.features)
        look_up: Callable[[KeyedJaggedTensor], KeyedTensor] = self.collection
        if isinstance(self.collection, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            look_up = self.collection.look_up_processed
        sums = _wait(look_up(bags)).to_dict()
        return Apart(sums, {feature: bag.lengths() for feature, bag in jagged_by_key(bags).items()})

    def _block_by_block(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Splits every bag of a multi-hot feature into one bag per block.

        A batch of B samples becomes one of ``num_slots * B``: slot 0 of all samples comes first."""
        batch_size, split = features.stride(), self._splitter(features)
        lengths = split.lengths().view(-1, batch_size)
        lengths = torch.cat([lengths.new_zeros(1, batch_size), lengths])[self._bag_of_slot]
        return KeyedJaggedTensor(
            keys=self._features,
            values=split.values(),
            weights=split.weights_or_none(),
            lengths=lengths.flatten(),
            stride=self._num_slots * batch_size,
        )

    def note(self, features: KeyedJaggedTensor, output: KeyedTensor) -> Lookup:
        """Records a call; a leaf that requires a gradient replaces its output."""
        leaf = output.values().detach().requires_grad_()
        sums = KeyedTensor(output.keys(), output.length_per_key(), leaf)
        return Lookup(self, features, sums, leaf)

    def entries(
        self, lookup: Lookup, apart: Apart | None, gradient: Tensor
    ) -> Iterator[tuple[str, Entries]]:
        """Yields every feature's contributions to the loss, by sample and block. No collective."""
        slopes = self._slopes(lookup, gradient)
        for part in self.pieces(lookup, apart):
            of_rows = slopes[part.name]
            if not part.is_whole or len(part.rows) < part.num_rows:  # else it needs no copy
                of_rows = of_rows.index_select(1, part.rows)
            yield part.table, Entries(part.rows, part.blocks, (part.values * of_rows).double())

    def pieces(self, lookup: Lookup, apart: Apart | None) -> Iterator[Pieces]:
        """Yields what the blocks of every feature add to the output. No collective."""
        bags, by_key = jagged_by_key(lookup.features), lookup.output.to_dict()
        for output in self.outputs:
            of_feature = bags[output.feature]
            if apart is not None and output.is_multi_hot:
                yield self._of_several_ids(output, of_feature, apart)
            else:
                yield self._of_one_id(output, of_feature, by_key[output.name].detach())

    def output_of(self, lookup: Lookup, values: Mapping[str, Tensor]) -> KeyedTensor:
        """Returns an output like the one recorded, with other values by name."""
        keys = lookup.output.keys()
        parts = torch.cat([values[key] for key in keys], dim=1)
        return KeyedTensor(keys, lookup.output.length_per_key(), parts)

    def reads(self, lookup: Lookup, gradient: Tensor) -> Iterator[tuple[str, Reads]]:
        """Yields which blocks every feature reads, and the gradient there. No collective."""
        bags, batch_size = jagged_by_key(lookup.features), lookup.features.stride()
        of_samples = torch.arange(batch_size, device=gradient.device)
        slopes = self._slopes(lookup, gradient)
        for output in self.outputs:
            of_feature = bags[output.feature]
            lengths, blocks = of_feature.lengths(), self._routers[output.table](of_feature.values())
            is_in_block = blocks < output.num_blocks
            places = blocks * batch_size + of_samples.repeat_interleave(lengths)
            places, counts = places[is_in_block].unique(return_counts=True)
            samples = places % batch_size
            times = counts.double()
            if output.divides:
                times = times / lengths[samples].double().square()
            of_samples_read = slopes[output.name].index_select(1, samples)
            yield output.table, Reads(samples, places // batch_size, times, of_samples_read)

    def _slopes(self, lookup: Lookup, gradient: Tensor) -> dict[str, Tensor]:
        """Output -> the gradient of its columns, ``(T, B, D)``."""
        widths = lookup.output.length_per_key()
        return dict(zip(lookup.output.keys(), gradient.split(widths, dim=2), strict=True))

    def _of_one_id(self, output: PooledFeature, bags: JaggedTensor, sums: Tensor) -> Pieces:
        lengths = bags.lengths()
        place, longest = f"table {output.table!r}, feature {output.feature!r}", int(lengths.max())
        requirement, remedy = "bags of at most one id, as counted", "count data that has such bags"
        check(longest <= 1, place, requirement, f"a bag of {longest}", remedy)
        samples, blocks = lengths.nonzero().squeeze(1), self._routers[output.table](bags.values())
        is_in_block = blocks < output.num_blocks
        samples, blocks, size = samples[is_in_block], blocks[is_in_block], len(sums)
        sums = sums[samples] if len(samples) < size else sums  # all of them need no copy
        return Pieces(output.name, output.table, samples, blocks, sums, size)

    def _of_several_ids(self, output: PooledFeature, bags: JaggedTensor, apart: Apart) -> Pieces:
        first, batch_size = self._first_slot[output.name], bags.lengths().numel()
        slots = slice(first * batch_size, (first + output.num_blocks) * batch_size)
        lengths = apart.lengths[output.feature][slots]
        read = lengths.nonzero().squeeze(1)
        samples, blocks = read % batch_size, read // batch_size
        sums = apart.sums[output.name][slots][read]
        if output.divides:
            # the mean of a block's ids, of the whole bag
            share = lengths[read].double() / bags.lengths()[samples]
            sums = sums * share.to(sums.dtype).unsqueeze(1)
        return Pieces(output.name, output.table, samples, blocks, sums, batch_size)


@dataclass(frozen=True, eq=False)
class Lookup:
    """A call that the model makes to a collection: the features that went in, the output."""

    of: WatchedCollection
    features: KeyedJaggedTensor
    output: Any
    leaf: Tensor


Call: TypeAlias = tuple[Lookup, Apart | None, Tensor]
"""A call, its bags taken apart, and the gradient in its leaf."""


@contextmanager
def watching(of: Sequence[WatchedCollection]) -> Iterator[list[Lookup]]:
    """Records the calls of collections inside the ``with`` block.

    The tables get no gradient there: each output is a leaf that requires one."""
    lookups: list[Lookup] = []
    with ExitStack() as stack:
        for blocks in of:
            forward = _noting(blocks, blocks.collection.forward, lookups)
            stack.enter_context(_forward_as(blocks.collection, forward))
        yield lookups


@contextmanager
def answering(
    of: Sequence[WatchedCollection], answers: Mapping[int, Sequence[Any]]
) -> Iterator[None]:
    """Lets collections answer their calls, one after the other, by ``id`` of their
    `WatchedCollection`."""
    with ExitStack() as stack:
        for blocks in of:
            stack.enter_context(_forward_as(blocks.collection, _in_turn(answers[id(blocks)])))
        yield


def _in_turn(answers: Sequence[Any]) -> Callable[[KeyedJaggedTensor], Any]:
    rest = iter(answers)
    return lambda _: next(rest)


@contextmanager
def _forward_as(
    collection: nn.Module, forward: Callable[[KeyedJaggedTensor], Any]
) -> Iterator[None]:
    attributes = vars(collection)  # as TorchRec's pipelines replace forwards: no module changes
    old = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if old is None:
            del attributes["forward"]
        else:
            attributes["forward"] = old


def _noting(
    blocks: WatchedCollection, forward: Callable[[KeyedJaggedTensor], Any], lookups: list[Lookup]
) -> Callable[[KeyedJaggedTensor], Any]:
    def look_up(features: KeyedJaggedTensor) -> Any:
        if not torch.is_grad_enabled():
            return forward(features)
        check_one_batch_size(features)
        with torch.no_grad():
            output = _wait(forward(features))
        if isinstance(blocks.collection, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            features = blocks.collection.process(features)  # a bag taken apart has other places
        lookups.append(blocks.note(features, output))
        return lookups[-1].output

    return look_up


def _wait(output: Any) -> Any:
    """Waits for the output of a sharded collection, which may still be on its way."""
    return output.wait() if isinstance(output, LazyAwaitable) else output


def entries_by_table(calls: Iterable[Call], batch_size: int) -> dict[str, Entries]:
    """What the blocks of every table that is read contribute, one entry a sample and block."""
    entries: dict[str, list[Entries]] = defaultdict(list)
    for lookup, apart, gradient in calls:
        for table, part in lookup.of.entries(lookup, apart, gradient):
            entries[table].append(part)
    result = {table: parts[0] for table, parts in entries.items()}
    for table, parts in entries.items():
        if len(parts) > 1:  # reads of several features are added up
            places = torch.cat([part.blocks * batch_size + part.samples for part in parts])
            worth = torch.cat([part.worth for part in parts], dim=1)
            result[table] = _one_of_each(places, worth, batch_size)
    return result


def _one_of_each(places: Tensor, worth: Tensor, batch_size: int) -> Entries:
    """Adds up reads of one table until each pair of a sample and a block stands there once."""
    places, runs = places.unique(return_inverse=True)
    worth = torch.stack([sum_by_group(of_output, runs, len(places)) for of_output in worth])
    return Entries(places % batch_size, places // batch_size, worth)


def sum_by_group(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Adds up rows, group by group, in their order: ten times as fast as `index_add_`."""
    if not len(values):
        return values.new_zeros(num_groups, values.shape[1])
    order = groups.argsort(stable=True)
    sizes = torch.bincount(groups, minlength=num_groups)
    return functional.embedding_bag(order, values, sizes.cumsum(0) - sizes, mode="sum")


def watched_collection(
    collection: nn.Module, blocks: RowBlocks, device: torch.device
) -> WatchedCollection:
    """A collection and the blocks of its tables, whether it pools or not."""
    kind = CollectionBlocks if is_pooled(collection) else SequenceBlocks
    return kind(collection, blocks, device)


class SequenceBlocks(_Blocks):
    """An EmbeddingCollection of a model, and the blocks of its tables."""

    def __init__(self, collection: nn.Module, blocks: RowBlocks, device: torch.device) -> None:
        super().__init__(collection, blocks, device, ())
        ids = sum(blocks.max_bag_lengths.get(output.feature, 1) for output in self.outputs)
        self.floats_per_sample = max(1, 3 * ids * self.outputs[0].embedding_dim)

    def apart(self, lookup: Lookup) -> None:
        """Every id stands apart already."""

    def note(self, features: KeyedJaggedTensor, output: Mapping[str, JaggedTensor]) -> Lookup:
        """Records a call; views of a leaf that requires a gradient replace its output."""
        bags_of = [output[feature.name] for feature in self.outputs]
        leaf = torch.cat([bag.values().detach() for bag in bags_of]).requires_grad_()
        parts = leaf.split([len(bag.values()) for bag in bags_of])
        dims = {
            feature.name: JaggedTensor(
                values=part, lengths=bag.lengths(), weights=bag.weights_or_none()
            )
            for feature, part, bag in zip(self.outputs, parts, bags_of, strict=True)
        }
        return Lookup(self, features, dims, leaf)

    def entries(
        self, lookup: Lookup, apart: Apart | None, gradient: Tensor
    ) -> Iterator[tuple[str, Entries]]:
        """Yields every feature's contributions to the loss, by sample and block. No collective."""
        batch_size = lookup.features.stride()
        for part, samples, slopes in self._ids(lookup, gradient):
            worth = (part.values * slopes).double()
            yield part.table, _one_of_each(part.blocks * batch_size + samples, worth, batch_size)

    def pieces(self, lookup: Lookup, apart: Apart | None) -> Iterator[Pieces]:
        """Yields what the blocks of every feature add to the output. No collective."""
        bags = jagged_by_key(lookup.features)
        for output in self.outputs:
            values = lookup.output[output.name].values().detach()
            blocks = self._routers[output.table](bags[output.feature].values())
            rows = (blocks < output.num_blocks).nonzero().squeeze(1)
            feature = output.name, output.table
            yield Pieces(*feature, rows, blocks[rows], values[rows], len(values))

    def output_of(self, lookup: Lookup, values: Mapping[str, Tensor]) -> dict[str, JaggedTensor]:
        """Returns an output like the one recorded, with other values by name."""
        return {
            name: JaggedTensor(values[name], lengths=bag.lengths(), weights=bag.weights_or_none())
            for name, bag in lookup.output.items()
        }

    def reads(self, lookup: Lookup, gradient: Tensor) -> Iterator[tuple[str, Reads]]:
        """Yields which blocks every feature reads, and the gradient there. No collective."""
        for part, samples, slopes in self._ids(lookup, gradient):
            ones = torch.ones_like(part.blocks, dtype=torch.float64)
            yield part.table, Reads(samples, part.blocks, ones, slopes)

    def _ids(self, lookup: Lookup, gradient: Tensor) -> Iterator[tuple[Pieces, Tensor, Tensor]]:
        """Of every feature: the ids that have a block, their samples, and the gradient in them."""
        bags, batch_size = jagged_by_key(lookup.features), lookup.features.stride()
        of_samples = torch.arange(batch_size, device=gradient.device)
        slopes = gradient.split(
            [bags[output.feature].values().numel() for output in self.outputs], 1
        )
        parts = zip(self.outputs, self.pieces(lookup, None), slopes, strict=True)
        for output, part, of_output in parts:
            samples = of_samples.repeat_interleave(bags[output.feature].lengths())[part.rows]
            yield part, samples, of_output[:, part.rows]


WatchedCollection: TypeAlias = CollectionBlocks | SequenceBlocks
"""A model's collection and the blocks of its tables, pooled or not."""
