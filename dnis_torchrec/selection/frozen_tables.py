"""Frozen tables: `requires_grad=False` means no step, in every sharding type and kernel."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.fused import FusedOptimizerModule

from dnis_torchrec.checks import describe

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
