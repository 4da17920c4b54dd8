"""What other projects build of TorchRec, written anew: six kinds of TorchEasyRec, and torchrec_dlrm's script.

TorchEasyRec's batches hold everything by data group, and its models return logits and probabilities by name. A table of
its bags and one of its sequences have the same name where they are of one id.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

BASE = "__BASE__"
"""TorchEasyRec's name of the data group that all features of a sample are in."""
DENSE, DIM, WIDE_DIM, LONGEST = ("price", "age", "hour", "rank"), 8, 4, 4
ROWS = {"user": 120, "item": 160, "genre": 20}


@dataclass
class GroupBatch:
    """A batch by data group, as TorchEasyRec's."""

    dense_features: Mapping[str, KeyedTensor]
    sparse_features: Mapping[str, KeyedJaggedTensor]
    labels: Mapping[str, Tensor] = field(default_factory=dict)


def to_groups(batch: Batch, labels: Sequence[str]) -> GroupBatch:
    """The samples of a batch of TorchRec's, with labels of some names."""
    dense = KeyedTensor(list(DENSE), [1] * len(DENSE), batch.dense_features)
    columns = {name: batch.labels.roll(place) for place, name in enumerate(labels)}
    return GroupBatch({BASE: dense}, {BASE: batch.sparse_features}, columns)


class EmbeddingGroup(nn.Module):
    """The tables of a model: bags of users, items and genres, with wide ones beside them or a sequence of items."""

    def __init__(self, *, has_wide: bool = False, has_sequence: bool = False) -> None:
        super().__init__()
        dims = {"": DIM} | ({"_wide": WIDE_DIM} if has_wide else {})
        bags = [
            EmbeddingBagConfig(name=f"{name}_emb{suffix}", num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for suffix, dim in dims.items()
            for name, rows in ROWS.items()
        ]
        items = EmbeddingConfig(
            name="item_emb", num_embeddings=ROWS["item"], embedding_dim=DIM, feature_names=["item", "history"]
        )
        self.emb_impls = nn.ModuleDict({BASE: nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=bags)})})
        self.seq_emb_impls = nn.ModuleDict()
        if has_sequence:
            collections = nn.ModuleDict({str(DIM): EmbeddingCollection(tables=[items])})
            self.seq_emb_impls[BASE] = nn.ModuleDict({"ec_dict": collections})

    def forward(self, batch: GroupBatch) -> dict[str, Tensor]:
        """Group of features -> what a model reads of it."""
        features = batch.sparse_features[BASE]
        bags = self.emb_impls[BASE]["ebc"](features)
        width = DIM * len(ROWS)
        groups = {"dense": batch.dense_features[BASE].values(), "deep": bags.values()[:, :width]}
        groups["wide"] = bags.values()[:, width:]
        if BASE in self.seq_emb_impls:
            rows = self.seq_emb_impls[BASE]["ec_dict"][str(DIM)](features)
            groups["query"] = rows["item"].values()
            groups["sequence"] = rows["history"].to_padded_dense(LONGEST)
            groups["length"] = rows["history"].lengths()
        return groups


def sequence_mask(groups: Mapping[str, Tensor]) -> Tensor:
    """1 at the places of a padded sequence that have an id, else 0."""
    places = torch.arange(LONGEST, device=groups["length"].device)
    return (places < groups["length"].unsqueeze(1)).float()


def mean_of_sequence(groups: Mapping[str, Tensor]) -> Tensor:
    mask = sequence_mask(groups).unsqueeze(2)
    return (groups["sequence"] * mask).sum(1) / mask.sum(1).clamp(min=1)


class TargetAttention(nn.Module):
    """The rows of a sequence, weighted by how they go with the candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Sequential(nn.Linear(4 * DIM, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, groups: Mapping[str, Tensor]) -> Tensor:
        rows = groups["sequence"]
        query = groups["query"].unsqueeze(1).expand_as(rows)
        scores = self.scores(torch.cat([query, rows, query - rows, query * rows], dim=2)).squeeze(2)
        weights = torch.softmax(scores - 1e9 * (1 - sequence_mask(groups)), dim=1)
        return (weights.unsqueeze(2) * rows).sum(1)


def predictions_by_name(logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logits and probabilities of each head, under TorchEasyRec's names."""
    heads = {suffix: part.squeeze(1) for suffix, part in logits.items()}
    probabilities = {f"probs{suffix}": torch.sigmoid(part) for suffix, part in heads.items()}
    return {f"logits{suffix}": part for suffix, part in heads.items()} | probabilities


class DeepFM(nn.Module):
    """Wide columns, pairwise products and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_group = EmbeddingGroup(has_wide=True)
        self.deep_mlp, self.output_mlp = MLP(DIM * len(ROWS), [8]), nn.Linear(8, 1)

    def forward(self, batch: GroupBatch) -> dict[str, Tensor]:
        groups = self.embedding_group(batch)
        rows = groups["deep"].reshape(-1, len(ROWS), DIM)
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True) / 2
        wide = groups["wide"].sum(1, keepdim=True)
        return predictions_by_name({"": wide + pairs + self.output_mlp(self.deep_mlp(groups["deep"]))})


class DotInteraction(nn.Module):
    """DLRM: products of all pairs of the dense tower and the bags, and a tower over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_group = EmbeddingGroup()
        self.dense_mlp = MLP(len(DENSE), [8, DIM])
        vectors = 1 + len(ROWS)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1), persistent=False)
        self.final_mlp, self.output_mlp = MLP(DIM + vectors * (vectors - 1) // 2, [8]), nn.Linear(8, 1)

    def forward(self, batch: GroupBatch) -> dict[str, Tensor]:
        groups = self.embedding_group(batch)
        dense = self.dense_mlp(groups["dense"])
        vectors = torch.cat([dense.unsqueeze(1), groups["deep"].reshape(-1, len(ROWS), DIM)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return predictions_by_name({"": self.output_mlp(self.final_mlp(torch.cat([dense, products], dim=1)))})


class Towers(nn.Module):
    """MultiTower, and DIN: a tower of the bags and one of the history, side by side."""

    def __init__(self, *, is_din: bool) -> None:
        super().__init__()
        self.embedding_group = EmbeddingGroup(has_sequence=True)
        self.deep = MLP(DIM * len(ROWS) + len(DENSE), [8])
        self.history = TargetAttention() if is_din else MLP(2 * DIM, [DIM])
        self.final_mlp, self.output_mlp = MLP(8 + DIM, [8]), nn.Linear(8, 1)

    def forward(self, batch: GroupBatch) -> dict[str, Tensor]:
        groups = self.embedding_group(batch)
        deep = self.deep(torch.cat([groups["deep"], groups["dense"]], dim=1))
        if isinstance(self.history, TargetAttention):
            history = self.history(groups)
        else:
            history = self.history(torch.cat([groups["query"], mean_of_sequence(groups)], dim=1))
        return predictions_by_name({"": self.output_mlp(self.final_mlp(torch.cat([deep, history], dim=1)))})


HEADS = ("click", "buy")


class Gate(nn.Module):
    """A mixture of experts, in shares that the features give."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.shares = nn.Linear(width, num_experts)

    def forward(self, features: Tensor, experts: Sequence[Tensor]) -> Tensor:
        shares = torch.softmax(self.shares(features), dim=1).unsqueeze(2)
        return (shares * torch.stack(list(experts), dim=1)).sum(1)


class GatedExperts(nn.Module):
    """MMoE: each head mixes the same experts in its own shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_group = EmbeddingGroup(has_sequence=True)
        width = DIM * (len(ROWS) + 1)
        self.experts = nn.ModuleList(MLP(width, [6]) for _ in range(3))
        self.gates = nn.ModuleDict({head: Gate(width, 3) for head in HEADS})
        self.heads = nn.ModuleDict({head: nn.Linear(6, 1) for head in HEADS})

    def forward(self, batch: GroupBatch) -> dict[str, Tensor]:
        groups = self.embedding_group(batch)
        features = torch.cat([groups["deep"], mean_of_sequence(groups)], dim=1)
        experts = [expert(features) for expert in self.experts]
        mixtures = {head: self.gates[head](features, experts) for head in HEADS}
        return predictions_by_name({f"_{head}": self.heads[head](mixtures[head]) for head in HEADS})


class Extraction(nn.Module):
    """A layer of PLE: experts of each head and shared ones; a last layer has no shared mixture."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.shared = nn.ModuleList(MLP(width, [size]) for _ in range(2))
        self.experts = nn.ModuleDict({head: MLP(width, [size]) for head in HEADS})
        self.gates = nn.ModuleDict({head: Gate(width, 3) for head in HEADS})
        self.shared_gate = Gate(width, 2 + len(HEADS))

    def forward(self, inputs: Mapping[str, Tensor], shared: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        common = [expert(shared) for expert in self.shared]
        special = {head: self.experts[head](inputs[head]) for head in HEADS}
        mixtures = {head: self.gates[head](inputs[head], [special[head], *common]) for head in HEADS}
        return mixtures, self.shared_gate(shared, [*special.values(), *common])


class LayeredExtraction(nn.Module):
    """PLE: two layers of experts, of which some belong to one head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_group = EmbeddingGroup(has_sequence=True)
        self.first, self.second = Extraction(DIM * (len(ROWS) + 1), 8), Extraction(8, 6)
        self.heads = nn.ModuleDict({head: nn.Linear(6, 1) for head in HEADS})

    def forward(self, batch: GroupBatch) -> dict[str, Tensor]:
        groups = self.embedding_group(batch)
        features = torch.cat([groups["deep"], mean_of_sequence(groups)], dim=1)
        mixtures, shared = self.first(dict.fromkeys(HEADS, features), features)
        mixtures, _ = self.second(mixtures, shared)
        return predictions_by_name({f"_{head}": self.heads[head](mixtures[head]) for head in HEADS})


EASY_REC: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "TorchEasyRec DeepFM": (DeepFM, ("click",)),
    "TorchEasyRec DLRM": (DotInteraction, ("click",)),
    "TorchEasyRec MultiTower": (lambda: Towers(is_din=False), ("click",)),
    "TorchEasyRec DIN": (lambda: Towers(is_din=True), ("click",)),
    "TorchEasyRec MMoE": (GatedExperts, HEADS),
    "TorchEasyRec PLE": (LayeredExtraction, HEADS),
}
"""Kind -> its model, and its labels."""


def build_script_model(interaction: type[nn.Module]) -> DLRM:
    """The model of torchrec_dlrm's script, with its tables on no device yet."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    options: dict[type[nn.Module], dict[str, object]] = {
        DLRM: {},
        DLRM_DCN: {"dcn_num_layers": 2, "dcn_low_rank_dim": 4},
        DLRM_Projection: {
            "interaction_branch1_layer_sizes": [8, 2 * DIM],
            "interaction_branch2_layer_sizes": [8, 3 * DIM],
        },
    }
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    return interaction(
        embedding_bag_collection=collection,
        dense_in_features=len(DENSE),
        dense_arch_layer_sizes=[8, DIM],
        over_arch_layer_sizes=[8, 1],
        dense_device=torch.device("cpu"),
        **options[interaction],
    )


def run_script(interaction: type[nn.Module], batches: Sequence[Batch]) -> DistributedModelParallel:
    """What torchrec_dlrm's script does up to its end, on one rank: plans, shards and trains by TorchRec's pipeline."""
    device, train_model = torch.device("cpu"), DLRMTrain(build_script_model(interaction))
    apply_optimizer_in_backward(torch.optim.Adagrad, train_model.model.sparse_arch.parameters(), {"lr": 0.1})
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, local_world_size=1, compute_device="cpu"))
    plan = planner.collective_plan(train_model, get_default_sharders())
    model = DistributedModelParallel(train_model, device=device, plan=plan)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    model.train()
    stream = iter(batches)
    for _ in batches:
        pipeline.progress(stream)
    return model
