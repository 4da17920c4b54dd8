"""First-order weights: one learnt number per row, kept apart from the embedding tables so that these stay of equal D.

In modules of their own, so that TorchRec's train pipelines trace around their reading of the KeyedJaggedTensor.

Shapes: B batch, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.ops.batches import select_features


class SingleIdBiases(nn.Module):
    """One learnt number per row for each single-id feature, summed over the features; starts at 0.

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
        """Sums the biases of every sample's ids.

        Args:
            features: at least these features, stride B, exactly one id per bag.

        Returns:
            ``(B,)``.

        Raises:
            ValueError: if a feature is missing.
            NotImplementedError: if the features of the batch differ in stride.
        """
        ids = select_features(features, self._features).values().view(len(self._features), -1)
        # Not by calling nn.Embedding, whose backward handles every row of one number as a vector.
        numbers = [self.biases[name].weight.squeeze(1) for name in self._features]
        return torch.stack([own.index_select(0, row) for own, row in zip(numbers, ids, strict=True)]).sum(dim=0)


class FirstOrderWeights(nn.Module):
    r"""The linear part of a factorisation machine over bags of any length: :math:`w_0 + \sum_i w_i x_i`.

    Args:
        tables: configs of the embedding tables; features that share a table share its rows' weights.
        is_weighted: whether :math:`x_i` is the id's per-sample weight; else it is 1.
        initial_bias: :math:`w_0` to start from; every :math:`w_i` starts at 0.

    Shape:
        - Input: a KJT, stride B.
        - Output: ``(B,)``.

    Example:
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=["f"])
        >>> first_order = FirstOrderWeights([table], initial_bias=-1.0)
        >>> _ = first_order.weights.data.copy_(torch.tensor([1.0, 10.0, 100.0]))
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([2, 0, 0]), lengths=torch.tensor([2, 0, 1]))
        >>> first_order(kjt).tolist()
        [100.0, -1.0, 0.0]
    """

    first_rows: Tensor

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], *, is_weighted: bool = False, initial_bias: float = 0.0
    ) -> None:
        super().__init__()
        self._features: list[str] = []
        self._is_weighted = is_weighted
        first_rows, num_rows = [], 0
        for table in tables:
            self._features += table.feature_names
            first_rows += [num_rows] * len(table.feature_names)
            num_rows += table.num_embeddings
        self.register_buffer("first_rows", torch.tensor(first_rows), persistent=False)
        self.weights = nn.Parameter(torch.zeros(num_rows))
        self.bias = nn.Parameter(torch.tensor([float(initial_bias)]))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Sums the weights of every sample's ids.

        Args:
            features: at least the tables' features, stride B, bags of any length; with weights if `is_weighted`.

        Returns:
            ``(B,)``, the bias in each.

        Raises:
            ValueError: if a feature is missing.
            NotImplementedError: if the features of the batch differ in stride.
        """
        bags = select_features(features, self._features)
        ids, lengths, batch_size = bags.values(), bags.lengths(), bags.stride()
        bag = torch.repeat_interleave(
            torch.arange(lengths.numel(), device=ids.device), lengths, output_size=ids.numel()
        )
        feature = torch.div(bag, batch_size, rounding_mode="floor")
        terms = self.weights[ids + self.first_rows[feature]]
        if self._is_weighted:
            terms = terms * bags.weights()
        return self.bias.expand(batch_size).index_add(0, bag - feature * batch_size, terms)


def log_odds(labels: Tensor) -> float:
    """The logit of a click that fits all labels best, to start a model's bias from.

    Args:
        labels: of the training data, 0 or 1; one of each is added, so that there always is an answer.

    Example:
        >>> round(log_odds(torch.tensor([1.0, 0.0, 0.0])), 4)
        -0.4055
    """
    positives = float(labels.sum()) + 1
    return math.log(positives / (labels.numel() + 2 - positives))
