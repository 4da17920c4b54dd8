"""The wrappers that apply soft selection around a collection, pooled or not.

The user's collection stays a child, so any sharder, planner and kernel works on it unchanged.
The embedding of a *single-id* feature (bags of at most one id) is multiplied by the row of alpha of
its block. Bags of a *multi-hot* feature are split by block and pooled apart, and the wrapper adds
up alpha_s * sum_s: up to S times the output volume, unless `on_shards` moves both to the shards.

Names know no wrapper: a checkpoint of the plain model is one of the prepared model. What a wrapper
adds is apart, under `soft_selection`. TorchRec does the same for its PipelinedPostproc.
"""

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
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.ops import batches
from dnis_torchrec.ops.select import are_compiled, are_good_bags, can_select
from dnis_torchrec.selection import torchrec
from dnis_torchrec.selection.alpha import (
    Alpha,
    PooledFeature,
    SelectPooled,
    SelectSequences,
    WatchedOutputs,
)
from dnis_torchrec.selection.torchrec_inputs import INNER, processed_bags, with_processors_of

SOFT_SELECTION = "soft_selection"
"""The name under which a wrapper holds all that the plain model lacks."""
UNLIMITED = torch.iinfo(torch.int64).max
"""Limit of the ids and bags of a key that nobody reads."""


class SoftSelectionModule(FusedOptimizerModule, nn.Module):
    """Base of the wrappers: a child that stands under the wrapper's own name, and alpha."""

    child_name: ClassVar[str]
    _FORCE_STATE_DICT_LOAD = True  # DistributedModelParallel then loads wrapper and child as one
    soft_selection: Alpha
    blocks: RowBlocks
    selection: WatchedOutputs
    bag_splitter: batches.BagSplitter | None
    outputs: tuple[PooledFeature, ...]
    """The feature and table behind each output key, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._prefix = ""
        self.register_state_dict_post_hook(_shorten)
        self.register_load_state_dict_pre_hook(_lengthen)
        self.register_load_state_dict_post_hook(_shorten_differences)

    @property
    def alpha(self) -> Alpha:
        """See `Alpha`; wrappers of one model share it."""
        return self.soft_selection

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        return cast(nn.Module, getattr(self, self.child_name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a child that is sharded reads by name from then on."""
        name = name or self.child_name  # as `named_children` has it
        child = vars(self).get("_modules", {}).get(name)
        if isinstance(value, ShardedEmbeddingCollection):
            if isinstance(child, EmbeddingCollection):
                torchrec.note_frozen_(value, torchrec.frozen_tables(child.embeddings))
            torchrec.read_rows_in_order_(value)
        super().__setattr__(name, value)
        if isinstance(value, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            # pipelines call it without the wrapper
            torchrec.read_collection_by_name_(value)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers fused into the child's tables, by their names in the child."""
        return CombinedOptimizer(list(_fused_optimizers(getattr(self, self.child_name), "")))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules in it; DistributedModelParallel wants a sharded child without a name."""
        for name, child in super().named_children():
            is_sharded = name == self.child_name and isinstance(child, ShardedModule)
            yield "" if is_sharded else name, child

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
                place = prefix if name == self.child_name else append_prefix(prefix, name)
                yield from module.named_modules(memo, place, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names of the child's parts, as torch.distributed.checkpoint.state_dict asks for them."""
        inner = getattr(self, self.child_name)._modules
        return dict.fromkeys(inner, self.child_name) | {"": ""}  # a sharded child has no name


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict, of live values, without what soft selection adds to the plain model's."""
    state = model.state_dict()
    for name in [name for name in state if f".{SOFT_SELECTION}." in f".{name}"]:
        del state[name]
    return state


def _fused_optimizers(module: nn.Module, name: str) -> Iterator[tuple[str, KeyedOptimizer]]:
    """Yields the fused optimizers of a module, by the walk of DistributedModelParallel."""
    if isinstance(module, FusedOptimizerModule):
        yield name, module.fused_optimizer
        return
    for child_name, child in module.named_children():
        yield from _fused_optimizers(child, append_prefix(name, child_name))


def _shorten(wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Takes the child's name out of what the wrapper has just written."""
    long = f"{prefix}{cast(SoftSelectionModule, wrapper).child_name}."
    for name in [name for name in state if name.startswith(long)]:
        state[prefix + name.removeprefix(long)] = state.pop(name)


def _lengthen(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Says where the child is, and that alpha is 1 where a state of its tables has none."""
    wrapper = cast(SoftSelectionModule, wrapper)
    wrapper._prefix, extra = prefix, f"{prefix}{SOFT_SELECTION}."
    of_child = [name for name in state if name.startswith(prefix) and not name.startswith(extra)]
    for name in of_child:
        state[f"{prefix}{wrapper.child_name}.{name.removeprefix(prefix)}"] = state.pop(name)
    if of_child and not any(name.startswith(extra) for name in state):
        for name, alpha in wrapper.soft_selection.state_dict().items():
            state[extra + name] = torch.ones_like(alpha)


def _shorten_differences(wrapper: nn.Module, differences: Any) -> None:
    wrapper = cast(SoftSelectionModule, wrapper)
    long, short = f"{wrapper._prefix}{wrapper.child_name}.", wrapper._prefix
    for names in differences:
        names[:] = [n.replace(long, short, 1) if n.startswith(long) else n for n in names]


class SoftSelectionEmbeddingBagCollection(SoftSelectionModule, EmbeddingBagCollectionInterface):
    """Wraps an EmbeddingBagCollection and applies soft selection (paper, eq. 3) to its output."""

    # MEAN divides by the length of the whole bag, per-sample weights multiply each row. Weights are
    # shared with the wrapped collection. Without `multi_hot_features` the counts tell them.

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
        self.outputs = pooled_features(self._tables, blocks, multi_hot_features)
        self.bag_check = BagCheck(self.outputs)
        self.bag_splitter = _bag_splitter(self.outputs, blocks)
        self.embedding_bag_collection = self._child_of(plain)
        self.soft_selection = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection = SelectPooled(self.outputs, blocks, self.alpha)
        self.multiplies_tables = False

    def _take(self, module: nn.Module) -> EmbeddingBagCollection:
        """Returns the collection of what is to be wrapped."""
        return cast(EmbeddingBagCollection, module)

    def _child_of(self, plain: EmbeddingBagCollection) -> EmbeddingBagCollection:
        """The collection that reads split bags: the same tables, names and weights, all sums."""
        # The wrapper divides MEAN: nn.EmbeddingBag takes no weights with it, and TorchRec pools it
        # wrongly in some plans (see `plan`). Sharders take no subclass.
        sums = all(table.pooling == PoolingType.SUM for table in self._tables)
        if type(plain) is EmbeddingBagCollection and self.bag_splitter is None and sums:
            return plain
        return self._read_by(plain, {output.name: output.block_keys for output in self.outputs})

    def _read_by(
        self, plain: EmbeddingBagCollection, keys_of: Mapping[str, tuple[str, ...]]
    ) -> EmbeddingBagCollection:
        """The tables of a collection, read by other keys and summed: output -> its keys."""
        configs = []
        for table in self._tables:
            names = [output.name for output in self.outputs if output.table == table.name]
            keys = [key for name in names for key in keys_of[name]]
            configs.append(replace(table, feature_names=keys, pooling=PoolingType.SUM))
        meta = torch.device("meta")
        child = EmbeddingBagCollection(configs, is_weighted=self._is_weighted, device=meta)
        for name, bag in plain.embedding_bags.items():
            child.embedding_bags[name].weight = bag.weight
        torchrec.set_device_(child, plain.device)
        return child

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up and multiplies them by alpha."""
        self.bag_check(features)
        return self._look_up(features)

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        split = features if self.bag_splitter is None else self.bag_splitter(features)
        return self.selection(self.embedding_bag_collection(split), features, split)

    def read_whole_features_(self, *, multiply_tables: bool = False) -> None:
        """Gives the child one key per feature: before sharding, with `select_on_shards_` after."""
        # FBGEMM's CPU kernels learn a table that several keys read by a slower path.
        self.multiplies_tables = multiply_tables
        if self.bag_splitter is not None:
            keys = {o.name: (o.name if o.is_multi_hot else o.feature,) for o in self.outputs}
            self.embedding_bag_collection = self._read_by(self.embedding_bag_collection, keys)

    @property
    def lookup(self) -> nn.Module:
        """The collection in it, plain or sharded, which holds the tables."""
        return self.embedding_bag_collection

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


class SoftSelectionFeatureProcessedEmbeddingBagCollection(SoftSelectionEmbeddingBagCollection):
    """Wraps a FeatureProcessedEmbeddingBagCollection: bags are split after their processing."""

    # TorchRec's sharded module applies its processors at the shards, where their weights learn.
    # Soft selection stands between them and the kernels.

    child_name = "feature_processed"

    def _take(self, module: nn.Module) -> EmbeddingBagCollection:
        collection = cast(EmbeddingBagCollection, getattr(module, INNER))
        self.feature_processed = with_processors_of(module, collection)
        return collection

    def __setattr__(self, name: str, value: Any) -> None:
        """The collection stays where TorchRec has it; sharded, it reads by name from then on."""
        if name == "embedding_bag_collection":
            setattr(self.feature_processed, INNER, value)
        else:
            super().__setattr__(name, value)
        if isinstance(value, ShardedFeatureProcessedEmbeddingBagCollection):
            torchrec.read_by_name_(value)

    def __getattr__(self, name: str) -> Any:
        """The collection has the name that it has in the plain model, too."""
        if name in ("embedding_bag_collection", INNER):
            return getattr(self.feature_processed, INNER)
        return super().__getattr__(name)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Processes features, looks bags up, and multiplies them by alpha."""
        self.bag_check(features)
        if self.bag_splitter is None:
            return self.selection(self.feature_processed(features), features, features)
        if isinstance(self.feature_processed, ShardedModule):
            remedy = "call selection.on_shards.select_on_shards_, as BilevelTrainPipeline does"
            place, requirement = "feature processors", "selection on the shards"
            raise RuntimeError(describe(place, requirement, "split bags", remedy))
        return self.look_up_processed(self.process(features))

    def process(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Bags with the weights that the processors give them, made here. Local, no collective."""
        return processed_bags(self.feature_processed, features)

    def look_up_processed(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks bags up that have their weights, and multiplies them by alpha."""
        return self._look_up(features)


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
        self.blocks = blocks
        self._tables = list(embedding_collection.embedding_configs())
        self._need_indices = embedding_collection.need_indices()
        tables = [as_bags(table) for table in self._tables]
        check_blocks(tables, blocks)
        self.outputs = pooled_features(tables, blocks, ())
        self.bag_check = BagCheck(tuple(replace(o, is_multi_hot=True) for o in self.outputs))
        self.bag_splitter = None
        self.embedding_collection = embedding_collection
        self.soft_selection = alpha if alpha is not None else Alpha(blocks.alpha_shapes)
        self.selection = SelectSequences(self.outputs, blocks, self.alpha)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks ids up and multiplies their embeddings by alpha."""
        self.bag_check(features)
        return self.selection(self.embedding_collection(features), features)

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
        return [[o.name for o in self.outputs if o.table == t.name] for t in self._tables]

    @property
    def embeddings(self) -> nn.ModuleDict:
        """Table -> the module whose `weight` it is, as the plain collection has them."""
        return cast(nn.ModuleDict, self.embedding_collection.embeddings)


def as_bags(table: EmbeddingConfig) -> EmbeddingBagConfig:
    """The config of an unpooled table as that of a pooled one, whose pooling is NONE."""
    names = [field.name for field in fields(EmbeddingConfig) if field.init]
    values = {name: getattr(table, name) for name in names}
    return EmbeddingBagConfig(**values, pooling=PoolingType.NONE)


def check_blocks(tables: list[EmbeddingBagConfig], blocks: RowBlocks) -> None:
    """Checks that blocks are of these tables, and that their pooling is known."""
    remedy = "make the blocks from counts of this table"
    for table in tables:
        check_known("table", table.name, blocks.routings)
        place, rows, dim = f"table {table.name!r}", table.num_embeddings, table.embedding_dim
        of_blocks = blocks.routings[table.name].num_embeddings
        check(rows == of_blocks, place, f"blocks of num_embeddings={rows} rows", of_blocks, remedy)
        of_blocks = blocks.embedding_dims[table.name]
        check(dim == of_blocks, place, f"blocks of embedding_dim={dim}", of_blocks, remedy)
        if table.pooling not in (PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE):
            limit = "supported pooling is SUM or MEAN"
            raise NotImplementedError(describe(place, limit, table.pooling))


def pooled_features(
    tables: list[EmbeddingBagConfig], blocks: RowBlocks, multi_hot_features: Collection[str] | None
) -> tuple[PooledFeature, ...]:
    """Everything that stands behind the output keys of a collection, in their order."""
    if multi_hot_features is None:
        features = {feature for table in tables for feature in table.feature_names}
        multi_hot_features = {f for f in features if blocks.max_bag_lengths.get(f, 2) > 1}
    return tuple(
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
        for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True)
        for feature, name in zip(table.feature_names, names, strict=True)
    )


def _bag_splitter(
    outputs: tuple[PooledFeature, ...], blocks: RowBlocks
) -> batches.BagSplitter | None:
    if not any(output.is_multi_hot for output in outputs):
        return None
    splits: dict[str, batches.FeatureSplit] = {}
    for output in outputs:
        routing = blocks.routings[output.table] if output.is_multi_hot else None
        split = batches.FeatureSplit(
            feature=output.feature, keys=output.block_keys, routing=routing
        )
        splits.setdefault(output.name if output.is_multi_hot else output.feature, split)
    return batches.BagSplitter(list(splits.values()))


def soft_selection_modules(model: nn.Module) -> dict[str, SoftSelectionModule]:
    """The wrappers in a model by their FQN inside DistributedModelParallel and DDP."""
    modules = get_unwrapped_module(model).named_modules()
    return {fqn: module for fqn, module in modules if isinstance(module, SoftSelectionModule)}


class BagCheck(nn.Module):
    """Checks bags before they are looked up: a bad id is named, and never trains a row."""

    def __init__(self, outputs: tuple[PooledFeature, ...]) -> None:
        super().__init__()
        self._outputs = outputs
        self._copies: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}

    def forward(self, features: KeyedJaggedTensor) -> None:
        """Checks lengths of single-id bags and the range of every id."""
        if features.variable_stride_per_key():
            limit = "supported are batches of one size for all keys"
            raise NotImplementedError(describe("features", limit, "several"))
        if self._are_good(features):
            return
        ids = features.values()
        if ids.dtype not in batches.INTEGERS:
            place, requirement = batches.name_features(features.keys()), "int32 or int64 ids"
            raise TypeError(describe(place, requirement, ids.dtype, "convert them with .long()"))
        if ids.device.type == "cpu":
            batches.check_bags(features)
        for output in self._outputs:
            check_known(f"feature of table {output.table!r}", output.feature, features.keys())
        if ids.device.type != "cpu":
            self._assert_good(features)
            return
        bags = batches.jagged_by_key(features)
        for output in self._outputs:
            ids, lengths = bags[output.feature].values(), bags[output.feature].lengths()
            if ids.numel():
                _check_on_cpu(output, ids, lengths)

    def _are_good(self, features: KeyedJaggedTensor) -> bool:
        """Decides the usual case on a CPU at once; where it is False, each feature is checked."""
        ids, lengths, keys = features.values(), features.lengths(), tuple(features.keys())
        weights = features.weights_or_none()
        has_weights = weights is None or weights.numel() == ids.numel()
        is_usual = ids.device.type == "cpu" and ids.dtype in batches.INTEGERS and has_weights
        if not is_usual or not {output.feature for output in self._outputs} <= set(keys):
            return False
        return are_compiled() and are_good_bags(ids, lengths, *self._limits(keys, ids.device))

    def _assert_good(self, features: KeyedJaggedTensor) -> None:
        """The same on a GPU, for all features at once: nobody waits for it."""
        ids, lengths = features.values(), features.lengths()
        bounds, longest = self._limits(tuple(features.keys()), ids.device)
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

    def _limits(self, keys: tuple[str, ...], device: torch.device) -> Tensor:
        """Rows in the smallest table, and the most ids of a bag, of every key: ``(2, keys)``."""
        if (keys, device) in self._copies:
            return self._copies[keys, device]
        bounds, longest = dict.fromkeys(keys, UNLIMITED), dict.fromkeys(keys, UNLIMITED)
        for output in self._outputs:
            bounds[output.feature] = min(bounds[output.feature], output.num_embeddings)
            if not output.is_multi_hot:
                longest[output.feature] = 1
        last = {key: place for place, key in enumerate(keys)}  # of a key twice, the last is read
        limits = [
            [limit[key] if last[key] == place else UNLIMITED for place, key in enumerate(keys)]
            for limit in (bounds, longest)
        ]
        self._copies[keys, device] = torch.tensor(limits, device=device)
        return self._copies[keys, device]


def _check_on_cpu(output: PooledFeature, ids: Tensor, lengths: Tensor) -> None:
    place = f"table {output.table!r}, feature {output.feature!r}"
    if not output.is_multi_hot:
        longest = int(lengths.max())
        remedy = f"name it in multi_hot_features=[{output.feature!r}]"
        check(longest <= 1, place, "bags of at most one id", f"a bag of {longest}", remedy)
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    last, bad = output.num_embeddings - 1, lowest if lowest < 0 else highest
    remedy = "hash the ids into the table, or raise its num_embeddings"
    check(lowest >= 0 and highest <= last, place, f"ids in 0..{last}", bad, remedy)
