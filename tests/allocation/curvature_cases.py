"""Models, data and blocks that curvature is measured on, and what the dense oracle makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from tests.reference import ReferenceTable, curvature_reference, pooled_reference

ROWS = {"a": 11, "b": 7, "c": 10}
DIMS = {"a": 4, "b": 4, "c": 8}
FEATURES = {"a": ["one", "both"], "b": ["both", "few"], "c": ["many"]}
LENGTHS = {"one": 1, "both": 3, "few": 1, "many": 4}
"""Longest bags; two features of one table, one feature of two tables."""
COLLECTIONS = (("a", "b"), ("c",))


@dataclass(frozen=True)
class Case:
    """What a model is to be like.

    Attributes:
        pooling: of all tables.
        is_weighted: whether ids have weights.
        lengths: longest bag of each feature.
        num_outputs: T.
        num_blocks: S.
        unassigned: rows of each table that belong to no block.
    """

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    lengths: tuple[int, ...] = tuple(LENGTHS.values())
    num_outputs: int = 1
    num_blocks: int = 3
    unassigned: int = 0


class Net(nn.Module):
    """Two collections of three tables and two dense layers in float64: not linear in what is pooled."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.num_outputs = case.num_outputs
        self.collections = nn.ModuleList(
            EmbeddingBagCollection(tables=[config(name, case) for name in names], is_weighted=case.is_weighted)
            for names in COLLECTIONS
        )
        width = sum(DIMS[name] * len(FEATURES[name]) for name in ROWS)
        self.over = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, case.num_outputs))
        self.over.double()

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``(B,)`` of one output, else ``(B, T)``; the dense features are not used."""
        pooled = [collection(sparse_features).to_dict() for collection in self.collections]
        parts = [part.double() for own in pooled for _, part in sorted(own.items())]
        predictions = self.over(torch.cat(parts, dim=1))
        return predictions.squeeze(1) if self.num_outputs == 1 else predictions


def config(name: str, case: Case) -> EmbeddingBagConfig:
    """Of one table."""
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS[name],
        embedding_dim=DIMS[name],
        feature_names=FEATURES[name],
        pooling=case.pooling,
    )


def make_model(case: Case) -> Net:
    """The same weights in every process."""
    torch.manual_seed(3)
    net = Net(case)
    for collection in net.collections:
        for bag in collection.embedding_bags.values():
            nn.init.normal_(bag.weight)
    return net


def make_blocks(case: Case) -> RowBlocks:
    """Blocks of all tables; `a` is in frequency order, the others are not."""
    generator = torch.Generator().manual_seed(2)
    drawn = {name: torch.randint(0, 20, (rows,), generator=generator) for name, rows in ROWS.items()}
    drawn["a"] = drawn["a"].sort(descending=True).values
    counts = FrequencyCounts(drawn, dict(zip(LENGTHS, case.lengths, strict=True)), 60)
    configs = [config(name, case) for name in ROWS]
    blocks = blocks_from_counts(counts, configs, num_blocks=case.num_blocks)
    if not case.unassigned:
        return blocks
    dropped = {name: torch.arange(rows) >= rows - case.unassigned for name, rows in ROWS.items()}
    routings: dict[str, RowRouting] = {name: blocks.routings[name].without_rows(dropped[name]) for name in ROWS}
    return replace(blocks, routings=routings)


def make_batch(case: Case, seed: int, size: int = 6) -> Batch:
    """Bags, empty ones among them, and labels in [0, 1]: one per sample and output."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, most + 1, (size,), generator=generator) for most in case.lengths]
    rows = min(ROWS.values())
    values = torch.randint(0, rows, (int(torch.cat(lengths).sum()),), generator=generator)
    features = KeyedJaggedTensor(
        keys=list(LENGTHS),
        values=values,
        lengths=torch.cat(lengths),
        weights=torch.rand(len(values), generator=generator) + 0.5 if case.is_weighted else None,
    )
    shape = (size,) if case.num_outputs == 1 else (size, case.num_outputs)
    labels = torch.randint(0, 2, shape, generator=generator).float()
    return Batch(torch.zeros(size, 1), features, labels)


def make_batches(case: Case, num_batches: int = 2) -> list[Batch]:
    """Batches of unlike sizes."""
    return [make_batch(case, seed, 6 - seed % 2) for seed in range(num_batches)]


def expected(
    case: Case, batches: list[Batch], loss: Callable[[Tensor, Tensor], Tensor], alpha: dict[str, Tensor] | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """G and H of every table by the oracle, of all batches as one; of another alpha than 1 times that alpha."""
    net, blocks = make_model(case).eval(), make_blocks(case)
    weights = {name: bag.weight.detach() for own in net.collections for name, bag in own.embedding_bags.items()}
    sizes = {name: (blocks.routings[name].num_blocks, DIMS[name]) for name in ROWS}
    ones = {name: torch.ones(size, dtype=torch.float64) for name, size in sizes.items()}
    factors = ones if alpha is None else alpha

    def predict(scales: dict[str, Tensor]) -> Tensor:
        parts = []
        for names in COLLECTIONS:
            pooled = {}
            for name in names:
                for feature in FEATURES[name]:
                    key = f"{feature}@{name}" if feature == "both" else feature
                    pooled[key] = _pooled(
                        case, weights[name], scales[name] * factors[name], blocks, name, feature, batches
                    )
            parts += [part for _, part in sorted(pooled.items())]
        return net.over(torch.cat(parts, dim=1))

    return curvature_reference(predict, ones, torch.cat([batch.labels for batch in batches]).double(), loss)


def _pooled(
    case: Case, weight: Tensor, alpha: Tensor, blocks: RowBlocks, name: str, feature: str, batches: list[Batch]
) -> Tensor:
    of_none = torch.ones(1, alpha.shape[1], dtype=torch.float64)  # rows of no block are multiplied by nothing
    table = ReferenceTable(
        weight.double(),
        torch.cat([alpha, of_none]),
        blocks.routings[name].all_blocks(),
        case.pooling == PoolingType.MEAN,
    )
    parts = []
    for batch in batches:
        jagged = batch.sparse_features[feature]
        bags = [bag.tolist() for bag in jagged.to_dense()]
        of_ids = [bag.tolist() for bag in jagged.to_dense_weights()] if case.is_weighted else None
        parts.append(pooled_reference(table, bags, of_ids))
    return torch.cat(parts)
