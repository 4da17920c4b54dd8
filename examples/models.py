"""A latent factor model on a TorchRec EmbeddingBagCollection, and what the recipes share in building models.

Shapes: B batch, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check


def build_tables(
    num_embeddings: Mapping[str, int], embedding_dim: int, *, init_std: float = 0.01
) -> EmbeddingBagCollection:
    """One table per feature, all of the same D, with SUM pooling and normal initial weights.

    Args:
        num_embeddings: feature -> rows of its table, which takes the feature's name.
        embedding_dim: D.
        init_std: standard deviation of the initial weights.

    Raises:
        ValueError: if `embedding_dim` is below 1.

    Example:
        >>> build_tables({"user": 5, "movie": 3}, 4).embedding_bags["movie"].weight.shape
        torch.Size([3, 4])
    """
    check(embedding_dim >= 1, "embedding_dim", "expected an integer >= 1", embedding_dim)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=embedding_dim,
                num_embeddings=rows,
                feature_names=[name],
                init_fn=partial(nn.init.normal_, std=init_std),
            )
            for name, rows in num_embeddings.items()
        ]
    )


def build_dlrm(
    tables: EmbeddingBagCollection, *, dense_in_features: int, dense_layers: list[int], over_layers: list[int]
) -> DLRM:
    """torchrec's DLRM whose dense arch ends with D, whatever D the tables have.

    Args:
        tables: the embedding tables, all of one D.
        dense_in_features: number of dense features.
        dense_layers: hidden sizes of the dense arch; D is appended.
        over_layers: hidden sizes of the over arch; 1 is appended.
    """
    embedding_dim = tables.embedding_bag_configs()[0].embedding_dim
    return DLRM(
        embedding_bag_collection=tables,
        dense_in_features=dense_in_features,
        dense_arch_layer_sizes=[*dense_layers, embedding_dim],
        over_arch_layer_sizes=[*over_layers, 1],
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws random numbers from `seed` inside the block and leaves the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class SingleIdBiases(nn.Module):
    """One learnt number per row for each single-id feature, summed over the features; starts at 0.

    Kept apart from the embedding tables so that these stay of equal D, and in a module of its own so that TorchRec's
    train pipelines trace around its reading of the KeyedJaggedTensor.

    Args:
        num_embeddings: feature -> number of rows.

    Shape:
        - Input: a KJT, stride B, with exactly one id per bag of these features.
        - Output: ``(B,)``.
    """

    def __init__(self, num_embeddings: Mapping[str, int]) -> None:
        super().__init__()
        self._features = tuple(num_embeddings)
        self.biases = nn.ModuleDict(
            {name: nn.Embedding(rows, 1, _weight=torch.zeros(rows, 1)) for name, rows in num_embeddings.items()}
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Sums the biases of every sample's ids."""
        parts = [self.biases[name](features[name].values()).squeeze(-1) for name in self._features]
        return torch.stack(parts).sum(dim=0)


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
        check(len(rows) == 2, "MatrixFactorization", "expected a collection of two features", list(rows))
        self._features = tuple(rows)
        self.embedding_bag_collection = embedding_bag_collection
        self.biases = SingleIdBiases(rows)
        self.register_buffer("global_mean", torch.tensor(float(global_mean)))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts a rating per sample."""
        pooled = self.embedding_bag_collection(sparse_features)
        left, right = self._features
        interaction = (pooled[left] * pooled[right]).sum(dim=1)
        return interaction + self.biases(sparse_features) + self.global_mean
