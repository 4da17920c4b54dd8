"""Every change made to an object of TorchRec or FBGEMM, and every reach into one.

An entry gives its reason, the place upstream, and the version that ends it, if any is planned.
Written for torchrec 1.8.0 and fbgemm 1.8.0, which may move a name that begins with an underscore.
What stands in front of lookups is in `torchrec_inputs`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as EnumerableShardingSpec
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from dnis_torchrec.checks import check, check_known, describe

Sharded: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
Plain: TypeAlias = EmbeddingBagCollection | EmbeddingCollection

# --------------------------------------------------------------------------------------------------
# What a sharded collection was made of
# Reason: it keeps the configs of its user, its ranks and its lookups, and shows none of them; two
#   collections may each have a table of one name, where bits and blocks need a name for each; and
#   tables of half precision, in which Adam's second moments round to 0.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/distributed/embeddingbag.py#L648
# Ends: not planned.


def bag_configs_of(collection: ShardedEmbeddingBagCollection) -> list[EmbeddingBagConfig]:
    """Tables of a sharded collection, whole, as its user wrote them."""
    return list(collection._embedding_bag_configs)


def sequence_configs_of(collection: ShardedEmbeddingCollection) -> list[EmbeddingConfig]:
    """The same, of one that does not pool."""
    return list(collection._embedding_configs)


def _tables_of(collection: Plain) -> tuple[nn.ModuleDict, str]:
    """What holds the tables of a plain collection, and the place of their configs."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bags, "_embedding_bag_configs"
    return collection.embeddings, "_embedding_configs"


def rename_tables_(collection: Plain, names: Mapping[str, str]) -> None:
    """Gives tables of a plain collection other names; weights and the keys of outputs stay."""
    holders, place = _tables_of(collection)
    holders._modules = {names.get(key, key): part for key, part in holders._modules.items()}
    configs = [replace(c, name=names.get(c.name, c.name)) for c in getattr(collection, place)]
    setattr(collection, place, configs)


def tables_in_float32_(collection: Plain) -> Callable[[], None]:
    """Converts half-precision tables of a plain collection to float32, which its outputs have.
    Returns a function that undoes it."""
    holders, place = _tables_of(collection)
    configs = getattr(collection, place)
    weights = [cast(Tensor, holder.weight) for holder in holders.values()]
    old = [(weight, weight.dtype) for weight in weights if weight.dtype.itemsize < 4]

    def undo() -> None:
        for weight, dtype in old:
            weight.data = weight.data.to(dtype)
        setattr(collection, place, configs)

    if old:
        for weight, _ in old:
            weight.data = weight.data.float()
        setattr(collection, place, [replace(c, data_type=DataType.FP32) for c in configs])
    return undo


def takes_weights(collection: ShardedEmbeddingBagCollection) -> bool:
    """Whether its bags carry per-sample weights."""
    return collection._is_weighted


def returns_indices(collection: ShardedEmbeddingCollection) -> bool:
    """Whether it passes ids on as the weights of its outputs."""
    return collection._need_indices


def sharding_env(module: Any) -> ShardingEnv:
    """The ranks of a sharded collection, or of a DistributedModelParallel."""
    return cast(ShardingEnv, module._env)


def process_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share a model; None for one that is not distributed."""
    return model._env.process_group if isinstance(model, DistributedModelParallel) else None


def set_device_(collection: Plain, device: torch.device) -> None:
    """Says where the weights of a collection are that was built around them."""
    collection._device = device


def lookups_by_type(collection: ShardedEmbeddingBagCollection) -> list[tuple[str, nn.Module]]:
    """(sharding type, lookup) of a collection, one of each."""
    return list(zip(collection._sharding_types, collection._lookups, strict=True))


def without_ddp(lookup: nn.Module) -> Any:
    """The lookup itself: that of data_parallel tables is in DistributedDataParallel."""
    return lookup.module if isinstance(lookup, DistributedDataParallel) else lookup


def lookups(model: nn.Module) -> list[nn.Module]:
    """TorchRec's lookups, which are in a plain list, unseen by `modules()`."""
    collections = [module for module in model.modules() if isinstance(module, Sharded)]
    return [without_ddp(lookup) for module in collections for lookup in module._lookups]


# --------------------------------------------------------------------------------------------------
# One rank: data_parallel tables without DistributedDataParallel
# Reason: it copies their whole gradients into buckets in every step, and divides them by one.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/distributed/embeddingbag.py#L819
# Ends: not planned.


def reduce_no_tables_(model: nn.Module) -> None:
    """Takes data_parallel tables out of DistributedDataParallel, for a process group of one."""
    for module in model.modules():
        if isinstance(module, Sharded):
            module._lookups[:] = [without_ddp(lookup) for lookup in module._lookups]


# --------------------------------------------------------------------------------------------------
# Features by name
# Reason: a sharded collection reads every batch at the places of the first batch's keys: other
#   keys, or another order, are read wrongly without a word. One step in front of `input_dist`,
#   through which every lookup goes, puts them in order. It also decides about per-sample weights:
#   a collection that is not weighted ignores them, kernels multiply by them; a weighted
#   collection without any would count every id once.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/distributed/embeddingbag.py#L1790
# Ends: not planned.

_MAKES_WEIGHTS = "makes_weights"
"""Attribute of a collection whose bags get weights from feature processors at the shards."""


def read_by_name_(model: nn.Module, *, refuse_weights: bool | None = False) -> None:
    """Lets every sharded collection of a model read features by name. Local, no collective."""
    for module in model.modules():
        if isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            vars(module._embedding_bag_collection)[_MAKES_WEIGHTS] = True
        if isinstance(module, Sharded):
            read_collection_by_name_(module, refuse_weights=refuse_weights)


def read_collection_by_name_(collection: Sharded, *, refuse_weights: bool | None = False) -> None:
    """`read_by_name_` for one sharded collection."""
    step = vars(collection).get("input_dist")
    if not isinstance(step, FeaturesByName):
        if not collection._has_uninitialized_input_dist:
            _forget_places_(collection)
        # as TorchRec's pipelines replace forwards: no module, and so no name, changes
        vars(collection)["input_dist"] = step = FeaturesByName(collection, collection.input_dist)
    if refuse_weights is not None:
        step.refuse_weights = refuse_weights


def _forget_places_(collection: Sharded) -> None:
    """Lets a collection that was called before find its features anew in its next batch."""
    collection._input_dists, collection._feature_splits, collection._features_order = [], [], []
    collection._has_uninitialized_input_dist = True
    if isinstance(collection, ShardedEmbeddingBagCollection):
        collection._has_features_permute = True


class FeaturesByName:
    """Replaces a sharded collection's input_dist: calls it with the features that it reads."""

    def __init__(self, collection: Sharded, input_dist: Callable[..., Any]) -> None:
        self._collection = collection
        self._input_dist = input_dist
        self._is_weighted = getattr(collection, "_is_weighted", None)  # None: sequences
        self._kernel_names: list[str] = []
        self._names: list[str] = []
        self._orders: dict[tuple[str, ...], tuple[list[int], Tensor]] = {}
        self.refuse_weights = True

    def __call__(self, ctx: Any, features: KeyedJaggedTensor | TensorDict) -> Any:
        """Begins the input_dist."""
        if isinstance(features, TensorDict):
            names = self._names or [str(key) for key in features.keys()]  # noqa: SIM118
            features = maybe_td_to_kjt(features, names)
        if not self._names:
            self._note_names(features.keys())
        features, keys = self._with_right_weights(features), features.keys()
        if keys != self._names:
            features = self._in_order(features, tuple(keys))
        return self._input_dist(ctx, features)

    def _note_names(self, keys: list[str]) -> None:
        """Notes the order of the first batch if it has these keys alone, else the kernels'."""
        shardings = getattr(self._collection, "_embedding_shardings", None)
        if shardings is None:
            shardings = self._collection._sharding_type_to_sharding.values()
        self._kernel_names = [name for sharding in shardings for name in sharding.feature_names()]
        for name in self._kernel_names:
            check_known("feature", name, keys)
        names = list(dict.fromkeys(self._kernel_names))
        self._names = keys if sorted(keys) == sorted(names) else names

    def _in_order(self, features: KeyedJaggedTensor, keys: tuple[str, ...]) -> KeyedJaggedTensor:
        if keys not in self._orders:
            places = {key: place for place, key in enumerate(keys)}
            for name in self._names:
                check_known("feature", name, places)
            order = [places[name] for name in self._names]
            on_device = torch.tensor(order, dtype=torch.int32, device=features.device())
            self._orders[keys] = order, on_device
        in_order = features.permute(*self._orders[keys])
        inverse = features.inverse_indices_or_none()
        if inverse is not None:  # of a batch size per feature, which `permute` leaves behind
            rows = [inverse[0].index(name) for name in self._names]
            in_order._inverse_indices = self._names, inverse[1][rows]
        return in_order

    def _with_right_weights(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weights = features.weights_or_none()
        if self._is_weighted is None or (weights is None and not self._is_weighted):
            return features
        place = f"collection of tables {self._collection._table_names}"
        if weights is None:
            remedy = "give the bags weights, or build the collection with is_weighted=False"
            makes = getattr(self._collection, _MAKES_WEIGHTS, False)
            check(makes, place, "per-sample weights", "none", remedy)
            return features
        if self._is_weighted:
            if weights.requires_grad and torch.is_grad_enabled():
                self._check_gradient_of_weights(place, features.keys())
            return features
        remedy = "leave them out, or build the collection with is_weighted=True"
        check(not self.refuse_weights, place, "bags without per-sample weights", "weights", remedy)
        return without_weights(features)

    def _check_gradient_of_weights(self, place: str, keys: list[str]) -> None:
        """Weights that travel, or are put in another order, leave their gradient behind."""
        kinds = set(self._collection._sharding_types)
        stay = {ShardingType.DATA_PARALLEL.value, ShardingType.TABLE_WISE.value}
        if kinds <= stay and keys == self._kernel_names and self._collection._env.world_size == 1:
            return
        limit = "supported are per-sample weights that learn on one rank, in whole tables"
        remedy = f"detach the weights, or list the features as kernels do: {self._kernel_names}"
        text = f"{sorted(kinds)}, features {keys}"
        raise NotImplementedError(describe(place, limit, text, remedy))


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags without per-sample weights, and without a copy of the ids."""
    bags = copy.copy(features)
    bags._weights = bags._jt_dict = None
    return bags


# --------------------------------------------------------------------------------------------------
# Whole bags in place of bags split by block
# Reason: with selection on the shards (`on_shards`), kernels pool a key for every block, while
#   input_dist and output_dist carry whole bags, as in the plain model.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/distributed/embeddingbag.py#L1616
# Ends: not planned; it is a use TorchRec does not foresee.


def kernels_of(lookup: nn.Module) -> list[tuple[nn.Module, list[ShardedEmbeddingTable]]]:
    """The kernels of a lookup, or a lookup in DistributedDataParallel, and their tables."""
    # by kernels, the pieces of one are added up before the next looks up its own
    whole = without_ddp(lookup)
    tables = [list(config.embedding_tables) for config in whole.grouped_configs]
    if isinstance(lookup, DistributedDataParallel) or not tables:
        return [(lookup, list(itertools.chain.from_iterable(tables)))]
    return list(zip(whole._emb_modules, tables, strict=True))


def replace_forward_(part: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces a forward as TorchRec's pipelines do: no module, and so no name, changes."""
    vars(part)["forward"] = forward


def set_features_per_kernel_(lookup: nn.Module, num_features: Sequence[int]) -> None:
    """Says how many features, of whole bags, each kernel of a lookup reads."""
    without_ddp(lookup)._feature_splits = list(num_features)


def read_whole_bags_(
    collection: ShardedEmbeddingBagCollection,
    features: Callable[[str], list[str]],
    outputs: Callable[[str], list[str]],
) -> None:
    """Gives a collection the input_dist and output_dist of a table's features and output names."""
    shardings = []
    for kind in collection._sharding_types:
        infos = []
        for info in collection.sharding_type_to_sharding_infos[kind]:
            table = info.embedding_config.name
            names = {"feature_names": features(table), "embedding_names": outputs(table)}
            infos.append(replace(info, embedding_config=replace(info.embedding_config, **names)))
        codecs = collection.qcomm_codecs_registry
        sharding = collection.create_embedding_bag_sharding(
            infos, collection._env, collection._device, True, qcomm_codecs_registry=codecs
        )
        shardings.append(sharding)
    collection._embedding_shardings = shardings
    _forget_places_(collection)
    collection._output_dists, collection._embedding_names, collection._embedding_dims = [], [], []
    collection._uncombined_embedding_names, collection._uncombined_embedding_dims = [], []
    collection._create_output_dist()
    vars(collection).pop("input_dist", None)  # it may have read a key for every block
    read_collection_by_name_(collection)


@contextmanager
def replace_weights(kernel: nn.Module, product: Tensor) -> Iterator[None]:
    """Replaces a kernel's weights by a product inside the block, as `functional_call` does."""
    weights = kernel._parameters["weights"]
    kernel._parameters["weights"] = product  # type: ignore[assignment]  # no parameter
    try:
        yield
    finally:
        kernel._parameters["weights"] = weights


# --------------------------------------------------------------------------------------------------
# Sequences in dense kernels on a CPU
# Reason: FBGEMM's CPU kernel without a fused optimizer returns unpooled embeddings sample by
#   sample, where TorchRec reads them feature by feature: ids get rows of others without a word.
#   torch's embedding reads the same weights, with the same gradient.
# Upstream:
#   https://github.com/pytorch/FBGEMM/blob/v1.8.0/fbgemm_gpu/fbgemm_gpu/split_table_batched_embeddings_ops_training.py
# Ends: not planned.


def read_rows_in_order_(collection: ShardedEmbeddingCollection) -> None:
    """Lets dense CPU kernels of a sharded collection return rows in the order of ids. Local."""
    for lookup in collection._lookups:
        for kernel in without_ddp(lookup)._emb_modules:
            is_dense = isinstance(kernel, BatchedDenseEmbedding)
            if is_dense and kernel.emb_module.weights.device.type == "cpu":
                replace_forward_(kernel, RowsInOrder(kernel))


class RowsInOrder:
    """Replaces a dense kernel's forward: a plain callable, with no name in the state_dict."""

    def __init__(self, kernel: BatchedDenseEmbedding) -> None:
        self._kernel: nn.Module = kernel.emb_module
        tables = kernel.config.embedding_tables
        widths = sorted({table.local_cols for table in tables})
        if len(widths) != 1:
            limit = "supported in one dense kernel are tables of one width"
            place = f"tables {[table.name for table in tables]}"
            raise NotImplementedError(describe(place, limit, widths))
        self._width = widths[0]
        begins = itertools.accumulate((table.local_rows for table in tables), initial=0)
        pairs = zip(begins, tables, strict=False)
        self._first_rows = torch.tensor([row for row, table in pairs for _ in table.feature_names])

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks ids up."""
        weights = cast(Tensor, self._kernel.weights).view(-1, self._width)
        num_ids = torch.tensor(features.length_per_key())
        rows = features.values().long() + self._first_rows.repeat_interleave(num_ids)
        return functional.embedding(rows, weights).float()


# --------------------------------------------------------------------------------------------------
# Frozen tables: `requires_grad=False` means no step, in every sharding type and kernel
# Reason: TorchRec's kernels step, or give gradients to, all their tables. TorchRec groups tables
#   by optimizer: SGD at rate 0 gives frozen ones a fused kernel of their own. What a dense kernel
#   gives them is hidden from optimizers, so that weight decay passes them by, too.
# Upstream: https://github.com/pytorch/torchrec/issues/1990,
#   https://github.com/pytorch/torchrec/issues/2908
# Ends: open upstream.

FROZEN_RATE = 0.0
"""Learning rate of a fused kernel whose tables are frozen, whatever rate it is given."""


class FrozenSlice(TableBatchedEmbeddingSlice):
    """A table's weights in a kernel, without a gradient, whatever the kernel makes of it."""

    __slots__: list[str] = []

    @staticmethod
    def of(weight: TableBatchedEmbeddingSlice) -> FrozenSlice:
        """The same weights, frozen."""
        frozen = weight.detach().as_subclass(FrozenSlice)
        vars(frozen).update(vars(weight))
        return frozen

    @property
    def grad(self) -> None:
        """None, so that optimizers leave it alone."""

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Forgets what an optimizer would clear or prepare."""

    @property
    def requires_grad(self) -> bool:
        """False."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenSlice:
        memo[id(self)] = FrozenSlice.of(super().__deepcopy__(memo))
        return cast(FrozenSlice, memo[id(self)])


def frozen_tables(tables: nn.ModuleDict) -> frozenset[str]:
    """Tables of an unsharded collection that no step may change."""
    weights = {name: cast(Tensor, holder.weight) for name, holder in tables.items()}
    return frozenset(name for name, weight in weights.items() if not weight.requires_grad)


def freeze_before_sharding_(tables: nn.ModuleDict) -> frozenset[str]:
    """Lets TorchRec give the frozen tables kernels of their own, in which they are not stepped."""
    frozen = frozen_tables(tables)
    for table in frozen:
        weight = cast(Any, tables[table].weight)
        weight._optimizer_classes = [torch.optim.SGD]
        weight._optimizer_kwargs = [{"lr": FROZEN_RATE}]
    return frozen


def hold_frozen_(collection: Any, holders: nn.ModuleDict, tables: Collection[str]) -> None:
    """Keeps the frozen tables of a sharded collection as they are. Local; on all ranks alike."""
    vars(collection)["frozen_tables"] = frozenset(tables)
    for table in tables:
        weight = cast(Tensor, holders[table].weight)
        if isinstance(weight, TableBatchedEmbeddingSlice):
            holders[table].weight = FrozenSlice.of(weight)
        else:  # an empty one: this rank holds nothing of the table
            weight.requires_grad_(False)
    for lookup in collection._lookups:
        for kernel in getattr(lookup, "_emb_modules", ()):
            if isinstance(kernel, FusedOptimizerModule):
                names = {table.name for table in cast(Any, kernel).config.embedding_tables}
                if names <= set(tables):
                    vars(kernel.emb_module)["set_learning_rate"] = _keep_rate


def _keep_rate(lr: float) -> None:
    """Ignores the learning rate that a schedule of a whole model sets."""


def note_frozen_(collection: ShardedEmbeddingCollection, tables: Collection[str]) -> None:
    """Notes which tables were frozen in sharding, for TorchRec does not. Local."""
    vars(collection)["frozen_when_sharded"] = frozenset(tables)


def frozen_tables_of_sharded(collection: Sharded) -> frozenset[str]:
    """Tables of a sharded collection that `hold_frozen_` keeps as they are."""
    return cast(frozenset[str], getattr(collection, "frozen_tables", frozenset()))


def check_frozen_are_held(fqn: str, collection: nn.Module) -> None:
    """Checks that the frozen tables of a collection were sharded as such. Local, no collective."""
    if isinstance(collection, ShardedEmbeddingBagCollection):
        infos = itertools.chain.from_iterable(collection.sharding_type_to_sharding_infos.values())
        # what a weight was when it was sharded
        frozen = {info.embedding_config.name for info in infos if not info.param.requires_grad}
    elif isinstance(collection, ShardedEmbeddingCollection):
        frozen = set(getattr(collection, "frozen_when_sharded", ()))
    else:
        return
    loose = sorted(frozen - frozen_tables_of_sharded(collection))
    if loose:
        limit = "supported are frozen tables (requires_grad=False) that shard_model has sharded"
        remedy = "shard with it: a DistributedModelParallel of its own trains them"
        raise NotImplementedError(describe(f"FQN {fqn!r}", limit, f"tables {loose}", remedy))


# --------------------------------------------------------------------------------------------------
# Tables in host memory behind a cache on the GPU (FBGEMM's UVM caching)
# Reason: before weights are written past the lookups the cache is written back, and afterwards
#   emptied. FBGEMM locks prefetched lines until the backward pass of their batch. An upper step
#   and an evaluation have none: they unlock them, or the cache would fill with locked lines.
# Upstream: https://github.com/pytorch/FBGEMM/pull/1883;
#   https://github.com/pytorch/FBGEMM/pull/6192 unlocks in a forward hook, for enrichment caches
#   alone.
# Ends: open upstream.

TRAINED_LOOKUPS = (GroupedPooledEmbeddingsLookup, GroupedEmbeddingsLookup)
"""TorchRec's lookups that train, of pooled collections and of sequences."""


@contextmanager
def writing_to_tables(model: nn.Module) -> Iterator[None]:
    """Lets weights be written: caches write back what they hold, and are empty afterwards."""
    for lookup in lookups(model):
        if isinstance(lookup, TRAINED_LOOKUPS):
            lookup.flush()
    try:
        yield
    finally:
        forget_cached_rows(model)


def forget_cached_rows(model: nn.Module) -> None:
    """Empties the caches of a model whose weights were written from outside. Local."""
    for lookup in lookups(model):
        if isinstance(lookup, TRAINED_LOOKUPS):
            lookup.purge()


class PrefetchedTables:
    """The tables of a model with ``CacheParams(prefetch_pipeline=True)``. Local."""

    def __init__(self, model: nn.Module) -> None:
        self._is_planned = any(_plans_prefetching(module) for module in model.modules())
        self.kernels = [
            part
            for lookup in lookups(model)
            for part in lookup.modules()
            if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)
            and part.prefetch_pipeline
            and part.lxu_cache_weights.numel()
        ]

    def __bool__(self) -> bool:
        return self._is_planned

    def unlock(self) -> None:
        """Unlocks the lines of the last batch, which has no backward pass to do so."""
        for kernel in self.kernels:
            _unlock(kernel, [kernel.lxu_cache_locations])

    def forget(self) -> None:
        """Unlocks and forgets what was prefetched and not looked up yet."""
        for kernel in self.kernels:
            _unlock(kernel, kernel.lxu_cache_locations_list)
            kernel.lxu_cache_locations_list, kernel.timesteps_prefetched = [], []

    @contextmanager
    def unlock_every_lookup(self) -> Iterator[None]:
        """Unlocks behind every lookup: nothing in here has a backward pass."""
        hooks = [
            kernel.register_forward_hook(lambda k, *_: _unlock(k, [k.lxu_cache_locations]))
            for kernel in self.kernels
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _plans_prefetching(module: nn.Module) -> bool:
    """Whether a table of a sharded collection is to be prefetched, on whatever rank."""
    options: list[tuple[Any, Any]] = []
    if isinstance(module, ShardedEmbeddingBagCollection):
        infos = itertools.chain(*module.sharding_type_to_sharding_infos.values())
        options = [
            (i.param_sharding, (i.fused_params or {}).get("prefetch_pipeline")) for i in infos
        ]
    elif isinstance(module, ShardedEmbeddingCollection):
        plans = module.module_sharding_plan.values()
        options = [(p, p.cache_params and p.cache_params.prefetch_pipeline) for p in plans]
    kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return any(plan.compute_kernel == kernel and prefetches for plan, prefetches in options)


def _unlock(kernel: SplitTableBatchedEmbeddingBagsCodegen, locations: list[Tensor]) -> None:
    """Counts every line's lock down by one, as FBGEMM does before a backward pass."""
    stream = kernel.prefetch_stream
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    counter = kernel.lxu_cache_locking_counter
    for of_batch in locations:
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(counter, of_batch)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())


# --------------------------------------------------------------------------------------------------
# Forward passes that no training step has
# Reason: FBGEMM's fused kernels count forward passes in training mode, with or without a backward
#   pass; optimizers with bias correction take the count for that of steps. Without an optimizer
#   that the user names, these kernels train tables by plain SGD at 0.01, and do not say so.
# Upstream:
# https://github.com/pytorch/FBGEMM/blob/v1.8.0/fbgemm_gpu/fbgemm_gpu/split_table_batched_embeddings_ops_training.py
# Ends: not planned.


def fused_kernels(model: nn.Module) -> list[Any]:
    """FBGEMM's kernels that count their forward passes. Local."""
    parts = (part for lookup in lookups(model) for part in lookup.modules())
    return [part for part in parts if hasattr(part, "iter_cpu")]


def default_kernels(model: nn.Module) -> list[Any]:
    """Returns the fused kernels that still have the default optimizer. Local."""
    kernels = [part for part in fused_kernels(model) if part.optimizer.name == "EXACT_SGD"]
    return [part for part in kernels if round(part.get_learning_rate(), 6) == 0.01]


@contextmanager
def frozen_counters(kernels: Iterable[Any]) -> Iterator[None]:
    """Lets kernels of `fused_kernels` forget the forward passes that they count inside."""
    counters = [counter for kernel in kernels for counter in (kernel.iter, kernel.iter_cpu)]
    values = [counter.clone() for counter in counters]
    try:
        yield
    finally:
        for counter, value in zip(counters, values, strict=True):
            counter.copy_(value)


# --------------------------------------------------------------------------------------------------
# Layers of an MLP
# Reason: turning a model's axes changes its first linear layer, which an MLP does not show.
# Upstream: https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/modules/mlp.py
# Ends: not planned.


def perceptrons_of(mlp: Any) -> nn.Sequential:
    """The perceptrons of an MLP of TorchRec's."""
    return cast(nn.Sequential, mlp._mlp)


def linear_of(perceptron: Any) -> nn.Linear:
    """The linear layer of a perceptron."""
    return cast(nn.Linear, perceptron._linear)
