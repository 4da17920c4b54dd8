"""A small model with managed collisions, trained on raw ids of any size, and what it should look up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.artifact.export import drop_in_, export
from dnis_torchrec.scheme import MixedDimensionScheme

CPU = torch.device("cpu")
ROWS, DIM, INTERVAL, LONGEST = 40, 16, 2, 3
USERS = EmbeddingBagConfig(name="user", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["user"])
ITEMS = EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item", "history"])
RAW = 10**12
"""Raw ids are about so large."""


def zch() -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(ROWS, CPU, LFU_EvictionPolicy(), INTERVAL)


def mpzch(device: torch.device = CPU) -> HashZchManagedCollisionModule:
    """On a CPU it gives rows to ids, as in serving, and learns none."""
    with warnings.catch_warnings():  # torchrec copies a tensor by torch.tensor
        warnings.simplefilter("ignore", UserWarning)
        return HashZchManagedCollisionModule(ROWS, device, 1, max_probe=8)


class StandIn(ManagedCollisionModule):
    """In place of multi-probe ZCH, whose kernels learn ids on GPUs only: the first free row from where an id hashes to.

    Its state has the name, shape and dtype of that of `HashZchManagedCollisionModule`.
    """

    def __init__(self) -> None:
        super().__init__(CPU, [0, ROWS], skip_state_validation=True)
        self._hash_zch_identities = nn.Parameter(torch.full((ROWS, 1), -1), requires_grad=False)

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Row of every id; in training an id without one takes the first free place from where it hashes to."""
        return {name: self._remap(bags) for name, bags in features.items()}

    def _remap(self, bags: JaggedTensor) -> JaggedTensor:
        rows = []
        held = self._hash_zch_identities.data
        for own in bags.values().tolist():
            places = [(own + probe) % ROWS for probe in range(ROWS)]
            found = next((place for place in places if int(held[place]) in (own, -1)), places[0])
            if self.training:
                held[found] = own
            rows.append(found)
        return JaggedTensor(torch.tensor(rows, dtype=torch.int64), lengths=bags.lengths())

    def output_size(self) -> int:
        """N of the table."""
        return ROWS

    def open_slots(self) -> Tensor:
        """Rows without an id."""
        return (self._hash_zch_identities == -1).sum()

    def evict(self) -> None:
        """Nothing is ever evicted."""

    preprocess = profile = remap = input_size = None  # type: ignore[assignment]
    buckets = validate_state = rebuild_with_output_id_range = None  # type: ignore[assignment]


class Model(nn.Module):
    """A linear model of what managed collisions look up."""

    def __init__(self, kind: Callable[[], ManagedCollisionModule] = zch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = self._make([USERS, ITEMS], kind)
        for weight in self.tables._embedding_module.parameters():
            nn.init.normal_(weight)
        self.linear = nn.Linear(3 * DIM, 1)

    def _make(self, tables: list[EmbeddingBagConfig], kind: Callable[[], ManagedCollisionModule]) -> nn.Module:
        collisions = ManagedCollisionCollection({table.name: kind() for table in tables}, tables)
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=tables), collisions)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predictions, ``(B,)``."""
        pooled, _ = self.tables(sparse_features)
        return self.linear(pooled.values()).squeeze(1)


class SequenceModel(Model):
    """A linear model of sums of rows, which an unpooled collection looks up."""

    def _make(self, tables: list[EmbeddingBagConfig], kind: Callable[[], ManagedCollisionModule]) -> nn.Module:
        fields = ("name", "num_embeddings", "embedding_dim", "feature_names")
        own = [EmbeddingConfig(**{field: getattr(table, field) for field in fields}) for table in tables]
        collisions = ManagedCollisionCollection({table.name: kind() for table in own}, own)
        return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=own), collisions)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Predictions, ``(B,)``."""
        found, _ = self.tables(sparse_features)
        sums = [found[key].to_padded_dense(LONGEST).sum(1) for key in ("user", "item", "history")]
        return self.linear(torch.cat(sums, dim=1)).squeeze(1)


def batch(seed: int, size: int = 32, *, first: int = RAW, ids: int = 30) -> Batch:
    """Few users and items, frequent ones first; histories of up to three items; keys not in the tables' order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat(
        [torch.ones(2, size, dtype=torch.int64), torch.randint(0, LONGEST + 1, (1, size), generator=generator)]
    )
    drawn = (ids * torch.rand(int(lengths.sum()), generator=generator) ** 3).long()
    features = KeyedJaggedTensor(["item", "user", "history"], first + 7919 * drawn, lengths=lengths.flatten())
    return Batch(torch.zeros(size, 1), features, torch.rand(size, generator=generator))


BATCHES = [batch(seed) for seed in range(8)]
NEW = [batch(100 + seed, first=2 * RAW, ids=10) for seed in range(6)]
"""Of ids that `BATCHES` lack."""


def trained(kind: Callable[[], ManagedCollisionModule] = zch, model_of: type[Model] = Model) -> Model:
    """A model whose remapping has learned the ids of `BATCHES`, where it can, in evaluation mode."""
    model = model_of(kind).train(kind is not mpzch)
    with torch.no_grad():
        for own in BATCHES:
            model(own.dense_features, own.sparse_features)
    return model.eval()


def predictions(model: nn.Module, batches: list[Batch] | None = None) -> Tensor:
    """Of all batches, as the model serves them."""
    with torch.no_grad():
        return torch.cat([model(own.dense_features, own.sparse_features) for own in batches or BATCHES])


def rows_of(model: Model, features: KeyedJaggedTensor) -> dict[str, list[int]]:
    """Naively, feature -> rows: what the collection is called with."""
    seen: list[KeyedJaggedTensor] = []
    hook = model.tables._embedding_module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(torch.zeros(1, 1), features)
    hook.remove()
    return {name: own.values().tolist() for name, own in seen[0].to_dict().items()}


def joined(batches: list[Batch]) -> Batch:
    """The samples of several batches in one."""
    keys = batches[0].sparse_features.keys()
    bags = [own.sparse_features.to_dict() for own in batches]
    features = KeyedJaggedTensor(
        keys,
        torch.cat([own[key].values() for key in keys for own in bags]),
        lengths=torch.cat([own[key].lengths() for key in keys for own in bags]),
    )
    dense = torch.cat([own.dense_features for own in batches])
    return Batch(dense, features, torch.cat([own.labels for own in batches]))


def check_served_as_exported(model: Model, scheme: MixedDimensionScheme, folder: Path, bare: Model) -> Model:
    """An artifact dropped into a bare model maps raw ids, those without a row too, and predicts as the codes do.

    Returns:
        The model with the artifact.
    """
    served = bare.eval()
    drop_in_(served, export(model, scheme, folder))
    later = [*BATCHES, *NEW]
    for own in later:
        assert rows_of(served, own.sparse_features) == rows_of(model, own.sparse_features)
    model.tables._embedding_module = packed_collections(model, scheme)["tables._embedding_module"]
    torch.testing.assert_close(predictions(served, later), predictions(model, later))
    return served
