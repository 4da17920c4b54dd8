"""Sharded collections that read the features of every batch by name, whatever the batch's order and
other keys."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
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
