"""Every change made to an object of TorchRec or FBGEMM, and every reach into one, is in this module.

An entry says the reason, links to the place upstream, and names the version that ends it ("none yet"
where upstream has no plan). Names that begin with an underscore are TorchRec's own: a new version may
move them, and this is the one file to read then. Nothing here imports a wrapper."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from dnis_torchrec.checks import check, check_known, describe

Sharded: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
_MAKES_WEIGHTS = "makes_weights"
"""Attribute of a weighted collection whose bags get their weights from feature processors, where
the shards are."""


def read_by_name_(model: nn.Module, *, refuse_weights: bool | None = False) -> None:
    """Lets every sharded collection of a model read features by name. Local, no collective."""
    for module in model.modules():
        if isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
            vars(module._embedding_bag_collection)[_MAKES_WEIGHTS] = True
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            read_collection_by_name_(module, refuse_weights=refuse_weights)


def read_collection_by_name_(
    collection: Sharded, *, refuse_weights: bool | None = False, anew: bool = False
) -> None:
    """`read_by_name_` for one sharded collection."""
    if anew:
        vars(collection).pop("input_dist", None)
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
    """Replacement of a sharded collection's input_dist: it calls the original one, with the
    features that it reads."""

    def __init__(self, collection: Sharded, input_dist: Callable[..., Any]) -> None:
        self._collection = collection
        self._input_dist = input_dist
        self._weighting = getattr(
            collection, "_is_weighted", None
        )  # None: sequence embeddings know no weights
        self._read: list[str] = []
        self._names: list[str] = []
        self._orders: dict[tuple[str, ...], tuple[list[int], Tensor]] = {}
        self.refuse_weights = True

    def __call__(self, ctx: Any, features: KeyedJaggedTensor | TensorDict) -> Any:
        """Begins the input_dist."""
        if isinstance(features, TensorDict):
            features = maybe_td_to_kjt(
                features, self._names or [str(key) for key in features.keys()]
            )
        if not self._names:
            self._note_names(features.keys())
        features = self._with_right_weights(features)
        keys = features.keys()
        return self._input_dist(
            ctx, features if keys == self._names else self._in_order(features, tuple(keys))
        )

    def _note_names(self, keys: list[str]) -> None:
        """Keeps the order of the first batch where it holds these features and no others, else that
        of the kernels."""
        own = getattr(self._collection, "_embedding_shardings", None)
        shardings = self._collection._sharding_type_to_sharding.values() if own is None else own
        self._read = [name for sharding in shardings for name in sharding.feature_names()]
        for name in self._read:
            check_known("feature", name, keys)
        names = list(dict.fromkeys(self._read))
        self._names = keys if sorted(keys) == sorted(names) else names

    def _in_order(self, features: KeyedJaggedTensor, keys: tuple[str, ...]) -> KeyedJaggedTensor:
        if keys not in self._orders:
            places = {key: place for place, key in enumerate(keys)}
            for name in self._names:
                check_known("feature", name, places)
            order = [places[name] for name in self._names]
            self._orders[keys] = (
                order,
                torch.tensor(order, dtype=torch.int32, device=features.device()),
            )
        ordered = features.permute(*self._orders[keys])
        inverse = features.inverse_indices_or_none()
        if inverse is not None:  # of a batch size per feature, which `permute` leaves behind
            rows = [inverse[0].index(name) for name in self._names]
            ordered._inverse_indices = self._names, inverse[1][rows]
        return ordered

    def _with_right_weights(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weights = features.weights_or_none()
        if self._weighting is None or (weights is None and not self._weighting):
            return features
        place = f"collection of tables {self._collection._table_names}"
        if weights is None and getattr(self._collection, _MAKES_WEIGHTS, False):
            return features
        if weights is None:
            remedy = (
                "give the KeyedJaggedTensor weights, or build the collection with is_weighted=False"
            )
            raise ValueError(describe(place, "per-sample weights", "none", remedy))
        if self._weighting:
            if weights.requires_grad and torch.is_grad_enabled():
                self._check_gradient_of_weights(place, features.keys())
            return features
        remedy = "leave them out, or build the collection with is_weighted=True: TorchRec's kernels would multiply"
        check(not self.refuse_weights, place, "bags without per-sample weights", "weights", remedy)
        unweighted = copy.copy(features)
        unweighted._weights = unweighted._jt_dict = None
        return unweighted

    def _check_gradient_of_weights(self, place: str, keys: list[str]) -> None:
        """Weights that travel, or are put in another order, leave their gradient behind."""
        kinds = set(self._collection._sharding_types)
        stays = (
            kinds <= {ShardingType.DATA_PARALLEL.value, ShardingType.TABLE_WISE.value}
            and keys == self._read
        )
        if not stays or self._collection._env.world_size > 1:
            supported = "supported are per-sample weights that learn on one rank, table_wise or data_parallel"
            remedy = (
                f"detach the weights, or list the features as the kernels read them: {self._read}"
            )
            raise NotImplementedError(
                describe(place, supported, f"{sorted(kinds)}, features {keys}", remedy)
            )


def read_rows_in_order_(collection: ShardedEmbeddingCollection) -> None:
    """Lets the dense kernels of a sharded collection return the rows of its ids in their order.
    Local, no collective."""
    for lookup in collection._lookups:
        own = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel in cast(Any, own)._emb_modules:
            if (
                isinstance(kernel, BatchedDenseEmbedding)
                and kernel.emb_module.weights.device.type == "cpu"
            ):
                # as TorchRec's pipelines replace forwards: no module, and so no name, changes
                vars(kernel)["forward"] = RowsInOrder(kernel)


class RowsInOrder:
    """Replacement of a dense kernel's forward. A plain callable, so that it adds no name to the
    state_dict."""

    def __init__(self, kernel: BatchedDenseEmbedding) -> None:
        self._kernel: nn.Module = kernel.emb_module
        tables = kernel.config.embedding_tables
        widths = sorted({table.local_cols for table in tables})
        if len(widths) != 1:
            supported = "supported in one dense kernel are tables of one width"
            raise NotImplementedError(
                describe(f"tables {[table.name for table in tables]}", supported, widths)
            )
        self._width = widths[0]
        begins = itertools.accumulate((table.local_rows for table in tables), initial=0)
        first_rows = [
            first for first, table in zip(begins, tables, strict=False) for _ in table.feature_names
        ]
        self._first_rows = torch.tensor(first_rows)

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks ids up."""
        weights = cast(Tensor, self._kernel.weights).view(-1, self._width)
        num_ids = torch.tensor(features.length_per_key())
        rows = features.values().long() + self._first_rows.repeat_interleave(num_ids)
        return functional.embedding(rows, weights).float()


FROZEN_RATE = 0.0
"""Learning rate of a fused kernel whose tables are frozen, whatever rate it is given
(`_keep_rate`)."""


class FrozenSlice(TableBatchedEmbeddingSlice):
    """A table's weights in a kernel, without a gradient, whatever the kernel makes of it."""

    __slots__: list[str] = []

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
        return _freeze_slice_(super().__deepcopy__(memo))


def frozen_tables(tables: nn.ModuleDict) -> frozenset[str]:
    """Tables of an unsharded collection that no step may change."""
    return frozenset(
        name for name, holder in tables.items() if not cast(Tensor, holder.weight).requires_grad
    )


def freeze_before_sharding_(weight: nn.Parameter) -> None:
    """Lets TorchRec give a frozen table a kernel of its own, in which it is not stepped."""
    noted = cast(Any, weight)
    noted._optimizer_classes, noted._optimizer_kwargs = [torch.optim.SGD], [{"lr": FROZEN_RATE}]


def hold_frozen_(collection: Any, holders: nn.ModuleDict, tables: Collection[str]) -> None:
    """Keeps the frozen tables of a sharded collection as they are. Local, no collective; on all
    ranks alike."""
    vars(collection)["frozen_tables"] = frozenset(tables)
    for table in tables:
        weight = cast(Tensor, holders[table].weight)
        if isinstance(weight, TableBatchedEmbeddingSlice):
            _freeze_slice_(weight)
        else:  # an empty one: this rank holds nothing of the table
            weight.requires_grad_(False)
    for kernel in _kernels(collection):
        if {table.name for table in kernel.config.embedding_tables} <= set(tables):
            vars(kernel.emb_module)["set_learning_rate"] = _keep_rate


def note_frozen_(collection: ShardedEmbeddingCollection, tables: Collection[str]) -> None:
    """Notes which tables were frozen when an EmbeddingCollection was sharded: TorchRec does not
    keep it. Local."""
    vars(collection)["frozen_when_sharded"] = frozenset(tables)


def check_frozen_are_held(fqn: str, collection: nn.Module) -> None:
    """Checks that the frozen tables of a collection were sharded as such. Local, no collective."""
    if isinstance(collection, ShardedEmbeddingBagCollection):
        infos = itertools.chain.from_iterable(collection.sharding_type_to_sharding_infos.values())
        frozen = {
            info.embedding_config.name for info in infos if not info.param.requires_grad
        }  # when it was sharded
    elif isinstance(collection, ShardedEmbeddingCollection):
        frozen = set(getattr(collection, "frozen_when_sharded", ()))
    else:
        return
    held: frozenset[str] = getattr(collection, "frozen_tables", frozenset())
    stepped = sorted(frozen - held)
    if stepped:
        supported = "supported are frozen tables (requires_grad=False) that dnis_torchrec.shard_model has sharded"
        remedy = "shard with it: a DistributedModelParallel of its own trains them"
        raise NotImplementedError(describe(f"FQN {fqn!r}", supported, f"tables {stepped}", remedy))


def _kernels(collection: Any) -> list[Any]:
    """Returns the kernels of TorchRec's lookups whose optimizer is fused."""
    kernels = [
        kernel for lookup in collection._lookups for kernel in getattr(lookup, "_emb_modules", ())
    ]
    return [kernel for kernel in kernels if isinstance(kernel, FusedOptimizerModule)]


def _keep_rate(lr: float) -> None:
    """Ignores a learning rate: schedules and warm-ups of a whole model set one, and frozen tables
    keep theirs."""


def _freeze_slice_(weight: Any) -> FrozenSlice:
    weight.__class__ = FrozenSlice
    return cast(FrozenSlice, weight)


TRAINED_LOOKUPS = (GroupedPooledEmbeddingsLookup, GroupedEmbeddingsLookup)
"""TorchRec's lookups that train, of pooled collections and of sequences."""


def lookups(model: nn.Module) -> list[nn.Module]:
    """TorchRec's lookups, which a sharded collection keeps in a plain list, unseen by `modules()`.
    Local."""
    kinds = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
    sharded = [module for module in model.modules() if isinstance(module, kinds)]
    found = [lookup for module in sharded for lookup in module._lookups]
    return [
        lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in found
    ]


@contextmanager
def writing_to_tables(model: nn.Module) -> Iterator[None]:
    """Lets weights be written to where they lie: caches write back what they hold before, and hold
    nothing after."""
    of_torchrec = [lookup for lookup in lookups(model) if isinstance(lookup, TRAINED_LOOKUPS)]
    for lookup in of_torchrec:
        lookup.flush()
    try:
        yield
    finally:
        forget_cached_rows(model)


def forget_cached_rows(model: nn.Module) -> None:
    """Empties the caches of a model whose weights were written from outside, what they hold lost.
    Local."""
    for lookup in lookups(model):
        if isinstance(lookup, TRAINED_LOOKUPS):
            lookup.purge()


class PrefetchedTables:
    """The tables of a model whose rows are to be prefetched:
    ``CacheParams(prefetch_pipeline=True)``. Local."""

    def __init__(self, model: nn.Module) -> None:
        sharded = [
            module
            for module in model.modules()
            if isinstance(module, ShardedEmbeddingBagCollection)
        ]
        infos = [
            info
            for module in sharded
            for own in module.sharding_type_to_sharding_infos.values()
            for info in own
        ]
        self.names = [info.embedding_config.name for info in infos if _is_prefetched(info)]
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingCollection):
                self.names += [
                    table
                    for table, own in module.module_sharding_plan.items()
                    if _is_planned_so(own)
                ]
        parts = (part for lookup in lookups(model) for part in lookup.modules())
        kernels = [
            part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)
        ]
        self.kernels = [
            kernel
            for kernel in kernels
            if kernel.prefetch_pipeline and kernel.lxu_cache_weights.numel()
        ]

    def __bool__(self) -> bool:
        return bool(self.names)

    def unlock(self) -> None:
        """Unlocks the lines of the batch that was looked up last, which has no backward pass to do
        so."""
        for kernel in self.kernels:
            _unlock(kernel, [kernel.lxu_cache_locations])

    def forget(self) -> None:
        """Unlocks and forgets what was prefetched and not looked up yet."""
        for kernel in self.kernels:
            _unlock(kernel, kernel.lxu_cache_locations_list)
            kernel.lxu_cache_locations_list, kernel.timesteps_prefetched = [], []

    @contextmanager
    def unlocking_every_lookup(self) -> Iterator[None]:
        """Unlocks behind every lookup: nothing in here has a backward pass."""
        hooks = [
            kernel.register_forward_hook(
                lambda own, _inputs, _output: _unlock(own, [own.lxu_cache_locations])
            )
            for kernel in self.kernels
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _is_prefetched(info: EmbeddingShardingInfo) -> bool:
    is_cached = info.param_sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return is_cached and bool((info.fused_params or {}).get("prefetch_pipeline"))


def _is_planned_so(planned: ParameterSharding) -> bool:
    is_cached = planned.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    return (
        is_cached
        and planned.cache_params is not None
        and bool(planned.cache_params.prefetch_pipeline)
    )


def _unlock(kernel: nn.Module, locations: list[Tensor]) -> None:
    """Counts every line's lock down by one, while nothing is prefetched, as FBGEMM does before a
    backward pass."""
    own = cast(SplitTableBatchedEmbeddingBagsCodegen, kernel)
    if own.prefetch_stream is not None:
        torch.cuda.current_stream().wait_stream(own.prefetch_stream)
    for of_batch in locations:
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
            own.lxu_cache_locking_counter, of_batch
        )
    if own.prefetch_stream is not None:
        own.prefetch_stream.wait_stream(torch.cuda.current_stream())


MANAGED = "_embedding_module"
"""The attribute by which TorchRec's managed collisions hold their collection."""
MANAGED_COLLISIONS = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
"""Modules of TorchRec that remap ids in front of a collection: one that pools, and one that does
not."""


def managed_collisions(model: nn.Module) -> dict[str, ManagedCollisionCollection]:
    """FQN of a module with managed collisions -> what remaps its ids. Local."""
    return {
        fqn: module._managed_collision_collection
        for fqn, module in get_unwrapped_module(model).named_modules()
        if type(module) in MANAGED_COLLISIONS
    }


def remapped(model: nn.Module, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The rows that a model looks up for some bags, as the remapping stands: what to count. Local,
    no collective.

    Nothing is learned from the bags. An id that has no row goes where TorchRec's module sends it,
    as in serving.

    Args:
        model: prepared or not; one without managed collisions gets the bags as they are.
        features: the bags, with raw ids, of all features that managed collisions read.

    Returns:
        Bags of the same keys, in their order, without per-sample weights.

    Raises:
        ValueError: if a feature is missing, or no id has a row yet.
        NotImplementedError: for a feature that several tables read, each of which gives its ids
            other rows.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> remapping = MCHManagedCollisionModule(4, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 1)
        >>> managed = ManagedCollisionEmbeddingBagCollection(
        ...     EmbeddingBagCollection(tables=[table]), ManagedCollisionCollection({"t": remapping}, [table]))
        >>> bags = KeyedJaggedTensor(["f"], torch.tensor([10**9, 7, 7]), lengths=torch.tensor([2, 1]))
        >>> _ = managed(bags)  # in training ids get rows
        >>> rows = remapped(managed, bags).values()
        >>> bool(rows.max() < 4), rows[1].item() == rows[2].item()
        (True, True)
    """
    managed = managed_collisions(model)
    if not managed:
        return features
    check_remapping(model)
    bags = dict(copy.copy(features).to_dict())  # the batch itself is left as it was
    for fqn, collection in managed.items():
        with _standing_still(collection):
            for table, remapping in collection._managed_collision_modules.items():
                names = collection._table_to_features[table]
                for name in names:
                    check_known(f"feature of table {table!r} in FQN {fqn!r}", name, bags)
                rows = _rows_of(
                    table, cast(ManagedCollisionModule, remapping), [bags[name] for name in names]
                )
                bags |= dict(zip(names, rows, strict=True))
    of_keys = [bags[key] for key in list(features.keys())]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat([own.values() for own in of_keys]),
        lengths=torch.cat([own.lengths() for own in of_keys]),
    )


def check_remapping(model: nn.Module) -> None:
    """Checks that rows stand for ids already, and for those of one table. Local."""
    readers = _readers(model)
    for fqn, collection in managed_collisions(model).items():
        for table, remapping in collection._managed_collision_modules.items():
            module = cast(ManagedCollisionModule, remapping)
            place = f"FQN {fqn!r}, table {table!r}"
            is_empty = int(module.open_slots()) >= module.output_size() - 1 > 0
            remedy = "train the model first: in training ids get their rows"
            check(not is_empty, place, "ids that have rows", "none", remedy)
            for feature in collection._table_to_features[table]:
                others = sorted(readers[feature] - {table})
                supported = f"supported are features of one table, so that the rows of {feature!r} are its own"
                if others:
                    remedy = "give the other table a feature of its own with the same ids"
                    raise NotImplementedError(
                        describe(place, supported, f"{others} reads it, too", remedy)
                    )


def stand_still_(model: nn.Module) -> None:
    """Keeps remapping as it is, also while the model trains, until `go_on_`. Local."""
    for collection in managed_collisions(model).values():
        collection.register_forward_pre_hook(_to_eval)


def stands_still(model: nn.Module) -> bool:
    """Whether no id gets another row until `go_on_`: every rank then maps ids alike. True without
    managed collisions."""
    return all(
        _to_eval in own._forward_pre_hooks.values() for own in managed_collisions(model).values()
    )


def share_remapping_(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Gives all ranks the remapping of the first. A broadcast of each tensor of its state."""
    first = dist.get_global_rank(process_group, 0)
    for collection in managed_collisions(model).values():
        for state in (*collection.buffers(), *collection.parameters()):
            dist.broadcast(state.detach(), src=first, group=process_group)


def go_on_(model: nn.Module) -> None:
    """Lets remapping learn ids again where the model trains. Local."""
    for fqn, collection in managed_collisions(model).items():
        hooks: dict[int, Any] = collection._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _to_eval]:
            del hooks[key]
            collection.train(get_unwrapped_module(model).get_submodule(fqn).training)


def refuse_managed_collisions(model: nn.Module, what: str, remedy: str) -> None:
    """Refuses what looks at raw ids, or shards the collection alone."""
    for fqn in managed_collisions(model):
        supported = f"supported in {what} are embedding collections that the model calls itself"
        kind = type(get_unwrapped_module(model).get_submodule(fqn)).__name__
        place, received = f"{fqn}.{MANAGED}".removeprefix("."), f"one in {kind} {fqn!r}"
        raise NotImplementedError(describe(f"FQN {place!r}", supported, received, remedy))


def _rows_of(
    table: str, remapping: ManagedCollisionModule, bags: list[JaggedTensor]
) -> list[JaggedTensor]:
    """The rows of one table for the bags of each of its features, given to its remapping as
    TorchRec gives them."""
    sizes = torch.tensor([own.values().numel() for own in bags])
    values, lengths = (
        torch.cat([own.values() for own in bags]),
        torch.cat([own.lengths() for own in bags]),
    )
    found = remapping({table: JaggedTensor(values=values, lengths=lengths, weights=sizes)})[table]
    of_features = found.lengths().view(len(bags), -1)
    rows = found.values().split(of_features.sum(1).tolist())
    return [
        JaggedTensor(own, lengths=lengths) for own, lengths in zip(rows, of_features, strict=True)
    ]


def _readers(model: nn.Module) -> dict[str, set[str]]:
    """Feature -> the tables of all collections that read it."""
    readers: dict[str, set[str]] = {}
    for module in get_unwrapped_module(model).modules():
        configs = getattr(module, "embedding_bag_configs", None) or getattr(
            module, "embedding_configs", None
        )
        for config in configs() if callable(configs) else ():
            for feature in config.feature_names:
                readers.setdefault(feature, set()).add(config.name)
    return readers


@contextmanager
def _standing_still(collection: ManagedCollisionCollection) -> Iterator[None]:
    before = [(module, module.training) for module in collection.modules()]
    collection.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def _to_eval(collection: nn.Module, _: tuple[Tensor, ...]) -> None:
    collection.eval()


def process_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share a model; None for one that is not distributed."""
    # DistributedModelParallel takes an env and gives none back, as of torchrec 1.9:
    # https://github.com/meta-pytorch/torchrec/blob/main/torchrec/distributed/model_parallel.py
    return model._env.process_group if isinstance(model, DistributedModelParallel) else None


def fused_kernels(model: nn.Module) -> list[Any]:
    """FBGEMM's kernels that count their forward passes, as fused optimizers want for bias
    correction. Local."""
    return [
        part for lookup in lookups(model) for part in lookup.modules() if hasattr(part, "iter_cpu")
    ]


@contextmanager
def frozen_counters(kernels: Iterable[Any]) -> Iterator[None]:
    """Forward passes meanwhile are none of a training step: kernels of `fused_kernels` count them
    and forget them."""
    # A forward pass in training mode counts, whether or not a backward pass follows, as of FBGEMM
    # 1.5: https://github.com/pytorch/FBGEMM, split_table_batched_embeddings_ops_training.py.
    counters = [counter for kernel in kernels for counter in (kernel.iter, kernel.iter_cpu)]
    before = [counter.clone() for counter in counters]
    try:
        yield
    finally:
        for counter, value in zip(counters, before, strict=True):
            counter.copy_(value)
