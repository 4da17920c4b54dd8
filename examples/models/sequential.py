"""Models of what a user looked at before: DIN and SASRec, on an EmbeddingCollection that candidate and history share.

Shapes: B batch, L longest history, D embedding_dim.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check


def build_sequence_table(num_items: int, embedding_dim: int, *, init_std: float = 0.02) -> EmbeddingCollection:
    """One unpooled table of items, which the features ``"candidate"`` and ``"history"`` read.

    Args:
        num_items: its rows.
        embedding_dim: D.
        init_std: standard deviation of the initial weights.

    Raises:
        ValueError: if `embedding_dim` is below 1.
    """
    check(embedding_dim >= 1, "embedding_dim", "an integer >= 1", embedding_dim)
    table = EmbeddingConfig(
        name="item",
        num_embeddings=num_items,
        embedding_dim=embedding_dim,
        feature_names=["candidate", "history"],
        init_fn=partial(nn.init.normal_, std=init_std),
    )
    return EmbeddingCollection(tables=[table])


class DeepInterestNetwork(nn.Module):
    """DIN (Zhou et al., KDD 2018): every item of the history counts as much as the candidate makes of it.

    The weights are not normalised, as in the paper. Its mini-batch aware regularisation and Dice are left out.

    Args:
        items: from `build_sequence_table`.
        longest: L.
        attention: width of the layer that weighs.
        tower: widths of the layers above.

    Shape:
        - Output: logits, ``(B,)``.
    """

    def __init__(
        self, items: EmbeddingCollection, *, longest: int, attention: int = 36, tower: tuple[int, int] = (80, 40)
    ) -> None:
        super().__init__()
        dim = items.embedding_dim()
        self.items, self._longest = items, longest
        self.weigh = nn.Sequential(nn.Linear(4 * dim, attention), nn.Sigmoid(), nn.Linear(attention, 1))
        first, second = tower
        layers = [nn.Linear(3 * dim, first), nn.PReLU(), nn.Linear(first, second), nn.PReLU(), nn.Linear(second, 1)]
        self.over = nn.Sequential(*layers)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts; the dense features are not used."""
        found = self.items(sparse_features)
        history = found["history"].to_padded_dense(self._longest)
        candidate = found["candidate"].to_padded_dense(1)
        repeated = candidate.expand(-1, self._longest, -1)
        pairs = torch.cat([history, repeated, history - repeated, history * repeated], dim=2)
        interest = (self.weigh(pairs) * history).sum(1)  # the padding of a history is zeros, and adds nothing
        candidate = candidate.squeeze(1)
        return self.over(torch.cat([interest, candidate, interest * candidate], dim=1)).squeeze(1)


class SelfAttentiveRecommender(nn.Module):
    """SASRec (Kang, McAuley, ICDM 2018): a causal transformer reads the history, its last state meets the candidate.

    Each sample is a prefix of a user's sequence with one candidate, so that it can be ranked and searched as any other.

    Args:
        items: from `build_sequence_table`.
        longest: L.
        num_layers: of the transformer.
        dropout: in it.

    Shape:
        - Output: logits, ``(B,)``.
    """

    causal: Tensor
    places: Tensor

    def __init__(self, items: EmbeddingCollection, *, longest: int, num_layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        dim = items.embedding_dim()
        self.items, self._longest = items, longest
        self.positions = nn.Parameter(0.02 * torch.randn(longest, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 1, dim, dropout, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(longest), persistent=False)
        self.register_buffer("places", torch.arange(longest), persistent=False)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts; the dense features are not used."""
        found = self.items(sparse_features)
        history = found["history"]
        states = history.to_padded_dense(self._longest) + self.positions
        for layer in self.layers:
            states = layer(states, src_mask=self.causal)
        is_last = self.places == (history.lengths() - 1).unsqueeze(1)  # what stands behind it, it has not seen
        last = (self.norm(states) * is_last.unsqueeze(2)).sum(1)
        return (last * found["candidate"].to_padded_dense(1).squeeze(1)).sum(1)
