"""Collections of a model, plain, wrapped or sharded, and the local shards of their tables."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.utils import CopyableMixin
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)

from dnis_torchrec.blocks.counts import table_key, table_name
from dnis_torchrec.blocks.routing import RowRouter
from dnis_torchrec.checks import check, describe
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.selection import torchrec, torchrec_inputs
from dnis_torchrec.selection.wrapper import (
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
    SoftSelectionModule,
    as_bags,
    plain_state_dict,
)

ROWS_PER_CHUNK = 1 << 16
"""Rows that one in-place operation touches, at most."""
VALUES_PER_OPERATION = 1 << 18
"""Values that one in-place operation touches: bounds temporary memory to a few MB."""

HOLDERS_OF_COLLECTIONS = ("torchrec.modules.", "torchrec.distributed.")
"""Where TorchRec has modules that hold a collection and change its inputs or outputs."""
INTERFACES = {
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    DistributedModelParallel,
    CopyableMixin,
}
"""Classes from there that may hold a collection: they do neither."""
_PLAIN = ("activation", "crossnet", "deepfm", "embedding_tower", "lazy_extension", "mlp", "regroup")
PLAIN_HOLDERS = (*(f"torchrec.modules.{n}" for n in _PLAIN), "torchrec.distributed.test_utils.")
"""Modules from there whose classes do neither, nor do those that a user derives from them."""
NO_HOOKS = "remove the hooks: neither sharded nor merged collections keep them"
MOVE_OUT = "move what it adds into a module around a plain collection"


@dataclass(frozen=True, eq=False)
class TableShard:
    """A view of the part of one table that this rank holds."""

    table: str
    weight: Tensor
    first_row: int = 0
    first_column: int = 0

    @property
    def window(self) -> tuple[slice, slice]:
        """Rows and columns of the table."""
        rows, columns = self.weight.shape
        of_rows = slice(self.first_row, self.first_row + rows)
        return of_rows, slice(self.first_column, self.first_column + columns)

    def chunks(self) -> Iterator[tuple[Tensor, slice, slice]]:
        """Walks the shard a few rows at a time."""
        _, columns = self.window
        num_rows = max(1, min(ROWS_PER_CHUNK, VALUES_PER_OPERATION // max(1, self.weight.shape[1])))
        for start in range(0, self.weight.shape[0], num_rows):
            chunk = self.weight[start : start + num_rows]
            yield chunk, slice(self.first_row + start, self.first_row + start + len(chunk)), columns


def collections(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost collections in a model by FQN: plain, wrapped or sharded."""
    outermost: dict[str, nn.Module] = {}
    plain_model = get_unwrapped_module(model)
    kinds = SoftSelectionModule | torchrec.Sharded | EmbeddingBagCollection | EmbeddingCollection
    for fqn, module in plain_model.named_modules():
        if isinstance(module, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            fqn = f"{fqn}.{torchrec_inputs.INNER}".removeprefix(".")
        is_outer = not any(fqn == outer or _is_inside(fqn, outer) for outer in outermost)
        if isinstance(module, kinds) and is_outer:
            _check_plain_lookup(plain_model, fqn, module)
            outermost[fqn] = module
    return outermost


def _check_plain_lookup(model: nn.Module, fqn: str, collection: nn.Module) -> None:
    kind_of = EmbeddingBagCollection if is_pooled(collection) else EmbeddingCollection
    place = f"FQN {fqn!r}"
    limit = f"supported are {kind_of.__name__}s that the model calls themselves"
    parts = fqn.split(".") if fqn else []
    for depth in range(len(parts)):
        holder, rest = ".".join(parts[:depth]), parts[depth:]
        kind = type(model.get_submodule(holder))
        if kind in torchrec_inputs.FEATURE_PROCESSED and rest == [torchrec_inputs.INNER]:
            continue
        if kind in torchrec_inputs.MANAGED_COLLISIONS and rest == [torchrec_inputs.MANAGED]:
            continue
        if any(_changes_lookups(base) for base in kind.__mro__):
            inside = f"one inside the {kind.__name__} {holder!r}"
            raise NotImplementedError(describe(place, limit, inside))
    if not isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
        return
    if getattr(collection.forward, "__func__", None) is not kind_of.forward:
        kind_name = f"{type(collection).__name__} with a forward of its own"
        raise NotImplementedError(describe(place, limit, kind_name, MOVE_OUT))
    if _has_hooks(collection):
        raise NotImplementedError(describe(place, limit, "one with hooks", NO_HOOKS))
    for table, holder_of_table in holders_of_tables(collection).items():
        _check_plain_table(f"{place}, table {table!r}", holder_of_table)


def _changes_lookups(kind: type) -> bool:
    is_torchrecs = kind.__module__.startswith(HOLDERS_OF_COLLECTIONS) and kind not in INTERFACES
    return is_torchrecs and not kind.__module__.startswith(PLAIN_HOLDERS)


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks, module._forward_pre_hooks
    return any((*forward, module._backward_hooks, module._backward_pre_hooks))


def _check_plain_table(place: str, holder: nn.Module) -> None:
    """Refuses a table with anything that TorchRec would lose in sharding."""
    limit = "supported are tables as TorchRec makes them"
    if not (type(holder) is nn.EmbeddingBag or type(holder) is nn.Embedding):
        raise NotImplementedError(describe(place, limit, type(holder).__name__, MOVE_OUT))
    if _has_hooks(holder) or holder.weight._backward_hooks:
        raise NotImplementedError(describe(place, limit, "one with hooks", NO_HOOKS))
    options = {name: getattr(holder, name) for name in ("max_norm", "padding_idx")}
    options = {name: value for name, value in options.items() if value is not None}
    if holder.scale_grad_by_freq:
        options["scale_grad_by_freq"] = True
    if options:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        remedy = "leave it out: no sharded collection knows it; empty bags need no id for padding"
        raise NotImplementedError(describe(place, limit, text, remedy))


def is_pooled(collection: nn.Module) -> bool:
    """Whether a collection pools bags, as an EmbeddingBagCollection does."""
    return not isinstance(collection, EmbeddingCollectionInterface | ShardedEmbeddingCollection)


def lookup_of(collection: nn.Module) -> nn.Module:
    """The collection itself, or the child of a wrapper."""
    return collection.lookup if isinstance(collection, SoftSelectionModule) else collection


def tables_under(collection: nn.Module) -> str:
    """The name under which TorchRec's collections of a kind hold their tables."""
    return "embedding_bags" if is_pooled(collection) else "embeddings"


def holders_of_tables(collection: nn.Module) -> nn.ModuleDict:
    """Table -> the module whose `weight` it is."""
    return cast(nn.ModuleDict, getattr(collection, tables_under(collection)))


def frozen_tables_of(collection: nn.Module) -> frozenset[str]:
    """Tables of a collection that no step may change."""
    collection = lookup_of(collection)
    if isinstance(collection, torchrec.Sharded):
        return torchrec.frozen_tables_of_sharded(collection)
    return torchrec.frozen_tables(holders_of_tables(collection))


def local_shards(collection: nn.Module) -> list[TableShard]:
    """Local shards of every table of a collection, plain or sharded. Local, no collective."""
    collection = lookup_of(collection)
    if isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
        holders = holders_of_tables(collection).items()
        return [TableShard(name, cast(Tensor, holder.weight).detach()) for name, holder in holders]
    if not isinstance(collection, torchrec.Sharded):
        requirement, kind = "an embedding collection, plain or sharded", type(collection).__name__
        raise TypeError(describe("local_shards", requirement, kind))
    shards = []
    for key, value in collection.state_dict().items():
        parts = key.split(".")
        if parts[0] not in ("embedding_bags", "embeddings") or parts[-1] != "weight":
            continue
        table = ".".join(parts[1:-1])
        if isinstance(value, torchrec.ShardedTensor):
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                shards.append(TableShard(table, shard.tensor.detach(), row, column))
        else:
            shards.append(TableShard(table, value.detach()))
    return shards


def shards_by_table(
    modules: Iterable[nn.Module], tables: Iterable[str]
) -> dict[str, list[TableShard]]:
    """Table -> its local shards in some collections. Local, no collective."""
    every = [shard for module in modules for shard in local_shards(module)]
    return {name: [shard for shard in every if shard.table == name] for name in tables}


def ranks_of(*modules: nn.Module) -> Ranks:
    """The ranks that hold the shards of some collections; this process alone without any."""
    for module in modules:
        inner = lookup_of(module)
        if isinstance(inner, torchrec.Sharded) and torchrec.sharding_env(inner).world_size > 1:
            return Ranks(torchrec.sharding_env(inner).process_group)
    return Ranks()


def whole_module_of(model: nn.Module, fqn: str) -> nn.Module:
    """A collection, or the module that processes features in front of it."""
    model = get_unwrapped_module(model)
    holder, _, name = fqn.rpartition(".")
    if name == torchrec_inputs.INNER and isinstance(
        model.get_submodule(holder), torchrec_inputs.FEATURE_PROCESSED
    ):
        return model.get_submodule(holder)
    return model.get_submodule(fqn)


def table_configs_of(collection: nn.Module) -> list[EmbeddingBagConfig]:
    """Tables of a collection, whole, as its user wrote them."""
    if isinstance(collection, ShardedEmbeddingBagCollection):
        return torchrec.bag_configs_of(collection)
    if isinstance(collection, ShardedEmbeddingCollection):
        return [as_bags(table) for table in torchrec.sequence_configs_of(collection)]
    if isinstance(collection, EmbeddingCollectionInterface):
        return [as_bags(table) for table in collection.embedding_configs()]
    return cast(EmbeddingBagCollectionInterface, collection).embedding_bag_configs()


def is_weighted(collection: nn.Module) -> bool:
    """Returns whether a collection takes per-sample weights; unpooled ones never do."""
    if not is_pooled(collection):
        return False
    if isinstance(collection, ShardedEmbeddingBagCollection):
        return torchrec.takes_weights(collection)
    return cast(EmbeddingBagCollectionInterface, collection).is_weighted()


def check_pooling(modules: Iterable[nn.Module]) -> None:
    """Checks that torch itself can look up the tables of some collections, once they are plain."""
    remedy = "use SUM, with weights that are divided by the length of their bag"
    for module in filter(is_weighted, modules):
        for table in table_configs_of(module):
            place, is_sum = f"table {table.name!r}", table.pooling != PoolingType.MEAN
            check(is_sum, place, "SUM pooling of bags with weights", "MEAN", remedy)


def needs_indices(collection: nn.Module) -> bool:
    """Returns whether an unpooled collection passes ids on as the weights of its outputs."""
    if is_pooled(collection):
        return False
    inner = lookup_of(collection)
    if isinstance(inner, ShardedEmbeddingCollection):
        return torchrec.returns_indices(inner)
    return cast(EmbeddingCollectionInterface, inner).need_indices()


def check_merged(fqn: str, collection: nn.Module, ranks: Ranks) -> None:
    """Checks that alpha has been folded into a collection. Local, no collective."""
    place, remedy = f"FQN {fqn!r}", "call merge_ first"
    is_plain = isinstance(collection, EmbeddingBagCollection | EmbeddingCollection)
    if ranks.world_size == 1 and not is_plain:
        requirement, kind = "a merged, unsharded collection", type(collection).__name__
        raise RuntimeError(describe(place, requirement, kind, remedy))
    if isinstance(collection, SoftSelectionModule):
        check_folded(fqn, collection)


def check_folded(fqn: str, wrapper: SoftSelectionModule) -> None:
    """Checks that no alpha is left to be folded into a table. Local."""
    alpha, remedy = wrapper.alpha, "call merge_ first"
    if not all(bool((alpha.of(dim) == 1).all()) for dim in alpha.dims):
        text = describe(f"FQN {fqn!r}", "a merged collection", "alpha below 1", remedy)
        raise RuntimeError(text)


def dense_state(model: nn.Module, served_fqns: Collection[str] = ()) -> dict[str, Tensor]:
    """A model's state_dict without tables, alpha and collections `served` packed. Local."""
    holders = [*collections(model), *served_fqns]
    state = plain_state_dict(get_unwrapped_module(model))
    is_dense = {name: not any(_is_inside(name, fqn) for fqn in holders) for name in state}
    return {name: value for name, value in state.items() if is_dense[name]}


def num_copies(
    shards: Mapping[str, Sequence[TableShard]], shapes: Mapping[str, tuple[int, int]], ranks: Ranks
) -> dict[str, int]:
    """On how many ranks each value of a table is: 1 if spread, W if replicated."""
    sizes = [sum(shard.weight.numel() for shard in of_table) for of_table in shards.values()]
    totals = torch.tensor(sizes)
    ranks.sum_(totals)
    copies = {}
    for name, values in zip(shards, totals.tolist(), strict=True):
        whole = shapes[name][0] * shapes[name][1]
        copies[name] = values // whole
        if values not in (whole, ranks.world_size * whole):
            limit = "supported are tables spread over the ranks, or whole on each of them"
            text = f"{values} values on {ranks.world_size} ranks instead of {whole}"
            raise NotImplementedError(describe(f"table {name!r}", limit, text))
    return copies


@torch.no_grad()
def multiply_by_alpha_(collection: SoftSelectionModule) -> None:
    """Merges alpha into the local shards: ``E~ = alpha[block] * E``. Local, no collective."""
    blocks = collection.blocks
    for shard in local_shards(collection):
        alpha = collection.alpha.of(blocks.embedding_dims[shard.table])
        first = blocks.first_alpha_row(shard.table)
        router = RowRouter(blocks.routings[shard.table]).to(shard.weight.device)
        for part, rows, columns in shard.chunks():
            ids = torch.arange(rows.start, rows.stop, device=part.device)
            part.mul_(alpha[first + router(ids), columns].to(part.dtype))


def table_weight_names(model: nn.Module) -> set[str]:
    """Names of the weights of all tables, as the model's state_dict has them."""
    holders = {id(lookup_of(collection)): collection for collection in collections(model).values()}
    names = set()
    for fqn, module in get_unwrapped_module(model).named_modules(remove_duplicate=False):
        if id(module) in holders:
            under = f"{fqn}.{tables_under(module)}".removeprefix(".")
            tables = table_configs_of(holders[id(module)])
            names |= {f"{under}.{table.name}.weight" for table in tables}
    return names


def _is_inside(fqn: str, outer: str) -> bool:
    return fqn.startswith(f"{outer}.") or not outer


def table_configs(model: nn.Module) -> list[EmbeddingBagConfig]:
    """Configs of all tables of an unsharded model."""
    remedy = "count bags of `remap`, call prepare_, compress or prune, which take such a model"
    torchrec_inputs.refuse_managed_collisions(model, "jobs that count a recipe's ids", remedy)
    configs: list[EmbeddingBagConfig] = []
    for fqn, module in collections(model).items():
        if not isinstance(module, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
            kind = type(module).__name__
            raise TypeError(describe(f"FQN {fqn!r}", "an unsharded collection", kind))
        configs += table_configs_of(module)
    check_distinct([config.name for config in configs], "over all collections")
    return configs


def check_distinct(tables: Sequence[str], where: str) -> None:
    """Checks that no two tables have one name."""
    names = sorted(name for name, times in Counter(tables).items() if times > 1)
    remedy = "call dnis_torchrec.selection.shards.name_tables_apart_(model) first"
    check(not names, "table names", f"distinct names {where}", names, remedy)


def dense_parameters(model: nn.Module) -> int:
    """Parameters of all tables of an unsharded model: the sum of N D."""
    return sum(table.num_embeddings * table.embedding_dim for table in table_configs(model))


def name_tables_apart_(model: nn.Module) -> dict[str, list[str]]:
    """Renames tables of one name in several collections, and returns the names of each. Local."""
    # Keys of outputs, weights and all other names stay.
    modules = collections(model)
    owners: dict[str, list[str]] = {}
    for fqn, module in modules.items():
        for config in table_configs_of(module):
            owners.setdefault(table_name(config.name, fqn), []).append(fqn)
    names = {name: [name] for name in owners}
    for name, fqns in owners.items():
        if len(fqns) == 1:
            continue
        names[name] = [table_key(name, fqn) for fqn in fqns]
        for fqn, key in zip(fqns, names[name], strict=True):
            _rename_(fqn, modules[fqn], name, key)
    return names


def name_tables_back_(model: nn.Module) -> nn.Module:
    """Gives tables the names that `name_tables_apart_` took; returns the model."""
    for fqn, module in collections(model).items():
        names = {c.name: table_name(c.name, fqn) for c in table_configs_of(module)}
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            torchrec.rename_tables_(module, names)
    return model


def _rename_(fqn: str, module: nn.Module, name: str, key: str) -> None:
    configs = {config.name: config for config in table_configs_of(module)}
    if key in configs:
        return
    place, remedy = f"FQN {fqn!r}, table {name!r}", "give it another name"
    if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        limit = "supported are tables of one name in plain collections"
        raise NotImplementedError(describe(place, limit, type(module).__name__, remedy))
    # where several tables read a feature, a table's name is part of an output's key
    readers = Counter(feature for config in configs.values() for feature in config.feature_names)
    several = [feature for feature in configs[name].feature_names if readers[feature] > 1]
    if several:
        limit = "supported beside another of its name are tables that read features of their own"
        raise NotImplementedError(describe(place, limit, several, remedy))
    torchrec.rename_tables_(module, {name: key})


@contextmanager
def tables_named_apart(model: nn.Module) -> Iterator[dict[str, list[str]]]:
    """`name_tables_apart_` within a block; afterwards tables that are still there have their names
    again."""
    modules = collections(model)
    old = {fqn: [config.name for config in table_configs_of(m)] for fqn, m in modules.items()}
    try:
        yield name_tables_apart_(model)
    finally:
        for fqn, module in collections(model).items():
            if module is modules.get(fqn) and isinstance(
                module, EmbeddingBagCollection | EmbeddingCollection
            ):
                new = [config.name for config in table_configs_of(module)]
                torchrec.rename_tables_(module, dict(zip(new, old[fqn], strict=True)))
