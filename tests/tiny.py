"""A small recipe that trains in a second, for tests of everything above the modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import RankingBatch
from dnis_torchrec.data.recipe import DataSplits, Recipe

EMBEDDING_DIM = 8
ROWS = {"user": 40, "genre": 12}


def ranked(batch: Batch, num_candidates: int) -> RankingBatch:
    """The samples of a batch as candidates of queries, so many each."""
    queries = torch.arange(batch.labels.numel()) // num_candidates
    return RankingBatch(batch.dense_features, batch.sparse_features, batch.labels, queries=queries)


@dataclass
class Repeatable:
    """A list of batches, fresh at every iteration."""

    batches: list[Batch]

    def __iter__(self):
        return iter(self.batches)


class BagsOnly:
    """A split of which no method may read more than how long its bags are: there is nothing else."""

    def __init__(self, longest: int = 1) -> None:
        self._longest = longest

    def __iter__(self) -> Iterator[SimpleNamespace]:
        lengths = torch.tensor([1, self._longest])
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        yield SimpleNamespace(sparse_features=KeyedJaggedTensor(keys=["user", "genre"], values=ids, lengths=lengths))


def make_batch(size: int, seed: int, *, empty_bags: bool = True) -> Batch:
    """One single-id feature, one multi-hot feature with empty bags, labels that depend on both."""
    generator = torch.Generator().manual_seed(seed)
    user = (ROWS["user"] ** torch.rand(size, generator=generator)).long().sub(1).clamp(0, ROWS["user"] - 1)
    lengths = torch.randint(0 if empty_bags else 1, 4, (size,), generator=generator)
    genre = torch.randint(0, ROWS["genre"], (int(lengths.sum()),), generator=generator)
    features = KeyedJaggedTensor(
        keys=["user", "genre"],
        values=torch.cat([user, genre]),
        lengths=torch.cat([torch.ones(size, dtype=torch.int64), lengths]),
    )
    dense = torch.rand(size, 4, generator=generator)
    signal = ((user % 3) - 1.0) + dense[:, 0] - 0.5
    labels = (torch.sigmoid(3 * signal) > torch.rand(size, generator=generator)).float()
    return Batch(dense_features=dense, sparse_features=features, labels=labels)


def make_collection(embedding_dim: int = EMBEDDING_DIM, *, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Two tables, SUM and MEAN."""
    tables = [
        EmbeddingBagConfig(
            name="user", num_embeddings=ROWS["user"], embedding_dim=embedding_dim, feature_names=["user"]
        ),
        EmbeddingBagConfig(
            name="genre",
            num_embeddings=ROWS["genre"],
            embedding_dim=embedding_dim,
            feature_names=["genre"],
            pooling=PoolingType.MEAN,
        ),
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def make_model(kind: str, embedding_dim: int = EMBEDDING_DIM) -> nn.Module:
    """torchrec's own models, unmodified."""
    collection = make_collection(embedding_dim)
    if kind == "dlrm":
        return DLRM(collection, 4, [8, embedding_dim], [8, 1])
    if kind == "dlrm_dcn":
        return DLRM_DCN(collection, 4, [8, embedding_dim], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4)
    return SimpleDeepFMNN(4, collection, hidden_layer_size=8, deep_fm_dimension=4)


class Sigmoidless(nn.Module):
    """SimpleDeepFMNN ends in a sigmoid; this undoes it, as a user would for BCEWithLogitsLoss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.logit(self.model(dense_features, sparse_features), eps=1e-6)


def make_recipe(
    kind: str = "dlrm", *, seed: int = 0, embedding_dim: int | None = None, optimizer: str = "adam"
) -> Recipe:
    """The recipe; the splits depend on nothing but the batch seeds."""
    torch.manual_seed(seed)
    model = make_model(kind, embedding_dim or EMBEDDING_DIM)
    return Recipe(
        model=Sigmoidless(model) if kind == "deepfm" else model,
        data=DataSplits(
            train=Repeatable([make_batch(64, s) for s in range(10)]),
            validation=Repeatable([make_batch(64, 100 + s) for s in range(3)]),
            selection=Repeatable([make_batch(64, 200 + s) for s in range(2)]),
            test=Repeatable([make_batch(64, 300 + s) for s in range(2)]),
        ),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer=optimizer,
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
    )


def demo(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe function, as the command line finds it: ``tests.tiny:demo``."""
    del data
    return make_recipe(seed=seed, embedding_dim=embedding_dim)
