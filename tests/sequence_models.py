"""Unpooled tables, batches for them, and their twins that pool bags of one id: what tests of sequences share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.data.task import Predictions, Task
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import SoftSelectionModule, as_bags, soft_selection_modules

ROWS = {"item": 23, "shop": 17}
FEATURES = {"item": ["history", "candidate"], "shop": ["candidate", "visits"]}
"""A table that two features read, and a feature that two tables read."""
LONGEST = {"history": 4, "candidate": 1, "visits": 3}
KEYS = ["history", "candidate@item", "candidate@shop", "visits"]
DIM, BATCH_SIZE = 8, 7
KINDS = tuple(
    kind.value
    for kind in (
        *(ShardingType.TABLE_WISE, ShardingType.ROW_WISE),
        *(ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL),
    )
)
"""Sharding types that TorchRec has for sequences."""


def tables() -> list[EmbeddingConfig]:
    """Configs of both tables."""
    return [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=FEATURES[name])
        for name, rows in ROWS.items()
    ]


def counts() -> FrequencyCounts:
    """Counts of both tables: `item` in frequency order, `shop` not."""
    drawn = torch.randint(0, 9, (ROWS["shop"],), generator=torch.Generator().manual_seed(0))
    return FrequencyCounts({"item": torch.arange(ROWS["item"], 0, -1), "shop": drawn}, LONGEST, 60)


def blocks() -> RowBlocks:
    """Three blocks of each table, by default with rows of alpha of its own."""
    return blocks_from_counts(counts(), [as_bags(table) for table in tables()], num_blocks=3)


def sequences(*, prepared: bool = True, need_indices: bool = False) -> nn.ModuleDict:
    """A model that is an EmbeddingCollection; the same weights and the same alpha in every process."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"tables": EmbeddingCollection(tables=tables(), need_indices=need_indices)})
    return _with_alpha(model) if prepared else model


def bags_of_one() -> nn.ModuleDict:
    """The same tables, pooled; the same weights and the same alpha. Bags are meant to hold one id."""
    configs = [replace(as_bags(table), pooling=PoolingType.SUM) for table in tables()]
    model = nn.ModuleDict({"tables": EmbeddingBagCollection(tables=configs)})
    for name, embedding in sequences(prepared=False)["tables"].embeddings.items():
        model["tables"].embedding_bags[name].weight.data.copy_(embedding.weight.data)
    return _with_alpha(model, multi_hot_features=[])


def _with_alpha(model: nn.ModuleDict, **options: object) -> nn.ModuleDict:
    prepare_(model, blocks(), **options)
    alpha = wrapper_of(model).alpha.of(DIM)
    alpha.copy_(torch.rand(alpha.shape, generator=torch.Generator().manual_seed(2)))
    return model


def wrapper_of(model: nn.Module) -> SoftSelectionModule:
    """The one wrapper of a model."""
    return next(iter(soft_selection_modules(model).values()))


def features(seed: int, *, of_one: bool = False, size: int = BATCH_SIZE) -> KeyedJaggedTensor:
    """Bags, empty ones among them, or bags of one id each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, most + 1, (size,), generator=generator) for most in LONGEST.values()]
    if of_one:
        lengths = [torch.ones_like(own) for own in lengths]
    ids = torch.randint(0, min(ROWS.values()), (int(torch.cat(lengths).sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(LONGEST), values=ids, lengths=torch.cat(lengths))


def values_of(output: dict[str, JaggedTensor]) -> Tensor:
    """The embeddings of all keys, one after the other."""
    return torch.cat([output[key].values() for key in KEYS])


class Interest(nn.Module):
    """A DIN in small: a candidate looks at a history and visits; beside it a pooled table."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(tables=tables())
        user = EmbeddingBagConfig(name="user", num_embeddings=19, embedding_dim=4, feature_names=["user"])
        self.users = EmbeddingBagCollection(tables=[user])
        self.over = nn.Sequential(nn.Linear(3 * DIM + 4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """A logit per sample; the dense features are not used."""
        found = self.sequences(sparse_features)
        candidate, shop = (found[f"candidate@{name}"].to_padded_dense(1)[:, 0] for name in ("item", "shop"))
        history, visits = (found[name].to_padded_dense(LONGEST[name]) for name in ("history", "visits"))
        weights = torch.sigmoid(torch.einsum("bld,bd->bl", history, candidate))
        looked_at = torch.einsum("bl,bld->bd", weights, history)
        users = self.users(sparse_features).values()
        over = torch.cat([candidate * looked_at, shop * visits.sum(1), candidate, users], dim=1)
        return self.over(over).squeeze(1)


NAMES = {
    "item": "sequences.embeddings.item.weight",
    "shop": "sequences.embeddings.shop.weight",
    "user": "users.embedding_bags.user.weight",
}
"""Table of `Interest` -> its weights."""


def interest() -> Interest:
    """The model, with the same weights in every process."""
    torch.manual_seed(4)
    model = Interest()
    for name, weight in model.named_parameters():
        if "embedding" in name:
            nn.init.normal_(weight)
    return model


def of_two(z: Tensor, labels: Tensor) -> Tensor:
    """A click, and a rating, which counts less: the loss of two outputs."""
    return binary_cross_entropy_with_logits(z[:, 0], labels) + 0.3 * mse_loss(z[:, 1], labels)


class ClickAndRating(Task):
    """The task of `two_outputs`: names for both columns."""

    kinds: Mapping[str, str] = {"click": "binary", "rating": "regression"}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        z = model(batch.dense_features, batch.sparse_features)
        return {"click": z[:, 0], "rating": z[:, 1]}

    def loss(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Tensor:
        return of_two(torch.stack([outputs[name] for name in self.kinds], dim=1), batch.labels)

    def predictions(self, batch: Batch, outputs: Mapping[str, Tensor]) -> dict[str, Predictions]:
        return {name: Predictions(outputs[name], batch.labels) for name in self.kinds}


def two_outputs() -> Interest:
    """The model with two outputs."""
    model = interest()
    model.over[2] = nn.Linear(6, 2)
    return model


def make_batch(seed: int, size: int = BATCH_SIZE) -> Batch:
    """A batch for `Interest`."""
    generator = torch.Generator().manual_seed(seed)
    own, users = features(seed, size=size), torch.randint(0, 19, (size,), generator=generator)
    both = KeyedJaggedTensor(
        keys=[*own.keys(), "user"],
        values=torch.cat([own.values(), users]),
        lengths=torch.cat([own.lengths(), torch.ones(size, dtype=torch.int64)]),
    )
    return Batch(torch.zeros(size, 1), both, torch.rand(size, generator=generator).round())


def blocks_of(model: nn.Module, batches: list[Batch], num_blocks: int = 2) -> RowBlocks:
    """Blocks of all tables of a plain model, from counts of the batches."""
    tables = table_configs(model)
    counted = count_frequencies([batch.sparse_features for batch in batches], tables)
    return blocks_from_counts(counted, tables, num_blocks=num_blocks)


@torch.no_grad()
def rounded(model: Interest, scheme: MixedDimensionScheme) -> Interest:
    """The model, every row in its codes: once it has settled, the nearest levels of each column, value by value."""
    nearest = copy.deepcopy(model)
    for shard in (shard for module in collections(nearest).values() for shard in local_shards(module)):
        table = scheme.tables[shard.table]
        shard.weight.copy_(table.codes.settled(shard.weight, table.routing.all_blocks()))
        for row, block in enumerate(table.routing.all_blocks().tolist()):
            for column in range(table.embedding_dim):
                width = int(table.codes.bits[block, column])
                value = shard.weight[row, column]
                if width == 0:
                    shard.weight[row, column] = 0
                elif width < 16:
                    shift = float(table.codes.shift[block, column]) / 2
                    levels = float(table.codes.scale[block, column]) * (torch.arange(2**width) + shift)
                    shard.weight[row, column] = levels[(levels - value).abs().argmin()]
    return nearest
