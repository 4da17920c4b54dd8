"""A model with position-weighted features, batches for it, and a few steps of it, sharded by TorchRec or by us."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.data.recipe import DataSplits, Recipe
from tests.small_models import alpha_of
from tests.tiny import Repeatable

CPU = torch.device("cpu")
TABLES = {"t": ("f", "g"), "u": ("h",)}
FEATURES = {"f": "t", "g": "t", "h": "u"}
ROWS, DIM, LONGEST, SIZE = 17, 8, 4, 10


def configs() -> list[EmbeddingBagConfig]:
    """Of the two tables; two features read the first one."""
    return [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=list(features))
        for name, features in TABLES.items()
    ]


class Net(nn.Module):
    """Position-weighted features and a layer over them."""

    def __init__(self, *, as_collection: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = EmbeddingBagCollection(tables=configs(), is_weighted=True)
        processors: object = {name: PositionWeightedModule(LONGEST) for name in FEATURES}
        if as_collection:
            processors = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, LONGEST))
        self.e = FeatureProcessedEmbeddingBagCollection(tables, processors)
        for name, weight in self.e.named_parameters():
            nn.init.normal_(weight) if "embedding_bags" in name else nn.init.uniform_(weight, 0.5, 1.5)
        self.over = nn.Linear(len(FEATURES) * DIM, 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """A logit per sample; the dense features are not used."""
        pooled = self.e(sparse_features).to_dict()
        return self.over(torch.cat([pooled[name] for name in FEATURES], dim=1)).squeeze(1)


def batch(seed: int) -> Batch:
    """Bags of up to `LONGEST` ids, empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, LONGEST + 1, (len(FEATURES) * SIZE,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    features = KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths)
    return Batch(torch.zeros(SIZE, 1), features, torch.randint(0, 2, (SIZE,), generator=generator).float())


BATCHES = [batch(seed) for seed in range(5)]


def blocks() -> RowBlocks:
    """The blocks of both tables."""
    counts = dnis.count_frequencies((own.sparse_features for own in BATCHES), configs())
    return dnis.blocks_from_counts(counts, configs(), num_blocks=3)


def prepared(net: nn.Module, *, alpha_from: float = 1.0) -> nn.Module:
    """The model with soft selection, alpha drawn from `alpha_from` on."""
    net = dnis.prepare_(net, blocks())
    generator = torch.Generator().manual_seed(7)
    alpha_of(net).of(DIM).uniform_(alpha_from, 1, generator=generator)
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
        self._batches = [batch(seed + 10 * rank) for seed in range(5)]
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def by_itself(self) -> list[float]:
        """Steps of a loop of its own."""
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
        stream = dnis.BilevelStream(self._batches, [batch(seed) for seed in (5, 6)], schedule)
        losses, before = [], 0
        while pipeline.lower_steps < len(self._batches):
            loss = float(pipeline.progress(stream)[0])
            if pipeline.lower_steps > before:
                losses.append(loss)
            before = pipeline.lower_steps
        pipeline.detach()
        return losses


def recipe(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe function, as the command line finds it: ``tests.position_weighted:recipe``."""
    del data, seed, embedding_dim
    splits = [Repeatable([batch(100 * split + step) for step in range(4)]) for split in range(4)]
    return Recipe(
        model=Net(),
        data=DataSplits(train=splits[0], validation=splits[1], selection=splits[2], test=splits[3]),
        loss=nn.BCEWithLogitsLoss(),
        table_optimizer="rowwise_adagrad",
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
    )
