"""Names of the plain model for a model with wrappers: state_dict, parameters and optimizers know no
wrapper."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule
from torchrec.distributed.utils import append_prefix, modify_input_for_feature_processor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops.batches import (
    INTEGERS,
    BagSplitter,
    FeatureSplit,
    check_bags,
    jagged_by_key,
    named,
)
from dnis_torchrec.ops.select import are_compiled, are_good_bags, can_select
from dnis_torchrec.selection.alpha import (
    Alpha,
    PooledFeature,
    SelectPooled,
    SelectSequences,
    WatchedOutputs,
)
from dnis_torchrec.selection.torchrec import (
    frozen_tables,
    note_frozen_,
    read_by_name_,
    read_collection_by_name_,
    read_rows_in_order_,
)

SOFT_SELECTION = "soft_selection"
"""The name under which a wrapper holds all that the plain model lacks."""


class PlainNames(FusedOptimizerModule, nn.Module):
    """Base of a wrapper whose child stands under the wrapper's own name."""

    child_name: ClassVar[str]
    _FORCE_STATE_DICT_LOAD = True  # DistributedModelParallel then loads wrapper and child as one
    soft_selection: Alpha

    def __init__(self) -> None:
        super().__init__()
        self._prefix = ""
        self.register_state_dict_post_hook(_shorten)
        self.register_load_state_dict_pre_hook(_lengthen)
        self.register_load_state_dict_post_hook(_shorten_differences)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; whoever replaces children by `named_children` sets the child under no
        name."""
        super().__setattr__(name or self.child_name, value)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers fused into the child's tables, by their names in the child."""
        return CombinedOptimizer(list(_fused_in(getattr(self, self.child_name), "")))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules in it; a sharded child has no name: DistributedModelParallel joins names by
        this."""
        for name, child in super().named_children():
            yield (
                "" if name == self.child_name and isinstance(child, ShardedModule) else name,
                child,
            )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules: the child under the wrapper's own name, after it."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                own = prefix if name == self.child_name else append_prefix(prefix, name)
                yield from module.named_modules(memo, own, remove_duplicate)


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict without what soft selection adds: names, and live values, as the plain model
    has them.

    What ``torch.distributed.checkpoint.load`` fills from a checkpoint of the plain model, and what
    to save for one.

    Args:
        model: prepared, sharded or not; of another it is the state_dict.

    Example:
        >>> plain_state_dict(nn.Linear(1, 1)).keys()
        odict_keys(['weight', 'bias'])
    """
    state = model.state_dict()
    for name in [name for name in state if f".{SOFT_SELECTION}." in f".{name}"]:
        del state[name]
    return state


def _fused_in(module: nn.Module, name: str) -> Iterator[tuple[str, KeyedOptimizer]]:
    """Yields the fused optimizers of a module, found as DistributedModelParallel finds them."""
    if isinstance(module, FusedOptimizerModule):
        yield name, module.fused_optimizer
        return
    for own, child in module.named_children():
        yield from _fused_in(child, append_prefix(name, own))


def _shorten(wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Takes the child's name out of what the wrapper has just written."""
    own = f"{prefix}{cast(PlainNames, wrapper).child_name}."
    for name in [name for name in state if name.startswith(own)]:
        state[prefix + name.removeprefix(own)] = state.pop(name)


def _lengthen(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Says where the child is, and that alpha is 1 where a state of its tables has none."""
    wrapper = cast(PlainNames, wrapper)
    wrapper._prefix, added = prefix, f"{prefix}{SOFT_SELECTION}."
    of_child = [name for name in state if name.startswith(prefix) and not name.startswith(added)]
    for name in of_child:
        state[f"{prefix}{wrapper.child_name}.{name.removeprefix(prefix)}"] = state.pop(name)
    if of_child and not any(name.startswith(added) for name in state):
        ones = {
            name: torch.ones_like(alpha)
            for name, alpha in wrapper.soft_selection.state_dict().items()
        }
        state.update({added + name: value for name, value in ones.items()})


def _shorten_differences(wrapper: nn.Module, differences: Any) -> None:
    wrapper = cast(PlainNames, wrapper)
    own = f"{wrapper._prefix}{wrapper.child_name}."
    for names in differences:
        names[:] = [
            name.replace(own, wrapper._prefix, 1) if name.startswith(own) else name
            for name in names
        ]


def as_bags(table: EmbeddingConfig) -> EmbeddingBagConfig:
    """The config of an unpooled table as that of a pooled one, whose pooling is NONE."""
    values = {
        field.name: getattr(table, field.name) for field in fields(EmbeddingConfig) if field.init
    }
    return EmbeddingBagConfig(**values, pooling=PoolingType.NONE)


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
            from dnis_torchrec.ops.batches_triton import bad_bags  # Triton takes seconds to load

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


class SoftSelectionModule(PlainNames):
    """Base of the wrappers around a model's collections, pooled or not: what the search and the
    tables' readers need."""

    blocks: RowBlocks
    selection: WatchedOutputs
    bag_splitter: BagSplitter | None

    @property
    def alpha(self) -> Alpha:
        """See `Alpha`; wrappers of one model share it."""
        return self.soft_selection

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        raise NotImplementedError

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """The feature and table behind each output key, in order."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """A child that is sharded reads by name from then on: pipelines call it without the
        wrapper."""
        before = vars(self).get("_modules", {}).get(name or self.child_name)
        if isinstance(value, ShardedEmbeddingCollection) and isinstance(
            before, EmbeddingCollection
        ):
            note_frozen_(value, frozen_tables(before.embeddings))
        super().__setattr__(name, value)
        if isinstance(value, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            read_collection_by_name_(value)
        if isinstance(value, ShardedEmbeddingCollection):
            read_rows_in_order_(value)


class SoftSelectionEmbeddingBagCollection(SoftSelectionModule, EmbeddingBagCollectionInterface):
    """Wraps an EmbeddingBagCollection and applies soft selection (paper, eq. 3) to its output."""

    child_name = "embedding_bag_collection"

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
        multi_hot_features: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        plain = self._take(embedding_bag_collection)
        self.blocks = blocks
        self._tables = list(plain.embedding_bag_configs())
        self._is_weighted = plain.is_weighted()
        check_blocks(self._tables, blocks)
        self._outputs = pooled_features(self._tables, blocks, multi_hot_features)
        self.bag_check = BagCheck(self._outputs)
        self.bag_splitter = _bag_splitter(self._outputs, blocks)
        self.embedding_bag_collection = _child(
            plain, self._tables, self._outputs, self.bag_splitter
        )
        self.soft_selection = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection = SelectPooled(self._outputs, blocks, self.alpha)
        self.multiplies_tables = False

    def _take(self, wrapped: nn.Module) -> EmbeddingBagCollection:
        """Returns the collection of what is to be wrapped."""
        if not isinstance(wrapped, EmbeddingBagCollection):
            raise TypeError(
                describe("SoftSelection", "an EmbeddingBagCollection", type(wrapped).__name__)
            )
        return wrapped

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up and multiplies them by alpha."""
        self.bag_check(features)
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        pooled = self.embedding_bag_collection(split)
        return self.selection(pooled, features, split)

    def read_whole_features_(self, *, multiply_tables: bool = False) -> None:
        """Gives the child one key per feature, whatever its blocks, for lookups that split bags for
        themselves."""
        self.multiplies_tables = multiply_tables
        if self.bag_splitter is not None:
            keys = {output.name: (output.whole_key,) for output in self._outputs}
            self.embedding_bag_collection = _reading(
                self.embedding_bag_collection, self._tables, self._outputs, keys
            )

    @property
    def embedding_bags(self) -> nn.ModuleDict:
        """Table -> the module whose `weight` it is, as the plain collection has them."""
        return cast(nn.ModuleDict, self.embedding_bag_collection.embedding_bags)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def is_weighted(self) -> bool:
        """Returns whether bags carry per-sample weights."""
        return self._is_weighted

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        return self.embedding_bag_collection

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """The feature and table behind each output key, in order."""
        return self._outputs


def check_blocks(tables: list[EmbeddingBagConfig], blocks: RowBlocks) -> None:
    """Checks that blocks are of these tables, and that their pooling is known."""
    for table in tables:
        check_known("table", table.name, blocks.routings)
        place, remedy = f"table {table.name!r}", "make the blocks from counts of this table"
        blocked = blocks.routings[table.name].num_embeddings
        fits = blocked == table.num_embeddings
        check(fits, place, f"blocks of num_embeddings={table.num_embeddings} rows", blocked, remedy)
        dim = blocks.embedding_dims[table.name]
        check(
            dim == table.embedding_dim,
            place,
            f"blocks of embedding_dim={table.embedding_dim}",
            dim,
            remedy,
        )
        if table.pooling not in (PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE):
            raise NotImplementedError(
                describe(place, "supported pooling is SUM or MEAN", table.pooling)
            )


def pooled_features(
    tables: list[EmbeddingBagConfig], blocks: RowBlocks, multi_hot_features: Collection[str] | None
) -> tuple[PooledFeature, ...]:
    """Everything that stands behind the output keys of a collection, in their order."""
    all_features = {feature for table in tables for feature in table.feature_names}
    for feature in multi_hot_features or ():
        check_known("feature", feature, all_features)
    if multi_hot_features is None:
        multi_hot_features = {f for f in all_features if blocks.max_bag_lengths.get(f, 2) > 1}
    outputs = []
    for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True):
        for feature, name in zip(table.feature_names, names, strict=True):
            outputs.append(
                PooledFeature(
                    feature=feature,
                    name=name,
                    table=table.name,
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    is_multi_hot=feature in multi_hot_features,
                    divides=table.pooling == PoolingType.MEAN and feature in multi_hot_features,
                    first_alpha_row=blocks.first_alpha_row(table.name),
                    num_blocks=blocks.routings[table.name].num_blocks,
                )
            )
    return tuple(outputs)


def _bag_splitter(outputs: tuple[PooledFeature, ...], blocks: RowBlocks) -> BagSplitter | None:
    if not any(output.is_multi_hot for output in outputs):
        return None
    splits: dict[str, FeatureSplit] = {}
    for output in outputs:
        routing = blocks.routings[output.table] if output.is_multi_hot else None
        split = FeatureSplit(feature=output.feature, keys=output.block_keys, routing=routing)
        splits.setdefault(output.name if output.is_multi_hot else output.feature, split)
    return BagSplitter(list(splits.values()))


def _child(
    wrapped: EmbeddingBagCollection,
    tables: list[EmbeddingBagConfig],
    outputs: tuple[PooledFeature, ...],
    splitter: BagSplitter | None,
) -> EmbeddingBagCollection:
    """The collection that reads split bags: the same tables, under the same names, with the same
    weights."""
    is_torchrecs = (
        type(wrapped) is EmbeddingBagCollection
    )  # sharders look up what to do by this very type
    if (
        is_torchrecs
        and splitter is None
        and all(table.pooling == PoolingType.SUM for table in tables)
    ):
        return wrapped
    return _reading(
        wrapped, tables, outputs, {output.name: output.block_keys for output in outputs}
    )


def _reading(
    wrapped: EmbeddingBagCollection,
    tables: list[EmbeddingBagConfig],
    outputs: tuple[PooledFeature, ...],
    keys_of: Mapping[str, tuple[str, ...]],
) -> EmbeddingBagCollection:
    """The tables of a collection, read by other keys and summed: output -> its keys."""
    configs = []
    for table in tables:
        keys = [
            key for output in outputs if output.table == table.name for key in keys_of[output.name]
        ]
        configs.append(replace(table, feature_names=keys, pooling=PoolingType.SUM))
    child = EmbeddingBagCollection(
        tables=configs, is_weighted=wrapped.is_weighted(), device=torch.device("meta")
    )
    for name, bag in wrapped.embedding_bags.items():
        child.embedding_bags[name].weight = bag.weight
    child._device = wrapped.device
    return child


def soft_selection_modules(model: nn.Module) -> dict[str, SoftSelectionModule]:
    """The wrappers in a model by their FQN inside DistributedModelParallel and DDP."""
    return {
        fqn: module
        for fqn, module in get_unwrapped_module(model).named_modules()
        if isinstance(module, SoftSelectionModule)
    }


FEATURE_PROCESSED = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
"""TorchRec's modules that process features in front of the collection that they hold."""
INNER = "_embedding_bag_collection"
"""The attribute by which they hold it."""


class SoftSelectionFeatureProcessedEmbeddingBagCollection(SoftSelectionEmbeddingBagCollection):
    """Wraps a FeatureProcessedEmbeddingBagCollection and applies soft selection to its output."""

    child_name = "feature_processed"

    def __init__(
        self,
        feature_processed: FeatureProcessedEmbeddingBagCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
        multi_hot_features: Collection[str] | None = None,
    ) -> None:
        super().__init__(
            cast(EmbeddingBagCollection, feature_processed),
            blocks,
            alpha=alpha,
            multi_hot_features=multi_hot_features,
        )

    def _take(self, wrapped: nn.Module) -> EmbeddingBagCollection:
        if type(wrapped) is not FeatureProcessedEmbeddingBagCollection:
            received = type(wrapped).__name__
            raise TypeError(
                describe("SoftSelection", "a FeatureProcessedEmbeddingBagCollection", received)
            )
        collection = wrapped._embedding_bag_collection
        self.feature_processed = with_processors_of(wrapped, collection)
        return collection

    def __setattr__(self, name: str, value: Any) -> None:
        """The collection stays where TorchRec has it; sharded, it reads by name from then on."""
        if name == "embedding_bag_collection":
            self.feature_processed._embedding_bag_collection = value
        else:
            super().__setattr__(name, value)
        if isinstance(value, ShardedFeatureProcessedEmbeddingBagCollection):
            read_by_name_(value)

    @property
    def embedding_bag_collection(self) -> EmbeddingBagCollection | ShardedEmbeddingBagCollection:
        """The collection behind the processors."""
        return self.feature_processed._embedding_bag_collection

    @property
    def _embedding_bag_collection(self) -> EmbeddingBagCollection | ShardedEmbeddingBagCollection:
        """The same, by the name that it has in the plain model."""
        return self.embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Processes features, looks bags up, and multiplies them by alpha."""
        self.bag_check(features)
        if self.bag_splitter is None:
            return self.selection(self.feature_processed(features), features, features)
        if isinstance(self.feature_processed, ShardedModule):
            remedy = "call soft_selection.on_shards.select_on_shards_, as BilevelTrainPipeline does"
            raise RuntimeError(
                describe("feature processors", "selection on the shards", "split bags", remedy)
            )
        return self.look_up_processed(self.processed(features))

    def processed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Bags with the weights that the processors give them, made here. Local, no collective."""
        processors, bags = self.feature_processed._feature_processors, copy.copy(features)
        bags._weights = bags._jt_dict = None
        is_collection = isinstance(processors, FeatureProcessorsCollection)
        if any(getattr(module, "_pre_processed", False) for module in processors.modules()):
            modify_input_for_feature_processor(
                bags, processors, is_collection
            )  # they now want places as weights
        return (
            processors(bags) if is_collection else apply_feature_processors_to_kjt(bags, processors)
        )

    def look_up_processed(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up that have their weights, and multiplies them by alpha."""
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        return self.selection(self.embedding_bag_collection(split), features, split)


def with_processors_of(
    holder: nn.Module, collection: EmbeddingBagCollection
) -> FeatureProcessedEmbeddingBagCollection:
    """An unsharded module with the processors of another, around a collection."""
    processors: Any = holder._feature_processors
    for module in processors.modules():
        if hasattr(module, "_pre_processed"):  # set for good where TorchRec shards rows
            module._pre_processed = False
    if not isinstance(processors, FeatureProcessorsCollection):
        processors = dict(processors.items())
    return FeatureProcessedEmbeddingBagCollection(collection, processors).train(holder.training)


class SoftSelectionEmbeddingCollection(SoftSelectionModule, EmbeddingCollectionInterface):
    """Wraps an EmbeddingCollection and applies soft selection (paper, eq. 3) to its output."""

    child_name = "embedding_collection"

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        blocks: RowBlocks,
        *,
        alpha: Alpha | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(embedding_collection, EmbeddingCollection):
            received = type(embedding_collection).__name__
            raise TypeError(describe("SoftSelection", "an EmbeddingCollection", received))
        self.blocks = blocks
        self._tables = list(embedding_collection.embedding_configs())
        self._need_indices = embedding_collection.need_indices()
        tables = [as_bags(table) for table in self._tables]
        check_blocks(tables, blocks)
        self._outputs = pooled_features(tables, blocks, ())
        self.bag_check = BagCheck(
            tuple(replace(output, is_multi_hot=True) for output in self._outputs)
        )
        self.bag_splitter = None
        self.embedding_collection = embedding_collection
        self.soft_selection = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection = SelectSequences(self._outputs, blocks, self.alpha)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and multiplies their embeddings by alpha."""
        self.bag_check(features)
        embeddings = self.embedding_collection(features)
        return self.selection(embeddings, features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the wrapped collection, as the user wrote them."""
        return self._tables

    def need_indices(self) -> bool:
        """Returns whether ids are passed on as the weights of the outputs."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Returns D, which all tables of an EmbeddingCollection share."""
        return self._tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Returns the output keys of each table."""
        return [
            [output.name for output in self._outputs if output.table == table.name]
            for table in self._tables
        ]

    @property
    def embeddings(self) -> nn.ModuleDict:
        """Table -> the module whose `weight` it is, as the plain collection has them."""
        return cast(nn.ModuleDict, self.embedding_collection.embeddings)

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        return self.embedding_collection

    @property
    def outputs(self) -> tuple[PooledFeature, ...]:
        """The feature and table behind each output key, in order."""
        return self._outputs
