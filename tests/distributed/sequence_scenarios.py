"""What ranks do, and report, about unpooled tables; judged in test_sequence_ranks.py."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.curvature import curvature, predictions_of
from dnis_torchrec.artifact.export import drop_in_, export
from dnis_torchrec.data.over_ranks import SlicedBatches
from dnis_torchrec.data.recipe import DataSplits, Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.search.search import search
from dnis_torchrec.search.settings import SearchSettings
from dnis_torchrec.selection.plan import default_sharders, make_sharding_plan, shard_model
from dnis_torchrec.selection.shards import holders_of_tables, local_shards
from dnis_torchrec.selection.swap import fold_, prepare_
from dnis_torchrec.selection.wrapper import SoftSelectionModule, plain_state_dict, soft_selection_modules
from dnis_torchrec.training.shard import shard as shard_task
from tests.distributed.harness import Rank, Results, Scenario
from tests.models import (
    DIM,
    KEYS,
    KINDS,
    LONGEST,
    bags_of_one,
    blocks_of,
    interest,
    make_batch,
    sequences,
    values_of,
    wrapper_of,
)
from tests.models import SEQUENCE_BATCH_SIZE as BATCH_SIZE
from tests.models import SEQUENCE_ROWS as ROWS
from tests.models import sequence_features as features

CPU = torch.device("cpu")
LOSS = nn.BCEWithLogitsLoss()
OPTIMIZERS = ("adam", "rowwise_adagrad")
LEARNING_RATE = 0.1
MIXED = "column_wise and row_wise"


def shard(model: nn.Module, kind: str, group: dist.ProcessGroup) -> SoftSelectionModule:
    """The wrapper of a model sharded over a group, plain SGD fused into its tables where they are not replicated."""
    kinds = dict(zip(ROWS, kind.split(" and ") * 2, strict=False))
    for name, holder in holders_of_tables(wrapper_of(model).lookup).items():
        if kinds[name] != "data_parallel":
            apply_optimizer_in_backward(torch.optim.SGD, holder.parameters(), {"lr": LEARNING_RATE})
    constraints = {name: ParameterConstraints(sharding_types=[kinds[name]], min_partition=4) for name in ROWS}
    sharders = default_sharders()
    plan = make_sharding_plan(model, CPU, sharders, constraints=constraints, process_group=group)
    return wrapper_of(shard_model(model, CPU, plan, sharders, process_group=group))


def outputs_of(wrapper: SoftSelectionModule, kjt: KeyedJaggedTensor) -> Tensor:
    """The embeddings of all keys, pooled or not."""
    output = wrapper(kjt)
    return torch.cat([output[key] for key in KEYS]) if hasattr(output, "to_dict") else values_of(output)


def loss_of(values: Tensor) -> Tensor:
    """Of a rank's samples, so that the mean over ranks is that of all; every column counts differently."""
    return (values * torch.linspace(-1, 1, DIM)).sin().sum() / BATCH_SIZE


def learn(wrapper: SoftSelectionModule, kjt: KeyedJaggedTensor, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What an upper and a lower step on a batch give: the outputs, alpha's gradient, hits, and the tables after it."""
    with wrapper.alpha.upper_level() as hits:
        gradient = torch.autograd.grad(loss_of(outputs_of(wrapper, kjt)), wrapper.alpha.of(DIM))[0].clone()
    hit = hits[DIM].int()
    dist.all_reduce(gradient, group=group)
    dist.all_reduce(hit, group=group)
    values = outputs_of(wrapper, kjt)
    loss_of(values).backward()
    rest = [weight for _, weight in in_backward_optimizer_filter(wrapper.named_parameters())]
    if rest:
        torch.optim.SGD(rest, lr=LEARNING_RATE).step()
    tables = {f"{own.table} {own.first_row} {own.first_column}": own.weight.clone() for own in local_shards(wrapper)}
    found = {"values": values.detach(), "alpha": gradient / dist.get_world_size(group), "hits": (hit > 0).float()}
    return found | tables


def farthest(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each thing, infinity if one of them lacks it."""
    keys = sorted({*one, *two})
    return {
        key: float((one[key] - two[key]).abs().max()) if key in one and key in two else float("inf") for key in keys
    }


def equals_bags(kind: str, at: Rank) -> Results:
    """How far sequences are from pooled bags of one id, in the same sharding."""
    kjt = features(10 + at.rank, of_one=True)
    found = [learn(shard(build(), kind, at.process_group), kjt, at.process_group) for build in (sequences, bags_of_one)]
    return {"errors": farthest(*found), "moved": _moved(found[0])}


def _moved(found: dict[str, Tensor]) -> bool:
    """Whether this rank's shard of the first table has learnt anything."""
    before = dict(sequences(prepared=False)["tables"].named_parameters())["embeddings.item.weight"]
    shards = [(key.split(), value) for key, value in found.items() if key.startswith("item ")]
    return any(
        not value.equal(before[int(row) : int(row) + len(value), int(column) : int(column) + value.shape[1]])
        for (_, row, column), value in shards
    )


def without_ids() -> KeyedJaggedTensor:
    """Bags that are all empty."""
    nothing, lengths = torch.empty(0, dtype=torch.int64), torch.zeros(len(LONGEST) * BATCH_SIZE, dtype=torch.int64)
    return KeyedJaggedTensor(keys=list(LONGEST), values=nothing, lengths=lengths)


def equals_unsharded(kind: str, empty_rank: int | None, at: Rank) -> Results:
    """How far bags of any length are from the collection that is not sharded and sees the samples of all ranks.

    A rank may have no ids at all.
    """
    whole = wrapper_of(sequences())
    kjts = [without_ids() if rank == empty_rank else features(20 + rank) for rank in range(at.world_size)]
    with whole.alpha.upper_level():
        losses = [loss_of(values_of(whole(kjt))) for kjt in kjts]
        alpha = torch.autograd.grad(sum(losses) / at.world_size, whole.alpha.of(DIM))[0]
    values = values_of(whole(kjts[at.rank])).detach()
    (sum(loss_of(values_of(whole(kjt))) for kjt in kjts) / at.world_size).backward()
    tables = {
        name: holder.weight.detach() - LEARNING_RATE * holder.weight.grad
        for name, holder in holders_of_tables(whole.lookup).items()
    }
    sharded = shard(sequences(), kind, at.process_group)
    found = learn(sharded, kjts[at.rank], at.process_group)
    error = max(float((found["values"] - values).abs().sum()), float((found["alpha"] - alpha).abs().max()))
    for own in local_shards(sharded):
        rows = slice(own.first_row, own.first_row + own.weight.shape[0])
        columns = slice(own.first_column, own.first_column + own.weight.shape[1])
        error = max(error, float((own.weight - tables[own.table][rows, columns]).abs().max()))
    selected = values_of(sharded(kjts[at.rank])).detach()
    fold_(sharded)
    return {"error": error, "folded": float((values_of(sharded(kjts[at.rank])) - selected).abs().sum())}


def curvature_errors(kind: str, at: Rank) -> Results:
    """How far the curvature of a model over the ranks is from that of the plain one."""
    model, batches = interest(), [make_batch(seed, 8) for seed in range(2)]
    blocks = blocks_of(model, batches)
    wanted = curvature(model, batches, blocks, loss=LOSS)
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in (*ROWS, "user")}
    sharders = default_sharders()
    plan = make_sharding_plan(model, CPU, sharders, constraints=constraints, process_group=at.process_group)
    sharded = shard_model(model, CPU, plan, sharders, process_group=at.process_group)
    own = SlicedBatches(batches, Ranks(at.process_group), "train", equal=True)
    found = curvature(sharded, own, blocks, loss=LOSS)
    errors = farthest(dict(found.curvature), dict(wanted.curvature)) | {
        f"gradient {name}": error for name, error in farthest(dict(found.gradient), dict(wanted.gradient)).items()
    }
    largest, coupled = (
        max(float(own.abs().max()) for own in of.values()) for of in (wanted.curvature, wanted.couplings)
    )
    apart = farthest(dict(found.couplings), dict(wanted.couplings))
    errors |= {f"couplings {name}": error * largest / coupled for name, error in apart.items()}
    return {"errors": errors, "largest": largest}


def recipe_of(optimizer: str) -> Recipe:
    """A recipe of the model."""
    splits = ("train", "validation", "selection", "test")
    data = {split: [make_batch(10 * part + seed, 8) for seed in range(4)] for part, split in enumerate(splits)}
    return Recipe(
        model=interest(),
        data=DataSplits(**data),
        loss=LOSS,
        table_optimizer=optimizer,
        table_learning_rate=1e-2,
        dense_learning_rate=1e-2,
        embedding_l2=0.01,
    )


class Trained:
    """The model over the ranks after a step, Adagrad fused into its tables."""

    def __init__(self, at: Rank, *, is_prepared: bool) -> None:
        recipe = recipe_of("rowwise_adagrad")
        blocks = blocks_of(recipe.model, list(recipe.data.train))
        model = prepare_(recipe.model, blocks) if is_prepared else recipe.model
        self.sharded, self.optimizer = shard_task(TrainTask(model, recipe.task), recipe, CPU)
        self._batches = [make_batch(10 * at.rank + seed, 8) for seed in range(3)]
        if is_prepared:  # other weights than the plain model
            for wrapper in soft_selection_modules(self.sharded).values():
                wrapper.alpha.of(wrapper.alpha.dims[0]).fill_(0.5)
            self.step(self._batches[2])
        self.step(self._batches[0])

    def step(self, batch: Batch) -> float:
        """The loss of a step."""
        self.optimizer.zero_grad()
        loss = self.sharded(batch)[0]
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> Results:
        """What users save."""
        fused = self.sharded.fused_optimizer.state_dict()
        return {"model": plain_state_dict(self.sharded), "fused": fused, "rest": self.optimizer.state_dict()}

    def names(self) -> Results:
        """Under which names it knows its weights, and those of each optimizer."""
        optimizers = (self.sharded.fused_optimizer, self.optimizer)
        return {
            "model": list(plain_state_dict(self.sharded)),
            "optimizers": [sorted(own.state_dict()["state"]) for own in optimizers],
        }

    def goes_on(self) -> list[float]:
        """Losses of two more steps, in which the optimizers' states play a part."""
        return [self.step(batch) for batch in self._batches[1:]]


def plain_checkpoint(at: Rank) -> Results:
    """A sharded checkpoint of the plain model, its optimizers included, in the prepared one."""
    plain, prepared = (Trained(at, is_prepared=is_prepared) for is_prepared in (False, True))
    folder = at.folder / "plain"
    dcp.save(plain.state(), checkpoint_id=folder)
    state = prepared.state()
    dcp.load(state, checkpoint_id=folder)
    prepared.sharded.load_state_dict(state["model"])
    prepared.sharded.fused_optimizer.load_state_dict(state["fused"])
    prepared.optimizer.load_state_dict(state["rest"])
    names = [own.names() for own in (plain, prepared)]
    return {"names": names, "plain": plain.goes_on(), "prepared": prepared.goes_on()}


def whole_search(optimizer: str, at: Rank) -> Results:
    """A search over the ranks, exported by all of them, and what the artifact predicts beside the model."""
    folder = at.folder / f"run {optimizer}"
    folder.mkdir(exist_ok=True)
    settings = SearchSettings(num_blocks=2, epochs=2, patience=2)
    outcome = search(recipe_of(optimizer), 3.0, folder, CPU, settings=settings)
    artifact = export(outcome.model, outcome.scheme, at.folder / f"artifact {optimizer}")
    batch = make_batch(99, 8)
    predicted = predictions_of(outcome.model, batch, LOSS, "batch", Ranks(at.process_group)).values
    served = predictions_of(drop_in_(interest(), artifact), batch, LOSS, "batch", Ranks()).values
    return {
        "compression": outcome.scheme.compression(),
        "retained": {name: table.retained.int() for name, table in outcome.scheme.tables.items()},
        "error": float((predicted - served).abs().max()),
    }


def scenarios() -> dict[str, Scenario]:
    """All of them by name."""
    found: dict[str, Scenario] = {}
    for kind in (*KINDS, MIXED):
        found[f"bags {kind}"] = partial(equals_bags, kind)
        found[f"unsharded {kind}"] = partial(equals_unsharded, kind, None)
        found[f"unsharded {kind}, no ids on rank 1"] = partial(equals_unsharded, kind, 1)
    return found


def scenarios_of_models() -> dict[str, Scenario]:
    """Those of whole models."""
    found: dict[str, Scenario] = {f"curvature {kind}": partial(curvature_errors, kind) for kind in KINDS}
    found["plain checkpoint"] = plain_checkpoint
    return found | {f"search {optimizer}": partial(whole_search, optimizer) for optimizer in OPTIMIZERS}
