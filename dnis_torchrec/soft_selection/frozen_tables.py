"""Frozen tables: `requires_grad=False` means no step, in every sharding type and kernel.

TorchRec's kernels do not ask: a fused optimizer steps every table of its kernel in the backward pass, a dense kernel
gives all its tables gradients. So a frozen table gets a kernel of its own, by an optimizer of its own that TorchRec
groups by (`freeze_before_sharding_`): SGD at rate 0 in a fused kernel. What a dense kernel gives it is hidden from
optimizers (`FrozenSlice`), so that weight decay passes it by, too.
"""

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
"""Learning rate of a fused kernel whose tables are frozen, whatever rate it is given (`_keep_rate`)."""


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
    """Tables of an unsharded collection that no step may change.

    Args:
        tables: table -> the module whose `weight` it is, as an EmbeddingBagCollection has it in `embedding_bags`.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> frozen_tables(EmbeddingBagCollection(tables=[table]).requires_grad_(False).embedding_bags)
        frozenset({'t'})
    """
    return frozenset(name for name, holder in tables.items() if not cast(Tensor, holder.weight).requires_grad)


def freeze_before_sharding_(weight: nn.Parameter) -> None:
    """Lets TorchRec give a frozen table a kernel of its own, in which it is not stepped.

    Args:
        weight: of an unsharded table; what is noted on it for sharding changes, its values do not.
    """
    noted = cast(Any, weight)
    noted._optimizer_classes, noted._optimizer_kwargs = [torch.optim.SGD], [{"lr": FROZEN_RATE}]


def hold_frozen_(collection: Any, holders: nn.ModuleDict, tables: Collection[str]) -> None:
    """Keeps the frozen tables of a sharded collection as they are. Local, no collective; on all ranks alike.

    Args:
        collection: sharded after `freeze_before_sharding_`.
        holders: table -> the module whose `weight` is what this rank holds of it.
        tables: its frozen tables.
    """
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
    """Notes which tables were frozen when an EmbeddingCollection was sharded: TorchRec does not keep it. Local.

    Args:
        collection: sharded.
        tables: frozen ones.
    """
    vars(collection)["frozen_when_sharded"] = frozenset(tables)


def check_frozen_are_held(fqn: str, collection: nn.Module) -> None:
    """Checks that the frozen tables of a collection were sharded as such. Local, no collective.

    Args:
        fqn: of the collection, for the error.
        collection: sharded or not.

    Raises:
        NotImplementedError: naming them, if TorchRec's kernels would step them.
    """
    if isinstance(collection, ShardedEmbeddingBagCollection):
        infos = itertools.chain.from_iterable(collection.sharding_type_to_sharding_infos.values())
        frozen = {info.embedding_config.name for info in infos if not info.param.requires_grad}  # when it was sharded
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
    kernels = [kernel for lookup in collection._lookups for kernel in getattr(lookup, "_emb_modules", ())]
    return [kernel for kernel in kernels if isinstance(kernel, FusedOptimizerModule)]


def _keep_rate(lr: float) -> None:
    """Ignores a learning rate: schedules and warm-ups of a whole model set one, and frozen tables keep theirs."""


def _freeze_slice_(weight: Any) -> FrozenSlice:
    weight.__class__ = FrozenSlice
    return cast(FrozenSlice, weight)
