"""prepare_ and merge_: soft selection in and out of a user's model, by FQN."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.soft_selection.alpha import Alpha
from dnis_torchrec.soft_selection.cached_tables import writing_to_tables
from dnis_torchrec.soft_selection.feature_processed import (
    FEATURE_PROCESSED,
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
    with_processors_of,
)
from dnis_torchrec.soft_selection.table_shards import (
    collections,
    frozen_tables_of,
    holders_of_tables,
    local_shards,
    multiply_by_alpha_,
    sequence_collections,
    whole_module_of,
)
from dnis_torchrec.soft_selection.wrapper import SoftSelectionEmbeddingBagCollection, soft_selection_modules

PlainCollection = TypeVar("PlainCollection", EmbeddingBagCollection, EmbeddingCollection)


def prepare_(
    model: nn.Module,
    blocks: RowBlocks,
    *,
    fqns: list[str] | None = None,
    multi_hot_features: list[str] | None = None,
) -> nn.Module:
    """Wraps the EmbeddingBagCollections of a model for the search; call it before DistributedModelParallel.

    The weights stay where they are. All wrappers share one alpha per embedding_dim.

    Args:
        model: any model, changed in place.
        blocks: blocks of every table that is wrapped.
        fqns: FQNs of the collections to wrap, at least one; all of the model's if None.
        multi_hot_features: see `SoftSelectionEmbeddingBagCollection`.

    Returns:
        `model`, or the wrapper if the model itself is an EmbeddingBagCollection.

    Raises:
        ValueError: for an unknown FQN, table or feature, blocks that do not fit, nothing to wrap, or a table whose
            weights are those of another table or layer too.
        NotImplementedError: for a collection inside a module that changes what it reads, see `collections`.
        RuntimeError: if the model is prepared or sharded already.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from dnis_torchrec.blocks.blocking import blocks_from_counts
        >>> from dnis_torchrec.blocks.frequency import FrequencyCounts
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
        >>> counts = FrequencyCounts({"t": torch.tensor([3, 2, 1, 0])}, {"f": 1}, 6)
        >>> type(prepare_(model, blocks_from_counts(counts, [table], num_blocks=2))["ebc"]).__name__
        'SoftSelectionEmbeddingBagCollection'
        >>> type(merge_(model)["ebc"]).__name__
        'EmbeddingBagCollection'
    """
    if soft_selection_modules(model):
        raise RuntimeError(describe("prepare_", "a model not yet prepared", "wrapped collections", "merge_ it"))
    sharded = [fqn for fqn, module in model.named_modules() if isinstance(module, ShardedEmbeddingBagCollection)]
    if sharded:
        remedy = "call prepare_ before DistributedModelParallel"
        raise RuntimeError(describe(f"FQN {sharded[0]!r}", "an unsharded collection", "a sharded one", remedy))
    found = {fqn: module for fqn, module in collections(model).items() if isinstance(module, EmbeddingBagCollection)}
    check(bool(found), "prepare_", "a model with an EmbeddingBagCollection", type(model).__name__)
    remedy = f"leave it out to wrap all collections: {', '.join(map(repr, found))}"
    check(fqns is None or len(fqns) > 0, "fqns", "at least one FQN", "none", remedy)
    for fqn in fqns or ():
        check_known("FQN", fqn, found)
    chosen = {fqn: module for fqn, module in found.items() if fqns is None or fqn in fqns}
    _check_features(chosen, multi_hot_features)
    _check_weights(get_unwrapped_module(model), found, chosen)
    alpha = Alpha(blocks.alpha_shapes)
    wrappers = []  # all of them before the first is put in: a model that does not fit stays whole
    for fqn, collection in chosen.items():
        own = {f for table in collection.embedding_bag_configs() for f in table.feature_names}
        multi_hot = None if multi_hot_features is None else own & set(multi_hot_features)
        whole = whole_module_of(model, fqn)
        wrapped = _wrapper_for(whole)(whole, blocks, alpha=alpha, multi_hot_features=multi_hot)
        wrappers.append((whole, wrapped.train(collection.training)))
    for whole, wrapper in wrappers:
        model = replace_(model, whole, wrapper)
    return model


def _wrapper_for(whole: nn.Module) -> Any:
    if isinstance(whole, FEATURE_PROCESSED):
        return SoftSelectionFeatureProcessedEmbeddingBagCollection
    return SoftSelectionEmbeddingBagCollection


def merge_(model: nn.Module) -> nn.Module:
    """Folds alpha into the tables and gives the user's plain model back.

    ``E~ = alpha[block] * E`` in place, shard by shard; the model then computes what it computed before, without
    wrappers. Local, no collective. In a model that DistributedModelParallel shards over several ranks the tables are
    folded where they are, alpha becomes 1 and the sharded model itself is returned, because no rank may hold a foreign
    shard.

    Args:
        model: a prepared model, wrapped in DistributedModelParallel or not. Changed in place; not usable afterwards
            except through what is returned.

    Returns:
        The plain model (world size 1) or the sharded one, whose pipeline has to be detached before it is called.

    Raises:
        RuntimeError: if the model is not prepared.
    """
    wrappers = soft_selection_modules(model)
    if not wrappers:
        raise RuntimeError(describe("merge_", "a prepared model", "no wrapped collection", "call prepare_ first"))
    fold_(model)
    if _spans_ranks(wrappers):
        return model
    model = get_unwrapped_module(model)
    for pipelined in [module for module in model.modules() if isinstance(module, PipelinedPostproc)]:
        model = replace_(model, pipelined, pipelined.postproc_module)  # it would give the bags of an older batch
    for wrapper in wrappers.values():
        plain = _collection_around(wrapper, wrapper.embedding_bag_configs(), wrapper.is_weighted())
        if isinstance(wrapper, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            model = replace_(model, wrapper, with_processors_of(wrapper.feature_processed, plain))
        else:
            model = replace_(model, wrapper, plain)
    return unshard_(model)  # collections that were not wrapped are sharded still


def unshard_(model: nn.Module) -> nn.Module:
    """Gives the plain model back from DistributedModelParallel at world size 1, around the live weights.

    EmbeddingBagCollections and EmbeddingCollections become plain; about other sharded modules a warning tells.

    Args:
        model: a sharded model without wrappers. Not usable afterwards except through what is returned.

    Raises:
        NotImplementedError: if tables are spread over several ranks.
    """
    plain = get_unwrapped_module(model)
    for fqn, module in (collections(model) | sequence_collections(model)).items():
        if not isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            continue
        if module._env.world_size > 1:
            raise NotImplementedError(describe(f"FQN {fqn!r}", "supported is world size 1", module._env.world_size))
        if isinstance(module, ShardedEmbeddingBagCollection):
            tables = list(module._embedding_bag_configs)
            around, whole = _collection_around(module, tables, module._is_weighted), whole_module_of(plain, fqn)
            plain = replace_(plain, whole, around if whole is module else with_processors_of(whole, around))
        else:
            plain = replace_(plain, module, _sequence_collection_around(module))
    left = {fqn: type(module).__name__ for fqn, module in plain.named_modules() if isinstance(module, ShardedModule)}
    if left:
        remedy = "copy their weights yourself: only embedding collections become plain again"
        warnings.warn(f"the plain model: some modules stay sharded, got {left}; {remedy}", stacklevel=3)
    return plain


@torch.no_grad()
def fold_(model: nn.Module) -> None:
    """Folds alpha into the tables and sets alpha to 1; the wrappers stay. Local, no collective.

    Args:
        model: prepared, sharded or not; changed in place.

    Raises:
        RuntimeError: if the model is not prepared.
    """
    wrappers = soft_selection_modules(model)
    if not wrappers:
        raise RuntimeError(describe("fold_", "a prepared model", "no wrapped collection", "call prepare_ first"))
    with writing_to_tables(model):
        for wrapper in wrappers.values():
            multiply_by_alpha_(wrapper)
    for wrapper in wrappers.values():
        for dim in wrapper.alpha.dims:
            wrapper.alpha.of(dim).fill_(1.0)


def _check_features(collections: dict[str, EmbeddingBagCollection], multi_hot_features: list[str] | None) -> None:
    tables = [table for collection in collections.values() for table in collection.embedding_bag_configs()]
    names = [table.name for table in tables]
    repeated = sorted({name for name in names if names.count(name) > 1})
    check(not repeated, "table names", "distinct names over all wrapped collections", repeated)
    features = {feature for table in tables for feature in table.feature_names}
    for feature in multi_hot_features or ():
        check_known("feature", feature, features)


def _check_weights(
    model: nn.Module, found: dict[str, EmbeddingBagCollection], chosen: dict[str, EmbeddingBagCollection]
) -> None:
    """Refuses shared weights: each holder would need its own alpha, and weights are multiplied by one alone."""
    bags = {id(bag) for collection in found.values() for bag in collection.embedding_bags.values()}
    holders: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        if id(module) not in bags:  # a collection speaks for its own: two may hold one bag
            is_collection = isinstance(module, EmbeddingBagCollection)
            for name, weight in module.named_parameters(fqn, recurse=is_collection, remove_duplicate=False):
                holders.setdefault(_memory(weight), []).append(name)
    remedy = "let one table read the features of both (feature_names), or copy the weights"
    for fqn, collection in chosen.items():
        for table, bag in collection.embedding_bags.items():
            own = f"{fqn}.embedding_bags.{table}.weight".removeprefix(".")
            others = [name for name in holders[_memory(bag.weight)] if name != own]
            received = f"those of {others[0]!r} too" if others else ""
            check(not others, f"table {table!r}", "weights of its own", received, remedy)


def _memory(weight: torch.Tensor) -> int:
    """Returns the address of weights; on the meta device, where they have none, the identity of their Parameter."""
    return weight.data_ptr() or id(weight)


def _spans_ranks(wrappers: dict[str, SoftSelectionEmbeddingBagCollection]) -> bool:
    children = [wrapper.embedding_bag_collection for wrapper in wrappers.values()]
    return any(getattr(getattr(child, "_env", None), "world_size", 1) > 1 for child in children)


def _collection_around(
    holder: nn.Module, tables: list[EmbeddingBagConfig], is_weighted: bool
) -> EmbeddingBagCollection:
    """A plain collection around the live weights of a sharded or wrapped one; only column-wise shards are joined."""
    plain = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted, device=torch.device("meta"))
    return _take_live_weights_(plain, holder)


def _sequence_collection_around(holder: ShardedEmbeddingCollection) -> EmbeddingCollection:
    """The same for sequence embeddings."""
    tables, need_indices = list(holder._embedding_configs), holder._need_indices
    plain = EmbeddingCollection(tables=tables, need_indices=need_indices, device=torch.device("meta"))
    return _take_live_weights_(plain, holder)


def _take_live_weights_(plain: PlainCollection, holder: nn.Module) -> PlainCollection:
    shards, frozen = local_shards(holder), frozen_tables_of(holder)
    for table, target in holders_of_tables(plain).items():
        parts = [shard for shard in shards if shard.table == table]
        weight = parts[0].weight
        if len(parts) > 1:
            whole = cast(torch.Tensor, target.weight).shape
            weight = weight.new_empty(whole)
            for shard in parts:
                rows = slice(shard.first_row, shard.first_row + shard.weight.shape[0])
                weight[rows, shard.first_column : shard.first_column + shard.weight.shape[1]] = shard.weight
        target.weight = nn.Parameter(weight, requires_grad=table not in frozen)
        plain._device = weight.device
    return plain.train(holder.training)


def replace_(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Puts a module wherever another is: a model may hold one collection under several names. Local.

    Args:
        model: changed in place.
        old: what is in it, or it itself.
        new: what takes its place.

    Returns:
        `model`, or `new` if the model itself was `old`.
    """
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
    return model
