"""Batches made of samples, and taken to pieces again, to be compared sample by sample after they were cut."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import RankingBatch
from dnis_torchrec.ranks import Ranks

Sample = tuple[float, float, tuple[tuple[int, ...], ...]]
"""Label, query and the bag of each of two features."""


class OneOf(Ranks):
    """A rank of several that has nobody to talk to."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        return values


samples = st.tuples(
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 3).map(float),
    st.tuples(*[st.lists(st.integers(0, 9), max_size=3).map(tuple)] * 2),
)


def to_batch(of: list[Sample], *, weighted: bool) -> RankingBatch:
    bags = [bag for feature in range(2) for _, _, pair in of for bag in (pair[feature],)]
    values = torch.tensor([row for bag in bags for row in bag], dtype=torch.int64)
    features = KeyedJaggedTensor(
        keys=["f", "g"],
        values=values,
        weights=values / 7 if weighted else None,
        lengths=torch.tensor([len(bag) for bag in bags]),
        stride=len(of),
    )
    labels, queries = torch.tensor([label for label, _, _ in of]), torch.tensor([int(query) for _, query, _ in of])
    return RankingBatch(labels.unsqueeze(1) + 2, features, labels, queries)


def to_samples(batch: RankingBatch) -> list[Sample]:
    assert torch.equal(batch.dense_features.squeeze(1), batch.labels + 2)
    features = batch.sparse_features
    if features.weights_or_none() is not None:
        torch.testing.assert_close(features.weights(), features.values() / 7)
    columns = [features[key].to_dense() for key in ("f", "g")]
    pairs = [tuple(tuple(bag.tolist()) for bag in bags) for bags in zip(*columns, strict=True)]
    return list(zip(batch.labels.tolist(), batch.queries.float().tolist(), pairs, strict=True))
