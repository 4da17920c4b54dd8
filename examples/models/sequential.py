"""Models of what a user looked at before: DIN and SASRec, on an EmbeddingCollection that candidate and history share.

Shapes: B batch, L longest history, D embedding_dim.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
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
        history, candidate = found["history"], found["candidate"].to_padded_dense(1).squeeze(1)
        items, repeated = history.values(), candidate.repeat_interleave(history.lengths(), dim=0)
        pairs = torch.cat([items, repeated, items - repeated, items * repeated], dim=1)
        weighted = self.weigh(pairs) * items
        padded = torch.ops.fbgemm.jagged_to_padded_dense(weighted, [history.offsets()], [self._longest])
        interest = padded.sum(1)
        return self.over(torch.cat([interest, candidate, interest * candidate], dim=1)).squeeze(1)


class SelfAttentionBlock(nn.Module):
    """A causal transformer layer of one head, normed in front, on sequences of any length.

    Args:
        dim: D.
        longest: L.
        dropout: of what is added to the states.
    """

    def __init__(self, dim: int, longest: int, dropout: float) -> None:
        super().__init__()
        self._longest = longest
        self.norm, self.read, self.attend = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        layers = [nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim)]
        self.feed_forward, self.dropout = nn.Sequential(*layers), nn.Dropout(dropout)

    def forward(self, states: Tensor, offsets: Tensor) -> Tensor:
        """States of the next layer.

        Args:
            states: ``(n, D)`` of all items of all histories; only attention needs them padded.
            offsets: ``(B + 1,)`` where each history begins.
        """
        read = torch.ops.fbgemm.jagged_to_padded_dense(self.read(self.norm(states)), [offsets], [self._longest])
        query, key, value = read.unsqueeze(1).chunk(3, dim=3)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        attended, _ = torch.ops.fbgemm.dense_to_jagged(attended, [offsets])
        states = states + self.dropout(self.attend(attended))
        return states + self.dropout(self.feed_forward(states))


class SelfAttentiveRecommender(nn.Module):
    """SASRec (Kang, McAuley, ICDM 2018): a causal transformer reads the history, its states meet the candidates.

    A sample has K candidates, which meet the states of the last K items of its history: all of them in training, the
    last one where a candidate is ranked.

    Args:
        items: from `build_sequence_table`.
        longest: L.
        num_layers: of the transformer.
        dropout: in it.

    Shape:
        - Output: logits, ``(B, K)``, 0 behind the candidates of a sample that has fewer than others.
    """

    def __init__(self, items: EmbeddingCollection, *, longest: int, num_layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        dim = items.embedding_dim()
        self.items, self._longest = items, longest
        self.positions = nn.Parameter(0.02 * torch.randn(longest, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(SelfAttentionBlock(dim, longest, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predicts; the dense features are not used."""
        found = self.items(sparse_features)
        history, candidate = found["history"], found["candidate"]
        offsets = history.offsets()
        padded = self.dropout(history.to_padded_dense(self._longest) + self.positions)
        states, _ = torch.ops.fbgemm.dense_to_jagged(padded, [offsets])
        for block in self.blocks:
            states = block(states, offsets)
        padded = torch.ops.fbgemm.jagged_to_padded_dense(self.norm(states), [offsets], [self._longest])
        candidates = candidate.to_padded_dense()
        first = (history.lengths() - candidate.lengths()).view(-1, 1, 1)
        places = first + torch.ones_like(candidates, dtype=torch.int64).cumsum(1) - 1
        return (padded.gather(1, places.clamp(0, self._longest - 1)) * candidates).sum(2)
