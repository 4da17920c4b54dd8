"""Models of two sides, user and item: MF, MLP and NeuMF, for ratings and for top-k.

Shapes: B batch, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.axes import RotationGroup, WeightedProduct
from dnis_torchrec.checks import check
from examples.models.first_order import SingleIdBiases
from examples.models.rotating import groups_of_tower


class MatrixFactorization(nn.Module):
    r"""Matrix factorisation with biases: :math:`\hat r_{ui} = \mu + b_u + b_i + p_u^\top q_i`.

    Source: Koren, Bell, Volinsky, Matrix Factorization Techniques for Recommender Systems, 2009, equation 4. Called
    like torchrec's DLRM; the collection may be replaced by anything with the interface of an EmbeddingBagCollection.

    Args:
        embedding_bag_collection: the tables of two single-id features, of equal D.
        global_mean: :math:`\mu`, the mean label of the training data.

    Shape:
        - dense_features: ``(B, any)``, not read.
        - sparse_features: stride B.
        - Output: ``(B,)``.

    Raises:
        ValueError: if the collection does not read exactly two features.

    Example:
        >>> from examples.models import build_tables
        >>> model = MatrixFactorization(build_tables({"user": 3, "movie": 2}, 4), global_mean=3.5)
        >>> kjt = KeyedJaggedTensor(keys=["user", "movie"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), kjt).shape
        torch.Size([1])
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, global_mean: float) -> None:
        super().__init__()
        rows = {
            feature: config.num_embeddings
            for config in embedding_bag_collection.embedding_bag_configs()
            for feature in config.feature_names
        }
        check(len(rows) == 2, "MatrixFactorization", "a collection of two features", list(rows))
        self._features = tuple(rows)
        self._tables = tuple(table.name for table in embedding_bag_collection.embedding_bag_configs())
        self.embedding_bag_collection = embedding_bag_collection
        self.biases = SingleIdBiases(rows)
        self.register_buffer("global_mean", torch.tensor(float(global_mean)))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts a rating per sample.

        Args:
            dense_features: ``(B, any)``, not read.
            sparse_features: stride B, exactly one id per bag of the two features.

        Returns:
            ``(B,)``.
        """
        pooled = self.embedding_bag_collection(sparse_features).to_dict()
        left, right = self._features
        interaction = (pooled[left] * pooled[right]).sum(dim=1)
        return interaction + self.biases(sparse_features) + self.global_mean

    def rotation_groups(self) -> list[RotationGroup]:
        """Both tables turn together: nothing but their dot product is looked at."""
        return [RotationGroup(tables=self._tables)]


class MultiLayerPerceptron(nn.Module):
    r"""The MLP of NCF, ReLU layers :math:`\phi`: :math:`\hat y_{ui} = h^\top \phi_L(\dots \phi_1([p_u; q_i])) + b`.

    Source: He et al., Neural Collaborative Filtering, 2017, equation 10.

    Args:
        embedding_bag_collection: the tables of two features.
        tower: sizes of the hidden layers; `ncf_tower` gives the paper's.
        initial_bias: b to start from, such as the mean label of the training data.

    Shape:
        - dense_features: ``(B, any)``, not read.
        - sparse_features: stride B.
        - Output: ``(B,)``.

    Raises:
        ValueError: if the collection does not have exactly two outputs.

    Example:
        >>> from examples.models import build_tables
        >>> model = MultiLayerPerceptron(build_tables({"user": 3, "movie": 2}, 4), tower=(4, 2))
        >>> kjt = KeyedJaggedTensor(keys=["user", "movie"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), kjt).shape
        torch.Size([1])
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, *, tower: Sequence[int], initial_bias: float = 0.0
    ) -> None:
        super().__init__()
        outputs = _output_dims(embedding_bag_collection)
        check(len(outputs) == 2, "MultiLayerPerceptron", "a collection of two features", list(outputs))
        self._left, self._right = outputs
        self._tables = tuple(embedding_bag_collection.embedding_bag_configs())
        self.embedding_bag_collection = embedding_bag_collection
        self.tower = MLP(sum(outputs.values()), list(tower))
        self.over = _last_layer(tower[-1], initial_bias)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts a rating, or the logit of an interaction, per sample.

        Args:
            dense_features: ``(B, any)``, not read.
            sparse_features: at least the two features, stride B.

        Returns:
            ``(B,)``.
        """
        pooled = self.embedding_bag_collection(sparse_features).to_dict()
        hidden = self.tower(torch.cat([pooled[self._left], pooled[self._right]], dim=1))
        return self.over(hidden).squeeze(1)

    def rotation_groups(self) -> list[RotationGroup]:
        """Each table turns alone, and the tower's first layer with it."""
        return groups_of_tower(self._tables, self.tower)


class NeuMF(nn.Module):
    r"""Neural matrix factorisation: a generalised MF (G) and an MLP (M) with tables of their own, joined at the end.

    .. math:: \hat y_{ui} = h^\top [p^G_u \odot q^G_i; \; \phi_L(\dots \phi_1([p^M_u; q^M_i]))] + b

    Source: He et al., Neural Collaborative Filtering, 2017, equation 12, without the pre-training of its parts.

    Args:
        embedding_bag_collection: four tables of two features, as `build_neumf_tables` makes them: the GMF pair of equal
            D first, then the MLP pair.
        tower: sizes of the MLP's hidden layers; `ncf_tower` gives the paper's.
        initial_bias: b to start from, such as the mean label of the training data.
        turns_gmf: whether a search turns the GMF's tables, too: worth much for ratings, and nothing for top-k.

    Shape:
        - dense_features: ``(B, any)``, not read.
        - sparse_features: stride B.
        - Output: ``(B,)``.

    Raises:
        ValueError: if the collection is not of that kind.

    Example:
        >>> from examples.models import build_neumf_tables
        >>> model = NeuMF(build_neumf_tables({"user": 3, "item": 2}, 4), tower=ncf_tower(4))
        >>> kjt = KeyedJaggedTensor(keys=["user", "item"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), kjt).shape
        torch.Size([1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        *,
        tower: Sequence[int],
        initial_bias: float = 0.0,
        turns_gmf: bool = True,
    ) -> None:
        super().__init__()
        outputs = _output_dims(embedding_bag_collection)
        dims = list(outputs.values())
        is_neumf = len(dims) == 4 and dims[0] == dims[1]
        check(is_neumf, "NeuMF", "a GMF pair of tables of equal D, then an MLP pair", outputs)
        self._gmf_left, self._gmf_right, self._mlp_left, self._mlp_right = outputs
        self._tables = tuple(embedding_bag_collection.embedding_bag_configs())
        self.embedding_bag_collection = embedding_bag_collection
        self.tower = MLP(dims[2] + dims[3], list(tower))
        self.over = _last_layer(dims[0] + tower[-1], initial_bias)
        self._turns_gmf = turns_gmf

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts a rating, or the logit of an interaction, per sample.

        Args:
            dense_features: ``(B, any)``, not read.
            sparse_features: at least the two features, stride B.

        Returns:
            ``(B,)``.
        """
        pooled = self.embedding_bag_collection(sparse_features).to_dict()
        product = pooled[self._gmf_left] * pooled[self._gmf_right]
        hidden = self.tower(torch.cat([pooled[self._mlp_left], pooled[self._mlp_right]], dim=1))
        return self.over(torch.cat([product, hidden], dim=1)).squeeze(1)

    def rotation_groups(self) -> list[RotationGroup]:
        """The GMF's tables turn together, their product's weights drawn in; the MLP's as in `MultiLayerPerceptron`."""
        pair = tuple(table.name for table in self._tables[:2])
        gmf = RotationGroup(tables=pair, product=WeightedProduct(weight=self.over.weight))
        return [*([gmf] if self._turns_gmf else []), *groups_of_tower(self._tables[2:], self.tower)]


def ncf_tower(num_factors: int) -> tuple[int, int, int]:
    """Hidden layers of NCF for so many factors: 4, 2 and 1 times as many; its tables for the MLP have 4 times as many.

    Args:
        num_factors: factors as NCF counts them, the width of its last layer.

    Example:
        >>> ncf_tower(16)
        (64, 32, 16)
    """
    return 4 * num_factors, 2 * num_factors, num_factors


def _output_dims(collection: EmbeddingBagCollection) -> dict[str, int]:
    """Output key -> D, in order; a feature that two tables read has one key per table."""
    tables = collection.embedding_bag_configs()
    names = get_embedding_names_by_table(tables)
    return {name: table.embedding_dim for table, own in zip(tables, names, strict=True) for name in own}


def _last_layer(in_features: int, initial_bias: float) -> nn.Linear:
    layer = nn.Linear(in_features, 1)
    nn.init.constant_(layer.bias, initial_bias)
    return layer
