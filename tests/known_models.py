"""Models of the kinds that people have, in small, and batches that all of them read: the rows of docs/models.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.distributed.test_utils import test_model as of_torchrec
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.data.batches import WholeBatch
from examples import models
from examples.models.sequential import DeepInterestNetwork, SelfAttentiveRecommender, build_sequence_table

SIZE, LONGEST, DIM, NUM_DENSE = 32, 4, 8, 4
ROWS = {"user": 120, "item": 160, "genre": 20}
BAGS = {"user": (1, 1), "item": (1, 1), "genre": (0, 3), "history": (1, LONGEST), "candidate": (1, 1)}
"""Feature -> ids of a bag, at least and at most."""
READS = {"user": ROWS["user"], "item": ROWS["item"], "genre": ROWS["genre"]} | dict.fromkeys(
    ("history", "candidate"), ROWS["item"]
)


@dataclass
class AnyBatch(WholeBatch):
    """A batch of TorchRec's, and a bag of weighted ids beside it, for models that read a second KeyedJaggedTensor."""

    weighted_features: KeyedJaggedTensor


def make_batch(seed: int, *, is_weighted: bool = False, is_rated: bool = False) -> AnyBatch:
    """Bags of all features.

    Args:
        seed: of the batch.
        is_weighted: whether the model's only features have weights.
        is_rated: whether a second column of labels holds ratings.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = {name: torch.randint(low, high + 1, (SIZE,), generator=generator) for name, (low, high) in BAGS.items()}
    ids = [
        (READS[name] * torch.rand(int(own.sum()), generator=generator).square()).long() for name, own in lengths.items()
    ]
    values, bags = torch.cat(ids), torch.cat(list(lengths.values()))
    weights = torch.rand(len(values), generator=generator) + 0.5
    plain = KeyedJaggedTensor(keys=list(BAGS), values=values, lengths=bags)
    weighted = KeyedJaggedTensor(keys=list(BAGS), values=values, lengths=bags, weights=weights)
    scored = KeyedJaggedTensor(
        keys=["scored"], values=ids[-1] % ROWS["genre"], lengths=lengths["candidate"], weights=weights[: len(ids[-1])]
    )
    clicks = torch.randint(0, 2, (SIZE,), generator=generator).float()
    labels = torch.stack([clicks, 3 + clicks], 1) if is_rated else clicks
    dense = torch.rand(SIZE, NUM_DENSE, generator=generator)
    return AnyBatch(dense, weighted if is_weighted else plain, labels, weighted_features=scored)


def table(
    name: str, features: Sequence[str] = (), *, dim: int = DIM, pooling: PoolingType = PoolingType.SUM, rows: str = ""
) -> EmbeddingBagConfig:
    """A pooled table, of the rows of `rows`, read by the feature of its name unless told otherwise."""
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS[rows or name],
        embedding_dim=dim,
        feature_names=list(features or [name]),
        pooling=pooling,
    )


def bags(*tables: EmbeddingBagConfig, is_weighted: bool = False) -> EmbeddingBagCollection:
    """A collection: of users, items and genres if no tables are given."""
    return EmbeddingBagCollection(tables=list(tables) or [table(name) for name in ROWS], is_weighted=is_weighted)


class Pooled(nn.Module):
    """Collections, and a tower over what they pool, side by side."""

    def __init__(self, *collections: nn.Module, width: int) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.over = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits; the dense features are not used."""
        pooled = [collection(sparse_features).values() for collection in self.collections]
        return self.over(torch.cat(pooled, dim=1)).squeeze(1)


class TwoTowers(nn.Module):
    """A query tower and a candidate tower, each with a collection of its own, that meet in a dot product."""

    def __init__(self) -> None:
        super().__init__()
        self.query = bags(table("user"), table("genre"))
        self.candidate = bags(table("item", ["candidate"]))
        self.of_query, self.of_candidate = MLP(2 * DIM, [DIM, 6]), MLP(DIM, [DIM, 6])

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """The dot product of each pair; the dense features are not used."""
        query = self.of_query(self.query(sparse_features).values())
        return (query * self.of_candidate(self.candidate(sparse_features).values())).sum(1)


class FirstOrder(nn.Module):
    """A factorisation machine whose first-order weights are tables of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = bags(table("user"), table("item"))
        self.singles = bags(*(table(f"{name}_weight", [name], dim=1, rows=name) for name in ("user", "item")))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits; the dense features are not used."""
        pairs = self.pairs(sparse_features)
        return self.singles(sparse_features).values().sum(1) + (pairs["user"] * pairs["item"]).sum(1)


def feature_processed() -> FeatureProcessedEmbeddingBagCollection:
    """Position weights in front of a table that two features read."""
    processors = PositionWeightedModuleCollection({"history": LONGEST, "candidate": LONGEST})
    return FeatureProcessedEmbeddingBagCollection(
        bags(table("item", ["history", "candidate"]), is_weighted=True), processors
    )


def sparse_nn(**options: object) -> nn.Module:
    """TorchRec's test model on two tables with a third one of weighted bags."""
    scored = [table("scored", rows="genre")]
    return of_torchrec.TestSparseNN([table("user"), table("item")], NUM_DENSE, scored, **options)


def towers(kind: type[nn.Module]) -> nn.Module:
    """TorchRec's test models of embedding towers, which want four tables."""
    tables = [table("user"), table("item"), table("history", ["history"], rows="item"), table("genre")]
    return kind(tables, NUM_DENSE, [table("scored", rows="genre")])


def both_kinds() -> nn.Module:
    """TorchRec's test model that holds pooled tables and sequences."""
    histories = EmbeddingConfig(name="item", num_embeddings=ROWS["item"], embedding_dim=DIM, feature_names=["history"])
    return of_torchrec.TestMixedEmbeddingSparseArch([table("user"), table("genre"), histories], NUM_DENSE)


def multi_task() -> nn.Module:
    """A click and a rating."""
    return models.MultiGateMixtureOfExperts(bags(), {"click": 0.0, "rating": 3.5}, num_experts=2, expert_size=6)


@dataclass(frozen=True)
class Kind:
    """A kind of model that goes through.

    Attributes:
        build: makes one.
        task: name of the page's task, or "" where the page's loss does.
        is_weighted: see `make_batch`.
        leave_alone: tables that are not touched.
    """

    build: Callable[[], nn.Module]
    task: str = ""
    is_weighted: bool = False
    leave_alone: tuple[str, ...] = ()


def _items() -> EmbeddingCollection:
    return build_sequence_table(ROWS["item"], DIM)


OF_MODEL_INPUT, CLICK_AND_RATING = "OfModelInput", "ClickAndRating"
"""Names of the page's tasks."""
SUPPORTED: Mapping[str, Kind] = {
    "DLRM": Kind(lambda: DLRM(bags(), NUM_DENSE, [8, DIM], [8, 1])),
    "DLRM_Projection": Kind(lambda: DLRM_Projection(bags(), NUM_DENSE, [8, DIM], [8, 1], [8, 2 * DIM], [8, 3 * DIM])),
    "DLRM_DCN": Kind(lambda: DLRM_DCN(bags(), NUM_DENSE, [8, DIM], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4)),
    "SimpleDeepFMNN": Kind(lambda: SimpleDeepFMNN(NUM_DENSE, bags(), 8, 4)),
    "DeepFM": Kind(lambda: models.DeepFM(bags(), tower=(8,))),
    "FM": Kind(lambda: models.FactorizationMachine(bags())),
    "FM, first-order tables of one column": Kind(FirstOrder),
    "Wide & Deep": Kind(lambda: models.WideDeep(bags(), tower=(8,))),
    "MF": Kind(lambda: models.MatrixFactorization(bags(table("user"), table("item")), 0.0)),
    "NeuMF": Kind(
        lambda: models.NeuMF(
            models.build_neumf_tables({name: ROWS[name] for name in ("user", "item")}, 4), tower=models.ncf_tower(4)
        )
    ),
    "Two towers": Kind(TwoTowers),
    "MMoE": Kind(multi_task, CLICK_AND_RATING),
    "DIN": Kind(lambda: DeepInterestNetwork(_items(), longest=LONGEST, attention=4, tower=(8, 4))),
    "SASRec": Kind(lambda: SelfAttentiveRecommender(_items(), longest=LONGEST, num_layers=1)),
    "TestSparseNN, weighted features": Kind(sparse_nn, OF_MODEL_INPUT),
    "TestSparseNN, position weights": Kind(lambda: sparse_nn(max_feature_lengths={"item": LONGEST}), OF_MODEL_INPUT),
    "TestTowerSparseNN": Kind(lambda: towers(of_torchrec.TestTowerSparseNN), OF_MODEL_INPUT),
    "TestTowerCollectionSparseNN": Kind(lambda: towers(of_torchrec.TestTowerCollectionSparseNN), OF_MODEL_INPUT),
    "TestMixedEmbeddingSparseArch": Kind(both_kinds, OF_MODEL_INPUT),
    "Feature processors": Kind(lambda: Pooled(feature_processed(), width=2 * DIM)),
    "Weighted bags": Kind(lambda: Pooled(bags(is_weighted=True), width=3 * DIM), is_weighted=True),
    "MEAN pooling": Kind(
        lambda: Pooled(bags(*(table(name, pooling=PoolingType.MEAN) for name in ROWS)), width=3 * DIM)
    ),
    "Several features on one table": Kind(
        lambda: Pooled(bags(table("item", ["item", "history", "candidate"])), width=3 * DIM)
    ),
    "One feature on several tables": Kind(
        lambda: Pooled(bags(table("item"), table("wide", ["item"], dim=12, rows="item")), width=DIM + 12)
    ),
    "Multi-hot bags": Kind(lambda: Pooled(bags(table("genre"), table("item", ["history"])), width=2 * DIM)),
    "Several collections": Kind(lambda: Pooled(bags(table("user")), bags(table("item")), width=2 * DIM)),
    "A table left alone": Kind(
        lambda: Pooled(bags(table("user"), table("item"), table("genre", dim=4)), width=2 * DIM + 4),
        leave_alone=("genre",),
    ),
}
"""Row of the page -> its model."""
