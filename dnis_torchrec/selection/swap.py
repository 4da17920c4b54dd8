"""prepare_ and merge_: soft selection in and out of a user's model, by FQN."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.selection import shards, torchrec
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.torchrec_inputs import (
    check_remapping,
    go_on_,
    stand_still_,
    with_processors_of,
)
from dnis_torchrec.selection.wrapper import (
    SoftSelectionEmbeddingBagCollection,
    SoftSelectionEmbeddingCollection,
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
    SoftSelectionModule,
    soft_selection_modules,
)

ON_RANKS = "call dnis_torchrec.allocation.compress.measure_(model, ...).allocate(...) and export"
PlainCollection = TypeVar("PlainCollection", EmbeddingBagCollection, EmbeddingCollection)


def prepare_(
    model: nn.Module,
    blocks: RowBlocks,
    *,
    fqns: list[str] | None = None,
    multi_hot_features: list[str] | None = None,
) -> nn.Module:
    """Wraps the embedding collections of a model for the search.

    Call it before DistributedModelParallel. The weights stay where they are. All wrappers, pooled
    or not, share one alpha per embedding_dim. Managed collisions give no id another row until
    `merge_`, because rows belong to blocks.

    Args:
        model: any model, changed in place.
        blocks: blocks of every table that is wrapped.
        fqns: FQNs of the collections to wrap, at least one; all of the model's if None.
        multi_hot_features: features whose bags may hold several ids; None asks the counts.

    Returns:
        `model`, or the wrapper if the model itself is a collection.

    Raises:
        ValueError: for an unknown FQN, table or feature, blocks that do not fit, nothing to wrap,
            or a table whose weights are those of another table or layer too.
        NotImplementedError: for a collection inside a module that changes what it reads, see
            `collections`.
        RuntimeError: if the model is prepared or sharded already.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from dnis_torchrec.blocks.blocking import blocks_from_counts
        >>> from dnis_torchrec.blocks.counts import FrequencyCounts
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"]
        ... )
        >>> model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
        >>> counts = FrequencyCounts({"t": torch.tensor([3, 2, 1, 0])}, {"f": 1}, 6)
        >>> blocks = blocks_from_counts(counts, [table])
        >>> type(prepare_(model, blocks)["ebc"]).__name__
        'SoftSelectionEmbeddingBagCollection'
        >>> type(merge_(model)["ebc"]).__name__
        'EmbeddingBagCollection'
    """
    if soft_selection_modules(model):
        requirement, text = "a model not yet prepared", "wrapped collections"
        raise RuntimeError(describe("prepare_", requirement, text, "merge_ it"))
    for fqn, module in model.named_modules():
        if isinstance(module, torchrec.Sharded):
            remedy = "call prepare_ before DistributedModelParallel"
            requirement = "an unsharded collection"
            raise RuntimeError(describe(f"FQN {fqn!r}", requirement, "a sharded one", remedy))
    plain = cast(dict[str, torchrec.Plain], shards.collections(model))
    check(bool(plain), "prepare_", "a model with an embedding collection", type(model).__name__)
    remedy = f"leave it out to wrap all collections: {', '.join(map(repr, plain))}"
    check(fqns is None or len(fqns) > 0, "fqns", "at least one FQN", "none", remedy)
    for fqn in fqns or ():
        check_known("FQN", fqn, plain)
    choice = {fqn: module for fqn, module in plain.items() if fqns is None or fqn in fqns}
    tables = [
        table for collection in choice.values() for table in shards.table_configs_of(collection)
    ]
    shards.check_distinct([table.name for table in tables], "over all wrapped collections")
    features = {feature for table in tables for feature in table.feature_names}
    for feature in multi_hot_features or ():
        check_known("feature", feature, features)
    check_weights_apart(model, choice)
    check_remapping(model)
    alpha = Alpha(blocks.alpha_shapes)
    wrappers = []  # all of them before the first is put in: a model that does not fit stays whole
    for fqn, collection in choice.items():
        whole = shards.whole_module_of(model, fqn)
        wrapper: SoftSelectionModule
        if isinstance(collection, EmbeddingCollection):
            wrapper = SoftSelectionEmbeddingCollection(collection, blocks, alpha=alpha)
        else:
            kind = SoftSelectionEmbeddingBagCollection
            if isinstance(whole, FeatureProcessedEmbeddingBagCollection):
                kind = SoftSelectionFeatureProcessedEmbeddingBagCollection
            wrapper = kind(whole, blocks, alpha=alpha, multi_hot_features=multi_hot_features)
        wrappers.append((whole, wrapper.train(collection.training)))
    for whole, wrapper in wrappers:
        model = replace_(model, whole, wrapper)
    stand_still_(model)
    return model


def merge_(model: nn.Module) -> nn.Module:
    """Folds alpha into the tables and gives the user's plain model back.

    ``E~ = alpha[block] * E`` in place, shard by shard. The model then computes the same without
    wrappers. Local, no collective. Over several ranks the tables are folded where they are, alpha
    becomes 1, and the sharded model itself is returned. Managed collisions give no id another row
    there, or ranks would not agree.

    Args:
        model: a prepared model, wrapped in DistributedModelParallel or not. Changed in place; not
            usable afterwards except through what is returned.

    Returns:
        The plain model (world size 1) or the sharded one, whose pipeline has to be detached before
        it is called.

    Raises:
        RuntimeError: if the model is not prepared.
    """
    wrappers = soft_selection_modules(model)
    fold_(model)
    lookups = [wrapper.lookup for wrapper in wrappers.values()]
    if any(
        isinstance(c, torchrec.Sharded) and torchrec.sharding_env(c).world_size > 1 for c in lookups
    ):
        return model
    model = get_unwrapped_module(model)
    go_on_(model)
    for module in list(model.modules()):
        if isinstance(module, PipelinedPostproc):  # it would give the bags of an older batch
            model = replace_(model, module, module.postproc_module)
    for wrapper in wrappers.values():
        plain = _plain_around(wrapper)
        if isinstance(wrapper, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            collection = cast(EmbeddingBagCollection, plain)
            plain = with_processors_of(wrapper.feature_processed, collection)
        model = replace_(model, wrapper, plain)
    return unshard_(model)  # collections that were not wrapped are sharded still


def unshard_(model: nn.Module) -> nn.Module:
    """Gives the plain model back from DistributedModelParallel at world size 1."""
    plain = get_unwrapped_module(model)
    for fqn, module in shards.collections(model).items():
        if not isinstance(module, torchrec.Sharded):
            continue
        world_size = torchrec.sharding_env(module).world_size
        if world_size > 1:
            limit, remedy = "supported is world size 1", ON_RANKS
            raise NotImplementedError(describe(f"FQN {fqn!r}", limit, world_size, remedy))
        around, whole = _plain_around(module), shards.whole_module_of(plain, fqn)
        if whole is not module:
            around = with_processors_of(whole, cast(EmbeddingBagCollection, around))
        plain = replace_(plain, whole, around)
    rest = {
        fqn: type(module).__name__
        for fqn, module in plain.named_modules()
        if isinstance(module, ShardedModule)
    }
    if rest:
        remedy = "copy their weights yourself: only embedding collections become plain again"
        text = f"the plain model: some modules stay sharded, got {rest}; {remedy}"
        warnings.warn(text, stacklevel=3)
    return plain


@torch.no_grad()
def fold_(model: nn.Module) -> None:
    """Folds alpha into the tables and sets alpha to 1; the wrappers stay. Local, no collective."""
    wrappers = soft_selection_modules(model)
    if not wrappers:
        remedy = "call prepare_ first"
        raise RuntimeError(describe("merge_", "a prepared model", "no wrapped collection", remedy))
    with torchrec.writing_to_tables(model):
        for wrapper in wrappers.values():
            shards.multiply_by_alpha_(wrapper)
    for wrapper in wrappers.values():
        for dim in wrapper.alpha.dims:
            wrapper.alpha.of(dim).fill_(1.0)


def check_weights_apart(model: nn.Module, fqns: Collection[str] | None = None) -> None:
    """Refuses tables whose weights others share: each needs its own alpha and codes. Local."""
    model, modules = get_unwrapped_module(model), shards.collections(model)
    kinds = EmbeddingBagCollection | EmbeddingCollection
    plain = {fqn: module for fqn, module in modules.items() if isinstance(module, kinds)}
    tables = [table for c in plain.values() for table in shards.holders_of_tables(c).values()]
    of_collections = {id(table) for table in tables}
    holders: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        if id(module) not in of_collections:  # a collection speaks for its tables: two may hold one
            is_collection = isinstance(module, kinds)
            weights = module.named_parameters(fqn, recurse=is_collection, remove_duplicate=False)
            for name, weight in weights:
                holders.setdefault(_memory(weight), []).append(name)
    remedy = "let one table read the features of both (feature_names), or copy the weights"
    for fqn in plain if fqns is None else fqns:
        for table, holder in shards.holders_of_tables(plain[fqn]).items():
            name = f"{fqn}.{shards.tables_under(plain[fqn])}.{table}.weight".removeprefix(".")
            names = [n for n in holders[_memory(cast(torch.Tensor, holder.weight))] if n != name]
            text = f"those of {names[0]!r} too" if names else ""
            check(not names, f"table {table!r}", "weights of its own", text, remedy)


def _memory(weight: torch.Tensor) -> int:
    """The address of weights, or on the meta device, where they have none, their identity."""
    return weight.data_ptr() or id(weight)


def _plain_around(holder: nn.Module) -> nn.Module:
    """A plain collection around the live weights of a sharded or wrapped one."""
    meta = torch.device("meta")
    if shards.is_pooled(holder):
        bags, weighs = shards.table_configs_of(holder), shards.is_weighted(holder)
        return _take_live_weights_(EmbeddingBagCollection(bags, weighs, meta), holder)
    if isinstance(holder, ShardedEmbeddingCollection):
        tables = torchrec.sequence_configs_of(holder)
    else:
        tables = cast(EmbeddingCollectionInterface, holder).embedding_configs()
    plain = EmbeddingCollection(tables, device=meta, need_indices=shards.needs_indices(holder))
    return _take_live_weights_(plain, holder)


def _take_live_weights_(plain: PlainCollection, holder: nn.Module) -> PlainCollection:
    every, frozen = shards.local_shards(holder), shards.frozen_tables_of(holder)
    for table, target in shards.holders_of_tables(plain).items():
        parts = [shard for shard in every if shard.table == table]
        weight = parts[0].weight
        if len(parts) > 1:  # column-wise shards are joined
            weight = weight.new_empty(cast(torch.Tensor, target.weight).shape)
            for shard in parts:
                weight[shard.window] = shard.weight
        target.weight = nn.Parameter(weight, requires_grad=table not in frozen)
        torchrec.set_device_(plain, weight.device)
    return plain.train(holder.training)


def replace_(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Puts a module wherever another is: a model may hold one under several names. Local."""
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
    return model


def in_float32_(model: nn.Module) -> list[Callable[[], None]]:
    """Converts half-precision tables to float32, where no rank shards them. Returns functions that
    undo it. Local."""
    kinds, modules = EmbeddingBagCollection | EmbeddingCollection, shards.collections(model)
    plain = [module for module in modules.values() if isinstance(module, kinds)]
    return [torchrec.tables_in_float32_(module) for module in plain]


@contextmanager
def tables_in_float32(model: nn.Module) -> Iterator[None]:
    """`in_float32_`, undone if the block raises."""
    undo = in_float32_(model)
    try:
        yield
    except BaseException:
        for step in undo:
            step()
        raise
