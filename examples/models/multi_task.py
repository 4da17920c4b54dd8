"""Models of several tasks on the same tables.

Shapes: B batch, F fields, D embedding_dim, E experts, H size of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.axes import RotationGroup
from examples.models.rotating import groups_of_tower


class MultiGateMixtureOfExperts(nn.Module):
    r"""MMoE: :math:`y_k = h_k(\sum_i g_{ki}(x) f_i(x))` with :math:`g_k(x) = \text{softmax}(W_k x)`, for every task k.

    Source: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, 2018,
    equations 5 to 7. x are the embeddings of all fields side by side, f_i experts of one hidden layer, h_k a tower.

    Args:
        embedding_bag_collection: the tables.
        initial_biases: task -> what its prediction starts from, such as the mean of its training labels.
        num_experts: E.
        expert_size: H.
        tower: sizes of the hidden layers of each task's tower.

    Shape:
        - dense_features: not read; may be None.
        - sparse_features: stride B.
        - Output: task -> ``(B,)``.

    Example:
        >>> from examples.models import build_tables
        >>> model = MultiGateMixtureOfExperts(build_tables({"user": 3, "movie": 2}, 4), {"click": 0.0, "rating": 3.5})
        >>> kjt = KeyedJaggedTensor(keys=["user", "movie"], values=torch.tensor([2, 1]), lengths=torch.tensor([1, 1]))
        >>> {name: tuple(values.shape) for name, values in model(None, kjt).items()}
        {'click': (1,), 'rating': (1,)}
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        initial_biases: Mapping[str, float],
        *,
        num_experts: int = 4,
        expert_size: int = 64,
        tower: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self._tables = tuple(embedding_bag_collection.embedding_bag_configs())
        width = sum(table.embedding_dim * len(table.feature_names) for table in self._tables)
        self.experts = nn.Sequential(
            nn.Linear(width, num_experts * expert_size), nn.ReLU(), nn.Unflatten(1, (num_experts, expert_size))
        )
        self.gates = nn.ModuleDict({name: nn.Linear(width, num_experts) for name in initial_biases})
        self.towers = nn.ModuleDict()
        for name, bias in initial_biases.items():
            last = nn.Linear(tower[-1], 1)
            nn.init.constant_(last.bias, bias)
            self.towers[name] = nn.Sequential(MLP(expert_size, list(tower)), last)

    def forward(self, dense_features: Tensor | None, sparse_features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Predicts every task of each sample.

        Args:
            dense_features: not read.
            sparse_features: at least the tables' features, stride B.

        Returns:
            Task -> ``(B,)``.
        """
        pooled = self.embedding_bag_collection(sparse_features).values()
        experts, outputs = self.experts(pooled), {}
        for name, gate in self.gates.items():
            shares = gate(pooled).softmax(1).unsqueeze(1)
            outputs[name] = self.towers[name](torch.bmm(shares, experts).squeeze(1)).squeeze(1)
        return outputs

    def rotation_groups(self) -> list[RotationGroup]:
        """Each table turns alone, and with it the layers of experts and gates that read it."""
        of_layers = [groups_of_tower(self._tables, layer) for layer in (self.experts, *self.gates.values())]
        return [
            RotationGroup(
                tables=(table.name,),
                readers={table.name: tuple(reader for group in groups for reader in group.readers[table.name])},
            )
            for table, groups in zip(self._tables, zip(*of_layers, strict=True), strict=True)
        ]
