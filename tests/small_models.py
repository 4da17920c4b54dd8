"""Small TorchRec models, batches for them, and ways to shard them on one rank: what tests of whole models share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.ops import batches as bag_splitting
from dnis_torchrec.selection import alpha as selection_alpha
from dnis_torchrec.selection import on_shards
from dnis_torchrec.selection import wrapper as wrapper_module
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.shards import collections, local_shards, table_configs
from dnis_torchrec.selection.wrapper import soft_selection_modules
from dnis_torchrec.training import shard as sharding_of_training
from dnis_torchrec.training.state import model_tensors

BATCH_SIZE = 5
NUM_DENSE = 3
ROWS = {"user": 12, "movie": 9, "genre": 7}
MULTI_HOT = "genre"
SHARDING_TYPES = ("table_wise", "column_wise", "data_parallel")


def tables(*names: str, dim: int = 8) -> list[EmbeddingBagConfig]:
    """Configs of some of the three tables; the multi-hot one is pooled by MEAN."""
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=dim,
            feature_names=[f"{name}_id"],
            pooling=PoolingType.MEAN if name == MULTI_HOT else PoolingType.SUM,
        )
        for name in names or ROWS
    ]


def counts() -> FrequencyCounts:
    """Counts of all three tables: one in frequency order, two not, with rows never seen."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randint(0, 9, (rows,), generator=generator) for name, rows in ROWS.items()}
    drawn["user"] = drawn["user"].sort(descending=True).values
    return FrequencyCounts(drawn, {f"{name}_id": 3 if name == MULTI_HOT else 1 for name in ROWS}, 40)


def blocks(dims: dict[str, int] | None = None) -> RowBlocks:
    """Blocks of all three tables."""
    configs = [config for name in ROWS for config in tables(name, dim=(dims or {}).get(name, 8))]
    return blocks_from_counts(counts(), configs, num_blocks=3)


@contextmanager
def operators(compiled: bool) -> Iterator[None]:
    """What learns inside does so as always, or as on a machine that has no compiler: a process asks for one once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in () if compiled else (wrapper_module, bag_splitting, on_shards, sharding_of_training):
            patch.setattr(module, "are_compiled", lambda: False)
        if not compiled:
            patch.setattr(selection_alpha, "can_select", lambda values: False)
        yield


def lookups_of(model: nn.Module) -> list[nn.Module]:
    """What a sharded model looks its tables up with, one for each sharding type; TorchRec names them nowhere."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection)]
    return [lookup for collection in sharded for lookup in collection._lookups]


def kernels_of(model: nn.Module) -> list[nn.Module]:
    """The kernels of those lookups, each of one or more tables."""
    return [kernel for lookup in lookups_of(model) for kernel in getattr(lookup, "module", lookup)._emb_modules]


def features(seed: int = 1) -> KeyedJaggedTensor:
    """A batch of bags, one of them empty, the multi-hot ones of up to three ids."""
    generator = torch.Generator().manual_seed(seed)
    values, lengths = [], []
    for name, rows in ROWS.items():
        length = torch.ones(BATCH_SIZE, dtype=torch.int64)
        length = torch.randint(0, 4, (BATCH_SIZE,), generator=generator) if name == MULTI_HOT else length
        lengths.append(length)
        values.append(torch.randint(0, rows, (int(length.sum()),), generator=generator))
    return KeyedJaggedTensor(keys=[f"{name}_id" for name in ROWS], values=torch.cat(values), lengths=torch.cat(lengths))


class TwoCollections(nn.Module):
    """Two collections, one of them deep inside a `module` of its own, whose tables have the same D or another."""

    def __init__(self, *, dim_of_first: int = 8) -> None:
        super().__init__()
        self.first = EmbeddingBagCollection(tables=tables("user", "genre", dim=dim_of_first))
        self.module = nn.ModuleDict({"second": EmbeddingBagCollection(tables=tables("movie"))})
        self.over = nn.Linear(2 * dim_of_first + 8, 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """A logit per sample; the dense features are not used."""
        pooled = [collection(sparse_features).values() for collection in (self.first, self.module["second"])]
        return self.over(torch.cat(pooled, dim=1))


def collection() -> EmbeddingBagCollection:
    """One collection of all three tables."""
    return EmbeddingBagCollection(tables=tables())


def dlrm() -> nn.Module:
    """torchrec's DLRM."""
    return DLRM(collection(), NUM_DENSE, dense_arch_layer_sizes=[4, 8], over_arch_layer_sizes=[4, 1])


def dlrm_dcn() -> nn.Module:
    """torchrec's DLRM_DCN."""
    return DLRM_DCN(collection(), NUM_DENSE, [4, 8], [4, 1], dcn_num_layers=1, dcn_low_rank_dim=2)


def deepfm() -> nn.Module:
    """torchrec's SimpleDeepFMNN."""
    return SimpleDeepFMNN(NUM_DENSE, collection(), hidden_layer_size=4, deep_fm_dimension=3)


MODELS = {
    "dlrm": dlrm,
    "dlrm_dcn": dlrm_dcn,
    "deepfm": deepfm,
    "two_collections": TwoCollections,
    "two_dims": lambda: TwoCollections(dim_of_first=4),
    "bare": collection,
}
"""name -> builder; ``"bare"`` is a collection and no model around it."""


def blocks_for(model: nn.Module) -> RowBlocks:
    """Blocks that fit the D of each table of a model."""
    configs = [config for config in table_configs(model) if config.name in ROWS]
    return blocks({config.name: config.embedding_dim for config in configs})


@torch.no_grad()
def predict(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """What a model makes of a batch; of a bare collection the pooled embeddings, in the order of `ROWS`."""
    dense = torch.randn(BATCH_SIZE, NUM_DENSE, generator=torch.Generator().manual_seed(seed))
    if list(collections(model)) == [""]:
        pooled: KeyedTensor = model(features(seed))
        return torch.cat([pooled[f"{name}_id"] for name in ROWS], dim=1)
    return model(dense_features=dense, sparse_features=features(seed))


def alpha_of(model: nn.Module) -> Alpha:
    """The one alpha that all wrappers of a prepared model share."""
    shared = {id(wrapper.alpha): wrapper.alpha for wrapper in soft_selection_modules(model).values()}
    assert len(shared) == 1
    return next(iter(shared.values()))


def randomise_alpha_(model: nn.Module) -> None:
    """Draws alpha, some of it exactly 0."""
    alpha = alpha_of(model)
    for dim in alpha.dims:
        alpha.of(dim).uniform_(-0.3, 1).clamp_(min=0)


def shard_as(
    model: nn.Module, sharding_type: str, *, fused: type[torch.optim.Optimizer] | None = torch.optim.SGD
) -> DistributedModelParallel:
    """Shards a model on one rank; data_parallel tables use the dense kernel, the others a fused optimizer of rate 1.

    Without `fused` they keep the one that they have. Column-wise tables of D=8 are cut into two shards. TorchRec draws
    the weights of tables on a CPU anew, so they are copied in.
    """
    weights = {s.table: s.weight for module in collections(model).values() for s in local_shards(module)}
    constraint = ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
    if sharding_type != "data_parallel" and fused is not None:
        for module in model.modules():
            if isinstance(module, EmbeddingBagCollection):
                apply_optimizer_in_backward(fused, module.parameters(), {"lr": 1.0})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=dict.fromkeys(weights, constraint)
    )
    sharders = [EmbeddingBagCollectionSharder()]
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=planner.plan(model, sharders), sharders=sharders
    )
    for module in collections(sharded).values():
        for shard in local_shards(module):
            columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
            shard.weight.copy_(weights[shard.table][:, columns])
    return sharded


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Live views of everything in a model that this rank would save."""
    placed = model_tensors(model).items()
    return {f"{key}@{chunk.offset}": chunk.tensor for key, value in placed for chunk in value.chunks}
