"""Small TorchRec models of every kind, batches for them, and ways to shard them on one rank."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.datasets.utils import Batch
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules import mc_embedding_modules, mc_modules
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.compress import measure_ as measure_
from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.data.batches import slice_of as slice_of
from dnis_torchrec.data.task import Predictions
from dnis_torchrec.ops import batches as bag_splitting
from dnis_torchrec.ops.packed import load_operator as load_operator
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.selection import alpha as selection_alpha
from dnis_torchrec.selection import on_shards
from dnis_torchrec.selection import wrapper as wrapper_module
from dnis_torchrec.selection.alpha import Alpha
from dnis_torchrec.selection.plan import default_sharders
from dnis_torchrec.selection.shards import TableShard, collections, local_shards, table_configs
from dnis_torchrec.selection.swap import replace_ as replace_
from dnis_torchrec.selection.swap import unshard_ as unshard_
from dnis_torchrec.selection.torchrec import lookups
from dnis_torchrec.selection.wrapper import SoftSelectionModule, as_bags, soft_selection_modules
from dnis_torchrec.training import shard as sharding_of_training
from dnis_torchrec.training.checkpoint import model_tensors
from tests.tiny import Repeatable, bag_config

CPU = torch.device("cpu")
BATCH_SIZE = 5
NUM_DENSE = 3
ROWS = {"user": 12, "movie": 9, "genre": 7}
MULTI_HOT = "genre"
SHARDING_TYPES = ("table_wise", "column_wise", "data_parallel")


def tables(*names: str, dim: int = 8) -> list[EmbeddingBagConfig]:
    """Configs of some of the three tables; the multi-hot one is pooled by MEAN."""
    kinds = {name: PoolingType.MEAN if name == MULTI_HOT else PoolingType.SUM for name in names or ROWS}
    return [bag_config(name, ROWS[name], dim, f"{name}_id", pooling=kind) for name, kind in kinds.items()]


def counts() -> FrequencyCounts:
    """Counts of all three tables: one in frequency order, two not, with rows never seen."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randint(0, 9, (rows,), generator=generator) for name, rows in ROWS.items()}
    drawn["user"] = drawn["user"].sort(descending=True).values
    return FrequencyCounts(drawn, {f"{name}_id": 3 if name == MULTI_HOT else 1 for name in ROWS}, 40)


def blocks(dims: dict[str, int] | None = None) -> RowBlocks:
    configs = [config for name in ROWS for config in tables(name, dim=(dims or {}).get(name, 8))]
    return dnis.blocks_from_counts(counts(), configs, num_blocks=3, least_rows=1)


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
        pooled = [collection(sparse_features).values() for collection in (self.first, self.module["second"])]
        return self.over(torch.cat(pooled, dim=1))


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=tables())


def dlrm() -> nn.Module:
    return DLRM(collection(), NUM_DENSE, dense_arch_layer_sizes=[4, 8], over_arch_layer_sizes=[4, 1])


MODELS = {
    "dlrm": dlrm,
    "dlrm_dcn": lambda: DLRM_DCN(collection(), NUM_DENSE, [4, 8], [4, 1], dcn_num_layers=1, dcn_low_rank_dim=2),
    "deepfm": lambda: SimpleDeepFMNN(NUM_DENSE, collection(), hidden_layer_size=4, deep_fm_dimension=3),
    "two_collections": TwoCollections,
    "two_dims": lambda: TwoCollections(dim_of_first=4),
    "bare": collection,
}
"""name -> builder; ``"bare"`` is a collection and no model around it."""
SHARDED_MODELS = [
    *((name, None) for name in MODELS),
    *((name, kind) for name in ("dlrm", "two_dims") for kind in SHARDING_TYPES),
]
"""Each model as it is, and two of them in each sharding type."""


def blocks_for(model: nn.Module) -> RowBlocks:
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
    weights = {shard.table: shard.weight for shard in shards_of(model)}
    constraint = ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
    if sharding_type != "data_parallel" and fused is not None:
        for module in model.modules():
            if isinstance(module, EmbeddingBagCollection):
                apply_optimizer_in_backward(fused, module.parameters(), {"lr": 1.0})
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=dict.fromkeys(weights, constraint)
    )
    sharders = [EmbeddingBagCollectionSharder()]
    sharded = DistributedModelParallel(model, device=CPU, plan=planner.plan(model, sharders), sharders=sharders)
    for shard in shards_of(sharded):
        columns = slice(shard.first_column, shard.first_column + shard.weight.shape[1])
        shard.weight.copy_(weights[shard.table][:, columns])
    return sharded


def shard_densely(model: nn.Module) -> DistributedModelParallel:
    """Shards a model on one rank, all tables in dense kernels: an optimizer steps them like other weights."""
    constraint = ParameterConstraints(compute_kernels=["dense"])
    constraints = {config.name: constraint for config in table_configs(model)}
    plan = dnis.make_sharding_plan(model, CPU, default_sharders(), constraints=constraints)
    return dnis.shard_model(model, CPU, plan)


def shards_of(model: nn.Module) -> list[TableShard]:
    """All shards that this rank holds of a model's tables; of a plain model whole tables."""
    return [shard for module in collections(model).values() for shard in local_shards(module)]


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the tables of a model that are not cut by rows or columns."""
    return {shard.table: shard.weight.detach().clone() for shard in shards_of(model)}


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Live views of everything in a model that this rank would save."""
    placed = model_tensors(model).items()
    return {f"{key}@{chunk.offset}": chunk.tensor for key, value in placed for chunk in value.chunks}


SEQUENCE_ROWS = {"item": 23, "shop": 17}
FEATURES = {"item": ["history", "candidate"], "shop": ["candidate", "visits"]}
"""A table that two features read, and a feature that two tables read."""
LONGEST = {"history": 4, "candidate": 1, "visits": 3}
KEYS = ["history", "candidate@item", "candidate@shop", "visits"]
DIM, SEQUENCE_BATCH_SIZE = 8, 7
KINDS = tuple(
    kind.value
    for kind in (
        *(ShardingType.TABLE_WISE, ShardingType.ROW_WISE),
        *(ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL),
    )
)
"""Sharding types that TorchRec has for sequences."""


def sequence_tables() -> list[EmbeddingConfig]:
    """Configs of both tables."""
    return [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=FEATURES[name])
        for name, rows in SEQUENCE_ROWS.items()
    ]


def sequence_blocks() -> RowBlocks:
    """Three blocks of each table; `item` is in frequency order, `shop` not."""
    drawn = torch.randint(0, 9, (SEQUENCE_ROWS["shop"],), generator=torch.Generator().manual_seed(0))
    counts = FrequencyCounts({"item": torch.arange(SEQUENCE_ROWS["item"], 0, -1), "shop": drawn}, LONGEST, 60)
    return dnis.blocks_from_counts(counts, [as_bags(table) for table in sequence_tables()], num_blocks=3, least_rows=1)


def sequences(*, prepared: bool = True, need_indices: bool = False) -> nn.ModuleDict:
    """A model that is an EmbeddingCollection; the same weights and the same alpha in every process."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"tables": EmbeddingCollection(tables=sequence_tables(), need_indices=need_indices)})
    return _with_alpha(model) if prepared else model


def bags_of_one() -> nn.ModuleDict:
    """The same tables, pooled; the same weights and the same alpha. Bags are meant to hold one id."""
    configs = [replace(as_bags(table), pooling=PoolingType.SUM) for table in sequence_tables()]
    model = nn.ModuleDict({"tables": EmbeddingBagCollection(tables=configs)})
    for name, embedding in sequences(prepared=False)["tables"].embeddings.items():
        model["tables"].embedding_bags[name].weight.data.copy_(embedding.weight.data)
    return _with_alpha(model, multi_hot_features=[])


def _with_alpha(model: nn.ModuleDict, **options: object) -> nn.ModuleDict:
    dnis.prepare_(model, sequence_blocks(), **options)
    alpha = wrapper_of(model).alpha.of(DIM)
    alpha.copy_(torch.rand(alpha.shape, generator=torch.Generator().manual_seed(2)))
    return model


def wrapper_of(model: nn.Module) -> SoftSelectionModule:
    return next(iter(soft_selection_modules(model).values()))


def sequence_features(seed: int, *, of_one: bool = False, size: int = SEQUENCE_BATCH_SIZE) -> KeyedJaggedTensor:
    """Bags, empty ones among them, or bags of one id each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, most + 1, (size,), generator=generator) for most in LONGEST.values()]
    if of_one:
        lengths = [torch.ones_like(own) for own in lengths]
    ids = torch.randint(0, min(SEQUENCE_ROWS.values()), (int(torch.cat(lengths).sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(LONGEST), values=ids, lengths=torch.cat(lengths))


def values_of(output: dict[str, JaggedTensor]) -> Tensor:
    return torch.cat([output[key].values() for key in KEYS])


class Interest(nn.Module):
    """A DIN in small: a candidate looks at a history and visits; beside it a pooled table."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(tables=sequence_tables())
        self.users = EmbeddingBagCollection(tables=[bag_config("user", 19, 4)])
        self.over = nn.Sequential(nn.Linear(3 * DIM + 4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
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


class ClickAndRating(dnis.Task):
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
    model = interest()
    model.over[2] = nn.Linear(6, 2)
    return model


def make_batch(seed: int, size: int = SEQUENCE_BATCH_SIZE) -> Batch:
    """A batch for `Interest`."""
    generator = torch.Generator().manual_seed(seed)
    own, users = sequence_features(seed, size=size), torch.randint(0, 19, (size,), generator=generator)
    both = KeyedJaggedTensor(
        keys=[*own.keys(), "user"],
        values=torch.cat([own.values(), users]),
        lengths=torch.cat([own.lengths(), torch.ones(size, dtype=torch.int64)]),
    )
    return Batch(torch.zeros(size, 1), both, torch.rand(size, generator=generator).round())


def blocks_of(model: nn.Module, batches: Iterable[Batch], num_blocks: int = 2) -> RowBlocks:
    tables = table_configs(model)
    counted = dnis.count_frequencies([batch.sparse_features for batch in batches], tables)
    return dnis.blocks_from_counts(counted, tables, num_blocks=num_blocks, least_rows=1)


@torch.no_grad()
def nearest_codes(table: TableScheme, weight: Tensor) -> Tensor:
    """Every row in its codes: once it has settled, the nearest of all levels of each column of its block."""
    of_row, codes = table.routing.all_blocks(), table.codes
    nearest = codes.settle(weight, of_row).clone()
    nearest[of_row == table.routing.num_blocks] = 0
    for (block, column), width in np.ndenumerate(codes.bits.numpy()):
        rows = (of_row == block).nonzero().squeeze(1)
        if width < 16:
            shift = float(codes.shift[block, column]) / 2
            levels = float(codes.scale[block, column]) * (torch.arange(2 ** int(width)) + shift)
            closest = (levels - nearest[rows, column].unsqueeze(1)).abs().argmin(1)
            nearest[rows, column] = levels[closest] if width else torch.zeros(len(rows))
    return nearest


@torch.no_grad()
def rounded(model: Interest, scheme: MixedDimensionScheme) -> Interest:
    """The model, every row in its nearest codes."""
    nearest = copy.deepcopy(model)
    for shard in shards_of(nearest):
        shard.weight.copy_(nearest_codes(scheme.tables[shard.table], shard.weight))
    return nearest


MANAGED_ROWS, MANAGED_DIM, INTERVAL, MANAGED_LONGEST = 40, 16, 2, 3
USERS = bag_config("user", MANAGED_ROWS, MANAGED_DIM)
ITEMS = bag_config("item", MANAGED_ROWS, MANAGED_DIM, "item", "history")
RAW = 10**12
"""Raw ids are about so large."""


def zch() -> mc_modules.MCHManagedCollisionModule:
    return mc_modules.MCHManagedCollisionModule(MANAGED_ROWS, CPU, mc_modules.LFU_EvictionPolicy(), INTERVAL)


def mpzch(device: torch.device = CPU) -> HashZchManagedCollisionModule:
    """On a CPU it gives rows to ids, as in serving, and learns none."""
    with warnings.catch_warnings():  # torchrec copies a tensor by torch.tensor
        warnings.simplefilter("ignore", UserWarning)
        return HashZchManagedCollisionModule(MANAGED_ROWS, device, 1, max_probe=8)


class StandIn(ManagedCollisionModule):
    """In place of multi-probe ZCH, whose kernels learn ids on GPUs only: the first free row from where an id hashes to.

    Its state has the name, shape and dtype of that of `HashZchManagedCollisionModule`.
    """

    def __init__(self) -> None:
        super().__init__(CPU, [0, MANAGED_ROWS], skip_state_validation=True)
        self._hash_zch_identities = nn.Parameter(torch.full((MANAGED_ROWS, 1), -1), requires_grad=False)

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Row of every id; in training an id without one takes the first free place from where it hashes to."""
        return {name: self._remap(bags) for name, bags in features.items()}

    def _remap(self, bags: JaggedTensor) -> JaggedTensor:
        rows = []
        held = self._hash_zch_identities.data
        for own in bags.values().tolist():
            places = [(own + probe) % MANAGED_ROWS for probe in range(MANAGED_ROWS)]
            found = next((place for place in places if int(held[place]) in (own, -1)), places[0])
            if self.training:
                held[found] = own
            rows.append(found)
        return JaggedTensor(torch.tensor(rows, dtype=torch.int64), lengths=bags.lengths())

    def output_size(self) -> int:
        return MANAGED_ROWS

    def open_slots(self) -> Tensor:
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
        self.linear = nn.Linear(3 * MANAGED_DIM, 1)

    def _make(self, tables: list[EmbeddingBagConfig], kind: Callable[[], ManagedCollisionModule]) -> nn.Module:
        collisions = ManagedCollisionCollection({table.name: kind() for table in tables}, tables)
        return mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables), collisions
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled, _ = self.tables(sparse_features)
        return self.linear(pooled.values()).squeeze(1)


class SequenceModel(Model):
    """A linear model of sums of rows, which an unpooled collection looks up."""

    def _make(self, tables: list[EmbeddingBagConfig], kind: Callable[[], ManagedCollisionModule]) -> nn.Module:
        fields = ("name", "num_embeddings", "embedding_dim", "feature_names")
        own = [EmbeddingConfig(**{field: getattr(table, field) for field in fields}) for table in tables]
        collisions = ManagedCollisionCollection({table.name: kind() for table in own}, own)
        return mc_embedding_modules.ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=own), collisions)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        found, _ = self.tables(sparse_features)
        sums = [found[key].to_padded_dense(MANAGED_LONGEST).sum(1) for key in ("user", "item", "history")]
        return self.linear(torch.cat(sums, dim=1)).squeeze(1)


def batch(seed: int, size: int = 32, *, first: int = RAW, ids: int = 30) -> Batch:
    """Few users and items, frequent ones first; histories of up to three items; keys not in the tables' order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat(
        [torch.ones(2, size, dtype=torch.int64), torch.randint(0, MANAGED_LONGEST + 1, (1, size), generator=generator)]
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
    """An artifact dropped into a bare model maps raw ids, those without a row too, and predicts as the codes do."""
    served = bare.eval()
    dnis.load_model(served, dnis.export(model, scheme, folder))
    later = [*BATCHES, *NEW]
    for own in later:
        assert rows_of(served, own.sparse_features) == rows_of(model, own.sparse_features)
    model.tables._embedding_module = packed_collections(model, scheme)["tables._embedding_module"]
    torch.testing.assert_close(predictions(served, later), predictions(model, later))
    return served


TABLES = {"t": ("f", "g"), "u": ("h",)}
POSITION_FEATURES = {"f": "t", "g": "t", "h": "u"}
POSITION_ROWS, POSITION_DIM, POSITION_LONGEST, SIZE = 17, 8, 4, 10


def configs() -> list[EmbeddingBagConfig]:
    return [bag_config(name, POSITION_ROWS, POSITION_DIM, *features) for name, features in TABLES.items()]


class Net(nn.Module):
    """Position-weighted features and a layer over them."""

    def __init__(self, *, as_collection: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = EmbeddingBagCollection(tables=configs(), is_weighted=True)
        processors: object = {name: PositionWeightedModule(POSITION_LONGEST) for name in POSITION_FEATURES}
        if as_collection:
            processors = PositionWeightedModuleCollection(dict.fromkeys(POSITION_FEATURES, POSITION_LONGEST))
        self.e = FeatureProcessedEmbeddingBagCollection(tables, processors)
        for name, weight in self.e.named_parameters():
            nn.init.normal_(weight) if "embedding_bags" in name else nn.init.uniform_(weight, 0.5, 1.5)
        self.over = nn.Linear(len(POSITION_FEATURES) * POSITION_DIM, 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = self.e(sparse_features).to_dict()
        return self.over(torch.cat([pooled[name] for name in POSITION_FEATURES], dim=1)).squeeze(1)


def position_batch(seed: int) -> Batch:
    """Bags of up to `LONGEST` ids, empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, POSITION_LONGEST + 1, (len(POSITION_FEATURES) * SIZE,), generator=generator)
    ids = torch.randint(0, POSITION_ROWS, (int(lengths.sum()),), generator=generator)
    features = KeyedJaggedTensor(keys=list(POSITION_FEATURES), values=ids, lengths=lengths)
    return Batch(torch.zeros(SIZE, 1), features, torch.randint(0, 2, (SIZE,), generator=generator).float())


POSITION_BATCHES = [position_batch(seed) for seed in range(5)]


def position_blocks() -> RowBlocks:
    counts = dnis.count_frequencies((own.sparse_features for own in POSITION_BATCHES), configs())
    return dnis.blocks_from_counts(counts, configs(), num_blocks=3, least_rows=1)


def prepared(net: nn.Module, *, alpha_from: float = 1.0) -> nn.Module:
    """The model with soft selection, alpha drawn from `alpha_from` on."""
    net = dnis.prepare_(net, position_blocks())
    generator = torch.Generator().manual_seed(7)
    alpha_of(net).of(POSITION_DIM).uniform_(alpha_from, 1, generator=generator)
    return net


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all places."""
    return {name: weight for name, weight in model.named_parameters() if "position" in name}


@torch.no_grad()
def _copy_(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Gives a sharded model weights: TorchRec draws those of tables anew."""
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for part in value.local_shards():
                (row, column), (rows, columns) = part.metadata.shard_offsets, part.tensor.shape
                part.tensor.copy_(weights[name][row : row + rows, column : column + columns])
        else:
            value.copy_(weights[name])


class Trained:
    """A model that is sharded as told, and a few of its steps."""

    def __init__(self, net: nn.Module, sharding_type: str, *, by_torchrec: bool = False, rank: int = 0) -> None:
        task = dnis.TrainTask(net, nn.BCEWithLogitsLoss())
        collection = next(module for module in net.modules() if isinstance(module, EmbeddingBagCollection))
        if sharding_type != "data_parallel":
            apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
        constraint = ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
        constraints = dict.fromkeys(TABLES, constraint)
        sharders: list = [dnis.CpuEmbeddingBagCollectionSharder()]
        if by_torchrec:
            sharders = [FeatureProcessedEmbeddingBagCollectionSharder(sharders[0])]
        plan = dnis.make_sharding_plan(task, CPU, sharders, constraints=constraints)
        if by_torchrec:
            weights = {name: value.clone() for name, value in task.state_dict().items()}
            self.model = DistributedModelParallel(task, device=CPU, plan=plan, sharders=sharders)
            _copy_(self.model, weights)
        else:
            self.model = dnis.shard_model(task, CPU, plan, sharders)
        self._batches = [position_batch(seed + 10 * rank) for seed in range(5)]
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def by_itself(self) -> list[float]:
        losses = []
        for own in self._batches:
            self.optimizer.zero_grad()
            loss = self.model(own)[0]
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def searched(self, *, with_upper_steps: bool) -> list[float]:
        """Lower steps of a search, perhaps with upper steps between them."""
        pipeline = dnis.BilevelTrainPipeline(self.model, self.optimizer, CPU)
        pipeline.alpha_optimizer.learning_rate = 0.05
        schedule = dnis.LevelSchedule(warm_up_steps=1 if with_upper_steps else 99)
        stream = dnis.BilevelStream(self._batches, [position_batch(seed) for seed in (5, 6)], schedule)
        losses, before = [], 0
        while pipeline.lower_steps < len(self._batches):
            loss = float(pipeline.progress(stream)[0])
            if pipeline.lower_steps > before:
                losses.append(loss)
            before = pipeline.lower_steps
        pipeline.detach()
        return losses


def recipe(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> dnis.Recipe:
    """The recipe function, as the command line finds it: ``tests.models:recipe``."""
    del data, seed, embedding_dim
    splits = [Repeatable([position_batch(100 * split + step) for step in range(4)]) for split in range(4)]
    return dnis.Recipe(
        model=Net(),
        data=dnis.DataSplits(train=splits[0], validation=splits[1], selection=splits[2], test=splits[3]),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer="rowwise_adagrad",
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
    )


class Cache:
    """What FBGEMM promises of a kernel's cache, and what it has to be promised: every row of a table is a line."""

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self.kernel, self.events, self.wrong = kernel, [], 0
        kernel.prefetch_pipeline = True
        kernel.lxu_cache_weights = torch.zeros(1, 1)
        kernel.lxu_cache_locking_counter = torch.zeros(sum(kernel.rows_per_table), dtype=torch.int32)
        kernel.prefetch = lambda indices, **_: self.prefetch(indices)
        kernel._prefetch = lambda indices, *_, **__: self.prefetch(indices)
        kernel.flush = lambda: self.events.append("flush")
        kernel.reset_cache_states = lambda: self.events.append("purge")
        kernel.register_forward_hook(self.looked_up, with_kwargs=True)

    def prefetch(self, indices: torch.Tensor) -> None:
        self.events.append("prefetch")
        self.kernel.timesteps_prefetched.append(0)
        self.kernel.lxu_cache_locations_list.append(indices.clone())
        self.kernel.lxu_cache_locking_counter.index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))

    def looked_up(self, kernel, _args, inputs: dict, output: torch.Tensor) -> None:
        self.events.append("forward")
        if output.requires_grad:
            output.register_hook(self.backward)
        self.wrong += not torch.equal(kernel.lxu_cache_locations, inputs["indices"])

    def backward(self, _gradient) -> None:
        self.events.append("backward")
        kernel = self.kernel
        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
            kernel.lxu_cache_locking_counter, kernel.lxu_cache_locations
        )

    def of_next_batch(self) -> torch.Tensor:
        """The locks as they have to be: those of what was prefetched and not looked up yet."""
        locks = torch.zeros_like(self.kernel.lxu_cache_locking_counter)
        for indices in self.kernel.lxu_cache_locations_list:
            locks.index_add_(0, indices, torch.ones_like(indices, dtype=torch.int32))
        return locks


@contextmanager
def counting_locks() -> Iterator[None]:
    """Lets locks be counted down on a CPU: FBGEMM declares the operator for GPUs only."""
    library = torch.library.Library("fbgemm", "IMPL")

    def decrement(counter: torch.Tensor, locations: torch.Tensor) -> None:
        counter.index_add_(0, locations, -torch.ones_like(locations, dtype=torch.int32))

    library.impl("lxu_cache_locking_counter_decrement", decrement, "CPU")
    try:
        yield
    finally:
        library._destroy()


CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING


def plan_caches_(model: nn.Module) -> None:
    """Has a model that was sharded without caches say that all its tables are cached, and their rows prefetched."""
    for module in (own for own in model.modules() if isinstance(own, ShardedEmbeddingBagCollection)):
        for info in (info for infos in module.sharding_type_to_sharding_infos.values() for info in infos):
            info.param_sharding.compute_kernel = CACHED.value
            info.fused_params = {**(info.fused_params or {}), "prefetch_pipeline": True}
    for kernel in fused_kernels(model):
        for table in kernel.config.embedding_tables:
            table.compute_kernel = CACHED


def caches_of(model: nn.Module) -> list[Cache]:
    """Gives this rank's kernels of cached tables their caches."""
    kernels = fused_kernels(model)
    cached = [own for own in kernels if all(table.compute_kernel == CACHED for table in own.config.embedding_tables)]
    return [Cache(kernel.emb_module) for kernel in cached]


def fused_kernels(model: nn.Module) -> list[BatchedFusedEmbeddingBag]:
    parts = (part for lookup in lookups(model) for part in lookup.modules())
    return [part for part in parts if isinstance(part, BatchedFusedEmbeddingBag)]
