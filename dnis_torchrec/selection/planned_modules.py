"""Under which FQNs TorchRec shards a model's collections, and by which sharders: in front of some
stand processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from dnis_torchrec.selection.feature_processed import (
    SoftSelectionFeatureProcessedEmbeddingBagCollection,
)
from dnis_torchrec.selection.table_shards import collections, lookup_of, whole_module_of
from dnis_torchrec.selection.torchrec import refuse_managed_collisions, stands_still
from dnis_torchrec.selection.wrapper import SoftSelectionModule


def planned_fqns(model: nn.Module) -> dict[str, str]:
    """FQN of every collection of an unsharded model -> that of the module which TorchRec shards."""
    if not stands_still(model):
        remedy = "call prepare_ first: then rows keep their ids; to train it as it is, take TorchRec's own sharder"
        refuse_managed_collisions(model, "sharding", remedy)
    planned = {}
    for fqn, module in collections(model).items():
        is_processed = isinstance(
            whole_module_of(model, fqn), FeatureProcessedEmbeddingBagCollection
        )
        if is_processed or isinstance(module, SoftSelectionFeatureProcessedEmbeddingBagCollection):
            own = fqn.rpartition(".")[0]
        else:
            own = fqn
        is_wrapped = isinstance(module, SoftSelectionModule)
        planned[fqn] = f"{own}.{module.child_name}".removeprefix(".") if is_wrapped else own
    return planned


def planned_collections(model: nn.Module) -> dict[str, nn.Module]:
    """Returns an unsharded model's collections, also inside wrappers, by the FQN under which
    TorchRec shards them."""
    planned = planned_fqns(model)
    return {planned[fqn]: lookup_of(module) for fqn, module in collections(model).items()}


def with_processors(
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> Sequence[ModuleSharder[nn.Module]]:
    """The sharders, and one for what processes features in front of a collection, made of the
    collection's sharder."""
    kinds = {sharder.module_type: sharder for sharder in sharders}
    inner = kinds.get(EmbeddingBagCollection)
    if inner is None or FeatureProcessedEmbeddingBagCollection in kinds:
        return sharders
    processed = FeatureProcessedEmbeddingBagCollectionSharder(
        inner, qcomm_codecs_registry=inner.qcomm_codecs_registry
    )
    return [*sharders, cast(ModuleSharder[nn.Module], processed)]
