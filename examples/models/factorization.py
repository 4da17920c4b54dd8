"""Models of any number of fields, for clicks: FM, Wide & Deep and DeepFM.

A field is one feature: a single id, a multi-hot bag, or a scalar as a bag of one id weighted by its value. First-order
weights are kept apart from the tables.

Shapes: B batch, F fields, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.allocation.axes import RotationGroup
from dnis_torchrec.checks import check
from examples.models.first_order import FirstOrderWeights
from examples.models.rotating import groups_of_tower, joined


class FactorizationMachine(nn.Module):
    r"""Factorisation machine: :math:`\hat y = w_0 + \sum_i w_i x_i + \sum_{i < j} \langle v_i, v_j \rangle x_i x_j`.

    Source: Rendle, Factorization Machines, 2010, equation 1; the pairs in O(F D) by its lemma 3.1.

    NOTE[DIFF]: pairs within one multi-hot bag are left out, because a pooled bag no longer tells its ids apart.

    Args:
        embedding_bag_collection: tables of equal D, SUM pooling; weighted or not.
        initial_bias: :math:`w_0` to start from, such as the log odds of the training labels.

    Shape:
        - dense_features: ``(B, any)``, not read.
        - sparse_features: stride B.
        - Output: ``(B,)`` logits.

    Raises:
        ValueError: if the tables are not of equal D.

    Example:
        >>> from examples.models import build_tables
        >>> model = FactorizationMachine(build_tables({"user": 3, "movie": 2}, 4), initial_bias=0.5)
        >>> kjt = KeyedJaggedTensor(keys=["user", "movie"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), kjt).shape
        torch.Size([1])
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, *, initial_bias: float = 0.0) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self._tables = tuple(embedding_bag_collection.embedding_bag_configs())
        self.fields = _Fields(self._tables)
        self.first_order = _first_order(embedding_bag_collection, initial_bias)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts the logit of a click per sample.

        Args:
            dense_features: ``(B, any)``, not read.
            sparse_features: at least the tables' features, stride B; with weights if the collection is weighted.

        Returns:
            ``(B,)``.
        """
        fields = self.fields(self.embedding_bag_collection(sparse_features))
        return self.first_order(sparse_features) + sum_of_pairs(fields)

    def rotation_groups(self) -> list[RotationGroup]:
        """All tables turn together: nothing but their dot products is looked at."""
        return [RotationGroup(tables=tuple(table.name for table in self._tables))]


class WideDeep(nn.Module):
    r"""Wide & Deep: :math:`\hat y = w_0 + \sum_i w_i x_i + h^\top \phi_L(\dots \phi_1([e_1; \dots; e_F]))`.

    Source: Cheng et al., Wide & Deep Learning for Recommender Systems, 2016, equation 3.

    NOTE[DIFF]: the wide part has no cross products, which its authors chose by hand for their data, and learns with the
    optimizer of the deep part instead of FTRL.

    Args:
        embedding_bag_collection: tables of equal D; weighted or not.
        tower: sizes of the hidden layers.
        initial_bias: see `FactorizationMachine`.

    Shape:
        - dense_features: ``(B, any)``, not read.
        - sparse_features: stride B.
        - Output: ``(B,)`` logits.

    Raises:
        ValueError: if the tables are not of equal D.

    Example:
        >>> from examples.models import build_tables
        >>> model = WideDeep(build_tables({"user": 3, "movie": 2}, 4), tower=(8,))
        >>> kjt = KeyedJaggedTensor(keys=["user", "movie"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), kjt).shape
        torch.Size([1])
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, *, tower: Sequence[int], initial_bias: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self._tables = tuple(embedding_bag_collection.embedding_bag_configs())
        self.fields = _Fields(self._tables)
        self.first_order = _first_order(embedding_bag_collection, initial_bias)
        self.deep = _deep(self.fields.width, tower)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts the logit of a click per sample.

        Args:
            dense_features: ``(B, any)``, not read.
            sparse_features: at least the tables' features, stride B; with weights if the collection is weighted.

        Returns:
            ``(B,)``.
        """
        fields = self.fields(self.embedding_bag_collection(sparse_features))
        return self.first_order(sparse_features) + self.deep(fields.flatten(1)).squeeze(1)

    def rotation_groups(self) -> list[RotationGroup]:
        """Each table turns alone, and the tower's first layer with it."""
        return groups_of_tower(self._tables, self.deep)


class DeepFM(nn.Module):
    r"""DeepFM: the logit of a factorisation machine plus that of a tower on the same embeddings.

    Source: Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, 2017, equation 1.
    torchrec's SimpleDeepFMNN differs: no first-order weights, and its second-order term goes through a last layer
    together with the tower.

    NOTE[DIFF]: no dropout.

    Args:
        embedding_bag_collection: tables of equal D, SUM pooling; weighted or not.
        tower: sizes of the hidden layers.
        initial_bias: see `FactorizationMachine`.

    Shape:
        - dense_features: ``(B, any)``, not read.
        - sparse_features: stride B.
        - Output: ``(B,)`` logits.

    Raises:
        ValueError: if the tables are not of equal D.

    Example:
        >>> from examples.models import build_tables
        >>> model = DeepFM(build_tables({"user": 3, "movie": 2}, 4), tower=(8,))
        >>> kjt = KeyedJaggedTensor(keys=["user", "movie"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), kjt).shape
        torch.Size([1])
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, *, tower: Sequence[int], initial_bias: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self._tables = tuple(embedding_bag_collection.embedding_bag_configs())
        self.fields = _Fields(self._tables)
        self.first_order = _first_order(embedding_bag_collection, initial_bias)
        self.deep = _deep(self.fields.width, tower)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts the logit of a click per sample.

        Args:
            dense_features: ``(B, any)``, not read.
            sparse_features: at least the tables' features, stride B; with weights if the collection is weighted.

        Returns:
            ``(B,)``.
        """
        fields = self.fields(self.embedding_bag_collection(sparse_features))
        return self.first_order(sparse_features) + sum_of_pairs(fields) + self.deep(fields.flatten(1)).squeeze(1)

    def rotation_groups(self) -> list[RotationGroup]:
        """All tables turn together, because of their dot products, and the tower's first layer with them."""
        groups = groups_of_tower(self._tables, self.deep)
        return [joined(groups)]


def sum_of_pairs(fields: Tensor) -> Tensor:
    r"""Sum of the inner products of all pairs: :math:`\frac 1 2 \sum_d (\sum_f e_{fd})^2 - \sum_f e_{fd}^2`.

    Args:
        fields: ``(B, F, D)``.

    Returns:
        ``(B,)``.

    Example:
        >>> sum_of_pairs(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).tolist()
        [11.0]
    """
    return 0.5 * (fields.sum(dim=1).square().sum(dim=1) - fields.square().sum(dim=(1, 2)))


class _Fields(nn.Module):
    """Pooled embeddings as one tensor ``(B, F, D)``, in the order of the tables.

    A module, which TorchRec's tracer takes for a leaf: a sharded collection may return its keys in another order.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        super().__init__()
        self._features = [feature for table in tables for feature in table.feature_names]
        dims = {table.name: table.embedding_dim for table in tables}
        check(len(set(dims.values())) == 1, "tables", "one embedding_dim", dims)
        self._embedding_dim = tables[0].embedding_dim

    @property
    def width(self) -> int:
        """F * D."""
        return len(self._features) * self._embedding_dim

    def forward(self, pooled: KeyedTensor) -> Tensor:
        if pooled.keys() == self._features:
            values = pooled.values()
        else:
            by_key = pooled.to_dict()
            values = torch.cat([by_key[feature] for feature in self._features], dim=1)
        return values.view(-1, len(self._features), self._embedding_dim)


def _first_order(collection: EmbeddingBagCollection, initial_bias: float) -> FirstOrderWeights:
    tables, is_weighted = collection.embedding_bag_configs(), collection.is_weighted()
    return FirstOrderWeights(tables, is_weighted=is_weighted, initial_bias=initial_bias)


def _deep(in_features: int, tower: Sequence[int]) -> nn.Module:
    last = nn.Linear(tower[-1], 1, bias=False)  # the first-order weights bring the bias
    return nn.Sequential(MLP(in_features, list(tower)), last)
