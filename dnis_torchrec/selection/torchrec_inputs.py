"""Changes to what TorchRec does in front of its lookups, entry by entry as in `torchrec`: feature
processors, managed collisions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as EnumerableShardingSpec
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.utils import modify_input_for_feature_processor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.selection.torchrec import without_weights

# --------------------------------------------------------------------------------------------------
# Feature processors
# Reason: a FeatureProcessedEmbeddingBagCollection keeps its collection and its processors to
#   itself; processors in front of row shards are told for good to expect places as weights, which
#   a model that is no longer sharded does not give.
# Upstream:
#   https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/modules/feature_processor_.py#L70
# Ends: not planned.
# --------------------------------------------------------------------------------------------------

FEATURE_PROCESSED = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
"""TorchRec's modules that process features in front of the collection that they hold."""
INNER = "_embedding_bag_collection"
"""The attribute by which they hold it."""


def inner_collection(holder: nn.Module) -> EmbeddingBagCollection | ShardedEmbeddingBagCollection:
    """The collection behind the processors."""
    return cast(EmbeddingBagCollection, getattr(holder, INNER))


def with_processors_of(
    holder: nn.Module, collection: EmbeddingBagCollection
) -> FeatureProcessedEmbeddingBagCollection:
    """An unsharded module with the processors of another, around a collection."""
    processors: Any = holder._feature_processors
    for module in processors.modules():
        if hasattr(module, "_pre_processed"):
            module._pre_processed = False
    if not isinstance(processors, FeatureProcessorsCollection):
        processors = dict(processors.items())
    return FeatureProcessedEmbeddingBagCollection(collection, processors).train(holder.training)


def processed_bags(holder: nn.Module, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Bags with the weights that the processors of a module give them, made here. Local."""
    processors: Any = holder._feature_processors
    bags = without_weights(features)
    is_collection = isinstance(processors, FeatureProcessorsCollection)
    if any(getattr(module, "_pre_processed", False) for module in processors.modules()):
        modify_input_for_feature_processor(
            bags, processors, is_collection
        )  # they now want places as weights
    return cast(
        KeyedJaggedTensor,
        processors(bags) if is_collection else apply_feature_processors_to_kjt(bags, processors),
    )


# --------------------------------------------------------------------------------------------------
# Managed collisions (ZCH, MPZCH): a model that looks up, for an id, the row that the id has now
# Reason: raw ids are remapped in front of the collection, which is wrapped, compressed and served
#   as any other. So counts, blocks and schemes are of the REMAPPED rows, and rows belong to
#   blocks: remapping stands still while a model is prepared. Where it goes on later, counts are
#   taken anew.
# Upstream: https://github.com/pytorch/torchrec/blob/v1.8.0/torchrec/modules/mc_modules.py
# Ends: not planned; TorchRec shows neither the remapping of a table nor a way to hold it.
# --------------------------------------------------------------------------------------------------

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


def _remappings(
    collection: ManagedCollisionCollection,
) -> Iterator[tuple[str, ManagedCollisionModule, list[str]]]:
    """(table, what remaps its ids, its features)."""
    for table, remapping in collection._managed_collision_modules.items():
        yield table, cast(ManagedCollisionModule, remapping), collection._table_to_features[table]


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
    """
    managed = managed_collisions(model)
    if not managed:
        return features
    check_remapping(model)
    bags = dict(copy.copy(features).to_dict())  # the batch itself is left as it was
    for fqn, collection in managed.items():
        with _standing_still(collection):
            for table, remapping, names in _remappings(collection):
                for name in names:
                    check_known(f"feature of table {table!r} in FQN {fqn!r}", name, bags)
                rows = _rows_of(table, remapping, [bags[name] for name in names])
                bags |= dict(zip(names, rows, strict=True))
    of_keys = [bags[key] for key in list(features.keys())]
    values, lengths = (
        [part() for part in parts] for parts in zip(*((b.values, b.lengths) for b in of_keys))
    )
    return KeyedJaggedTensor(features.keys(), torch.cat(values), lengths=torch.cat(lengths))


def check_remapping(model: nn.Module) -> None:
    """Checks that rows stand for ids already, and for those of one table. Local."""
    readers = _readers(model)
    for fqn, collection in managed_collisions(model).items():
        for table, remapping, features in _remappings(collection):
            place = f"FQN {fqn!r}, table {table!r}"
            is_empty = int(remapping.open_slots()) >= remapping.output_size() - 1 > 0
            remedy = "train the model first: in training ids get their rows"
            check(not is_empty, place, "ids that have rows", "none", remedy)
            for feature in features:
                others = sorted(readers[feature] - {table})
                if others:
                    supported = f"supported are features of one table, so that the rows of {feature!r} are its own"
                    remedy = "give the other table a feature of its own with the same ids"
                    received = f"{others} reads it, too"
                    raise NotImplementedError(describe(place, supported, received, remedy))


def stand_still_(model: nn.Module) -> None:
    """Keeps remapping as it is, also while the model trains, until `go_on_`. Local."""
    for collection in managed_collisions(model).values():
        collection.register_forward_pre_hook(_to_eval)


def stands_still(model: nn.Module) -> bool:
    """Whether no id gets another row until `go_on_`: every rank then maps ids alike. True without
    managed collisions."""
    hooks = (own._forward_pre_hooks.values() for own in managed_collisions(model).values())
    return all(_to_eval in of_collection for of_collection in hooks)


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
    rows = remapping({table: JaggedTensor(values=values, lengths=lengths, weights=sizes)})[table]
    of_features = rows.lengths().view(len(bags), -1)
    values = rows.values().split(of_features.sum(1).tolist())
    return [
        JaggedTensor(v, lengths=lengths) for v, lengths in zip(values, of_features, strict=True)
    ]


def _readers(model: nn.Module) -> dict[str, set[str]]:
    """Feature -> the tables of all collections that read it."""
    readers: dict[str, set[str]] = {}
    for module in get_unwrapped_module(model).modules():
        configs: Any = getattr(module, "embedding_bag_configs", None)
        configs = configs or getattr(module, "embedding_configs", None)
        for config in configs() if callable(configs) else ():
            for feature in cast(BaseEmbeddingConfig, config).feature_names:
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
